# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest that writes which functions of the package each test calls, on ranks too.

``DS_FSMOE_REACHED=FOLDER python -m pytest -p tools.reached ...``; ``tools/mutations.py`` runs it, and breaks a function
in front of those tests only. What a test calls in processes of its own making is not seen.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

FOLDER = "DS_FSMOE_REACHED"
OF_WORKER = "DS_FSMOE_REACHED_BY"
"""The variable with the folder of this worker's ranks; their fork server hands it on."""
_PACKAGE = f"{Path(__file__).resolve().parents[1]}/ds_fsmoe/"
_seen: set[CodeType] = set()
_of_setups: dict[str, set[str]] = defaultdict(set)
"""A test file -> what fixtures have called in it, of which some serve several tests."""


def begin() -> None:
    """Note every function of the package that is called from now on."""
    threading.settrace(_note)
    sys.settrace(_note)


def _note(frame: FrameType, event: str, argument: Any) -> None:
    if _PACKAGE and frame.f_code.co_filename.startswith(_PACKAGE):  # nothing, while the interpreter ends
        _seen.add(frame.f_code)


def reached() -> list[str]:
    """Return the functions that were called since the last time, as "ds_fsmoe/FILE.py NAME" of the outermost one."""
    found = {
        f"ds_fsmoe/{code.co_filename.removeprefix(_PACKAGE)} {code.co_qualname.partition('.<locals>')[0]}"
        for code in list(_seen)
    }
    _seen.clear()
    return sorted(f"{path} {name.rpartition('.')[2]}" for path, _, name in (each.partition(" ") for each in found))


def be_rank(*args: Any) -> None:
    """Be a rank of :func:`tests.ranks.run_on_ranks` whose calls are noted."""
    begin()
    end = os._exit

    def write_and_end(status: int) -> None:
        Path(os.environ[OF_WORKER], f"{uuid.uuid4().hex}.json").write_text(json.dumps(reached()))
        end(status)

    os._exit = write_and_end  # type: ignore[assignment]
    from tests.ranks import _be_rank

    _be_rank(*args)


def pytest_configure() -> None:
    """Replace what ranks run, where there is torch for them."""
    folder = Path(os.environ[FOLDER], f"ranks_{os.getpid()}")
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[OF_WORKER] = str(folder)
    with suppress(ImportError):
        from tests import ranks

        ranks._be_rank = be_rank
    begin()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Note what fixtures call for all tests of their file."""
    _take()
    try:
        return (yield)
    finally:
        _of_setups[item.nodeid.partition("::")[0]].update(_take())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Write a line for each test: its name, its time, and what it calls."""
    begin()
    began = time.monotonic()
    try:
        return (yield)
    finally:
        calls = sorted(_take() | _of_setups[item.nodeid.partition("::")[0]])
        row = {"test": item.nodeid, "seconds": round(time.monotonic() - began, 3), "calls": calls}
        with Path(os.environ[FOLDER], f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


def _take() -> set[str]:
    found = set(reached())
    for file in Path(os.environ[OF_WORKER]).glob("*.json"):
        found.update(json.loads(file.read_text()))
        file.unlink()
    return found
