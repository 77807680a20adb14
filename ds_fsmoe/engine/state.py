# SPDX-License-Identifier: Apache-2.0
"""Holds the state of one engine's MoE layers, and updates it between steps.

The engine calls it at the start of each forward and at the end of each step; scripts reach it as ``engine.fsmoe``. The
functions below the class describe the active settings for the log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from ds_fsmoe.checks.expert_results import ExpertResults
from ds_fsmoe.checks.router_checks import RouterCheck
from ds_fsmoe.components.gate import GateBase, update_gates
from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.distributed.agreement import check_agreement, facts_of_config, facts_of_layers, facts_of_plan
from ds_fsmoe.distributed.fail_together import on_every_rank, raise_on_all_ranks
from ds_fsmoe.distributed.groups import FSMoEGroups
from ds_fsmoe.distributed.topology import Stages, world_size_now
from ds_fsmoe.engine.auto_ep_size import choice_of
from ds_fsmoe.engine.restore_model import forget_graph
from ds_fsmoe.engine.routing_data import RoutingData
from ds_fsmoe.engine.telemetry import Telemetry
from ds_fsmoe.gradients.reduction import Reduction
from ds_fsmoe.gradients.updated_parameters import UpdatedParameters
from ds_fsmoe.layer.expert_checks import ChunkGuard
from ds_fsmoe.layer.experts_layer import FSMoEExperts
from ds_fsmoe.layer.experts_state import ExternalRouter
from ds_fsmoe.layer.parts import Parts
from ds_fsmoe.layer.runtime import LayerRuntime
from ds_fsmoe.layer.state import ConvertedLayer
from ds_fsmoe.layer.stock_layer import FSMoEGate
from ds_fsmoe.observing.predicted import MeasuredPredictor
from ds_fsmoe.placement.placements import Placements
from ds_fsmoe.placement.watch import PlacementWatch
from ds_fsmoe.planning.block import BlockPlan
from ds_fsmoe.planning.decide.block_times import order_words
from ds_fsmoe.planning.decide.presets import BEST
from ds_fsmoe.planning.workload import NODE_DEDUPLICATED
from ds_fsmoe.telemetry.paths import PathProfiler
from ds_fsmoe.terminal.tables import Message, Table
from ds_fsmoe.tuning.autotune import FORWARDS_BEFORE, Autotune
from ds_fsmoe.tuning.drift import BatchWatch, PredictionWatch, StepComparison
from ds_fsmoe.tuning.micro_ops import MicroOps, chunks_by_bytes
from ds_fsmoe.tuning.predicted_ep_size import BatchLengths
from ds_fsmoe.tuning.summary import why_unpadded
from ds_fsmoe.two_batch.splitter import Splitter
from ds_fsmoe.versions import VERSION


class FSMoEState:
    """Holds the state of one engine's MoE layers: ``engine.fsmoe``."""

    def __init__(
        self,
        block: FSMoEBlock,
        layers: dict[str, ConvertedLayer],
        parts: Parts,
        running: LayerRuntime,
        stage_group: dist.ProcessGroup | None = None,
        micro_batches: Callable[[], int] = lambda: 1,
    ) -> None:
        self.block = block
        self.micro_batches = micro_batches
        """Tells the number of micro-batches of an optimizer step, which a script may change."""
        self.stage_group = stage_group
        """The ranks that run the same layers; ``None``: all."""
        self.layers = layers
        """The MoE layers of this rank, by path."""
        self.inner_layers = {each.label: each for each in layers.values()}
        """The same layers, by their labels (``L00``, ...)."""
        self.parts = parts
        self.running = running
        self.reduction: Reduction | None = None
        """The reduction of gradients, where we do it."""
        self.autotune = Autotune(block, running, stage_group) if block.autotune.enabled else None
        self.micro_ops = MicroOps(block, stage_group) if chunks_by_bytes(block) else None
        """The object that cuts layers by rule, where that is asked for."""
        if self.micro_ops is not None:
            running.instruments.append(self.micro_ops.watch)
        running.observer.predictors = self._predictors
        self.watch: PredictionWatch | None = None
        """The watch that compares steps with their predictions, where that is asked for."""
        if running.step_clock is not None and block.autotune.watch_every and stage_group is None:
            of_steps = running.step_clock, list(self.inner_layers), self._predictors, self._plan_again
            self.watch = PredictionWatch(block.autotune, *of_steps, stage_group)
        self.updated: UpdatedParameters | None = None
        """The gather of updated parameters, where it is ours."""
        self.why_untuned: str | None = None
        """The reason why nothing is measured, though nobody has turned that off."""
        self.has_tuned_plans = False
        """Whether a checkpoint's plans are used that the autotuner of that run has chosen."""
        self.lengths: BatchLengths | None = None
        """What compares batches with the length that ``ep_size`` was chosen for, where it was chosen."""
        self.splitter: Splitter | None = None
        """The splitter, which runs blocks by sub-batches, where that may be."""
        self.why_whole = ""
        """The reason why batches stay whole."""
        self.why_not_placed = ""
        """The reason why no expert moves, though that is asked for."""
        self.gradients = "DeepSpeed's own reduction"
        """The way gradients are reduced, in words: the mode, where it is ours."""
        self.has_late_gradients = False
        """Whether they are sent after the backward though the schedule would send them earlier."""

        self._router_check = RouterCheck(stage_group) if block.debug.check_router else None
        if self._router_check is not None:
            running.instruments.append(self._router_check.watch)
        self.expert_results: ExpertResults | None = None
        """The check of experts' results before each optimizer step, where that is asked for."""
        self.placement: Placements | None = None
        """Where experts are, if they may move; made with the engine."""
        self.placement_watch: PlacementWatch | None = None
        """The watch that decides when experts move, where that is asked for."""
        self.paths: PathProfiler | None = None
        """The profiler that counts which experts follow which, where that is asked for."""
        if block.placement.profile_paths:
            self.paths = PathProfiler({label: each.total_experts for label, each in self.inner_layers.items()})
            running.instruments.append(self.paths.watch)
        self.routing: RoutingData | None = None
        """The object that records and replays routing, once the engine is complete."""
        self.telemetry: Telemetry | None = None
        """The telemetry that is told at the end of each step, once the engine is complete."""
        self.plans_made_again = 0
        """The number of times that plans were made again because steps were no longer as predicted."""
        self._facts: dict[str, str] = {}
        self._compared_at = 0
        self._first_step: int | None = None
        self._is_settled = False
        is_tuned = block.autotune.enabled or self.micro_ops is not None
        tries, is_sharded = block.debug.check_experts, block.esp_size > 1
        self.chunking_guard = ChunkGuard(
            running.device, tries, is_tuned, is_sharded, stage_group, self._on_layers_unchunked
        )
        running.checks.append(self.chunking_guard.check)

    def begin(self, steps_whole: bool) -> None:
        """Begin to check and observe layers, when the engine is complete. Collective.

        Args:
            steps_whole: True if the engine has an optimizer, and parameters that are whole in a forward.
        """
        self.chunking_guard.begin(self.inner_layers)
        running = self.running
        sizes = {(each.ep_size, each.fsmoe.tensor_parallel) for each in self.inner_layers.values()}
        of_all = sizes if self.stage_group is None else set().union(*on_every_rank(sizes))
        running.layer_sizes = sorted(of_all, key=repr)
        if steps_whole and self.stage_group is None and running.device.type != "cpu" and world_size_now() > 1:
            alone = [
                path
                for path, each in self.layers.items()
                if isinstance(each, FSMoEExperts) and each.ep_size * self.block.esp_size == 1
            ]
            running.late_faults.begin_sharing(alone, running.device)

    def facts(self) -> dict[str, str]:
        """Return the facts that all ranks must agree on, as short texts by name."""
        if not self._facts:
            for label, layer in self.inner_layers.items():
                for plan in (layer.pipeline.forward, layer.pipeline.backward):
                    self._facts |= facts_of_plan(label, plan)
                self._facts[f"dispatch of {label}"] = f"unpadded by choice: {layer.fsmoe.is_unpadded_by_choice}"
        placed = {} if self.placement is None else self.placement.facts()
        return self._facts | placed | facts_of_config(self.block.alike()) | facts_of_layers(self.layers)

    def at_step(self, number: int) -> None:
        """Start, or continue, optimizer step ``number``.

        Raises:
            DisagreementError: every ``debug.check_every`` steps, if ranks differ.
        """
        self.running.at_step(number)
        self.routing.at_step(number)
        if self._first_step is None:
            self._first_step = number
        elif number > self._first_step and not self._is_settled:
            self._is_settled = True
            self.chunking_guard.settle(self.inner_layers)
            self._chunk_by_rule()
        if self._router_check is not None:
            self._router_check.step = number
        every = self.block.debug.check_every
        if every and number >= self._compared_at + every:
            self._compared_at = number
            self.chunking_guard.settle(self.inner_layers)
            check_agreement(self.facts(), self.stage_group, f"how MoE layers are run, at step {number}")

    def _chunk_by_rule(self) -> None:
        """Set the number of chunks of layers by their bytes, if the config asks for it and a step has counted them.
        Collective."""
        if self.micro_ops is None or not self.micro_ops.is_wanted:
            return
        self.chunking_guard.settle(self.inner_layers)
        is_cut = self.micro_ops.chunk_layers(self.inner_layers)
        if self.stage_group is not None:
            # Plans are compared on all stages at once, also on those without chunked layers.
            is_cut = any(on_every_rank(is_cut))
        if is_cut:
            self.plans_changed()

    def replay(self, indices: Any) -> None:
        """Replay choices in the next forward, such as those of a sampling engine. Collective.

        Only the choice is replaced: weights, and with them the gradients of routers, come from the scores of the
        forward. Under activation checkpointing the recomputed forward uses the same choice.

        Args:
            indices: [tokens, layers, k], see :meth:`~ds_fsmoe.engine.routing_data.RoutingData.replay`; ``None`` on a
                rank without choices.

        Raises:
            ReplayError: the choices of any rank do not fit the model; on every rank.
        """
        self.routing.replay(indices)

    def before_forward(self) -> None:
        """Choose how layers are run, once, before a forward in training. Collective when a choice is due.

        Raises:
            MeasuringError, DisagreementError: on every rank.
        """
        if self.autotune is None:
            return
        # Where parameters are gathered under the forward, the first one that waits for them is among those before.
        before = FORWARDS_BEFORE if self.updated is None else max(FORWARDS_BEFORE, self.micro_batches() + 1)
        if not self.autotune.counts_forward(before):
            return
        self.wait_for_parameters()
        clock = self.running.step_clock
        dense_ms = None if clock is None else clock.dense_ms(self.stage_group)
        self.chunking_guard.settle(self.inner_layers)
        # A schedule that was named is run as it is.
        can_split = self.block.schedule == BEST and self.splitter is not None and self.splitter.is_worth_trying
        if not self.autotune.run(self.inner_layers, self.reduction, dense_ms, can_split, self.micro_batches()):
            return
        if self.reduction is not None and self.autotune.trials is None:
            self.reduction.plans_are_kept()
        self.plans_changed()

    def keeps_batches_whole(self) -> bool:
        """Return True if batches are measured, recorded or replayed unsplit for now; the same on every rank."""
        is_measuring = self.autotune is not None and self.autotune.is_measuring
        return is_measuring or self.running.records_routing or self.running.replay.is_armed

    def begin_stages(self, stages: Stages) -> None:
        """Set this rank to run one of several pipeline stages, whose plans change only between two batches.

        Args:
            stages: the stages, with this rank's own.
        """
        if self.autotune is None:
            return
        self.autotune.stages = stages
        block, clock = self.block.autotune, self.running.step_clock
        if clock is not None and block.watch_every:
            self.watch = BatchWatch(block, clock, stages, lambda: self.autotune.result.of_stages, self._plan_again)

    def plans_changed(self) -> None:
        """Update the state after a change of plans. Collective.

        Raises:
            DisagreementError: on every rank, if plans differ between ranks.
            MeasuringError: the same in pipeline stages, where only the ranks of one stage share plans; on every
            rank.
        """
        if self.watch is not None:
            self.watch.plans_changed()
        self._facts = {}
        with nullcontext() if self.stage_group is None else raise_on_all_ranks(None, "comparing plans"):
            check_agreement(self.facts(), self.stage_group, "the plans that were chosen")
        if self.telemetry is not None:
            self.telemetry.plans_changed()

    def wait_for_parameters(self) -> None:
        """Wait for all updated parameters that are still being gathered.

        Code that reads memory without torch, by an earlier address, needs this. All other reads wait by themselves.
        """
        if self.updated is not None:
            self.updated.wait()

    def recheck_chunking(self) -> None:
        """Check again whether layers may be chunked. Collective.

        Every rank has to call it between two steps, after experts, their weights, hooks on their module or dropout have
        changed.
        """
        self.chunking_guard.recheck()
        self.chunking_guard.begin(self.inner_layers)

    look_again = recheck_chunking  # its name in version 0.2.0

    def _on_layers_unchunked(self) -> None:
        """Update the state after some layers were set to one chunk, on this rank for now."""
        self._facts = {}
        if self.telemetry is not None:
            self.telemetry.plans_changed()

    def step_is_over(self, next_step: int) -> StepComparison | None:
        """End an optimizer step: continue trials of plans, or compare the step with its prediction. Collective if
        either is due.

        Args:
            next_step: the number of the next step.

        Returns:
            The comparison, if one was made.
        """
        self._chunk_by_rule()
        if self.running.step_clock is not None:
            self.running.step_clock.step_is_over()
        if self.lengths is not None and self.lengths.step_is_over(self._is_tuned()):
            self.wait_for_parameters()
            self.lengths.compare()
        if self.placement_watch is not None:
            self.placement_watch.step_is_over(next_step, self._is_tuned())
        if self.autotune is not None and self.autotune.trials is not None:
            is_settled = self.autotune.trial_is_over()
            self._facts = {}
            if is_settled:
                if self.reduction is not None:
                    self.reduction.plans_are_kept()
                self.plans_changed()
            return None
        if self.autotune is not None and self.autotune.step_is_over():
            # Layers may be chunked from now on, and experts may have changed since the last check.
            self.chunking_guard.recheck()
        return None if self.watch is None else self.watch.step_is_over(next_step)

    def _is_tuned(self) -> bool:
        return self.autotune is None or self.autotune.is_settled

    def _predictors(self) -> Mapping[str, MeasuredPredictor]:
        return {} if self.autotune is None else self.autotune.result.predictors

    def _plan_again(self, reason: str) -> None:
        self.plans_made_again += 1
        self.chunking_guard.recheck()
        for layer in self.inner_layers.values():
            # The watched forward shows slots, as the first did.
            if layer.fsmoe.plan.is_unpadded:
                layer.fsmoe.apply(replace(layer.fsmoe.plan, is_unpadded=False))
        self._facts = {}
        self.autotune.request_again(reason)

    def after_optimizer_step(self) -> None:
        """Update gates by their counts after an optimizer step. Collective if there are such gates."""
        inner, groups = list(self.inner_layers.values()), [self.stage_group]
        # In a pipeline of stages, the tensor-parallel ranks are apart from the data-parallel ones.
        if self.stage_group is not None and inner and inner[0].fsmoe.mp_group is not None:
            groups.append(inner[0].fsmoe.mp_group)
        for each in inner:
            forget_graph(each)
        update_gates((each.gate for each in inner if isinstance(each.gate, GateBase)), groups)

    def groups(self) -> dict[str, FSMoEGroups]:
        """Return the groups of the layers, by DeepSpeed's name of the experts' group."""
        return {
            each.ep_group_name: self.running.groups(each.ep_size, each.fsmoe.tensor_parallel)
            for each in self.inner_layers.values()
        }

    def close(self) -> None:
        """Return the reduction of gradients to DeepSpeed, and end the lanes, once; layers keep running without the
        engine."""
        if self.running.is_over:
            return
        for each in (self.autotune, self.telemetry, self.routing, self.splitter, self.updated, self.reduction):
            if each is not None:
                each.close()
        for layer in self.inner_layers.values():
            layer.fsmoe.run_on_without_engine()
        self.running.close()

    @property
    def num_layers(self) -> int:
        """Return the number of MoE layers that are ours."""
        return len(self.layers)

    def chosen(self) -> dict[str, str]:
        """Return the active settings, a word or two per field of the config, in the order in which a token meets
        them."""
        return {name: words for name, (words, _) in what_runs(self).items()}


# ---- Says what an engine runs: one record, whose words the log, ``engine.fsmoe.chosen()``, examples and pages
# show


MIN_LOGGED_SHARE = 0.1
"""The share of slots that have to be empty for a word about it."""


def what_runs(state: FSMoEState) -> dict[str, tuple[str, bool]]:
    """Return field of the config -> (active setting, True if it differs from DeepSpeed's).

    Settings come from the current plans of layers, not from the config's request, in the order in which a token meets
    them.
    """
    block, running = state.block, state.running
    blocks = _blocks(state)
    is_cut = any(each.degree > 1 for pair in blocks for each in pair)
    gates = sorted({describe_gate(layer.gate) for layer in state.inner_layers.values()})
    dispatch, alltoall = describe_dispatch(state), describe_alltoall(state)
    orders = dict.fromkeys(
        order_words(each.degree, each.links, each.conversions) for pair in blocks for each in pair if each.degree > 1
    )
    chosen = choice_of(state.layers.values()).reason
    untuned = "off" if state.why_untuned is None else f"off: {state.why_untuned}"
    return {
        "schedule": (_describe_schedule(state, is_cut), True),
        "num_chunks": (_describe_chunks(blocks), is_cut),
        "autotune": (
            untuned if state.autotune is None else state.autotune.describe(),
            state.autotune is not None or state.why_untuned is not None,
        ),
        "links": (running.describe_links(list(orders)), is_cut or running.one_link is not None),
        **({"ep_size": (chosen, True)} if chosen and block.ep_size == "auto" else {}),
        "expert_tensor_parallel_size": (str(block.esp_size), block.esp_size > 1),
        "gate": ("; ".join(gates), False),
        "order": (state.parts.order_name, False),
        "alltoall": (alltoall, alltoall != "flat"),
        "dispatch": (dispatch, "empty" in dispatch),
        "ops": (state.parts.ops.name, False),
        "gradients": (
            state.gradients if state.reduction is None else state.reduction.describe(),
            state.reduction is not None or state.has_late_gradients,
        ),
        "placement": (_describe_placement(state), state.placement is not None),
        "two_batch_overlap": (_describe_two_batch(state), _runs_two_batch(state)),
    }


_FIELDS = {
    "pipeline_degree": "num_chunks",
    "esp_size": "expert_tensor_parallel_size",
    "overlap": "links",
    "gradient_partition": "gradients",
    "split_batch": "two_batch_overlap",
}
"""Field of the block -> the part that shows what became of it, where that has another name."""


def summary(state: FSMoEState) -> Message:
    """Return the active settings as a table for the log: those requested or different from stock; the rest as
    details."""
    head = f"ds_fsmoe {VERSION} is on for {state.num_layers} MoE layer(s)"
    asked = {_FIELDS.get(each, each) for each in state.block.model_fields_set}
    found, says_all = what_runs(state).items(), state.block.autotune.details
    rows = [(name, words) for name, (words, differs) in found if says_all or differs or name in asked]
    return Message([head, Table((), rows, indent="  ")])


def _blocks(state: FSMoEState) -> list[tuple[BlockPlan, BlockPlan]]:
    """Return how layers run, forward and backward; empty for a pipeline stage without layers."""
    pipelines = [layer.pipeline for layer in state.inner_layers.values()]
    blocks = [(each.forward.block, each.backward.block) for each in pipelines]
    return blocks or [(state.running.plan.forward, state.running.plan.backward)]


def _describe_chunks(blocks: Sequence[tuple[BlockPlan, BlockPlan]]) -> str:
    counts = dict.fromkeys((forward.degree, backward.degree) for forward, backward in blocks)
    return "; ".join("forward {}, backward {}".format(*each) for each in counts)


def _runs_two_batch(state: FSMoEState) -> bool:
    return state.splitter is not None and state.splitter.is_planned


def _describe_schedule(state: FSMoEState, is_cut: bool) -> str:
    """Return the source of the order in which layers run now, and the reason."""
    name, tuner = state.block.schedule, state.autotune
    if tuner is not None and tuner.trials is not None:
        return f"{name}: the autotuner is trying plans"
    if tuner is not None and tuner.result.outcome.num_plans:
        others = tuner.result.outcome.num_plans - 1
        if tuner.result.outcome.is_stock:
            return f"DeepSpeed's (kept by the autotuner: none of {others} other plans was faster)"
        return f"{name} (chosen by the autotuner from {others + 1} plans)"
    if name == "deepspeed":
        return "DeepSpeed's"
    if is_cut or _runs_two_batch(state) or state.micro_ops is not None:
        return name
    if tuner is not None and not tuner.is_settled:
        return f"DeepSpeed's until measured, then {name}"
    if tuner is not None and tuner.result.rows:
        return f"{name}: one chunk, as predicted"
    return f"{name} in one chunk, which is DeepSpeed's order"


def _describe_two_batch(state: FSMoEState) -> str:
    """Return whether two-batch overlap runs now; if not, the reason."""
    asked, splitter, tuner = state.block.split_batch, state.splitter, state.autotune
    why = state.why_whole or (splitter and (splitter.why_not or splitter.why_whole))
    if why:
        return "off" if why == asked == "off" else f"{asked}: batches stay whole: {why}"
    if splitter.is_wanted:
        return f"{asked}: on"
    if splitter.is_planned or tuner is None:
        return f"{asked}: off for now, on later"
    if not tuner.is_settled:
        return f"{asked}: off for now, tried with the other plans"
    return f"{asked}: off{', which was faster' if splitter.is_worth_trying else ''}"


def _describe_placement(state: FSMoEState) -> str:
    """Describe the source of the placement of experts."""
    block = state.block.placement
    if block.policy == "off":
        return "the model's own order" if state.placement is None else "as the file says, and stays"
    if block.policy == "lina" and state.placement is None:
        return "lina: ep_size was chosen at the start, and no expert moves"
    if state.placement is None:
        return f"{block.policy}: {state.why_not_placed}"
    return f"{block.policy}, decided every {block.every} steps"


def describe_dispatch(state: FSMoEState) -> str:
    """Return the dispatch mode; for padded dispatch with empty slots, also the option that would avoid them."""
    layers = state.inner_layers.values()
    sends = {layer.fsmoe.sends_rows(layer.gate) for layer in layers}
    words = "; ".join("unpadded" if each else "padded" for each in sorted(sends)) or state.block.dispatch
    tuner = state.autotune
    if any(layer.fsmoe.is_unpadded_by_choice for layer in layers):
        why = "" if tuner is None else why_unpadded(tuner.result.rows)
        return f"{words}, chosen by the autotuner: {why or 'empty slots are not sent'}"
    empty = min((_least_empty(layer.gate) for layer in layers if layer.fsmoe.could_send_rows(layer.gate)), default=0.0)
    if state.block.dispatch != "auto" or empty < MIN_LOGGED_SHARE:
        return words
    said = f"{words}: at least {empty:.0%} of the slots are empty"
    if tuner is not None and any(layer.fsmoe.may_be_unpadded(layer.gate) for layer in layers):
        if not tuner.is_settled:
            return f'{said}; the autotuner compares "unpadded", which does not send these'
        if tuner.has_chosen:
            return f'{said}; the autotuner found "unpadded", which does not send these, no faster'
    return f'{said}; "dispatch": "unpadded" does not send these'


def _least_empty(gate: Any) -> float:
    """Return the least share of a gate's slots that stay empty, as capacity exceeds the number of choices."""
    factor = getattr(getattr(gate, "settings", gate), "capacity_factor", None)
    # A gate of a user's own may mean anything by it.
    return 1.0 - 1.0 / factor if isinstance(factor, (int, float)) and factor > 1.0 else 0.0


def describe_alltoall(state: FSMoEState) -> str:
    """Return the configured all-to-all, and those that run where they differ from it."""
    asked = state.running.plan.alltoall
    run = {layer.pipeline.forward.alltoall for layer in state.inner_layers.values()}
    return f"{asked}, run as {'; '.join(sorted(run))}" if asked == NODE_DEDUPLICATED and run - {asked} else asked


def describe_gate(gate: Any) -> str:
    """Return a gate's class and settings."""
    if not isinstance(gate, FSMoEGate):
        return gate.describe() if isinstance(gate, (GateBase, ExternalRouter)) else type(gate).__name__
    return f"topk, k = {gate.k}, {f'capacity factor {gate.capacity_factor}' if gate.drop_tokens else 'nothing dropped'}"
