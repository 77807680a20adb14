# SPDX-License-Identifier: Apache-2.0
"""Holds the sizes of one call of a layer, and builds the layer that the planner sees from them. The engine uses it
to plan and to compare measured calls with predictions.

Letters: E experts of all ranks, C slots per expert, M width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ds_fsmoe.planning.chunks import chunk_shares
from ds_fsmoe.planning.cost import LayerCosts
from ds_fsmoe.planning.groups import Fanout, Groups
from ds_fsmoe.planning.phase_plan import PhasePlan
from ds_fsmoe.planning.schedule import GRADIENT_TASKS, REST, Lane, Schedule, Task
from ds_fsmoe.planning.timeline import IDEAL, Contention, Timeline, simulate
from ds_fsmoe.planning.workload import (
    AllToAll,
    BlockWork,
    Gradient,
    Layer,
    MoEWork,
    Shape,
    Stage,
    Work,
    layer_work,
)


@dataclass(frozen=True, slots=True)
class CallShape:
    """Holds the sizes that one call of a layer sends and multiplies on one rank."""

    num_experts: int
    """The number of experts, E."""
    capacity: int
    """The number of slots per expert, C; of rows the mean number that an expert gets from a rank."""
    width: int
    """The width, M."""
    dtype_bytes: int
    """The bytes of one sent element as the layer gives it; a hook may send another type."""
    num_products: int
    """The number of matrices of this rank's experts."""
    num_weights: int
    """The number of elements of those matrices."""
    slices_bytes: tuple[int, ...] = ()
    """The gradient slices that are sent in the same run, in their order."""
    num_tokens: int | None = None
    """The number of tokens by which rows are cut into chunks; ``None``: slots are cut, by the capacity."""
    crossings: Fanout | None = None
    """The crossings of a token for each of its choices, where it crosses once per node."""
    wires: tuple[float, float] = (1.0, 1.0)
    """The bytes of a row on its way to experts and back, as shares of ``width * dtype_bytes``."""

    @property
    def narrow(self) -> tuple[bool, bool]:
        """Return whether rows are converted to the communication dtype in (dispatch, combine)."""
        return self.wires[0] != 1.0, self.wires[1] != 1.0


def moe_work(groups: Groups, backward: bool, shape: CallShape, alltoall: AllToAll = "flat") -> MoEWork:
    """Return the experts' part of a layer, unchunked, with the sizes of a call."""
    # Every slot is sent, with or without a token: as many tokens as slots, each sent once.
    slots = shape.num_experts * shape.capacity
    sent = Shape(
        B=groups.mp,
        L=max(1, slots),
        M=shape.width,
        H=groups.esp,
        E=shape.num_experts,
        K=1,
        capacity_factor=None,
        heads=1,
        dtype_bytes=shape.dtype_bytes,
    )
    layer = layer_work(sent, groups, alltoall, fanout=shape.crossings, narrow=shape.narrow)
    moe = (layer.backward if backward else layer.forward).moe
    # Each expert here meets its slots of all ranks that share it: those of esp ranks, and of all that send it tokens.
    rows = shape.capacity * groups.ep * groups.esp
    times = 1 + backward
    flops, launches = 2 * rows * shape.num_weights, max(1, shape.num_products)

    way_in, way_out = shape.wires[::-1] if backward else shape.wires
    return replace(
        moe,
        ahead=_shared(moe.ahead, way_in),
        behind=_shared(moe.behind, way_out),
        expert=replace(moe.expert, size=times * flops, launches=times * launches),
        capacity=max(1, shape.capacity if shape.num_tokens is None else shape.num_tokens),
    )


def _shared(stages: tuple[Stage, ...], share: float) -> tuple[Stage, ...]:
    """Return the stages with a share of the bytes where they send rows to the ranks of an EP group. Sums over shards
    and conversions keep their size, as both handle whole rows.
    """
    return tuple(replace(each, size=each.size * share) if each.group == "ep" else each for each in stages)


def layer_of_call(
    groups: Groups,
    shape: CallShape,
    costs: LayerCosts,
    alltoall: AllToAll = "flat",
    rest_ms: tuple[float, float] = (0.0, 0.0),
    gradients: tuple[Gradient, ...] = (),
) -> Layer:
    """Return a layer for the planner.

    Args:
        groups: the process groups that run it.
        shape: the sizes of a call.
        costs: the costs of its tasks; that of REST is its size in ms.
        alltoall: the kind of all-to-all.
        rest_ms: the ms between this layer and the next, in (forward, backward).
        gradients: the gradients that its backward leaves.
    """
    blocks = []
    for backward, time_ms in zip((False, True), rest_ms, strict=True):
        moe = moe_work(groups, backward, shape, alltoall)
        if not costs.is_per_launch:
            moe = replace(moe, expert=replace(moe.expert, launches=1))
        rest = (Work(REST, (Lane.COMPUTE,), time_ms, launches=0),) if time_ms else ()
        blocks.append(BlockWork((), moe, rest))
    return Layer(blocks[0], blocks[1], gradients, costs=costs)


def sized(schedule: Schedule, plan: PhasePlan, shape: CallShape) -> Schedule:
    """Return the same tasks in the same order, each with its size in a call."""
    moe = moe_work(plan.groups, plan.backward, shape, plan.alltoall)
    work_of = {each.kind: each for each in moe.stages}
    shares = chunk_shares(moe.capacity, plan.block.degree)

    def with_size(task: Task) -> Task:
        if task.kind in GRADIENT_TASKS:
            return replace(task, size=shape.slices_bytes[task.chunk])
        work = work_of.get(task.kind)
        return task if work is None else replace(task, size=work.size * shares[task.chunk], launches=work.launches)

    return Schedule(tuple(map(with_size, schedule.tasks)))


def call_timeline(
    schedule: Schedule,
    plan: PhasePlan,
    shape: CallShape,
    costs: LayerCosts,
    same_chunks: bool = True,
    contention: Contention = IDEAL,
    is_serial: bool = False,
) -> Timeline:
    """Simulate one phase of one call.

    Args:
        schedule: the schedule to run, with its gradient slices.
        plan: the plan of the phase.
        shape: the sizes of the call.
        costs: the costs of its tasks.
        same_chunks: whether the backward has the chunks of the forward.
        contention: how lanes slow each other down.
        is_serial: whether all tasks run one after another.

    Raises:
        ValueError: a cost is missing.
    """
    return sized_timeline(sized(schedule, plan, shape), plan.backward, costs, same_chunks, contention, is_serial)


def sized_timeline(
    run: Schedule,
    backward: bool,
    costs: LayerCosts,
    same_chunks: bool = True,
    contention: Contention = IDEAL,
    is_serial: bool = False,
) -> Timeline:
    """Simulate one phase of one call whose tasks have their sizes; see :func:`call_timeline`."""
    if not costs.is_per_launch:
        run = Schedule(tuple(replace(task, launches=min(1, task.launches)) for task in run.tasks))
    of_phase, host_ms = costs.of(backward, same_chunks)
    if is_serial:
        return simulate(run.in_one_lane(), of_phase, IDEAL, host_ms)
    return simulate(run, of_phase, contention, host_ms)
