# SPDX-License-Identifier: Apache-2.0
"""Rows of results as tables and pictures."""
