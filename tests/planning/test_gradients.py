# SPDX-License-Identifier: Apache-2.0
"""Who sends which part of the gradients: nothing is lost, nothing is sent early, and the best is the best."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest

from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.decide.gradients import Partition, QueuedGradient, SendWindow, partition
from ds_fsmoe.planning.schedule import EXPERT_GRAD, GRAD, Lane

INTER = (Lane.INTER,)


def window(layer: int, kind: str, num_pieces: int, slack_ms: float, slope: float = 1.0) -> SendWindow:
    """A window with room for so many milliseconds, in which an all-to-all waits if it is inside a layer."""
    room_ms = slack_ms if kind == "dense" else 0.0
    return SendWindow(layer, kind, num_pieces, lambda time_ms: slope * np.maximum(0.0, time_ms - slack_ms), room_ms)


def dense(layer: int, size_bytes: int, cost: LinearCost) -> QueuedGradient:
    return QueuedGradient(GRAD, INTER, size_bytes, cost, layer)


def expert(layer: int, size_bytes: int, cost: LinearCost) -> QueuedGradient:
    return QueuedGradient(EXPERT_GRAD, INTER, size_bytes, cost, layer)


def random_queue(rng: random.Random, layers: int, two_kinds: bool) -> tuple[list[QueuedGradient], list[SendWindow]]:
    """A backward of so many layers: each has its windows, and leaves a dense and perhaps an expert gradient."""
    cost = LinearCost(rng.choice([0.0, 0.3, 1.0]), 10 ** rng.uniform(-7, -5))
    other = LinearCost(rng.choice([0.0, 0.4]), 10 ** rng.uniform(-7, -5))
    pieces: list[QueuedGradient] = [dense(-1, rng.randint(1, 10**7), cost)] if rng.random() < 0.3 else []
    windows = []
    for layer in range(layers):
        slope = rng.choice([1.0, 1.0, 0.5])
        windows.append(window(layer, "moe", len(pieces), rng.choice([0.0, 20 * rng.random()]), slope))
        if two_kinds:
            pieces.append(expert(layer, rng.randint(1, 10**7), other))
        windows.append(window(layer, "dense", len(pieces), rng.choice([0.0, 20 * rng.random()])))
        pieces.append(dense(layer, rng.randint(1, 10**7), cost))
    return pieces, windows


def extra_ms(found: Partition, pieces: Sequence[QueuedGradient], windows: Sequence[SendWindow]) -> float:
    """What a partition costs, from its slices alone: each window's price, and the tail."""
    costs = {each.kind: each.cost for each in pieces}

    def ms(slices: tuple) -> float:
        return sum(costs[each.kind].ms(each.size_bytes) for each in slices)

    pairs = zip(windows, found.slices, strict=True)
    prices = sum(float(each.extra_ms(np.array([ms(slices)]))[0]) if slices else 0.0 for each, slices in pairs)
    return prices + ms(found.tail)


def by_brute_force_ms(pieces: Sequence[QueuedGradient], windows: Sequence[SendWindow], steps: int) -> float:
    """The best way to empty a queue of one kind in whole steps: all ways."""
    cost = pieces[0].cost
    total = sum(each.size_bytes for each in pieces)
    step_bytes = total / steps
    exists = [
        int(sum(each.size_bytes for each in pieces[: window.num_slices]) / step_bytes + 1e-9) for window in windows
    ]
    best_ms = np.inf
    for cuts in itertools.combinations_with_replacement(range(steps + 1), len(windows)):
        if any(cut > there for cut, there in zip(cuts, exists, strict=True)):
            continue
        time_ms, before = 0.0, 0
        for cut, each in zip(cuts, windows, strict=True):
            if cut > before:
                time_ms += float(each.extra_ms(np.array([cost.ms((cut - before) * step_bytes)]))[0])
            before = cut
        if before < steps:
            time_ms += cost.ms((steps - before) * step_bytes)
        best_ms = min(best_ms, time_ms)
    return best_ms


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


FREE, START_UP, SLOPE = LinearCost(0.0, 0.0), LinearCost(0.5, 0.0), LinearCost(0.0, 1e-6)


def windows_of(layers: int, *num_slices: int, slack_ms: float = 2.0) -> list[SendWindow]:
    """Two windows of each layer, with so many gradients there in each layer's second."""
    return [window(layer, kind, num_slices[layer], slack_ms) for layer in range(layers) for kind in ("moe", "dense")]


def queues() -> dict[str, tuple[list[QueuedGradient], list[SendWindow]]]:
    """Queues at the edges, and drawn ones of one and of two kinds of gradients."""
    rng, both = random.Random(5), (Lane.INTER, Lane.INTRA)
    found = {f"drawn {number}": random_queue(rng, rng.randint(1, 4), number % 2 == 1) for number in range(8)}
    found |= {
        "without windows": ([dense(-1, 10**6, COST)], []),
        "the layer's own": ([dense(0, 10**6 + 7, COST)], windows_of(1, 0, slack_ms=9.0)),
        "more than all slack": ([dense(-1, 10**9 + 1, COST), dense(0, 10**9 + 3, COST)], windows_of(2, 1, 2)),
        "one kind is free": ([expert(0, 10**6, COST), dense(0, 10**6, FREE)], windows_of(2, 0, 2)),
        "the other kind is free": ([dense(0, 10**6, FREE), expert(1, 10**6, COST)], windows_of(2, 1, 2)),
        "over both links": ([QueuedGradient(GRAD, both, 10**6, COST, -1), expert(0, 10**6, COST)], windows_of(1, 2)),
    }
    for name, cost in (("free", FREE), ("start-ups", START_UP), ("slopes", SLOPE)):
        pieces = [dense(layer, size, cost) for layer, size in enumerate((3, 10**7 + 1, 999_983))]
        found[name] = pieces, windows_of(3, 0, 1, 2)
    return found


@pytest.mark.parametrize("queue", queues())
def test_every_byte_is_sent_once_on_its_links_and_none_before_it_exists(queue: str) -> None:
    pieces, windows = queues()[queue]
    for mode, solver in WAYS if queue[-1] in "013" else WAYS[:-1]:
        found = split(pieces, windows, mode, solver, chunk_bytes=max(2**21, pieces[0].size_bytes // 64))
        check_laws(found, pieces, windows)
        if queue == "the layer's own":
            assert found.slices == ((), ())
            assert found.extra_ms == pytest.approx(0.5 + 1.000007, rel=1e-6)
        if queue == "more than all slack":
            assert found.extra_ms >= 2000.0 - 8.0
            if mode == "adaptive":
                assert found.extra_ms <= 2000.0 - 8.0 + 3 * COST.alpha_ms * 2 + 2 * 2000 / 512


@pytest.mark.parametrize(("mode", "solver"), WAYS)
def test_no_gradient_leaves_nothing_to_send(mode: str, solver: str) -> None:
    windows = windows_of(1, 0)
    for pieces in ([], [dense(0, 0, COST)]):
        assert split(pieces, windows, mode, solver) == Partition(((), ()), (), 0.0)
    assert split([], [], mode, solver) == Partition((), (), 0.0)


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


@pytest.mark.parametrize("seed", range(20))
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
