# SPDX-License-Identifier: Apache-2.0
"""Defines one MoE layer: its parts, a token's way through it, and how the layers of an engine are run."""
