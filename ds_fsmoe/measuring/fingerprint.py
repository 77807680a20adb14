# SPDX-License-Identifier: Apache-2.0
"""The conditions that measurements hold for: hosts, rank placement, processors, links and versions, in JSON's types."""

from __future__ import annotations

import platform
import socket
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ds_fsmoe.distributed import nccl
from ds_fsmoe.distributed.fail_together import NCCL_BACKENDS, on_every_rank
from ds_fsmoe.distributed.topology import Topology, world_size_now
from ds_fsmoe.measuring.hardware import link_lines
from ds_fsmoe.versions import VERSION

Fingerprint = dict[str, Any]


def cluster_fingerprint(
    device: torch.device,
    topology: Topology,
    root: Path = Path("/"),
    *,
    max_ctas: int | None = None,
    one_link: bool = False,
) -> Fingerprint:
    """The cluster this job runs on, the same on every rank. Collective over all ranks of the job.

    What measurements depend on besides (sizes, types, layers), their names say.

    Args:
        device: of this rank; on a GPU it has to be set by now, because NCCL carries the texts.
        topology: of the job, as it was found or is asked for.
        root: where this host tells of itself; for tests.
        max_ctas: of the communicators that are measured, where they are NCCL's.
        one_link: whether the links take turns there.
    """
    own = {
        "host": socket.gethostname(),
        "device": name_of(device, root),
        "threads": torch.get_num_threads() if device.type == "cpu" else 0,
        "links": link_lines(root, cuda=device.type == "cuda"),
    }
    of_ranks = on_every_rank(own)
    links = {each["host"]: each["links"] for each in reversed(of_ranks)}
    found: Fingerprint = {
        "hosts": by_ranks([each["host"] for each in of_ranks]),
        "nodes": by_ranks([str(node) for node in topology.node_of_rank]),
        "ranks_per_node": list(topology.node_sizes),
        "devices": by_ranks([each["device"] for each in of_ranks]),
        "links": {host: links[host] for host in sorted(links)},
        "versions": {"torch": str(torch.__version__), "deepspeed": _version("deepspeed"), "ds_fsmoe": VERSION},
        "backend": _backend(),
    }
    if device.type == "cuda":
        # Times that an earlier version took by the host's clock are of another kind.
        found["clock"] = "of the device"
        found["nccl"] = {"max_ctas": max_ctas, "one_link": one_link}
    if device.type == "cpu":
        found["threads"] = by_ranks([str(each["threads"]) for each in of_ranks])
    return found


def source_of(fingerprint: Fingerprint, dtype: str) -> str:
    """Return a sentence about the source of numbers that were measured under these conditions.

    Args:
        fingerprint: the conditions.
        dtype: the type in which products were measured, by name.
    """
    devices = ", ".join(dict.fromkeys(fingerprint["devices"].values()))
    threads = "/".join(dict.fromkeys(fingerprint.get("threads", {}).values()))
    hosts = list(dict.fromkeys(fingerprint["hosts"].values()))
    links = fingerprint["links"][hosts[0]]
    parts = (
        f"measured by ds_fsmoe {VERSION} on {datetime.now(UTC):%Y-%m-%d}",
        f"{world_size_now()} ranks of {devices}{threads and f' ({threads} threads)'}, {dtype}",
        f"hosts {', '.join(hosts[:8])}{' and more' if len(hosts) > 8 else ''}",
        f"torch {fingerprint['versions']['torch']}, {fingerprint['backend']}",
        *([f"links of {hosts[0]}: {' | '.join(links)}"] if links else []),
    )
    return "; ".join(parts)


def by_ranks(values: Sequence[str]) -> dict[str, str]:
    """``{"0-1": "node0", "2": "node1"}``: runs of ranks with the same value."""
    found: dict[str, str] = {}
    first = 0
    for rank, value in enumerate(values):
        if rank + 1 == len(values) or values[rank + 1] != value:
            found[str(rank) if rank == first else f"{first}-{rank}"] = value
            first = rank + 1
    return found


def name_of(device: torch.device, root: Path = Path("/")) -> str:
    """Return the model of a GPU or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _backend() -> str:
    if world_size_now() == 1:
        return "none"
    name = str(dist.get_backend())
    return f"{name} {'.'.join(map(str, nccl.version()))}" if name in NCCL_BACKENDS else name


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # raised here, it would leave the other ranks waiting
        return "not installed"
