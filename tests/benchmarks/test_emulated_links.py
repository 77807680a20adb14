# SPDX-License-Identifier: Apache-2.0
"""Links that are emulated take what is predicted of them, on threads and on streams."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch

from benchmarks.gpu.emulated_links import link_bodies, modern_node
from ds_fsmoe.execution.lanes import SerialLanes, make_lanes
from ds_fsmoe.execution.stream_lanes import StreamLanes
from ds_fsmoe.observing.device_time import Delay, elapsed_ms
from ds_fsmoe.observing.spans import Recorder
from ds_fsmoe.planning.cluster_schema import UNITS
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.schedule import (
    A2A_IN,
    GATHER,
    Draft,
    Lane,
    Schedule,
)
from ds_fsmoe.planning.timeline import simulate
from tests.fake_clock import FakeClock
from tests.lane_cases import NEEDS_GPU, assert_spans_fit
from tests.pretended_device import Device, pretended

FIXTURES = (pretended,)  # which pytest finds by their names here

CPU = torch.device("cpu")


def links_only() -> tuple[Schedule, dict[str, LinearCost]]:
    """Two chunks, each 6 ms on one link and then 9 ms on the other."""
    draft = Draft()
    for chunk in range(2):
        entered = draft.add(A2A_IN, Lane.INTER, chunk=chunk, size=500.0)
        draft.add(GATHER, Lane.INTRA, chunk=chunk, size=700.0, after=[entered])
    return draft.finish(), {A2A_IN: LinearCost(1.0, 0.01), GATHER: LinearCost(2.0, 0.01)}


class Lazy(FakeClock):
    """Whoever sleeps wakes up late: a tenth of the time later, and half a millisecond."""

    def sleep(self, time_s: float) -> None:
        super().sleep(1.1 * time_s + 0.5e-3)


def test_emulated_links_take_what_is_predicted_of_them() -> None:
    schedule, costs = links_only()
    clock = Lazy()
    delay, lanes = Delay(CPU, clock), SerialLanes()
    took_ms = elapsed_ms(CPU, lambda: lanes.run(schedule, link_bodies(costs, costs, delay)), host=clock)
    assert took_ms == pytest.approx(2 * (6 + 9))
    # On lanes that overlap the second message goes in beside the first one going out.
    assert simulate(schedule, costs).makespan_ms == pytest.approx(6 + 9 + 9)


def test_delays_are_measured_anew_when_sleeping_has_become_longer() -> None:
    clock = FakeClock()
    delay = Delay(CPU, clock)
    delay(4.0)
    assert elapsed_ms(CPU, lambda: delay(4.0), host=clock) == pytest.approx(4.0)
    clock.sleep = lambda time_s: FakeClock.sleep(clock, 2 * time_s)  # type: ignore[method-assign]
    assert elapsed_ms(CPU, lambda: delay(4.0), host=clock) == pytest.approx(8.0)
    delay.calibrate()
    assert elapsed_ms(CPU, lambda: delay(4.0), host=clock) == pytest.approx(4.0)


@pytest.fixture
def gpu(pretended: tuple[StreamLanes, Device], monkeypatch: pytest.MonkeyPatch) -> tuple[StreamLanes, Device]:
    """Something that stands for a GPU of 2 GHz that takes 3 microseconds to start a kernel, and its lanes."""
    _, device = pretended

    def spin(cycles: int) -> None:
        assert type(cycles) is int
        assert cycles >= 0
        device.current.time += 0.003 + cycles / 2e6

    monkeypatch.setattr(torch.cuda, "_sleep", spin)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    return pretended


def test_on_cuda_a_delay_is_as_many_cycles_as_it_needs(gpu: tuple[StreamLanes, Device]) -> None:
    device = torch.device("cuda")
    delay = Delay(device)
    for wanted_ms in (0.02, 1.0, 40.0):
        took_ms = elapsed_ms(device, lambda ms=wanted_ms: delay(ms), ahead=lambda: delay(7.0))
        assert took_ms == pytest.approx(wanted_ms, rel=1e-3)
    # Shorter than a kernel can be.
    assert elapsed_ms(device, lambda: delay(0.0)) == pytest.approx(0.003)


def test_a_node_of_today_has_every_operation_and_faster_links_inside_than_between() -> None:
    cluster = modern_node()
    assert set(UNITS) == set(cluster.operations)
    for name in ("all_to_all", "all_gather", "reduce_scatter", "all_reduce"):
        inside, between = (cluster.operations[f"{link}.{name}"].cost for link in ("intra", "inter"))
        assert 0 < inside.ms(1e6) < between.ms(1e6)
    # 3 of 4 parts of 40 MB at 40 GB/s.
    assert cluster.operations["inter.all_to_all"].cost.ms(40e6) == pytest.approx(0.03 + 0.75)


@NEEDS_GPU
def test_emulated_links_on_streams_overlap() -> None:
    device = torch.device("cuda")
    schedule, costs = links_only()
    delay, recorder = Delay(device), Recorder(device)
    with closing(make_lanes(device)) as lanes:
        delay(5.0)
        lanes.run(schedule, link_bodies(costs, costs, delay), observer=recorder)
        assert_spans_fit(schedule, recorder, slack_ms=0.01)
