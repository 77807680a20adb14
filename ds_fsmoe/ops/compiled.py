# SPDX-License-Identifier: Apache-2.0
"""The compiled ops as torch sees them: their signatures, shapes without data, and gradients.

The operators exist once :func:`ds_fsmoe.ops.load_ops` has loaded a library; ``loading`` then calls :func:`define`.
``ds_fsmoe.ops.reference`` defines their results.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import SymInt, Tensor

from ds_fsmoe.ops.reference import Rows, Slots

# ---- Signatures. They are here and not in the libraries because a process may load those of two device types, and
# torch requires every signature once

SCHEMAS = (
    "gather_rows(Tensor x, Tensor index) -> Tensor",
    "gather_rows_backward(Tensor dy, Tensor index, SymInt num_rows) -> Tensor",
    "arrange(Tensor x, Tensor slots, SymInt num_slots, ScalarType? dtype=None) -> Tensor",
    "restore(Tensor y, Tensor slots, Tensor? weights=None, ScalarType? dtype=None, bool by_slot=False) -> Tensor",
    "restore_backward(Tensor d_out, Tensor y, Tensor slots, Tensor weights) -> (Tensor, Tensor)",
    "gated(Tensor x, str form, bool interleaved=False, float limit=0.0, float alpha=0.0) -> Tensor",
    "gated_backward(Tensor x, Tensor dh, str form, bool interleaved=False, float limit=0.0, float alpha=0.0)"
    " -> (Tensor, Tensor)",
    "top_k_slots(Tensor scores, SymInt k, SymInt capacity, Tensor? used=None, str priority='choice')"
    " -> (Tensor, Tensor, Tensor)",
    "take_slots(Tensor experts, SymInt num_experts, SymInt capacity, Tensor? used=None, str priority='choice',"
    " Tensor? scores=None) -> (Tensor, Tensor)",
    "number_rows(Tensor choices, SymInt num_experts, SymInt capacity, Tensor? segments=None, Tensor? limits=None)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)


@functools.cache
def define() -> torch.library.Library:
    """Register the operators with torch, once per process: signatures, shapes of results, and gradients.

    Called after a library has been loaded. The signatures live as long as the returned object, which is cached here.
    """
    library = torch.library.Library("fsmoe", "FRAGMENT")
    for schema in SCHEMAS:
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    shapes = {
        "gather_rows": _gather_rows_fake,
        "gather_rows_backward": _gather_rows_backward_fake,
        "arrange": _arrange_fake,
        "restore": _restore_fake,
        "restore_backward": _restore_backward_fake,
        "gated": _gated_fake,
        "gated_backward": _gated_backward_fake,
        "top_k_slots": _top_k_slots_fake,
        "take_slots": _take_slots_fake,
        "number_rows": _number_rows_fake,
    }
    for name, fake in shapes.items():
        torch.library.register_fake(f"fsmoe::{name}", fake)
    gradients = {
        "gather_rows": (_gather_rows_gradient, _save_for_gather_rows_gradient),
        "gather_rows_backward": (_gather_rows_backward_gradient, _save_index),
        "arrange": (_arrange_gradient, _save_for_arrange),
        "restore": (_restore_gradient, _save_for_restore),
        "restore_backward": (_restore_backward_gradient, _save_for_restore_backward),
    }
    for name, (gradient, save) in gradients.items():
        torch.library.register_autograd(f"fsmoe::{name}", gradient, setup_context=save)
    return library


# ---- Rows by number. Each operator is the gradient of the other, so derivatives of any order exist


def gather_rows(x_RM: Tensor, index_N: Tensor) -> Tensor:
    """Return rows by number, with zeros for an empty slot. Differentiable in ``x_RM``, twice.

    Args:
        x_RM: [R, M], float32, float64, bfloat16 or float16, on the CPU.
        index_N: [N], int64, row numbers. A number outside 0..R-1 is an empty slot; by convention R.

    Returns:
        [N, M] in the dtype of ``x_RM``: row ``index_N[n]`` of ``x_RM``, or zeros. Contiguous.

    Raises:
        RuntimeError: a wrong number of dimensions, or a dtype that is not listed above.
        AttributeError: the library has not been loaded.
    """
    return torch.ops.fsmoe.gather_rows.default(x_RM, index_N)


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


# ---- Token rows to slots and back
# No operator allocates a [K, S, M] tensor. The gradient of one is another: ``arrange`` and the unweighted ``restore``
# are each other's, and the two gradients of the weighted ``restore`` come from one pass. So derivatives of any order
# exist.


def arrange(x_SM: Tensor, slots_KS: Tensor, num_slots: int, dtype: torch.dtype | None = None) -> Tensor:
    """Copy token rows into slots; a slot without a token is zero. Differentiable in ``x_SM``.

    Args:
        x_SM: [S, M], float32, bfloat16 or float16, on the CPU float64 too.
        slots_KS: [K, S] int64, the slot of every choice; a number outside 0..N-1 (by convention N) is a dropped choice.
            No slot may appear twice.
        num_slots: N = E * C.
        dtype: of the result; ``None`` is that of ``x_SM``.

    Returns:
        [N, M]. The gradient of ``x_SM`` is summed in float32, in the order of the slots, and rounded once.

    Raises:
        RuntimeError: shapes or dtypes that do not fit; on the CPU also a slot with two tokens.
    """
    return torch.ops.fsmoe.arrange.default(x_SM, slots_KS, num_slots, dtype)


def restore(
    y_NM: Tensor,
    slots_KS: Tensor,
    weights_KS: Tensor | None = None,
    dtype: torch.dtype | None = None,
    by_slot: bool = False,
) -> Tensor:
    """Compute the weighted sum of every token's rows; zero where all its choices were dropped.

    Differentiable in ``y_NM`` and ``weights_KS``.

    Args:
        y_NM: [N, M], float32, bfloat16 or float16, on the CPU float64 too.
        slots_KS: [K, S] int64, as for :func:`arrange`.
        weights_KS: [K, S], float32, on the CPU float64 too; ``None`` counts every row once.
        dtype: of the result; ``None`` is that of ``y_NM``.
        by_slot: whether terms are summed in the order of the slots instead of that of the choices.

    Returns:
        [S, M], summed in float32 (float64 if an operand is) and rounded once.

    Raises:
        RuntimeError: shapes or dtypes that do not fit.
    """
    return torch.ops.fsmoe.restore.default(y_NM, slots_KS, weights_KS, dtype, by_slot)


def restore_backward(d_out_SM: Tensor, y_NM: Tensor, slots_KS: Tensor, weights_KS: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows, [N, M], and of the weights, [K, S], of a weighted :func:`restore`."""
    return torch.ops.fsmoe.restore_backward.default(d_out_SM, y_NM, slots_KS, weights_KS)


def _arrange_fake(x_SM: Tensor, slots_KS: Tensor, num_slots: int | SymInt, dtype: torch.dtype | None = None) -> Tensor:
    return x_SM.new_empty((num_slots, x_SM.shape[1]), dtype=dtype or x_SM.dtype)


def _save_for_arrange(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x_SM, slots_KS, _, _ = inputs
    ctx.save_for_backward(slots_KS)
    ctx.dtype = x_SM.dtype


def _arrange_gradient(ctx: Any, d_out_NM: Tensor) -> tuple[Tensor, None, None, None]:
    (slots_KS,) = ctx.saved_tensors
    # The last bit of a sum depends on its order: torch adds up gathered rows in the order of the slots.
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
    # On a GPU gradients of weights have the strides of the weights.
    is_dense = not weights_KS.is_cuda
    d_weights_KS = weights_KS.new_empty(weights_KS.shape) if is_dense else torch.empty_like(weights_KS)
    return y_NM.new_empty(y_NM.shape), d_weights_KS


def _save_for_restore_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs)


def _restore_backward_gradient(ctx: Any, ddy_NM: Tensor, dd_weights_KS: Tensor) -> tuple[Tensor, Tensor, None, Tensor]:
    # dy[slot] = weight * d_out and d_weight = <d_out, y[slot]>; both are linear in each factor.
    d_out_SM, y_NM, slots_KS, weights_KS = ctx.saved_tensors
    backward = torch.ops.fsmoe.restore_backward.default
    of_d_out_SM = restore(ddy_NM, slots_KS, weights_KS, d_out_SM.dtype)
    of_d_out_SM = of_d_out_SM + restore(y_NM, slots_KS, dd_weights_KS, d_out_SM.dtype)
    of_weights_KS = backward(d_out_SM, ddy_NM, slots_KS, weights_KS)[1]
    of_y_NM = backward(d_out_SM, y_NM, slots_KS, dd_weights_KS)[0]
    return of_d_out_SM, of_y_NM, None, of_weights_KS


# ---- The gated products of experts. Neither is differentiable: the experts' backward calls the second


def gated(x_RF: Tensor, form: str, interleaved: bool = False, limit: float = 0.0, alpha: float = 0.0) -> Tensor:
    """Compute the gated product of :func:`ds_fsmoe.ops.reference.gated`, in one pass on CUDA devices.

    Raises:
        RuntimeError: shapes, dtypes or forms that do not fit.
    """
    return torch.ops.fsmoe.gated.default(x_RF, form, interleaved, limit, alpha)


def gated_backward(
    x_RF: Tensor, dh_RH: Tensor, form: str, interleaved: bool = False, limit: float = 0.0, alpha: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of :func:`ds_fsmoe.ops.reference.gated_backward`, in one pass on CUDA devices.

    Raises:
        RuntimeError: shapes, dtypes or forms that do not fit.
    """
    return torch.ops.fsmoe.gated_backward.default(x_RF, dh_RH, form, interleaved, limit, alpha)


def _gated_fake(x_RF: Tensor, form: str, interleaved: bool = False, limit: float = 0.0, alpha: float = 0.0) -> Tensor:
    return x_RF.new_empty((x_RF.shape[0], x_RF.shape[1] // 2))


def _gated_backward_fake(
    x_RF: Tensor, dh_RH: Tensor, form: str, interleaved: bool = False, limit: float = 0.0, alpha: float = 0.0
) -> tuple[Tensor, Tensor]:
    return x_RF.new_empty(x_RF.shape), dh_RH.new_empty(dh_RH.shape)


# ---- From scores to slots. Results are integers, so there are no gradients


def top_k_slots(
    scores_SE: Tensor, k: int, capacity: int, used_S: Tensor | None = None, priority: str = "choice"
) -> Slots:
    """Choose experts and assign slots as :func:`ds_fsmoe.ops.reference.top_k_slots`, in one pass.

    Raises:
        RuntimeError: ``k`` out of range, or shapes or dtypes that do not fit.
    """
    return Slots(*torch.ops.fsmoe.top_k_slots.default(scores_SE, k, capacity, used_S, priority))


def take_slots(
    experts_KS: Tensor,
    num_experts: int,
    capacity: int,
    used_S: Tensor | None = None,
    priority: str = "choice",
    scores_KS: Tensor | None = None,
) -> Slots:
    """Assign slots as :func:`ds_fsmoe.ops.reference.take_slots`.

    Raises:
        RuntimeError: shapes or dtypes that do not fit.
    """
    take = torch.ops.fsmoe.take_slots.default
    return Slots(experts_KS, *take(experts_KS, num_experts, capacity, used_S, priority, scores_KS))


def number_rows(
    choices_KS: Tensor,
    num_experts: int,
    capacity: int = 1,
    segments_3T: Tensor | None = None,
    limits_E: Tensor | None = None,
) -> Rows:
    """Number the rows of a decision as :func:`ds_fsmoe.ops.reference.number_rows`, in one pass over the choices.

    Raises:
        RuntimeError: shapes or dtypes that do not fit.
    """
    return Rows(*torch.ops.fsmoe.number_rows.default(choices_KS, num_experts, capacity, segments_3T, limits_E))


def _top_k_slots_fake(
    scores_SE: Tensor,
    k: int | SymInt,
    capacity: int | SymInt,
    used_S: Tensor | None = None,
    priority: str = "choice",
) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens, num_experts = scores_SE.shape
    shapes = ((k, num_tokens), (k, num_tokens), (num_experts,))
    experts_KS, slots_KS, counts_E = (scores_SE.new_empty(shape, dtype=torch.int64) for shape in shapes)
    return experts_KS, slots_KS, counts_E


def _take_slots_fake(
    experts_KS: Tensor,
    num_experts: int | SymInt,
    capacity: int | SymInt,
    used_S: Tensor | None = None,
    priority: str = "choice",
    scores_KS: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return experts_KS.new_empty(experts_KS.shape), experts_KS.new_empty(num_experts)


def _number_rows_fake(
    choices_KS: Tensor,
    num_experts: int | SymInt,
    capacity: int | SymInt,
    segments_3T: Tensor | None = None,
    limits_E: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_queues = num_experts * (1 if segments_3T is None else segments_3T.shape[1])
    counts_V = choices_KS.new_empty(num_queues)
    ends_V = choices_KS.new_empty(num_queues, dtype=torch.int32)
    return choices_KS.new_empty(choices_KS.shape), counts_V, ends_V, choices_KS.new_empty(())
