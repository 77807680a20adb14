# SPDX-License-Identifier: Apache-2.0
"""Finds what the autotuner measures: the layers of an engine as they were called, each kind of equal layers once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ds_fsmoe import registry
from ds_fsmoe.checks.first_forwards import FirstCall
from ds_fsmoe.distributed.agreement import check_agreement
from ds_fsmoe.distributed.topology import world_size_now
from ds_fsmoe.execution.pipeline import Pipeline
from ds_fsmoe.layer.alltoall_tasks import exchange_in
from ds_fsmoe.layer.stock_layer import FSMoELayer
from ds_fsmoe.measuring.profiler import Subject
from ds_fsmoe.planning.call_shape import CallShape
from ds_fsmoe.planning.crossings import Crossings, crosses_once, expected_crossings
from ds_fsmoe.planning.measured import ALL_GATHER, IN_NODES, REDUCE_SCATTER
from ds_fsmoe.planning.schedule import Lane
from ds_fsmoe.planning.workload import AllToAll

if TYPE_CHECKING:
    from ds_fsmoe.layer.runtime import LayerRuntime


@dataclass(frozen=True)
class Way:
    """One way to exchange tokens: an all-to-all by name."""

    subject: Subject
    """The layer with this all-to-all."""
    planned: AllToAll
    """The planner's name for it."""


@dataclass
class LayerKind:
    """Describes layers that are equal and have been called alike."""

    labels: list[str]
    layer: FSMoELayer
    """One of the layers."""
    subject: Subject
    num_tokens: int
    """S, on this rank."""
    ways: dict[str, Way] = field(default_factory=dict)
    """The all-to-alls that may be chosen, the one that is run first."""

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline of ``layer``."""
        assert self.layer.pipeline is not None
        return self.layer.pipeline

    @property
    def sizes(self) -> CallShape:
        """The sizes for the planner. Experts are one product of all weights: their cost was measured as a whole."""
        at, subject = self.subject.sizes, self.subject
        sizes = subject.num_experts, at.capacity, at.width, at.dtype.itemsize, 1, subject.num_weights
        return CallShape(*sizes, num_tokens=at.num_tokens, crossings=self._crossings, wires=at.wires)

    @property
    def _crossings(self) -> Crossings | None:
        """The crossings of a token for each of its choices, with balanced routing; ``None``: none crosses once."""
        groups, k = self.pipeline.forward.groups, self.subject.sizes.num_choices
        if not k or not crosses_once(groups):
            return None
        at = groups.placements["ep"]
        found = expected_crossings(self.subject.num_experts, min(k, self.subject.num_experts), at.nodes, at.per_node)
        return Crossings(found.nodes / k, found.ranks / k)

    def lane_of(self, name: str) -> Lane:
        """Return the lane of a collective."""
        if name == IN_NODES:
            return Lane.INTRA
        group = "esp" if name in (ALL_GATHER, REDUCE_SCATTER) else "ep"
        return self.pipeline.forward.groups.placements[group].lanes[0]

    def find_ways(self, running: LayerRuntime) -> None:
        """Fill in :attr:`ways`. Collective: communicators may be made."""
        asked, own = running.block.alltoall, self.pipeline.forward.alltoall
        if asked != "auto" or len(self.pipeline.forward.groups.placements["ep"].lanes) < 2:
            name = asked if asked != "auto" else "flat"
            self.ways = {name: Way(replace(self.subject, alltoall=name), own)}
            return
        groups = running.groups(self.layer.ep_size, self.layer.fsmoe.tensor_parallel)
        for name in ("flat", *(each for each in registry.known("alltoall") if each != "flat")):
            exchange = exchange_in(groups, registry.lookup("alltoall", name)())
            if exchange.why_flat or (exchange.nodes is not None and self.layer.fsmoe.is_in_slots):
                continue
            nodes = exchange.nodes
            collectives = replace(self.subject.collectives, exchange=exchange.whole, legs=exchange.legs, nodes=nodes)
            self.ways[name] = Way(replace(self.subject, collectives=collectives, alltoall=name), exchange.planned)


def find_kinds(
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
        dist.all_reduce(capacities, dist.ReduceOp.MAX, group=group)
    found: dict[tuple[str, int], LayerKind] = {}
    for (label, subject), capacity in zip(subjects.items(), capacities.tolist(), strict=True):
        subject = replace(subject, sizes=replace(subject.sizes, capacity=capacity))
        key = subject.kind, subject.measured_capacity
        kind = found.setdefault(key, LayerKind([], layers[label], subject, calls[label].num_tokens))
        kind.labels.append(label)
        if capacity > kind.subject.sizes.capacity:
            kind.subject = subject
    return list(found.values())


def largest_of_each(kinds: list[LayerKind]) -> list[LayerKind]:
    """Return the kinds to be measured: what is known of a large capacity holds for smaller ones."""
    largest: dict[str, LayerKind] = {}
    for kind in sorted(kinds, key=lambda each: each.subject.sizes.capacity):
        largest[kind.subject.kind] = kind
    return list(largest.values())


def _subject(label: str, layer: FSMoELayer, call: FirstCall) -> Subject:
    pipeline = layer.pipeline
    assert pipeline is not None
    splits = all(form is not None for form in call.forms)
    modules = [type(each).__name__ for each in getattr(call.experts, "experts", ())]
    shapes = ["x".join(map(str, each)) for each in call.experts.shapes]
    places = _places(pipeline)
    kind = (
        f"experts {'/'.join(modules)} of {' '.join(shapes)}, written out {splits}, width {call.sizes.width}, "
        f"{call.sizes.dtype}, recompute {pipeline.recompute}, {places['ep']}, {places['esp']}"
        f"{', not to be cut' if layer.fsmoe.is_uncut else ''}"
    )
    return Subject(
        label,
        kind,
        pipeline.collectives,
        call.experts,
        call.experts.num_experts,
        max(1, sum(math.prod(each) for each in call.experts.shapes if len(each) > 1)),
        splits,
        pipeline.recompute,
        call.sizes,
        call.autocast.restored,
        places,
    )


def _places(pipeline: Pipeline) -> dict[str, str]:
    placements, collectives = pipeline.forward.groups.placements, type(pipeline.collectives).__name__
    texts = {}
    for kind in ("ep", "esp"):
        at = placements[kind]
        texts[kind] = f"{kind} {at.size} ({at.per_node} in a node) on {'+'.join(at.lanes) or 'no link'}, {collectives}"
    return texts
