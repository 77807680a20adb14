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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class AutoEPExperts:
    """A parameter of all experts of a layer, of which AutoEP has saved each expert's matrices in a file."""

    layer: int
    """The running number of the MoE layer."""
    num_experts: int
    prefix: str
    """The prefix of the names of its matrices."""
    matrices: tuple[str, ...]
    """Those that make up an expert's part of the parameter, one behind the other."""

    def keys(self, number: int) -> list[str]:
        """Return the names that the file of an expert has for its matrices."""
        return [f"{self.prefix}.{each}.{number}" for each in self.matrices]


def names_of_auto_ep(main: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, AutoEPExperts]]:
    """Return the names that the Hugging Face model has for what AutoEP has saved.

    Args:
        main: what the file of weights holds.

    Returns:
        Name -> the name in that file, of what no expert has; name -> where it is, of the parameters of experts.
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
    """Give what is around the experts of a layer the names that the model has for it."""
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
