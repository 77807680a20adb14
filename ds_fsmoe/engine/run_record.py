# SPDX-License-Identifier: Apache-2.0
"""Begins the record of a run when its engine is complete: of ours, or of DeepSpeed's own to compare it with."""

from __future__ import annotations

import functools
import logging
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from deepspeed.moe.layer import MoE
from torch import nn

from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.config.reading import ConfigError, shown
from ds_fsmoe.distributed.fail_together import from_first_rank
from ds_fsmoe.distributed.topology import rank_now
from ds_fsmoe.engine.compat import load_ds_config
from ds_fsmoe.log import log_on_rank_0
from ds_fsmoe.observing.call_observer import trace_folder
from ds_fsmoe.telemetry.record import Record
from ds_fsmoe.telemetry.stock_trace import StockTracer
from ds_fsmoe.telemetry.surroundings import config_of
from ds_fsmoe.tuning.autotune import Autotune

_made: weakref.WeakSet[Record] = weakref.WeakSet()
"""The records of this process, as long as their engines are there."""


def watch_ours(engine: Any) -> None:
    """Begin the record of an engine of ours, if its block asks for one.

    Raises:
        ConfigError: its folder cannot be written to; raised on every rank.
    """
    state = engine.fsmoe
    layers = {
        each.deepspeed_moe.label: _layer(path, each) | {"gate": type(each.deepspeed_moe.gate).__name__}
        for path, each in state.layers.items()
    }
    facts = {"schedule": state.block.schedule, "chosen": state.chosen(), "layers": layers}
    facts["why_untuned"] = state.why_untuned
    record = _record(engine, state.block, facts, next(iter(state.layers.values()), None))
    if record is not None:
        # The record outlives an engine that nobody has ended, and writes its end.
        autotune = (lambda: None) if state.autotune is None else weakref.ref(state.autotune)
        record.steps.tell_tuning(lambda: _is_tuning(autotune()))
        state.telemetry.record = record
        state.telemetry.plans_changed()


def _is_tuning(autotune: Autotune | None) -> bool:
    """Return whether something is measured or tried in the step that comes next."""
    return autotune is not None and (autotune.is_measuring or autotune.trials is not None)


def watch_stock(engine: Any, block: FSMoEBlock) -> None:
    """Begin the record and the trace of an engine of DeepSpeed's own, as far as the block asks for them. Collective for
    a trace.

    Raises:
        ConfigError: the folder of the record cannot be written to; raised on every rank.
        OSError: the folder of the trace cannot be written to.
    """
    found = [(path, each) for path, each in engine.module.named_modules() if isinstance(each, MoE)]
    layers = {f"L{index:02d}": _layer(path, each) for index, (path, each) in enumerate(found)}
    first = found[0][1] if found else None
    watching: list[Record | StockTracer | None] = [_record(engine, block, {"layers": layers}, first)]
    if block.trace.enabled:
        asked = block.trace
        watching.append(StockTracer(engine, trace_folder(block), rank_now(), asked.start_step, asked.num_steps))
    destroy = engine.destroy

    @functools.wraps(destroy)
    def outer(*args: Any, **kwargs: Any) -> Any:
        for each in watching:
            if each is not None:
                each.close()
        return destroy(*args, **kwargs)

    if any(watching):
        engine.destroy = outer


def _record(engine: Any, block: FSMoEBlock, facts: dict[str, Any], first_layer: nn.Module | None) -> Record | None:
    asked = block.record
    if asked.dir is None and not asked.stop_after:
        return None
    if any(each.is_open for each in _made):
        log_on_rank_0(
            "fsmoe.record: another engine of this process is being recorded, so this one is not", logging.WARNING
        )
        return None
    folder = None if asked.dir is None else Path(asked.dir)
    facts |= {"block": block.model_dump(exclude_unset=True)}
    with suppress(Exception):  # a config of whatever kind; without it the page says less
        facts["config"] = config_of(load_ds_config(engine.config)) | {"fsmoe": facts["block"]}
    problem, record = "", None
    try:
        record = Record(engine, folder, asked.stop_after, rank_now(), facts, first_layer)
    except OSError as error:
        problem = f"fsmoe.record.dir = {shown(asked.dir)}: cannot be written to: {error}"
    # Rank 0 alone writes, and no rank may go on into a collective without it.
    problem = from_first_rank(problem)
    if record is None or problem:
        raise ConfigError(problem)
    _made.add(record)
    return record


def _layer(path: str, layer: MoE) -> dict[str, Any]:
    gate = layer.deepspeed_moe.gate
    return {"path": path, "experts": layer.num_experts, "ep_size": layer.ep_size, "k": getattr(gate, "k", None)}
