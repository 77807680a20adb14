# SPDX-License-Identifier: Apache-2.0
"""Tries the best predicted plans by training with them: every plan gives the same numbers, so no step is lost.

The rounds of trials call it at each optimizer step. Predictions ignore shared cores, other waits and drifting ranks,
and are off by more than plans differ. So the measured step decides.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch.distributed as dist

from ds_fsmoe.observing.step_timer import StepClock, most_of
from ds_fsmoe.terminal.tables import Message, Table

GAIN = 0.01
"""A later plan in the list must be faster by this share; less is noise."""
DROP_MARGIN = 0.1
"""A plan whose fastest step is slower than another's by this share is not tried again: little training time is lost."""
FINALISTS = 2
"""So many plans, the fastest so far, are tried in every turn all the same: none is kept for a single lucky step."""


@dataclass(frozen=True)
class TrialGain:
    """Holds how many times as fast a plan is as the baseline, from alternating steps of both."""

    ratio: float
    """The median, over turns, of the ratio of the two steps in it."""
    low: float
    high: float
    """The smallest and the largest of these ratios."""
    num_turns: int

    @property
    def is_clear(self) -> bool:
        """Return True if the plan was the faster one in each of several turns."""
        return self.num_turns > 1 and self.low > 1.0


@dataclass(frozen=True)
class Tried:
    """Holds the result of trying a plan."""

    name: str
    step_ms: float
    """The median time of its steps."""
    num_steps: int
    is_kept: bool
    is_baseline: bool = False
    """Whether it is the one that the others are compared with."""
    times_ms: tuple[float, ...] = ()
    """The time of each of its steps, in their order."""


class Trials:
    """Runs whole optimizer steps, each with one plan. A turn tries each plan that is left once.

    Every second turn tries the plans in reverse order, and each turn drops the plans outside of the margin. Ranks
    decide alike.

    Args:
        names: the names of the plans, for people; the first is kept if none is faster.
        turns: how many steps each plan gets at most; a plan's median step time decides.
        use: a function that runs the layers by a plan from now on.
        clock: the clock of the steps.
        group: the ranks; ``None``: all.
        baseline: the plan to compare with, which is tried in every turn, however slow; ``None``: there is none.
        may_keep_baseline: whether it may be kept, too.
        phase_group: the ranks that say how long forwards and backwards take, such as those of a stage; ``None``: all.
        max_steps: the steps that may be taken; where they run short, only the fastest plans are tried again, or none.
            Each plan has its first step all the same. ``None``: as many as it takes.
    """

    def __init__(
        self,
        names: Sequence[str],
        turns: int,
        use: Callable[[int], None],
        clock: StepClock,
        group: dist.ProcessGroup | None = None,
        baseline: int | None = None,
        may_keep_baseline: bool = True,
        phase_group: dist.ProcessGroup | None = None,
        max_steps: int | None = None,
    ) -> None:
        self.names = tuple(names)
        self.baseline = baseline
        self._may_keep_baseline = may_keep_baseline
        self._turn = 0
        self._of_turn: list[dict[int, float]] = [{} for _ in names]
        """Plan -> turn -> the time of its step."""
        self.times_ms: list[list[float]] = [[] for _ in names]
        """Plan -> the time of each step on its slowest rank, all but the optimizer's part."""
        self._phases_ms: list[list[tuple[float, float]]] = [[] for _ in names]
        self._turns_left = turns
        self._max_steps = max_steps
        self.num_taken = 0
        """The steps that were taken, whether they were seen whole or not."""
        self._to_try = list(range(len(names)))
        """The plans to try in this turn, in order."""
        self._tried: list[int] = []
        self._in_last_turn: list[int] = list(range(len(names)))
        self.least_dense_ms: float | None = None
        """The least time, over steps, of all but the layers' runs; ``None``: no step was seen whole."""
        self.rest_ms: list[float] = []
        """That of each step with the baseline."""
        self._use = use
        self._clock = clock
        self._group = group
        self._phase_group = phase_group
        self._trying: int | None = None

    def step_is_over(self) -> int | None:
        """End an optimizer step; the first call starts the first trial. Collective, on every rank after the same steps.

        Returns:
            The plan that is kept, and is run from now on; ``None`` while there is more to try.
        """
        if self._trying is not None:
            own = self._clock.read()
            seen = [1.0, 0.0, 0.0, 0.0, 0.0]
            if own is not None and own.has_both:
                dense_ms = math.inf if own.is_interleaved else own.dense_forward_ms + own.dense_backward_ms
                seen = [0.0, own.step_ms, own.forward_ms, own.backward_ms, dense_ms]
            lacks, step_ms, *phases_ms, dense_ms = most_of(seen, self._clock.device, self._group)
            if self._phase_group is not None:
                phases_ms = most_of(seen[2:4], self._clock.device, self._phase_group)
            # A step that was not seen whole, such as one without a backward, says nothing.
            if not lacks:
                self.times_ms[self._trying].append(step_ms)
                self._of_turn[self._trying][self._turn] = step_ms
                self._phases_ms[self._trying].append((phases_ms[0], phases_ms[1]))
                if dense_ms < math.inf:
                    self.least_dense_ms = min(dense_ms, self.least_dense_ms or dense_ms)
                    self.rest_ms += [dense_ms] * (self._trying == self.baseline)
            self._clock.stop()
            self.num_taken += 1
            self._tried.append(self._to_try.pop(0))
        if not self._to_try:
            self._turns_left -= 1
            self._turn += 1
            finalists = self._finalists()
            hopeful = [plan for plan in reversed(self._tried) if plan in finalists or self._is_competitive(plan)]
            self._to_try = self._affordable(hopeful)
            self._in_last_turn, self._tried = self._tried, []
            if len(self._to_try) == 1:
                self._turns_left = 0
        if not self._turns_left:
            best = self._best()
            self._use(best)
            return best
        self._trying = self._to_try[0]
        self._use(self._trying)
        self._clock.start()
        return None

    def _finalists(self) -> set[int | None]:
        """Return the plans that stay in every turn: the fastest ones, and the baseline."""
        seen = [plan for plan, times_ms in enumerate(self.times_ms) if times_ms and plan != self.baseline]
        return {self.baseline, *sorted(seen, key=lambda plan: min(self.times_ms[plan]))[:FINALISTS]}

    def _affordable(self, plans: Sequence[int]) -> list[int]:
        """Return those plans that are tried in the next turn, in the same order: the fastest ones, where the steps that
        are left do not suffice for all in each turn. Fewer turns are left where they do not suffice for finalists."""
        if self._max_steps is None or not self._turns_left:
            return list(plans)
        num_left = self._max_steps - self.num_taken
        self._turns_left = min(self._turns_left, num_left // min(len(plans), FINALISTS + 1))
        if not self._turns_left:
            return list(plans)
        by_speed = sorted(plans, key=lambda plan: min(self.times_ms[plan], default=math.inf))
        by_speed.sort(key=lambda plan: plan != self.baseline)
        stay = set(by_speed[: num_left // self._turns_left])
        return [plan for plan in plans if plan in stay]

    def _is_competitive(self, plan: int) -> bool:
        # One that has not been seen whole is tried on.
        fastest_ms = min((min(each) for each in self.times_ms if each), default=float("inf"))
        return not self.times_ms[plan] or min(self.times_ms[plan]) <= (1 + DROP_MARGIN) * fastest_ms

    def _best(self) -> int:
        """Return the plan with the least median, of those that were in every turn: one that was dropped has been timed
        while the machine may have been less busy. The first that is left stays unless another gains enough."""
        found = [plan for plan in sorted(self._in_last_turn) if self.times_ms[plan] and self._may_be_kept(plan)]
        if not found:
            return 0
        best = found[0]
        for plan in found[1:]:
            if self._median_ms(plan) < (1 - GAIN) * self._median_ms(best):
                best = plan
        return best

    def _may_be_kept(self, plan: int) -> bool:
        return plan != self.baseline or self._may_keep_baseline

    def _median_ms(self, plan: int) -> float:
        return statistics.median(self.times_ms[plan])

    def fastest_phases(self, kept: int) -> tuple[int, int]:
        """Return the plans with the fastest forward and with the fastest backward.

        Args:
            kept: the plan to return for both if no step was seen whole.
        """
        seen = [(plan, np.median(times_ms, axis=0)) for plan, times_ms in enumerate(self._phases_ms) if times_ms]
        if not seen:
            return kept, kept
        forward, backward = (min(seen, key=lambda each: each[1][phase])[0] for phase in (0, 1))
        return forward, backward

    def gain_of_best(self) -> TrialGain | None:
        """Return the gain of the plan with the least median, other than the baseline and tried in every turn: the ratio
        of the medians, which have decided."""
        others = [plan for plan in self._in_last_turn if plan != self.baseline and self.times_ms[plan]]
        best = min(others, key=self._median_ms, default=None)
        found = None if best is None else self.gain(best)
        if found is None or self.baseline is None or best is None:
            return None
        return replace(found, ratio=self._median_ms(self.baseline) / self._median_ms(best))

    def gain(self, plan: int) -> TrialGain | None:
        """Return how many times as fast a plan is as the baseline; ``None`` if no turn has both."""
        if self.baseline is None:
            return None
        ours, base = self._of_turn[plan], self._of_turn[self.baseline]
        ratios = [base[turn] / ours[turn] for turn in ours.keys() & base.keys() if ours[turn] > 0]
        if not ratios:
            return None
        return TrialGain(statistics.median(ratios), min(ratios), max(ratios), len(ratios))

    @property
    def spread(self) -> float:
        """Return the share by which the slowest step of a plan is behind its fastest, the median of the plans that were
        tried more than once; at least what counts as chance."""
        seen = [max(each) / min(each) - 1 for each in self.times_ms if len(each) > 1 and min(each) > 0]
        return max(GAIN, statistics.median(seen)) if seen else GAIN

    @property
    def num_steps(self) -> int:
        """Return the number of steps that were observed whole."""
        return sum(map(len, self.times_ms))

    @property
    def total_ms(self) -> float:
        """Return the time of all these steps in milliseconds."""
        return sum(map(sum, self.times_ms))

    def results(self, kept: int) -> list[Tried]:
        """Return the times of each measured plan, the fastest first.

        Args:
            kept: the plan that stays.
        """
        seen = [
            Tried(
                self.names[plan],
                statistics.median(times_ms),
                len(times_ms),
                is_kept=plan == kept,
                is_baseline=plan == self.baseline,
                times_ms=tuple(times_ms),
            )
            for plan, times_ms in enumerate(self.times_ms)
            if times_ms
        ]
        return sorted(seen, key=lambda each: each.step_ms)

    def describe(self, kept: int) -> str:
        """Describe the results, a row for each plan."""
        results = self.results(kept)
        if not results:
            return "autotune: no step of a trial was complete, so the predicted plan is kept"
        head = "autotune: trained alternating between these plans"
        rows = [
            (f"{each.step_ms:.4g}", each.num_steps, each.name + ("  (kept)" if each.is_kept else ""))
            for each in results
        ]
        return Message([head, Table(("ms", "steps", "plan"), rows, indent="  ", has_rule=False)])
