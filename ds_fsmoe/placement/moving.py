# SPDX-License-Identifier: Apache-2.0
"""Exchanges experts between ranks with all that belongs to them, bit for bit.

An exchange of two places moves what the ranks of either have of the expert there. Which elements go from which rank to
which is worked out on every rank from what all ranks have, so each knows what the others send and wait for: one message
of bytes from each rank to each that needs something of it.
Where several ranks have the same elements (data-parallel copies of an expert), a rank takes those of its own EP group.

Everything that leaves is packed before anything is overwritten, so an error before the exchange changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ds_fsmoe.distributed.fail_together import device_of, on_every_rank, raise_on_all_ranks
from ds_fsmoe.distributed.waits import waiting
from ds_fsmoe.placement.holdings import ExpertTensor, Fragment, PlacementError, fragments_of

Facts = tuple[str, str, int, int, int, str]
"""(layer, name, number of the expert on its rank, first element, elements, type) of a fragment."""


@dataclass(frozen=True)
class Seat:
    """The seat of a rank among those that share experts."""

    block: int
    """The number of its EP group."""
    ep_rank: int
    """Its index in that group."""


@dataclass(frozen=True)
class Swap:
    """An exchange of the experts in two homes of a layer."""

    layer: str
    first: tuple[int, int]
    """(EP rank, number of the expert there)."""
    second: tuple[int, int]


@dataclass(frozen=True)
class _Segment:
    source: int
    source_fragment: int
    source_at: int
    target: int
    target_fragment: int
    target_at: int
    size: int


class Mover:
    """Moves experts of an engine's layers. Collective to make, over all ranks that run these layers.

    Args:
        engine: our engine, between two steps. What it has in which tensors must not change as long as this is used.
        tensors: the parameters and buffers of the experts of this rank.
        seats: label of a layer -> this rank's seat.
        group: the ranks that run the layers; ``None``: all.

    Raises:
        PlacementError: on every rank, where states cannot be moved, or ranks have other ones.
    """

    def __init__(
        self,
        engine: Any,
        tensors: Sequence[ExpertTensor],
        seats: Mapping[str, Seat],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._engine, self._group = engine, group
        self._device = device_of(group)
        found: list[Fragment] = []
        with raise_on_all_ranks(group, "looking for the states of experts", PlacementError):
            found = fragments_of(engine, tensors)
        told = on_every_rank(([each.facts for each in found], dict(seats)), group)
        self._facts: list[list[Facts]] = [facts for facts, _ in told]
        self._seats: list[Mapping[str, Seat]] = [each for _, each in told]
        self._by_expert = [_by_expert(facts) for facts in self._facts]
        self._tensors = tuple(tensors)
        for layer in seats:
            of_ep_ranks: dict[int, set[str]] = {}
            for facts, of_rank in zip(self._facts, self._seats, strict=True):
                names = of_ep_ranks.setdefault(of_rank[layer].ep_rank, set())
                names |= {name for of, name, *_ in facts if of == layer}
            everywhere, anywhere = set.intersection(*of_ep_ranks.values()), set.union(*of_ep_ranks.values())
            if missing := sorted(anywhere - everywhere):
                raise PlacementError(f"{layer}: experts cannot move, as only some ranks have {', '.join(missing[:4])}")

    def bytes_of_expert(self, layer: str) -> int:
        """Return the bytes of one expert of a layer with all its states, once."""
        of_first = (
            (name, first, size, dtype)
            for rank, facts in enumerate(self._facts)
            if self._seats[rank][layer].ep_rank == 0
            for of, name, index, first, size, dtype in facts
            if of == layer and index == 0
        )
        return sum(size * getattr(torch, dtype).itemsize for _, _, size, dtype in set(of_first))

    def swap(self, swaps: Sequence[Swap]) -> int:
        """Exchange experts. Collective; each home at most once.

        Args:
            swaps: the same on every rank.

        Returns:
            The bytes that the rank with most to send has sent.

        Raises:
            PlacementError: on every rank, before anything has changed, where one cannot pack what it sends.
        """
        segments = [segment for each in swaps for segment in self._segments(each)]
        ranks = range(len(self._facts))
        own = 0 if len(ranks) == 1 else dist.get_rank(self._group)
        nbytes = [[0] * len(ranks) for _ in ranks]
        for each in segments:
            nbytes[each.source][each.target] += each.size * _itemsize(self._facts[each.source][each.source_fragment])
        sent = received = scratch = torch.empty(0, dtype=torch.uint8)
        fragments: list[Fragment] = []
        arriving = sorted((each for each in segments if each.target == own), key=lambda each: each.source)
        with raise_on_all_ranks(self._group, "packing experts that move", PlacementError):
            # Looked up each time: an engine may have put its states into other memory.
            fragments = fragments_of(self._engine, self._tensors)
            if [each.facts for each in fragments] != self._facts[own]:
                raise PlacementError("the states of experts are not what they were when it was decided what moves")
            received = torch.empty(sum(row[own] for row in nbytes), dtype=torch.uint8, device=self._device)
            sizes = [each.size * _itemsize(self._facts[own][each.target_fragment]) for each in arriving]
            scratch = torch.empty(max(sizes, default=0), dtype=torch.uint8, device=self._device)
            leaving = sorted((each for each in segments if each.source == own), key=lambda each: each.target)
            parts = [_values(fragments[each.source_fragment], each.source_at, each.size) for each in leaving]
            packed = [each.contiguous().to(self._device).view(torch.uint8) for each in parts]
            sent = torch.cat(packed) if packed else torch.empty(0, dtype=torch.uint8, device=self._device)
        self._exchange(sent.split(nbytes[own]), received.split([row[own] for row in nbytes]), own)
        self._unpack(received, arriving, fragments, scratch)
        return max(sum(row) for row in nbytes)

    def _exchange(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], own: int) -> None:
        """Send to each rank and receive from each, both at once: of two ranks that exchange experts, neither waits for
        the other's turn, as in the rounds of an all-to-all."""
        received[own].copy_(sent[own])
        operations = []
        # On gloo two ranks that begin with sending take turns: whoever waits for something says so first.
        for do, of_ranks in ((dist.irecv, received), (dist.isend, sent)):
            for index, values in enumerate(of_ranks):
                rank = index if self._group is None else dist.get_global_rank(self._group, index)
                if index != own and len(values):
                    operations.append(dist.P2POp(do, values, rank, self._group))
        with waiting("experts that move"):
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()

    @torch.no_grad()
    def _unpack(
        self,
        received: torch.Tensor,
        segments: Sequence[_Segment],
        fragments: Sequence[Fragment],
        scratch: torch.Tensor,
    ) -> None:
        at = 0
        for each in segments:
            target = _values(fragments[each.target_fragment], each.target_at, each.size)
            size = each.size * target.element_size()
            # In memory of its own: elements of a type may not begin just anywhere.
            target.copy_(scratch[:size].copy_(received[at : at + size]).view(target.dtype))
            at += size
        _make_whole_again(self._tensors)

    def _segments(self, swap: Swap) -> list[_Segment]:
        found: list[_Segment] = []
        for source, target in ((swap.first, swap.second), (swap.second, swap.first)):
            holders = [rank for rank, seats in enumerate(self._seats) if seats[swap.layer].ep_rank == source[0]]
            for rank, seats in enumerate(self._seats):
                if seats[swap.layer].ep_rank == target[0]:
                    # Those of its own EP group first.
                    block = seats[swap.layer].block
                    nearest = sorted(holders, key=lambda each: self._seats[each][swap.layer].block != block)
                    found += self._to_rank(swap.layer, source[1], rank, target[1], nearest)
        return found

    def _to_rank(
        self, layer: str, source_index: int, target: int, target_index: int, holders: Sequence[int]
    ) -> list[_Segment]:
        found = []
        for fragment, name, first, size in self._by_expert[target].get((layer, target_index), ()):
            at, stop = first, first + size
            while at < stop:
                segment = self._next(layer, name, source_index, holders, at, stop)
                if segment is None:
                    raise PlacementError(f"{layer}: no rank has element {at} of {name} of an expert that moves")
                source, source_fragment, source_at, length = segment
                found.append(_Segment(source, source_fragment, source_at, target, fragment, at - first, length))
                at += length
        return found

    def _next(
        self, layer: str, name: str, index: int, holders: Sequence[int], at: int, stop: int
    ) -> tuple[int, int, int, int] | None:
        """Return who has the elements from ``at`` on: (rank, fragment, where in it, how many)."""
        for rank in holders:
            for fragment, of, first, size in self._by_expert[rank].get((layer, index), ()):
                if of == name and first <= at < first + size:
                    return rank, fragment, at - first, min(stop, first + size) - at
        return None


def _values(fragment: Fragment, at: int, size: int) -> torch.Tensor:
    return fragment.values[at : at + size]


def _by_expert(facts: Sequence[Facts]) -> dict[tuple[str, int], list[tuple[int, str, int, int]]]:
    """Return (layer, number of the expert) -> (number of the fragment, name, first element, elements) of each."""
    found: dict[tuple[str, int], list[tuple[int, str, int, int]]] = {}
    for number, (layer, name, index, first, size, _) in enumerate(facts):
        found.setdefault((layer, index), []).append((number, name, first, size))
    return found


def _itemsize(facts: Facts) -> int:
    return getattr(torch, facts[-1]).itemsize


def _make_whole_again(tensors: Sequence[ExpertTensor]) -> None:
    """Gather parameters again that ZeRO 3 keeps whole, after what they are cut into has changed. Collective."""
    kept: list[Any] = [each.tensor for each in tensors if getattr(each.tensor, "ds_persist", False)]
    if kept:
        kept[0].partition(kept)
        with waiting("weights that ZeRO 3 keeps whole"):
            kept[0].all_gather(kept)
