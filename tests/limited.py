# SPDX-License-Identifier: Apache-2.0
"""Runs commands of the console script one by one in forks with little memory and time, and says how each has ended.

``python -m tests.limited < commands.json``: a list of lists of arguments; prints a list of [status, output].
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path

from tests.python_path import python_path

MEMORY_BYTES = 3 << 28
LIMIT_S = 60


def run_limited(commands: Sequence[Sequence[str]], folder: Path, python: str = sys.executable) -> list[tuple[int, str]]:
    """Return (status, output) of each command; a status below 0 is the signal that has ended it."""
    done = subprocess.run(
        [python, "-m", "tests.limited"],
        input=json.dumps([list(each) for each in commands]),
        env=os.environ | {"PYTHONPATH": python_path(), "NO_COLOR": "1", "OMP_NUM_THREADS": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    return [(status, text) for status, text in json.loads(done.stdout)]


def _run(arguments: Sequence[str], said: Path) -> int:
    """Run one command in a fork."""
    child = os.fork()
    if child == 0:
        with said.open("w") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY_BYTES,) * 2)
        signal.alarm(LIMIT_S)
        status = 70
        try:
            from ds_fsmoe import cli

            status = cli.main(arguments)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    # Its engine of JavaScript reserves more addresses than a fork may have; no file reaches what it bundles.
    sys.modules["vl_convert"] = types.SimpleNamespace(javascript_bundle=lambda: "")  # type: ignore[assignment]
    # Imported once, for all forks.
    import scipy.optimize  # noqa: F401

    import ds_fsmoe.offline.plan.report
    import ds_fsmoe.offline.report.run_page
    import ds_fsmoe.routes.recorded  # noqa: F401

    text = Path("said.txt")
    found = []
    for each in json.load(sys.stdin):
        ended = _run(each, text)
        found.append((ended, text.read_text(errors="replace")))
    print(json.dumps(found))
