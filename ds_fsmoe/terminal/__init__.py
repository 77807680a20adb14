# SPDX-License-Identifier: Apache-2.0
"""Prints progress, tables and coloured text while something runs: with rich on a terminal, as plain text elsewhere."""
