# SPDX-License-Identifier: Apache-2.0
"""Runs a user's training command with a changed copy of its config, until it ends or its time is over. ``ds_fsmoe
compare`` and ``ds_fsmoe tune`` call it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ds_fsmoe.files import hiding
from ds_fsmoe.files.runs import RUN, STEPS, clear_run
from ds_fsmoe.files.whole_files import OwnedError, Ownership
from ds_fsmoe.offline.commands.training_command import PlannedRun, TrainingCommand, run_config, with_free_port
from ds_fsmoe.terminal.progress import Progress
from ds_fsmoe.terminal.screen import RED, YELLOW, print_coloured

NO_ENTRY_POINT = (
    "does the script use ds_fsmoe? It has to call ds_fsmoe.initialize, or ds_fsmoe.install() first, or be started "
    "with --module ds_fsmoe.run"
)
REPORTS = "fsmoe_reports"
"""Where ranks of ours leave reports, under the folder in which the job was started."""
LOG = "log.txt"
OUT_OF_TIME = 124
"""The exit status of a training whose time was over, as that of the program ``timeout``."""
_SOON_S = 300.0
"""The seconds after which a run without a record is considered to have none."""
_GRACE_S = 45.0
"""The seconds that a launcher has to end its ranks: torchrun kills those that do not end within 30 s."""


def claim_out(out: Path, name: str) -> Ownership:
    """Claim the folder of a command's runs for this process.

    Args:
        out: the folder.
        name: the name of the lock file in it.

    Raises:
        ValueError: another process writes there, or the folder is not writable.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        return Ownership(out, name=name)
    except OwnedError as error:
        raise ValueError(f"--out {out}: {error}: choose another folder") from error
    except OSError as error:
        raise ValueError(f"--out {out}: cannot be written to: {error}") from error


def run_training(
    of: str, subject: TrainingCommand, planned: PlannedRun, timeout_s: float | None, **variables: str
) -> int:
    """Run a training with its own copy of the config, and remove possible secrets from what it leaves.

    Args:
        of: the name of the command, for lines on the screen.
        subject: the training command with its config.
        planned: the run.
        timeout_s: the seconds after which it is ended; ``None``: never.
        variables: environment variables for it, unless the user has set them.

    Returns:
        Its exit status; :data:`OUT_OF_TIME` if it was ended.

    Raises:
        ValueError: it cannot be started, or its folder has files that are of no run.
    """
    folder = planned.folder
    folder.mkdir(parents=True, exist_ok=True)
    config = run_config(subject.config, planned)
    file, log = folder / "ds_config.json", folder / LOG
    file.unlink(missing_ok=True)
    file.touch(0o600)
    file.write_text(json.dumps(config, indent=2))
    command = with_free_port(subject.command_with(file), free_port())
    try:
        return _train(of, command, folder, planned.steps, timeout_s, variables | os.environ)
    finally:
        _hide_secrets(config, command, file, log)


def free_port() -> int:
    """Return a free port, so that a training can run next to other jobs. It is below those that the kernel gives to
    connections: a training takes it up to a minute later."""
    while True:
        port = random.SystemRandom().randint(15_000, 32_000)
        with socket.socket() as taken, suppress(OSError):
            taken.bind(("", port))
            return port


def _hide_secrets(config: Mapping[str, Any], command: Sequence[str], file: Path, log: Path) -> None:
    """Remove possible secrets from the config and from the training's log."""
    shown = hiding.config_of(config)
    found = hiding.secrets_of([config, list(command)], [shown, hiding.command_of(command)])
    file.write_text(json.dumps(shown, indent=2))
    if found and log.exists():
        log.write_text(hiding.without(log.read_text(errors="surrogateescape"), found), errors="surrogateescape")


def _train(
    of: str, command: Sequence[str], folder: Path, steps: int, timeout_s: float | None, variables: Mapping[str, str]
) -> int:
    try:
        clear_run(folder)
    except OSError as error:
        raise ValueError(f"{folder}: {error}") from error
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    with (folder / LOG).open("w") as log:
        try:
            # A session of its own, so that all of it can be ended.
            job = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=variables)
        except OSError as error:
            raise ValueError(f"{command[0]}: cannot be started: {error}") from error
        # Told to end, or left by its terminal unless nohup has started it, this process ends the job as at Ctrl-C.
        both = signal.SIGTERM, signal.SIGHUP
        ends = [each for each in both if signal.getsignal(each) is not signal.SIG_IGN]
        before = [signal.signal(each, lambda number, _: sys.exit(128 + number)) for each in ends]
        try:
            with Progress(f"{of}: training", steps) as progress:
                start_s, is_told = time.monotonic(), False
                while job.poll() is None:
                    with suppress(subprocess.TimeoutExpired):
                        job.wait(0.2)
                    if not is_told and time.monotonic() - start_s > _SOON_S and not (folder / RUN).exists():
                        is_told = True
                        print_coloured(f"{of}: nothing recorded after {_SOON_S:.0f} s: {NO_ENTRY_POINT}", YELLOW)
                    progress.reached((folder / STEPS).read_text().count("\n") if (folder / STEPS).exists() else 0)
                    if deadline_s is not None and time.monotonic() > deadline_s:
                        print_coloured(f"{of}: ended after {timeout_s:.0f} s", RED)
                        return OUT_OF_TIME
            return job.returncode
        finally:
            _end(job)
            for number, handler in zip(ends, before, strict=True):
                signal.signal(number, handler)


def _end(job: subprocess.Popen[bytes]) -> None:
    """End a job with all its processes. Ranks may be in sessions of their own, or on other nodes: their launcher ends
    them, if it is asked to and has the time. It may be below another program, which does not wait for it.
    """
    if job.poll() is not None:
        return
    try:
        os.killpg(job.pid, signal.SIGTERM)
        deadline_s = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline_s and _is_running(job.pid):
            time.sleep(0.1)
    finally:  # also at a second Ctrl-C
        # Not reaped before the last signal, so that nobody else has its number by then.
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def _is_running(group: int) -> bool:
    """Return True while a process of a group has not ended."""
    for each in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The name, in brackets, may have blanks.
            state, _, of_group = each.read_text().rpartition(")")[2].split()[:3]
            if int(of_group) == group and state not in "ZX":
                return True
    return False
