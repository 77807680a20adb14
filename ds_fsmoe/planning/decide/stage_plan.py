# SPDX-License-Identifier: Apache-2.0
"""The times of one stage of a pipeline, and what a plan of its layers takes there."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ds_fsmoe.planning.decide.model_plan import ModelPlan
from ds_fsmoe.planning.decide.plan import Planner


@dataclass(frozen=True, slots=True)
class StageTimes:
    """The times of one stage's own work: those of one micro-batch, predicted or measured."""

    forward_ms: float
    backward_ms: float
    """The time of a backward that sends no gradients to be summed: of all micro-batches but the last one."""
    last_backward_ms: float
    """The time of the backward in which gradients travel."""
    gradients_ms: float = 0.0
    """The time of the gradients that are left after it."""

    def busy_ms(self, num_micro_batches: int) -> float:
        """Return the time of a whole batch of this stage alone, without sends."""
        m = num_micro_batches
        return m * self.forward_ms + (m - 1) * self.backward_ms + self.last_backward_ms + self.gradients_ms


@dataclass(frozen=True)
class StagePlan:
    """The plan of one stage, and what it takes."""

    times: StageTimes
    hidden_bytes: float
    """The gradients that travel beside the last backward."""
    after_bytes: float
    """The gradients that are left after it."""
    plan: ModelPlan | None = None
    """How its layers are run; ``None``: it has none."""


def stage_times(planner: Planner, plan: ModelPlan) -> StagePlan:
    """Return what a plan of a stage's layers takes there."""
    last_forward_ms, to_the_end_ms = planner.phases_ms(plan)
    forward_ms, bare_ms = planner.phases_ms(plan.earlier())
    # What is left over counts as a part of its own, as it does where it is measured.
    last_ms = planner.phases_ms(replace(plan, tail=()))[1] if plan.tail else to_the_end_ms
    hidden = sum(each.size_bytes for block in plan.backward for each in (*block.moe_slices, *block.dense_slices))
    # Gathers of updated parameters make one forward of a step longer, and count once.
    after_ms = to_the_end_ms - last_ms + last_forward_ms - forward_ms
    return StagePlan(StageTimes(forward_ms, bare_ms, last_ms, after_ms), hidden, plan.tail_bytes, plan)
