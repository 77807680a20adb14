# SPDX-License-Identifier: Apache-2.0
"""The base class of all-to-alls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist


class RowsToSend(Protocol):
    """How many rows an all-to-all moves."""

    @property
    def sends(self) -> Sequence[int]:
        """The rows to each rank of the group."""

    @property
    def receives(self) -> Sequence[int]:
        """The rows from each rank of the group."""

    @property
    def between(self) -> Mapping[tuple[int, int], int] | None:
        """The rows from one rank to another, of those pairs whose rows come by here; ``None`` unless the all-to-all
        passes rows on."""


class AllToAllBase(ABC):
    """Exchanges equal blocks between the ranks of a group. A subclass defines :meth:`exchange`.

    An all-to-all's law: block g of the input goes to rank g of the group, and doing it twice is the identity. Calling
    one, ``alltoall(x, group)``, is :meth:`exchange` with autograd: x is [G * n, ...], n of dimension 0 for each of the
    G ranks, and so is the result. A group of one rank, or ``None``, leaves x as it is.

    Examples:
        One that sends copies of all to all, and keeps what is meant for its rank:

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
        """Send block g of dimension 0 to rank g; block g of the result came from rank g. No autograd.

        Args:
            x: contiguous, dimension 0 divisible by the group's size.
            group: at least two ranks.
        """

    def exchange_rows(self, x_RM: torch.Tensor, group: dist.ProcessGroup, sizes: RowsToSend) -> torch.Tensor:
        """Send some rows to each rank, not equally many. No autograd.

        An all-to-all that leaves this out is used for slots only.

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
        """Whether it defines :meth:`exchange_rows`."""
        return type(self).exchange_rows is not AllToAllBase.exchange_rows

    def __call__(self, x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        """:meth:`exchange` with autograd; a group of one rank, or none, leaves ``x`` as it is."""
        if group is None or dist.get_world_size(group) == 1:
            return x
        return _Exchange.apply(x, self, group)


class NodeDeduplicated:
    """Marks an all-to-all that is run in two levels, a row of a token crossing to each node once."""


class _Exchange(torch.autograd.Function):
    """An all-to-all is a permutation of blocks and its own inverse, so the gradient travels the same way back."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, alltoall: AllToAllBase, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.alltoall, ctx.group = alltoall, group
        return alltoall.exchange(x.contiguous(), group)

    @staticmethod
    def backward(ctx, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _Exchange.apply(dy, ctx.alltoall, ctx.group), None, None
