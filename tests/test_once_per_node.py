# SPDX-License-Identifier: Apache-2.0
"""Each token once per node: the numbers of the flat way, and as many rows between nodes as the routing asks for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ds_fsmoe.components.alltoalls.node_deduplicated import NodeDeduplicatedAllToAll
from ds_fsmoe.components.callback import CallbackArgs, CallbackBase
from ds_fsmoe.components.gates.deepseek import DeepSeekGate
from ds_fsmoe.distributed.groups import make_groups
from ds_fsmoe.execution.lanes import make_lanes
from ds_fsmoe.layer.parts import exchange_in
from tests.hf_families import families, why_not
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.test_alltoalls import on_nodes
from tests.test_hugging_face import SIX, gradients
from tests.test_rows import CASES, TOLERANCE, Case, differences, mixtral, module, run_layer

NODES = [
    (4, 4, (0, 0, 1, 1)),
    (4, 4, (0, 1, 0, 1)),
    (6, 6, (0, 0, 1, 1, 2, 2)),
    (6, 6, (0, 0, 0, 1, 1, 1)),
    (8, 4, (0, 0, 1, 1, 2, 2, 3, 3)),
]
MORE = [
    Case((5, 4), k=5, experts_per_rank=3),
    Case((1, 5), k=8, experts_per_rank=2, expert=mixtral, recompute=True),
    Case((4, 1), k=3, masked=True, links="reduce_first"),
    Case((2, 3), k=4, expert=module, experts_per_rank=1, tokens=(0, 0, 5, 0, 1, 0, 2, 3)),
]


def compare_with_flat(rank: int, world_size: int, ep: int, nodes: tuple[int, ...], cases: str) -> list[str]:
    with on_nodes(*nodes):
        groups = make_groups(ep, 1)
    lanes, serial, found = make_lanes(torch.device("cpu")), make_lanes(torch.device("cpu"), overlap=False), []
    every = (*CASES, *MORE)
    for case in {"pairs": PAIRS, "all": every, "even": every[::2], "odd": every[1::2]}[cases]:
        exact = run_layer(replace(case, degrees=(1, 1)), groups, serial, True, exact=True)
        for ours in (lanes, serial):
            once = run_layer(case, groups, ours, True, alltoall="node_deduplicated")
            found += [f"{case}: {each}" for each in differences(once, exact, TOLERANCE[case.dtype])]
    lanes.close()
    return found


@sampled(
    ("world_size", "ep", "nodes", "cases"),
    [(*NODES[0], "even"), (*NODES[2], "odd"), *((*each, "all") for each in NODES)],
    kept=[0, 1],
)
def test_once_per_node_has_the_numbers_of_the_flat_way(
    world_size: int, ep: int, nodes: tuple[int, ...], cases: str, tmp_path: Path
) -> None:
    for rank, found in enumerate(run_on_ranks(compare_with_flat, world_size, tmp_path, ep, nodes, cases)):
        assert not found, f"rank {rank}: {found[:5]}"


PAIRS = [
    Case((forward, backward), k=1 + (5 * forward + backward) % 8, experts_per_rank=2 + forward % 2)
    for forward in range(1, 6)
    for backward in range(1, 6)
]


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (0, 0, 1, 1, 2, 2)])
def test_every_pair_of_degrees_has_these_numbers(nodes: tuple[int, ...], tmp_path: Path) -> None:
    found = run_on_ranks(compare_with_flat, len(nodes), tmp_path, len(nodes), nodes, "pairs")
    assert [each for of_rank in found for each in of_rank] == []


def whole_modules(rank: int, world_size: int) -> list[str]:
    with on_nodes(0, 0, 1, 1):
        groups = make_groups(4, 1)
    lanes, found = make_lanes(torch.device("cpu")), []
    for case in (Case((1, 1)), Case((1, 1), tokens=(0, 3, 0, 1)), Case((1, 1), recompute=True, masked=True, k=4)):
        flat = run_layer(case, groups, lanes, True)
        for is_whole in (True, rank == 0):
            ours = run_layer(case, groups, lanes, True, whole=is_whole, alltoall="node_deduplicated")
            found += differences(ours, flat, 1e-12)
    lanes.close()
    return found


def test_experts_called_as_one_module_are_reached_once_per_node_too(tmp_path: Path) -> None:
    assert run_on_ranks(whole_modules, 4, tmp_path) == [[]] * 4


ON_TWO_NODES = {"ep_size": 4, "alltoall": "node_deduplicated", "topology": {"ranks_per_node": 2}}


@sampled(
    ("stage", "forward", "backward", "names"),
    [(0, 1, 1, SIX), (2, 3, 2, SIX), (3, 2, 3, SIX), (2, 3, 2, SIX[1::2])],
    kept=[-1],
)
def test_hugging_face_models_have_the_losses_and_gradients_of_eager_experts(
    stage: int, forward: int, backward: int, names: tuple[str, ...], tmp_path: Path
) -> None:
    degrees = {"forward": forward, "backward": backward}
    found = run_on_ranks(gradients, 4, tmp_path, list(names), stage, degrees, ON_TWO_NODES)
    assert [each for of_rank in found for each in of_rank] == []


@pytest.mark.slow
def test_every_family_that_can_be_tiny_is_reached_once_per_node(tmp_path: Path) -> None:
    """Among them are those with biases and with a norm behind the experts; but one draws noise, rank by rank."""
    tried = [each for each in families() if not why_not(each) and each != "phimoe"]
    degrees = {"forward": 2, "backward": 3}
    found = run_on_ranks(gradients, 4, tmp_path, tried, 2, degrees, ON_TWO_NODES, limit_s=900)
    assert [each for of_rank in found for each in of_rank] == []


# ---- what travels, and where it cannot be


@contextmanager
def recorded_rows(node_of_rank: tuple[int, ...]) -> Iterator[list[int]]:
    """The rows that this rank's collectives send to other nodes, one number for each collective of rows."""
    sent, send = [], dist.all_to_all_single

    def recording(y: torch.Tensor, x: torch.Tensor, receives: Any = None, sends: Any = None, **options: Any) -> Any:
        if x.is_floating_point() and x.dim() == 2:
            ranks, own = dist.get_process_group_ranks(options["group"]), node_of_rank[dist.get_rank()]
            sent.append(sum(size for size, rank in zip(sends, ranks, strict=True) if node_of_rank[rank] != own))
        return send(y, x, receives, sends, **options)

    with patch.object(dist, "all_to_all_single", recording):
        yield sent


def rows_sent_either_way(rank: int, world_size: int, nodes: tuple[int, ...], k: int) -> list[tuple[int, int]]:
    return [rows_sent(rank, nodes, alltoall, k) for alltoall in ("flat", "node_deduplicated")]


def rows_sent(rank: int, nodes: tuple[int, ...], alltoall: str, k: int) -> tuple[int, int]:
    """The rows that this rank sent across in a forward and backward; and how often its own tokens are to cross."""
    with on_nodes(*nodes):
        groups = make_groups(len(nodes), 1)
    lanes = make_lanes(torch.device("cpu"), overlap=False)
    case, places = Case((3, 2), k=k, experts_per_rank=4), []

    class Watch(CallbackBase):
        def before_moe_end_hook(self, args: CallbackArgs) -> None:
            places.append(args.routing.chosen() // 4)

    with recorded_rows(nodes) as sent:
        run_layer(case, groups, lanes, True, alltoall=alltoall, callbacks=(Watch(),))
    node_KS = torch.tensor(nodes)[places[0]]
    others = [set(each) - {nodes[rank]} for each in node_KS.t().tolist()]
    choices = int((node_KS != nodes[rank]).sum())
    return sum(sent), 4 * (choices if alltoall == "flat" else sum(map(len, others)))


TWO_NODES, THREE_NODES = (0, 0, 1, 1), (0, 0, 1, 1, 2, 2)


@sampled(("nodes", "k"), [(TWO_NODES, 2), (TWO_NODES, 8), (THREE_NODES, 2), (THREE_NODES, 8)], kept=[0, 3])
def test_a_token_crosses_to_each_node_of_its_experts_once_and_back(
    nodes: tuple[int, ...], k: int, tmp_path: Path
) -> None:
    """Twice in the forward and twice in the backward; each gradient of a token crosses once, too."""
    for of_ranks in zip(*run_on_ranks(rows_sent_either_way, len(nodes), tmp_path, nodes, k), strict=True):
        sent, expected = map(sum, zip(*of_ranks, strict=True))
        assert sent == expected > 0


def crossings_of_groups(rank: int, world_size: int) -> tuple[int, int]:
    """The rows that crossed with a gate whose tokens choose one of two groups of experts, each in one node; and how
    often they may at the most."""
    nodes = (0, 0, 1, 1)
    with on_nodes(*nodes):
        groups = make_groups(4, 1)
    lanes = make_lanes(torch.device("cpu"), overlap=False)
    case = Case((2, 2), k=4, experts_per_rank=4)
    limited = partial(DeepSeekGate, k=4, num_groups=2, kept_groups=1, drop_tokens=False)
    with recorded_rows(nodes) as sent, patch("tests.test_rows.LinearGate", lambda **_: limited()):
        run_layer(case, groups, lanes, True, alltoall="node_deduplicated")
    return sum(sent), 4 * case.tokens[rank]


def test_tokens_that_choose_one_group_of_experts_cross_at_most_once(tmp_path: Path) -> None:
    sent, most = map(sum, zip(*run_on_ranks(crossings_of_groups, 4, tmp_path), strict=True))
    assert 0 < sent < most


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
