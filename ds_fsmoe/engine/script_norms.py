# SPDX-License-Identifier: Apache-2.0
"""Computes norms of gradients for scripts that clip by themselves: experts of all ranks count, whoever computes.

Without ZeRO a script may call torch's ``clip_grad_norm_`` between backward and step. Each rank would find a norm of its
own there, of its own experts, and would scale dense gradients by another factor than the others.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.utils import is_moe_param
from deepspeed.utils import groups as stock_groups
from deepspeed.utils import safe_get_full_grad
from deepspeed.utils.bwc import bwc_pipeline_parallel_world_size, bwc_tensor_model_parallel_world_size
from torch import nn
from torch.nn.utils import clip_grad

from ds_fsmoe.checkpoint_files.expert_parts import part_of
from ds_fsmoe.distributed.waits import waiting
from ds_fsmoe.layer.expert_shard import origin_of

_engines: weakref.WeakSet[Any] = weakref.WeakSet()
"""Those whose gradients torch's norms are to know."""
_torchs_norm: Callable[..., torch.Tensor]
"""The function that ours has replaced, once there is an engine."""


def count_all_experts(engine: Any) -> None:
    """Let torch's ``clip_grad_norm_`` and ``get_total_norm`` count the experts of all ranks in gradients of an engine.

    Args:
        engine: our engine; with ZeRO nothing is changed, as parameters have no gradients there for a script to clip.
    """
    global _torchs_norm
    if engine.zero_optimization() or _has_other_parts(engine):
        return
    _engines.add(engine)
    # ``clip_grad_norm_`` looks it up here at every call, so what a script has imported before is right, too.
    if clip_grad._get_total_norm is not _total_norm:
        _torchs_norm = clip_grad._get_total_norm
        clip_grad._get_total_norm = nn.utils.get_total_norm = _total_norm


def gradient_norm(engine: Any, norm_type: float = 2.0) -> torch.Tensor:
    """Return the norm of all gradients, each counted once, between backward and step; collective over all ranks.

    In the place of a sum over ``engine.module.parameters()``, which has the experts of one rank. At ZeRO 1 to 3 one
    gradient after the other is gathered for it; ``engine.get_global_grad_norm()`` has the norm of the last step for
    nothing.

    Args:
        engine: the engine that ``initialize`` has returned, with the block enabled or not.
        norm_type: which norm, as of ``torch.nn.utils.get_total_norm``; ``float("inf")`` is the largest element.

    Returns:
        A scalar, the same on all ranks. In fp16 it has DeepSpeed's loss scale in it, as gradients have.

    Raises:
        ValueError: the engine has pipeline stages or tensor-parallel ranks.

    Examples:
        >>> import torch, ds_fsmoe
        >>> model = ds_fsmoe.MoE(8, torch.nn.Linear(8, 8), num_experts=4, k=2)
        >>> ds_config = {"train_micro_batch_size_per_gpu": 2, "fsmoe": {"enabled": True, "ops": "reference"}}
        >>> ds_config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
        >>> engine, *_ = ds_fsmoe.initialize(model=model, model_parameters=model.parameters(), config=ds_config)
        >>> engine.backward(engine(torch.randn(2, 3, 8))[0].square().mean())
        >>> norm = ds_fsmoe.gradient_norm(engine)
        >>> torch.nn.utils.clip_grads_with_norm_(engine.module.parameters(), 1.0, norm)  # without ZeRO
    """
    if _has_other_parts(engine):
        raise ValueError(
            "ds_fsmoe.gradient_norm: the engine has pipeline stages or tensor-parallel ranks, whose gradients are not "
            "added up here; engine.get_global_grad_norm() has the norm of the last step"
        )
    norms, own = [], {}
    for parameter in engine.module.parameters():
        gradient = safe_get_full_grad(parameter)
        if gradient is None:
            continue
        # With ZeRO that of experts of a Hugging Face model has been put together.
        group = _ranks_of(parameter)
        if group is not None and (part_of(parameter) is None or not engine.zero_optimization()):
            own[len(norms)] = group
        norms.append(torch.linalg.vector_norm(gradient.detach(), norm_type, dtype=torch.float32))
    _combine(norms, own, norm_type)
    return torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros(())


def _has_other_parts(engine: Any) -> bool:
    mpu = engine.mpu
    return mpu is not None and max(bwc_tensor_model_parallel_world_size(mpu), bwc_pipeline_parallel_world_size(mpu)) > 1


def _ranks_of(parameter: nn.Parameter) -> dist.ProcessGroup | None:
    """Return the ranks over which experts are spread, ``None`` for what is none of theirs."""
    group = stock_groups._get_expert_parallel_group(parameter.group_name) if is_moe_param(parameter) else None
    return group if group is not None and group.size() > 1 else None


@torch.no_grad()
def _total_norm(
    tensors: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Do what torch's function does, with the norm over all ranks in the place of each gradient of experts.

    A norm of norms is the norm of the whole. Collective, if such gradients are among the tensors.
    """
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    experts = {
        id(each.grad): group
        for engine in _engines
        for each in engine.module.parameters()
        if each.grad is not None and (group := _ranks_of(each)) is not None
    }
    own: dict[int, dist.ProcessGroup] = {}
    for at, each in enumerate(tensors):
        # What a script gets from a marked parameter says itself what it is.
        origin = origin_of(each)
        if origin is not None or id(each) in experts:
            own[at] = experts[id(each)] if origin is None else origin.group
    norms = {at: torch.linalg.vector_norm(tensors[at], norm_type, dtype=torch.float32) for at in own}
    _combine(norms, own, norm_type)
    found = [norms[at].to(each.dtype) if at in norms else each for at, each in enumerate(tensors)]
    return _torchs_norm(found, norm_type, error_if_nonfinite, foreach)


def _combine(norms: Any, own: Mapping[int, dist.ProcessGroup], norm_type: float) -> None:
    """Replace norms of what this rank has of experts by those of what all have, in place. Collective.

    Args:
        norms: number -> norm.
        own: number -> the ranks that have the rest, in the same order on all ranks.
        norm_type: which norm.
    """
    numbers: dict[dist.ProcessGroup, list[int]] = defaultdict(list)
    for number, group in own.items():
        numbers[group].append(number)
    # A rank is in one group of each size, so all ranks have the same order.
    for group in sorted(numbers, key=dist.ProcessGroup.size):
        of_rank = torch.stack([norms[each] for each in numbers[group]])
        of_ranks = [torch.empty_like(of_rank) for _ in range(group.size())]
        with waiting("the norm of gradients of a script"):
            dist.all_gather(of_ranks, of_rank, group=group)
        whole = torch.linalg.vector_norm(torch.stack(of_ranks), norm_type, dim=0)
        for number, norm in zip(numbers[group], whole, strict=True):
            norms[number] = norm
