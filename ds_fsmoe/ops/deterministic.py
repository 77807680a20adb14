# SPDX-License-Identifier: Apache-2.0
"""Gathers rows and adds up rows by index, always in the same order of additions.

On CUDA torch adds rows with atomics (``index_add``, and the gradients of ``index_select``). The order of rows for one
place then varies, and so do the last bits of a sum of three. Here rows are first sorted by place, and each place adds
up its own rows. The host does not wait for the device. ``loading`` chooses these functions for ``deterministic`` runs.

Letters: R places, N rows, M width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_fsmoe.ops import reference


def gather_rows(x_RM: Tensor, index_N: Tensor) -> Tensor:
    """Gather rows as :func:`ds_fsmoe.ops.reference.gather_rows`, with gradients of any order from this module."""
    return _Gather.apply(x_RM, index_N)


def add_rows(y_NM: Tensor, index_N: Tensor, num_rows: int) -> Tensor:
    """Add up rows as :func:`ds_fsmoe.ops.reference.add_rows`, each sum in the order of the rows.

    Sums are computed in float32 or wider, and rounded once.
    """
    return _Add.apply(y_NM, index_N, num_rows)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RM: Tensor, index_N: Tensor) -> Tensor:
        ctx.save_for_backward(index_N)
        ctx.num_rows = x_RM.shape[0]
        return reference.gather_rows(x_RM, index_N)

    @staticmethod
    def backward(ctx: Any, dy_NM: Tensor) -> tuple[Tensor, None]:
        (index_N,) = ctx.saved_tensors
        return add_rows(dy_NM, index_N, ctx.num_rows), None


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_NM: Tensor, index_N: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(index_N)
        places_N = reference.places_of(index_N, num_rows)
        sorted_N, order_N = torch.sort(places_N, stable=True)
        starts = torch.searchsorted(sorted_N, torch.arange(num_rows + 1, device=index_N.device))
        rows_NM = y_NM.index_select(0, order_N).to(torch.promote_types(y_NM.dtype, torch.float32))
        # Without checks of the starts, for which the host would wait; rows behind the last start have no place.
        sums_RM = torch.segment_reduce(rows_NM, "sum", offsets=starts, axis=0, initial=0, unsafe=True)
        return sums_RM.to(y_NM.dtype)

    @staticmethod
    def backward(ctx: Any, dx_RM: Tensor) -> tuple[Tensor, None, None]:
        (index_N,) = ctx.saved_tensors
        return gather_rows(dx_RM, index_N), None, None
