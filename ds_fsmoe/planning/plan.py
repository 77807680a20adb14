# SPDX-License-Identifier: Apache-2.0
"""A whole model planned: a degree and an order for every layer and phase, and a window for every gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ds_fsmoe.planning.block import BlockPlan, Slice, model_schedule
from ds_fsmoe.planning.block_times import BlockTimes, Order
from ds_fsmoe.planning.choose import Choice, choose, choose_as_the_paper
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.degree import smallest_of_best
from ds_fsmoe.planning.gradients import CHUNK_BYTES, Partition, Piece, Window, check_solver, partition
from ds_fsmoe.planning.presets import Switches
from ds_fsmoe.planning.schedule import EXPERT_GRAD, Lane, Schedule
from ds_fsmoe.planning.timeline import IDEAL, Contention, Timeline, simulate
from ds_fsmoe.planning.workload import BlockWork, Gradient, Layer

SOLVERS = {"exact": choose, "slsqp": choose_as_the_paper}
MAX_DEGREE = 256
_CURVE_POINTS = 17
_Price = Callable[[np.ndarray], np.ndarray]
"""Time of gradients in a window -> how much longer the layer gets."""


@dataclass(frozen=True)
class Settings:
    """How to plan.

    Raises:
        ValueError: a degree out of range, a cost of the host that is none, a chunk of nothing, an unknown solver.
    """

    contention: Contention = IDEAL
    """How lanes slow each other down, as the plan assumes."""
    host_ms: float = 0.0
    """What a launch costs the host."""
    max_degree: int = 16
    solver: str = "exact"
    gradient_solver: str = "dp"
    chunk_bytes: int = CHUNK_BYTES
    seed: int = 0

    def __post_init__(self) -> None:
        is_whole = isinstance(self.max_degree, int) and not isinstance(self.max_degree, bool)
        if not is_whole or not 1 <= self.max_degree <= MAX_DEGREE:
            raise ValueError(f"pipeline_degree.max = {self.max_degree}: must be a whole number from 1 to {MAX_DEGREE}")
        check_solver(self.gradient_solver, self.chunk_bytes)
        if not (math.isfinite(self.host_ms) and self.host_ms >= 0):
            raise ValueError(f"host_ms = {self.host_ms}: must be a finite number of at least 0")
        if self.solver not in SOLVERS:
            raise ValueError(f"solver = {self.solver!r}: the choices are {', '.join(SOLVERS)}")


@dataclass(frozen=True)
class ModelPlan:
    """Everything that is decided about a training step."""

    layers: tuple[Layer, ...]
    """In the order of the forward; the tuples below are in the order of their phase."""
    forward: tuple[BlockPlan, ...]
    backward: tuple[BlockPlan, ...]
    tail: tuple[Slice, ...]
    """Gradients that travel when the backward is over."""
    forward_choices: tuple[Choice, ...]
    backward_choices: tuple[Choice, ...]
    endless: bool = False
    """Whether these layers are the middle of many."""

    def schedules(self) -> tuple[Schedule, Schedule]:
        """Of the forward and of the backward."""
        return (
            model_schedule(self.layers, self.forward, "forward"),
            model_schedule(self.layers[::-1], self.backward, "backward", self.tail, self.forward[::-1], self.endless),
        )

    def timelines(
        self, costs: Mapping[str, LinearCost], contention: Contention = IDEAL, host_ms: float = 0.0
    ) -> tuple[Timeline, Timeline]:
        """Both phases, played."""
        forward, backward = (simulate(each, costs, contention, host_ms) for each in self.schedules())
        return forward, backward

    def step_ms(self, costs: Mapping[str, LinearCost], contention: Contention = IDEAL, host_ms: float = 0.0) -> float:
        """Predicted time of a step's forward and backward."""
        return sum(each.makespan_ms for each in self.timelines(costs, contention, host_ms))


@dataclass
class Planner:
    """Plans layers on one cluster. Equal layers are planned once."""

    costs: Mapping[str, LinearCost]
    settings: Settings = field(default_factory=Settings)
    _times: dict[tuple[BlockWork, tuple[Lane, ...]], BlockTimes] = field(default_factory=dict)
    _choices: dict[tuple, Choice] = field(default_factory=dict)
    _pairs: dict[tuple, tuple[tuple[Order, ...], tuple[Order, ...]]] = field(default_factory=dict)
    _curves: dict[tuple, tuple[_Price, _Price]] = field(default_factory=dict)

    def plan(
        self,
        layers: Sequence[Layer],
        switches: Switches,
        carried: Sequence[Gradient] = (),
        open_orders: Callable[[bool], tuple[Order, ...]] | None = None,
    ) -> ModelPlan:
        """Plan a step.

        Args:
            layers: in the order of the forward.
            switches: the system.
            carried: gradients that wait when the backward begins, as in the middle of a larger model.
            open_orders: whether backward -> the orders to choose from, where that is more than the switches say.
        """
        orders = {
            backward: open_orders(backward) if open_orders else switches.orders(self.settings.max_degree, backward)
            for backward in (False, True)
        }
        # Layers that are equal are planned once, and told apart by a number from here on.
        numbers: dict[Layer, int] = {}
        kinds = [numbers.setdefault(layer, len(numbers)) for layer in layers]
        pairs = [(orders[False], orders[True])] * len(numbers)
        if switches.pipeline == "common" and open_orders is None:
            pairs = [self._common(layer, orders[False], orders[True]) for layer in numbers]
        forwards = [self._choose(layer.forward, pairs[kind][0]) for layer, kind in numbers.items()]
        split = self._partition(list(numbers), kinds[::-1], pairs, switches, carried)
        chosen: dict[tuple, Choice] = {}
        backward, plans = [], []
        for index, kind in enumerate(kinds[::-1]):
            moe, dense = split.slices[2 * index : 2 * index + 2]
            key = (kind, *(tuple((each.kind, each.size_bytes) for each in slices) for slices in (moe, dense)))
            if key not in chosen:
                chosen[key] = self._choose(layers[-1 - index].backward, pairs[kind][1], moe, dense)
            backward.append(chosen[key])
            plans.append(chosen[key].order.plan(moe, dense))
        forward = [forwards[kind] for kind in kinds]
        return ModelPlan(
            tuple(layers),
            tuple(choice.order.plan() for choice in forward),
            tuple(plans),
            split.tail,
            tuple(forward),
            tuple(backward),
            bool(carried),
        )

    def times(self, work: BlockWork, slices: Sequence[Slice | Gradient] = ()) -> BlockTimes:
        """Times of a layer in one phase."""
        lanes = slices[0].lanes if slices else (Lane.INTER,)
        key = (work, lanes)
        if key not in self._times:
            self._times[key] = BlockTimes(work, self.costs, self.settings.contention, self.settings.host_ms, lanes)
        return self._times[key]

    def _choose(
        self, work: BlockWork, orders: tuple[Order, ...], moe: tuple[Slice, ...] = (), dense: tuple[Slice, ...] = ()
    ) -> Choice:
        moe_ms, dense_ms = (
            sum(self.costs[each.kind].ms(each.size_bytes) for each in slices) for slices in (moe, dense)
        )
        key = (work, orders, moe_ms, dense_ms, *(each.lanes for each in (*moe, *dense)))
        if key not in self._choices:
            self._choices[key] = SOLVERS[self.settings.solver](
                self.times(work, (*moe, *dense)), orders, moe_ms, dense_ms
            )
        return self._choices[key]

    def _common(
        self, layer: Layer, forward: tuple[Order, ...], backward: tuple[Order, ...]
    ) -> tuple[tuple[Order, ...], tuple[Order, ...]]:
        """One degree for both phases: the one with the smallest sum. Gradients do not enter into it."""
        key = layer, forward, backward
        if key not in self._pairs:
            self._pairs[key] = self._common_uncached(*key)
        return self._pairs[key]

    def _common_uncached(
        self, layer: Layer, forward: tuple[Order, ...], backward: tuple[Order, ...]
    ) -> tuple[tuple[Order, ...], tuple[Order, ...]]:
        phases = []
        for orders, work in ((forward, layer.forward), (backward, layer.backward)):
            times_ms = self.times(work).times_ms(orders)[:, 0]
            best_ms: dict[int, tuple[float, Order]] = {}
            for order, time_ms in zip(orders, times_ms, strict=True):
                if order.degree not in best_ms or time_ms < best_ms[order.degree][0]:
                    best_ms[order.degree] = (time_ms, order)
            phases.append(best_ms)
        degrees = sorted(phases[0])
        degree = degrees[smallest_of_best([phases[0][each][0] + phases[1][each][0] for each in degrees])]
        return (phases[0][degree][1],), (phases[1][degree][1],)

    def _partition(
        self,
        kinds_of_layers: Sequence[Layer],
        kinds: Sequence[int],
        pairs: Sequence[tuple[tuple[Order, ...], tuple[Order, ...]]],
        switches: Switches,
        carried: Sequence[Gradient],
    ) -> Partition:
        def piece(gradient: Gradient, layer: int) -> Piece:
            return Piece(gradient.kind, gradient.lanes, gradient.size_bytes, self.costs[gradient.kind], layer)

        grads = [*carried, *(each for layer in kinds_of_layers for each in layer.gradients)]
        # What is sent at the end has no use for windows, and finding out what they cost takes time.
        prices: list[tuple[_Price, _Price]] = [(np.zeros_like, np.zeros_like)] * len(kinds_of_layers)
        if grads and switches.gradients != "exposed":
            prices = [
                self._windows(layer.backward, pair[1], grads)
                for layer, pair in zip(kinds_of_layers, pairs, strict=True)
            ]
        pieces = [piece(each, -1) for each in carried]
        windows = []
        for index, kind in enumerate(kinds):
            gradients = kinds_of_layers[kind].gradients
            windows.append(Window(index, "moe", len(pieces), prices[kind][0]))
            # The experts' gradients of a layer exist before the layer is through, the others only then.
            pieces += [piece(each, index) for each in gradients if each.kind == EXPERT_GRAD]
            windows.append(Window(index, "dense", len(pieces), prices[kind][1]))
            pieces += [piece(each, index) for each in gradients if each.kind != EXPERT_GRAD]
        return partition(
            pieces,
            windows,
            switches.gradients,
            solver=self.settings.gradient_solver,
            chunk_bytes=self.settings.chunk_bytes,
            seed=self.settings.seed,
        )

    def _windows(
        self, work: BlockWork, orders: tuple[Order, ...], gradients: Sequence[Gradient]
    ) -> tuple[_Price, _Price]:
        """For both windows of a layer, the degree re-chosen for every time of gradients."""
        lanes = gradients[0].lanes if gradients else (Lane.INTER,)
        key = (work, orders, lanes)
        if key in self._curves:
            return self._curves[key]
        times = self.times(work, gradients)
        alone_ms = times.times_ms(orders)[:, 0]
        first = smallest_of_best(alone_ms)
        base_ms = float(alone_ms[first])
        if all(times.has_closed_form(order) for order in orders):

            def moe(grad_ms: np.ndarray) -> np.ndarray:
                return times.times_ms(orders, grad_ms).min(axis=0) - base_ms

            def dense(grad_ms: np.ndarray) -> np.ndarray:
                return np.maximum(0.0, grad_ms - times.after_ms)

        else:
            grid_ms = np.linspace(0.0, 1.5 * base_ms, _CURVE_POINTS)
            few = _promising(orders, alone_ms, times.times_ms(orders, grid_ms[[_CURVE_POINTS // 3, -1]]))
            moe = _Curve(grid_ms, times.times_ms(few, grid_ms).min(axis=0) - base_ms)
            dense = _Curve(grid_ms, times.times_ms([orders[first]], 0.0, grid_ms)[0] - base_ms)
        self._curves[key] = moe, dense
        return moe, dense


def _promising(orders: Sequence[Order], *times_ms: np.ndarray) -> list[Order]:
    """Of many orders, those that matter for a curve: with few gradients, more, and many, the best of each degree, and
    of these the best eight."""
    if len(orders) <= 24:
        return list(orders)
    kept: set[int] = set()
    for column_ms in np.column_stack([each.reshape(len(orders), -1) for each in times_ms]).T:
        of_degree: dict[int, int] = {}
        for index in np.argsort(column_ms, kind="stable"):
            of_degree.setdefault(orders[index].degree, int(index))
        kept.update(list(of_degree.values())[:8])
    return [orders[index] for index in sorted(kept)]


@dataclass(frozen=True)
class _Curve:
    """A function by its points: straight between them, and one to one behind the last."""

    at_ms: np.ndarray
    extra_ms: np.ndarray

    def __call__(self, grad_ms: np.ndarray) -> np.ndarray:
        beyond_ms = np.maximum(0.0, grad_ms - self.at_ms[-1])
        return np.interp(grad_ms, self.at_ms, np.maximum.accumulate(np.maximum(self.extra_ms, 0.0))) + beyond_ms
