# SPDX-License-Identifier: Apache-2.0
"""Each token once per node: the rows of plain loops over tokens, which were written without looking at it.

The loop over rows is written from the law alone (docs/dispatch.md), for all ranks in one process; the numbers are those
of the loop over tokens in tests/reference.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from ds_fsmoe.components.alltoalls.node_deduplicated import NodeDeduplicatedAllToAll
from ds_fsmoe.distributed.groups import make_groups
from ds_fsmoe.execution.lanes import make_lanes
from ds_fsmoe.layer.parts import exchange_in
from tests.hf_families import families
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.test_alltoalls import on_nodes
from tests.test_hugging_face import gradients
from tests.test_rows import HIDDEN, WIDTH, Case, by_loop, differences, gate_weight_of, mixtral, run_layer, tokens_of


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


def legs_of(rank: int, holders: set[int], nodes: tuple[int, ...]) -> Iterator[Leg]:
    """The rows that are sent for one token of a rank whose experts these ranks hold."""

    def there_and_back(hop: str, source: int, target: int) -> Iterator[Leg]:
        for phase in ("forward", "backward"):
            # What stays on its rank has not to travel.
            if source != target:
                yield Leg(phase, "in", hop, source, target)
                yield Leg(phase, "out", hop, target, source)

    def ranks_of(node: int) -> list[int]:
        return [each for each, other in enumerate(nodes) if other == node]

    place = ranks_of(nodes[rank]).index(rank)
    for node in {nodes[holder] for holder in holders}:
        # To the rank of the node that has the same place there, and by it a copy to each rank with an expert.
        relay = ranks_of(node)[place]
        yield from there_and_back("between", rank, relay)
        for holder in holders & set(ranks_of(node)):
            yield from there_and_back("inside", relay, holder)


def chosen(case: Case, rank: int, world_size: int) -> list[list[int]]:
    """The experts of each of a rank's tokens."""
    x_SM, _, used_S = tokens_of(case, rank)
    weight_EM = gate_weight_of(case, case.experts_per_rank * world_size)
    experts_SK = (x_SM @ weight_EM.t()).topk(min(case.k, len(weight_EM)), dim=1).indices.tolist()
    return [experts if used_S is None or used_S[token] else [] for token, experts in enumerate(experts_SK)]


# ---- the layer on ranks


class Noting(nn.Module):
    """An expert of one's own; all of a rank count their rows together."""

    rows = 0

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.second = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Noting.rows += x.numel() // WIDTH
        return self.second(torch.tanh(self.first(x)))


CASES = [
    Case((1, 1), k=2),
    Case((3, 2), k=1, tokens=(5, 0, 1, 7, 3, 2), expert=mixtral),
    Case((2, 3), k=3, masked=True, expert=Noting),
    Case((4, 1), k=5, tokens=(13, 2, 0, 11, 1, 4), experts_per_rank=3, masked=True),
    Case((2, 5), k=8, tokens=(7, 3, 5, 1, 0, 11), links="reduce_first", expert=mixtral, recompute=True),
    Case((3, 4), k=8, tokens=(0, 0, 9, 0, 0, 5), experts_per_rank=3, expert=Noting),
]
Sent = list[tuple[str, str, int, torch.Tensor]]
"""Of each message to another rank its phase, its hop, that rank and its rows, [R, M]."""


@contextmanager
def noting(rank: int, nodes: tuple[int, ...]) -> Iterator[tuple[Sent, list[int]]]:
    """Note what is sent, and how many rows the experts were given in the forward."""
    sent: Sent = []
    computed: list[int] = []
    send, backward = dist.all_to_all_single, torch.Tensor.backward
    Noting.rows = 0

    def sending(y: torch.Tensor, x: torch.Tensor, receives: Any = None, sends: Any = None, **options: Any) -> Any:
        if x.is_floating_point() and x.dim() == 2:
            ranks = dist.get_process_group_ranks(options["group"])
            hop = "inside" if len({nodes[each] for each in ranks}) == 1 else "between"
            for other, rows_RM in zip(ranks, x.clone().split(list(sends)), strict=True):
                if other != rank:
                    sent.append(("backward" if computed else "forward", hop, other, rows_RM))
        return send(y, x, receives, sends, **options)

    def going_back(loss: torch.Tensor, *args: Any, **options: Any) -> None:
        computed.append(Noting.rows)
        backward(loss, *args, **options)

    with patch.object(dist, "all_to_all_single", sending), patch.object(torch.Tensor, "backward", going_back):
        yield sent, computed


def run_cases(rank: int, world_size: int, nodes: tuple[int, ...]) -> list[tuple[list[str], Sent, list[int]]]:
    """Of each case the numbers that are not those of the loop, what was sent, and the rows of experts that count."""
    with on_nodes(*nodes):
        groups = make_groups(world_size, 1)
    lanes, found = make_lanes(torch.device("cpu")), []
    for case in CASES:
        with noting(rank, nodes) as (sent, computed):
            results = run_layer(case, groups, lanes, True, alltoall="node_deduplicated")
        found.append((differences(results, by_loop(case, groups), 1e-12), sent, computed))
    lanes.close()
    return found


def rows_sent(case: Case, of_ranks: list[Sent]) -> Counter[Leg]:
    """The rows that were sent. What is sent to experts is a token, or the gradient of an output, to the bit."""
    going_in = {
        (phase, row_M.numpy().tobytes())
        for rank in range(len(of_ranks))
        for phase, rows_SM in zip(("forward", "backward"), tokens_of(case, rank)[:2], strict=True)
        for row_M in rows_SM
    }
    return Counter(
        Leg(phase, "in" if (phase, row_M.numpy().tobytes()) in going_in else "out", hop, rank, other)
        for rank, sent in enumerate(of_ranks)
        for phase, hop, other, rows_RM in sent
        for row_M in rows_RM
    )


PLACEMENTS = [(0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 1, 1, 2, 2), (0, 1, 2, 0, 1, 2), (0, 0, 0, 1, 1, 1)]


@sampled("nodes", PLACEMENTS, kept=[0], ids=str)
def test_the_layer_has_the_numbers_and_sends_the_rows_of_the_loops(nodes: tuple[int, ...], tmp_path: Path) -> None:
    of_ranks = run_on_ranks(run_cases, len(nodes), tmp_path, nodes)
    found, crossed = [], Counter[str]()
    for number, case in enumerate(CASES):
        found += [f"case {number}, rank {rank}: {each}" for rank, of in enumerate(of_ranks) for each in of[number][0]]
        sent = rows_sent(case, [of[number][1] for of in of_ranks])
        wanted, computed = Counter[Leg](), Counter[int]()
        for rank in range(len(nodes)):
            for experts in chosen(case, rank, len(nodes)):
                of_token = [expert // case.experts_per_rank for expert in experts]
                computed.update(of_token)
                wanted.update(legs_of(rank, set(of_token), nodes))
        for leg in sorted(sent | wanted):
            if sent[leg] != wanted[leg]:
                found.append(f"case {number}: {leg}: {sent[leg]} rows, not {wanted[leg]}")
            crossed[leg.hop] += wanted[leg]
        if case.expert is Noting:
            assert [of[number][2] for of in of_ranks] == [[computed[rank]] for rank in range(len(nodes))]
    assert not found, f"{len(found)}, the first are {found[:5]}"
    assert min(crossed["between"], crossed["inside"]) > 50


# ---- where it can be


ON_TWO_NODES = {"ep_size": 4, "alltoall": "node_deduplicated", "topology": {"ranks_per_node": 2}}
# One draws noise, rank by rank.
FAMILIES = [each for each in families() if each != "phimoe"]
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
