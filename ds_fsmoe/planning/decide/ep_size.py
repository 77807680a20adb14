# SPDX-License-Identifier: Apache-2.0
"""Predicts a job that has not run yet with its experts over each possible number of ranks, and chooses the fastest
that fits into memory. What it needs is known before a model is built: shapes, the ZeRO stage, the batch and the links.

More ranks leave fewer gradients and parameters of experts to send, and each token more rows. Which of them takes longer
depends on the tokens of a micro-batch, on the micro-batches and on the links. So every size is planned as training
would run it, by the planner's own search: chunks, orders, windows of gradients, ZeRO's collectives and the all-to-all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ds_fsmoe.planning.cluster import Cluster
from ds_fsmoe.planning.cost import LayerCosts
from ds_fsmoe.planning.decide.plan import Planner, Settings
from ds_fsmoe.planning.decide.presets import BEST
from ds_fsmoe.planning.decide.zero import Zero, sharing_costs
from ds_fsmoe.planning.groups import Groups, can_deduplicate
from ds_fsmoe.planning.schedule import GRAD
from ds_fsmoe.planning.workload import (
    GEMMS,
    NODE_DEDUPLICATED,
    AllToAll,
    Gradient,
    Layer,
    Shape,
    kind_costs,
    layer_work,
)

CLEARLY = 0.95
"""The share of a step's predicted time below which another size is clearly faster."""
_FEW, _FEW_AT_3 = 1, 3
"""The layers of a shape that are planned where not all are, and at ZeRO 3, where a layer waits for its neighbours'
parameters."""

_MOST_HIDDEN, _CLOSE = 2.0, 1.3
"""How many times as long as the fastest a step may take in DeepSpeed's order and still be the fastest in ours, and how
many times as long as the second and still be the second."""


@dataclass(frozen=True)
class ExpertJob:
    """Describes a job before it has run, as far as the number of ranks for its experts depends on it.

    Raises:
        ValueError: there is no layer, or a number is too small.
    """

    shapes: tuple[Shape, ...]
    """Each layer with experts, in the order of the forward: its micro-batch of ``B`` samples of ``L`` positions is a
    rank's."""
    world: int
    """The ranks of the job, or of one of its stages."""
    ranks_per_node: int
    num_dense: int
    """The elements of all parameters outside the experts."""
    esp: int = 1
    """The ranks that share an expert's width."""
    zero: int = 0
    """The ZeRO stage; with ``"accumulate": "before_sum"`` stage 2 sends what stage 1 does."""
    micro_batches: int = 1
    """The micro-batches of a step."""
    overlap_comm: bool = True
    """DeepSpeed's, at ZeRO 3."""
    rest_ms: float = 0.0
    """The ms of a step that no size changes and no shape tells: the optimizer, the head, the loss."""
    sums_in_slices: bool = False
    """Whether gradients are summed in two levels whose slices follow each other, as ours are and DeepSpeed's are not.
    """
    has_windows: bool = True
    """Whether gradients may be sent before the backward ends."""
    max_degree: int = Settings.max_degree
    """The most chunks of a phase."""
    alltoall: AllToAll | None = None
    """The all-to-all that was asked for: flat instead where the ranks cannot have it. ``None``: the fastest."""

    def __post_init__(self) -> None:
        if not self.shapes:
            raise ValueError("shapes: must have at least one layer with experts")
        for name in ("world", "ranks_per_node", "esp", "micro_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")
        for name in ("num_dense", "rest_ms"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 0")
        if self.world % self.esp:
            raise ValueError(f"expert_tensor_parallel_size = {self.esp}: must divide the {self.world} ranks")

    def layouts(self) -> list[Groups]:
        """Return the groups of every size that divides the ranks and the experts of all layers, ascending."""
        return [
            Groups(self.world, self.ranks_per_node, esp=self.esp, ep=ep)
            for ep in range(1, self.world // self.esp + 1)
            if self.world % (ep * self.esp) == 0 and not any(shape.E % ep for shape in self.shapes)
        ]

    def layers(self, groups: Groups, alltoall: AllToAll, cluster: Cluster) -> tuple[Layer, ...]:
        """Return the layers in these groups with their costs; equal layers are the same object.

        Raises:
            ValueError: the cluster lacks a number.
        """
        made: dict[Shape, Layer] = {}
        for shape in dict.fromkeys(self.shapes):
            layer = layer_work(shape, groups, alltoall, whole_slots=True)
            # Experts of another width have another rate.
            in_slices = self.sums_in_slices and self.zero < 3
            of_layer = kind_costs(cluster, groups, alltoall, shape, in_slices)
            costs = {**of_layer, **sharing_costs(cluster, groups, in_slices)}
            made[shape] = replace(self._with_dense(layer, shape), costs=LayerCosts.written(costs, cluster.host_ms))
        return tuple(made[shape] for shape in self.shapes)

    def _with_dense(self, layer: Layer, shape: Shape) -> Layer:
        """Return a layer that has its part of all parameters outside the experts, as gradients and as elements."""
        share_bytes = round(self.num_dense / len(self.shapes)) * shape.dtype_bytes

        def of_job(each: Gradient) -> Gradient:
            if each.kind != GRAD:
                return each
            # Embedding, head and layers without experts are one more tensor, and exist last.
            more_bytes = share_bytes - sum(each.tensors_bytes)
            tensors = (*each.tensors_bytes, more_bytes) if more_bytes >= 0 else (share_bytes,)
            return replace(each, size_bytes=share_bytes, tensors_bytes=tensors)

        gradients = tuple(of_job(each) for each in layer.gradients)
        before, after = (sum(each.size_bytes for each in of) for of in (layer.gradients, gradients))
        return replace(layer, gradients=gradients, numel=layer.numel + (after - before) // shape.dtype_bytes)


@dataclass(frozen=True)
class EpSize:
    """Holds what is predicted of a job with its experts over one number of ranks."""

    ep: int
    step_ms: float
    """The ms of a step with the fastest all-to-all: forward, backward, gradients and parameters."""
    alltoall: AllToAll
    memory_bytes: float | None = None
    """The memory of a rank; ``None``: not known."""
    fits: bool = True
    """False if a rank has less memory than that; True also where one of the two is not known."""


@dataclass(frozen=True)
class EpChoice:
    """Holds the chosen number of ranks for experts, and what the next one would cost."""

    best: EpSize
    runner_up: EpSize | None
    """The fastest other size that fits; ``None``: there is none."""

    @property
    def runner_up_costs(self) -> float | None:
        """Return how many times as long a step takes with the runner-up."""
        if self.runner_up is None:
            return None
        return self.runner_up.step_ms / self.best.step_ms if self.best.step_ms else 1.0


def ep_sizes(
    job: ExpertJob,
    cluster: Cluster,
    schedule: str = BEST,
    memory_of: Callable[[Groups], float] | None = None,
    most_bytes: float | None = None,
    *,
    plans_all: bool = True,
) -> list[EpSize]:
    """Predict a step with every possible size, ascending.

    Args:
        job: the job.
        cluster: the costs of the links and of computing.
        schedule: the schedule by name that layers will run with.
        memory_of: the groups to the memory of a rank, in bytes; ``None``: not known.
        most_bytes: the memory that a rank has; ``None``: not known.
        plans_all: see :func:`step_ms`.

    Raises:
        ValueError: the cluster lacks a number for every size, or the schedule is unknown; the message names it.
    """
    found, lacking = [], None
    for groups in job.layouts():
        try:
            ways_ms = {
                each: step_ms(job, cluster, groups, each, schedule, plans_all=plans_all)
                for each in alltoalls_of(job, groups)
            }
        except ValueError as error:
            lacking = lacking or error
            continue
        needed = None if memory_of is None else memory_of(groups)
        fits = needed is None or most_bytes is None or needed <= most_bytes
        alltoall = min(ways_ms, key=ways_ms.__getitem__)
        found.append(EpSize(groups.ep, ways_ms[alltoall], alltoall, needed, fits))
    if not found:
        assert lacking is not None
        raise lacking
    return found


def likely_ep_sizes(
    job: ExpertJob,
    cluster: Cluster,
    schedule: str = BEST,
    memory_of: Callable[[Groups], float] | None = None,
    most_bytes: float | None = None,
    usual: int | None = None,
) -> list[EpSize]:
    """Predict a step with those sizes that may be the fastest two, ascending, in about a second for deep models.

    DeepSpeed's order is quickly planned, and tells which all-to-all is the fastest, and which sizes no overlap can make
    up for. The others are planned with few layers of each shape.

    Args:
        job, cluster, schedule, memory_of, most_bytes: see :func:`ep_sizes`.
        usual: a size that is predicted in any case, if it fits; ``None``: none is.

    Raises:
        ValueError: the cluster lacks a number for every size.
    """
    in_turn = ep_sizes(job, cluster, "deepspeed", memory_of, most_bytes, plans_all=False)
    fitting = sorted((each for each in in_turn if each.fits), key=lambda each: each.step_ms)
    if len(fitting) < 2:
        return in_turn
    most_ms = max(_MOST_HIDDEN * fitting[0].step_ms, _CLOSE * fitting[1].step_ms)
    likely = [each for each in fitting if each.step_ms <= most_ms or each.ep == usual]
    groups = {each.ep: each for each in job.layouts()}
    found = (
        replace(each, step_ms=step_ms(job, cluster, groups[each.ep], each.alltoall, schedule, plans_all=False))
        for each in likely
    )
    return sorted(found, key=lambda each: each.ep)


def choose_ep_size(sizes: Sequence[EpSize], usual: int | None = None) -> EpChoice:
    """Choose the fastest size that fits, the smaller one of two that are alike. Where none fits, it is the one that
    needs the least memory.

    Args:
        sizes: the predictions, ascending.
        usual: the size that is kept unless another is predicted to take less than :data:`CLEARLY` of its time;
            predictions are several percent off, and measured links differ from start to start. ``None``: there is none.
    """
    fitting = [each for each in sizes if each.fits]
    if not fitting:
        return EpChoice(min(sizes, key=lambda each: each.memory_bytes or 0.0), None)
    best, *others = sorted(fitting, key=lambda each: (each.step_ms * (CLEARLY if each.ep == usual else 1), each.ep))
    return EpChoice(best, others[0] if others else None)


def states_bytes(job: ExpertJob, groups: Groups, optimizer_bytes: float) -> float:
    """Return the least memory of a rank: its parameters, gradients and optimizer states. Activations and buffers come
    on top.

    Args:
        job, groups: the job, and the ranks over which its experts are spread.
        optimizer_bytes: the bytes of the optimizer's states per element, with its copy of the parameter.
    """
    experts = sum(GEMMS[each.ffn] * each.M * each.H * each.E // (groups.ep * groups.esp) for each in job.shapes)
    number_bytes, total = job.shapes[0].dtype_bytes, 0.0
    for numel, replicas in ((job.num_dense, groups.stage), (experts, groups.edp)):
        parameters, gradients, states = (numel / (replicas if job.zero >= stage else 1) for stage in (3, 2, 1))
        total += number_bytes * (parameters + gradients) + optimizer_bytes * states
    return total


def alltoalls_of(job: ExpertJob, groups: Groups) -> tuple[AllToAll, ...]:
    """Return the all-to-alls that a job can have in these groups, ``"flat"`` first."""
    found: list[AllToAll] = ["flat"]
    if len(groups.placements["ep"].lanes) > 1:
        found.append("2dh")
        # Empty slots are sent as well, so padded dispatch is never node-deduplicated.
        if all(shape.capacity_factor is None for shape in job.shapes) and can_deduplicate(groups):
            found.append(NODE_DEDUPLICATED)
    if job.alltoall is not None:
        return (job.alltoall if job.alltoall in found else "flat",)
    return tuple(found)


def step_ms(
    job: ExpertJob,
    cluster: Cluster,
    groups: Groups,
    alltoall: AllToAll,
    schedule: str = BEST,
    *,
    plans_all: bool = True,
) -> float:
    """Predict the ms of a step in these groups with an all-to-all.

    Args:
        job, cluster, groups, alltoall, schedule: the job, where it runs, and how.
        plans_all: whether all layers are planned. Otherwise it is a few of each shape, then one more of each: as much
            longer as that makes a step, every further one does. In a deep model that takes a tenth of the time.

    Raises:
        ValueError: the cluster lacks a number, or the schedule is unknown.
    """
    settings = Settings(cluster.contention, max_degree=job.max_degree, num_micro_batches=job.micro_batches)
    zero = Zero(job.zero, job.shapes[0].dtype_bytes, job.has_windows, overlap_comm=job.overlap_comm)
    layers, counts = job.layers(groups, alltoall, cluster), Counter(job.shapes)
    planner, few = Planner({}, settings), _FEW_AT_3 if job.zero == 3 else _FEW
    if plans_all or max(counts.values()) <= few + 1:
        return job.rest_ms + planner.batch_ms(zero.plan(planner, schedule, layers))
    of_shape = dict(zip(job.shapes, layers, strict=True))

    def of_ms(zero: Zero, longer: Shape | None = None) -> float:
        some = [layer for shape, layer in of_shape.items() for _ in range(min(counts[shape], few + (shape == longer)))]
        return planner.batch_ms(zero.plan(planner, schedule, some))

    def all_ms(zero: Zero) -> float:
        first_ms = of_ms(zero)
        more = {shape: count - few for shape, count in counts.items() if count > few}
        return first_ms + sum(count * (of_ms(zero, shape) - first_ms) for shape, count in more.items())

    # At stage 3 parameters of the last layers stay until their backward; of few layers it is all of them, or none.
    numel = sum(each.numel for each in layers)
    staying = min(1.0, zero.max_reuse / (2 * numel)) if job.zero == 3 and numel else 1.0
    found_ms = all_ms(zero)
    if staying < 1:
        found_ms = staying * found_ms + (1 - staying) * all_ms(replace(zero, max_reuse=0))
    return job.rest_ms + found_ms
