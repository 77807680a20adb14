# SPDX-License-Identifier: Apache-2.0
"""Plans the stages of a pipeline, each for its own layers as a job without stages does, and predicts a batch.
``ds_fsmoe plan`` calls it.

A stage's layers have one plan per phase for all micro-batches. Gradients are reduced over a stage's ranks when they are
complete: in the backward of the last micro-batch, and the rest after it. A stage without experts has no windows.
Parameters that stages share are reduced over them first, after all backwards.

A batch is predicted by closed forms from the times of its stages and sends, without simulation.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ds_fsmoe.offline.models.architecture import Architecture
from ds_fsmoe.offline.models.model_layers import DenseStage, ModelStage, dense_stage, model_layers
from ds_fsmoe.planning.block import add_work
from ds_fsmoe.planning.cluster import Cluster
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.decide.candidates import Search
from ds_fsmoe.planning.decide.plan import Planner, mode_of
from ds_fsmoe.planning.decide.plan_requests import PlanRequest
from ds_fsmoe.planning.decide.presets import BEST
from ds_fsmoe.planning.decide.step_time import StagePlan, StageTimes, stage_times
from ds_fsmoe.planning.decide.zero import NO_ZERO, Zero, gathers_of
from ds_fsmoe.planning.groups import Fanout, Groups
from ds_fsmoe.planning.schedule import Draft, Lane
from ds_fsmoe.planning.timeline import simulate
from ds_fsmoe.planning.workload import AllToAll, Layer, Shape, Work

StageWork = tuple[Layer, ...] | DenseStage
"""What one stage has to do in a micro-batch: its layers, or all that a stage without experts does."""


@dataclass(frozen=True)
class PlannedPipeline:
    """Holds the stages of a model, and what they send."""

    works: tuple[StageWork, ...]
    lanes: tuple[Lane, ...]
    """The link between each stage and the next."""
    sends_ms: tuple[float, ...]
    """The time of a send over each, of activations as of gradients."""
    send_bytes: float
    """The bytes that a rank sends to the next stage for a micro-batch, and gets back as gradients."""
    tied_ms: float = 0.0
    """The time to sum the gradients that the first stage and the last one share; 0: there are none."""
    zero: Zero = NO_ZERO

    def plan(
        self, planner: Planner, name: str, known: Mapping[StageWork, StagePlan] | None = None
    ) -> tuple[StagePlan, ...]:
        """Plan each stage as a named system would.

        ``best`` may also send the gradients of all stages behind the first at the end, if that makes a batch shorter.
        There they are concurrent with the backwards of earlier stages.

        Args:
            planner: the planner with the costs; its settings have the number of micro-batches.
            name: the system.
            known: stages that are already planned.

        Raises:
            ValueError: the system is unknown; the message lists the names.
        """
        of_works = dict(known or {})
        for work in self.works:
            if work not in of_works:
                of_works[work] = plan_stage(planner, name, work, self.zero)
        first, *others = (of_works[work] for work in self.works)
        ways = [(first, *others)]
        if name == BEST:
            ways.append((first, *(_at_the_end(planner, each) for each in others)))
        return min(ways, key=lambda way: self.batch_ms([e.times for e in way], planner.settings.num_micro_batches))

    def batch_ms(self, stages: Sequence[StageTimes], num_micro_batches: int) -> float:
        """Predict the ms of a batch, see :func:`batch_ms`."""
        return batch_ms(stages, num_micro_batches, self.sends_ms, self.tied_ms)

    def stage_sends_ms(self, stage: int, num_micro_batches: int) -> float:
        """Return the ms for which a stage sends and receives in a batch."""
        return 2 * num_micro_batches * _send_to_neighbours_ms(self.sends_ms, stage)


def batch_ms(
    stages: Sequence[StageTimes],
    num_micro_batches: int,
    send_ms: float | Sequence[float] = 0.0,
    tied_ms: float = 0.0,
) -> float:
    """Predict the ms of a ``train_batch`` of DeepSpeed's pipeline engine from the times of its stages.

    The last micro-batch goes through all stages and back, with its sends. Earlier micro-batches take their time on the
    slowest stage, which does not compute while it sends. A stage reduces its remaining gradients after its last
    backward, concurrent with the backwards of the stages before it.

    Args:
        stages: the times of each stage's own work, from the front, measured or predicted.
        num_micro_batches: ``gradient_accumulation_steps``.
        send_ms: the ms to send one micro-batch's activation to the next stage, or its gradient back; one number, or one
            for each pair of neighbours.
        tied_ms: the ms to reduce the gradients that the first and the last stage share, after all backwards.

    Returns:
        The ms from the first forward of the first stage until gradients are reduced; without the optimizer.

    Raises:
        ValueError: the number of sends is not the number of pairs of neighbours.
    """
    pairs = len(stages) - 1
    sends_ms = [float(send_ms)] * pairs if isinstance(send_ms, int | float) else list(send_ms)
    if len(sends_ms) != pairs:
        raise ValueError(f"send_ms: {len(sends_ms)} times, must be one for each of {pairs} pairs of neighbours")
    slowest_ms = max(
        each.forward_ms + each.backward_ms + 2 * _send_to_neighbours_ms(sends_ms, stage)
        for stage, each in enumerate(stages)
    )
    through_ms = sum(each.forward_ms + each.last_backward_ms for each in stages) + 2 * sum(sends_ms)
    # From the last backward of each stage on, those of the stages before it follow.
    behind_ms = itertools.accumulate(
        (each.last_backward_ms + sent_ms for each, sent_ms in zip(stages, sends_ms, strict=False)), initial=0.0
    )
    left_ms = max(each.gradients_ms - ms for each, ms in zip(stages, behind_ms, strict=True))
    return through_ms + (num_micro_batches - 1) * slowest_ms + tied_ms + max(0.0, left_ms)


def _send_to_neighbours_ms(sends_ms: Sequence[float], stage: int) -> float:
    """Return the ms of one send to the previous stage plus one to the next."""
    return sum(sends_ms[max(0, stage - 1) : stage + 1])


def plan_stage(planner: Planner, name: str, work: StageWork, zero: Zero = NO_ZERO) -> StagePlan:
    """Plan one stage as a named system would.

    Args:
        planner: the planner with the costs; its settings have the number of micro-batches.
        name: the system.
        work: the work of the stage.
        zero: the ZeRO stage with its options.

    Raises:
        ValueError: the system is unknown; the message lists the names.
    """
    if not isinstance(work, DenseStage):
        return stage_times(planner, zero.plan(planner, name, work))
    forward_ms, backward_ms = (_chain_ms(planner, each) for each in (work.forward, work.backward))
    after = work.gradients
    sent = (*after, *(gathers_of(after) if zero.stage else ()))
    end_ms = sum(planner.costs[each.kind].ms(each.size_bytes) for each in sent)
    times = StageTimes(forward_ms, backward_ms, backward_ms, end_ms)
    return StagePlan(times, 0.0, sum(each.size_bytes for each in after))


def _at_the_end(planner: Planner, stage: StagePlan) -> StagePlan:
    """Return a stage with all gradients sent after its last backward."""
    if stage.plan is None or not stage.hidden_bytes:
        return stage
    options = [{"": each} for each in stage.plan.layers]
    request = PlanRequest(options, planner.settings.space(BEST), mode_of(BEST), may_send_anyhow=True)
    return stage_times(planner, Search(planner, request).late(stage.plan))


def pipeline_of_model(
    cluster: Cluster,
    architecture: Architecture,
    groups: Groups,
    stages: Sequence[ModelStage],
    shape: Shape,
    alltoall: AllToAll = "flat",
    recompute: bool = False,
    fanout: Fanout | None = None,
) -> PlannedPipeline:
    """Return the pipeline of a whole model.

    Args:
        cluster: the cluster.
        architecture: the model.
        groups: the ranks.
        stages: the blocks of each stage.
        shape: the samples, the length, the bytes of an element and the imbalance.
        alltoall, recompute, fanout: see :func:`~ds_fsmoe.offline.models.model_layers.model_layers`.

    Raises:
        ValueError: see :func:`~ds_fsmoe.offline.models.model_layers.model_layers`; the cluster has no number for sends.
    """
    sizes = architecture, groups, shape.B, shape.L, shape.dtype_bytes
    how = alltoall, recompute, fanout
    works: list[StageWork] = []
    for stage in stages:
        if any(architecture.blocks[place].experts is not None for place in stage.places):
            works.append(model_layers(*sizes, *how, imbalance=shape.imbalance, stage=stage))
        else:
            works.append(dense_stage(*sizes, stage, recompute))
    tied_ms = 0.0
    if architecture.is_tied and len(stages) > 1:
        tied_bytes = architecture.M * architecture.vocab / groups.mp * shape.dtype_bytes
        lane = lane_between(groups, 0, groups.pp - 1)
        tied_ms = cluster.operation(f"{lane}.all_reduce", "weights that stages share").among(2).ms(tied_bytes)
    return PlannedPipeline(tuple(works), *_sends(cluster, groups, shape), tied_ms)


def pipeline_of_layers(cluster: Cluster, groups: Groups, layers: Sequence[Layer], shape: Shape) -> PlannedPipeline:
    """Return a pipeline whose stages all have the same layers, and no other parts.

    Args:
        cluster: the cluster.
        groups: the ranks.
        layers: the layers of each stage.
        shape: the shape of a layer.

    Raises:
        ValueError: the cluster has no number for sends.
    """
    return PlannedPipeline((tuple(layers),) * groups.pp, *_sends(cluster, groups, shape))


def lane_between(groups: Groups, one: int, other: int) -> Lane:
    """Return the link between two stages: the inter-node one if the peer of any rank is on another node. A stage has
    neighbouring ranks, and each sends to its counterpart in the other stage.
    """

    def nodes(stage: int) -> list[int]:
        first = stage * groups.stage
        return [rank // groups.gpus_per_node for rank in range(first, first + groups.stage)]

    return Lane.INTRA if nodes(one) == nodes(other) else Lane.INTER


def send_cost(cluster: Cluster, lane: Lane) -> LinearCost:
    """Return the cost per byte of sending from one rank to another.

    A cluster's file has no such number. An all-to-all between two ranks serves instead, in which each sends half of its
    buffer; or else an all-gather between two.

    Raises:
        ValueError: the cluster has a number for neither.
    """
    name = next((each for each in ("all_to_all", "all_gather") if f"{lane}.{each}" in cluster.operations), "all_to_all")
    between_two = cluster.operation(f"{lane}.{name}", "what a stage sends to the next").among(2)
    return LinearCost(between_two.alpha_ms, 2 * between_two.beta_ms)


def _sends(cluster: Cluster, groups: Groups, shape: Shape) -> tuple[tuple[Lane, ...], tuple[float, ...], float]:
    """Return (the links between stages, the ms of a send over each, the bytes that a rank sends). A rank sends its
    share of the tokens.
    """
    send_bytes = shape.B * shape.L / groups.mp * shape.M * shape.dtype_bytes
    lanes = tuple(lane_between(groups, stage, stage + 1) for stage in range(groups.pp - 1))
    return lanes, tuple(send_cost(cluster, each).ms(send_bytes) for each in lanes), send_bytes


def _chain_ms(planner: Planner, works: Sequence[Work]) -> float:
    """Return the ms of a chain of operations."""
    settings, draft = planner.settings, Draft()
    last: tuple[int, ...] = ()
    for each in works:
        last = (add_work(draft, each, 0, last),)
    schedule = draft.finish()
    if settings.is_serial:
        schedule = schedule.in_one_lane()
    return simulate(schedule, planner.costs, settings.contention, settings.host_ms).makespan_ms
