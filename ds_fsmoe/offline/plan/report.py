# SPDX-License-Identifier: Apache-2.0
"""Plans a model on a cluster with every system. ``ds_fsmoe plan`` prints and writes the result."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

from ds_fsmoe.offline.models.architecture import describe_model
from ds_fsmoe.offline.models.known import PlannedModel
from ds_fsmoe.offline.models.model_layers import ModelStage, busiest_stage, model_layers
from ds_fsmoe.planning.block import BlockPlan, block_schedule
from ds_fsmoe.planning.cluster import Cluster
from ds_fsmoe.planning.decide.bounds import lower_bound_ms, step_bounds_ms
from ds_fsmoe.planning.decide.candidates import Search
from ds_fsmoe.planning.decide.plan import ModelPlan, Planner, Settings, mode_of
from ds_fsmoe.planning.decide.plan_requests import PlanRequest
from ds_fsmoe.planning.decide.presets import BEST, NAMES, preset
from ds_fsmoe.planning.decide.zero import NO_ZERO, Zero, sharing_costs
from ds_fsmoe.planning.groups import Fanout, Groups
from ds_fsmoe.planning.timeline import Span, Timeline, simulate
from ds_fsmoe.planning.workload import AllToAll, BlockWork, Layer, kind_costs, layer_work

STOCK = "deepspeed"
"""The schedule of DeepSpeed, over which others gain."""
PHASES = ("forward", "backward")
_GROUPS = {"esp": "expert_tensor_parallel_size", "ep": "ep_size"}
LINKS_IN_WORDS = {
    "shared": "links one after the other",
    "paper": "links at the same time",
    "reduce_first": "links at the same time, reduces first",
}
"""In a few words in which order the tasks of a layer run."""


@dataclass(frozen=True)
class PlannedJob:
    """Describes a planned job: the cluster, the groups, the model and the settings."""

    cluster: Cluster
    groups: Groups
    model: PlannedModel
    settings: Settings
    alltoall: AllToAll = "flat"
    recompute: bool = False
    """Whether layers run their forward again in the backward."""
    fanout: Fanout | None = None
    """How often a token crosses where it does so once per node; ``None``: as with balanced routing."""
    zero: Zero = NO_ZERO
    memory_gb: float | None = None
    """The memory of a GPU in 10^9 bytes; ``None``: it is not known."""

    @property
    def predicts_memory(self) -> bool:
        """Return True if the memory of a rank can be predicted."""
        return self.model.architecture is not None and self.groups.mp == 1

    def layers(self) -> tuple[Layer, ...]:
        """Return the layers of the busiest pipeline stage."""
        model, shape, groups = self.model, self.model.shape, self.groups
        how = self.alltoall, self.recompute, self.fanout
        if model.architecture is None:
            # Chunks are whole slots, as they are in training.
            layer = layer_work(shape, groups, self.alltoall, self.recompute, True, self.fanout)
            return (layer,) * (model.num_layers // groups.pp)
        step = shape.B, shape.L, shape.dtype_bytes
        return model_layers(model.architecture, groups, *step, *how, imbalance=shape.imbalance)


@dataclass(frozen=True)
class Report:
    """Holds the plans of a model and their predictions."""

    job: PlannedJob
    planner: Planner
    layers: tuple[Layer, ...]
    """The layers of one pipeline stage."""
    plans: Mapping[str, ModelPlan]
    times_ms: Mapping[str, tuple[float, float]]
    """Preset -> the times of forward and backward."""
    bounds_ms: tuple[float, float]
    """The lower bounds of forward and backward: no plan is faster."""
    preset_name: str
    stage: ModelStage | None = None
    """The stage that is planned, of an architecture."""

    @property
    def places(self) -> Sequence[int]:
        """Return the indices of the layers in the model; in an architecture, those of blocks with experts."""
        architecture = self.job.model.architecture
        if architecture is None or self.stage is None:
            return range(len(self.layers))
        return [each for each in architecture.moe_blocks if each in self.stage.places][: len(self.layers)]

    @property
    def plan(self) -> ModelPlan:
        """Return the plan of the shown preset."""
        return self.plans[self.preset_name]

    def step_ms(self, name: str) -> float:
        """Return the ms of a step by a system."""
        return sum(self.times_ms[name])

    def head(self) -> list[tuple[str, str]]:
        """Return the assumptions of the plan, as (name, text)."""
        s, g, kappa = self.job.model.shape, self.job.groups, self.planner.settings.contention
        drop = "nothing dropped" if s.capacity_factor is None else f"capacity factor {s.capacity_factor:g}"
        if s.imbalance > 1:
            drop += f", the fullest rank {s.imbalance:g} times the mean"
        sizes = ((_GROUPS.get(name, name), place) for name, place in g.placements.items() if place.size > 1)
        lies = ", ".join(f"{name} = {place.size}{_describe_lanes(place.lanes)}" for name, place in sizes)
        model = [
            (
                "model",
                f"{len(self.layers) * g.pp} layers, B = {s.B}, L = {s.L}, M = {s.M}, H = {s.H}, E = {s.E}, "
                f"k = {s.K}, {drop}, {s.ffn} experts, {s.heads} heads, {8 * s.dtype_bytes}-bit",
            )
        ]
        if self.job.model.architecture is not None:
            step = f"B = {s.B}, L = {s.L}, {drop}, {8 * s.dtype_bytes}-bit"
            model = [*describe_model(self.job.model.architecture), ("step", step)]
        return [
            *model,
            ("groups", f"{g.world} ranks, {g.gpus_per_node} per node: {lies or 'one rank each'}"),
            *([("stages", self._stages())] if g.pp > 1 else []),
            (
                "links",
                f"kappa = {kappa.links:g} while both are busy, computation {kappa.compute:+.0%} beside traffic, "
                f"{self.planner.settings.host_ms * 1e3:g} us to launch a task",
            ),
        ]

    def _stages(self) -> str:
        pp, architecture, stage = self.job.groups.pp, self.job.model.architecture, self.stage
        if architecture is None or stage is None:
            return f"{pp} alike; the layers below are those of the first"
        least, more = divmod(len(architecture.blocks), pp)
        sizes = f"{least} or {least + 1}" if more else f"{least}"
        head = ", and the head" if stage.has_head else ""
        return (
            f"{pp} of {sizes} blocks; the layers below are those of stage {stage.index + 1} (blocks {stage.places[0]} "
            f"to {stage.places[-1]}{head}), which computes the most"
        )

    def timelines(self, plan: ModelPlan) -> dict[str, Timeline]:
        """Return phase -> the timeline of a plan."""
        found = plan.timelines(self.planner.costs, self.planner.settings.contention, self.planner.settings.host_ms)
        return dict(zip(PHASES, found, strict=True))

    def block_timelines(self, preset_name: str) -> dict[str, Timeline]:
        """Return phase -> the timeline of a plan's middle layer."""
        plan, middle = self.plans[preset_name], len(self.layers) // 2
        layer = self.layers[middle]
        return {
            "forward": self._simulate(layer.forward, plan.forward[middle]),
            "backward": self._simulate(layer.backward, plan.backward[middle]),
        }

    def _simulate(self, work: BlockWork, block: BlockPlan) -> Timeline:
        schedule = block_schedule(work, block.without_ages())
        return simulate(schedule, self.planner.costs, self.planner.settings.contention, self.planner.settings.host_ms)

    def best_two_batch(self) -> ModelPlan | None:
        """Return the ``best`` plan with two-batch overlap, or None if it cannot be used."""
        zero, space = self.job.zero, self.planner.settings.space(BEST)
        options = [{"": each} for each in zero.layers(BEST, self.layers)]
        mode = mode_of(BEST) if zero.has_windows_of(BEST) else "off"
        return Search(self.planner, PlanRequest(options, space, mode, can_split=True)).best_two_batch()

    def pair_timelines(self, plan: ModelPlan) -> dict[str, Timeline]:
        """Return phase -> the timeline of two consecutive layers like the plan's middle one."""
        middle = len(self.layers) // 2
        forward, backward = plan.forward[middle], plan.backward[-1 - middle].without_ages()
        few = (self.layers[middle],) * 2
        return self.timelines(replace(plan, layers=few, forward=(forward,) * 2, backward=(backward,) * 2, tail=()))

    def step_timelines(self, *, is_two_batch: ModelPlan | None = None) -> list[tuple[str, Timeline, float]]:
        """Return (title, timeline, begin of the backward in ms) of the whole step of every preset, the slowest first.

        All presets do the same work and send the same gradients, so their lengths are comparable.

        Args:
            is_two_batch: a plan with two-batch overlap to include; ``None``: none.
        """
        plans = {**self.plans, **({} if is_two_batch is None else {f"{BEST}, two-batch": is_two_batch})}
        times_ms = {name: sum(self.times_ms.get(name) or self.planner.phases_ms(each)) for name, each in plans.items()}
        drawn = []
        for name in sorted(plans, key=lambda each: -times_ms[each]):
            forward, backward = self.timelines(plans[name]).values()
            shift_ms = forward.makespan_ms
            later = (Span(each.task, each.start_ms + shift_ms, each.end_ms + shift_ms, None) for each in backward.spans)
            gain = times_ms[STOCK] / times_ms[name]
            drawn.append((f"{name}, {gain:.2f}x over {STOCK}", Timeline((*forward.spans, *later)), shift_ms))
        return drawn

    def trace(self) -> str:
        """Return the step for Perfetto, with one process per phase."""
        events = []
        for pid, (phase, timeline) in enumerate(self.timelines(self.plan).items()):
            events.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": phase}})
            events += [event | {"pid": pid} for event in json.loads(timeline.chrome_trace())["traceEvents"]]
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})

    @cached_property
    def plan_rows(self) -> list[dict[str, Any]]:
        """Return the plan, layer by layer, counted from the front in both phases."""
        plan, places = self.plan, self.places
        forward = places, [each.forward for each in self.layers], plan.forward, plan.forward_choices
        backward = places[::-1], [each.backward for each in self.layers[::-1]], plan.backward, plan.backward_choices
        found: list[dict[str, Any]] = []
        alike: dict[tuple, dict[str, Any]] = {}
        for phase, of_phase in zip(PHASES, (forward, backward), strict=True):
            for place, work, block, choice in zip(*of_phase, strict=True):
                key = work, phase, block.without_ages()
                if key not in alike:
                    alike[key] = {"phase": phase} | self._row(work, block) | {"why": choice.explain()}
                found.append({"layer": place} | alike[key])
        return found

    def _row(self, work: BlockWork, block: BlockPlan) -> dict[str, Any]:
        costs = self.planner.costs
        grads_ms = sum(costs[each.kind].ms(each.size_bytes) for each in (*block.moe_slices, *block.dense_slices))
        return {
            "degree": block.degree,
            "order": LINKS_IN_WORDS[block.links],
            "ms": self._simulate(work, block).makespan_ms,
            "bound_ms": lower_bound_ms(work, costs, self.planner.settings.max_degree, grads_ms),
            "moe_bytes": sum(each.size_bytes for each in block.moe_slices),
            "dense_bytes": sum(each.size_bytes for each in block.dense_slices),
        }

    def plan_groups(self) -> list[list[dict[str, Any]]]:
        """Return the rows of the plan, grouped by neighbours with equal chunks and order. Their gradient slices may
        differ.
        """
        decided = ("phase", "degree", "order")
        return [list(same) for _, same in groupby(self.plan_rows, key=lambda row: [row[name] for name in decided])]

    def as_dict(self) -> dict[str, Any]:
        """Return the whole report in plain types."""
        cluster, groups, settings = self.job.cluster, self.job.groups, self.planner.settings
        architecture, stage, model = self.job.model.architecture, self.stage, {}
        if architecture is not None and stage is not None:
            numbers = ("num_parameters", "num_expert_parameters", "num_active_parameters")
            model["model"] = {
                "name": architecture.name,
                "source": architecture.source,
                "num_blocks": len(architecture.blocks),
                "moe_blocks": list(architecture.moe_blocks),
                **{name: getattr(architecture, name) for name in numbers},
                "stage": {"index": stage.index, "blocks": [stage.places[0], stage.places[-1]]},
            }
        return {
            "cluster": cluster.name,
            "source": cluster.source,
            "shape": asdict(self.job.model.shape),
            "groups": asdict(groups) | {"edp": groups.edp},
            "num_layers_per_stage": len(self.layers),
            **model,
            "contention": asdict(settings.contention),
            "host_ms": settings.host_ms,
            "solver": settings.solver,
            "gradient_solver": settings.gradient_solver,
            "presets": {
                name: {
                    "forward_ms": forward_ms,
                    "backward_ms": backward_ms,
                    "step_ms": forward_ms + backward_ms,
                    "over_deepspeed": self.step_ms(STOCK) / (forward_ms + backward_ms),
                    "over_tutel": self.step_ms("tutel") / (forward_ms + backward_ms),
                }
                for name, (forward_ms, backward_ms) in self.times_ms.items()
            },
            "lower_bound_ms": dict(zip(PHASES, self.bounds_ms, strict=True)),
            "plan": {"preset": self.preset_name, "layers": self.plan_rows, "tail_bytes": self.plan.tail_bytes},
        }


def report(job: PlannedJob, preset_name: str, names: Sequence[str] = NAMES, max_layers: int | None = None) -> Report:
    """Plan a model as every system would.

    Args:
        job: the job to plan.
        preset_name: the preset to show.
        names: the systems.
        max_layers: the largest number of layers of a stage to plan; ``None``: all.

    Raises:
        ValueError: the preset is unknown, or the job is impossible.
    """
    if preset_name != BEST:
        preset(preset_name)
    groups, shape, architecture, zero = job.groups, job.model.shape, job.model.architecture, job.zero
    costs = kind_costs(job.cluster, groups, job.alltoall, shape)
    stage = None if architecture is None else busiest_stage(architecture, groups.pp, shape.L)
    layers = job.layers()[:max_layers]
    if zero.stage:
        costs = {**costs, **sharing_costs(job.cluster, groups)}
    planner = Planner(costs, job.settings)
    request = PlanRequest([{"": each} for each in layers], job.settings.space(preset_name), mode_of(preset_name))
    request.check_named(planner.written)
    plans = {name: zero.plan(planner, name, layers) for name in names}
    if zero.stage and BEST in plans:
        # Layers are planned without what ZeRO sends; with it another plan may be the fastest.
        plans[BEST] = min((plans[BEST], *plans.values()), key=planner.batch_ms)
    times_ms = {name: planner.phases_ms(plan) for name, plan in plans.items()}
    # Whether a system sends early or late: what ZeRO 3 sends has to be sent.
    bounds_ms = step_bounds_ms(zero.layers(STOCK, layers), costs, job.settings.max_degree)
    return Report(job, planner, layers, plans, times_ms, bounds_ms, preset_name, stage)


def _describe_lanes(lanes: tuple) -> str:
    return {0: "", 1: f" ({'/'.join(lanes)})", 2: " (both links)"}[len(lanes)]
