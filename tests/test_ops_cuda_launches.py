# SPDX-License-Identifier: Apache-2.0
"""What the CUDA ops would launch for the largest tensors: within a GPU's limits, on emulated CUDA that runs nothing."""

from __future__ import annotations

import itertools
import re

import pytest

torch = pytest.importorskip("torch")

from tests.emulated_kernels import DTYPES, PLAIN, PRIORITIES, Address, Ended, build  # noqa: E402

# What csrc/cuda/bindings.cpp lets through.
MOST_BLOCKS = 2**31 - 1
MOST_EXPERTS = 1024
SOMEWHERE, ODD = Address(1 << 40), Address((1 << 40) + 4)


def launches(ended: Ended) -> list[tuple[str, int, int, int]]:
    """(kernel, blocks, threads, bytes of shared memory). The emulation stops at one that a GPU would refuse."""
    assert ended.status == 0, ended.stderr
    found = re.findall(r"launch: (.+?) in .*: (\d+) blocks of (\d+) threads, (\d+) bytes shared", ended.stderr)
    return [(kernel, *map(int, numbers)) for kernel, *numbers in found]


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 16384, 2**33])
@pytest.mark.parametrize("pointer", [SOMEWHERE, ODD], ids=["aligned", "odd"])
def test_rows_of_the_largest_tensors_are_a_block_each(width: int, pointer: Address) -> None:
    kernels, sizes = build("rows.cu", PLAIN), (MOST_BLOCKS, 2, MOST_BLOCKS, width)
    x = (pointer, torch.float32)
    calls = {
        "launch_arrange": (*x, SOMEWHERE, *x, SOMEWHERE, *sizes),
        "launch_restore": (*x, SOMEWHERE, None, *x, *sizes),
        "launch_restore_backward": (*x, *x, SOMEWHERE, SOMEWHERE, pointer, SOMEWHERE, SOMEWHERE, *sizes),
    }
    for name, arguments in calls.items():
        found = launches(kernels.end(name, *arguments, only_list=1))
        assert len(found) == (1 if name == "launch_restore" else 2)
        assert {blocks for _, blocks, _, _ in found} == {MOST_BLOCKS}
        assert {threads for _, _, threads, _ in found} == {32 if width == 1 else 256}


@pytest.mark.parametrize(("dtype", "wire"), list(itertools.product(DTYPES, DTYPES)), ids=str)
def test_each_pair_of_types_has_kernels_for_packs_and_for_single_values(dtype, wire) -> None:
    size = 16 // min(dtype.itemsize, wire.itemsize)
    for pointer, expected in ((SOMEWHERE, size), (ODD, 1)):
        arguments = (pointer, dtype, SOMEWHERE, pointer, wire, SOMEWHERE, 3, 2, 5, 16)
        ended = build("rows.cu", PLAIN).end("launch_arrange", *arguments, only_list=1)
        assert set(re.findall(r"kSize = (\d+)", ended.stderr)) == {str(expected)}


@pytest.mark.parametrize("priority", range(len(PRIORITIES)), ids=PRIORITIES)
@pytest.mark.parametrize("num_choices", [1, 8, 1024])
def test_slots_of_the_largest_tensors_fit_their_launches(num_choices: int, priority: int) -> None:
    kernels, num_tokens = build("slots.cu", PLAIN), MOST_BLOCKS // num_choices
    sizes = (num_tokens, num_choices, MOST_EXPERTS)
    inputs = (SOMEWHERE, None, priority, SOMEWHERE, 0, MOST_EXPERTS, 1)
    outputs = (SOMEWHERE, SOMEWHERE, SOMEWHERE)
    ended = kernels.end("launch_take_slots", *inputs, *sizes, num_tokens, *outputs, only_list=1)
    found = {kernel: (blocks, threads, shared) for kernel, blocks, threads, shared in launches(ended)}
    tiles = -(-num_tokens // 256) * (num_choices if PRIORITIES[priority] == "choice" else 1)
    assert found["count_kernel"] == (tiles, 256, 4 * MOST_EXPERTS)
    place = next(launch for kernel, launch in found.items() if "place_kernel" in kernel)
    assert place == (tiles, 256, 32 * MOST_EXPERTS)
    queued = 2 * num_tokens * num_choices + MOST_EXPERTS if PRIORITIES[priority] == "score" else 0
    assert kernels.number("take_slots_workspace", *sizes, priority) == tiles * MOST_EXPERTS + queued
    assert all(blocks > 0 for blocks, _, _ in found.values())


def test_a_launch_beyond_the_limits_is_stopped() -> None:
    arguments = (SOMEWHERE, torch.float32, SOMEWHERE, None, SOMEWHERE, torch.float32, 2**31, 2, 5, 8)
    ended = build("rows.cu", PLAIN).end("launch_restore", *arguments, only_list=1)
    assert ended.status != 0
    assert "a GPU would refuse" in ended.stderr
