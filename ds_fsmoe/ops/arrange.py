# SPDX-License-Identifier: Apache-2.0
"""Compiled: token rows to slots and back. What each computes is written out in ``ds_fsmoe.ops.reference``.

The operators exist once :func:`ds_fsmoe.ops.load_ops` has loaded a library. None of them makes a [K, S, M] tensor.
The gradient of one is another: ``arrange`` and the unweighted ``restore`` are each other's, and the two gradients of
the weighted ``restore`` come from one pass. So derivatives of any order exist.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import SymInt, Tensor


def arrange(x_SM: Tensor, slots_KS: Tensor, num_slots: int, dtype: torch.dtype | None = None) -> Tensor:
    """Token rows to slots; a slot that no token took is zero. Differentiable in ``x_SM``.

    Args:
        x_SM: [S, M], float32, bfloat16 or float16, on the CPU float64 too.
        slots_KS: [K, S] int64, the slot of every choice; outside 0..N-1 (by convention N) is a choice that was dropped.
            No slot may be there twice.
        num_slots: N = E * C.
        dtype: of the result; ``None`` is that of ``x_SM``.

    Returns:
        [N, M]. The gradient of ``x_SM`` is summed in float32, in the order of the slots, and rounded once.

    Raises:
        RuntimeError: shapes or dtypes that do not fit; on the CPU also a slot that two tokens were given.
    """
    return torch.ops.fsmoe.arrange.default(x_SM, slots_KS, num_slots, dtype)


def restore(
    y_NM: Tensor,
    slots_KS: Tensor,
    weights_KS: Tensor | None = None,
    dtype: torch.dtype | None = None,
    by_slot: bool = False,
) -> Tensor:
    """The weighted sum of every token's rows; zero where all its choices were dropped.

    Differentiable in ``y_NM`` and ``weights_KS``.

    Args:
        y_NM: [N, M], float32, bfloat16 or float16, on the CPU float64 too.
        slots_KS: [K, S] int64, as for :func:`arrange`.
        weights_KS: [K, S], float32, on the CPU float64 too; ``None`` counts every row once.
        dtype: of the result; ``None`` is that of ``y_NM``.
        by_slot: whether sums go in the order of the slots instead of that of the choices.

    Returns:
        [S, M], summed in float32 (float64 if anything is) and rounded once.

    Raises:
        RuntimeError: shapes or dtypes that do not fit.
    """
    return torch.ops.fsmoe.restore.default(y_NM, slots_KS, weights_KS, dtype, by_slot)


def restore_backward(d_out_SM: Tensor, y_NM: Tensor, slots_KS: Tensor, weights_KS: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the rows, [N, M], and of the weights, [K, S], of a weighted :func:`restore`."""
    return torch.ops.fsmoe.restore_backward.default(d_out_SM, y_NM, slots_KS, weights_KS)


@functools.cache
def register_formulas() -> None:
    """Tells torch the output shapes and the gradients of the operators. Call it after their schemas are defined."""
    register_fake, register_autograd = torch.library.register_fake, torch.library.register_autograd
    register_fake("fsmoe::arrange", _arrange_fake)
    register_fake("fsmoe::restore", _restore_fake)
    register_fake("fsmoe::restore_backward", _restore_backward_fake)
    register_autograd("fsmoe::arrange", _arrange_gradient, setup_context=_save_for_arrange)
    register_autograd("fsmoe::restore", _restore_gradient, setup_context=_save_for_restore)
    register_autograd("fsmoe::restore_backward", _restore_backward_gradient, setup_context=_save_for_restore_backward)


def _arrange_fake(x_SM: Tensor, slots_KS: Tensor, num_slots: int | SymInt, dtype: torch.dtype | None = None) -> Tensor:
    return x_SM.new_empty((num_slots, x_SM.shape[1]), dtype=dtype or x_SM.dtype)


def _save_for_arrange(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x_SM, slots_KS, _, _ = inputs
    ctx.save_for_backward(slots_KS)
    ctx.dtype = x_SM.dtype


def _arrange_gradient(ctx: Any, d_out_NM: Tensor) -> tuple[Tensor, None, None, None]:
    (slots_KS,) = ctx.saved_tensors
    # The order of a sum is part of its last bit: torch adds up what it gathers in the order of the slots.
    return restore(d_out_NM, slots_KS, None, ctx.dtype, by_slot=True), None, None, None


def _restore_fake(
    y_NM: Tensor,
    slots_KS: Tensor,
    weights_KS: Tensor | None = None,
    dtype: torch.dtype | None = None,
    by_slot: bool = False,
) -> Tensor:
    return y_NM.new_empty((slots_KS.shape[1], y_NM.shape[1]), dtype=dtype or y_NM.dtype)


def _save_for_restore(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y_NM, slots_KS, weights_KS, _, _ = inputs
    ctx.is_weighted = weights_KS is not None
    ctx.num_slots, ctx.dtype = y_NM.shape[0], y_NM.dtype
    # Without weights the rows are not needed again, and may be many.
    ctx.save_for_backward(slots_KS, *((y_NM, weights_KS) if ctx.is_weighted else ()))


def _restore_gradient(ctx: Any, d_out_SM: Tensor) -> tuple[Tensor, None, Tensor | None, None, None]:
    slots_KS, *saved = ctx.saved_tensors
    if not ctx.is_weighted:
        return arrange(d_out_SM, slots_KS, ctx.num_slots, ctx.dtype), None, None, None, None
    y_NM, weights_KS = saved
    dy_NM, d_weights_KS = restore_backward(d_out_SM, y_NM, slots_KS, weights_KS)
    return dy_NM, None, d_weights_KS, None, None


def _restore_backward_fake(
    d_out_SM: Tensor, y_NM: Tensor, slots_KS: Tensor, weights_KS: Tensor
) -> tuple[Tensor, Tensor]:
    # On a GPU gradients of weights lie as the weights do.
    is_dense = not weights_KS.is_cuda
    d_weights_KS = weights_KS.new_empty(weights_KS.shape) if is_dense else torch.empty_like(weights_KS)
    return y_NM.new_empty(y_NM.shape), d_weights_KS


def _save_for_restore_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs)


def _restore_backward_gradient(ctx: Any, ddy_NM: Tensor, dd_weights_KS: Tensor) -> tuple[Tensor, Tensor, None, Tensor]:
    # dy[slot] = weight * d_out and d_weight = <d_out, y[slot]>; both are linear in each of what they are made of.
    d_out_SM, y_NM, slots_KS, weights_KS = ctx.saved_tensors
    backward = torch.ops.fsmoe.restore_backward.default
    of_d_out_SM = restore(ddy_NM, slots_KS, weights_KS, d_out_SM.dtype)
    of_d_out_SM = of_d_out_SM + restore(y_NM, slots_KS, dd_weights_KS, d_out_SM.dtype)
    of_weights_KS = backward(d_out_SM, ddy_NM, slots_KS, weights_KS)[1]
    of_y_NM = backward(d_out_SM, y_NM, slots_KS, dd_weights_KS)[0]
    return of_d_out_SM, of_y_NM, None, of_weights_KS
