# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's engine for a ``PipelineModule``, with our layers in each stage."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_fsmoe.distributed.stages import Stages
from ds_fsmoe.engine.engine import FSMoEEngine
from ds_fsmoe.gradients.norm import complete_norms


class FSMoEPipelineEngine(FSMoEEngine, PipelineEngine):
    """Does what :class:`~ds_fsmoe.engine.engine.FSMoEEngine` does: each stage's layers are ours, and gradients travel
    in the backward of the last micro batch, when all earlier ones have added theirs.

    Between two batches no stage has anything under way: that is where layers are measured, for all stages at once, and
    whole batches are what plans are tried with. Each stage plans for its own layers.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        complete_norms(self.optimizer)
        if self.num_stages > 1:
            self.fsmoe.begin_stages(Stages(self.stage_id, self.num_stages, self.micro_batches))
        self._num_backwards = 0
        """The micro batches of this batch whose backwards have begun."""

    def train_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Run DeepSpeed's ``train_batch``, with what is due at the start and at the end of a step."""
        state = self.fsmoe
        state.at_step(self.global_steps)
        state.before_forward()
        clock = state.running.step_clock
        if clock is not None and state.autotune is not None and state.autotune.is_measuring:
            # Micro batches of a stage come and go in no fixed turns with their backwards: all of them are timed.
            clock.start()
        if state.reduction is not None:
            state.reduction.reducer.forget_if_broken_off()
        self._num_backwards = 0
        if clock is not None:
            clock.begin_step()
        result = super().train_batch(*args, **kwargs)
        if clock is not None:
            clock.end_step()
        if self.was_step_applied():
            state.after_optimizer_step()
        state.running.first_forwards.tell()
        state.running.at_step(self.global_steps)
        state.routing.at_step(self.global_steps)
        self._tell_of_step(state.step_is_over(self.global_steps))
        state.running.late_faults.look()
        return result

    def _exec_forward_pass(self, buffer_id: int) -> None:
        """Run the forward of one micro batch, timed where that is asked for."""
        clock = self.fsmoe.running.step_clock
        if clock is None or not self.module.training:
            super()._exec_forward_pass(buffer_id)
            return
        clock.begin_forward()
        super()._exec_forward_pass(buffer_id)
        clock.end_forward()

    def _exec_backward_pass(self, buffer_id: int) -> None:
        """Run the backward of one micro batch, timed where that is asked for; of the last one, gradients are complete
        as they come."""
        clock = self.fsmoe.running.step_clock
        self._num_backwards += 1
        self._force_grad_boundary = self._num_backwards == self.micro_batches and self._is_one_backward(buffer_id)
        if clock is not None:
            clock.begin_backward()
        try:
            super()._exec_backward_pass(buffer_id)
        finally:
            self._force_grad_boundary = False
        if clock is not None:
            clock.end_backward()

    def _is_one_backward(self, buffer_id: int) -> bool:
        """Return whether a micro batch has one backward: DeepSpeed has one for each tensor that the stage hands on, and
        a gradient is complete after the last."""
        outputs = self.pipe_buffers["outputs"][buffer_id]
        if self.is_last_stage() or not isinstance(outputs, tuple):
            return True
        return sum(each.is_floating_point() for each in outputs) == 1

    _INSTRUCTION_MAP = PipelineEngine._INSTRUCTION_MAP | {
        schedule.ForwardPass: _exec_forward_pass,
        schedule.BackwardPass: _exec_backward_pass,
    }
