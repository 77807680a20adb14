# SPDX-License-Identifier: Apache-2.0
"""Says where a run came from: the commit of its script."""

from __future__ import annotations

import os
import re
import subprocess
from contextlib import suppress
from pathlib import Path

_GIT_S = 5.0
"""The seconds after which a commit is given up: a repository on a slow disk is no reason to wait."""


def commit_of(script: str) -> str | None:
    """Return the commit of the repository that holds a script, and whether files differ from it; ``None``: there is no
    repository, or no git."""
    folder = Path(script).resolve().parent if script and Path(script).is_file() else Path.cwd()
    with suppress(OSError, subprocess.SubprocessError):
        found = _git(folder, "rev-parse", "--verify", "HEAD")
        commit = found.stdout.strip()
        if found.returncode or not re.fullmatch(r"[0-9a-f]{40,64}", commit):
            return None
        is_clean = _git(folder, "diff", "--quiet", "HEAD", "--").returncode == 0
        return commit if is_clean else f"{commit}, with changes"
    return None


def _git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    return subprocess.run(
        ["git", "-C", str(folder), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=_GIT_S,
        check=False,
    )
