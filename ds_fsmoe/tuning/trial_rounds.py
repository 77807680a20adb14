# SPDX-License-Identifier: Apache-2.0
"""Finds the plan that is kept in three rounds of trials.

The autotuner makes the rounds after measuring, and ends a step of them at each optimizer step. First all candidates are
tried, then the neighbours of the fastest, and at last the plan that was found against DeepSpeed's schedule alone: turns
in which the fastest of many is found show it faster than it is. With a single turn there is one round, of few plans.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ds_fsmoe.log import log_on_rank_0
from ds_fsmoe.planning.decide.model_plan import ModelPlan
from ds_fsmoe.terminal.progress import NowAndThen
from ds_fsmoe.tuning.summary import Outcome
from ds_fsmoe.tuning.table import describe_plan
from ds_fsmoe.tuning.trials import Trials, Tried
from ds_fsmoe.tuning.tuned_model import Candidate, TunedModel, windows_of

if TYPE_CHECKING:
    import torch.distributed as dist

    from ds_fsmoe.gradients.reduction import Reduction
    from ds_fsmoe.observing.step_timer import StepClock

STOCK = "DeepSpeed's schedule"
"""The name of the plan that the others are compared with."""
Decide = Callable[[Callable[[], Sequence[ModelPlan]]], Sequence[ModelPlan]]
Together = Callable[[Sequence[ModelPlan]], Sequence[Candidate]]


MAX_STEPS = 24
"""The optimizer steps within which plans are settled, unless more turns are asked for than there are by default."""
TURNS_WITHIN = 3
"""The most turns for which that holds: more are run if they are asked for, with every plan within the margin."""
TURNS_OF_JUDGING = 3
"""The least number of turns with the plan that was found that are left for measuring its gain."""
PLANS_OF_ONE_TURN = 3
"""The candidates, besides DeepSpeed's schedule, where each has a single step."""


class TrialRounds:
    """Runs the rounds, for one engine. Every method is collective.

    Args:
        model: the layers as they were measured.
        plans: the candidates, the predicted one first, and DeepSpeed's schedule last.
        turns: the steps with each plan.
        clock: the clock of the steps.
        apply: a function that runs the layers by a plan from now on.
        decide: a function that returns, on every rank, what the first one decides.
        together: a function that makes candidates of plans, the last of which is DeepSpeed's schedule; stages have
            equally many.
        reduction: the reduction of gradients, if we do it.
        outcome: what is found is noted in it.
        may_keep_stock: whether DeepSpeed's schedule may stay.
        can_refine: whether neighbours may be tried, as no degree is given by hand.
        phase_group: the ranks of the stage that says which plan's forward is the fastest; ``None``: all.
        has_details: whether each round is logged.
    """

    def __init__(
        self,
        model: TunedModel,
        plans: Sequence[Candidate],
        turns: int,
        clock: StepClock,
        apply: Callable[[Candidate], None],
        decide: Decide,
        together: Together,
        reduction: Reduction | None,
        outcome: Outcome,
        may_keep_stock: bool,
        can_refine: bool,
        phase_group: dist.ProcessGroup | None,
        has_details: bool,
    ) -> None:
        self.model = model
        self._turns = turns
        self._steps_left = MAX_STEPS if turns <= TURNS_WITHIN else None
        self._clock = clock
        self._apply = apply
        self._decide = decide
        self._reduction = reduction
        self._outcome = outcome
        self._may_keep_stock = may_keep_stock
        self._can_refine = can_refine
        self._together = together
        self._phase_group = phase_group
        self._has_details = has_details
        self._names: set[str] = set()
        self._is_last = False
        self._lines = NowAndThen()
        self.rounds: list[list[Tried]] = []
        """Round -> the times of each plan."""
        most = self._steps_for_finding()
        tried = plans if most is None else [*plans[:-1][: most - 1], plans[-1]]
        self.trials = self._begin(tried, turns, most)

    def step_is_over(self) -> bool:
        """End an optimizer step; return True if a plan is settled on, which runs from now on."""
        kept = self.trials.step_is_over()
        if kept is None:
            if self._lines.is_due():
                seen = self._outcome.num_steps + self.trials.num_steps
                log_on_rank_0(f"autotune: tried {seen} steps in {self._lines.took_s:.0f} s; trials go on")
            return False
        trials, outcome = self.trials, self._outcome
        self.rounds.append(trials.results(kept))
        if self._steps_left is not None:
            self._steps_left -= trials.num_taken
        outcome.num_plans = len(self._names)
        outcome.num_steps += trials.num_steps
        outcome.total_ms += trials.total_ms
        found = [each for each in (outcome.least_dense_ms, trials.least_dense_ms) if each is not None]
        outcome.least_dense_ms = min(found, default=None)
        outcome.rest_ms += trials.rest_ms if self._phase_group is None else []
        outcome.is_stock = kept == trials.baseline
        if self._has_details:
            log_on_rank_0(trials.describe(kept))
        if not self._is_last:
            outcome.tried = self.rounds[-1]
            if not outcome.is_stock and self._turns > 1:
                self._next_round(trials, kept)
                return False
        stock = len(self.plans) - 1
        outcome.kept_ms, outcome.baseline_ms = (_median_ms(trials.times_ms[each]) for each in (kept, stock))
        outcome.gain = trials.gain_of_best() if outcome.is_stock else trials.gain(kept)
        return True

    def _steps_for_finding(self) -> int | None:
        """Return the steps that may be taken before the last round; ``None``: as many as it takes."""
        return None if self._steps_left is None else self._steps_left - 2 * TURNS_OF_JUDGING

    def _next_round(self, trials: Trials, kept: int) -> None:
        plans, stock = self.plans, self.plans[-1]
        if self._can_refine:
            self._can_refine = False
            best, forward, backward = (plans[number].plan for number in (kept, *trials.fastest_phases(kept)))
            near = self._together(
                [*self._decide(lambda: self._near(best, forward, backward, trials.spread)), stock.plan]
            )
            most = self._steps_for_finding()
            if len(near) > 2 and (most is None or len(near) <= most):
                self.trials = self._begin(near, self._turns, most)
                return
        self._is_last = True
        # Twice as many, as these alone say what is gained.
        turns = max(2, 2 * self._turns - 1)
        if self._steps_left is not None:
            turns = min(turns, self._steps_left // 2)
        self.trials = self._begin([plans[kept], stock], turns, self._steps_left)

    def _near(self, best: ModelPlan, forward: ModelPlan, backward: ModelPlan, spread: float) -> list[ModelPlan]:
        """Return the best plan, and its neighbours that are predicted to gain more than steps differ by; of a stage
        without layers there are none."""
        search = self.model.search
        if not search.request.options:
            return [best]
        first, *others = search.refinements(best, forward, backward)
        most_ms = (1 - spread) * self.model.predict(first).chosen_ms
        return [first, *(each for each in others if self.model.predict(each).chosen_ms < most_ms)]

    def _begin(self, plans: Sequence[Candidate], turns: int, max_steps: int | None) -> Trials:
        self.plans = tuple(plans)
        names = [*(self._name_of(each) for each in plans[:-1]), STOCK]
        self._names.update(names)
        if self._reduction is not None:
            self._reduction.try_windows(windows_of(plans[0].plan))
        of_trials = len(plans) - 1, self._may_keep_stock, self._phase_group
        return Trials(names, turns, self._use, self._clock, None, *of_trials, max_steps)

    def _name_of(self, candidate: Candidate) -> str:
        if candidate.of_stages is not None:
            return candidate.of_stages.name
        return describe_plan(self.model.labels, candidate.plan)

    def _use(self, number: int) -> None:
        self._apply(self.plans[number])
        if self._reduction is not None:
            self._reduction.try_windows(windows_of(self.plans[number].plan))


def _median_ms(times_ms: Sequence[float]) -> float | None:
    return statistics.median(times_ms) if times_ms else None
