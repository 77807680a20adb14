# SPDX-License-Identifier: Apache-2.0
"""The planner's lists of what pipeline stages do are those that DeepSpeed's pipeline engine runs."""

from __future__ import annotations

import pytest
from deepspeed.runtime.pipe import schedule as stock

from ds_fsmoe.planning import schedule as kinds
from ds_fsmoe.planning.stage_schedule import one_forward_one_backward

KIND_OF = {
    stock.LoadMicroBatch: kinds.LOAD,
    stock.ForwardPass: kinds.FORWARD,
    stock.BackwardPass: kinds.BACKWARD,
    stock.SendActivation: kinds.SEND_ACTIVATION,
    stock.RecvActivation: kinds.RECV_ACTIVATION,
    stock.SendGrad: kinds.SEND_GRADIENT,
    stock.RecvGrad: kinds.RECV_GRADIENT,
    stock.ReduceTiedGrads: kinds.REDUCE_TIED,
    stock.ReduceGrads: kinds.REDUCE_GRADIENTS,
    stock.OptimizerStep: kinds.OPTIMIZER_STEP,
}


@pytest.mark.parametrize("num_stages", range(1, 9))
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 5, 8, 13, 16])
def test_each_stage_does_what_stock_does_instruction_by_instruction(num_stages: int, micro_batches: int) -> None:
    for stage in range(num_stages):
        train = stock.TrainSchedule(micro_batches=micro_batches, stages=num_stages, stage_id=stage)
        found = one_forward_one_backward(stage, num_stages, micro_batches)
        instructions = [each for step in train.steps() for each in step]
        assert [kind for kind, _ in found] == [KIND_OF[type(each)] for each in instructions]
        buffers = train.num_pipe_buffers()
        for (kind, micro_batch), each in zip(found, instructions, strict=True):
            if isinstance(each, stock.BufferOpInstruction):
                assert each.kwargs["buffer_id"] == micro_batch % buffers, kind
