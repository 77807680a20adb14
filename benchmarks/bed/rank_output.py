# SPDX-License-Identifier: Apache-2.0
"""``rank_output.py SCRIPT ARGUMENTS``: runs a script as if it were called itself, every line of its output with the
name of its rank. Launched by ``cluster.py run`` in place of the script."""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

_SET_PARENT_DEATH_SIGNAL = 1  # prctl


def main() -> None:
    """Become the script in a process of its own, name its lines, and leave its exit status where the bed finds it."""
    rank, node = os.environ.get("RANK", "?"), os.environ.get("FSMOE_BED_NODE", "?")
    reading, writing = os.pipe()
    script_pid = os.fork()
    if script_pid == 0:
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        os.close(reading)
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        os.close(writing)
        become_script()
        return
    os.close(writing)

    def copy() -> None:
        with os.fdopen(reading, "rb") as lines, os.fdopen(os.dup(1), "wb", buffering=0) as out:
            for line in lines:
                out.write(f"[node{node} rank{rank}] ".encode() + line)

    ended_from_outside = False

    def hand_on(number: int, _frame: FrameType | None) -> None:
        nonlocal ended_from_outside
        ended_from_outside = True
        os.kill(script_pid, number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, hand_on)
    copier = threading.Thread(target=copy, daemon=True)
    copier.start()
    code = os.waitstatus_to_exitcode(os.waitpid(script_pid, 0)[1])
    copier.join(timeout=20)  # what the script started may hold its output open
    status = code if code >= 0 else 128 - code
    folder = os.environ.get("FSMOE_BED_STATUS")
    if folder and not ended_from_outside:
        (Path(folder) / rank).write_text(str(status))
    os._exit(status)


def become_script() -> None:
    """Run it with its own arguments and its own folder first on the path."""
    # The launcher puts its --local_rank first; the script gets it as the first of its own arguments.
    added = [each for each in sys.argv[1:2] if each.startswith("--local_rank")]
    script, *rest = sys.argv[1 + len(added) :]
    sys.argv = [script, *added, *rest]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
