# SPDX-License-Identifier: Apache-2.0
"""The console script."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ds_fsmoe import cli
from ds_fsmoe.commands import env
from ds_fsmoe.versions import SUPPORTED, VERSION


def rows_of(text: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}


def test_env_says_what_is_installed_and_on_the_shelf(capsys) -> None:
    assert cli.main(["env"]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert rows["ds_fsmoe"][:2] == [VERSION, "[OKAY]"]
    assert rows["deepspeed"][:2] == ["0.19.8", "[OKAY]"]
    assert rows["torch"][1] == "[OKAY]"
    assert rows["gate"] == ["topk"]
    assert rows["expert"] == ["gpt,", "mixtral"]


def test_env_fails_on_a_version_out_of_range(capsys, monkeypatch) -> None:
    monkeypatch.setitem(SUPPORTED, "deepspeed", "==0.1.0")
    assert cli.main(["env"]) == 1
    assert rows_of(capsys.readouterr().out)["deepspeed"] == ["0.19.8", "[FAIL]", "works", "with", "==0.1.0"]


def test_what_is_missing_is_no_failure_on_a_laptop_that_plans(capsys, monkeypatch) -> None:
    monkeypatch.setattr(env, "_installed", lambda name: None if name in ("torch", "deepspeed") else "1.0")
    assert cli.main(["env"]) == 0
    assert rows_of(capsys.readouterr().out)["torch"][:3] == ["not", "installed", "[NO]"]


def test_an_unknown_command_lists_the_known_ones(capsys) -> None:
    with pytest.raises(SystemExit):
        cli.main(["dance"])
    assert "choose from 'env'" in capsys.readouterr().err.replace("choose from env", "choose from 'env'")


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "ds_fsmoe", "--version"], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == f"ds_fsmoe {VERSION}"


def test_a_name_that_needs_torch_says_so_where_there_is_none() -> None:
    code = (
        "import sys\nsys.modules['deepspeed'] = None\nimport ds_fsmoe\n"
        "try:\n    ds_fsmoe.initialize\nexcept ModuleNotFoundError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip().endswith("which is not installed: pip install 'ds_fsmoe[train]'")
