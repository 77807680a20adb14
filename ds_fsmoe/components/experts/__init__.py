# SPDX-License-Identifier: Apache-2.0
"""Experts, one per file."""
