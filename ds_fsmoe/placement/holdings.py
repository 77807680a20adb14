# SPDX-License-Identifier: Apache-2.0
"""Finds all that a rank has of each of its experts: weights, adapters, buffers, optimizer states, whole or in pieces.

ZeRO lays parameters end to end and cuts the result by ranks, so of an expert a rank may have all, some elements, or of
its weights all and of its states some. Every tensor is seen here as elements of an expert, whatever lies around them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ds_fsmoe.checkpoint.optimizer_states import live_groups, names_in_files, piece_of
from ds_fsmoe.checkpoint_files.expert_parts import Layout, parts_in
from ds_fsmoe.checkpoint_files.pieces import MASTER, WEIGHTS, Piece
from ds_fsmoe.distributed.partitioned import is_shared_out
from ds_fsmoe.layer.experts_layer import FSMoEExperts


class PlacementError(RuntimeError):
    """Experts cannot be moved. The message, the same on all ranks, says why."""


@dataclass(frozen=True)
class ExpertTensor:
    """A parameter or buffer of experts of this rank."""

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

    def lies(self, index: int) -> tuple[int, int, int] | None:
        """Return (first, step, count) of the flat elements of an expert, ``None`` where it has none here.

        Args:
            index: the number of the expert on this rank.
        """
        count = getattr(self.tensor, "ds_numel", self.tensor.numel())
        if self.index is not None:
            return (0, 1, count) if self.index == index else None
        share = count // self.num_local
        return (index * share, 1, share) if self.layout == "stacked" else (index, self.num_local, share)


@dataclass(frozen=True)
class Fragment:
    """Consecutive elements of one expert, in one tensor of this rank."""

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
        """What other ranks have to know of it."""
        dtype = str(self.values.dtype).removeprefix("torch.")
        return self.layer, self.name, self.index, self.first, self.values.numel(), dtype


def expert_tensors(label: str, layer: Any) -> Iterator[ExpertTensor]:
    """Return the parameters and buffers of the experts of a layer.

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
    """Return all that this rank has of these experts, in an order that follows from names alone.

    Args:
        engine: our engine, between two steps.
        tensors: parameters and buffers of experts.

    Raises:
        PlacementError: states are not in memory, or are of an optimizer that is not known.
    """
    tensors = list(tensors)
    found = [fragment for each in tensors for fragment in _of_weights(each)]
    by_parameter = {id(each.tensor): each for each in tensors}
    by_name = {name: parameter for parameter, name in names_in_files(engine).items()}
    groups = live_groups(engine) if engine.optimizer is not None else []
    if groups is None:
        raise PlacementError(
            f"experts cannot move: the states of {type(engine.optimizer).__name__} are not in memory, or not known"
        )
    if getattr(engine.optimizer, "offloaded_states", None):
        raise PlacementError("experts cannot move: states of the optimizer are offloaded (engine.offload_states)")
    for group in groups:
        of_experts = [each for each in group.pieces if id(by_name.get(each.name)) in by_parameter]
        if of_experts and (others := group.others()):
            raise PlacementError(
                f"experts cannot move: the optimizer's {', '.join(sorted(others))} of {of_experts[0].name} has no "
                "number for each element"
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
    """Return what a piece of a flat parameter has of each expert."""
    flat = holder.detach().view(-1)
    for index in range(of.num_local):
        lies = of.lies(index)
        if lies is None:
            continue
        start, step, count = lies
        first = min(count, max(0, -(-(piece.first - start) // step)))
        stop = min(count, max(0, -(-(piece.first + piece.size - start) // step)))
        if first < stop:
            at = piece.at + start + first * step - piece.first
            values = flat[at : at + (stop - first - 1) * step + 1 : step]
            yield Fragment(of.layer, f"{of.name} {state}", index, first, values)
