# SPDX-License-Identifier: Apache-2.0
"""Decides whether micro-batches of a step are added up on each rank before the sum over ranks, or summed one by one.

Adding up takes room for all gradients of a rank, and ZeRO 2 promises to do without. So it is done there if it is asked
for, or if the memory of the GPU is known to hold them: by what two steps have needed at their peak.
"""

from __future__ import annotations

from typing import Any

import torch

from ds_fsmoe.config.reading import ConfigError
from ds_fsmoe.distributed.fail_together import on_every_rank

STEPS_WATCHED = 2
"""The steps after which the peak is known: the first of all makes what the others use again."""
_MARGIN = 1.1

_PATH = "fsmoe.gradient_partition.accumulate"


def sums_every_micro_batch(engine: Any, accumulate: str) -> bool:
    """Return whether each is summed over ranks at ZeRO stage 1 or 2, and not the last one of a step alone.

    Args:
        engine: the engine, with its optimizer.
        accumulate: the option of that name.

    Raises:
        ConfigError: what was asked for cannot be.
    """
    if not engine.optimizer.partition_gradients:
        refuse_before_stage_2(accumulate)
        return False
    reason = _obstacle(engine)
    if accumulate == "before_sum" and reason is not None:
        raise ConfigError(
            f'{_PATH} = "before_sum": cannot be here, because {reason}; the choices are "auto" and "after_sum"'
        )
    return accumulate != "before_sum"


def may_add_up_later(engine: Any, accumulate: str) -> bool:
    """Return whether every micro-batch is summed only as long as it is not known that there is room to add them up."""
    several = engine.optimizer.partition_gradients and engine.gradient_accumulation_steps() > 1
    return several and accumulate == "auto" and _obstacle(engine) is None and _room(engine.device) is not None


def holds_all(engine: Any, needed_bytes: int) -> bool:
    """Return whether the GPUs of all ranks have room for so many bytes besides what they needed so far. Collective."""
    room = _room(engine.device)
    return all(on_every_rank(room is not None and needed_bytes * _MARGIN <= room, engine.optimizer.dp_process_group))


def words_of_stage_2(size: float, sums_each: bool, accumulate: str) -> str:
    """Say which micro-batches are summed over ranks at stage 2, and why; ``size``: all gradients of a rank in MB."""
    if not sums_each:
        return f'ZeRO 2: micro-batches are added up first, as "accumulate" says, in {size:.4g} MB of gradients'
    sentence = "ZeRO 2: every micro-batch is summed over ranks, so that a rank keeps its own part of the gradients"
    if accumulate == "auto":
        sentence += (
            f'; adding up first takes all {size:.4g} MB of them: "gradient_partition": {{"accumulate": "before_sum"}}, '
            "or by itself where a GPU has room"
        )
    return sentence


def _room(device: torch.device) -> float | None:
    """Return the bytes of a GPU that nobody has needed at the peak; ``None``: its memory is not known."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)


def refuse_before_stage_2(accumulate: str) -> None:
    """Refuse to sum every micro-batch where DeepSpeed does not do it either.

    Raises:
        ConfigError: it was asked for.
    """
    if accumulate == "after_sum":
        raise ConfigError(f'{_PATH} = "after_sum": only at zero_optimization.stage 2; leave it out')


def _obstacle(engine: Any) -> str | None:
    """Return why micro-batches cannot be added up here at stage 2 before the sum over ranks; ``None``: they can."""
    optimizer = engine.optimizer
    if not engine.managed_gradient_accumulation():
        return "managed_gradient_accumulation is false, so nobody knows which micro-batch is the last one"
    if optimizer.use_separate_grad_accum:
        return "gradients are added up in another type (data_types.grad_accum_dtype) than they are computed in"
    if optimizer.zenflow:
        return "ZenFlow looks at the gradients of every micro-batch"
    if optimizer.cpu_offload:
        return "gradients are added up in the memory of the host (offload_optimizer)"
    return None
