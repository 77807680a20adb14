# SPDX-License-Identifier: Apache-2.0
"""A user's own command, run with and without the block."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

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
    path = tmp_path / "ds_config.json"
    path.write_text("// DeepSpeed reads comments\n" + (ROOT / "ds_configs" / "cpu.json").read_text())
    return path


class Comparing:
    """``compare`` with runs that are recorded without training.

    Args:
        config: of the runs.
        out: where they are recorded.
        capsys: hears what is said.
    """

    def __init__(self, config: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.config, self.out, self._capsys = config, out, capsys

    def said(self) -> str:
        heard = self._capsys.readouterr()
        return heard.out + heard.err

    def run(self, *arguments: str | Path, status: int = 0) -> str:
        assert main(list(map(str, arguments))) == status
        return self.said()

    def recorded(
        self, ours_ms: float, *options: str, slower_by: float = 0, choices: Any = (), later: int = 0
    ) -> tuple[list[dict], str]:
        """The blocks of the runs that are started, and what is said."""
        log = self.out.with_name(f"{self.out.name}.jsonl")
        log.unlink(missing_ok=True)
        command = [sys.executable, "-S", "-c", RECORD, str(ours_ms), self.config, log, str(slower_by)]
        command += [json.dumps(choices), str(later)]
        said = self.run("compare", "--out", self.out, "--steps", "30", *options, "--", *command)
        return [json.loads(line) for line in log.read_text().splitlines()], said


@pytest.fixture
def comparing(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Comparing:
    return Comparing(config, tmp_path / "out", capsys)


def with_config_inside(config: Path, folder: Path) -> Path:
    held = load_ds_config(str(config))
    del held["fsmoe"]
    source = (ROOT / "examples" / "plain.py").read_text()
    changed = source.replace("deepspeed.initialize(args=args,", f"deepspeed.initialize(config={dict(held)!r},")
    assert changed != source
    script = folder / "inside.py"
    script.write_text(changed)
    return script


@pytest.mark.daily("commands", 1)
@pytest.mark.parametrize("inside", [False, True], ids=["file", "in the script"])
def test_an_untouched_script_is_compared_with_itself(
    inside: bool, comparing: Comparing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"DS_ACCELERATOR": "cpu", "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    build_ops()
    config, out = comparing.config, comparing.out
    deepspeed = str(Path(sys.executable).with_name("deepspeed"))
    command = [sys.executable, deepspeed, "--num_accelerators", "2", "--master_port", str(free_port())]
    command += ["--module", "ds_fsmoe.run"]
    if inside:
        command.append(str(with_config_inside(config, tmp_path)))
    else:
        command += [str(ROOT / "examples" / "plain.py"), f"--deepspeed_config={config}"]
    given = ["--fsmoe", config] if inside else []
    options = ["--steps", "14", "--turns", "1", "--out", out, "--timeout", "900"]
    said = comparing.run("compare", *given, *options, "--", *command)
    assert "times as fast as stock DeepSpeed here" in said
    if "losses: identical in all 14 steps" not in said:
        assert float(said.split("losses: differ by at most ")[1].split()[0]) < 1e-5
    # What turns have found is the result, and no other ratio is beside it.
    assert not [line for line in said.splitlines() if line.startswith("ratio ")]
    assert "\ntimelines, plans and loads: ds_fsmoe report" in said
    for kind, layer in ((STOCK, "MOELayer"), (OURS, "FSMoELayer")):
        assert f"by {layer}" in (out / kind / "log.txt").read_text()
    comparing.run("report", out)
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


def test_a_command_that_cannot_be_compared_is_refused_in_a_sentence(comparing: Comparing, tmp_path: Path) -> None:
    for name, text in (("other", "{}"), ("broken", "{"), ("twin", '{"fsmoe": {"enabled": true}}')):
        (tmp_path / f"{name}.json").write_text(text)
    python, config = [sys.executable, "-c", TRAIN.format(status=0)], comparing.config
    for command, words in (
        ([], "no training command"),
        (python, "no DeepSpeed config with an fsmoe block"),
        ([*python, tmp_path / "other.json"], "other.json has none"),
        ([*python, config, tmp_path / "twin.json"], "several configs"),
        ([*python, tmp_path / "broken.json"], "broken.json has none"),
        (["/no/such/program", config], "cannot be started"),
    ):
        assert words in comparing.run("compare", "--out", tmp_path / "out", "--", *command, status=2)
    said = comparing.run("compare", "--turn-steps", "4", "--", *python, status=2)
    assert "--turns = 10, --turn-steps = 4: must be at least 0, and at least 5" in said
    said = comparing.run("compare", "--steps", "3", "--", *python, status=2)
    assert "--steps = 3: must be at least 8" in said


@pytest.mark.parametrize(
    ("script", "options", "status", "words"),
    [
        (TRAIN.format(status=7), (), 1, ["exit status 7", "trained"]),
        ("import signal; signal.pause()", ("--timeout", "0.5"), 1, ["exit status 124"]),
        (TRAIN.format(status=0), (), 2, ["the training ended without a record: does the script use ds_fsmoe?"]),
        (RECORD.replace("30", "5"), (), 2, ["the script ended after 5 steps: must be at least 8"]),
    ],
    ids=["fails", "does not end", "records nothing", "ends too soon"],
)
def test_a_training_without_a_record_to_compare_is_told_with_its_last_lines(
    script: str, options: tuple[str, ...], status: int, words: list[str], comparing: Comparing
) -> None:
    out = comparing.out
    command = [sys.executable, "-c", script, "8", comparing.config, out.with_name("log"), "0", "[]", "0"]
    said = comparing.run("compare", "--out", out, *options, "--", *command, status=status)
    assert all(each in said for each in words)


def test_after_the_long_runs_both_run_in_turns_and_the_order_changes(comparing: Comparing) -> None:
    comparing.config.write_text('{"fsmoe": {"enabled": true}}')
    blocks, said = comparing.recorded(5.0, "--turns", "3", "--turn-steps", "10", choices=(CHOICE,))
    assert [each["enabled"] for each in blocks] == [False, True, False, True, True, False, False, True]
    # As long as it takes until plans are settled, and 10 steps that count; only long runs are traced.
    assert [each["record"]["stop_after"] for each in blocks] == [30, 30, *[22] * 6]
    assert [each["trace"]["enabled"] for each in blocks] == [True, True, *[False] * 6]
    # Measured once: "auto" would find a turn too short to measure, and all share what was measured.
    assert [each["autotune"]["enabled"] for each in blocks] == ["auto", "auto", *[True] * 6]
    assert {each["autotune"]["cache_dir"] for each in blocks} == {str(comparing.out / "measured")}
    assert "over 3 turns ours is 1.95 times as fast" in said
    assert "of medians of 10 steps" in said
    # One result: the long runs' times are shown, and their ratio is not.
    assert "steps of the long runs, ms" in said
    assert not [line for line in said.splitlines() if line.startswith("ratio ")]
    assert "no winner: an interval needs 10 turns, and there are fewer" in said
    assert "95%" not in said


@pytest.mark.parametrize(
    ("later", "steps", "words", "repeats"),
    [
        # Settled in step 17 instead of 12: one step is left of the first turn, which is run again with six.
        (5, [30, 30, 18, 18, 27, 27, 27, 27], "over 2 turns ours is 1.93 times as fast", 1),
        # Longer than the long runs no turn is, so that it ends.
        (15, [30, 30, 18, 18, 30, 30, 30, 30], "2 of 2 turns ended before plans were settled, and are excluded", 0),
    ],
)
def test_a_turn_whose_plans_settle_late_is_run_again_and_longer(
    later: int, steps: list[int], words: str, repeats: int, comparing: Comparing
) -> None:
    blocks, said = comparing.recorded(5.0, "--turns", "2", "--turn-steps", "6", "--no-trace", later=later)
    assert [each["record"]["stop_after"] for each in blocks] == steps
    assert said.count("repeating this turn with 27 steps") == repeats
    assert words in said
    assert "times as fast" not in said.split("are excluded")[-1] or repeats


def test_a_machine_that_gets_slower_makes_nobody_the_winner(comparing: Comparing) -> None:
    _, equal = comparing.recorded(10.0, "--no-trace", slower_by=0.03)
    assert "over 10 turns" in equal
    assert "no winner: the interval contains 1, so the difference is within the noise" in equal
    assert "possible cause" in equal
    for factor, winner in (
        (0.8, "ds_fsmoe is faster: the whole interval is above 1"),
        (1.6, "stock DeepSpeed is faster: the whole interval is below 1"),
    ):
        for steps in comparing.out.rglob(f"{OURS}/steps.jsonl"):
            rows = [json.loads(line) for line in steps.read_text().splitlines()]
            changed = [json.dumps(row | {"step_ms": factor * row["step_ms"]}) for row in rows]
            steps.write_text("\n".join(changed) + "\n")
        assert print_comparison(comparing.out) == 0
        assert winner in comparing.said()


def test_turns_of_an_earlier_comparison_are_not_counted_and_two_recorded_runs_are_compared_without_a_command(
    comparing: Comparing,
) -> None:
    assert "over 1 turns" in comparing.recorded(5.0, "--turns", "1")[1]
    assert "turns ours" not in comparing.recorded(5.0, "--turns", "0")[1]
    assert not (comparing.out / "turns").exists()
    folders = [comparing.out / kind for kind in (STOCK, OURS)]
    said = comparing.run("compare", "--recorded", *folders)
    assert "ours is 1.95 times as fast as stock DeepSpeed in these two runs" in said
    assert "not a fair comparison" in said
    said = comparing.run("compare", "--recorded", *folders[::-1], status=2)
    assert "name the stock run first" in said
    assert "starts no training" in comparing.run("compare", "--recorded", *folders, "--", "train", status=2)


def test_a_script_that_ends_early_is_compared_over_the_steps_it_has_with_both_timelines(comparing: Comparing) -> None:
    blocks, said = comparing.recorded(8.0, "--turns", "0", "--steps", "150")
    runs = [(each["enabled"], each["record"]["stop_after"], each["trace"]["start_step"]) for each in blocks]
    assert runs == [(False, 150, 147), (False, 30, 27), (True, 30, 27)]
    assert "the script ended after 30 of 150 steps" in said
    assert "losses: identical in all 30 steps; the last is 1\n" in said
    assert "\ntimelines, plans and loads: ds_fsmoe report" in said
    blocks, said = comparing.recorded(8.0, "--no-trace", "--turns", "0", "--steps", "150")
    assert [(each["enabled"], each["record"]["stop_after"]) for each in blocks] == [(False, 150), (True, 30)]
    assert "\nplans and loads: ds_fsmoe report" in said
    assert "ratio " in said
