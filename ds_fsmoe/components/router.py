# SPDX-License-Identifier: Apache-2.0
"""A router's arithmetic: in float32 at the least, whatever the model computes in."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F


def without_autocast(device: torch.device) -> AbstractContextManager:
    """In which matrix products keep the type of their factors."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def linear_scores(x_SM: torch.Tensor, weight_NM: torch.Tensor) -> torch.Tensor:
    """``x * W^T`` [S, N] in float32, for float64 tokens in float64; under autocast too.

    Args:
        x_SM: [S, M], of any float type.
        weight_NM: [N, M].
    """
    dtype = torch.promote_types(x_SM.dtype, torch.float32)
    with without_autocast(x_SM.device):
        return F.linear(x_SM.to(dtype), weight_NM.to(dtype))


def mix(weights_NR: torch.Tensor, rows_RM: torch.Tensor) -> torch.Tensor:
    """Weighted sums of rows [N, M], in the type of the rows; products and sums are in float32 at the least.

    Args:
        weights_NR: [N, R], of any float type.
        rows_RM: [R, M].
    """
    dtype = torch.promote_types(torch.promote_types(weights_NR.dtype, rows_RM.dtype), torch.float32)
    with without_autocast(rows_RM.device):
        return (weights_NR.to(dtype) @ rows_RM.to(dtype)).to(rows_RM.dtype)


def which_are_used(used_token_S: torch.Tensor | None, num_tokens: int) -> torch.Tensor | None:
    """The mask of a layer's caller as [S] booleans.

    Raises:
        ValueError: a mask of another length than the tokens.
    """
    if used_token_S is None:
        return None
    used_S = used_token_S.reshape(-1).ne(0)
    if len(used_S) != num_tokens:
        raise ValueError(f"used_token has {len(used_S)} entries for {num_tokens} tokens: one per token is needed")
    return used_S


def mean_over_used(values_S: torch.Tensor, used_S: torch.Tensor | None) -> torch.Tensor:
    """Over the first dimension, as far as it is used; 0 where nothing is."""
    if used_S is None:
        return values_S.sum(dim=0) / max(len(values_S), 1)
    masked_S = values_S.masked_fill(~used_S.view(-1, *[1] * (values_S.dim() - 1)), 0.0)
    return masked_S.sum(dim=0) / used_S.sum().clamp(min=1)


def entropy_of(weights_SE: torch.Tensor, used_S: torch.Tensor | None) -> torch.Tensor:
    """Scalar, in nats, without a gradient: of a token's probabilities, as a mean over the tokens that take part.

    Args:
        weights_SE: [S, E], not negative; over their sum they are a token's probabilities.
        used_S: [S] booleans; ``None``: all take part.
    """
    weights_SE = weights_SE.detach().to(torch.promote_types(weights_SE.dtype, torch.float32))
    tiny = torch.finfo(weights_SE.dtype).tiny
    probs_SE = weights_SE / weights_SE.sum(dim=1, keepdim=True).clamp(min=tiny)
    return mean_over_used(torch.special.entr(probs_SE).sum(dim=1), used_S)
