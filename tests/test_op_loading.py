# SPDX-License-Identifier: Apache-2.0
"""How the ops are chosen, built and loaded: choices, locks, several ranks, and what importing must not do."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")

from ds_fsmoe.ops import load_ops, loading  # noqa: E402
from tests.build_locks import FILE_IS_THE_LOCK, hold_lock  # noqa: E402
from tests.built_ops import forget_ops  # noqa: E402
from tests.python_path import python_path  # noqa: E402
from tests.ranks import run_on_ranks  # noqa: E402
from tests.waiting import LIMIT_S, make_older  # noqa: E402

REPOSITORY = Path(__file__).resolve().parents[1]
NAME = f"{loading.LIBRARIES['cpu']}_{loading.import_op_builder().SOURCE_TAG}"


@pytest.fixture
def fresh_extensions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty build folder, in a process that seems to have loaded nothing yet and in which torch may not wait."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    def wait(baton: object) -> None:
        raise AssertionError("torch waits for the lock, and it does that without a limit")

    monkeypatch.setattr(OpBuilder, "_loaded_ops", {})
    monkeypatch.setattr("torch.utils.file_baton.FileBaton.wait", wait)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return tmp_path


def locks_of_builds() -> Any:
    """The module, which is there when the builders are."""
    loading.import_op_builder().builders("cpu")
    return sys.modules["ds_fsmoe.ops.op_builder.locks"]


of_a_file = pytest.mark.skipif(not FILE_IS_THE_LOCK, reason="the date of a file says nothing where torch locks it")


def leave_lock(extensions: Path, age_s: float) -> Path:
    lock = extensions / NAME / "lock"
    lock.parent.mkdir(parents=True)
    hold_lock(lock)
    make_older(lock, age_s)
    return lock


class LockClock:
    """The functions of the module ``time``; only who sleeps gets older, from the moment that a lock was made."""

    def __init__(self, lock: Path, age_s: float) -> None:
        self.slept_s = 0.0
        self._start_s = lock.stat().st_mtime + age_s

    def time(self) -> float:
        return self._start_s + self.slept_s

    def monotonic(self) -> float:
        return self.slept_s

    def sleep(self, time_s: float) -> None:
        self.slept_s += time_s


@of_a_file
@pytest.mark.parametrize(
    ("age_s", "waited_s", "said"),
    [
        (0, 600, r"60[01] s old"),
        (-60, 600, r"5[34]. s old, and it was there for the 60. s that were waited"),
        (-599, 600, r". s old, and it was there for the 60. s that were waited"),
        (-3e9, 0, r"dated 3000000000 s in the future"),
    ],
)
def test_a_lock_is_waited_for_until_it_is_stale_whatever_its_date(
    age_s: float, waited_s: float, said: str, fresh_extensions: Path, caplog, monkeypatch
) -> None:
    locks = locks_of_builds()
    monkeypatch.setattr(logging.getLogger("ds_fsmoe"), "propagate", True)
    caplog.set_level(logging.INFO, "ds_fsmoe")
    lock = leave_lock(fresh_extensions, age_s=0)
    clock = LockClock(lock, age_s)
    found = locks.wait_for(lock, clock)
    assert found.is_stale
    assert re.fullmatch(said, found.age)
    assert abs(clock.slept_s - waited_s) <= 1.0
    # Once in passing, and once so that it is seen.
    levels = [each.levelname for each in caplog.records if "waiting for the process that builds there" in each.message]
    assert levels == (["INFO", "WARNING"] if waited_s else [])


def test_a_locked_file_is_waited_for_whatever_its_date(fresh_extensions: Path, monkeypatch) -> None:
    locks = locks_of_builds()
    monkeypatch.delattr("torch.utils.cpp_extension.FileBaton", raising=False)
    lock = leave_lock(fresh_extensions, age_s=3600)
    clock = LockClock(lock, 3600)
    found = locks.wait_for(lock, clock)
    assert found.is_stale
    assert abs(clock.slept_s - 600) <= 1.0
    assert found.age.startswith("0 s old, and it was there for the 60")


def test_the_lock_of_a_build_that_was_killed_is_taken_away(fresh_extensions: Path) -> None:
    locks = locks_of_builds()
    path = fresh_extensions / NAME / "lock"
    script = (
        "import sys; from pathlib import Path; from ds_fsmoe.ops.loading import import_op_builder\n"
        "import_op_builder().builders('cpu'); locks = sys.modules['ds_fsmoe.ops.op_builder.locks']\n"
        "path = Path(sys.argv[1])\n"
        "from tests.build_locks import hold_lock\n"
        "with locks.building(path):\n    hold_lock(path); print('builds', flush=True); sys.stdin.read()"
    )
    environment = os.environ | {"PYTHONPATH": python_path(), "DS_ACCELERATOR": "cpu"}
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as builder:
        assert builder.stdout.readline() == b"builds\n"
        assert locks.find_lock(path) is not None
        clock = LockClock(path, 0)
        clock.sleep = lambda _: (builder.kill(), builder.wait())
        assert locks.wait_for(path, clock) is None
    assert path.exists()
    with locks.building(path):
        assert path.exists() != FILE_IS_THE_LOCK


def test_a_lock_whose_builder_may_be_on_another_machine_is_waited_for(fresh_extensions: Path) -> None:
    locks = locks_of_builds()
    path = leave_lock(fresh_extensions, age_s=0)
    path.with_name("fsmoe_builder").write_text("another-machine")
    assert locks.find_lock(path) is not None
    with locks.building(path):
        assert path.exists()


def test_a_lock_that_is_let_go_is_waited_for_no_longer(fresh_extensions: Path) -> None:
    locks = locks_of_builds()
    lock = leave_lock(fresh_extensions, age_s=0)
    clock = LockClock(lock, 0)
    clock.sleep = lambda _: lock.unlink()
    assert locks.wait_for(lock, clock) is None


def load_slowly(rank: int, world_size: int) -> tuple[str, int]:
    """What came of it, and how often this rank had spoken to the others before the build was over."""
    builder = type(loading.import_op_builder().builders("cpu")["fsmoe_cpu"])
    loading._ANSWER_EVERY_S = 0.01
    spoken, has_spoken_often = 0, threading.Event()

    def gathered(own: str | None, plain=loading._gathered) -> list[str | None]:
        nonlocal spoken
        told = plain(own)
        spoken += loading._AT_WORK in told
        if spoken == 5:
            has_spoken_often.set()
        return told

    def build(self, verbose: bool = False) -> None:
        if rank == 0:
            assert has_spoken_often.wait(LIMIT_S), "the others sit in one collective until the build is over"
        raise RuntimeError(f"built by rank {rank}")

    loading._gathered = gathered
    builder.load, builder.will_compile = build, lambda self: False
    with pytest.raises(RuntimeError) as caught:
        load_ops("required", "cpu")
    return str(caught.value), spoken


def test_ranks_that_wait_for_a_build_sit_in_no_collective_that_lasts_as_long(tmp_path: Path) -> None:
    (first, spoken), *others = run_on_ranks(load_slowly, 3, tmp_path)
    assert "on rank 0, RuntimeError: built by rank 0" in first
    assert spoken >= 5
    assert others == [(first, spoken)] * 2


def test_importing_builds_and_loads_nothing_and_deepspeed_starts_beside_our_builders(tmp_path: Path) -> None:
    # DeepSpeed looks for a name in a top-level op_builder to recognise its own source tree: ours must not have it.
    script = """
import sys, torch, ds_fsmoe.ops, ds_fsmoe.ops.loading, ds_fsmoe.ops.reference, ds_fsmoe.ops.compiled
assert 'deepspeed' not in sys.modules
assert not [name for name in sys.modules if 'op_builder' in name]
ops = ds_fsmoe.ops.load_ops('reference', 'cpu')
ops.top_k_slots(torch.zeros(2, 3), 1, 1)
ops.gather_rows(torch.zeros(2, 3), torch.zeros(1, dtype=torch.int64))
assert not hasattr(torch.ops.fsmoe, 'gather_rows')
assert not hasattr(torch.ops.fsmoe, 'arrange')
import op_builder, deepspeed, deepspeed.accelerator
assert not hasattr(op_builder, '__deepspeed__')
folder = deepspeed.accelerator.get_accelerator().op_builder_dir()
assert folder.startswith('deepspeed.'), folder
assert deepspeed.ops.op_builder.CPUAdamBuilder().name == 'cpu_adam'
"""
    of_builds = {"TORCH_EXTENSIONS_DIR": str(tmp_path), "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(REPOSITORY)}
    environment = os.environ | of_builds
    subprocess.run([sys.executable, "-c", script], env=environment, cwd=tmp_path, check=True, timeout=600)
    assert list(tmp_path.iterdir()) == []


def test_a_torch_upgrade_changes_the_build_and_hides_the_prebuilt_library(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = loading.import_op_builder().builders("cpu")["fsmoe_cpu"]
    before = (builder.cxx_args(), builder.absolute_name())
    monkeypatch.setattr(sys.modules["ds_fsmoe.ops.op_builder.builder"], "TORCH_TAG", "9_9_9")
    assert builder.cxx_args() != before[0]
    assert builder.absolute_name() != before[1]


def load_three_times(rank: int, world_size: int, folder: Path) -> dict[str, str]:
    """What came of three attempts on this rank: the name of the ops, or the error."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    forget_ops()
    # A library without ops is enough here, and compiled in a second: a process that waits for a minute is given up.
    builder = type(loading.import_op_builder().builders("cpu")["fsmoe_cpu"])
    builder.sources = lambda self: ["csrc/python_module.cpp"]

    def attempt(extensions: Path) -> str:
        os.environ["TORCH_EXTENSIONS_DIR"] = str(extensions)
        try:
            return load_ops("required", "cpu").name
        except RuntimeError as err:
            return str(err)

    outcomes = {"good": attempt(folder / "good")}
    # Rank 0 keeps the library it has in its process, so the lock in this folder is in the way of rank 1 alone.
    if rank == 1:
        OpBuilder._loaded_ops.clear()
    outcomes["lock on rank 1"] = attempt(folder / "locked")
    OpBuilder._loaded_ops.clear()
    if rank == 0:
        os.environ["CXX"] = "false"
    # Folders of their own here: what rank 1 does shows in its folder, and no lock of rank 0 can hide it.
    outcomes["no compiler on rank 0"] = attempt(folder / f"broken{rank}")
    return outcomes


@of_a_file
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "c++")) is None, reason="no C++ compiler")
def test_local_rank_0_builds_and_all_ranks_agree_on_the_outcome(tmp_path: Path) -> None:
    leave_lock(tmp_path / "locked", age_s=3600)
    for outcomes in run_on_ranks(load_three_times, 2, tmp_path / "ranks", tmp_path):
        assert outcomes["good"] == "compiled"
        locked = outcomes["lock on rank 1"]
        assert "on rank 1" in locked
        assert str(tmp_path / "locked" / NAME / "lock") in locked
        failed = outcomes["no compiler on rank 0"]
        assert "compiled ops (fsmoe_cpu)" in failed
        assert "on rank 0" in failed
        assert "'auto' or 'plain'" in failed
    assert (tmp_path / "broken0").exists()
    assert not (tmp_path / "broken1").exists(), "rank 1 tried to build, although rank 0 had not succeeded"
    compiles = (tmp_path / "good" / NAME / ".ninja_log").read_text().count("python_module.o")
    assert compiles == 1
