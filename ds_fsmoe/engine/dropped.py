# SPDX-License-Identifier: Apache-2.0
"""Lets an engine go that a script drops without ending it, with its model, its threads and its files."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

_RELEASED = "_PartitionedParameterCoordinator__params_to_release"


def let_go_when_dropped(optimizer: Any) -> None:
    """Have nothing but its own parts keep DeepSpeed's optimizer, and with it the engine.

    Args:
        optimizer: DeepSpeed's, of any kind, or what stands for it where nothing is optimized.
    """
    _hold_hooks(optimizer)
    offload = getattr(optimizer, "parameter_offload", optimizer)
    if hasattr(offload, "get_param_coordinator"):
        _remember_by_itself(offload.get_param_coordinator())
        _stand_weakly(sys.modules[type(offload).__module__].FWD_MODULE_STACK, offload.module)


def forget_graph(layer: Any) -> None:
    """Let a layer's loss, which the step is over for, hold the graph of its forward no more, and the engine by that."""
    if (loss := getattr(layer, "l_aux", None)) is not None:
        layer.l_aux = loss.detach()


def _hold_hooks(optimizer: Any) -> None:
    """Let the optimizer hold its gradient hooks, and parameters refer to them weakly.

    Python's collector does not see the hooks that a parameter holds. One of DeepSpeed's knows its optimizer, which has
    the parameters: the collector would take all of them for used, for ever.
    """
    kept: list[Callable[..., Any]] = []
    for handle in getattr(optimizer, "_grad_acc_hooks", ()):
        hooks = handle.hooks_dict_ref()
        if hooks is not None and handle.id in hooks:
            kept.append(hooks[handle.id])
            hooks[handle.id] = _weakly(hooks[handle.id])
    if kept:
        optimizer.fsmoe_hooks = kept


def _remember_by_itself(coordinator: Any) -> None:
    """Let what ZeRO 3 releases after a module be remembered by its coordinator, and not for all of the process."""
    parts = [each.cell_contents for each in getattr(type(coordinator), _RELEASED).__closure__ or ()]
    cached = next((each for each in parts if hasattr(each, "cache_clear")), None)
    if cached is not None:
        own = functools.partial(cached.__wrapped__, coordinator)
        setattr(coordinator, _RELEASED, functools.lru_cache(maxsize=None)(own))


def _stand_weakly(stack: list[Any], model: Any) -> None:
    """Let the model stand weakly at the bottom of the stack of modules that run, where ZeRO 3 leaves it for ever."""

    def leave(dead: Any) -> None:
        stack[:] = [each for each in stack if each is not dead]

    stack[:] = [weakref.proxy(model, leave) if each is model else each for each in stack]


def _weakly(hook: Callable[..., Any]) -> Callable[..., Any]:
    known = weakref.ref(hook)

    @functools.wraps(hook, updated=())
    def call(*args: Any) -> Any:
        found = known()
        return None if found is None else found(*args)

    del call.__wrapped__
    return call
