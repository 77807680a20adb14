# SPDX-License-Identifier: Apache-2.0
"""Where the time of a traced phase went, for phases drawn by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ds_fsmoe.files.traces import TracedRun, trace_of, waits_for
from ds_fsmoe.offline.report.critical_path import BETWEEN, NOTHING_LEFT, phases
from ds_fsmoe.planning.schedule import HOLD, Lane, Task

TASKS = A2A_IN, EXPERT, A2A_OUT = (
    Task("A2A_IN", Lane.INTER),
    Task("EXPERT", Lane.COMPUTE, after=(0,)),
    Task("A2A_OUT", Lane.INTER, after=(1,)),
)


def trace(
    rank: int, spans_ms: list[tuple[float, float]], tasks: Sequence[Task] = TASKS, **about: Any
) -> dict[str, Any]:
    """Of one phase of one layer on one rank."""
    spans_ns = [(round(begin * 1e6), round(end * 1e6)) for begin, end in spans_ms]
    run = TracedRun(0, "L00/forward", 7, tasks, spans_ns[0][0], spans_ns)
    return trace_of(rank, "host", [run], about)


def test_one_rank_alone_is_a_chain() -> None:
    (phase,) = phases({0: trace(0, [(1, 3), (4, 9), (9, 10)])})
    assert (phase.key.label, phase.key.step) == ("L00/fwd", 7)
    assert phase.ms == 9
    assert phase.shares_ms() == {"EXPERT": 5, "A2A_IN": 2, BETWEEN: 1, "A2A_OUT": 1}
    assert [each.what for each in phase.path] == ["A2A_IN", BETWEEN, "EXPERT", "A2A_OUT"]
    assert phase.busy_ms == {"inter": 3, "compute": 5}
    assert phase.idle_ms["inter"] == {"for EXPERT": 6}
    assert phase.idle_ms["compute"] == {"for A2A_IN": 2, BETWEEN: 1, NOTHING_LEFT: 1}


def test_the_path_is_without_a_gap_and_goes_over_to_the_rank_that_came_last() -> None:
    # Rank 1's expert is slow, so rank 0 waits for it in the second all-to-all.
    traces = {
        0: trace(0, [(0, 2), (2, 4), (4, 11)], peers={"L00": {"A2A_OUT": [0, 1]}}),
        1: trace(1, [(0, 2), (2, 9), (9, 10.5)], peers={"L00": {"A2A_OUT": [0, 1]}}),
    }
    (phase,) = phases(traces)
    assert [(each.rank, each.what, each.ms) for each in phase.path] == [
        (1, "A2A_IN", 2),
        (1, "EXPERT", 7),
        (0, "A2A_OUT", 2),
    ]
    ends = [each.end_us for each in phase.path]
    assert [each.begin_us for each in phase.path[1:]] == ends[:-1]
    # What a lane does and waits for is told as a mean over ranks.
    assert phase.busy_ms == {"inter": ((2 + 7) + (2 + 1.5)) / 2, "compute": (2 + 7) / 2}
    assert phase.idle_ms["inter"] == {"for EXPERT": (2 + 7) / 2}
    assert phase.idle_ms["compute"] == {"for A2A_IN": 2, NOTHING_LEFT: (7 + 1.5) / 2}


def test_ranks_of_another_group_are_not_waited_for() -> None:
    traces = {
        0: trace(0, [(0, 2), (2, 9), (9, 12)], peers={"L00": {"A2A_IN": [0], "A2A_OUT": [0]}}),
        1: trace(1, [(1, 2), (2, 10), (10, 11)], peers={"L00": {"A2A_OUT": [1]}}),
    }
    (phase,) = phases(traces)
    assert {each.rank for each in phase.path} == {0}
    assert phase.shares_ms()["A2A_OUT"] == 3


def test_overlap_is_on_the_path_only_as_far_as_it_was_waited_for() -> None:
    tasks = [
        Task("A2A_IN", Lane.INTER, 0),
        Task("A2A_IN", Lane.INTER, 1),
        Task("EXPERT", Lane.COMPUTE, 0, after=(0,)),
        Task("EXPERT", Lane.COMPUTE, 1, after=(1,)),
    ]
    (phase,) = phases({0: trace(0, [(0, 2), (2, 4), (2, 7), (7, 12)], tasks)})
    assert phase.shares_ms() == {"EXPERT": 10, "A2A_IN": 2}
    assert phase.idle_ms["compute"] == {"for A2A_IN": 2}
    assert phase.idle_ms["inter"] == {NOTHING_LEFT: 8}


def test_a_hold_stands_for_what_it_waits_for() -> None:
    tasks = (
        Task("GATHER", Lane.INTRA),
        Task(HOLD, Lane.INTER, after=(0,)),
        Task("A2A_IN", Lane.INTER),
        Task("EXPERT", Lane.COMPUTE, after=(1,)),
    )
    assert waits_for(tasks, 2) == [0]
    assert waits_for(tasks, 3) == [0]


def test_runs_of_one_phase_in_one_step_are_told_apart_by_turn_and_one_that_was_cut_short_is_left_out() -> None:
    def run(number: int, *ends_ns: int) -> TracedRun:
        begin_ns = 10**7 * number
        spans_ns = [(begin_ns + end_ns - 10**6, begin_ns + end_ns) for end_ns in ends_ns]
        return TracedRun(number, "L00/forward", 7, TASKS, begin_ns, [*spans_ns, *[None] * (3 - len(spans_ns))])

    runs = [run(number, 10**6, 2 * 10**6, 3 * 10**6) for number in range(3)]
    found = phases({0: trace_of(0, "host", [*runs, run(3, 10**6)], {})})
    assert [(each.key.label, each.key.turn, each.ms) for each in found] == [("L00/fwd", turn, 3) for turn in range(3)]
    assert phases({}) == phases({0: trace_of(0, "host", [], {})}) == []
