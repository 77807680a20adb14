# SPDX-License-Identifier: Apache-2.0
"""Reads the ``"fsmoe"`` block of ds_config.json: its fields, their values and how they are read. Needs no torch."""
