# SPDX-License-Identifier: Apache-2.0
"""DS_FSMOE in the environment: what an interpreter does about it, what ranks compare, and that TRL's command trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE

import ds_fsmoe
from ds_fsmoe import env_entry_point
from ds_fsmoe.distributed.agreement import DisagreementError
from tests.ranks import run_on_ranks
from tests.scripts import ROOT, free_port, on_ranks

ENTRY_POINT = ROOT / "ds_fsmoe" / "ds_fsmoe_entry_point.pth"
HEAVY = "print(*(name for name in ('ds_fsmoe', 'torch', 'deepspeed') if name in sys.modules))"
WHOSE = "import ds_fsmoe; print(deepspeed.initialize is ds_fsmoe.initialize)"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder that on PYTHONPATH does what a folder of installed packages does: its .pth files are read at start."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / ENTRY_POINT.name).write_text(ENTRY_POINT.read_text())
    (folder / "sitecustomize.py").write_text("import os, site; site.addsitedir(os.path.dirname(__file__))\n")
    return folder


def python(site: Path, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    others = {name: value for name, value in os.environ.items() if name != "DS_FSMOE"}
    environment = others | {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "DS_ACCELERATOR": "cpu"} | variables
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600)


def test_an_interpreter_imports_nothing_at_its_start_unless_the_variable_is_set(site: Path) -> None:
    for variables in ({}, {"DS_FSMOE": ""}):
        done = python(site, f"import sys; {HEAVY}", **variables)
        assert (done.stdout.strip(), done.stderr) == ("", "")


def test_deepspeed_is_ours_as_soon_as_it_is_imported_if_the_variable_says_so(site: Path) -> None:
    done = python(site, f"import sys; {HEAVY}; import deepspeed; {WHOSE}", DS_FSMOE="1")
    assert done.stdout.splitlines()[:1] == ["ds_fsmoe"], "nothing heavy comes with it"
    assert done.stdout.split()[-1:] == ["True"], done.stderr


@pytest.mark.parametrize(
    ("value", "is_ours"), [("1", True), ("TRUE", True), ("", False), ("0", False), ("False", False)]
)
def test_the_variable_says_it_by_few_words(value: str, is_ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []

    def finder(name: str, act: Any) -> Any:
        assert name == "deepspeed"
        return SimpleNamespace(begin=lambda: begun.append(act))

    monkeypatch.setenv("DS_FSMOE", value)
    monkeypatch.setattr(env_entry_point, "Finder", finder)
    env_entry_point.open_by_variable()
    assert len(begun) == is_ours
    try:
        for act in begun:
            act(deepspeed)
        assert (deepspeed.initialize is ds_fsmoe.initialize) == is_ours
    finally:
        ds_fsmoe.uninstall()


def test_another_value_ends_the_import_of_deepspeed_and_no_interpreter_without_it(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert python(site, "print('through')", DS_FSMOE="yes").stdout.strip() == "through"
    monkeypatch.setenv("DS_FSMOE", "yes")
    with pytest.raises(ValueError, match=r"ds_fsmoe: DS_FSMOE = 'yes' in the environment: write 1 to have deepspeed"):
        env_entry_point._install(deepspeed)


# ---- ranks


def begin_on_the_first_rank_only(rank: int, world_size: int, stage: int) -> tuple[str, str]:
    """What rank 0 raises, and what it said before, where the last rank runs stock DeepSpeed."""
    from tests.logged import heard

    said = heard()
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    config["optimizer"] = {"type": "Adam", "params": {"torch_adam": True}}
    model = MoE(7, torch.nn.Linear(7, 7), num_experts=2)
    ours = dist.new_group([*range(world_size - 1)])
    if rank == world_size - 1:
        return "", ""  # DeepSpeed's own initialize would know nothing of us, and wait for the others in its collectives
    config["fsmoe"] = {"enabled": True, "debug": {"hang_timeout_s": 2.0}}
    ds_fsmoe.install()
    dist.barrier(group=ours)  # one of them that comes late would be named, too
    with pytest.raises(DisagreementError) as caught:
        deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    return str(caught.value), "\n".join(said.lines)


def test_ranks_that_do_not_honour_the_block_are_named_on_all_that_do(tmp_path: Path) -> None:
    *ours, _ = run_on_ranks(begin_on_the_first_rank_only, 3, tmp_path, 1)
    for rank, (raised, said) in enumerate(ours):
        assert raised.startswith("rank 2 of 3 did not call initialize with ds_fsmoe and an enabled block, and rank")
        assert "Every rank needs the same block, and DS_FSMOE=1 in its environment" in raised
        assert rank == 0 or "rank 2 of 3 did not call initialize" not in said
    # One of them may have come a moment late, and been named beside rank 2.
    assert "2 of 3 did not call initialize" in "".join(said for _, said in ours)


# ---- frameworks with a launcher of their own

ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config: {deepspeed_config_file: ds.json, zero3_init_flag: false}
num_machines: 1
num_processes: 2
"""
DATA = [{"text": f"{number} and {number % 7} are {number + number % 7}"} for number in range(32)]


def losses_of_trl(folder: Path, site: Path, out: str, **variables: str) -> tuple[list[float], str]:
    """The losses of ``trl sft``, started as its users start it, and what it printed."""
    words = {"model_name_or_path": "base", "dataset_name": "data", "output_dir": out, "max_steps": 4, "save_steps": 4}
    words |= {"per_device_train_batch_size": 2, "learning_rate": 1e-2, "logging_steps": 1, "report_to": "none"}
    words |= {"max_length": 64, "bf16": False, "gradient_checkpointing": False}
    (folder / "train.json").write_text(json.dumps(words))  # JSON is YAML
    environment = {name: value for name, value in os.environ.items() if name != "DS_FSMOE"} | variables
    environment |= {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    environment |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    command = ["trl", "sft", "--config", "train.json", "--accelerate_config", "accelerate.yaml"]
    command += ["--main_process_port", str(free_port())]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    history = json.loads((folder / out / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    return [each["loss"] for each in history if "loss" in each], done.stdout


@pytest.mark.daily("commands", 1)
def test_trls_command_trains_as_it_is_with_the_losses_of_stock_deepspeed(site: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    with (site / "sitecustomize.py").open("a") as file:
        file.write(f"import runpy; runpy.run_path({str(ROOT / 'examples' / 'on_cpu' / 'sitecustomize.py')!r})\n")
    (tmp_path / "accelerate.yaml").write_text(ACCELERATE)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, DATA)))
    (tmp_path / "ds.json").write_text((ROOT / "examples" / "hf" / "zero2.json").read_text())
    subprocess.run(
        [sys.executable, ROOT / "examples" / "hf" / "make_model.py", "base"], cwd=tmp_path, check=True, timeout=600
    )
    stock, said_by_stock = losses_of_trl(tmp_path, site, "stock")
    ours, said = losses_of_trl(tmp_path, site, "ours", DS_FSMOE="1")
    assert "is on for 2 MoE layer(s)" in said
    assert "ds_fsmoe" not in said_by_stock
    assert len(stock) == 4
    assert ours == pytest.approx(stock, rel=2e-5)


SHOW = "import sys; sys.stdout.write(f'{__name__} {sys.argv}\\n')"  # at once: ranks write into one pipe


def test_run_runs_a_module_as_python_does(tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text(SHOW + "\nimport deepspeed; " + WHOSE)
    (tmp_path / "begin.py").write_text("from ds_fsmoe import run\nrun.main()\n")
    said = on_ranks(tmp_path, "begin.py", "--module", "shown", "sft", "--module", "x")
    for rank in range(2):
        shown = f"__main__ ['{tmp_path}/shown.py', '--local_rank={rank}', 'sft', '--module', 'x']"
        assert shown in said.splitlines(), said
    assert said.splitlines().count("True") == 2
