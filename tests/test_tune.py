# SPDX-License-Identifier: Apache-2.0
"""``ds_fsmoe tune``: which layouts run, what is said of them, and the config that is written."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds_fsmoe.cli import main
from ds_fsmoe.files.runs import read_run
from ds_fsmoe.offline.commands.layouts import (
    AllowedSizes,
    ExpertLayout,
    Job,
    changes_of,
    in_order,
    layouts_of,
    micro_batches_of,
    with_changes,
    words_of_changes,
)
from ds_fsmoe.offline.commands.training_command import OURS, PlannedRun, TrainingCommand, find_config
from ds_fsmoe.offline.commands.training_run import OUT_OF_TIME, run_training
from ds_fsmoe.offline.commands.tune import AS_IT_IS
from tests.built_ops import build_ops
from tests.python_path import python_path
from tests.scripts import ROOT

OWN = ExpertLayout(2, 1, 2)
HUGGING_FACE = Job(4, (8, 8), False, OWN)
STOCKS = Job(4, (8, 8), True, OWN)
# Writes the record of a run without training. The first argument says what it does with each ep_size, the second is the
# config, and to the third it adds the block of each run: a number is the ms of a step, other words an end, a list of
# words that of each run in turn.
RUNS = """
import json, pathlib, signal, sys

config = json.loads(pathlib.Path(sys.argv[2]).read_text())
block = config["fsmoe"]
with pathlib.Path(sys.argv[3]).open("a") as file:
    file.write(json.dumps(config) + "\\n")
size, folder = block.get("ep_size", 2), pathlib.Path(block["record"]["dir"])
all_do = json.loads(sys.argv[1])
does = all_do["stock"] if "stock" in all_do and not block["enabled"] else all_do[str(size)]
runs = [json.loads(each)["fsmoe"].get("ep_size", 2) for each in pathlib.Path(sys.argv[3]).read_text().splitlines()]
if isinstance(does, list) and isinstance(does[0], str):
    does = does[runs.count(size) - 1]
layers = {"L00": {"path": "experts", "experts": 8, "ep_size": size, "k": 2, "own_ep_size": False}}
schedule = "best" if block["enabled"] else "stock"
facts = {"format": 1, "schedule": schedule, "layers": layers, "world_size": 4, "block": block, "ended": "now"}
if does == "no record":
    sys.exit()
if does == "memory at once":
    raise RuntimeError("CUDA out of memory. Tried to allocate 20 GiB")
facts["zero_stage"] = config.get("zero_optimization", {}).get("stage", 0)
(folder / "run.json").write_text(json.dumps(facts))
if does == "memory":
    raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
if does == "hang":
    signal.pause()
if does == "fail":
    raise ValueError("experts: are not divisible")
if does == "wide":
    does = [90, 110] * 8
is_late = isinstance(does, str)
does = int(does.removeprefix("late ")) if is_late else does
does = does if isinstance(does, list) else [does + step % 3 / 10 for step in range(12)]
is_tuning = "tunes" in sys.argv
micro = 2 if "ignores" in sys.argv else config.get("train_micro_batch_size_per_gpu", 1)
tokens = 64 * micro * config.get("gradient_accumulation_steps", 1)
steps = [{"step": 1 + i, "step_ms": ms, "tokens_of_rank": tokens} for i, ms in enumerate(does)]
for each in steps if is_late and is_tuning else ():
    each["is_tuning"] = True
(folder / "steps.jsonl").write_text("".join(json.dumps(each) + "\\n" for each in steps))
if is_late:
    raise RuntimeError("the model could not be saved")
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    written = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8},
        "fsmoe": {"enabled": True, "num_chunks": {"forward": 2}, "trace": {"enabled": True, "cluster": "testbed_b"}},
    }
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(written, indent=4))
    return path


@pytest.fixture
def tune(config: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Return what tunes a script that does this with each ep_size."""

    def run(does: dict[str, Any], *options: str, more: tuple[str, ...] = ()) -> Any:
        log, tuned = config.with_name("configs.jsonl"), config.with_name("ds_config.tuned.json")
        log.unlink(missing_ok=True)
        command = [sys.executable, "-c", RUNS, json.dumps(does), str(config), str(log), *more]
        status = main(["tune", "--out", str(config.parent / "out"), *options, "--", *command])
        configs = [json.loads(each) for each in log.read_text().splitlines()] if log.exists() else []
        sizes = [each["fsmoe"].get("ep_size") for each in configs]
        written = json.loads(tuned.read_text()) if tuned.exists() else None
        return SimpleNamespace(
            status=status, configs=configs, sizes=sizes, tuned=written, **capsys.readouterr()._asdict()
        )

    return run


def test_the_fastest_layout_is_written_beside_the_config_with_only_what_changed(tune: Any, config: Path) -> None:
    before = config.read_text()
    found = tune({"2": 100, "1": 120, "4": 80})
    # One is clearly ahead after the first round, so there is no second one.
    assert (found.status, found.sizes[0], sorted(found.sizes[1:])) == (0, None, [1, 4])
    assert config.read_text() == before
    wanted = json.loads(before)
    wanted["fsmoe"]["ep_size"] = 4
    assert found.tuned == wanted
    assert "tune: nothing was measured to predict layouts from: the nearest are tried first" in found.out
    assert '\n    "fsmoe": {' in config.with_name("ds_config.tuned.json").read_text()
    assert "fsmoe.ep_size: left out -> 4" in found.out
    rows = {line.split("  ")[0]: line for line in found.out.splitlines() if line.endswith("  ok")}
    assert set(rows) == {f"{AS_IT_IS} (ep_size 2)", "ep_size = 1", "ep_size = 4"}
    assert "1.25x" in rows["ep_size = 4"]
    # A run has the record, the measurements and the end that its steps need; its links are those of the config.
    out = config.parent / "out"
    for number, each in enumerate(found.configs):
        record = {"dir": str(out / f"{number:02}"), "stop_after": 106, "stop_after_settled": 9}
        assert each["fsmoe"]["record"] == record
        assert each["fsmoe"]["autotune"] == {"enabled": True, "trials": 1, "cache_dir": str(out / "measured")}
        assert each["fsmoe"]["trace"] == {"enabled": False, "cluster": "testbed_b"}


def test_a_layout_that_is_predicted_to_be_clearly_behind_what_was_measured_runs_only_if_its_size_is_named(
    tune: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The fake runs measure nothing from which a size could be predicted.
    predicted_ms = {(2, 1): 100.0, (4, 1): 75.0, (1, 1): 110.0}
    monkeypatch.setattr("ds_fsmoe.offline.commands.tune.predicted_ms", lambda *_: predicted_ms)
    does = {"2": 100, "1": 90, "4": 80}
    found = tune(does)
    assert found.sizes == [None, 4]
    assert "nothing was measured" not in found.out
    row = next(line for line in found.out.splitlines() if line.startswith("ep_size = 1"))
    assert "110.0" in row
    assert "not tried: predicted to take 1.4 times as long as the fastest took; name its size to try it" in row
    assert tune(does, "--ep-sizes", "1,4").sizes == [None, 4, 1]
    assert tune(does, "--expert-tensor-parallel-sizes", "1").sizes == [None, 4]  # which all of them have
    # 1.3 times the 80 ms of the fastest are the bound, whatever the fastest was predicted to take.
    predicted_ms[1, 1] = 103.0
    assert tune(does).sizes == [None, 4, 1]


def test_layouts_that_are_about_as_fast_run_again_and_no_others(tune: Any) -> None:
    found = tune({"2": "wide", "1": 300, "4": "wide"}, "--rounds", "3")
    assert found.status == 0
    # What "auto" chose in the first run is kept in the others.
    assert (found.sizes[0], *(found.sizes[1:].count(size) for size in (1, 2, 4))) == (None, 1, 2, 3)
    assert "it stays, and nothing is written\nto have it at every start: ep_size = 2\n" in found.out
    assert found.tuned is None


def test_a_config_of_an_earlier_run_is_named_where_none_is_written(tune: Any, config: Path) -> None:
    (earlier := config.with_name("ds_config.tuned.json")).write_text("{}")
    said = tune({"2": 50, "1": 90, "4": 90}).out
    assert f"it stays, and nothing is written; {earlier} is of an earlier run\n" in said


def test_layouts_that_cannot_run_are_rows_and_a_config_that_cannot_is_replaced_by_one_that_fits(tune: Any) -> None:
    found = tune({"2": 100, "1": "fail", "4": "hang"}, "--limit-s", "6")
    assert (found.status, len(found.configs), found.tuned) == (0, 3, None)
    lines = found.out.splitlines()
    for size, state in {1: "failed: ValueError: experts: are not divisible", 4: "ended after 6 s"}.items():
        assert next(line for line in lines if line.startswith(f"ep_size = {size}  ")).endswith(state)
    found = tune({"2": "memory", "1": 130, "4": 120})
    assert (found.status, found.tuned["fsmoe"]["ep_size"]) == (0, 4)
    assert "fastest: ep_size = 4" in found.out
    assert "out of memory" in found.out


def test_a_run_that_fails_once_it_was_timed_counts_and_its_row_says_so(tune: Any, config: Path) -> None:
    found = tune({"2": "late 100", "1": "late 120", "4": "late 80"})
    assert (found.status, found.tuned["fsmoe"]["ep_size"]) == (0, 4)
    (row,) = (line for line in found.out.splitlines() if line.startswith("ep_size = 4  "))
    assert "1.25x" in row
    assert row.endswith("timed; then failed: RuntimeError: the model could not be saved")
    # Steps of trials are none of a plan that was chosen.
    config.with_name("ds_config.tuned.json").unlink()
    found = tune({"2": 100, "1": 120, "4": "late 80"}, more=("tunes",))
    assert (found.status, found.tuned) == (0, None)
    assert "ep_size = 4: failed: RuntimeError: the model could not be saved" in found.err


def test_a_layout_that_fails_when_it_runs_again_is_not_written_and_the_config_as_it_is_keeps_its_steps(
    tune: Any,
) -> None:
    """The second run of a size does what stands behind its first."""
    found = tune({"2": "wide", "1": 300, "4": ["wide", "fail"]})
    assert (found.status, found.sizes.count(4), found.tuned) == (0, 2, None)
    (row,) = (line for line in found.out.splitlines() if line.startswith("ep_size = 4  "))
    assert row.endswith("failed: ValueError: experts: are not divisible")
    found = tune({"2": ["wide", "fail"], "1": 300, "4": "wide"})
    assert (found.status, found.tuned) == (0, None)
    assert "it stays, and nothing is written" in found.out


def test_a_first_run_that_does_not_begin_ends_the_command(tune: Any, config: Path, capsys: Any) -> None:
    found = tune({"2": "no record"})
    assert found.status == 1
    assert "no record: does the script use ds_fsmoe?" in found.err
    command = [sys.executable, "-c", "raise RuntimeError('no data')", str(config)]
    assert main(["tune", "--out", str(config.parent / "out"), "--", *command]) == 1
    assert "failed: RuntimeError: no data" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("does", "size"),
    [({"stock": "memory at once", "2": 100, "1": 300, "4": 200}, 2), ({"2": 100, "1": 60, "4": 120}, 1)],
)
def test_a_config_without_our_block_is_tuned_against_stock_where_that_fits(
    does: dict[str, Any], size: int, tune: Any, config: Path
) -> None:
    written = json.loads(config.read_text())
    del written["fsmoe"]
    config.write_text(json.dumps(written))
    found = tune(does)
    assert found.status == 0
    assert [each["fsmoe"]["enabled"] for each in found.configs][:2] == [False, True]
    # The size that was tried is written, as another start might choose another one.
    assert found.tuned == written | {"fsmoe": {"enabled": True, "ep_size": size}}


def test_sizes_that_are_named_are_tried_where_no_run_comes_to_its_first_step(tune: Any) -> None:
    does = {"2": "memory at once", "4": 100, "8": "memory at once"}
    found = tune(does)
    assert found.status == 1
    assert "name sizes by --ep-sizes to try them all the same" in found.err
    assert "out of memory" in found.out
    found = tune(does, "--ep-sizes", "4,8")
    assert (found.status, found.sizes) == (0, [None, 4, 8])
    assert found.tuned["fsmoe"]["ep_size"] == 4


def test_what_a_launcher_has_started_has_time_to_end_its_ranks(tmp_path: Path) -> None:
    """The launcher ends at once where it is told to, and a program below it only once its own are gone."""
    below = "import pathlib, signal, sys, threading; "
    below += f"done = pathlib.Path({str(tmp_path / 'done')!r}); begun = done.with_name('begun'); "
    below += "signal.signal(signal.SIGTERM, lambda *_: (threading.Event().wait(1), done.touch(), sys.exit())); "
    below += "begun.touch(); signal.pause()"
    launcher = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    subject = TrainingCommand({}, [sys.executable, "-c", launcher, below], "", [])
    assert run_training("tune", subject, PlannedRun(OURS, tmp_path / "run", 9, False, tmp_path), 8.0) == OUT_OF_TIME
    assert (tmp_path / "begun").exists()
    assert (tmp_path / "done").exists()


def test_a_job_that_nohup_has_started_goes_on_when_its_terminal_is_gone(tmp_path: Path) -> None:
    script = "import os, signal; os.kill(os.getppid(), signal.SIGHUP)"
    subject = TrainingCommand({}, [sys.executable, "-c", script], "", [])
    planned = PlannedRun(OURS, tmp_path / "run", 9, False, tmp_path)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        assert run_training("tune", subject, planned, 60.0) == 0
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with pytest.raises(SystemExit, match=str(128 + signal.SIGHUP)):
            run_training("tune", subject, planned, 60.0)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_stages_and_micro_batches_are_tried_where_they_are_allowed(tune: Any) -> None:
    options = ("--ep-sizes", "2", "--zero-stages", "2,3", "--micro-batch-sizes", "2,4")
    configs = tune({"2": 100}, *options, "--rounds", "1").configs
    sizes = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    found = [(each["zero_optimization"]["stage"], *(each[name] for name in sizes)) for each in configs]
    assert sorted(found) == [(2, 2, 4), (2, 4, 2), (3, 2, 4), (3, 4, 2)]
    assert {each["zero_optimization"]["reduce_bucket_size"] for each in configs} == {5e8}
    # Sizes that are predicted come before other stages and micro-batches, which are not.
    configs = tune({"1": 100, "2": 100, "4": 100}, "--zero-stages", "2,3", "--most", "2", "--rounds", "1").configs
    assert [each["zero_optimization"]["stage"] for each in configs] == [2, 2, 2]


def test_a_script_that_ignores_the_micro_batch_of_the_config_is_said_to_do_so(tune: Any) -> None:
    found = tune({"2": 100}, "--ep-sizes", "2", "--micro-batch-sizes", "2,4", more=("ignores",))
    assert "256 tokens of rank 0 in a step instead of 512: the script does not follow" in found.out
    assert found.tuned is None


def test_deepspeeds_own_autotuner_stays_off_in_every_run(tune: Any, config: Path) -> None:
    written = json.loads(config.read_text()) | {"autotuning": {"enabled": True, "fast": False}}
    config.write_text(json.dumps(written))
    found = tune({"2": 100, "1": 120, "4": 80})
    assert {(each["autotuning"]["enabled"], each["autotuning"]["fast"]) for each in found.configs} == {(False, False)}
    assert found.tuned["autotuning"] == written["autotuning"]


def test_options_of_the_script_follow_by_the_mapping_of_deepspeeds_own_autotuner(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    mapped = {"train_micro_batch_size_per_gpu": "--batch", "gradient_accumulation_steps": "--steps"}
    config.write_text(json.dumps({"train_micro_batch_size_per_gpu": 2, "autotuning": {"arg_mappings": mapped}}))
    command = ["train.py", "--steps=1", f"--deepspeed={config}", "--batch", "2"]
    subject = find_config(command, "tune", needs_block=False)
    changes = [(("train_micro_batch_size_per_gpu",), 1), (("gradient_accumulation_steps",), 2)]
    found = with_changes(subject, changes).command_with(Path("new"))
    assert found == ["train.py", "--steps=2", "--deepspeed=new", "--batch", "1"]
    # One that the command leaves out has a default, which is another number.
    subject = find_config(["train.py", str(config)], "tune", needs_block=False)
    found = with_changes(subject, changes).command_with(Path("new"))
    assert found == ["train.py", "new", "--batch", "1", "--steps", "2"]
    subject = find_config(command, "tune", needs_block=False)
    assert subject.command_with(config) == command


def test_all_sizes_that_divide_ranks_and_experts_are_layouts_and_no_others() -> None:
    found = layouts_of(HUGGING_FACE, AllowedSizes())
    assert found == [ExpertLayout(1, 1, 2), ExpertLayout(4, 1, 2)]
    assert layouts_of(Job(4, (6, 8), False, OWN), AllowedSizes()) == [ExpertLayout(1, 1, 2)]
    assert layouts_of(STOCKS, AllowedSizes()) == [ExpertLayout(2, 2, 2)]
    # Ranks do not share an expert at ZeRO 3.
    assert layouts_of(STOCKS, AllowedSizes(zero_stages=(2, 3))) == [ExpertLayout(2, 2, 2), ExpertLayout(2, 1, 3)]


def test_layouts_come_in_the_order_of_predictions_and_else_the_nearest_first() -> None:
    job = Job(8, (8,), False, ExpertLayout(2, 1, 2))
    layouts = layouts_of(job, AllowedSizes())
    assert [each.ep_size for each in in_order(layouts, job, {(8, 1): 3.0, (1, 1): 2.0})] == [1, 8, 4]
    assert [each.ep_size for each in in_order(layouts, job, {})] == [4, 1, 8]


def test_an_auto_size_is_written_as_the_number_that_was_tried() -> None:
    config = {"fsmoe": {"enabled": True, "ep_size": "auto"}, "zero_optimization": {"stage": 2}}
    changes = changes_of(ExpertLayout(2, 1, 3), HUGGING_FACE, config)
    assert words_of_changes(changes) == "ep_size = 2, zero_optimization.stage = 3"
    assert words_of_changes(changes_of(ExpertLayout(2, 2, 2), STOCKS, config)) == "expert_tensor_parallel_size = 2"


def test_wrong_arguments_are_named_before_anything_starts(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inside = json.loads(config.read_text()) | {"train_batch_size": 32}
    del inside["gradient_accumulation_steps"]
    other = config.with_name("other.json")
    other.write_text(json.dumps(inside))
    script = config.with_name("train.py")
    script.write_text("")
    named = ["train.py", str(config)]
    runner = ["-m", "ds_fsmoe.run", str(script)]
    for options, command, words in (
        ([], [], "no training command"),
        ([], ["train.py"], "no DeepSpeed config among the arguments of the command. tune changes copies"),
        ([], [*named, str(other)], "several configs in the command"),
        (["--config", "no.json"], named, "no.json is not among the arguments of the command"),
        (["--steps", "2"], named, "--steps = 2: must be at least 5"),
        (["--limit-s", "0"], named, "--limit-s = 0: must be above 0"),
        (["--ep-sizes", "0,2"], named, "--ep-sizes 0: must be at least 1"),
        (["--zero-stages", "4"], named, "--zero-stages 4: must be 0, 1, 2 or 3"),
        (["--micro-batch-sizes", "3"], named, "--micro-batch-sizes 3: must divide the 8 samples of a rank and step"),
        (["--micro-batch-sizes", "1"], ["train.py", str(other)], "gradient_accumulation_steps must be numbers"),
        (["--output", str(config)], named, "is the config of the command, which stays as it is"),
        (["--output", "/no/such/folder/x.json"], named, "no folder /no/such/folder"),
        (["--fsmoe", '{"enabled": true}', "--zero-stages", "1"], runner, "--zero-stages and --micro-batch-sizes need"),
    ):
        assert main(["tune", "--out", str(config.parent / "out"), *options, "--", *command]) == 2
        assert words in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["tune", "--ep-sizes", "one", "--", *named])
    assert "must be whole numbers with commas between them" in capsys.readouterr().err
    with pytest.raises(ValueError, match="--ep-sizes 3: must divide the 4 ranks and the 8 experts of a layer"):
        layouts_of(HUGGING_FACE, AllowedSizes(ep_sizes=(3,)))
    with pytest.raises(ValueError, match=r"whose ep_size is an argument in the script; leave it out"):
        layouts_of(STOCKS, AllowedSizes(ep_sizes=(1,)))
    assert micro_batches_of(json.loads(config.read_text()), (2, 8), "x") == [None, 8]


@pytest.mark.parametrize("in_file", [False, True], ids=["JSON", "file"])
def test_a_block_that_is_given_is_tuned_without_a_config(
    in_file: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    does, log, block = json.dumps({"2": 100, "1": 120, "4": 80}), tmp_path / "log", '{"enabled": true}'
    file = tmp_path / "block.json"
    file.write_text(block)
    code = f"import sys; sys.argv[1:] = [{does!r}, sys.argv[3], {str(log)!r}]\n{RUNS}"
    command = [sys.executable, "-c", code, "ds_fsmoe.run", "train.py"]
    options = ["--out", str(tmp_path / "out"), "--fsmoe", str(file) if in_file else block]
    assert main(["tune", *options, "--", *command]) == 0
    said = capsys.readouterr().out
    if in_file:
        tuned = json.loads((tmp_path / "block.tuned.json").read_text())
        assert tuned == {"fsmoe": {"enabled": True, "ep_size": 4}}
    else:
        assert """give it instead: --fsmoe '{"enabled": true, "ep_size": 4}'""" in said
    assert file.read_text() == block


SCRIPT = """
import argparse

import deepspeed
import torch
from transformers import OlmoeConfig, OlmoeForCausalLM

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=0)
args = parser.parse_args()
torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
words = {"vocab_size": 64, "pad_token_id": 0, "eos_token_id": 1}
model = OlmoeForCausalLM(OlmoeConfig(num_experts=8, num_experts_per_tok=2, **sizes, **words)).train()
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
while True:
    tokens = torch.randint(64, (engine.train_micro_batch_size_per_gpu(), 16))
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
"""


@pytest.mark.daily("commands", 1)
def test_a_script_that_knows_nothing_of_us_is_tuned_on_two_ranks_and_ends_by_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # What an installed package does: its .pth file is read by every interpreter that starts.
    site = tmp_path / "site"
    site.mkdir()
    shutil.copy(ROOT / "ds_fsmoe" / "ds_fsmoe_entry_point.pth", site)
    (site / "sitecustomize.py").write_text("import os, site; site.addsitedir(os.path.dirname(__file__))\n")
    path = f"{site}{os.pathsep}{python_path()}"
    for name, value in {"DS_ACCELERATOR": "cpu", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    build_ops()
    (tmp_path / "train.py").write_text(SCRIPT)
    config = tmp_path / "ds_config.json"
    block = {"enabled": True, "autotune": {"enabled": True, "trials": 1}}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    config.write_text(json.dumps({"train_micro_batch_size_per_gpu": 2, "optimizer": optimizer, "fsmoe": block}))
    launcher = [sys.executable, str(Path(sys.executable).with_name("deepspeed")), "--num_accelerators", "2"]
    command = [*launcher, str(tmp_path / "train.py"), "--deepspeed", "--deepspeed_config", str(config)]
    options = ["--steps", "6", "--rounds", "1", "--out", str(tmp_path / "out"), "--limit-s", "600"]
    assert main(["tune", *options, "--", *command]) == 0
    said = capsys.readouterr().out
    assert [line.split("  ")[0] for line in said.splitlines() if line.endswith("  ok")] == [
        f"{AS_IT_IS} (ep_size 2)",
        "ep_size = 1",
    ]
    for folder, ep_size in (("00", 2), ("01", 1)):
        run = read_run(tmp_path / "out" / folder)
        assert run.problems == []
        assert run.facts["layers"]["L00"]["ep_size"] == ep_size
        settled = run.plans["settled_at"]
        # Layers that are found to be in one chunk change plans once more.
        assert 6 <= len([row for row in run.steps if row["step"] > settled]) <= 9
        assert run.steps[-1]["step"] < 106


def test_ranks_that_share_an_expert_are_tried_in_the_numbers_that_are_allowed_and_fit(tune: Any) -> None:
    configs = tune({"2": 100}, "--ep-sizes", "2", "--expert-tensor-parallel-sizes", "1,2", "--rounds", "1").configs
    assert [each["fsmoe"].get("expert_tensor_parallel_size") for each in configs] == [None, 2]
    found = tune({"2": 100}, "--expert-tensor-parallel-sizes", "3")
    assert found.status == 2
    assert "--expert-tensor-parallel-sizes 3: must divide the 4 ranks and the 8 experts of a layer" in found.err
