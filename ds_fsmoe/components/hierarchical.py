# SPDX-License-Identifier: Apache-2.0
"""Hierarchical all-to-alls: which way a block takes over the nodes, and the steps that follow from it.

A block on its way from rank s to rank d rests on other ranks in between. Where it rests is all that tells one algorithm
from another; who talks to whom in a step, how many blocks each sends, and how they are laid out anew from step to step
are worked out here, once for all algorithms and for nodes of any shape.

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
"""The rows from one rank of a group to another, by (source, destination), of those that come by here."""
Part = tuple[int, ...]
"""Ranks that talk to each other in a step, ascending."""


@dataclass(frozen=True)
class Nodes:
    """On which nodes the ranks of a group lie. They need not be neighbours, nor equally many on each node."""

    node_of_rank: tuple[int, ...]

    @classmethod
    def of(cls, nodes: Iterable[object]) -> Nodes:
        """From whatever names the node of each rank; nodes are numbered as they come."""
        numbers: dict[object, int] = {}
        return cls(tuple(numbers.setdefault(node, len(numbers)) for node in nodes))

    @property
    def size(self) -> int:
        """Ranks of the group."""
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
        """The ranks on the node of this one, itself among them, ascending."""
        return self._ranks_of_node[self.node_of_rank[rank]]

    def local_rank(self, rank: int) -> int:
        """Which of its neighbours it is."""
        return self._local_ranks[rank]


class HierarchicalAllToAll(AllToAllBase):
    """An all-to-all in steps, each along one kind of link.

    With ``links = ("intra", "inter")`` it is run as two tasks on two lanes, one chunk's step inside the node beside
    another's between nodes, and on the way back the other way round. With other links it is one task that has both
    lanes to itself. On a group that lies on one kind of link it is the flat all-to-all.
    """

    links: ClassVar[tuple[Link, ...]]
    """What each step goes along."""

    @abstractmethod
    def forwarding_ranks(self, source: int, destination: int, nodes: Nodes) -> tuple[int, ...]:
        """Where a block rests after each step but the last, which brings it to its destination. A step may leave it
        where it is. The same on every rank: it follows from the arguments alone."""

    def exchange(self, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """See :meth:`AllToAllBase.exchange`. Of the group's nodes nothing is known here, so it goes the flat way, which
        has the same result; :class:`Route` goes this algorithm's."""
        return FlatAllToAll().exchange(x, group)

    def exchange_rows(self, x_RM: torch.Tensor, group: dist.ProcessGroup, sizes: RowsToSend) -> torch.Tensor:
        """See :meth:`AllToAllBase.exchange_rows`; the flat way, as :meth:`exchange`."""
        return FlatAllToAll().exchange_rows(x_RM, group, sizes)


@dataclass(frozen=True)
class Hop:
    """One rank's part in one step."""

    link: Link
    pack: tuple[int, ...]
    """The order in which it sends the blocks that it has."""
    sends: tuple[int, ...]
    """How many of them to each rank of its part."""
    receives: tuple[int, ...]
    """How many from each."""
    unpack: tuple[int, ...]
    """The order in which they are passed on."""
    pairs: tuple[tuple[int, int], ...] = ()
    """(source, destination) of each block that it has."""
    received_pairs: tuple[tuple[int, int], ...] = ()
    """(source, destination) of each block that it receives, in the order of arrival."""

    def go(
        self, blocks: torch.Tensor, group: dist.ProcessGroup | None, between: SizesOfPairs | None = None
    ) -> torch.Tensor:
        """[blocks that it has, ...] to [blocks that it has afterwards, ...]; no autograd.

        Args:
            blocks: contiguous; with ``between`` the rows of blocks that are not equally large, one after another.
            group: of its part; ``None`` where that is this rank alone.
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
    """The sums of runs of so many sizes each."""
    ends = (0, *itertools.accumulate(lengths))
    return [sum(sizes[start:stop]) for start, stop in itertools.pairwise(ends)]


def _in_order(blocks: torch.Tensor, order: tuple[int, ...], sizes: Sequence[int] | None = None) -> torch.Tensor:
    """The blocks of dimension 0 in this order, which names each of them once; themselves, if that is theirs.

    Args:
        blocks: [blocks, ...], or [rows, ...] where sizes are given.
        order: which block comes first, second, and so on.
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
    """[start, stop) of what lies in one piece."""
    runs: list[tuple[int, int]] = []
    for block in order:
        if runs and block == runs[-1][1]:
            runs[-1] = runs[-1][0], block + 1
        else:
            runs.append((block, block + 1))
    return tuple(runs)


class BlockPaths:
    """Where every block of a group is after each step.

    Args:
        alltoall: the algorithm.
        nodes: of the group.
        back: the way back: every block goes the way its answer came, so the steps are those of the way in from the
            last to the first.

    Raises:
        ValueError: the algorithm names ranks that there are not, or sends along another link than it says.
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
        """The ranks that talk to each other in a step, in parts that do not; those that talk to nobody are parts of
        one. Every rank is in one part, and all of them come to the same parts."""
        part_of = {rank: {rank} for rank in range(self.nodes.size)}
        for path in self._paths.values():
            one, other = (part_of[rank] for rank in path[step : step + 2])
            if one is not other:
                one |= other
                part_of.update(dict.fromkeys(other, one))
        return tuple(sorted({tuple(sorted(part)) for part in part_of.values()}))

    def forwarded_blocks(self, rank: int) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
        """Return of whose blocks a rank has to know the sizes: of each other rank the destinations of those of its
        blocks that rest here, on their way or on the way of their answers; and what this rank tells each so."""
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
        """The blocks that a rank has after a step, sender after sender."""
        found = [pair for pair, path in self._paths.items() if path[step + 1] == rank]
        return sorted(found, key=lambda pair: (self._paths[pair][step], pair[::-1]))

    def _sending_order(self, step: int, pair: tuple[int, int]) -> tuple[int, tuple[int, int]]:
        # By destination first, then by source: on nodes of neighbours the last step needs no order of its own then.
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
    """The steps of an all-to-all for one rank, with their communicators."""

    hops: tuple[Hop, ...]
    groups: tuple[dist.ProcessGroup | None, ...]
    """Of this rank's part in each step; ``None`` where it is alone."""

    def step(self, number: int, blocks: torch.Tensor, between: SizesOfPairs | None = None) -> torch.Tensor:
        """[blocks, ...], contiguous, to [blocks, ...]: at first one for each rank, and at the end one from each. With
        ``between`` rows, see :meth:`Hop.go`."""
        return self.hops[number].go(blocks, self.groups[number], between)

    def exchange_rows(self, x_RM: torch.Tensor, group: dist.ProcessGroup, sizes: RowsToSend) -> torch.Tensor:
        """All steps: see :meth:`AllToAllBase.exchange_rows`."""
        assert sizes.between is not None
        return self._all_steps(x_RM, sizes.between)

    def exchange(self, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """All steps: see :meth:`AllToAllBase.exchange`."""
        size = group.size()
        return self._all_steps(x.view(size, x.shape[0] // size, *x.shape[1:])).view(x.shape)

    def _all_steps(self, blocks: torch.Tensor, between: SizesOfPairs | None = None) -> torch.Tensor:
        for number in range(len(self.hops)):
            blocks = self.step(number, blocks, between)
        return blocks
