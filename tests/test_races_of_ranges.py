# SPDX-License-Identifier: Apache-2.0
"""The pretended GPU tells bytes of one storage apart: two streams may use different ones, and not the same ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.gradient_cases import Run
from tests.pretended_gpu import Gpu, pretending
from tests.ranks import run_on_ranks
from tests.test_races_in_engines import _give_back, degrees, on_the_device


def breaches(first: slice, second: slice, reads: bool = False, waits: bool = False) -> list[str]:
    """The rules that are broken where a stream writes elements and another one writes or reads elements."""
    with pretending(Gpu()) as gpu:
        memory = torch.zeros(4, 4, device="cuda")
        side = gpu.make_stream()
        side.wait_stream(gpu.current)
        with gpu.on(side):
            memory.view(-1)[first].fill_(1.0)
        if waits:
            gpu.current.wait_stream(side)
        if reads:
            memory.view(-1)[second].sum()
        else:
            memory.view(-1)[second].fill_(2.0)
    return [each.rule for each in gpu.breaches]


@pytest.mark.parametrize("reads", [False, True])
def test_two_streams_may_use_different_elements_of_one_storage(reads: bool) -> None:
    assert breaches(slice(0, 8), slice(8, 16), reads) == []
    assert breaches(slice(8, 16), slice(0, 8), reads) == []


@pytest.mark.parametrize("reads", [False, True])
def test_a_race_on_elements_that_both_have_is_reported(reads: bool) -> None:
    assert breaches(slice(0, 9), slice(8, 16), reads) == ["order"]
    assert breaches(slice(8, 16), slice(0, 16), reads) == ["order"]
    assert breaches(slice(4, 5), slice(0, 16), reads) == ["order"]
    # Of a tensor with gaps the first and the last element count, and what is between.
    assert breaches(slice(0, 16, 5), slice(8, 9), reads) == ["order"]
    assert breaches(slice(0, 9), slice(8, 16), reads, waits=True) == []


def test_an_earlier_write_of_other_elements_is_not_forgotten() -> None:
    with pretending(Gpu()) as gpu:
        memory = torch.zeros(16, device="cuda")
        side = gpu.make_stream()
        side.wait_stream(gpu.current)
        with gpu.on(side):
            memory[:8].fill_(1.0)
            memory[8:].fill_(1.0)
        memory[:4].sum()
    assert [each.rule for each in gpu.breaches] == ["order"]


def sends_at_once(_: int, __: int) -> list[str]:
    """Breaches of an engine whose gradients are sent beside it before they are there."""
    from ds_fsmoe.gradients.background_lane import BackgroundStreams

    def give(self: BackgroundStreams, between: bool, step: object, after: object) -> object:
        with torch.cuda.stream(self._streams[between]), torch.no_grad():
            step()
            return self._now()

    dist.destroy_process_group()
    BackgroundStreams._give = give
    found = on_the_device(Run(1, mode="dense_only", steps=2, block=degrees(2, 2)), 2)
    _give_back()
    return list(found.breaches)


def test_gradients_that_are_sent_before_they_are_there_are_reported(tmp_path: Path) -> None:
    (found,) = run_on_ranks(sends_at_once, 1, tmp_path)
    assert any("order" in each for each in found)
