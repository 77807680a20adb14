# SPDX-License-Identifier: Apache-2.0
"""The ops written with plain torch operators: what the compiled ones are measured against, and the default."""

from __future__ import annotations

import torch
from torch import Tensor


def gather_rows(x_RM: Tensor, index_N: Tensor) -> Tensor:
    """Reads rows by number; an empty slot reads as a row of zeros. Differentiable in ``x_RM``.

    Args:
        x_RM: [R, M], floating point, any device.
        index_N: [N], int64, row numbers. Anything outside 0..R-1 is an empty slot; R is the usual way to write it.

    Returns:
        [N, M] in the dtype of ``x_RM``: row ``index_N[n]`` of ``x_RM``, or zeros.
    """
    num_rows, width = x_RM.shape
    # Empty slots select a row of zeros. Masking the result instead would multiply, and inf times 0 is nan.
    padded_RM = torch.cat([x_RM, x_RM.new_zeros(1, width)])
    is_empty_N = (index_N < 0) | (index_N >= num_rows)
    return padded_RM.index_select(0, torch.where(is_empty_N, num_rows, index_N))
