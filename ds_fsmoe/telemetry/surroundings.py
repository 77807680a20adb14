# SPDX-License-Identifier: Apache-2.0
"""Says where a run came from: its command, the commit of its script, its config. Pages of runs are shown around, so
values whose names say that they are secret are left out."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

HIDDEN = "(hidden)"
_SECRET = re.compile(r"(?i)(^|[^a-z])(token|secret|passwd|password|credentials?|(api|access|private)[_-]?key)$")
_GIT_S = 5.0
"""The seconds after which a commit is given up: a repository on a slow disk is no reason to wait."""


def command_of(arguments: Sequence[str]) -> list[str]:
    """Return a command line without the values of options such as ``--hf-token``."""
    found: list[str] = []
    hides_next = False
    for each in arguments:
        name, sign, _ = each.partition("=")
        is_secret = name.startswith("-") and _SECRET.search(name) is not None
        found.append(
            HIDDEN if hides_next and not each.startswith("-") else f"{name}={HIDDEN}" if is_secret and sign else each
        )
        hides_next = is_secret and not sign
    return found


def config_of(value: Any) -> Any:
    """Return a config, as deep as it is, without the values of keys such as ``api_key``."""
    if isinstance(value, Mapping):
        return {str(key): HIDDEN if _SECRET.search(str(key)) else config_of(each) for key, each in value.items()}
    return [config_of(each) for each in value] if isinstance(value, (list, tuple)) else value


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
