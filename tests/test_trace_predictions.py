# SPDX-License-Identifier: Apache-2.0
"""What was predicted beside what was measured."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from ds_fsmoe.execution.lanes import Lanes
from ds_fsmoe.files.traces import TracedRun, trace_of
from ds_fsmoe.observing.trace import Tracer
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.schedule import Task
from ds_fsmoe.planning.timeline import Span, Timeline, simulate
from tests.fake_clock import FakeClock
from tests.lane_cases import COMPUTE
from tests.trace_cases import (
    assert_no_overlap,
    assert_valid,
    events_by_row,
    events_of,
    lanes,
    make_tracer,
    run,
    two_chunks,
    written,
)

FIXTURES = (lanes, make_tracer)  # which pytest finds by their names here


# ---- predicted rows


def test_what_was_predicted_stands_beside_each_run_from_where_it_began(
    make_tracer: Callable[..., Tracer], lanes: Lanes
) -> None:
    schedule = two_chunks()
    a2a_in, expert = LinearCost(2.0, 0.0), LinearCost(3.0, 0.0)
    timeline = simulate(schedule, {"A2A_IN": a2a_in, "EXPERT": expert})
    clock = FakeClock()
    tracer = make_tracer(predicted={"L03/backward": timeline, "L09/forward": timeline}, host=clock)
    tracer.step(0)
    began_us = []
    for label in ("L03/forward", "L03/backward", "L03/backward"):
        began_us.append(clock.time_ns() // 1000)
        run(lanes, tracer, schedule, label, lambda task: clock.sleep(0.004))
    tracer.step(1)
    trace = written(tracer)
    assert_valid(trace)
    rows = events_by_row(trace)
    # Less was predicted than it took, so one row of each is enough; the runs without a prediction have none.
    assert set(rows) == {"compute", "inter", "predicted compute", "predicted inter"}
    for number in (1, 2):
        predicted = [event for event in events_of(trace, "predicted") if event["args"]["run"] == number]
        measured = [event for event in events_of(trace) if event["args"]["run"] == number]
        assert {event["name"] for event in predicted} == {event["name"] for event in measured}
        start_us = predicted[0]["ts"]
        assert began_us[number] == start_us == min(event["ts"] for event in measured)
        spans = {event["name"]: (event["ts"] - start_us, event["dur"]) for event in predicted}
        expected = {
            "fsmoe/L03/bwd/A2A_IN/chunk0": (0, 2000),
            "fsmoe/L03/bwd/EXPERT/chunk0": (2000, 3000),
            "fsmoe/L03/bwd/A2A_IN/chunk1": (2000, 2000),
            "fsmoe/L03/bwd/EXPERT/chunk1": (5000, 3000),
        }
        for name, (at_us, took_us) in expected.items():
            # Rounded down to microseconds, start and end each.
            assert abs(spans[name][0] - at_us) <= 1
            assert abs(spans[name][1] - took_us) <= 1
    assert len(events_of(trace, "predicted")) == 8


def test_predictions_that_reach_into_the_next_run_have_further_rows() -> None:
    tasks = (Task("EXPERT", COMPUTE),)
    timeline = Timeline((Span(tasks[0], 0.0, 2.5, None),))
    runs = [
        TracedRun(n, "L00/forward", 0, tasks, n * 10**6, [(n * 10**6, (n + 1) * 10**6)], timeline) for n in range(6)
    ]
    trace = trace_of(0, "here", runs, {})
    assert_valid(trace)
    assert_no_overlap(trace)
    rows = {row: [event["args"]["run"] for event in events] for row, events in events_by_row(trace).items()}
    assert rows == {
        "compute": [0, 1, 2, 3, 4, 5],
        "predicted compute": [0, 3],
        "predicted compute (2)": [1, 4],
        "predicted compute (3)": [2, 5],
    }


def test_further_rows_have_room_for_every_run() -> None:
    rng = random.Random(5)
    tasks, runs = (Task("EXPERT", COMPUTE),), []
    for number in range(200):
        timeline = Timeline((Span(tasks[0], 0.0, rng.choice((0.3, 1.7, 2.2, 9.1)), None),))
        start_ns = number * 10**6
        runs.append(TracedRun(number, "L00/forward", 0, tasks, start_ns, [(start_ns, start_ns + 10**6)], timeline))
    rng.shuffle(runs)
    trace = trace_of(0, "here", runs, {})
    assert_valid(trace)
    assert_no_overlap(trace)
    rows = events_by_row(trace)
    assert [len(rows[row]) for row in rows if not row.startswith("predicted")] == [200]
    # At no moment are more than ten of them under way.
    assert 5 < len(rows) - 1 <= 10


def test_tasks_next_to_each_other_by_nanoseconds_do_not_overlap_in_microseconds() -> None:
    rng = random.Random(3)
    at_ns, spans_ns = 1_790_000_000_123_456_789, []
    for _ in range(500):
        spans_ns.append((at_ns, at_ns + rng.randrange(5000)))
        at_ns = spans_ns[-1][1] + rng.choice((0, 0, 1, 700))
    tasks = tuple(Task("EXPERT", COMPUTE, chunk) for chunk in range(500))
    trace = trace_of(0, "here", [TracedRun(0, "L00/forward", 0, tasks, spans_ns[0][0], spans_ns)], {})
    assert_no_overlap(json.loads(json.dumps(trace)))
    # As a viewer reads them that has nothing but floats.
    assert all(int(float(event["ts"])) == event["ts"] for event in events_of(trace))
