# SPDX-License-Identifier: Apache-2.0
"""A block given from outside, to a script whose config is a dict inside it."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.moe.layer import MoE

import ds_fsmoe
from ds_fsmoe import ConfigError, run
from ds_fsmoe.cli import main
from ds_fsmoe.engine import entry_points
from ds_fsmoe.engine.command_line import read_given, take_option
from ds_fsmoe.log import logger
from ds_fsmoe.offline.commands.training_command import find_given
from tests.logged import Said
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.scripts import ROOT, START, launch

ENABLED = '{"enabled": true}'
SCRIPT = """
import argparse, sys
import deepspeed, torch
from deepspeed.moe.layer import MoE

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("--fsmoe")
args = parser.parse_args()
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam", "params": {"torch_adam": True}}}
for own in ({}, {"fsmoe": {"enabled": True, "order": "sparse"}}):
    model = MoE(7, torch.nn.Linear(7, 7), num_experts=2, ep_size=2)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config | own)
    order = engine.fsmoe.block.order if hasattr(engine, "fsmoe") else "stock"
    print(f"rank {args.local_rank}: {order}, its own argument is {args.fsmoe}", flush=True)
"""


@pytest.mark.parametrize(
    ("arguments", "taken"),
    [
        (["train.py", "--fsmoe", "x"], (None, [], ["train.py", "--fsmoe", "x"])),
        (["--fsmoe", "a.json", "train.py", "--fsmoe=x"], ("a.json", [], ["train.py", "--fsmoe=x"])),
        (["--local_rank=1", f"--fsmoe={ENABLED}", "train.py"], (ENABLED, ["--local_rank=1"], ["train.py"])),
        (["--fsmoe", "a=b.json", "--local-rank=0", "train.py"], ("a=b.json", ["--local-rank=0"], ["train.py"])),
        (["--fsmoe-like", "train.py"], (None, ["--fsmoe-like"], ["train.py"])),
        ([], (None, [], [])),
    ],
)
def test_only_what_stands_in_front_of_the_script_is_taken(arguments: list[str], taken: tuple) -> None:
    assert take_option(arguments) == taken


def test_a_block_is_read_from_a_file_or_as_json(tmp_path: Path) -> None:
    file = tmp_path / "block.json"
    file.write_text('{"enabled": true, // as DeepSpeed reads it\n "order": "sparse"}')
    assert read_given(str(file)) == {"enabled": True, "order": "sparse"}
    file.write_text('{"zero_optimization": {"stage": 1}, "fsmoe": {"enabled": false}}')
    assert read_given(str(file)) == {"enabled": False}
    assert read_given(f" {ENABLED}") == {"enabled": True}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("absent.json", "--fsmoe absent.json: no such file; the value is a file, or a JSON object such as"),
        ("broken.json", "--fsmoe broken.json: cannot be read as JSON: "),
        ("list.json", "--fsmoe list.json: holds [1]; the block is an object"),
        ("inner.json", "--fsmoe inner.json: holds true; the block is an object"),
        ('{"enabled": tru}', '--fsmoe {"enabled": tru}: is not JSON: '),
        ("", "--fsmoe : no such file"),
    ],
)
def test_what_is_no_block_is_refused_with_what_was_given(
    text: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, written in {"broken": '{"enabled": ', "list": "[1]", "inner": '{"fsmoe": true}'}.items():
        Path(f"{name}.json").write_text(written)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        read_given(text)


def test_run_and_install_refuse_a_wrong_block_before_the_script_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise AssertionError('the script has begun')")
    for arguments, sentence in (
        (["--fsmoe", '{"enabled": true, "gat": 1}', str(script)], '"gat": 1}: fsmoe.gat: unknown key; did you mean'),
        (["--fsmoe", "{}", str(script)], 'ds_fsmoe.run: --fsmoe {}: fsmoe.enabled is missing: write "enabled": true'),
        (["--fsmoe", "absent.json", str(script)], "absent.json: no such file"),
        (["--fsmoe", ENABLED, "--fsmoe", ENABLED, str(script)], "--fsmoe is given twice"),
        (["--fsmoe"], "--fsmoe needs a value"),
        (["--fsmoe", ENABLED], "no script given"),
    ):
        monkeypatch.setattr("sys.argv", ["run", *arguments])
        monkeypatch.setattr("sys.path", ["", str(ROOT)])
        with pytest.raises(SystemExit, match=re.escape(sentence)):
            run.main()
    ds_fsmoe.uninstall()
    with pytest.raises(ConfigError, match="unknown key"):
        ds_fsmoe.install({"enabled": True, "gat": 1})
    assert deepspeed.initialize is not ds_fsmoe.initialize
    assert run.split_arguments(["--local_rank=0", str(script), "--fsmoe", "x"])[1:] == (
        False,
        ["--local_rank=0", "--fsmoe", "x"],
        None,
    )


def give(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Where the config was -> whose engine it became, with a block given from outside."""

    def look(name: str, model: torch.nn.Module | None = None, **where: Any) -> None:
        made, *_ = deepspeed.initialize(model=MoE(7, torch.nn.Linear(7, 7)) if model is None else model, **where)
        found[name] = made.fsmoe.block.order if hasattr(made, "fsmoe") else "stock"
        made.destroy()

    plain: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1}
    own = plain | {"fsmoe": {"enabled": True, "order": "sparse"}}
    file = Path(folder, "ds_config.json")
    file.write_text(json.dumps(plain))
    listening, found = Said(), {}
    logger.addHandler(listening)

    ds_fsmoe.install({"enabled": True, "order": "einsum"})
    entry_points.warn_if_unused()
    assert "was not used" in listening.lines.pop()
    look("no MoE layer", torch.nn.Linear(7, 7), config=own)
    entry_points.warn_if_unused()
    said = "Linear is trained by stock DeepSpeed (the model has no MoE layers for the command line's fsmoe block)"
    assert [said in listening.lines[0], "was not used" in listening.lines[1]] == [True, True]
    look("no block", config=plain)
    look("a block of its own", config=own)
    assert any("replaces the one in the script's config" in each for each in listening.lines)
    look("config_params", config_params=plain)
    look("a file", config=str(file))
    args = Namespace(deepspeed_config=str(file))
    look("args", args=args)
    assert args.deepspeed_config == str(file)
    assert (plain, own["fsmoe"]) == ({"train_micro_batch_size_per_gpu": 1}, {"enabled": True, "order": "sparse"})
    ds_fsmoe.install()
    look("a second install", config=plain)
    listening.lines.clear()
    entry_points.warn_if_unused()
    assert not listening.lines
    ds_fsmoe.install({"enabled": False})
    look("stock from outside", config=own)
    ds_fsmoe.uninstall()
    ds_fsmoe.install()
    look("after uninstall", config=own)
    return found


def test_a_block_from_outside_takes_the_place_of_every_other(tmp_path: Path) -> None:
    assert run_on_ranks(give, 1, tmp_path / "rank", str(tmp_path)) == [
        {
            "no MoE layer": "stock",
            "no block": "einsum",
            "a block of its own": "einsum",
            "config_params": "einsum",
            "a file": "einsum",
            "args": "einsum",
            "a second install": "einsum",
            "stock from outside": "stock",
            "after uninstall": "sparse",
        }
    ]


@START
@sampled(("block", "order"), [(ENABLED, "auto"), ('{"enabled": false}', "stock")], kept=[0])
def test_a_script_with_its_config_inside_is_given_a_block(start: Any, block: str, order: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    runner = ["--module", "ds_fsmoe.run"] if start is launch else [str(ROOT / "ds_fsmoe" / "run.py")]
    said = start(tmp_path, *runner, "--fsmoe", block, "train.py", "--fsmoe", "mine")
    for rank in range(2):
        assert said.count(f"rank {rank}: {order}, its own argument is mine") == 2


# ---- compare


def test_compare_hands_its_block_to_run_in_front_of_the_script() -> None:
    start = ["deepspeed", "--num_gpus", "2", "--module", "ds_fsmoe.run"]
    subject = find_given([*start, "train.py", "--fsmoe", "mine"], ENABLED)
    assert subject is not None
    assert subject.config == {"fsmoe": {"enabled": True}}
    assert subject.command_with(Path("out.json")) == [*start, "--fsmoe", "out.json", "train.py", "--fsmoe", "mine"]
    in_command = find_given([*start, f"--fsmoe={ENABLED}", "train.py"], None)
    assert in_command is not None
    assert in_command.command_with(Path("out.json")) == [*start, "--fsmoe", "out.json", "train.py"]
    assert find_given([*start, "train.py", "--fsmoe", "mine"], None) is None
    assert find_given(["deepspeed", "train.py"], None) is None


@pytest.mark.parametrize(
    ("given", "command", "sentence"),
    [
        (["--fsmoe", ENABLED], ["deepspeed", "train.py"], "ds_fsmoe.run, which is not in the command"),
        (
            ["--fsmoe", ENABLED],
            ["-m", "ds_fsmoe.run", "--fsmoe", ENABLED, "train.py"],
            "is given twice, also in the command",
        ),
        (["--fsmoe", "absent.json"], ["-m", "ds_fsmoe.run", "train.py"], "--fsmoe absent.json: no such file"),
        ([], ["-m", "ds_fsmoe.run", "--fsmoe", "absent.json", "train.py"], "--fsmoe absent.json: no such file"),
        ([], ["-m", "ds_fsmoe.run", "train.py"], "for a script whose config is inside it, give the block with --fsmoe"),
    ],
)
def test_compare_says_why_a_block_cannot_be_handed_on(
    given: list[str], command: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "--out", str(tmp_path), *given, "--", *command]) == 2
    assert sentence in capsys.readouterr().err
