# SPDX-License-Identifier: Apache-2.0
"""A plan of slices sends every element of every buffer at most once, from the start on, and never before it exists."""

from __future__ import annotations

from bisect import bisect_left

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from ds_fsmoe.planning.schedule import EXPERT_GRAD, GRAD

UNHURRIED = settings(deadline=None, derandomize=True)

MODES = ("adaptive", "fixed_chunk", "dense_only", "micro_ops")


@st.composite
def supplies(draw: st.DrawFn, max_windows: int = 6) -> list[BufferReadiness]:
    """Of some buffers, over the same windows."""
    num_windows = draw(st.integers(0, max_windows))
    made = []
    for _ in range(draw(st.integers(1, 3))):
        numel = draw(st.integers(0, 5000) | st.integers(8000, 20_000))
        ready = sorted(draw(st.lists(st.integers(0, numel), min_size=num_windows, max_size=num_windows)))
        kind, element_bytes = draw(st.sampled_from((GRAD, EXPERT_GRAD))), draw(st.sampled_from((2, 4)))
        made.append(BufferReadiness(kind, element_bytes, tuple(ready), numel))
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
                if supply.numel >= 8192:  # the next one begins where NCCL likes it
                    assert each.first % ALIGNED_ELEMENTS == 0
                    assert each.stop % ALIGNED_ELEMENTS == 0 or each.stop == supply.numel
                sent[each.flat] = each.stop
    assert plan.hidden() == sum(sent)
    assert plan.sizes == tuple(each.numel for each in given_supplies)
    return sent


@UNHURRIED
@given(supplies(), st.sampled_from(MODES), st.integers(1, 40_000))
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


@UNHURRIED
@given(supplies(), window_bytes())
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


def test_the_share_of_a_window_in_numbers() -> None:
    plan = plan_by_rule([BufferReadiness(GRAD, 4, (10, 10, 31), 40)], "adaptive", 1)
    assert [[(e.first, e.stop) for e in parcels] for parcels in plan.moe] == [[(0, 4)], [(4, 7)], [(7, 31)]]
    plan = plan_by_rule([BufferReadiness(GRAD, 4, (10, 10, 31), 40)], "fixed_chunk", 27)
    assert [[(e.first, e.stop) for e in parcels] for parcels in plan.moe] == [[(0, 6)], [(6, 10)], [(10, 16)]]


def test_bytes_go_on_to_the_next_buffer_of_the_kind() -> None:
    two = [
        BufferReadiness(GRAD, 4, (5,), 5),
        BufferReadiness(EXPERT_GRAD, 4, (9,), 9),
        BufferReadiness(GRAD, 2, (8,), 8),
    ]
    plan = plan_by_bytes(two, [WindowBytes(((GRAD, 27.0), (EXPERT_GRAD, 8.0)), ())])
    assert [(e.flat, e.first, e.stop) for e in plan.moe[0]] == [(0, 0, 5), (2, 0, 3), (1, 0, 2)]


@pytest.mark.parametrize(
    "parcels",
    [
        [GradientSlice(GRAD, 0, 1, 5)],  # not from the start
        [GradientSlice(GRAD, 0, 0, 5), GradientSlice(GRAD, 0, 4, 7)],  # twice
        [GradientSlice(GRAD, 0, 0, 5), GradientSlice(GRAD, 0, 6, 7)],  # with a hole
        [GradientSlice(GRAD, 0, 0, 11)],  # past the end
        [GradientSlice(GRAD, 0, 0, 0)],  # nothing
    ],
)
def test_a_plan_with_a_hole_or_an_overlap_is_refused(parcels: list[GradientSlice]) -> None:
    for moe, dense in (((tuple(parcels),), ((),)), (((),), (tuple(parcels),))):
        with pytest.raises(ValueError, match="does not continue"):
            GradientPlan(moe, dense, (10,))


def test_the_part_inside_a_layer_comes_before_the_part_beside_what_follows() -> None:
    first, second = GradientSlice(GRAD, 0, 0, 5), GradientSlice(GRAD, 0, 5, 7)
    GradientPlan(((first,),), ((second,),), (10,))
    with pytest.raises(ValueError, match="does not continue"):
        GradientPlan(((second,),), ((first,),), (10,))


def test_a_mode_without_a_rule_is_refused() -> None:
    for mode in ("off", "auto", "lina"):
        with pytest.raises(ValueError, match="adaptive, fixed_chunk, dense_only"):
            plan_by_rule([BufferReadiness(GRAD, 4, (10,), 10)], mode, 1)


@UNHURRIED
@given(supplies(), window_bytes(), st.integers(0, 3000))
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


# ---- Lina's slices of single tensors


@st.composite
def buffers(draw: st.DrawFn) -> list[BufferReadiness]:
    """Some buffers of tensors that come ahead of windows."""
    num_windows = draw(st.integers(0, 5))
    made = []
    for kind in draw(st.lists(st.sampled_from((GRAD, EXPERT_GRAD)), min_size=1, max_size=3)):
        tensors = draw(st.lists(st.sampled_from((0, 1, 7, 127, 128, 300)) | st.integers(0, 9000), max_size=6))
        came = sorted(draw(st.lists(st.integers(0, num_windows), min_size=len(tensors), max_size=len(tensors))))
        ready = [sum(n for n, at in zip(tensors, came, strict=True) if at <= w) for w in range(num_windows)]
        ends = [sum(tensors[: place + 1]) for place in range(len(tensors))]
        made.append(BufferReadiness(kind, draw(st.sampled_from((2, 4))), tuple(ready), sum(tensors), tuple(ends)))
    return made


def slices_by_loop(supply: BufferReadiness, chunk_bytes: int) -> list[tuple[int, int]]:
    """Every tensor in equal parts, their ends moved down to where a message may begin."""
    found = []
    first = 0
    for end in supply.tensor_ends:
        numel = end - first
        if numel:
            parts = min(numel, -(-numel * supply.element_bytes // chunk_bytes))
            at = first
            for part in range(1, parts + 1):
                stop = first + numel * part // parts
                if part < parts and supply.numel >= 64 * ALIGNED_ELEMENTS:
                    stop -= stop % ALIGNED_ELEMENTS
                if stop > at:
                    found.append((at, stop))
                    at = stop
        first = end
    return found


@UNHURRIED
@given(buffers(), st.integers(1, 40_000), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6))
def test_a_plan_of_micro_ops_is_that_of_a_loop(
    supplies: list[BufferReadiness], chunk_bytes: int, room: list[tuple[int, int]]
) -> None:
    plan = plan_micro_ops(supplies, room, lambda each: 1 + each.flat, chunk_bytes)
    queues = [slices_by_loop(each, chunk_bytes) for each in supplies]
    expected = []
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
                left -= 1 + flat
            expected.append(tuple(parcels))
    assert list(plan.parts) == expected


@UNHURRIED
@given(buffers(), st.integers(1, 40_000))
def test_by_rule_one_slice_goes_beside_each_layer_and_none_inside(
    supplies: list[BufferReadiness], chunk_bytes: int
) -> None:
    plan = plan_by_rule(supplies, "micro_ops", chunk_bytes)
    assert not any(plan.moe)
    assert all(len(parcels) <= 1 for parcels in plan.dense)
    left = [slices_by_loop(each, chunk_bytes) for each in supplies]
    for at, parcels in enumerate(plan.dense):
        there = [flat for flat, queue in enumerate(left) if queue and queue[0][1] <= supplies[flat].ready[at]]
        assert bool(parcels) == bool(there)
        for each in parcels:
            assert (each.first, each.stop) == left[each.flat].pop(0)


def test_a_buffer_without_tensors_is_one() -> None:
    assert BufferReadiness(GRAD, 4, (), 1000).micro_ops(1500) == [333, 666, 1000]
    assert BufferReadiness(GRAD, 4, (), 0).micro_ops(1500) == []
    assert BufferReadiness(GRAD, 4, (), 10_000, (3000, 10_000)).micro_ops(30_000) == [3000, 10_000]
