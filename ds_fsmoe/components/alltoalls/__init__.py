# SPDX-License-Identifier: Apache-2.0
"""The all-to-alls that the package has, one algorithm per file.

Each is registered under the name that a config uses.
"""
