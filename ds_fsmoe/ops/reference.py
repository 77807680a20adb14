# SPDX-License-Identifier: Apache-2.0
"""The ops in plain torch operators, on any device: they define the results that the other versions are tested against.

``loading`` chooses them for "reference"; ``plain`` computes the same faster, and ``compiled`` in kernels.

Letters: S tokens, E experts, K choices of a token, C slots of an expert, N = E * C slots in all, M width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

FORMS = ("silu", "gelu", "gelu_tanh", "silu_of_clamped", "clamped_silu", "swish_of_clamped")
"""Gated products, L being a limit.

``"silu"``, ``"gelu"``, ``"gelu_tanh"``: ``act(gate) * up``.
``"silu_of_clamped"``: ``silu(min(gate, L)) * clamp(up, -L, L)``.
``"clamped_silu"``: ``min(silu(gate), L) * clamp(up, -L, L)``.
``"swish_of_clamped"``: ``g * sigmoid(alpha * g) * (clamp(up, -L, L) + 1)`` with ``g = min(gate, L)``.
"""
PRIORITIES = ("choice", "token", "score")
"""The order of tokens in an expert's queue when more tokens chose it than it has slots.

``"choice"``: all first choices in the order of the tokens, then all second choices, and so on (GShard).
``"token"``: the order of the tokens, whichever of its choices the expert is.
``"score"``: the highest scores are kept, of equal ones the earlier token; kept ones are in the order of the tokens.
"""


class Slots(NamedTuple):
    """Holds the expert and the slot of every choice of every token."""

    experts_KS: Tensor
    """[K, S] int64: the expert of every choice, the best first, dropped choices included."""
    slots_KS: Tensor
    """[K, S] int64: ``expert * capacity + position``, or ``num_experts * capacity`` where the choice was dropped."""
    counts_E: Tensor
    """[E] int64: the tokens that chose each expert, before any was dropped; without those that take no part."""


class Rows(NamedTuple):
    """Holds the numbers of the rows of a decision. V: queues, one for each expert in each segment of the tokens."""

    rows_KS: Tensor
    """[K, S] int64: the number of each choice among all rows, queue by queue; K * S for a choice without a row."""
    counts_V: Tensor
    """[V] int64: the rows of each queue."""
    ends_V: Tensor
    """[V] int32: the end of each queue."""
    fault: Tensor
    """Scalar int64: bit 0 for a choice that is out of range, bit 1 for an expert with more rows than its limit."""


def gather_rows(x_RM: Tensor, index_N: Tensor) -> Tensor:
    """Return rows by number, with zeros for an empty slot. Differentiable in ``x_RM``.

    Args:
        x_RM: [R, M], floating point, any device.
        index_N: [N], int64, row numbers. A number outside 0..R-1 is an empty slot; by convention R.

    Returns:
        [N, M] in the dtype of ``x_RM``: row ``index_N[n]`` of ``x_RM``, or zeros.
    """
    num_rows, width = x_RM.shape
    # Empty slots select a row of zeros. A mask on the result would multiply instead, and inf times 0 is nan.
    padded_RM = torch.cat([x_RM, x_RM.new_zeros(1, width)])
    return padded_RM.index_select(0, places_of(index_N, num_rows))


def add_rows(y_NM: Tensor, index_N: Tensor, num_rows: int) -> Tensor:
    """Add up rows by number: the gradient of :func:`gather_rows`. Differentiable in ``y_NM``.

    Args:
        y_NM: [N, M], floating point.
        index_N: [N] int64, the place of each row. A row with a number outside 0..R-1 is ignored.
        num_rows: R.

    Returns:
        [R, M]; zeros for places without a row.
    """
    # An extra row takes ignored rows.
    sums_RM = y_NM.new_zeros(num_rows + 1, y_NM.shape[1])
    return sums_RM.index_add(0, places_of(index_N, num_rows), y_NM)[:-1]


def places_of(index_N: Tensor, num_rows: int) -> Tensor:
    """Return the numbers, with ``num_rows`` for each that is outside 0..R-1."""
    return torch.where((index_N < 0) | (index_N >= num_rows), num_rows, index_N)


def arrange(
    x_SM: Tensor,
    slots_KS: Tensor,
    num_slots: int,
    dtype: torch.dtype | None = None,
    *,
    gather: Callable[[Tensor, Tensor], Tensor] = gather_rows,
) -> Tensor:
    """Copy token rows into slots; a slot without a token is zero. Differentiable in ``x_SM``.

    Args:
        x_SM: [S, M], floating point.
        slots_KS: [K, S] int64, the slot of every choice; a number outside 0..N-1 (by convention N) is a dropped choice.
            No slot may appear twice.
        num_slots: N = E * C.
        dtype: of the result; ``None`` is that of ``x_SM``.
        gather: a version of :func:`gather_rows`.

    Returns:
        The slots, [N, M].
    """
    num_tokens = x_SM.shape[0]
    # An extra slot takes dropped choices and is removed again: no branch, and no wait for the device.
    token_of_slot = slots_KS.new_full((num_slots + 1,), num_tokens)
    tokens_KS = torch.arange(num_tokens, device=slots_KS.device).expand_as(slots_KS)
    is_dropped_KS = (slots_KS < 0) | (slots_KS >= num_slots)
    token_of_slot.scatter_(0, torch.where(is_dropped_KS, num_slots, slots_KS).reshape(-1), tokens_KS.reshape(-1))
    return gather(x_SM.to(dtype or x_SM.dtype), token_of_slot[:-1])


def restore(
    y_NM: Tensor,
    slots_KS: Tensor,
    weights_KS: Tensor | None = None,
    dtype: torch.dtype | None = None,
    by_slot: bool = False,
    *,
    gather: Callable[[Tensor, Tensor], Tensor] = gather_rows,
) -> Tensor:
    """Compute the weighted sum of every token's rows; zero where all its choices were dropped.

    Differentiable in ``y_NM`` and ``weights_KS``.

    Args:
        y_NM: [N, M], floating point.
        slots_KS: [K, S] int64, as for :func:`arrange`.
        weights_KS: [K, S], float32 or float64; ``None`` counts every row once.
        dtype: of the result; ``None`` is that of ``y_NM``.
        by_slot: whether terms are summed in the order of the slots instead of that of the choices.
        gather: a version of :func:`gather_rows`.

    Returns:
        [S, M], summed in float32 (float64 if an operand is) and rounded once.
    """
    if by_slot:
        slots_KS, order_KS = slots_KS.sort(dim=0, stable=True)
        weights_KS = None if weights_KS is None else weights_KS.gather(0, order_KS)
    dtype = dtype or y_NM.dtype
    sum_dtype = torch.float32
    for each in (y_NM.dtype, dtype, *(() if weights_KS is None else (weights_KS.dtype,))):
        sum_dtype = torch.promote_types(sum_dtype, each)
    out_SM = y_NM.new_zeros((slots_KS.shape[1], y_NM.shape[1]), dtype=sum_dtype)
    for choice, slots_S in enumerate(slots_KS):
        rows_SM = gather(y_NM, slots_S).to(sum_dtype)
        if weights_KS is not None:
            # A dropped choice has no part in the sum, whatever its weight: a nan there must not reach the result.
            is_dropped_S = (slots_S < 0) | (slots_S >= len(y_NM))
            rows_SM = rows_SM * weights_KS[choice].to(sum_dtype).masked_fill(is_dropped_S, 0).unsqueeze(1)
        out_SM = out_SM + rows_SM
    return out_SM.to(dtype)


def restore_backward(d_out_SM: Tensor, y_NM: Tensor, slots_KS: Tensor, weights_KS: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows, [N, M], and of the weights, [K, S], of a weighted :func:`restore`."""
    with torch.enable_grad():
        y_NM, weights_KS = y_NM.detach().requires_grad_(), weights_KS.detach().requires_grad_()
        out_SM = restore(y_NM, slots_KS, weights_KS, d_out_SM.dtype)
    return torch.autograd.grad(out_SM, (y_NM, weights_KS), d_out_SM)


def gated(x_RF: Tensor, form: str, interleaved: bool = False, limit: float = 0.0, alpha: float = 0.0) -> Tensor:
    """Compute the gated product of rows step by step, each rounded to the rows' dtype. Differentiable in ``x_RF``.

    Args:
        x_RF: [R, 2H], floating point: gate and up.
        form: one of :data:`FORMS`.
        interleaved: whether gate and up are the even and odd columns, instead of the halves of a row.
        limit: of the clamped forms.
        alpha: of ``"swish_of_clamped"``.

    Returns:
        [R, H].

    Raises:
        ValueError: an unknown form.
    """
    if form not in FORMS:
        raise ValueError(f"form = {form!r}: must be one of {', '.join(map(repr, FORMS))}")
    gate_RH, up_RH = (x_RF[:, ::2], x_RF[:, 1::2]) if interleaved else x_RF.chunk(2, dim=1)
    if "clamped" in form:
        up_RH = up_RH.clamp(-limit, limit)
    if form.endswith("_of_clamped"):
        gate_RH = gate_RH.clamp(max=limit)
    if form == "swish_of_clamped":
        return gate_RH * torch.sigmoid(gate_RH * alpha) * (up_RH + 1)
    if form.startswith("gelu"):
        return F.gelu(gate_RH, approximate="tanh" if form == "gelu_tanh" else "none") * up_RH
    act_RH = F.silu(gate_RH)
    return (act_RH.clamp(max=limit) if form == "clamped_silu" else act_RH) * up_RH


def gated_backward(
    x_RF: Tensor, dh_RH: Tensor, form: str, interleaved: bool = False, limit: float = 0.0, alpha: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the rows of :func:`gated`, [R, 2H], and its result once more, [R, H]."""
    with torch.enable_grad():
        leaf_RF = x_RF.detach().requires_grad_()
        h_RH = gated(leaf_RF, form, interleaved, limit, alpha)
    (dx_RF,) = torch.autograd.grad(h_RH, leaf_RF, dh_RH)
    return dx_RF, h_RH.detach()


def top_k_slots(
    scores_SE: Tensor, k: int, capacity: int, used_S: Tensor | None = None, priority: str = "choice"
) -> Slots:
    """Choose every token's ``k`` best experts, and assign a slot to each choice.

    Args:
        scores_SE: [S, E] float32 or float64, the higher the better (probabilities or logits). Of equal ones the expert
            with the smaller number is better; NaN is better than any number.
        k: 1..E.
        capacity: C, slots of every expert. With C = S no choice is dropped: see :func:`with_capacity`.
        used_S: [S] bool, tokens that take part; the others get no slot and are not counted. ``None`` means all do.
        priority: one of ``PRIORITIES``.

    Raises:
        ValueError: an impossible ``k``, ``capacity`` or ``priority``.
    """
    num_experts = scores_SE.shape[1]
    if not 1 <= k <= num_experts:
        raise ValueError(f"k = {k}: must be between 1 and the number of experts ({num_experts})")
    experts_SK = torch.sort(scores_SE.detach(), dim=1, descending=True, stable=True).indices[:, :k]
    scores_KS = scores_SE.detach().gather(1, experts_SK).t()
    return take_slots(experts_SK.t().contiguous(), num_experts, capacity, used_S, priority, scores_KS)


def take_slots(
    experts_KS: Tensor,
    num_experts: int,
    capacity: int,
    used_S: Tensor | None = None,
    priority: str = "choice",
    scores_KS: Tensor | None = None,
) -> Slots:
    """Assign a slot to every choice, for gates that do not choose by the ``k`` highest scores.

    Args:
        experts_KS: [K, S] int64, different ones for each token; a number outside 0..E-1 is a choice that is not made.
        num_experts: E.
        capacity: C, slots of every expert.
        used_S: [S] bool, as for :func:`top_k_slots`.
        priority: one of ``PRIORITIES``.
        scores_KS: [K, S], the scores of choices; needed for ``"score"`` only.

    Raises:
        ValueError: an impossible ``capacity`` or ``priority``, or missing scores.
    """
    if priority not in PRIORITIES:
        raise ValueError(f"priority = {priority!r}: must be one of {', '.join(map(repr, PRIORITIES))}")
    if capacity < 0:
        raise ValueError(f"capacity = {capacity}: must not be negative")
    is_choice_KS = (experts_KS >= 0) & (experts_KS < num_experts)
    if used_S is not None:
        is_choice_KS = is_choice_KS & used_S
    # The last queue, behind all experts, is for tokens that take no part.
    queues_KS = torch.where(is_choice_KS, experts_KS, num_experts)
    stays_KS = is_choice_KS
    if priority == "score":
        if scores_KS is None:
            raise ValueError("priority = 'score' needs scores_KS")
        best_first = torch.sort(scores_KS.t().reshape(-1), descending=True, stable=True).indices
        rank = _places(queues_KS.t().reshape(-1)[best_first], num_experts)
        rank_SK = torch.empty_like(rank).scatter_(0, best_first, rank).view(queues_KS.t().shape)
        stays_KS = stays_KS & (rank_SK.t() < capacity)
    queue_KS = torch.where(stays_KS, queues_KS, num_experts)
    if priority == "choice":
        position_KS = _places(queue_KS.reshape(-1), num_experts).view(queue_KS.shape)
    else:
        position_KS = _places(queue_KS.t().reshape(-1), num_experts).view(queue_KS.t().shape).t()
    stays_KS = stays_KS & (position_KS < capacity)
    slots_KS = torch.where(stays_KS, experts_KS * capacity + position_KS, num_experts * capacity)
    counts_E = queues_KS.new_zeros(num_experts + 1)
    counts_E.scatter_add_(0, queues_KS.reshape(-1), torch.ones_like(queues_KS.reshape(-1)))
    return Slots(experts_KS, slots_KS.contiguous(), counts_E[:-1])


def number_rows(
    choices_KS: Tensor,
    num_experts: int,
    capacity: int = 1,
    segments_3T: Tensor | None = None,
    limits_E: Tensor | None = None,
) -> Rows:
    """Number, count and check the rows of a decision. The host does not wait for the device.

    Args:
        choices_KS: [K, S] int64, ``expert * capacity + place``; ``num_experts * capacity`` is a choice that is not
            made. A number out of range is not made either, and a fault.
        num_experts: E.
        capacity: the places of every expert.
        segments_3T: [3, T] int64, for tokens in several chunks: the end of each segment, its queue of expert 0, and the
            step from one expert's queue to the next. ``None``: one segment, whose queues are the experts.
        limits_E: [E] int64, the maximum rows of each expert; ``None``: no limit.
    """
    num_choices, num_tokens = choices_KS.shape
    none = num_experts * capacity
    is_row_KS = (choices_KS >= 0) & (choices_KS < none)
    queue_KS = expert_KS = choices_KS.div(max(1, capacity), rounding_mode="floor")
    num_queues = num_experts
    if segments_3T is not None:
        num_queues *= segments_3T.shape[1]
        end_T, first_T, step_T = segments_3T.unbind()
        tokens = torch.arange(num_tokens, device=choices_KS.device)
        segment_S = torch.bucketize(tokens, end_T.contiguous(), right=True)
        queue_KS = expert_KS * step_T[segment_S] + first_T[segment_S]
    queue_KS = torch.where(is_row_KS, queue_KS, num_queues)
    queue_of_place = queue_KS.t().reshape(-1)
    lengths = queue_KS.new_zeros(num_queues + 1).scatter_add_(0, queue_of_place, torch.ones_like(queue_of_place))
    by_queue = torch.sort(queue_of_place, stable=True).indices
    rows = torch.empty_like(by_queue).scatter_(0, by_queue, torch.arange(len(by_queue), device=by_queue.device))
    rows_KS = torch.where(is_row_KS, rows.view(num_tokens, num_choices).t(), num_choices * num_tokens)
    fault = ((choices_KS < 0) | (choices_KS > none)).any().long()
    if limits_E is not None:
        expert_KS = torch.where(is_row_KS, expert_KS, num_experts).reshape(-1)
        of_experts = queue_KS.new_zeros(num_experts + 1).scatter_add_(0, expert_KS, torch.ones_like(expert_KS))
        fault = fault + 2 * (limits_E < of_experts[:-1]).any().long()
    counts_V = lengths[:-1]
    return Rows(rows_KS.contiguous(), counts_V, counts_V.cumsum(0).to(torch.int32), fault)


def with_capacity(slots_KS: Tensor, num_experts: int, old: int, new: int) -> Tensor:
    """Return slots with the same positions for another capacity; choices beyond it are dropped.

    For dropless gates: assign slots with a capacity of S, agree on the largest count of any rank, and use that as the
    new capacity.

    Args:
        slots_KS: [K, S] int64, with a capacity of ``old``.
        num_experts: E.
        old, new: capacities.
    """
    if old == 0:
        return torch.full_like(slots_KS, num_experts * new)
    expert_KS, position_KS = slots_KS // old, slots_KS % old
    stays_KS = (slots_KS < num_experts * old) & (position_KS < new)
    return torch.where(stays_KS, expert_KS * new + position_KS, num_experts * new)


def _places(queue: Tensor, num_queues: int) -> Tensor:
    """Return the place of each element in its queue, [n] from 0, for queue numbers [n] in 0..Q in the order of
    arrival."""
    by_queue = torch.sort(queue, stable=True)
    lengths = queue.new_zeros(num_queues + 1).scatter_add_(0, queue, torch.ones_like(queue))
    starts = lengths.cumsum(0) - lengths
    place = torch.arange(len(queue), device=queue.device) - starts[by_queue.values]
    return torch.empty_like(place).scatter_(0, by_queue.indices, place)
