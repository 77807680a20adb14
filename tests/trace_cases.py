# SPDX-License-Identifier: Apache-2.0
"""Tracers, runs to trace, and what must hold of every trace, for the tests of the trace."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ds_fsmoe.execution.lanes import Lanes, Observer, make_lanes
from ds_fsmoe.files.traces import read_trace
from ds_fsmoe.observing.trace import Tracer
from ds_fsmoe.planning.schedule import Draft, Schedule, Task
from ds_fsmoe.planning.timeline import Timeline
from tests.lane_cases import COMPUTE, CPU, INTER, KINDS
from tests.waiting import pause

Event = dict[str, Any]


@pytest.fixture(params=["serial", "threads"])
def lanes(request: pytest.FixtureRequest) -> Iterator[Lanes]:
    with closing(make_lanes(CPU, overlap=request.param == "threads")) as made:
        yield made


class PredictingTracer(Tracer):
    """A tracer of runs whose timelines are known by their labels."""

    def __init__(self, *of_tracer: Any, predicted: Mapping[str, Timeline], **more: Any) -> None:
        super().__init__(*of_tracer, **more)
        self.predicted = predicted

    def of_run(self, schedule: Schedule, label: str, expected: Callable[[], Timeline] | None = None) -> Observer:
        timeline = self.predicted.get(label)
        return super().of_run(schedule, label, None if timeline is None else lambda: timeline)


@pytest.fixture
def make_tracer(tmp_path: Path) -> Iterator[Callable[..., Tracer]]:
    """``make_tracer(start_step, num_steps, ...)``; closed after the test, whatever has become of it."""
    made: list[Tracer] = []

    def make(start_step: int = 0, num_steps: int = 1, rank: int = 0, **others: Any) -> Tracer:
        kind = PredictingTracer if "predicted" in others else Tracer
        made.append(kind(tmp_path, rank, start_step, num_steps, others.pop("device", CPU), **others))
        return made[-1]

    yield make
    for tracer in made:
        tracer.close()


def two_chunks() -> Schedule:
    draft = Draft()
    for chunk in range(2):
        draft.add("A2A_IN", INTER, chunk=chunk)
        draft.add("EXPERT", COMPUTE, chunk=chunk, after=[2 * chunk])
    return draft.finish()


def nothing(task: Task) -> None:
    pass


def pausing(seed: int) -> Callable[[Task], None]:
    rng = random.Random(seed)
    return lambda task: pause(rng, 0, 0, 0.0003, 0.001)


def run(
    lanes: Lanes, tracer: Tracer, schedule: Schedule, label: str = "L03/forward", body: Callable[[Task], Any] = nothing
) -> None:
    lanes.run(schedule, dict.fromkeys(KINDS, body), label, tracer)


def written(tracer: Tracer) -> dict[str, Any]:
    return read_trace(tracer.path)


def events_of(trace: dict[str, Any], category: str = "measured") -> list[Event]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X" and event["cat"] == category]


def row_names(trace: dict[str, Any]) -> dict[tuple[int, int], str]:
    named = (event for event in trace["traceEvents"] if event["name"] == "thread_name")
    return {(event["pid"], event["tid"]): event["args"]["name"] for event in named}


def events_by_row(trace: dict[str, Any]) -> dict[str, list[Event]]:
    names, found = row_names(trace), defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            found[names[event["pid"], event["tid"]]].append(event)
    return dict(found)


def assert_no_overlap(trace: dict[str, Any]) -> None:
    rows = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert rows
    for spans in rows.values():
        for (_, end_us), (start_us, _) in itertools.pairwise(sorted(spans)):
            assert end_us <= start_us


def assert_valid(trace: dict[str, Any]) -> None:
    """What a viewer needs of every event, and each row and process with one name and one place."""
    used, metadata = set(), defaultdict(list)
    for event in trace["traceEvents"]:
        assert type(event["pid"]) is int
        assert event["pid"] > 0
        if event["ph"] == "M":
            metadata[event["name"], event["pid"], event.get("tid")].append(event["args"])
        else:
            assert event["ph"] == "X"
            used.add((event["pid"], event["tid"]))
            assert [type(event[each]) for each in ("name", "cat", "tid", "ts", "dur")] == [str, str, int, int, int]
            assert event["dur"] >= 0
            needed = {"layer", "phase", "kind", "chunk", "step", "ms", "lane", "run"}
            assert needed <= event["args"].keys()
    assert all(len(each) == 1 for each in metadata.values())
    for pid, tid in used:
        assert metadata["process_name", pid, None]
        assert metadata["process_sort_index", pid, None]
        assert metadata["thread_name", pid, tid]
        assert metadata["thread_sort_index", pid, tid]


def assert_holds_nothing(tracer: Tracer) -> None:
    assert tracer._runs == []
