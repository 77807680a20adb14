# SPDX-License-Identifier: Apache-2.0
"""Puts a weight of experts together from all ranks, and adds values up over them, with exact gradients.

Every rank has a loss of its own, and the gradient wanted is that of their mean. What a rank's loss takes from other
ranks' experts has its gradient there, so the backward adds up over the ranks what each has found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ds_fsmoe.checkpoint_files.expert_parts import ExpertPart
from ds_fsmoe.distributed.waits import waiting


@dataclass(frozen=True)
class Origin:
    """Says of which weight a tensor is this rank's part."""

    name: str
    part: ExpertPart
    group: dist.ProcessGroup
    """The ranks that have the other parts."""
    places: Callable[[], Sequence[int] | None] = lambda: None
    """Tells where each expert lies among those of all ranks; ``None``: in the model's own order."""

    @property
    def times(self) -> int:
        """How many times as many elements the whole weight has."""
        shard = self.part.shard
        return self.part.ep_size * (1 if shard is None or shard.dim is None else shard.count)

    @property
    def experts(self) -> list[int]:
        """The numbers of this rank's experts, in the order in which they lie."""
        places, own = self.places(), self.part.experts
        return [*own] if places is None else [places.index(each) for each in own]

    def said(self) -> str:
        """Return the parameter and what of it is here, for messages."""
        which = ", ".join(map(str, self.experts))
        return f"{self.name} has experts {which} of {self.part.num_experts} on this rank"

    def whole(self, own: torch.Tensor) -> torch.Tensor:
        """Return the whole of what each rank has, with experts in the model's own order. Collective."""
        whole, places = joined(own, self.part, self.group), self.places()
        return whole if places is None else self.part.in_order(whole, places)

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of what is whole."""
        if (places := self.places()) is None:
            return self.part.cut(whole)
        inverse = sorted(range(len(places)), key=places.__getitem__)
        return self.part.cut(self.part.in_order(whole, inverse))


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
        ctx: Any,
        parameter: torch.Tensor,
        whole: torch.Tensor,
        cut: Callable[[torch.Tensor], torch.Tensor],
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.cut, ctx.group = cut, group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.cut(_sum(gradient, ctx.group)).contiguous(), None, None, None


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
