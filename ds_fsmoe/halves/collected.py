# SPDX-License-Identifier: Apache-2.0
"""Puts together what transformers collects of modules that were called for each half, such as routers' scores.

It collects into lists that a context variable holds, one entry for each call. Each half has its own context, so each is
given lists of its own, and at the end the entries of both are made one.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

_MODULE, _NAME = "transformers.utils.output_capturing", "_active_collector"


def _collector() -> Any:
    """Return the variable, with ``get`` and ``set``; ``None`` without transformers."""
    return getattr(sys.modules.get(_MODULE), _NAME, None)


def wants_blocks() -> bool:
    """Return whether what blocks return is collected in the forward under way."""
    variable = _collector()
    lists = None if variable is None else variable.get()
    return isinstance(lists, dict) and "hidden_states" in lists


class Collected:
    """Collects for one forward by halves."""

    def __init__(self) -> None:
        variable = _collector()
        self._whole: Any = None if variable is None else variable.get()
        self._of_halves: list[dict[str, Any]] = [{}, {}]
        if isinstance(self._whole, dict):
            self._of_halves = [{key: [] for key in self._whole} for _ in range(2)]

    def begin(self, half: int) -> None:
        """Collect apart from here on, in the context of a half."""
        variable = _collector()
        if variable is not None and isinstance(self._whole, dict):
            variable.set(self._of_halves[half])

    def end(self) -> None:
        """Add what both halves have collected to the forward's own lists."""
        if not isinstance(self._whole, dict):
            return
        for key, entries in self._whole.items():
            if isinstance(entries, list):
                pairs = zip(*(each[key] for each in self._of_halves), strict=True)
                entries += [_joined(first, second) for first, second in pairs]


def _joined(first: Any, second: Any) -> Any:
    return None if first is None else torch.cat((first, second))
