# SPDX-License-Identifier: Apache-2.0
"""Finds what the autotuner measures: the layers of an engine as they were called, each kind of equal layers once.

:func:`~ds_fsmoe.tuning.measure.measure` calls it once, ahead of all timing. The all-to-alls that may be chosen
come from the runtime; measuring only reads them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from ds_fsmoe.checks.first_forwards import FirstCall
from ds_fsmoe.distributed.agreement import check_agreement
from ds_fsmoe.distributed.fail_together import raise_on_all_ranks
from ds_fsmoe.distributed.topology import world_size_now
from ds_fsmoe.distributed.waits import waiting
from ds_fsmoe.execution.collectives import Collectives
from ds_fsmoe.execution.node_links import NodeLinks
from ds_fsmoe.execution.pipeline import LayerPipeline
from ds_fsmoe.layer.stock_layer import FSMoELayer
from ds_fsmoe.measuring.profiler import ProfiledLayer
from ds_fsmoe.planning.call_shape import CallShape
from ds_fsmoe.planning.groups import Fanout, counted_fanout, expected_fanout
from ds_fsmoe.planning.job.measured import ALL_GATHER, IN_NODES, REDUCE_SCATTER
from ds_fsmoe.planning.schedule import Lane
from ds_fsmoe.planning.workload import UNPADDED, AllToAll

if TYPE_CHECKING:
    from ds_fsmoe.layer.runtime import LayerRuntime


@dataclass(frozen=True)
class AllToAllOption:
    """Holds an all-to-all that may be chosen for a layer."""

    subject: ProfiledLayer
    """The layer with this all-to-all."""
    planned: AllToAll
    """The planner's name for it."""
    fanout: Fanout | None = None
    """The fan-out of a token for each of its choices, as in the first forward; only with node-deduplicated dispatch."""
    is_unpadded: bool = False
    """Whether it sends rows, in a layer whose dispatch is padded by its config."""


MIN_EMPTY = 0.05
"""The least share of empty slots for which unpadded dispatch is compared with padded: it has to gain more than a plan's
:data:`~ds_fsmoe.planning.decide.plan_requests.MIN_GAIN`, and numbers of rows are exchanged with it."""


@dataclass
class LayerKind:
    """Describes layers that are equal and have been called alike."""

    labels: list[str]
    layer: FSMoELayer
    """One of the layers."""
    subject: ProfiledLayer
    num_tokens: int
    """S, on this rank."""
    options: dict[str, AllToAllOption] = field(default_factory=dict)
    """The all-to-alls that may be chosen, the one that is run first."""
    choices: list[torch.Tensor] = field(default_factory=list)
    """The places of the choices of each layer, see :attr:`FirstCall.expert_KS`."""
    may_be_unpadded: bool = False
    """Whether dispatch is padded by the config, and may be unpadded."""
    rows: int | None = None
    """The mean number of rows that an expert gets from a rank, on the fullest rank; ``None``: dispatch stays as it
    is."""

    @property
    def pipeline(self) -> LayerPipeline:
        """Return the pipeline of ``layer``."""
        assert self.layer.pipeline is not None
        return self.layer.pipeline

    @property
    def sizes(self) -> CallShape:
        """Return the sizes for the planner. Experts are one product of all weights: they were measured as a whole."""
        at, subject = self.subject.sizes, self.subject
        sizes = subject.num_experts, at.capacity, at.width, at.dtype.itemsize, 1, subject.num_weights
        fanout = next((each.fanout for each in self.options.values() if each.fanout is not None), None)
        return CallShape(*sizes, num_tokens=at.num_tokens, crossings=fanout, wires=at.comm_byte_shares)

    def sizes_with(self, name: str) -> CallShape:
        """Return the sizes for the planner with one of :attr:`options`."""
        if not self.options[name].is_unpadded:
            return self.sizes
        assert self.rows is not None
        return replace(self.sizes, capacity=self.rows, num_tokens=self.num_tokens)

    def empty_share(self, name: str) -> float:
        """Return the share of slots that were empty, if they are not sent with one of :attr:`options`; else 0."""
        is_unpadded = self.options[name].is_unpadded and self.rows is not None
        return 1.0 - self.rows / self.subject.sizes.capacity if is_unpadded else 0.0

    def count_rows(self, group: dist.ProcessGroup | None) -> None:
        """Fill in :attr:`rows` where the dispatch of these layers may be unpadded and enough slots were empty.
        Collective over the group.

        Args:
            group: the ranks that have these layers; ``None``: all.
        """
        if not self.may_be_unpadded or not self.choices:
            return
        num_local, ep_group = self.subject.num_local_experts, self.subject.collectives.ep_group
        counts_E = torch.zeros(self.subject.num_experts + 1, dtype=torch.int64, device=self.choices[0].device)
        for expert_KS in self.choices:
            counts_E += torch.bincount(expert_KS.flatten().clamp(0, len(counts_E) - 1), minlength=len(counts_E))
        first = 0
        with waiting("the rows of experts"):
            if ep_group is not None:
                dist.all_reduce(counts_E, group=ep_group)
                first = dist.get_rank(ep_group) * num_local
            num_rows = counts_E[first : first + num_local].sum()
            if world_size_now() > 1:
                dist.all_reduce(num_rows, dist.ReduceOp.MAX, group=group)
        calls = len(self.choices) * self.subject.num_experts
        rows = max(1, math.ceil(num_rows.item() / calls))
        self.rows = rows if rows <= (1 - MIN_EMPTY) * self.subject.sizes.capacity else None

    def _option(
        self, name: str, exchange: Collectives, group: dist.ProcessGroup | None, is_unpadded: bool = False
    ) -> AllToAllOption:
        nodes = exchange.nodes
        collectives = replace(self.subject.collectives, exchange=exchange.exchange, legs=exchange.legs, nodes=nodes)
        subject = replace(self.subject, collectives=collectives, alltoall=name)
        fanout = None if nodes is None else self._fanout(nodes, group)
        return AllToAllOption(subject, exchange.planned, fanout, is_unpadded)

    def _fanout(self, nodes: NodeLinks, group: dist.ProcessGroup | None) -> Fanout:
        """Count the fan-out of the tokens of these layers, for each of their choices. Collective over the group."""
        device = next(self.layer.parameters()).device
        counted = torch.zeros(3, dtype=torch.float64, device=device)
        for expert_KS in self.choices:
            counted += torch.tensor(_places_of(expert_KS, self.subject, nodes), dtype=torch.float64, device=device)
        with waiting("the fan-out of tokens"):
            if world_size_now() > 1:
                dist.all_reduce(counted, group=group)
            in_nodes, on_ranks, num_choices = counted.tolist()
        if num_choices:
            return Fanout(in_nodes / num_choices, on_ranks / num_choices)
        # No rank had a token: as with balanced routing.
        num_experts = self.subject.num_experts
        k = max(1, min(self.subject.sizes.num_choices, num_experts))
        found = expected_fanout(num_experts, k, nodes.num_nodes, nodes.per_node)
        return Fanout(found.nodes / k, found.ranks / k)

    def lane_of(self, name: str) -> Lane:
        """Return the lane of a collective."""
        if name == IN_NODES:
            return Lane.INTRA
        group = "esp" if name in (ALL_GATHER, REDUCE_SCATTER) else "ep"
        return self.pipeline.forward.groups.placements[group].lanes[0]

    def find_options(
        self, candidates: Mapping[str, Collectives], default: str, group: dist.ProcessGroup | None
    ) -> None:
        """Fill in :attr:`options`. Collective over the ranks that have these layers.

        Args:
            candidates: the all-to-alls among which one is chosen, by name; empty where there is no choice.
            default: the name of the layer's own all-to-all, the only option where there is no choice.
            group: the ranks that have these layers; ``None``: all.
        """
        possible = {name: each for name, each in candidates.items() if not each.why_flat}
        is_in_slots = self.layer.fsmoe.is_in_slots
        usable = {name: each for name, each in possible.items() if each.nodes is None or not is_in_slots}
        to_compare = usable or {default: self.subject.collectives}
        if self.rows is None:
            self.options = {name: self._option(name, each, group) for name, each in to_compare.items()}
            return
        # What is sent in rows is less with each all-to-all, so slots are compared in the way that they are sent now.
        first = next(iter(to_compare))
        self.options = {first: self._option(first, to_compare[first], group)}
        for name, each in (possible or {default: self.layer.fsmoe.exchange_of(default)}).items():
            if each.exchange_rows is not None or each.ep_group is None:
                self.options[UNPADDED + name] = self._option(name, each, group, is_unpadded=True)


@dataclass(frozen=True)
class LayersToMeasure:
    """Holds what the autotuner measures, and what it knows of it before."""

    kinds: list[LayerKind]
    """All kinds of layers, the same on every rank that has them and in the same order."""
    largest: list[LayerKind]
    """The kinds that are measured: what is known of a large capacity holds for smaller ones."""


def find_layers_to_measure(
    layers: Mapping[str, FSMoELayer], running: LayerRuntime, group: dist.ProcessGroup | None
) -> LayersToMeasure:
    """Find the kinds of layers and make the all-to-alls that may be chosen for them. Collective over all ranks.

    Args:
        layers: the engine's layers, by label; those that were called are measured.
        running: the runtime of the engine.
        group: the ranks that have these layers; ``None``: all.

    Raises:
        MeasuringError: on every rank, if one has failed.
        DisagreementError: on every rank, if they have called different layers.
    """
    calls = running.first_forwards.calls
    called = {label: layer for label, layer in layers.items() if label in calls}
    candidates = running.alltoalls_to_compare()
    default = running.plan.alltoall
    # A stage that fails must not leave the others waiting in a collective of all stages.
    with nullcontext() if group is None else raise_on_all_ranks(None, "finding the layers of a stage"):
        kinds = _find_kinds(called, calls, group)
        for kind in kinds:
            kind.count_rows(group)
        largest = {kind.subject.kind: kind for kind in sorted(kinds, key=lambda each: each.subject.sizes.capacity)}
        for kind in largest.values():
            sizes = kind.layer.ep_size, kind.layer.fsmoe.tensor_parallel
            kind.find_options(candidates.get(sizes, {}), default, group)
    for kind in kinds:
        # Smaller layers of a kind are run as the largest was measured.
        options = largest[kind.subject.kind].options
        has_rows = kind.rows is not None
        kind.options = {name: each for name, each in options.items() if has_rows or not each.is_unpadded}
        # The choices of a whole batch are of no use any more.
        kind.choices.clear()
    return LayersToMeasure(kinds, list(largest.values()))


def _find_kinds(
    layers: Mapping[str, FSMoELayer], calls: Mapping[str, FirstCall], group: dist.ProcessGroup | None
) -> list[LayerKind]:
    """Return the kinds of layers, the same on every rank and in the same order. Collective.

    Args:
        layers: the layers that were called, by label.
        calls: how they were called.
        group: the ranks that have these layers; ``None``: all.

    Raises:
        DisagreementError: on every rank, if they have called different layers.
    """
    subjects = {label: _subject(label, layer, calls[label]) for label, layer in layers.items()}
    stated = {f"experts of {label}": subject.kind for label, subject in subjects.items()}
    check_agreement(stated, group, "the layers to be measured")
    if not subjects:
        return []
    # Where nothing is dropped, blocks of ranks have capacities of their own.
    device = next(next(iter(layers.values())).parameters()).device
    capacities = torch.tensor([each.sizes.capacity for each in subjects.values()], device=device)
    if world_size_now() > 1:
        with waiting("the capacities of layers"):
            dist.all_reduce(capacities, dist.ReduceOp.MAX, group=group)
    found: dict[tuple[str, int, bool], LayerKind] = {}
    for (label, subject), capacity in zip(subjects.items(), capacities.tolist(), strict=True):
        subject = replace(subject, sizes=replace(subject.sizes, capacity=capacity))
        may_be_unpadded = layers[label].fsmoe.may_be_unpadded(layers[label].gate)
        key = subject.kind, subject.measured_capacity, may_be_unpadded
        own = layers[label], subject, calls[label].num_tokens
        kind = found.setdefault(key, LayerKind([], *own, may_be_unpadded=may_be_unpadded))
        kind.labels.append(label)
        expert_KS, placed = calls[label].expert_KS, layers[label].fsmoe.placed
        if expert_KS is not None:
            kind.choices.append(expert_KS if placed is None else placed.place_of(expert_KS))
        if capacity > kind.subject.sizes.capacity:
            kind.subject = subject
    return list(found.values())


def _subject(label: str, layer: FSMoELayer, call: FirstCall) -> ProfiledLayer:
    pipeline = layer.pipeline
    assert pipeline is not None
    is_written = all(form is not None for form in call.forms)
    modules = [type(each).__name__ for each in getattr(call.experts, "experts", ())]
    shapes = ["x".join(map(str, each)) for each in call.experts.shapes]
    places = _places(pipeline)
    kind = (
        f"experts {'/'.join(modules)} of {' '.join(shapes)}, written out {is_written}, width {call.sizes.width}, "
        f"{call.sizes.dtype}, recompute {pipeline.recompute}, {places['ep']}, {places['esp']}"
        f"{', in one chunk' if layer.fsmoe.is_unchunked else ''}"
    )
    return ProfiledLayer(
        label,
        kind,
        pipeline.collectives,
        call.experts,
        call.experts.num_experts,
        max(1, sum(math.prod(each) for each in call.experts.shapes if len(each) > 1)),
        is_written,
        pipeline.recompute,
        call.sizes,
        call.autocast.restored,
        places,
    )


def _places_of(expert_KS: torch.Tensor, subject: ProfiledLayer, nodes: NodeLinks) -> tuple[float, float, int]:
    """Return in how many nodes and on how many ranks tokens of this rank had experts, and how many choices they had."""
    per_rank, num_experts = subject.num_local_experts, subject.num_experts
    # Experts are numbered rank by rank; node by node they may lie in another order.
    place_of_rank = np.argsort(np.array(nodes.ranks).reshape(-1))
    expert_SK = expert_KS.t().cpu().numpy()
    is_sent = expert_SK < num_experts
    by_node = place_of_rank[np.where(is_sent, expert_SK, 0) // per_rank] * per_rank
    found = counted_fanout(np.where(is_sent, by_node, num_experts), num_experts, nodes.num_nodes, nodes.per_node)
    return found.nodes * len(expert_SK), found.ranks * len(expert_SK), int(is_sent.sum())


def _places(pipeline: LayerPipeline) -> dict[str, str]:
    placements, collectives = pipeline.forward.groups.placements, type(pipeline.collectives).__name__
    texts = {}
    for kind in ("ep", "esp"):
        at = placements[kind]
        texts[kind] = f"{kind} {at.size} ({at.per_node} in a node) on {'+'.join(at.lanes) or 'no link'}, {collectives}"
    return texts
