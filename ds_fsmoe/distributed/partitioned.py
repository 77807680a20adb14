# SPDX-License-Identifier: Apache-2.0
"""Knows parameters that ZeRO 3 has shared out over ranks, and how to have them whole for a while."""

from __future__ import annotations

from collections.abc import Collection, Iterable
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


def gather_module_by_module(model: nn.Module, inner: Collection[nn.Module]) -> None:
    """Let ZeRO 3 gather the weights of each module for its own calls, in blocks that contain certain modules.

    DeepSpeed marks the MoE blocks of some families as leaves, whose weights it gathers together, since which of their
    experts run differs. Of a leaf whose input requires no gradient, as in the first layer of a model with adapters, it
    takes the gradients before they are there.

    Args:
        model: the model.
        inner: modules that always run.
    """
    from deepspeed.utils import set_z3_leaf_module, z3_leaf_module

    wanted = set(map(id, inner))
    for module in model.modules():
        if z3_leaf_module(module) and any(id(each) in wanted for each in module.modules()):
            set_z3_leaf_module(module, False)
