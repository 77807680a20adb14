# SPDX-License-Identifier: Apache-2.0
"""The flat all-to-all: the backend's own, every rank to every rank at once."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ds_fsmoe.components.alltoall import AllToAllBase
from ds_fsmoe.registry import register_alltoall


@register_alltoall("flat")
class FlatAllToAll(AllToAllBase):
    """One ``all_to_all_single`` over all ranks of the group."""

    def exchange(self, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        y = torch.empty_like(x)
        dist.all_to_all_single(y, x, group=group)
        return y
