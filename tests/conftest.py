# SPDX-License-Identifier: Apache-2.0
"""What all tests share: Ctrl-C works, tests that need a GPU are skipped where there is none, and a run says at its end
which tests it left out."""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings

# No test judges by a clock, whatever else the machine does.
settings.register_profile("without_a_clock", deadline=None)
settings.load_profile("without_a_clock")
# One thread for each rank and test, as ranks share the cores and as sums keep their bits; read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
LEFT_OUT = pytest.StashKey[Counter[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """In the background of a shell a process ignores Ctrl-C, and so would those that tests start and interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.stash[LEFT_OUT] = Counter()


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Skip what needs more CUDA devices than there are."""
    marks = [(item, mark) for item in items if (mark := item.get_closest_marker("gpu"))]
    if not marks:
        return
    import torch  # as those tests have done, where it may be missing

    found = torch.cuda.device_count()
    for item, mark in marks:
        wanted = mark.kwargs.get("count", 1)
        if found < wanted:
            what = "a CUDA device" if wanted == 1 else f"{wanted} CUDA devices"
            there = {0: "there is none", 1: "there is one"}.get(found, f"there are {found}")
            item.add_marker(pytest.mark.skip(reason=f"needs {what}: {there}"))


def pytest_collection_finish() -> None:
    """Have the collector look no more at what was imported, which lives as long as the tests: half a second each time
    that one of them calls it."""
    gc.collect()
    gc.freeze()


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Count the tests that this run leaves out, file by file."""
    for item in items:
        item.config.stash[LEFT_OUT][item.nodeid.partition("::")[0]] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Let a worker of a run in several processes tell the one that reports; all of them collected the same tests."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(session.config.stash[LEFT_OUT])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what one worker left out."""
    node.config.stash[LEFT_OUT] = Counter(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what was left out, and what runs it."""
    left_out = config.stash[LEFT_OUT]
    if not left_out:
        return
    chosen = config.getoption("markexpr") or config.getoption("keyword") or "the names given"
    terminalreporter.section("left out")
    terminalreporter.line(f"{left_out.total()} tests are left out by '{chosen}'; make nightly runs all:")
    for file, count in sorted(left_out.items()):
        terminalreporter.line(f"  {count:5} of {file}")
