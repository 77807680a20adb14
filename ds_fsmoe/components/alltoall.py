# SPDX-License-Identifier: Apache-2.0
"""What every all-to-all is."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.distributed as dist


class AllToAllBase(ABC):
    """Exchanges equal blocks between the ranks of a group.

    An all-to-all's law: block g of the input goes to rank g of the group, and doing it twice is the identity.
    """

    @abstractmethod
    def exchange(self, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Send block g of dimension 0 to rank g; block g of the result came from rank g. No autograd.

        Args:
            x: contiguous, dimension 0 divisible by the group's size.
            group: at least two ranks.
        """

    def __call__(self, x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        """:meth:`exchange` with autograd; a group of one rank, or none, leaves ``x`` as it is."""
        if group is None or dist.get_world_size(group) == 1:
            return x
        return _Exchange.apply(x, self, group)


class _Exchange(torch.autograd.Function):
    """An all-to-all is a permutation of blocks and its own inverse, so the gradient travels the same way back."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, alltoall: AllToAllBase, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.alltoall, ctx.group = alltoall, group
        return alltoall.exchange(x.contiguous(), group)

    @staticmethod
    def backward(ctx, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _Exchange.apply(dy, ctx.alltoall, ctx.group), None, None
