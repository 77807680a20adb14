# SPDX-License-Identifier: Apache-2.0
"""Ops, layers on streams and a model under NVIDIA's sanitizer, each in a process of its own. The same runs here on the
CPU, without it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ds_fsmoe.execution.lanes import make_lanes
from ds_fsmoe.ops import Ops, load_ops
from tests.gpu_cases import BODY_ON_CPU, case_of, run_layer
from tests.ops_cases import SHAPES_SMKN
from tests.python_path import python_path
from tests.scripts import ROOT, free_port
from tests.test_gpu_one_rank import compare_gated, compare_numbers
from tests.test_gpu_ops import check_rows, check_slots, ops_of
from tests.test_ops_slots import SHAPES_SEkC

FIXTURES = (ops_of,)  # which pytest finds by their names here

RUNS = [(tool, "ops") for tool in ("memcheck", "racecheck", "initcheck", "synccheck")]
RUNS += [("memcheck", "layers"), ("memcheck", "model")]
FOUND = 86
"""Exit status of the sanitizer where it has found something."""
OPTIONS = {
    # torch asks the driver for what may not be there.
    "memcheck": ["--report-api-errors", "no"],
    # Those of cuBLAS are many, slow and not ours.
    "racecheck": ["--kernel-name", "kns=fsmoe"],
    "synccheck": ["--kernel-name", "kns=fsmoe"],
}


def once(what: str, device_type: str) -> None:
    """What runs under the sanitizer, in a process of its own."""
    device = torch.device(device_type)
    if what == "ops":
        ops = load_ops("required", device_type)
        for shape_SMKN in SHAPES_SMKN[1:4]:
            check_rows(ops, device, shape_SMKN, torch.bfloat16, torch.float32)
        for shape_SEkC in SHAPES_SEkC[1:5]:
            check_slots(ops, device, shape_SEkC, "score")
        compare_gated(ops, device)
        compare_numbers(ops, device, 24, (3, 2))
    elif what == "layers":
        with contextlib.closing(make_lanes(device)) as lanes:
            for seed in (0, 5, 10, 15):
                run_layer(case_of(seed), lanes, device, 32, is_off=True)
    else:
        from tests.gpu_training import train_hf

        train_hf("qwen3_moe", 1, "bf16", {}, 2)
    print("all of it ran")


def command_of(what: str, device_type: str) -> list[str]:
    return [sys.executable, "-c", f"from tests.test_gpu_sanitizer import once; once({what!r}, {device_type!r})"]


def environment_of(device_type: str) -> dict[str, str]:
    """Of one rank, without the caching allocator: its blocks are larger than what was asked for, and a write behind the
    end of a tensor is to be one into memory that is nobody's."""
    of_rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    of_rank |= {"MASTER_PORT": str(free_port()), "DS_ACCELERATOR": device_type, "PYTHONPATH": python_path()}
    return os.environ | of_rank | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def sanitized(tool: str, what: str = "ops") -> None:
    """Run something under a tool of the sanitizer; skips the test where there is none."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=f"{home}/bin")
    if found is None:
        pytest.skip(f"no compute-sanitizer, neither on the PATH nor in {home}/bin")
    options = ["--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20", *OPTIONS.get(tool, [])]
    command, limits = [found, *options, *command_of(what, "cuda")], {"timeout": 150, "check": False}
    done = subprocess.run(command, env=environment_of("cuda"), cwd=ROOT, capture_output=True, text=True, **limits)
    said = f"{done.stdout[-4000:]}{done.stderr[-2000:]}"
    if done.returncode == FOUND:
        pytest.fail(f"{tool} has found something:\n{said}")
    if done.returncode or "all of it ran" not in done.stdout:
        pytest.fail(f"{what} did not run under {tool}, exit status {done.returncode}:\n{said}")


@pytest.mark.gpu
@pytest.mark.parametrize(("tool", "what"), RUNS)
def test_the_sanitizer_finds_nothing(ops_of: Callable[[torch.device], Ops], tool: str, what: str) -> None:
    ops_of(torch.device("cuda"))  # compiled by now, not by a process under the sanitizer
    sanitized(tool, what)


@BODY_ON_CPU
@pytest.mark.parametrize("what", ["ops", "layers", "model"])
def test_what_runs_under_the_sanitizer_runs(ops_of: Callable[[torch.device], Ops], what: str) -> None:
    ops_of(torch.device("cpu"))
    options = {"cwd": ROOT, "capture_output": True, "text": True, "check": False}
    done = subprocess.run(command_of(what, "cpu"), env=environment_of("cpu"), **options)
    assert "all of it ran" in done.stdout.splitlines(), done.stderr[-3000:]


@pytest.mark.parametrize(
    ("status", "prints", "message"),
    [
        (0, "all of it ran", None),
        (FOUND, "Invalid __global__ write of size 4 bytes", "memcheck has found something:\nInvalid __global__ write"),
        (1, "Traceback", "ops did not run under memcheck, exit status 1:\nTraceback"),
    ],
)
def test_what_the_sanitizer_says_is_told(
    status: int, prints: str, message: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a tool of two lines in its place."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f'#!/bin/sh\necho "{prints}"\nexit {status}\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with contextlib.nullcontext() if message is None else pytest.raises(pytest.fail.Exception, match=message):
        sanitized("memcheck")
