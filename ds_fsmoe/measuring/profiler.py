# SPDX-License-Identifier: Apache-2.0
"""Times the tasks of a layer's plan, each alone, on the groups, types and device that it runs on.

The autotuner calls it between two forwards, on all ranks.

Letters: E experts of all ranks, e of this rank, c slots of a chunk, M width, G ranks of an EP group, P of an ESP group,
N = P * G.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from ds_fsmoe.distributed.fail_together import MeasuringError
from ds_fsmoe.execution.call import CallOfExperts
from ds_fsmoe.execution.collectives import REDUCE_METHODS, Collectives, ReduceMethod, dequantized_rows, quantized_rows
from ds_fsmoe.execution.lanes import Lanes, SerialLanes
from ds_fsmoe.execution.pipeline import CallSizes, LayerExperts
from ds_fsmoe.execution.thread_lanes import ThreadLanes
from ds_fsmoe.measuring.cache import Measuring, Timeable
from ds_fsmoe.measuring.stopwatch import Prepare, at_least, empty_task_ms, slowdowns
from ds_fsmoe.planning.job.measured import (
    ALL_GATHER,
    ALL_TO_ALL,
    BACKWARD,
    BACKWARD_ANEW,
    BETWEEN_NODES,
    DEQUANTISED,
    FORWARD,
    IN_NODES,
    QUANTISED,
    REDUCE_SCATTER,
    LayerProfile,
    Slowdowns,
    Timing,
)
from ds_fsmoe.planning.schedule import A2A_IN, A2A_IN_NODE, HOLD, Lane, Schedule

# ---- What the collectives of layers cost: each is timed once, however many layers share its ranks, in every
# way that there is to do it


Reduces = tuple[tuple[float, ReduceMethod], ...]
"""The methods to reduce, by size; see :attr:`Collectives.reduces`."""


@dataclass(frozen=True)
class LinkTimes:
    """Holds the times of several layers' collectives, by :meth:`ProfiledLayer.link_name`."""

    timings: Mapping[str, Timing]
    reduces: Mapping[str, Reduces]
    """The fastest methods to reduce-scatter, by size."""


def time_links(measuring: Measuring, subjects: Sequence[ProfiledLayer]) -> LinkTimes:
    """Time every collective of these layers. Collective.

    Raises:
        MeasuringError: on every rank, if one has failed.
    """
    device = measuring.watch.device
    uses: dict[str, list[tuple[str, ProfiledLayer]]] = {}
    for subject in subjects:
        for name in subject.links:
            uses.setdefault(subject.link_name(name), []).append((name, subject))
    timings: dict[str, Timing] = {}
    reduces: dict[str, Reduces] = {}
    for full_name, users in uses.items():
        name, subject = users[0]
        sizes_bytes = _sizes_bytes([user.link_bytes(each) for each, user in users])
        found: dict[ReduceMethod | None, Timing] = {}
        for method, collectives in _by_method(name, subject.collectives).items():
            way = full_name if method is None else f"{full_name} by {method}"
            prepare, row_bytes, group = prepared(subject, name, collectives, device)
            rows = at_least(4, (max(1, size // row_bytes) for size in sizes_bytes))
            up_to = f"{way}, up to {rows[-1] * row_bytes} bytes"
            try:
                with untouched(device):
                    found[method] = measuring.timing(Timeable(up_to, "byte", rows, float(row_bytes), prepare, group))
            except MeasuringError:
                # On every rank: not each backend has each method for each type.
                if not found:
                    raise
        if None in found:
            timings[full_name] = found[None]
        else:
            reduces[full_name], timings[full_name] = fastest(found)
    return LinkTimes(timings, reduces)


def fastest(found: Mapping[ReduceMethod, Timing]) -> tuple[Reduces, Timing]:
    """Return the best of several methods, with at most one change between them as messages grow, and its times."""
    names = list(found)
    sizes = found[names[0]].sizes
    best_ms, best = float("inf"), (0, names[0], names[0])
    for place in range(len(sizes)):
        for small in names if place else names[:1]:
            for large in names:
                ways = [small] * place + [large] * (len(sizes) - place)
                # A way counts by how much longer it takes, at a small size as much as at a large one.
                total = sum(
                    found[way].times_ms[i] / max(1e-9, min(each.times_ms[i] for each in found.values()))
                    for i, way in enumerate(ways)
                )
                if total < best_ms:
                    best_ms, best = total, (place, small, large)
    place, small, large = best
    times_ms = (*found[small].times_ms[:place], *found[large].times_ms[place:])
    least_ms = (*found[small].least_ms[:place], *found[large].least_ms[place:])
    rule: Reduces = ((0.0, large),) if small == large or not place else ((0.0, small), (sizes[place], large))
    return rule, Timing(found[large].unit, sizes, times_ms, least_ms=least_ms)


def prepared(
    subject: ProfiledLayer, name: str, collectives: Collectives, device: torch.device
) -> tuple[Prepare, int, dist.ProcessGroup | None]:
    """Return a function that prepares rows of a collective, the bytes of a row in its buffer, and the ranks whose mean
    counts.

    The second part of an all-to-all in two needs the result of the first one, so preparing it communicates.
    """
    exchanging, sharing = collectives.num_exchanging, collectives.num_sharing
    width, dtype = subject.sizes.width, subject.sizes.dtype
    blocks = {ALL_GATHER: 1, REDUCE_SCATTER: sharing}.get(name, exchanging)
    group = collectives.esp_group if name in (ALL_GATHER, REDUCE_SCATTER) else collectives.ep_group
    nodes = collectives.nodes
    if nodes is not None and name in (IN_NODES, BETWEEN_NODES):
        is_inside = name == IN_NODES
        blocks = nodes.per_node if is_inside else nodes.num_nodes
        send = nodes.exchange_inside if is_inside else nodes.exchange_between
        row_bytes = blocks * width * dtype.itemsize

        def prepare_level(rows: int) -> Callable[[], object]:
            x_RM = torch.randn(blocks * rows, width, device=device).to(dtype)
            each, order = [rows] * blocks, torch.arange(blocks * rows, device=device)
            # Inside a node rows are copied before they are sent, or added up afterwards.
            return lambda: send(x_RM.index_select(0, order) if is_inside else x_RM, each, each)

        # Between nodes the groups of all places share the ports of the same nodes. Which of them is through first is
        # another one each time, and in a step they make up for each other: the mean over all of them counts.
        return prepare_level, row_bytes, nodes.inside if is_inside else group

    def prepare(rows: int) -> Callable[[], object]:
        x_BcM = torch.randn(blocks, rows, width, device=device).to(dtype)
        if name == ALL_GATHER:
            return lambda: collectives.gather(x_BcM.unsqueeze(1))
        if name == REDUCE_SCATTER:
            return lambda: collectives.reduce(x_BcM.unsqueeze(1))
        return collectives.ready(A2A_IN_NODE if name == IN_NODES else A2A_IN, x_BcM)

    counted = sharing if name in (ALL_GATHER, REDUCE_SCATTER) else exchanging
    return prepare, counted * width * dtype.itemsize, group


def _sizes_bytes(wanted_bytes: Sequence[int]) -> list[int]:
    """Return the sizes from the largest down to a chunk of the smallest, each half of the last; at least six."""
    sizes, smallest = [max(wanted_bytes)], min(wanted_bytes) // 32
    while len(sizes) < 6 or (sizes[-1] > smallest and len(sizes) < 10):
        sizes.append(max(1, sizes[-1] // 2))
    return sizes


def _by_method(name: str, collectives: Collectives) -> dict[ReduceMethod | None, Collectives]:
    """Return the collectives to compare, by method to reduce; ``None``: there is one method."""
    # Collectives with their own method to reduce have no choice.
    if name != REDUCE_SCATTER or type(collectives).reduce is not Collectives.reduce:
        return {None: collectives}
    return {each: replace(collectives, reduces=((0.0, each),)) for each in REDUCE_METHODS}


# ---- This module times the tasks of a layer's plan, each alone, on the groups, types and device that it runs
# on


@dataclass(frozen=True)
class ProfiledLayer:
    """Describes one layer, as it was called."""

    name: str
    """The name for messages."""
    kind: str
    """The text that is the same for equal layers, which are measured once."""
    collectives: Collectives
    experts: LayerExperts
    num_local_experts: int
    """The number of this rank's experts, e."""
    num_weights: int
    """The number of elements of this rank's expert matrices; at least 1."""
    is_written: bool
    """Whether all experts are computed by written-out forms: these do not depend on the chunks of the forward."""
    recompute: bool
    sizes: CallSizes
    surroundings: Callable[[], AbstractContextManager]
    """The context of a call: autocast."""
    places: Mapping[str, str] = field(default_factory=dict)
    """ "ep" and "esp" -> where the ranks of the group lie, as text."""
    alltoall: str = "flat"
    """The name of the algorithm."""

    @property
    def num_experts(self) -> int:
        """Return the number of experts, E."""
        return self.num_local_experts * self.collectives.num_exchanging

    @property
    def links(self) -> tuple[str, ...]:
        """Return the collectives of the layer."""
        in_two = self.collectives.legs or self.collectives.nodes is not None
        exchanges = (IN_NODES, BETWEEN_NODES) if in_two else (ALL_TO_ALL,)
        return (
            *(() if self.collectives.ep_group is None else exchanges),
            *(() if self.collectives.esp_group is None else (ALL_GATHER, REDUCE_SCATTER)),
        )

    @property
    def computations(self) -> tuple[str, ...]:
        """Return the computations of its experts, and the conversions of its rows to and from a communication dtype."""
        experts = (FORWARD, BACKWARD) if self.is_written or self.recompute else (FORWARD, BACKWARD, BACKWARD_ANEW)
        is_narrow = self.sizes.comm_byte_shares != (1.0, 1.0) and self.collectives.ep_group is not None
        return (*experts, *((QUANTISED, DEQUANTISED) if is_narrow else ()))

    @property
    def measured_capacity(self) -> int:
        """Return C, up to the next multiple of an eighth of a power of two, so that a capacity that follows the tokens
        does not make every run a new one."""
        capacity = max(1, self.sizes.capacity)
        step = max(1, (1 << (capacity - 1).bit_length()) // 16)
        return -(-capacity // step) * step

    def link_name(self, name: str) -> str:
        """Return a text of all that the time of one of its collectives depends on, except the size."""
        is_shared = name in (ALL_GATHER, REDUCE_SCATTER)
        how = "" if is_shared else f" ({self.alltoall})"
        return f"{name}{how} of {self.sizes.dtype} among {self.places.get('esp' if is_shared else 'ep', 'its ranks')}"

    def link_bytes(self, name: str) -> int:
        """Return the bytes of the whole capacity as it is measured."""
        sent = self.num_experts * self.measured_capacity * self.sizes.width * self.sizes.dtype.itemsize
        return self.collectives.num_sharing * sent if name in (ALL_GATHER, REDUCE_SCATTER) else sent


def measured_slots(capacity: int) -> list[int]:
    """Return the chunks to time, in slots, ascending: up to the whole capacity and at least four different ones."""
    return at_least(4, (-(-max(1, capacity) // parts) for parts in (16, 8, 4, 2, 1)))


def profile(
    measuring: Measuring,
    subject: ProfiledLayer,
    lanes: Lanes,
    schedule: Schedule,
) -> LayerProfile:
    """Time the computation of a layer's experts; collectives of tokens: see :func:`time_links`.

    Collective; random numbers and buffers are left as they were.

    Args:
        measuring: the measurements of this job.
        subject: the layer.
        lanes: the lanes on which it runs.
        schedule: a schedule of such a layer in several chunks; the cost of handing out its tasks is timed.

    Raises:
        MeasuringError: on every rank, if one has failed.
    """
    watch, slots = measuring.watch, measured_slots(subject.measured_capacity)
    of_kind = f"of {subject.kind}, {slots[-1]} slots"
    with untouched(watch.device, *getattr(subject.experts, "experts", ())):
        draws = _Draws(watch.device)
        table = _computations(watch.device, subject, draws)
        work = {
            name: Timeable(f"{name} {of_kind}", unit, slots, size_of_one, prepare)
            for name, (prepare, size_of_one, unit) in table.items()
            if name in subject.computations
        }
        operations = measuring.timings(work)
        drew = measuring.number(
            f"random numbers drawn by experts {of_kind}", lambda: float(watch.any_rank(draws.has_drawn))
        )
        empty = f"an empty task of {sum(task.kind != HOLD for task in schedule.tasks)}, {type(lanes).__name__}"
        what = f"empty tasks of {subject.name}", lanes, schedule, f"{subject.name}/empty"
        task_ms = measuring.number(empty, lambda: empty_task_ms(watch, *what))
    return LayerProfile(operations, task_ms, bool(drew))


def slowdowns_of(
    measuring: Measuring, subject: ProfiledLayer, lanes: Lanes, lane_of: Callable[[str], Lane]
) -> Slowdowns:
    """Measure how much a layer's traffic and computation slow each other down. Collective.

    Args:
        measuring: the measurements of this job.
        subject: the layer.
        lanes: the lanes that overlap.
        lane_of: name of a collective -> its lane; of those on one lane the first is taken.

    Raises:
        MeasuringError: on every rank, if one has failed.
    """
    watch, slots = measuring.watch, measured_slots(subject.measured_capacity)
    work: dict[Lane, Callable[[], _Work]] = {}
    for name in subject.links:
        prepare, row_bytes, _ = prepared(subject, name, subject.collectives, watch.device)
        rows = max(1, subject.link_bytes(name) // row_bytes // 4)
        work.setdefault(lane_of(name), partial(prepare, rows))
    work[Lane.COMPUTE] = partial(_computations(watch.device, subject, _Draws(watch.device))[FORWARD][0], slots[-3])
    pairs = [(a, b) for a in work for b in work if a is not b]
    of_kind = f"{subject.kind}, {subject.alltoall}, {slots[-1]} slots"
    names = {(a, b): f"slowdown of {a} by {b}, {of_kind}" for a, b in pairs}
    if not all(name in measuring.known.numbers for name in names.values()):
        with untouched(watch.device, *getattr(subject.experts, "experts", ())):
            found = slowdowns(watch, lanes, work, f"lanes of {subject.name} side by side")
        for pair, name in names.items():
            measuring.number(name, partial(found.factors.__getitem__, pair))
    return Slowdowns({pair: measuring.known.numbers[name] for pair, name in names.items()})


_Work = Callable[[], object]


def _computations(device: torch.device, subject: ProfiledLayer, draws: _Draws) -> dict[str, tuple[Prepare, float, str]]:
    """Return the computations of a layer on made-up rows: name -> what prepares so many slots, the size of one, and the
    unit of sizes."""
    ranks, width = subject.collectives.num_exchanging * subject.collectives.num_sharing, subject.sizes.width

    def arrived(slots: int) -> torch.Tensor:
        """Return the shape [N, e, c, M]."""
        shape = ranks, subject.num_local_experts, slots, width
        return torch.randn(*shape, device=device).to(subject.sizes.dtype)

    def called(same_chunks: bool = True) -> CallOfExperts:
        with subject.surroundings():
            return subject.experts.call(True, same_chunks=same_chunks, recompute=subject.recompute)

    def forward(slots: int) -> _Work:
        x_NecM = arrived(slots)
        # A call takes each slot once; so that it can be done over and over, each time is a call of its own.
        return lambda: called().forward(0, slots, x_NecM)

    def backward(slots: int, same_chunks: bool = True) -> _Work:
        call, x_NecM = called(same_chunks), arrived(slots)
        with draws.watched():
            y_NecM = call.forward(0, slots, x_NecM)
        dy_NecM = torch.randn_like(y_NecM)
        return lambda: call.backward(0, slots, dy_NecM)

    def narrow(slots: int) -> _Work:
        return partial(quantized_rows, arrived(slots).view(-1, width))

    def widen(slots: int) -> _Work:
        bytes_RB = quantized_rows(arrived(slots).view(-1, width))
        return lambda: dequantized_rows(bytes_RB, subject.sizes.dtype, torch.Size((width,)))

    flops = 2.0 * ranks * subject.num_weights
    wide_bytes = float(ranks * subject.num_local_experts * width * subject.sizes.dtype.itemsize)
    return {
        FORWARD: (forward, flops, "flop"),
        BACKWARD: (backward, 2 * flops, "flop"),
        BACKWARD_ANEW: (partial(backward, same_chunks=False), 2 * flops, "flop"),
        QUANTISED: (narrow, wide_bytes, "byte"),
        DEQUANTISED: (widen, wide_bytes, "byte"),
    }


class _Draws:
    """Notices when random numbers are drawn."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.has_drawn = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        before = self._state()
        yield
        self.has_drawn = self.has_drawn or not all(map(torch.equal, before, self._state()))

    def _state(self) -> Sequence[torch.Tensor]:
        states = [torch.get_rng_state()]
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
        return states


@contextmanager
def untouched(device: torch.device, *modules: nn.Module) -> Iterator[None]:
    """Restore the generators of random numbers and the buffers of modules after made-up rows; without gradients."""
    kept = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers()]
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
        try:
            yield
        finally:
            for buffer, value in kept:
                buffer.copy_(value)


def is_serial(lanes: Lanes) -> bool:
    """Return True if these lanes run one task after another."""
    return isinstance(lanes, SerialLanes)


def issues_ahead(lanes: Lanes, device: torch.device) -> bool:
    """Return True if one thread issues the tasks of all these lanes and is through before they are. Lanes that are
    threads, and a CPU with one task after another, run their tasks themselves."""
    return not isinstance(lanes, ThreadLanes) and device.type == "cuda"
