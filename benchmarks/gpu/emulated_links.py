# SPDX-License-Identifier: Apache-2.0
"""Links that are not there: a task on a link keeps its lane busy for as long as the link would take, and sends nothing.

On CUDA that is a kernel of one thread that spins on the lane's stream, on a CPU a sleep in the lane's thread. Links
that are emulated so do not slow each other down, whatever those of the cluster would do.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import torch

from ds_fsmoe.execution.lanes import Body, Lanes
from ds_fsmoe.observing.device_time import Delay, elapsed_ms
from ds_fsmoe.planning.cluster import Cluster, Operation
from ds_fsmoe.planning.cost import Cost, LinearCost
from ds_fsmoe.planning.schedule import Draft, Lane, Task

CHAIN = 30
"""Tasks in a row, each on another lane than the one before, from which the cost of a task is taken."""
_ROUNDS = 5
_NVLINK_BYTES_PER_MS = 360e6
"""Of 450 GB/s in each direction of a GPU, 80%."""
_ADAPTER_BYTES_PER_MS = 40e6
"""Of 400 Gb/s of a GPU's own adapter, 80%."""


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
