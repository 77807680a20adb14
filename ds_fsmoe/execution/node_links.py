# SPDX-License-Identifier: Apache-2.0
"""The two levels of an EP group with equally many ranks in each of several nodes, and exchanges along each level.

Node-deduplicated dispatch uses it for tokens, and ``ds_fsmoe.gradients`` for hierarchical reductions.

Letters: G ranks of the EP group, n nodes, p ranks of it in a node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.distributed as dist

from ds_fsmoe.execution.device_tables import TABLES


@dataclass(frozen=True)
class NodeLinks:
    """Holds the ranks of an EP group by node, and this rank's communicators along each kind of link."""

    ranks: tuple[tuple[int, ...], ...]
    """The ranks of each node, as indices in the EP group; the index within a node is a rank's place."""
    rank: int
    """This rank's index in the EP group."""
    between: dist.ProcessGroup | None = None
    """The ranks of the same place in all nodes."""
    inside: dist.ProcessGroup | None = None
    """The ranks of this node."""

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes, n."""
        return len(self.ranks)

    @property
    def per_node(self) -> int:
        """Return the number of ranks in a node, p."""
        return len(self.ranks[0])

    @cached_property
    def node(self) -> int:
        """Return this rank's node."""
        return next(node for node, ranks in enumerate(self.ranks) if self.rank in ranks)

    @property
    def place(self) -> int:
        """Return this rank's place in its node."""
        return self.ranks[self.node].index(self.rank)

    def node_of_each(self, like: torch.Tensor) -> torch.Tensor:
        """Return the node of each rank, [G] int64, on the device of a tensor."""
        return TABLES.from_host(like, _node_of_each, self.ranks)

    def rank_of_each(self, like: torch.Tensor) -> torch.Tensor:
        """Return the ranks node by node, [n * p] int64, on the device of a tensor."""
        return TABLES.from_host(like, np.ravel, self.ranks)

    def exchange_between(self, x_RM: torch.Tensor, sends: Sequence[int], receives: Sequence[int]) -> torch.Tensor:
        """Exchange rows with the ranks of the same place in all nodes, those for the first node first."""
        return exchange_sized(x_RM, sends, receives, self.between)

    def exchange_inside(self, x_RM: torch.Tensor, sends: Sequence[int], receives: Sequence[int]) -> torch.Tensor:
        """Exchange rows with the ranks of this node, those for the first place first."""
        return exchange_sized(x_RM, sends, receives, self.inside)


def _node_of_each(ranks: tuple[tuple[int, ...], ...]) -> np.ndarray:
    return np.argsort(np.ravel(ranks)) // len(ranks[0])


def exchange_sized(
    x: torch.Tensor, sends: Sequence[int], receives: Sequence[int], group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Send ``sends[i]`` contiguous rows of dimension 0 to each rank i, and return ``receives[i]`` rows from each."""
    y = x.new_empty(sum(receives), *x.shape[1:])
    dist.all_to_all_single(y, x, list(receives), list(sends), group=group)
    return y
