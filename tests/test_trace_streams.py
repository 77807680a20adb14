# SPDX-License-Identifier: Apache-2.0
"""The trace on streams: the times are those of the device's events."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.schedule import Schedule, Task
from ds_fsmoe.planning.timeline import simulate
from ds_fsmoe.runtime import trace as trace_module
from ds_fsmoe.runtime.lanes import make_lanes
from ds_fsmoe.runtime.stream_lanes import StreamLanes
from ds_fsmoe.runtime.trace import Tracer
from ds_fsmoe.runtime.trace_files import (
    summary,
)
from tests.lane_cases import COMPUTE, INTER, INTRA, KINDS, NEEDS_GPU
from tests.pretended_device import Device, pretended, run_pretended
from tests.trace_cases import assert_no_overlap, assert_valid, events_of, make_tracer, run, two_chunks, written

FIXTURES = (make_tracer, pretended)  # which pytest finds by their names here


def test_on_streams_times_are_those_of_events(
    pretended: tuple[StreamLanes, Device], make_tracer: Callable[..., Tracer]
) -> None:
    _, device = pretended
    device.now = 10**6  # done as soon as it is given
    tracer = make_tracer(device=torch.device("cuda"))
    schedule = Schedule((Task("A2A_IN", INTER, 0), Task("EXPERT", COMPUTE, 1, after=(0,)), Task("GATHER", INTRA, 2)))
    device.streams[0].do("before")
    tracer.step(0)
    before_us = time.time_ns() / 1e3
    for turn in range(2):
        run_pretended(pretended, schedule, f"L0{turn}/forward", tracer)
    tracer.step(1)
    trace = written(tracer)
    assert_valid(trace)
    assert_no_overlap(trace)
    assert trace["otherData"]["device"] == "cuda"
    start_us = min(event["ts"] for event in events_of(trace))
    # An operation takes a millisecond there, whatever the host's clock says.
    found = {event["name"]: (event["ts"] - start_us, event["dur"]) for event in events_of(trace)}
    assert found == {
        "fsmoe/L00/fwd/A2A_IN/chunk0": (0, 1000),
        "fsmoe/L00/fwd/EXPERT/chunk1": (1000, 1000),
        "fsmoe/L00/fwd/GATHER/chunk2": (0, 1000),
        "fsmoe/L01/fwd/A2A_IN/chunk0": (2000, 1000),
        "fsmoe/L01/fwd/EXPERT/chunk1": (3000, 1000),
        "fsmoe/L01/fwd/GATHER/chunk2": (2000, 1000),
    }
    assert before_us - 1e3 < start_us < before_us + 30e6


def test_on_streams_the_host_waits_at_the_first_step_and_not_at_the_others(
    pretended: tuple[StreamLanes, Device], make_tracer: Callable[..., Tracer], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, device = pretended
    device.now, waits = 10**6, []
    monkeypatch.setattr(Device.TimingEvent, "synchronize", lambda event: waits.append(event.time))
    tracer = make_tracer(start_step=1, num_steps=3, device=torch.device("cuda"))
    counts = []
    for step in range(5):
        tracer.step(step)
        counts.append(len(waits))
        run_pretended(pretended, two_chunks(), "L00/forward", tracer)
    assert counts[0] == 0
    assert counts[1] > 0
    assert counts[2:] == [counts[1]] * 3
    assert len(events_of(written(tracer))) == 12


def test_on_streams_closing_waits_a_little_and_leaves_out_what_the_device_has_not_done(
    pretended: tuple[StreamLanes, Device], make_tracer: Callable[..., Tracer], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, device = pretended
    monkeypatch.setattr(trace_module, "_PATIENCE_AT_CLOSE_S", 0.05)
    schedule = Schedule((Task("A2A_IN", INTER, 0), Task("EXPERT", COMPUTE, 1, after=(0,)), Task("EXPERT", COMPUTE, 2)))
    timeline = simulate(schedule, dict.fromkeys(KINDS, LinearCost(1.0, 0.0)))
    tracer = make_tracer(device=torch.device("cuda"), predicted={"L01/forward": timeline})
    tracer.step(0)
    for turn in range(2):
        run_pretended(pretended, schedule, f"L0{turn}/forward", tracer)
    device.now = 2  # of three
    started_s = time.monotonic()
    tracer.close()
    assert 0.05 <= time.monotonic() - started_s < 20
    trace = written(tracer)
    assert [event["name"] for event in events_of(trace)] == [
        "fsmoe/L00/fwd/A2A_IN/chunk0",
        "fsmoe/L00/fwd/EXPERT/chunk1",
    ]
    # Nobody knows when the second run began, so nothing can stand beside it.
    assert events_of(trace, "predicted") == []
    first, second = trace["otherData"]["unfinished"]
    assert (first["done"], first["under_way"]) == (2, ["fsmoe/L00/fwd/EXPERT/chunk2"])
    assert (second["done"], second["tasks"], len(second["under_way"])) == (0, 3, 3)


def test_on_streams_a_device_that_has_failed_takes_nothing_along(
    pretended: tuple[StreamLanes, Device], make_tracer: Callable[..., Tracer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_module, "_PATIENCE_AT_CLOSE_S", 60)
    tracer = make_tracer(device=torch.device("cuda"))
    tracer.step(0)
    run_pretended(pretended, two_chunks(), "L00/forward", tracer)

    def fail(event: Device.Event) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Device.TimingEvent, "query", fail)
    started_s = time.monotonic()
    tracer.close()
    assert time.monotonic() - started_s < 30
    assert written(tracer)["otherData"]["unfinished"][0]["done"] == 0


@NEEDS_GPU
def test_on_a_gpu_times_are_those_of_the_device_on_the_clock_of_the_host(make_tracer: Callable[..., Tracer]) -> None:
    device = torch.device("cuda")
    lanes, tracer = make_lanes(device), make_tracer(device=device)
    schedule = Schedule((Task("A2A_IN", INTER, 0), Task("EXPERT", COMPUTE, 1), Task("A2A_OUT", INTER, 2, after=(1,))))
    tracer.step(0)
    before_us = time.time_ns() / 1e3
    for number in range(5):
        run(lanes, tracer, schedule, f"L0{number}/forward", lambda task: torch.cuda._sleep(20_000_000))
    tracer.step(1)
    after_us = time.time_ns() / 1e3
    trace = written(tracer)
    assert_valid(trace)
    assert_no_overlap(trace)
    assert trace["otherData"]["unfinished"] == []
    for event in events_of(trace):
        assert before_us - 1000 < event["ts"] < event["ts"] + event["dur"] < after_us + 1000
        assert event["args"]["ms"] > 5
    assert all(row["hidden"] > 0.2 for row in summary(trace))
