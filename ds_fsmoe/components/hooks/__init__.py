# SPDX-License-Identifier: Apache-2.0
"""Hooks that come with the package. One per file."""
