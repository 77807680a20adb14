# SPDX-License-Identifier: Apache-2.0
"""Exchanges experts between ranks with all their parameters and states, bit for bit. Placements call it between two
steps. :mod:`~ds_fsmoe.placement.placements` decides which experts to exchange and updates the routing.

An exchange of two places moves what both ranks have of the experts there. Every rank computes all transfers from the
facts of all ranks, so each knows what the others send. Each pair of ranks exchanges one message of bytes. Where several
ranks have the same elements (data-parallel copies of an expert), a rank takes those of its own EP group.

ZeRO concatenates parameters and splits the result by ranks. So a rank may have all of an expert, some of its elements,
or all of its weights and a part of its states. This module sees every tensor as elements of an expert.

All data is packed before any is overwritten, so an error before the exchange changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_fsmoe.checkpoint.optimizer_states import live_groups, names_in_files, piece_of
from ds_fsmoe.checkpoint_files.expert_parts import Layout, parts_in
from ds_fsmoe.checkpoint_files.pieces import MASTER, WEIGHTS, Piece
from ds_fsmoe.distributed.fail_together import device_of, on_every_rank, raise_on_all_ranks
from ds_fsmoe.distributed.partitioned import is_shared_out
from ds_fsmoe.distributed.waits import waiting
from ds_fsmoe.layer.experts_layer import FSMoEExperts

Facts = tuple[str, str, int, int, int, str]
"""(layer, name, number of the expert on its rank, first element, elements, type) of a fragment."""


class PlacementError(RuntimeError):
    """Raised when experts cannot be moved. The message has the reason and is the same on all ranks."""


@dataclass(frozen=True)
class ExpertTensor:
    """Holds a parameter or buffer of this rank's experts."""

    layer: str
    """The label of the layer."""
    name: str
    """Its name in the layer, the same on every rank, without the number of an expert."""
    tensor: torch.Tensor
    index: int | None
    """The number on this rank of the one expert that it belongs to; ``None``: it belongs to all of them."""
    num_local: int
    """The number of experts of this rank, e."""
    layout: Layout = "stacked"
    """How experts lie in it, if it belongs to all."""

    def local_range(self, index: int) -> tuple[int, int, int] | None:
        """Return (first, step, count) of the flat elements of an expert, or None if the tensor has none.

        Args:
            index: the index of the expert on this rank.
        """
        count = getattr(self.tensor, "ds_numel", self.tensor.numel())
        if self.index is not None:
            return (0, 1, count) if self.index == index else None
        share = count // self.num_local
        return (index * share, 1, share) if self.layout == "stacked" else (index, self.num_local, share)


@dataclass(frozen=True)
class Fragment:
    """Holds consecutive elements of one expert, in one tensor of this rank."""

    layer: str
    name: str
    """The tensor's name, and of which state it is."""
    index: int
    """The number of the expert on this rank."""
    first: int
    """The first element, counted among those of the expert."""
    values: torch.Tensor
    """[elements], a view."""

    @property
    def facts(self) -> tuple[str, str, int, int, int, str]:
        """Return (layer, name, expert, first element, elements, dtype), which other ranks need."""
        dtype = str(self.values.dtype).removeprefix("torch.")
        return self.layer, self.name, self.index, self.first, self.values.numel(), dtype


@dataclass(frozen=True)
class ExpertRank:
    """Names the position of a rank among those that share experts: its EP group and its rank there."""

    block: int
    """The number of its EP group."""
    ep_rank: int
    """Its index in that group."""


ExpertPlace = tuple[int, int]
"""(EP rank, number of the expert there)."""


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
    """Moves experts of an engine's layers from rank to rank, with their optimizer states.

    Construction is collective over all ranks that run these layers.

    Args:
        engine: our engine, between two steps. Its tensors must stay the same while the mover is used.
        tensors: the parameters and buffers of the experts of this rank.
        expert_ranks: label of a layer -> this rank's EP group and its index there.
        group: the ranks that run the layers; ``None``: all.

    Raises:
        PlacementError: on every rank, where states cannot be moved, or ranks have different states.
    """

    def __init__(
        self,
        engine: Any,
        tensors: Sequence[ExpertTensor],
        expert_ranks: Mapping[str, ExpertRank],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._engine, self._group = engine, group
        self._device = device_of(group)
        found: list[Fragment] = []
        with raise_on_all_ranks(group, "looking for the states of experts", PlacementError):
            found = fragments_of(engine, tensors)
        told = on_every_rank(([each.facts for each in found], dict(expert_ranks)), group)
        self._facts: list[list[Facts]] = [facts for facts, _ in told]
        self._expert_ranks: list[Mapping[str, ExpertRank]] = [each for _, each in told]
        self._by_expert = [_by_expert(facts) for facts in self._facts]
        self._tensors = tuple(tensors)
        for layer in expert_ranks:
            of_ep_ranks: dict[int, set[str]] = {}
            for facts, of_rank in zip(self._facts, self._expert_ranks, strict=True):
                names = of_ep_ranks.setdefault(of_rank[layer].ep_rank, set())
                names |= {name for of, name, *_ in facts if of == layer}
            everywhere, anywhere = set.intersection(*of_ep_ranks.values()), set.union(*of_ep_ranks.values())
            if missing := sorted(anywhere - everywhere):
                raise PlacementError(f"{layer}: experts cannot move, as only some ranks have {', '.join(missing[:4])}")

    def bytes_of_expert(self, layer: str) -> int:
        """Return the bytes of one expert of a layer with all its states, counting copies once."""
        of_first = (
            (name, first, size, dtype)
            for rank, facts in enumerate(self._facts)
            if self._expert_ranks[rank][layer].ep_rank == 0
            for of, name, index, first, size, dtype in facts
            if of == layer and index == 0
        )
        return sum(size * getattr(torch, dtype).itemsize for _, _, size, dtype in set(of_first))

    def swap(self, swaps: Sequence[tuple[str, ExpertPlace, ExpertPlace]]) -> int:
        """Exchange experts; each place occurs at most once. Collective.

        Args:
            swaps: (layer, place, place) of two experts; the same on every rank.

        Returns:
            The bytes sent by the rank that sends most.

        Raises:
            PlacementError: on every rank, before any change, where a rank cannot pack its data.
        """
        segments = [segment for each in swaps for segment in self._segments(*each)]
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
                raise PlacementError("the states of experts have changed since the moves were decided")
            received = torch.empty(sum(row[own] for row in nbytes), dtype=torch.uint8, device=self._device)
            sizes = [each.size * _itemsize(self._facts[own][each.target_fragment]) for each in arriving]
            scratch = torch.empty(max(sizes, default=0), dtype=torch.uint8, device=self._device)
            leaving = sorted((each for each in segments if each.source == own), key=lambda each: each.target)
            parts = [fragments[each.source_fragment].values.narrow(0, each.source_at, each.size) for each in leaving]
            packed = [each.contiguous().to(self._device).view(torch.uint8) for each in parts]
            sent = torch.cat(packed) if packed else torch.empty(0, dtype=torch.uint8, device=self._device)
        self._exchange(sent.split(nbytes[own]), received.split([row[own] for row in nbytes]), own)
        self._unpack(received, arriving, fragments, scratch)
        return max(sum(row) for row in nbytes)

    def _exchange(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], own: int) -> None:
        """Send to and receive from all ranks at the same time, as in an all-to-all."""
        received[own].copy_(sent[own])
        operations = []
        # On gloo two ranks that both send first are serialised, so receives are posted first.
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
            target = fragments[each.target_fragment].values.narrow(0, each.target_at, each.size)
            size = each.size * target.element_size()
            # In memory of its own: elements of a type may not begin just anywhere.
            target.copy_(scratch[:size].copy_(received[at : at + size]).view(target.dtype))
            at += size
        _make_whole_again(self._tensors)

    def _segments(self, layer: str, first: ExpertPlace, second: ExpertPlace) -> list[_Segment]:
        found: list[_Segment] = []
        expert_ranks = [of_rank[layer] for of_rank in self._expert_ranks]
        for source, target in ((first, second), (second, first)):
            holders = [rank for rank, seat in enumerate(expert_ranks) if seat.ep_rank == source[0]]
            for rank, seat in enumerate(expert_ranks):
                if seat.ep_rank == target[0]:
                    # Those of its own EP group first.
                    nearest = sorted(holders, key=lambda each: expert_ranks[each].block != seat.block)
                    found += self._to_rank(layer, source[1], rank, target[1], nearest)
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
                    raise PlacementError(f"{layer}: no rank has element {at} of {name} of a moving expert")
                source, source_fragment, source_at, length = segment
                found.append(_Segment(source, source_fragment, source_at, target, fragment, at - first, length))
                at += length
        return found

    def _next(
        self, layer: str, name: str, index: int, holders: Sequence[int], at: int, stop: int
    ) -> tuple[int, int, int, int] | None:
        """Return the source of the elements from ``at`` on: (rank, fragment, offset in it, elements)."""
        for rank in holders:
            for fragment, of, first, size in self._by_expert[rank].get((layer, index), ()):
                if of == name and first <= at < first + size:
                    return rank, fragment, at - first, min(stop, first + size) - at
        return None


def _by_expert(facts: Sequence[Facts]) -> dict[tuple[str, int], list[tuple[int, str, int, int]]]:
    """Return (layer, expert) -> (index of the fragment, name, first element, elements) of each fragment."""
    found: dict[tuple[str, int], list[tuple[int, str, int, int]]] = {}
    for number, (layer, name, index, first, size, _) in enumerate(facts):
        found.setdefault((layer, index), []).append((number, name, first, size))
    return found


def _itemsize(facts: Facts) -> int:
    return getattr(torch, facts[-1]).itemsize


def _make_whole_again(tensors: Sequence[ExpertTensor]) -> None:
    """Gather the parameters that ZeRO 3 keeps whole again, after their partitions changed. Collective."""
    kept: list[Any] = [each.tensor for each in tensors if getattr(each.tensor, "ds_persist", False)]
    if kept:
        kept[0].partition(kept)
        with waiting("weights that ZeRO 3 keeps whole"):
            kept[0].all_gather(kept)


# ---- all that a rank has of each of its experts: weights, adapters, buffers, states, whole or in pieces


def expert_tensors(label: str, layer: Any) -> Iterator[ExpertTensor]:
    """Yield the parameters and buffers of the experts of a layer.

    Args:
        label: the label of the layer.
        layer: a converted layer, of DeepSpeed or of Hugging Face.
    """
    if isinstance(layer, FSMoEExperts):
        around = next(iter(layer.fsmoe.outermost), layer)
        for name, parameter, part in parts_in(around):
            yield ExpertTensor(label, name, parameter, None, part.num_local, part.layout)
        return
    experts = list(layer.experts.deepspeed_experts)
    for index, expert in enumerate(experts):
        for name, tensor in (*expert.named_parameters(), *expert.named_buffers()):
            yield ExpertTensor(label, name, tensor, index, len(experts))


def fragments_of(engine: Any, tensors: Iterable[ExpertTensor]) -> list[Fragment]:
    """Return all fragments that this rank has of these experts, in an order that depends on names alone.

    Args:
        engine: our engine, between two steps.
        tensors: parameters and buffers of experts.

    Raises:
        PlacementError: states are not in memory, or are of an unknown optimizer.
    """
    tensors = list(tensors)
    found = [fragment for each in tensors for fragment in _of_weights(each)]
    by_parameter = {id(each.tensor): each for each in tensors}
    by_name = {name: parameter for parameter, name in names_in_files(engine).items()}
    groups = live_groups(engine) if engine.optimizer is not None else []
    if groups is None:
        raise PlacementError(
            f"experts cannot move: the states of {type(engine.optimizer).__name__} are not in memory, or unknown"
        )
    if getattr(engine.optimizer, "offloaded_states", None):
        raise PlacementError("experts cannot move: optimizer states are offloaded (engine.offload_states)")
    for group in groups:
        of_experts = [each for each in group.pieces if id(by_name.get(each.name)) in by_parameter]
        if of_experts and (others := group.others()):
            raise PlacementError(
                f"experts cannot move: the optimizer's {', '.join(sorted(others))} of {of_experts[0].name} is not a "
                "number per element"
            )
        states = group.per_element() | ({} if group.master is None else {MASTER: group.master})
        for piece in group.pieces:
            of = by_parameter.get(id(by_name.get(piece.name)))
            if of is not None:
                for state, values in states.items():
                    found += _of_piece(of, state, piece, values)
    return sorted(found, key=lambda each: each.facts[:4])


def _of_weights(of: ExpertTensor) -> Iterator[Fragment]:
    tensor = of.tensor
    if is_shared_out(tensor):
        if hasattr(tensor.ds_tensor, "ds_quant_scale"):
            raise PlacementError(f"experts cannot move: {of.name} is quantized (zero_quantized_nontrainable_weights)")
        piece = piece_of(tensor, of.name) if isinstance(tensor, nn.Parameter) else None
        if piece is not None:
            yield from _of_piece(of, WEIGHTS, piece, tensor.ds_tensor)
        return
    yield from _of_piece(of, WEIGHTS, Piece(of.name, 0, tensor.numel(), 0), tensor)


def _of_piece(of: ExpertTensor, state: str, piece: Piece, holder: torch.Tensor) -> Iterator[Fragment]:
    """Yield the fragment of each expert in one partition of a flat parameter."""
    flat = holder.detach().view(-1)
    for index in range(of.num_local):
        lies = of.local_range(index)
        if lies is None:
            continue
        start, step, count = lies
        first = min(count, max(0, -(-(piece.first - start) // step)))
        stop = min(count, max(0, -(-(piece.first + piece.size - start) // step)))
        if first < stop:
            at = piece.at + start + first * step - piece.first
            values = flat[at : at + (stop - first - 1) * step + 1 : step]
            yield Fragment(of.layer, f"{of.name} {state}", index, first, values)
