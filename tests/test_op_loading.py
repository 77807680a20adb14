# SPDX-License-Identifier: Apache-2.0
"""How the ops are chosen, built and loaded: choices, locks, several ranks, and what importing must not do."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")

from ds_fsmoe.ops import load_ops, loading  # noqa: E402
from tests.ranks import run_on_ranks  # noqa: E402
from tests.waiting import make_older  # noqa: E402

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("device_type", ["cpu", "cuda", "xpu"])
def test_the_reference_can_be_had_for_any_device(device_type: str) -> None:
    assert load_ops("reference", device_type) is loading.REFERENCE


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


def leave_lock(extensions: Path, age_s: float) -> Path:
    lock = extensions / loading.LIBRARIES["cpu"] / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    make_older(lock, age_s)
    return lock


def test_a_stale_lock_is_named_with_its_age_and_the_cure(fresh_extensions: Path) -> None:
    lock = leave_lock(fresh_extensions, age_s=3600)
    with pytest.raises(RuntimeError, match=rf"{re.escape(str(lock))} is \d+ s old.*delete it") as caught:
        load_ops("required", "cpu")
    assert "fsmoe_cpu" in str(caught.value)
    assert "'auto' or 'reference'" in str(caught.value)


def test_a_fresh_lock_is_waited_for_until_it_is_let_go_or_stale(fresh_extensions: Path) -> None:
    loading.import_op_builder().builders("cpu")
    locks = sys.modules["ds_fsmoe.ops.op_builder.locks"]
    lock, ages_s = leave_lock(fresh_extensions, age_s=0), []

    def grow_older(_: float) -> None:
        make_older(lock, locks.STALE_LOCK_S / 3.5)
        ages_s.append(locks.find_lock(lock).age_s)

    found = locks.wait_for(lock, sleep=grow_older)
    assert found.is_stale
    assert len(ages_s) == 4
    lock.touch()
    assert locks.wait_for(lock, sleep=lambda _: lock.unlink()) is None


def test_importing_builds_and_loads_nothing(tmp_path: Path) -> None:
    script = (
        "import sys, torch, ds_fsmoe.ops, ds_fsmoe.ops.loading, ds_fsmoe.ops.reference, ds_fsmoe.ops.rows\n"
        "assert 'deepspeed' not in sys.modules\n"
        "assert not [name for name in sys.modules if 'op_builder' in name]\n"
        "ops = ds_fsmoe.ops.load_ops('reference', 'cpu')\n"
        "ops.top_k_slots(torch.zeros(2, 3), 1, 1)\n"
        "ops.gather_rows(torch.zeros(2, 3), torch.zeros(1, dtype=torch.int64))\n"
        "assert not hasattr(torch.ops.fsmoe, 'gather_rows')\n"
        "assert not hasattr(torch.ops.fsmoe, 'arrange')\n"
    )
    environment = os.environ | {"TORCH_EXTENSIONS_DIR": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    subprocess.run([sys.executable, "-c", script], env=environment, cwd=tmp_path, check=True, timeout=600)
    assert list(tmp_path.iterdir()) == []


def test_deepspeed_starts_with_our_builders_on_its_path(tmp_path: Path) -> None:
    # DeepSpeed looks for a name in a top-level op_builder to recognise its own source tree: ours must not have it.
    script = (
        "import op_builder, deepspeed, deepspeed.accelerator\n"
        "assert not hasattr(op_builder, '__deepspeed__')\n"
        "accelerator = deepspeed.accelerator.get_accelerator()\n"
        "assert accelerator.op_builder_dir().startswith('deepspeed.'), accelerator.op_builder_dir()\n"
        "assert deepspeed.ops.op_builder.CPUAdamBuilder().name == 'cpu_adam'\n"
    )
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "DS_ACCELERATOR": "cpu"}
    subprocess.run([sys.executable, "-c", script], env=environment, cwd=tmp_path, check=True, timeout=600)


def test_a_torch_upgrade_changes_the_build_and_hides_the_prebuilt_library(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = loading.import_op_builder().builders("cpu")["fsmoe_cpu"]
    before = (builder.cxx_args(), builder.absolute_name())
    monkeypatch.setattr(sys.modules["ds_fsmoe.ops.op_builder.builder"], "TORCH_TAG", "9_9_9")
    assert builder.cxx_args() != before[0]
    assert builder.absolute_name() != before[1]


def load_three_times(rank: int, world_size: int, folder: Path) -> dict[str, str]:
    """What came of three attempts on this rank: the name of the ops, or the error."""
    from deepspeed.ops.op_builder.builder import OpBuilder

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


@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "c++")) is None, reason="no C++ compiler")
def test_local_rank_0_builds_and_all_ranks_agree_on_the_outcome(tmp_path: Path) -> None:
    leave_lock(tmp_path / "locked", age_s=3600)
    for outcomes in run_on_ranks(load_three_times, 2, tmp_path / "ranks", tmp_path):
        assert outcomes["good"] == "compiled"
        locked = outcomes["lock on rank 1"]
        assert "on rank 1" in locked
        assert str(tmp_path / "locked" / "fsmoe_cpu" / "lock") in locked
        failed = outcomes["no compiler on rank 0"]
        assert "compiled ops (fsmoe_cpu)" in failed
        assert "on rank 0" in failed
        assert "'auto' or 'reference'" in failed
    assert (tmp_path / "broken0").exists()
    assert not (tmp_path / "broken1").exists(), "rank 1 tried to build, although rank 0 had not succeeded"
    compiles = (tmp_path / "good/fsmoe_cpu/.ninja_log").read_text().count("python_module.o")
    assert compiles == 1
