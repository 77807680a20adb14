# SPDX-License-Identifier: Apache-2.0
"""Tries whether an optimizer treats every element of a weight by itself, as ranks with their own experts need.

LAMB scales an update by norms of the whole weight, Adafactor keeps means over it: for such the update of an expert
depends on the others in its tensor. No list of names says which they are. A few steps of the same class with the same
options are taken, on a small tensor, and on each half of it by itself.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ds_fsmoe.checkpoint_files.expert_parts import parts_in
from ds_fsmoe.log import log_on_rank_0

_SHAPE = (2, 4, 6)
"""Two experts of small weights."""
_STEPS = 4
"""Some estimate scales in the first steps, which tell in later ones."""
_LEAST = 1e-3
"""From this share of the largest update on a difference is more than rounding."""


def warn_of_whole_tensors(engine: Any) -> None:
    """Warn once where the optimizer of an engine computes updates of experts from whole tensors.

    Args:
        engine: our engine, with its optimizer.
    """
    optimizer, is_zero = engine.basic_optimizer, engine.zero_optimization()
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    if not any(part.num_parts > 1 and each.requires_grad for _, each, part in parts_in(engine.module)):
        return
    device = torch.device("cpu") if engine.zero_use_cpu_optimizer() else torch.device(engine.device)
    name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    try:
        depends = any(
            # ZeRO shows it flat partitions, but for what Muon makes of a gradient before that.
            depends_on_others(optimizer, group, is_zero and not group.get("use_muon"), device)
            for group in optimizer.param_groups
            if group.get("moe")
        )
    except Exception as error:  # whatever its own code raises: training is to show it, and not a trial
        log_on_rank_0(f"whether {name} treats every element of a weight by itself could not be tried: {error!r}")
        return
    if depends:
        why = "a rank has its own experts only"
        remedy = ', or spread no experts ("ep_size": 1)'
        if is_zero:
            why = "ZeRO shows it flat partitions, which are cut otherwise with experts in groups of their own"
            remedy = ""
        log_on_rank_0(
            f"ds_fsmoe: {name} computes the update of a weight from others in the same tensor (tried on a small one: "
            f"as a whole and in two halves it came out differently), and {why}. Trained experts will differ from those "
            "of stock DeepSpeed, and with the number of ranks: take an optimizer that treats every element by itself "
            f"(AdamW, SGD, Lion){remedy}",
            logging.WARNING,
        )


def depends_on_others(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], is_flat: bool, device: torch.device
) -> bool:
    """Return whether an optimizer updates a tensor otherwise as a whole than in two halves.

    The optimizer itself takes no step. Options are those of one of its groups, with a rate at which something moves.

    Args:
        optimizer: the optimizer.
        group: the group.
        is_flat: whether it is shown tensors of one dimension.
        device: where it works.
    """
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor([1.0, 3.0]).view(2, 1, 1)  # halves that are alike would hide what is taken over both
    start, *gradients = (torch.randn(_SHAPE, generator=generator).to(device) for _ in range(_STEPS + 1))
    start, gradients = start * scales.to(device), [each / scales.to(device) ** 2 for each in gradients]
    if is_flat:
        start, gradients = start.flatten(), [each.flatten() for each in gradients]
    cut = [each.chunk(2) for each in (start, *gradients)]
    # What compiled code computes is told without the seconds of compiling it.
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.compiler.set_stance("force_eager"):
        whole = _updated(optimizer, group, start, gradients)
        halves = torch.cat([_updated(optimizer, group, first, others) for first, *others in zip(*cut, strict=True)])
        differs = _is_apart(halves, whole, start)
        # One that rounds at random comes out otherwise every time.
        return differs and not _is_apart(_updated(optimizer, group, start, gradients), whole, start)


def _is_apart(one: torch.Tensor, other: torch.Tensor, start: torch.Tensor) -> bool:
    return bool((one - other).abs().max() > _LEAST * (other - start).abs().max())


def _updated(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], start: torch.Tensor, gradients: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return what a new optimizer of the same class makes of a tensor."""
    parameter = torch.nn.Parameter(start.clone())
    taken = inspect.signature(type(optimizer)).parameters
    options = {name: value for name, value in group.items() if name != "params"}
    if options.get("lr") is not None:
        options["lr"] = 0.1
    defaults = {name: value for name, value in optimizer.defaults.items() if name in taken and name != "params"}
    twin = type(optimizer)([options | {"params": [parameter]}], **defaults)
    for each in gradients:
        parameter.grad = each.clone()
        twin.step()
    return parameter.detach()
