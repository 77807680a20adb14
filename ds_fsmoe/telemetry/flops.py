# SPDX-License-Identifier: Apache-2.0
"""Makes DeepSpeed's flops profiler count grouped products, which it lacks. The engine calls it when it is complete."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.profiling.flops_profiler import profiler as deepspeeds


def count_grouped_products(engine: Any) -> None:
    """Make the profiler of a DeepSpeed engine count grouped products, wherever it counts others.

    Args:
        engine: the complete engine; one without such a profiler is unchanged.
    """
    # Of the engine itself: what it does not have it looks for in the user's model.
    profiler = vars(engine).get("flops_profiler")
    if profiler is None:
        return
    start, stop, grouped_mm = profiler.start_profile, profiler.stop_profile, F.grouped_mm

    @functools.wraps(start)
    def counting(*args: Any, **kwargs: Any) -> None:
        start(*args, **kwargs)
        F.grouped_mm = deepspeeds.wrapFunc(grouped_mm, _flops_of)

    @functools.wraps(stop)
    def over() -> None:
        F.grouped_mm = grouped_mm
        stop()

    profiler.start_profile, profiler.stop_profile = counting, over


def _flops_of(rows: torch.Tensor, weights: torch.Tensor, **_: Any) -> tuple[int, int]:
    """Return (operations, multiply-accumulates) of a product: each row is multiplied with one of the weights."""
    macs = math.prod(rows.shape) * weights.shape[-1]
    return 2 * macs, macs
