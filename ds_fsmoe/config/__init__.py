# SPDX-License-Identifier: Apache-2.0
"""Reads the ``"fsmoe"`` block of ds_config.json: its fields, how it is read, what it may hold. Needs no torch."""
