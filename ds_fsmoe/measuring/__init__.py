# SPDX-License-Identifier: Apache-2.0
"""Measures what tasks and links cost on this machine, and keeps it. Returns data, decides nothing."""
