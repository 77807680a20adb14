# SPDX-License-Identifier: Apache-2.0
"""The experts' law, held against the experts of a layer: each row of a result depends on the same row of the input."""

from __future__ import annotations

import logging

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from ds_fsmoe.components.expert_calls import ExpertSet
from ds_fsmoe.components.row_wise import check_row_wise
from ds_fsmoe.log import log_on_rank_0
from ds_fsmoe.parts import LayerError
from ds_fsmoe.runtime.agreement import check_agreement


def check_experts_of(path: str, experts: ExpertSet, x: torch.Tensor, same_cuts: bool) -> None:
    """Try the experts of a layer on a few rows of random numbers, the same on every rank.

    Collective: all ranks come here at the same forward, and all raise if one has to.

    Args:
        path: of the layer in the model.
        experts: of this rank, in the mode in which they are to train.
        x: [..., M], whose width, dtype and device the rows have.
        same_cuts: whether forward and backward are cut alike.

    Raises:
        LayerError: naming the layer, the expert and what is wrong with it.
        DisagreementError: on every rank, if only some have something to refuse, or for other reasons.
    """
    problem, doubt = None, None
    for index, expert in enumerate(experts.experts):
        name = f"{path}: expert {index}"
        try:
            draws = check_row_wise(
                expert, x.shape[-1], dtype=x.dtype, device=x.device, keep_expert_dim=experts.keep_expert_dim
            )
        except ValueError as error:
            problem = problem or f"{name}: {error}"
            continue
        if draws and same_cuts:
            doubt = doubt or f"{name}: {_drawing(expert)}; with pipeline_degree 1 its numbers are those of stock"
        elif draws:
            problem = problem or (
                f"{name}: {_drawing(expert)}; forward and backward are cut differently, so the backward would go with "
                "other numbers than the forward: make the degrees of fsmoe.pipeline_degree equal"
            )
    check_agreement({f"experts of {path}": problem or "row-wise"}, what="whether experts are row-wise")
    if problem is not None:
        raise LayerError(problem)
    if doubt is not None:
        log_on_rank_0(doubt, logging.WARNING)


def _drawing(expert: nn.Module) -> str:
    found = [
        f"{name or 'the expert itself'}, a {type(module).__name__}"
        for name, module in expert.named_modules()
        if isinstance(module, _DropoutNd) and module.training and module.p > 0
    ]
    return (
        f"expert {type(expert).__name__} is not row-wise in training, because it draws random numbers "
        f"({'; '.join(found) or 'in none of the dropout layers that torch has'}): cut in chunks, it draws others than "
        "for all rows at once"
    )
