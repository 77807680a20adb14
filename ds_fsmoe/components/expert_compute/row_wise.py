# SPDX-License-Identifier: Apache-2.0
"""A check of the experts' law: row i of the result depends on row i of the input alone."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from ds_fsmoe.components.expert_compute.call_context import RandomState, buffers_kept

_RANKS, _SLOTS = 2, 5


class NotRowWiseError(ValueError):
    """A row of an expert's result depends on more than the same row of its input. The message says on what."""


class RowShapeError(ValueError):
    """An expert changes the number of rows, or their width."""


def check_row_wise(
    expert: nn.Module,
    model_dim: int,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    keep_expert_dim: bool = False,
) -> bool:
    """Try an expert on a few rows of random numbers, in the mode it is in and through ``module(...)``.

    Other rows are changed and the row in question must stay; then, unless the expert draws random numbers, the rows
    are cut and each must come out as before. Random-number generators, gradients and buffers are left as they were.

    Args:
        expert: the module.
        model_dim: M.
        dtype, device: of the rows; those of the expert's first floating-point parameter unless given.
        keep_expert_dim: call the module with [N, 1, c, M], as stock does, instead of [N, c, M].

    Returns:
        Whether the expert draws random numbers: then it is row-wise as far as they are the same, and rows that are
        cut otherwise draw others.

    Raises:
        RowShapeError: the expert changes the number of rows or their width.
        NotRowWiseError: it is not row-wise.
    """
    like = next((each for each in expert.parameters() if each.is_floating_point()), torch.empty(0))
    dtype, device = dtype or like.dtype, torch.device(device or like.device)
    generator = torch.Generator().manual_seed(0)
    x_NcM = torch.randn(_RANKS, _SLOTS, model_dim, generator=generator).to(device, dtype)
    other_NcM = torch.randn(_RANKS, _SLOTS, model_dim, generator=generator).to(device, dtype)

    call = partial(_called, expert, keep_expert_dim)
    differs = partial(_differs, dtype)
    state = RandomState.now(device)
    with torch.no_grad(), buffers_kept(expert), state.replayed():
        y_NcM = call(x_NcM)
        # Numbers of torch's generators are missed by whoever draws next, even where they change nothing here; those of
        # others show in another result, as they have moved on.
        draws = not state.is_now() or differs(call(x_NcM), y_NcM)
        # The middle row sees rows change before it, after it, and in the other rank's block.
        for rank, slot in ((0, _SLOTS // 2), (1, 0), (_RANKS - 1, _SLOTS - 1)):
            changed_NcM = other_NcM.clone()
            changed_NcM[rank, slot] = x_NcM[rank, slot]
            with state.replayed():  # the same numbers: dropout takes out the same elements
                if differs(call(changed_NcM)[rank, slot], y_NcM[rank, slot]):
                    raise _not_row_wise(expert, "a row of its result changes when other rows do")
        for start, stop in () if draws else ((0, 2), (2, _SLOTS)):
            if differs(call(x_NcM[:, start:stop]), y_NcM[:, start:stop]):
                raise _not_row_wise(expert, "a row of its result depends on the row's place or on the number of rows")
    return draws


def _called(expert: nn.Module, keep_expert_dim: bool, x_NcM: torch.Tensor) -> torch.Tensor:
    x = (x_NcM.unsqueeze(1) if keep_expert_dim else x_NcM).clone()
    y = expert(x)
    y = y[0] if isinstance(y, tuple) else y
    if y.shape != x.shape:
        raise RowShapeError(
            f"expert {type(expert).__name__} made {tuple(y.shape)} of {tuple(x.shape)}: an expert must return a "
            "row of the same width for every row"
        )
    return y.squeeze(1) if keep_expert_dim else y


def _differs(dtype: torch.dtype, one: torch.Tensor, other: torch.Tensor) -> bool:
    # Products of other heights add in another order: some roundings are allowed, and no more.
    tolerance = min(1000 * max(torch.finfo(each).eps for each in (dtype, one.dtype)), 0.02)
    one, other = one.double(), other.double()
    largest = float(one.nan_to_num().abs().max())
    return not torch.allclose(one, other, rtol=tolerance, atol=tolerance * largest, equal_nan=True)


def _not_row_wise(expert: nn.Module, why: str) -> NotRowWiseError:
    return NotRowWiseError(
        f"expert {type(expert).__name__} is not row-wise: {why}. Rows are computed in chunks, so each row of the "
        "result may depend on the same row of the input alone"
    )
