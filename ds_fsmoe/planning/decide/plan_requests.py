# SPDX-License-Identifier: Apache-2.0
"""Lists the possible plans of a step as data. Training, trials, what-if and ``ds_fsmoe plan`` all choose from this
list.

A :class:`PlanRequest` holds what was given and what may be chosen; :func:`requests_to_plan` lists the requests that
follow from it. A request fixes some decisions of a step (all-to-alls, chunks, two-batch overlap, when gradients are
sent). The rest is chosen layer by layer from a :class:`SearchSpace`, which applies the rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from ds_fsmoe.planning.block import CONVERSIONS, ORDERS, Links
from ds_fsmoe.planning.chunks import MICRO_OP_BYTES, degree_by_bytes
from ds_fsmoe.planning.cost import Cost, LayerCosts
from ds_fsmoe.planning.decide.block_times import Order
from ds_fsmoe.planning.decide.gradients import Mode
from ds_fsmoe.planning.decide.presets import BEST, Switches, preset
from ds_fsmoe.planning.decide.rules import allowed, check_named
from ds_fsmoe.planning.workload import Gradient, Layer, MoEWork

if TYPE_CHECKING:
    from ds_fsmoe.planning.decide.model_plan import ModelPlan, Sending

MIN_GAIN = 0.03
"""``best`` cuts a layer where that is predicted to gain more than this share of its time; less is lost in the noise."""
TRIED_DEGREES = (1, 2, 3, 4)
"""The numbers of chunks to try besides those with the best prediction. More chunks seldom help."""
TWO_BATCH_DEGREES = (1, 2)
"""The numbers of chunks of a sub-batch to try besides."""
IN_MOE = (1.0, 0.5, 0.0)
"""Shares of gradients to try inside the MoE part of the next layer."""
OTHER_MODES: tuple[Mode, ...] = ("dense_only", "fixed_chunk", "adaptive")
"""When gradients may be sent in layers that are run as they are best without any."""

Degree = int | None
"""``None``: to be chosen."""
Orders = tuple[Order | None, Order | None]
"""The ways to run a layer's forward and backward; ``None``: to be chosen."""


@dataclass(frozen=True)
class SearchSpace:
    """Lists the orders of a layer that may be chosen, and those that were given."""

    orders: tuple[Order, ...]
    """The ways of both phases, smaller degrees first; of the same degree, the first wins where others are not faster.
    Empty: the given ways are taken, and nothing else is looked at."""
    common_degree: bool = False
    """Both phases must have the same degree."""
    min_gain: float = 0.0
    """The share of its time that a layer has to gain to be run in another way than the first."""
    asked: Orders = (None, None)
    """The ways that are given. The choice without them is reported beside them."""
    solver: str = "exact"
    """Degrees by a search of all, or ``"slsqp"``: by the paper's algorithm 1, where it applies."""
    micro_op_bytes: int | None = None
    """The bytes of an all-to-all's micro-op, from which the degree follows; ``None``: any may be chosen."""
    named: str | None = None
    """The system by name whose chunks are chosen; where a user names it, it is refused if rules leave it none."""

    @classmethod
    def of(
        cls,
        schedule: str | Switches,
        max_degree: int,
        *,
        shared_link: bool = False,
        min_gain: float = MIN_GAIN,
        micro_op_bytes: int = MICRO_OP_BYTES,
    ) -> SearchSpace:
        """Return the choices of a system.

        Args:
            schedule: its name as in ``fsmoe.schedule``, or its switches.
            max_degree: the largest degree to consider.
            shared_link: whether both links share one cable, so that ``best`` treats them as one lane.
            min_gain: the share of time that ``best`` has to gain by chunking.
            micro_op_bytes: the bytes of an all-to-all's micro-op, where degrees follow from it.

        Raises:
            ValueError: the schedule is unknown.
        """
        if schedule == BEST:
            return cls(_orders(("shared",) if shared_link else ORDERS, max_degree), min_gain=min_gain)
        switches = preset(schedule) if isinstance(schedule, str) else schedule
        orders = _orders((switches.links,), 1 if switches.pipeline == "off" else max_degree)
        by_bytes = switches.pipeline == "by_bytes"
        is_common = by_bytes or switches.pipeline == "common"
        named = schedule if isinstance(schedule, str) and switches.pipeline != "off" else None
        return cls(orders, is_common, micro_op_bytes=micro_op_bytes if by_bytes else None, named=named)

    @classmethod
    def fixed(cls, forward: Order, backward: Order) -> SearchSpace:
        """Return a space with only the given orders of a layer."""
        return cls((), asked=(forward, backward))

    def orders_of(
        self, moe: MoEWork, backward: bool, is_two_batch: bool = False, costs: Mapping[str, Cost] | None = None
    ) -> Sequence[Order]:
        """Return the orders of a layer in a phase that the rules allow, limited by bytes where these set the degree.

        Args:
            moe: the stages of the layer, or of its sub-batch.
            backward: whether the phase is the backward.
            is_two_batch: whether the layer runs with two-batch overlap. Given orders then apply, and the result may be
                empty.
            costs: kind of task -> its cost in this phase, where it is known.
        """
        asked, orders = self.asked[backward], self.orders
        if asked is not None and (is_two_batch or not orders):
            return _two_batch_orders(asked, moe) if is_two_batch else (asked,)
        if is_two_batch:
            orders = tuple(
                sorted((e for each in orders for e in _two_batch_orders(each, moe)), key=lambda each: each.degree)
            )
        else:
            orders = _with_conversions(orders, moe)
        found = allowed(orders, moe, backward, is_two_batch, costs)
        if not found and not is_two_batch:
            # DeepSpeed's own order passes every rule.
            return [Order(1, orders[0].links)]
        if self.micro_op_bytes is not None and found:
            wanted = degree_by_bytes(moe, self.micro_op_bytes, max(each.degree for each in orders))
            degree = max((each.degree for each in found if each.degree <= wanted), default=found[0].degree)
            return [each for each in found if each.degree == degree]
        return found

    def with_degrees(self, forward: Degree, backward: Degree, links: Links) -> SearchSpace:
        """Return the same space with these degrees given."""
        asked = (None if degree is None else Order(degree, links) for degree in (forward, backward))
        return self.with_orders(*asked)

    def with_orders(self, forward: Order | None, backward: Order | None) -> SearchSpace:
        """Return the same space with these orders given."""
        is_open = forward is None and backward is None
        return replace(self, asked=(forward, backward), named=self.named if is_open else None)

    def unchunked(self, links: Links) -> SearchSpace:
        """Return the same space for layers that must not be chunked.

        Args:
            links: the order to use if the space has no unchunked order.
        """
        whole = tuple(each for each in self.orders if each.degree == 1) or (Order(1, links),)
        return replace(self, orders=whole, asked=(None, None), micro_op_bytes=None, named=None)


def _orders(links: tuple[Links, ...], max_degree: int) -> tuple[Order, ...]:
    # The first is stock's schedule; on lanes of their own, its collectives leave the other link to gradients.
    found = [Order(1, links[-1])]
    for degree in range(1, max_degree + 1):
        found += [Order(degree, order) for order in links if degree > 1 or order != "paper"]
    return tuple(dict.fromkeys(found))


def _with_conversions(orders: tuple[Order, ...], moe: MoEWork) -> tuple[Order, ...]:
    """Return the orders, and for several chunks also those with conversions concurrent with the experts, where the
    layer allows it. With two-batch overlap the other sub-batch computes meanwhile.
    """
    if not moe.may_convert_on_compute:
        return orders
    return tuple(
        replace(each, conversions=where)
        for each in orders
        for where in (CONVERSIONS if each.degree > 1 else ("links",))
    )


def _two_batch_orders(order: Order, moe: MoEWork) -> tuple[Order, ...]:
    """Return the orders of a sub-batch with the traffic of an order. Where one sub-batch's reduces may precede the
    other's gathers, both orders are returned.
    """
    behind = replace(order, links="paper")
    if order.links != "reduce_first":
        return (order,)
    return (behind, order) if any(each.is_inner for each in moe.ahead) else (behind,)


Kind = Literal["whole", "windows", "isolated", "alltoall", "given", "halves", "near", "late", "stock"]
"""The purpose of a request: the whole micro-batch with all choices open; layers planned without gradients, which go
into other windows; the best if lanes did not slow each other down; a given all-to-all or number of chunks; two-batch
overlap; neighbours of the fastest tried; the fastest with all gradients at the end, for a pipeline stage; DeepSpeed's
own."""


@dataclass(frozen=True)
class PlanRequest:
    """States which choices of a step are given, and which are open."""

    options: Sequence[Mapping[str, Layer]]
    """Layer by layer, in the order of the forward: name of an all-to-all -> the layer with it, the one in use first."""
    space: SearchSpace
    """The choices of each layer that may be cut."""
    mode: Mode
    """When gradients are sent; with two-batch overlap see :func:`sendings_in_two_batch`."""
    links: Links = "paper"
    """The task order of layers whose degrees are given."""
    unchunked: Sequence[bool] = ()
    """True for each layer that may not be cut; empty: all may be."""
    can_split: bool = False
    """Micro-batches may be run in two sub-batches that alternate."""
    may_send_anyhow: bool = False
    """Gradients may also be sent at once or at the end, where whole steps show that to be faster."""
    carried: Sequence[Gradient] = ()
    """The gradients that wait when the backward begins, as in the middle of a larger model."""
    kind: Kind = "whole"
    alltoalls: Sequence[str] | None = None
    """The all-to-all of each layer; ``None``: another than the first is taken where it gains more than
    :data:`MIN_GAIN`, with two-batch overlap for all layers that have it."""
    orders: Sequence[Orders] | None = None
    """The way to run each layer, kept exactly with two-batch overlap; ``None``: as the space has it."""
    is_two_batch: bool = False
    degree: Degree = None
    """The chunks of each sub-batch, where a layer has a way with so many."""
    sending: Sending = "placed"
    """The rule by which gradients get into windows."""

    @property
    def spaces(self) -> list[SearchSpace]:
        """Return the choices of each layer."""
        uncut = self.unchunked or [False] * len(self.options)
        return [self.space.unchunked(self.links) if each else self.space for each in uncut]

    def check_named(self, costs: LayerCosts | None = None) -> None:
        """Refuse a schedule by name for which the rules allow no chunks, as it would run as another one.

        Args:
            costs: the costs of layers that have none of their own.

        Raises:
            RuleError: the rules allow no chunks; the message names them.
        """
        for layers, space in zip(self.options, self.spaces, strict=True):
            layer = next(iter(layers.values()))
            known = layer.costs or costs
            for backward, work in enumerate((layer.forward, layer.backward)) if space.named is not None else ():
                of_phase = None if known is None else known.of(bool(backward))[0]
                check_named(space.named, space.orders, work.moe, bool(backward), of_phase)


Near = tuple["ModelPlan", "ModelPlan", "ModelPlan"]
"""The fastest plan tried, the one with the fastest forward and the one with the fastest backward."""


def requests_to_plan(request: PlanRequest, *kinds: Kind, near: Near | None = None) -> list[PlanRequest]:
    """Return the requests that are predicted, tried and chosen from, DeepSpeed's own last.

    Args:
        request: the given and the open choices.
        kinds: the kinds of requests to return.
        near: the plans whose neighbours to return, for kind "near"; kind "late" varies the first.
    """
    found = [request, replace(request, kind="isolated")]
    if request.mode == "adaptive":
        # The windows are chosen layer by layer. With layers planned without gradients, other windows are sometimes a
        # little faster.
        found += [replace(request, kind="windows", mode=each) for each in OTHER_MODES]
    if len(each_alltoall(request.options)) > 1:
        found += [replace(request, kind="alltoall", alltoalls=each) for each in each_alltoall(request.options)]
    if "given" in kinds:
        found += [replace(request, kind="given", orders=each) for each in _given_orders(request)]
    if request.can_split:
        two_batch = replace(request, kind="halves", is_two_batch=True)
        found += [two_batch, *(replace(two_batch, kind="given", degree=each) for each in TWO_BATCH_DEGREES)]
    if near is not None:
        found += _neighbours(request, *near)
    return [each for each in (*found, stock_request(request.options)) if each.kind in kinds]


def stock_request(options: Sequence[Mapping[str, Layer]]) -> PlanRequest:
    """Return DeepSpeed's own schedule as a request: unchunked layers, their current all-to-alls, and gradients after
    the backward.
    """
    return PlanRequest(options, SearchSpace.of("deepspeed", 1), "off", kind="stock", alltoalls=used_alltoalls(options))


def sendings_in_two_batch(mode: Mode) -> tuple[tuple[Mode, ...], tuple[float, ...]]:
    """Return (modes, shares) of sending gradients with two-batch overlap, of which the fastest is chosen. A mode is
    as without two-batch overlap; a share of the gradients is sent inside the MoE part of the next layer.

    A sub-batch's traffic is hidden already, so the slices for a window of a whole micro-batch may be too large.
    """
    return ((mode, "dense_only"), IN_MOE) if mode == "adaptive" else ((mode,), ())


def used_alltoalls(options: Sequence[Mapping[str, Layer]]) -> tuple[str, ...]:
    """Return the current all-to-all of each layer."""
    return tuple(next(iter(each)) for each in options)


def each_alltoall(options: Sequence[Mapping[str, Layer]]) -> list[tuple[str, ...]]:
    """Return each all-to-all for all layers; layers that lack it keep their own."""
    names = dict.fromkeys(name for each in options for name in each)
    used = list(zip(options, used_alltoalls(options), strict=True))
    return [tuple(name if name in each else own for each, own in used) for name in names]


def _given_orders(request: PlanRequest) -> list[list[Orders]]:
    """Return the (forward, backward) orders to try in all layers that may be chunked, where chunks are open."""
    space = request.space
    if space.asked != (None, None) or space.micro_op_bytes is not None:
        return []
    # More lanes at once take more of the processors, which is hard to predict where ranks share them.
    links = dict.fromkeys([request.links, *(each.links for each in space.orders)])
    degrees = {each.degree for each in space.orders}
    tried = [Order(degree, each) for each in links for degree in TRIED_DEGREES if degree in degrees]
    tried = [each for each in tried if each.degree > 1 or each.links == request.links]
    may_cut = [each is space for each in request.spaces]
    for layers, is_cut in zip(request.options, may_cut, strict=True):
        for layer in layers.values() if is_cut else ():
            for backward, work in enumerate((layer.forward, layer.backward)):
                costs = layer.costs.of(bool(backward))[0] if layer.costs else None
                tried = allowed(tried, work.moe, bool(backward), costs=costs)
    return [[(each, each) if is_cut else (None, None) for is_cut in may_cut] for each in tried]


def _neighbours(request: PlanRequest, kept: ModelPlan, forward: ModelPlan, backward: ModelPlan) -> list[PlanRequest]:
    """Return the neighbours of the fastest plan, which comes first.

    One combines the fastest forward with the fastest backward. Two more send all gradients at once and at the end,
    where that is allowed. Contention is predicted from pairs of operations, so these are worth a measurement.
    """
    joined = []
    for index, (name, space) in enumerate(zip(kept.alltoalls, request.spaces, strict=True)):
        pair = forward.orders[index][0], backward.orders[index][1]
        layer = request.options[index][name]
        must_match = request.space.common_degree or bool(layer.costs and layer.costs.uses_rng)
        is_open = kept.is_two_batch == forward.is_two_batch == backward.is_two_batch
        is_open = is_open and name == forward.alltoalls[index] == backward.alltoalls[index]
        is_open = is_open and not (must_match and pair[0].degree != pair[1].degree)
        if is_open and space is request.space and not kept.is_two_batch:
            # One of the two may be DeepSpeed's schedule, whose degree a schedule by name need not have.
            for phase, work in enumerate((layer.forward, layer.backward)):
                costs = layer.costs.of(bool(phase))[0] if layer.costs else None
                open_degrees = {each.degree for each in space.orders_of(work.moe, bool(phase), costs=costs)}
                is_open = is_open and pair[phase].degree in open_degrees
        joined.append(pair if is_open else kept.orders[index])
    own = replace(request, kind="near", is_two_batch=kept.is_two_batch, alltoalls=kept.alltoalls, orders=kept.orders)
    found = [own, replace(own, orders=joined)]
    if request.may_send_anyhow and kept.has_gradients:
        late = replace(own, sending="at_the_end")
        found += [replace(own, sending="at_once"), late, replace(late, kind="late")]
    return found
