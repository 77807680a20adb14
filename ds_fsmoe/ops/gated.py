# SPDX-License-Identifier: Apache-2.0
"""Compiled: the gated products of experts. What each computes is written out in ``ds_fsmoe.ops.reference``.

The operators exist once :func:`ds_fsmoe.ops.load_ops` has loaded a library. Neither is differentiable: the experts'
backward calls the second.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def gated(x_RF: Tensor, form: str, interleaved: bool = False, limit: float = 0.0, alpha: float = 0.0) -> Tensor:
    """As :func:`ds_fsmoe.ops.reference.gated`, in one pass on CUDA devices.

    Raises:
        RuntimeError: shapes, dtypes or forms that do not fit.
    """
    return torch.ops.fsmoe.gated.default(x_RF, form, interleaved, limit, alpha)


def gated_backward(
    x_RF: Tensor, dh_RH: Tensor, form: str, interleaved: bool = False, limit: float = 0.0, alpha: float = 0.0
) -> tuple[Tensor, Tensor]:
    """As :func:`ds_fsmoe.ops.reference.gated_backward`, in one pass on CUDA devices.

    Raises:
        RuntimeError: shapes, dtypes or forms that do not fit.
    """
    return torch.ops.fsmoe.gated_backward.default(x_RF, dh_RH, form, interleaved, limit, alpha)


@functools.cache
def register_formulas() -> None:
    """Tells torch the output shapes of the operators. Call it after their schemas are defined."""
    torch.library.register_fake("fsmoe::gated", _gated_fake)
    torch.library.register_fake("fsmoe::gated_backward", _gated_backward_fake)


def _gated_fake(x_RF: Tensor, form: str, interleaved: bool = False, limit: float = 0.0, alpha: float = 0.0) -> Tensor:
    return x_RF.new_empty((x_RF.shape[0], x_RF.shape[1] // 2))


def _gated_backward_fake(
    x_RF: Tensor, dh_RH: Tensor, form: str, interleaved: bool = False, limit: float = 0.0, alpha: float = 0.0
) -> tuple[Tensor, Tensor]:
    return x_RF.new_empty(x_RF.shape), dh_RH.new_empty(dh_RH.shape)
