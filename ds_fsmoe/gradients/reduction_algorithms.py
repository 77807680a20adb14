# SPDX-License-Identifier: Apache-2.0
"""Defines reduction algorithms: how ranks add up a stretch of a buffer, in which steps, and which ranks get the sum.

``flat_buffers`` chooses one for each buffer and runs its steps. Every rank may need the whole sum, or each only the
part that its optimizer updates (ZeRO stages 1 and 2): then the owner alone has a part, and fewer bytes are sent. Where
ranks are in several nodes, a sum may be made in two levels: first inside each node, so that between nodes a rank sends
only its own share of the node's sum.

Letters: m elements of a stretch, n nodes, p ranks in each, N = n * p ranks. A link between nodes carries, per direction
and node: for a flat ring 2m(N-1)/N; in two levels 2m(n-1)/n; to owners in two levels m(n-1)/n, if all own equal parts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from ds_fsmoe.execution.collectives import all_gather
from ds_fsmoe.execution.node_links import NodeLinks, exchange_sized
from ds_fsmoe.planning.schedule import GRAD, GRAD_GATHER, GRAD_SCATTER

if TYPE_CHECKING:
    from ds_fsmoe.gradients.flat_buffers import FlatGradients

Steps = dict[str, Callable[[], None]]

MOST_NUMEL = 1 << 62


class Stretch(NamedTuple):
    """Represents elements [first, stop) of a buffer that one rank owns."""

    first: int
    stop: int
    owner: int


Range = tuple[int, int]
"""Elements [first, stop)."""


class ReductionAlgorithm(ABC):
    """Adds up stretches of one buffer over ranks, by one algorithm."""

    words: str
    """The words by which logs and measurements call it."""
    most_kinds: tuple[str, ...]
    """The kinds of tasks that a stretch may take, in their order: GRAD is the one on the lane of gradients."""

    def __str__(self) -> str:
        return self.words

    @abstractmethod
    def steps(self, buffer: FlatGradients, first: int, stop: int) -> Steps:
        """Return kind of task -> function on elements [first, stop), in the order of the tasks; the same kinds on every
        rank. Each is collective."""

    @abstractmethod
    def alone(self, kind: str, scratch: torch.Tensor) -> Callable[[], object]:
        """Return a function that sends one step of a stretch as long as ``scratch``, for measuring; its result is
        unused."""


@dataclass(frozen=True, repr=False)
class AllReduce(ReductionAlgorithm):
    """Adds up in one collective among all ranks."""

    group: dist.ProcessGroup
    most: int = MOST_NUMEL
    """The elements of a message, at the most."""
    words = "all-reduce"
    most_kinds = (GRAD,)

    def steps(self, buffer: FlatGradients, first: int, stop: int) -> Steps:
        """Return the steps; see :class:`ReductionAlgorithm`."""

        def reduce() -> None:
            for piece in _messages(first, stop, self.most):
                message = buffer.packed([piece])
                dist.all_reduce(message, group=self.group)
                buffer.put([piece], message)

        return {GRAD: reduce}

    def alone(self, kind: str, scratch: torch.Tensor) -> Callable[[], object]:
        """Return a step for measuring; see :class:`ReductionAlgorithm`."""
        return lambda: dist.all_reduce(scratch, group=self.group)


@dataclass(frozen=True, repr=False)
class AllReduceByNodes(ReductionAlgorithm):
    """Adds up equal parts inside the node, each part between nodes, and gathers the parts inside."""

    nodes: NodeLinks
    words = "all-reduce in two levels"
    most_kinds = (GRAD_SCATTER, GRAD, GRAD_GATHER)

    def steps(self, buffer: FlatGradients, first: int, stop: int) -> Steps:
        """Return the steps; see :class:`ReductionAlgorithm`."""
        nodes, per_node = self.nodes, self.nodes.per_node
        each = -(-(stop - first) // per_node)
        # A rank's part must be as long as each other's for the gather; what is missing at the end is filled up.
        missing = each * per_node - (stop - first)
        part: list[torch.Tensor] = []

        def scatter() -> None:
            whole = buffer.packed([(first, stop)])
            padded = torch.cat([whole, whole.new_zeros(missing)]) if missing else whole
            part[:] = (_summed(padded, [each] * per_node, nodes.place, nodes.inside),)

        def between() -> None:
            _is_used_here(part[0])
            dist.all_reduce(part[0], group=nodes.between)

        def gather() -> None:
            _is_used_here(part[0])
            gathered = part[0].new_empty(each * per_node)
            all_gather(gathered, part.pop(), group=nodes.inside)
            buffer.put([(first, stop)], gathered[: stop - first])

        return {GRAD_SCATTER: scatter, GRAD: between, GRAD_GATHER: gather}

    def alone(self, kind: str, scratch: torch.Tensor) -> Callable[[], object]:
        """Return a step for measuring; see :class:`ReductionAlgorithm`."""
        nodes = self.nodes
        part = scratch[: -(-len(scratch) // nodes.per_node)].clone()
        if kind == GRAD:
            return lambda: dist.all_reduce(part, group=nodes.between)
        whole = part.repeat(nodes.per_node)
        if kind == GRAD_GATHER:
            return lambda: all_gather(whole, part, group=nodes.inside)
        return lambda: _summed(whole, [len(part)] * nodes.per_node, nodes.place, nodes.inside)


@dataclass(frozen=True, repr=False)
class ReduceScatter(ReductionAlgorithm):
    """Sends every element to its owner, which adds up; in one collective among all ranks."""

    group: dist.ProcessGroup
    stretches: Sequence[Stretch]
    """Who owns what of the buffer, in its order and without gaps."""
    most: int = MOST_NUMEL
    """The elements of a message, at the most."""
    words = "reduce-scatter"
    most_kinds = (GRAD,)

    def steps(self, buffer: FlatGradients, first: int, stop: int) -> Steps:
        """Return the steps; see :class:`ReductionAlgorithm`."""
        group = self.group
        order = [(owner,) for owner in range(group.size())]
        pieces = [_within(self.stretches, *piece) for piece in _messages(first, stop, self.most)]

        def scatter() -> None:
            for stretches in pieces:
                packed, counts = _packed(buffer, stretches, order)
                buffer.put(_of(stretches, group.rank()), _summed(packed, counts, group.rank(), group))

        return {GRAD: scatter}

    def alone(self, kind: str, scratch: torch.Tensor) -> Callable[[], object]:
        """Return a step for measuring; see :class:`ReductionAlgorithm`."""
        return _summing_equally(scratch, self.group.rank(), self.group)


@dataclass(frozen=True, repr=False)
class ReduceScatterByNodes(ReductionAlgorithm):
    """Adds up for owners in two levels: inside the node for ranks of one index, then between nodes at the owner.

    A stretch that belongs to few ranks, whose links alone would carry it, is added up for all ranks in two levels.
    """

    nodes: NodeLinks
    stretches: Sequence[Stretch]
    """Who owns what of the buffer, in its order and without gaps."""
    words = "reduce-scatter in two levels"
    most_kinds = (GRAD_SCATTER, GRAD, GRAD_GATHER)

    def is_cheaper(self, first: int, stop: int) -> bool:
        """Return True if no rank sends or receives more between nodes than for a sum on all ranks."""
        nodes = self.nodes
        counts = [0] * (nodes.num_nodes * nodes.per_node)
        for each in _within(self.stretches, first, stop):
            counts[each.owner] += each.stop - each.first
        of_place = [sum(counts[ranks[place]] for ranks in nodes.ranks) for place in range(nodes.per_node)]
        most = max(
            max((nodes.num_nodes - 1) * counts[rank], of_place[place] - counts[rank])
            for ranks in nodes.ranks
            for place, rank in enumerate(ranks)
        )
        return most * nodes.num_nodes * nodes.per_node <= 2 * (nodes.num_nodes - 1) * (stop - first)

    def steps(self, buffer: FlatGradients, first: int, stop: int) -> Steps:
        """Return the steps; see :class:`ReductionAlgorithm`."""
        if not self.is_cheaper(first, stop):
            return AllReduceByNodes(self.nodes).steps(buffer, first, stop)
        nodes, stretches = self.nodes, _within(self.stretches, first, stop)
        of_place: list[torch.Tensor] = []

        def scatter() -> None:
            order = [tuple(ranks[place] for ranks in nodes.ranks) for place in range(nodes.per_node)]
            packed, counts = _packed(buffer, stretches, order)
            of_place[:] = (_summed(packed, counts, nodes.place, nodes.inside),)

        def between() -> None:
            _is_used_here(of_place[0])
            owners = [ranks[nodes.place] for ranks in nodes.ranks]
            counts = [sum(each.stop - each.first for each in stretches if each.owner == owner) for owner in owners]
            sums = _summed(of_place.pop(), counts, nodes.node, nodes.between)
            buffer.put(_of(stretches, nodes.rank), sums)

        return {GRAD_SCATTER: scatter, GRAD: between}

    def alone(self, kind: str, scratch: torch.Tensor) -> Callable[[], object]:
        """Return a step for measuring; see :class:`ReductionAlgorithm`."""
        if kind != GRAD:
            return AllReduceByNodes(self.nodes).alone(kind, scratch)
        nodes = self.nodes
        part = scratch[: -(-len(scratch) // nodes.per_node)]
        return _summing_equally(part, nodes.node, nodes.between)


def _messages(first: int, stop: int, most: int) -> list[Range]:
    """Return the ranges of the messages, the same on every rank; an empty stretch is one empty message."""
    return [(at, min(stop, at + most)) for at in range(first, stop, most)] or [(first, stop)]


def _within(stretches: Sequence[Stretch], first: int, stop: int) -> list[Stretch]:
    """Return the stretches between two elements."""
    begin = max(0, bisect_right(stretches, first, key=lambda each: each.first) - 1)
    begun = takewhile(lambda each: each.first < stop, stretches[begin:])
    cut = [Stretch(max(each.first, first), min(each.stop, stop), each.owner) for each in begun]
    return [each for each in cut if each.first < each.stop]


def _of(stretches: Sequence[Stretch], owner: int) -> list[Range]:
    """Return the stretches of one rank."""
    return [(each.first, each.stop) for each in stretches if each.owner == owner]


def _packed(
    buffer: FlatGradients, stretches: Sequence[Stretch], order: Sequence[tuple[int, ...]]
) -> tuple[torch.Tensor, list[int]]:
    """Return the elements of each set of owners, one set after the other and owner by owner, and their numbers."""
    of_sets = [[each for owner in owners for each in _of(stretches, owner)] for owners in order]
    counts = [sum(stop - first for first, stop in of_set) for of_set in of_sets]
    return buffer.packed([each for of_set in of_sets for each in of_set]), counts


def _summed(x: torch.Tensor, counts: Sequence[int], index: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the sum over ranks of this rank's elements: ``counts`` of ``x`` belong to each rank, in their order."""
    own = counts[index]
    parts = exchange_sized(x, counts, [own] * len(counts), group)
    return parts.view(len(counts), own).sum(dim=0)


def _summing_equally(scratch: torch.Tensor, index: int, group: dist.ProcessGroup | None) -> Callable[[], torch.Tensor]:
    num_ranks = dist.get_world_size(group)
    whole = scratch.new_zeros(-(-len(scratch) // num_ranks) * num_ranks)
    return lambda: _summed(whole, [len(whole) // num_ranks] * num_ranks, index, group)


def _is_used_here(x: torch.Tensor) -> None:
    """Mark a tensor of another lane's stream as read in the current stream, for the GPU's allocator."""
    if x.is_cuda:
        x.record_stream(torch.cuda.current_stream(x.device))
