# SPDX-License-Identifier: Apache-2.0
"""What all tests share: Ctrl-C works, tests that need a GPU are skipped where there is none, samples are drawn, and a
run says at its end which tests it left out and what runs them."""

from __future__ import annotations

import gc
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.samples import SEED, at_night_alone, draw_daily, todays_seed

# No test judges by a clock, whatever else the machine does; and examples are drawn anew where CI is set, too.
settings.register_profile("ours", deadline=None, derandomize=False)
settings.load_profile("ours")
# One thread for each rank and test, as ranks share the cores and as sums keep their bits; read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
CACHE = Path(tempfile.gettempdir(), f"ds_fsmoe_tests_cache_{os.getpid()}")
LEFT_OUT = pytest.StashKey[Counter[tuple[str, str]]]()
# Marks -> what runs the tests that have them; the first that a test has counts.
RUN_BY = {"slow": "make nightly", "long": "make test-long", "": "make test"}
# What make test does not look into -> what does.
APART = {
    "tests/planning": "make test-planning, which make test runs first",
    "tests/benchmarks": "make test-bench",
    "tools/try_llamafactory.py": "make test-clients, in an environment of its own",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for another order."""
    parser.addoption("--shuffle", metavar="SEED", help="run files, and the tests of each, in an order of this seed's")


@pytest.hookimpl(tryfirst=True)  # ahead of hypothesis, which reads its seed here
def pytest_configure(config: pytest.Config) -> None:
    """In the background of a shell a process ignores Ctrl-C, and so would those that tests start and interrupt.
    Hypothesis draws from the seed of the run."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "DS_FSMOE_EXPECT_ALL" in os.environ:  # in CI, where what a missing package skips would be missed by nobody
        pytest.importorskip = importlib.import_module
    config.stash[LEFT_OUT] = Counter()
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = todays_seed()


@pytest.hookimpl(wrapper=True, trylast=True)  # ahead of --lf, which leaves out cases
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Refuse a file with functions that run at night alone."""
    report = yield
    if alone := at_night_alone([each for each in report.result or () if isinstance(each, pytest.Item)]):
        report.outcome, report.longrepr = "failed", f"by day no case of these runs: {', '.join(alone)}"
    return report


@pytest.hookimpl(tryfirst=True)  # ahead of -m, which goes by the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Draw today's samples, shuffle if asked, and skip what needs more CUDA devices than there are."""
    draw_daily(items)
    if seed := config.getoption("shuffle"):
        shuffle(items, seed)
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


@pytest.hookimpl(tryfirst=True)  # ahead of fixtures, which may run jobs
def pytest_runtest_setup() -> None:
    """Give each test a cache folder of its own, so that no job knows what one of another test has learned, and the same
    random numbers whatever ran before it."""
    shutil.rmtree(CACHE, ignore_errors=True)
    os.environ["XDG_CACHE_HOME"] = str(CACHE)
    if "torch" in sys.modules:  # the planner's tests run without
        sys.modules["torch"].manual_seed(0)


def shuffle(items: list[pytest.Item], seed: str) -> None:
    """Reorder files, and the tests within each: a file's fixtures are made once."""
    keys = {item: random.Random(f"{seed} {item.nodeid}").random() for item in items}
    files = {item.path: random.Random(f"{seed} {item.path.name}").random() for item in items}
    items.sort(key=lambda item: (files[item.path], item.path, keys[item]))


def pytest_collection_finish() -> None:
    """Have the collector look no more at what was imported, which lives as long as the tests: half a second each time
    that one of them calls it."""
    gc.collect()
    gc.freeze()


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Count the tests that this run leaves out, by what runs them and by file."""
    for item in items:
        by = next(command for mark, command in RUN_BY.items() if not mark or item.get_closest_marker(mark))
        item.config.stash[LEFT_OUT][by, item.nodeid.partition("::")[0]] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Remove the cache, and let a worker of a run in several processes tell the one that reports what was left out; all
    of them collected the same tests."""
    shutil.rmtree(CACHE, ignore_errors=True)
    if hasattr(session.config, "workeroutput"):
        left_out = session.config.stash[LEFT_OUT]
        session.config.workeroutput["left_out"] = [(*key, count) for key, count in left_out.items()]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what one worker left out."""
    left_out = getattr(node, "workeroutput", {}).get("left_out", [])
    node.config.stash[LEFT_OUT] = Counter({(by, file): count for by, file, count in left_out})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say from which seed the samples are, what was left out, and what runs it."""
    terminalreporter.section("samples")
    terminalreporter.line(f"drawn from the seed {todays_seed()}; {SEED}={todays_seed()} draws them again")
    left_out = config.stash[LEFT_OUT]
    if not left_out:
        return
    terminalreporter.section("left out")
    if config.getoption("ignore"):
        for place, command in APART.items():
            terminalreporter.line(f"{place} is run by {command}")
    for command in RUN_BY.values():
        files = {file: count for (by, file), count in sorted(left_out.items()) if by == command}
        if files:
            terminalreporter.line(f"{sum(files.values())} tests of {len(files)} files are run by {command}:")
            terminalreporter.line("  " + ", ".join(f"{file.rpartition('/')[2]} {n}" for file, n in files.items()))
