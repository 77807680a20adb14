# SPDX-License-Identifier: Apache-2.0
"""This module measures what a cluster's links and processors cost, in the planner's form."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch

from ds_fsmoe.distributed.groups import passing_communicators
from ds_fsmoe.distributed.topology import Topology, rank_now
from ds_fsmoe.execution.lanes import Lanes
from ds_fsmoe.measuring.contention import slowdowns
from ds_fsmoe.measuring.measurements import Measuring
from ds_fsmoe.measuring.microbenchmarks import (
    CONTENTION,
    FEWEST,
    LINKS,
    MAX_BYTES,
    ProfileNames,
    Trial,
    collectives,
    computations,
    groups_of,
)
from ds_fsmoe.planning.cluster import Cluster, Operation
from ds_fsmoe.planning.cluster_schema import UNITS
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.measured import Timing
from ds_fsmoe.planning.schedule import A2A_IN, A2A_OUT, EXPERT, GATHER, HOLD, REDUCE, Draft, Lane, Schedule
from ds_fsmoe.planning.timeline import IDEAL, Contention

logger = logging.getLogger("ds_fsmoe")

LINK_AIM_MS, COMPUTING_AIM_MS = 100.0, 25.0
"""The approximate time of the largest size."""
_PARTS = (32, 16, 8, 4, 2, 1)
"""The numbers of parts into which the largest size is cut to get the other sizes."""
_FARTHEST = 16
"""The largest ratio of a largest size to the smaller one from whose time it is estimated."""
_MOST_NAMES = 3
_CORUN_MS = 5.0
"""The approximate time of each piece of work that runs side by side to measure slowdown."""
_HOST_RUNS, _HOST_CHUNKS = 8, 4


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
    """Measure what is not known yet of the cluster this job runs on. Collective over all ranks of the job.

    All groups of a link are at work at the same time, as they are in training. Where nodes are not equally large, as
    many ranks of each are measured as the smallest has. One rank has no links: only its computing is measured. Random
    numbers are left as they were.

    Args:
        measuring: of this job; what is measured is added to what it knows.
        topology: of all ranks.
        lanes: the lanes that overlap, to measure their slowdown and the host cost of a task.
        dtype: the type of tokens and weights.
        max_bytes: the size of the largest buffer.
        max_ctas: of the communicators that training will have.
        name, source: of the result.

    Raises:
        MeasuringError: on every rank, if one has failed.
    """
    profiler = _Profiler(measuring, topology, lanes, dtype, max_bytes, max_ctas)
    devices = [measuring.watch.device] if measuring.watch.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad():
        return profiler.run(name, source)


class _Profiler:
    """The state of one call of :func:`profile_cluster`."""

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
        self._shape = self._names.shape

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
            name, self._shape.num_nodes, self._shape.per_node, operations, contention, host_ms, self._said(source)
        )

    @contextmanager
    def _trials(self) -> Iterator[list[Trial]]:
        """Yield all operations that can be timed here, links first; the communicators end with the context."""
        device = self._measuring.watch.device
        kinds = [groups_of(self._topology, link) for link in self._names.links]
        with passing_communicators(kinds, "fsmoe_profile", self._max_ctas) as groups:
            trials = [
                trial
                for link, group in zip(self._names.links, groups, strict=True)
                for trial in collectives(link, self._shape.ranks_of(link), group, device, self._dtype, self._max_bytes)
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
            work = name, UNITS[operation], sizes, trial.size_of_one, trial.prepare, trial.group
            first = self._measuring.timing(*work)
            if not first.fit.is_good:
                # Somebody else may have been at work on the machine.
                del known.timings[name]
                known.timings[name] = min(first, self._measuring.timing(*work), key=lambda each: each.fit.typical_share)
        return known.timings[name]

    def _warn_of_bad_fits(self, timings: Mapping[str, Timing]) -> None:
        worst = {name: timing.fit.worst_share for name, timing in timings.items() if not timing.fit.is_good}
        if worst:
            names = sorted(worst, key=lambda each: -worst[each])
            bad = [f"{each} off by up to {worst[each]:.0%}" for each in names[:_MOST_NAMES]]
            bad += [f"{len(names) - _MOST_NAMES} more"] if len(names) > _MOST_NAMES else []
            self._warn(
                f"noisy measurement (busy machine?): {', '.join(bad)}. Predictions are rough; measure again on idle "
                "machines, or let trials decide"
            )

    def _largest(self, trial: Trial) -> int:
        """Return the largest size to time, the same on every rank. The four collectives of a link share one."""
        link = trial.operation.split(".")[0]
        what = link if trial.is_collective else trial.operation
        aim_ms = LINK_AIM_MS if trial.is_collective else COMPUTING_AIM_MS
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
        """What it takes to hand out a task, and to wait for what it needs; where the host issues ahead, with what it
        takes to issue an operation, the mean of all of them. Elsewhere that is in what the operation takes."""
        schedule = _five_tasks_a_chunk()
        bodies: dict[str, Callable[[object], None]] = dict.fromkeys(
            {task.kind for task in schedule.tasks}, lambda task: None
        )

        def prepare(runs: int) -> Callable[[], None]:
            def work() -> None:
                for _ in range(runs):
                    self._lanes.run(schedule, bodies, "profile/empty")

            return work

        time_ms = self._measuring.watch.host_ms("empty tasks", _HOST_RUNS, prepare)
        issue_ms = sum(each.issue_ms for each in timings.values()) / len(timings)
        return time_ms / (_HOST_RUNS * sum(task.kind != HOLD for task in schedule.tasks)) + issue_ms

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
            self._shape.ranks_of(link) if link in LINKS else None,
            f"measured: {where}, typically off by {fit.typical_share:.1%}, at most by {fit.worst_share:.1%}{bad}",
        )

    def _said(self, source: str) -> str:
        sizes = self._topology.node_sizes
        if len(set(sizes)) > 1:
            note = f"the nodes have {', '.join(map(str, sizes))} ranks; measured are {self._shape.per_node} of each"
            if self._shape.per_node == 1:
                note += ", so there is nothing about links inside a node"
            self._warn(note)
            return "; ".join(filter(None, (source, note)))
        return source

    def _warn(self, sentence: str) -> None:
        if rank_now() == 0:
            logger.warning(sentence)


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
