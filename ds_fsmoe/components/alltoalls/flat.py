# SPDX-License-Identifier: Apache-2.0
"""The flat all-to-all: the backend's own, from every rank to every rank at once.

The other algorithms use it where a group has one kind of link.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ds_fsmoe.components.alltoall import AllToAllBase, RowsToSend
from ds_fsmoe.registry import register_alltoall


def exchange_flat(
    x: torch.Tensor, sends: Sequence[int], receives: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Send ``sends[g]`` rows of dimension 0 to rank g, and return ``receives[g]`` rows from each rank g."""
    y = x.new_empty(sum(receives), *x.shape[1:])
    dist.all_to_all_single(y, x, list(receives), list(sends), group=group)
    return y


@register_alltoall("flat")
class FlatAllToAll(AllToAllBase):
    """Exchanges blocks in one ``all_to_all_single`` over all ranks of the group: x [G * n, ...] to the same shape.

    See :class:`AllToAllBase`.

    Examples:
        >>> import torch, ds_fsmoe
        >>> ds_fsmoe.FlatAllToAll()(torch.ones(4, 8), group=None).shape  # a group of one rank returns its input
        torch.Size([4, 8])
    """

    def exchange_rows(self, x_RM: torch.Tensor, group: dist.ProcessGroup, sizes: RowsToSend) -> torch.Tensor:
        """Exchange rows; see :meth:`AllToAllBase.exchange_rows`."""
        return exchange_flat(x_RM, sizes.sends, sizes.receives, group)

    def exchange(self, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        y = torch.empty_like(x)
        dist.all_to_all_single(y, x, group=group)
        return y
