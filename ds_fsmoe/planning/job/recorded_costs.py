# SPDX-License-Identifier: Apache-2.0
"""A job as its run's folder records it: what its layers are, and what their tasks were measured to cost.

From it everything is planned again as it was planned there, without the machine: see
:class:`~ds_fsmoe.planning.job.what_if.WhatIf`. A run that was not tuned records what its layers are, and no costs:
those are fitted to its trace (:mod:`~ds_fsmoe.offline.plan.traced_costs`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from ds_fsmoe.planning.block import Links
from ds_fsmoe.planning.call_shape import CallShape, layer_of_call
from ds_fsmoe.planning.cost import Cost, LinearCost, SwitchedCost
from ds_fsmoe.planning.decide.gradients import Mode
from ds_fsmoe.planning.decide.plan import Settings
from ds_fsmoe.planning.groups import Groups, Placement
from ds_fsmoe.planning.job.measured import LayerProfile, Slowdowns
from ds_fsmoe.planning.layer_costs import LayerCosts
from ds_fsmoe.planning.phase_plan import gradient_lanes
from ds_fsmoe.planning.schedule import GRADIENT_TASKS, Lane
from ds_fsmoe.planning.timeline import IDEAL, Contention
from ds_fsmoe.planning.workload import AllToAll, Gradient, Layer


@dataclass(frozen=True)
class RecordedGroups(Groups):
    """Process groups with the placement that they had: where nodes are not equally large, sizes do not tell it."""

    placed: tuple[tuple[str, Placement], ...] = ()

    @cached_property
    def placements(self) -> dict[str, Placement]:
        return dict(self.placed)


@dataclass(frozen=True)
class RecordedWay:
    """One all-to-all of a kind of layers, and what its tasks cost with it."""

    planned: AllToAll
    """The planner's name for it."""
    profile: LayerProfile | None = None
    """What was measured; ``None``: nothing."""
    fitted: LayerCosts | None = None
    """What was fitted to a trace instead."""


@dataclass(frozen=True)
class RecordedKind:
    """Layers that are equal and were called alike."""

    labels: tuple[str, ...]
    groups: Groups
    shape: CallShape
    """The sizes of a call, experts as one product of all their weights."""
    ways: Mapping[str, RecordedWay]
    """Name of an all-to-all -> what it costs; the one that was run at first comes first."""
    is_uncut: bool = False
    """Whether the layers may not be cut."""
    num_choices: int | None = None
    """The experts of a token, k; ``None``: not known."""


@dataclass(frozen=True)
class RecordedJob:
    """A job: its layers, and what its planner knew of the machine and the options."""

    kinds: tuple[RecordedKind, ...]
    labels: tuple[str, ...]
    """The labels of the layers in the order of the forward."""
    schedule: str
    """The schedule by name."""
    mode: Mode
    """When gradients were sent."""
    links: Links
    """The order of traffic within a layer whose degrees are given."""
    rest_ms: tuple[float, float] | None = None
    """The time of all but the experts' parts, forward and backward, without gradients; ``None``: not measured."""
    gradients_bytes: Mapping[str, int] = field(default_factory=dict)
    """Kind of gradient -> the bytes that we reduce; nothing where DeepSpeed does."""
    tensors_bytes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Kind of gradient -> the bytes of its tensors."""
    slowed: Slowdowns = field(default_factory=lambda: Slowdowns({}))
    is_serial: bool = False
    issues_ahead: bool = False
    shared_link: bool = False
    max_degree: int = 16
    gradient_solver: str = "dp"
    chunk_bytes: int | None = None
    micro_batches: int = 1
    """The forwards and backwards of an optimizer step."""
    gradient_factor: float = 1.0
    """What gradients take by the way that was chosen for them in training, over what was measured. Where DeepSpeed
    reduces them, by the one way that it has, they take no less than was measured."""
    _costs: dict[tuple[int, str], LayerCosts] = field(default_factory=dict, compare=False, repr=False)

    @property
    def is_measured(self) -> bool:
        """Whether the costs of tasks were measured, and not only what the layers are."""
        return bool(self.kinds) and all(way.profile is not None for kind in self.kinds for way in kind.ways.values())

    @property
    def contention(self) -> Contention:
        """Return how lanes slow each other down."""
        return self.slowed.contention()

    @property
    def settings(self) -> Settings:
        """Return the planner's settings, as the autotuner makes them."""
        return Settings(
            self.contention,
            max_degree=self.max_degree,
            gradient_solver=self.gradient_solver,
            chunk_bytes=self.chunk_bytes,
            is_serial=self.is_serial,
            shared_link=self.shared_link,
        )

    @property
    def uncut(self) -> list[bool]:
        """Return for each layer, in the order of the forward, whether it may not be cut."""
        return [self.kind_of(label).is_uncut for label in self.labels]

    def kind_of(self, label: str) -> RecordedKind:
        """Return the kind of a layer."""
        return next(kind for kind in self.kinds if label in kind.labels)

    def costs_of(self, kind: RecordedKind, name: str) -> LayerCosts:
        """Return what tasks cost with an all-to-all; always the same object.

        Raises:
            ValueError: neither measured nor fitted.
        """
        key = self.kinds.index(kind), name
        if key not in self._costs:
            way = kind.ways[name]
            found = way.fitted if way.profile is None else way.profile.costs(self.issues_ahead)
            if found is None:
                raise ValueError(f"{', '.join(kind.labels)}: nothing tells what tasks of these layers cost")
            self._costs[key] = found
        return self._costs[key]

    def options(self, mode: Mode, rest_ms: tuple[float, float]) -> list[dict[str, Layer]]:
        """Return the model as the planner sees it: layer by layer, name of an all-to-all -> the layer with it.

        Args:
            mode: when gradients are sent: micro-ops keep to tensors.
            rest_ms: the time of all but the experts' parts, forward and backward: each layer is followed by its share.
        """
        count = max(1, len(self.labels))
        shares_ms = rest_ms[0] / count, rest_ms[1] / count
        found: dict[int, dict[str, Layer]] = {}
        for number, kind in enumerate(self.kinds):
            gradients = self._gradients(kind.groups, count, keeps_tensors=mode == "micro_ops")
            found[number] = {
                name: layer_of_call(
                    kind.groups, kind.shape, self._sending(kind, name, mode), way.planned, shares_ms, gradients
                )
                for name, way in kind.ways.items()
            }
        return [found[self.kinds.index(self.kind_of(label))] for label in self.labels]

    def _sending(self, kind: RecordedKind, name: str, mode: Mode) -> LayerCosts:
        """Return what tasks cost where gradients are sent so."""
        costs = self.costs_of(kind, name)
        # DeepSpeed has one way; ours is the faster one of two.
        factor = max(1.0, self.gradient_factor) if mode == "off" else self.gradient_factor
        if factor == 1.0:
            return costs

        def slower(own: Mapping[str, Cost]) -> dict[str, Cost]:
            factors = dict.fromkeys(GRADIENT_TASKS, self.gradient_factor)
            return {each: cost_times(cost, factors.get(each, 1.0)) for each, cost in own.items()}

        rechunked = None if costs.rechunked is None else slower(costs.rechunked)
        return replace(costs, backward=slower(costs.backward), rechunked=rechunked)

    def _gradients(self, groups: Groups, count: int, keeps_tensors: bool) -> tuple[Gradient, ...]:
        """Return the gradients that each of so many layers leaves: its share of all."""
        return tuple(
            Gradient(
                kind,
                lanes,
                self.gradients_bytes[kind] // count,
                _middle_share(self.tensors_bytes.get(kind, ()), count) if keeps_tensors else (),
            )
            for kind, lanes in gradient_lanes(groups).items()
            if self.gradients_bytes.get(kind, 0) >= count and lanes
        )

    def with_fitted(self, fitted: Mapping[str, LayerCosts], contention: Contention = IDEAL) -> RecordedJob:
        """Return the same job with costs that were fitted to a trace.

        Args:
            fitted: label of a layer -> the costs of its tasks.
            contention: how lanes slow each other down.
        """
        kinds = tuple(
            replace(kind, ways={name: replace(way, fitted=fitted[kind.labels[0]]) for name, way in kind.ways.items()})
            for kind in self.kinds
        )
        compute, *links = Lane
        factors = {(compute, each): 1 + contention.compute for each in links}
        factors |= {(each, compute): 1 + contention.traffic for each in links}
        factors |= {(links[0], links[1]): 1 + contention.links, (links[1], links[0]): 1 + contention.links}
        return replace(self, kinds=kinds, slowed=Slowdowns(factors), _costs={})


def cost_times(cost: Cost, factor: float) -> Cost:
    """Return a cost so many times as large, at every size."""
    if isinstance(cost, SwitchedCost):
        below, above = (LinearCost(each.alpha_ms * factor, each.beta_ms * factor) for each in (cost.below, cost.above))
        return SwitchedCost(below, above, cost.switch_size)
    return LinearCost(cost.alpha_ms * factor, cost.beta_ms * factor)


def _middle_share(tensors_bytes: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return the bytes of the tensors in the middle one of so many equal parts."""
    share = sum(tensors_bytes) // count
    first, last, start, found = count // 2 * share, (count // 2 + 1) * share, 0, []
    for size in tensors_bytes:
        found.append(min(start + size, last) - max(start, first))
        start += size
    return tuple(each for each in found if each > 0)
