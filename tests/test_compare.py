# SPDX-License-Identifier: Apache-2.0
"""A user's own command, run with and without the block."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from ds_fsmoe.cli import main
from ds_fsmoe.engine.compat import load_ds_config
from ds_fsmoe.offline.commands.compare import print_comparison
from ds_fsmoe.offline.commands.training_command import OURS, STOCK, PlannedRun, find_config, run_config
from tests.built_ops import build_ops
from tests.python_path import python_path
from tests.scripts import ROOT, free_port

TRAIN = "import sys; print('trained'); sys.exit({status})"
# Writes the record of a run of 30 steps at most, without training: steps of 10 ms, and of `fsmoe_ms` with our layers,
# on a machine that gets slower from run to run by a share. Ours is slow until its plans are settled: in step 12, and in
# the runs after the second, later by a number of steps.
RECORD = """
import json, pathlib, sys

block = json.loads(pathlib.Path(sys.argv[2]).read_text())["fsmoe"]
folder, log = pathlib.Path(block["record"]["dir"]), pathlib.Path(sys.argv[3])
with log.open("a") as file:
    file.write(json.dumps(block) + "\\n")
step_ms = float(sys.argv[1]) if block["enabled"] else 10.0
step_ms *= 1 + float(sys.argv[4]) * len(log.read_text().splitlines())
steps = range(1, min(block["record"]["stop_after"], 30) + 1)
settled_at = 12 + (int(sys.argv[6]) if len(log.read_text().splitlines()) > 2 else 0)
slow = {step: 50.0 for step in steps if step <= settled_at}
rows = [{"step": step, "step_ms": slow.get(step, 0) + step_ms + step % 7 / 10, "loss": 1.0} for step in steps]
(folder / "steps.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
schedule = "best" if block["enabled"] else "stock"
(folder / "run.json").write_text(json.dumps({"format": 1, "schedule": schedule, "block": block, "ended": "now"}))
if block["trace"]["enabled"]:
    (folder / "trace").mkdir(exist_ok=True)
    (folder / "trace" / "rank0.json").write_text("{}")
if block["enabled"]:
    (folder / "plans.json").write_text(json.dumps({"settled_at": settled_at, "choices": json.loads(sys.argv[5])}))
"""
CHOICE = {"layers": ["L00"], "phase": "forward", "degree": 2, "asked": None, "order": "paper"}
CHOICE |= {"predicted_ms": 1, "runner_up": None, "runner_up_ms": None, "uncut_ms": 2}


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


@pytest.mark.daily("a script beside itself", 1)
@pytest.mark.parametrize("inside", [False, True], ids=["file", "in the script"])
def test_an_untouched_script_is_compared_with_itself(
    inside: bool, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"DS_ACCELERATOR": "cpu", "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}.items():
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
    options = ["--steps", "14", "--turns", "1", "--out", str(out), "--timeout", "900"]
    assert main(["compare", *given, *options, "--", *command]) == 0
    said = capsys.readouterr().out
    assert "times as fast as stock DeepSpeed here" in said
    if "losses: identical in all 14 steps" not in said:
        assert float(said.split("losses: differ by at most ")[1].split()[0]) < 1e-5
    # What turns have found is the result, and no other ratio is beside it.
    assert not [line for line in said.splitlines() if line.startswith("ratio ")]
    assert "\ntimelines, plans and loads: ds_fsmoe report" in said
    for kind, layer in ((STOCK, "MOELayer"), (OURS, "FSMoELayer")):
        assert f"by {layer}" in (out / kind / "log.txt").read_text()
    assert main(["report", str(out)]) == 0
    page = (out / "report.html").read_text()
    assert "<th>critical path, ms</th><th>stock DeepSpeed</th><th>ds_fsmoe, best</th>" in page
    assert "Gain, turn by turn" in page
    assert "<td>fsmoe.enabled</td><td>false</td><td>true</td>" in page


def test_the_two_configs_differ_in_enabled_alone(config: Path, tmp_path: Path) -> None:
    subject = find_config(["train.py", f"--deepspeed_config={config}", "--lr", "1"])
    assert subject.command_with(Path("other")) == ["train.py", "--deepspeed_config=other", "--lr", "1"]
    found = subject.config
    stock, ours = (run_config(found, PlannedRun(kind, tmp_path, 20, True, tmp_path / "m")) for kind in (STOCK, OURS))
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
    assert main(["compare", "--turn-steps", "4", "--", *python]) == 2
    assert "--turns = 10, --turn-steps = 4: must be at least 0, and at least 5" in capsys.readouterr().err
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
    assert "the training ended without a record: does the script use ds_fsmoe?" in said


def compare_recorded(
    config: Path,
    out: Path,
    ours_ms: float,
    *options: str,
    slower_by: float = 0.0,
    choices: tuple[dict, ...] = (),
    later: int = 0,
) -> list[dict]:
    """The blocks of the runs that ``compare`` starts."""
    log = out.with_name(f"{out.name}.jsonl")
    command = [sys.executable, "-S", "-c", RECORD, str(ours_ms), str(config), str(log), str(slower_by)]
    assert main(["compare", "--out", str(out), *options, "--", *command, json.dumps(choices), str(later)]) == 0
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_after_the_long_runs_both_run_in_turns_and_the_order_changes(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned = config.with_name("tuned.json")
    tuned.write_text('{"fsmoe": {"enabled": true}}')
    blocks = compare_recorded(
        tuned, tmp_path / "out", 5.0, "--turns", "3", "--turn-steps", "10", "--steps", "30", choices=(CHOICE,)
    )
    assert [each["enabled"] for each in blocks] == [False, True, False, True, True, False, False, True]
    # As long as it takes until plans are settled, and 10 steps that count; only long runs are traced.
    assert [each["record"]["stop_after"] for each in blocks] == [30, 30, *[22] * 6]
    assert [each["trace"]["enabled"] for each in blocks] == [True, True, *[False] * 6]
    # Measured once: "auto" would find a turn too short to measure, and all share what was measured.
    assert [each["autotune"]["enabled"] for each in blocks] == ["auto", "auto", *[True] * 6]
    assert {each["autotune"]["cache_dir"] for each in blocks} == {str(tmp_path / "out" / "measured")}
    said = capsys.readouterr().out
    assert "over 3 turns ours is 1.95 times as fast" in said
    assert "of medians of 10 steps" in said
    # One result: the long runs' times are shown, and their ratio is not.
    assert "steps of the long runs, ms" in said
    assert not [line for line in said.splitlines() if line.startswith("ratio ")]
    assert "no winner: an interval needs 10 turns, and there are fewer" in said
    assert "95%" not in said


def test_a_turn_whose_plans_settle_late_is_run_again_and_longer(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def steps_of(name: str, later: int) -> list[int]:
        options = ("--turns", "2", "--turn-steps", "6", "--steps", "30", "--no-trace")
        blocks = compare_recorded(config, tmp_path / name, 5.0, *options, later=later)
        return [each["record"]["stop_after"] for each in blocks]

    # Settled in step 17 instead of 12: one step is left of the first turn, which is run again with six.
    assert steps_of("later", 5) == [30, 30, 18, 18, 27, 27, 27, 27]
    said = capsys.readouterr().out
    assert said.count("repeating this turn with 27 steps") == 1
    assert "over 2 turns ours is 1.93 times as fast" in said
    # Longer than the long runs no turn is, so that it ends.
    assert steps_of("never", 15) == [30, 30, 18, 18, 30, 30, 30, 30]
    said = capsys.readouterr().out
    assert "2 of 2 turns ended before plans were settled, and are excluded" in said
    assert "times as fast" not in said.split("are excluded")[1]


def test_a_machine_that_gets_slower_makes_nobody_the_winner(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    compare_recorded(config, out, 10.0, "--steps", "30", "--no-trace", slower_by=0.03)
    equal = capsys.readouterr().out
    assert "over 10 turns" in equal
    assert "no winner: the interval contains 1, so the difference is within the noise" in equal
    assert "possible cause" in equal
    for factor, winner in (
        (0.8, "ds_fsmoe is faster: the whole interval is above 1"),
        (1.6, "stock DeepSpeed is faster: the whole interval is below 1"),
    ):
        for steps in out.rglob(f"{OURS}/steps.jsonl"):
            rows = [json.loads(line) for line in steps.read_text().splitlines()]
            changed = [json.dumps(row | {"step_ms": factor * row["step_ms"]}) for row in rows]
            steps.write_text("\n".join(changed) + "\n")
        assert print_comparison(out) == 0
        assert winner in capsys.readouterr().out


def test_turns_of_an_earlier_comparison_are_not_counted_and_turns_that_end_too_soon_are_named(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compare_recorded(config, tmp_path / "out", 5.0, "--turns", "2", "--steps", "30")
    compare_recorded(config, tmp_path / "out", 5.0, "--turns", "0", "--steps", "30")
    said = capsys.readouterr().out
    assert "over 2 turns" in said
    assert "these two runs" in said
    assert said.index("over 2 turns") < said.index("these two runs")
    assert not (tmp_path / "out" / "turns").exists()
    late = tmp_path / "out" / "turns" / "000"
    for kind in (STOCK, OURS):
        shutil.copytree(tmp_path / "out" / kind, late / kind)
    (late / OURS / "plans.json").write_text('{"settled_at": 40}')
    assert print_comparison(tmp_path / "out") == 0
    assert "1 of 1 turns ended before plans were settled, and are excluded" in capsys.readouterr().out


def test_two_runs_that_are_recorded_are_compared_without_a_command(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compare_recorded(config, tmp_path, 5.0, "--turns", "0", "--steps", "30")
    capsys.readouterr()
    folders = [str(tmp_path / kind) for kind in (STOCK, OURS)]
    assert main(["compare", "--recorded", *folders]) == 0
    said = capsys.readouterr().out
    assert "ours is 1.95 times as fast as stock DeepSpeed in these two runs" in said
    assert "not a fair comparison" in said
    assert main(["compare", "--recorded", *folders[::-1]]) == 2
    assert "name the stock run first" in capsys.readouterr().err
    assert main(["compare", "--recorded", *folders, "--", "train"]) == 2
    assert "starts no training" in capsys.readouterr().err


def test_a_script_that_ends_early_is_compared_over_the_steps_it_has_with_both_timelines(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = compare_recorded(config, tmp_path / "out", 8.0, "--turns", "0")
    assert [(each["enabled"], each["record"]["stop_after"]) for each in blocks] == [
        (False, 150),
        (False, 30),
        (True, 30),
    ]
    assert [each["trace"]["start_step"] for each in blocks] == [147, 27, 27]
    said = capsys.readouterr().out
    assert "the script ended after 30 of 150 steps" in said
    assert "losses: identical in all 30 steps; the last is 1\n" in said
    assert "\ntimelines, plans and loads: ds_fsmoe report" in said
    without = compare_recorded(config, tmp_path / "without", 8.0, "--no-trace", "--turns", "0")
    assert [(each["enabled"], each["record"]["stop_after"]) for each in without] == [(False, 150), (True, 30)]
    said = capsys.readouterr().out
    assert "\nplans and loads: ds_fsmoe report" in said
    assert "ratio " in said


def test_a_script_that_ends_before_anything_counts_is_refused(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, rest = RECORD.replace("30", "5"), [str(tmp_path / "log"), "0", "[]", "0"]
    assert main(["compare", "--out", str(tmp_path), "--", sys.executable, "-c", record, "8", str(config), *rest]) == 2
    assert "the script ended after 5 steps: must be at least 8" in capsys.readouterr().err


def test_how_sure_the_ratio_of_two_runs_is_is_said_with_it_and_causes_where_ours_is_not_faster(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said_of(ours_ms: float, name: str, *options: str, of: Path = config) -> str:
        compare_recorded(of, tmp_path / name, ours_ms, "--turns", "0", "--steps", "30", *options)
        return capsys.readouterr().out

    said = said_of(5.0, "faster")
    assert "1.95 times as fast" in said
    # 18 steps are three blocks.
    assert "no winner: an interval needs 10 blocks of 5 steps in each run" in said
    assert "not a fair comparison" in said
    assert "possible cause: the layers run in one chunk" in said_of(20.0, "slower")
    cut = config.with_name("cut.json")
    cut.write_text('{"fsmoe": {"enabled": true, "pipeline_degree": {"forward": 2}}}')
    assert "possible cause: num_chunks was set by hand (2 forward)" in said_of(20.0, "cut", of=cut)
