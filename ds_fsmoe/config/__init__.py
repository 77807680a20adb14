# SPDX-License-Identifier: Apache-2.0
"""Reads the ``"fsmoe"`` block of ds_config.json: its fields, their values and their checks. It needs no torch.

The entry points call it before anything else. ``ds_fsmoe/checks`` then compares the block with model and environment.
"""
