# SPDX-License-Identifier: Apache-2.0
"""Translates names of parameters between DeepSpeed's MoE layers and Hugging Face's Mixtral, expert by expert.

::

    <layer>.deepspeed_moe.gate.wg.weight                             <layer>.gate.weight
    <layer>.deepspeed_moe.gate.<other>                               <layer>.gate.<other>
    <layer>.deepspeed_moe.experts.deepspeed_experts.3.w1.weight      <layer>.experts.3.w1.weight

All other names are the model's own and stay. Where a model uses other names, regular expressions rename them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ds_fsmoe.checkpoint_files.numbering import ExpertName, expert_name

_GATE = re.compile(r"^(?P<layer>.*)\.deepspeed_moe\.gate\.(?P<rest>.+)$")
_THEIR_EXPERT = re.compile(r"^(?P<layer>.*)\.experts\.(?P<number>[0-9]{1,9})\.(?P<parameter>.+)$")
_ROUTER = "wg.weight"

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
