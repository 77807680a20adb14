# SPDX-License-Identifier: Apache-2.0
"""Lists the clusters in the package, or checks cluster files for errors, missing numbers and doubtful numbers."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ds_fsmoe.terminal.tables import print_table

if TYPE_CHECKING:
    from ds_fsmoe.planning.cluster import Cluster

HELP = "list the clusters that plan knows, and check cluster files"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("--check", nargs="+", metavar="FILE", help="check cluster files (or names)")
    parser.add_argument("--sources", action="store_true", help="print the source of each number")


def run(args: argparse.Namespace) -> int:
    """List the clusters, or check files. Return 1 if a file is wrong, otherwise 0."""
    from ds_fsmoe.planning.cluster import load_cluster, names

    if args.check is not None:
        wrong = [name for name in args.check if _check(name)]
        return 1 if wrong else 0
    clusters = [load_cluster(name) for name in names()]
    heads = ("cluster", "nodes x GPUs", "GPU", "memory GB", "type", "intra GB/s", "inter GB/s", "TFLOP/s")
    print_table(heads, [_row(each) for each in clusters])
    print("\nGB/s: all-to-all per GPU's share of the link; TFLOP/s: a large matrix product")
    for each in clusters:
        print(f"\n{each.name}: {each.source}")
        if args.sources:
            for name, operation in each.operations.items():
                print(f"  {name}: {operation.source}")
    return 0


def _row(cluster: Cluster) -> tuple[str, ...]:
    from ds_fsmoe.offline.plan.cluster_check import gb_per_s

    rates = {
        link: gb_per_s(name, cluster.operations[name]) if name in cluster.operations else 0.0
        for link in ("intra", "inter")
        for name in (f"{link}.all_to_all",)
    }
    gemm = cluster.operations.get("gemm")
    tflops = 1e-9 / gemm.cost.beta_ms if gemm is not None and gemm.cost.beta_ms else 0.0
    return (
        cluster.name,
        f"{cluster.num_nodes} x {cluster.gpus_per_node}",
        cluster.gpu,
        "" if cluster.memory_gb is None else f"{cluster.memory_gb:g}",
        cluster.dtype or "",
        *(f"{rates[link]:.3g}" for link in ("intra", "inter")),
        f"{tflops:.3g}",
    )


def _check(name: str) -> bool:
    """Print the findings about a file, and return True if one of them is an error."""
    from ds_fsmoe.offline.plan.cluster_check import check_cluster

    findings = check_cluster(name)
    for finding in findings:
        print(f"{name}: {finding.kind}: {finding.sentence}")
    if not findings:
        print(f"{name}: no problems found")
    return any(finding.kind == "wrong" for finding in findings)
