# SPDX-License-Identifier: Apache-2.0
"""Tells which expert, which shard of it, and which stage of a pipeline a name or a file of a checkpoint means.

DeepSpeed numbers experts by the ranks of an expert-parallel group. Where experts are cut into ``esp`` shards it is
told of a group of ``ep * esp`` ranks, so that its numbers run over shards: no shard is written over another. Number
``n`` is on rank ``n // (E / ep)`` of that group; neighbours there hold shards of the same experts.

It writes the number of the stage where other jobs have that of a tensor-parallel rank (``mp_rank_01``), in the names of
experts' files too, so no stage writes over another. A stage with MoE layers has its other weights in one file; a stage
without has a file for each of its layers, in which names begin at the layer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import StrictStr

from ds_fsmoe.shapes import Counted

Cut = Literal[0, 1, "first", "whole"]
"""How an expert's parameter is cut: along a dimension; whole in the first shard and zero in the others; not at all."""

EXPERTS = ".deepspeed_moe.experts.deepspeed_experts."
_NAME = re.compile(rf"^(?P<layer>.*){re.escape(EXPERTS)}(?P<number>[0-9]{{1,9}})\.(?P<parameter>.+)$")
_FILE = re.compile(
    r"^layer_(?P<layer>[0-9]{1,9})_expert_(?P<number>[0-9]{1,9})_mp_rank_(?P<stage>[0-9]{1,9})_model_states\.pt$"
)

_STAGE = re.compile(r"(?:^|_)mp_rank_(?P<stage>[0-9]{1,9})_")


@dataclass(frozen=True)
class ExpertName:
    """The name of an expert's parameter, as a checkpoint has it."""

    layer: str
    """The path of the MoE layer."""
    number: int
    parameter: str
    """The name that the expert itself gives the parameter."""

    def __str__(self) -> str:
        return f"{self.layer}{EXPERTS}{self.number}.{self.parameter}"


def expert_name(name: str) -> ExpertName | None:
    """Parse a parameter's name; return ``None`` if it is not an expert's."""
    found = _NAME.match(name)
    return None if found is None else ExpertName(found["layer"], int(found["number"]), found["parameter"])


class ExpertFile(NamedTuple):
    """What the name of an expert's file says."""

    stage: int
    """The stage of the pipeline; 0 without stages."""
    layer: int
    """The running number of the MoE layer, in the stage."""
    number: int
    """The number of the expert."""

    def __str__(self) -> str:
        return f"layer_{self.layer}_expert_{self.number}_mp_rank_{self.stage:02d}_model_states.pt"


def expert_file(name: str) -> ExpertFile | None:
    """Parse the name of a file; return ``None`` if it is not an expert's."""
    found = _FILE.match(name)
    return None if found is None else ExpertFile(int(found["stage"]), int(found["layer"]), int(found["number"]))


@dataclass(frozen=True)
class Numbering:
    """The numbers of the experts and shards of one layer in one layout.

    Attributes:
        num_experts: the number of experts E.
        ep: the number of ranks that the experts are spread over.
        esp: the number of shards of an expert.
    """

    num_experts: int
    ep: int
    esp: int

    def meant(self, number: int) -> tuple[int, int]:
        """Return the expert and the shard that a number means, both from 0."""
        local = self.num_experts // self.ep
        rank, of_rank = divmod(number, local)
        return rank // self.esp * local + of_rank, rank % self.esp

    def number(self, expert: int, shard: int) -> int:
        """Return the number of an expert's shard; the inverse of :meth:`meant`."""
        local = self.num_experts // self.ep
        rank, of_rank = divmod(expert, local)
        return (rank * self.esp + shard) * local + of_rank


@dataclass(frozen=True)
class StageOfLayers:
    """One stage of a pipeline."""

    first: Counted
    """The number of its first layer in the pipeline."""
    end: Counted
    """The number of the layer after its last."""
    files: Mapping[StrictStr, StrictStr] = field(default_factory=dict)
    """Maps the file of a layer -> the path of its module in the model; empty for a stage with one file."""

    def __post_init__(self) -> None:
        if self.first > self.end:
            raise ValueError(f"layers {self.first!r} to {self.end!r} of a stage")
        for file, path in self.files.items():
            if not path or Path(file).name != file:
                raise ValueError(f"a layer {path!r} in {file!r}")

    @property
    def layers(self) -> str:
        """Its layers, in words."""
        return f"layers {self.first} to {self.end - 1}" if self.end > self.first else "no layers"


def main_file(stage: int) -> str:
    """Return DeepSpeed's name for the file with what a stage has beside its experts; 0 without stages."""
    return f"mp_rank_{stage:02d}_model_states.pt"


def stage_of_file(name: str) -> int:
    """Return the stage that a file belongs to; 0 for a file whose name does not say so."""
    found = _STAGE.search(name)
    return 0 if found is None else int(found["stage"])
