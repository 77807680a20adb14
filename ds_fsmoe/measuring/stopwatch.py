# SPDX-License-Identifier: Apache-2.0
"""Times operations at several sizes on all ranks together; on a GPU by its own clock, besides the host's time to issue.

Everything that is measured, is measured by it: layers, clusters, micro-ops and reductions of gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist

from ds_fsmoe.distributed.fail_together import raise_on_all_ranks
from ds_fsmoe.distributed.topology import world_size_now
from ds_fsmoe.distributed.waits import waiting
from ds_fsmoe.execution.lanes import Lanes
from ds_fsmoe.observing.clock import HOST, Clock
from ds_fsmoe.observing.device_time import Delay, elapsed_ms, issued_ms, pause_ms
from ds_fsmoe.observing.spans import Recorder
from ds_fsmoe.planning.job.measured import Slowdowns
from ds_fsmoe.planning.schedule import HOLD, Draft, Lane, Schedule, Task

FEWEST, MOST = 3, 9
"""The number of repetitions that count, after one that does not."""
BUDGET_S = 0.5
"""The time limit for repetitions, including preparation, within these bounds."""
ISSUED = 2
"""Repetitions in which a GPU is not kept waiting: of these the host's time is taken, and by that it is kept waiting."""

SETTLE_S = 0.003
"""Ranks that have been brought together wait so long before a collective. Those who hear of it first would fill the
link, and the news for others would wait behind: groups that share a link would be timed one after another, each having
it alone."""

_HOST_RUNS = 8
Prepare = Callable[[int], Callable[[], object]]
"""A size to what is timed; what it does itself is not. It may not communicate."""


def at_least(count: int, sizes: Iterable[int]) -> list[int]:
    """Return different sizes, ascending: those that are given, then doubles of the largest up to so many."""
    found = sorted(set(sizes))
    while len(found) < count:
        found.append(2 * found[-1])
    return found


class Times(NamedTuple):
    """Holds the times of an operation, one of each kind per size."""

    times_ms: list[float]
    """The medians of the repetitions."""
    issued_ms: list[float]
    """The host time to issue it; empty on a CPU."""
    least_ms: list[float]
    """The fastest repetition; of a computation on the fastest rank, as the others may have been in its way."""


class Stopwatch:
    """Times operations on all ranks that take part. Every method is collective.

    Args:
        device: the device that runs them.
        group: the ranks that take part; ``None``: all of the job.
        host: the clock of this rank.
        budget_s: the time limit for the repetitions of an operation, :data:`BUDGET_S` if it is None; there are
            :data:`FEWEST` in any case.
    """

    def __init__(
        self,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        host: Clock = HOST,
        budget_s: float | None = None,
    ) -> None:
        self.device = device
        self.group = group
        self.host = host
        self._budget_s = BUDGET_S if budget_s is None else budget_s
        self.num_timed = 0
        """The number of operations so far."""
        self.issues_ahead = device.type == "cuda"
        """Whether the host is through before the device is, so that the two are measured apart."""

    def times(self, what: str, sizes: Sequence[int], prepare: Prepare, group: dist.ProcessGroup | None = None) -> Times:
        """Time an operation at several sizes.

        The time of a collective is the mean of the ranks of its group, and of several such groups the slowest counts.
        All start together, so no rank has waited long for another; the least of them would be that of the rank whose
        messages came through first, and of whoever comes last in training. The time of a computation is that of the
        slowest rank.

        On a GPU all work waits behind a delay until the host has issued it, and is timed by events: neither the latency
        of a launch nor Python is in it. Behind the delay the ranks of a collective meet, on the device.

        Args:
            what: the name of the operation, for messages.
            sizes: given to ``prepare``, in turn within each repetition, so that no size has the quiet minutes alone.
            prepare: a function that prepares one of them.
            group: the group of a collective; ``None`` for the work of one rank alone.

        Raises:
            MeasuringError: on every rank, if one has failed.
        """
        self.num_timed += 1
        start_s = self.host.perf_counter()
        issued: list[float] = []

        def by_host(place: int, work: Callable[[], object]) -> float:
            return issued_ms(self.device, work, self.host)

        def by_device(place: int, work: Callable[[], object]) -> float:
            def ahead() -> None:
                if self.issues_ahead:
                    self.hold_back(pause_ms(issued[place]), group is not None, group)

            return elapsed_ms(self.device, work, ahead, self.host)

        of_round = what, sizes, prepare, group
        self._round(*of_round, by_host)
        if self.issues_ahead:
            self._ready_to_hold_back(what)
            # Of a round in which a rank was disturbed, the other one is taken.
            rounds = [self._round(*of_round, by_host) for _ in range(ISSUED)]
            issued = self._over_ranks(rounds, None).min(dim=0).values.tolist()
            start_s = self.host.perf_counter()
            self._round(*of_round, by_device)
        # The same on every rank.
        round_s = self._over_ranks([[self.host.perf_counter() - start_s]], None).item()
        repeats = min(MOST, max(FEWEST, int(self._budget_s / max(1e-6, round_s))))
        rounds = [self._round(*of_round, by_device) for _ in range(repeats)]
        of_ranks = self._over_ranks(rounds, group)
        least = of_ranks if group is not None else self._over_ranks(rounds, None, least=True)
        return Times(of_ranks.median(dim=0).values.tolist(), issued, least.min(dim=0).values.tolist())

    def times_ms(
        self, what: str, sizes: Sequence[int], prepare: Prepare, group: dist.ProcessGroup | None = None
    ) -> list[float]:
        """Return the median of each size; see :meth:`times`."""
        return self.times(what, sizes, prepare, group).times_ms

    def host_ms(self, what: str, size: int, prepare: Prepare) -> float:
        """Measure the host time of some work: on a GPU to issue it, on a CPU to run it.

        Raises:
            MeasuringError: on every rank, if one has failed.
        """
        found = self.times(what, [size], prepare)
        return (found.issued_ms or found.times_ms)[0]

    def issued_in_ms(self, what: str, work: Callable[[], object]) -> float:
        """Measure the time of some work on this rank's host in one run; on a GPU it can be held back then.

        Raises:
            MeasuringError: on every rank, if one has failed.
        """
        self._ready_to_hold_back(what)
        with raise_on_all_ranks(self.group, f"measuring {what}"):
            took_ms = issued_ms(self.device, work, self.host)
        return took_ms

    def hold_back(self, delay_ms: float, meets: bool = False, group: dist.ProcessGroup | None = None) -> None:
        """Keep the current stream of a GPU busy, so that the host can issue what is to come after.

        Args:
            delay_ms: the length; delays of the same length differ between devices.
            meets: whether ranks have a barrier behind it, on the device, so that none waits for the delay of another.
            group: those ranks; ``None``: all of the job.
        """
        self._delay(delay_ms)
        if meets and world_size_now() > 1:
            with waiting("the start of what is measured"):
                dist.all_reduce(self._token, group=group)

    @cached_property
    def _delay(self) -> Delay:
        return Delay(self.device, self.host)

    @cached_property
    def _token(self) -> torch.Tensor:
        return torch.zeros(1, device=self.device)

    def _ready_to_hold_back(self, what: str) -> None:
        """Run the delay once on all ranks before anything is timed, as it takes longer the first time."""
        if "_delay" not in vars(self):
            with raise_on_all_ranks(self.group, f"making ready to measure {what}"):
                self.hold_back(0.0)

    def slowest(self, values: Sequence[Sequence[float]]) -> list[list[float]]:
        """Return the largest over ranks of each number."""
        return self._over_ranks(values, None).tolist()

    def any_rank(self, what: bool) -> bool:
        """Return True if it is true on at least one rank."""
        return bool(self._over_ranks([[float(what)]], None).item())

    def _round(
        self,
        what: str,
        sizes: Sequence[int],
        prepare: Prepare,
        group: dist.ProcessGroup | None,
        time_ms: Callable[[int, Callable[[], object]], float],
    ) -> list[float]:
        """Return the times of one repetition of all sizes by ``time_ms``, which is given the place of the size."""
        times_ms = []
        doing = f"measuring {what}"
        for place, size in enumerate(sizes):
            # No rank enters a collective that another rank will not come to. It also brings them together: ranks that
            # share a machine are all at work in training, so they have to be when they are timed.
            with raise_on_all_ranks(self.group, doing):
                work = prepare(size)
            with raise_on_all_ranks(self.group, doing):
                if group is not None:
                    self.host.sleep(SETTLE_S)
                self._wait()
                with waiting(doing):
                    times_ms.append(time_ms(place, work))
            del work
        return times_ms

    def _wait(self) -> None:
        if self.issues_ahead:
            torch.cuda.synchronize(self.device)

    def _over_ranks(
        self, values: Sequence[Sequence[float]], group: dist.ProcessGroup | None, least: bool = False
    ) -> torch.Tensor:
        """Return of each number the mean over the ranks of a group, if one is given, and of these the largest, or the
        least, of all ranks that take part."""
        times = torch.tensor(values, dtype=torch.float64)
        if world_size_now() > 1:
            times = times.to(self.device)
            with waiting("measured times"):
                if group is not None:
                    dist.all_reduce(times, dist.ReduceOp.SUM, group=group)
                    times /= group.size()
                dist.all_reduce(times, dist.ReduceOp.MIN if least else dist.ReduceOp.MAX, group=self.group)
        return times.cpu()


def empty_task_ms(watch: Stopwatch, what: str, lanes: Lanes, schedule: Schedule, label: str) -> float:
    """Return the host cost per task of a schedule whose tasks do nothing. Collective.

    Args:
        watch: the stopwatch of this job.
        what: the measured thing, for messages.
        lanes: the lanes that run it.
        schedule: the schedule; holding a lane is no task.
        label: the name of its runs.

    Raises:
        MeasuringError: on every rank, if one has failed.
    """
    bodies = dict.fromkeys({task.kind for task in schedule.tasks}, lambda task: None)

    def prepare(runs: int) -> Callable[[], None]:
        def work() -> None:
            for _ in range(runs):
                lanes.run(schedule, bodies, label)

        return work

    time_ms = watch.host_ms(what, _HOST_RUNS, prepare)
    return time_ms / (_HOST_RUNS * max(1, sum(task.kind != HOLD for task in schedule.tasks)))


# ---- This module measures how much two lanes slow each other down: alone, then both at once
#
# What an operation takes alone says little about a machine on which others are under way: links may share a wire or
# an adapter, and traffic and computation take processor time, memory bandwidth or multiprocessors from each other.
#
# A GPU is kept waiting until it has been given all that is to run side by side: one thread issues for all lanes, so
# lanes that wait for it would seem to slow each other down, by as much as they share it.


REPEATS = 3
SHORTEST_MS = 20.0
"""The least time that a lane is kept busy, so that its start does not matter."""
MOST_TASKS = 64
MOST_ISSUED_MS = 2.0
"""Of a lane, what the host needs at the most to issue its tasks: a GPU takes a thousand launches ahead, and a host that
has to wait for room would be timed with it."""

PrepareOnLane = Callable[[], Callable[[], object]]
"""A function that prepares, without communication, work that can then be done many times."""


def slowdowns(watch: Stopwatch, lanes: Lanes, work: Mapping[Lane, PrepareOnLane], what: str) -> Slowdowns:
    """Measure every pair. Collective; each lane's work is the same on every rank.

    Args:
        watch: the stopwatch of this job.
        lanes: the lanes that overlap.
        work: lane -> what it does, over and over.
        what: the measured thing, for messages.

    Raises:
        MeasuringError: on every rank, if one has failed.
    """
    bodies: dict[Lane, Callable[[], object]] = {}
    with raise_on_all_ranks(watch.group, f"making ready to measure {what}"):
        bodies = {lane: prepare() for lane, prepare in work.items()}
    recorder = Recorder(watch.device, watch.host)
    last_issue_ms = 0.0

    def busy_ms(counts: Mapping[Lane, int]) -> list[float]:
        """Return lane -> when it finished on the slowest rank, the median over repeats."""
        schedule = _concurrent_tasks(counts)
        calls = {lane.value: _calling(bodies[lane]) for lane in counts}

        def run() -> None:
            lanes.run(schedule, calls, what, recorder)

        nonlocal last_issue_ms
        if watch.issues_ahead:
            last_issue_ms = watch.issued_in_ms(what, run)
        runs = []
        for _ in range(REPEATS):
            with raise_on_all_ranks(watch.group, f"measuring {what}"):
                if watch.issues_ahead:
                    watch.hold_back(pause_ms(last_issue_ms), meets=True, group=watch.group)
                run()
                spans = recorder.timeline(schedule).spans
            runs.append([max(each.end_ms for each in spans if each.task.lane is lane) for lane in counts])
        return torch.tensor(watch.slowest(runs)).median(dim=0).values.tolist()

    if len(bodies) < 2:
        return Slowdowns({})
    for lane in bodies:  # warm up
        busy_ms({lane: 1})
    once_ms, issue_ms = {}, []
    for lane in bodies:
        once_ms[lane] = max(1e-3, busy_ms({lane: 1})[0])
        issue_ms.append(last_issue_ms)
    counts = _counts(once_ms, watch.slowest([issue_ms])[0] if watch.issues_ahead else issue_ms)
    alone_ms = {lane: busy_ms({lane: counts[lane]})[0] for lane in bodies}
    factors: dict[tuple[Lane, Lane], float] = {}
    for a, b in itertools.combinations(bodies, 2):
        a_ms, b_ms = busy_ms({a: counts[a], b: counts[b]})
        factors[a, b] = _slowdown(alone_ms[a], a_ms, b_ms)
        factors[b, a] = _slowdown(alone_ms[b], b_ms, a_ms)
    return Slowdowns(factors)


def _counts(once_ms: Mapping[Lane, float], issue_ms: Sequence[float]) -> dict[Lane, int]:
    """Return how many tasks keep each lane busy for about as long as the others.

    Args:
        once_ms: what a task of the lane takes; the same on every rank, as is the result.
        issue_ms: of each lane, what it takes the host to issue one ahead.
    """
    aim_ms = max(SHORTEST_MS, 2 * max(once_ms.values()))
    most = [MOST_TASKS if not each_ms else min(MOST_TASKS, int(MOST_ISSUED_MS / each_ms)) for each_ms in issue_ms]
    return {
        lane: max(1, min(most_of_lane, round(aim_ms / once_ms[lane])))
        for lane, most_of_lane in zip(once_ms, most, strict=True)
    }


def _slowdown(alone_ms: float, together_ms: float, other_ms: float) -> float:
    """Compute the slowdown from when a lane finished alone and together; it only slows while the other is busy."""
    beside_ms = min(together_ms, other_ms)
    # What was left of it when the other was through ran at full speed.
    done_beside_ms = alone_ms - (together_ms - beside_ms)
    return max(1.0, beside_ms / done_beside_ms) if done_beside_ms > 0 else 1.0


def _concurrent_tasks(counts: Mapping[Lane, int]) -> Schedule:
    """Return this many tasks on each lane that wait only for their lane. A task's kind is its lane's name."""
    draft = Draft()
    for chunk in range(max(counts.values())):
        for lane, count in counts.items():
            if chunk < count:
                draft.add(lane.value, lane, chunk=chunk)
    return draft.finish()


def _calling(body: Callable[[], object]) -> Callable[[Task], None]:
    def call(task: Task) -> None:
        body()

    return call
