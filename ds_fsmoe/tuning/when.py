# SPDX-License-Identifier: Apache-2.0
"""Decides when the autotuner runs: at once, after some steps, or not at all where there is no gain to find.

The engine calls it once, when it is made. The decision follows from the config and from the job, never from a clock, so
it is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.planning.decide.presets import BEST, PRESETS

STEPS_BEFORE = 10
"""The optimizer steps before the autotuner measures unasked: what only tries whether a job starts is over by then."""
FEWEST_STEPS = 100
"""The optimizer steps that a job has to have, where their number is known, before it is measured unasked: trials take
up to 24 of them, and measuring the time of more."""


def settled(block: FSMoEBlock, ds_config: Mapping[str, Any], num_ranks: int) -> tuple[FSMoEBlock, str | None]:
    """Return the block with ``autotune.enabled`` turned off where nothing is to be measured, and why, for the log.

    Args:
        block: our block of the job's config.
        ds_config: the whole config.
        num_ranks: the ranks of the job.
    """
    if not block.autotune.enabled:
        return block, None
    tunes_itself = ds_config.get("autotuning", {})
    if isinstance(tunes_itself, Mapping) and tunes_itself.get("enabled", False):
        # It launches short jobs to compare their speed, and in each of them this would be measured anew.
        why = "autotuning.enabled = true: DeepSpeed's own autotuner is active"
        return _without(block), why
    if block.autotune.enabled is True:
        return block, None
    why_not = _why_not_unasked(block, ds_config, num_ranks)
    return (block, None) if why_not is None else (_without(block), why_not)


def needs_numbers(block: FSMoEBlock) -> bool:
    """Return True if a schedule that was named has numbers of chunks that are not set, so that they are measured."""
    if block.schedule == BEST or "auto" not in (block.pipeline_degree.forward, block.pipeline_degree.backward):
        return False
    return PRESETS[block.schedule]().pipeline in ("common", "per_phase")


def runs_whole(block: FSMoEBlock) -> bool:
    """Return True if layers run in one chunk: nothing else is asked for, and nothing is measured."""
    is_cut_by_bytes = block.schedule != BEST and PRESETS[block.schedule]().pipeline == "by_bytes"
    degrees = {block.pipeline_degree.forward, block.pipeline_degree.backward}
    return not block.autotune.enabled and not is_cut_by_bytes and degrees <= {1, "auto"}


def _without(block: FSMoEBlock) -> FSMoEBlock:
    return block.model_copy(update={"autotune": block.autotune.model_copy(update={"enabled": False})})


def _why_not_unasked(block: FSMoEBlock, ds_config: Mapping[str, Any], num_ranks: int) -> str | None:
    """Return why a job is not measured unless that is asked for; ``None`` if it is. See :func:`settled`."""
    asked = block.pipeline_degree
    by_rule = block.schedule != BEST and PRESETS[block.schedule]().pipeline in ("off", "by_bytes")
    steps = known_steps(block, ds_config)
    if block.deterministic:
        return "fsmoe.deterministic = true: no decision may depend on timings"
    if num_ranks == 1:
        return "a single rank has no communication to hide"
    if not block.overlap:
        return "fsmoe.overlap = false: nothing overlaps for any number of chunks"
    if by_rule:
        return f'fsmoe.schedule = "{block.schedule}" has nothing to choose by measurements'
    if isinstance(asked.forward, int) and isinstance(asked.backward, int):
        return "fsmoe.num_chunks is set for both phases"
    if steps is not None and steps < FEWEST_STEPS and not needs_numbers(block):
        return (
            f"the job ends after {steps} steps, and trials take up to 24: too short to pay; "
            '"autotune": true measures all the same'
        )
    return None


def known_steps(block: FSMoEBlock, ds_config: Mapping[str, Any]) -> int | None:
    """Return the optimizer steps after which the job ends, where the config has it: by ``fsmoe.record.stop_after``, or
    by the length of the learning rate's schedule, which a trainer fills in; ``None`` where it does not."""
    found = [block.record.stop_after] if block.record.stop_after else []
    scheduler = ds_config.get("scheduler") or {}
    parameters = scheduler.get("params") or {} if isinstance(scheduler, Mapping) else {}
    length = parameters.get("total_num_steps") if isinstance(parameters, Mapping) else None
    if isinstance(length, int) and not isinstance(length, bool) and length > 0:
        found.append(length)
    return min(found, default=None)
