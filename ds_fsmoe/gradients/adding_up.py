# SPDX-License-Identifier: Apache-2.0
"""Decides whether micro-batches of a step are added up on each rank before the sum over ranks, or summed one by one."""

from __future__ import annotations

from typing import Any

from ds_fsmoe.config.reading import ConfigError

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
    return accumulate == "after_sum" or reason is not None


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
