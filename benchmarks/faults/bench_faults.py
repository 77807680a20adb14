# SPDX-License-Identifier: Apache-2.0
"""``make soak``, first part: faults that jobs survive. Processes are really killed, delayed and cut off.

Each fault is given to a training job under a real launcher. How long it takes until every process of the job has ended
is measured, who has left a report is looked up, the job is started again as it was, and the losses of all steps on all
ranks are held against those of a job that nothing happened to: bit for bit.

Rows go to ``benchmarks/results/faults.csv``. Links are cut on a cluster of network namespaces (Linux, root, iproute2).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(ROOT))

from benchmarks.bed.bed import BedError, check_machine  # noqa: E402
from benchmarks.faults import fault_cuts  # noqa: E402
from benchmarks.harness.result_files import RESULTS, append_rows, made_with  # noqa: E402
from benchmarks.harness.routing import parsed  # noqa: E402

JOB = ROOT / "benchmarks" / "faults" / "fault_job.py"
NUM_STEPS = 6
LIMIT_S = 15.0
"""So soon after a fault no process of the job may be left."""
START_LIMIT_S = 600.0
KILLS = (
    *("kill in forward", "kill in backward", "kill in a collective", "kill in a save", "kill while measuring"),
    "error",
)
REFUSED = ("other config", "other plan", "other layers")


@dataclass(frozen=True)
class Trial:
    """What is tried.

    Attributes:
        fault: see ``fault_job.py``.
        launcher: ``"deepspeed"`` or ``"torchrun"``; ``"torchrun restarts"`` starts the job again by itself.
        stage: of ZeRO.
        rank: to which it happens.
    """

    fault: str
    launcher: str = "deepspeed"
    stage: int = 1
    rank: int = 1


@dataclass(frozen=True)
class Outcome:
    """How it went.

    Attributes:
        ended_s: from the fault until the last process was gone; ``None``: the job went on.
        reports: ranks that left one.
        resumed_at: the step that the second start began with.
        is_unbroken: whether all losses are those of a job that nothing happened to.
        said: the message of the job, where it is refused.
    """

    ended_s: float | None
    reports: tuple[int, ...]
    resumed_at: int | None
    is_unbroken: bool
    said: str = ""

    def passes(self, trial: Trial, limit_s: float = LIMIT_S) -> bool:
        """Whether it is as it has to be, and was so soon."""
        if trial.fault == "late" or trial.launcher == "torchrun restarts":
            return self.is_unbroken
        if self.ended_s is None or self.ended_s > limit_s or not self.is_unbroken:
            return False
        # Before the engine is there nobody is listening, and an error that all ranks meet says more than a report.
        return trial.fault in REFUSED or bool(self.reports)


def command(trial: Trial, folder: Path, num_steps: int = NUM_STEPS) -> list[str]:
    """What a user would type, with two ranks."""
    fault = {"what": trial.fault, "rank": trial.rank}
    arguments = [str(JOB), str(folder), "--steps", str(num_steps), "--stage", str(trial.stage)]
    arguments += ["--fault", json.dumps(fault)]
    if trial.launcher == "deepspeed":
        # Below those that the kernel gives to connections.
        port = str(random.SystemRandom().randint(15_000, 32_000))
        launcher = str(Path(sys.executable).with_name("deepspeed"))
        return [sys.executable, launcher, "--num_accelerators", "2", "--master_port", port, *arguments]
    restarts = "1" if trial.launcher == "torchrun restarts" else "0"
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", restarts]
    return [sys.executable, "-m", "torch.distributed.run", *options, *arguments]


@contextmanager
def started(arguments: Sequence[str], log: Path) -> Iterator[Job]:
    """A job, of which every process can be told by its environment; all of them are ended at last."""
    name = f"{_NAME}={random.SystemRandom().getrandbits(64)}"
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment |= dict([name.split("=")])
    # Else torchrun keeps its store over restarts, and a restarted job meets the addresses of the processes before it.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with log.open("ab") as out:
        job = Job(arguments, stdout=out, stderr=out, env=environment)
    job.name = name
    try:
        yield job
    finally:
        for each in job.processes():
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        job.wait()


_NAME = "FSMOE_FAULT_JOB"


class Job(subprocess.Popen[bytes]):
    """A launcher and all that comes of it."""

    name = ""

    def processes(self) -> list[int]:
        """That live; ended ones that nobody has looked after do not count."""
        found = []
        for each in Path("/proc").iterdir():
            if each.name.isdigit():
                with suppress(OSError):  # gone meanwhile, or another user's
                    if self.name.encode() in (each / "environ").read_bytes().split(b"\0"):
                        found.append(int(each.name))
        return found


def wait_until(is_so: Callable[[], bool], limit_s: float) -> bool:
    """Whether it came to be so."""
    deadline = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def losses(folder: Path) -> dict[int, dict[int, str]]:
    """Rank -> step -> loss, the last one that was written."""
    found = {}
    for file in sorted((folder / "losses").glob("rank*.txt")):
        rows = (line.split() for line in file.read_text().splitlines())
        found[int(file.stem.removeprefix("rank"))] = {int(step): loss for step, loss in rows}
    return found


def try_it(trial: Trial, folder: Path, expected: dict[int, dict[int, str]], limit_s: float = LIMIT_S) -> Outcome:
    """Give a job a fault, and start it again.

    Args:
        trial: which.
        folder: an empty one.
        expected: losses of a job that nothing happened to.
        limit_s: so soon it has to end; it is watched for longer.
    """
    log, stamp = folder / "log.txt", folder / "fault.txt"
    with started(command(trial, folder), log) as job:
        if not wait_until(lambda: job.poll() is not None or stamp.exists(), START_LIMIT_S):
            raise TimeoutError(f"{trial}: nothing has happened; see {log}")
        restarts = trial.launcher == "torchrun restarts"
        patience_s = START_LIMIT_S if trial.fault == "late" or restarts else 4 * limit_s
        wait_until(lambda: not job.processes() or job.poll() is not None, patience_s)
        wait_until(lambda: not job.processes(), limit_s / 3)
        is_gone, ended_at = not job.processes(), time.time()
        status = job.wait() if is_gone else None
    if not stamp.exists():
        raise RuntimeError(f"{trial}: the job ended before anything happened; see {log}")
    ended_s = None if status == 0 else ended_at - float(stamp.read_text()) if is_gone else float("inf")
    resumed_at = None
    if status != 0:
        before = log.stat().st_size
        latest = folder / "checkpoints" / "latest"
        resumed_at = int(latest.read_text().removeprefix("global_step")) if latest.exists() else 0
        with started(command(trial, folder), log) as job:
            wait_until(lambda: job.poll() is not None, START_LIMIT_S)
            if job.poll() != 0:
                raise RuntimeError(f"{trial}: the second start failed; see {log}, from byte {before}")
    said = next((line for line in log.read_text().splitlines() if "DisagreementError" in line), "")
    return Outcome(ended_s, reports(folder), resumed_at, losses(folder) == expected, said.strip())


def undisturbed(folder: Path, trial: Trial, num_steps: int = NUM_STEPS) -> dict[int, dict[int, str]]:
    """Losses of a job that nothing happens to."""
    nothing = Trial("none", "deepspeed", trial.stage)
    with started(command(nothing, folder, num_steps), folder / "log.txt") as job:
        wait_until(lambda: job.poll() is not None, START_LIMIT_S)
        if job.poll() != 0:
            said = (folder / "log.txt").read_text()[-3000:]
            raise RuntimeError(f"a job without a fault failed; the end of {folder / 'log.txt'}:\n{said}")
    return losses(folder)


def trials(quick: bool) -> list[Trial]:
    """All, or one of each kind."""
    if quick:
        return [Trial("kill in a collective"), Trial("kill in a save", "torchrun restarts", stage=2)]
    found = [Trial(each, launcher) for each in (*KILLS, *REFUSED, "late") for launcher in ("deepspeed", "torchrun")]
    found += [Trial(each, "torchrun restarts", stage=2, rank=0) for each in KILLS]
    return found + [Trial(each, stage=0, rank=0) for each in ("kill in forward", "kill in a save")]


def try_cuts(root: Path) -> Iterator[tuple[Trial, Outcome, float]]:
    """The network between two nodes cut for 3 s, and for good; and the limit within which a job has to end."""
    folders = {name: root / name for name in ("no cut", "cut for 3 s", "cut")}
    for each in folders.values():
        each.mkdir()
    status, _ = fault_cuts.on_two_nodes(JOB, folders["no cut"], 0, losses)
    expected = losses(folders["no cut"])
    if status or not expected:
        raise RuntimeError(f"a job without a cut failed; see {folders['no cut'] / 'log.txt'}")
    folder = folders["cut for 3 s"]
    status, _ = fault_cuts.on_two_nodes(JOB, folder, 3.0, losses)
    unbroken = status == 0 and losses(folder) == expected
    yield Trial("cut for 3 s", "deepspeed --no_ssh"), Outcome(None, reports(folder), None, unbroken), 0.0
    folder = folders["cut"]
    status, ended_s = fault_cuts.on_two_nodes(JOB, folder, None, losses)
    left = reports(folder)
    resumed_at = int((folder / "checkpoints" / "latest").read_text().removeprefix("global_step"))
    again, _ = fault_cuts.on_two_nodes(JOB, folder, 0, losses)
    unbroken = status != 0 and again == 0 and losses(folder) == expected
    yield Trial("cut", "deepspeed --no_ssh"), Outcome(ended_s, left, resumed_at, unbroken), fault_cuts.LIMIT_S


def reports(folder: Path) -> tuple[int, ...]:
    """Ranks that have left one."""
    return tuple(sorted(int(each.stem[4:]) for each in (folder / "fsmoe_reports").glob("rank?.txt")))


def main() -> int:
    """Exit status 0 if every fault was survived."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two of them")
    parser.add_argument("--only", nargs="*", help="faults by name")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parsed(parser, no_routers="it looks at what jobs survive, and at no times that routing could change")
    if not (Path("/proc") / str(os.getpid()) / "environ").exists():
        raise SystemExit("bench_faults.py needs /proc, to see which processes of a job are left")
    table = Table(args.results / "faults.csv")
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for trial, outcome in try_all([each for each in trials(args.quick) if wanted(each.fault, args.only)], root):
            table.add(trial, outcome, LIMIT_S, outcome.passes(trial))
        if not args.quick and wanted("cut", args.only):
            try:
                check_machine()
                for trial, outcome, limit_s in try_cuts(root):
                    in_time = outcome.ended_s is None or outcome.ended_s < limit_s
                    table.add(trial, outcome, limit_s, outcome.is_unbroken and in_time)
            except BedError as error:
                print(f"links are not cut here: {error}")
    return table.end()


def wanted(fault: str, only: Sequence[str] | None) -> bool:
    """Whether it was asked for."""
    return not only or fault in only


def try_all(wanted_trials: Sequence[Trial], root: Path) -> Iterator[tuple[Trial, Outcome]]:
    """One after another."""
    expected: dict[int, dict[int, dict[int, str]]] = {}
    for at, trial in enumerate(wanted_trials):
        if trial.stage not in expected:
            (folder := root / f"undisturbed{trial.stage}").mkdir()
            expected[trial.stage] = undisturbed(folder, trial)
        (folder := root / str(at)).mkdir()
        outcome = try_it(trial, folder, expected[trial.stage])
        if trial.fault == "kill while measuring":
            # Degrees that were measured differ from run to run, and with them the last bits.
            found = losses(folder)
            whole = len(found) == 2 and all(sorted(each) == list(range(NUM_STEPS)) for each in found.values())
            outcome = replace(outcome, is_unbroken=whole)
        yield trial, outcome


class Table:
    """On the screen while it grows, and in a file at the end.

    Args:
        file: of rows.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._rows: list[dict[str, Any]] = []
        self._failed = 0
        print(f"{'fault':24} {'launcher':18} stage rank  {'all ended after':>15}  reports  resumed at  losses")

    def add(self, trial: Trial, outcome: Outcome, limit_s: float, passed: bool) -> None:
        """A row."""
        self._failed += not passed
        ended = "went on" if outcome.ended_s is None else f"{outcome.ended_s:.1f} s"
        words = "unbroken" if outcome.is_unbroken else "BROKEN"
        left = ", ".join(map(str, outcome.reports)) or "-"
        print(
            f"{trial.fault:24} {trial.launcher:18} {trial.stage:5} {trial.rank:4}  {ended:>15}  {left:7}  "
            f"{_shown(outcome.resumed_at):>10}  {words}{'' if passed else '  FAILED'}",
            flush=True,
        )
        facts = asdict(trial) | {"ended_s": "" if outcome.ended_s is None else f"{outcome.ended_s:.2f}"}
        facts |= {"limit_s": limit_s, "reports": " ".join(map(str, outcome.reports))}
        facts |= {"resumed_at": _shown(outcome.resumed_at), "losses": words, "passed": passed}
        self._rows.append(made_with(("torch", "deepspeed")) | facts)

    def end(self) -> int:
        """Write it; 1 if something was not survived."""
        if self._rows:
            append_rows(self._file, tuple(self._rows[0]), self._rows)
        print(f"{len(self._rows) - self._failed} of {len(self._rows)} survived; rows in {self._file}")
        return 1 if self._failed else 0


def _shown(step: int | None) -> str:
    return "-" if step is None else str(step)


if __name__ == "__main__":
    raise SystemExit(main())
