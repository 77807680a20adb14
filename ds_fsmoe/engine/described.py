# SPDX-License-Identifier: Apache-2.0
"""Says in words what an engine runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ds_fsmoe.components.gate import GateBase
from ds_fsmoe.layer.experts_layer import GivenRouter
from ds_fsmoe.layer.stock_layer import FSMoEGate
from ds_fsmoe.planning.workload import ONCE_PER_NODE
from ds_fsmoe.terminal.tables import Message, Table
from ds_fsmoe.versions import VERSION

if TYPE_CHECKING:
    from ds_fsmoe.engine.state import FSMoEState

WORTH_SAYING = 0.1
"""The share of slots that have to be empty for a word about it."""


def summary(state: FSMoEState) -> Message:
    """Return what is on, as a table for the log."""
    head = f"ds_fsmoe {VERSION} is on for {state.num_layers} MoE layer(s)"
    return Message([head, Table((), list(state.chosen().items()), indent="  ")])


def describe_dispatch(state: FSMoEState) -> str:
    """Return whether layers send slots or rows, and where slots are sent that stay empty, what would send none."""
    layers = state.inner_layers.values()
    sends = {layer.fsmoe.sends_rows(layer.gate) for layer in layers}
    words = "; ".join("rows" if each else "slots" for each in sorted(sends)) or state.block.dispatch
    empty = min((_least_empty(layer.gate) for layer in layers if layer.fsmoe.could_send_rows(layer.gate)), default=0.0)
    if state.block.dispatch != "auto" or empty < WORTH_SAYING:
        return words
    return f'{words}, of which at least {empty:.0%} are empty; "dispatch": "rows" sends none of these'


def _least_empty(gate: Any) -> float:
    """Return the share of a gate's slots that no token can take: its capacity is so much above what is chosen."""
    factor = getattr(getattr(gate, "settings", gate), "capacity_factor", None)
    # A gate of a user's own may mean anything by it.
    return 1.0 - 1.0 / factor if isinstance(factor, (int, float)) and factor > 1.0 else 0.0


def describe_alltoall(state: FSMoEState) -> str:
    """Return the all-to-all that is asked for, and those that run where they are others."""
    asked = state.running.plan.alltoall
    run = {layer.pipeline.forward.alltoall for layer in state.inner_layers.values()}
    return f"{asked}, run as {'; '.join(sorted(run))}" if asked == ONCE_PER_NODE and run - {asked} else asked


def describe_degrees(state: FSMoEState) -> str:
    """Return the chunks of both phases of all layers."""
    pipelines = [layer.pipeline for layer in state.inner_layers.values()]
    blocks = [(each.forward.block, each.backward.block) for each in pipelines]
    # A stage of a pipeline may have no layer.
    blocks = blocks or [(state.running.plan.forward, state.running.plan.backward)]
    degrees = [(forward.degree, backward.degree) for forward, backward in blocks]
    return "; ".join("forward {}, backward {}".format(*each) for each in dict.fromkeys(degrees))


def describe_gate(gate: Any) -> str:
    """Return what a gate is and what it is set to."""
    if not isinstance(gate, FSMoEGate):
        return gate.describe() if isinstance(gate, (GateBase, GivenRouter)) else type(gate).__name__
    return f"topk, k = {gate.k}, {f'capacity factor {gate.capacity_factor}' if gate.drop_tokens else 'nothing dropped'}"
