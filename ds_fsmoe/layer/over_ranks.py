# SPDX-License-Identifier: Apache-2.0
"""Puts a weight of experts together from all ranks, and adds values up over them, with exact gradients.

Every rank has a loss of its own, and the gradient wanted is that of their mean. What a rank's loss takes from other
ranks' experts has its gradient there, so the backward adds up over the ranks what each has found.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ds_fsmoe.checkpoint_files.expert_parts import ExpertPart
from ds_fsmoe.distributed.waits import waiting


class SumOverRanks(torch.autograd.Function):
    """Adds up a tensor over ranks; so does its backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _sum(value, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum(gradient, ctx.group), None


class WholeOfParts(torch.autograd.Function):
    """Stands for a whole weight where a gradient is wanted; its backward gives each rank that of its part."""

    @staticmethod
    def forward(
        ctx: Any, parameter: torch.Tensor, whole: torch.Tensor, part: ExpertPart, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.part, ctx.group = part, group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.part.cut(_sum(gradient, ctx.group)).contiguous(), None, None, None


@torch.no_grad()
def joined(part: torch.Tensor, description: ExpertPart, group: dist.ProcessGroup) -> torch.Tensor:
    """Return a whole weight, of which each rank of a group has a part. Collective over the group.

    Args:
        part: this rank's.
        description: which part that is.
        group: the ranks, in the order of the parts.
    """
    own = part.detach().contiguous()
    parts = [torch.empty_like(own) for _ in range(description.num_parts)]
    with waiting("all parts of a weight of experts"):
        dist.all_gather(parts, own, group=group)
    return description.join(parts)


def _sum(value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    total = value.clone(memory_format=torch.contiguous_format)
    with waiting("the sum of a loss on weights of experts"):
        dist.all_reduce(total, group=group)
    return total
