# SPDX-License-Identifier: Apache-2.0
"""Which ops a run gets, and how they are built and loaded: locks, several ranks, what importing must not do, what
stands in a builder's way, and for which GPUs CUDA ops are built. No GPU is needed."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")

from deepspeed.ops.op_builder.builder import OpBuilder  # noqa: E402
from torch.utils import cpp_extension  # noqa: E402

from ds_fsmoe.ops import load_ops, loading, report  # noqa: E402
from tests.build_locks import FILE_IS_THE_LOCK, hold_lock  # noqa: E402
from tests.built_ops import forget_ops  # noqa: E402
from tests.fake_clock import FakeClock  # noqa: E402
from tests.logged import heard  # noqa: E402
from tests.ranks import PRELOADED, run_on_ranks  # noqa: E402
from tests.waiting import LIMIT_S, make_older  # noqa: E402

REPOSITORY = Path(__file__).resolve().parents[1]
NAME = f"{loading.LIBRARIES['cpu']}_{loading.import_op_builder().SOURCE_TAG}"


@pytest.fixture
def extensions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A build folder that is not there yet, in a process that seems to have loaded nothing and given up nothing yet,
    and in which torch may not wait."""

    def wait(baton: object) -> None:
        raise AssertionError("torch waits for the lock, and it does that without a limit")

    monkeypatch.setattr(OpBuilder, "_loaded_ops", {})
    monkeypatch.setattr(loading, "_failed", set())
    monkeypatch.setattr("torch.utils.file_baton.FileBaton.wait", wait)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return tmp_path / "extensions"


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """The warnings so far, also if the package has set up a handler of its own."""
    monkeypatch.setattr(logging.getLogger("ds_fsmoe"), "propagate", True)
    return lambda: [
        each.getMessage() for each in caplog.records if each.name == "ds_fsmoe" and each.levelno >= logging.WARNING
    ]


def builder_for(device_type: str) -> Any:
    return loading.import_op_builder().builders(device_type)[f"fsmoe_{device_type}"]


def test_auto_without_a_compiler_takes_torchs_own_and_says_why_once(extensions: Path, monkeypatch, warned) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    for _ in range(3):
        assert load_ops("auto", "cpu").name == "plain"
    (warning,) = warned()
    assert "no C++ compiler: 'no-such-compiler' is not on the PATH" in warning
    assert not extensions.exists()


def test_auto_after_a_failed_build_takes_torchs_own_and_does_not_build_again(
    extensions: Path, tmp_path: Path, monkeypatch, warned
) -> None:
    compiler, calls = tmp_path / "compiler", tmp_path / "calls"
    answers = 'case "$1" in --version|-v|-dump*) exec c++ "$@";; esac'
    compiler.write_text(f"#!/bin/sh\n{answers}\necho >>{calls}\necho nothing today >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert load_ops("auto", "cpu").name == "plain"
    num_calls = len(calls.read_text())
    assert load_ops("auto", "cpu").name == "plain"
    assert len(calls.read_text()) == num_calls > 0
    (warning,) = warned()
    # Its name goes on with a number where this process has built it before.
    assert "Error building extension 'fsmoe_cpu" in warning
    assert "nothing today" in warning
    assert "'required'" in warning


def test_a_device_type_without_ops_takes_torchs_own_or_is_refused(extensions: Path, warned) -> None:
    for device_type in ("cpu", "cuda", "xpu"):
        assert load_ops("reference", device_type) is loading.REFERENCE
    assert load_ops("auto", "xpu").name == "plain"
    assert "there are none for 'xpu', only for cpu, cuda" in warned()[0]
    with pytest.raises(ValueError, match="compiled ops exist for cpu, cuda only, and this run is on 'xpu'"):
        load_ops("required", "xpu")
    with pytest.raises(ValueError, match="ops = 'fast': must be one of 'auto', 'plain', 'reference', 'required'"):
        load_ops("fast", "cpu")


def test_obstacles_are_named_with_what_to_do_and_are_none_to_a_library_in_the_wheel(
    monkeypatch, tmp_path: Path
) -> None:
    builder = builder_for("cpu")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert not builder.is_compatible()
    for what in ("'c++' is not on the PATH", "pip install ninja", "Python.h is missing"):
        assert what in builder.error_log
    monkeypatch.setattr(type(builder), "is_prebuilt", lambda self: True)
    assert builder.is_compatible()


def test_a_torch_upgrade_changes_the_build_and_hides_the_prebuilt_library(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = builder_for("cpu")
    before = (builder.cxx_args(), builder.absolute_name())
    monkeypatch.setattr(sys.modules["ds_fsmoe.ops.op_builder.builder"], "TORCH_TAG", "9_9_9")
    assert builder.cxx_args() != before[0]
    assert builder.absolute_name() != before[1]


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


# ---- locks


@pytest.fixture
def locks() -> Any:
    """The module, which is there when the builders are."""
    loading.import_op_builder().builders("cpu")
    return sys.modules["ds_fsmoe.ops.op_builder.locks"]


of_a_file = pytest.mark.skipif(not FILE_IS_THE_LOCK, reason="the date of a file says nothing where torch locks it")


def leave_lock(folder: Path, age_s: float = 0) -> Path:
    lock = folder / NAME / "lock"
    lock.parent.mkdir(parents=True)
    hold_lock(lock)
    make_older(lock, age_s)
    return lock


class LockClock(FakeClock):
    """The functions of the module ``time``; only who sleeps gets older, from the moment that a lock was made."""

    def __init__(self, lock: Path, age_s: float) -> None:
        super().__init__()
        self._start_s = lock.stat().st_mtime + age_s

    def time(self) -> float:
        return self._start_s + self.slept_s


@pytest.mark.parametrize(
    ("is_the_lock", "age_s", "waited_s", "said"),
    [
        pytest.param(True, 0, 600, r"60[01] s old", marks=of_a_file),
        pytest.param(True, -60, 600, r"5[34]. s old, and it was there for the 60. s that were waited", marks=of_a_file),
        pytest.param(True, -3e9, 0, r"dated 3000000000 s in the future", marks=of_a_file),
        # What is locked is waited for whatever the date of its file.
        (False, 3600, 600, r"0 s old, and it was there for the 60. s that were waited"),
    ],
)
def test_a_lock_is_waited_for_until_it_is_stale(
    is_the_lock: bool, age_s: float, waited_s: float, said: str, extensions: Path, locks, caplog, monkeypatch
) -> None:
    monkeypatch.setattr(logging.getLogger("ds_fsmoe"), "propagate", True)
    caplog.set_level(logging.INFO, "ds_fsmoe")
    if not is_the_lock:
        monkeypatch.delattr(cpp_extension, "FileBaton", raising=False)
    lock = leave_lock(extensions)
    clock = LockClock(lock, age_s)
    found = locks.wait_for(lock, clock)
    assert found.is_stale
    assert re.fullmatch(said, found.age)
    assert abs(clock.slept_s - waited_s) <= 1.0
    # Once in passing, and once so that it is seen.
    levels = [each.levelname for each in caplog.records if "waiting for the process that builds there" in each.message]
    assert levels == (["INFO", "WARNING"] if waited_s else [])


def build_until_killed(path: Path, has_begun: Any) -> None:
    loading.import_op_builder().builders("cpu")
    with sys.modules["ds_fsmoe.ops.op_builder.locks"].building(path):
        hold_lock(path)
        has_begun.set()
        threading.Event().wait()


def test_the_lock_of_a_build_that_was_killed_is_taken_away(tmp_path: Path, locks) -> None:
    path, context = tmp_path / NAME / "lock", multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    has_begun = context.Event()
    builder = context.Process(target=build_until_killed, args=(path, has_begun), daemon=True)
    builder.start()
    assert has_begun.wait(LIMIT_S)
    assert locks.find_lock(path) is not None
    clock = LockClock(path, 0)
    clock.sleep = lambda _: (builder.kill(), builder.join())
    assert locks.wait_for(path, clock) is None
    assert path.exists()
    with locks.building(path):
        assert path.exists() != FILE_IS_THE_LOCK


def test_a_lock_whose_builder_may_be_on_another_machine_is_waited_for_until_it_is_let_go(tmp_path: Path, locks) -> None:
    path = leave_lock(tmp_path)
    path.with_name("fsmoe_builder").write_text("another-machine")
    assert locks.find_lock(path) is not None
    with locks.building(path):
        assert path.exists()
    clock = LockClock(path, 0)
    clock.sleep = lambda _: path.unlink()
    assert locks.wait_for(path, clock) is None


def test_our_locks_are_looked_for_where_torch_puts_them(tmp_path: Path, locks, monkeypatch) -> None:
    builder = builder_for("cpu")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "named"))
    assert builder.lock_path() == Path(cpp_extension._get_build_directory(builder.name, verbose=False)) / "lock"
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setattr("torch.utils.cpp_extension.get_default_build_root", lambda: str(tmp_path / "usual"))
    assert builder.lock_path() == Path(cpp_extension._get_build_directory(builder.name, verbose=False)) / "lock"
    assert locks.held_locks(locks.extensions_folder()) == []
    hold_lock(builder.lock_path())
    (lock,) = locks.held_locks(locks.extensions_folder())
    assert lock.path == builder.lock_path()
    assert not lock.is_stale


# ---- several ranks


def load_slowly(rank: int, world_size: int) -> tuple[str, int]:
    """What came of it, and how often this rank had spoken to the others before the build was over."""
    builder = type(builder_for("cpu"))
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


def load_often(rank: int, world_size: int, folder: Path) -> None:
    forget_ops()
    # A library without ops is enough here, and compiled in a second: a process that waits for a minute is given up.
    builder = type(builder_for("cpu"))
    builder.sources = lambda self: ["csrc/python_module.cpp"]
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder / "good")
    assert load_ops("required", "cpu").name == "compiled"

    # Rank 0 keeps the library it has in its process, so the lock in this folder is in the way of rank 1 alone.
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder / "locked")
    if rank == 1:
        OpBuilder._loaded_ops.clear()
    lock = re.escape(str(folder / "locked" / NAME / "lock"))
    with pytest.raises(RuntimeError, match=rf"on rank 1[\s\S]*{lock} is \d+ s old[\s\S]*delete it"):
        load_ops("required", "cpu")
    listener = heard("WARNING")
    assert [load_ops("auto", "cpu").name for _ in range(2)] == ["plain", "plain"]
    assert len(listener.lines) == (rank == 0)
    assert all("on rank 1, RuntimeError: " in each for each in listener.lines)

    OpBuilder._loaded_ops.clear()
    if rank == 0:
        os.environ["CXX"] = "false"
    # Folders of their own here: what rank 1 does shows in its folder, and no lock of rank 0 can hide it.
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder / f"broken{rank}")
    with pytest.raises(RuntimeError, match=r"compiled ops \(fsmoe_cpu\)[\s\S]*on rank 0[\s\S]*'auto' or 'plain'"):
        load_ops("required", "cpu")


@of_a_file
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "c++")) is None, reason="no C++ compiler")
def test_local_rank_0_builds_and_what_one_rank_cannot_have_no_rank_uses(tmp_path: Path) -> None:
    leave_lock(tmp_path / "locked", age_s=3600)
    run_on_ranks(load_often, 2, tmp_path / "ranks", tmp_path)
    assert (tmp_path / "broken0").exists()
    assert not (tmp_path / "broken1").exists(), "rank 1 tried to build, although rank 0 had not succeeded"
    compiles = (tmp_path / "good" / NAME / ".ninja_log").read_text().count("python_module.o")
    assert compiles == 1


# ---- for which releases of CUDA, and for which GPUs


def toolkit_of(release: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The builder of CUDA's ops, with a toolkit whose nvcc does no more than say its release; none: without nvcc."""
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(folder))
    if release is not None:
        nvcc = folder / "bin" / "nvcc"
        nvcc.parent.mkdir(exist_ok=True)
        nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.88'\n")
        nvcc.chmod(0o755)
    return builder_for("cuda")


@pytest.mark.parametrize(
    ("release", "for_torch", "state"),
    [
        ("13.2", "13.0", "[OKAY]"),
        ("13.0", "13.1", "[OKAY]"),
        ("13.0", "12.4", "[FAIL]"),
        ("12.9", "13.0", "[FAIL]"),
        ("13.0", None, ""),
        (None, "13.0", "[NO]"),
    ],
)
def test_builds_and_the_report_accept_the_same_releases_of_cuda(
    release: str | None, for_torch: str | None, state: str, tmp_path: Path, monkeypatch
) -> None:
    builder = toolkit_of(release, tmp_path, monkeypatch)
    monkeypatch.setattr(torch.version, "cuda", for_torch)
    monkeypatch.setenv("DS_BUILD_FSMOE", "1")  # for a wheel no device is needed
    found = next(row for row in report.compiler_rows() if row[0] == "nvcc")
    assert found[1:3] == (release or "not found", state)
    if release is None:
        assert any(f"{tmp_path}/bin/nvcc does not run" in each for each in builder.obstacles())
        return
    assert "without CUDA" in found[3] if for_torch is None else f"CUDA {for_torch}" in found[3]
    reasons = [each for each in builder.obstacles() if "CUDA" in each]
    assert (reasons == []) == (state == "[OKAY]")
    if state == "[FAIL]":
        assert reasons == [found[3]]


def gencode(arguments: list[str]) -> list[str]:
    """What code is made of, of nvcc's arguments, without what they share; sorted."""
    return sorted(each.rpartition("=")[2] for each in arguments if each.startswith("-gencode="))


@pytest.mark.parametrize(
    ("release", "made"),
    [("12.6", ["compute_90", "sm_80", "sm_90"]), ("13.1", ["compute_100", "sm_100", "sm_80", "sm_90"])],
)
def test_a_wheel_is_compiled_for_what_the_toolkit_knows(
    release: str, made: list[str], tmp_path: Path, monkeypatch
) -> None:
    builder = toolkit_of(release, tmp_path, monkeypatch)
    monkeypatch.setattr(torch.version, "cuda", release.split(".")[0] + ".0")
    for name in ("TORCH_CUDA_ARCH_LIST", "DS_SKIP_CUDA_CHECK"):
        monkeypatch.delenv(name, raising=False)
    assert gencode(builder.builder().extra_compile_args["nvcc"]) == made
    assert not {"TORCH_CUDA_ARCH_LIST", "DS_SKIP_CUDA_CHECK"} & set(os.environ)


CARDS = {"A100": (8, 0), "H100": (9, 0), "B200": (10, 0), "RTX 5090": (12, 0)}


@pytest.fixture
def builder_on(tmp_path, monkeypatch) -> Callable[..., Any]:
    """(TORCH_CUDA_ARCH_LIST, cards) -> a builder on a machine with those cards. Its toolkit is of torch's release."""
    found = toolkit_of("13.0", tmp_path, monkeypatch)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("DS_BUILD_FSMOE", raising=False)
    found.jit_mode = True

    def put(architectures: str, *cards: str) -> Any:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", architectures)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: CARDS[cards[index]])
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: cards[index])
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90", "sm_100", "compute_100"])
        return found

    return put


@pytest.mark.parametrize(
    ("architectures", "cards", "made"),
    [
        ("9.0a+PTX", ["H100"], ["compute_90a", "sm_90a"]),
        ("Blackwell", ["B200"], ["compute_121", "sm_100", "sm_103", "sm_120", "sm_121"]),
        ("8.0 9.0a", ["H100"], ["sm_80", "sm_90a"]),
        (" 8.0;  9.0 ; ", ["A100", "H100"], ["sm_80", "sm_90"]),
        ("8.0+PTX", ["H100", "B200"], ["compute_80", "sm_80"]),
        ("native", ["RTX 5090"], ["compute_100", "sm_100"]),
        ("", ["A100"], ["compute_80", "sm_80"]),
    ],
)
def test_ops_are_built_for_what_torch_understands_and_torch_adds_no_flags(
    builder_on, architectures, cards, made
) -> None:
    found = builder_on(architectures, *cards)
    assert found.obstacles() == []
    assert gencode(found.nvcc_args()) == made
    assert cpp_extension._get_cuda_arch_flags(found.nvcc_args()) == []


@pytest.mark.parametrize(
    ("architectures", "cards", "said"),
    [
        ("12.0f", ["H100"], "Unknown CUDA arch (12.0f) or GPU not supported; in place of 12.0f write 12.0 or 12.0a or"),
        (
            "hopper",
            ["H100"],
            "in place of 'hopper' write a number such as 9.0 or 9.0+PTX, or a generation such as Hopper",
        ),
        ("8.0", ["H100"], "(H100, 9.0) can run: add 9.0"),
        ("9.0a+PTX", ["B200"], "(B200, 10.0) can run: add 10.0"),
        ("9.0", ["H100", "A100"], "(A100, 8.0) can run: add 8.0"),
        ("native", [], "no GPU is visible to compile for: name some in TORCH_CUDA_ARCH_LIST, such as 9.0"),
    ],
)
def test_a_list_that_torch_refuses_or_that_names_nothing_for_a_card_is_named_with_what_to_write(
    builder_on, architectures, cards, said
) -> None:
    (reason,) = builder_on(architectures, *cards).obstacles()
    assert said in reason
    assert not cards or reason.startswith(f"TORCH_CUDA_ARCH_LIST = {architectures!r}")


def test_a_wheel_may_be_for_cards_that_are_not_here(builder_on, monkeypatch) -> None:
    found = builder_on("8.0", "H100")
    monkeypatch.setenv("DS_BUILD_FSMOE", "1")
    assert found.obstacles() == []
