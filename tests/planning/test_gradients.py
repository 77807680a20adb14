# SPDX-License-Identifier: Apache-2.0
"""Who sends which part of the gradients: nothing is lost, nothing is sent early, and the best is the best."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.decide.gradients import MODES, Partition, QueuedGradient, SendWindow, partition
from ds_fsmoe.planning.schedule import EXPERT_GRAD, GRAD, Lane
from tests.planning.queues import by_brute_force_ms, dense, expert, extra_ms, random_queue, window

IN_SLICES = ("fixed_chunk", "micro_ops")
WAYS = [("off", "dp"), ("dense_only", "dp"), *((each, "dp") for each in (*IN_SLICES, "adaptive")), ("adaptive", "de")]
COST = LinearCost(0.5, 1e-6)


def split(
    pieces: list[QueuedGradient], windows: list[SendWindow], mode: str, solver: str = "dp", **more: int
) -> Partition:
    return partition(pieces, windows, mode, solver=solver, chunk_bytes=more.pop("chunk_bytes", 2**21), **more)


def check_laws(found: Partition, pieces: list[QueuedGradient], windows: list[SendWindow]) -> None:
    """Bytes of each kind sum exactly; a window sends only what exists by then, and knows the newest of it."""
    assert len(found.slices) == len(windows)
    for kind in {each.kind for each in pieces}:
        mine = [each for each in pieces if each.kind == kind]
        sent = 0
        for place, slices in enumerate((*found.slices, found.tail)):
            there = (
                mine if place == len(windows) else [p for p in pieces[: windows[place].num_slices] if p.kind == kind]
            )
            for each in (each for each in slices if each.kind == kind):
                assert each.size_bytes > 0
                assert each.size_bytes == int(each.size_bytes)
                sent += each.size_bytes
                assert sent <= sum(p.size_bytes for p in there), "sent before it is computed"
                # First in, first out: what has been sent by now reaches into this piece.
                ends = np.cumsum([p.size_bytes for p in mine])
                assert each.newest_layer == mine[int(np.searchsorted(ends, sent))].layer
                assert each.lanes == mine[0].lanes
        assert sent == sum(each.size_bytes for each in mine)
    sent_bytes = sum(each.size_bytes for slices in (*found.slices, found.tail) for each in slices)
    assert sent_bytes == sum(each.size_bytes for each in pieces)
    assert found.extra_ms == pytest.approx(extra_ms(found, pieces, windows), abs=1e-3, rel=1e-4)


@pytest.mark.parametrize("two_kinds", [False, True])
@pytest.mark.parametrize(("mode", "solver"), WAYS)
def test_every_byte_is_sent_once_and_none_before_it_exists(mode: str, solver: str, two_kinds: bool) -> None:
    rng = random.Random(f"{mode}{two_kinds}")
    for _ in range(2 if solver == "de" else 8):
        pieces, windows = random_queue(rng, rng.randint(1, 4), two_kinds)
        check_laws(split(pieces, windows, mode, solver), pieces, windows)


@pytest.mark.parametrize(("mode", "solver"), WAYS)
def test_no_gradient_leaves_nothing_to_send(mode: str, solver: str) -> None:
    windows = [window(0, "moe", 0, 3.0), window(0, "dense", 0, 3.0)]
    nothing = Partition(((), ()), (), 0.0)
    assert split([], windows, mode, solver) == nothing
    assert split([dense(0, 0, COST)], windows, mode, solver) == nothing
    assert split([], [], mode, solver) == Partition((), (), 0.0)


@pytest.mark.parametrize(("mode", "solver"), WAYS)
def test_one_layer_can_send_its_own_gradient_only_at_the_end(mode: str, solver: str) -> None:
    pieces, windows = [dense(0, 10**6 + 7, COST)], [window(0, "moe", 0, 9.0), window(0, "dense", 0, 9.0)]
    found = split(pieces, windows, mode, solver)
    assert found.slices == ((), ())
    assert sum(each.size_bytes for each in found.tail) == 10**6 + 7
    assert found.extra_ms == pytest.approx(0.5 + 1.000007, rel=1e-6)


@pytest.mark.parametrize(("mode", "solver"), WAYS)
def test_gradients_without_windows_are_sent_at_the_end(mode: str, solver: str) -> None:
    pieces = [dense(-1, 10**6, COST)]
    check_laws(split(pieces, [], mode, solver), pieces, [])


@pytest.mark.parametrize("cost", [LinearCost(0.0, 0.0), LinearCost(0.5, 0.0), LinearCost(0.0, 1e-6)], ids=str)
@pytest.mark.parametrize(("mode", "solver"), WAYS)
def test_start_ups_and_slopes_of_zero_keep_the_laws(mode: str, solver: str, cost: LinearCost) -> None:
    pieces = [dense(layer, size, cost) for layer, size in enumerate((3, 10**7 + 1, 999_983))]
    windows = [w for i in range(3) for w in (window(i, "moe", i, 1.0), window(i, "dense", i, 2.0))]
    check_laws(split(pieces, windows, mode, solver), pieces, windows)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fast_first", [True, False])
def test_a_kind_that_costs_nothing_per_byte_is_not_sent_early_beside_one_that_does(mode: str, fast_first: bool) -> None:
    free = LinearCost(0.1, 0.0)
    first, second = (expert(0, 10**6, COST), dense(0, 10**6, free))
    pieces = [dense(0, 10**6, free), expert(1, 10**6, COST)] if fast_first else [first, second]
    windows = [
        window(0, "moe", 0, 5.0),
        window(0, "dense", 1, 5.0),
        window(1, "moe", 1, 5.0),
        window(1, "dense", 2, 5.0),
    ]
    check_laws(split(pieces, windows, mode), pieces, windows)


@pytest.mark.parametrize(("mode", "solver"), WAYS)
def test_a_gradient_larger_than_all_slack_is_still_sent_in_full(mode: str, solver: str) -> None:
    pieces = [dense(-1, 10**9 + 1, COST), dense(0, 10**9 + 3, COST)]
    windows = [w for i in range(2) for w in (window(i, "moe", i + 1, 1.5), window(i, "dense", i + 1, 2.5))]
    found = split(pieces, windows, mode, solver, chunk_bytes=30 * 2**20)
    check_laws(found, pieces, windows)
    assert found.extra_ms >= 2000.0 - 8.0
    if mode == "adaptive":
        assert found.extra_ms <= 2000.0 - 8.0 + 3 * COST.alpha_ms * 2 + 2 * 2000 / 512


@pytest.mark.parametrize("seed", range(5))
def test_the_dynamic_program_is_never_worse_than_any_other_mode(seed: int) -> None:
    rng = random.Random(seed)
    pieces, windows = random_queue(rng, rng.randint(1, 4), two_kinds=seed % 3 == 0)
    # Lina's slices do not keep to the steps of the queue: each window may be off by one.
    steps = max(1, len(pieces)) * max(16, min(256, 2048 // len(pieces)))
    step_ms = sum(each.size_bytes * each.cost.beta_ms for each in pieces) / steps
    best_ms = split(pieces, windows, "adaptive").extra_ms
    for mode, solver in WAYS:
        other_ms = split(pieces, windows, mode, solver).extra_ms
        off_ms = 2 * len(windows) * step_ms if mode in IN_SLICES else 1e-5 * step_ms
        assert best_ms <= other_ms + off_ms + 1e-9, (mode, solver)


def test_the_dynamic_program_counts_the_launch_that_a_second_window_costs() -> None:
    """10 ms in the queue and 5 ms of room in one window: all of it there costs 2 + 10 - 5, a rest at the end 2 more."""
    cost = LinearCost(2.0, 0.01)
    windows = [
        window(0, "moe", 1, 0.0),
        window(0, "dense", 1, 5.0),
        window(1, "moe", 1, 0.0),
        window(1, "dense", 1, 0.0),
    ]
    found = split([dense(-1, 1000, cost)], windows, "adaptive")
    assert found.extra_ms == pytest.approx(7.0)


@pytest.mark.parametrize("seed", range(30))
def test_the_dynamic_program_is_the_best_of_all_ways_on_a_small_grid(seed: int) -> None:
    rng = random.Random(seed)
    cost = LinearCost(rng.choice([0.0, 0.2, 1.0, 3.0]), 1e-6)
    count, steps = rng.randint(2, 4), 12
    pieces = [dense(i - 1, 10**6 * rng.randint(1, 4), cost) for i in range(rng.randint(1, 3))]
    windows = [
        window(i // 2, ("moe", "dense")[i % 2], min(len(pieces), 1 + i // 2), rng.choice([0.0, 1.0, 2.5, 6.0]), slope)
        for i, slope in enumerate([rng.choice([0.5, 1.0, 1.0, 1.5]) for _ in range(count)])
    ]
    found = split(pieces, windows, "adaptive", num_steps=steps)
    best_ms = by_brute_force_ms(pieces, windows, steps)
    assert found.extra_ms == pytest.approx(best_ms, abs=1e-4)


def test_fixed_chunks_are_of_one_size_with_a_rest() -> None:
    pieces = [dense(-1, 2500, LinearCost(0.0, 1e-3)), dense(0, 1000, LinearCost(0.0, 1e-3))]
    windows = [
        window(0, "moe", 1, 0.5),
        window(0, "dense", 1, 1.2),
        window(1, "moe", 2, 0.0),
        window(1, "dense", 2, 9.0),
    ]
    found = split(pieces, windows, "fixed_chunk", chunk_bytes=1000)
    sizes = [[each.size_bytes for each in slices] for slices in found.slices]
    assert sizes == [[1000], [1000, 500], [], [1000]], "a slice is sent only while the link would be idle"
    assert found.tail == ()
    assert found.extra_ms == pytest.approx(0.5 + 0.3)


def test_dense_only_sends_all_there_is_beside_each_dense_part() -> None:
    pieces = [dense(-1, 1000, COST), expert(0, 3000, COST), dense(0, 2000, COST)]
    windows = [
        window(0, "moe", 1, 9.0),
        window(0, "dense", 2, 9.0),
        window(1, "moe", 3, 9.0),
        window(1, "dense", 3, 9.0),
    ]
    found = split(pieces, windows, "dense_only", num_steps=60)
    sizes = [{each.kind: each.size_bytes for each in slices} for slices in found.slices]
    assert sizes == [{}, {GRAD: 1000, EXPERT_GRAD: 3000}, {}, {GRAD: 2000}]
    assert found.tail == ()


@pytest.mark.parametrize("solver", ["dp", "de"])
def test_a_partition_is_the_same_every_time(solver: str) -> None:
    pieces, windows = random_queue(random.Random(4), 4, two_kinds=True)
    once, again = (split(pieces, windows, "adaptive", solver, seed=7) for _ in range(2))
    assert once == again


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "adaptiv"}, "mode = 'adaptiv': did you mean 'adaptive'"),
        ({"solver": "ga"}, "solver = 'ga': the choices are dp, de"),
        ({"chunk_bytes": 0}, "chunk_bytes = 0: must be a whole number of at least 1"),
        ({"num_steps": 0}, "num_steps = 0"),
    ],
)
def test_an_unknown_way_is_refused_with_the_choices(change: dict, message: str) -> None:
    arguments = {"mode": "adaptive", "solver": "dp", "chunk_bytes": 9} | change
    with pytest.raises(ValueError, match=message):
        partition([dense(0, 5, COST)], [window(0, "moe", 0, 1.0)], arguments.pop("mode"), **arguments)


def test_a_slice_keeps_the_lanes_of_its_gradient() -> None:
    both = (Lane.INTER, Lane.INTRA)
    pieces = [QueuedGradient(GRAD, both, 10**6, COST, -1), expert(0, 10**6, COST)]
    windows = [window(0, "moe", 1, 9.0), window(0, "dense", 2, 9.0)]
    for mode, solver in WAYS:
        found = split(pieces, windows, mode, solver)
        for each in (each for slices in (*found.slices, found.tail) for each in slices):
            assert each.lanes == (both if each.kind == GRAD else (Lane.INTER,))
