# SPDX-License-Identifier: Apache-2.0
"""Models by their usual names: configurations as Hugging Face has them, and the three of the FSMoE paper."""

from __future__ import annotations

import difflib
import json
from dataclasses import replace
from pathlib import Path

from ds_fsmoe.offline.models.architecture import Architecture, Attention, Block, Experts
from ds_fsmoe.offline.models.hf_config import read_hf_config

_FOLDER = Path(__file__).parent / "configs"
PAPER = ("gpt2-xl", "mixtral-7b", "mixtral-22b")
"""The models of the paper's section 6.4, which drop tokens."""
_PAPERS_FACTOR = 1.2
_SAME_SIZES = {"mixtral-7b": "mixtral-8x7b", "mixtral-22b": "mixtral-8x22b"}


def names() -> tuple[str, ...]:
    """Return the names of all models that come with the package."""
    return (*(each.stem for each in sorted(_FOLDER.glob("*.json"))), *PAPER)


def load_model(name_or_path: str) -> Architecture:
    """Return a model by its name, or from a ``config.json`` or a folder that has one.

    Raises:
        ValueError: no such name or file, or whatever :func:`~ds_fsmoe.offline.models.hf_config.read_hf_config` refuses.
    """
    if name_or_path in PAPER:
        return _of_paper(name_or_path)
    if name_or_path in names():
        path = _FOLDER / f"{name_or_path}.json"
        source = json.loads(path.read_text(encoding="utf-8"))["_source"]
        return replace(read_hf_config(path, name_or_path), source=source)
    if Path(name_or_path).exists():
        return read_hf_config(name_or_path)
    near = [each for each in names() if each.startswith(name_or_path.lower())]
    near = near or difflib.get_close_matches(name_or_path, names(), 1)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near and name_or_path else ""
    raise ValueError(
        f"no model is called {name_or_path!r}, and there is no such file: {hint}the choices are {', '.join(names())}, "
        "or the path of a config.json"
    )


def _of_paper(name: str) -> Architecture:
    """Return a model of the paper, whole: with the embeddings that its numbers leave out."""
    source = "FSMoE, ASPLOS'25, section 6.4, with a capacity factor of 1.2"
    if name == "gpt2-xl":
        # Eight experts instead of its dense layers, as many as the paper's testbed B has nodes.
        M, heads, length = 1600, 25, 1024
        attention = Attention(heads, heads, M // heads, M // heads, num_other=4 * M)
        experts = Experts(8, 2, 4 * M, gemms=2, has_bias=True, capacity_factor=_PAPERS_FACTOR)
        gpt_blocks = (Block(attention, experts, num_norms=4 * M),) * 48
        num_other = length * M + 2 * M
        return Architecture(name, source, M, 50257, True, length, gpt_blocks, num_other=num_other, dtype="fp32")
    whole = load_model(_SAME_SIZES[name])
    dropping = {
        block: replace(block, experts=replace(block.experts, capacity_factor=_PAPERS_FACTOR))
        for block in whole.kinds
        if block.experts is not None
    }
    blocks = tuple(dropping.get(each, each) for each in whole.blocks)
    return replace(whole, name=name, source=source, blocks=blocks, dtype="fp32")
