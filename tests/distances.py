# SPDX-License-Identifier: Apache-2.0
"""How far numbers are from others, so that nan never passes for near."""

from __future__ import annotations

import math

import torch


def furthest(found: torch.Tensor | None, wanted: torch.Tensor, order: float = math.inf) -> float:
    """Return the norm of the differences as a share of that of the wanted numbers: by default, of the largest.

    No tensor is as far off as zeros may be; nan on either side, and another shape, are infinitely far off.
    """
    if found is None:
        return float(wanted.ne(0).any())
    if found.shape != wanted.shape:
        return math.inf
    if not wanted.numel():
        return 0.0
    off, scale = (torch.linalg.vector_norm(each, order).item() for each in (found.double() - wanted, wanted.double()))
    share = off / (scale if scale > 1e-9 else 1.0)
    return math.inf if math.isnan(share) else share
