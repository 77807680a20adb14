# SPDX-License-Identifier: Apache-2.0
"""Lets stages of a pipeline agree on the norm of all gradients where some have no MoE layer.

DeepSpeed's optimizer at ZeRO 1 adds up the norm of each group of parameters over the stages, group by group. Experts
are groups of their own, so a stage without any has fewer groups, and DeepSpeed 0.19.8 waits there for ever.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.utils import combine_grad_norm_groups
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ds_fsmoe.distributed.fail_together import on_every_rank


def complete_norms(optimizer: Any) -> None:
    """Let the optimizer of a stage take part in the norms of groups that it has not. Collective over all ranks.

    Args:
        optimizer: of an engine; nothing is changed where all have as many groups, or where it is not ZeRO's.
    """
    is_zeros = isinstance(optimizer, DeepSpeedZeroOptimizer)
    counts = on_every_rank(len(optimizer.bit16_groups) if is_zeros else 0)
    num_missing = max(counts) - len(optimizer.bit16_groups) if is_zeros else 0
    if not num_missing:
        return
    norm_of_own = optimizer.scaled_global_norm

    def scaled_global_norm(norm_type: int = 2) -> torch.Tensor:
        norms = [norm_of_own(norm_type)]
        for _ in range(num_missing):
            # What the stages that have the group add up; this one adds nothing.
            squares = torch.zeros((), dtype=torch.float32, device=norms[0].device)
            optimizer._model_parallel_all_reduce(tensor=squares, op=dist.ReduceOp.SUM)
            norms.append(squares.sqrt())
        return combine_grad_norm_groups(norms)

    optimizer.scaled_global_norm = scaled_global_norm
