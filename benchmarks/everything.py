# SPDX-License-Identifier: Apache-2.0
"""``make bench`` and ``make bench-full``: the benchmarks one after another, on a bed of their own, then the report.

Beds are built and removed by this. One benchmark that fails does not keep the others from running; the exit status
says so.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(ROOT))

from benchmarks.bed.bed import Bed, BedError, cleared_if_killed  # noqa: E402
from benchmarks.bed.job import run_job  # noqa: E402
from benchmarks.harness.result_files import RESULTS  # noqa: E402

# In --full without the arguments, which make them short.
ON_THE_BED = (
    ("cases/bench_operations.py", "--steps 3 --only 0"),
    ("cases/bench_layer.py", "--blocks 2 --only 0"),
    ("cases/bench_interference.py", "--steps 20"),
    ("cases/bench_timeline.py", ""),
)
NUM_LAYERS, NUM_LAYERS_LIKE_TABLE_2, NUM_CHOICES, NUM_INFERENCE, NUM_HALVES = 24, 12, 5, 6, 7
ALONE_IN_NODES: dict[str, Any] = {"nodes": 4, "ranks_per_node": 1, "inter": "50mbit"}
ONLY_IN_FULL = (
    *(
        "cases/bench_models.py",
        "cases/bench_models.py --only short long",
        "cases/bench_layer.py --ablation --only 1 4 13",
    ),
    *(
        "cases/bench_layer.py --skew --only 2",
        "cases/bench_gates.py",
        "cases/bench_pipeline.py",
        "cases/bench_alltoall.py",
    ),
    *("cases/bench_gradients.py", "cases/bench_autotune.py", "cases/bench_from_trace.py", "cases/bench_wire.py"),
    *("cases/bench_rows.py", "cases/bench_bed.py"),
    *("cases/bench_once.py", "cases/bench_levels.py", "cases/bench_fp8.py", "cases/bench_lina.py"),
    *(f"cases/bench_choice.py --only {number}" for number in range(NUM_CHOICES)),
    *(f"cases/bench_choice.py --old-grid --only {number}" for number in range(NUM_LAYERS)),
)
ON_OTHER_BEDS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"mode": "shared"}, "cases/bench_layer.py --only 1 4 13"),
    *(({"mode": "shared"}, f"cases/bench_choice.py --only {number}") for number in range(NUM_CHOICES)),
    ({"nodes": 3}, "cases/bench_models.py --only mixtral"),
    ({"nodes": 4}, "cases/bench_models.py --only mixtral"),
    ({"nodes": 4, "ranks_per_node": 1, "inter": "50mbit"}, "cases/bench_stages.py"),
    *(
        ({"intra": "50mbit"}, f"cases/bench_layer.py --table2 --only {number}")
        for number in range(NUM_LAYERS_LIKE_TABLE_2)
    ),
    *(
        (
            ALONE_IN_NODES | {"inter": "100mbit", "intra": "400mbit"},
            f"cases/bench_placement.py --only 0 --routing {name}",
        )
        for name in ("hot_rank", "zipf_1.5", "rotating", "olmoe")
    ),
    *(
        (ALONE_IN_NODES | {"nodes": 2, "inter": "100mbit"}, f"cases/bench_halves.py --only {n}")
        for n in range(NUM_HALVES)
    ),
    *((ALONE_IN_NODES, f"cases/bench_inference.py --only {number}") for number in range(NUM_INFERENCE)),
)
"""Only in --full: links that contend, 6 and 8 ranks, pipeline stages, long traffic inside nodes, nodes of one rank."""
BY_THEMSELVES = (
    ("cases/bench_ops.py", "--tokens 2048 --choices 2 --blocks 4"),
    ("cases/bench_experts.py", "--budget 1"),
    ("cases/bench_split_plan.py", "--quick"),
)


def main() -> int:
    """Exit status 0 if every benchmark ran, 1 if one did not, 2 if there can be no bed here."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="every case of every benchmark (hours)")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    failed, start_s = [], time.monotonic()
    on_the_bed = [name if args.full else f"{name} {short}" for name, short in ON_THE_BED]
    if args.full:
        # A job for each case, because of what the groups of earlier ones would cost.
        on_the_bed.remove("cases/bench_layer.py")
        on_the_bed += [f"cases/bench_layer.py --only {number}" for number in range(NUM_LAYERS)]
    on_the_bed += ONLY_IN_FULL if args.full else ()
    beds = [({}, job) for job in on_the_bed] + list(ON_OTHER_BEDS if args.full else ())
    try:
        for options, jobs in itertools.groupby(beds, key=lambda each: each[0]):
            bed = Bed("bench", **{"inter": "25mbit", "intra": "100mbit"} | options)
            bed.up()
            with cleared_if_killed(bed.name):
                for _, job in jobs:
                    print(f"== {job}, {bed}", flush=True)
                    script, *rest = job.split()
                    command = [str(ROOT / "benchmarks" / script), *rest, "--results", str(args.results)]
                    if run_job(bed, command, None if args.full else 400.0):
                        failed.append(job)
    except BedError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    for name, short in BY_THEMSELVES:
        print(f"== {name} {'' if args.full else short}", flush=True)
        command = [sys.executable, str(ROOT / "benchmarks" / name), *([] if args.full else short.split())]
        command += ["--results", str(args.results)]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            failed.append(name)
    subprocess.run([sys.executable, "-m", "benchmarks.report", "--results", str(args.results)], cwd=ROOT, check=False)
    print(f"bench: {time.monotonic() - start_s:.0f} s; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
