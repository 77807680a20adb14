# SPDX-License-Identifier: Apache-2.0
"""Translates names of parameters between DeepSpeed's MoE layers, or AutoEP's, and Hugging Face's, expert by expert.

::

    <layer>.deepspeed_moe.gate.wg.weight                             <layer>.gate.weight
    <layer>.deepspeed_moe.gate.<other>                               <layer>.gate.<other>
    <layer>.deepspeed_moe.experts.deepspeed_experts.3.w1.weight      <layer>.experts.3.w1.weight

All other names are the model's own and stay. Where a model uses other names, regular expressions rename them.

DeepSpeed's AutoEP puts a layer of its own in the place of an MoE block. Each expert has a file, with ``w1`` (gate),
``w3`` (value) and ``w2`` (down); the router is ``router.gate``, and once more under the name that the block had for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ds_fsmoe.checkpoint_files.numbering import ExpertName, expert_name

_GATE = re.compile(r"^(?P<layer>.*)\.deepspeed_moe\.gate\.(?P<rest>.+)$")
_THEIR_EXPERT = re.compile(r"^(?P<layer>.*)\.experts\.(?P<number>[0-9]{1,9})\.(?P<parameter>.+)$")
_ROUTER = "wg.weight"
AUTO_EP_LAYERS = "ds_autoep_layers"
"""Where AutoEP's file of weights describes its layers."""
_AUTO_ROUTER, _AUTO_GATE = "router.", "gate."

Rename = tuple[re.Pattern[str], str]


def read_rename(text: str) -> Rename:
    """Parse ``PATTERN=REPLACEMENT``, as :func:`re.sub` takes them.

    Raises:
        ValueError: the text has another form.
    """
    pattern, sign, replacement = text.partition("=")
    if not sign or not pattern:
        raise ValueError(f"--rename {text!r}: must be PATTERN=REPLACEMENT, for example mlp=block_sparse_moe")
    try:
        return re.compile(pattern), replacement
    except re.error as error:
        raise ValueError(f"--rename {text!r}: {pattern!r} is no regular expression: {error}") from error


def renamed(name: str, renames: Sequence[Rename]) -> str:
    """Return a name after all renames, applied in order.

    Raises:
        ValueError: a replacement names a group that its pattern does not have.
    """
    for pattern, replacement in renames:
        try:
            name = pattern.sub(replacement, name)
        except (re.error, IndexError) as error:
            raise ValueError(f"--rename {pattern.pattern}={replacement}: {error}") from error
    return name


def to_huggingface(name: str) -> str:
    """Return a name as Mixtral's checkpoints have it."""
    expert = expert_name(name)
    if expert is not None:
        return f"{expert.layer}.experts.{expert.number}.{expert.parameter}"
    gate = _GATE.match(name)
    if gate is None:
        return name
    return f"{gate['layer']}.gate.{'weight' if gate['rest'] == _ROUTER else gate['rest']}"


def from_huggingface(names: Iterable[str]) -> dict[str, str]:
    """Map each Hugging Face name -> DeepSpeed's name; names that are DeepSpeed's already stay."""
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


class AutoEPNames:
    """Reads the weights of a checkpoint that AutoEP has saved, under the names of the Hugging Face model.

    Args:
        main: what the file of weights holds.
        expert: returns what the file of an expert holds, by the number of its layer and its own.
    """

    def __init__(self, main: Mapping[str, Any], expert: Callable[[int, int], Mapping[str, torch.Tensor]]) -> None:
        self._weights: Mapping[str, torch.Tensor] = main["module"]
        self._expert = expert
        self._stacked: dict[str, tuple[Mapping[str, Any], tuple[str, ...]]] = {}
        self._renamed = {name: name for name in self._weights}
        for layer in main[AUTO_EP_LAYERS]:
            prefix = str(layer["expert_key_prefix"])
            self._stacked[f"{prefix}.gate_up_proj"] = layer, ("w1", "w3")
            self._stacked[f"{prefix}.down_proj"] = layer, ("w2",)
            self._rename(f"{layer['module_path']}.")

    def _rename(self, path: str) -> None:
        """Give what is around the experts of a layer the names that the model has for it."""
        inner = {name.removeprefix(path): name for name in self._renamed if name.startswith(path)}
        # The same router by its own name, "gate" for example.
        aliases = {
            name.partition(".")[0] for name in inner if f".{_AUTO_GATE}" in name and not name.startswith(_AUTO_ROUTER)
        }
        for short, name in inner.items():
            first, _, rest = short.partition(".")
            if aliases and short.startswith(_AUTO_ROUTER):
                del self._renamed[name]
            elif first in aliases or short.startswith(_AUTO_ROUTER):
                del self._renamed[name]
                self._renamed[f"{path}{first}.{rest.removeprefix(_AUTO_GATE)}"] = name

    def __iter__(self) -> Iterator[str]:
        yield from self._renamed
        yield from self._stacked

    def num_experts(self) -> dict[str, int]:
        """Return name -> number of experts, of every parameter of experts."""
        return {name: int(layer["num_experts"]) for name, (layer, _) in self._stacked.items()}

    def weights(self, name: str, number: int | None = None) -> torch.Tensor:
        """Return a parameter, or buffer, of the model.

        Args:
            name: its name in the model.
            number: that of an expert, of whose weights alone a tensor [1, ...] is returned.

        Raises:
            KeyError: there is no such parameter.
        """
        if number is None:
            return self._weights[self._renamed[name]]
        layer, kinds = self._stacked[name]
        prefix, file = layer["expert_key_prefix"], self._expert(int(layer["moe_layer_id"]), number)
        return torch.cat([file[f"{prefix}.{kind}.{number}"] for kind in kinds]).unsqueeze(0)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the whole shape of a parameter, without making it."""
        if name not in self._stacked:
            return tuple(self._weights[self._renamed[name]].shape)
        layer, kinds = self._stacked[name]
        prefix, file = layer["expert_key_prefix"], self._expert(int(layer["moe_layer_id"]), 0)
        matrices = [file[f"{prefix}.{kind}.0"] for kind in kinds]
        return int(layer["num_experts"]), sum(each.shape[0] for each in matrices), *matrices[0].shape[1:]
