# SPDX-License-Identifier: Apache-2.0
"""What tests under tensor parallelism have in common: an ``mpu``, an expert that is split itself, a stock that runs.

Stock fails there on gloo, see :func:`benchmarks.models.layers.fix_gather`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.models.layers import Mpu, StockGroups, fix_gather, shared_by, summed_up
from tests.small_model import EXPERT_WIDTH, EXPERTS, WIDTH


def begin(tp_size: int) -> Mpu:
    """An mpu for a run; DeepSpeed forgets the groups of the run before, which may have had others of the same name."""
    fix_gather()
    StockGroups().put()
    SplitFeedForward.mpu = Mpu(tp_size)
    return SplitFeedForward.mpu


class SplitFeedForward(nn.Module):
    """An expert that is tensor-parallel itself, as Megatron's are. Its group is no attribute of its own:
    modules are copied."""

    mpu: Mpu | None = None

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, EXPERT_WIDTH)
        self.fc2 = nn.Linear(EXPERT_WIDTH, WIDTH, bias=False)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def differ(self) -> None:
        """Each rank has another part."""
        with torch.no_grad():
            self.fc1.weight.mul_(1.0 - 1.5 * self.mpu.get_model_parallel_rank())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        group = self.mpu.get_model_parallel_group()
        return summed_up(group, self.fc2(torch.relu(self.fc1(shared_by(group, x))))) + self.bias


EXPERTS["split"] = SplitFeedForward


def degrees(forward: int, backward: int, **others: Any) -> dict[str, Any]:
    partition = {"mode": "off"}  # the layer's own gradients are looked at, not who reduces them
    pipeline_degree = {"forward": forward, "backward": backward}
    return {"enabled": True, "pipeline_degree": pipeline_degree, "gradient_partition": partition, **others}
