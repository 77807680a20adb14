# SPDX-License-Identifier: Apache-2.0
"""Finds out on one GPU what is right and how fast it is: ``python -m benchmarks.gpu.run --budget 560 --out DIR``.

Each stage is a process of its own with a limit, so that a crash, a hang or a lost device ends one stage only. Stages
whose times matter run alone. What failed is run again at the end with ``CUDA_LAUNCH_BLOCKING=1``, which names the line.
``summary.md`` and ``summary.json`` are written anew after each stage. ``--device cpu --small`` tries the stages.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu.checks import BAD, LOST, last_of, start, tail
from benchmarks.harness.result_files import commit
from ds_fsmoe.files.whole_files import write_whole

BUDGET_S = 560.0
"""The budget for which the stages' limits are meant."""
MOST_STARTS, LEAST_S, AGAIN_S = 4, 20.0, 60.0
"""How often a stage is started; below what time it is not started again; the limit of what failed, run again."""
SETTINGS = {"PYTHONUNBUFFERED": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Stage:
    """Describes a part of a run. Stages of one group run beside each other."""

    name: str
    group: int
    limit_s: float
    """With a budget of BUDGET_S."""
    why: str
    by_default: bool = True
    module: str = ""
    """With a function ``run(checks)``; that of its name unless given."""


STAGES = (
    Stage("facts", 0, 100, "versions, tools, the GPU; ops compiled for it and for the CPU"),
    Stage("smoke", 1, 110, "ops, a layer, an engine, Hugging Face models: ours against stock"),
    Stage("gpu_tests", 2, 165, "pytest -m gpu, file by file"),
    Stage("parity", 2, 150, "families, ZeRO, types, presets and degrees on one rank, against stock"),
    Stage("nccl", 2, 160, "2 and 4 ranks on this GPU, over NCCL where it takes them"),
    Stage("sanitize", 2, 150, "memcheck, racecheck, initcheck, synccheck", module="benchmarks.gpu.gpu_tests"),
    Stage("speed", 3, 105, "one layer at real sizes: ours, Hugging Face's, stock"),
    Stage("model", 4, 80, "training steps of whole models, stock and ours"),
    Stage("links", 5, 70, "every preset's plan on streams beside emulated links"),
    Stage("trace", 6, 40, "a profile of training steps", module="benchmarks.gpu.model"),
    Stage("crash", 2, 110, "layers and refusals, each in a process", False, "benchmarks.gpu.gpu_tests"),
)


def limits(stages: Sequence[Stage], budget_s: float) -> dict[str, float]:
    """Return the limit of each stage: in proportion to the budget, and longer where few stages share it."""
    longest = {one.group: max(each.limit_s for each in stages if each.group == one.group) for one in stages}
    scale = budget_s / min(BUDGET_S, sum(longest.values()))
    return {each.name: each.limit_s * scale for each in stages}


@dataclass
class Job:
    """Runs one stage, and starts it again behind a check that has ended it."""

    stage: Stage
    folder: Path
    settings: Mapping[str, Any]
    """Those of its checks."""
    until_s: float
    """By the monotonic clock."""
    variables: Mapping[str, str] = field(default_factory=dict)
    status: str = ""
    took_s: float = 0.0
    process: subprocess.Popen | None = None
    starts: int = 0

    def start(self) -> None:
        """Start the stage's process."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._mark, self.starts = uuid.uuid4().hex, self.starts + 1
        limit_s = self.until_s - time.monotonic()
        settings = json.dumps({"out": str(self.folder), "limit_s": limit_s} | dict(self.settings))
        command = ["-m", "benchmarks.gpu.checks", self.stage.module or f"benchmarks.gpu.{self.stage.name}", settings]
        variables = SETTINGS | dict(self.variables) | {"FSMOE_STAGE": self._mark}
        self.process = start(command, self.folder / "log.txt", **variables)

    def is_over(self, now_s: float) -> bool:
        """Return whether the stage has ended. At its limit it is ended."""
        assert self.process is not None
        code, left_s = self.process.poll(), self.until_s - now_s
        if code is None and left_s > 0:
            return False
        self.end()
        if code is not None and (code == LOST or code < 0) and self.starts < MOST_STARTS and left_s > LEAST_S:
            self.start()
            return False
        self.status = {None: "ended at its limit", 0: "ok"}.get(code, f"exit status {code}")
        self.status += f", after {self.starts} starts" if self.starts > 1 else ""
        return True

    def end(self) -> None:
        """End what is left of the stage: its processes are asked, and then killed."""
        for number, grace_s in ((signal.SIGTERM, 4.0), (signal.SIGKILL, 2.0)):
            for each in self._processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each, number)
            until_s = time.monotonic() + grace_s
            while self._processes() and time.monotonic() < until_s:
                time.sleep(0.05)

    def checks(self, file: str = "checks.jsonl") -> dict[str, dict[str, Any]]:
        """Return the last word on each check by its name."""
        return last_of(self.folder / file)

    def bad(self) -> list[dict[str, Any]]:
        """Return the checks that are not right."""
        return [each for each in self.checks().values() if each["status"] in BAD]

    def _processes(self) -> list[int]:
        """Return the stage's processes, which have its mark in their environment."""
        mark, found = f"FSMOE_STAGE={self._mark}".encode(), []
        if self.process is not None:
            self.process.poll()  # one that has ended goes
        for each in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (each / "environ").read_bytes().split(b"\0"):
                    found.append(int(each.name))
        return found


def write_summary(out: Path, jobs: Sequence[Job], used_s: float, budget_s: float) -> None:
    """Write what came of the stages until now."""
    lines = ["# A run on a GPU", "", f"Commit {commit()}, {datetime.now(UTC):%Y-%m-%d %H:%M}.", ""]
    lines += [
        "| stage | what came of it | seconds | ok | wrong | failed | skipped |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    plain, said, tables = [], [], []
    for job in jobs:
        checks, again = job.checks(), job.checks("blocking.jsonl")
        counts = dict.fromkeys(("ok", "wrong", "failed", "skipped"), 0)
        for each in checks.values():
            counts[each["status"] if each["status"] in counts else "failed"] += 1
        cells = (job.stage.name, job.status or "under way", f"{job.took_s:.0f}", *map(str, counts.values()))
        lines.append(f"| {' | '.join(cells)} |")
        about = {"stage": job.stage.name, "status": job.status, "seconds": round(job.took_s, 1)}
        plain.append(about | {"checks": list(checks.values()), "again": list(again.values())})
        for each in job.bad():
            words = (each.get("said") or str(each.get("facts"))).strip().splitlines() or [""]
            then = f" With every launch waited for: {again[each['name']]['status']}." if each["name"] in again else ""
            said.append(f"- **{job.stage.name}: {each['name']}** ({each['status']}): {words[-1][:300]}{then}")
        if job.status.startswith("e"):  # "exit status", "ended"
            said.append(f"- **{job.stage.name}** {job.status}: {tail(job.folder / 'log.txt').strip()[-300:]}")
        if (job.folder / "table.md").exists():
            tables += ["", f"## {job.stage.name}", "", (job.folder / "table.md").read_text().strip()]
    lines += ["", f"{used_s:.0f} s of {budget_s:.0f}.", "", "## Wrong or failed", "", *(said or ["Nothing."]), *tables]
    write_whole(out / "summary.md", "\n".join(lines) + "\n")
    write_whole(out / "summary.json", json.dumps({"used_s": round(used_s, 1), "stages": plain}, indent=1))


@dataclass
class Run:
    """Runs stages, group by group, and then once more what failed."""

    out: Path
    budget_s: float
    settings: Mapping[str, Any]
    """Those of all checks."""
    jobs: list[Job] = field(default_factory=list)

    def __call__(self, stages: Sequence[Stage]) -> list[Job]:
        """Return what came of each stage."""
        self._began_s = time.monotonic()
        try:
            for group in sorted({each.group for each in stages}):
                # What earlier stages have left is for the later ones.
                limit_of = limits([each for each in stages if each.group >= group], self._left_s())
                beside = []
                for each in (each for each in stages if each.group == group):
                    limit_s = min(self._left_s(), limit_of[each.name])
                    job = Job(each, self.out / each.name, self.settings, time.monotonic() + limit_s)
                    self.jobs.append(job)
                    if limit_s > min(LEAST_S, limit_of[each.name]) / 2:
                        self._say(f"{each.name}: {each.why}")
                        job.start()
                        beside.append(job)
                    else:
                        job.status = "no time left"
                self._wait_for(beside)
            if self.settings["device_type"] == "cuda":
                self._again()
        finally:
            for job in self.jobs:
                if job.process is not None and not job.status:
                    job.status = "ended with the run"
                    job.end()
            self._write()
        return self.jobs

    def _left_s(self) -> float:
        return self.budget_s - (time.monotonic() - self._began_s)

    def _say(self, words: str) -> None:
        print(f"{self.budget_s - self._left_s():6.1f} s  {words}", flush=True)

    def _write(self) -> None:
        write_summary(self.out, self.jobs, self.budget_s - self._left_s(), self.budget_s)

    def _wait_for(self, beside: Sequence[Job]) -> None:
        began_s, beside = time.monotonic(), list(beside)
        while beside:
            time.sleep(0.1)
            for job in [each for each in beside if each.is_over(time.monotonic())]:
                beside.remove(job)
                job.took_s = time.monotonic() - began_s
                self._say(f"{job.stage.name}: {job.status}, {len(job.bad())} not right")
                self._write()

    def _again(self) -> None:
        for job in self.jobs:
            names = [each["name"] for each in job.bad() if each["status"] != "wrong"][:12]
            if names and self._left_s() > LEAST_S:
                self._say(f"{job.stage.name}: again, with every launch waited for")
                settings = dict(self.settings) | {"only": names, "file": "blocking.jsonl"}
                until_s = time.monotonic() + min(AGAIN_S, self._left_s())
                variables = {"CUDA_LAUNCH_BLOCKING": "1", "TORCH_SHOW_CPP_STACKTRACES": "1"}
                again = Job(job.stage, job.folder, settings, until_s, variables)
                again.start()
                self._wait_for([again])


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if all is right, 1 if something is not, 2 if there is no such stage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds for everything (%(default)s)")
    parser.add_argument("--stages", help="names, with commas; else all but those by name only")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="few and small cases, to try the stages")
    parser.add_argument("--out", type=Path, required=True, help="a new folder: summary, rows, the stages' files")
    parser.add_argument("--nccl", default="", help="a library of NCCL 2.30 or later, if torch's own is older")
    args = parser.parse_args(arguments)
    names = args.stages.split(",") if args.stages else [each.name for each in STAGES if each.by_default]
    if unknown := sorted(set(names) - {each.name for each in STAGES}):
        there = ", ".join(each.name for each in STAGES)
        parser.error(f"--stages {', '.join(unknown)}: there is no such stage; there are {there}")
    if args.out.exists() and any(args.out.iterdir()):
        parser.error(f"--out {args.out}: it is not empty; name a new folder")
    os.environ["DS_ACCELERATOR"] = args.device
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(args.out.resolve() / "extensions"))  # built once for all
    for each in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(each, None)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    settings = {"device_type": args.device, "small": args.small, "nccl": args.nccl}
    jobs = Run(args.out.resolve(), args.budget, settings)([each for each in STAGES if each.name in names])
    print((args.out / "summary.md").read_text(), flush=True)
    return int(any(job.bad() or not job.status.startswith("ok") for job in jobs))


if __name__ == "__main__":
    raise SystemExit(main())
