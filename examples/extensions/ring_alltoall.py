# SPDX-License-Identifier: Apache-2.0
"""An all-to-all of one's own: in turns, each rank sends to the one so many places ahead.

{"fsmoe": {"enabled": true, "plugins": ["extensions.ring_alltoall"], "alltoall": "ring"}}
"""

import torch
import torch.distributed as dist

from ds_fsmoe import AllToAllBase, register_alltoall


@register_alltoall("ring")
class RingAllToAll(AllToAllBase):
    """Law: block g goes to rank g, and doing it twice is the identity. It is asynchronous because its lane is."""

    def exchange(self, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """``x``: contiguous, a block of dimension 0 for each rank of ``group``."""
        size, rank = group.size(), group.rank()
        y = torch.empty_like(x)
        sent, came = x.chunk(size), y.chunk(size)
        came[rank].copy_(sent[rank])
        for step in range(1, size):
            to, source = (rank + step) % size, (rank - step) % size
            sends = [
                dist.P2POp(dist.isend, sent[to], dist.get_global_rank(group, to), group),
                dist.P2POp(dist.irecv, came[source], dist.get_global_rank(group, source), group),
            ]
            for work in dist.batch_isend_irecv(sends):
                work.wait()
        return y
