# SPDX-License-Identifier: Apache-2.0
"""Compiled: from scores to slots. What each computes is written out in ``ds_fsmoe.ops.reference``.

The operators exist once :func:`ds_fsmoe.ops.load_ops` has loaded a library. Their results are whole numbers, so there
are no gradients.
"""

from __future__ import annotations

import functools

import torch
from torch import SymInt, Tensor

from ds_fsmoe.ops.reference import Rows, Slots


def top_k_slots(
    scores_SE: Tensor, k: int, capacity: int, used_S: Tensor | None = None, priority: str = "choice"
) -> Slots:
    """As :func:`ds_fsmoe.ops.reference.top_k_slots`, in one pass.

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
    """As :func:`ds_fsmoe.ops.reference.take_slots`.

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
    """As :func:`ds_fsmoe.ops.reference.number_rows`, in one pass over the choices.

    Raises:
        RuntimeError: shapes or dtypes that do not fit.
    """
    return Rows(*torch.ops.fsmoe.number_rows.default(choices_KS, num_experts, capacity, segments_3T, limits_E))


@functools.cache
def register_formulas() -> None:
    """Tells torch the output shapes of the operators. Call it after their schemas are defined."""
    torch.library.register_fake("fsmoe::top_k_slots", _top_k_slots_fake)
    torch.library.register_fake("fsmoe::take_slots", _take_slots_fake)
    torch.library.register_fake("fsmoe::number_rows", _number_rows_fake)


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
