# SPDX-License-Identifier: Apache-2.0
"""Keeps the name that :class:`~ds_fsmoe.components.hooks.bfloat16_communication.BFloat16Communication` had in 0.2.0."""

from __future__ import annotations

from ds_fsmoe.components.hooks.bfloat16_communication import BFloat16Communication as BFloat16Wire

__all__ = ["BFloat16Wire"]
