# SPDX-License-Identifier: Apache-2.0
"""Plans of all stages of a pipeline: each for its own layers, as they run in a batch.

A stage's layers are cut in one way per phase, whatever the micro-batch. Gradients are summed over a stage's ranks when
they are whole: in the backward of the last micro-batch, and what finds no room there after it. A stage without experts
has no room. What stages share is summed over them first, when all backwards are over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ds_fsmoe.planning.architecture import Architecture
from ds_fsmoe.planning.block import add_work
from ds_fsmoe.planning.candidates import PATIENT_SHARE
from ds_fsmoe.planning.cluster import Cluster
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.crossings import Crossings
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.model_layers import DenseStage, Stage, dense_stage, model_layers
from ds_fsmoe.planning.model_plan import ModelPlan
from ds_fsmoe.planning.plan import Planner, mode_of
from ds_fsmoe.planning.schedule import Draft, Lane
from ds_fsmoe.planning.stage_batch import BatchTimeline, Order, StageLink, StageTimes, simulate_batch
from ds_fsmoe.planning.timeline import simulate
from ds_fsmoe.planning.workload import AllToAll, Layer, Shape, Work
from ds_fsmoe.planning.zero import NO_ZERO, Zero, gathers_of


@dataclass(frozen=True)
class StageWork:
    """What one stage has to do in a micro-batch."""

    layers: tuple[Layer, ...]
    dense: DenseStage | None = None
    """The work of a stage without experts, which has no layers."""


@dataclass(frozen=True)
class StagePlan:
    """The plan of one stage, and what it takes."""

    times: StageTimes
    hidden_bytes: float
    """The gradients that travel beside the last backward."""
    after_bytes: float
    """The gradients that are left after it."""
    plan: ModelPlan | None
    """How its layers are run; ``None``: it has none."""


@dataclass(frozen=True)
class BatchPlan:
    """The plans of all stages by one system, and the batch that they make."""

    stages: tuple[StagePlan, ...]
    timeline: BatchTimeline


@dataclass(frozen=True)
class Pipeline:
    """What is planned: the stages of a model, what they send, and how often."""

    works: tuple[StageWork, ...]
    links: tuple[StageLink, ...]
    """Between each stage and the next."""
    send_bytes: float
    """The bytes that a rank sends to the next stage for a micro-batch, and gets back as gradients."""
    tied_ms: float = 0.0
    """The time to sum the gradients that the first stage and the last one share; 0: there are none."""
    zero: Zero = NO_ZERO

    def plan(
        self, planner: Planner, name: str, order: Order = "1f1b", known: Mapping[StageWork, StagePlan] | None = None
    ) -> BatchPlan:
        """Plan a batch the way a named system would.

        A system that sends gradients where they cost least minds the whole batch. What makes the last backward of a
        stage longer, all stages before it wait for, one after the other; while gradients after it travel beside the
        backwards of those stages, for nothing. So behind the first stage it either weighs both alike, or hides only
        what fits beside the backward: whichever makes the batch shorter, decided for one stage after another from
        behind until nothing changes.

        Args:
            planner: with the costs; its settings have the number of micro-batches.
            name: the system.
            order: of forwards and backwards.
            known: stages that are planned already, by weighing both alike.

        Raises:
            ValueError: no such system, with those there are.
        """
        even, patient = dict(known or {}), dict[StageWork, StagePlan]()
        for work in self.works:
            if work not in even:
                even[work] = plan_stage(planner, name, work, self.zero)
        chosen = [even[work] for work in self.works]
        batch = self.batch(chosen, planner.settings.num_micro_batches, order)
        if mode_of(name) != "adaptive":
            return batch
        for work in self.works[1:]:
            if work not in patient:
                patient[work] = plan_stage(planner.counting_tails(PATIENT_SHARE), name, work, self.zero)
        changes = True
        while changes:
            changes = False
            for stage in range(len(chosen) - 1, 0, -1):
                others = even if chosen[stage] is patient[self.works[stage]] else patient
                tried = [*chosen[:stage], others[self.works[stage]], *chosen[stage + 1 :]]
                found = self.batch(tried, planner.settings.num_micro_batches, order)
                if found.timeline.makespan_ms < (1 - 1e-9) * batch.timeline.makespan_ms:
                    chosen, batch, changes = tried, found, True
        return batch

    def batch(self, stages: Sequence[StagePlan], num_micro_batches: int, order: Order = "1f1b") -> BatchPlan:
        """Return the batch that plans of the stages make."""
        times = [each.times for each in stages]
        timeline = simulate_batch(times, num_micro_batches, self.links, tied_ms=self.tied_ms, order=order)
        return BatchPlan(tuple(stages), timeline)


def plan_stage(planner: Planner, name: str, work: StageWork, zero: Zero = NO_ZERO) -> StagePlan:
    """Plan one stage the way a named system would.

    Args:
        planner: with the costs; its settings have the number of micro-batches, and whether gradients travel early.
        name: the system.
        work: of the stage.
        zero: the stage of ZeRO.

    Raises:
        ValueError: no such system, with those there are.
    """
    if work.dense is None:
        return stage_times(planner, zero.plan(planner, name, work.layers))
    forward_ms, backward_ms = (_chain_ms(planner, each) for each in (work.dense.forward, work.dense.backward))
    after = work.dense.gradients
    sent = (*after, *(gathers_of(after) if zero.stage else ()))
    end_ms = sum(planner.costs[each.kind].ms(each.size_bytes) for each in sent)
    times = StageTimes(forward_ms, backward_ms, backward_ms, end_ms)
    return StagePlan(times, 0.0, sum(each.size_bytes for each in after), None)


def stage_times(planner: Planner, plan: ModelPlan) -> StagePlan:
    """Return what a plan of a stage's layers takes there."""
    last_forward_ms, to_the_end_ms = planner.phases_ms(plan)
    forward_ms, bare_ms = planner.phases_ms(plan.earlier())
    # What is left over counts as a part of its own, as it does where it is measured.
    last_ms = planner.phases_ms(replace(plan, tail=()))[1] if plan.tail else to_the_end_ms
    hidden = sum(each.size_bytes for block in plan.backward for each in (*block.moe_slices, *block.dense_slices))
    # Gathers of updated parameters make one forward of a step longer, and count once.
    after_ms = to_the_end_ms - last_ms + last_forward_ms - forward_ms
    return StagePlan(StageTimes(forward_ms, bare_ms, last_ms, after_ms), hidden, plan.tail_bytes, plan)


def pipeline_of_model(
    cluster: Cluster,
    architecture: Architecture,
    groups: Groups,
    stages: Sequence[Stage],
    shape: Shape,
    alltoall: AllToAll = "flat",
    recompute: bool = False,
    crossings: Crossings | None = None,
) -> Pipeline:
    """Return the stages of a whole model.

    Args:
        cluster: on which it runs.
        architecture: the model.
        groups: the ranks.
        stages: the blocks of each.
        shape: with the samples, the length, the bytes of an element and the imbalance.
        alltoall, recompute, crossings: see :func:`~ds_fsmoe.planning.model_layers.model_layers`.

    Raises:
        ValueError: see :func:`~ds_fsmoe.planning.model_layers.model_layers`; the cluster has no number for sends.
    """
    sizes = architecture, groups, shape.B, shape.L, shape.dtype_bytes
    works = []
    for stage in stages:
        if any(architecture.blocks[place].experts is not None for place in stage.places):
            how = alltoall, recompute, crossings
            works.append(StageWork(model_layers(*sizes, *how, imbalance=shape.imbalance, stage=stage)))
        else:
            works.append(StageWork((), dense_stage(*sizes, stage, recompute)))
    tied_ms = 0.0
    if architecture.is_tied and len(stages) > 1:
        tied_bytes = architecture.M * architecture.vocab / groups.mp * shape.dtype_bytes
        lane = lane_between(groups, 0, groups.pp - 1)
        tied_ms = cluster.operation(f"{lane}.all_reduce", "weights that stages share").among(2).ms(tied_bytes)
    return Pipeline(tuple(works), *_sends(cluster, groups, shape), tied_ms)


def pipeline_of_layers(cluster: Cluster, groups: Groups, layers: Sequence[Layer], shape: Shape) -> Pipeline:
    """Return stages that all have the same layers, and nothing else.

    Args:
        cluster: on which they run.
        groups: the ranks.
        layers: of each stage.
        shape: of a layer.

    Raises:
        ValueError: the cluster has no number for sends.
    """
    return Pipeline((StageWork(tuple(layers)),) * groups.pp, *_sends(cluster, groups, shape))


def lane_between(groups: Groups, one: int, other: int) -> Lane:
    """Return the link that two stages send over: that between nodes, if any rank's peer lies in another node. A stage
    is as many neighbouring ranks as it has, and each sends to the one at its place in the other stage."""

    def nodes(stage: int) -> list[int]:
        first = stage * groups.stage
        return [rank // groups.gpus_per_node for rank in range(first, first + groups.stage)]

    return Lane.INTRA if nodes(one) == nodes(other) else Lane.INTER


def send_cost(cluster: Cluster, lane: Lane) -> LinearCost:
    """Return the cost of sending a byte from a rank to another one. A cluster's file has none of its own: it is that of
    an all-to-all between two, each of which sends half of what it has; or, where a link has no such number, of an
    all-gather between two.

    Raises:
        ValueError: the cluster has a number for neither.
    """
    name = next((each for each in ("all_to_all", "all_gather") if f"{lane}.{each}" in cluster.operations), "all_to_all")
    between_two = cluster.operation(f"{lane}.{name}", "what a stage sends to the next").among(2)
    return LinearCost(between_two.alpha_ms, 2 * between_two.beta_ms)


def _sends(cluster: Cluster, groups: Groups, shape: Shape) -> tuple[tuple[StageLink, ...], float]:
    """Return the links between stages, and the bytes that a rank sends: those of its share of the tokens, as model
    parallelism divides them between its parts."""
    send_bytes = shape.B * shape.L / groups.mp * shape.M * shape.dtype_bytes
    links = []
    for stage in range(groups.pp - 1):
        lane = lane_between(groups, stage, stage + 1)
        send_ms = send_cost(cluster, lane).ms(send_bytes)
        links.append(StageLink(send_ms, send_ms, lane))
    return tuple(links), send_bytes


def _chain_ms(planner: Planner, works: Sequence[Work]) -> float:
    """Return the time of operations that each wait for the one before."""
    settings, draft = planner.settings, Draft()
    last: tuple[int, ...] = ()
    for each in works:
        last = (add_work(draft, each, 0, last),)
    schedule = draft.finish()
    if settings.is_serial:
        schedule = schedule.in_one_lane()
    return simulate(schedule, planner.costs, settings.contention, settings.host_ms).makespan_ms
