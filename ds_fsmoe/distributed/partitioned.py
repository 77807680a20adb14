# SPDX-License-Identifier: Apache-2.0
"""Knows parameters that ZeRO 3 has shared out over ranks, and how to have them whole for a while."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn


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


def gather_with(module: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
    """Let ZeRO 3 gather parameters for the calls of a module that is not theirs, forward and backward.

    Args:
        module: the module.
        parameters: those of modules that nobody calls.
    """
    from deepspeed.runtime.zero.partition_parameters import register_external_parameter

    for each in parameters:
        register_external_parameter(module, each)
