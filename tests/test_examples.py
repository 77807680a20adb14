# SPDX-License-Identifier: Apache-2.0
"""Each of the smaller examples does what its first lines say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ds_fsmoe.cli import main
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.scripts import ROOT, START, Start, be_script, free_port

EXAMPLES = ROOT / "examples"


@pytest.mark.daily("examples", 1)
@START
def test_digits_that_were_not_seen_are_read(start: Start, tmp_path: Path) -> None:
    printed = start(tmp_path, str(EXAMPLES / "digits.py"))
    found = re.search(r"loss ([\d.]+), ([\d.]+)% of 297 unseen digits read right", printed)
    assert found, printed[-2000:]
    assert float(found[2]) > 75
    assert len(re.findall(r"layer \d: tokens per expert \[\d+, \d+, \d+, \d+\]", printed)) == 2


def test_a_checkpoint_that_has_moved_goes_on_as_if_it_had_not(tmp_path: Path) -> None:
    said = []
    for ranks, arguments in ((2, ("--save",)), (1, ("--stage", "2", "--load"))):
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        script, folder = str(EXAMPLES / "move_checkpoint.py"), tmp_path / f"on{ranks}"
        every = (*arguments, str(tmp_path / "moving"))
        said += run_on_ranks(be_script, ranks, folder, str(folder), script, every, variables)[:1]
    numbers = [re.search(r"loss when \w+ ([\d.]+), ten steps later ([\d.]+)", each) for each in said]
    assert all(numbers), said
    (saved, loaded) = ([float(each) for each in found.groups()] for found in numbers)
    assert loaded == pytest.approx(saved, rel=2e-5)
    assert saved[1] < saved[0]


@pytest.mark.daily("examples", 1)
@START
def test_a_run_is_tuned_planned_from_and_reported(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = start(tmp_path, str(EXAMPLES / "tune.py"), "--folder", str(tmp_path / "tuned"), "--steps", "40")
    assert "chosen: forward" in printed
    cluster = re.search(r"measured: (.*)", printed)[1]
    planned = re.search(r"ds_fsmoe plan (.*) --cluster", (EXAMPLES / "tune.py").read_text())[1].split()
    assert main(["plan", *planned, "--cluster", cluster]) == 0
    assert "the plan of" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "tuned" / "run")]) == 0
    page = (tmp_path / "tuned" / "run" / "report.html").read_text()
    for words in ("What was decided", "Load of experts", "What was measured", "critical path"):
        assert words in page, words
    # Which plan is the faster one is up to the machine.
    assert ("runner-up" in page) != ("the plans that were tried were not faster" in page)


@START
@sampled("with_ours", [False, True], ids=["stock", "ours"])
def test_an_untouched_script_trains_with_either(with_ours: bool, start: Start, tmp_path: Path) -> None:
    config = ["--deepspeed_config", str(ROOT / "ds_configs" / "cpu.json"), "--steps", "30"]
    through = [str(ROOT / "ds_fsmoe" / "run.py")] if with_ours else []
    printed = start(tmp_path, *through, str(EXAMPLES / "plain.py"), *config)
    found = re.findall(r"step (\d+): loss ([\d.]+), by (\w+)", printed)
    layer = "FSMoELayer" if with_ours else "MOELayer"
    assert [(step, by) for step, _, by in found] == [("1", layer), ("30", layer)]
    assert float(found[1][1]) < float(found[0][1])


FINETUNE = {"ours": ["--stage", "3", "--chunks", "2"], "stock": ["--stage", "2", "--stock"]}


@pytest.mark.daily("examples", 1)
@START
@sampled("names", [["ours"], ["ours", "stock"]], ids=["learns", "as stock"])
def test_a_hugging_face_model_learns_and_has_the_losses_of_stock_deepspeed(
    names: list[str], start: Start, tmp_path: Path
) -> None:
    script, losses = str(EXAMPLES / "hf_finetune.py"), {}
    for name in names:
        arguments = FINETUNE[name]
        (tmp_path / name).mkdir()
        printed = start(tmp_path / name, script, *arguments, "--steps", "20")
        losses[name] = [float(each) for each in re.findall(r"step +\d+: loss ([\d.]+)", printed)]
        assert ("converted the experts of olmoe: ep_size = 2" in printed) == (name == "ours")
    assert len(losses["ours"]) == 3
    assert losses["ours"] == pytest.approx(losses[names[-1]], rel=1e-4)
    assert losses["ours"][-1] < 0.7 * losses["ours"][0]


@pytest.mark.daily("examples", 1)
@START
@sampled("policies", [["balanced"], ["balanced", "off"]], ids=["moves", "as without"])
def test_experts_move_to_where_the_tokens_are(policies: list[str], start: Start, tmp_path: Path) -> None:
    losses = {}
    for policy in policies:
        (tmp_path / policy).mkdir()
        printed = start(tmp_path / policy, str(EXAMPLES / "skewed.py"), "--policy", policy)
        losses[policy] = [float(each) for each in re.findall(r"step +\d+: loss ([\d.]+)", printed)]
        decided = re.findall(r"after step \d+: L\d\d: \d+ experts? moves?: the fullest", printed)
        found = re.search(r"the fullest rank had ([\d.]+) times the mean at first, and ([\d.]+) at last", printed)
        assert (len(decided) >= 2, bool(found)) == ((False, False) if policy == "off" else (True, True))
        assert not found or float(found[1]) > 1.3 > 1.1 > float(found[2])
    assert len(losses["balanced"]) == 4
    assert losses["balanced"] == pytest.approx(losses[policies[-1]], rel=1e-4)
    assert losses["balanced"][-1] < losses["balanced"][0]
