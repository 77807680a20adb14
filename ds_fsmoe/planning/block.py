# SPDX-License-Identifier: Apache-2.0
"""Builds the schedules of one layer and of a sequence of layers: the orders of the paper's figure 3, and one more.
The search and the step's plan use it; :mod:`~ds_fsmoe.planning.timeline` simulates the schedules.

A block has two windows for gradient slices. One is inside its MoE part, right after the last incoming tokens. The other
is concurrent with the rest of the layer (attention and its collectives). Slices in a window run while the lanes are
otherwise idle; slices that are too long make the layer longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ds_fsmoe.planning.chunks import chunk_shares
from ds_fsmoe.planning.schedule import EXPERT_GRAD, EXPERT_PARAMETERS, GRAD_GATHER, GRAD_SCATTER, Draft, Lane, Schedule
from ds_fsmoe.planning.workload import BlockWork, Layer, MoEWork, Sharing, Stage, Work

Links = Literal["shared", "paper", "reduce_first"]
ORDERS: tuple[Links, ...] = ("shared", "paper", "reduce_first")
Conversions = Literal["links", "compute"]
CONVERSIONS: tuple[Conversions, ...] = ("links", "compute")


@dataclass(frozen=True, slots=True)
class Slice:
    """Describes a part of the gradients that is sent in one launch."""

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
    """Describes how one layer runs in one phase.

    Raises:
        ValueError: the degree is below 1, or the order is unknown.
    """

    degree: int = 1
    """The number of chunks."""
    links: Links = "shared"
    """The traffic of the MoE part: all in one stream; on separate links, with all gathers before all reduces; or with
    each reduce ahead of the gather two chunks later. In sub-batches that alternate the last is: with the reduces of the
    sub-batch that is first ahead of the gathers of the other."""
    moe_slices: tuple[Slice, ...] = ()
    dense_slices: tuple[Slice, ...] = ()
    conversions: Conversions = "links"
    """Where rows are converted for narrow wires: on the links that send them, or, where that may be, on COMPUTE."""

    def __post_init__(self) -> None:
        if self.degree < 1:
            raise ValueError(f"num_chunks = {self.degree}: must be at least 1")
        if self.links not in ORDERS:
            raise ValueError(f"links = {self.links!r}: the choices are {', '.join(ORDERS)}")
        if self.conversions not in CONVERSIONS:
            raise ValueError(f"conversions = {self.conversions!r}: the choices are {', '.join(CONVERSIONS)}")

    def without_ages(self) -> BlockPlan:
        """Return the plan of a layer considered alone: all its gradients come from earlier layers."""
        moe, dense = (
            tuple(replace(each, newest_layer=-1) for each in slices) for slices in (self.moe_slices, self.dense_slices)
        )
        return replace(self, moe_slices=moe, dense_slices=dense)


@dataclass(frozen=True)
class LayerPlan:
    """Describes how one layer runs in both phases. The planner makes it for the object that owns the layer."""

    forward: BlockPlan
    backward: BlockPlan
    alltoall: str
    """The name of the all-to-all in the registry."""
    reduces: tuple[tuple[float, str], ...] = ()
    """(smallest size in bytes, how a reduce-scatter is done), ascending; empty: the default for the kind of device."""
    is_two_batch: bool = False
    """Whether the two sub-batches of a micro-batch alternate; the plans above are then those of one sub-batch."""
    is_unpadded: bool = False
    """Whether a layer whose dispatch is padded by its config is unpadded all the same."""


@dataclass
class GradientDependencies:
    """Holds the tasks that gradient slices can wait for."""

    layer: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Layer -> the tasks that finish it, after which its dense gradients exist."""
    experts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Layer -> the tasks after which the gradients of its experts exist."""


def add_block(
    draft: Draft,
    work: BlockWork,
    plan: BlockPlan,
    layer: int,
    after: Sequence[int],
    passed: GradientDependencies,
    moe_after: Sequence[int] = (),
) -> tuple[int, ...]:
    """Append one layer to a schedule.

    Args:
        draft: the schedule to append to.
        work: the operations of the layer in this phase.
        plan: how the layer runs.
        layer: the index of the layer in the order of this phase.
        after: the tasks that the layer waits for.
        passed: the tasks of earlier layers that gradients wait for; this layer's are added.
        moe_after: further tasks that its MoE part waits for.

    Returns:
        The tasks that the next layer waits for.
    """
    last = tuple(after)
    for each in work.before:
        last = (add_work(draft, each, layer, last),)
    part = MoEPart(draft, work.moe, plan, layer, (*last, *moe_after))
    last = part.whole(passed)
    passed.experts[layer] = tuple(part.weights_done)
    last = add_after(draft, work.after, plan, layer, last, passed)
    if last:
        passed.layer[layer] = last
    return last


class MoEPart:
    """Appends the chunks of one layer's MoE part to a schedule: at once, or in two parts with a pause.

    Args:
        draft: the schedule to append to.
        moe: the chunked operations.
        plan: the plan of the layer.
        layer: the index of the layer in the order of the phase.
        after: the tasks that the MoE part waits for.
        first_chunk: the number of its first chunk in task names; above 0 where another sub-batch has the first ones.
    """

    def __init__(
        self,
        draft: Draft,
        moe: MoEWork,
        plan: BlockPlan,
        layer: int,
        after: tuple[int, ...],
        first_chunk: int = 0,
    ) -> None:
        if plan.conversions == "compute":
            moe = moe.converting_on_compute()
        if plan.links == "shared":
            moe = _links_in_turn(moe)
        self.draft, self.moe, self.plan, self.layer, self.first_chunk = draft, moe, plan, layer, first_chunk
        self._after = after
        self._at: list[tuple[int, ...]] = [after] * plan.degree  # chunk -> the tasks that its next one waits for
        self.weights_done: list[int] = []
        """The tasks that make weight gradients."""
        # Where nothing leaves the node there is one link anyhow.
        self._stream = Lane.INTER if any(Lane.INTER in each.lanes for each in (*moe.ahead, *moe.behind)) else None
        # What computes right behind the experts goes with them: at its place among the links it would be issued when
        # all experts are through.
        self._with_expert = tuple(each for each in moe.behind[:1] if Lane.COMPUTE in each.lanes and not each.offset)
        self._ahead, self._gather = self._by_offset(moe.ahead)
        self._behind, self._reduce = self._by_offset(moe.behind[len(self._with_expert) :])
        self._to_gather: tuple[Stage, ...] = ()

    def _by_offset(self, stages: Iterable[Stage]) -> tuple[dict[int, list[Stage]], tuple[Stage, ...]]:
        """Return (offset in chunks -> the outer stages with it, the inner stages)."""
        found: dict[int, list[Stage]] = {0: []}
        for each in stages:
            if not each.is_inner:
                found.setdefault(each.offset, []).append(each)
        return dict(sorted(found.items())), tuple(each for each in stages if each.is_inner)

    def whole(self, passed: GradientDependencies) -> tuple[int, ...]:
        """Append the whole MoE part, and return the tasks that the next part waits for.

        Tasks are issued chunk by chunk, so that the host's cost delays no lane. The order within a lane sets what runs
        first.
        """
        return self._run(passed, is_here=False)

    def enter(self, gathers: bool = True) -> None:
        """Append the stages that send tokens to the experts, for all chunks.

        Args:
            gathers: whether to append the gathers too; otherwise :meth:`rest` appends them.
        """
        self._to_gather = () if gathers else self._gather
        for chunk in range(self.plan.degree):
            self._bring(chunk, gathers)

    def rest(self, passed: GradientDependencies) -> tuple[int, ...]:
        """Append the stages left after :meth:`enter`, with all reduces behind all gathers."""
        return self._run(passed, is_here=True)

    def _run(self, passed: GradientDependencies, is_here: bool) -> tuple[int, ...]:
        draft, moe, plan, layer = self.draft, self.moe, self.plan, self.layer
        reduce_ahead = plan.links == "reduce_first" and not is_here
        # Inside the node gradients come ahead of everything, while the first tokens are on their way between nodes.
        scattered = {
            index: draft.add(
                GRAD_SCATTER, Lane.INTRA, chunk=index, size=each.size_bytes, after=self._after, layer=layer
            )
            for index, each in enumerate(plan.moe_slices)
            if GRAD_SCATTER in each.inside
        }
        summed: list[int] = []
        for chunk in range(plan.degree):
            if is_here:
                self._step(chunk, self._to_gather)
            else:
                self._bring(chunk)
            if chunk == plan.degree - 1:
                summed = _add_slices(draft, plan.moe_slices, layer, passed, scattered=scattered)
            if reduce_ahead and chunk >= 1:
                self._step(chunk - 1, self._reduce)
            self._step(chunk, (moe.expert,))
            self.weights_done.extend(self._at[chunk])
            self._step(chunk, self._with_expert)
        for chunk in range(plan.degree + max(self._behind)):
            if chunk < plan.degree and not (reduce_ahead and chunk < plan.degree - 1):
                self._step(chunk, self._reduce)
            for offset, stages in self._behind.items():
                self._step(chunk - offset, stages)
        for index, each in enumerate(plan.moe_slices):
            if GRAD_GATHER in each.inside:
                after = (summed[index],)
                draft.add(GRAD_GATHER, Lane.INTRA, chunk=index, size=each.size_bytes, after=after, layer=layer)
        return tuple(dict.fromkeys(index for each in self._at for index in each))

    def _bring(self, chunk: int, gathers: bool = True) -> None:
        if chunk == 0:
            for early in range(max(self._ahead)):
                self._step(early, [each for each in self.moe.ahead if each.offset > early and not each.is_inner])
        for offset, stages in self._ahead.items():
            self._step(chunk + offset, stages)
        if gathers:
            self._step(chunk, self._gather)

    def _step(self, chunk: int, works: Iterable[Work]) -> None:
        """Append stages of a chunk, if a chunk with this number exists."""
        for each in works if 0 <= chunk < self.plan.degree else ():
            self._at[chunk] = (self._add(each, chunk, self._at[chunk]),)

    def _add(self, work: Work, chunk: int, after: Iterable[int]) -> int:
        """Append one chunk of an operation; with one stream of traffic, append it to that stream."""
        lanes, size = work.lanes, work.size * chunk_shares(self.moe.capacity, self.plan.degree)[chunk]
        if self.plan.links == "shared" and self._stream is not None and Lane.COMPUTE not in lanes:
            lanes = (self._stream,)
        place, launches = self.first_chunk + chunk, work.launches
        return self.draft.add(
            work.kind, *lanes, chunk=place, size=size, after=after, layer=self.layer, launches=launches
        )


def _links_in_turn(moe: MoEWork) -> MoEWork:
    """Return the stages for one stream of traffic, where no step of an all-to-all is apart from the others.
    Computation ahead of all traffic keeps its place.
    """
    first = next((at for at, each in enumerate(moe.ahead) if Lane.COMPUTE not in each.lanes), len(moe.ahead))
    in_turn = moe.each(lambda stage: replace(stage, offset=0))
    return replace(in_turn, ahead=(*moe.ahead[:first], *in_turn.ahead[first:]))


def add_work(draft: Draft, work: Work, layer: int, after: Iterable[int], chunk: int = 0) -> int:
    """Append one unchunked operation."""
    how = {"chunk": chunk, "layer": layer, "launches": work.launches}
    return draft.add(work.kind, *work.lanes, size=work.size, after=after, **how)


def add_after(
    draft: Draft,
    works: Sequence[Work],
    plan: BlockPlan,
    layer: int,
    last: tuple[int, ...],
    passed: GradientDependencies,
    sub_batch: int = 0,
) -> tuple[int, ...]:
    """Append what follows a layer's MoE part, with the concurrent gradient slices; return the tasks that end it."""
    # Behind the first collective, so that a slice on both links does not delay it.
    open_at = next((i + 1 for i, each in enumerate(works) if each.lanes[:1] != (Lane.COMPUTE,)), 0)
    for i, each in enumerate((*works, None)):
        if i == open_at:
            _add_slices(draft, plan.dense_slices, layer, passed, len(plan.moe_slices))
        if each is not None:
            last = (add_work(draft, each, layer, last, sub_batch),)
    return last


def _add_slices(
    draft: Draft,
    slices: Iterable[Slice],
    layer: int,
    passed: GradientDependencies,
    first: int = 0,
    scattered: Mapping[int, int] | None = None,
) -> list[int]:
    """Append slices, and return their tasks. ``scattered``: index of a slice -> the task that reduced it within
    nodes.
    """
    added: list[int] = []
    for index, each in enumerate(slices, first):
        needs: Sequence[int] = ()
        if each.newest_layer >= 0:
            is_expert = each.kind == EXPERT_GRAD
            exist: dict[int, tuple[int, ...]] = passed.experts if is_expert else passed.layer
            if each.newest_layer not in exist:
                raise ValueError(
                    f"layer {layer}: {each.kind} of layer {each.newest_layer} is sent before it is computed: move "
                    "the slice to a later window"
                )
            needs = exist[each.newest_layer]
        if scattered and index in scattered:
            needs = (*needs, scattered[index])
        added.append(draft.add(each.kind, *each.lanes, chunk=index, size=each.size_bytes, after=needs, layer=layer))
    return added


def block_schedule(work: BlockWork, plan: BlockPlan, layer: int = 0) -> Schedule:
    """Return the schedule of one layer in one phase."""
    draft = Draft()
    add_block(draft, work, plan, layer, (), GradientDependencies())
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
        layers: the layers in the order of the phase; the backward begins with the last.
        plans: one per layer.
        phase: the phase. A layer that recomputes runs its forward again before its backward.
        tail: gradient slices that are sent after all layers.
        forward_plans: one per layer, in the same order; needed if layers recompute.
    """
    draft, passed = Draft(), GradientDependencies()
    last: tuple[int, ...] = ()
    shared = _Shared(draft, layers, phase)
    for index, (layer, plan) in enumerate(zip(layers, plans, strict=True)):
        dense, experts = shared.gathered(index, last)
        last = (*last, *dense)
        if phase == "backward" and layer.recompute:
            last = add_block(draft, layer.forward, forward_plans[index], index, last, GradientDependencies(), experts)
        last = add_block(draft, getattr(layer, phase), plan, index, last, passed, experts)
        last = shared.is_through(index, last)
    for index, each in enumerate(tail):
        draft.add(each.kind, *each.lanes, chunk=index, size=each.size_bytes, after=last, layer=len(layers))
    return draft.finish()


class _Shared:
    """Appends what ZeRO sends for layers to a schedule. Gathers are prefetched as in DeepSpeed; reduce-scatters are
    concurrent with what runs next, unless that waits for them.
    """

    def __init__(self, draft: Draft, layers: Sequence[Layer], phase: Literal["forward", "backward"]) -> None:
        self._draft, self._phase = draft, phase
        self._of = [each.sharing or Sharing() for each in layers]
        self._gathers: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self._left: list[tuple[int, tuple[int, ...]]] = []

    def gathered(self, index: int, last: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Append the gathers of a layer.

        Returns:
            The tasks that the layer waits for, and those that its MoE part waits for. ``last`` holds the tasks before
            the
            layer.
        """
        self._gather(index, last)
        if index + 1 < len(self._of) and self._of[index + 1].is_ahead:
            self._gather(index + 1, last)
        self._scatter()
        return self._gathers[index]

    def is_through(self, index: int, last: tuple[int, ...]) -> tuple[int, ...]:
        """Mark a layer's backward as finished by these tasks, so that its gradients can be sent.

        Returns:
            The tasks that the next layer begins after.
        """
        if self._phase == "backward":
            self._left.append((index, last))
        if self._of[index].is_waited_for:
            return (*last, *self._scatter())
        if index == len(self._of) - 1:
            self._scatter()
        return last

    def _gather(self, index: int, last: tuple[int, ...]) -> None:
        if index in self._gathers:
            return
        works = self._of[index].forward if self._phase == "forward" else self._of[index].backward
        added = [(each.kind, add_work(self._draft, each, index, last)) for each in works]
        dense, experts = (
            tuple(task for kind, task in added if (kind == EXPERT_PARAMETERS) is of_experts)
            for of_experts in (False, True)
        )
        self._gathers[index] = dense, experts

    def _scatter(self) -> list[int]:
        sent = [
            add_work(self._draft, each, index, last) for index, last in self._left for each in self._of[index].gradients
        ]
        self._left = []
        return sent
