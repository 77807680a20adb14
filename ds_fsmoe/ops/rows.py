# SPDX-License-Identifier: Apache-2.0
"""The compiled row gather, as torch sees it: shapes without data, and gradients.

The operators exist once :func:`ds_fsmoe.ops.load_ops` has loaded the library for the CPU.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import SymInt, Tensor


def gather_rows(x_RM: Tensor, index_N: Tensor) -> Tensor:
    """Reads rows by number; an empty slot reads as a row of zeros. Differentiable in ``x_RM``, twice.

    Args:
        x_RM: [R, M], float32, float64, bfloat16 or float16, on the CPU.
        index_N: [N], int64, row numbers. Anything outside 0..R-1 is an empty slot; R is the usual way to write it.

    Returns:
        [N, M] in the dtype of ``x_RM``: row ``index_N[n]`` of ``x_RM``, or zeros. Contiguous.

    Raises:
        RuntimeError: a wrong number of dimensions or a dtype that is not listed above.
        AttributeError: the library has not been loaded.
    """
    return torch.ops.fsmoe.gather_rows.default(x_RM, index_N)


@functools.cache
def register_formulas() -> None:
    """Tells torch the output shapes and the gradients of the operators. Call it after the library has been loaded.

    Each operator is the gradient of the other, so derivatives of any order exist.
    """
    torch.library.register_fake("fsmoe::gather_rows", _gather_rows_fake)
    torch.library.register_fake("fsmoe::gather_rows_backward", _gather_rows_backward_fake)
    torch.library.register_autograd(
        "fsmoe::gather_rows", _gather_rows_gradient, setup_context=_save_for_gather_rows_gradient
    )
    torch.library.register_autograd(
        "fsmoe::gather_rows_backward", _gather_rows_backward_gradient, setup_context=_save_index
    )


def _gather_rows_fake(x_RM: Tensor, index_N: Tensor) -> Tensor:
    return x_RM.new_empty(index_N.shape[0], x_RM.shape[1])


def _gather_rows_backward_fake(dy_NM: Tensor, index_N: Tensor, num_rows: int | SymInt) -> Tensor:
    return dy_NM.new_empty(num_rows, dy_NM.shape[1])


def _save_for_gather_rows_gradient(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    x_RM, index_N = inputs
    ctx.save_for_backward(index_N)
    ctx.num_rows = x_RM.shape[0]


def _gather_rows_gradient(ctx: Any, dy_NM: Tensor) -> tuple[Tensor, None]:
    (index_N,) = ctx.saved_tensors
    return torch.ops.fsmoe.gather_rows_backward.default(dy_NM, index_N, ctx.num_rows), None


def _save_index(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _gather_rows_backward_gradient(ctx: Any, ddx_RM: Tensor) -> tuple[Tensor, None, None]:
    (index_N,) = ctx.saved_tensors
    return torch.ops.fsmoe.gather_rows.default(ddx_RM, index_N), None, None
