# SPDX-License-Identifier: Apache-2.0
"""A batch through the stages of a pipeline obeys the laws of time."""

from __future__ import annotations

import itertools
import random

import pytest

from ds_fsmoe.planning.schedule import RECV_ACTIVATION, SEND_ACTIVATION, Lane, Schedule, Task
from ds_fsmoe.planning.stage_batch import (
    BatchTimeline,
    StageLink,
    StageTimes,
    batch_ms,
    play_batch,
    simulate_batch,
)
from ds_fsmoe.planning.stage_schedule import SENDS, stage_schedule


def random_pipeline(seed: int) -> tuple[list[StageTimes], int, list[StageLink]]:
    coin = random.Random(seed)
    stages = [StageTimes(*(coin.uniform(0, 9) for _ in range(5))) for _ in range(coin.randint(1, 6))]
    links = [StageLink(coin.uniform(0, 4), coin.uniform(0, 4), coin.choice(list(Lane)[1:])) for _ in stages[1:]]
    return stages, coin.randint(1, 9), links


WAYS = [
    {"order": order, "is_blocking": is_blocking, "tied_ms": tied_ms}
    for order, is_blocking, tied_ms in itertools.product(("1f1b", "gpipe"), (True, False), (0.0, 2.5))
]
CASES = [(seed, WAYS[seed % len(WAYS)]) for seed in range(48)]


def played(seed: int, way: dict) -> BatchTimeline:
    stages, batches, links = random_pipeline(seed)
    return simulate_batch(stages, batches, links, **way)


@pytest.mark.parametrize("order", ["1f1b", "gpipe"])
@pytest.mark.parametrize(
    ("p", "m", "forward_ms", "backward_ms"), [(1, 3, 2, 4), (2, 1, 1, 1), (4, 8, 3, 5), (6, 4, 5, 2)]
)
def test_equal_stages_with_free_sends_take_what_textbooks_say(
    order: str, p: int, m: int, forward_ms: float, backward_ms: float
) -> None:
    stages = [StageTimes(forward_ms, backward_ms, backward_ms)] * p
    found = simulate_batch(stages, m, order=order)  # type: ignore[arg-type]
    assert found.makespan_ms == pytest.approx((m + p - 1) * (forward_ms + backward_ms))
    for stage in range(p):
        assert found.bubbles(stage).all_ms == pytest.approx((p - 1) * (forward_ms + backward_ms))


def test_a_batch_by_hand() -> None:
    """Two stages, two micro-batches: of 1 and 2 ms forward, 3 and 4 ms backward, in the end 5 and 6; sends of 0.5."""
    stages = [StageTimes(1, 3, 5, 0.25, 0.125), StageTimes(2, 4, 6)]
    found = simulate_batch(stages, 2, [StageLink(0.5, 0.5)])
    #  stage 1: F0 0-1, > 1-1.5, F1 1.5-2.5, < 7.5-8, > 8-8.5, B0 8.5-11.5, < 16.5-17, B1 17-22, end 22.375
    #  stage 2:          > 1-1.5, F0 1.5-3.5, B0 3.5-7.5, < 7.5-8, > 8-8.5, F1 8.5-10.5, B1 10.5-16.5, < 16.5-17
    assert found.makespan_ms == pytest.approx(22.375)
    first, last = found.bubbles(0), found.bubbles(1)
    assert (first.warm_up_ms, first.steady_ms, first.cool_down_ms) == pytest.approx((5.0, 0.0, 5.0))
    assert (last.warm_up_ms, last.steady_ms, last.cool_down_ms) == pytest.approx((1.0, 0.0, 5.375))
    assert found.sends_ms(0) == found.sends_ms(1) == pytest.approx(2.0)
    assert batch_ms(stages, 2, 0.5) == found.makespan_ms


@pytest.mark.parametrize(("seed", "way"), CASES)
def test_a_batch_takes_at_least_its_busiest_stage_and_its_longest_chain(seed: int, way: dict) -> None:
    stages, batches, links = random_pipeline(seed)
    found = played(seed, way).makespan_ms + 1e-9
    assert found >= max(each.busy_ms(batches) for each in stages)
    # One micro-batch has to pass all stages, both ways.
    chain_ms = sum(each.forward_ms + min(each.backward_ms, each.last_backward_ms) for each in stages)
    chain_ms += sum(each.activation_ms + each.gradient_ms for each in links)
    assert found >= chain_ms


@pytest.mark.parametrize(("seed", "way"), CASES)
def test_a_lane_does_one_thing_at_a_time(seed: int, way: dict) -> None:
    for timeline in played(seed, way).stages:
        for lane in Lane:
            spans = [each for each in timeline.spans if each.task.lane is lane or way["is_blocking"]]
            for one, other in itertools.pairwise(spans):
                assert one.end_ms <= other.start_ms + 1e-9


@pytest.mark.parametrize(("seed", "way"), CASES)
def test_a_send_and_its_receive_are_one_transfer(seed: int, way: dict) -> None:
    stages = played(seed, way).stages
    for stage, timeline in enumerate(stages):
        for span in timeline.spans:
            if span.task.kind in SENDS:
                other = stages[stage + (1 if span.task.kind == SEND_ACTIVATION else -1)]
                (pair,) = (
                    each
                    for each in other.spans
                    if (each.task.kind, each.task.chunk) == (SENDS[span.task.kind], span.task.chunk)
                )
                assert (pair.start_ms, pair.end_ms, pair.task.lane) == (span.start_ms, span.end_ms, span.task.lane)


@pytest.mark.parametrize(("seed", "way"), CASES)
def test_busy_time_and_bubbles_fill_the_batch(seed: int, way: dict) -> None:
    stages, batches, _ = random_pipeline(seed)
    found = played(seed, way)
    for stage, times in enumerate(stages):
        busy_ms = times.busy_ms(batches) + found.bubbles(stage).all_ms
        if way["tied_ms"] and stage in (0, len(stages) - 1):
            busy_ms += way["tied_ms"]
        assert busy_ms <= found.makespan_ms + 1e-9
        if way["is_blocking"]:
            assert busy_ms + found.sends_ms(stage) == pytest.approx(found.makespan_ms)


def test_sends_beside_computation_are_never_slower() -> None:
    for seed in range(60):
        stages, batches, links = random_pipeline(seed)
        beside, blocking = (simulate_batch(stages, batches, links, is_blocking=each) for each in (False, True))
        assert beside.makespan_ms <= blocking.makespan_ms + 1e-9


def test_one_stage_is_a_batch_without_bubbles() -> None:
    times = StageTimes(2, 3, 4, 5, 6)
    found = simulate_batch([times], 3)
    assert found.makespan_ms == times.busy_ms(3) == 3 * 2 + 2 * 3 + 4 + 5 + 6
    assert found.bubbles(0).all_ms == 0.0


def test_what_two_stages_share_is_summed_when_both_are_through() -> None:
    stages = [StageTimes(1, 1, 1, gradients_ms=3), StageTimes(1, 1, 1), StageTimes(1, 1, 1, gradients_ms=7)]
    alone, tied = (simulate_batch(stages, 4, tied_ms=each) for each in (0.0, 2.0))
    # The last stage is through after 10, the first one after 12; what they share, the last one has to wait for.
    assert (alone.makespan_ms, tied.makespan_ms) == (10.0 + 7.0, 12.0 + 2.0 + 7.0)


def test_the_slowest_stage_alone_counts_in_a_long_batch() -> None:
    stages = [StageTimes(1, 2, 2), StageTimes(2, 4, 4), StageTimes(1, 2, 2)]
    longer, shorter = (simulate_batch(stages, each).makespan_ms for each in (1000, 999))
    assert longer - shorter == pytest.approx(6.0)


def test_stages_that_would_wait_for_each_other_for_ever_are_named() -> None:
    lists = [stage_schedule(each, 2, 2) for each in range(2)]
    tasks = [Task(each.kind, each.lane, each.chunk) for each in lists[1].tasks]
    first, second = (
        next(i for i, each in enumerate(tasks) if (each.kind, each.chunk) == (RECV_ACTIVATION, micro))
        for micro in (0, 1)
    )
    tasks[first], tasks[second] = tasks[second], tasks[first]
    with pytest.raises(ValueError, match=r"stages wait for each other for ever: stage \d"):
        play_batch([lists[0], Schedule(tuple(tasks))], [StageTimes(1, 1, 1)] * 2, [StageLink()])


def test_a_send_that_nobody_receives_is_named() -> None:
    lists = [stage_schedule(each, 2, batches) for each, batches in ((0, 2), (1, 1))]
    with pytest.raises(ValueError, match="stage 1: L00/SEND_ACTIVATION/chunk1 has no RECV_ACTIVATION on stage 2"):
        play_batch(lists, [StageTimes(1, 1, 1)] * 2, [StageLink()])


def test_times_of_sends_may_differ_from_pair_to_pair_and_there_and_back() -> None:
    stages = [StageTimes(1, 1, 1)] * 3
    assert batch_ms(stages, 1, [1, 2], [10, 20]) == 6 + 1 + 2 + 10 + 20
    assert batch_ms(stages, 1, 1) == 6 + 4
    with pytest.raises(ValueError, match="send_ms: 1 times, must be one for each of 2 pairs"):
        batch_ms(stages, 1, [1])


def test_times_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="StageTimes: backward_ms = -1: must be a finite number"):
        StageTimes(1, -1, 1)
    with pytest.raises(ValueError, match="StageLink: gradient_ms = nan"):
        StageLink(1, float("nan"))
    with pytest.raises(ValueError, match="a pipeline of no stages"):
        batch_ms([], 1)
    with pytest.raises(ValueError, match="3 links: must be one between each of 2 stages"):
        simulate_batch([StageTimes(1, 1, 1)] * 2, 1, [StageLink()] * 3)


def test_the_drawing_has_a_row_for_each_stage_and_dots_for_bubbles() -> None:
    stages = [StageTimes(4, 8, 8), StageTimes(4, 8, 8)]
    drawn = simulate_batch(stages, 2).gantt(36).splitlines()
    assert drawn == [
        "stage 1   F0--F1--........B0======....B1======",
        "stage 2   ....F0--B0======F1--B1======........",
        "36.000 ms",
    ]
