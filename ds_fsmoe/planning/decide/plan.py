# SPDX-License-Identifier: Apache-2.0
"""Chooses a degree and an order for every layer and phase, an all-to-all, and a window for every gradient.

Costs from a cluster's file and from measurements have the same form, :class:`~ds_fsmoe.planning.cost.LayerCosts`.
``ds_fsmoe plan`` prints the plans, and training runs them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from ds_fsmoe.planning.block import Slice
from ds_fsmoe.planning.chunks import MICRO_OP_BYTES
from ds_fsmoe.planning.cost import Cost, LayerCosts
from ds_fsmoe.planning.decide.block_times import BlockTimes, Order, PhaseTimes, learn
from ds_fsmoe.planning.decide.degree import smallest_of_best
from ds_fsmoe.planning.decide.gradients import (
    Mode,
    Partition,
    Price,
    QueuedGradient,
    SendWindow,
    check_solver,
    partition,
    window_prices,
)
from ds_fsmoe.planning.decide.model_plan import ModelPlan
from ds_fsmoe.planning.decide.plan_requests import MIN_GAIN, PlanRequest, SearchSpace, requests_to_plan
from ds_fsmoe.planning.decide.presets import BEST, preset
from ds_fsmoe.planning.decide.search import Choice, choose
from ds_fsmoe.planning.schedule import EXPERT_GRAD, REST, Lane
from ds_fsmoe.planning.timeline import IDEAL, Contention
from ds_fsmoe.planning.workload import BlockWork, Gradient, Layer
from ds_fsmoe.untrusted import suggested

SOLVERS = ("exact", "slsqp")
MAX_DEGREE = 256
SHARED_LINK = 0.8
"""The slowdown from which two links count as one: both at once gain less than a tenth."""


@dataclass(frozen=True)
class Settings:
    """Holds the settings of the planner.

    Raises:
        ValueError: a degree, host cost, chunk size or solver is invalid.
    """

    contention: Contention = IDEAL
    """The assumed slowdown of lanes by each other."""
    host_ms: float = 0.0
    """The host time of a launch, for layers without costs of their own."""
    max_degree: int = 16
    solver: str = "exact"
    gradient_solver: str = "dp"
    chunk_bytes: int | None = None
    """The bytes of a slice of gradients or an all-to-all's micro-op; ``None``: as modes and schedules have them."""
    seed: int = 0
    is_serial: bool = False
    """Whether tasks run one after another, whatever their lane."""
    shared_link: bool = False
    """Whether both links are one wire, even if they were not seen to slow each other down."""
    min_gain: float = MIN_GAIN
    """The share that ``best`` has to gain for cutting a layer."""
    num_micro_batches: int = 1
    """The micro-batches of a batch: all are cut alike, and the backward of the last one sends the gradients."""

    def __post_init__(self) -> None:
        is_whole = isinstance(self.max_degree, int) and not isinstance(self.max_degree, bool)
        if not is_whole or not 1 <= self.max_degree <= MAX_DEGREE:
            raise ValueError(f"num_chunks.max = {self.max_degree}: must be a whole number from 1 to {MAX_DEGREE}")
        check_solver(self.gradient_solver, self.chunk_bytes)
        if not (math.isfinite(self.host_ms) and self.host_ms >= 0):
            raise ValueError(f"host_ms = {self.host_ms}: must be a finite number of at least 0")
        if self.num_micro_batches < 1:
            raise ValueError(f"num_micro_batches = {self.num_micro_batches}: must be at least 1")
        if self.solver not in SOLVERS:
            raise ValueError(f"solver = {self.solver!r}: {suggested(self.solver, SOLVERS)}")

    def space(self, schedule: str) -> SearchSpace:
        """Return the choices that a schedule by name leaves open.

        Raises:
            ValueError: the schedule is unknown.
        """
        shared = self.shared_link or self.contention.links >= SHARED_LINK
        found = SearchSpace.of(
            schedule,
            self.max_degree,
            shared_link=shared,
            min_gain=self.min_gain,
            micro_op_bytes=self.micro_op_bytes,
        )
        return replace(found, solver=self.solver)

    @property
    def micro_op_bytes(self) -> int:
        """Return the bytes of a micro-op of an all-to-all."""
        return MICRO_OP_BYTES if self.chunk_bytes is None else self.chunk_bytes


@dataclass
class Planner:
    """Plans layers on one cluster. Equal layers are planned once."""

    costs: Mapping[str, Cost]
    """Kind of task -> cost, for layers without costs of their own."""
    settings: Settings = field(default_factory=Settings)
    _times: dict[tuple, BlockTimes] = field(default_factory=dict)
    _choices: dict[tuple, tuple[Choice, Choice]] = field(default_factory=dict)
    _curves: dict[tuple, tuple[Price, Price]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.written = LayerCosts.written(self.costs, self.settings.host_ms)

    def plan(self, request: PlanRequest) -> ModelPlan:
        """Plan a step of whole micro-batches, and choose what the request leaves open."""
        if request.kind == "isolated":
            ideal = Planner(self.costs, replace(self.settings, contention=IDEAL)).plan(replace(request, kind="whole"))
            return self.plan(replace(request, kind="given", alltoalls=ideal.alltoalls, orders=ideal.orders))
        options, spaces = request.options, request.spaces
        if request.orders is not None:
            spaces = [space.with_orders(*given) for space, given in zip(spaces, request.orders, strict=True)]
        self._learn((layer, space, ()) for each, space in zip(options, spaces, strict=True) for layer in each.values())
        fastest, times = [], []
        for of_layer, space in zip(options, spaces, strict=True):
            of_names = {
                name: _waiting_ms(of) + sum(each.time_ms for each in self.choose(of, space))
                for name, of in of_layer.items()
            }
            first, best = next(iter(of_names)), min(of_names, key=of_names.__getitem__)
            fastest.append(best if of_names[best] < (1 - MIN_GAIN) * of_names[first] else first)
            times.append(of_names)
        names = fastest if request.alltoalls is None else request.alltoalls
        layers = [each[name] for each, name in zip(options, names, strict=True)]
        # Equal layers are planned once, and have a number from here on.
        numbers: dict[tuple[Layer, SearchSpace], int] = {}
        kinds = [numbers.setdefault(each, len(numbers)) for each in zip(layers, spaces, strict=True)]
        alone = [self.choose(*each) for each in numbers]
        # A system of one degree chooses it without its gradients.
        is_alone = [request.kind == "windows" or space.common_degree for _, space in numbers]
        final = [
            space.with_orders(*(each.order for each in pair)) if stays else space
            for (_, space), pair, stays in zip(numbers, alone, is_alone, strict=True)
        ]
        distinct = [layer for layer, _ in numbers]
        split = self._partition(distinct, kinds[::-1], alone, final, request.mode, request.carried)
        sending = ((kinds[-1 - index], split.slices[2 * index]) for index in range(len(kinds)))
        self._learn((distinct[kind], final[kind], moe) for kind, moe in sending)
        pairs, plans = [], []
        for index, kind in enumerate(kinds[::-1]):
            moe, dense = split.slices[2 * index : 2 * index + 2]
            pair = self.choose(distinct[kind], final[kind], moe) if moe or is_alone[kind] else alone[kind]
            pairs.append(pair)
            plans.append(pair[1].order.plan(moe, dense))
        return ModelPlan(
            tuple(layers),
            tuple(pair[0].order.plan() for pair in pairs[::-1]),
            tuple(plans),
            split.tail,
            tuple(pair[0] for pair in pairs[::-1]),
            tuple(pair[1] for pair in pairs),
            tuple(names),
            tuple(times),
        )

    def step_ms(self, plan: ModelPlan) -> float:
        """Predict the ms of a step with a plan, forward and backward."""
        return sum(self.phases_ms(plan))

    def batch_ms(self, plan: ModelPlan) -> float:
        """Predict the ms of all micro-batches of a batch with a plan, one after the other."""
        earlier = self.settings.num_micro_batches - 1
        return self.step_ms(plan) + (earlier * self.step_ms(plan.earlier()) if earlier else 0.0)

    def phases_ms(self, plan: ModelPlan) -> tuple[float, float]:
        """Predict the ms of (forward, backward) with a plan."""
        how = self.settings.contention, self.settings.host_ms, self.settings.is_serial
        forward, backward = plan.timelines(self.costs, *how)
        return forward.makespan_ms, backward.makespan_ms

    def choose(self, layer: Layer, space: SearchSpace, moe: tuple[Slice, ...] = ()) -> tuple[Choice, Choice]:
        """Choose how the MoE part of a layer runs in forward and backward.

        Args:
            layer: the layer.
            space: the allowed choices.
            moe: the slices of gradients that are sent in its backward.
        """
        costs, key = layer.costs or self.written, self._key(layer, space, moe)
        if key not in self._choices:
            self._choices[key] = choose(
                *self._both_phases(layer, moe),
                space,
                uses_rng=costs.uses_rng,
                relative_residual=costs.relative_residual,
            )
        return self._choices[key]

    def _key(self, layer: Layer, space: SearchSpace, moe: tuple[Slice, ...]) -> tuple:
        return layer.forward.moe, layer.backward.moe, layer.costs, space, self._grad_ms(layer, moe), _lanes(moe)

    def _grad_ms(self, layer: Layer, moe: tuple[Slice, ...]) -> float:
        costs = (layer.costs or self.written).backward
        return sum(costs[each.kind].ms(each.size_bytes) for each in moe)

    def _learn(self, wanted: Iterable[tuple[Layer, SearchSpace, tuple[Slice, ...]]]) -> None:
        """Compute the times that :meth:`choose` needs, for all layers together."""
        of_times: dict[BlockTimes, tuple[dict[Order, None], dict[float, None]]] = {}
        for layer, space, moe in {self._key(*each): each for each in wanted}.values():
            for backward, phase in enumerate(self._both_phases(layer, moe)):
                orders = dict.fromkeys(space.orders_of(phase.same.work.moe, bool(backward), costs=phase.same.costs))
                for times in dict.fromkeys((phase.same, phase.other or phase.same)):
                    known = of_times.setdefault(times, ({}, {}))
                    known[0].update(orders)
                    known[1].update(dict.fromkeys(phase.grads_ms))
        learn(of_times)

    def _both_phases(self, layer: Layer, moe: tuple[Slice, ...]) -> tuple[PhaseTimes, PhaseTimes]:
        backward = self._phase_times(layer, True, _lanes(moe), self._grad_ms(layer, moe))
        return self._phase_times(layer, False), backward

    def _phase_times(
        self, layer: Layer, backward: bool, lanes: tuple[Lane, ...] = (Lane.INTER,), grad_ms: float = 0.0
    ) -> PhaseTimes:
        costs, work = layer.costs or self.written, layer.backward if backward else layer.forward
        moe = BlockWork((), work.moe, ())
        return PhaseTimes(
            self.times(moe, costs, backward, lanes),
            self.times(moe, costs, backward, lanes, same_chunks=False) if backward and costs.rechunked else None,
            None if self.settings.contention == IDEAL else self.times(moe, costs, backward, lanes, contention=IDEAL),
            grad_ms,
            self.settings.num_micro_batches,
        )

    def times(
        self,
        work: BlockWork,
        costs: LayerCosts | None = None,
        backward: bool = False,
        lanes: tuple[Lane, ...] = (Lane.INTER,),
        *,
        same_chunks: bool = True,
        contention: Contention | None = None,
    ) -> BlockTimes:
        """Return the times of a block in one phase.

        Args:
            work: the block.
            costs: the costs of its tasks; ``None``: the cluster's.
            backward: whether the phase is the backward.
            lanes: the links that gradients use.
            same_chunks: whether the backward has the chunks of the forward.
            contention: how lanes slow each other down; ``None``: as in the settings.
        """
        costs = costs or self.written
        contention = self.settings.contention if contention is None else contention
        key = work, costs, backward, lanes, same_chunks, contention
        if key not in self._times:
            of_phase, host_ms = costs.of(backward, same_chunks)
            self._times[key] = BlockTimes(work, of_phase, contention, host_ms, lanes, self.settings.is_serial)
        return self._times[key]

    def _partition(
        self,
        layers: Sequence[Layer],
        kinds: Sequence[int],
        alone: Sequence[tuple[Choice, Choice]],
        spaces: Sequence[SearchSpace],
        mode: Mode,
        carried: Sequence[Gradient],
    ) -> Partition:
        def piece(gradient: Gradient, layer: Layer, index: int) -> QueuedGradient:
            cost = (layer.costs or self.written).backward[gradient.kind]
            of_gradient = gradient.kind, gradient.lanes, gradient.size_bytes, cost, index
            return QueuedGradient(*of_gradient, gradient.tensors_bytes)

        grads = [*carried, *(each for layer in layers for each in layer.gradients)]
        # What is sent at the end has no use for windows, and finding out what they cost takes time.
        prices: list[tuple[Price, Price]] = [(np.zeros_like, np.zeros_like)] * len(layers)
        if grads and mode != "off":
            prices = [
                self._windows(layer, pair[1], space, _lanes(grads))
                for layer, pair, space in zip(layers, alone, spaces, strict=True)
            ]
        rooms_ms = [(0.0, 0.0)] * len(layers)
        if mode == "micro_ops":
            rooms_ms = [self._idle_link_ms(*each, _lanes(grads)) for each in zip(layers, alone, strict=True)]
        pieces = [piece(each, layers[kinds[0]], -1) for each in carried]
        windows = []
        for index, kind in enumerate(kinds):
            layer = layers[kind]
            windows.append(SendWindow(index, "moe", len(pieces), prices[kind][0], rooms_ms[kind][0]))
            # The experts' gradients of a layer exist before the layer is through, the others only then.
            pieces += [piece(each, layer, index) for each in layer.gradients if each.kind == EXPERT_GRAD]
            windows.append(SendWindow(index, "dense", len(pieces), prices[kind][1], rooms_ms[kind][1]))
            pieces += [piece(each, layer, index) for each in layer.gradients if each.kind != EXPERT_GRAD]
        settings = self.settings
        return partition(
            pieces,
            windows,
            mode,
            solver=settings.gradient_solver,
            chunk_bytes=settings.chunk_bytes,
            seed=settings.seed,
        )

    def _idle_link_ms(self, layer: Layer, alone: tuple[Choice, Choice], lanes: tuple[Lane, ...]) -> tuple[float, float]:
        """Return the ms during which gradients may begin (inside a layer, after it) while no all-to-all waits for
        their link. Inside a layer that is above 0 only if it has no all-to-all.
        """
        if self.settings.is_serial:
            return 0.0, 0.0
        # What is under way meanwhile may make all of them take longer, by so much at the most.
        slower = self.settings.contention.slowdown(lanes[0], set(Lane))
        costs, moe = layer.costs or self.written, layer.backward.moe
        after_ms = self.times(layer.backward, costs, True, lanes).after_ms
        return 0.0 if moe.exchange else alone[1].time_ms / slower, after_ms / slower

    def _windows(self, layer: Layer, alone: Choice, space: SearchSpace, lanes: tuple[Lane, ...]) -> tuple[Price, Price]:
        """Return the prices of both windows of a layer, with the best degree for each time of gradients."""
        costs, moe = layer.costs or self.written, layer.backward.moe
        orders = [alone.order]
        if space.asked[1] is None and not costs.uses_rng:
            orders += space.orders_of(moe, True, costs=costs.backward)
        orders = list(dict.fromkeys(orders))
        key = layer.backward, costs, tuple(orders), lanes
        if key in self._curves:
            return self._curves[key]
        prices = window_prices(
            orders,
            alone.order,
            self.times(BlockWork((), moe, ()), costs, True, lanes),
            self.times(layer.backward, costs, True, lanes),
            self.settings.num_micro_batches,
        )
        self._curves[key] = prices
        return prices


def _waiting_ms(layer: Layer) -> float:
    """Return the ms that a layer waits for numbers of rows ahead of its MoE part."""
    return sum(each.size for each in layer.forward.before if each.kind == REST)


def _lanes(gradients: Sequence[Slice | Gradient]) -> tuple[Lane, ...]:
    return gradients[0].lanes if gradients else (Lane.INTER,)


def plan_by_name(planner: Planner, name: str, layers: Sequence[Layer], carried: Sequence[Gradient] = ()) -> ModelPlan:
    """Plan a step as a named system would.

    Raises:
        ValueError: the name is unknown; the message lists the names.
    """
    options, space = [{"": each} for each in layers], planner.settings.space(name)
    request = PlanRequest(options, space, mode_of(name), carried=carried)
    if name != BEST:
        return planner.plan(request)
    plans = [planner.plan(each) for each in requests_to_plan(request, "whole", "windows")]
    return plans[smallest_of_best([planner.batch_ms(each) for each in plans])]


def mode_of(schedule: str, asked: Mode | Literal["auto"] = "auto") -> Mode:
    """Return the requested mode of sending gradients, or that of a schedule by name."""
    if asked != "auto":
        return asked
    return "adaptive" if schedule == BEST else preset(schedule).gradients
