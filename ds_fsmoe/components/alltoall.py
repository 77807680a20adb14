# SPDX-License-Identifier: Apache-2.0
"""Defines the base class of all-to-alls, which exchange rows between the ranks of a group.

``alltoalls`` holds the algorithms, and ``hierarchical`` the base of those that go over several hops. Layers call an
all-to-all for dispatch and combine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist


class RowsToSend(Protocol):
    """Holds the numbers of rows that an all-to-all sends and receives."""

    @property
    def sends(self) -> Sequence[int]:
        """Return the number of rows to each rank of the group."""

    @property
    def receives(self) -> Sequence[int]:
        """Return the number of rows from each rank of the group."""

    @property
    def between(self) -> Mapping[tuple[int, int], int] | None:
        """Return the rows of each (source, destination) whose rows this rank sends, receives or forwards.

        ``None`` unless the all-to-all forwards rows.
        """


class AllToAllBase(ABC):
    """Exchanges equal blocks between the ranks of a group. A subclass defines :meth:`exchange`.

    An all-to-all's law: block g of the input goes to rank g of the group, and two exchanges are the identity. A call,
    ``alltoall(x, group)``, is :meth:`exchange` with autograd. Both x and the result are [G * n, ...]: n rows of
    dimension 0 for each of G ranks. For a group of one rank, or ``None``, a call returns x.

    Examples:
        One that sends all blocks to all ranks, and keeps those for its own rank:

        >>> import torch, torch.distributed as dist, ds_fsmoe
        >>> class ByGathering(ds_fsmoe.AllToAllBase):
        ...     def exchange(self, x, group):
        ...         everything = [torch.empty_like(x) for _ in range(group.size())]
        ...         dist.all_gather(everything, x, group=group)
        ...         return torch.cat([each.chunk(group.size())[group.rank()] for each in everything])
        >>> ByGathering()(torch.ones(4, 8), None).shape
        torch.Size([4, 8])
    """

    @abstractmethod
    def exchange(self, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Send block g of dimension 0 to rank g, and return the received blocks, that of rank 0 first. No autograd.

        Args:
            x: contiguous, dimension 0 divisible by the group's size.
            group: at least two ranks.
        """

    def exchange_rows(self, x_RM: torch.Tensor, group: dist.ProcessGroup, sizes: RowsToSend) -> torch.Tensor:
        """Send a different number of rows to each rank. No autograd.

        An all-to-all without this method is used for padded dispatch only.

        Args:
            x_RM: contiguous, the rows for rank 0 first.
            group: at least two ranks.
            sizes: the rows to and from each rank.

        Returns:
            The rows from rank 0 first.
        """
        raise TypeError(f"{type(self).__name__} does not define exchange_rows(x_RM, group, sizes)")

    @property
    def takes_rows(self) -> bool:
        """Return True if the class defines :meth:`exchange_rows`."""
        return type(self).exchange_rows is not AllToAllBase.exchange_rows

    def __call__(self, x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        """Exchange blocks with autograd; for a group of one rank, or ``None``, return ``x``."""
        if group is None or dist.get_world_size(group) == 1:
            return x
        return _Exchange.apply(x, self, group)


class NodeDeduplicated:
    """Marks an all-to-all that runs in two levels and sends a token to each node once."""


class _Exchange(torch.autograd.Function):
    """Differentiates an all-to-all, which is a permutation of blocks and its own inverse: the gradient takes the same
    exchange."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, alltoall: AllToAllBase, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.alltoall, ctx.group = alltoall, group
        return alltoall.exchange(x.contiguous(), group)

    @staticmethod
    def backward(ctx, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _Exchange.apply(dy, ctx.alltoall, ctx.group), None, None
