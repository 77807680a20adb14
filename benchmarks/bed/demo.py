# SPDX-License-Identifier: Apache-2.0
"""The demo on a cluster on one machine: the main job on 2 nodes of 2 ranks, with stock DeepSpeed's layers and ours.

``make cluster-demo``. The bed is built, used and removed, whatever happens.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import demo  # noqa: E402

from benchmarks.bed.bed import Bed, BedError, cleared_if_killed  # noqa: E402
from benchmarks.bed.job import run_job  # noqa: E402

NAME = "demo"
TIME_LIMIT_S = 240.0


def run(bed: Bed, moe: str, steps: int) -> dict[str, Any]:
    """One run of the main job.

    Returns:
        What it measured (its ``--metrics``).

    Raises:
        SystemExit: it failed; its last lines are printed.
    """
    metrics, log = demo.RUNS / f"cluster_{moe}.json", demo.RUNS / f"cluster_{moe}.log"
    metrics.unlink(missing_ok=True)
    config = ROOT / "ds_configs" / "gpt_moe_small.json"
    job = [str(ROOT / "examples" / "train.py"), "--deepspeed_config", str(config), "--moe", moe]
    job += ["--steps", str(steps), "--metrics", str(metrics), "--save-dir", str(demo.RUNS / f"cluster_{moe}")]
    print(f"{demo.TITLE_OF_RUN[moe]}: {steps} steps on {bed}; log in {log.relative_to(ROOT)}", flush=True)
    with log.open("w") as file:
        status = run_job(bed, job, TIME_LIMIT_S, lambda line: print(line, file=file, flush=True))
    if status or not metrics.exists():
        print("\n".join(log.read_text().splitlines()[-25:]), file=sys.stderr)
        raise SystemExit(f"cluster-demo: the run with {demo.TITLE_OF_RUN[moe]} failed (status {status}); see {log}")
    measured = json.loads(metrics.read_text())
    if bool(measured["chosen"]) != (moe == "fsmoe"):
        raise SystemExit(f"cluster-demo: the run meant for {moe} trained with {measured['moe']}; see {log}")
    return measured


def main() -> int:
    """Exit status 0 if the losses agree and the validation loss fell, 1 if not, 2 if there can be no bed here."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12, help="steps of each run (%(default)s)")
    steps = parser.parse_args().steps
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    demo.RUNS.mkdir(exist_ok=True)
    start = time.monotonic()
    bed = Bed(NAME)
    try:
        bed.up()
    except BedError as error:
        print(f"cluster-demo: {error}", file=sys.stderr)
        return 2
    with cleared_if_killed(NAME):
        text, good = demo.report(run(bed, "deepspeed", steps), run(bed, "fsmoe", steps), steps)
    print(text)
    print(f"cluster-demo: {time.monotonic() - start:.0f} s")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
