# SPDX-License-Identifier: Apache-2.0
"""The exchangeable parts of a layer that hold no parameters, made as a block asks for them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from ds_fsmoe import registry
from ds_fsmoe.components.alltoall import AllToAllBase
from ds_fsmoe.components.callback import CallbackBase
from ds_fsmoe.components.order import OrderBase
from ds_fsmoe.components.orders.sparse import SimpleOrder
from ds_fsmoe.config import FSMoEBlock
from ds_fsmoe.ops.loading import load_row_ops


class LayerError(ValueError):
    """A model whose MoE layers cannot be made ours. The message names layer, class and what to change."""


@dataclass(frozen=True)
class Parts:
    """The exchangeable parts of a layer that hold no parameters, shared by all layers of a model."""

    order: OrderBase
    alltoall: AllToAllBase
    callbacks: tuple[CallbackBase, ...]
    order_name: str
    alltoall_name: str
    ops_name: str


def choose_parts(block: FSMoEBlock, device_type: str) -> Parts:
    """The parts a block asks for; "auto" takes the best there is.

    Raises:
        RuntimeError: ``ops: "required"`` and the op cannot be built, on every rank.
        ValueError: ``ops: "required"`` on a device without compiled ops.
    """
    ops = load_row_ops(block.ops, device_type)
    order_name = "sparse" if block.order == "auto" else block.order
    alltoall_name = "flat" if block.alltoall == "auto" else block.alltoall
    order_class = registry.lookup("order", order_name)
    order = order_class(ops.gather_rows) if order_class is SimpleOrder else order_class()
    alltoall = registry.lookup("alltoall", alltoall_name)()
    for part, base, name in ((order, OrderBase, order_name), (alltoall, AllToAllBase, alltoall_name)):
        if not isinstance(part, base):
            raise LayerError(f"the part {name!r} is a {type(part).__name__}: it must be a subclass of {base.__name__}")
    return Parts(order, alltoall, _make_callbacks(block), order_name, alltoall_name, ops.name)


def _make_callbacks(block: FSMoEBlock) -> tuple[CallbackBase, ...]:
    """``fsmoe.hooks``: each is named as ``package.module.Name``, a class without arguments or an object."""
    callbacks = []
    for name in block.hooks:
        module, _, attribute = name.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), attribute)
            callback = found() if isinstance(found, type) else found
        except Exception as error:  # whatever the module, or a name that is none, brings up
            raise LayerError(f"fsmoe.hooks: {name!r} cannot be had: {type(error).__name__}: {error}") from error
        if not isinstance(callback, CallbackBase):
            raise LayerError(f"fsmoe.hooks: {name!r} is a {type(callback).__name__}: it must be a CallbackBase")
        callbacks.append(callback)
    return tuple(callbacks)
