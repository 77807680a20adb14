# SPDX-License-Identifier: Apache-2.0
"""Links that are not there: a task on a link keeps its lane busy for as long as the link would take, and sends nothing.

On CUDA that is a kernel of one thread that spins on the lane's stream, on a CPU a sleep in the lane's thread. Links
that are emulated so do not slow each other down, whatever those of the cluster would do. Also here: the clock that
goes with it, and a node of today in numbers.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

import torch

from ds_fsmoe.planning.cluster import Cluster, Operation
from ds_fsmoe.planning.cost import Cost, Fit, LinearCost, fit
from ds_fsmoe.planning.schedule import Draft, Lane, Task
from ds_fsmoe.runtime.clock import HOST, Clock
from ds_fsmoe.runtime.lanes import Body, Lanes

CHAIN = 30
"""Tasks in a row, each on another lane than the one before, from which the cost of a task is taken."""
_ON_CUDA_CYCLES = (20_000, 50_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000)
"""From about ten microseconds to about five milliseconds."""
_AHEAD_CYCLES = 1_000_000
_ON_CPU_MS = (0.2, 0.5, 1.0, 2.0, 4.0)
_IN_A_ROW = 4
_ROUNDS = 5
_NVLINK_BYTES_PER_MS = 360e6
"""Of 450 GB/s in each direction of a GPU, 80%."""
_ADAPTER_BYTES_PER_MS = 40e6
"""Of 400 Gb/s of a GPU's own adapter, 80%."""


class Delay:
    """Keeps the lane that calls it busy for a time.

    Args:
        device: of the lanes.
        host: the clock of the CPU.
    """

    def __init__(self, device: torch.device, host: Clock = HOST) -> None:
        self.device, self.host = device, host
        self._ahead = _AHEAD_CYCLES if device.type == "cuda" else 0.0
        self.line: Fit
        """Milliseconds of a delay by what is asked for: cycles on CUDA, milliseconds of sleep on a CPU."""
        self.calibrate()

    def calibrate(self) -> None:
        """Find out what a delay takes. On CUDA cycles are counted by a clock that follows the load of the device, so
        this is to be done again ahead of every measurement."""
        asked = _ON_CUDA_CYCLES if self.device.type == "cuda" else _ON_CPU_MS
        rounds = [[self._took_ms(each) for each in asked] for _ in range(_ROUNDS)]
        self.line = fit(asked, [statistics.median(column) for column in zip(*rounds[1:], strict=True)])
        self._alpha_ms, self._beta_ms = self.line.cost.alpha_ms, self.line.cost.beta_ms
        if not self._beta_ms > 0:
            raise RuntimeError(f"delays on {self.device} do not get longer when longer ones are asked for: {self.line}")

    def __call__(self, delay_ms: float) -> None:
        """Be busy for so long."""
        self._ask(max(0.0, (delay_ms - self._alpha_ms) / self._beta_ms))

    def _ask(self, amount: float) -> None:
        if self.device.type == "cuda":
            torch.cuda._sleep(int(amount))
        else:
            self.host.sleep(amount / 1e3)

    def _took_ms(self, amount: float) -> float:
        """One of several in a row: as in a schedule, where a lane has its next task at hand."""

        def work() -> None:
            for _ in range(_IN_A_ROW):
                self._ask(amount)

        return elapsed_ms(self.device, work, lambda: self._ask(self._ahead), self.host) / _IN_A_ROW


def elapsed_ms(
    device: torch.device,
    work: Callable[[], object],
    ahead: Callable[[], object] | None = None,
    host: Clock = HOST,
) -> float:
    """Milliseconds of some work, by the clock of the device.

    Args:
        device: on which it is done.
        work: issued on the current stream.
        ahead: done first, and not counted: a pause. It keeps a GPU waiting until the host has issued the work; and on a
            CPU work takes longer after a pause, which is how most tasks of a schedule begin.
        host: the clock of the CPU.
    """
    if device.type != "cuda":
        if ahead is not None:
            ahead()
        start_ns = host.perf_counter_ns()
        work()
        return (host.perf_counter_ns() - start_ns) / 1e6
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if ahead is not None:
        ahead()
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def issued_ms(device: torch.device, work: Callable[[], object], host: Clock = HOST) -> float:
    """What it costs the host to issue some work; on a CPU that is to do it. Leaves the device idle."""
    start_ns = host.perf_counter_ns()
    work()
    took_ms = (host.perf_counter_ns() - start_ns) / 1e6
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return took_ms


def link_bodies(costs: Mapping[str, Cost], kinds: Iterable[str], delay: Delay) -> dict[str, Body]:
    """Kind -> what does a task of that kind on a link.

    Args:
        costs: kind -> what it takes there.
        kinds: those wanted.
        delay: of the lanes' device.
    """

    def wait(task: Task) -> None:
        delay(costs[task.kind].ms(task.size, task.launches))

    return dict.fromkeys(kinds, wait)


def task_cost_ms(lanes: Lanes, device: torch.device, delay: Delay) -> float:
    """What a task takes besides its work: to be handed over from one lane to another."""
    draft = Draft()
    for index in range(CHAIN):
        draft.add("EMPTY", tuple(Lane)[index % len(Lane)], chunk=index, after=[index - 1] if index else [])
    schedule = draft.finish()
    bodies: dict[str, Body] = {"EMPTY": lambda task: None}

    def work() -> None:
        lanes.run(schedule, bodies, "empty")

    work()
    # Issued while the device waits, as in what is measured.
    times_ms = [elapsed_ms(device, work, lambda: delay(2.0), delay.host) for _ in range(4 * _ROUNDS)]
    return statistics.median(times_ms) / CHAIN


def modern_node() -> Cluster:
    """Nodes of eight GPUs with NVLink of 900 GB/s and an adapter of 400 Gb/s for each GPU. Assumed from data sheets and
    usual start-up times, measured nowhere."""
    num_nodes, gpus = 4, 8
    said = "assumed: 80% of the data sheet's bandwidth, a usual start-up time"
    operations = {}
    for link, alpha_ms, ranks, bytes_per_ms in (
        ("inter", 0.030, num_nodes, _ADAPTER_BYTES_PER_MS),
        ("intra", 0.015, gpus, _NVLINK_BYTES_PER_MS),
    ):
        # Of a buffer, (N - 1) / N goes over the wire; in an all-reduce twice.
        beta_ms = (ranks - 1) / ranks / bytes_per_ms
        for name, times in (("all_to_all", 1), ("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)):
            operations[f"{link}.{name}"] = Operation(LinearCost(times * alpha_ms, times * beta_ms), ranks, said)
    computed = ("gemm", "attention", "softmax", "routing", "order")
    operations |= {name: Operation(LinearCost(0.0, 0.0), source="not given: timed where it runs") for name in computed}
    source = "assumed: 4 nodes of 8 GPUs, NVLink 900 GB/s, 400 Gb/s per GPU"
    return Cluster("modern", num_nodes, gpus, MappingProxyType(operations), source=source)
