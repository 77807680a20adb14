# SPDX-License-Identifier: Apache-2.0
"""How long an operation takes at several sizes, as all ranks see it together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist

from ds_fsmoe.planning.cost import Cost, Fit, fit, fit_switched
from ds_fsmoe.runtime.clock import HOST, Clock
from ds_fsmoe.runtime.one_fate import OneFate
from ds_fsmoe.runtime.topology import world_size_now

FEWEST, MOST = 3, 9
"""Repetitions that count, after one that does not."""
BUDGET_S = 0.5
"""As many repetitions as fit in here, within these bounds; making ready for them counts, too."""

SETTLE_S = 0.003
"""Ranks that have been brought together wait so long before a collective. Those who hear of it first would fill the
link, and the news for others would wait behind: groups that share a link would be timed one after another, each having
it alone."""

Prepare = Callable[[int], Callable[[], object]]
"""A size to what is timed; what it does itself is not. It may not communicate."""


@dataclass(frozen=True)
class Timing:
    """An operation, measured."""

    unit: str
    """Of the sizes."""
    sizes: tuple[float, ...]
    times_ms: tuple[float, ...]
    """Medians, one per size."""

    @cached_property
    def fit(self) -> Fit:
        """A line through them."""
        return fit(self.sizes, self.times_ms)

    @cached_property
    def best_fit(self) -> Fit:
        """Of messages, two lines where one does not do."""
        return fit_switched(self.sizes, self.times_ms) if self.unit == "byte" else self.fit

    @property
    def cost(self) -> Cost:
        """As it was fitted best."""
        return self.best_fit.cost


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
        self.fate = OneFate(device, group)
        self.num_timed = 0
        """Operations, so far."""

    def times_ms(
        self, what: str, sizes: Sequence[int], prepare: Prepare, group: dist.ProcessGroup | None = None
    ) -> list[float]:
        """The median of each size.

        The time of a collective is the mean of the ranks of its group, and of several such groups the slowest counts.
        All start together, so no rank has waited long for another; the least of them would be that of the rank whose
        messages came through first, and of whoever comes last in training. The time of a computation is that of the
        slowest rank.

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
        self._round(what, sizes, prepare, group)
        # The same on every rank.
        round_s = self._over_ranks([[self.host.perf_counter() - start_s]], None).item()
        repeats = min(MOST, max(FEWEST, int(BUDGET_S / max(1e-6, round_s))))
        rounds = [self._round(what, sizes, prepare, group) for _ in range(repeats)]
        return self._over_ranks(rounds, group).median(dim=0).values.tolist()

    def slowest(self, values: Sequence[Sequence[float]]) -> list[list[float]]:
        """Of each number the largest over ranks."""
        return self._over_ranks(values, None).tolist()

    def any_rank(self, what: bool) -> bool:
        """Whether it is so on one rank at least."""
        return bool(self._over_ranks([[float(what)]], None).item())

    def _round(self, what: str, sizes: Sequence[int], prepare: Prepare, group: dist.ProcessGroup | None) -> list[float]:
        """One repetition of all sizes."""
        times_ms = []
        doing = f"measuring {what}"
        for size in sizes:
            # Nobody enters a collective that another rank will not come to. It also brings them together: ranks that
            # share a machine are all at work in training, so they have to be when they are timed.
            with self.fate.of(doing):
                work = prepare(size)
            with self.fate.of(doing):
                if group is not None:
                    self.host.sleep(SETTLE_S)
                times_ms.append(self._time_ms(work))
            del work
        return times_ms

    def _time_ms(self, work: Callable[[], object]) -> float:
        self._wait()
        start_ns = self.host.perf_counter_ns()
        work()
        self._wait()
        return (self.host.perf_counter_ns() - start_ns) / 1e6

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _over_ranks(self, values: Sequence[Sequence[float]], group: dist.ProcessGroup | None) -> torch.Tensor:
        times = torch.tensor(values, dtype=torch.float64, device=self.device)
        if world_size_now() > 1:
            if group is not None:
                dist.all_reduce(times, dist.ReduceOp.SUM, group=group)
                times /= group.size()
            dist.all_reduce(times, dist.ReduceOp.MAX, group=self.group)
        return times.cpu()
