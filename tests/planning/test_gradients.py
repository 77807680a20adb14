# SPDX-License-Identifier: Apache-2.0
"""Who sends which part of the gradients: nothing is lost, nothing is sent early, and the best is the best; and a plan
of slices sends every element of every buffer at most once, from the start on, and never before it exists."""

from __future__ import annotations

import itertools
import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_fsmoe.planning.call_shape import CallShape, moe_work
from ds_fsmoe.planning.chunks import MICRO_OP_BYTES, degree_by_bytes
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.decide.block_times import BlockTimes, Order
from ds_fsmoe.planning.decide.gradient_plan import (
    ALIGNED_ELEMENTS,
    BufferReadiness,
    GradientPlan,
    GradientSlice,
    WindowBytes,
    never_above,
    plan_by_bytes,
    plan_by_rule,
    plan_micro_ops,
)
from ds_fsmoe.planning.decide.gradients import (
    CHUNK_BYTES,
    MODES,
    Partition,
    QueuedGradient,
    SendWindow,
    partition,
    slice_bytes,
    window_prices,
)
from ds_fsmoe.planning.decide.plan import ModelPlan, Planner, Settings, plan_by_name
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.schedule import EXPERT_GRAD, GRAD, HOLD, Lane
from ds_fsmoe.planning.timeline import Contention, Timeline
from ds_fsmoe.planning.workload import BlockWork, MoEWork, Shape, Stage, Work
from tests.planning.layers import LAYOUTS, SHAPE, layer_of, random_costs

INTER = (Lane.INTER,)


def window(layer: int, kind: str, num_pieces: int, slack_ms: float, slope: float = 1.0) -> SendWindow:
    """A window with room for so many milliseconds, in which an all-to-all waits if it is inside a layer."""
    room_ms = slack_ms if kind == "dense" else 0.0
    return SendWindow(layer, kind, num_pieces, lambda time_ms: slope * np.maximum(0.0, time_ms - slack_ms), room_ms)


def dense(layer: int, size_bytes: int, cost: LinearCost, kind: str = GRAD) -> QueuedGradient:
    return QueuedGradient(kind, INTER, size_bytes, cost, layer)


expert = partial(dense, kind=EXPERT_GRAD)


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
    step_bytes = sum(each.size_bytes for each in pieces) / steps
    there = [sum(piece.size_bytes for piece in pieces[: each.num_slices]) / step_bytes + 1e-9 for each in windows]
    best_ms = np.inf
    for cuts in itertools.combinations_with_replacement(range(steps + 1), len(windows)):
        if any(cut > exists for cut, exists in zip(cuts, there, strict=True)):
            continue
        sent_ms = [
            pieces[0].cost.ms((cut - before) * step_bytes) if cut > before else None
            for before, cut in itertools.pairwise((0, *cuts, steps))
        ]
        in_windows = zip(sent_ms, windows, strict=False)
        time_ms = sum(float(each.extra_ms(np.array([ms]))[0]) for ms, each in in_windows if ms is not None)
        best_ms = min(best_ms, time_ms + (sent_ms[-1] or 0.0))
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
        mine, sent = [each for each in pieces if each.kind == kind], 0
        ends = np.cumsum([each.size_bytes for each in mine])
        of_windows = [pieces[: each.num_slices] for each in windows]
        for slices, there in zip((*found.slices, found.tail), (*of_windows, pieces), strict=True):
            for each in (each for each in slices if each.kind == kind):
                assert each.size_bytes == int(each.size_bytes) > 0
                sent += each.size_bytes
                assert sent <= sum(piece.size_bytes for piece in there if piece.kind == kind), "sent before it exists"
                # First in, first out: what has been sent by now reaches into this piece.
                assert each.newest_layer == mine[int(np.searchsorted(ends, sent))].layer
                assert each.lanes == mine[0].lanes
        assert sent == ends[-1]
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
def test_the_dynamic_program_is_never_worse_than_any_other_mode_and_the_same_every_time(seed: int) -> None:
    rng = random.Random(seed)
    pieces, windows = random_queue(rng, rng.randint(1, 4), two_kinds=seed % 3 == 0)
    # Lina's slices do not keep to the steps of the queue: each window may be off by one.
    steps = max(1, len(pieces)) * max(16, min(256, 2048 // len(pieces)))
    step_ms = sum(each.size_bytes * each.cost.beta_ms for each in pieces) / steps
    best_ms = split(pieces, windows, "adaptive").extra_ms
    for mode, solver in WAYS:
        found = split(pieces, windows, mode, solver)
        off_ms = 2 * len(windows) * step_ms if mode in IN_SLICES else 1e-5 * step_ms
        assert best_ms <= found.extra_ms + off_ms + 1e-9, (mode, solver)
        assert seed or found == split(pieces, windows, mode, solver), "it is the same every time"


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
    assert found.extra_ms == pytest.approx(by_brute_force_ms(pieces, windows, steps), abs=1e-4)


def test_fixed_chunks_are_of_one_size_with_a_rest() -> None:
    pieces = [dense(-1, 2500, LinearCost(0.0, 1e-3)), dense(0, 1000, LinearCost(0.0, 1e-3))]
    slacks_ms = (0.5, 1.2, 0.0, 9.0)
    windows = [window(i // 2, ("moe", "dense")[i % 2], 1 + i // 2, slack_ms) for i, slack_ms in enumerate(slacks_ms)]
    found = split(pieces, windows, "fixed_chunk", chunk_bytes=1000)
    sizes = [[each.size_bytes for each in slices] for slices in found.slices]
    assert sizes == [[1000], [1000, 500], [], [1000]], "a slice is sent only while the link would be idle"
    assert found.tail == ()
    assert found.extra_ms == pytest.approx(0.5 + 0.3)


def test_dense_only_sends_all_there_is_beside_each_dense_part() -> None:
    pieces = [dense(-1, 1000, COST), expert(0, 3000, COST), dense(0, 2000, COST)]
    windows = [window(i // 2, ("moe", "dense")[i % 2], count, 9.0) for i, count in enumerate((1, 2, 3, 3))]
    found = split(pieces, windows, "dense_only", num_steps=60)
    sizes = [{each.kind: each.size_bytes for each in slices} for slices in found.slices]
    assert sizes == [{}, {GRAD: 1000, EXPERT_GRAD: 3000}, {}, {GRAD: 2000}]
    assert found.tail == ()


# ---- slices of the buffers in which gradients lie


@st.composite
def buffers(draw: st.DrawFn) -> list[BufferReadiness]:
    """Some buffers over the same windows, with tensors that come ahead of them or with any elements there."""
    num_windows, made = draw(st.integers(0, 5)), []
    for kind in draw(st.lists(st.sampled_from((GRAD, EXPERT_GRAD)), min_size=1, max_size=3)):
        tensors = draw(st.lists(st.sampled_from((0, 1, 7, 127, 128, 300)) | st.integers(0, 9000), max_size=6))
        came = sorted(draw(st.lists(st.integers(0, num_windows), min_size=len(tensors), max_size=len(tensors))))
        ready = [sum(n for n, at in zip(tensors, came, strict=True) if at <= w) for w in range(num_windows)]
        ends = tuple(itertools.accumulate(tensors))
        if draw(st.booleans()):
            ready = sorted(draw(st.lists(st.integers(0, sum(tensors)), min_size=num_windows, max_size=num_windows)))
        made.append(BufferReadiness(kind, draw(st.sampled_from((2, 4))), tuple(ready), sum(tensors), ends))
    return made


def window_bytes() -> st.SearchStrategy[list[WindowBytes]]:
    slices = st.lists(
        st.tuples(st.sampled_from((GRAD, EXPERT_GRAD)), st.floats(0, 30_000, allow_nan=False)), max_size=3
    ).map(tuple)
    return st.lists(st.builds(WindowBytes, slices, slices), max_size=7)


def check(plan: GradientPlan, given_supplies: list[BufferReadiness]) -> list[int]:
    """What must hold of every plan; returns how many elements of each buffer it sends in windows."""
    sent = [0] * len(given_supplies)
    for window, parts in enumerate(zip(plan.moe, plan.dense, strict=True)):
        for parcels in parts:
            for each in parcels:
                supply = given_supplies[each.flat]
                assert each.kind == supply.kind
                assert each.first == sent[each.flat] < each.stop <= supply.ready[window]
                if supply.numel >= 8192:  # the next one begins where NCCL likes it, or with a tensor
                    assert each.stop % ALIGNED_ELEMENTS == 0 or each.stop in (*supply.tensor_ends, supply.numel)
                sent[each.flat] = each.stop
    assert plan.hidden() == sum(sent)
    assert plan.sizes == tuple(each.numel for each in given_supplies)
    return sent


@given(buffers(), st.sampled_from([each for each in MODES if each != "off"]), st.integers(1, 40_000))
def test_a_plan_by_rule_sends_what_exists_once_and_in_order_as_its_mode_says(
    given_supplies: list[BufferReadiness], mode: str, chunk_bytes: int
) -> None:
    plan = plan_by_rule(given_supplies, mode, chunk_bytes)
    sent = check(plan, given_supplies)
    assert plan.num_windows == len(given_supplies[0].ready)
    if mode in ("adaptive", "dense_only"):
        assert sent == [each.end(each.ready[-1]) if each.ready else 0 for each in given_supplies], "something is left"
    assert not any(plan.moe) or mode in ("adaptive", "fixed_chunk")
    assert not any(plan.dense) or mode in ("dense_only", "micro_ops", "adaptive")
    for parcels in plan.moe if mode == "fixed_chunk" else ():
        assert len({each.flat for each in parcels}) == len(parcels)
        for each in parcels:
            supply = given_supplies[each.flat]
            least_bytes = supply.step * supply.element_bytes
            assert (each.stop - each.first) * supply.element_bytes <= max(chunk_bytes, least_bytes)


@given(buffers(), window_bytes())
def test_a_plan_by_bytes_sends_what_exists_once_and_in_order(
    given_supplies: list[BufferReadiness], windows: list[WindowBytes]
) -> None:
    plan = plan_by_bytes(given_supplies, windows)
    check(plan, given_supplies)
    for window, (moe, dense) in enumerate(zip(plan.moe, plan.dense, strict=True)):
        wanted = windows[window] if window < len(windows) else WindowBytes()
        for parcels, slices in ((moe, wanted.moe), (dense, wanted.dense)):
            for kind in (GRAD, EXPERT_GRAD):
                got = sum((e.stop - e.first) * given_supplies[e.flat].element_bytes for e in parcels if e.kind == kind)
                assert got <= sum(size for of_kind, size in slices if of_kind == kind)


@pytest.mark.parametrize("ends", [[(1, 5)], [(0, 5), (4, 7)], [(0, 5), (6, 7)], [(0, 11)], [(0, 0)]], ids=str)
def test_a_plan_with_a_hole_or_an_overlap_is_refused(ends: list[tuple[int, int]]) -> None:
    parcels = tuple(GradientSlice(GRAD, 0, *each) for each in ends)
    for moe, dense in (((parcels,), ((),)), (((),), (parcels,))):
        with pytest.raises(ValueError, match="does not continue"):
            GradientPlan(moe, dense, (10,))
    # The part inside a layer comes ahead of the part beside what follows.
    first, second = ((GradientSlice(GRAD, 0, *each),) for each in ((0, 5), (5, 7)))
    GradientPlan((first,), (second,), (10,))
    with pytest.raises(ValueError, match="does not continue"):
        GradientPlan((second,), (first,), (10,))


def test_plans_by_rule_and_by_bytes_in_numbers() -> None:
    def ends(parcels: tuple[GradientSlice, ...]) -> list[tuple[int, int, int]]:
        return [(each.flat, each.first, each.stop) for each in parcels]

    one = [BufferReadiness(GRAD, 4, (10, 10, 31), 40)]
    shares, chunks = plan_by_rule(one, "adaptive", 1), plan_by_rule(one, "fixed_chunk", 27)
    assert [ends(each) for each in shares.moe] == [[(0, 0, 4)], [(0, 4, 7)], [(0, 7, 31)]]
    assert [ends(each) for each in chunks.moe] == [[(0, 0, 6)], [(0, 6, 10)], [(0, 10, 16)]]
    for mode in ("off", "auto", "lina"):
        with pytest.raises(ValueError, match="adaptive, fixed_chunk, dense_only"):
            plan_by_rule(one, mode, 1)
    # Bytes go on to the next buffer of the kind.
    kinds = ((GRAD, 4, 5), (EXPERT_GRAD, 4, 9), (GRAD, 2, 8))
    several = [BufferReadiness(kind, element_bytes, (numel,), numel) for kind, element_bytes, numel in kinds]
    plan = plan_by_bytes(several, [WindowBytes(((GRAD, 27.0), (EXPERT_GRAD, 8.0)), ())])
    assert ends(plan.moe[0]) == [(0, 0, 5), (2, 0, 3), (1, 0, 2)]
    # A buffer without tensors is one.
    assert BufferReadiness(GRAD, 4, (), 1000).micro_ops(1500) == [333, 666, 1000]
    assert BufferReadiness(GRAD, 4, (), 10_000, (3000, 10_000)).micro_ops(30_000) == [3000, 10_000]


@given(buffers(), window_bytes(), st.integers(0, 3000))
def test_no_more_waits_behind_a_layer_than_it_may_and_what_was_planned_is_sent_no_later(
    given_supplies: list[BufferReadiness], windows: list[WindowBytes], most: int
) -> None:
    plan = plan_by_bytes(given_supplies, windows)
    bounded = never_above(plan, given_supplies, most)
    check(bounded, given_supplies)
    sent, planned = ([0] * len(given_supplies) for _ in range(2))
    for window in range(plan.num_windows):
        for found, at in ((bounded, sent), (plan, planned)):
            for each in (*found.moe[window], *found.dense[window]):
                at[each.flat] = each.stop
        for supply, of_bounded, of_plan in zip(given_supplies, sent, planned, strict=True):
            assert supply.end(supply.ready[window]) - of_bounded <= most
            assert of_bounded >= of_plan
    assert never_above(plan, given_supplies, 10**9) == plan


def slices_by_loop(supply: BufferReadiness, chunk_bytes: int) -> list[tuple[int, int]]:
    """Every tensor in equal parts, their ends moved down to where a message may begin."""
    found, first = [], 0
    for end in supply.tensor_ends:
        numel, at = end - first, first
        parts = min(numel, -(-numel * supply.element_bytes // chunk_bytes))
        for part in range(1, parts + 1):
            stop = first + numel * part // parts
            if part < parts and supply.numel >= 64 * ALIGNED_ELEMENTS:
                stop -= stop % ALIGNED_ELEMENTS
            if stop > at:
                found.append((at, stop))
                at = stop
        first = end
    return found


def micro_ops_by_loop(
    supplies: list[BufferReadiness], room: list[tuple[int, int]], chunk_bytes: int, takes: Callable[[int], int]
) -> list[tuple[GradientSlice, ...]]:
    """While there is room the slice that came first goes, of a buffer that stands ahead of others."""
    queues, expected = [slices_by_loop(each, chunk_bytes) for each in supplies], []
    for at in range(len(supplies[0].ready)):
        for left in room[at] if at < len(room) else (0, 0):
            parcels = []
            while left > 0:
                there = [
                    (bisect_left(supplies[flat].ready, queue[0][1]), flat)
                    for flat, queue in enumerate(queues)
                    if queue and queue[0][1] <= supplies[flat].ready[at]
                ]
                if not there:
                    break
                flat = min(there)[1]
                parcels.append(GradientSlice(supplies[flat].kind, flat, *queues[flat].pop(0)))
                left -= takes(flat)
            expected.append(tuple(parcels))
    return expected


@given(buffers(), st.integers(1, 40_000), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6))
def test_a_plan_of_micro_ops_is_that_of_a_loop_and_by_rule_one_goes_beside_each_layer(
    supplies: list[BufferReadiness], chunk_bytes: int, room: list[tuple[int, int]]
) -> None:
    plan = plan_micro_ops(supplies, room, lambda each: 1 + each.flat, chunk_bytes)
    assert list(plan.parts) == micro_ops_by_loop(supplies, room, chunk_bytes, lambda flat: 1 + flat)
    by_rule = plan_by_rule(supplies, "micro_ops", chunk_bytes)
    beside = [(0, 1)] * len(supplies[0].ready)
    assert list(by_rule.parts) == micro_ops_by_loop(supplies, beside, chunk_bytes, lambda flat: 1)


GRADIENTS = (GRAD, EXPERT_GRAD)


# ---- all-to-alls


def moe(size_bytes: float, capacity: int | None = None) -> MoEWork:
    """An experts' part whose all-to-alls have so many bytes."""
    enter, leave = ((Stage(kind, INTER, size_bytes, group="ep"),) for kind in ("A2A_IN", "A2A_OUT"))
    return MoEWork(enter, Work("EXPERT", (Lane.COMPUTE,), 1.0), leave, capacity=capacity)


@given(st.integers(0, 400), st.integers(1, 60), st.integers(1, 16), st.none() | st.integers(1, 20))
def test_a_degree_is_the_least_that_makes_an_alltoall_a_micro_op(
    size_bytes: int, micro_op_bytes: int, most: int, capacity: int | None
) -> None:
    found = degree_by_bytes(moe(float(size_bytes), capacity), micro_op_bytes, most)
    allowed = range(1, 1 + (most if capacity is None else min(most, capacity)))
    fitting = [each for each in allowed if size_bytes / each <= micro_op_bytes]
    assert found == (fitting[0] if fitting else allowed[-1])


def test_a_micro_op_is_30_megabytes_and_a_layer_whose_tokens_stay_on_their_rank_is_not_cut() -> None:
    assert MICRO_OP_BYTES == 30e6
    degrees = {each: degree_by_bytes(moe(each), MICRO_OP_BYTES, 16) for each in (0, 1, 30e6, 30e6 + 1, 90e6, 1e9)}
    assert degrees == {0: 1, 1: 1, 30e6: 1, 30e6 + 1: 2, 90e6: 3, 1e9: 16}
    assert degree_by_bytes(MoEWork((), Work("EXPERT", (Lane.COMPUTE,), 1e12), ()), 1, 16) == 1
    assert slice_bytes("micro_ops", None) == MICRO_OP_BYTES
    assert slice_bytes("fixed_chunk", None) == CHUNK_BYTES == 31457280
    assert slice_bytes("micro_ops", 77) == slice_bytes("fixed_chunk", 77) == 77


@pytest.mark.parametrize("wires", [(1.0, 1.0), (0.28125, 1.0), (1.0, 0.5)])
def test_both_phases_have_one_degree_even_where_wires_differ(wires: tuple[float, float]) -> None:
    groups = Groups(8, 4, ep=8)
    shape = CallShape(8, 13, 7, 4, 1, 1, wires=wires)
    degrees = {degree_by_bytes(moe_work(groups, backward, shape), 101, 99) for backward in (False, True)}
    # Every slot of a call travels, so many rows of 7 elements.
    assert degrees == {min(13, -(-8 * 13 * 7 * 4 // 101))}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("micro_op_bytes", [97, 480, 10**6])
def test_the_planner_runs_every_layer_in_as_many_chunks_as_its_bytes_make(layout: str, micro_op_bytes: int) -> None:
    layers = [layer_of(layout), layer_of(layout, Shape(1, 8, 8, 16, 8, 1, None, heads=2))]
    settings = Settings(Contention(0.3, 0.1), 0.01, max_degree=5, chunk_bytes=micro_op_bytes)
    planner = Planner(random_costs(random.Random(layout)), settings)
    plan = plan_by_name(planner, "lina", layers)
    for index, layer in enumerate(layers):
        forward, backward = plan.blocks(index)
        size_bytes = max((each.size for each in layer.forward.moe.exchange), default=0.0)
        assert forward.degree == backward.degree == min(5, max(1, -int(-size_bytes // micro_op_bytes)))
        assert forward.links == "shared"
        # A degree by hand is respected, and said to be one.
        for choice in planner.choose(layer, settings.space("lina").with_degrees(2, 2, "shared")):
            assert (choice.order.degree, choice.auto_degree) == (2, forward.degree)


# ---- gradients in a plan of a model


def planned(layout: str, seed: int, contention: Contention, chunk_bytes: int) -> tuple[ModelPlan, Timeline]:
    """The backward of four layers of two kinds, as Lina would have it."""
    rng = random.Random(f"{layout}{seed}")
    costs = random_costs(rng)
    layers = [layer_of(layout, SHAPE if rng.random() < 0.7 else replace(SHAPE, L=5)) for _ in range(4)]
    host_ms = rng.choice([0.0, 0.01])
    plan = plan_by_name(Planner(costs, Settings(contention, host_ms, 3, chunk_bytes=chunk_bytes)), "lina", layers)
    return plan, plan.timelines(costs, contention, host_ms)[1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_alltoall_waits_for_no_slice_that_was_not_under_way_and_none_is_inside_a_layer_that_has_one(
    layout: str,
) -> None:
    beside = inside = 0
    for seed, contention in itertools.product(range(4), (Contention(), Contention(0.5, 0.2, 0.1))):
        plan, timeline = planned(layout, seed, contention, chunk_bytes=61)
        beside += sum(len(each.dense_slices) for each in plan.backward)
        inside += sum(len(each.moe_slices) for each in plan.backward)
        spans = timeline.spans
        for index, span in enumerate(spans):
            if not span.task.kind.startswith("A2A"):
                continue
            # What it needs of others than slices: then it could begin.
            needed = [each for each in span.task.after if spans[each].task.kind not in (*GRADIENTS, HOLD)]
            ready_ms = max((spans[each].end_ms for each in needed), default=0.0)
            for other in spans[:index]:
                if other.task.kind in GRADIENTS and other.end_ms > ready_ms:
                    assert other.start_ms <= ready_ms + 1e-9, (seed, span.task.name, other.task.name)
    # Or the rule would hold of nothing: slices travel wherever links are shared.
    assert bool(beside) == (layout != "one rank")
    assert not inside or LAYOUTS[layout][0].ep == 1
    assert inside or layout != "no expert parallelism"


def test_without_contention_a_window_costs_what_its_best_order_takes_longer_for_any_time_of_gradients() -> None:
    work, costs = layer_of("the paper's").backward, random_costs(random.Random(3))
    whole, inside = BlockTimes(work, costs), BlockTimes(BlockWork((), work.moe, ()), costs)
    orders = [Order(degree) for degree in (1, 2, 3)]
    moe, dense = window_prices(orders, orders[0], inside, whole)
    grads_ms = np.random.default_rng(0).uniform(0.0, 2.0 * whole.with_ms(orders, 0.0).max(), 50)
    assert moe(grads_ms) == pytest.approx(inside.times_ms(orders, grads_ms).min(0) - inside.with_ms(orders, 0.0).min())
    assert dense(grads_ms) == pytest.approx(whole.times_ms(orders, 0.0, grads_ms)[0] - whole.with_ms(orders, 0.0)[0])


def test_slices_begin_while_there_is_room_and_the_last_may_overrun() -> None:
    cost = LinearCost(0.0, 1e-3)
    pieces = [QueuedGradient(GRAD, INTER, 2500, cost, -1, (2300, 200)), QueuedGradient(GRAD, INTER, 1000, cost, 0)]
    slacks_ms = (9.0, 1.2, 9.0, 9.0)
    windows = [window(i // 2, ("moe", "dense")[i % 2], 1 + i // 2, slack_ms) for i, slack_ms in enumerate(slacks_ms)]
    found = partition(pieces, windows, "micro_ops", chunk_bytes=1000)
    sizes = [[each.size_bytes for each in slices] for slices in found.slices]
    # 2300 in three parts; nothing inside layers, where an all-to-all waits.
    assert sizes == [[], [766, 767], [], [767, 200, 1000]]
    assert found.tail == ()
    assert found.extra_ms == pytest.approx(0.333)
