# SPDX-License-Identifier: Apache-2.0
"""The console script."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.cuda import nccl

from ds_fsmoe import cli
from ds_fsmoe.offline.commands import env
from ds_fsmoe.versions import SUPPORTED, VERSION
from tests.build_locks import FILE_IS_THE_LOCK, hold_lock
from tests.waiting import make_older


def rows_of(text: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}


def env_rows(capsys) -> dict[str, list[str]]:
    cli.main(["env", "--brief"])
    return rows_of(capsys.readouterr().out)


def test_env_says_what_is_installed_and_on_the_shelf(capsys) -> None:
    rows = env_rows(capsys)
    assert rows["ds_fsmoe"][:2] == [VERSION, "[OKAY]"]
    assert rows["deepspeed"][:2] == ["0.19.8", "[OKAY]"]
    assert rows["torch"][1] == "[OKAY]"
    for name in ("transformers", "accelerate", "trl", "peft"):
        assert rows[name][0] == version(name)
    assert rows["NCCL"][0] == ("none" if not dist.is_nccl_available() else ".".join(map(str, nccl.version())))
    assert {"topk", "gshard"} <= {name.rstrip(",") for name in rows["gate"]}
    assert rows["expert"] == ["gpt,", "mixtral"]


def test_env_fails_on_a_version_out_of_range_and_not_on_what_is_missing(capsys, monkeypatch) -> None:
    monkeypatch.setitem(SUPPORTED, "deepspeed", "==0.1.0")
    assert cli.main(["env", "--brief"]) == 1
    assert rows_of(capsys.readouterr().out)["deepspeed"] == ["0.19.8", "[FAIL]", "works", "with", "==0.1.0"]
    monkeypatch.setattr(env, "_installed", lambda name: None if name in ("torch", "deepspeed") else "1.0")
    assert cli.main(["env"]) == 0
    assert rows_of(capsys.readouterr().out)["torch"][:3] == ["not", "installed", "[NO]"]


def test_env_says_what_it_knows_before_it_waits_for_deepspeeds_own_report(capsys, monkeypatch) -> None:
    before = []

    def report() -> str:
        before.append(capsys.readouterr().out)
        return own_report()

    own_report = env.deepspeed_report
    monkeypatch.setattr(env, "deepspeed_report", report)
    assert cli.main(["env"]) == 0
    assert rows_of(before[0])["ds_fsmoe"][0] == VERSION
    assert "names" in before[0]
    assert before[0].splitlines()[-1].startswith("DeepSpeed's own report follows; it takes up to a minute")
    text = capsys.readouterr().out
    assert text.index("extension op report") < text.index("deepspeed info")
    assert "\033" not in before[0] + text


def test_env_says_whether_ops_can_be_had_and_why_not(capsys, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    file = tmp_path / "env.json"
    assert cli.main(["env", "--brief", "--json", str(file)]) == 0
    text = capsys.readouterr().out
    found = {row["name"]: row for row in json.loads(file.read_text())["op"]}
    assert found["fsmoe_cpu"]["state"] == "[NO]"
    assert "'no-such-compiler' is not on the PATH" in found["fsmoe_cpu"]["note"]
    assert "no-such-compiler" in text
    assert set(found) == {"fsmoe_cpu", "fsmoe_cuda"}


def test_env_fails_on_a_stale_lock_and_says_how_old_it_is(capsys, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for name, age_s in (("cpu_adam", 5), ("fsmoe_cpu", 5000)):
        lock = tmp_path / name / "lock"
        lock.parent.mkdir()
        hold_lock(lock)
        make_older(lock, age_s)
    assert cli.main(["env", "--brief"]) == int(FILE_IS_THE_LOCK)
    lines = [line for line in capsys.readouterr().out.splitlines() if "s old" in line]
    assert [line.split()[0] for line in lines] == ["cpu_adam", "fsmoe_cpu"]
    assert "[OKAY]  being built" in lines[0]
    if not FILE_IS_THE_LOCK:
        assert "[OKAY]  being built" in lines[1]
        return
    assert re.search(r" 5\d{3} s old", lines[1])
    assert f"delete {tmp_path / 'fsmoe_cpu' / 'lock'}" in lines[1]


def test_env_tells_what_the_launcher_has_told(capsys, monkeypatch) -> None:
    for name, value in {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    cli.main(["env", "--brief"])
    text = capsys.readouterr().out
    assert "4 on this node, so 2 node(s)" in text
    assert "RANK=3" in text


@pytest.mark.parametrize(("command", "module"), cli.MOVED.items())
def test_a_command_that_became_a_benchmark_says_in_one_line_which(command: str, module: str, capsys) -> None:
    assert cli.main([command, "--ranks", "8"]) == 2
    where = f"it is a benchmark now: in a checkout of the repository, run python -m {module}\n"
    assert capsys.readouterr().err == f"ds_fsmoe {command}: error: {where}"
    assert find_spec(module) is not None


def test_the_package_runs_as_a_module_and_a_name_that_needs_torch_says_so_where_there_is_none() -> None:
    code = (
        "import runpy, sys\nsys.modules['deepspeed'] = None\nimport ds_fsmoe\n"
        "try:\n    ds_fsmoe.initialize\nexcept ModuleNotFoundError as error:\n    print(error)\n"
        "sys.argv = ['ds_fsmoe', '--version']\nrunpy.run_module('ds_fsmoe', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    error, printed = done.stdout.strip().splitlines()
    assert error.endswith("which is not installed: pip install 'ds_fsmoe[train]'")
    assert printed == f"ds_fsmoe {VERSION}"
