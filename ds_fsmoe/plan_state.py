# SPDX-License-Identifier: Apache-2.0
"""The plans that an engine has settled on, as plain data: kept with a checkpoint, so that they are not measured again.

What travels in which message decides in which order numbers are summed: a run that goes on with other plans goes on
with other last bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from ds_fsmoe import registry
from ds_fsmoe.engine_state import FSMoEState
from ds_fsmoe.exchanges import exchange_in
from ds_fsmoe.planning.block import BlockPlan
from ds_fsmoe.runtime.gradient_plan import GradientPlan, Parcel
from ds_fsmoe.runtime.pipeline import PhasePlan


def is_settled(state: FSMoEState) -> bool:
    """Whether there is something to keep: the autotuner, where there is one, has chosen and tried."""
    tuner = state.autotune
    return tuner is None or bool(tuner.rows and tuner.trials is None)


def plans_of(state: FSMoEState) -> dict[str, Any]:
    """Of layers and gradients, the same on every rank of a stage."""
    alltoall_of = (
        {} if state.autotune is None else {label: row.alltoall for row in state.autotune.rows for label in row.labels}
    )
    layers = {}
    for layer in state.layers.values():
        pipeline = layer.deepspeed_moe.pipeline
        layers[pipeline.label] = {
            "forward": asdict(pipeline.forward.block),
            "backward": asdict(pipeline.backward.block),
            "reduces": [list(each) for each in pipeline.wires.reduces],
            "alltoall": alltoall_of.get(pipeline.label),
        }
    reducer = None if state.reduction is None else state.reduction.reducer
    gradients = None
    if reducer is not None and reducer.plan is not None:
        gradients = reducer.memory() | {"plan": asdict(reducer.plan)}
    return {"layers": layers, "gradients": gradients}


def go_on_with(state: FSMoEState, plans: Mapping[str, Any]) -> None:
    """Run by these plans from now on, without measuring. Collective, before the next forward.

    Raises:
        KeyError, TypeError, ValueError: they are not such plans, or of another model; nothing has changed.
    """
    layers = {layer.deepspeed_moe.pipeline.label: layer.deepspeed_moe for layer in state.layers.values()}
    if set(plans["layers"]) != set(layers):
        raise ValueError(f"plans of layers {sorted(plans['layers'])}: there are {sorted(layers)}")
    read = {
        label: tuple(_block(plan[phase]) for phase in ("forward", "backward"))
        for label, plan in plans["layers"].items()
    }
    gradients = plans["gradients"]
    plan = None if gradients is None else _gradient_plan(gradients["plan"])
    for label, layer in layers.items():
        pipeline, kept = layer.pipeline, plans["layers"][label]
        wires = replace(pipeline.wires, reduces=tuple((float(size), name) for size, name in kept["reduces"]))
        planned = pipeline.forward.alltoall
        if kept["alltoall"] is not None:
            groups = state.running.groups(layer.ep_size, layer.tensor_parallel)
            exchange = exchange_in(groups, registry.lookup("alltoall", kept["alltoall"])())
            wires, planned = replace(wires, exchange=exchange.whole, legs=exchange.legs), exchange.planned
        forward, backward = (
            PhasePlan(block, now.groups, now.backward, planned)
            for block, now in zip(read[label], (pipeline.forward, pipeline.backward), strict=True)
        )
        layer.pipeline = replace(pipeline, wires=wires, forward=forward, backward=backward)
    if state.autotune is not None:
        state.autotune.need_not_run()
    if plan is not None and state.reduction is not None:
        state.reduction.go_on_with(plan, gradients["windows"], gradients["ready_at"])


def _block(facts: Mapping[str, Any]) -> BlockPlan:
    if facts["moe_slices"] or facts["dense_slices"]:
        raise ValueError("slices of gradients in the plan of a layer that is run")
    return BlockPlan(
        **(dict(facts) | {"shares": tuple(map(float, facts["shares"])), "moe_slices": (), "dense_slices": ()})
    )


def _gradient_plan(facts: Mapping[str, Any]) -> GradientPlan:
    def parts(name: str) -> tuple[tuple[Parcel, ...], ...]:
        return tuple(tuple(Parcel(**each) for each in parcels) for parcels in facts[name])

    return GradientPlan(parts("moe"), parts("dense"), tuple(map(int, facts["sizes"])))
