# SPDX-License-Identifier: Apache-2.0
"""A network between two nodes that is cut while they train: for a while, or for good. See ``bench_faults.py``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.bed.bed import Bed, cleared_if_killed, down
from benchmarks.bed.job import run_job

STEPS, SAVE_EVERY, PAUSE_S = 60, 20, 0.05
CUT_AT = 30
"""The step that is under way when the link goes down."""
HANG_LIMIT_S = 20.0
"""Of the job's ``debug.hang_timeout_s``."""
LIMIT_S = HANG_LIMIT_S + 25.0
"""So soon after a cut for good no process of the job may be left: the watchdog's limit, and the launcher's grace."""
_NAME = "cuts"


def on_two_nodes(
    job: Path, folder: Path, cut_s: float | None, read: Callable[[Path], dict]
) -> tuple[int, float | None]:
    """Train on a bed of two nodes with a rank each, and cut the link between them.

    Args:
        job: the script.
        folder: of the job.
        cut_s: for so long; 0: never; ``None``: for good.
        read: the losses in a folder.

    Returns:
        The job's exit status, and how many seconds after the cut it ended; ``None`` without a cut.
    """
    bed = Bed(_NAME, nodes=2, ranks_per_node=1, inter="1gbit", intra="1gbit", mode="independent")
    arguments = [str(job), str(folder), "--steps", str(STEPS), "--save-every", str(SAVE_EVERY)]
    arguments += ["--pause-s", str(PAUSE_S)]
    status: list[int] = []
    with (folder / "log.txt").open("a") as log, cleared_if_killed(_NAME):
        bed.up()
        try:
            run = threading.Thread(
                target=lambda: status.append(
                    run_job(bed, arguments, 180, lambda line: print(line, file=log, flush=True))
                )
            )
            run.start()
            cut_at = None
            while run.is_alive() and cut_s != 0:
                if cut_at is None and len(read(folder).get(0, {})) >= CUT_AT:
                    bed.link(1, "down")
                    cut_at = time.monotonic()
                if cut_at is not None and cut_s is not None and time.monotonic() > cut_at + cut_s:
                    bed.link(1, "up")
                    break
                time.sleep(0.02)
            run.join()
            ended_s = None if cut_at is None else time.monotonic() - cut_at
        finally:
            down(_NAME)
    return status[0], ended_s
