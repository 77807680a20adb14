# SPDX-License-Identifier: Apache-2.0
"""Measures the cluster that a job runs on and writes a cluster file, without training: ``ds_fsmoe profile``."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.distributed.fail_together import MeasuringError, from_first_rank
from ds_fsmoe.distributed.nccl import why_one_link
from ds_fsmoe.distributed.topology import find_topology, rank_now, sizes_that_divide, world_size_now
from ds_fsmoe.execution.lanes import make_lanes
from ds_fsmoe.measuring.cache import (
    Fingerprint,
    Measurements,
    Measuring,
    cluster_fingerprint,
    source_of,
    write_measurements,
)
from ds_fsmoe.measuring.cluster_profile import ProfileNames, profile_cluster
from ds_fsmoe.measuring.hardware import link_lines
from ds_fsmoe.measuring.stopwatch import Stopwatch
from ds_fsmoe.planning.cluster import Cluster
from ds_fsmoe.planning.job.measured import Timing
from ds_fsmoe.terminal.progress import Progress

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_LAUNCHED = ("RANK", "OMPI_COMM_WORLD_RANK")
_MAX_CTAS = FSMoEBlock.model_fields["max_ctas"].default
_SPEEDS = {"byte": "GB/s", "flop": "Gflop/s", "score": "Gscore/s"}


class Result:
    """Holds the results that rank 0 reports."""

    def __init__(
        self, cluster: Cluster, timings: dict[str, Timing], facts: dict[str, list[str]], took_s: float
    ) -> None:
        self.cluster = cluster
        self.timings = timings
        """The timings by operation."""
        self.facts = facts
        """Host -> what it reports about its links."""
        self.took_s = took_s

    def rows(self) -> tuple[Sequence[str], list[tuple[str, ...]]]:
        """Return a table of the fits: a head and a row for each operation."""
        head = ("operation", "ranks", "alpha ms", "speed", "typically off", "at most", "")
        return head, [self._row(name, timing) for name, timing in self.timings.items()]

    def _row(self, name: str, timing: Timing) -> tuple[str, ...]:
        operation, fit = self.cluster.operations[name], timing.fit
        beta_ms = operation.cost.beta_ms
        speed = f"{1e-6 / beta_ms:.4g} {_SPEEDS[timing.unit]}" if beta_ms else "-"
        state = "" if fit.is_good else "no straight line"
        numbers = (f"{operation.cost.alpha_ms:.4f}", speed, f"{fit.typical_share:.1%}", f"{fit.worst_share:.1%}")
        return (name, str(operation.ranks or ""), *numbers, state)


def measure_and_write(out: Path, dtype: str, ranks_per_node: int | None, max_bytes: int) -> Result | None:
    """Measure with all ranks that were launched, or with this process alone, and write a cluster file.

    Args:
        out: the file; on the machine of rank 0.
        dtype: the type that is sent and multiplied, see ``DTYPES``.
        ranks_per_node: the ranks of a node; ``None``: by host names.
        max_bytes: the size of the largest buffer.

    Returns:
        The results on rank 0; ``None`` on the others.

    Raises:
        ValueError: on every rank: an argument that does not fit, or a file that cannot be written; before measuring.
        MeasuringError: on every rank, if one has failed.
    """
    start_s = time.perf_counter()
    with _process_group() as device:
        rank = rank_now()
        sentence = from_first_rank(_why_not_written(out) if rank == 0 else None) or _why_not(ranks_per_node)
        if sentence:
            raise ValueError(sentence)
        topology = find_topology(ranks_per_node)
        one_link = device.type == "cuda" and why_one_link() is not None
        fingerprint = cluster_fingerprint(device, topology, max_ctas=_MAX_CTAS, one_link=one_link)
        lanes = make_lanes(device, one_link=one_link)
        names = ProfileNames(topology, lanes, DTYPES[dtype], max_bytes)
        known = Measurements()
        try:
            with Progress("measuring", len(names.all()), "operations", is_shown=rank == 0) as progress:
                cluster = profile_cluster(
                    *(Measuring(Stopwatch(device), known, progress), topology, lanes, DTYPES[dtype]),
                    max_bytes=max_bytes,
                    max_ctas=_MAX_CTAS,
                    name=out.stem,
                    source=source_of(fingerprint, dtype),
                )
        finally:
            lanes.close()
        if rank != 0:
            return None
        cluster = replace(cluster, dtype=dtype, date=f"{datetime.now(UTC):%Y-%m-%d}", **_of_gpu(device))
        try:
            write_measurements(out, fingerprint, known, cluster)
        except OSError as error:
            raise MeasuringError(f"{out}: cannot be written: {error}") from error
        facts = fingerprint["links"] | {_host_of_rank_0(fingerprint): link_lines(ask_nvidia_smi=True)}
        timings = {each: known.timings[names.of(each)] for each in names.operations}
        return Result(cluster, timings, facts, time.perf_counter() - start_s)


def _of_gpu(device: torch.device) -> dict[str, Any]:
    """Return the fields of a cluster file about its GPUs."""
    if device.type != "cuda":
        return {}
    found = torch.cuda.get_device_properties(device)
    return {"gpu": found.name, "memory_gb": round(found.total_memory / 1e9, 1)}


@contextmanager
def _process_group() -> Iterator[torch.device]:
    """Open the group of all ranks that the launcher has started, and yield this rank's device."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    device = torch.device(accelerator.device_name())
    if not any(name in os.environ for name in _LAUNCHED):
        yield device
        return
    # Compiled at the first process group otherwise, for a collective of inference that is of no use here.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if device.type != "cpu":
        accelerator.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        device = torch.device(accelerator.current_device_name())
    deepspeed.init_distributed(verbose=False)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def _why_not_written(out: Path) -> str | None:
    if out.is_dir():
        return f"--out {out}: is a folder; name a file in it"
    probe = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        return f"--out {out}: cannot be written: {error.strerror or error}"
    return None


def _why_not(ranks_per_node: int | None) -> str | None:
    world_size = world_size_now()
    if ranks_per_node is None or (ranks_per_node > 0 and world_size % ranks_per_node == 0):
        return None
    choices = sizes_that_divide(world_size)
    return f"--ranks-per-node = {ranks_per_node}: must divide the {world_size} ranks; the choices are {choices}"


def _host_of_rank_0(fingerprint: Fingerprint) -> str:
    return next(iter(fingerprint["hosts"].values()))
