# SPDX-License-Identifier: Apache-2.0
"""Reads the architecture of a model from the ``config.json`` of Hugging Face's transformers. ``ds_fsmoe plan`` calls
it; ``hf_families.py`` has the fields of each family.

Only the file is needed. Missing fields get the defaults of transformers for the model's family.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_fsmoe.offline.models.architecture import Architecture, ModelBlock
from ds_fsmoe.offline.models.hf_families import DENSE, FAMILIES, UNREAD, Family, Fields
from ds_fsmoe.untrusted import MOST_LAYERS, read_json, suggested

CONFIG = "config.json"
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_FAMILY_OF = {name: family for key, family in FAMILIES.items() for name in (key, *family.also)}


def read_hf_config(
    source: str | Path | Mapping[str, Any], name: str | None = None, declared_by: str | None = None
) -> Architecture:
    """Read a model's architecture.

    Args:
        source: a ``config.json``, a folder that has one, or the content of such a file.
        name: the name of the model; ``None``: the configuration's name, or its folder's.
        declared_by: the source of the configuration, for messages; ``None``: its file.

    Raises:
        ValueError: the file is missing or not JSON, the family is unknown or has no experts, or a field is wrong. The
            message names the file, the field, the value and the choices.
    """
    if isinstance(source, Mapping):
        known_as = name or str(source.get("_name_or_path") or "")
        return _architecture(dict(source), known_as, declared_by or "a configuration")
    path = Path(source)
    file = path / CONFIG if path.is_dir() else path
    if not file.is_file():
        has = f"{path} has no {CONFIG}" if path.is_dir() else f"there is no file {path}"
        raise ValueError(f"{has}: give a {CONFIG}, or a folder that has one")
    try:
        data = read_json(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{file}: must be a JSON object")
    known_as = file.resolve().parent.name if file.name == CONFIG else file.stem
    return _architecture(data, name or known_as, declared_by or str(file))


def _architecture(data: dict[str, Any], name: str, source: str) -> Architecture:
    model_type, text = data.get("model_type"), data.get("text_config")
    if not isinstance(model_type, str | None):
        raise ValueError(f"{source}: model_type = {json.dumps(model_type)[:60]}: must be the name of a family")
    if model_type not in _FAMILY_OF and isinstance(text, Mapping) and text.get("model_type") in tuple(_FAMILY_OF):
        # A model of pictures and text: experts are in the one of text.
        outer = {key: data[key] for key in ("torch_dtype", "dtype") if key in data}
        return _architecture(outer | dict(text), name, f"{source}, its model of text alone")
    family = _known(model_type, source)
    fields = Fields(data, source, family.defaults)
    M, vocab = fields.count("hidden_size"), fields.count("vocab_size")
    try:
        made = [
            _block(family, fields, layer, M) for layer in range(fields.count("num_hidden_layers", most=MOST_LAYERS))
        ]
    except ValueError as error:
        # What the parts of a block refuse names no file.
        raise error if str(error).startswith(source) else ValueError(f"{source}: {error}") from error
    same: dict[ModelBlock, ModelBlock] = {}
    blocks = tuple(same.setdefault(each, each) for each in made)
    if not any(each.experts for each in blocks):
        raise ValueError(f"{source}: none of its {len(blocks)} layers has experts, so there is nothing to plan")
    head_bias = vocab if family.head_bias and fields.flag(family.head_bias) else 0
    return Architecture(
        name=name or str(model_type),
        source=source,
        M=M,
        vocab=vocab,
        is_tied=fields.flag("tie_word_embeddings"),
        max_length=fields.count("max_position_embeddings"),
        blocks=blocks,
        num_other=family.norm_size * M + head_bias,
        dtype=_dtype(fields),
    )


def _known(model_type: Any, source: str) -> Family:
    """Return the family of a configuration."""
    if model_type in DENSE:
        raise ValueError(
            f"{source}: model_type = {json.dumps(model_type)}: has no experts, so there is nothing to plan"
        )
    if model_type in UNREAD:
        raise ValueError(f"{source}: model_type = {json.dumps(model_type)}: cannot be planned: {UNREAD[model_type]}")
    if model_type not in _FAMILY_OF:
        known = sorted(_FAMILY_OF)
        raise ValueError(
            f"{source}: model_type = {json.dumps(model_type)}: unknown family: {suggested(model_type, known)}; or give "
            "the sizes as options (--layers, --width, ...)"
        )
    return _FAMILY_OF[model_type]


def _block(family: Family, fields: Fields, layer: int, M: int) -> ModelBlock:
    attention = family.attention(fields, layer)
    num_norms = 2 * family.norm_size * M
    has_bias = bool(family.mlp_bias) and fields.flag(family.mlp_bias)
    if family.is_sparse(fields, layer):
        experts = family.experts(fields, layer)
        biases = 2 * experts.shared_H + M if has_bias and experts.shared_H else 0
        return ModelBlock(attention, experts, num_norms=num_norms + biases)
    H = fields.count(family.dense_width)
    return ModelBlock(attention, None, H, num_norms=num_norms + (2 * H + M if has_bias else 0))


def _dtype(fields: Fields) -> str:
    """Return the dtype of the weights in their file; bf16 if the configuration has none."""
    said = next((each for each in ("dtype", "torch_dtype") if fields.value(each) is not None), None)
    if said is None:
        return "bf16"
    found = str(fields.value(said)).removeprefix("torch.")
    if found not in _DTYPES:
        raise fields.wrong(f"the choices are {', '.join(_DTYPES)}", said)
    return _DTYPES[found]
