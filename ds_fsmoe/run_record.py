# SPDX-License-Identifier: Apache-2.0
"""The record of a run, begun when its engine is complete: of ours, and of DeepSpeed's own to compare it with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.moe.layer import MoE

from ds_fsmoe.blocks import FSMoEBlock
from ds_fsmoe.running import trace_folder
from ds_fsmoe.runtime.topology import world_size_now
from ds_fsmoe.telemetry.record import Record
from ds_fsmoe.telemetry.stock_trace import StockTracer


def watch_ours(engine: Any) -> None:
    """Begin the record of an engine of ours, if its block asks for one.

    Raises:
        OSError: its folder cannot be written to.
    """
    state = engine.fsmoe
    layers = {
        each.deepspeed_moe.label: _layer(path, each) | {"gate": type(each.deepspeed_moe.gate).__name__}
        for path, each in state.layers.items()
    }
    facts = {"schedule": state.block.schedule, "chosen": state.chosen(), "layers": layers}
    record = _record(engine, state.block, facts)
    if record is not None:
        state.telemetry.record = record
        state.telemetry.plans_changed()


def watch_stock(engine: Any, block: FSMoEBlock) -> None:
    """Begin the record and the trace of an engine of DeepSpeed's own, as far as the block asks for them. Collective for
    a trace.

    Raises:
        OSError: a folder cannot be written to.
    """
    found = ((path, each) for path, each in engine.module.named_modules() if isinstance(each, MoE))
    layers = {f"L{index:02d}": _layer(path, each) for index, (path, each) in enumerate(found)}
    _record(engine, block, {"layers": layers})
    if block.trace.enabled:
        StockTracer(engine, trace_folder(block), _rank(), block.trace.start_step, block.trace.num_steps)


def _record(engine: Any, block: FSMoEBlock, facts: dict[str, Any]) -> Record | None:
    asked = block.record
    if asked.dir is None and not asked.stop_after:
        return None
    folder = None if asked.dir is None else Path(asked.dir)
    return Record(engine, folder, asked.stop_after, _rank(), facts | {"block": block.model_dump(exclude_unset=True)})


def _layer(path: str, layer: MoE) -> dict[str, Any]:
    gate = layer.deepspeed_moe.gate
    return {"path": path, "experts": layer.num_experts, "ep_size": layer.ep_size, "k": getattr(gate, "k", None)}


def _rank() -> int:
    return 0 if world_size_now() == 1 else dist.get_rank()
