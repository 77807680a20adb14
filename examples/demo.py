# SPDX-License-Identifier: Apache-2.0
"""Runs the main job twice: with stock DeepSpeed's MoE layers, and with ours by default, which are tuned as they train.

Prints one table that compares the two, and writes one page with the losses, the steps and a timeline of both.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from ds_fsmoe import cli
from ds_fsmoe.observing.clock import HOST, Clock
from ds_fsmoe.terminal.progress import Progress
from ds_fsmoe.terminal.tables import Message, Table, print_parts
from ds_fsmoe.tuning.when import STEPS_BEFORE

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "runs"
CONFIG = ROOT / "ds_configs" / "gpt_moe_small.json"
TITLE_OF_RUN = {"deepspeed": "stock DeepSpeed", "fsmoe": "ds_fsmoe"}
# Relative; the same numbers in the same order are expected, so anything but 0 would be a surprise: until the autotuner
# tries layers in chunks, which add up weight gradients chunk by chunk, or unpadded. That rounds otherwise, and training
# makes more of it from step to step.
TOLERANCE, TOLERANCE_IN_CHUNKS = 1e-6, 1e-2
TIME_LIMIT_S = 600
WIDEST = 40
"""Characters of a cell; the log has the rest."""
FEWEST_TRACED = 8
"""Steps of a run that is too short for a timeline: its first ones are slow."""


def free_port() -> int:
    """A port for the ranks to meet at, so that two demos do not get in each other's way."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def num_ranks() -> int:
    """Two, or one where there is a single GPU."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    except FileNotFoundError:
        return 2
    # Without a driver nvidia-smi complains on standard output: only lines that name a GPU count.
    return 1 if sum(line.startswith("GPU ") for line in listed.splitlines()) == 1 else 2


def end(job: subprocess.Popen[str]) -> None:
    """End a launch and its ranks: the launcher hands on an interrupt only, and ended alone leaves them running."""
    with contextlib.suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(job.pid)
        for process in (launcher, *launcher.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def recorded_config(folder: Path, steps: int) -> dict[str, Any]:
    """Return the main job's config with a record in a folder, and its last steps but one traced task by task."""
    config = json.loads(CONFIG.read_text())
    config["fsmoe"] |= {"record": {"dir": str(folder)}}
    if steps > FEWEST_TRACED:
        config["fsmoe"]["trace"] = {"enabled": True, "start_step": steps - 6, "num_steps": 5}
    return config


def run(moe: str, steps: int, host: Clock = HOST) -> dict[str, Any]:
    """One launch of the main job.

    Returns:
        What the main job measured (its ``--metrics``).

    Raises:
        SystemExit: it failed or took too long, and its last lines are printed; or it trained with the other layers.
    """
    metrics = RUNS / f"{moe}.json"
    metrics.unlink(missing_ok=True)
    recorded = RUNS / "demo" / moe
    shutil.rmtree(recorded, ignore_errors=True)
    recorded.mkdir(parents=True)
    config = recorded / "ds_config.json"
    config.write_text(json.dumps(recorded_config(recorded, steps), indent=1))
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", str(num_ranks())]
    command += ["--master_port", str(free_port()), str(ROOT / "examples" / "train.py")]
    command += ["--deepspeed_config", str(config), "--moe", moe]
    command += ["--steps", str(steps), "--metrics", str(metrics), "--save-dir", str(RUNS / f"checkpoints_{moe}")]
    log = RUNS / f"{moe}.log"
    is_done, is_late = threading.Event(), threading.Event()

    def end_when_late() -> None:
        if not host.wait(is_done, TIME_LIMIT_S):
            is_late.set()
            end(job)

    print(f"demo: training with {TITLE_OF_RUN[moe]}; its log is {os.path.relpath(log)}", flush=True)
    with (
        log.open("w") as file,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job,
        Progress(f"demo: {TITLE_OF_RUN[moe]}", steps, say=lambda line: print(line, flush=True)) as progress,
    ):
        # An interrupted demo does not wait for it.
        threading.Thread(target=end_when_late, daemon=True).start()
        for line in job.stdout:
            file.write(line)
            file.flush()
            seen = re.match(r"step (\d+)/", line)
            if seen:
                progress.reached(int(seen.group(1)), line[seen.end(1) :].partition(": ")[2].rstrip())
        is_done.set()
    if job.returncode or not metrics.exists():
        print("\n".join(log.read_text().splitlines()[-25:]), file=sys.stderr)
        what = f"took longer than {TIME_LIMIT_S} s" if is_late.is_set() else f"failed (exit status {job.returncode})"
        raise SystemExit(f"demo: the run with {TITLE_OF_RUN[moe]} {what}; see {log}")
    measured = json.loads(metrics.read_text())
    # Two runs of the same layers would agree as well, and show nothing.
    if bool(measured["chosen"]) != (moe == "fsmoe"):
        raise SystemExit(f"demo: the run meant for {TITLE_OF_RUN[moe]} trained with {measured['moe']}; see {log}")
    return measured


def relative_difference(stock: float, ours: float) -> float:
    """0 for the same number only; infinite if one is not finite, since NaN would pass every comparison unseen."""
    if not (math.isfinite(stock) and math.isfinite(ours)):
        return math.inf
    return 0.0 if stock == ours else abs(ours - stock) / max(abs(stock), abs(ours))


def compared_rows(stock: dict[str, Any], ours: dict[str, Any]) -> tuple[list[tuple[str, str, str, str]], float]:
    """Rows of the table, and the largest relative difference of two losses, of all steps and not only those shown."""
    rows = []
    last = len(stock["losses"]) - 1
    named = [("validation before", stock["validation_first"], ours["validation_first"])]
    named += [
        (f"loss, step {i + 1}", stock["losses"][i], ours["losses"][i])
        for i in sorted({0, last // 4, last // 2, 3 * last // 4, last})
    ]
    named += [("validation after", stock["validation_last"], ours["validation_last"])]
    for name, a, b in named:
        difference = relative_difference(a, b)
        rows.append((name, f"{a:.6f}", f"{b:.6f}", f"{difference:.1e}" if difference else "same"))
    every = list(zip(stock["losses"], ours["losses"], strict=True)) + [(a, b) for _, a, b in named]
    rows += [
        (f"runs: {name}", "-", textwrap.shorten(value, WIDEST, placeholder=" ..."), "")
        for name, value in ours["chosen"].items()
        if name != "autotune"
    ]
    return rows, max(relative_difference(a, b) for a, b in every)


def main() -> int:
    """Exit status 0 if the losses agree and the validation loss fell, 1 if not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100, help="steps of each run (%(default)s)")
    steps = parser.parse_args().steps
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    RUNS.mkdir(exist_ok=True)
    start = time.monotonic()
    stock, ours = run("deepspeed", steps), run("fsmoe", steps)

    found, good = report(stock, ours, steps)
    print_parts(found.parts, sys.stdout)
    (RUNS / "demo.txt").write_text(found + "\n")
    print(f"demo: {time.monotonic() - start:.0f} s; the table is in {os.path.relpath(RUNS / 'demo.txt')}")
    # What is missing to draw it is said, and changes nothing about the verdict.
    cli.main(["report", os.path.relpath(RUNS / "demo")])
    return 0 if good else 1


def described(difference: float) -> str:
    """Say in words what two runs differ by."""
    return "the same, bit for bit" if difference == 0 else f"largest relative difference {difference:.1e}"


def report(stock: dict[str, Any], ours: dict[str, Any], steps: int) -> tuple[Message, bool]:
    """The table with a verdict, and whether the losses agree and the validation loss fell."""
    rows, difference = compared_rows(stock, ours)
    exact = min(steps, STEPS_BEFORE)
    early = max(relative_difference(a, b) for a, b in zip(stock["losses"][:exact], ours["losses"][:exact], strict=True))
    agree = early <= TOLERANCE and difference <= (TOLERANCE_IN_CHUNKS if ours["is_tuned"] else TOLERANCE)
    since = ", with layers in chunks or unpadded tried or run from then on" if ours["is_tuned"] else ""
    fell = all(each["validation_last"] < each["validation_first"] for each in (stock, ours))
    lines = [
        "",
        Table(("", TITLE_OF_RUN["deepspeed"], TITLE_OF_RUN["fsmoe"], "difference"), rows),
        "",
        f"Losses of the first {exact} steps: {described(early)}; of all {steps}{since}: "
        f"{described(difference)}, which is {'as' if agree else 'NOT AS'} expected. Validation loss "
        f"{'fell' if fell else 'DID NOT FALL'}.",
        f"autotune: {ours['chosen']['autotune']}",
        *(f"  {each}" for each in ours["hints"]),
    ]
    return Message(lines), agree and fell


if __name__ == "__main__":
    raise SystemExit(main())
