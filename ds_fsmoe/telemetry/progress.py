# SPDX-License-Identifier: Apache-2.0
"""Shows the progress of long work: a bar on rank 0's terminal, and nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TypeVar

import torch.distributed as dist
from tqdm import tqdm

_T = TypeVar("_T")
_PATIENCE_S = 2.0
"""The seconds before a bar appears; shorter work shows none."""


def shown(items: Sequence[_T], what: str) -> Iterable[_T]:
    """Yield each item, with a bar on rank 0's terminal if they take long."""
    is_shown = sys.stderr.isatty() and (not dist.is_initialized() or dist.get_rank() == 0)
    return tqdm(items, desc=what, unit=" files", disable=not is_shown, delay=_PATIENCE_S, leave=False)


class Progress:
    """A bar that grows with each operation about to be measured. Use it in a ``with`` statement.

    Args:
        is_shown: whether this rank shows it; never where standard error is no terminal.
    """

    def __init__(self, is_shown: bool) -> None:
        self._bar = tqdm(
            desc="fsmoe autotune", unit=" operations", disable=not (is_shown and sys.stderr.isatty()), leave=False
        )

    def __call__(self, what: str) -> None:
        """Advance the bar to the next operation."""
        self._bar.set_postfix_str(what[:60], refresh=False)
        self._bar.update()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
