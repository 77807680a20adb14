# SPDX-License-Identifier: Apache-2.0
"""Each token once per node: the numbers, gradients and rows of plain loops that were written without looking at it.

The loops stand for all ranks, in one process; they are written from the law alone (docs/dispatch.md) with as little
cleverness as possible: no buffers, chunks, collectives. Every row that goes from one rank to another is handed on by
one call, which notes it; autograd hands the gradients back through these calls, each the other way, and they note that
too. So the rows are counted as they occur, in both phases, and no formula for their number is needed.

Letters: S tokens of a rank, K choices of a token, M width.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from ds_fsmoe.components.alltoalls.node_deduplicated import NodeDeduplicatedAllToAll
from ds_fsmoe.components.routing import Routing
from ds_fsmoe.distributed.groups import FSMoEGroups, make_groups
from ds_fsmoe.execution.lanes import Lanes, make_lanes
from ds_fsmoe.layer.moe_layer import MoEOutput
from ds_fsmoe.layer.parts import exchange_in
from tests.hf_families import UNTRIED, families
from tests.layer_runs import token_path
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.test_alltoalls import on_nodes
from tests.test_hugging_face import gradients
from tests.test_rows import HIDDEN, WIDTH, Case, differences, mixtral, run_layer


@dataclass(frozen=True)
class OfRank:
    """One rank's part of a call: what went in, what came out, and which rows it sent where."""

    x_SM: torch.Tensor
    choices_SK: torch.Tensor
    """The expert of every choice; -1 where it was dropped."""
    gate_weight_EM: torch.Tensor
    experts: list[nn.Module]
    computed: list[int]
    """How many rows each expert was given in the forward, where they count."""
    sent: list[tuple[str, str, int, torch.Tensor]]
    """Of each message to another rank its phase, its hop, that rank and its rows, [R, M]."""
    dy_SM: torch.Tensor
    results: list[torch.Tensor]
    """The output, and the gradients of tokens, gate, weights of choices, and experts."""


# ---- the loops


class Leg(NamedTuple):
    """A row's way from one rank to one rank."""

    phase: str
    """``"forward"`` or ``"backward"``."""
    way: str
    """``"in"`` to the experts, or ``"out"`` from them."""
    hop: str
    """``"between"`` nodes, or ``"inside"`` one."""
    source: int
    target: int


@dataclass(frozen=True)
class Loops:
    """The ranks, and what has happened so far."""

    node_of_rank: tuple[int, ...]
    experts: list[nn.Module]
    """The first of them belong to rank 0, as many next ones to rank 1, and so on."""
    rows: Counter[Leg]
    """How many rows went each way. What stays on its rank is none: nothing has to travel."""
    computed: Counter[int]
    """How many rows each expert was given in the forward."""

    def token(self, rank: int, x_M: torch.Tensor, weight_of: dict[int, torch.Tensor]) -> torch.Tensor:
        """One token of this rank, to each node of its experts and back."""
        y_M = 0 * x_M  # not zeros: the result of a token without experts has a gradient, too
        for node in sorted({self.node_of_rank[self.holder(expert)] for expert in weight_of}):
            relay = self.ranks_of(node)[self.place(rank)]
            x_of_node_M = self.sent(x_M, "in", "between", rank, relay)
            y_of_node_M = torch.zeros_like(x_M)
            for holder in self.ranks_of(node):
                held = {expert: weight for expert, weight in weight_of.items() if self.holder(expert) == holder}
                if held:
                    x_of_rank_M = self.sent(x_of_node_M, "in", "inside", relay, holder)
                    y_of_rank_M = self.weighed(x_of_rank_M, held)
                    y_of_node_M = y_of_node_M + self.sent(y_of_rank_M, "out", "inside", holder, relay)
            y_M = y_M + self.sent(y_of_node_M, "out", "between", relay, rank)
        return y_M

    def weighed(self, x_M: torch.Tensor, weight_of: dict[int, torch.Tensor]) -> torch.Tensor:
        """What one rank makes of one token: the sum over those of its experts that were chosen."""
        y_M = torch.zeros_like(x_M)
        for expert, weight in weight_of.items():
            self.computed[expert] += 1
            y_M = y_M + weight * self.experts[expert](x_M)
        return y_M

    def sent(self, row_M: torch.Tensor, way: str, hop: str, source: int, target: int) -> torch.Tensor:
        if source == target:
            return row_M
        return _Sent.apply(row_M, self.rows, Leg("forward", way, hop, source, target))

    def holder(self, expert: int) -> int:
        """The rank that an expert lies on."""
        return expert // (len(self.experts) // len(self.node_of_rank))

    def ranks_of(self, node: int) -> list[int]:
        return [rank for rank, other in enumerate(self.node_of_rank) if other == node]

    def place(self, rank: int) -> int:
        """Which one of its node a rank is."""
        return self.ranks_of(self.node_of_rank[rank]).index(rank)


class _Sent(torch.autograd.Function):
    """A row on another rank. Its gradient is sent back: the gradient of what came from the experts goes to them."""

    @staticmethod
    def forward(ctx: Any, row_M: torch.Tensor, rows: Counter[Leg], leg: Leg) -> torch.Tensor:
        ctx.rows, ctx.leg = rows, leg
        rows[leg] += 1
        return row_M.clone()

    @staticmethod
    def backward(ctx: Any, drow_M: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        leg = ctx.leg
        back = "in" if leg.way == "out" else "out"
        ctx.rows[Leg("backward", back, leg.hop, leg.target, leg.source)] += 1
        return drow_M.clone(), None, None


def by_loops(of_ranks: tuple[OfRank, ...], nodes: tuple[int, ...]) -> tuple[list[list[torch.Tensor]], Loops]:
    """Do what the layer is to do, forward and backward: the results of each rank, and the rows."""
    loops = Loops(nodes, [expert for of in of_ranks for expert in of.experts], Counter(), Counter())
    inputs, outputs = [], []
    for rank, of in enumerate(of_ranks):
        x_SM, gate_weight_EM = (each.clone().requires_grad_() for each in (of.x_SM, of.gate_weight_EM))
        weights_SK = weights_of(x_SM, of.choices_SK, gate_weight_EM)
        weights_SK.retain_grad()
        rows = []
        for x_M, choices_K, weights_K in zip(x_SM, of.choices_SK.tolist(), weights_SK, strict=True):
            weight_of = {expert: weight for expert, weight in zip(choices_K, weights_K, strict=True) if expert >= 0}
            rows.append(loops.token(rank, x_M, weight_of))
        inputs.append((x_SM, gate_weight_EM, weights_SK))
        outputs.append(torch.stack(rows) if rows else 0 * x_SM)
    torch.autograd.backward(outputs, [of.dy_SM for of in of_ranks])
    found = []
    for of, of_rank, y_SM in zip(of_ranks, inputs, outputs, strict=True):
        leaves = (*of_rank, *(each for expert in of.experts for each in expert.parameters()))
        found.append([y_SM.detach(), *(torch.zeros_like(t) if t.grad is None else t.grad for t in leaves)])
    return found, loops


# ---- the layer on ranks


class Noting(nn.Module):
    """An expert of one's own that counts its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.second = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.rows = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows += x.numel() // WIDTH
        return self.second(torch.tanh(self.first(x)))


CASES = [
    Case((1, 1), k=2),
    Case((3, 2), k=1, tokens=(5, 0, 1, 7, 3, 2), expert=mixtral),
    Case((2, 3), k=3, masked=True, expert=Noting),
    Case((4, 1), k=5, tokens=(13, 2, 0, 11, 1, 4), experts_per_rank=3, masked=True),
    Case((2, 5), k=8, tokens=(7, 3, 5, 1, 0, 11), links="reduce_first", expert=mixtral, recompute=True),
    Case((3, 4), k=8, tokens=(0, 0, 9, 0, 0, 5), experts_per_rank=3, expert=Noting),
]


def weights_of(x_SM: torch.Tensor, choices_SK: torch.Tensor, gate_weight_EM: torch.Tensor) -> torch.Tensor:
    """[S, K]: what choices are weighed with, by a gate as simple as one that learns can be."""
    scores_SE = torch.sigmoid(x_SM @ gate_weight_EM.t())
    return scores_SE.gather(1, choices_SK.clamp(min=0)) * (choices_SK >= 0)


def drawn_choices(rank: int, case: Case, used_S: torch.Tensor | None, num_experts: int) -> torch.Tensor:
    """[S, K]: different experts; -1 where unused tokens, and some choices of the others, are dropped."""
    generator = torch.Generator().manual_seed(1000 * case.k + rank)
    choices_SK = torch.rand(case.tokens[rank], num_experts, generator=generator).argsort(dim=1)[:, : case.k]
    if used_S is not None:
        is_dropped_SK = torch.rand(choices_SK.shape, generator=generator) < 0.3
        choices_SK[is_dropped_SK | ~used_S.unsqueeze(1)] = -1
    return choices_SK


def as_routing(choices_SK: torch.Tensor, weights_SK: torch.Tensor, num_experts: int) -> Routing:
    choices_KS = choices_SK.t().contiguous()
    counts_E = torch.bincount(choices_KS[choices_KS >= 0], minlength=num_experts)
    capacity = int(counts_E.max())
    slots_KS = torch.full_like(choices_KS, num_experts * capacity)
    for expert in range(num_experts):
        slots_KS[choices_KS == expert] = expert * capacity + torch.arange(int(counts_E[expert]))
    return Routing(slots_KS, weights_SK.t(), weights_SK.new_zeros(()), counts_E, capacity, num_experts)


def run_case(case: Case, nodes: tuple[int, ...], groups: FSMoEGroups, lanes: Lanes) -> OfRank:
    """Run the layer of tests/test_rows.py on choices drawn here, and note what its collectives send."""
    seen: dict[str, Any] = {"sent": []}
    watched: list[torch.Tensor] = []
    send = dist.all_to_all_single

    def path(x_SM: torch.Tensor, used_S: torch.Tensor | None, *, gate: Any, experts: Any, **parts: Any) -> MoEOutput:
        gate_weight_EM = gate.wg.weight
        num_experts = len(gate_weight_EM)
        choices_SK = drawn_choices(groups.rank, case, used_S, num_experts)
        weights_SK = weights_of(x_SM, choices_SK, gate_weight_EM)
        routing = as_routing(choices_SK, weights_SK, num_experts)
        result = token_path(x_SM, used_S, gate=lambda *_: routing, experts=experts, **parts)
        watched.extend([result.output, weights_SK])
        for each in watched:
            each.retain_grad()
        seen.update(x_SM=x_SM.detach(), choices_SK=choices_SK, gate_weight_EM=gate_weight_EM.detach())
        seen["experts"] = copy.deepcopy(list(experts.experts))
        seen["computed"] = [expert.rows for expert in experts.experts if isinstance(expert, Noting)]
        return result

    def sending(y: torch.Tensor, x: torch.Tensor, receives: Any = None, sends: Any = None, **options: Any) -> Any:
        if x.is_floating_point() and x.dim() == 2:
            ranks = dist.get_process_group_ranks(options["group"])
            hop = "inside" if len({nodes[each] for each in ranks}) == 1 else "between"
            for other, rows_RM in zip(ranks, x.clone().split(list(sends)), strict=True):
                if other != groups.rank:
                    seen["sent"].append(("backward" if watched else "forward", hop, other, rows_RM))
        return send(y, x, receives, sends, **options)

    with patch("tests.test_rows.token_path", path), patch.object(dist, "all_to_all_single", sending):
        y_SM, dx_SM, dgate_EM, *dexperts = run_layer(case, groups, lanes, True, alltoall="node_deduplicated")
    dy_SM, dweights_SK = (each.grad for each in watched)
    return OfRank(**seen, dy_SM=dy_SM, results=[y_SM, dx_SM, dgate_EM, dweights_SK, *dexperts])


def run_cases(rank: int, world_size: int, nodes: tuple[int, ...]) -> list[OfRank]:
    with on_nodes(*nodes):
        groups = make_groups(world_size, 1)
    lanes = make_lanes(torch.device("cpu"))
    found = [run_case(case, nodes, groups, lanes) for case in CASES]
    lanes.close()
    return found


def rows_sent(of_ranks: tuple[OfRank, ...]) -> Counter[Leg]:
    """The rows that were sent. What is sent to experts is a token, or the gradient of an output, to the bit."""
    going_in = {
        (phase, row_M.numpy().tobytes())
        for of in of_ranks
        for phase, rows_SM in (("forward", of.x_SM), ("backward", of.dy_SM))
        for row_M in rows_SM
    }
    return Counter(
        Leg(phase, "in" if (phase, row_M.numpy().tobytes()) in going_in else "out", hop, rank, other)
        for rank, of in enumerate(of_ranks)
        for phase, hop, other, rows_RM in of.sent
        for row_M in rows_RM
    )


PLACEMENTS = [(0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 1, 1, 2, 2), (0, 1, 2, 0, 1, 2), (0, 0, 0, 1, 1, 1)]


@sampled("nodes", PLACEMENTS, kept=[0], ids=str)
def test_the_layer_has_the_numbers_of_the_reference_and_sends_its_rows(nodes: tuple[int, ...], tmp_path: Path) -> None:
    of_cases = list(zip(*run_on_ranks(run_cases, len(nodes), tmp_path, nodes), strict=True))
    found, crossed = [], Counter[str]()
    for number, (case, of_ranks) in enumerate(zip(CASES, of_cases, strict=True)):
        results, loops = by_loops(of_ranks, nodes)
        for rank, (of, theirs) in enumerate(zip(of_ranks, results, strict=True)):
            found += [f"case {number}, rank {rank}: {each}" for each in differences(of.results, theirs, 1e-12)]
        sent = rows_sent(of_ranks)
        for leg in sorted(sent | loops.rows):
            if sent[leg] != loops.rows[leg]:
                found.append(f"case {number}: {leg}: {sent[leg]} rows, not {loops.rows[leg]}")
            crossed[leg.hop] += loops.rows[leg]
        computed = [rows for of in of_ranks for rows in of.computed]
        if case.expert is Noting and computed != [loops.computed[expert] for expert in range(len(computed))]:
            found.append(f"case {number}: experts were given {computed} rows, not {loops.computed}")
    assert not found, f"{len(found)}, the first are {found[:5]}"
    assert min(crossed["between"], crossed["inside"]) > 50


# ---- where it can be


ON_TWO_NODES = {"ep_size": 4, "alltoall": "node_deduplicated", "topology": {"ranks_per_node": 2}}
# One draws noise, rank by rank.
FAMILIES = [each for each in families() if each not in UNTRIED and each != "phimoe"]
HOW = ((0, 1, 1), (2, 3, 2), (3, 2, 3))
"""ZeRO stage, chunks forward and backward."""


@sampled("family", FAMILIES)
def test_models_have_the_losses_and_gradients_of_eager_experts_with_each_token_once_per_node(
    family: str, tmp_path: Path
) -> None:
    stage, forward, backward = HOW[FAMILIES.index(family) % len(HOW)]
    degrees = {"forward": forward, "backward": backward}
    found = run_on_ranks(gradients, 4, tmp_path, [family], stage, degrees, ON_TWO_NODES)
    assert [each for of_rank in found for each in of_rank] == []


def ways_of_layouts(rank: int, world_size: int) -> list[str]:
    found = []
    for nodes, ep, esp in (
        ((0, 0, 0, 0), 4, 1),
        ((0, 1, 2, 3), 4, 1),
        ((0, 0, 0, 1), 4, 1),
        ((0, 0, 1, 1), 2, 1),
        ((0, 0, 1, 1), 2, 2),
        ((0, 1, 1, 0), 4, 1),
        ((0, 1, 0, 1), 4, 1),
    ):
        with on_nodes(*nodes):
            exchange = exchange_in(make_groups(ep, esp), NodeDeduplicatedAllToAll())
        found.append(exchange.planned + (f": {exchange.why_flat}" if exchange.why_flat else ""))
    return found


def test_it_is_flat_where_tokens_cannot_be_relayed(tmp_path: Path) -> None:
    uneven = "flat: the ranks that share experts are not equally many, at least 2, in several nodes"
    split = "flat: each expert is split over several ranks"
    expected = [uneven, uneven, uneven, uneven, split, uneven, "node_deduplicated"]
    assert run_on_ranks(ways_of_layouts, 4, tmp_path) == [expected] * 4
