# SPDX-License-Identifier: Apache-2.0
"""Reads what runs have recorded and shows it as tables, pictures, and one page. Needs no torch."""
