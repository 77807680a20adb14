# SPDX-License-Identifier: Apache-2.0
"""Finds errors, omissions and doubtful numbers in a cluster's file, one sentence each. ``ds_fsmoe clusters --check``
calls it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ds_fsmoe.planning.cluster import Cluster, Operation, cluster_from_json, read_cluster_file
from ds_fsmoe.planning.cluster_schema import COLLECTIVES, LINKS, UNITS, ClusterFile, slope_of
from ds_fsmoe.shapes import wrong_in

Kind = Literal["wrong", "missing", "implausible"]
_SLACK = 1.02
"""By how much a rate may be above what hardware can do: both are rounded."""
_LEAST_SHARE = 0.01
"""The share of what hardware can do under which a number is more likely in another unit."""
_LONG_MS = 100.0
"""The start-up above which a number is more likely in another unit."""
_NEEDED_BY = {
    "all_to_all": "expert parallelism",
    "all_reduce": "data parallelism",
    "all_gather": "model parallelism and expert sharding",
    "reduce_scatter": "model parallelism and expert sharding",
}
_REWORDED: Mapping[str, str] = {
    "memory_gb": "whether a model fits cannot be said",
    "dtype": "it is not known for which numbers the costs of computing hold",
    "peak_tflops": "whether a product is faster than the GPU cannot be checked",
    "link_gb_per_s": "whether a collective is faster than its port cannot be checked",
    "source": "the numbers cannot be judged",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """Holds one sentence about a file, with its kind."""

    kind: Kind
    """``wrong``: the file is refused, or claims what hardware cannot do; ``missing``: it can be read, but says less
    than it could; ``implausible``: it can be, but look again."""
    sentence: str
    """It begins with the field."""


def check_cluster(name_or_path: str) -> tuple[Finding, ...]:
    """Check a cluster's file, of the package or your own.

    Raises:
        ValueError: the name or file does not exist, or the file is not JSON.
    """
    path, data = read_cluster_file(name_or_path)
    if isinstance(data, Mapping) and "operations" not in data and ("model_type" in data or "architectures" in data):
        return (Finding("wrong", "this is a Hugging Face config, not a cluster file; give it to plan --hf-config"),)
    if wrong := wrong_in(data, ClusterFile):
        return tuple(Finding("wrong", each) for each in wrong)
    cluster = cluster_from_json(data, path.stem)
    return (*_missing(data, cluster), *_of_links(cluster), *_of_computing(cluster))


def _missing(data: Mapping[str, Any], cluster: Cluster) -> Iterator[Finding]:
    for name, so in _REWORDED.items():
        if not data.get(name):
            yield Finding("missing", f"{name} is missing: {so}")
    if "contention" not in data:
        yield Finding("missing", "contention is missing: links and computation are taken not to slow each other down")
    if "elementwise" not in cluster.operations:
        yield Finding("missing", "operations.elementwise is missing: norms, activations and the loss take no time")
    for name in UNITS:
        path = f"operations.{name}"
        operation = cluster.operations.get(name)
        if operation is None:
            if "." not in name:
                yield Finding("missing", f"{path} is missing, and every layer needs it")
            elif _has_link(cluster, name):
                needed_by = _NEEDED_BY[name.split(".")[1]]
                yield Finding("missing", f"{path} is missing: {needed_by} over that link cannot be planned")
            continue
        if not operation.source:
            yield Finding("missing", f"{path}.source is missing: say where it was measured, or that it was not")
        if "." in name and operation.ranks is None:
            yield Finding("missing", f"{path}.ranks is missing: it is taken to be the same for every number of ranks")


def _has_link(cluster: Cluster, name: str) -> bool:
    return (cluster.num_nodes if name.startswith("inter") else cluster.gpus_per_node) > 1


def gb_per_s(name: str, operation: Operation) -> float:
    """Return the rate of a collective over a rank's link, in 10^9 bytes per second; 0 if its bytes cost no time.

    An all-reduce counts once: where switches add up, every rank sends its buffer once.
    """
    if operation.cost.beta_ms == 0:
        return 0.0
    share = 1.0 if operation.ranks is None else (operation.ranks - 1) / operation.ranks
    if name.endswith("all_reduce"):
        share = 1.0
    return share / operation.cost.beta_ms * 1e-6


def _of_links(cluster: Cluster) -> Iterator[Finding]:
    for name, operation in cluster.operations.items():
        if "." not in name:
            continue
        path, link = f"operations.{name}", name.split(".")[0]
        rate, port = gb_per_s(name, operation), cluster.link_gb_per_s.get(link)
        says = f"{path}.{slope_of(name)} = {operation.cost.beta_ms:g}"
        if rate == 0:
            yield Finding("implausible", f"{says}: bytes cost nothing")
        elif port is not None and rate > _SLACK * port:
            yield Finding(
                "wrong", f"{says}: is {rate:.4g} GB/s, more than the port carries, link_gb_per_s.{link} = {port:g}"
            )
        elif port is not None and rate < _LEAST_SHARE * port:
            yield Finding(
                "implausible",
                f"{says}: is {rate:.3g} GB/s, under a hundredth of link_gb_per_s.{link} = {port:g}; its unit must be "
                "milliseconds per byte",
            )
        yield from _of_start_up(path, operation)
    for collective in COLLECTIVES:
        pair = [cluster.operations.get(f"{link}.{collective}") for link in LINKS]
        inter, intra = (gb_per_s(collective, each) if each else 0.0 for each in pair)
        if intra and inter and intra < inter:
            yield Finding(
                "implausible",
                f"operations.intra.{collective} is {intra:.4g} GB/s, slower than operations.inter.{collective} at "
                f"{inter:.4g} GB/s: are the two exchanged?",
            )


def _of_start_up(path: str, operation: Operation) -> Iterator[Finding]:
    alpha_ms = operation.cost.alpha_ms
    if alpha_ms > _LONG_MS:
        yield Finding("implausible", f"{path}.alpha_ms = {alpha_ms:g}: a start-up of over 100 ms; its unit must be ms")
    per_rank_ms = operation.alpha_ms_per_rank
    if operation.ranks is not None and per_rank_ms * operation.ranks > 4 * max(alpha_ms, 1e-9):
        yield Finding(
            "implausible",
            f"{path}.alpha_ms_per_rank = {per_rank_ms:g}: {operation.ranks} ranks would take "
            f"{per_rank_ms * operation.ranks:g} ms, and alpha_ms = {alpha_ms:g}",
        )


def _of_computing(cluster: Cluster) -> Iterator[Finding]:
    for name in ("gemm", "attention", "routing"):
        operation = cluster.operations.get(name)
        if operation is None:
            continue
        path, beta_ms = f"operations.{name}", operation.cost.beta_ms
        yield from _of_start_up(path, operation)
        if cluster.peak_tflops is None or beta_ms == 0:
            continue
        tflops = 1e-9 / beta_ms
        says = f"{path}.{slope_of(name)} = {beta_ms:g}: is {tflops:.4g} TFLOP/s"
        if tflops > _SLACK * cluster.peak_tflops:
            yield Finding("wrong", f"{says}, more than the GPU computes, peak_tflops = {cluster.peak_tflops:g}")
        elif tflops < _LEAST_SHARE * cluster.peak_tflops:
            yield Finding(
                "implausible",
                f"{says}, under a hundredth of peak_tflops = {cluster.peak_tflops:g}; its unit must be milliseconds "
                "per floating-point operation",
            )
    gemm = cluster.operations.get("gemm")
    if gemm is not None and gemm.cost.beta_ms == 0:
        yield Finding("implausible", f"operations.gemm.{slope_of('gemm')} = 0: computing costs nothing")
