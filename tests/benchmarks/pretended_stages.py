# SPDX-License-Identifier: Apache-2.0
"""A stage for tests of the runner: what comes of its checks is in the name of the stage."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

from benchmarks.gpu.checks import LOST, Checks, SkipCheckError, WrongError


def run(checks: Checks) -> None:
    if checks.folder.name == "cannot begin":
        raise ImportError("no such module")
    checks.check("first", lambda: {"left": checks.left_s() > 0})

    def middle() -> dict[str, Any] | None:
        match checks.folder.name:
            case "crashes":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "crashes unless waited for":
                if "CUDA_LAUNCH_BLOCKING" not in os.environ:
                    os.kill(os.getpid(), signal.SIGSEGV)
            case "is lost":
                os._exit(LOST)
            case "hangs":
                # Of a session of its own, as ranks may be.
                command = [sys.executable, "-c", "import signal; signal.pause()"]
                process = subprocess.Popen(command, start_new_session=True)
                (checks.folder / "process").write_text(str(process.pid))
                process.wait()
            case "is wrong":
                raise WrongError("2 for 1")
            case "raises":
                raise ValueError("one\ntwo")
            case "cannot":
                raise SkipCheckError("nothing to do it with")
        return {"blocking": os.environ.get("CUDA_LAUNCH_BLOCKING", "")}

    checks.check("middle", middle)
    checks.check("last", lambda: None)
