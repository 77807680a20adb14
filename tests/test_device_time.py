# SPDX-License-Identifier: Apache-2.0
"""What an operation is said to take: the median of the repetitions that count. On a GPU, which is pretended here, it is
without launches and Python, and the time of the host is apart from that. No GPU has run any of it yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch

from ds_fsmoe.execution.lanes import SerialLanes, make_lanes
from ds_fsmoe.execution.stream_lanes import StreamLanes
from ds_fsmoe.gradients.reduction import is_faster_in_levels
from ds_fsmoe.gradients.reduction_algorithms import AllReduce
from ds_fsmoe.measuring import stopwatch
from ds_fsmoe.measuring.cache import Measurements, Measuring, Timeable
from ds_fsmoe.measuring.profiler import issues_ahead
from ds_fsmoe.measuring.stopwatch import BUDGET_S, FEWEST, MOST, MOST_ISSUED_MS, Stopwatch, empty_task_ms, slowdowns
from ds_fsmoe.observing.device_time import elapsed_ms
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.job.measured import FORWARD, LayerProfile
from ds_fsmoe.planning.schedule import EXPERT, GRAD, GRAD_GATHER, GRAD_SCATTER
from tests.fake_clock import SetClock
from tests.hurry import hurry
from tests.lane_cases import COMPUTE, INTER, INTRA, schedule_of
from tests.pretended_device import Device, pretend

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CYCLES_PER_MS = 2_000_000
TRUTH = LinearCost(0.02, 1e-3)
SIZES = [50, 100, 200, 400]


# ---- a device whose host is slow to issue


class TimedDevice(Device):
    """Streams in milliseconds, beside a host's clock that passes with every launch."""

    launch_ms = 0.05

    def __init__(self) -> None:
        super().__init__()
        self.host = SetClock()
        self.num_launches = 0

    def launch(self, kernel_ms: float, num_kernels: int = 1) -> None:
        """Issue kernels on the current stream, of so long altogether."""
        for _ in range(num_kernels):
            self.host.now_ms += self.launch_ms
            self.num_launches += 1
            self.current.time = max(self.current.time, self.host.now_ms) + kernel_ms / num_kernels

    def kernels(self, kernel_ms: float, num_kernels: int = 1) -> Callable[[], None]:
        return lambda: self.launch(kernel_ms, num_kernels)

    def synchronize(self, device: object = None) -> None:
        self.host.now_ms = max(self.host.now_ms, *(each.time for each in self.streams))

    def make_event(self, enable_timing: bool = False) -> Device.Event:
        return TimedEvent(self) if enable_timing else Device.Event(self)


class TimedEvent(Device.Event):
    """An event for which the host can wait. It comes to pass when the host has recorded it, at the earliest."""

    def record(self, stream: Device.Stream | None = None) -> None:
        super().record(stream)
        self.time = max(self.time, self.device.host.now_ms)

    def synchronize(self) -> None:
        self.device.host.now_ms = max(self.device.host.now_ms, self.time)

    def elapsed_time(self, end: Device.Event) -> float:
        return end.time - self.time


Timed = tuple[TimedDevice, StreamLanes]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Timed]:
    """The device and lanes on it."""
    device = TimedDevice()
    lanes, _ = pretend(monkeypatch, device)
    monkeypatch.setattr(torch.cuda, "synchronize", device.synchronize)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: device.launch(0.003 + cycles / CYCLES_PER_MS))
    yield device, lanes
    lanes.close()


def of_size(device: TimedDevice, num_kernels: int) -> Callable[[int], Callable[[], None]]:
    return lambda size: device.kernels(TRUTH.ms(size), num_kernels)


def test_alpha_is_the_devices_own_and_the_hosts_time_is_told_apart(timed: Timed) -> None:
    device, _ = timed
    measuring = Measuring(Stopwatch(CUDA, host=device.host), Measurements())
    found = measuring.timing(Timeable("work", "row", SIZES, 1.0, of_size(device, 40)))
    assert found.cost.alpha_ms == pytest.approx(TRUTH.alpha_ms, rel=1e-6)
    assert found.cost.beta_ms == pytest.approx(TRUTH.beta_ms, rel=1e-6)
    assert found.issued_ms == pytest.approx([2.0] * len(SIZES))
    # By the host's clock, as the work of a device that waits for it, it would bear its launches.
    assert elapsed_ms(CUDA, device.kernels(TRUTH.ms(50), 40), None, device.host) > 20 * TRUTH.ms(50)


def test_times_of_ranks_are_compared_on_the_device_that_they_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL takes no tensor of the host."""
    compared: list[str] = []
    monkeypatch.setattr(stopwatch, "world_size_now", lambda: 2)
    monkeypatch.setattr(stopwatch.dist, "all_reduce", lambda times, *_, **__: compared.append(times.device.type))
    with pytest.raises(NotImplementedError, match="no data"):  # a tensor without values does not come back
        Stopwatch(torch.device("meta")).slowest([[1.0]])
    assert compared == ["meta"]


def test_the_first_call_of_something_which_loads_it_keeps_nobody_waiting(timed: Timed) -> None:
    device, _ = timed
    calls: list[int] = []

    def prepare(size: int) -> Callable[[], None]:
        def work() -> None:
            if not calls:
                device.host.now_ms += 3_000.0
            calls.append(size)
            device.launch(TRUTH.ms(size))

        return work

    found = Stopwatch(CUDA, host=device.host).times("work", SIZES, prepare)
    assert found[0] == pytest.approx([TRUTH.ms(size) for size in SIZES])
    assert found[1] == pytest.approx([0.05] * len(SIZES))
    # 13 repetitions of four sizes, of half a millisecond or so, a delay each, and what it took to calibrate it.
    assert device.host.now_ms - 3_000.0 < 13 * 4 * 2.0 + 400.0


def test_ranks_of_a_collective_meet_behind_their_delays_and_none_is_timed_waiting_for_another(
    timed: Timed, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, _ = timed
    watch, met = Stopwatch(CUDA, host=device.host), []
    vars(watch)["_token"] = token = torch.zeros(1)

    def all_reduce(tensor: torch.Tensor, op: object = None, group: object = None) -> None:
        if tensor is token:
            # The other rank's delay is five milliseconds longer.
            device.launch(5.0)
            met.append(group)

    monkeypatch.setattr(stopwatch, "world_size_now", lambda: 2)
    monkeypatch.setattr(stopwatch.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *_: self)
    group = SimpleNamespace(size=lambda: 1)
    times_ms, *_ = watch.times("a collective", SIZES, of_size(device, 3), group)  # type: ignore[arg-type]
    assert times_ms == pytest.approx([TRUTH.ms(size) for size in SIZES])
    assert len(met) >= 4 * FEWEST
    assert set(map(id, met)) == {id(group)}
    met.clear()
    watch.times("a computation", SIZES, of_size(device, 3))
    assert met == []


def test_on_a_cpu_there_is_one_number(timed: Timed) -> None:
    device, _ = timed

    def prepare(size: int) -> Callable[[], None]:
        return lambda: device.host.sleep(size / 1e3)

    watch = Stopwatch(CPU, host=device.host)
    assert watch.times("work", [1, 2, 4], prepare) == ([1.0, 2.0, 4.0], [], [1.0, 2.0, 4.0])
    assert watch.host_ms("work", 7, prepare) == 7.0
    measuring = Measuring(watch, Measurements())
    assert measuring.timing(Timeable("work", "row", [1, 2, 4], 1.0, prepare)).issue_ms == 0.0
    assert not issues_ahead(SerialLanes(), CPU)
    assert issues_ahead(SerialLanes(), CUDA)
    with closing(make_lanes(CPU)) as threads:
        assert not issues_ahead(threads, CPU)
    assert issues_ahead(timed[1], CUDA)


def test_what_handing_out_tasks_costs_is_the_hosts_time(timed: Timed) -> None:
    device, _ = timed
    schedule = schedule_of((EXPERT, COMPUTE, ()), ("A2A_OUT", INTER, (0,)))

    class Slow(StreamLanes):
        """Lanes that take the host a millisecond for each task, and the device nothing."""

        def run(self, schedule, bodies, label="", observer=None) -> None:
            def slow(task) -> None:
                device.host.now_ms += 1.0

            super().run(schedule, dict.fromkeys(bodies, slow), label, observer)

    watch = Stopwatch(CUDA, host=device.host)
    assert empty_task_ms(watch, "empty tasks", Slow(CUDA), schedule, "empty") == pytest.approx(1.0)
    assert dict(LayerProfile({}, 1.0, False).costs(issues_ahead=True).forward_host_ms) == {}
    timing = Measuring(watch, Measurements()).timing(Timeable(FORWARD, "flop", SIZES, 1.0, of_size(device, 30)))
    costs = LayerProfile({FORWARD: timing}, 1.0, False).costs(issues_ahead=True)
    assert costs.forward_host_ms[EXPERT] == pytest.approx(1.0 + 30 * 0.05)
    assert costs.forward[EXPERT].ms(0) == pytest.approx(TRUTH.alpha_ms)


def test_lanes_that_only_share_the_thread_that_issues_do_not_slow_each_other_down(timed: Timed) -> None:
    """Each lane's kernels take the device less than they take the host: side by side, from an idle device, both lanes
    get half of the launches, and each would seem to take twice as long."""
    device, lanes = timed
    work = {lane: lambda: device.kernels(1.0, 60) for lane in (COMPUTE, INTRA, INTER)}
    found = slowdowns(Stopwatch(CUDA, host=device.host), lanes, work, "a test")
    assert found.factors == pytest.approx(dict.fromkeys(found.factors, 1.0), abs=1e-2)
    assert len(found.factors) == 6


def test_no_more_is_issued_ahead_than_a_device_takes(timed: Timed) -> None:
    device, _ = timed
    launched: list[int] = []
    work = {lane: lambda: device.kernels(0.1, 8) for lane in (COMPUTE, INTER)}

    class Counted(StreamLanes):
        def run(self, *args: object, **kwargs: object) -> None:
            before = device.num_launches
            super().run(*args, **kwargs)  # type: ignore[arg-type]
            launched.append(device.num_launches - before)

    slowdowns(Stopwatch(CUDA, host=device.host), Counted(CUDA), work, "a test")
    # Two lanes of 2 ms, at 0.05 for each launch.
    assert max(launched) == 2 * 8 * int(MOST_ISSUED_MS / (8 * 0.05))


@pytest.mark.parametrize(
    ("inside_ms", "between_ms", "is_faster"), [(12.0, 1.0, True), (8.0, 8.0, True), (9.5, 9.5, False)]
)
def test_of_two_ways_to_reduce_gradients_the_one_that_takes_the_device_less_is_faster(
    timed: Timed, monkeypatch: pytest.MonkeyPatch, inside_ms: float, between_ms: float, is_faster: bool
) -> None:
    device, _ = timed

    class Levels(AllReduce):
        """40 kernels inside a node and 20 between nodes."""

        most_kinds = (GRAD_SCATTER, GRAD, GRAD_GATHER)

        def alone(self, kind: str, scratch: torch.Tensor) -> Callable[[], object]:
            return device.kernels(between_ms if kind == GRAD else inside_ms / 2, 20)

    def all_reduce(tensor: torch.Tensor, op: object = None, group: object = None) -> None:
        if op is None:
            device.launch(0.5 + 2e-5 * tensor.numel() * 4)

    monkeypatch.setattr(stopwatch.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(stopwatch.torch, "zeros", lambda *shape, **_: torch.empty(*shape).zero_())
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *_: self)
    ways = AllReduce(None), Levels(None)
    # 13.3 ms in one level. In two there are two pieces: half of the shorter time is hidden.
    flat = SimpleNamespace(
        **{"numel": 160_000, "device": CUDA, "group": None, "algorithm_in": lambda in_levels: ways[in_levels]},
        reducing=lambda task, way: lambda numel: way.alone(task, torch.empty(numel)),
    )
    assert is_faster_in_levels(flat, device.host) is is_faster  # type: ignore[arg-type]


# ---- how often something is timed, on a clock that the test sets

# What an operation of each size takes.
TRUE_MS = {1: 2.0, 10: 11.0}


def played(times_ms: Callable[[int, int], float], ready_ms: float = 0.0) -> tuple[list[float], list[int]]:
    """The times that are found of operations that a clock moves with, and the sizes in the order of the operations.

    Args:
        times_ms: (size, repetition, 0 for the one that does not count) -> what it takes.
        ready_ms: making ready for it.
    """
    clock, order = SetClock(), list[int]()

    def prepare(size: int) -> Callable[[], None]:
        clock.now_ms += ready_ms

        def work() -> None:
            clock.now_ms += times_ms(size, order.count(size))
            order.append(size)

        return work

    return Stopwatch(CPU, host=clock).times_ms("a test", list(TRUE_MS), prepare), order


@pytest.mark.parametrize(
    ("factors", "ready_ms"),
    [
        *(({0: 50.0, disturbed: 20.0}, 7.0) for disturbed in range(1, 4)),
        # Three are all there is time for; neither the least nor the mean, and the first would move the median down.
        ({0: 0.01, 1: 0.1, 2: 1.0, 3: 1.5}, BUDGET_S * 1e3),
    ],
)
def test_it_is_the_median_of_all_repetitions_but_the_first_without_making_ready(
    factors: dict[int, float], ready_ms: float
) -> None:
    found_ms, order = played(lambda size, repeat: TRUE_MS[size] * factors.get(repeat, 1.0), ready_ms)
    assert found_ms == pytest.approx(list(TRUE_MS.values()))
    assert order == list(TRUE_MS) * (len(order) // 2), "sizes take turns"


@pytest.mark.parametrize(
    ("round_ms", "repeats"),
    [(1.0, MOST), (BUDGET_S * 1e3 / 6.5, 6), (BUDGET_S * 1e3, FEWEST), (100 * BUDGET_S * 1e3, FEWEST)],
)
def test_there_are_as_many_repetitions_as_there_is_time_for_making_ready_included(
    round_ms: float, repeats: int
) -> None:
    _, order = played(lambda size, repeat: round_ms / 4, ready_ms=round_ms / 4)
    assert order.count(1) == 1 + repeats


def test_a_process_that_hurries_repeats_what_it_measures_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch.setattr)
    _, order = played(lambda size, repeat: 1e-3)
    assert order.count(1) == 2
