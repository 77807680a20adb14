# SPDX-License-Identifier: Apache-2.0
"""Handles parameters that ZeRO 3 has partitioned: gathers them whole for a block, and fixes the order of gathers.

The engine, checkpoints and placement call it. DeepSpeed gathers the parameters of a module ahead of its forward and
backward, and those of the next modules with them. Dense parameters use one communicator and experts' another. Their
order follows from a set of parameters, by addresses. It differs between ranks, and NCCL may wait for ever. Hooks on
every module do this, activation functions within experts too, which run while lanes are busy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from ds_fsmoe.distributed.waits import waiting

_GATHER = "_PartitionedParameterCoordinator__all_gather_params"


def is_shared_out(parameter: torch.Tensor) -> bool:
    """Return True if ZeRO 3 has partitioned a parameter."""
    return hasattr(parameter, "ds_id")


@contextmanager
def gathered(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Gather whole parameters inside the block. Collective over the ranks that share them, if any."""
    shared = [each for each in parameters if is_shared_out(each)]
    with ExitStack() as stack:
        if shared:
            from deepspeed.runtime.zero.partition_parameters import GatheredParameters

            with waiting("weights that ZeRO 3 has shared out"):
                stack.enter_context(GatheredParameters(shared))
        yield


def gather_with(module: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
    """Register ZeRO 3 gathers of parameters for the calls of another module, forward and backward.

    Args:
        module: the module.
        parameters: the parameters of modules without calls.
    """
    from deepspeed.runtime.zero.partition_parameters import register_external_parameter

    for each in parameters:
        register_external_parameter(module, each)


def gather_module_by_module(model: nn.Module, inner: Collection[nn.Module]) -> None:
    """Make ZeRO 3 gather the weights of each module for its own calls, in blocks that contain certain modules.

    DeepSpeed marks the MoE blocks of some families as leaves, whose weights it gathers together, since their active
    experts differ between ranks. The input of a leaf may require no gradient, as in the first layer of a model with
    adapters. DeepSpeed then reads the gradients before they exist.

    Args:
        model: the model.
        inner: modules that always run.
    """
    from deepspeed.utils import set_z3_leaf_module, z3_leaf_module

    wanted = set(map(id, inner))
    for module in model.modules():
        if z3_leaf_module(module) and any(id(each) in wanted for each in module.modules()):
            set_z3_leaf_module(module, False)


def run_compiled(model: nn.Module) -> None:
    """Make ZeRO 3 run modules that ``torch.compile`` wrapped before the engine was made.

    DeepSpeed writes its own dict to each module and marks it at every forward. A compiled module passes this dict,
    which is empty, on to the module inside.

    Raises:
        RuntimeError: the module inside has weights, which would be lost.
    """
    from deepspeed.runtime.zero.parameter_offload import ZeROOrderedDict

    for name, module in model.named_modules():
        if "_orig_mod" not in module._modules:
            continue
        if module._orig_mod._parameters:
            raise RuntimeError(
                f"{name or 'the model'} was given to torch.compile before ds_fsmoe.initialize, and DeepSpeed's ZeRO "
                "3 cannot partition such a module: call its method compile() instead, or engine.compile()"
            )
        vars(module)["_parameters"] = ZeROOrderedDict(module)


def fence_gathers(optimizer: Any, experts: Iterable[nn.Module]) -> None:
    """Make DeepSpeed gather parameters in the same order on all ranks, independent of the lanes.

    Args:
        optimizer: the engine's optimizer at stage 3, or its placeholder if nothing is optimized.
        experts: the modules whose forwards run on lanes.
    """
    offload = getattr(optimizer, "parameter_offload", optimizer)
    coordinator = offload.get_param_coordinator()
    gather = getattr(coordinator, _GATHER)

    def gather_in_order(params: Iterable[torch.Tensor], forward: bool) -> None:
        gather(sorted(params, key=attrgetter("ds_id")), forward)

    setattr(coordinator, _GATHER, gather_in_order)
    # These are called chunk by chunk, or as often as there are rows; what they need is gathered with the experts.
    within = (each for module in experts for each in module.modules() if each is not module)
    hooks = {id(each) for module in within for each in (module._forward_pre_hooks, module._forward_hooks)}
    for handle in (*offload.forward_hooks, *offload.backward_hooks):
        if id(handle.hooks_dict_ref()) in hooks:
            handle.remove()
