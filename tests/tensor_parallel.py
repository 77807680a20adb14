# SPDX-License-Identifier: Apache-2.0
"""What tests under tensor parallelism have in common: an ``mpu``, an expert that is split itself, a stock that runs.

Stock fails there on gloo: ``deepspeed.moe.mappings._gather_tokens`` gives ``all_gather_into_tensor`` an output of one
dimension and an input of three. :func:`fix_stock` makes the input flat, which is all that is missing.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.small_model import EXPERT_WIDTH, EXPERTS, WIDTH


@cache
def fix_stock() -> None:
    """The one line of stock's that gloo does not take: a flat view of what ``_gather_tokens`` sends."""
    from deepspeed.moe import mappings

    source = inspect.getsource(mappings._gather_tokens)
    line = "all_gather_into_tensor(gather_buffer, input_, "
    assert source.count(line) == 1
    exec(source.replace(line, line.replace("input_", "input_.view(-1)")), vars(mappings))


class Mpu:
    """Tensor parallelism over so many neighbours, as Megatron gives it to DeepSpeed. Collective to make."""

    def __init__(self, size: int) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        self.groups: dict[str, Any] = {}
        for kind, every in (
            ("model", [range(first, first + size) for first in range(0, world, size)]),
            ("data", [range(first, world, size) for first in range(size)]),
        ):
            for ranks in every:
                group = dist.new_group(list(ranks))
                if rank in ranks:
                    self.groups[kind] = group

    def get_model_parallel_group(self) -> Any:
        return self.groups["model"]

    def get_model_parallel_world_size(self) -> int:
        return self.groups["model"].size()

    def get_model_parallel_rank(self) -> int:
        return self.groups["model"].rank()

    def get_data_parallel_group(self) -> Any:
        return self.groups["data"]

    def get_data_parallel_world_size(self) -> int:
        return self.groups["data"].size()

    def get_data_parallel_rank(self) -> int:
        return self.groups["data"].rank()


def begin(tp_size: int) -> Mpu:
    """An mpu for a run; DeepSpeed forgets the groups of the run before, which may have had others of the same name."""
    from deepspeed.utils import groups

    fix_stock()
    for name in ("_EXPERT_PARALLEL_GROUP", "_EXPERT_DATA_PARALLEL_GROUP"):
        getattr(groups, name).clear()
        getattr(groups, f"{name}_RANKS").clear()
    groups.expert_tensor_parallel_world_size, groups.mpu = 1, None
    SplitFeedForward.mpu = Mpu(tp_size)
    return SplitFeedForward.mpu


class Copied(torch.autograd.Function):
    """Megatron's f: the same going in, the sum over the tensor-parallel ranks coming back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class Summed(torch.autograd.Function):
    """Megatron's g: the sum going out, the same coming back."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, group: Any) -> torch.Tensor:
        total = y.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


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
        return Summed.apply(self.fc2(torch.relu(self.fc1(Copied.apply(x, group)))), group) + self.bias


EXPERTS["split"] = SplitFeedForward


def degrees(forward: int, backward: int, **others: Any) -> dict[str, Any]:
    partition = {"mode": "off"}  # the layer's own gradients are looked at, not who reduces them
    pipeline_degree = {"forward": forward, "backward": backward}
    return {"enabled": True, "pipeline_degree": pipeline_degree, "gradient_partition": partition, **others}
