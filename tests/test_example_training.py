# SPDX-License-Identifier: Apache-2.0
"""The main job, small: both kinds of layer learn the same, to the last bit.

And the demo around it: what it calls the same, and what it does with a run that hangs or was not the one asked for. The
job says what is wrong with its input in one sentence, and draws its batches reproducibly.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch

import ds_fsmoe
from ds_fsmoe.observing.clock import Clock
from ds_fsmoe.tuning.when import STEPS_BEFORE
from tests.scripts import ROOT, START, Start
from tests.waiting import until

sys.path.insert(0, str(ROOT / "examples"))

import demo
from text_data import Text, draw_batch, load_text, rank_generator
from train import parse_arguments, read_config

SMALL = [
    *("--width", "26", "--heads", "2", "--layers", "2", "--seq-len", "31"),
    *("--num-experts", "4", "--eval-batches", "4"),
]


def main_job(folder: Path, start: Start, moe: str, config: str) -> dict:
    """What the main job measured."""
    metrics, checkpoints = folder / f"{moe}.json", folder / f"checkpoints_{moe}"
    arguments = ["--deepspeed_config", str(ROOT / "ds_configs" / config), "--moe", moe, *SMALL, "--steps", "25"]
    arguments += ["--metrics", str(metrics), "--save-dir", str(checkpoints)]
    said = start(folder, str(ROOT / "examples/train.py"), *arguments)
    assert (f"ds_fsmoe {ds_fsmoe.__version__} is on for 2 MoE layer(s)" in said) == (moe == "fsmoe")
    written = {file.name for file in (checkpoints / (checkpoints / "latest").read_text()).iterdir()}
    experts = {f"layer_{layer}_expert_{e}_mp_rank_00_model_states.pt" for layer in range(2) for e in range(4)}
    assert experts | {"mp_rank_00_model_states.pt"} <= written
    return json.loads(metrics.read_text())


@pytest.mark.daily("examples", 1)
@START
@pytest.mark.parametrize("config", ["gpt_moe_small.json", "gpt_moe_small_bf16_zero2.json"])
def test_the_main_job_learns_and_equals_stock(config: str, start: Start, tmp_path: Path) -> None:
    stock, ours = (main_job(tmp_path, start, moe, config) for moe in ("deepspeed", "fsmoe"))
    assert len(ours["losses"]) == len(ours["step_times_ms"]) == 25
    # From then on plans in chunks are tried, which round otherwise.
    assert ours["losses"][:STEPS_BEFORE] == stock["losses"][:STEPS_BEFORE]
    assert ours["losses"] == pytest.approx(stock["losses"], rel=1e-2)
    assert ours["validation_last"] == pytest.approx(stock["validation_last"], rel=1e-2)
    assert ours["validation_last"] < 0.8 * ours["validation_first"]
    assert (ours["moe"], stock["chosen"]) == ("ds_fsmoe, 2 layers", {})
    assert ours["chosen"]["gate"] == "topk, k = 2, capacity factor 1.25"


def measured(chosen: dict[str, str], losses: tuple[float, ...] = (3.0, 2.0, 1.0, 1.0)) -> dict:
    """What the main job writes, made up."""
    times = {"step_ms": 1.0, "tokens_per_s": 1.0, "step_times_ms": [1.0] * len(losses)}
    losses_of = {"validation_first": 5.0, "validation_last": 2.0, "losses": list(losses)}
    return {"moe": "layers of some kind", "chosen": chosen} | times | losses_of


def test_the_demo_calls_only_equal_finite_losses_the_same() -> None:
    stock = measured({})
    assert demo.compared_rows(stock, measured({}))[1] == 0
    one_bit_off = measured({}, (3.0, math.nextafter(2.0, 3.0), 1.0, 1.0))
    assert 0 < demo.compared_rows(stock, one_bit_off)[1] < 1e-15
    for lost in (math.nan, math.inf):
        diverged = measured({}, (3.0, 2.0, lost, 1.0))
        assert demo.compared_rows(stock, diverged)[1] == math.inf
        assert demo.compared_rows(diverged, diverged)[1] == math.inf


@pytest.mark.daily("examples", 1)
def test_the_demo_leaves_a_report_with_a_timeline_of_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "RUNS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--steps", "12"])
    assert demo.main() == 0
    page = (tmp_path / "demo" / "report.html").read_text()
    assert "stock DeepSpeed" in page
    for kind in demo.TITLE_OF_RUN:
        assert (tmp_path / "demo" / kind / "trace" / "trace.json").is_file(), kind


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Lets the demo launch a script of the test's in place of DeepSpeed's launcher."""

    file, popen = tmp_path / "stand_in.py", subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda _, **settings: popen([sys.executable, str(file)], **settings))
    monkeypatch.setattr(demo, "ROOT", tmp_path)
    monkeypatch.setattr(demo, "RUNS", tmp_path)
    monkeypatch.setattr(demo, "num_ranks", lambda: 2)
    return file.write_text


def test_the_demo_refuses_a_run_of_the_other_layers_and_one_that_fails(stand_in, tmp_path, capsys) -> None:
    for moe, chosen in (("fsmoe", {}), ("deepspeed", {"gate": "topk"})):
        stand_in(f"open({str(tmp_path / moe)!r} + '.json', 'w').write({json.dumps(measured(chosen))!r})")
        with pytest.raises(SystemExit, match="trained with layers of some kind"):
            demo.run(moe, 4)
    stand_in("raise SystemExit('out of luck')")
    with pytest.raises(SystemExit, match=r"failed \(exit status 1\)"):
        demo.run("deepspeed", 4)
    assert "out of luck" in capsys.readouterr().err


def test_the_demo_ends_a_launch_over_its_time_limit_with_all_its_ranks(stand_in, tmp_path) -> None:
    # A launcher that, like DeepSpeed's, waits for a rank that would outlive it and holds its output open.
    pid_file = tmp_path / "pid"
    rank = f"import os, signal; open({str(pid_file)!r}, 'w').write(str(os.getpid())); signal.pause()"
    stand_in(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}])")

    class OverOnceTheRankIsThere(Clock):
        def wait(self, event: threading.Event, limit_s: float) -> bool:
            assert limit_s == 600
            until(lambda: pid_file.exists() and pid_file.read_text())
            return event.is_set()

    with pytest.raises(SystemExit, match="took longer than 600 s"):
        demo.run("deepspeed", 4, OverOnceTheRankIsThere())
    # Killed is not yet gone: on a busy machine the kernel takes a moment to take a process apart.
    with suppress(psutil.NoSuchProcess):
        left = psutil.Process(int(pid_file.read_text()))
        until(lambda: left.status() == psutil.STATUS_ZOMBIE)


# ---- its input


def with_config(*arguments: str) -> list[str]:
    return ["--deepspeed_config", str(ROOT / "ds_configs" / "gpt_moe_small.json"), *arguments]


@pytest.mark.parametrize(
    ("world_size", "arguments", "content", "sentence"),
    [
        (2, "--num-experts 5", None, "--num-experts 5 is not divisible by --ep-size 2"),
        (3, "--ep-size 2", None, "--ep-size 2 does not divide the 3 ranks"),
        (1, "--width 30 --heads 4", None, "--width 30 is not divisible by --heads 4"),
        (1, "--k 9", None, "--k 9: there are only 8 experts (--num-experts)"),
        (1, "--ep-size 0", None, "--ep-size 0: must be at least 1"),
        (1, "--text FILE", None, "--text FILE: cannot be read: No such file or directory"),
        (1, "--text FILE", "", "--text FILE: the file is empty"),
        (1, "--text FILE --seq-len 128", 1289 * "a", "FILE has 1289 bytes: too short for sequences of 128"),
        (1, "--deepspeed_config FILE", None, "--deepspeed_config FILE: no such file"),
        (1, "--deepspeed_config FILE", "{bad", "--deepspeed_config FILE: cannot be read as JSON: "),
        (1, "--deepspeed_config FILE", "[1]", "--deepspeed_config FILE: must hold a JSON object"),
    ],
)
def test_what_is_wrong_with_its_input_is_one_sentence(
    world_size: int, arguments: str, content: str | None, sentence: str, capsys, monkeypatch, tmp_path
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    file = tmp_path / "file"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SystemExit) as caught:
        read_config(parse_arguments(with_config(*arguments.replace("FILE", str(file)).split(), "--moe", "fsmoe")))
    code = caught.value.code
    said = code if isinstance(code, str) else capsys.readouterr().err.splitlines()[-1]
    assert said.split("error: ", 1)[1].startswith(sentence.replace("FILE", str(file)))


def test_one_flag_turns_our_layers_on_and_off_and_without_it_the_config_decides(tmp_path) -> None:
    for moe, enabled in (("fsmoe", True), ("deepspeed", False)):
        assert read_config(parse_arguments(with_config("--moe", moe)))["fsmoe"]["enabled"] is enabled
    assert read_config(parse_arguments(with_config()))["fsmoe"] == {"enabled": True}
    (file := tmp_path / "own.json").write_text("{}")
    assert "fsmoe" not in read_config(parse_arguments(["--deepspeed_config", str(file)]))
    file.write_text('{"fsmoe": true}')  # left for ds_fsmoe to name
    assert read_config(parse_arguments(["--deepspeed_config", str(file), "--moe", "fsmoe"]))["fsmoe"] is True


def test_training_and_validation_do_not_overlap_and_the_text_of_the_standard_library_is_prose(tmp_path) -> None:
    (tmp_path / "text").write_bytes(bytes(i % 251 for i in range(1000)))
    text: Text = load_text(str(tmp_path / "text"), 16)
    assert torch.cat([text.train_L, text.validation_L]).tolist() == [i % 251 for i in range(1000)]
    assert len(text.validation_L) == 100
    text = load_text(None, 128)
    assert len(text.train_L) > 300_000
    assert "the" in bytes(text.train_L.tolist()).decode(errors="ignore").split()


def test_batches_are_reproducible_differ_between_ranks_and_a_bytes_target_is_the_next_one() -> None:
    data_L = torch.arange(997, dtype=torch.int64) % 256
    first, again, other = (draw_batch(data_L, 3, 7, rank_generator(1, rank))[0] for rank in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    starts = set()
    for seed in range(50):
        tokens_BL, targets_BL = draw_batch(torch.arange(9, dtype=torch.uint8), 2, 7, rank_generator(seed, 0))
        assert torch.equal(targets_BL, tokens_BL + 1)
        starts |= set(tokens_BL[:, 0].tolist())
    assert starts == {0, 1}, "up to the last"
