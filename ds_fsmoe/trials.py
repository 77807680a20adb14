# SPDX-License-Identifier: Apache-2.0
"""The few plans that look best, tried by training with them: every plan gives the same numbers, so no step is lost.

A prediction adds up what operations take one by one, and pair by pair. Ranks that share cores or links, wait for each
other in other places, or drift apart, make it wrong by more than plans differ. What a step takes is the judge.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch.distributed as dist

from ds_fsmoe.runtime.step_times import StepClock, most_of

GAIN = 0.01
"""What a plan has to gain over one that stands before it: less is chance."""


class Trials:
    """Whole optimizer steps, each with one plan, in turns; every second round backwards. Ranks decide alike.

    Args:
        names: of the plans, for people; the one that is kept if none is faster stands first.
        rounds: steps with each plan, of which the median counts.
        use: runs the layers by a plan from now on.
        clock: of the steps.
        group: the ranks; ``None``: all.
    """

    def __init__(
        self,
        names: Sequence[str],
        rounds: int,
        use: Callable[[int], None],
        clock: StepClock,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.names = tuple(names)
        self.times_ms: list[list[float]] = [[] for _ in names]
        """Plan -> of each step, of its slowest rank, all but the optimizer's part."""
        once = range(len(names))
        self._order = [plan for turn in range(rounds) for plan in (reversed(once) if turn % 2 else once)]
        self._use = use
        self._clock = clock
        self._group = group
        self._next = 0

    def step_is_over(self) -> int | None:
        """An optimizer step is over: the first call begins. Collective, on every rank after the same steps.

        Returns:
            The plan that is kept, and is run from now on; ``None`` while there is more to try.
        """
        if self._next:
            own = self._clock.read()
            lacks, step_ms = 1.0, 0.0
            if own is not None and own.has_both:
                lacks, step_ms = 0.0, own.forward_ms + own.backward_ms
            lacks, step_ms = most_of([lacks, step_ms], self._clock.device, self._group)
            # A step that was not seen whole, such as one without a backward, says nothing.
            if not lacks:
                self.times_ms[self._order[self._next - 1]].append(step_ms)
            self._clock.stop()
        if self._next == len(self._order):
            best = self._best()
            self._use(best)
            return best
        self._use(self._order[self._next])
        self._next += 1
        self._clock.start()
        return None

    def _best(self) -> int:
        best, best_ms = 0, statistics.median(self.times_ms[0] or [float("inf")])
        for plan, times_ms in enumerate(self.times_ms):
            if times_ms and statistics.median(times_ms) < (1 - GAIN) * best_ms:
                best, best_ms = plan, statistics.median(times_ms)
        return best

    def describe(self, kept: int) -> str:
        """What each took."""
        told = [
            f"{name} {statistics.median(times_ms):.4g} ms{' (kept)' if plan == kept else ''}"
            for plan, (name, times_ms) in enumerate(zip(self.names, self.times_ms, strict=True))
            if times_ms
        ]
        return f"autotune: trained with each of these in turns, medians of {len(self.times_ms[kept])} steps: " + (
            "; ".join(told) or "no step was seen whole, so what was predicted stays"
        )
