# SPDX-License-Identifier: Apache-2.0
"""DS_FSMOE in the environment: what an interpreter does about it, what ranks compare, and that TRL's command trains."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from deepspeed.moe.layer import MoE

import ds_fsmoe
from ds_fsmoe.distributed.agreement import DisagreementError
from tests.ranks import run_on_ranks
from tests.scripts import ROOT, free_port, launch

DOOR = ROOT / "ds_fsmoe" / "ds_fsmoe_door.pth"
HEAVY = "print(*(name for name in ('ds_fsmoe', 'torch', 'deepspeed') if name in sys.modules))"
WHOSE = "import ds_fsmoe; print(deepspeed.initialize is ds_fsmoe.initialize)"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder that on PYTHONPATH does what a folder of installed packages does: its .pth files are read at start."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / DOOR.name).write_text(DOOR.read_text())
    (folder / "sitecustomize.py").write_text("import os, site; site.addsitedir(os.path.dirname(__file__))\n")
    return folder


def python(site: Path, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    others = {name: value for name, value in os.environ.items() if name != "DS_FSMOE"}
    environment = others | {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "DS_ACCELERATOR": "cpu"} | variables
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize(("variables", "loaded"), [({}, ""), ({"DS_FSMOE": ""}, ""), ({"DS_FSMOE": "1"}, "ds_fsmoe")])
def test_an_interpreter_imports_nothing_at_its_start_unless_the_variable_is_set_and_then_nothing_heavy(
    variables: dict[str, str], loaded: str, site: Path
) -> None:
    done = python(site, f"import sys; {HEAVY}", **variables)
    assert (done.stdout.strip(), done.stderr) == (loaded, "")


@pytest.mark.parametrize(("value", "is_ours"), [("1", True), ("TRUE", True), ("0", False), ("false", False)])
def test_deepspeed_is_ours_as_soon_as_it_is_imported_if_the_variable_says_so(
    value: str, is_ours: bool, site: Path
) -> None:
    done = python(site, f"import deepspeed; {WHOSE}", DS_FSMOE=value)
    assert done.stdout.split()[-1:] == [str(is_ours)], done.stderr


def test_another_value_ends_the_import_of_deepspeed_and_no_interpreter_without_it(site: Path) -> None:
    assert python(site, "print('through')", DS_FSMOE="yes").stdout.strip() == "through"
    done = python(site, "import deepspeed", DS_FSMOE="yes")
    assert done.returncode == 1
    assert "ds_fsmoe: DS_FSMOE = 'yes' in the environment: write 1 to have deepspeed.initialize" in done.stderr


# ---- ranks


def begin_on_the_first_rank_only(rank: int, world_size: int, stage: int) -> tuple[str, str]:
    """What rank 0 raises, and what it said before, where the last rank runs stock DeepSpeed."""
    import deepspeed

    from ds_fsmoe.log import logger
    from tests.logged import Said

    said = Said()
    logger.addHandler(said)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    config["optimizer"] = {"type": "Adam", "params": {"torch_adam": True}}
    model = MoE(7, torch.nn.Linear(7, 7), num_experts=2, ep_size=2)
    if rank == world_size - 1:
        # What a rank without the variable does: it knows nothing of us, and waits for the others in its collectives.
        torch.distributed.get_process_group_ranks(None)
        return "", ""
    config["fsmoe"] = {"enabled": True, "debug": {"hang_timeout_s": 2.0}}
    ds_fsmoe.install()
    with pytest.raises(DisagreementError) as caught:
        deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    return str(caught.value), "\n".join(said.lines)


def test_ranks_that_do_not_honour_the_block_are_named_on_all_that_do(tmp_path: Path) -> None:
    *ours, _ = run_on_ranks(begin_on_the_first_rank_only, 3, tmp_path, 1)
    for rank, (raised, said) in enumerate(ours):
        assert raised.startswith("rank 2 of 3 did not come to initialize with ds_fsmoe and an enabled block, and rank")
        assert "Every rank needs DS_FSMOE=1 in its environment" in raised
        assert ("rank 2 of 3 did not come to initialize" in said) == (rank == 0)
