# SPDX-License-Identifier: Apache-2.0
"""The process groups: which ranks communicate with each other, and over which links.

Per pipeline stage, world = mp x dp = esp x ep x edp. MP and ESP groups are neighbours, EP strides over ESP groups, DP
and EDP over the remaining ranks. No size has to equal another, or the number of GPUs per node.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ds_fsmoe.planning.schedule import Lane
from ds_fsmoe.untrusted import MOST_RANKS


@dataclass(frozen=True, slots=True)
class Placement:
    """The placement of a kind of group on nodes."""

    size: int
    per_node: int
    """The largest number of ranks that a group has in one node."""
    lanes: tuple[Lane, ...]
    """The links that a group crosses: none (one rank), the intra-node one, the inter-node one (at most one rank of a
    group per node), or both, the inter-node one first."""
    nodes: int = 1
    """The largest number of nodes over which a group spreads."""


@dataclass(frozen=True)
class Groups:
    """The sizes of the process groups.

    Raises:
        ValueError: a size below 1, or sizes that do not multiply to the world.
    """

    world: int
    gpus_per_node: int
    mp: int = 1
    """The model-parallel size: attention is split over this many ranks."""
    esp: int = 1
    """The expert-sharding size: each expert is split over this many ranks."""
    ep: int = 1
    """The expert-parallel size: the experts are spread over this many ranks."""
    dp: int | None = None
    """The data-parallel size; ``None``: the rest of the world."""
    pp: int = 1
    """The number of pipeline stages."""

    def __post_init__(self) -> None:
        for name in ("world", "gpus_per_node", "mp", "esp", "ep", "pp", *(() if self.dp is None else ("dp",))):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} = {value}: must be a whole number of at least 1")
            if value > MOST_RANKS:
                raise ValueError(f"{name} = {value}: must be at most {MOST_RANKS}")
        if self.world % self.pp:
            raise ValueError(f"pp = {self.pp}: must divide the world size {self.world}")
        if self.stage % self.mp or (self.dp is not None and self.mp * self.dp != self.stage):
            dp = "any dp" if self.dp is None else f"dp = {self.dp}"
            raise ValueError(
                f"mp = {self.mp} and {dp} do not multiply to the {self.stage} ranks "
                f"{'of a pipeline stage' if self.pp > 1 else 'of the world'}"
            )
        if self.stage % (self.ep * self.esp):
            fits = [each for each in range(1, self.stage + 1) if self.stage % (each * self.esp) == 0]
            raise ValueError(
                f"ep_size = {self.ep} times expert_tensor_parallel_size = {self.esp} = {self.ep * self.esp}: must "
                f"divide the {self.stage} ranks {'of a pipeline stage' if self.pp > 1 else 'of the world'}"
                + (f"; ep_size can be {', '.join(map(str, fits))}" if fits else "")
            )

    @property
    def stage(self) -> int:
        """The number of ranks of one pipeline stage."""
        return self.world // self.pp

    @property
    def edp(self) -> int:
        """The expert-data-parallel size: this many ranks hold the same experts."""
        return self.stage // (self.ep * self.esp)

    @cached_property
    def placements(self) -> dict[str, Placement]:
        """Return the placement of the groups ``mp``, ``dp``, ``esp``, ``ep`` and ``edp``."""
        return {name: self._place(size, stride) for name, (size, stride) in self.strides.items()}

    @property
    def strides(self) -> dict[str, tuple[int, int]]:
        """The size of the groups of each kind, and the distance of their ranks."""
        return {
            "mp": (self.mp, 1),
            "dp": (self.stage // self.mp, self.mp),
            "esp": (self.esp, 1),
            "ep": (self.ep, self.esp),
            "edp": (self.edp, self.ep * self.esp),
        }

    def _place(self, size: int, stride: int) -> Placement:
        if size == 1:
            return Placement(1, 1, ())
        # Looked up rank by rank: where nodes and groups do not line up, the worst group counts.
        ranks = np.arange(self.world).reshape(-1, size, stride).transpose(0, 2, 1).reshape(-1, size)
        nodes = ranks // self.gpus_per_node
        begins = np.ones(nodes.shape, dtype=bool)
        begins[:, 1:] = nodes[:, 1:] != nodes[:, :-1]
        per_node = int(np.diff(np.append(np.flatnonzero(begins), self.world)).max())
        most_nodes = int(begins.sum(axis=1).max())
        if most_nodes == 1:
            return Placement(size, per_node, (Lane.INTRA,))
        lanes = (Lane.INTER,) if per_node == 1 else (Lane.INTER, Lane.INTRA)
        return Placement(size, per_node, lanes, most_nodes)
