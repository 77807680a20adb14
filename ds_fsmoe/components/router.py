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
