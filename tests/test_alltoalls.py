# SPDX-License-Identifier: Apache-2.0
"""All-to-alls: every registered one, on real process groups, with nodes and without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from ds_fsmoe import registry
from ds_fsmoe.components.alltoall import AllToAllBase
from ds_fsmoe.distributed import groups as ours
from ds_fsmoe.distributed.groups import FSMoEGroups, make_groups
from ds_fsmoe.distributed.topology import Topology
from ds_fsmoe.execution.collectives import Collectives
from ds_fsmoe.layer.parts import exchange_in
from ds_fsmoe.planning.schedule import A2A_IN, A2A_IN_NODE, A2A_OUT, A2A_OUT_NODE
from tests.ranks import run_on_ranks
from tests.samples import sampled

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64]


def tokens_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """What a rank sends: known to all of them."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(100 + rank), dtype=torch.float64)
    return (x * 1000).to(dtype)


def expected_on(me: int, members: list[int], shape: tuple[int, ...], dtype: torch.dtype = torch.float64):
    """Block ``me`` of everyone's tensor, in the order of the group."""
    size = len(members)
    return torch.cat([tokens_of(rank, shape, dtype).chunk(size)[me] for rank in members])


def laws_in_a_group(alltoall: AllToAllBase, group: dist.ProcessGroup, members: list[int], rank: int) -> dict[str, bool]:
    size, me = len(members), members.index(rank)
    shape = (3 * size, 5, 7)
    x = tokens_of(rank, shape)
    held = {}

    y = alltoall(x, group)
    held["block g goes to rank g of the group"] = torch.equal(y, expected_on(me, members, shape))
    held["twice is the identity"] = torch.equal(alltoall(y, group), x)
    held["the input is left alone"] = torch.equal(x, tokens_of(rank, shape))
    held["every type travels unchanged"] = all(
        torch.equal(alltoall(tokens_of(rank, shape, dtype), group), expected_on(me, members, shape, dtype))
        for dtype in DTYPES
    )

    apart = x.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    held["the input need not be contiguous"] = not apart.is_contiguous() and torch.equal(alltoall(apart, group), y)

    empties = [(0, 7), (size, 0, 7), (3 * size, 5, 0)]
    held["nothing can be sent"] = all(alltoall(torch.zeros(empty), group).shape == empty for empty in empties)

    x.requires_grad_()
    dy = tokens_of(rank + 50, shape)
    (dx,) = torch.autograd.grad(alltoall(x, group), x, dy)
    sent_back = torch.cat([tokens_of(other + 50, shape).chunk(size)[me] for other in members])
    held["the gradient travels the same way back"] = torch.equal(dx, sent_back)

    (dx,) = torch.autograd.grad(alltoall(x, group).sum(), x)  # an expanded gradient has no memory of its own
    held["the gradient need not be contiguous"] = torch.equal(dx, torch.ones_like(x))

    nothing = torch.zeros(size, 0, 7, requires_grad=True)
    (dx,) = torch.autograd.grad(alltoall(nothing, group), nothing, torch.zeros(size, 0, 7))
    held["nothing has a gradient too"] = dx.shape == nothing.shape

    # d/dx of |dx|^2, where dx = a2a(a2a(x)^2 derivative): 2 * a2a(y) * 2 -> 8 * x.
    (dx,) = torch.autograd.grad((alltoall(x, group) ** 2).sum(), x, create_graph=True)
    (ddx,) = torch.autograd.grad((dx**2).sum(), x)
    held["the gradient has a gradient"] = torch.allclose(ddx, 8 * x, rtol=1e-14, atol=0)
    return held


def test_one_rank_keeps_its_tokens() -> None:
    x = tokens_of(0, (6, 7))
    assert all(registry.lookup("alltoall", name)()(x, None) is x for name in registry.known("alltoall"))


# ---- on nodes


@contextmanager
def on_nodes(*node_of_rank: int) -> Iterator[None]:
    """As if the ranks lay so."""
    where = "ds_fsmoe.distributed.groups"
    # Groups are made once, on whatever nodes they lay then.
    made = ours._made().groups if dist.is_initialized() else {}
    with patch(f"{where}.find_topology", lambda _: Topology(node_of_rank)), patch.dict(made, clear=True):
        yield


# Ranks -> (node of each, EP size); with the same node for all, or another for each, there is one kind of link.
SHAPES: dict[int, list[tuple[tuple[int, ...], int]]] = {
    4: [
        ((0, 0, 1, 1), 4),
        ((0, 1, 0, 1), 4),
        ((0, 1, 1, 1), 4),
        ((0, 0, 0, 1), 2),
        ((0, 0, 0, 0), 4),
        ((2, 1, 3, 0), 4),
    ],
    6: [((0, 0, 0, 1, 1, 1), 6), ((0, 1, 1, 2, 2, 2), 6), ((0, 0, 1, 1, 2, 2), 6), ((0, 1, 1, 0, 1, 1), 3)],
    8: [((0, 0, 0, 0, 1, 1, 1, 1), 8), ((0, 0, 0, 0, 1, 1, 1, 1), 4), ((0, 1, 2, 2, 2, 0, 2, 0), 8)],
}


class Routed(AllToAllBase):
    """An all-to-all as a layer runs it."""

    def __init__(self, exchange: Collectives) -> None:
        self._exchange = exchange

    def exchange(self, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return self._exchange.exchange(x, group)


def laws_of_legs(exchange: Collectives, groups: FSMoEGroups, rank: int) -> dict[str, bool]:
    """What is run as two tasks is what is run as one."""
    held = dict.fromkeys(("in two parts, both ways, it is the same", "a part can be repeated to be measured"), True)
    for dtype in DTYPES:
        for shape in ((3, 5, 7), (1, 0, 7), (0, 5, 7)):
            x_EcM = tokens_of(rank, (shape[0] * groups.ep_group.size(), *shape[1:]), dtype)
            whole = exchange.to_experts(x_EcM)
            blocks = exchange.blocks(x_EcM)
            for first, second in ((A2A_IN_NODE, A2A_IN), (A2A_OUT, A2A_OUT_NODE)):
                between = exchange.legs[first](blocks)
                end = exchange.legs[second](between)
                held["in two parts, both ways, it is the same"] &= torch.equal(end, exchange.blocks(whole))
                for kind, result in ((first, between), (second, end)):
                    again = exchange.ready(kind, x_EcM)
                    repeated = torch.equal(again(), result) and torch.equal(again(), result)
                    held["a part can be repeated to be measured"] &= repeated
    return held


def every_law_on_nodes(rank: int, world_size: int) -> dict[str, list[str]]:
    """Name, shape and way -> laws that are broken; by itself, as a module, and as a layer runs it."""
    broken = {}
    for nodes, ep_size in SHAPES[world_size]:
        with on_nodes(*nodes):
            groups = make_groups(ep_size)
        members = list(groups.ranks_of("ep"))
        for name in registry.known("alltoall"):
            by_itself = registry.lookup("alltoall", name)()
            exchange = exchange_in(groups, by_itself)
            for way, alltoall in {"by itself": by_itself, "in a layer": Routed(exchange)}.items():
                held = laws_in_a_group(alltoall, groups.ep_group, members, rank)
                assert len(held) == 10
                broken[f"{name} {way} on {nodes}, {ep_size} exchange"] = [law for law in held if not held[law]]
            held = laws_of_legs(exchange, groups, rank) if exchange.legs else {}
            spans = len(groups.planned.placements["ep"].lanes) == 2
            held["2dh has legs where there are two kinds of links"] = bool(exchange.legs) == (name == "2dh" and spans)
            x = tokens_of(rank, (ep_size * 5, 11), torch.bfloat16)
            flat = registry.lookup("alltoall", "flat")()(x, groups.ep_group)
            held["equal to flat bit for bit"] = torch.equal(exchange.exchange(x, groups.ep_group), flat)
            broken[f"links of {name} on {nodes}, {ep_size} exchange"] = [law for law in held if not held[law]]
    return broken


@sampled("world_size", list(SHAPES), kept=[0])
def test_every_all_to_all_keeps_the_laws_on_nodes_of_every_shape(world_size: int, tmp_path: Path) -> None:
    for rank, broken in enumerate(run_on_ranks(every_law_on_nodes, world_size, tmp_path)):
        assert len(broken) == 3 * len(SHAPES[world_size]) * len(registry.known("alltoall"))
        assert broken == {name: [] for name in broken}, f"rank {rank} of {world_size}"
