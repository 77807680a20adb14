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

from ds_fsmoe.components.expert_compute.contract import follows_contract
from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.config.reading import ConfigError, shown
from ds_fsmoe.distributed.fail_together import from_first_rank, on_every_rank
from ds_fsmoe.distributed.topology import rank_now
from ds_fsmoe.engine.compat import load_ds_config
from ds_fsmoe.engine.convert_experts import num_experts_of
from ds_fsmoe.files.hiding import config_of
from ds_fsmoe.files.owners import OF_RECORD, ONE_EACH, OwnedError, Ownership
from ds_fsmoe.files.runs import check_run_folder
from ds_fsmoe.files.whole_files import create
from ds_fsmoe.layer.experts_layer import HuggingFaceLayer
from ds_fsmoe.log import log_on_rank_0
from ds_fsmoe.observing.call_observer import trace_folder
from ds_fsmoe.telemetry.flops import count_grouped_products
from ds_fsmoe.telemetry.record import Record
from ds_fsmoe.telemetry.stock_trace import StockTracer
from ds_fsmoe.tuning.autotune import Autotune

_made: weakref.WeakSet[Record] = weakref.WeakSet()
"""The records of this process, as long as their engines are there."""
_claimed: list[Ownership] = []
"""The folder of the record of the engine that is being made."""


def claim_folders(block: FSMoEBlock) -> None:
    """Take the folders of the record and of the trace, before anything is removed there. Collective.

    Raises:
        ConfigError: one cannot be written to, another job writes there, or it has files that are no run's; raised on
            every rank.
    """
    while _claimed:  # by an engine that was never made
        _claimed.pop().release()
    if block.record.dir is not None and not _is_recording():
        problem = from_first_rank(_claim(Path(block.record.dir)) if rank_now() == 0 else "")
        if problem:
            raise ConfigError(f"fsmoe.record.dir = {shown(block.record.dir)}: {problem}")
    if block.trace.enabled:
        folder = trace_folder(block)
        problems = on_every_rank(_why_not_written_to(folder, f".rank{rank_now()}.writable"))
        if wrong := [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem]:
            name = "fsmoe.trace.path" if folder == Path(block.trace.path) else "fsmoe.record.dir"
            raise ConfigError(f"{name} = {shown(str(folder))}: {wrong[0]}")


def _claim(folder: Path) -> str:
    """Make a folder this job's own, and return why not."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_run_folder(folder)
        _claimed.append(Ownership(folder, name=OF_RECORD))
    except OwnedError as error:
        return f"{error}: {ONE_EACH}"
    except FileExistsError as error:
        return str(error)
    except OSError as error:
        return f"cannot be written to: {error}"
    return ""


def _why_not_written_to(folder: Path, name: str) -> str:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            create(folder / name).close()
        (folder / name).unlink(missing_ok=True)
    except OSError as error:
        return f"cannot be written to: {error}"
    return ""


def _is_recording() -> bool:
    return any(each.is_open for each in _made)


def watch_ours(engine: Any) -> None:
    """Begin the record of an engine of ours, if its block asks for one, and let DeepSpeed's profiler count all of it.

    Raises:
        ConfigError: its folder cannot be written to; raised on every rank.
    """
    state = engine.fsmoe
    count_grouped_products(engine)
    layers = {
        each.deepspeed_moe.label: _layer(path, each) | {"gate": type(each.deepspeed_moe.gate).__name__}
        for path, each in state.layers.items()
    }
    facts = {"schedule": state.block.schedule, "chosen": state.chosen(), "layers": layers}
    facts["why_untuned"] = state.why_untuned
    first = next(iter(state.layers.values()), None)
    # The experts of a Hugging Face model are all there is of a layer; tokens come to them.
    takes_tokens = first.deepspeed_moe if isinstance(first, HuggingFaceLayer) else first
    record = _record(engine, state.block, facts, takes_tokens)
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
    """Begin the record and the trace of an engine of DeepSpeed's own, as far as the block asks for them. Collective.

    Raises:
        ConfigError: the folder of either cannot be taken; raised on every rank.
    """
    claim_folders(block)
    modules = engine.module.named_modules()
    found = [(path, each) for path, each in modules if isinstance(each, MoE) or follows_contract(each)]
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
    if _is_recording():
        log_on_rank_0(
            "fsmoe.record: another engine of this process is being recorded, so this one is not", logging.WARNING
        )
        return None
    folder = None if asked.dir is None else Path(asked.dir)
    facts |= {"block": config_of(block.model_dump(exclude_unset=True)), "cwd": str(Path.cwd())}
    with suppress(Exception):  # a config of whatever kind; without it the page says less
        facts["config"] = config_of(load_ds_config(engine.config)) | {"fsmoe": facts["block"]}
    problem, record = "", None
    try:
        owner = _claimed.pop() if _claimed else None
        record = Record(engine, folder, asked.stop_after, rank_now(), facts, first_layer, owner)
    except OSError as error:
        problem = f"fsmoe.record.dir = {shown(asked.dir)}: cannot be written to: {error}"
    # Rank 0 alone writes, and no rank may go on into a collective without it.
    problem = from_first_rank(problem)
    if record is None or problem:
        raise ConfigError(problem)
    _made.add(record)
    return record


def _layer(path: str, layer: nn.Module | HuggingFaceLayer) -> dict[str, Any]:
    if not isinstance(layer, (MoE, HuggingFaceLayer)):
        # Transformers' own experts: each rank has them all, and what a token takes is not theirs to know.
        return {"path": path, "experts": num_experts_of(layer), "ep_size": 1, "k": None}
    gate = layer.deepspeed_moe.gate
    return {"path": path, "experts": layer.num_experts, "ep_size": layer.ep_size, "k": getattr(gate, "k", None)}
