# SPDX-License-Identifier: Apache-2.0
"""Measures the cluster that it runs on, and writes a file for ``ds_fsmoe plan --cluster``. Started alone it measures
computation on one rank. Started by a launcher, like a training script, it measures the links as well: ``deepspeed
--module ds_fsmoe profile --out FILE``, or ``torchrun ... -m ds_fsmoe profile --out FILE``.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ds_fsmoe.terminal.screen import RED, print_coloured
from ds_fsmoe.terminal.tables import print_table

if TYPE_CHECKING:
    from ds_fsmoe.measuring.profile_job import Result

HELP = "measure the links and the computation of this cluster, without training, for plan --cluster"
_LEAST_BYTES = 1 << 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help=("cluster file to write (JSON, by rank 0)")
    )
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="dtype of tokens and weights (fp32)"
    )
    parser.add_argument("--ranks-per-node", type=int, metavar="N", help="ranks per node (ranks of one host name)")
    parser.add_argument(
        "--max-bytes", type=int, default=1 << 26, metavar="N", help=("largest buffer that is sent, in bytes (67108864)")
    )


def run(args: argparse.Namespace) -> int:
    """Measure the cluster, write the file, and print the result."""
    if args.max_bytes < _LEAST_BYTES:
        raise ValueError(f"--max-bytes = {args.max_bytes}: must be at least {_LEAST_BYTES}")
    from ds_fsmoe.measuring.profile_job import MeasuringError, measure_and_write

    try:
        result = measure_and_write(args.out, args.dtype, args.ranks_per_node, args.max_bytes)
    except ValueError:
        if _is_first():
            raise
        return 2
    except MeasuringError as error:
        if _is_first():
            print_coloured(f"ds_fsmoe profile: error: {error}", RED)
        return 1
    if result is not None:
        _print(result, args.out)
    return 0


def _is_first() -> bool:
    """Return True if this rank prints. All ranks have the same result, so one prints it."""
    return os.environ.get("RANK", "0") == "0"


def _print(result: Result, out: Path) -> None:
    cluster, (head, rows) = result.cluster, result.rows()
    nodes = f"{cluster.num_nodes} node{'s' if cluster.num_nodes > 1 else ''}"
    print(f"{nodes} of {cluster.gpus_per_node} rank{'s' if cluster.gpus_per_node > 1 else ''}")
    for host, lines in result.facts.items():
        for line in lines:
            print(f"  {host}: {line}")
    print()
    print_table(head, rows)
    print()
    slowed, links = cluster.contention, {name.split(".")[0] for name in cluster.operations if "." in name}
    if not links:
        print("one rank has no links: only computation was measured; use a launcher to measure a cluster")
    if len(links) > 1:
        print(f"with both links busy, transfers take {1 + slowed.links:.2f} times as long")
    if links:
        beside = (
            f"computation takes {1 + slowed.compute:.2f} times as long, and transfers {1 + slowed.traffic:.2f} times"
        )
        print(f"computation and transfers at the same time: {beside}")
    print(f"a task costs the host {1e3 * cluster.host_ms:.1f} us")
    print(f"{out}: written after {result.took_s:.1f} s: ds_fsmoe plan --cluster {out} ...")
