# SPDX-License-Identifier: Apache-2.0
"""Who builds a model of our layers and uses none of the entry points is told so, once, and pays for it once."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch

import ds_fsmoe
from ds_fsmoe.checks import missing_engine
from tests.logged import Said, heard
from tests.python_path import python_path
from tests.ranks import run_on_ranks
from tests.small_model import BATCH, LENGTH, WIDTH, Case, SmallModel


def engine_of(initialize: Callable, rank: int, moe_class: type, **blocks: Any) -> deepspeed.DeepSpeedEngine:
    case = Case(ep_size=2)
    model = SmallModel(case, rank, moe_class)
    return initialize(model=model, model_parameters=model.parameters(), config=case.ds_config(**blocks))[0]


def warnings_of_engines(rank: int, said: Said) -> dict[str, int]:
    """What was done -> how often the warning had been heard by then."""
    heard: dict[str, int] = {}

    def note(when: str) -> None:
        warning = "by an engine of DeepSpeed, which does not read the fsmoe block"
        heard[when] = sum(warning in line for line in said.lines)

    x = torch.randn(BATCH, LENGTH, WIDTH)
    engine_of(ds_fsmoe.initialize, rank, ds_fsmoe.MoE, fsmoe={"enabled": True, "ops": "reference"})(x, x)
    note("through an entry point")
    engine_of(ds_fsmoe.initialize, rank, ds_fsmoe.MoE, fsmoe={"enabled": False})(x, x)
    note("through an entry point, disabled")
    engine_of(deepspeed.initialize, rank, deepspeed.moe.layer.MoE)(x, x)
    note("layers of DeepSpeed's")
    engine = engine_of(deepspeed.initialize, rank, ds_fsmoe.MoE)
    engine.eval()
    with torch.no_grad():
        engine(x, x)
    note("no entry point, evaluated")
    engine.train()
    engine(x, x)
    note("no entry point, trained")
    heard["checks left"] = sum(len(each.deepspeed_moe.fsmoe.checks) for each in engine.module.moes)
    engine(x, x)
    engine_of(deepspeed.initialize, rank, ds_fsmoe.MoE)(x, x)
    note("no entry point, trained on")
    return heard


def warnings_about_blocks(rank: int, said: Said) -> list[list[str]]:
    """What is said, in a process of each, when an engine of DeepSpeed's own is made with a config."""
    heard: list[list[str]] = []
    for initialize, written in (
        (deepspeed.initialize, {"fsmoe": {"enabled": False}}),
        (deepspeed.initialize, {}),
        (ds_fsmoe.initialize, {}),
        (ds_fsmoe.initialize, {"fsmoe": {"enabled": True, "ops": "reference"}}),
        (deepspeed.initialize, {"fsmoe": {"enabled": True}}),
        (deepspeed.initialize, {"fsmoe": {}}),
        (deepspeed.initialize, {"fsmeo": {"enabled": True}}),
    ):
        said.lines.clear()
        missing_engine._has_warned = False
        for _ in range(2):
            engine_of(initialize, rank, deepspeed.moe.layer.MoE, **written)
        heard.append([line for line in said.lines if "block" in line and " is on for " not in line])
    return heard


def all_warnings(rank: int, world_size: int) -> tuple[dict[str, int], list[list[str]]]:
    said = heard()
    return warnings_of_engines(rank, said), warnings_about_blocks(rank, said)


def test_the_first_rank_warns_once_of_training_without_an_entry_point_and_of_a_block_that_is_not_read(
    tmp_path: Path,
) -> None:
    (engines, blocks), (other_engines, other_blocks) = run_on_ranks(all_warnings, 2, tmp_path)
    assert engines == {
        "through an entry point": 0,
        "through an entry point, disabled": 0,
        "layers of DeepSpeed's": 0,
        "no entry point, evaluated": 0,
        "no entry point, trained": 1,
        "checks left": 0,
        "no entry point, trained on": 1,
    }
    off, none, none_by_ours, ours, *unread = blocks
    assert off == none == ours == []
    assert none_by_ours == ["the config has no fsmoe block: stock DeepSpeed trains the model"] * 2
    beginnings = [*["the config has an fsmoe block"] * 2, "fsmeo = ...: no such block in a DeepSpeed"]
    for (line,), beginning in zip(unread, beginnings, strict=True):
        assert line.startswith(beginning)
        for way in ("ds_fsmoe.initialize", "ds_fsmoe.install()", "ds_fsmoe.run", "DS_FSMOE=1"):
            assert way in line
    assert set(other_engines.values()) == {0}
    assert other_blocks == [[]] * 7


def test_engines_are_looked_at_if_deepspeed_is_imported_last_and_its_functions_stay_its_own() -> None:
    """Here it was imported first, and the tests above are of that."""
    code = """
import ds_fsmoe, deepspeed, inspect
engine = deepspeed.DeepSpeedEngine.__init__
print(engine.__name__, "args" in inspect.signature(engine).parameters, engine.__globals__["__name__"])
print(deepspeed.initialize.__module__)
"""
    environment = os.environ | {"PYTHONPATH": python_path(), "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600)
    assert done.stdout.split()[-4:] == ["__init__", "True", "ds_fsmoe.env_entry_point", "deepspeed"], done.stderr
    here = deepspeed.DeepSpeedEngine.__init__
    assert (here.__name__, here.__globals__["__name__"]) == ("__init__", "ds_fsmoe.env_entry_point")
    assert "args" in inspect.signature(here).parameters


def test_a_layer_without_any_engine_is_nobodys_mistake() -> None:
    layer = ds_fsmoe.MoE(WIDTH, torch.nn.Linear(WIDTH, WIDTH), num_experts=4)
    layer(torch.randn(5, WIDTH))
    assert layer.deepspeed_moe.fsmoe.checks == []
