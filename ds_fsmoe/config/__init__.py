# SPDX-License-Identifier: Apache-2.0
"""The ``"fsmoe"`` block of ds_config.json: its fields, how it is read, what it may hold. Needs no torch."""
