# SPDX-License-Identifier: Apache-2.0
"""Describes which part of a whole expert parameter a rank has; every such parameter has such a description.

Conversion, saving, loading and placement read it. Letters: E experts of all ranks, e = E / ep experts of one rank, r
the rank of an adapter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from ds_fsmoe.checkpoint_files.numbering import ShardDim

Layout = Literal["stacked", "innermost"]
"""How experts lie in a parameter. ``"stacked"``: one behind the other along the first dimension, [E * k, ...], as in
base weights (k = 1) and the A of an adapter (k = r). ``"innermost"``: [out, r * E], experts running fastest in the
second dimension, as in the B of an adapter."""
LAYOUTS: tuple[Layout, ...] = ("stacked", "innermost")
_ATTRIBUTE = "fsmoe_part"
_SIGN = "@"
_NAME = re.compile(rf"^(?P<name>.+){_SIGN}(?P<number>[0-9]{{1,9}})$")


@dataclass(frozen=True)
class Shard:
    """Describes a rank's shard of each of its experts, for a parameter of layout ``"stacked"``."""

    count: int
    """The ranks that share an expert."""
    index: int
    """Which of them this is."""
    dim: int | None
    """The dimension that is cut; ``None``: whole in the first shard and zero in the others."""
    pieces: int = 1
    """How many equal pieces lie one behind the other in that dimension, each of which is cut: 2 for gate and value."""

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(f"index = {self.index}: must be between 0 and count - 1 ({self.count - 1})")

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this shard of a tensor with all of some experts.

        Raises:
            ValueError: the shards would have unequal sizes.
        """
        if self.dim is None:
            return torch.zeros_like(whole) if self.index else whole
        if whole.shape[self.dim] % (self.pieces * self.count):
            raise ValueError(
                f"shape {list(whole.shape)}: dimension {self.dim} does not divide into {self.count} shards"
            )
        each = whole.unflatten(self.dim, (self.pieces, self.count, -1))
        return each.select(self.dim + 1, self.index).flatten(self.dim, self.dim + 1)

    def join(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the whole tensor of all shards, in their order."""
        if self.dim is None:
            return shards[0]
        pieces = [each.unflatten(self.dim, (self.pieces, -1)) for each in shards]
        return torch.stack(pieces, dim=self.dim + 1).flatten(self.dim, self.dim + 2)

    def scaled(self, shape: Sequence[int], up: bool) -> tuple[int, ...]:
        """Return the whole shape for the shape of a shard, or the reverse."""
        sizes = list(shape)
        if self.dim is not None:
            sizes[self.dim] = sizes[self.dim] * self.count if up else sizes[self.dim] // self.count
        return tuple(sizes)


@dataclass(frozen=True)
class ExpertPart:
    """Describes the part of a whole parameter that a rank has."""

    layout: Layout
    num_experts: int
    """The experts of all ranks, E."""
    ep_size: int
    """The ranks over which they are spread."""
    ep_rank: int
    """Which of them this is."""
    shard: Shard | None = None
    """Which shard of these experts this rank has; ``None``: all of each."""

    def __post_init__(self) -> None:
        if self.shard is not None and self.layout != "stacked":
            raise ValueError(f"layout = {self.layout!r}: only stacked experts can be sharded")
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout = {self.layout!r}: must be one of {', '.join(LAYOUTS)}")
        if self.ep_size < 1 or self.num_experts % self.ep_size:
            raise ValueError(f"ep_size = {self.ep_size}: must divide the {self.num_experts} experts")
        if not 0 <= self.ep_rank < self.ep_size:
            raise ValueError(f"ep_rank = {self.ep_rank}: must be between 0 and ep_size - 1 ({self.ep_size - 1})")

    @property
    def num_local(self) -> int:
        """Return the number of experts of this rank."""
        return self.num_experts // self.ep_size

    @property
    def num_parts(self) -> int:
        """Return the number of different parts: rank ``i * shards + s`` has shard s of EP rank i's experts."""
        return self.ep_size * (1 if self.shard is None else self.shard.count)

    @property
    def number(self) -> int:
        """Return the number of this part among all, by which checkpoints name it."""
        return self.ep_rank if self.shard is None else self.ep_rank * self.shard.count + self.shard.index

    @property
    def experts(self) -> range:
        """Return the experts of this rank."""
        return range(self.ep_rank * self.num_local, (self.ep_rank + 1) * self.num_local)

    def part_shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of this rank's part of a parameter.

        Raises:
            ValueError: the shape has not E experts.
        """
        dim = self._dim_of(whole, self.num_experts)
        mine = (*whole[:dim], whole[dim] // self.ep_size, *whole[dim + 1 :])
        return mine if self.shard is None else self.shard.scaled(mine, up=False)

    def whole_shape(self, part: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a whole parameter from that of a part.

        Raises:
            ValueError: the shape has not the number of this rank's experts.
        """
        dim = self._dim_of(part, self.num_local)
        whole = (*part[:dim], part[dim] * self.ep_size, *part[dim + 1 :])
        return whole if self.shard is None else self.shard.scaled(whole, up=True)

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a whole parameter; for ``"stacked"`` ones without shards, a view.

        Raises:
            ValueError: the tensor has not E experts.
        """
        dim = self._dim_of(whole.shape, self.num_experts)
        if self.layout == "stacked":
            size = whole.shape[dim] // self.ep_size
            mine = whole[self.ep_rank * size : (self.ep_rank + 1) * size]
            return mine if self.shard is None else self.shard.take(mine)
        mine = slice(self.experts.start, self.experts.stop)
        return whole.unflatten(dim, (-1, self.num_experts))[..., mine].flatten(dim)

    def join(self, parts: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return the whole parameter, in new memory.

        Args:
            parts: the parts of the ranks, in the order of ``ep_rank``, and for each of these shard by shard.

        Raises:
            ValueError: there are too few or too many parts, or one lacks experts of its rank.
        """
        parts = list(parts)
        if len(parts) != self.num_parts:
            raise ValueError(f"{len(parts)} parts: must be one for each rank ({self.num_parts})")
        for each in parts:
            self._dim_of(each.shape, self.num_local)
        if self.shard is not None:
            count = self.shard.count
            parts = [self.shard.join(parts[at : at + count]) for at in range(0, len(parts), count)]
        if self.layout == "stacked":
            return torch.cat(parts)
        return torch.cat([each.unflatten(1, (-1, self.num_local)) for each in parts], dim=2).flatten(1)

    def in_order(self, whole: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
        """Return a whole parameter, whose experts are placed elsewhere, in the model's own order, in new memory.

        Args:
            whole: the result of :meth:`join`.
            places: [E]: the place of each expert in it.
        """
        dim = LAYOUTS.index(self.layout)
        sizes = (self.num_experts, -1) if self.layout == "stacked" else (-1, self.num_experts)
        chosen = torch.tensor(places, device=whole.device)
        return whole.unflatten(dim, sizes).index_select(2 * dim, chosen).flatten(dim, dim + 1)

    def all_of_it(self) -> ExpertPart:
        """Return the description of the whole parameter, as one rank alone would have it."""
        return replace(self, ep_size=1, ep_rank=0, shard=None)

    def _dim_of(self, shape: Sequence[int], num_experts: int) -> int:
        dim = LAYOUTS.index(self.layout)
        if len(shape) <= dim or shape[dim] % num_experts:
            raise ValueError(f"shape {list(shape)}: dimension {dim} must be a multiple of {num_experts} experts")
        return dim


def of_one_expert(cut: ShardDim, index: int, count: int) -> ExpertPart:
    """Describe one of ``count`` shards of an expert with a file of its own, whose parameter is seen as [1, ...]."""
    is_whole = cut == "whole" or count == 1
    shard = None if is_whole else Shard(count, index, None if cut == "first" else int(cut) + 1)
    return ExpertPart("stacked", 1, 1, 0, shard)


def part_of(parameter: torch.Tensor) -> ExpertPart | None:
    """Return the part of the whole that a parameter is; ``None`` if it is not one of experts of a Hugging Face
    model."""
    return getattr(parameter, _ATTRIBUTE, None)


def describe_as(parameter: torch.Tensor, part: ExpertPart) -> None:
    """Mark a parameter with its part of the whole."""
    setattr(parameter, _ATTRIBUTE, part)


def parts_in(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, ExpertPart]]:
    """Return (name, parameter, part) of every expert parameter in a module, in its order of parameters."""
    for name, parameter in module.named_parameters():
        if (part := part_of(parameter)) is not None:
            yield name, parameter, part


def part_name(name: str, number: int) -> str:
    """Return the name under which a checkpoint has one part of a parameter."""
    return f"{name}{_SIGN}{number}"


def whole_name(name: str) -> str:
    """Return the whole parameter's name for a part's name; another name is returned as it is."""
    found = _NAME.match(name)
    return name if found is None else found["name"]


def part_number(name: str) -> int | None:
    """Return the number of the part in a name; ``None`` for a name without parts."""
    found = _NAME.match(name)
    return None if found is None else int(found["number"])


def parts_file(number: int, stage: int = 0) -> str:
    """Return the name of the file with one part of all expert parameters of a stage."""
    return f"experts_{number:05d}_mp_rank_{stage:02d}_model_states.pt"
