# SPDX-License-Identifier: Apache-2.0
"""Says what an engine runs: one record, whose words the log, ``engine.fsmoe.chosen()``, examples and pages show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ds_fsmoe.components.gate import GateBase
from ds_fsmoe.layer.experts_state import GivenRouter
from ds_fsmoe.layer.stock_layer import FSMoEGate
from ds_fsmoe.planning.block import BlockPlan
from ds_fsmoe.planning.block_times import order_words
from ds_fsmoe.planning.workload import ONCE_PER_NODE
from ds_fsmoe.terminal.tables import Message, Table
from ds_fsmoe.versions import VERSION

if TYPE_CHECKING:
    from ds_fsmoe.engine.state import FSMoEState

WORTH_SAYING = 0.1
"""The share of slots that have to be empty for a word about it."""


@dataclass(frozen=True)
class Chosen:
    """Describes what an engine runs now."""

    words: dict[str, str]
    """Field of the config -> what runs, in the order a token meets them."""
    telling: frozenset[str]
    """The fields that were asked for, or whose words differ from what DeepSpeed does."""


def chosen(state: FSMoEState) -> Chosen:
    """Return what runs, from the plans that layers have now and not from what the config wished for."""
    block, running = state.block, state.running
    blocks = _blocks(state)
    is_cut = any(each.degree > 1 for pair in blocks for each in pair)
    gates = sorted({describe_gate(layer.gate) for layer in state.inner_layers.values()})
    dispatch, alltoall = describe_dispatch(state), describe_alltoall(state)
    # Field -> (words, whether they differ from what stock does).
    parts: dict[str, tuple[str, bool]] = {
        "schedule": (_describe_schedule(state, is_cut), True),
        "num_chunks": (_describe_chunks(blocks), is_cut),
        "autotune": (_describe_autotune(state), state.autotune is not None or state.why_untuned is not None),
        "links": (running.describe_links(_orders(blocks)), is_cut or running.one_link is not None),
        "expert_tensor_parallel_size": (str(block.esp_size), block.esp_size > 1),
        "gate": ("; ".join(gates), False),
        "order": (state.parts.order_name, False),
        "alltoall": (alltoall, alltoall != "flat"),
        "dispatch": (dispatch, "empty" in dispatch),
        "ops": (state.parts.ops.name, False),
        "gradients": (_describe_gradients(state), state.reduction is not None or state.has_late_gradients),
        "placement": (_describe_placement(state), state.placement is not None),
        "split_batch": (_describe_halves(state), _in_halves(state)),
    }
    asked = {_FIELDS.get(each, each) for each in block.model_fields_set}
    return Chosen(
        {name: words for name, (words, _) in parts.items()},
        frozenset(name for name, (_, differs) in parts.items() if differs or name in asked),
    )


_FIELDS = {
    "pipeline_degree": "num_chunks",
    "esp_size": "expert_tensor_parallel_size",
    "overlap": "links",
    "gradient_partition": "gradients",
}
"""Field of the block -> the part that shows what became of it, where that has another name."""


def summary(state: FSMoEState) -> Message:
    """Return what is on, as a table for the log: what was asked for or differs from stock, and the rest for details."""
    head = f"ds_fsmoe {VERSION} is on for {state.num_layers} MoE layer(s)"
    found = chosen(state)
    rows = [each for each in found.words.items() if state.block.autotune.details or each[0] in found.telling]
    return Message([head, Table((), rows, indent="  ")])


def _blocks(state: FSMoEState) -> list[tuple[BlockPlan, BlockPlan]]:
    """Return how layers run, forward and backward; a stage of a pipeline may have no layer."""
    pipelines = [layer.pipeline for layer in state.inner_layers.values()]
    blocks = [(each.forward.block, each.backward.block) for each in pipelines]
    return blocks or [(state.running.plan.forward, state.running.plan.backward)]


def _describe_chunks(blocks: Sequence[tuple[BlockPlan, BlockPlan]]) -> str:
    counts = dict.fromkeys((forward.degree, backward.degree) for forward, backward in blocks)
    return "; ".join("forward {}, backward {}".format(*each) for each in counts)


def _orders(blocks: Sequence[tuple[BlockPlan, BlockPlan]]) -> list[str]:
    """Return the orders of the tasks of those layers that run in chunks."""
    found = (each for pair in blocks for each in pair if each.degree > 1)
    return list(dict.fromkeys(order_words(each.degree, each.links) for each in found))


def _in_halves(state: FSMoEState) -> bool:
    return state.splitter is not None and state.splitter.is_planned


def _describe_schedule(state: FSMoEState, is_cut: bool) -> str:
    """Return whose order layers run in now, and why."""
    name, tuner = state.block.schedule, state.autotune
    if tuner is not None and tuner.trials is not None:
        return f"{name}: plans are tried in turns"
    if tuner is not None and tuner.outcome.num_plans:
        others = tuner.outcome.num_plans - 1
        if tuner.outcome.is_stock:
            return f"DeepSpeed's, kept by the autotuner: none of {others} other plans was faster"
        return f"{name}, chosen by the autotuner from {others + 1} plans"
    if name == "deepspeed":
        return "DeepSpeed's"
    if is_cut or _in_halves(state) or state.micro_ops is not None:
        return name
    if tuner is not None and not tuner.is_settled:
        return f"DeepSpeed's for now; {name} begins when measured"
    if tuner is not None and tuner.rows:
        return f"{name}: one chunk, as predicted"
    return f"{name}: one chunk, so DeepSpeed's order"


def _describe_autotune(state: FSMoEState) -> str:
    if state.autotune is not None:
        return state.autotune.describe()
    return "off" if state.why_untuned is None else f"off: {state.why_untuned}"


def _describe_gradients(state: FSMoEState) -> str:
    return state.gradients if state.reduction is None else state.reduction.describe()


def _describe_halves(state: FSMoEState) -> str:
    """Return whether two halves of a batch take turns now; where batches stay whole, the reason."""
    asked, splitter, tuner = state.block.split_batch, state.splitter, state.autotune
    why = state.why_whole or (splitter and (splitter.why_not or splitter.why_whole))
    if why:
        return "off" if why == asked == "off" else f"{asked}: batches stay whole: {why}"
    if splitter.is_wanted:
        return f"{asked}: two halves take turns"
    if splitter.is_planned or tuner is None:
        return f"{asked}: batches are whole for now, and two halves take turns later"
    if not tuner.is_settled:
        return f"{asked}: batches are whole for now, and halves are tried with other plans"
    return f"{asked}: batches stay whole{', which was faster' if splitter.is_worth_trying else ''}"


def _describe_placement(state: FSMoEState) -> str:
    """Describe who decides where experts are."""
    block = state.block.placement
    if block.policy == "off":
        return "the model's own order" if state.placement is None else "as the file says, and stays"
    if block.policy == "lina" and state.placement is None:
        return "lina: ep_size was chosen at the start, and experts stay"
    if state.placement is None:
        return f"{block.policy}: {state.why_not_placed}"
    return f"{block.policy}, decided every {block.every} steps"


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


def describe_gate(gate: Any) -> str:
    """Return what a gate is and what it is set to."""
    if not isinstance(gate, FSMoEGate):
        return gate.describe() if isinstance(gate, (GateBase, GivenRouter)) else type(gate).__name__
    return f"topk, k = {gate.k}, {f'capacity factor {gate.capacity_factor}' if gate.drop_tokens else 'nothing dropped'}"
