# SPDX-License-Identifier: Apache-2.0
"""Lets a call of a layer pause while its tokens travel, so that another part of the batch computes meanwhile.

Whoever runs parts of a batch in turns calls the layers inside of :meth:`Half.running`; a call that finds a half there
pauses twice, see :mod:`~ds_fsmoe.execution.paused`. What runs in a pause is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

_current: ContextVar[Half | None] = ContextVar("half", default=None)


@dataclass(frozen=True, eq=False)
class Half:
    """One of the parts of a batch that take turns."""

    pause: Callable[[], None]
    """Lets the others compute, and returns when it is this part's turn again."""
    is_last_in_backward: bool
    """True if its backward comes last, when the layers behind have all their gradients: then some may travel."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let layers that are called meanwhile pause."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


def half_now() -> Half | None:
    """Return the part of a batch for which a layer is called now; ``None``: the whole batch."""
    return _current.get()
