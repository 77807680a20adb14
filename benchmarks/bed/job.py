# SPDX-License-Identifier: Apache-2.0
"""A job in a bed: one ``deepspeed --no_ssh`` per place, every line of output with its rank's name, and an end for all
when one rank dies."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.bed.bed import Bed, BedError, Place
from benchmarks.harness.result_files import BED_VARIABLE

GRACE_S = 10.0
"""So long the other places may go on after one has failed: to print what they know."""
_SET_PARENT_DEATH_SIGNAL = 1  # prctl


def run_job(
    bed: Bed, arguments: Sequence[str], timeout_s: float | None = None, out: Callable[[str], None] = print
) -> int:
    """Run a script on every rank.

    Args:
        bed: up.
        arguments: the script and its arguments.
        timeout_s: after that it is ended.
        out: takes each line.

    Returns:
        124 after a timeout; else the worst exit status of the ranks, of those that failed by themselves if any did;
        a launcher's where no rank tells of a failure.

    Raises:
        BedError: no script, or no DeepSpeed to launch it with.
    """
    if not arguments:
        raise BedError("run what? cluster.py run -- SCRIPT ARGUMENTS")
    script = Path(arguments[0])
    if not script.is_file():
        raise BedError(f"script {script}: no such file")
    deepspeed = Path(sys.executable).with_name("deepspeed")
    launcher = str(deepspeed) if deepspeed.exists() else shutil.which("deepspeed")
    if launcher is None:
        raise BedError("no `deepspeed` to launch with: pip install 'ds_fsmoe[train]'")
    places = bed.places()
    port = random.SystemRandom().randint(20_000, 60_000)
    with tempfile.TemporaryDirectory() as folder:
        hostfile = Path(folder) / "hostfile"
        hostfile.write_text("".join(f"place{index} slots={place.ranks}\n" for index, place in enumerate(places)))
        jobs = []
        for index, place in enumerate(places):
            command = [
                *(launcher, "--hostfile", str(hostfile), "--no_ssh", "--node_rank", str(index)),
                *("--master_addr", places[0].address, "--master_port", str(port)),
                *(str(Path(__file__).with_name("rank_output.py")), *arguments),
            ]
            jobs.append(_start(place, command, folder, str(bed)))
        status = _follow(jobs, places, timeout_s, out)
        # A launcher tells of the first rank that it sees fail, which may have failed because another did.
        failed = _failed(Path(folder))
        if failed:
            out("[bed] " + ", ".join(f"rank {rank} ended with status {code}" for rank, code in failed.items()))
        return status if status == 124 or not failed else max(failed.values())


def _failed(folder: Path) -> dict[str, int]:
    """What the ranks that failed left as their exit status."""
    ended = {path.name: int(path.read_text()) for path in folder.iterdir() if path.name.isdigit()}
    failed = {rank: code for rank, code in sorted(ended.items()) if code}
    # A launcher whose rank fails ends its others; they are not the cause.
    causes = {rank: code for rank, code in failed.items() if code != 128 + signal.SIGTERM}
    return causes or failed


def _start(place: Place, command: Sequence[str], folder: str, bed: str) -> subprocess.Popen[str]:
    inside = (
        *("ip", "netns", "exec", place.namespace),
        # Its own host name, so that topology is seen as on machines; its own process tree, which dies with its head.
        *("unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"),
        *("sh", "-c", f'hostname node{place.node}; exec "$@"', "sh", *command),
    )
    environment = os.environ | {
        "GLOO_SOCKET_IFNAME": "eth0",
        "TP_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        BED_VARIABLE: bed,
        "FSMOE_BED_NODE": str(place.node),
        "FSMOE_BED_STATUS": folder,
        "PYTHONUNBUFFERED": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }
    return subprocess.Popen(
        inside,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        preexec_fn=_die_with_parent,
    )


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _follow(
    jobs: Sequence[subprocess.Popen[str]], places: Sequence[Place], timeout_s: float | None, out: Callable[[str], None]
) -> int:
    lock = threading.Lock()

    def copy(job: subprocess.Popen[str], place: Place) -> None:
        for line in job.stdout:
            # Ranks name themselves; what has no name is the launcher's.
            named = line if line.startswith("[node") else f"[node{place.node}] {line}"
            with lock:
                out(named.rstrip("\n"))

    readers = [threading.Thread(target=copy, args=pair, daemon=True) for pair in zip(jobs, places, strict=True)]
    for reader in readers:
        reader.start()
    end_s = None if timeout_s is None else time.monotonic() + timeout_s
    failed_s: float | None = None
    status = 0
    try:
        while any(job.poll() is None for job in jobs):
            time.sleep(0.05)
            now_s = time.monotonic()
            if failed_s is None:
                first = next((i for i, job in enumerate(jobs) if job.poll()), None)
                if first is not None:
                    failed_s = now_s
                    out(f"[bed] node{places[first].node} failed with status {_status(jobs[first])}; ending the others")
            elif now_s > failed_s + GRACE_S:
                break
            if end_s is not None and now_s > end_s:
                out(f"[bed] not done after {timeout_s:g} s; ending it")
                status = 124
                break
    finally:
        for job in jobs:
            if job.poll() is None:
                job.kill()
        for job in jobs:
            job.wait()
    for reader in readers:
        reader.join(timeout=30)
    # Those that were ended here are not the cause.
    statuses = [_status(job) for job in jobs]
    own = [each for each in statuses if each != 128 + signal.SIGKILL]
    return max([status, *(own if any(own) else statuses if not status else [])])


def _status(job: subprocess.Popen[str]) -> int:
    code = job.returncode or 0
    return code if code >= 0 else 128 - code
