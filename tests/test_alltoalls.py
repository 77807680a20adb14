# SPDX-License-Identifier: Apache-2.0
"""The laws of every all-to-all on the shelf, on real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ds_fsmoe import registry
from tests.ranks import run_on_ranks

ROWS, M = 3, 5


def blocks(rank: int, world_size: int) -> torch.Tensor:
    """Block g says who sends it and to whom."""
    x = torch.arange(world_size * ROWS * M, dtype=torch.double).view(world_size * ROWS, M)
    return x + 1000 * rank


def exchange(rank: int, world_size: int) -> dict[str, bool]:
    group = dist.group.WORLD
    laws = {}
    for name in registry.known("alltoall"):
        alltoall = registry.lookup("alltoall", name)()
        x = blocks(rank, world_size)
        y = alltoall(x, group)
        mine = slice(rank * ROWS, (rank + 1) * ROWS)
        expected = torch.cat([blocks(sender, world_size)[mine] for sender in range(world_size)])
        laws[f"{name}: block g goes to rank g"] = torch.equal(y, expected)
        laws[f"{name}: twice is the identity"] = torch.equal(alltoall(y, group), x)

        leaf = x.clone().requires_grad_()
        weight = blocks(rank, world_size) * 7
        (alltoall(leaf, group) * weight).sum().backward()
        laws[f"{name}: the gradient travels back"] = torch.equal(leaf.grad, alltoall(weight, group))

        strided = x.t().contiguous().t()
        laws[f"{name}: strides do not matter"] = torch.equal(alltoall(strided, group), y)
        empty = torch.zeros(0, M, requires_grad=True)
        alltoall(empty, group).sum().backward()
        laws[f"{name}: nothing is exchanged as nothing"] = empty.grad.shape == (0, M)
        for dtype in (torch.bfloat16, torch.float32):
            laws[f"{name}: {dtype}"] = torch.equal(alltoall(x.to(dtype), group), y.to(dtype))
    return laws


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_an_alltoall_keeps_its_laws(world_size: int, tmp_path: Path) -> None:
    for laws in run_on_ranks(exchange, world_size, tmp_path):
        assert len(laws) == 7 * len(registry.known("alltoall"))
        assert all(laws.values()), [law for law, kept in laws.items() if not kept]


@pytest.mark.parametrize("name", registry.known("alltoall"))
def test_a_group_of_one_leaves_everything_as_it_is(name: str) -> None:
    x = torch.randn(4, 5)
    assert registry.lookup("alltoall", name)()(x, None) is x
