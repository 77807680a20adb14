# SPDX-License-Identifier: Apache-2.0
"""Says of a key that no field of the ``"fsmoe"`` block has which one was meant, or where it belongs."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.config.fields import block_in, words_for
from ds_fsmoe.config.words import BLOCK, words_of

# What other projects, or DeepSpeed's layer, call things that are not here under that name.
_OF_THE_MODEL = "it is an argument of MoE(...), where the model is built"
_EP_SIZE = (
    "it is ep_size, an argument of MoE(...), where the model is built, or "
    f"{BLOCK}.ep_size for the experts of a Hugging Face model"
)
_ELSEWHERE = {
    **dict.fromkeys(("expert_model_parallel_size", "expert_parallel_size", "autoep_size"), _EP_SIZE),
    "num_experts": _OF_THE_MODEL,
    "hidden_size": _OF_THE_MODEL,
    "use_residual": _OF_THE_MODEL,
    "topk": f"write it as {BLOCK}.gate.top_k",
    "moe_router_topk": f"write it as {BLOCK}.gate.top_k",
    "num_experts_per_tok": f"write it as {BLOCK}.gate.top_k",
    "moe_expert_capacity_factor": f"write it as {BLOCK}.gate.capacity_factor",
    **dict.fromkeys(("degree", "chunks", "a2a_ffn_overlap_degree"), f"write it as {BLOCK}.num_chunks"),
    "autotuning": f"write it as {BLOCK}.autotune; DeepSpeed's own autotuning stands beside {BLOCK}, not in it, and "
    f"looks for batch sizes and ZeRO settings in jobs of its own, while {BLOCK}.autotune chooses how layers are run",
}


def unknown_key(path: str, choices: list[tuple[str, ...]], is_listed: bool = True) -> str:
    """Return a sentence with the nearest known key, or, if none is near, with all of them, once for each block.

    Args:
        path: the path of the key.
        choices: the words of each known key.
        is_listed: whether all of them may be listed.
    """
    name = path.rpartition(".")[2]
    if hint := elsewhere(path):
        return f"{path}: unknown key; {hint}"
    close = difflib.get_close_matches(name, [word for each in choices for word in each], n=1)
    if close:
        today = next(each[0] for each in choices if close[0] in each)
        return f"{path}: unknown key; did you mean {today!r}?"
    return f"{path}: unknown key" + (f"; the keys are {', '.join(each[0] for each in choices)}" if is_listed else "")


def near(value: Any, choices: Sequence[str]) -> str:
    """Return the end of a sentence about a value that is none of the choices: the nearest one, if any is near."""
    found = difflib.get_close_matches(value, choices, n=1) if isinstance(value, str) else []
    return f"; did you mean {found[0]!r}?" if found else ""


def elsewhere(path: str) -> str | None:
    """Return where to write a well-known option that belongs somewhere else."""
    parent, _, name = path.rpartition(".")
    if name in _ELSEWHERE:
        return _ELSEWHERE[name]
    # A field of another part of the block, written where it does not belong.
    places = [each for each in _PLACES.get(name, ()) if each.rpartition(".")[0] != parent]
    return f"write it as {places[0]}" if len(places) == 1 else None


_PLACES: dict[str, set[str]] = {}
"""Word of a field -> the paths, in today's words, of the fields that may be written by it."""
for _path, _place in words_of({}).paths.items():
    _PLACES.setdefault(_path.rpartition(".")[2], set()).add(_place)


def known_keys(block: type[BaseModel]) -> list[tuple[str, ...]]:
    """Return, for every field of a block, the words that it may be written by, today's first."""
    return [words_for(name, field) for name, field in block.model_fields.items()]


def block_at(location: Sequence[Any]) -> type[BaseModel]:
    """Return the block that is at a location: the words that lead to it."""
    block: type[BaseModel] = FSMoEBlock
    for word in location:
        fields = block.model_fields.items()
        block = next(inner for name, field in fields if word in words_for(name, field) and (inner := block_in(field)))
    return block


def field_at(location: Sequence[Any]) -> FieldInfo | None:
    """Return the field that is at a location, or whose list has an element there; ``None`` where there is none."""
    words = [each for each in location if not isinstance(each, int)]
    fields = block_at(words[:-1]).model_fields.items() if words else ()
    return next((field for name, field in fields if words[-1] in words_for(name, field)), None)
