# SPDX-License-Identifier: Apache-2.0
"""The trace on streams: the times are those of the device's events."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ds_fsmoe.execution.lanes import make_lanes
from ds_fsmoe.execution.stream_lanes import StreamLanes
from ds_fsmoe.observing import trace as trace_module
from ds_fsmoe.observing.trace import Tracer
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.schedule import Schedule, Task
from ds_fsmoe.planning.timeline import simulate
from tests.fake_clock import FakeClock
from tests.lane_cases import COMPUTE, INTER, INTRA, KINDS, NEEDS_GPU
from tests.pretended_device import Device, pretended, run_pretended
from tests.trace_cases import assert_no_overlap, assert_valid, events_of, make_tracer, run, two_chunks, written

FIXTURES = (make_tracer, pretended)  # which pytest finds by their names here


def test_on_streams_times_are_those_of_events(
    pretended: tuple[StreamLanes, Device], make_tracer: Callable[..., Tracer]
) -> None:
    _, device = pretended
    device.now = 10**6  # done as soon as it is given
    clock = FakeClock()
    tracer = make_tracer(device=torch.device("cuda"), host=clock)
    schedule = Schedule((Task("A2A_IN", INTER, 0), Task("EXPERT", COMPUTE, 1, after=(0,)), Task("GATHER", INTRA, 2)))
    device.streams[0].do("before")
    tracer.step(0)
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
    # The clock of the host says when the first of them was issued.
    assert start_us == clock.time_ns() // 1000


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
    pretended: tuple[StreamLanes, Device], make_tracer: Callable[..., Tracer]
) -> None:
    _, device = pretended
    clock = FakeClock()
    schedule = Schedule((Task("A2A_IN", INTER, 0), Task("EXPERT", COMPUTE, 1, after=(0,)), Task("EXPERT", COMPUTE, 2)))
    timeline = simulate(schedule, dict.fromkeys(KINDS, LinearCost(1.0, 0.0)))
    tracer = make_tracer(device=torch.device("cuda"), predicted={"L01/forward": timeline}, host=clock)
    tracer.step(0)
    for turn in range(2):
        run_pretended(pretended, schedule, f"L0{turn}/forward", tracer)
    device.now = 2  # of three
    tracer.close()
    assert clock.slept_s == pytest.approx(trace_module._PATIENCE_AT_CLOSE_S, rel=0.01)
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
    clock = FakeClock()
    tracer = make_tracer(device=torch.device("cuda"), host=clock)
    tracer.step(0)
    run_pretended(pretended, two_chunks(), "L00/forward", tracer)

    def fail(event: Device.Event) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Device.TimingEvent, "query", fail)
    tracer.close()
    assert clock.slept_s == 0, "waits for a device that has failed"
    assert written(tracer)["otherData"]["unfinished"][0]["done"] == 0


@NEEDS_GPU
def test_on_a_gpu_times_are_those_of_the_device_from_when_the_host_set_them(make_tracer: Callable[..., Tracer]) -> None:
    device, clock = torch.device("cuda"), FakeClock()
    lanes, tracer = make_lanes(device), make_tracer(device=device, host=clock)
    schedule = Schedule((Task("A2A_IN", INTER, 0), Task("EXPERT", COMPUTE, 1), Task("A2A_OUT", INTER, 2, after=(1,))))
    tracer.step(0)
    for number in range(5):
        run(lanes, tracer, schedule, f"L0{number}/forward", lambda task: torch.cuda._sleep(20_000_000))
    # The tracer waits by its own clock, on which no time passes for the device.
    torch.cuda.synchronize()
    tracer.step(1)
    trace = written(tracer)
    assert_valid(trace)
    assert_no_overlap(trace)
    assert trace["otherData"]["unfinished"] == []
    for event in events_of(trace):
        assert event["ts"] >= clock.time_ns() // 1000
        assert event["args"]["ms"] > 0
    # Of two kernels that need nothing of each other, on two streams, each began before the other was done.
    for number in range(5):
        a2a_in, expert, _ = (event for event in events_of(trace) if event["args"]["run"] == number)
        assert max(a2a_in["ts"], expert["ts"]) < min(each["ts"] + each["dur"] for each in (a2a_in, expert))
