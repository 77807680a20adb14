# SPDX-License-Identifier: Apache-2.0
"""Expert packing doubles the experts of a rank until their micro-op takes as long as the all-to-all's."""

from __future__ import annotations

import random

import pytest

from ds_fsmoe.planning.lina.packing import pack, packings


def by_loop(experts: int, ranks: int, experts_ms: dict[int, float], alltoall_ms: dict[int, float]) -> int:
    """The number of ranks, as the paper tells it: from the fewest experts per rank on, twice as many each time."""
    while experts_ms[ranks] < alltoall_ms[ranks]:
        if ranks % 2 or experts % (ranks // 2):
            break
        ranks //= 2
    return ranks


def fitting(experts: int, world_size: int) -> list[int]:
    return [each for each in range(1, world_size + 1) if world_size % each == 0 and experts % each == 0]


@pytest.mark.parametrize("experts", [1, 2, 3, 6, 8, 12, 13, 64])
def test_the_rule_is_that_of_a_loop(experts: int) -> None:
    rng = random.Random(experts)
    for world_size in (1, 2, 3, 4, 6, 8, 12, 16, 31):
        sizes = fitting(experts, world_size)
        for most_ms in (0.0, *[3.0] * 10):
            computed = {each: rng.uniform(0, most_ms) for each in sizes}
            sent = {each: rng.uniform(0, 3) if each > 1 else 0.0 for each in sizes}
            found = pack([experts], sizes, computed.__getitem__, sent.__getitem__)
            assert found.ep_size == by_loop(experts, max(sizes), computed, sent)
            assert found.experts_per_rank(found.ep_size) == (experts // found.ep_size,)
            assert [row.experts_ms for row in found.rows] == [computed[row.ep_size] for row in found.rows]


def test_times_are_asked_for_no_further_than_the_choice() -> None:
    asked: list[tuple[str, int]] = []

    def experts_ms(ranks: int) -> float:
        asked.append(("experts", ranks))
        return 1.0

    def alltoall_ms(ranks: int) -> float:
        asked.append(("all-to-all", ranks))
        return {16: 4.0, 8: 2.0, 4: 1.0}[ranks]

    assert pack([16], [1, 2, 4, 8, 16], experts_ms, alltoall_ms).ep_size == 4
    assert asked == [(what, ranks) for ranks in (16, 8, 4) for what in ("experts", "all-to-all")]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([1], (1,)),
        ([1, 2, 3, 6], (6, 3)),
        ([1, 3], (3,)),
        ([1, 2, 4, 8], (8, 4, 2, 1)),
        ([1, 2, 3, 4, 6, 12], (12, 6, 3)),
        ([4, 16], (16,)),
    ],
)
def test_packing_goes_by_halves_as_far_as_there_are_such_numbers(sizes: list[int], expected: tuple[int, ...]) -> None:
    assert packings(sizes) == expected


def test_layers_with_different_experts_have_one_number_of_ranks() -> None:
    found = pack([8, 24, 8], [1, 2, 4, 8], lambda ranks: 8.0 / ranks, lambda ranks: 2.0)
    assert (found.num_experts, found.ep_size) == ((8, 24), 4)
    assert found.experts_per_rank(4) == (2, 6)
    lines = str(found.table()).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["1", "or", "3", "8", "1.000", "2.000"],
        ["2", "or", "6", "4", "2.000", "2.000"],
    ]
    assert lines[0].split("  ")[0].strip() == "experts per rank"


@pytest.mark.parametrize(
    ("experts", "sizes", "time_ms", "message"),
    [
        ([8], [], 1.0, r"ep_sizes = \[\]: must be numbers of ranks that divide \[8\] experts"),
        ([8, 6], [1, 2, 4], 1.0, r"ep_sizes = \[1, 2, 4\]: must be"),
        ([8], [0, 1], 1.0, r"ep_sizes = \[0, 1\]: must be"),
        ([8], [1, 2], float("nan"), "times must be finite"),
        ([8], [1, 2], -1.0, "times must be finite and at least 0"),
    ],
)
def test_what_cannot_be_packed_is_refused(experts: list[int], sizes: list[int], time_ms: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(experts, sizes, lambda ranks: time_ms, lambda ranks: time_ms)
