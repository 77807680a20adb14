# SPDX-License-Identifier: Apache-2.0
"""Lets an engine go that a script drops without ending it, with its model, its threads and its files."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any


def let_go_when_dropped(optimizer: Any) -> None:
    """Have nothing outside of Python keep DeepSpeed's optimizer, and with it the engine.

    Python's collector does not see the gradient hooks that parameters hold. A hook of DeepSpeed's knows its optimizer,
    which has the parameters: the collector would take all of them for used, for ever. So the optimizer holds the hooks,
    and parameters refer to them weakly.

    Args:
        optimizer: DeepSpeed's, of any kind.
    """
    kept: list[Callable[..., Any]] = []
    for handle in getattr(optimizer, "_grad_acc_hooks", ()):
        hooks = handle.hooks_dict_ref()
        if hooks is not None and handle.id in hooks:
            kept.append(hooks[handle.id])
            hooks[handle.id] = _weakly(hooks[handle.id])
    if kept:
        optimizer.fsmoe_hooks = kept


def _weakly(hook: Callable[..., Any]) -> Callable[..., Any]:
    known = weakref.ref(hook)

    @functools.wraps(hook, updated=())
    def call(*args: Any) -> Any:
        found = known()
        return None if found is None else found(*args)

    del call.__wrapped__
    return call
