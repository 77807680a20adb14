# SPDX-License-Identifier: Apache-2.0
"""Knows parameters that ZeRO 3 has shared out over ranks: their whole shape, and how to have them whole for a while."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def shape_of(weight: Any) -> tuple[int, ...] | None:
    """Return the whole shape of a parameter; ``None`` for what is no tensor."""
    shape = getattr(weight, "ds_shape", getattr(weight, "shape", None))
    return None if shape is None else tuple(shape)


def numel_of(weight: torch.Tensor) -> int:
    """Return the number of elements of a whole parameter."""
    return math.prod(shape_of(weight) or (0,))


def is_shared_out(parameter: torch.Tensor) -> bool:
    """Return whether ZeRO 3 has shared a parameter out."""
    return hasattr(parameter, "ds_id")


def gathered(parameters: Iterable[torch.Tensor]) -> AbstractContextManager:
    """Have parameters whole meanwhile. Collective over the ranks that share them, if there are such."""
    shared = [each for each in parameters if is_shared_out(each)]
    if not shared:
        return nullcontext()
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    return GatheredParameters(shared)
