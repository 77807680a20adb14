# SPDX-License-Identifier: Apache-2.0
"""Measures the costs of a cluster's links and processors, in the planner's form.

The autotuner calls it ahead of timing layers, and ``ds_fsmoe profile`` in a job of its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch.nn import functional as F

from ds_fsmoe.distributed.fail_together import MeasuringError
from ds_fsmoe.distributed.groups import passing_communicators
from ds_fsmoe.distributed.topology import Ranks, Topology, rank_now
from ds_fsmoe.distributed.waits import waiting
from ds_fsmoe.execution.collectives import Collectives
from ds_fsmoe.execution.lanes import Lanes, SerialLanes, make_lanes
from ds_fsmoe.log import log_line
from ds_fsmoe.measuring.cache import Measuring, Timeable
from ds_fsmoe.measuring.stopwatch import Prepare, Stopwatch, at_least, empty_task_ms, slowdowns
from ds_fsmoe.planning.cluster import Cluster, Operation
from ds_fsmoe.planning.cluster_schema import UNITS
from ds_fsmoe.planning.cost import LinearCost, fit
from ds_fsmoe.planning.job.measured import Timing
from ds_fsmoe.planning.schedule import A2A_IN, A2A_OUT, EXPERT, GATHER, REDUCE, Draft, Lane, Schedule
from ds_fsmoe.planning.timeline import IDEAL, Contention

# ---- The work that is timed to measure a cluster: one plain piece for each operation that the planner uses
#
# Letters: S tokens, M width, E experts, L positions of a sample, n blocks of elements for one rank.


COMPUTING = tuple(name for name in UNITS if "." not in name)
LINKS = ("inter", "intra")
CONTENTION = ("links", "compute", "traffic")
"""The slowdowns of lanes by each other, with the names of ``planning.timeline.Contention``."""
MAX_BYTES = 1 << 26
"""The size of the largest buffer."""
FEWEST = 16
"""The least ratio of the largest size to the smallest step, so that there are five different sizes."""
_FIRST_BYTES = 1 << 16
_HEAD = 64
"""The width of an attention head."""
_CPU_BYTES = 1 << 24
"""The size of the largest input on a CPU: making it takes longer than what is timed."""
_DRAWN = 512
"""The number of random rows, which are repeated."""
_COPIES = 2
"""The number of experts per token."""


@dataclass(frozen=True)
class Trial:
    """Holds an operation that can be timed at any size."""

    operation: str
    """The name in ``planning.cluster.UNITS``, which gives the unit."""
    prepare: Prepare
    size_of_one: float
    """The number of units in a size of 1."""
    first: int
    """A first size that takes hardly any time."""
    most: int
    """The largest size to try."""
    group: dist.ProcessGroup | None = None
    """The group of this rank for a collective, which has one even where it is left over; ``None``: no collective."""


# ---- which ranks


def lane_groups(topology: Topology, link: str) -> tuple[Ranks, ...]:
    """Return all groups that use a link at the same time, as in training: of ``inter`` each has one rank per node, of
    ``intra`` the ranks of a node. Where nodes are not equally large, ranks are left over, each a group by itself."""
    nodes = _nodes(topology)
    per_node = min(map(len, nodes))
    measured = [ranks[:per_node] for ranks in nodes]
    groups = list(zip(*measured, strict=True)) if link == "inter" else measured
    return tuple(groups) + tuple((rank,) for ranks in nodes for rank in ranks[per_node:])


def _nodes(topology: Topology) -> list[Ranks]:
    nodes: dict[int, list[int]] = {}
    for rank, node in enumerate(topology.node_of_rank):
        nodes.setdefault(node, []).append(rank)
    return [tuple(ranks) for ranks in nodes.values()]


# ---- collectives


def collectives(
    link: str, ranks: int, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype, max_bytes: int
) -> list[Trial]:
    """Return the four collectives of one link. A size of 1 is one element for each rank in the largest buffer.

    Args:
        link: ``inter`` or ``intra``.
        ranks: the number of ranks of a group.
        group: this rank's; of one rank, if it is left over.
        device, dtype: the device and type of the buffers.
        max_bytes: the size of the largest buffer.
    """
    unit_bytes = ranks * dtype.itemsize
    takes_part = group.size() == ranks
    collectives = Collectives(_exchange, group, group)
    bodies: Mapping[str, tuple[Callable[[torch.Tensor], object], int]] = {
        "all_to_all": (collectives.to_experts, ranks),
        "all_reduce": (lambda x: dist.all_reduce(x, group=group), ranks),
        "all_gather": (collectives.gather, 1),
        "reduce_scatter": (collectives.reduce, ranks),
    }

    def preparing(body: Callable[[torch.Tensor], object], blocks: int) -> Prepare:
        def prepare(size: int) -> Callable[[], object]:
            if not takes_part:
                return lambda: None
            x_n = torch.zeros(blocks, size, device=device, dtype=dtype)
            return lambda: body(x_n)

        return prepare

    most = max(FEWEST, max_bytes // unit_bytes)
    first = min(most, max(FEWEST, _FIRST_BYTES // unit_bytes))
    return [
        Trial(f"{link}.{name}", preparing(*body), float(unit_bytes), first, most, group)
        for name, body in bodies.items()
    ]


def _exchange(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    y = torch.empty_like(x)
    dist.all_to_all_single(y, x, group=group)
    return y


# ---- computation


def computations(device: torch.device, dtype: torch.dtype, max_bytes: int) -> list[Trial]:
    """Return the operations that one rank does alone; ``planning.workload`` says what a size means.

    Args:
        device, dtype: of the tensors.
        max_bytes: of the largest input.
    """
    # Large enough to be what a model of today does, small enough for a fraction of a second.
    width, length, num_experts = (2048, 512, 64) if device.type == "cuda" else (256, 32, 16)
    max_bytes = min(max_bytes, MAX_BYTES if device.type == "cuda" else _CPU_BYTES)
    at = {"device": device, "dtype": dtype}
    row_bytes = width * dtype.itemsize

    def rows(size: int, columns: int = width) -> torch.Tensor:
        # Drawing all of them takes long.
        drawn = torch.randn(min(size, _DRAWN), columns, **at)
        return drawn.repeat(-(-size // _DRAWN), 1)[:size]

    def weights(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, **at) / math.sqrt(shape[0])

    def gemm(size: int) -> Callable[[], object]:
        x_SM, w_MM = rows(size), weights(width, width)
        return lambda: x_SM @ w_MM

    def attention(size: int) -> Callable[[], object]:
        return partial(_attention, rows(size * length), [weights(width, width) for _ in range(4)], length)

    def softmax(size: int) -> Callable[[], object]:
        scores = rows(size * length, length)
        return lambda: scores.softmax(-1)

    def routing(size: int) -> Callable[[], object]:
        return partial(_routing, rows(size), weights(width, num_experts))

    def order(size: int) -> Callable[[], object]:
        x_SM = rows(size)
        row_N = torch.randperm(_COPIES * size, device=device) % size
        return lambda: x_SM.index_select(0, row_N)

    attention_flops = 2.0 * (length * 4 * width**2 + 2 * length**2 * width)
    table: Sequence[tuple[str, Prepare, float, int, int]] = (
        ("gemm", gemm, 2.0 * width**2, row_bytes, 256),
        ("attention", attention, attention_flops, length * row_bytes, FEWEST),
        ("softmax", softmax, float(length**2), length**2 * dtype.itemsize, FEWEST),
        ("routing", routing, 2.0 * width * num_experts, row_bytes, 256),
        ("order", order, float((_COPIES + 1) * row_bytes), row_bytes, 256),
    )
    return [
        Trial(name, prepare, size_of_one, first, max(first, max_bytes // unit_bytes))
        for name, prepare, size_of_one, unit_bytes, first in table
    ]


def _attention(x_SM: torch.Tensor, projections: Sequence[torch.Tensor], length: int) -> torch.Tensor:
    """Run attention without the softmax, which has a cost of its own."""
    width = x_SM.shape[-1]

    def heads(x_SM: torch.Tensor) -> torch.Tensor:
        return x_SM.view(-1, length, width // _HEAD, _HEAD).transpose(1, 2)

    q, k, v = (heads(x_SM @ each) for each in projections[:3])
    return ((q @ k.transpose(2, 3)) @ v).transpose(1, 2).reshape(-1, width) @ projections[3]


def _routing(x_SM: torch.Tensor, w_ME: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weight_SK, expert_SK = (x_SM @ w_ME).float().softmax(-1).topk(_COPIES)
    chosen_NE = F.one_hot(expert_SK.T.reshape(-1), w_ME.shape[1])
    return weight_SK, (chosen_NE.cumsum(0) * chosen_NE).sum(-1)


# ---- names


class ProfileNames:
    """Makes the names of a cluster's measurements: they have all that these depend on, except the cluster.

    Args:
        topology, lanes, dtype, max_bytes: see :func:`ds_fsmoe.measuring.cluster_profile.profile_cluster`.
    """

    def __init__(self, topology: Topology, lanes: Lanes, dtype: torch.dtype, max_bytes: int = MAX_BYTES) -> None:
        nodes = _nodes(topology)
        self.num_nodes, self.per_node = len(nodes), min(map(len, nodes))
        """The shape that all nodes have in common."""
        self.links = [link for link in LINKS if self.ranks_of(link) > 1]
        self.overlap = bool(self.links) and not isinstance(lanes, SerialLanes)
        """Whether there are lanes that could slow each other down."""
        self._lanes = type(lanes).__name__
        self._how = f"{str(dtype).removeprefix('torch.')}, at most {max_bytes} bytes"

    def ranks_of(self, link: str) -> int:
        """Return the size of the groups of a link; 1 if there is no other rank."""
        return self.num_nodes if link == "inter" else self.per_node

    @property
    def operations(self) -> list[str]:
        """Return the operations that can be timed here, in the order of ``UNITS``."""
        return [each for each in UNITS if "." not in each or each.split(".")[0] in self.links]

    def all(self) -> list[str]:
        """Return the names of everything that is measured."""
        found = [self.of(each) for each in self.operations]
        found += [self.largest(each) for each in (*self.links, *COMPUTING)]
        return [*found, self.host, *(self.contention(each) for each in CONTENTION if self.overlap)]

    def of(self, operation: str) -> str:
        """Return the name of a timing."""
        return f"{operation}{self._among(operation)}, {self._how}"

    def largest(self, operation_or_link: str) -> str:
        """Return the name of the largest timed size, which is itself found by measuring."""
        return f"largest size of {operation_or_link}{self._among(operation_or_link)}, {self._how}"

    def contention(self, kind: str) -> str:
        """Return the name of the slowdown of lanes."""
        shape = f"{self.num_nodes} nodes x {self.per_node} ranks"
        return f"contention of {kind}, {shape}, {self._lanes}, {self._how}"

    @property
    def host(self) -> str:
        """Return the name of the host cost of a task."""
        return f"host ms per task, {self._lanes}"

    def _among(self, operation: str) -> str:
        link = operation.split(".")[0]
        return f" among {self.ranks_of(link)} ranks" if link in LINKS else ""


# ---- This module measures what a cluster's links and processors cost, in the planner's form


LINK_AIM_MS, COMPUTING_AIM_MS = 100.0, 25.0
"""The approximate time of the largest size."""
_PARTS = (32, 16, 8, 4, 2, 1)
"""The divisors of the largest size that give the other sizes."""
_FARTHEST = 16
"""The largest ratio of a largest size to the smaller one from whose time it is estimated."""
_MOST_NAMES = 1
_CORUN_MS = 5.0
"""The approximate time of each piece of work that runs side by side to measure slowdown."""
_HOST_CHUNKS = 4


def profile_cluster(
    measuring: Measuring,
    topology: Topology,
    lanes: Lanes,
    dtype: torch.dtype,
    *,
    max_bytes: int = MAX_BYTES,
    max_ctas: int | None = None,
    name: str = "measured",
    source: str = "",
) -> Cluster:
    """Measure the missing values of the cluster this job runs on. Collective over all ranks of the job.

    All groups of a link are at work at the same time, as they are in training. Where nodes are not equally large, as
    many ranks of each are measured as the smallest has. One rank has no links: only its computing is measured. Random
    numbers are left as they were.

    Args:
        measuring: the measurements of this job; new ones are added.
        topology: the nodes of all ranks.
        lanes: the lanes that overlap, to measure their slowdown and the host cost of a task.
        dtype: the type of tokens and weights.
        max_bytes: the size of the largest buffer.
        max_ctas: the limit of the communicators in training.
        name, source: the name and the source of the result.

    Raises:
        MeasuringError: on every rank, if one has failed.
    """
    profiler = _Profiler(measuring, topology, lanes, dtype, max_bytes, max_ctas)
    devices = [measuring.watch.device] if measuring.watch.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad():
        return profiler.run(name, source)


class _Profiler:
    """Holds the state of one call of :func:`profile_cluster`."""

    def __init__(
        self,
        measuring: Measuring,
        topology: Topology,
        lanes: Lanes,
        dtype: torch.dtype,
        max_bytes: int,
        max_ctas: int | None,
    ) -> None:
        self._measuring = measuring
        self._topology = topology
        self._lanes = lanes
        self._dtype = dtype
        self._max_bytes = max_bytes
        self._max_ctas = max_ctas
        self._names = ProfileNames(topology, lanes, dtype, max_bytes)

    def run(self, name: str, source: str) -> Cluster:
        """Measure everything and put the results together."""
        known = self._measuring.known
        # The same on every rank. Without something to measure there is no need of communicators.
        is_known = all(each in known.timings or each in known.numbers for each in self._names.all())
        with nullcontext([]) if is_known else self._trials() as trials:
            timings = self._timings(trials)
            host_ms = self._measuring.number(self._names.host, functools.partial(self._host_ms, timings))
            contention = self._contention(trials, timings)
        self._warn_of_bad_fits(timings)
        operations = {each: self._operation(each, timing) for each, timing in timings.items()}
        return Cluster(
            name, self._names.num_nodes, self._names.per_node, operations, contention, host_ms, self._origin(source)
        )

    @contextmanager
    def _trials(self) -> Iterator[list[Trial]]:
        """Yield all operations that can be timed here, links first; the communicators end with the context."""
        device = self._measuring.watch.device
        kinds = [lane_groups(self._topology, link) for link in self._names.links]
        with passing_communicators(kinds, "fsmoe_profile", self._max_ctas) as groups:
            trials = [
                trial
                for link, group in zip(self._names.links, groups, strict=True)
                for trial in collectives(link, self._names.ranks_of(link), group, device, self._dtype, self._max_bytes)
            ]
            yield trials + computations(device, self._dtype, self._max_bytes)

    def _timings(self, trials: Sequence[Trial]) -> dict[str, Timing]:
        """Return operation -> its timing, in the order of ``UNITS``."""
        of = {trial.operation: trial for trial in trials}
        return {each: self._timing(each, of.get(each)) for each in self._names.operations}

    def _timing(self, operation: str, trial: Trial | None) -> Timing:
        name, known = self._names.of(operation), self._measuring.known
        if name not in known.timings:
            assert trial is not None
            sizes = sorted({-(-self._largest(trial) // parts) for parts in _PARTS})
            work = Timeable(name, UNITS[operation], sizes, trial.size_of_one, trial.prepare, trial.group)
            first = self._measuring.timing(work)
            if not first.fit.is_good:
                # Another job may have used the machine.
                del known.timings[name]
                known.timings[name] = min(first, self._measuring.timing(work), key=lambda each: each.fit.typical_share)
        return known.timings[name]

    def _warn_of_bad_fits(self, timings: Mapping[str, Timing]) -> None:
        worst = {name: timing.fit.worst_share for name, timing in timings.items() if not timing.fit.is_good}
        if worst:
            names = sorted(worst, key=lambda each: -worst[each])
            bad = [f"{each} {worst[each]:.0%}" for each in names[:_MOST_NAMES]]
            bad += [f"{len(names) - _MOST_NAMES} more"] if len(names) > _MOST_NAMES else []
            self._warn(
                f"noisy measurement: measure again on idle machines, or let trials decide (off by {', '.join(bad)})",
                "Predictions are rough. Off by at most: " + ", ".join(f"{each} {worst[each]:.0%}" for each in names),
            )

    def _largest(self, trial: Trial) -> int:
        """Return the largest size to time, the same on every rank. The four collectives of a link share one."""
        link = trial.operation.split(".")[0]
        what, aim_ms = (trial.operation, COMPUTING_AIM_MS) if trial.group is None else (link, LINK_AIM_MS)
        largest = self._measuring.number(self._names.largest(what), lambda: float(self._grown(trial, what, aim_ms)))
        # An all-reduce sends what a reduce-scatter and an all-gather send.
        return max(FEWEST, int(largest) // (2 if trial.operation.endswith(".all_reduce") else 1))

    def _grown(self, trial: Trial, what: str, aim_ms: float) -> int:
        size = trial.first
        while True:
            (time_ms,) = self._measuring.watch.times_ms(f"how long {what} takes", [size], trial.prepare, trial.group)
            factor = aim_ms / max(time_ms, 1e-6)
            grown = min(trial.most, max(FEWEST, int(size * min(factor, _FARTHEST))))
            if factor < _FARTHEST or grown == trial.most:
                return grown
            size = grown

    def _host_ms(self, timings: Mapping[str, Timing]) -> float:
        """Return the host cost of handing out a task and of waiting for those it depends on. Where the host issues
        ahead, the mean cost of issuing an operation is added. Elsewhere the time of the operation has it."""
        empty_ms = empty_task_ms(
            self._measuring.watch, "empty tasks", self._lanes, _five_tasks_a_chunk(), "profile/empty"
        )
        return empty_ms + sum(each.issue_ms for each in timings.values()) / len(timings)

    def _contention(self, trials: Sequence[Trial], timings: Mapping[str, Timing]) -> Contention:
        if not self._names.overlap:
            return IDEAL
        of = {trial.operation: trial for trial in trials}

        @functools.cache
        def found() -> Contention:
            lanes = {Lane.INTER: "inter.all_to_all", Lane.INTRA: "intra.all_gather", Lane.COMPUTE: "gemm"}
            work = {
                lane: functools.partial(of[each].prepare, _size_of(_CORUN_MS, of[each], timings[each]))
                for lane, each in lanes.items()
                if each in of
            }
            return slowdowns(self._measuring.watch, self._lanes, work, "how much lanes slow each other").contention()

        number = self._measuring.number
        return Contention(
            *(number(self._names.contention(each), lambda each=each: getattr(found(), each)) for each in CONTENTION)
        )

    def _operation(self, operation: str, timing: Timing) -> Operation:
        fit, link = timing.fit, operation.split(".")[0]
        assert isinstance(fit.cost, LinearCost)
        where = f"{len(timing.sizes)} sizes up to {timing.sizes[-1]:.4g} {timing.unit}s"
        bad = "" if fit.is_good else "; fits poorly"
        return Operation(
            fit.cost,
            self._names.ranks_of(link) if link in LINKS else None,
            f"measured: {where}, typically off by {fit.typical_share:.1%}, at most by {fit.worst_share:.1%}{bad}",
        )

    def _origin(self, source: str) -> str:
        sizes = self._topology.node_sizes
        if len(set(sizes)) > 1:
            note = f"the nodes have {', '.join(map(str, sizes))} ranks; {self._names.per_node} of each are measured"
            if self._names.per_node == 1:
                note += ", so links inside a node were not measured"
            self._warn(note)
            return "; ".join(filter(None, (source, note)))
        return source

    def _warn(self, sentence: str, details: str = "") -> None:
        if rank_now() == 0:
            log_line(sentence, details=details)


def _size_of(aim_ms: float, trial: Trial, timing: Timing) -> int:
    """Return a size that takes about this long, within the sizes that were timed."""
    steps = [round(each / trial.size_of_one) for each in timing.sizes]
    fitting = [step for step, time_ms in zip(steps, timing.times_ms, strict=True) if time_ms <= aim_ms]
    return max(fitting, default=steps[0])


def _five_tasks_a_chunk() -> Schedule:
    """Return a schedule with five tasks per chunk, as a layer has them."""
    draft = Draft()
    lanes = {A2A_IN: Lane.INTER, GATHER: Lane.INTRA, EXPERT: Lane.COMPUTE, REDUCE: Lane.INTRA, A2A_OUT: Lane.INTER}
    after: list[list[int]] = [[] for _ in range(_HOST_CHUNKS)]
    for kind, lane in lanes.items():
        after = [[draft.add(kind, lane, chunk=chunk, after=after[chunk])] for chunk in range(_HOST_CHUNKS)]
    return draft.finish()


# ---- The same ahead of a job, of links and a product alone, within a few seconds


LINKS_LIMIT_S = 2.0
"""The time after which no further operation is timed."""
_LEAST_MS = 10.0
"""The least time of the largest size: what only starts up is shorter."""
_LARGER = 4
"""The ratio of a size to the next smaller one."""
_LIKE = {"all_reduce": ("all_to_all", 2), "all_gather": ("all_to_all", 1), "reduce_scatter": ("all_gather", 1)}
"""A collective -> one by which it can be told, and how many times as much of a buffer it sends."""


def measure_links(
    watch: Stopwatch, topology: Topology, dtype: torch.dtype, max_ctas: int | None = None
) -> tuple[dict[str, Operation], Contention]:
    """Measure the collectives of the links of this job, and a product, at three sizes each, and how much a product and
    an all-to-all over the outer link slow each other down. Collective over all ranks of the job. When
    :data:`LINKS_LIMIT_S` are over, the other collectives follow from those that were timed.

    Args:
        watch: the stopwatch of this job.
        topology, dtype, max_ctas: see :func:`profile_cluster`.

    Raises:
        MeasuringError: on every rank, if a measurement has failed, or not even the all-to-alls were timed by then.
    """
    device, nodes = watch.device, _nodes(topology)
    ranks_of = {"inter": len(nodes), "intra": min(map(len, nodes))}
    links = [link for link in LINKS if ranks_of[link] > 1]
    found, largest, slowed = {}, {}, IDEAL
    kinds = [lane_groups(topology, link) for link in links]
    with (
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        torch.no_grad(),
        passing_communicators(kinds, "fsmoe_links", max_ctas) as groups,
    ):
        for group in groups:
            # The first message makes the communicator, which is no part of what links cost.
            with waiting("the first message over a link"):
                dist.all_reduce(torch.zeros(1, device=device), group=group)
        start_s = watch.host.perf_counter()
        trials = computations(device, dtype, MAX_BYTES)[:1]
        for link, group in zip(links, groups, strict=True):
            trials += collectives(link, ranks_of[link], group, device, dtype, MAX_BYTES)
        places = ("gemm", "all_to_all", *_LIKE)
        for trial in sorted(trials, key=lambda each: places.index(each.operation.split(".")[-1])):
            what, _, collective = trial.operation.partition(".")
            if watch.any_rank(watch.host.perf_counter() - start_s > LINKS_LIMIT_S):
                if collective not in _LIKE:
                    raise MeasuringError(f"the links could not be measured within {LINKS_LIMIT_S:g} s")
                other, factor = _LIKE[collective]
                cost = found[f"{what}.{other}"].cost
                found[trial.operation] = Operation(
                    LinearCost(factor * cost.alpha_ms, factor * cost.beta_ms), ranks_of[what]
                )
                continue
            if what not in largest:
                largest[what] = _long_enough(watch, trial, start_s)
            sizes = at_least(3, (max(1, largest[what] // _LARGER**step) for step in range(3)))
            # Of few repetitions the fastest tells more than the one in the middle.
            least_ms = watch.times(trial.operation, sizes, trial.prepare, trial.group).least_ms
            fitted = fit([each * trial.size_of_one for each in sizes], least_ms).cost
            assert isinstance(fitted, LinearCost)
            found[trial.operation] = Operation(fitted, ranks_of.get(what))
        for link in links[:1]:
            of_lanes = {Lane(link): f"{link}.all_to_all", Lane.COMPUTE: "gemm"}
            work = {
                lane: partial(each.prepare, max(1, largest[each.operation.split(".")[0]] // _LARGER))
                for lane, name in of_lanes.items()
                for each in trials
                if each.operation == name
            }
            with closing(make_lanes(device)) as lanes:
                slowed = slowdowns(watch, lanes, work, "how much computing and a link slow each other").contention()
    return found, slowed


def _long_enough(watch: Stopwatch, trial: Trial, start_s: float) -> int:
    """Return the first size that takes so long that it shows what a byte takes; the same on every rank."""
    size = trial.first
    while size < trial.most and not watch.any_rank(watch.host.perf_counter() - start_s > LINKS_LIMIT_S):
        (time_ms,) = watch.times_ms(f"how long {trial.operation} takes", [size], trial.prepare, trial.group)
        if time_ms >= _LEAST_MS:
            break
        size = min(trial.most, _LARGER * size)
    return size
