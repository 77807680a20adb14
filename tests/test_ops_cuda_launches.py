# SPDX-License-Identifier: Apache-2.0
"""What the CUDA ops would launch for the largest tensors: within a GPU's limits, on emulated CUDA that runs nothing."""

from __future__ import annotations

import itertools
import re

import pytest

torch = pytest.importorskip("torch")

from tests.call_counts import ON_A_GPU  # noqa: E402
from tests.covering import covering  # noqa: E402
from tests.emulated_kernels import CHECKED, PRIORITIES, Address, Ended, build  # noqa: E402
from tests.samples import sampled  # noqa: E402

pytestmark = pytest.mark.long

# What csrc/cuda/bindings.cpp lets through.
MOST_BLOCKS = 2**31 - 1
EXPERTS_AT_ONCE = 1024
SOMEWHERE, ODD = Address(1 << 40), Address((1 << 40) + 4)
WEIGHTS = SOMEWHERE, 64, 1


def launches(ended: Ended) -> list[tuple[str, int, int, int]]:
    """(kernel, blocks, threads, bytes of shared memory). The emulation stops at one that a GPU would refuse."""
    assert ended.status == 0, ended.stderr
    found = re.findall(r"launch: (.+?) in .*: (\d+) blocks of (\d+) threads, (\d+) bytes shared", ended.stderr)
    return [(kernel, *map(int, numbers)) for kernel, *numbers in found]


@sampled(("width", "pointer"), list(itertools.product([1, 16384, 2**33], [SOMEWHERE, ODD])))
def test_rows_of_the_largest_tensors_are_a_block_each(width: int, pointer: Address) -> None:
    kernels, sizes = build("rows.cu", CHECKED), (MOST_BLOCKS, 2, MOST_BLOCKS, width)
    x = (pointer, torch.float32)
    calls = {
        "launch_arrange": (*x, SOMEWHERE, *x, SOMEWHERE, *sizes),
        "launch_restore": (*x, SOMEWHERE, None, 0, 0, 0, *x, *sizes),
        "launch_restore_backward": (*x, *x, SOMEWHERE, *WEIGHTS, pointer, SOMEWHERE, SOMEWHERE, *sizes),
    }
    for name, arguments in calls.items():
        found = launches(kernels.end(name, *arguments, only_list=1))
        assert len(found) == (1 if name == "launch_restore" else 2)
        assert {blocks for _, blocks, _, _ in found} == {MOST_BLOCKS}
        assert {threads for _, _, threads, _ in found} == {32 if width == 1 else 256}


SIZES = covering([1, EXPERTS_AT_ONCE, 2**20], [1, 8, 1024], range(len(PRIORITIES)))


@sampled(("num_experts", "num_choices", "priority"), SIZES, drawn=3)
def test_slots_of_the_largest_tensors_fit_their_launches(num_experts: int, num_choices: int, priority: int) -> None:
    kernels, num_tokens = build("slots.cu", CHECKED), MOST_BLOCKS // num_choices
    at_once = min(num_experts, EXPERTS_AT_ONCE)
    sizes = (num_tokens, num_choices, num_experts)
    inputs = (SOMEWHERE, None, priority, SOMEWHERE, 0, num_experts, 1)
    outputs = (SOMEWHERE, SOMEWHERE, SOMEWHERE)
    ended = kernels.end("launch_take_slots", *inputs, *sizes, num_tokens, *outputs, only_list=1)
    found = {kernel: (blocks, threads, shared) for kernel, blocks, threads, shared in launches(ended)}
    tiles = -(-num_tokens // 256) * (num_choices if PRIORITIES[priority] == "choice" else 1)
    assert found["count_kernel"] == (tiles, 256, 4 * at_once)
    place = next(launch for kernel, launch in found.items() if "place_kernel" in kernel)
    assert place == (tiles, 256, 32 * at_once)
    queued = 2 * num_tokens * num_choices + num_experts if PRIORITIES[priority] == "score" else 0
    assert kernels.number("take_slots_workspace", *sizes, priority) == tiles * num_experts + queued
    assert all(blocks > 0 for blocks, _, _ in found.values())


@pytest.mark.parametrize("num_segments", [None, 30])
@pytest.mark.parametrize(("num_choices", "num_experts"), [(1, 1), (8, 384), (8, 2**20)])
def test_rows_of_the_largest_decisions_fit_their_launches(
    num_choices: int, num_experts: int, num_segments: int | None
) -> None:
    kernels, num_tokens = build("slots.cu", CHECKED), MOST_BLOCKS // num_choices
    segments = (None, 1) if num_segments is None else (SOMEWHERE, num_segments)
    decision = (SOMEWHERE, 1, num_choices, num_tokens, num_choices, num_experts, 1, *segments)
    found = launches(kernels.end("launch_number_rows", *decision, None, *(SOMEWHERE,) * 5, only_list=1))
    tiles, at_once = -(-num_tokens // 256) + segments[1] - 1, min(num_experts, EXPERTS_AT_ONCE)
    assert [launch[1:] for launch in found] == [
        (tiles, 256, 4 * at_once),
        (-(-num_experts * segments[1] // 8), 256, 0),
        (1, 256, 0),
        (tiles, 256, 32 * at_once),
    ]
    assert kernels.number("number_rows_workspace", *decision) == tiles * (num_experts + 1)


def test_a_launch_beyond_the_limits_is_stopped() -> None:
    arguments = (SOMEWHERE, torch.float32, SOMEWHERE, None, 0, 0, 0, SOMEWHERE, torch.float32, 2**31, 2, 5, 8)
    ended = build("rows.cu", CHECKED).end("launch_restore", *arguments, only_list=1)
    assert ended.status != 0
    assert "a GPU would refuse" in ended.stderr


def test_the_table_of_launches_is_that_of_the_launchers() -> None:
    x = (SOMEWHERE, torch.bfloat16)
    sizes = (64, 2, 128, 16)
    rows, slots, gated = (build(f"{name}.cu", CHECKED) for name in ("rows", "slots", "gated"))
    decision = (SOMEWHERE, 64, 1, 64, 2, 16, 1, None, 1)
    taking = (SOMEWHERE, None, PRIORITIES.index("choice"), None, 0, 0, 0, 64, 2, 16, 8)
    choosing = slots.end("launch_choose", SOMEWHERE, 64, 16, 2, SOMEWHERE, only_list=1)
    of_form = (torch.bfloat16, 0, 0, 0.0, 0.0)
    ended = {
        "arrange": rows.end("launch_arrange", *x, SOMEWHERE, *x, SOMEWHERE, *sizes, only_list=1),
        "restore": rows.end("launch_restore", *x, SOMEWHERE, *WEIGHTS, 1, *x, *sizes, only_list=1),
        "restore_backward": rows.end(
            "launch_restore_backward", *x, *x, SOMEWHERE, *WEIGHTS, *(SOMEWHERE,) * 3, *sizes, only_list=1
        ),
        "gated": gated.end("launch_gated", SOMEWHERE, None, *of_form, None, SOMEWHERE, 64, 16, only_list=1),
        "gated_backward": gated.end(
            "launch_gated", SOMEWHERE, SOMEWHERE, *of_form, SOMEWHERE, SOMEWHERE, 64, 16, only_list=1
        ),
        "number_rows": slots.end("launch_number_rows", *decision, None, *(SOMEWHERE,) * 5, only_list=1),
        "take_slots": slots.end("launch_take_slots", *taking, *(SOMEWHERE,) * 3, only_list=1),
    }
    found = {name: len(launches(each)) + each.stderr.count("memset: ") for name, each in ended.items()}
    found["top_k_slots"] = len(launches(choosing)) + found["take_slots"]
    assert found == ON_A_GPU
