# SPDX-License-Identifier: Apache-2.0
"""A user's own command, run with and without the block."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ds_fsmoe.cli import main
from ds_fsmoe.commands.compare import OURS, STOCK, config_of, find_config
from ds_fsmoe.engine.compat import load_ds_config
from tests.built_ops import build_ops
from tests.scripts import ROOT, free_port

TRAIN = "import sys; print('trained'); sys.exit({status})"
# Writes the record of a run of 30 steps at most, without training: steps of 10 ms, and of `ours_ms` with our layers.
RECORD = """
import json, pathlib, sys

block = json.loads(pathlib.Path(sys.argv[2]).read_text())["fsmoe"]
folder = pathlib.Path(block["record"]["dir"])
with (folder.parent / "runs.jsonl").open("a") as file:
    file.write(json.dumps(block) + "\\n")
step_ms = float(sys.argv[1]) if block["enabled"] else 10.0
steps = range(1, min(block["record"]["stop_after"], 30) + 1)
rows = [{"step": step, "step_ms": step_ms + step % 7 / 10, "loss": 1.0} for step in steps]
(folder / "steps.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
schedule = "best" if block["enabled"] else "stock"
(folder / "run.json").write_text(json.dumps({"format": 1, "schedule": schedule, "block": block, "ended": "now"}))
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    written = json.loads((ROOT / "ds_configs" / "cpu.json").read_text())
    path = tmp_path / "ds_config.json"
    path.write_text("// DeepSpeed reads comments\n" + json.dumps(written))
    return path


def with_config_inside(config: Path, folder: Path) -> Path:
    """The example with its DeepSpeed config as a dict in it, without a block."""
    held = load_ds_config(str(config))
    del held["fsmoe"]
    source = (ROOT / "examples" / "plain.py").read_text()
    changed = source.replace("deepspeed.initialize(args=args,", f"deepspeed.initialize(config={dict(held)!r},")
    assert changed != source
    script = folder / "inside.py"
    script.write_text(changed)
    return script


@pytest.mark.slow
@pytest.mark.parametrize("inside", [False, True], ids=["file", "in the script"])
def test_an_untouched_script_is_compared_with_itself(
    inside: bool, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    build_ops()
    out = tmp_path / "out"
    deepspeed = str(Path(sys.executable).with_name("deepspeed"))
    command = [sys.executable, deepspeed, "--num_accelerators", "2", "--master_port", str(free_port())]
    command += ["--module", "ds_fsmoe.run"]
    given = []
    if inside:
        command.append(str(with_config_inside(config, tmp_path)))
        given = ["--fsmoe", str(config)]
    else:
        command += [str(ROOT / "examples" / "plain.py"), f"--deepspeed_config={config}"]
    assert main(["compare", *given, "--steps", "14", "--out", str(out), "--timeout", "900", "--", *command]) == 0
    said = capsys.readouterr().out
    assert "times as fast as stock DeepSpeed here" in said
    assert "over 14 steps" in said
    assert float(said.split("losses: at most ")[1].split()[0]) < 1e-5
    for kind, layer in ((STOCK, "MOELayer"), (OURS, "FSMoELayer")):
        assert f"by {layer}" in (out / kind / "log.txt").read_text()
    assert main(["report", str(out)]) == 0
    page = (out / "report.html").read_text()
    assert "critical path, stock DeepSpeed" in page
    assert "critical path, ds_fsmoe, best" in page


def test_the_two_configs_differ_in_enabled_alone(config: Path, tmp_path: Path) -> None:
    subject = find_config(["train.py", f"--deepspeed_config={config}", "--lr", "1"])
    assert subject.command_with(Path("other")) == ["train.py", "--deepspeed_config=other", "--lr", "1"]
    found = subject.config
    stock, ours = (config_of(found, kind, tmp_path, 20, True) for kind in (STOCK, OURS))
    assert (stock["fsmoe"].pop("enabled"), ours["fsmoe"].pop("enabled")) == (False, True)
    assert stock == ours
    assert ours["fsmoe"]["record"] == {"dir": str(tmp_path), "stop_after": 20}
    assert "record" not in found["fsmoe"]


def test_a_command_that_cannot_be_compared_is_refused_in_a_sentence(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "twin.json").write_text('{"fsmoe": {"enabled": true}}')
    python = [sys.executable, "-c", TRAIN.format(status=0)]
    for command, words in (
        ([], "no training command"),
        (python, "no DeepSpeed config with an fsmoe block"),
        ([*python, str(tmp_path / "other.json")], "other.json has none"),
        ([*python, str(config), str(tmp_path / "twin.json")], "several configs"),
        ([*python, str(tmp_path / "broken.json")], "broken.json has none"),
        (["/no/such/program", str(config)], "cannot be started"),
    ):
        assert main(["compare", "--out", str(tmp_path / "out"), "--", *command]) == 2
        assert words in capsys.readouterr().err
    assert main(["compare", "--steps", "3", "--", *python]) == 2
    assert "--steps = 3: must be at least 8" in capsys.readouterr().err


def test_a_training_that_fails_shows_its_last_lines(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-c", TRAIN.format(status=7), str(config)]
    assert main(["compare", "--out", str(tmp_path / "out"), "--", *command]) == 1
    said = capsys.readouterr().err
    assert "exit status 7" in said
    assert "trained" in said


def test_a_training_that_does_not_end_is_ended(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-c", "import signal; signal.pause()", str(config)]
    assert main(["compare", "--out", str(tmp_path / "out"), "--timeout", "0.5", "--", *command]) == 1
    assert "exit status 124" in capsys.readouterr().err


def test_a_script_that_records_nothing_is_named(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-c", TRAIN.format(status=0), str(config)]
    assert main(["compare", "--out", str(tmp_path / "out"), "--", *command]) == 2
    said = capsys.readouterr().err
    assert "recorded nothing: does the script go through one of the doors?" in said


def compare_recorded(config: Path, out: Path, ours_ms: float, *options: str) -> list[dict]:
    """The blocks of the runs that ``compare`` starts."""
    command = [sys.executable, "-c", RECORD, str(ours_ms), str(config)]
    assert main(["compare", "--out", str(out), *options, "--", *command]) == 0
    return [json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines()]


def test_a_script_that_ends_early_is_compared_over_the_steps_it_has_with_both_timelines(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = compare_recorded(config, tmp_path, 8.0)
    assert [(each["enabled"], each["record"]["stop_after"]) for each in blocks] == [
        (False, 150),
        (False, 30),
        (True, 30),
    ]
    assert [each["trace"]["start_step"] for each in blocks] == [147, 27, 27]
    said = capsys.readouterr().out
    assert "the script ended by itself after 30 of 150 steps" in said
    assert "over 30 steps" in said
    without = compare_recorded(config, tmp_path / "without", 8.0, "--no-trace")
    assert [(each["enabled"], each["record"]["stop_after"]) for each in without] == [(False, 150), (True, 30)]
    assert "\nplans and loads: ds_fsmoe report" in capsys.readouterr().out


def test_a_script_that_ends_before_anything_counts_is_refused(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = RECORD.replace("30", "5")
    assert main(["compare", "--out", str(tmp_path), "--", sys.executable, "-c", record, "8", str(config)]) == 2
    assert "the script ends after 5 steps: it must train at least 8" in capsys.readouterr().err


def test_how_sure_the_ratio_is_is_said_with_it_and_causes_where_ours_is_not_faster(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compare_recorded(config, tmp_path / "faster", 5.0, "--steps", "30")
    said = capsys.readouterr().out
    assert "1.94 times as fast" in said
    assert "95% interval" in said
    assert "the two ran one after the other" in said
    assert "a possible cause" not in said
    compare_recorded(config, tmp_path / "slower", 20.0, "--steps", "30")
    said = capsys.readouterr().out
    assert "a possible cause: the layers are not cut" in said
    cut = config.with_name("cut.json")
    cut.write_text('{"fsmoe": {"enabled": true, "pipeline_degree": {"forward": 2}}}')
    compare_recorded(cut, tmp_path / "cut", 20.0, "--steps", "10")
    said = capsys.readouterr().out
    assert "too few steps for an interval" in said
    assert "a possible cause: the layers are cut by hand (2 forward)" in said
