# SPDX-License-Identifier: Apache-2.0
"""Which expert, and which shard of it, a name or a file of a checkpoint means.

DeepSpeed numbers experts by the ranks of an expert-parallel group. Where experts are cut into ``esp`` shards it is
told of a group of ``ep * esp`` ranks, so that its numbers run over shards: no shard is written over another. Number
``n`` is on rank ``n // (E / ep)`` of that group; neighbours there hold shards of the same experts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

Cut = Literal[0, 1, "first", "whole"]
"""How a parameter of an expert is cut: along a dimension; whole in the first shard and zero in the others; not."""
CUTS: tuple[Cut, ...] = (0, 1, "first", "whole")

EXPERTS = ".deepspeed_moe.experts.deepspeed_experts."
_NAME = re.compile(rf"^(?P<layer>.*){re.escape(EXPERTS)}(?P<number>[0-9]{{1,9}})\.(?P<parameter>.+)$")
_FILE = re.compile(
    r"^layer_(?P<layer>[0-9]{1,9})_expert_(?P<number>[0-9]{1,9})_mp_rank_(?P<mp>[0-9]{1,9})_model_states\.pt$"
)


@dataclass(frozen=True)
class ExpertName:
    """Of a parameter of an expert, as a checkpoint has it."""

    layer: str
    """Path of the MoE layer."""
    number: int
    parameter: str
    """As the expert itself names it."""

    def __str__(self) -> str:
        return f"{self.layer}{EXPERTS}{self.number}.{self.parameter}"


def expert_name(name: str) -> ExpertName | None:
    """``None`` for what is not an expert's."""
    found = _NAME.match(name)
    return None if found is None else ExpertName(found["layer"], int(found["number"]), found["parameter"])


def expert_file(name: str) -> tuple[int, int] | None:
    """Running number of the layer and number of the expert, of a file; ``None`` for another file."""
    found = _FILE.match(name)
    return None if found is None else (int(found["layer"]), int(found["number"]))


@dataclass(frozen=True)
class Numbering:
    """Of one layer in one layout.

    Attributes:
        num_experts: E.
        ep: ranks that the experts are spread over.
        esp: shards of an expert.
    """

    num_experts: int
    ep: int
    esp: int

    def meant(self, number: int) -> tuple[int, int]:
        """Expert and shard, both from 0."""
        local = self.num_experts // self.ep
        rank, of_rank = divmod(number, local)
        return rank // self.esp * local + of_rank, rank % self.esp

    def number(self, expert: int, shard: int) -> int:
        """The other way round."""
        local = self.num_experts // self.ep
        rank, of_rank = divmod(expert, local)
        return (rank * self.esp + shard) * local + of_rank


def join(shards: Sequence[torch.Tensor], cut: Cut) -> torch.Tensor:
    """The whole parameter, of all its shards in order."""
    if len(shards) == 1 or cut in ("first", "whole"):
        return shards[0]
    return torch.cat(tuple(shards), dim=int(cut))


def cut_out(whole: torch.Tensor, cut: Cut, shard: int, count: int) -> torch.Tensor:
    """One of ``count`` shards of a whole parameter.

    Raises:
        ValueError: they are not of equal width.
    """
    if count == 1 or cut == "whole":
        return whole
    if cut == "first":
        return torch.zeros_like(whole) if shard else whole
    width, rest = divmod(whole.shape[cut], count)
    if rest:
        raise ValueError(f"{whole.shape[cut]} elements are not cut into {count} shards")
    return whole.narrow(cut, shard * width, width)
