# SPDX-License-Identifier: Apache-2.0
"""Makes the exchangeable parts of a layer that hold no parameters, as a block asks for them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch.distributed as dist

from ds_fsmoe import registry
from ds_fsmoe.components.alltoall import AllToAllBase, NodeDeduplicated
from ds_fsmoe.components.callback import CallbackBase
from ds_fsmoe.components.hierarchical import BlockPaths, HierarchicalAllToAll, Nodes, Route
from ds_fsmoe.components.order import OrderBase
from ds_fsmoe.components.routing import Routing, kind_of
from ds_fsmoe.config.blocks import Dispatch, FSMoEBlock
from ds_fsmoe.config.reading import BLOCK, ConfigError, shown
from ds_fsmoe.distributed.groups import FSMoEGroups, make
from ds_fsmoe.execution.collectives import Collectives
from ds_fsmoe.execution.node_links import NodeLinks
from ds_fsmoe.execution.row_sizes import ForwardedRows
from ds_fsmoe.execution.tensor_parallel import SelfSplitCollectives
from ds_fsmoe.ops import Ops, load_ops
from ds_fsmoe.planning.groups import Communicators, Ranks, in_levels, levels_of
from ds_fsmoe.planning.schedule import A2A_IN, A2A_IN_NODE, A2A_OUT, A2A_OUT_NODE


class LayerError(ValueError):
    """The MoE layers of a model cannot be converted. The message names the layer, its class and a remedy.

    It is a ``ValueError``, raised on every rank that has the layer, before training.

    Examples:
        >>> import torch, ds_fsmoe
        >>> try:
        ...     ds_fsmoe.MoE(8, torch.nn.Linear(8, 8), num_experts=4, ep_size=3)
        ... except ds_fsmoe.LayerError as error:
        ...     print(error)
        MoE: num_experts = 4 is not divisible by ep_size = 3; with 4 experts ep_size can be 1, 2, 4
    """


def refuse_copy(path: str) -> NoReturn:
    """Refuse to copy or pickle a layer that has an engine, or had one.

    Args:
        path: the path of the layer in its model.

    Raises:
        LayerError: always.
    """
    raise LayerError(
        f"{path}: a model of a ds_fsmoe engine cannot be copied or pickled, as this rank has only a part of it. "
        "Copy it before initialize and load ds_fsmoe.whole_state_dict(engine) into the copy, or call "
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
                f"{type(gate).__name__}, which returns a {kind.__name__}"
            )
        return order

    def check_dispatch(self, gate: Any) -> None:
        """Refuse rows where only slots can travel.

        Raises:
            ConfigError: rows were asked for, and the gate or the all-to-all has none.
        """
        if self.dispatch != "rows":
            return
        slots_only = f'{BLOCK}.dispatch = "unpadded": must be "auto" or "padded" with'
        kind = kind_of(gate)
        if not issubclass(kind, Routing):
            raise ConfigError(f"{slots_only} {type(gate).__name__}, which returns a {kind.__name__}")
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
        raise LayerError(f"{name!r} is a {type(part).__name__}: it must be a subclass of {base.__name__}")


def _make_callbacks(block: FSMoEBlock) -> tuple[CallbackBase, ...]:
    """Make ``fsmoe.hooks``: each is named as ``package.module.Name``, a class without arguments or an object."""
    callbacks = []
    for name in block.hooks:
        module, _, attribute = name.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), attribute)
            callback = found() if isinstance(found, type) else found
        except Exception as error:  # whatever the module, or a name that is none, brings up
            raise LayerError(f"fsmoe.hooks: {name!r} cannot be constructed: {type(error).__name__}: {error}") from error
        if not isinstance(callback, CallbackBase):
            raise LayerError(f"fsmoe.hooks: {name!r} is a {type(callback).__name__}: it must be a CallbackBase")
        callbacks.append(callback)
    return tuple(callbacks)


# ---- Runs an all-to-all in the groups of a layer: in one task or in two, and on which communicators


def exchange_in(groups: FSMoEGroups, alltoall: AllToAllBase) -> Collectives:
    """Prepare an all-to-all in the groups of a layer. Collective: it may make communicators.

    Whether it is in steps follows from the nodes of all EP groups, not of this rank's, because the schedule has to be
    the same on every rank. On one kind of link steps gain nothing, and the flat way is used.

    Raises:
        ValueError: a hierarchical all-to-all contradicts itself, on every rank.
    """
    of_kind = SelfSplitCollectives if groups.layout.tensor_parallel_experts else Collectives
    flat = of_kind(alltoall.exchange, groups.ep_group, groups.esp_group)
    if alltoall.takes_rows:
        flat = replace(flat, exchange_rows=alltoall.exchange_rows)
    if isinstance(alltoall, NodeDeduplicated):
        return _node_deduplication(groups, flat)
    if not isinstance(alltoall, HierarchicalAllToAll) or len(groups.planned.placements["ep"].lanes) < 2:
        return flat
    all_ranks = groups.layout.ep
    nodes_of = {ranks: Nodes.of(groups.topology.node_of_rank[rank] for rank in ranks) for ranks in all_ranks}
    relays_of = {nodes: BlockPaths(alltoall, nodes) for nodes in dict.fromkeys(nodes_of.values())}
    # Steps along one kind of link share communicators where they have the same parts, and those along another do not:
    # each is on one lane.
    communicators = tuple(
        make(Communicators(f"a2a_{link}", _parts(all_ranks, relays_of, nodes_of, step)), groups.max_ctas)
        for step, link in enumerate(alltoall.links)
    )
    own_ranks = groups.ranks_of("ep")
    own, me = nodes_of[own_ranks], groups.index_in("ep")

    def route(relays: BlockPaths, groups_of_steps: tuple[dist.ProcessGroup | None, ...]) -> Route:
        return Route(tuple(relays.hop(step, me) for step in range(len(relays.links))), groups_of_steps)

    way_in = route(relays_of[own], communicators)
    forwarded = ForwardedRows(*relays_of[own].forwarded_blocks(me))
    whole = replace(flat, exchange=way_in.exchange, exchange_rows=way_in.exchange_rows, forwarded=forwarded)
    if alltoall.links != ("intra", "inter"):
        return whole
    way_out = route(BlockPaths(alltoall, own, back=True), communicators[::-1])
    legs = {
        A2A_IN_NODE: lambda blocks: way_in.step(0, blocks),
        A2A_IN: lambda blocks: way_in.step(1, blocks),
        A2A_OUT: lambda blocks: way_out.step(0, blocks),
        A2A_OUT_NODE: lambda blocks: way_out.step(1, blocks),
    }
    row_legs = {
        A2A_IN_NODE: lambda x_RM, sizes: way_in.step(0, x_RM, sizes.between),
        A2A_IN: lambda x_RM, sizes: way_in.step(1, x_RM, sizes.between),
        A2A_OUT: lambda y_RM, sizes: way_out.step(0, y_RM, sizes.between),
        A2A_OUT_NODE: lambda y_RM, sizes: way_out.step(1, y_RM, sizes.between),
    }
    return replace(whole, legs=legs, row_legs=row_legs)


def _parts(
    all_ranks: tuple[Ranks, ...], relays_of: Mapping[Nodes, BlockPaths], nodes_of: Mapping[Ranks, Nodes], step: int
) -> tuple[Ranks, ...]:
    """Return the ranks that talk to each other in a step, of all groups."""
    parts = [
        tuple(ranks[each] for each in part) for ranks in all_ranks for part in relays_of[nodes_of[ranks]].parts(step)
    ]
    return tuple(sorted(parts))


def _node_deduplication(groups: FSMoEGroups, flat: Collectives) -> Collectives:
    """Prepare the two levels, or say why it is the flat way. Collective."""
    if groups.planned.esp > 1 or groups.layout.tensor_parallel_experts:
        return replace(flat, why_flat="each expert is split over several ranks")
    nodes = node_links(groups, "ep", "a2a")
    if nodes is None:
        return replace(flat, why_flat="the ranks that share experts are not equally many, at least 2, in several nodes")
    return replace(flat, nodes=nodes)


# ---- Makes the communicators of groups whose ranks are addressed in two levels: inside a node, and between nodes


def node_links(groups: FSMoEGroups, kind: str, purpose: str) -> NodeLinks | None:
    """Return the two levels of this rank's group of a kind. Collective: it may make communicators.

    Args:
        groups: the groups of a layer.
        kind: "ep", "dp" or "edp".
        purpose: "a2a" or "gradients"; the two have separate communicators.

    Returns:
        ``None`` where the ranks of any group of that kind, on whichever rank, are not equally many in several nodes.
    """
    ranks, node_of = getattr(groups.layout, kind), groups.topology.node_of_rank
    levels = levels_of(ranks, node_of)
    if not levels:
        return None
    of_links = [make(each, groups.max_ctas) for each in in_levels(purpose, ranks, node_of)]
    return NodeLinks(levels[groups.ranks_of(kind)], groups.index_in(kind), *of_links)
