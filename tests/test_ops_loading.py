# SPDX-License-Identifier: Apache-2.0
"""Which ops a run gets: what "auto" falls back to and says, what stands in a builder's way; on one rank and on two."""

from __future__ import annotations

import logging
import os
import re
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")

from ds_fsmoe.ops import load_ops, loading, report  # noqa: E402
from tests.build_locks import FILE_IS_THE_LOCK, hold_lock  # noqa: E402
from tests.built_ops import forget_ops  # noqa: E402
from tests.logged import Said  # noqa: E402
from tests.ranks import run_on_ranks  # noqa: E402
from tests.waiting import make_older  # noqa: E402


@pytest.fixture
def untried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty build folder, in a process that seems to have loaded nothing and given up nothing yet."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    monkeypatch.setattr(OpBuilder, "_loaded_ops", {})
    monkeypatch.setattr(loading, "_failed", set())
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return tmp_path / "extensions"


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    ours = [record for record in caplog.records if record.name == "ds_fsmoe"]
    return [record.getMessage() for record in ours if record.levelno >= logging.WARNING]


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """The log, also if the package has set up a handler of its own."""
    monkeypatch.setattr(logging.getLogger("ds_fsmoe"), "propagate", True)
    return caplog


def test_auto_without_a_compiler_takes_torchs_own_and_says_why_once(untried: Path, monkeypatch, said) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    for _ in range(3):
        assert load_ops("auto", "cpu").name == "plain"
    (warning,) = warnings_of(said)
    assert "no C++ compiler: 'no-such-compiler' is not on the PATH" in warning
    assert "'required'" in warning
    assert not untried.exists()


def test_auto_after_a_failed_build_takes_torchs_own_and_does_not_build_again(
    untried: Path, tmp_path: Path, monkeypatch, said
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
    (warning,) = warnings_of(said)
    # Its name goes on with a number where this process has built it before.
    assert "Error building extension 'fsmoe_cpu" in warning
    assert "nothing today" in warning


def test_a_stale_lock_stops_required_and_is_the_reason_that_auto_gives(untried: Path, monkeypatch, said) -> None:
    lock = untried / loading.import_op_builder().builders("cpu")["fsmoe_cpu"].name / "lock"
    lock.parent.mkdir(parents=True)
    hold_lock(lock)
    make_older(lock, 3600)
    if not FILE_IS_THE_LOCK:  # its date says nothing: how long it was waited for does
        monkeypatch.setattr(sys.modules["ds_fsmoe.ops.op_builder.locks"], "STALE_LOCK_S", 0.0)
    with pytest.raises(RuntimeError, match=rf"{re.escape(str(lock))} is \d+ s old.*delete it") as caught:
        load_ops("required", "cpu")
    assert "fsmoe_cpu" in str(caught.value)
    assert "'auto' or 'plain'" in str(caught.value)
    assert load_ops("auto", "cpu").name == "plain"
    assert str(lock) in warnings_of(said)[0]


def test_a_device_type_without_ops_takes_torchs_own_or_is_refused(untried: Path, said) -> None:
    for device_type in ("cpu", "cuda", "xpu"):
        assert load_ops("reference", device_type) is loading.REFERENCE
    assert load_ops("auto", "xpu").name == "plain"
    assert "there are none for 'xpu', only for cpu, cuda" in warnings_of(said)[0]
    with pytest.raises(ValueError, match="compiled ops exist for cpu, cuda only, and this run is on 'xpu'"):
        load_ops("required", "xpu")
    with pytest.raises(ValueError, match="ops = 'fast': must be one of 'auto', 'plain', 'reference', 'required'"):
        load_ops("fast", "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: the ops can be built")
def test_without_a_gpu_the_cuda_ops_say_what_is_missing(untried: Path, said) -> None:
    builder = loading.import_op_builder().builders("cuda")["fsmoe_cuda"]
    assert not builder.is_compatible()
    assert re.search("without CUDA|no CUDA device|ROCm", builder.error_log)
    with pytest.raises(RuntimeError, match=r"without CUDA|no CUDA device|ROCm"):
        load_ops("required", "cuda")
    assert load_ops("auto", "cuda").name == "plain"
    assert not untried.exists()


def test_obstacles_are_named_with_what_to_do(monkeypatch, tmp_path: Path) -> None:
    builder = loading.import_op_builder().builders("cpu")["fsmoe_cpu"]
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert not builder.is_compatible()
    for what in ("'c++' is not on the PATH", "pip install ninja", "Python.h is missing"):
        assert what in builder.error_log


def test_a_library_in_the_wheel_needs_no_compiler(monkeypatch) -> None:
    builder = loading.import_op_builder().builders("cpu")["fsmoe_cpu"]
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not builder.is_compatible()
    monkeypatch.setattr(type(builder), "is_prebuilt", lambda self: True)
    assert builder.is_compatible()


def test_our_locks_are_looked_for_where_torch_puts_them(tmp_path: Path, monkeypatch) -> None:
    from torch.utils.cpp_extension import _get_build_directory

    builder = loading.import_op_builder().builders("cpu")["fsmoe_cpu"]
    locks = sys.modules["ds_fsmoe.ops.op_builder.locks"]
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "named"))
    assert builder.lock_path() == Path(_get_build_directory(builder.name, verbose=False)) / "lock"
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setattr("torch.utils.cpp_extension.get_default_build_root", lambda: str(tmp_path / "usual"))
    assert builder.lock_path() == Path(_get_build_directory(builder.name, verbose=False)) / "lock"
    assert locks.held_locks(locks.extensions_folder()) == []
    hold_lock(builder.lock_path())
    (lock,) = locks.held_locks(locks.extensions_folder())
    assert lock.path == builder.lock_path()
    assert not lock.is_stale


def load_where_rank_1_cannot(rank: int, world_size: int, folder: Path) -> dict[str, object]:
    """What two attempts gave on this rank, and what it said; nothing stands in the way of rank 0, it seems."""
    forget_ops()
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder / f"extensions{rank}")
    if rank == 1:
        os.environ["CXX"] = "no-such-compiler"
    else:  # as if it were there already: that the others cannot have it is what this is about
        builder = type(loading.import_op_builder().builders("cpu")["fsmoe_cpu"])
        builder.load = lambda self, verbose=False: None
        builder.will_compile = lambda self: False
    listener = Said(logging.WARNING)
    logging.getLogger("ds_fsmoe").addHandler(listener)
    names = [load_ops("auto", "cpu").name for _ in range(2)]
    try:
        load_ops("required", "cpu")
        refused = None
    except RuntimeError as err:
        refused = str(err)
    return {"names": names, "said": listener.lines, "refused": refused}


@pytest.mark.long
def test_what_one_rank_cannot_have_no_rank_uses(tmp_path: Path) -> None:
    first, second = run_on_ranks(load_where_rank_1_cannot, 2, tmp_path / "ranks", tmp_path)
    assert first["names"] == second["names"] == ["plain", "plain"]
    (warning,) = first["said"]
    assert "on rank 1, RuntimeError: no C++ compiler: 'no-such-compiler'" in warning
    assert second["said"] == []
    for outcome in (first, second):
        assert "ops = 'required'" in outcome["refused"]
        assert "on rank 1" in outcome["refused"]


def toolkit_of(release: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A toolkit whose nvcc does no more than say its release."""
    from torch.utils import cpp_extension

    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir(exist_ok=True)
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.88'\n")
    nvcc.chmod(0o755)
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(folder))


FITS = [
    ("13.0", "13.0", "[OKAY]"),
    ("13.2", "13.0", "[OKAY]"),
    ("13.0", "13.1", "[OKAY]"),
    ("12.4", "12.8", "[OKAY]"),
    ("13.0", "12.4", "[FAIL]"),
    ("12.9", "13.0", "[FAIL]"),
    ("13.0", None, ""),
]


@pytest.mark.parametrize(("release", "for_torch", "state"), FITS)
def test_builds_and_the_report_accept_the_same_releases_of_cuda(
    release: str, for_torch: str | None, state: str, tmp_path: Path, monkeypatch
) -> None:
    toolkit_of(release, tmp_path, monkeypatch)
    monkeypatch.setattr(torch.version, "cuda", for_torch)
    monkeypatch.setenv("DS_BUILD_FSMOE", "1")  # for a wheel no device is needed
    found = next(row for row in report.compiler_rows() if row[0] == "nvcc")
    assert found[1:3] == (release, state)
    assert "without CUDA" in found[3] if for_torch is None else f"CUDA {for_torch}" in found[3]
    builder = loading.import_op_builder().builders("cuda")["fsmoe_cuda"]
    reasons = [each for each in builder.obstacles() if "CUDA" in each]
    assert (reasons == []) == (state == "[OKAY]")
    if state == "[FAIL]":
        assert reasons == [found[3]]


def gencode(arguments: list[str]) -> list[str]:
    """What code is made of, of nvcc's arguments, without what they share; sorted."""
    return sorted(each.rpartition("=")[2] for each in arguments if each.startswith("-gencode="))


OF_WHEELS = {
    "8.0;9.0+PTX": ["compute_90", "sm_80", "sm_90"],
    "8.0;9.0;10.0+PTX": ["compute_100", "sm_100", "sm_80", "sm_90"],
}


@pytest.mark.parametrize(
    ("release", "architectures"), [("12.6", "8.0;9.0+PTX"), ("12.8", "8.0;9.0;10.0+PTX"), ("13.1", "8.0;9.0;10.0+PTX")]
)
def test_a_wheel_is_compiled_for_what_the_toolkit_knows(
    release: str, architectures: str, tmp_path: Path, monkeypatch
) -> None:
    toolkit_of(release, tmp_path, monkeypatch)
    monkeypatch.setattr(torch.version, "cuda", release.split(".")[0] + ".0")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "")
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST")
    monkeypatch.delenv("DS_SKIP_CUDA_CHECK", raising=False)
    builder = loading.import_op_builder().builders("cuda")["fsmoe_cuda"]
    arguments = builder.builder().extra_compile_args["nvcc"]
    assert gencode(arguments) == OF_WHEELS[architectures]
    assert not {"TORCH_CUDA_ARCH_LIST", "DS_SKIP_CUDA_CHECK"} & set(os.environ)


def test_without_a_toolkit_builds_and_the_report_say_so(tmp_path: Path, monkeypatch) -> None:
    from torch.utils import cpp_extension

    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = next(row for row in report.compiler_rows() if row[0] == "nvcc")
    assert found[1:3] == ("not found", "[NO]")
    builder = loading.import_op_builder().builders("cuda")["fsmoe_cuda"]
    assert any(f"{tmp_path}/bin/nvcc does not run" in each for each in builder.obstacles())
