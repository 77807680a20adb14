# SPDX-License-Identifier: Apache-2.0
"""Reports measurements at the end of steps: to DeepSpeed's monitors, and to the record of the run.

The engine calls it after each step. ``ds_fsmoe/telemetry`` counts and writes; here the values of one step are put
together and sent. It also records stock engines, for comparison.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspeed.moe.layer import MoE
from deepspeed.moe.sharded_moe import MOELayer
from torch import nn
from torch.utils.hooks import RemovableHandle

from ds_fsmoe.components.expert_compute.contract import follows_contract
from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.config.reading import ConfigError, shown
from ds_fsmoe.distributed.fail_together import from_first_rank, most_of, on_every_rank
from ds_fsmoe.distributed.topology import rank_now
from ds_fsmoe.engine.compat import load_ds_config
from ds_fsmoe.engine.convert_experts import num_experts_of
from ds_fsmoe.execution.pipeline import CallSizes
from ds_fsmoe.files.hiding import config_of
from ds_fsmoe.files.runs import CLUSTER, COMPARED, MEASURED, PLACEMENT, PLANS, ROUTERS, check_run_folder
from ds_fsmoe.files.whole_files import OF_RECORD, ONE_EACH, OwnedError, Ownership, create
from ds_fsmoe.layer.experts_layer import FSMoEExperts
from ds_fsmoe.log import log_on_rank_0
from ds_fsmoe.observing.call_observer import call_sizes, folder_of_trace
from ds_fsmoe.observing.instruments import LayerCall
from ds_fsmoe.planning.call_shape import CallShape
from ds_fsmoe.planning.cluster import cluster_as_json
from ds_fsmoe.planning.decide.plan import mode_of
from ds_fsmoe.planning.job.recorded_costs import job_as_data
from ds_fsmoe.telemetry.flops import count_grouped_products
from ds_fsmoe.telemetry.record import Record
from ds_fsmoe.telemetry.routers import RouterMetrics, named, of_placement, of_routers, router_outputs
from ds_fsmoe.telemetry.stock_trace import StockTracer
from ds_fsmoe.tuning.autotune import Autotune
from ds_fsmoe.tuning.drift import StepComparison
from ds_fsmoe.tuning.measure import Measured
from ds_fsmoe.tuning.table import called_as_data, plans_as_data

if TYPE_CHECKING:
    from ds_fsmoe.engine.state import FSMoEState


# ---- Begins the record of a run when its engine is complete: of ours, or of DeepSpeed's own to compare it with


_made: weakref.WeakSet[Record] = weakref.WeakSet()
"""The records of this process, as long as their engines are there."""
_claimed: list[Ownership] = []
"""The folder of the record of the engine that is being made."""


def claim_folders(block: FSMoEBlock) -> None:
    """Claim the folders of the record and of the trace, before files are removed there. Collective.

    Raises:
        ConfigError: a folder is not writable, another job writes there, or it has files that belong to no run; raised
            on every rank.
    """
    while _claimed:  # by an engine that was never made
        _claimed.pop().release()
    if block.record.dir is not None and not _is_recording():
        problem = from_first_rank(_claim(Path(block.record.dir)) if rank_now() == 0 else "")
        if problem:
            raise ConfigError(f"fsmoe.record.dir = {shown(block.record.dir)}: {problem}")
    if block.trace.enabled:
        folder = folder_of_trace(block)
        problems = on_every_rank(_why_not_written_to(folder, f".rank{rank_now()}.writable"))
        if wrong := [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem]:
            name = "fsmoe.trace.path" if folder == Path(block.trace.path) else "fsmoe.record.dir"
            raise ConfigError(f"{name} = {shown(str(folder))}: {wrong[0]}")


def _claim(folder: Path) -> str:
    """Claim a folder for this job; return the reason why that failed, or an empty text."""
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


def watch_fsmoe(engine: Any) -> None:
    """Begin the record of an engine of ours, if its block asks for one, and make DeepSpeed's profiler count its layers.

    Raises:
        ConfigError: its folder is not writable; raised on every rank.
    """
    state = engine.fsmoe
    count_grouped_products(engine)
    layers = {
        each.label: _layer(path, each) | {"gate": type(each.gate).__name__} for path, each in state.layers.items()
    }
    facts = {"schedule": state.block.schedule, "chosen": state.chosen(), "layers": layers}
    facts["why_untuned"] = state.why_untuned
    record = _record(engine, state.block, facts, next(iter(state.layers.values()), None))
    if record is not None:
        # The record outlives an engine without a call of destroy, and writes its end.
        autotune = (lambda: None) if state.autotune is None else weakref.ref(state.autotune)
        record.steps.mark_tuning(lambda: _is_tuning(autotune()), lambda: _is_settled(autotune()))
        state.telemetry.record = record
        state.telemetry.plans_changed()


def _is_tuning(autotune: Autotune | None) -> bool:
    """Return True if the next step measures or tries a plan."""
    return autotune is not None and (autotune.is_measuring or autotune.trials is not None)


def _is_settled(autotune: Autotune | None) -> bool:
    """Return True if plans are settled in the next step, or never change."""
    return autotune is None or autotune.is_settled


def watch_stock(engine: Any, block: FSMoEBlock) -> None:
    """Begin the record and the trace of an engine of DeepSpeed's own, where the block asks for them. Collective.

    Raises:
        ConfigError: the folder of either cannot be claimed; raised on every rank.
    """
    claim_folders(block)
    modules = engine.module.named_modules()
    found = [
        (path, each.deepspeed_moe if isinstance(each, MoE) else each)
        for path, each in modules
        if isinstance(each, MoE) or follows_contract(each)
    ]
    layers = {f"L{index:02d}": _layer(path, each) for index, (path, each) in enumerate(found)}
    first = found[0][1] if found else None
    watching: list[Record | StockTracer | None] = [_record(engine, block, {"layers": layers}, first)]
    if block.trace.enabled:
        asked = block.trace
        watching.append(StockTracer(engine, folder_of_trace(block), rank_now(), asked.start_step, asked.num_steps))
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
    if asked.dir is None and not asked.stop_after and not asked.stop_after_settled:
        return None
    if _is_recording():
        log_on_rank_0("fsmoe.record: another engine of this process is recorded, so this one is not", logging.WARNING)
        return None
    folder = None if asked.dir is None else Path(asked.dir)
    facts |= {"block": config_of(block.model_dump(exclude_unset=True, by_alias=True)), "cwd": str(Path.cwd())}
    with suppress(Exception):  # a config of whatever kind; without it the page says less
        facts["config"] = config_of(load_ds_config(engine.config)) | {"fsmoe": facts["block"]}
    problem, record = "", None
    try:
        owner = _claimed.pop() if _claimed else None
        record = Record(
            *(engine, folder, asked.stop_after, rank_now(), facts, first_layer, owner), asked.stop_after_settled
        )
    except OSError as error:
        problem = f"fsmoe.record.dir = {shown(asked.dir)}: cannot be written to: {error}"
    # Rank 0 alone writes, and no rank may continue to a collective without it.
    problem = from_first_rank(problem)
    if record is None or problem:
        raise ConfigError(problem)
    _made.add(record)
    return record


def _layer(path: str, layer: nn.Module) -> dict[str, Any]:
    if not isinstance(layer, (MOELayer, FSMoEExperts)):
        # Transformers' own experts: each rank has them all, and what a token takes is not theirs to know.
        return {"path": path, "experts": num_experts_of(layer), "ep_size": 1, "k": None, "own_ep_size": False}
    experts = layer.num_local_experts * layer.ep_size
    # The script has given DeepSpeed's own layers their size, and no config changes it.
    found = {"path": path, "experts": experts, "ep_size": layer.ep_size, "k": getattr(layer.gate, "k", None)}
    return found | {"own_ep_size": isinstance(layer, MOELayer)}


# ---- Reports what an engine of ours measured at the end of its steps: to DeepSpeed's monitors, and to the
# run's record


class Telemetry:
    """Reports for one engine. It counts only with ``metrics`` on, and with a monitor or a record.

    Making it is collective where a model has stages; so is the end of every step that is counted.

    Args:
        engine: the complete engine.
        state: the state of the engine.
    """

    def __init__(self, engine: Any, state: FSMoEState) -> None:
        block = state.block
        self._engine = engine
        self._gradient_plan: Any = None
        self._state = state
        self._every = block.metrics_every
        self._is_detailed = block.metrics == "detailed"
        self._writes_metrics = block.metrics != "off" and engine.monitor.enabled
        self.record: Record | None = None
        """The record of the run, if there is to be one."""
        self.routers: RouterMetrics | None = None
        self._layers = state.inner_layers
        self._decided: list[dict[str, Any]] = []
        self._hooks: list[RemovableHandle] = []
        self._shapes: dict[str, CallShape] = {}
        """Label of a layer -> the sizes of its first call in training, for the record."""
        self._recorded: Measured | dict[str, CallShape] | None = None
        """What the record has of the layers' costs, or at least of their sizes."""
        if block.record.dir is not None:
            state.running.instruments.append(self._note_sizes)
        if state.placement_watch is not None:
            state.placement_watch.on_event.append(lambda events: self._decided.extend(map(asdict, events)))
        if block.metrics == "off":
            return
        # A script may have given its monitor to rank 0 alone; what is shared at the end of steps is shared by all.
        (listens,) = most_of([float(engine.monitor.enabled or block.record.dir is not None)], state.running.device)
        if not listens:
            return
        sizes = {label: (each.total_experts, _num_copies(each)) for label, each in self._layers.items()}
        # Of the engine itself: what it does not have it looks for in the user's model.
        self.routers = RouterMetrics(sizes, state.running.device, vars(engine).get("stage_id"))
        state.running.instruments.append(self.routers.watch_call)
        self._watch_own_routers()
        self._listen(engine.global_steps)

    def _note_sizes(self, call: LayerCall) -> None:
        if not call.is_training or call.label in self._shapes:
            return

        def note(at: CallSizes) -> None:
            if at.capacity:
                found = call_sizes(at, call.experts)
                # One product of all weights, as the autotuner measures it.
                self._shapes[call.label] = replace(found, num_products=1, num_weights=max(1, found.num_weights))

        call.pipeline = call.pipeline.watched(on_call=note)

    def _record_costs(self) -> None:
        """Record the layers and the costs of their tasks, if they are new."""
        state, record = self._state, self.record
        tuner = state.autotune
        micro_batches = self._engine.gradient_accumulation_steps()
        choices = {label: getattr(gate, "k", None) for label, gate in self._gates().items()}
        result = None if tuner is None else tuner.result
        if result is not None and result.measured is not None and result.job is not None:
            measured = result.measured
            if measured is not self._recorded:
                kinds = tuple(replace(kind, num_choices=choices.get(kind.labels[0])) for kind in result.job.kinds)
                record.write(MEASURED, job_as_data(replace(result.job, kinds=kinds)))
                if measured.cluster is not None:
                    record.write(CLUSTER, cluster_as_json(measured.cluster))
                self._recorded = measured
        elif self._recorded is None and self._shapes:
            mode = mode_of(state.block.schedule, state.block.gradient_partition.mode)
            of_layers = self._shapes, self._layers, state.block, state.running.links, mode, micro_batches, choices
            record.write(MEASURED, called_as_data(*of_layers))
            self._recorded = self._shapes

    def _watch_own_routers(self) -> None:
        """Record the model's own routers where they return logits; experts receive their choices only."""
        experts = {label: each for label, each in self._layers.items() if isinstance(each, FSMoEExperts)}
        found = router_outputs(self._engine.module, experts) if experts else {}
        for label, output in found.items():
            self._hooks.append(self.routers.watch(output, experts[label], label))
        if silent := [label for label in experts if label not in found]:
            log_on_rank_0(
                f"router_entropy does not include {', '.join(silent)}",
                details=f"{type(self._engine.module).__name__} does not declare which module returns router logits "
                "(_can_record_outputs)",
            )

    def _gates(self) -> dict[str, Any]:
        return {label: each.gate for label, each in self._layers.items()}

    def _listen(self, next_step: int) -> None:
        # Steps are counted from 1 on in what people are shown.
        if self.routers is not None and (next_step + 1) % self._every == 0:
            self.routers.listen(self._gates())

    def step_is_over(self, step: int, num_samples: int, found: StepComparison | None) -> None:
        """Report the end of a step. Collective if it was counted.

        Args:
            step: the number of the step, from 1 on.
            num_samples: the samples trained with so far.
            found: the comparison of the step, if there was one.
        """
        reduction = self._state.reduction
        if reduction is not None and reduction.reducer.plan is not self._gradient_plan:
            self._gradient_plan = reduction.reducer.plan
            self.plans_changed()
        if self.record is not None and self._recorded is None:
            self._record_costs()
        values: dict[str, float] = {}
        if self.routers is not None and self.routers.is_listening:
            loads = self.routers.read(self._gates())
            values |= of_routers(loads, self._is_detailed) | self._plans()
            if self.record is not None:
                rows = {label: load.as_row() for label, load in loads.items()}
                self.record.append(ROUTERS, [{"step": step, "layers": rows}])
        self._listen(step)
        if self._decided:
            values |= of_placement(self._decided, self._is_detailed)
            if self.record is not None:
                self.record.append(PLACEMENT, self._with_places(self._decided))
            self._decided = []
        if found is not None:
            values |= found.values(self._is_detailed)
            if self.record is not None:
                self.record.append(COMPARED, [asdict(found) | {"busy": found.busy}])
        if values and self._writes_metrics:
            self._engine.monitor.write_events(named(values, num_samples))

    def _with_places(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows of a decision; a layer whose experts move has their old and new placement."""
        placement, watch = self._state.placement, self._state.placement_watch
        wanted, found = watch.wanted, []
        for row in rows:
            label = row["layer"]
            if label in wanted:
                groups = placement.layer(label).fsmoe.groups
                row = row | {
                    "places": {
                        "before": placement.now[label].expert_of_place,
                        "after": wanted[label].expert_of_place,
                        "node_of_rank": [groups.topology.node_of_rank[each] for each in groups.ranks_of("ep")],
                    }
                }
            found.append(row)
        return found

    def _plans(self) -> dict[str, float]:
        """Return the plans as numbers."""
        found: dict[str, float] = {"plans_made_again": self._state.plans_made_again}
        reduction = self._state.reduction
        if reduction is not None and reduction.reducer.plan is not None:
            found["gradients/bytes"], found["gradients/hidden_bytes"] = reduction.bytes_of_plan()
            found["gradients/sent_again"] = reduction.reducer.sent_again
        if self._is_detailed:
            for label, layer in self._layers.items():
                found[f"{label}/forward/num_chunks"] = layer.pipeline.forward.block.degree
                found[f"{label}/backward/num_chunks"] = layer.pipeline.backward.block.degree
        return found

    def plans_changed(self) -> None:
        """Record that plans have changed."""
        if self.record is None:
            return
        pipelines = {label: each.pipeline for label, each in self._layers.items()}
        # The current step has measured something.
        now = {"settled_at": self._engine.global_steps + 1, "chosen": self._state.chosen()}
        self.record.write(PLANS, plans_as_data(pipelines, self._state.autotune) | now)
        self._record_costs()

    def close(self) -> None:
        """End the record of the run, and stop watching routers."""
        for hook in self._hooks:
            hook.remove()
        if self.record is not None:
            self.record.close()


def _num_copies(layer: Any) -> int:
    """Return the number of ranks that enter a layer with the same tokens."""
    state = layer.fsmoe
    is_copied = state.mp_group is not None and state.tensor_parallel.same_tokens
    return state.mp_group.size() if is_copied else 1
