# SPDX-License-Identifier: Apache-2.0
"""The benchmarks, one per file: each is a script and explains itself."""
