# SPDX-License-Identifier: Apache-2.0
"""Parses names of parameters and files of a checkpoint: expert, shard, pipeline stage; and other programs' names.

Saving, loading and ``convert`` call it. DeepSpeed numbers experts by the ranks of an expert-parallel group. If experts
are split into ``esp`` shards, it receives a group of ``ep * esp`` ranks. Its numbers then run over shards, so no shard
overwrites another. Number ``n`` is on rank ``n // (E / ep)`` of that group; consecutive ranks there have shards of the
same experts.

It writes the number of the stage in the place of a tensor-parallel rank's (``mp_rank_01``), also in the names of
experts' files. So no stage overwrites another. A stage with MoE layers has its other weights in one file. A stage
without has a file for each of its layers, in which names begin at the layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import StrictStr

from ds_fsmoe.shapes import Counted

ShardDim = Literal[0, 1, "first", "whole"]
"""How an expert's parameter is cut: along a dimension; whole in the first shard and zero in the others; not at all."""

EXPERTS = ".deepspeed_moe.experts.deepspeed_experts."
_NAME = re.compile(rf"^(?P<layer>.*){re.escape(EXPERTS)}(?P<number>[0-9]{{1,9}})\.(?P<parameter>.+)$")
_FILE = re.compile(
    r"^layer_(?P<layer>[0-9]{1,9})_expert_(?P<number>[0-9]{1,9})_mp_rank_(?P<stage>[0-9]{1,9})_model_states\.pt$"
)

_STAGE = re.compile(r"(?:^|_)mp_rank_(?P<stage>[0-9]{1,9})_")


@dataclass(frozen=True)
class ExpertName:
    """Represents the name of an expert's parameter in a checkpoint."""

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
    """Represents the parts of the name of an expert's file."""

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
    """Maps the experts and shards of one layer in one layout to numbers.

    Attributes:
        num_experts: the number of experts E.
        ep: the number of ranks that the experts are spread over.
        esp: the number of shards of an expert.
    """

    num_experts: int
    ep: int
    esp: int

    def meant(self, number: int) -> tuple[int, int]:
        """Return the expert and the shard of a number, both from 0."""
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
    """Describes one stage of a pipeline."""

    first: Counted
    """The number of its first layer in the pipeline."""
    end: Counted
    """The number of the layer after its last."""
    files: Mapping[StrictStr, StrictStr] = field(default_factory=dict)
    """Maps the file of a layer -> the path of its module in the model; empty for a stage with one file."""

    def __post_init__(self) -> None:
        if self.first > self.end:
            raise ValueError(
                f"stage: first = {self.first!r}, end = {self.end!r}: must be whole numbers, 0 <= first <= end"
            )
        for file, path in self.files.items():
            if not path or Path(file).name != file:
                raise ValueError(f"a layer {path!r} in {file!r}")

    @property
    def layers(self) -> str:
        """Return its layers, in words."""
        return f"layers {self.first} to {self.end - 1}" if self.end > self.first else "no layers"


def main_file(stage: int) -> str:
    """Return DeepSpeed's name for the file of a stage's parameters other than experts; 0 without stages."""
    return f"mp_rank_{stage:02d}_model_states.pt"


def stage_of_file(name: str) -> int:
    """Return the stage of a file; 0 for a name without a stage."""
    found = _STAGE.search(name)
    return 0 if found is None else int(found["stage"])


# ---- Translates names of parameters between DeepSpeed's MoE layers, or AutoEP's, and Hugging Face's, expert by expert
#
# ::
#
#     <layer>.deepspeed_moe.gate.wg.weight                             <layer>.gate.weight
#     <layer>.deepspeed_moe.gate.<other>                               <layer>.gate.<other>
#     <layer>.deepspeed_moe.experts.deepspeed_experts.3.w1.weight      <layer>.experts.3.w1.weight
#
# All other names are the model's own and stay. Where a model uses other names, regular expressions rename them.
#
# DeepSpeed's AutoEP puts a layer of its own in the place of an MoE block. Each expert has a file, with ``w1`` (gate),
# ``w3`` (value) and ``w2`` (down); the router is ``router.gate``, and once more under the name that the block had for
# it.


_GATE = re.compile(r"^(?P<layer>.*)\.deepspeed_moe\.gate\.(?P<rest>.+)$")
_THEIR_EXPERT = re.compile(r"^(?P<layer>.*)\.experts\.(?P<number>[0-9]{1,9})\.(?P<parameter>.+)$")
_ROUTER = "wg.weight"
AUTO_EP_LAYERS = "ds_autoep_layers"
"""Where AutoEP's file of weights describes its layers."""
_AUTO_ROUTER, _AUTO_GATE = "router.", "gate."

Rename = tuple[re.Pattern[str], str]


def read_rename(text: str) -> Rename:
    """Parse ``PATTERN=REPLACEMENT``, in the form of :func:`re.sub`.

    Raises:
        ValueError: the text has another form.
    """
    pattern, sign, replacement = text.partition("=")
    if not sign or not pattern:
        raise ValueError(f"--rename {text!r}: must be PATTERN=REPLACEMENT, for example mlp=block_sparse_moe")
    try:
        return re.compile(pattern), replacement
    except re.error as error:
        raise ValueError(f"--rename {text!r}: {pattern!r} is not a regular expression: {error}") from error


def renamed(name: str, renames: Sequence[Rename]) -> str:
    """Return a name after all renames, applied in order.

    Raises:
        ValueError: a replacement names a group that its pattern lacks.
    """
    for pattern, replacement in renames:
        try:
            name = pattern.sub(replacement, name)
        except (re.error, IndexError) as error:
            raise ValueError(f"--rename {pattern.pattern}={replacement}: {error}") from error
    return name


def to_huggingface(name: str) -> str:
    """Return a name in the form of Mixtral's checkpoints."""
    expert = expert_name(name)
    if expert is not None:
        return f"{expert.layer}.experts.{expert.number}.{expert.parameter}"
    gate = _GATE.match(name)
    if gate is None:
        return name
    return f"{gate['layer']}.gate.{'weight' if gate['rest'] == _ROUTER else gate['rest']}"


def from_huggingface(names: Iterable[str]) -> dict[str, str]:
    """Return Hugging Face name -> DeepSpeed's name; names that are DeepSpeed's already stay."""
    names = list(names)
    theirs = {name: _THEIR_EXPERT.match(name) for name in names if expert_name(name) is None}
    layers = {found["layer"] for found in theirs.values() if found is not None}
    result = {}
    for name in names:
        found = theirs.get(name)
        layer, gate, rest = name.rpartition(".gate.") if found is None else ("", "", "")
        if found is not None:
            result[name] = str(ExpertName(found["layer"], int(found["number"]), found["parameter"]))
        elif gate and layer in layers:
            result[name] = f"{layer}.deepspeed_moe.gate.{_ROUTER if rest == 'weight' else rest}"
        else:
            result[name] = name
    return result


@dataclass(frozen=True)
class AutoEPExperts:
    """Represents a parameter of all experts of a layer, of which AutoEP has saved each expert's matrices in a file."""

    layer: int
    """The running number of the MoE layer."""
    num_experts: int
    prefix: str
    """The prefix of the names of its matrices."""
    matrices: tuple[str, ...]
    """Those that make up an expert's part of the parameter, one behind the other."""

    def keys(self, number: int) -> list[str]:
        """Return the names of its matrices in the file of an expert."""
        return [f"{self.prefix}.{each}.{number}" for each in self.matrices]


def names_of_auto_ep(main: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, AutoEPExperts]]:
    """Return the names that the Hugging Face model has for the parameters that AutoEP saved.

    Args:
        main: the content of the file of weights.

    Returns:
        Name -> name in that file, for parameters outside of experts; name -> location, for those of experts.
    """
    stacked, names = {}, {name: name for name in main["module"]}
    for layer in main[AUTO_EP_LAYERS]:
        prefix = str(layer["expert_key_prefix"])
        sizes = int(layer["moe_layer_id"]), int(layer["num_experts"]), prefix
        stacked[f"{prefix}.gate_up_proj"] = AutoEPExperts(*sizes, ("w1", "w3"))
        stacked[f"{prefix}.down_proj"] = AutoEPExperts(*sizes, ("w2",))
        _rename_router(names, f"{layer['module_path']}.")
    return names, stacked


def _rename_router(names: dict[str, str], path: str) -> None:
    """Rename the parameters around the experts of a layer to the model's names."""
    inner = {name.removeprefix(path): name for name in names if name.startswith(path)}
    # The same router by its own name, "gate" for example.
    aliases = {
        name.partition(".")[0] for name in inner if f".{_AUTO_GATE}" in name and not name.startswith(_AUTO_ROUTER)
    }
    for short, name in inner.items():
        first, _, rest = short.partition(".")
        is_alias = first in aliases and not short.startswith(_AUTO_ROUTER)
        if short.startswith(_AUTO_ROUTER) or is_alias:
            del names[name]
        if is_alias or (short.startswith(_AUTO_ROUTER) and not aliases):
            names[f"{path}{first}.{rest.removeprefix(_AUTO_GATE)}"] = name
