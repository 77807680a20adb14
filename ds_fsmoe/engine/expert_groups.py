# SPDX-License-Identifier: Apache-2.0
"""Knows whether DeepSpeed's optimizer has groups of experts, which it insists on once a model has MoE layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ds_fsmoe.engine.convert_adapters import adapters_of
from ds_fsmoe.layer.experts_layer import HuggingFaceLayer


@contextmanager
def groups_of_trained(engine: Any, layers: Sequence[HuggingFaceLayer]) -> Iterator[None]:
    """Have an engine make its optimizer meanwhile as for a dense model, where all its layers are of Hugging Face and
    none of their experts or adapters trains: there is no parameter for a group of experts then.

    Args:
        engine: the engine; afterwards it has MoE layers again, as saving has to know.
        layers: the layers taken over.
    """
    inner = [each.deepspeed_moe for each in layers]
    trains = any(each.requires_grad for layer in inner for each in (*layer.parameters(), *adapters_of(layer)))
    if trains or len(layers) < len(engine.fsmoe.layers):
        yield
        return
    before, engine.has_moe_layers = engine.has_moe_layers, False
    try:
        yield
    finally:
        engine.has_moe_layers = before
