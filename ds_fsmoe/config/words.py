# SPDX-License-Identifier: Apache-2.0
"""Finds the names by which a user wrote the fields of the ``"fsmoe"`` block, and the right place of unknown keys.

``reading.py`` and the entry points call it. Some fields have two words, one of the research field and an older one of
this project. Some blocks may be written as one value. Messages are made with either word; users read the paths that
they wrote.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from ds_fsmoe.config.blocks import FSMoEBlock, alone_in
from ds_fsmoe.shapes import known_keys, old_values, shape_in, shown, words_for

BLOCK = "fsmoe"


@dataclass
class Words:
    """Holds the words of one block, see :func:`words_of`."""

    paths: dict[str, str] = field(default_factory=dict)
    """Path of a field by any of its words -> the path that the user wrote, or would write today."""
    old: list[str] = field(default_factory=list)
    """A sentence for each older word, or older name of a value, that was used."""
    twice: dict[str, str] = field(default_factory=dict)
    """Path, by its older word, of each field that was written by both of its words -> a sentence about it."""
    normalized: Any = None
    """The block by today's words and values, and without what means nothing any more."""

    def as_written(self, text: str) -> str:
        """Return a text with its paths in the user's form."""
        return re.sub(rf"\b{BLOCK}(?:\.\w+)+", lambda path: self._written(path[0]), text)

    def _written(self, path: str) -> str:
        """Return a path in the user's form; an unknown one continues that of its parent."""
        parent, _, name = path.rpartition(".")
        return self.paths.get(path) or (f"{self._written(parent)}.{name}" if parent else name)

    @contextmanager
    def in_errors(self) -> Iterator[None]:
        """Return a context whose errors have the paths in the user's form."""
        try:
            yield
        except (ValueError, RuntimeError) as error:
            error.args = tuple(self.as_written(each) if isinstance(each, str) else each for each in error.args)
            raise


def words_of(written: Any) -> Words:
    """Return the words of a block in a config; any value is accepted, also a wrong one."""
    found = Words()
    found.normalized = _collect_words(found, FSMoEBlock, written, [BLOCK], BLOCK)
    if isinstance(written, Mapping) and "solver" in written:
        # Numbers of chunks are chosen by simulating all of them.
        found.old.append(f"{BLOCK}.solver = {shown(found.normalized.pop('solver'))} has no effect any more: remove it")
    if isinstance(written, Mapping) and re.search(r"'ds_fsmoe\.([\w.]+\.)?BFloat16Wire'", str(written.get("hooks"))):
        found.old.append(f"{BLOCK}.hooks: BFloat16Wire is now called BFloat16Communication; both work")
    return found


def _collect_words(found: Words, block: type[BaseModel], written: Any, paths: list[str], path: str) -> Any:
    """Add the words of the value ``written`` at ``path`` to ``found``; return it with today's words and values.

    ``paths`` are the other names of ``path``.
    """
    values = written if isinstance(written, Mapping) else {}
    once = dict(values)
    for name, each in block.model_fields.items():
        words = words_for(name, each)
        used = [word for word in words if word in values] or [words[0]]
        here, value = f"{path}.{used[0]}", values.get(used[0])
        if len(used) > 1:
            both = " and ".join(f"{path}.{word} = {shown(values[word])}" for word in used)
            older = f"{path}.{used[1]}"
            found.twice[older] = f"{both}: must be one of the two, which are names of the same key; remove {older}"
            del once[used[1]]
        if used[0] != words[0]:
            found.old.append(f"{here} is now called {path}.{words[0]}; both work")
        today = old_values(each).get(value) if isinstance(value, str) else None
        if today is not None:
            found.old.append(f"{here} = {shown(value)} is now called {shown(today)}; both work")
            once[used[0]] = today
        names = [f"{parent}.{word}" for parent in paths for word in words]
        found.paths.update(dict.fromkeys(names, here))
        if inner := shape_in(each):
            inner_once = _collect_words(found, inner, value, names, here)
            if used[0] in values:
                once[used[0]] = inner_once
                alone = () if isinstance(value, Mapping) else alone_in(each)
                found.paths.update({f"{parent}.{name}": here for parent in names for name in alone})
    if not isinstance(written, Mapping):
        return written
    first = {word: words[0] for words in known_keys(block) for word in words}
    return {first.get(word, word): value for word, value in once.items()}


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
    **dict.fromkeys(("enable_dbo", "enable_two_batch_overlap"), f"write it as {BLOCK}.two_batch_overlap"),
    "moe_comm_dtype": f"write it as {BLOCK}.comm_dtype",
    "communication_data_type": f"write it as {BLOCK}.comm_dtype for rows in the all-to-alls; for gradients it is "
    f"DeepSpeed's key beside {BLOCK}",
    "dropless": f'write it as {BLOCK}.gate = {{"drop_tokens": false}}',
    "padded": f'write it as {BLOCK}.dispatch = "padded"',
    "autotuning": f"write it as {BLOCK}.autotune, which chooses how layers run. DeepSpeed's autotuning, which "
    f"searches batch sizes and ZeRO settings, is a key beside {BLOCK}",
}


def elsewhere(path: str) -> str | None:
    """Return the right place for a well-known option that belongs elsewhere."""
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
