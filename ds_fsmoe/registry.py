# SPDX-License-Identifier: Apache-2.0
"""Registers every part of a layer by kind and name: gates, orders, all-to-alls and experts.

A part is a class with a decorator in its kind's folder under ``ds_fsmoe/components``, or in a module that the user
names in ``"fsmoe": {"plugins": [...]}``. No other file has to be edited.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from typing import TypeVar

from ds_fsmoe.untrusted import NAMES_OF_BEFORE, suggested

_FOLDER_OF_KIND: dict[str, str] = {
    "gate": "ds_fsmoe.components.gates",
    "order": "ds_fsmoe.components.orders",
    "alltoall": "ds_fsmoe.components.alltoalls",
    "expert": "ds_fsmoe.components.experts",
}
_PARTS: dict[str, dict[str, type]] = {kind: {} for kind in _FOLDER_OF_KIND}

Part = TypeVar("Part", bound=type)


def register(kind: str, name: str) -> Callable[[Part], Part]:
    """Return a class decorator that registers a part.

    Args:
        kind: ``"gate"``, ``"order"``, ``"alltoall"`` or ``"expert"``.
        name: the word users write in the config.

    Raises:
        ValueError: unknown kind, or the name is taken by another class, or was that of another part in version 0.2.0.
    """
    if kind not in _PARTS:
        raise ValueError(f"register({kind!r}, {name!r}): the kinds of part are {', '.join(_PARTS)}")
    if name in (before := NAMES_OF_BEFORE.get(kind, {})):
        raise ValueError(f"{kind} {name!r} is an older name of {before[name]!r}: choose another name")

    def add(part: Part) -> Part:
        taken = _PARTS[kind].get(name)
        # Re-running a module (a notebook cell, a reload) defines the same class again; that is no clash.
        if taken is not None and (taken.__module__, taken.__qualname__) != (part.__module__, part.__qualname__):
            raise ValueError(
                f"{kind} {name!r} is taken by {taken.__module__}.{taken.__qualname__}: choose another name"
            )
        _PARTS[kind][name] = part
        return part

    return add


def register_gate(name: str) -> Callable[[Part], Part]:
    """Return a class decorator for a subclass of ``GateBase``: ``@register_gate("mine")``.

    Args:
        name: the word that users write in ``fsmoe.gate``.

    Returns:
        The decorator, which returns the class as it is.

    Raises:
        ValueError: the name is taken by another class.

    Examples:
        >>> import ds_fsmoe
        >>> from ds_fsmoe import registry
        >>> @ds_fsmoe.register_gate("example of a gate")
        ... class Mine(ds_fsmoe.SwitchGate):
        ...     pass
        >>> registry.lookup("gate", "example of a gate")().settings.k
        1
    """
    return register("gate", name)


def register_order(name: str) -> Callable[[Part], Part]:
    """Return a class decorator for a subclass of ``OrderBase``: ``@register_order("mine")``.

    Args:
        name: the word that users write in ``fsmoe.order``.

    Returns:
        The decorator, which returns the class as it is.

    Raises:
        ValueError: the name is taken by another class.

    Examples:
        >>> import ds_fsmoe
        >>> from ds_fsmoe import registry
        >>> @ds_fsmoe.register_order("example of an order")
        ... class Mine(ds_fsmoe.SimpleOrder):
        ...     pass
        >>> registry.lookup("order", "example of an order").__name__
        'Mine'
    """
    return register("order", name)


def register_alltoall(name: str) -> Callable[[Part], Part]:
    """Return a class decorator for a subclass of ``AllToAllBase``: ``@register_alltoall("mine")``.

    Args:
        name: the word that users write in ``fsmoe.alltoall``.

    Returns:
        The decorator, which returns the class as it is.

    Raises:
        ValueError: the name is taken by another class.

    Examples:
        >>> import ds_fsmoe
        >>> from ds_fsmoe import registry
        >>> @ds_fsmoe.register_alltoall("example of an all-to-all")
        ... class Mine(ds_fsmoe.FlatAllToAll):
        ...     pass
        >>> registry.lookup("alltoall", "example of an all-to-all").__name__
        'Mine'
    """
    return register("alltoall", name)


def register_expert(name: str) -> Callable[[Part], Part]:
    """Return a class decorator for an ``nn.Module`` made with ``(model_dim, expert_dim)``:
    ``@register_expert("mine")``.

    Args:
        name: the word that users write in ``MOELayer(expert_impl=...)``.

    Returns:
        The decorator, which returns the class as it is.

    Raises:
        ValueError: the name is taken by another class.

    Examples:
        >>> import torch, ds_fsmoe
        >>> @ds_fsmoe.register_expert("example of an expert")
        ... class Narrow(torch.nn.Sequential):
        ...     def __init__(self, model_dim, expert_dim):
        ...         super().__init__(torch.nn.Linear(model_dim, expert_dim), torch.nn.Linear(expert_dim, model_dim))
        >>> layer = ds_fsmoe.MOELayer(
        ...     ds_fsmoe.SwitchGate(), ds_fsmoe.SimpleOrder(), model_dim=8, num_experts=4,
        ...     expert_impl="example of an expert", expert_dim=3,
        ... )
        >>> layer(torch.randn(6, 8)).shape
        torch.Size([6, 8])
    """
    return register("expert", name)


def known(kind: str) -> tuple[str, ...]:
    """Return the registered names of one kind, sorted. It imports the kind's folder, and with it torch."""
    _import_folder(kind)
    return tuple(sorted(_PARTS[kind]))


@functools.cache
def _import_folder(kind: str) -> None:
    """Import every file of a kind's folder, so that its parts register themselves."""
    folder = importlib.import_module(_FOLDER_OF_KIND[kind])
    for module in pkgutil.iter_modules(folder.__path__):
        importlib.import_module(f"{folder.__name__}.{module.name}")


def lookup(kind: str, name: str) -> type:
    """Return the class of a part, by its name today or in version 0.2.0.

    Raises:
        ValueError: no such part; the message lists the choices.
    """
    names, before = known(kind), NAMES_OF_BEFORE.get(kind, {})
    name = before.get(name, name)
    if name not in names:
        raise ValueError(f"no {kind} {name!r}: {suggested(name, names, before=before)}")
    return _PARTS[kind][name]
