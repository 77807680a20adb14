# SPDX-License-Identifier: Apache-2.0
"""Computes the norm of all gradients where DeepSpeed's is wrong: every distinct parameter once, equal on every rank.

With ZeRO (stages 1 and 2) DeepSpeed's norm is right and is kept. Without it (stage 0) DeepSpeed 0.19.8 averages the
norms of the ranks, or leaves experts out. The value then depends on how experts are spread, and gradients are clipped
by it. The engine calls this module before each optimizer step.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.utils import is_moe_param, is_moe_param_group
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.utils import PIPE_REPLICATED, combine_grad_norm_groups, is_model_parallel_parameter
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups as stock_groups
from deepspeed.utils.bwc import bwc_tensor_model_parallel_rank
from torch import nn

from ds_fsmoe.distributed.fail_together import on_every_rank
from ds_fsmoe.distributed.waits import waiting
from ds_fsmoe.log import log_on_rank_0


def norm_of_reduced(parameters: Iterable[nn.Parameter], mpu: Any = None) -> torch.Tensor:
    """Return the 2-norm of the reduced gradients of a model, as a scalar. Collective.

    A dense gradient is the same on all ranks and counts once. Squares of experts' gradients are summed over the ranks
    with different experts or shards; those of tensor-parallel ranks or stages, over these.

    Args:
        parameters: the model's parameters on this rank; those without a gradient do not count.
        mpu: DeepSpeed's ``mpu``, or ``None``.
    """
    is_counted = bwc_tensor_model_parallel_rank(mpu) == 0
    whole: list[torch.Tensor] = []
    split: dict[str, list[torch.Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is None or getattr(parameter, PIPE_REPLICATED, False):
            continue
        norm = parameter.grad.detach().float().norm(2)
        if is_moe_param(parameter) and stock_groups._get_expert_parallel_group(parameter.group_name).size() > 1:
            split[parameter.group_name].append(norm)
        elif is_counted or is_model_parallel_parameter(parameter):
            whole.append(norm)
    device = next((each.device for norms in (whole, *split.values()) for each in norms), None)
    total = _sum_of_squares(whole, device)
    # By name: every rank that holds experts of a group has parameters of that name.
    for name in sorted(split):
        of_group = _sum_of_squares(split[name], device)
        with waiting("the norm of gradients"):
            dist.all_reduce(of_group, group=stock_groups._get_expert_parallel_group(name))
        # Tensor-parallel ranks are among those of the group, and have all found the same.
        total = total + of_group if is_counted else total
    if mpu is not None:
        with waiting("the norm of gradients"):
            dist.all_reduce(total, group=mpu.get_model_parallel_group())
    return total.sqrt()


def _sum_of_squares(norms: list[torch.Tensor], device: torch.device | None) -> torch.Tensor:
    return torch.stack(norms).pow(2).sum() if norms else torch.zeros((), device=device)


def clip_by_norm(parameters: Iterable[nn.Parameter], max_norm: float, mpu: Any = None) -> torch.Tensor:
    """Scale gradients down to ``max_norm`` if their norm is above it; return the norm."""
    parameters = [each for each in parameters if each.grad is not None]
    norm = norm_of_reduced(parameters, mpu)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for each in parameters:
        each.grad.mul_(factor)
    return norm


def correct_norm(engine: Any, has_stock_layers: bool) -> None:
    """Make an engine's optimizer clip by the true norm, and warn of the difference.

    The engine clips for a plain optimizer (see ``FSMoEEngine.clip_fp32_gradients``).

    Args:
        engine: the engine.
        has_stock_layers: whether there are DeepSpeed's own MoE layers. For a Hugging Face model stock's norm is right.
    """
    optimizer = engine.optimizer
    if isinstance(optimizer, ZeROOptimizer):
        return
    if has_stock_layers and engine.gradient_clipping() > 0:
        log_on_rank_0(
            f"gradient_clipping = {engine.gradient_clipping():g} with zero_optimization.stage = 0 clips unlike "
            "stock (to compare, set stage 1 or clipping 0)",
            logging.WARNING,
            "It is clipped by the norm of all gradients. Stock DeepSpeed's norm depends on ep_size or leaves experts "
            "out, so its weights differ",
        )
    if not isinstance(optimizer, FP16_UnfusedOptimizer):
        return
    stock_unscale = optimizer.unscale_and_clip_grads

    def unscale_and_clip_grads(total_norm: Any, apply_scale: bool = True) -> Any:
        # It comes here with the norm of the dense gradients alone, when all have been reduced.
        parameters = (each for group in optimizer.fp16_groups for each in group)
        norm = norm_of_reduced(parameters, engine.mpu).item()
        optimizer._global_grad_norm = norm
        return stock_unscale(norm, apply_scale)

    optimizer.unscale_and_clip_grads = unscale_and_clip_grads


def complete_norms(optimizer: Any) -> None:
    """Make the optimizer of a pipeline stage take part in the norms of groups that it lacks. Collective over all ranks.

    DeepSpeed adds up norms over the stages: at ZeRO 1 of each parameter group; in bf16 without ZeRO, of dense
    parameters and of experts. Experts are separate groups, so a stage without experts has fewer norms, and DeepSpeed
    0.19.8 waits there for ever.

    Args:
        optimizer: the optimizer of an engine; it is unchanged if all stages have as many groups, or if DeepSpeed adds
            up no norms over stages.
    """
    is_bf16 = isinstance(optimizer, BF16_Optimizer)
    groups = optimizer.optimizer.param_groups if is_bf16 else []
    names = list(dict.fromkeys(each["name"] for each in groups if is_moe_param_group(each)))
    is_zeros = isinstance(optimizer, DeepSpeedZeroOptimizer)
    of_ranks = on_every_rank((len(optimizer.bit16_groups) if is_zeros else 0, names))
    if is_bf16:
        _complete_experts(optimizer, sorted({name for _, of_rank in of_ranks for name in of_rank}), names)
    num_missing = max(count for count, _ in of_ranks) - len(optimizer.bit16_groups) if is_zeros else 0
    if not num_missing:
        return
    norm_of_own = optimizer.scaled_global_norm

    def scaled_global_norm(norm_type: int = 2) -> torch.Tensor:
        norms = [norm_of_own(norm_type)]
        for _ in range(num_missing):
            # What the stages that have the group add up; this one adds nothing.
            squares = torch.zeros((), dtype=torch.float32, device=norms[0].device)
            optimizer._model_parallel_all_reduce(tensor=squares, op=dist.ReduceOp.SUM)
            norms.append(squares.sqrt())
        return combine_grad_norm_groups(norms)

    optimizer.scaled_global_norm = scaled_global_norm


def _complete_experts(optimizer: BF16_Optimizer, names: list[str], own: list[str]) -> None:
    """Make DeepSpeed's optimizer for bf16 include the norms of the experts of all stages.

    Args:
        optimizer: the optimizer.
        names: DeepSpeed's names of the groups of experts of all stages.
        own: the names of the groups of this stage.
    """
    if names == own:  # as many, in the order of all
        return
    if not optimizer.has_moe_layers:
        optimizer.has_moe_layers, optimizer.expert_gradients = True, {}
    grads_of_own = optimizer.get_grads_for_norm

    def get_grads_for_norm(for_clipping: bool = False) -> Any:
        if for_clipping:
            return grads_of_own(for_clipping)
        dense, experts = grads_of_own()
        nothing = [torch.zeros(1, device=optimizer.fp32_groups_flat_partition[0].device)]
        return dense, {name: experts.get(name, nothing) for name in names}

    optimizer.get_grads_for_norm = get_grads_for_norm
