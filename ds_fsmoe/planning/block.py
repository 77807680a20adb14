# SPDX-License-Identifier: Apache-2.0
"""Schedules for one layer and for a sequence of layers: the orders of the paper's figure 3, and two more.

A block has two windows for gradient slices: one inside its MoE part, right after the last incoming tokens, and
one beside the rest of the layer (attention and its collectives). Slices in a window run while the lanes are otherwise
idle; slices that are too long for it make the layer longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ds_fsmoe.planning.chunks import chunk_shares
from ds_fsmoe.planning.schedule import EXPERT_GRAD, GRAD_GATHER, GRAD_SCATTER, Draft, Lane, Schedule
from ds_fsmoe.planning.workload import BlockWork, Layer, MoEWork, Work

Links = Literal["shared", "paper", "reduce_first"]
ORDERS: tuple[Links, ...] = ("shared", "paper", "reduce_first")


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of the gradients that is sent in one launch."""

    kind: str
    lanes: tuple[Lane, ...]
    size_bytes: float
    newest_layer: int = -1
    """The last layer in backward order that added to this slice; -1: the slice existed before all of them."""
    inside: tuple[str, ...] = ()
    """GRAD_SCATTER, if it is first added up inside the node, and GRAD_GATHER, if all ranks of the node have the sum at
    the end; both on the links inside."""


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """The plan for running one layer in one phase.

    Raises:
        ValueError: a degree below 1, or an unknown order.
    """

    degree: int = 1
    """The number of chunks."""
    links: Links = "shared"
    """The traffic of the MoE part: all in one stream; on separate links, with all gathers before all reduces; or with
    each reduce ahead of the gather two chunks later."""
    late_dw: int = 0
    """The number of last chunks whose expert weight gradients wait until all input gradients have been sent."""
    moe_slices: tuple[Slice, ...] = ()
    dense_slices: tuple[Slice, ...] = ()

    def __post_init__(self) -> None:
        if self.degree < 1:
            raise ValueError(f"degree = {self.degree}: must be at least 1")
        if self.links not in ORDERS:
            raise ValueError(f"links = {self.links!r}: the choices are {', '.join(ORDERS)}")

    def without_ages(self) -> BlockPlan:
        """Return the plan for a layer that is considered alone: all its gradients come from earlier layers."""
        moe, dense = (
            tuple(replace(each, newest_layer=-1) for each in slices) for slices in (self.moe_slices, self.dense_slices)
        )
        return replace(self, moe_slices=moe, dense_slices=dense)


@dataclass
class Passed:
    """The tasks that gradients can wait for."""

    layer: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Layer -> the tasks that finish it, after which its dense gradients exist."""
    experts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Layer -> the tasks after which the gradients of its experts exist."""


def add_block(
    draft: Draft, work: BlockWork, plan: BlockPlan, layer: int, after: Sequence[int], passed: Passed
) -> tuple[int, ...]:
    """Append one layer to a schedule.

    Args:
        draft: the schedule to append to.
        work: what the layer does in this phase.
        plan: how the layer runs.
        layer: the index of the layer in the order of this phase.
        after: the tasks that the layer waits for.
        passed: the tasks that earlier layers left; this layer's are added.

    Returns:
        The tasks that the next layer waits for.
    """
    last = tuple(after)
    for each in work.before:
        last = (_add(draft, each, layer, last),)
    last, weights_done, late = _add_moe(draft, work.moe, plan, layer, last, passed)
    for chunk, inputs in late:
        weights_done.append(_add(draft, work.moe.expert_dw, layer, inputs, chunk, plan, work.moe.capacity))
    passed.experts[layer] = tuple(weights_done)
    # A run of the MoE part is over when all its lanes are: the rest of the layer waits for weight gradients, too.
    if late:
        last = tuple(dict.fromkeys((*last, *weights_done)))
    # Behind the first collective, so that a slice that needs both links does not hold it up.
    open_at = next((i + 1 for i, each in enumerate(work.after) if Lane.COMPUTE not in each.lanes), 0)
    for i, each in enumerate((*work.after, None)):
        if i == open_at:
            _add_slices(draft, plan.dense_slices, layer, passed, len(plan.moe_slices))
        if each is not None:
            last = (_add(draft, each, layer, last),)
    if last:
        passed.layer[layer] = last
    return last


_Late = list[tuple[int, tuple[int, ...]]]


def _add_moe(
    draft: Draft, moe: MoEWork, plan: BlockPlan, layer: int, after: tuple[int, ...], passed: Passed
) -> tuple[tuple[int, ...], list[int], _Late]:
    """Append the chunks. Return the tasks that the next part waits for, the tasks that made weight gradients, and the
    chunks (with their dependencies) whose weight gradients are deferred."""
    degree = plan.degree
    at: list[tuple[int, ...]] = [after] * degree  # chunk -> the tasks that its next one waits for
    weights_done: list[int] = []
    late: _Late = []
    late_from = degree - (plan.late_dw if moe.expert_dw is not None else 0)
    # Where nothing leaves the node there is one link anyhow.
    traffic = (*moe.enter, *moe.gather, *moe.reduce, *moe.leave)
    stream = Lane.INTER if any(Lane.INTER in each.lanes for each in traffic) else None

    def step(chunk: int, works: Iterable[Work]) -> None:
        for each in works:
            at[chunk] = (_add(draft, each, layer, at[chunk], chunk, plan, moe.capacity, stream),)

    def experts(chunk: int) -> None:
        if chunk >= late_from:
            late.append((chunk, at[chunk]))
            step(chunk, (moe.expert_dx,))
        else:
            step(chunk, (moe.expert,))
            weights_done.extend(at[chunk])

    # Issued chunk by chunk, so that the host's cost holds up no lane; what a lane does first is the order within it.
    reduce_ahead = plan.links == "reduce_first"
    # Of an all-to-all in two steps the one inside the node comes a chunk ahead of the gather on the way in, and a chunk
    # behind the reduce on the way out: on the same link, each would wait for the other's chunk to come between nodes.
    in_steps = len(moe.enter) > 1 and plan.links != "shared"
    inside, enter = (moe.enter[:1], moe.enter[1:]) if in_steps else ((), moe.enter)
    leave, back_inside = (moe.leave[:1], moe.leave[1:]) if in_steps else (moe.leave, ())
    # Inside the node gradients come ahead of everything, while the first tokens are on their way between nodes.
    scattered = {
        index: draft.add(GRAD_SCATTER, Lane.INTRA, chunk=index, size=each.size_bytes, after=after, layer=layer)
        for index, each in enumerate(plan.moe_slices)
        if GRAD_SCATTER in each.inside
    }
    summed: list[int] = []
    step(0, inside)
    for chunk in range(degree):
        step(chunk, enter)
        if chunk + 1 < degree:
            step(chunk + 1, inside)
        step(chunk, moe.gather)
        if chunk == degree - 1:
            summed = _add_slices(draft, plan.moe_slices, layer, passed, scattered=scattered)
        if reduce_ahead and chunk >= 1:
            step(chunk - 1, moe.reduce)
        experts(chunk)
    for chunk in range(degree):
        if not reduce_ahead or chunk == degree - 1:
            step(chunk, moe.reduce)
        step(chunk, leave)
        if chunk > 0:
            step(chunk - 1, back_inside)
    step(degree - 1, back_inside)
    for index, each in enumerate(plan.moe_slices):
        if GRAD_GATHER in each.inside:
            draft.add(GRAD_GATHER, Lane.INTRA, chunk=index, size=each.size_bytes, after=(summed[index],), layer=layer)
    return tuple(dict.fromkeys(index for each in at for index in each)), weights_done, late


def _add(
    draft: Draft,
    work: Work,
    layer: int,
    after: Iterable[int],
    chunk: int | None = None,
    plan: BlockPlan | None = None,
    capacity: int | None = None,
    stream: Lane | None = None,
) -> int:
    """Append one operation, or with a plan one chunk of it; with one stream of traffic, append it to that."""
    lanes, size = work.lanes, work.size
    if plan is not None and chunk is not None:
        size *= chunk_shares(capacity, plan.degree)[chunk]
        if plan.links == "shared" and stream is not None and Lane.COMPUTE not in lanes:
            lanes = (stream,)
    return draft.add(work.kind, *lanes, chunk=chunk or 0, size=size, after=after, layer=layer, launches=work.launches)


def _add_slices(
    draft: Draft,
    slices: Iterable[Slice],
    layer: int,
    passed: Passed,
    first: int = 0,
    scattered: Mapping[int, int] | None = None,
) -> list[int]:
    """Append slices; return their tasks. ``scattered``: index of a slice -> the task that has added it up inside."""
    added: list[int] = []
    for index, each in enumerate(slices, first):
        needs: Sequence[int] = ()
        if each.newest_layer >= 0:
            is_expert = each.kind == EXPERT_GRAD
            exist: dict[int, tuple[int, ...]] = passed.experts if is_expert else passed.layer
            if each.newest_layer not in exist:
                raise ValueError(
                    f"layer {layer}: {each.kind} of layer {each.newest_layer} is sent before it exists: "
                    "move the slice to a later window"
                )
            needs = exist[each.newest_layer]
        if scattered and index in scattered:
            needs = (*needs, scattered[index])
        added.append(draft.add(each.kind, *each.lanes, chunk=index, size=each.size_bytes, after=needs, layer=layer))
    return added


def block_schedule(work: BlockWork, plan: BlockPlan, layer: int = 0) -> Schedule:
    """Return the schedule of one layer in one phase."""
    draft = Draft()
    add_block(draft, work, plan, layer, (), Passed())
    return draft.finish()


def model_schedule(
    layers: Sequence[Layer],
    plans: Sequence[BlockPlan],
    phase: Literal["forward", "backward"],
    tail: Sequence[Slice] = (),
    forward_plans: Sequence[BlockPlan] = (),
) -> Schedule:
    """Return the schedule of all layers, in the order in which the phase runs them.

    Args:
        layers: in the order of the phase: the backward begins with the last.
        plans: one per layer.
        phase: the phase. A layer that recomputes runs its forward again before its backward.
        tail: gradient slices that are sent after all layers.
        forward_plans: one per layer, in the same order; needed if layers recompute.
    """
    draft, passed = Draft(), Passed()
    last: tuple[int, ...] = ()
    for index, (layer, plan) in enumerate(zip(layers, plans, strict=True)):
        if phase == "backward" and layer.recompute:
            last = add_block(draft, layer.forward, forward_plans[index], index, last, Passed())
        last = add_block(draft, getattr(layer, phase), plan, index, last, passed)
    for index, each in enumerate(tail):
        draft.add(each.kind, *each.lanes, chunk=index, size=each.size_bytes, after=last, layer=len(layers))
    return draft.finish()
