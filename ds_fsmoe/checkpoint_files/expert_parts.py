# SPDX-License-Identifier: Apache-2.0
"""Says which part of a whole expert parameter a rank has: a description that every such parameter carries.

Letters: E experts of all ranks, e = E / ep those of one rank, r the rank of an adapter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

Layout = Literal["stacked", "innermost"]
"""How experts lie in a parameter. ``"stacked"``: one behind the other along the first dimension, [E * k, ...], as in
base weights (k = 1) and the A of an adapter (k = r). ``"innermost"``: [out, r * E], experts running fastest in the
second dimension, as in the B of an adapter."""
LAYOUTS: tuple[Layout, ...] = ("stacked", "innermost")
_ATTRIBUTE = "fsmoe_part"
_SIGN = "@"
_NAME = re.compile(rf"^(?P<name>.+){_SIGN}(?P<ep_rank>[0-9]{{1,9}})$")


@dataclass(frozen=True)
class ExpertPart:
    """Describes what of a whole parameter is on a rank."""

    layout: Layout
    num_experts: int
    """The experts of all ranks, E."""
    ep_size: int
    """The ranks over which they are spread."""
    ep_rank: int
    """Which of them this is."""

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout = {self.layout!r}: must be one of {', '.join(LAYOUTS)}")
        if self.ep_size < 1 or self.num_experts % self.ep_size:
            raise ValueError(f"ep_size = {self.ep_size}: must divide the {self.num_experts} experts")
        if not 0 <= self.ep_rank < self.ep_size:
            raise ValueError(f"ep_rank = {self.ep_rank}: must be between 0 and ep_size - 1 ({self.ep_size - 1})")

    @property
    def num_local(self) -> int:
        """The number of experts of this rank."""
        return self.num_experts // self.ep_size

    @property
    def experts(self) -> range:
        """The experts of this rank."""
        return range(self.ep_rank * self.num_local, (self.ep_rank + 1) * self.num_local)

    def part_shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of this rank's part of a parameter of a shape.

        Raises:
            ValueError: the shape does not hold E experts.
        """
        dim = self._dim_of(whole, self.num_experts)
        return *whole[:dim], whole[dim] // self.ep_size, *whole[dim + 1 :]

    def whole_shape(self, part: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a whole parameter from that of a part.

        Raises:
            ValueError: the shape does not hold this rank's experts.
        """
        dim = self._dim_of(part, self.num_local)
        return *part[:dim], part[dim] * self.ep_size, *part[dim + 1 :]

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a whole parameter; of ``"stacked"`` ones a view.

        Raises:
            ValueError: the tensor does not hold E experts.
        """
        dim = self._dim_of(whole.shape, self.num_experts)
        if self.layout == "stacked":
            size = whole.shape[dim] // self.ep_size
            return whole[self.ep_rank * size : (self.ep_rank + 1) * size]
        mine = slice(self.experts.start, self.experts.stop)
        return whole.unflatten(dim, (-1, self.num_experts))[..., mine].flatten(dim)

    def join(self, parts: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return the whole parameter, in new memory.

        Args:
            parts: those of the ranks, in the order of ``ep_rank``.

        Raises:
            ValueError: too few or too many of them, or one that does not hold its rank's experts.
        """
        parts = list(parts)
        if len(parts) != self.ep_size:
            raise ValueError(f"{len(parts)} parts: must be ep_size of them ({self.ep_size})")
        for each in parts:
            self._dim_of(each.shape, self.num_local)
        if self.layout == "stacked":
            return torch.cat(parts)
        return torch.cat([each.unflatten(1, (-1, self.num_local)) for each in parts], dim=2).flatten(1)

    def of_rank(self, ep_rank: int) -> ExpertPart:
        """Return the description of another rank's part of the same parameter."""
        return ExpertPart(self.layout, self.num_experts, self.ep_size, ep_rank)

    def _dim_of(self, shape: Sequence[int], num_experts: int) -> int:
        dim = LAYOUTS.index(self.layout)
        if len(shape) <= dim or shape[dim] % num_experts:
            raise ValueError(f"shape {list(shape)}: dimension {dim} must be a multiple of {num_experts} experts")
        return dim


def part_of(parameter: torch.Tensor) -> ExpertPart | None:
    """Return the part that a parameter is, ``None`` where it is not one of experts of a Hugging Face model."""
    return getattr(parameter, _ATTRIBUTE, None)


def describe_as(parameter: torch.Tensor, part: ExpertPart) -> None:
    """Let a parameter say which part of a whole it is."""
    setattr(parameter, _ATTRIBUTE, part)


def parts_in(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, ExpertPart]]:
    """Return (name, parameter, part) of every expert parameter in a module, in its order of parameters."""
    for name, parameter in module.named_parameters():
        if (part := part_of(parameter)) is not None:
            yield name, parameter, part


def part_name(name: str, ep_rank: int) -> str:
    """Return the name under which a checkpoint has one rank's part of a parameter."""
    return f"{name}{_SIGN}{ep_rank}"


def whole_name(name: str) -> str:
    """Return the name of the whole parameter, of a part's name; another name is returned as it is."""
    found = _NAME.match(name)
    return name if found is None else found["name"]


def ep_rank_of(name: str) -> int | None:
    """Return which rank's part a name means; ``None`` for the name of something that has no parts."""
    found = _NAME.match(name)
    return None if found is None else int(found["ep_rank"])


def parts_file(ep_rank: int) -> str:
    """Return the name of the file with one rank's parts of all parameters of experts."""
    return f"experts_of_ep_rank_{ep_rank:05d}_mp_rank_00_model_states.pt"
