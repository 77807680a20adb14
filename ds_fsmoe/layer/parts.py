# SPDX-License-Identifier: Apache-2.0
"""Makes the exchangeable parts of a layer that hold no parameters, as a block asks for them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ds_fsmoe import registry
from ds_fsmoe.components.alltoall import AllToAllBase
from ds_fsmoe.components.callback import CallbackBase
from ds_fsmoe.components.order import OrderBase
from ds_fsmoe.components.routing import Routing, kind_of
from ds_fsmoe.config.blocks import Dispatch, FSMoEBlock
from ds_fsmoe.config.reading import BLOCK, ConfigError, shown
from ds_fsmoe.ops import Ops, load_ops


class LayerError(ValueError):
    """The MoE layers of a model cannot be made ours. The message names layer, class and what to change.

    It is a ``ValueError``, raised on every rank that has the layer, before training.

    Examples:
        >>> import torch, ds_fsmoe
        >>> try:
        ...     ds_fsmoe.MoE(8, torch.nn.Linear(8, 8), num_experts=4, ep_size=3)
        ... except ds_fsmoe.LayerError as error:
        ...     print(error)
        MoE: num_experts = 4 is not divisible by ep_size = 3; for 4 experts the sizes are 1, 2, 4
    """


def refuse_copy(path: str) -> NoReturn:
    """Refuse a copy or a pickle of a layer that has an engine, or is what an engine has left.

    Args:
        path: the path of the layer in its model.

    Raises:
        LayerError: always.
    """
    raise LayerError(
        f"{path}: a model that was given to ds_fsmoe.initialize cannot be copied or pickled, as this rank has its own "
        "part of it. Copy it before initialize and load ds_fsmoe.whole_state_dict(engine) into the copy, or call "
        "engine.destroy() and ds_fsmoe.make_whole(model) on every rank first"
    )


@dataclass(frozen=True)
class Parts:
    """Holds the exchangeable parts of a layer that have no parameters, shared by all layers of a model."""

    alltoall: AllToAllBase
    callbacks: tuple[CallbackBase, ...]
    asked_order: str
    """The name of the order for all layers; "auto": each layer gets the one that goes with its gate."""
    ops: Ops
    dispatch: Dispatch = "auto"
    """Whether rows travel or slots, see :attr:`FSMoEBlock.dispatch`."""
    _orders: dict[str, OrderBase] = field(default_factory=dict, repr=False)

    def order_for(self, gate: Any) -> OrderBase:
        """Return the order of a layer with this gate.

        Raises:
            ConfigError: the order asked for cannot read what the gate returns; names those that can.
            LayerError: the part registered under its name is not an order.
        """
        kind = kind_of(gate)
        name = kind.order if self.asked_order == "auto" else self.asked_order
        if name not in self._orders:
            self._orders[name] = self._make_order(name)
        order = self._orders[name]
        if not issubclass(kind, order.reads):
            classes = {each: registry.lookup("order", each) for each in registry.known("order")}
            fitting = [each for each in classes if issubclass(kind, getattr(classes[each], "reads", ()))]
            raise ConfigError(
                f"{BLOCK}.order = {shown(name)}: must be {' or '.join(map(shown, ['auto', *fitting]))} with "
                f"{type(gate).__name__}, whose decision is a {kind.__name__}"
            )
        return order

    def check_dispatch(self, gate: Any) -> None:
        """Refuse rows where only slots can travel.

        Raises:
            ConfigError: rows were asked for, and the gate or the all-to-all has none.
        """
        if self.dispatch != "rows":
            return
        slots_only = f'{BLOCK}.dispatch = "rows": must be "auto" or "slots" with'
        kind = kind_of(gate)
        if not issubclass(kind, Routing):
            raise ConfigError(f"{slots_only} {type(gate).__name__}, whose decision is a {kind.__name__}")
        if not self.alltoall.takes_rows:
            raise ConfigError(f"{slots_only} {type(self.alltoall).__name__}, which does not define exchange_rows")

    @property
    def order_name(self) -> str:
        """The names of the orders that layers have been given."""
        return "; ".join(sorted(self._orders)) or self.asked_order

    def _make_order(self, name: str) -> OrderBase:
        order_class = registry.lookup("order", name)
        order = order_class()
        _check_kind(order, OrderBase, name)
        order.ops = self.ops
        return order


def choose_parts(block: FSMoEBlock, device_type: str) -> Parts:
    """Return the parts a block asks for; "auto" takes the best. Collective, unless ``ops`` is "reference".

    Raises:
        RuntimeError: ``ops: "required"`` and the ops cannot be built, on every rank.
        ValueError: ``ops: "required"`` on a device without compiled ops.
    """
    ops = load_ops(block.ops, device_type, block.deterministic)
    name = "flat" if block.alltoall == "auto" else block.alltoall
    alltoall = registry.lookup("alltoall", name)()
    _check_kind(alltoall, AllToAllBase, name)
    return Parts(alltoall, _make_callbacks(block), block.order, ops, block.dispatch)


def _check_kind(part: Any, base: type, name: str) -> None:
    if not isinstance(part, base):
        raise LayerError(f"the part {name!r} is a {type(part).__name__}: it must be a subclass of {base.__name__}")


def _make_callbacks(block: FSMoEBlock) -> tuple[CallbackBase, ...]:
    """Make ``fsmoe.hooks``: each is named as ``package.module.Name``, a class without arguments or an object."""
    callbacks = []
    for name in block.hooks:
        module, _, attribute = name.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), attribute)
            callback = found() if isinstance(found, type) else found
        except Exception as error:  # whatever the module, or a name that is none, brings up
            raise LayerError(f"fsmoe.hooks: {name!r} cannot be made: {type(error).__name__}: {error}") from error
        if not isinstance(callback, CallbackBase):
            raise LayerError(f"fsmoe.hooks: {name!r} is a {type(callback).__name__}: it must be a CallbackBase")
        callbacks.append(callback)
    return tuple(callbacks)
