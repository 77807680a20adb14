# SPDX-License-Identifier: Apache-2.0
"""Loads models by their usual names: Hugging Face's configurations, and the three models of the FSMoE paper.
``ds_fsmoe plan`` calls it.

The paper's models exist as whole models, and as in the paper's figures 6 to 8: a number of equal layers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ds_fsmoe.offline.models.architecture import Architecture, Attention, BlockExperts, ModelBlock
from ds_fsmoe.offline.models.hf_config import read_hf_config
from ds_fsmoe.planning.workload import Shape
from ds_fsmoe.untrusted import suggested

DEFAULT_EXPERTS = 8
"""The number of experts of a model that does not state it."""


@dataclass(frozen=True)
class PlannedModel:
    """Holds the planned model and the assumptions about it."""

    shape: Shape
    """A layer; of an architecture, the one that most of its blocks with experts have."""
    num_layers: int
    architecture: Architecture | None = None
    """The model block by block; ``None``: all layers are alike, and there is nothing else."""
    taken: Mapping[str, object] = field(default_factory=dict)
    """Argument that was not given -> what was taken."""
    notes: tuple[str, ...] = ()
    """Why it was taken, and what is unusual."""

    @property
    def num_experts(self) -> int:
        """Return the number of experts that the EP size has to divide."""
        return self.shape.E if self.architecture is None else self.architecture.num_experts


# Samples and length are the paper's for its testbed A (its section 6.4); they are meant to be replaced. So are the
# experts of GPT2-XL, which has none of its own; the paper has as many as nodes.
MODELS: dict[str, PlannedModel] = {
    "gpt2-xl": PlannedModel(Shape(1, 1024, 1600, 6400, DEFAULT_EXPERTS, 2, 1.2, "gpt", 25), 48),
    "mixtral-7b": PlannedModel(Shape(1, 1024, 4096, 14336, 8, 2, 1.2, "mixtral", 32, 8), 32),
    "mixtral-22b": PlannedModel(Shape(1, 1024, 6144, 16384, 8, 2, 1.2, "mixtral", 48, 8), 56),
}


_FOLDER = Path(__file__).parent / "configs"
PAPER = tuple(MODELS)
"""The models of the paper's section 6.4, which drop tokens."""
_PAPERS_FACTOR = 1.2


def model_names() -> tuple[str, ...]:
    """Return the names of all models in the package."""
    return (*(each.stem for each in sorted(_FOLDER.glob("*.json"))), *PAPER)


def load_model(name_or_path: str) -> Architecture:
    """Return a model by its name, or from a ``config.json`` or its folder.

    Raises:
        ValueError: the name or file is unknown, or :func:`~ds_fsmoe.offline.models.hf_config.read_hf_config` refuses
            it.
    """
    if name_or_path in PAPER:
        return _of_paper(name_or_path)
    known = model_names()
    if name_or_path in known:
        path = _FOLDER / f"{name_or_path}.json"
        source = json.loads(path.read_text(encoding="utf-8"))["_source"]
        return replace(read_hf_config(path, name_or_path), source=source)
    if Path(name_or_path).exists():
        return read_hf_config(name_or_path)
    near = [each for each in known if each.startswith(name_or_path.lower())]
    hint = f"did you mean {' or '.join(map(repr, near))}?"
    if not near or not name_or_path:
        hint = suggested(name_or_path, known, f"the choices are {', '.join(known)}, or the path of a config.json")
    raise ValueError(f"no model or file {name_or_path!r}: {hint}")


def _of_paper(name: str) -> Architecture:
    """Return a whole model of the paper, with the embeddings that the paper's numbers leave out."""
    source = "FSMoE, ASPLOS'25, section 6.4, with a capacity factor of 1.2"
    if name == "gpt2-xl":
        # Experts instead of its dense layers, as many as the paper's testbed B has nodes.
        M, heads, length = 1600, 25, 1024
        attention = Attention(heads, heads, M // heads, M // heads, num_other=4 * M)
        experts = BlockExperts(DEFAULT_EXPERTS, 2, 4 * M, gemms=2, has_bias=True, capacity_factor=_PAPERS_FACTOR)
        gpt_blocks = (ModelBlock(attention, experts, num_norms=4 * M),) * 48
        num_other = length * M + 2 * M
        return Architecture(name, source, M, 50257, True, length, gpt_blocks, num_other=num_other, dtype="fp32")
    whole = load_model({"mixtral-7b": "mixtral-8x7b", "mixtral-22b": "mixtral-8x22b"}[name])
    return replace(whole.with_experts(capacity_factor=_PAPERS_FACTOR), name=name, source=source, dtype="fp32")
