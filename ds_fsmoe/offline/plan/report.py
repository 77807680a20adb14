# SPDX-License-Identifier: Apache-2.0
"""A model on a cluster under every system: what ``ds_fsmoe plan`` prints and writes.

Of pipeline stages a whole batch is planned beside the stage that computes the most.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

from ds_fsmoe.offline.models.architecture import Architecture, describe_model
from ds_fsmoe.offline.models.model_layers import ModelStage, busiest_stage, model_layers, stages
from ds_fsmoe.offline.models.pipeline import PlannedPipeline, StageWork, pipeline_of_layers, pipeline_of_model
from ds_fsmoe.offline.models.zero import NO_ZERO, Zero, sharing_costs
from ds_fsmoe.planning.block import BlockPlan, block_schedule
from ds_fsmoe.planning.cluster import Cluster
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.decide.bounds import lower_bound_ms, step_bounds_ms
from ds_fsmoe.planning.decide.plan import ModelPlan, Planner, Settings, mode_of
from ds_fsmoe.planning.decide.plan_halves import plan_in_halves
from ds_fsmoe.planning.decide.presets import BEST, NAMES
from ds_fsmoe.planning.decide.search import Choice
from ds_fsmoe.planning.decide.step_time import StagePlan, StageTimes, stage_times
from ds_fsmoe.planning.groups import Crossings, Groups
from ds_fsmoe.planning.timeline import Span, Timeline, simulate
from ds_fsmoe.planning.workload import AllToAll, Layer, Shape, kind_costs, layer_work

STOCK = "deepspeed"
"""The schedule of DeepSpeed, over which others gain."""
_GROUPS = {"esp": "expert_tensor_parallel_size", "ep": "ep_size"}
_LINKS = {
    "shared": "links one after the other",
    "paper": "links at the same time",
    "reduce_first": "links at the same time, reduces first",
}


@dataclass(frozen=True)
class Report:
    """The plans of a model and their predictions."""

    cluster: Cluster
    groups: Groups
    shape: Shape
    """A layer; of an architecture, the one that most of its blocks with experts have."""
    settings: Settings
    costs: Mapping[str, LinearCost]
    layers: tuple[Layer, ...]
    """The layers of one pipeline stage."""
    plans: Mapping[str, ModelPlan]
    times_ms: Mapping[str, tuple[float, float]]
    """Preset -> the times of forward and backward."""
    bounds_ms: tuple[float, float]
    """The lower bounds of forward and backward: no plan is faster."""
    preset_name: str
    architecture: Architecture | None = None
    """The model block by block; ``None``: all layers are alike, and there is nothing else."""
    stage: ModelStage | None = None
    """The stage that is planned, of an architecture."""
    zero: Zero = NO_ZERO

    @property
    def places(self) -> Sequence[int]:
        """The places of the layers in the model: of an architecture, those of blocks with experts."""
        if self.architecture is None or self.stage is None:
            return range(len(self.layers))
        return [each for each in self.architecture.moe_blocks if each in self.stage.places][: len(self.layers)]

    @property
    def plan(self) -> ModelPlan:
        """The preset that is shown."""
        return self.plans[self.preset_name]

    @property
    def tail_bytes(self) -> float:
        """The gradients that are sent after the backward."""
        return self.plan.tail_bytes

    def head(self) -> list[tuple[str, str]]:
        """The assumptions of the plan."""
        s, g, at = self.shape, self.groups, self.groups.placements
        drop = "nothing dropped" if s.capacity_factor is None else f"capacity factor {s.capacity_factor:g}"
        if s.imbalance > 1:
            drop += f", the fullest rank {s.imbalance:g} times the mean"
        kappa = self.settings.contention
        sizes = ((_GROUPS.get(name, name), place) for name, place in at.items() if place.size > 1)
        lies = ", ".join(f"{name} = {place.size}{_lies(place.lanes)}" for name, place in sizes)
        if self.architecture is None:
            model = [
                (
                    "model",
                    f"{len(self.layers) * g.pp} layers, B = {s.B}, L = {s.L}, M = {s.M}, H = {s.H}, E = {s.E}, "
                    f"k = {s.K}, {drop}, {s.ffn} experts, {s.heads} heads, {8 * s.dtype_bytes}-bit",
                )
            ]
        else:
            step = f"B = {s.B}, L = {s.L}, {drop}, {8 * s.dtype_bytes}-bit"
            model = [*describe_model(self.architecture), ("step", step)]
        return [
            *model,
            ("groups", f"{g.world} ranks, {g.gpus_per_node} per node: {lies or 'one rank each'}"),
            *([("stages", self._stages())] if g.pp > 1 else []),
            (
                "links",
                f"kappa = {kappa.links:g} while both are busy, computation {kappa.compute:+.0%} beside traffic, "
                f"{self.settings.host_ms * 1e3:g} us to launch a task",
            ),
        ]

    def _stages(self) -> str:
        pp = self.groups.pp
        if self.stage is None:
            return f"{pp} alike; the layers below are those of the first"
        assert self.architecture is not None
        least, more = divmod(len(self.architecture.blocks), pp)
        sizes = f"{least} or {least + 1}" if more else f"{least}"
        places = f"{self.stage.places[0]} to {self.stage.places[-1]}" + (
            ", and the head" if self.stage.has_head else ""
        )
        return (
            f"{pp} of {sizes} blocks; the layers below are those of stage {self.stage.index + 1} (blocks {places}), "
            "which computes the most"
        )

    def block_timelines(self, preset_name: str) -> list[tuple[str, Timeline]]:
        """Return the timelines of a plan's middle layer, in both phases."""
        plan = self.plans[preset_name]
        middle = len(self.layers) // 2
        layer = self.layers[middle]
        pairs = (("forward", layer.forward, plan.forward[middle]), ("backward", layer.backward, plan.backward[middle]))
        return [(phase, self._simulate(work, block)) for phase, work, block in pairs]

    def _simulate(self, work: Any, block: BlockPlan) -> Timeline:
        schedule = block_schedule(work, block.without_ages())
        return simulate(schedule, self.costs, self.settings.contention, self.settings.host_ms)

    def in_halves(self) -> ModelPlan | None:
        """Return ``best`` for two halves of a micro-batch that take turns; ``None`` without layers."""
        planner, space = Planner(self.costs, self.settings), self.settings.space(BEST)
        options = [{"": each} for each in self.zero.layers(BEST, self.layers)]
        mode = mode_of(BEST) if self.zero.has_windows_of(BEST) else "off"
        return plan_in_halves(planner, options, space, mode)

    def phases_ms(self, plan: ModelPlan) -> tuple[float, float]:
        """Predict the times of forward and backward with a plan of these layers."""
        return Planner(self.costs, self.settings).phases_ms(plan)

    def pair_timelines(self, plan: ModelPlan) -> list[tuple[str, Timeline]]:
        """Return the timelines of two layers like the middle one of a plan, one after the other, in both phases."""
        middle = len(self.layers) // 2
        forward, backward = plan.forward[middle], plan.backward[-1 - middle].without_ages()
        few = (self.layers[middle],) * 2
        two = replace(plan, layers=few, forward=(forward,) * 2, backward=(backward,) * 2, tail=())
        found = two.timelines(self.costs, self.settings.contention, self.settings.host_ms)
        return list(zip(("forward", "backward"), found, strict=True))

    def step_timelines(self, *, in_halves: ModelPlan | None = None) -> list[tuple[str, Timeline]]:
        """The whole step of every preset, forward and backward one after the other, the slowest first. All of them do
        the same work and send the same gradients, so their lengths can be compared.

        Args:
            in_halves: a plan in halves that is drawn with them.
        """
        plans = {**self.plans, **({} if in_halves is None else {f"{BEST}, in halves": in_halves})}
        times_ms = {name: sum(self.times_ms.get(name) or self.phases_ms(plan)) for name, plan in plans.items()}
        drawn = []
        for name in sorted(plans, key=lambda each: -times_ms[each]):
            forward, backward = plans[name].timelines(self.costs, self.settings.contention, self.settings.host_ms)
            shift_ms = forward.makespan_ms
            later = (Span(each.task, each.start_ms + shift_ms, each.end_ms + shift_ms, None) for each in backward.spans)
            gain = times_ms["deepspeed"] / times_ms[name]
            drawn.append((f"{name}, {gain:.2f}x over deepspeed", Timeline((*forward.spans, *later))))
        return drawn

    def trace(self) -> str:
        """Return the step for Perfetto, with one process per phase."""
        timelines = self.plan.timelines(self.costs, self.settings.contention, self.settings.host_ms)
        events = []
        for pid, (phase, timeline) in enumerate(zip(("forward", "backward"), timelines, strict=True)):
            events.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": phase}})
            events += [event | {"pid": pid} for event in json.loads(timeline.chrome_trace())["traceEvents"]]
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})

    def plan_rows(self) -> list[dict[str, Any]]:
        """Return the plan, layer by layer. Layers are counted from the front, in both phases."""
        last, places = len(self.layers) - 1, self.places
        forward = zip(self.plan.forward, self.plan.forward_choices, strict=True)
        backward = zip(self.plan.backward, self.plan.backward_choices, strict=True)
        return [
            *({"layer": places[index]} | self._row("forward", index, *each) for index, each in enumerate(forward)),
            *(
                {"layer": places[last - index]} | self._row("backward", last - index, *each)
                for index, each in enumerate(backward)
            ),
        ]

    def plan_groups(self) -> list[list[dict[str, Any]]]:
        """Return the plan with neighbours with as many chunks in one order merged; their gradient slices may differ."""
        decided = ("phase", "degree", "order")
        return [list(same) for _, same in groupby(self.plan_rows(), key=lambda row: [row[name] for name in decided])]

    def _row(self, phase: str, index: int, block: BlockPlan, choice: Choice) -> dict[str, Any]:
        layer = self.layers[index]
        work = layer.forward if phase == "forward" else layer.backward
        key = (work, phase, block.without_ages())
        if key not in self._rows:
            slices = (*block.moe_slices, *block.dense_slices)
            grads_ms = sum(self.costs[each.kind].ms(each.size_bytes) for each in slices)
            self._rows[key] = {
                "phase": phase,
                "degree": block.degree,
                "order": order_text(block),
                "ms": self._simulate(work, block).makespan_ms,
                "bound_ms": lower_bound_ms(work, self.costs, self.settings.max_degree, grads_ms),
                "moe_bytes": sum(each.size_bytes for each in block.moe_slices),
                "dense_bytes": sum(each.size_bytes for each in block.dense_slices),
                "why": choice.explain(),
            }
        return self._rows[key]

    def _model(self) -> dict[str, Any]:
        """Return what the architecture is, in plain types."""
        model, stage = self.architecture, self.stage
        assert model is not None
        assert stage is not None
        return {
            "name": model.name,
            "source": model.source,
            "num_blocks": len(model.blocks),
            "moe_blocks": list(model.moe_blocks),
            "num_parameters": model.num_parameters,
            "num_expert_parameters": model.num_expert_parameters,
            "num_active_parameters": model.num_active_parameters,
            "stage": {"index": stage.index, "blocks": [stage.places[0], stage.places[-1]]},
        }

    @cached_property
    def _rows(self) -> dict[tuple, dict[str, Any]]:
        return {}

    def as_dict(self) -> dict[str, Any]:
        """Return the whole report in plain types."""
        return {
            "cluster": self.cluster.name,
            "source": self.cluster.source,
            "shape": asdict(self.shape),
            "groups": asdict(self.groups) | {"edp": self.groups.edp},
            "num_layers_per_stage": len(self.layers),
            **({} if self.architecture is None else {"model": self._model()}),
            "contention": asdict(self.settings.contention),
            "host_ms": self.settings.host_ms,
            "solver": self.settings.solver,
            "gradient_solver": self.settings.gradient_solver,
            "presets": {
                name: {
                    "forward_ms": forward_ms,
                    "backward_ms": backward_ms,
                    "step_ms": forward_ms + backward_ms,
                    "over_deepspeed": sum(self.times_ms["deepspeed"]) / (forward_ms + backward_ms),
                    "over_tutel": sum(self.times_ms["tutel"]) / (forward_ms + backward_ms),
                }
                for name, (forward_ms, backward_ms) in self.times_ms.items()
            },
            "lower_bound_ms": {"forward": self.bounds_ms[0], "backward": self.bounds_ms[1]},
            "plan": {"preset": self.preset_name, "layers": self.plan_rows(), "tail_bytes": self.tail_bytes},
        }


def order_text(block: BlockPlan) -> str:
    """Say in a few words in which order the tasks of a layer run."""
    return _LINKS[block.links]


def report(
    cluster: Cluster,
    groups: Groups,
    shape: Shape,
    num_layers: int,
    settings: Settings,
    preset_name: str,
    alltoall: AllToAll = "flat",
    recompute: bool = False,
    crossings: Crossings | None = None,
    architecture: Architecture | None = None,
    max_layers: int | None = None,
    zero: Zero = NO_ZERO,
    names: Sequence[str] = NAMES,
) -> Report:
    """Plan a model the way every system would.

    Args:
        cluster, groups, shape, num_layers, settings: what is planned.
        preset_name: whose plan is shown.
        alltoall: how tokens are exchanged.
        recompute: whether layers run their forward again in the backward.
        crossings: how often a token crosses where it does so once per node; ``None``: as with balanced routing.
        architecture: a whole model, of whose first ``num_layers`` blocks ``shape`` has the samples, the length, and the
            bytes of an element; ``None``: so many layers of that shape, and nothing else.
        max_layers: so many layers of a stage and no more are planned; ``None``: all.
        zero: the stage of ZeRO.
        names: of the systems.

    Raises:
        ValueError: an unknown preset, or whatever the parts refuse.
    """
    if preset_name not in NAMES:
        raise ValueError(f"no preset is called {preset_name!r}: the choices are {', '.join(NAMES)}")
    costs = kind_costs(cluster, groups, alltoall, shape)
    if architecture is not None:
        architecture = architecture.first(num_layers)
    stage = None if architecture is None else busiest_stage(architecture, groups.pp, shape.L)
    layers = planned_layers(groups, shape, num_layers, alltoall, recompute, crossings, architecture)[:max_layers]
    if zero.stage:
        costs = {**costs, **sharing_costs(cluster, groups)}
    planner = Planner(costs, settings)
    plans = {name: zero.plan(planner, name, layers) for name in names}
    if zero.stage and BEST in plans:
        # Layers are planned without what ZeRO sends; with it another plan may be the fastest.
        plans[BEST] = min((plans[BEST], *plans.values()), key=planner.batch_ms)
    times_ms = {}
    for name, plan in plans.items():
        forward, backward = plan.timelines(costs, settings.contention, settings.host_ms)
        times_ms[name] = forward.makespan_ms, backward.makespan_ms
    # Whether a system sends early or late: what ZeRO 3 sends has to be sent.
    bounds = step_bounds_ms(zero.layers(STOCK, layers), costs, settings.max_degree)
    found = layers, plans, times_ms, bounds, preset_name
    return Report(cluster, groups, shape, settings, costs, *found, architecture, stage, zero)


def planned_layers(
    groups: Groups,
    shape: Shape,
    num_layers: int,
    alltoall: AllToAll = "flat",
    recompute: bool = False,
    crossings: Crossings | None = None,
    architecture: Architecture | None = None,
) -> tuple[Layer, ...]:
    """Return the layers of one pipeline stage; see :func:`report`."""
    how = alltoall, recompute, crossings
    if architecture is None:
        # Chunks are whole slots, as they are in training.
        return (layer_work(shape, groups, alltoall, recompute, True, crossings),) * (num_layers // groups.pp)
    model, step = architecture.first(num_layers), (shape.B, shape.L, shape.dtype_bytes)
    return model_layers(model, groups, *step, *how, imbalance=shape.imbalance)


def _lies(lanes: tuple) -> str:
    return {0: "", 1: f" ({'/'.join(lanes)})", 2: " (both links)"}[len(lanes)]


@dataclass(frozen=True)
class BatchReport:
    """The plans of all stages by every system, and the batches that they make."""

    pipeline: PlannedPipeline
    places: tuple[range, ...]
    """The blocks of each stage."""
    plans: Mapping[str, Sequence[StagePlan]]
    """System -> the plan of each stage."""
    num_micro_batches: int
    bound_ms: float
    """The batch of stages that all take what no plan can beat."""
    preset_name: str

    def batch_ms(self, name: str) -> float:
        """Return the time of a batch by a system."""
        return self.pipeline.batch_ms([each.times for each in self.plans[name]], self.num_micro_batches)

    def bubble_share(self, name: str) -> float:
        """Return the share of all stages' time in which they have nothing to do."""
        shares = [row["bubble_share"] for row in self.rows(name)]
        return sum(shares) / len(shares)

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Return what each stage does by a system. Bytes and times of sends are those of a batch, there and back; what
        is left of a batch beside them and the stage's own work are its bubbles."""
        whole_ms, count, found = self.batch_ms(name), self.num_micro_batches, []
        for stage, plan in enumerate(self.plans[name]):
            sends_ms = self.pipeline.stage_sends_ms(stage, count)
            bubbles_ms = max(0.0, whole_ms - plan.times.busy_ms(count) - sends_ms)
            neighbours = (stage > 0) + (stage < len(self.places) - 1)
            found.append(
                {
                    "stage": stage,
                    "blocks": [self.places[stage][0], self.places[stage][-1]],
                    **asdict(plan.times),
                    "hidden_gradient_bytes": plan.hidden_bytes,
                    "later_gradient_bytes": plan.after_bytes,
                    "send_bytes": 2 * neighbours * count * self.pipeline.send_bytes,
                    "sends_ms": sends_ms,
                    "bubbles_ms": bubbles_ms,
                    "bubble_share": bubbles_ms / whole_ms,
                }
            )
        return found

    def on_stage(self, report: Report) -> Report:
        """Return a report of one stage with the plans that it has in the batch."""
        index = 0 if report.stage is None else report.stage.index
        plans = {name: of_stages[index].plan or report.plans[name] for name, of_stages in self.plans.items()}
        times_ms = {name: report.phases_ms(plan) for name, plan in plans.items()}
        return replace(report, plans=plans, times_ms=times_ms)

    def as_dict(self) -> dict[str, Any]:
        """Return the whole report in plain types."""
        base_ms = {name: self.batch_ms(name) for name in ("deepspeed", "tutel")}
        links = zip(self.pipeline.lanes, self.pipeline.sends_ms, strict=True)
        return {
            "num_micro_batches": self.num_micro_batches,
            "links": [{"lane": lane.value, "send_ms": send_ms} for lane, send_ms in links],
            "send_bytes": self.pipeline.send_bytes,
            "tied_ms": self.pipeline.tied_ms,
            "lower_bound_ms": self.bound_ms,
            "presets": {
                name: {
                    "batch_ms": self.batch_ms(name),
                    "bubble_share": self.bubble_share(name),
                    "over_deepspeed": base_ms["deepspeed"] / self.batch_ms(name),
                    "over_tutel": base_ms["tutel"] / self.batch_ms(name),
                    "stages": self.rows(name),
                }
                for name in self.plans
            },
        }


def batch_report(report: Report, **how: Any) -> BatchReport:
    """Plan all stages of a model the way every system would, of which one stage has been planned.

    Args:
        report: of that stage; its settings have the number of micro-batches.
        how: ``alltoall``, ``recompute`` and ``crossings`` as the stage was planned with.

    Raises:
        ValueError: the cluster has no number for sends.
    """
    groups, settings, model = report.groups, report.settings, report.architecture
    if model is None:
        pipeline = pipeline_of_layers(report.cluster, groups, report.layers, report.shape)
        size = len(report.layers)
        places = tuple(range(size * each, size * (each + 1)) for each in range(groups.pp))
    else:
        parts = stages(model, groups.pp)
        pipeline = pipeline_of_model(report.cluster, model, groups, parts, report.shape, **how)
        places = tuple(each.places for each in parts)
    pipeline = replace(pipeline, zero=report.zero)
    planner = Planner(report.costs, settings)
    plans = {
        name: pipeline.plan(planner, name, {StageWork(report.layers): stage_times(planner, plan)})
        for name, plan in report.plans.items()
    }
    least = _least_times(pipeline, planner, plans[report.preset_name])
    bound_ms = pipeline.batch_ms(least, settings.num_micro_batches)
    return BatchReport(pipeline, places, plans, settings.num_micro_batches, bound_ms, report.preset_name)


def _least_times(pipeline: PlannedPipeline, planner: Planner, found: Sequence[StagePlan]) -> list[StageTimes]:
    """Return what no plan of each stage can beat: a batch gets no longer when a part of it gets shorter."""
    settings = planner.settings
    least = []
    for work, plan in zip(pipeline.works, found, strict=True):
        if work.dense is not None:
            least.append(plan.times)
            continue
        layers = pipeline.zero.layers(STOCK, work.layers)
        forward_ms, last_ms = step_bounds_ms(layers, planner.costs, settings.max_degree)
        bare = [replace(each, gradients=()) for each in layers]
        earlier_ms = step_bounds_ms(bare, planner.costs, settings.max_degree)[1]
        # Gradients lengthen a backward, or follow it; nobody waits for these.
        least.append(StageTimes(forward_ms, earlier_ms, earlier_ms, max(0.0, last_ms - earlier_ms)))
    return least
