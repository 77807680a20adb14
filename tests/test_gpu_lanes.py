# SPDX-License-Identifier: Apache-2.0
"""The real pipeline on streams, links emulated: whatever is late, the bits are those of one task after another.

On a GPU a delay in every task of experts gives whatever would overwrite their rows the time to do it: memory of the
forward that is given away before the backward has read it shows as other weight gradients. The same bodies run here on
threads.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ds_fsmoe.execution.lanes import SerialLanes, make_lanes
from ds_fsmoe.execution.stream_lanes import StreamLanes
from ds_fsmoe.execution.thread_lanes import ThreadLanes
from tests import gpu_cases
from tests.gpu_cases import ON_DEVICE, SEEDS, Case, checksum, checksums, differing_seeds, run_layer
from tests.lane_cases import CPU
from tests.python_path import python_path

ROOT = Path(__file__).resolve().parents[1]
# Chunks of 32 KiB and more on a GPU: of one size, so that the allocator gives one the memory of another.
WIDTHS = {"cuda": 128, "cpu": 8}


@ON_DEVICE
def test_gradients_on_overlapping_lanes_are_those_of_serial_lanes_bit_for_bit(device: torch.device) -> None:
    seeds = range(SEEDS) if device.type == "cuda" else range(20)
    lanes = make_lanes(device)
    assert isinstance(lanes, StreamLanes if device.type == "cuda" else ThreadLanes)
    lanes.close()
    assert differing_seeds(device, seeds, WIDTHS[device.type]) == []


def test_the_comparison_sees_rows_that_are_overwritten_while_experts_have_yet_to_read_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a use after free does on a GPU, done by hand: a chunk that comes in takes the place of the one before."""
    places: dict[tuple[int, ...], torch.Tensor] = {}
    real = gpu_cases.EmulatedWires.sent

    def into_the_same_place(collectives: gpu_cases.EmulatedWires, x: torch.Tensor) -> torch.Tensor:
        received = real(collectives, x)
        return places.setdefault(tuple(x.shape), received).copy_(received)

    case = Case((4, 4))
    expected = run_layer(case, SerialLanes(), CPU, 8)
    monkeypatch.setattr(gpu_cases.EmulatedWires, "sent", into_the_same_place)
    found = run_layer(case, SerialLanes(), CPU, 8)
    assert not all(map(torch.equal, found, expected))


def main(device: str, num_seeds: int, file: str) -> None:
    """Write checksums, in a process of its own, whose allocator follows its environment."""
    Path(file).write_text(json.dumps(checksums(torch.device(device), range(num_seeds), WIDTHS[device])))


@ON_DEVICE
def test_an_allocator_that_never_gives_memory_twice_changes_no_bit(device: torch.device, tmp_path: Path) -> None:
    """Without the cache memory is freed when the device is through with it, so it cannot be overwritten too early."""
    found = []
    for caching in ({}, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}):
        file = tmp_path / f"{len(found)}.json"
        if device.type == "cpu":
            main("cpu", 2, str(file))
        else:
            environment = os.environ | {"PYTHONPATH": python_path()}
            environment.pop("PYTORCH_NO_CUDA_MEMORY_CACHING", None)
            call = f"from tests.test_gpu_lanes import main; main('cuda', 20, {str(file)!r})"
            subprocess.run([sys.executable, "-c", call], env=environment | caching, cwd=ROOT, check=True, timeout=120)
        found.append(json.loads(file.read_text()))
    assert found[0] == found[1]


def test_a_checksum_tells_one_element_that_differs() -> None:
    tensor = torch.ones(3, 5)
    before = checksum(tensor)
    tensor[1, 2] += 1e-6
    assert checksum(tensor) != before
