# SPDX-License-Identifier: Apache-2.0
"""Simulate known models on known clusters from 8 GPUs to thousands: what a step takes under every system, how well it
scales, what limits it, and where an all-to-all that crosses to each node once pays."""

from __future__ import annotations

import argparse
import csv
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_fsmoe.commands.folders import check_folders
from ds_fsmoe.terminal.progress import Progress, followed
from ds_fsmoe.terminal.tables import print_table

if TYPE_CHECKING:
    from ds_fsmoe.planning.scale import Exact, Row
    from ds_fsmoe.planning.scale_layouts import Job

HELP = "known models on known clusters, simulated from 8 GPUs to 4096"
_SIZES = "8..4096"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: which models, clusters and sizes, and where the result goes."""
    parser.add_argument("--model", nargs="+", default=["all"], help="names, or config.json files (all: five of them)")
    parser.add_argument("--cluster", nargs="+", default=["all"], help="names, or JSON files (all: five of them)")
    parser.add_argument("--ranks", default=_SIZES, help=f"numbers of GPUs: 8,64,512 or doubling, {_SIZES} ({_SIZES})")
    parser.add_argument("--samples", type=int, default=1, metavar="B", help="samples per GPU and micro-batch (1)")
    parser.add_argument("--length", type=int, default=4096, metavar="L", help="positions of a sample (4096)")
    parser.add_argument("--micro-batches", type=int, default=1, metavar="N", help="micro-batches of a step (1)")
    parser.add_argument("--zero", type=int, choices=(0, 1, 2), default=2, help="the stage of ZeRO, for memory (2)")
    parser.add_argument("--activation-checkpointing", action="store_true", help="every block is checkpointed")
    parser.add_argument("--presets", nargs="+", help="systems (all)")
    parser.add_argument(
        "--exact",
        choices=("none", "chosen", "all"),
        default="chosen",
        help="of which layouts every layer is planned, rather than one of each kind (chosen)",
    )
    parser.add_argument("--processes", type=int, help="how many processes (one per core)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write scale.csv and scale.json there")
    parser.add_argument("--png", type=Path, metavar="FOLDER", help="draw the pictures there")


def run(args: argparse.Namespace) -> int:
    """Simulate, and print the results."""
    from ds_fsmoe.planning.presets import NAMES, preset
    from ds_fsmoe.planning.scale import ASSUMPTIONS, with_efficiency

    presets = tuple(args.presets or NAMES)
    for name in presets:
        if name not in NAMES:
            preset(name)  # says which there are
    processes = os.cpu_count() or 1 if args.processes is None else args.processes
    if processes < 1:
        raise ValueError(f"--processes = {processes}: must be at least 1")
    jobs = _jobs(args)
    for folder in (args.out, args.png):
        check_folders(folder)
        if folder is not None:
            folder.mkdir(exist_ok=True)
    if args.png is not None:
        from ds_fsmoe.planning.draw import drawing

        drawing()  # says what is missing before the work is done
    began_s = time.perf_counter()
    rows = with_efficiency(_simulated(jobs, presets, min(processes, len(jobs)), args.exact))
    took_s = time.perf_counter() - began_s
    print("assumed:")
    print("\n".join(f"  - {each}" for each in ASSUMPTIONS))
    print_rows(rows)
    print(f"\n{len(jobs)} sizes of models on clusters, {len(rows)} simulated steps in {took_s:.0f} s")
    if args.out is not None:
        _write(rows, args.out)
        print(f"all of them: {args.out / 'scale.csv'}, {args.out / 'scale.json'}")
    if args.png is not None:
        from ds_fsmoe.planning.scale_pictures import draw_all

        print(f"pictures: {', '.join(str(each) for each in draw_all(rows, args.png))}")
    return 0


def sizes_of(text: str) -> tuple[int, ...]:
    """Return the numbers of ranks that a text names: commas between them, or the first and last of a doubling.

    Raises:
        ValueError: none of both, or a last one that doubling does not come to.
    """
    wrong = f"--ranks = {text!r}: must be numbers of GPUs like 8,64,512, or a doubling like {_SIZES}"
    try:
        if ".." not in text:
            found = tuple(int(each) for each in text.split(","))
        else:
            first, last = (int(each) for each in text.split(".."))
            found = tuple(first << step for step in range(32) if first > 0 and first << step <= last)
            if not found or found[-1] != last:
                raise ValueError
    except ValueError as error:
        raise ValueError(wrong) from error
    if min(found) < 1 or len(set(found)) < len(found):
        raise ValueError(wrong)
    return found


def _jobs(args: argparse.Namespace) -> list[Job]:
    from ds_fsmoe.planning.scale import CLUSTERS, MODELS
    from ds_fsmoe.planning.scale_layouts import Job

    models = MODELS if args.model == ["all"] else tuple(args.model)
    clusters = CLUSTERS if args.cluster == ["all"] else tuple(args.cluster)
    sizes = sizes_of(args.ranks)
    return [
        Job(
            *(model, cluster, ranks, args.samples, args.length, args.micro_batches),
            zero=args.zero,
            checkpointing=args.activation_checkpointing,
        )
        for model in models
        for cluster in clusters
        for ranks in sizes
    ]


def _simulated(jobs: Sequence[Job], presets: Sequence[str], processes: int, exact: Exact) -> Iterator[Row]:
    """Yield the rows of all jobs, and say how far that has come."""
    from ds_fsmoe.planning.scale import sweep

    found = sweep(jobs, presets, processes, exact)
    for rows in followed(found, Progress("simulating", len(jobs), "sizes")):
        yield from rows


def print_rows(rows: Sequence[Row]) -> None:
    """Print the choice of each model, cluster and size, with what the other exchange or layout would take."""
    from ds_fsmoe.planning.presets import BEST
    from ds_fsmoe.planning.scale import job_of, limit_of

    chosen = {(*job_of(row), row["preset"]): row for row in rows if row["is_choice"]}
    flat = {job_of(row): row for row in rows if row["preset"] == BEST and row["is_flat_choice"]}
    cells = []
    for (*names, name), row in chosen.items():
        if name != BEST:
            continue
        job = job_of(row)
        others = (chosen.get((*job, each)) for each in ("deepspeed", "tutel"))
        cells.append(
            (
                *names,
                f"{row['ep']} over nodes" if row["ep_over"] == "nodes" else f"{row['ep']} in a node",
                row["alltoall"],
                *("" if other is None else f"{other['step_ms']:.1f}" for other in others),
                f"{row['step_ms']:.1f}",
                f"{row['bound_ms']:.1f}",
                f"{flat[job]['step_ms'] / row['step_ms']:.2f}x",
                f"{row['tokens_per_s_per_gpu']:.0f}",
                f"{row['efficiency']:.0%}",
                limit_of(row),
                "" if row["fits"] is not False else f"no: {row['memory_gb']:.0f} GB",
            )
        )
    heads = ("model", "cluster", "GPUs", "experts", "exchange", "deepspeed ms", "tutel ms", "best ms", "bound ms")
    print()
    print_table((*heads, "over flat", "tokens/s/GPU", "efficiency", "limit", "fits"), cells)


def _write(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    from ds_fsmoe.planning.scale import ASSUMPTIONS

    with open(folder / "scale.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    text = json.dumps({"assumptions": ASSUMPTIONS, "rows": list(rows)}, indent=1)
    (folder / "scale.json").write_text(text + "\n", encoding="utf-8")
