# SPDX-License-Identifier: Apache-2.0
"""Holds measurements as data: operations, the inputs of a layer's task costs, and the contention of lanes. The
profiler makes them, and recorded jobs keep them.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ds_fsmoe.planning.cost import Cost, Fit, LayerCosts, LinearCost, fit, fit_switched
from ds_fsmoe.planning.schedule import (
    A2A_IN,
    A2A_IN_NODE,
    A2A_OUT,
    A2A_OUT_NODE,
    COLLECT,
    DEQUANTISING,
    EXPERT,
    EXPERT_GRAD,
    GATHER,
    GRAD,
    GRAD_GATHER,
    GRAD_SCATTER,
    GRADIENT_TASKS,
    HOLD,
    QUANTISING,
    REDUCE,
    REST,
    SPREAD,
    Lane,
)
from ds_fsmoe.planning.timeline import Contention

ALL_TO_ALL, ALL_GATHER, REDUCE_SCATTER = "all-to-all", "all-gather", "reduce-scatter"
IN_NODES, BETWEEN_NODES = "all-to-all inside nodes", "all-to-all between nodes"
"""The two parts of an all-to-all in two tasks, or the two levels where each token crosses to a node once."""
LINKS = (ALL_TO_ALL, IN_NODES, BETWEEN_NODES, ALL_GATHER, REDUCE_SCATTER)
FORWARD, BACKWARD = "experts forward", "experts backward"
BACKWARD_ANEW = "experts backward, cut anew"
GRADIENTS, EXPERT_GRADIENTS = "all-reduce of gradients", "all-reduce of experts' gradients"
SCATTERED, GATHERED = "gradients added up inside nodes", "gradients gathered inside nodes"
QUANTISED, DEQUANTISED = "rows made 8-bit", "rows made wide"
GATE, ORDER = "gate", "order and back"


@dataclass(frozen=True)
class Timing:
    """Holds the measurements of one operation."""

    unit: str
    """The unit of the sizes."""
    sizes: tuple[float, ...]
    times_ms: tuple[float, ...]
    """The medians, one per size."""
    issued_ms: tuple[float, ...] = ()
    """The host time to issue it, one per size; empty if the thread that issues it also does it."""
    least_ms: tuple[float, ...] = ()
    """The fastest of the repetitions, one per size; empty: not kept."""
    share: float = 1.0
    """The share of the fitted times that it is said to take."""

    @property
    def issue_ms(self) -> float:
        """Return the host ms to issue a task of any size: it hardly depends on the number of rows."""
        return statistics.median(self.issued_ms) if self.issued_ms else 0.0

    @cached_property
    def fit(self) -> Fit:
        """Return a line fitted to the measurements."""
        return fit(self.sizes, self.times_ms)

    @cached_property
    def best_fit(self) -> Fit:
        """Return the best fit: two lines for messages if one line is not good enough."""
        return fit_switched(self.sizes, self.times_ms) if self.unit == "byte" else self.fit

    @property
    def cost(self) -> Cost:
        """Return the cost with the best fit."""
        return self.best_fit.cost.times(self.share)

    @property
    def line(self) -> Cost:
        """Return the cost as one line."""
        return self.fit.cost.times(self.share)

    def at_its_fastest(self) -> Timing:
        """Return the operation with its fastest times, never above those at any size: for bounds."""
        if not self.least_ms:
            return self
        share = 1.0
        for line in (self.best_fit.cost, self.fit.cost):
            for size, least in zip(self.sizes, self.least_ms, strict=True):
                share = min(share, least / max(line.ms(size), 1e-12))
        return replace(self, share=share, least_ms=())


@dataclass(frozen=True)
class LayerProfile:
    """Holds the measured operations of one kind of layer."""

    operations: Mapping[str, Timing]
    """The operations by the names above. Collectives cost per byte that an all-to-all sends, an all-gather ends with, a
    reduce-scatter starts from; experts per floating-point operation of their products; gate and order per token."""
    task_ms: float
    """The host cost of a task beside its work: to hand it to a lane, and to wait for its dependencies."""
    uses_rng: bool
    """Whether the experts draw random numbers: then forward and backward must be cut alike."""

    @property
    def relative_residual(self) -> float:
        """Return the typical deviation of the planned operations from their fitted lines. It is a share of their
        total time at the whole capacity; the deviations count as independent.
        """
        planned = [each for name, each in self.operations.items() if name in (*LINKS, FORWARD, BACKWARD)]
        total_ms = sum(each.times_ms[-1] for each in planned)
        off_ms = math.hypot(*(each.best_fit.typical_share * each.times_ms[-1] for each in planned))
        return off_ms / total_ms if total_ms else 0.0

    def costs(self, issues_ahead: bool = False) -> LayerCosts:
        """Return the costs of the layer's tasks, for the planner.

        Args:
            issues_ahead: whether one thread issues the tasks of all lanes ahead, as for a GPU. Then issue
                times add up over lanes; otherwise each lane runs and issues its own tasks.
        """
        least = None
        if any(each.least_ms for each in self.operations.values()):
            fastest = {name: each.at_its_fastest() for name, each in self.operations.items()}
            least = replace(self, operations=fastest).costs(issues_ahead)
        forward, backward, rechunked = (self._costs(*each, issues_ahead) for each in _PHASES)
        hosts = [self._issue_ms(*each) if issues_ahead else 0.0 for each in _PHASES]
        return LayerCosts(
            forward,
            backward,
            rechunked if BACKWARD_ANEW in self.operations else None,
            *hosts,
            is_per_launch=False,
            uses_rng=self.uses_rng,
            relative_residual=self.relative_residual,
            least=least,
        )

    def _costs(self, backward: bool, same_chunks: bool, issues_ahead: bool) -> dict[str, Cost]:
        at, names = self.operations, self._names(backward, same_chunks)
        found: dict[str, Cost] = {kind: at[name].cost for kind, name in names.items() if name in at}
        task_ms = 0.0 if issues_ahead else self.task_ms
        # The formula for slices of gradients needs a single line.
        found |= {kind: at[names[kind]].line for kind in GRADIENT_TASKS if kind in found}
        # Where conversions were not measured, they are in the times of links, as they were before they were tasks.
        nothing = dict.fromkeys((HOLD, *QUANTISING, *DEQUANTISING), LinearCost(0.0, 0.0))
        return {**nothing, REST: LinearCost(0.0, 1.0)} | {kind: cost.plus(task_ms) for kind, cost in found.items()}

    def _issue_ms(self, backward: bool, same_chunks: bool) -> dict[str, float]:
        """Return kind of task -> the ms of the issuing thread, with sending the task to its lane."""
        at = self.operations
        names = {kind: name for kind, name in self._names(backward, same_chunks).items() if name in at}
        found = {kind: at[name].issue_ms for kind, name in names.items()}
        return {kind: self.task_ms + each_ms for kind, each_ms in found.items()}

    def _names(self, backward: bool, same_chunks: bool) -> dict[str, str]:
        """Return kind of task -> the name of the measured operation for it."""
        at = self.operations
        anew = BACKWARD_ANEW if BACKWARD_ANEW in at and not same_chunks else BACKWARD
        between = BETWEEN_NODES if BETWEEN_NODES in at else ALL_TO_ALL
        names = {A2A_IN: between, A2A_OUT: between, A2A_IN_NODE: IN_NODES, A2A_OUT_NODE: IN_NODES}
        names |= {GATHER: ALL_GATHER, REDUCE: REDUCE_SCATTER, SPREAD: IN_NODES, COLLECT: IN_NODES}
        names |= dict.fromkeys(QUANTISING, QUANTISED) | dict.fromkeys(DEQUANTISING, DEQUANTISED)
        names[EXPERT] = anew if backward else FORWARD
        if backward:
            names |= {GRAD: GRADIENTS, EXPERT_GRAD: EXPERT_GRADIENTS, GRAD_SCATTER: SCATTERED, GRAD_GATHER: GATHERED}
        return names


_PHASES = ((False, True), (True, True), (True, False))
"""The cases that are priced: (backward, same chunks)."""


@dataclass(frozen=True)
class Slowdowns:
    """Holds the measured slowdown of lanes by each other."""

    factors: Mapping[tuple[Lane, Lane], float]
    """(slowed, by) -> the factor on a task's time while the other lane is busy; at least 1."""

    def contention(self) -> Contention:
        """Return the contention for the planner: one number for each kind of pair, the mean over its pairs."""

        def more(pairs: Sequence[tuple[Lane, Lane]]) -> float:
            found = [self.factors[pair] - 1.0 for pair in pairs if pair in self.factors]
            return sum(found) / len(found) if found else 0.0

        inter, intra, compute = Lane.INTER, Lane.INTRA, Lane.COMPUTE
        return Contention(
            links=more([(inter, intra), (intra, inter)]),
            compute=more([(compute, inter), (compute, intra)]),
            traffic=more([(inter, compute), (intra, compute)]),
        )

    def overlap_gains(self) -> dict[tuple[Lane, Lane], float]:
        """Return pair of lanes -> the work of both at once, in units of one lane alone: 2 is ideal, 1 no gain."""
        pairs = itertools.combinations(Lane, 2)
        return {(a, b): 1 / self.factors[a, b] + 1 / self.factors[b, a] for a, b in pairs if (a, b) in self.factors}
