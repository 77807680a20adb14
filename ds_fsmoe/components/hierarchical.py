# SPDX-License-Identifier: Apache-2.0
"""Hierarchical all-to-alls: the path of each block over the nodes, and the hops that follow from it.

A block from rank s to rank d is forwarded by other ranks. An algorithm defines only the forwarding ranks. This module
derives the peers, message sizes and layouts of each hop, for nodes of any shape. ``alltoalls`` holds the algorithms;
``ds_fsmoe.layer.parts`` builds a :class:`Route` per layer.

Ranks are numbered within their group throughout.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar, Literal, get_args

import torch
import torch.distributed as dist

from ds_fsmoe.components.alltoall import AllToAllBase, RowsToSend
from ds_fsmoe.components.alltoalls.flat import FlatAllToAll, exchange_flat

Link = Literal["intra", "inter"]
"""Between ranks of one node, or between nodes."""
SizesOfPairs = Mapping[tuple[int, int], int]
"""The rows of each (source, destination) that this rank sends, receives or forwards."""
Part = tuple[int, ...]
"""Ranks that communicate with each other in a step, ascending."""


@dataclass(frozen=True)
class Nodes:
    """Holds the node of each rank of a group. Ranks of a node need not be neighbours, and nodes may differ in size."""

    node_of_rank: tuple[int, ...]

    @classmethod
    def of(cls, nodes: Iterable[object]) -> Nodes:
        """Return the nodes for a name of each rank's node; nodes are numbered in the order of appearance."""
        numbers: dict[object, int] = {}
        return cls(tuple(numbers.setdefault(node, len(numbers)) for node in nodes))

    @property
    def size(self) -> int:
        """Return the number of ranks of the group."""
        return len(self.node_of_rank)

    @cached_property
    def _ranks_of_node(self) -> dict[int, Part]:
        return {
            node: tuple(rank for rank, on in enumerate(self.node_of_rank) if on == node)
            for node in dict.fromkeys(self.node_of_rank)
        }

    @cached_property
    def _local_ranks(self) -> dict[int, int]:
        return {rank: local for ranks in self._ranks_of_node.values() for local, rank in enumerate(ranks)}

    def neighbours(self, rank: int) -> Part:
        """Return the ranks on the node of ``rank``, itself included, ascending."""
        return self._ranks_of_node[self.node_of_rank[rank]]

    def local_rank(self, rank: int) -> int:
        """Return the rank's index among its neighbours."""
        return self._local_ranks[rank]


class HierarchicalAllToAll(AllToAllBase):
    """Runs an all-to-all in steps, each along one kind of link.

    With ``links = ("intra", "inter")`` it runs as two tasks on two lanes. One chunk's step inside the node is then
    concurrent with another's step between nodes; the return has the steps in reverse order. With other links it is one
    task that uses both lanes alone. On a group with one kind of link it is the flat all-to-all.
    """

    links: ClassVar[tuple[Link, ...]]
    """The kind of link of each step."""

    @abstractmethod
    def forwarding_ranks(self, source: int, destination: int, nodes: Nodes) -> tuple[int, ...]:
        """Return the rank that has a block after each step but the last, which ends at the destination.

        A rank may appear twice in a row: that step does not move the block. The result depends on the arguments alone,
        so it is equal on every rank.
        """

    def exchange(self, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Exchange blocks by the flat all-to-all, which has the same result; see :meth:`AllToAllBase.exchange`.

        The group's nodes are unknown here; :class:`Route` runs this algorithm's own steps.
        """
        return FlatAllToAll().exchange(x, group)

    def exchange_rows(self, x_RM: torch.Tensor, group: dist.ProcessGroup, sizes: RowsToSend) -> torch.Tensor:
        """Exchange rows by the flat all-to-all; see :meth:`AllToAllBase.exchange_rows` and :meth:`exchange`."""
        return FlatAllToAll().exchange_rows(x_RM, group, sizes)


@dataclass(frozen=True)
class Hop:
    """Holds one rank's part in one step: what it sends and receives, and in which order."""

    link: Link
    pack: tuple[int, ...]
    """The order in which this rank sends its blocks."""
    sends: tuple[int, ...]
    """The number of blocks to each rank of its part."""
    receives: tuple[int, ...]
    """The number of blocks from each rank of its part."""
    unpack: tuple[int, ...]
    """The order of the received blocks in the result."""
    pairs: tuple[tuple[int, int], ...] = ()
    """(source, destination) of each block ahead of the step."""
    received_pairs: tuple[tuple[int, int], ...] = ()
    """(source, destination) of each received block, in the order of arrival."""

    def go(
        self, blocks: torch.Tensor, group: dist.ProcessGroup | None, between: SizesOfPairs | None = None
    ) -> torch.Tensor:
        """Exchange blocks in this step: [blocks before, ...] to [blocks after, ...]; no autograd.

        Args:
            blocks: contiguous; with ``between`` the rows of blocks of unequal size, one block after another.
            group: of its part; ``None`` where the part is this rank alone.
            between: the rows of each (source, destination).
        """
        sizes = received_sizes = None
        sends, receives = self.sends, self.receives
        if between is not None:
            sizes = [between[pair] for pair in self.pairs]
            received_sizes = [between[pair] for pair in self.received_pairs]
            sends = _sums_of_runs([sizes[block] for block in self.pack], self.sends)
            receives = _sums_of_runs(received_sizes, self.receives)
        packed = _in_order(blocks, self.pack, sizes)
        received = packed if group is None else exchange_flat(packed, sends, receives, group)
        return _in_order(received, self.unpack, received_sizes)


def _sums_of_runs(sizes: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Return the sums of consecutive runs of ``sizes`` with the given lengths."""
    ends = (0, *itertools.accumulate(lengths))
    return [sum(sizes[start:stop]) for start, stop in itertools.pairwise(ends)]


def _in_order(blocks: torch.Tensor, order: tuple[int, ...], sizes: Sequence[int] | None = None) -> torch.Tensor:
    """Return the blocks of dimension 0 in another order, a permutation; the input itself if the order is unchanged.

    Args:
        blocks: [blocks, ...], or [rows, ...] where sizes are given.
        order: the index of the first block, the second, and so on.
        sizes: the rows of each block; ``None``: 1.
    """
    runs = _runs(order)
    if len(runs) <= 1:
        return blocks
    if sizes is not None:
        ends = (0, *itertools.accumulate(sizes))
        runs = tuple((ends[start], ends[stop]) for start, stop in runs)
    return torch.cat([blocks[start:stop] for start, stop in runs])


@lru_cache(maxsize=256)
def _runs(order: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return [start, stop) of each consecutive run of blocks in an order."""
    runs: list[tuple[int, int]] = []
    for block in order:
        if runs and block == runs[-1][1]:
            runs[-1] = runs[-1][0], block + 1
        else:
            runs.append((block, block + 1))
    return tuple(runs)


class BlockPaths:
    """Computes the rank that has each block of a group after each step.

    Args:
        alltoall: the algorithm.
        nodes: of the group.
        back: use the return: every block takes the path of its answer in reverse, so the steps run from the last to the
            first.

    Raises:
        ValueError: the algorithm names ranks outside the group, or sends along another link than it declares.
    """

    def __init__(self, alltoall: HierarchicalAllToAll, nodes: Nodes, back: bool = False) -> None:
        self.nodes = nodes
        links = getattr(alltoall, "links", ())
        if not links or not set(links) <= set(get_args(Link)):
            raise ValueError(
                f"{type(alltoall).__name__}.links = {links!r}: must be some of {get_args(Link)}, one a step"
            )
        pairs = [(source, destination) for source in range(nodes.size) for destination in range(nodes.size)]
        paths = {(s, d): (s, *alltoall.forwarding_ranks(s, d, nodes), d) for s, d in pairs}
        _check(paths, alltoall, nodes)
        self.links = alltoall.links[::-1] if back else alltoall.links
        self._paths = {(s, d): paths[d, s][::-1] for s, d in pairs} if back else paths

    def parts(self, step: int) -> tuple[Part, ...]:
        """Return the ranks that communicate with each other in a step, as disjoint parts.

        A rank that communicates with no other is a part of one. Every rank is in one part, and the result is equal on
        all ranks.
        """
        part_of = {rank: {rank} for rank in range(self.nodes.size)}
        for path in self._paths.values():
            one, other = (part_of[rank] for rank in path[step : step + 2])
            if one is not other:
                one |= other
                part_of.update(dict.fromkeys(other, one))
        return tuple(sorted({tuple(sorted(part)) for part in part_of.values()}))

    def forwarded_blocks(self, rank: int) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
        """Return the blocks that a rank forwards, and those that others forward for it, whose sizes they must exchange.

        Returns:
            For each other rank, the destinations of its blocks that this rank forwards in either direction; and for
            each other rank, the destinations of this rank's blocks that it forwards.
        """
        hears: list[list[int]] = [[] for _ in range(self.nodes.size)]
        tells: list[list[int]] = [[] for _ in range(self.nodes.size)]
        for (source, destination), path in self._paths.items():
            for relay in set(path[1:-1]) - {source, destination}:
                if relay == rank:
                    hears[source].append(destination)
                if source == rank:
                    tells[relay].append(destination)
        return tuple(map(tuple, hears)), tuple(map(tuple, tells))

    def hop(self, step: int, rank: int) -> Hop:
        """Return a rank's part in a step."""
        (part,) = (each for each in self.parts(step) if rank in each)
        before = self._sent_to(step - 1, rank) if step else [(rank, d) for d in range(self.nodes.size)]
        sent = sorted(before, key=lambda pair: self._sending_order(step, pair))
        received = self._sent_to(step, rank)
        is_last = step == len(self.links) - 1
        after = sorted(received) if is_last else received
        return Hop(
            self.links[step],
            _places(sent, before),
            tuple(sum(self._paths[pair][step + 1] == other for pair in sent) for other in part),
            tuple(sum(self._paths[pair][step] == other for pair in received) for other in part),
            _places(after, received),
            tuple(before),
            tuple(received),
        )

    def _sent_to(self, step: int, rank: int) -> list[tuple[int, int]]:
        """Return the blocks that a rank has after a step, ordered by sender."""
        found = [pair for pair, path in self._paths.items() if path[step + 1] == rank]
        return sorted(found, key=lambda pair: (self._paths[pair][step], pair[::-1]))

    def _sending_order(self, step: int, pair: tuple[int, int]) -> tuple[int, tuple[int, int]]:
        # By destination, then by source: on nodes of neighbouring ranks the last step then needs no reordering.
        return self._paths[pair][step + 1], pair[::-1]


def _places(wanted: Sequence[tuple[int, int]], present: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    place = {pair: index for index, pair in enumerate(present)}
    return tuple(place[pair] for pair in wanted)


def _check(paths: Mapping[tuple[int, int], tuple[int, ...]], alltoall: HierarchicalAllToAll, nodes: Nodes) -> None:
    name = type(alltoall).__name__
    for (source, destination), path in paths.items():
        way = f"{name} sends blocks of rank {source} to rank {destination} over {list(path[1:-1])}"
        if len(path) != len(alltoall.links) + 1 or not all(0 <= rank < nodes.size for rank in path):
            raise ValueError(f"{way}: its links need {len(alltoall.links) - 1} of the {nodes.size} ranks")
        for link, one, other in zip(alltoall.links, path, path[1:], strict=False):
            same_node = nodes.node_of_rank[one] == nodes.node_of_rank[other]
            if one != other and same_node != (link == "intra"):
                lie = "on one node" if same_node else "on two nodes"
                raise ValueError(f"{way}: from {one} to {other} on an {link} link, but they are {lie}")


@dataclass(frozen=True)
class Route:
    """Holds the steps of an all-to-all for one rank, with their communicators. A layer calls it in place of the
    algorithm."""

    hops: tuple[Hop, ...]
    groups: tuple[dist.ProcessGroup | None, ...]
    """The group of this rank's part in each step; ``None`` where it is alone."""

    def step(self, number: int, blocks: torch.Tensor, between: SizesOfPairs | None = None) -> torch.Tensor:
        """Run one step: [blocks, ...], contiguous, to [blocks, ...].

        The first step starts with a block for each rank; the last ends with a block from each. With ``between`` the
        blocks are rows; see :meth:`Hop.go`.
        """
        return self.hops[number].go(blocks, self.groups[number], between)

    def exchange_rows(self, x_RM: torch.Tensor, group: dist.ProcessGroup, sizes: RowsToSend) -> torch.Tensor:
        """Run all steps on rows; see :meth:`AllToAllBase.exchange_rows`."""
        assert sizes.between is not None
        return self._all_steps(x_RM, sizes.between)

    def exchange(self, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Run all steps on blocks; see :meth:`AllToAllBase.exchange`."""
        size = group.size()
        return self._all_steps(x.view(size, x.shape[0] // size, *x.shape[1:])).view(x.shape)

    def _all_steps(self, blocks: torch.Tensor, between: SizesOfPairs | None = None) -> torch.Tensor:
        for number in range(len(self.hops)):
            blocks = self.step(number, blocks, between)
        return blocks
