# SPDX-License-Identifier: Apache-2.0
"""Lets gloo use both directions of a link at once, for everything that is measured: stock, ours and all others.

gloo's own all-to-all hands its message over before it says that it is ready for the other's, over the same connection.
Where one exchange follows another that word waits behind a whole message, so the two directions take turns and the
link carries half of what it can (262 kB each way at 100 Mbit/s: 40 ms instead of 22). No network of a cluster does
that. Here every rank first says what it is ready for, and then sends. The same bytes go the same ways.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

TAG = 7_000
"""Tells these messages from those of other sends and receives in the same group."""


class Exchange:
    """Sends and receives that are under way; holds what they read and write."""

    def __init__(self, works: Sequence[Any], kept: tuple[torch.Tensor, ...]) -> None:
        self._works, self._kept = list(works), kept

    def wait(self, *_: Any) -> bool:
        """Wait for all of them."""
        for work in self._works:
            work.wait()
        self._works, self._kept = [], ()
        return True

    def is_completed(self) -> bool:
        """Return whether all of them are over."""
        return all(work.is_completed() for work in self._works)


def exchange(group: dist.ProcessGroup, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> Exchange:
    """Begin to send a tensor to each rank and to receive one from each; those of no elements are not sent.

    Args:
        group: the ranks, on gloo.
        sent: contiguous, for each rank of the group.
        received: contiguous, from each.
    """
    rank, size = group.rank(), group.size()
    works = []
    for step in range(1, size):
        source = (rank - step) % size
        if received[source].numel():
            works.append(group.recv([received[source]], source, TAG))
    for step in range(1, size):
        target = (rank + step) % size
        if sent[target].numel():
            works.append(group.send([sent[target]], target, TAG))
    received[rank].copy_(sent[rank])
    return Exchange(works, (*sent, *received))


def _is_ours(group: dist.ProcessGroup, *tensors: torch.Tensor) -> bool:
    on_host = all(each.device.type == "cpu" and each.is_contiguous() for each in tensors)
    return on_host and group.size() > 1 and "gloo" in dist.get_backend(group)


@functools.cache
def use_both_directions() -> None:
    """Put it in the place of gloo's all-to-all and all-gather, for whoever calls them in this process.

    What imported or kept torch's functions before is reached, too: they end in these methods of a group.
    """
    # Older names are those of torch before 2.13.
    all_to_all, all_gather = (
        next(each for each in names if hasattr(dist.ProcessGroup, each))
        for names in (("all_to_all_single", "alltoall_base"), ("all_gather_single", "_allgather_base"))
    )
    own_all_to_all, own_all_gather = getattr(dist.ProcessGroup, all_to_all), getattr(dist.ProcessGroup, all_gather)

    def exchange_all(
        group: dist.ProcessGroup,
        output: torch.Tensor,
        given: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        *rest: Any,
    ) -> Any:
        if not _is_ours(group, output, given):
            return own_all_to_all(group, output, given, output_sizes, input_sizes, *rest)
        sent = given.split(input_sizes) if input_sizes else given.chunk(group.size())
        received = output.split(output_sizes) if output_sizes else output.chunk(group.size())
        return exchange(group, sent, received)

    def gather_all(group: dist.ProcessGroup, output: torch.Tensor, given: torch.Tensor, *rest: Any) -> Any:
        # In a ring of more ranks every message is to another than it waits for.
        if group.size() > 2 or not _is_ours(group, output, given):
            return own_all_gather(group, output, given, *rest)
        return exchange(group, [given.view(-1)] * group.size(), output.view(-1).chunk(group.size()))

    setattr(dist.ProcessGroup, all_to_all, exchange_all)
    setattr(dist.ProcessGroup, all_gather, gather_all)
