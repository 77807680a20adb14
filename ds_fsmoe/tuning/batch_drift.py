# SPDX-License-Identifier: Apache-2.0
"""Compares the predictions of batches through pipeline stages with what they take: of every n-th batch, as a whole and
stage by stage.

What is predicted of a batch is the work of the stage that takes longest, with the plans that run. What else a batch
takes, such as bubbles, sends and the optimizer, is taken as it was in the first batches compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import product

from ds_fsmoe.config.blocks import AutotuneBlock
from ds_fsmoe.distributed.topology import Stages
from ds_fsmoe.observing.step_timer import StepClock, most_of
from ds_fsmoe.planning.stage_plan import StageTimes
from ds_fsmoe.tuning.drift import REFERENCES, PredictionWatch
from ds_fsmoe.tuning.stage_plans import OfStages
from ds_fsmoe.tuning.step_comparison import Compared, StepComparison

_PHASES = ("forward", "backward")


class BatchWatch(PredictionWatch):
    """Compares batches through stages, for one engine. Every rank of the job is told of the end of every batch.

    Args:
        block: how often to compare, and what differs too much.
        clock: the clock that is started for the batches that are compared.
        stages: where this rank is.
        of_stages: returns what runs, the same on every rank; ``None`` until something is planned.
        plan_again: see :class:`~ds_fsmoe.tuning.drift.PredictionWatch`.
    """

    def __init__(
        self,
        block: AutotuneBlock,
        clock: StepClock,
        stages: Stages,
        of_stages: Callable[[], OfStages | None],
        plan_again: Callable[[str], None],
    ) -> None:
        self._stages = stages
        self._of_stages = of_stages
        super().__init__(block, clock, (), dict, plan_again)

    def _is_predicted(self) -> bool:
        return self._of_stages() is not None

    def _compare(self, step: int) -> StepComparison | None:
        own, of_stages = self._clock.read(), self._of_stages()
        assert of_stages is not None
        phases_ms = [0.0] * (2 * self._stages.num_stages)
        lacks, batch_ms = 1.0, 0.0
        if own is not None and own.batch_ms is not None and own.has_both:
            lacks, batch_ms = 0.0, own.batch_ms
            phases_ms[2 * self._stages.stage], phases_ms[2 * self._stages.stage + 1] = own.forward_ms, own.backward_ms
        # A stage takes as long as its slowest rank; other stages have nothing to say of it.
        lacks, batch_ms, *phases_ms = most_of([lacks, batch_ms, *phases_ms], self._clock.device)
        if lacks:
            self._warn(step, "")
            return None
        rest_ms = batch_ms - of_stages.step.chosen_ms
        rests = self._rests.setdefault((0, 0), [])
        if len(rests) < REFERENCES:
            rests.append(rest_ms)
        rest = Compared(statistics.median_low(rests), rest_ms)
        whole = Compared(of_stages.step.chosen_ms + rest.predicted_ms, batch_ms)
        names = [f"stage{stage}/{phase}" for stage, phase in product(range(self._stages.num_stages), _PHASES)]
        pairs = zip(self._predicted_ms(of_stages.times), phases_ms, strict=True)
        phases = {name: Compared(*each) for name, each in zip(names, pairs, strict=True)}
        return StepComparison(step, whole, rest, phases, {}, {})

    def _predicted_ms(self, stages: Sequence[StageTimes]) -> list[float]:
        """Return the times of all forwards and of all backwards of each stage in a batch."""
        found = []
        for each in stages:
            count = self._stages.num_micro_batches
            found += [count * each.forward_ms, (count - 1) * each.backward_ms + each.last_backward_ms]
        return found
