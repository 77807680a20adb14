# SPDX-License-Identifier: Apache-2.0
"""The ops in whole-tensor operations of torch, for machines without a compiled library: on any device, without waits.

They compute the same as ``ds_fsmoe.ops.reference``, which loops over choices, and are faster. Rows that were numbered
here also contain the order of their choices, so that rows are gathered instead of scattered. ``loading`` chooses these
ops for "plain".

Letters: S tokens, E experts, K choices of a token, N = K * S rows, V queues, M width.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ds_fsmoe.ops import reference

_PLACES = "fsmoe_places"
"""The attribute of numbered rows [K, S] with their :class:`Places`."""


class Places(NamedTuple):
    """Holds the choices and tokens of numbered rows."""

    choice_N: Tensor
    """[N] int64: the choice of each row, ``token * K + choice``."""
    token_N: Tensor
    """[N] int64: the token of each row."""
    is_none_KS: Tensor
    """[K, S] bool: True for a choice that has no row."""


_counted: dict[torch.device, Tensor] = {}
"""Device -> the numbers 0, 1, 2 and so on, as many as were needed so far."""


def _numbers(count: int, like: Tensor) -> Tensor:
    found = _counted.get(like.device)
    if type(like) is not Tensor or found is None or found.shape[0] < count:
        with torch.inference_mode(False):
            found = torch.arange(count, device=like.device)
        # A tensor made by a tracer has no values, and one made during a graph capture belongs to the graph.
        is_captured = like.is_cuda and torch.cuda.is_current_stream_capturing()
        if type(like) is type(found) is Tensor and not is_captured:
            _counted[like.device] = found
    return found[:count]


class LazyRows:
    """Has the fields of :class:`ds_fsmoe.ops.reference.Rows`; counts are computed on the first access."""

    def __init__(self, rows_KS: Tensor, sorted_N: Tensor, queues_V: Tensor, fault: Tensor) -> None:
        self.rows_KS, self.fault = rows_KS, fault
        self.ends_V = torch.searchsorted(sorted_N, queues_V, right=True, out_int32=True)
        self._sorted_N, self._queues_V = sorted_N, queues_V

    @functools.cached_property
    def counts_V(self) -> Tensor:
        """Return the rows of each queue, [V] int64."""
        return self.ends_V - torch.searchsorted(self._sorted_N, self._queues_V)

    def __iter__(self) -> Any:
        """Return an iterator over the fields of :class:`ds_fsmoe.ops.reference.Rows`, in their order."""
        return iter((self.rows_KS, self.counts_V, self.ends_V, self.fault))


def number_rows(
    choices_KS: Tensor,
    num_experts: int,
    capacity: int = 1,
    segments_3T: Tensor | None = None,
    limits_E: Tensor | None = None,
) -> LazyRows:
    """Number the rows of a decision as :func:`ds_fsmoe.ops.reference.number_rows`."""
    num_choices, num_tokens = choices_KS.shape
    none, num_rows = num_experts * capacity, choices_KS.numel()
    # A choice out of range becomes "not made".
    known_KS = choices_KS.clamp(-1, none).remainder(none + 1)
    fault = (known_KS != choices_KS).any()
    expert_KS = known_KS if capacity == 1 else _experts(known_KS, num_experts, capacity)
    queue_KS, num_queues = expert_KS, num_experts
    if segments_3T is not None:
        num_queues *= segments_3T.shape[1]
        end_T, first_T, step_T = segments_3T.unbind()
        tokens_S = torch.arange(num_tokens, device=choices_KS.device)
        segment_S = torch.searchsorted(end_T.contiguous(), tokens_S, right=True)
        queue_KS = torch.where(expert_KS < num_experts, expert_KS * step_T[segment_S] + first_T[segment_S], num_queues)
    if limits_E is not None:
        counts_E = expert_KS.new_zeros(num_experts + 1)
        counts_E.scatter_add_(0, expert_KS.reshape(-1), torch.ones_like(expert_KS).reshape(-1))
        fault = fault + 2 * (limits_E < counts_E[:-1]).any()
    numbers = _numbers(max(num_queues, num_rows), choices_KS)
    sorted_N, order_N = torch.sort(queue_KS.t().reshape(-1), stable=True)
    row_of_choice_N = torch.empty_like(order_N).scatter_(0, order_N, numbers[:num_rows])
    is_none_KS = queue_KS == num_queues
    rows_KS = row_of_choice_N.view(num_tokens, num_choices).t().masked_fill(is_none_KS, num_rows)
    token_N = order_N.div(max(1, num_choices), rounding_mode="floor")
    setattr(rows_KS, _PLACES, Places(order_N, token_N, is_none_KS))
    return LazyRows(rows_KS, sorted_N, numbers[:num_queues], fault)


def _experts(known_KS: Tensor, num_experts: int, capacity: int) -> Tensor:
    # With a capacity of 0 the only valid number is 0, which means "not made".
    return known_KS.div(capacity, rounding_mode="floor") if capacity else torch.full_like(known_KS, num_experts)


def arrange(x_SM: Tensor, slots_KS: Tensor, num_slots: int, dtype: torch.dtype | None = None) -> Tensor:
    """Arrange tokens as :func:`ds_fsmoe.ops.reference.arrange`; rows behind the last of numbered rows are undefined."""
    return _Arrange.apply(x_SM, slots_KS, num_slots, dtype or x_SM.dtype)


def restore(
    y_NM: Tensor,
    slots_KS: Tensor,
    weights_KS: Tensor | None = None,
    dtype: torch.dtype | None = None,
    by_slot: bool = False,
) -> Tensor:
    """Restore tokens as :func:`ds_fsmoe.ops.reference.restore`; sums are in torch's order, whatever ``by_slot`` is."""
    return _Restore.apply(y_NM, slots_KS, weights_KS, dtype or y_NM.dtype)


def restore_backward(d_out_SM: Tensor, y_NM: Tensor, slots_KS: Tensor, weights_KS: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of :func:`ds_fsmoe.ops.reference.restore_backward`."""
    num_slots, num_choices = len(y_NM), len(slots_KS)
    wide = functools.reduce(torch.promote_types, (d_out_SM.dtype, y_NM.dtype, weights_KS.dtype), torch.float32)
    places, weight_N = _places(slots_KS, num_slots), weights_KS.t().reshape(-1)
    if places is None:
        slots_KS = _known(slots_KS, num_slots)
        # The choice behind the last one is that of empty slots, with a token of zeros.
        choice_N = slots_KS.new_full((num_slots + 1,), slots_KS.numel())
        choice_N[slots_KS] = torch.arange(slots_KS.numel(), device=slots_KS.device).view(slots_KS.t().shape).t()
        choice_N = choice_N[:-1]
        token_N = choice_N.div(max(1, num_choices), rounding_mode="floor")
        d_out_SM, weight_N = F.pad(d_out_SM, (0, 0, 0, 1)), F.pad(weight_N, (0, 1))
    else:
        choice_N, token_N, _ = places
    weight_N, d_out_NM = weight_N.index_select(0, choice_N), d_out_SM.index_select(0, token_N)
    dy_NM = torch.empty_like(y_NM)
    torch.mul(d_out_NM, weight_N.to(wide).unsqueeze(1), out=dy_NM)
    d_weight_N = (d_out_NM.to(wide) * y_NM).sum(1)
    d_weights_KS = F.pad(d_weight_N, (0, 1)).index_select(0, slots_KS.reshape(-1)).view(slots_KS.shape)
    return dy_NM, d_weights_KS.to(weights_KS.dtype)


def gated_backward(
    x_RF: Tensor, dh_RH: Tensor, form: str, interleaved: bool = False, limit: float = 0.0, alpha: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of :func:`ds_fsmoe.ops.reference.gated_backward`."""
    if interleaved or form not in ("silu", "gelu", "gelu_tanh"):
        return reference.gated_backward(x_RF, dh_RH, form, interleaved, limit, alpha)
    dx_RF = torch.empty_like(x_RF, memory_format=torch.contiguous_format)
    (gate_RH, up_RH), (dgate_RH, dup_RH) = x_RF.chunk(2, dim=1), dx_RF.chunk(2, dim=1)
    if form == "silu":
        act_RH = F.silu(gate_RH)
        torch.ops.aten.silu_backward.grad_input(dh_RH * up_RH, gate_RH, grad_input=dgate_RH)
    else:
        how = {"approximate": "tanh" if form == "gelu_tanh" else "none"}
        act_RH = F.gelu(gate_RH, **how)
        torch.ops.aten.gelu_backward.grad_input(dh_RH * up_RH, gate_RH, **how, grad_input=dgate_RH)
    torch.mul(dh_RH, act_RH, out=dup_RH)
    return dx_RF, act_RH * up_RH


class _Arrange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SM: Tensor, slots_KS: Tensor, num_slots: int, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(slots_KS)
        ctx.dtype = x_SM.dtype
        return _rows_of_tokens(x_SM.to(dtype), slots_KS, num_slots)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out_NM: Tensor) -> tuple[Tensor, None, None, None]:
        (slots_KS,) = ctx.saved_tensors
        return _sums_of_tokens(d_out_NM, slots_KS, None, ctx.dtype), None, None, None


class _Restore(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_NM: Tensor, slots_KS: Tensor, weights_KS: Tensor | None, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(slots_KS, *(() if weights_KS is None else (y_NM, weights_KS)))
        ctx.num_slots, ctx.dtype = len(y_NM), y_NM.dtype
        return _sums_of_tokens(y_NM, slots_KS, weights_KS, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out_SM: Tensor) -> tuple[Tensor, None, Tensor | None, None]:
        slots_KS, *saved = ctx.saved_tensors
        if not saved:
            return _rows_of_tokens(d_out_SM.to(ctx.dtype), slots_KS, ctx.num_slots), None, None, None
        dy_NM, d_weights_KS = restore_backward(d_out_SM, saved[0], slots_KS, saved[1])
        return dy_NM, None, d_weights_KS, None


def _places(slots_KS: Tensor, num_slots: int) -> Places | None:
    """Return the places of choices if these rows were numbered here; else ``None``."""
    return getattr(slots_KS, _PLACES, None) if slots_KS.numel() == num_slots else None


def _known(slots_KS: Tensor, num_slots: int) -> Tensor:
    """Return the slots, with ``num_slots`` for each that is outside 0..N-1."""
    return slots_KS.clamp(-1, num_slots).remainder(num_slots + 1)


def _rows_of_tokens(x_SM: Tensor, slots_KS: Tensor, num_slots: int) -> Tensor:
    places = _places(slots_KS, num_slots)
    if places is not None:
        return x_SM.index_select(0, places.token_N)
    token_N = slots_KS.new_full((num_slots + 1,), slots_KS.shape[1])
    token_N[_known(slots_KS, num_slots)] = torch.arange(slots_KS.shape[1], device=slots_KS.device)
    return F.pad(x_SM, (0, 0, 0, 1)).index_select(0, token_N[:-1])


def _sums_of_tokens(y_NM: Tensor, slots_KS: Tensor, weights_KS: Tensor | None, dtype: torch.dtype) -> Tensor:
    num_slots, width = y_NM.shape
    places = _places(slots_KS, num_slots)
    known_KS = slots_KS if places is not None else _known(slots_KS, num_slots)
    # Dropped choices read a row of zeros, whatever memory is behind the last row.
    rows_KSM = F.pad(y_NM, (0, 0, 0, 1)).index_select(0, known_KS.reshape(-1)).view(*slots_KS.shape, width)
    if weights_KS is None:
        wide = None if dtype == y_NM.dtype else torch.promote_types(dtype, y_NM.dtype)
        return rows_KSM.sum(0, dtype=wide).to(dtype)
    wide = functools.reduce(torch.promote_types, (dtype, y_NM.dtype, weights_KS.dtype), torch.float32)
    # The weight of a dropped choice may be nan.
    is_none_KS = known_KS == num_slots if places is None else places.is_none_KS
    weights_KS = weights_KS.to(wide).masked_fill(is_none_KS, 0)
    return (rows_KSM * weights_KS.unsqueeze(-1)).sum(0).to(dtype)
