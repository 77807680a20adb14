# SPDX-License-Identifier: Apache-2.0
"""What the gather of updated parameters costs its host on many ranks: lines of Python, and copies."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_fsmoe.execution.node_links import NodeLinks
from ds_fsmoe.gradients import updated_parameters
from ds_fsmoe.gradients.updated_parameters import (
    FEWEST_NUMEL,
    MOST_MESSAGES,
    ParameterPart,
    _Among,
    _Message,
    in_messages,
)
from ds_fsmoe.gradients.zero_stages import split_by_owner
from tests.call_counts import Operations
from tests.pretended_nccl import fake_ranks

LAYERS, PER_NODE = 94, 8
SIZES = (4096, 64, 512, 512, 4096, 4096, 64, 64)
"""Elements of the dense parameters of a layer, in which norms are small and projections large."""


def num_lines(function: Callable[[], Any]) -> int:
    """Lines of Python that a function executes, each turn of a loop anew."""
    number = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal number
        number += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return number


def messages_of(ranks: int, levels: bool) -> tuple[list[torch.Tensor], list[_Message], int]:
    """Flat groups, what is sent of them as this rank sees it, and the number of parts."""
    nodes = None
    if levels:
        own = dist.get_rank()
        ranks_of = tuple(tuple(range(first, first + PER_NODE)) for first in range(0, ranks, PER_NODE))
        between, inside = [each[own % PER_NODE] for each in ranks_of], ranks_of[own // PER_NODE]
        nodes = NodeLinks(ranks_of, own, dist.new_group(between), dist.new_group(list(inside)))
    among = _Among(dist.group.WORLD, nodes)
    numel = sum(SIZES) * LAYERS
    partition, at, parts = -(-numel // ranks), 0, []
    for number, size in enumerate(SIZES * LAYERS):
        parts += [ParameterPart(number, 0, *each) for each in split_by_owner(at, size, partition)]
        at += size
    found = in_messages(parts, among.node_of_each, FEWEST_NUMEL // ranks, MOST_MESSAGES)
    messages = [_Message(among.exchanges(each), tuple(each)) for each in found]
    return [torch.zeros(partition * ranks)], messages, sum(map(len, found))


def send(flats: list[torch.Tensor], messages: list[_Message]) -> None:
    for message in messages:
        for step in message.steps(flats).values():
            step()


@pytest.fixture(autouse=True)
def nothing_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch's fake group refuses a rank that receives without sending.
    def received(x: torch.Tensor, sends: Sequence[int], receives: Sequence[int], group: Any) -> torch.Tensor:
        assert x.numel() == sum(sends)
        assert len(sends) == len(receives) == dist.get_world_size(group)
        return x.new_ones(sum(receives))

    monkeypatch.setattr(updated_parameters, "exchange_sized", received)


@pytest.mark.parametrize("levels", [False, True], ids=["flat", "in two levels"])
def test_the_work_of_a_step_grows_with_parts_and_ranks_never_with_their_product(levels: bool) -> None:
    seen = {}
    for ranks in (512, 1024):
        with fake_ranks(1, ranks):
            num_planning = num_lines(lambda: messages_of(ranks, levels))  # noqa: B023
            flats, messages, num_parts = messages_of(ranks, levels)
            seen[ranks] = num_lines(lambda: send(flats, messages)), num_planning, num_parts  # noqa: B023
            with Operations() as operations:
                send(flats, messages)
            copies = [name for name, _ in operations.found if "copy_" in name]
            assert set(copies) == {"_foreach_copy_"}
            assert len(copies) <= len(messages) * (1 + levels)
            arrived = int(flats[0].sum())
            assert arrived == sum(part.stop - part.first for m in messages for part in m.parts if part.owner != 1)
    for few, many in zip(seen[512], seen[1024], strict=True):
        assert many <= 2.2 * few
    for ranks, (lines, _, parts) in seen.items():
        assert lines <= 10 * (parts + MOST_MESSAGES * ranks)
