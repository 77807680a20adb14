# SPDX-License-Identifier: Apache-2.0
"""One layer in one phase as each rank issues it: real plans, groups, pipelines and stream lanes, made-up experts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ds_fsmoe.components.alltoall import AllToAllBase, NodeDeduplicated
from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.distributed.groups import communicator_like
from ds_fsmoe.execution.counts_exchange import NodeCall
from ds_fsmoe.execution.pipeline import LayerPipeline
from ds_fsmoe.execution.row_chunks import RowLayout
from ds_fsmoe.execution.row_sizes import ChunkSizes, NodeCounts, PhaseSizes, RowSizes, TokenChunks
from ds_fsmoe.gradients.flat_buffers import FlatGradients, Scaling
from ds_fsmoe.layer.parts import exchange_in, node_links
from ds_fsmoe.layer.runtime import LayerRuntime
from ds_fsmoe.ops import reference
from ds_fsmoe.planning.block import ORDERS, BlockPlan, Links
from ds_fsmoe.planning.decide.gradient_plan import GradientSlice
from ds_fsmoe.planning.decide.plan_requests import SearchSpace
from ds_fsmoe.planning.decide.presets import BEST, NAMES, preset
from ds_fsmoe.planning.phase_plan import PhasePlan
from ds_fsmoe.planning.schedule import EXPERT_GRAD, GRAD
from ds_fsmoe.registry import known, lookup
from tests.deadlocks import Devices, Program, search, slots_needed
from tests.pretended_nccl import fake_ranks
from tests.recorded_collectives import Tape, record

CPU = torch.device("cpu")
CAPACITY, WIDTH = 7, 3


def sends_its_own(alltoall: type[AllToAllBase]) -> bool:
    """Whether messages have the sizes of this rank's rows, which pretended ranks give back; those of ranks that gather
    for a node, and of tokens that are sent once, have the sizes of others."""
    return not issubclass(alltoall, NodeDeduplicated) and len(getattr(alltoall, "links", ())) < 3


PRETENDED = tuple(name for name in known("alltoall") if sends_its_own(lookup("alltoall", name)))


@dataclass(frozen=True)
class Layout:
    """Where a layer lies."""

    world_size: int
    ep_size: int
    esp_size: int
    ranks_per_node: int
    alltoall: str = "flat"


@dataclass(frozen=True)
class Way:
    """How it is run in one phase."""

    links: Links
    degree: int
    backward: bool
    slices: tuple[str, ...] = ()
    in_rows: bool = False
    in_levels: bool = False
    """Slices are added up inside nodes first, where the ranks lie in several nodes."""


def layouts(world_sizes: Sequence[int]) -> list[Layout]:
    """All that so many ranks have."""
    found = []
    for world in world_sizes:
        sizes = [each for each in range(1, world + 1) if world % each == 0]
        for ep, esp, per_node in itertools.product(sizes, repeat=3):
            if world % (ep * esp) == 0:
                found += [Layout(world, ep, esp, per_node, name) for name in PRETENDED]
    return found


SLICES = ((), (GRAD,), (EXPERT_GRAD, GRAD), (GRAD, EXPERT_GRAD, GRAD))


def ways(most: int, links: Sequence[Links] = ORDERS) -> list[Way]:
    """All up to a degree."""
    found = []
    for order, degree in itertools.product(links, range(1, most + 1)):
        found.append(Way(order, degree, backward=False))
        found += [Way(order, degree, True, slices) for slices in SLICES]
        found.append(Way(order, degree, True, SLICES[-1], in_levels=True))
    return found


def ways_of_preset(name: str, most: int) -> list[Way]:
    """All that a preset may choose, up to a degree; ``best`` may choose any."""
    if name == BEST:
        return ways(most)
    switches = preset(name)
    # "dense_only" and "micro_ops" send them between the layers.
    slices = SLICES if switches.gradients in ("adaptive", "fixed_chunk") else SLICES[:1]
    found = []
    for backward in (False, True):
        for order in SearchSpace.of(name, most).orders:
            of_phase = slices if backward else SLICES[:1]
            found += [Way(order.links, order.degree, backward, each) for each in of_phase]
    return found


class Copies:
    """Experts that give back what they get, and their call."""

    def __init__(self) -> None:
        self.parameters = (nn.Parameter(torch.zeros(1)),)

    def call(self, needs_backward: bool, rows: Any = None, x_RM: Any = None, **options: bool) -> Copies:
        return self

    def forward(self, start: int, stop: int, rows: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return rows.clone()

    backward = forward

    def gradients(self) -> tuple[None]:
        return (None,)

    def release(self) -> list[None]:
        return []

    def restore(self, tensors: Any) -> None:
        pass

    def rows(self) -> list[torch.Tensor]:
        return []


def sizes_of_rows(pipeline: LayerPipeline, num_experts: int) -> RowSizes:
    """As they are where every rank sends one row to each expert in each chunk."""
    collectives = pipeline.collectives
    ranks, sharing = collectives.num_exchanging, collectives.num_sharing
    here = num_experts // ranks
    pairs = itertools.product(range(ranks), range(ranks))
    between = dict.fromkeys(pairs, here) if collectives.forwarded is not None else None
    chunk = ChunkSizes([here] * ranks, [here] * ranks, [num_experts] * sharing, [ranks * sharing] * here, between)
    degree = pipeline.forward.block.degree
    starts = tuple(num_experts * each for each in range(degree + 1))
    phase = PhaseSizes((chunk,) * degree, starts, None, torch.zeros(degree, here, dtype=torch.int32))
    return RowSizes(degree * num_experts, phase, phase, None, None)


def node_layout(pipeline: LayerPipeline, num_experts: int, degree: int) -> tuple[RowLayout, torch.Tensor]:
    """As it is where every rank has a token in each chunk, which chooses all experts; with its choices' weights."""
    collectives = pipeline.collectives
    links = collectives.nodes
    assert links is not None
    ranks = links.num_nodes * links.per_node
    here, cuts = num_experts // ranks, TokenChunks(degree, degree)
    of_ranks, of_nodes, choices, copies = (
        np.ones((*shape, degree), dtype=np.int64)
        for shape in ((ranks,), (links.num_nodes,), (ranks, here), (links.num_nodes, links.per_node))
    )
    counts = NodeCounts(links, cuts, choices, of_ranks, of_nodes, choices, of_nodes, copies, of_ranks)
    tokens, experts = torch.arange(degree), torch.arange(here).unsqueeze(1)
    records = (tokens * num_experts + experts).reshape(-1).repeat(ranks)
    on_device = torch.from_numpy(of_nodes), torch.from_numpy(choices)
    sizes = counts.sizes(*on_device, tokens.repeat(ranks), records, num_experts)
    weights_R = torch.ones(degree * num_experts, requires_grad=True)
    call = NodeCall(sizes, torch.ones(len(records)), collectives.block, *counts.choice_sizes)
    return RowLayout(sizes, num_experts, degree, num_experts, call, reference.restore), weights_R


class Slices:
    """A window in which slices of these kinds travel."""

    def __init__(self, flats: dict[str, FlatGradients], kinds: tuple[str, ...]) -> None:
        self._flats, self._kinds = flats, kinds

    def open(self, label: str) -> list[GradientSlice]:
        return [
            GradientSlice(kind, 0, 5 * at, 5 * at + 5) for at, kind in enumerate(self._kinds) if kind in self._flats
        ]

    def tasks(self, parcel: GradientSlice) -> tuple[str, ...]:
        return self._flats[parcel.kind].tasks(parcel.first, parcel.stop)

    def send(self, parcel: GradientSlice, task: str) -> None:
        self._flats[parcel.kind].send(parcel.first, parcel.stop, task)

    def close(self) -> None:
        pass


def programs(layout: Layout, asked: Sequence[Way], one_link: bool = False) -> dict[Way, tuple[Program, ...]]:
    """What all ranks issue.

    Args:
        layout: where the layer lies.
        asked: how it is run.
        one_link: whether the links take turns, as they do where NCCL keeps no order.
    """
    of_ranks = [_programs_of(rank, layout, asked, one_link) for rank in range(layout.world_size)]
    return dict(zip(asked, zip(*of_ranks, strict=True), strict=True))


def _programs_of(rank: int, layout: Layout, asked: Sequence[Way], one_link: bool) -> list[Program]:
    alltoall = lookup("alltoall", layout.alltoall)()
    with fake_ranks(rank, layout.world_size), pytest.MonkeyPatch.context() as patch:
        tape = record(patch)
        patch.setattr("ds_fsmoe.layer.runtime.why_one_link", lambda: "it is asked for" if one_link else None)
        block = {"enabled": True, "esp_size": layout.esp_size, "topology": {"ranks_per_node": layout.ranks_per_node}}
        running = LayerRuntime(FSMoEBlock(**block), torch.device("cuda", 0))
        try:
            return list(_run(running, layout, alltoall, asked, tape))
        finally:
            running.close()


def _run(
    running: LayerRuntime, layout: Layout, alltoall: AllToAllBase, asked: Sequence[Way], tape: Tape
) -> Iterator[Program]:
    groups = running.groups(layout.ep_size)
    pipeline = running.pipeline("L00", groups, running.plan, exchange_in(groups, alltoall), in_rows=True)
    flats: dict[bool, dict[str, FlatGradients]] = {False: {}, True: {}}
    for kind, of in ((EXPERT_GRAD, "edp"), (GRAD, "dp")):
        if (group := communicator_like(groups, of)) is not None:
            nodes = node_links(groups, of, "gradients")
            for in_levels, of_levels in flats.items():
                parameters = [nn.Parameter(torch.zeros(15))]
                flat = FlatGradients(kind, parameters, torch.float32, group, Scaling(), CPU, nodes=nodes)
                flat.arrange(parameters, in_levels)
                of_levels[kind] = flat
    tape.take()
    for way in asked:
        yield _of_way(replace(pipeline, window=Slices(flats[way.in_levels], way.slices)), way, layout.ep_size, tape)


def _of_way(pipeline: LayerPipeline, way: Way, ep_size: int, tape: Tape) -> Program:
    def plan(like: PhasePlan) -> PhasePlan:
        return replace(like, block=BlockPlan(way.degree, way.links))

    pipeline = replace(pipeline, forward=plan(pipeline.forward), backward=plan(pipeline.backward))
    num_experts = 2 * ep_size
    if way.in_rows and pipeline.collectives.nodes is not None:
        layout, weights_R = node_layout(pipeline, num_experts, way.degree)
        tape.take()
        x_RM = torch.zeros(layout.sizes.num_rows, WIDTH, requires_grad=True)
        y_RM = pipeline.run(x_RM, layout, Copies(), weights_R=weights_R)
    elif way.in_rows:
        sizes = sizes_of_rows(pipeline, num_experts)
        x_RM = torch.zeros(sizes.num_rows, WIDTH, requires_grad=True)
        y_RM = pipeline.run(x_RM, RowLayout(sizes, num_experts, way.degree), Copies())
    else:
        x_RM = torch.zeros(num_experts * CAPACITY, WIDTH, requires_grad=True)
        y_RM = pipeline(x_RM, num_experts, CAPACITY, Copies())
    forward = tape.take()
    if not way.backward:
        return forward
    y_RM.sum().backward()
    return tape.take()


def unlike(found: Sequence[tuple[Program, ...]]) -> list[tuple[Program, ...]]:
    """Each once; names of communicators do not count."""
    return list({tuple(each): each for each in found}.values())


def needs(found: Sequence[tuple[Program, ...]]) -> tuple[int, bool]:
    """(slots where devices may begin in any order, whether one slot will do in the order of issue)."""
    slots, is_free = 1, True
    for each in unlike(found):
        slots = max(slots, slots_needed(each))
        is_free = is_free and search(Devices(each, 1, implicit=True)) is None
    return slots, is_free


def deadlock_table(world_sizes: Sequence[int], most: int, names: Sequence[str] = NAMES) -> str:
    """For each preset what it needs, over all layouts of so many ranks and all degrees up to one."""
    rows = [("preset", "slots in any order", "one slot, in the order of issue")]
    recorded: dict[Way, list[tuple[Program, ...]]] = {}
    asked = ways(most)
    for layout in layouts(world_sizes):
        for way, each in programs(layout, asked).items():
            recorded.setdefault(way, []).append(each)
    for name in names:
        slots, is_free = needs([each for way in ways_of_preset(name, most) for each in recorded[way]])
        rows.append((name, str(slots), "free" if is_free else "hangs"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)


if __name__ == "__main__":
    print(deadlock_table((2, 3, 4), 3))
