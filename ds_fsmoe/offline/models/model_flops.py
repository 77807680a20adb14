# SPDX-License-Identifier: Apache-2.0
"""Counts the floating-point operations that a model's step needs, whatever is recomputed, dropped or padded.

They are those of Chowdhery et al., PaLM (arXiv:2204.02311, appendix B): 6 for each active parameter and token, and 3
times the forward of attention's scores and values, with all pairs of positions. Looking words up needs none, so that
the embedding counts only where it is the head, too.
"""

from __future__ import annotations

from ds_fsmoe.offline.models.architecture import Architecture
from ds_fsmoe.planning.workload import GEMMS, Shape


def step_flops(shape: Shape, num_layers: int, architecture: Architecture | None = None) -> float:
    """Return the operations of one micro-batch, forward and backward.

    Args:
        shape: with the samples and the length; without an architecture all sizes of a layer.
        num_layers: of equal layers.
        architecture: a whole model, of which ``num_layers`` blocks count; ``None``: equal layers and nothing else.
    """
    if architecture is None:
        active = shape.attention_weights + shape.M * shape.E + GEMMS[shape.ffn] * shape.K * shape.M * shape.H
        return num_layers * shape.B * (6.0 * active * shape.L + 12.0 * shape.M * shape.L**2)
    model = architecture.first(num_layers)
    embedding = 0 if model.is_tied else model.M * model.vocab
    active = model.num_active_parameters - embedding
    attention = 0.0
    for block in model.blocks:
        each = block.attention
        attention += each.flops(model.M, shape.L) - 2.0 * shape.L * each.num_weights(model.M)
    return shape.B * (6.0 * active * shape.L + 3.0 * attention)
