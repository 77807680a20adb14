# SPDX-License-Identifier: Apache-2.0
"""What the stages of a run share: checks that are noted one by one, times, rows, processes."""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LOST = 3
"""Exit status of a stage whose device no longer answers."""
BAD = ("wrong", "error", "lost", "begun")
"""What may have come of a check that is not right."""


class SkipCheckError(Exception):
    """Raised by a check that cannot be done here."""


class WrongError(Exception):
    """Raised by a check whose numbers are wrong."""


@dataclass
class Checks:
    """Does the checks of one stage. Each is noted in a file before it begins and when it has ended."""

    out: str
    """The stage's folder, in that of the run."""
    limit_s: float
    """The time after which the stage is ended."""
    device_type: str
    small: bool = False
    only: list[str] | None = None
    """Names of checks; None for all."""
    file: str = "checks.jsonl"
    nccl: str = ""
    """A library of NCCL that ranks load first."""

    def __post_init__(self) -> None:
        self.folder, self.is_cuda = Path(self.out), self.device_type == "cuda"
        self._until_s = time.monotonic() + self.limit_s
        self._done = last_of(self.folder / self.file)
        for name, each in self._done.items():
            if each["status"] == "begun":
                self.note(name, "lost", "the process ended in it")

    @cached_property
    def device(self) -> Any:
        """The device; a CPU computes in one thread."""
        import torch

        torch.cuda.set_device(0) if self.is_cuda else torch.set_num_threads(1)
        return torch.device("cuda", 0) if self.is_cuda else torch.device("cpu")

    def left_s(self) -> float:
        """Return how long the stage may still run."""
        return self._until_s - time.monotonic()

    def note(self, name: str, status: str, said: str = "", **more: Any) -> None:
        """Write down what came of a check."""
        facts = {"name": name, "status": status, "said": said[-6000:]} | more
        with (self.folder / self.file).open("a") as opened:
            opened.write(json.dumps(facts, default=str) + "\n")
        if status != "begun":
            print(f"{status:7} {name} {str(more)[:400]} {said.strip().rpartition(chr(10))[2][:300]}", flush=True)

    def check(self, name: str, work: Callable[[], Mapping[str, Any] | None], needs_s: float = 4.0) -> bool:
        """Do one check, unless that has been done, and return whether it was right.

        Args:
            name: its name.
            work: returns facts, or raises.
            needs_s: the time below which it is not begun.
        """
        if name in self._done or (self.only is not None and name not in self.only):
            return True
        if self.left_s() < needs_s:
            self.note(name, "skipped", "no time left")
            return False
        self.note(name, "begun")
        began_s, status, said, facts = time.monotonic(), "ok", "", None
        try:
            facts = work()
        except SkipCheckError as error:
            status, said = "skipped", str(error)
        except (WrongError, AssertionError) as error:
            status, said = "wrong", str(error) or traceback.format_exc()
        except Exception:  # whatever it is: the checks behind it are to be done
            status, said = "error", traceback.format_exc()
        self.note(name, status, said, facts=facts or {}, seconds=round(time.monotonic() - began_s, 2))
        if status in BAD and self._is_lost():
            print("the device does no more for this process", flush=True)
            os._exit(LOST)
        return status == "ok"

    def append(self, file: str, row: Mapping[str, Any]) -> None:
        """Add a row to a file of results in the folder of the run, and to the table of the stage."""
        from benchmarks.harness.outcome import PACKAGES
        from benchmarks.harness.result_files import append_rows, made_with

        made = made_with(PACKAGES) | {"arch_list": os.environ.get("TORCH_CUDA_ARCH_LIST", "")}
        append_rows(self.folder.parent / file, (*made, *row), [made | row])
        table = self.folder / "table.md"
        head = "" if table.exists() else f"| {' | '.join(row)} |\n|{'---|' * len(row)}\n"
        with table.open("a") as opened:
            opened.write(f"{head}| {' | '.join(map(str, row.values()))} |\n")

    def _is_lost(self) -> bool:
        torch = sys.modules.get("torch")
        try:
            if torch is not None and torch.cuda.is_initialized():
                torch.ones(2, device="cuda").sum().item()
        except Exception:
            return True
        return False


def last_of(file: Path) -> dict[str, dict[str, Any]]:
    """Return the last word on each check by its name; a line that was cut off is left out."""
    found: dict[str, dict[str, Any]] = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            each = json.loads(line)
        except ValueError:
            continue
        found[each["name"]] = each
    return found


def median_ms(times: Callable[..., float], device: Any, work: Callable[[], object], rounds: int = 10) -> float:
    """Return the median of some rounds, by ``elapsed_ms`` or ``issued_ms`` of the package."""
    times(device, work)
    return round(statistics.median(times(device, work) for _ in range(rounds)), 3)


def alone() -> dict[str, str]:
    """Return the environment of a process group of one rank."""
    from tests.scripts import free_port

    found = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    return found | {"MASTER_PORT": str(free_port())}


def start(command: Sequence[str], log: Path, **variables: str) -> subprocess.Popen:
    """Start a Python process that writes into a file, and finds this checkout."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path} | variables
    with log.open("ab") as opened:
        streams = {"stdin": subprocess.DEVNULL, "stdout": opened, "stderr": subprocess.STDOUT}
        return subprocess.Popen([sys.executable, *command], cwd=ROOT, env=environment, **streams)


def end(process: subprocess.Popen, limit_s: float) -> bool:
    """Wait for a process, end it at the limit, and return whether it ended by itself."""
    try:
        process.wait(max(0.1, limit_s))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False
    return True


def tail(file: Path, size: int = 3000) -> str:
    """Return the end of a log."""
    return file.read_text(errors="replace")[-size:] if file.exists() else ""


if __name__ == "__main__":
    # Under its own name, so that the errors which stages raise are those that are caught.
    checks = importlib.import_module("benchmarks.gpu.checks").Checks(**json.loads(sys.argv[2]))
    importlib.import_module(sys.argv[1]).run(checks)
