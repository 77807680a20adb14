# SPDX-License-Identifier: Apache-2.0
"""Puts the whole weights of a model together on the first rank, from experts and pieces that are spread over ranks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import groups as stock_groups

from ds_fsmoe.checkpoint_files.expert_parts import ExpertPart, part_of
from ds_fsmoe.distributed.fail_together import device_of, on_every_rank
from ds_fsmoe.distributed.partitioned import gathered
from ds_fsmoe.distributed.waits import waiting
from ds_fsmoe.layer.inference import refuse_within


def whole_state_dict(engine: Any, exclude_frozen_parameters: bool = False) -> dict[str, torch.Tensor] | None:
    """Return the state dict that the model would have in one process, on the CPU; collective over all ranks.

    One parameter at a time is put together, and only the first rank keeps it; of a pipeline, the first rank of each
    stage until the first of all has it. Their names are those that a ``PipelineModule`` has of all its layers.

    Args:
        engine: the engine that ``initialize`` has returned.
        exclude_frozen_parameters: whether to leave out what is not trained.

    Returns:
        Name -> tensor, in the model's own shapes; ``None`` on all ranks but the first.

    Raises:
        RuntimeError: experts would have to move for it, and the engine is in inference.

    Examples:
        >>> import torch, ds_fsmoe
        >>> model = ds_fsmoe.MoE(8, torch.nn.Linear(8, 8), num_experts=4, k=2)
        >>> ds_config = {"train_micro_batch_size_per_gpu": 2, "fsmoe": {"enabled": True, "ops": "reference"}}
        >>> ds_config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
        >>> engine, *_ = ds_fsmoe.initialize(model=model, model_parameters=model.parameters(), config=ds_config)
        >>> weights = ds_fsmoe.whole_state_dict(engine)  # on rank 0; with four experts over two ranks all four, too
        >>> weights["deepspeed_moe.gate.wg.weight"].shape  # [E, M]
        torch.Size([4, 8])
    """
    placement = getattr(getattr(engine, "fsmoe", None), "placement", None)
    if placement is not None:
        refuse_within(engine.fsmoe.running, "whole_state_dict")
    with nullcontext() if placement is None else placement.at_home():
        group = getattr(getattr(engine, "fsmoe", None), "stage_group", None)
        if group is None:
            return _gathered_state_dict(engine, exclude_frozen_parameters)
        first = dist.get_process_group_ranks(group)[0]
        return _of_all_stages(_gathered_state_dict(engine, exclude_frozen_parameters, first))


def _of_all_stages(own: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor] | None:
    """Return the weights of all stages on the first rank, from the first rank of each. Collective over all ranks."""
    of_ranks = on_every_rank([(name, each.shape, each.dtype) for name, each in (own or {}).items()])
    rank, device = dist.get_rank(), device_of(None)
    found = dict(own or {})
    for sender, described in enumerate(of_ranks[1:], 1):
        for name, shape, dtype in described:
            if sender == rank:
                assert own is not None
                with waiting("the whole weights of stages"):
                    dist.send(own[name].to(device).contiguous(), 0)
            elif rank == 0:
                arrived = torch.empty(shape, dtype=dtype, device=device)
                with waiting("the whole weights of stages"):
                    dist.recv(arrived, sender)
                # What stages share is alike in them.
                found.setdefault(name, arrived.cpu())
    return found if rank == 0 else None


def _gathered_state_dict(
    engine: Any, exclude_frozen_parameters: bool, first: int = 0
) -> dict[str, torch.Tensor] | None:
    """Return the whole weights of this rank's module, on one of the ranks that have it."""
    is_first = dist.get_rank() == first
    result: dict[str, torch.Tensor] = {}
    known: dict[int, torch.Tensor] = {}
    for name, value in engine.module.state_dict(keep_vars=True).items():
        is_parameter = isinstance(value, torch.nn.Parameter)
        if not torch.is_tensor(value) or (exclude_frozen_parameters and is_parameter and not value.requires_grad):
            continue
        if id(value) not in known:
            with gathered([value]):
                whole = _whole(value, part_of(value), first)
                known[id(value)] = value if whole is None else whole
        if is_first:
            result[name] = known[id(value)]
    return result if is_first else None


def _whole(value: torch.Tensor, part: ExpertPart | None, first: int) -> torch.Tensor | None:
    """Return a whole parameter of which ranks have parts, on the CPU of one rank; ``None`` on the others."""
    own, is_first = value.detach(), dist.get_rank() == first
    if part is None or part.num_parts == 1:
        # In memory of its own: what ZeRO 3 has gathered is given back, and training goes on with the rest.
        return own.to("cpu", copy=True) if is_first else None
    group = stock_groups._get_expert_parallel_group(value.group_name)
    if first not in dist.get_process_group_ranks(group):
        return None
    parts = [torch.empty(own.shape, dtype=own.dtype) for _ in range(part.num_parts)] if is_first else []
    # A stretch of every part at a time: on a device, all of these are one part.
    stretch, at = max(1, -(-own.numel() // part.num_parts)), 0
    for piece in own.contiguous().view(-1).split(stretch):
        arrived = [torch.empty_like(piece) for _ in parts]
        with waiting("the whole weights of experts"):
            dist.gather(piece, arrived if is_first else None, dst=first, group=group)
        for each, found in zip(parts, arrived, strict=True):
            each.view(-1)[at : at + piece.numel()] = found
        at += piece.numel()
    # Handed over one by one: shards are let go once they are joined.
    return part.join(parts.pop(0) for _ in range(part.num_parts)) if is_first else None
