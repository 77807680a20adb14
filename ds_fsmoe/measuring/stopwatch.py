# SPDX-License-Identifier: Apache-2.0
"""How long an operation takes at several sizes, as all ranks see it together; on a GPU by its own clock, and beside
that how long the host takes to issue it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist

from ds_fsmoe.distributed.fail_together import raise_on_all_ranks
from ds_fsmoe.distributed.topology import world_size_now
from ds_fsmoe.distributed.waits import waiting
from ds_fsmoe.observing.clock import HOST, Clock
from ds_fsmoe.observing.device_time import Delay, elapsed_ms, issued_ms, pause_ms

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

Prepare = Callable[[int], Callable[[], object]]
"""A size to what is timed; what it does itself is not. It may not communicate."""


class Times(NamedTuple):
    """The times of an operation, one of each kind per size."""

    times_ms: list[float]
    """The medians of the repetitions."""
    issued_ms: list[float]
    """The host time to issue it; empty on a CPU."""
    least_ms: list[float]
    """The fastest repetition; of a computation on the fastest rank, as the others may have been in its way."""


class Stopwatch:
    """Times operations on all ranks that take part. Every method is collective.

    Args:
        device: on which they run.
        group: the ranks that take part; ``None``: all of the job.
        host: the clock of this rank.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None, host: Clock = HOST) -> None:
        self.device = device
        self.group = group
        self.host = host
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
            what: is timed, for messages.
            sizes: given to ``prepare``, in turn within each repetition, so that no size has the quiet minutes alone.
            prepare: makes ready for one of them.
            group: of a collective; ``None`` for what a rank does alone.

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
        repeats = min(MOST, max(FEWEST, int(BUDGET_S / max(1e-6, round_s))))
        rounds = [self._round(*of_round, by_device) for _ in range(repeats)]
        of_ranks = self._over_ranks(rounds, group)
        least = of_ranks if group is not None else self._fastest(rounds)
        return Times(of_ranks.median(dim=0).values.tolist(), issued, least.min(dim=0).values.tolist())

    def times_ms(
        self, what: str, sizes: Sequence[int], prepare: Prepare, group: dist.ProcessGroup | None = None
    ) -> list[float]:
        """Return the median of each size; see :meth:`times`."""
        return self.times(what, sizes, prepare, group).times_ms

    def host_ms(self, what: str, size: int, prepare: Prepare) -> float:
        """Measure what some work costs the host: on a GPU to issue it, on a CPU to do it.

        Raises:
            MeasuringError: on every rank, if one has failed.
        """
        found = self.times(what, [size], prepare)
        return (found.issued_ms or found.times_ms)[0]

    def issued_in_ms(self, what: str, work: Callable[[], object]) -> float:
        """Measure what some work costs this rank's host, done once for that; on a GPU it can be held back then.

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
            delay_ms: for so long; delays of the same length differ between devices.
            meets: whether ranks meet behind it, on the device, so that none has to wait for the delay of another.
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
        """Do once on all ranks what takes longer the first time, before anything is timed."""
        if "_delay" not in vars(self):
            with raise_on_all_ranks(self.group, f"making ready to measure {what}"):
                self.hold_back(0.0)

    def slowest(self, values: Sequence[Sequence[float]]) -> list[list[float]]:
        """Return the largest over ranks of each number."""
        return self._over_ranks(values, None).tolist()

    def any_rank(self, what: bool) -> bool:
        """Return whether it is true on at least one rank."""
        return bool(self._over_ranks([[float(what)]], None).item())

    def _round(
        self,
        what: str,
        sizes: Sequence[int],
        prepare: Prepare,
        group: dist.ProcessGroup | None,
        time_ms: Callable[[int, Callable[[], object]], float],
    ) -> list[float]:
        """One repetition of all sizes, timed by ``time_ms``, which is told which of them it is."""
        times_ms = []
        doing = f"measuring {what}"
        for place, size in enumerate(sizes):
            # Nobody enters a collective that another rank will not come to. It also brings them together: ranks that
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

    def _fastest(self, values: Sequence[Sequence[float]]) -> torch.Tensor:
        times = torch.tensor(values, dtype=torch.float64)
        if world_size_now() > 1:
            times = times.to(self.device)
            with waiting("measured times"):
                dist.all_reduce(times, dist.ReduceOp.MIN, group=self.group)
        return times.cpu()

    def _over_ranks(self, values: Sequence[Sequence[float]], group: dist.ProcessGroup | None) -> torch.Tensor:
        times = torch.tensor(values, dtype=torch.float64)
        if world_size_now() > 1:
            times = times.to(self.device)
            with waiting("measured times"):
                if group is not None:
                    dist.all_reduce(times, dist.ReduceOp.SUM, group=group)
                    times /= group.size()
                dist.all_reduce(times, dist.ReduceOp.MAX, group=self.group)
        return times.cpu()
