# SPDX-License-Identifier: Apache-2.0
"""``ds_fsmoe plan`` and ``ds_fsmoe simulate-paper`` as a user types them, on a machine without torch."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ds_fsmoe import cli
from ds_fsmoe.planning.presets import NAMES

SMALL = ["--width", "64", "--hidden", "192", "--length", "60", "--layers", "3", "--heads", "8"]
PLAN = ["plan", "--cluster", "testbed_b", *SMALL]


@pytest.mark.skipif("DS_FSMOE_EXPECT_NO_TORCH" not in os.environ, reason="only where make test-planning runs")
def test_this_environment_has_no_torch() -> None:
    assert importlib.util.find_spec("torch") is None
    assert importlib.util.find_spec("deepspeed") is None


def test_planning_a_model_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['deepspeed'] = None; from ds_fsmoe.cli import main; "
        f"status = main({[*PLAN, '--max-degree', '4']!r}); "
        "raise SystemExit(status or 'matplotlib' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "the plan of best" in done.stdout


def test_a_plan_shows_every_preset_the_bound_and_the_reasons(capsys, tmp_path) -> None:
    files = {name: tmp_path / f"out.{name}" for name in ("json", "trace", "png")}
    arguments = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    assert cli.main([*PLAN, "--preset", "fsmoe", "--gantt", *arguments]) == 0
    text = capsys.readouterr().out
    for name in (*NAMES, "(no plan can beat)"):
        assert any(line.startswith(name) for line in text.splitlines()), name
    assert "ep = 8 (inter)" in text
    assert "esp = 4 (intra)" in text
    assert "kappa = 0.445" in text
    assert "forward, layers 0-2: degree " in text
    assert "bound by the" in text
    assert "(case " in text
    assert "one layer, backward:" in text

    found = json.loads(files["json"].read_text())
    assert set(found["presets"]) == set(NAMES)
    assert len(found["plan"]["layers"]) == 6
    bound_ms = sum(found["lower_bound_ms"].values())
    for name, times in found["presets"].items():
        assert times["step_ms"] >= bound_ms, name
        assert times["over_deepspeed"] == pytest.approx(found["presets"]["deepspeed"]["step_ms"] / times["step_ms"])
    # The table says the same, the right way round.
    for name, *cells in (line.split() for line in text.splitlines() if line.split()[:1] and line.split()[0] in NAMES):
        times = found["presets"][name]
        shown = [f"{times[key]:.2f}" for key in ("forward_ms", "backward_ms", "step_ms")]
        over = [found["presets"][base]["step_ms"] / times["step_ms"] for base in ("deepspeed", "tutel")]
        assert cells == [*shown, *(f"{each:.2f}x" for each in over)]
    assert found["presets"]["best"]["step_ms"] == min(each["step_ms"] for each in found["presets"].values())
    sent = sum(layer["moe_bytes"] + layer["dense_bytes"] for layer in found["plan"]["layers"])
    assert sent + found["plan"]["tail_bytes"] == 3 * 4 * (4 * 64 * 64 // 4 + 64 * 8)

    events = [each for each in json.loads(files["trace"].read_text())["traceEvents"] if each["ph"] == "X"]
    ends_ms = [max(e["ts"] + e["dur"] for e in events if e["pid"] == pid) / 1e3 for pid in (0, 1)]
    assert ends_ms == pytest.approx([found["presets"]["fsmoe"][f"{phase}_ms"] for phase in ("forward", "backward")])
    assert files["png"].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert files["png"].stat().st_size > 20_000


def test_what_a_cluster_says_of_the_host_and_of_contention_is_planned_with(capsys, tmp_path) -> None:
    cluster = json.loads((Path(cli.__file__).parent / "planning" / "clusters" / "testbed_b.json").read_text())
    (tmp_path / "own.json").write_text(json.dumps(cluster | {"host_ms": 0.03, "contention": {"links": 0.25}}))
    arguments = ["plan", "--cluster", str(tmp_path / "own.json"), *SMALL, "--layers", "1", "--max-degree", "1"]
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    assert "30 us to launch a task" in text
    assert "kappa = 0.25" in text
    # Given by hand they are not those of the file.
    assert cli.main([*arguments, "--host-us", "5", "--contention", "0.75"]) == 0
    text = capsys.readouterr().out
    assert "5 us to launch a task" in text
    assert "kappa = 0.75" in text


def test_a_known_model_takes_what_is_given_instead(capsys) -> None:
    arguments = ["plan", "--cluster", "testbed_a", "--model", "mixtral-7b", "--layers", "2", "--length", "128"]
    groups = ["--mp", "1", "--esp", "2", "--ep", "12", "--capacity-factor", "none", "--dtype", "bf16"]
    assert cli.main([*arguments, *groups, "--contention", "ideal", "--host-us", "30", "--preset", "tutel"]) == 0
    text = capsys.readouterr().out
    assert "2 layers, B = 1, L = 128, M = 4096, H = 14336, E = 12, k = 2, nothing dropped, mixtral" in text
    assert "esp = 2 (intra), ep = 12 (both links), edp = 2 (inter)" in text
    assert "kappa = 0 while both are busy" in text
    assert "30 us to launch a task" in text


def test_the_papers_solvers_can_be_asked_for(capsys) -> None:
    arguments = ["--solver", "slsqp", "--gradient-solver", "de", "--preset", "fsmoe", "--contention", "ideal"]
    assert cli.main([*PLAN, *arguments]) == 0
    assert "the plan of fsmoe" in capsys.readouterr().out


def test_recomputing_and_stages_and_2dh_are_planned(capsys) -> None:
    arguments = [
        "--recompute",
        "--pp",
        "3",
        "--nodes",
        "6",
        "--mp",
        "2",
        "--esp",
        "1",
        "--ep",
        "8",
        "--alltoall",
        "2dh",
    ]
    assert cli.main([*PLAN, *arguments]) == 0
    text = capsys.readouterr().out
    assert "24 ranks, 4 per node" in text
    assert "times are those of one stage" in text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--cluster", "testbed_c"],
            "no cluster is called 'testbed_c', and there is no such file: did you mean 'testbed_",
        ),
        (
            ["--model", "mixtral-8b"],
            "no model is called 'mixtral-8b': the choices are gpt2-xl, mixtral-7b, mixtral-22b",
        ),
        (["--preset", "fastmoe"], "no preset is called 'fastmoe': the choices are deepspeed, tutel, tutel_improved,"),
        (["--ep", "5"], "ep = 5 times esp = 4 = 20: must divide the 32 ranks of the world"),
        (["--dp", "3"], "mp = 4 and dp = 3 do not multiply to the 32 ranks of the world"),
        (["--pp", "5"], "pp = 5: must divide the world size 32"),
        (["--mp", "0"], "mp = 0: must be a whole number of at least 1"),
        (["--experts", "9"], "E = 9: must be divisible by ep = 8"),
        (["--top-k", "9"], "K = 9: must be at most the number of experts, E = 8"),
        (["--capacity-factor", "much"], "--capacity-factor = 'much': must be a number, or none"),
        (["--capacity-factor", "-1"], "capacity_factor = -1.0: must be above 0, or none where nothing drops"),
        (["--ffn", "wide"], "ffn = 'wide': the choices are gpt, mixtral"),
        (["--contention", "-1"], "--contention = '-1': the choices are measured, ideal, or a number of at least 0"),
        (["--contention", "nan"], "--contention = 'nan': the choices are measured, ideal, or a number of at least 0"),
        (["--solver", "newton"], "solver = 'newton': the choices are exact, slsqp"),
        (["--gradient-solver", "sa"], "--gradient-solver = 'sa': the choices are dp, de"),
        (["--alltoall", "3dh"], "alltoall = '3dh': the choices are flat, 2dh"),
        (["--max-degree", "0"], "pipeline_degree.max = 0: must be a whole number from 1 to 256"),
        (["--chunk-bytes", "0"], "gradient_partition.chunk_bytes = 0: must be a whole number of at least 1"),
        (["--host-us", "-3"], "--host-us = -3.0: must be a finite number of at least 0"),
        (["--nodes", "0"], "--nodes = 0: must be at least 1"),
        (["--layers", "0"], "--layers = 0: must be at least 1"),
        (["--json", "/no/such/folder/x.json"], "/no/such/folder/x.json: there is no folder /no/such/folder"),
    ],
)
def test_a_wrong_argument_is_one_sentence(arguments: list[str], sentence: str, capsys) -> None:
    assert cli.main([*PLAN, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"ds_fsmoe plan: error: {sentence}")


def test_what_is_missing_without_a_model_is_named(capsys) -> None:
    assert cli.main(["plan", "--cluster", "testbed_a", "--width", "64"]) == 2
    needed = "without --model (gpt2-xl, mixtral-7b, mixtral-22b) also needed: --hidden, --length, --layers"
    assert needed in capsys.readouterr().err


def test_a_cluster_of_ones_own_plans_and_a_missing_operation_is_named(capsys, tmp_path) -> None:
    shipped = Path(cli.__file__).parent / "planning" / "clusters" / "testbed_b.json"
    data = json.loads(shipped.read_text()) | {"name": "mine", "num_nodes": 2}
    mine = tmp_path / "mine.json"
    mine.write_text(json.dumps(data))
    assert cli.main(["plan", "--cluster", str(mine), *SMALL, "--preset", "fsmoe"]) == 0
    assert "8 ranks, 4 per node" in capsys.readouterr().out
    del data["operations"]["inter.all_reduce"]
    mine.write_text(json.dumps(data))
    assert cli.main(["plan", "--cluster", str(mine), *SMALL]) == 2
    sentence = "cluster mine: operations.inter.all_reduce is missing, and the DP group (2 ranks, at most 1 in a node)"
    assert f"{sentence} needs it: there are inter.all_to_all, " in capsys.readouterr().err


def test_the_papers_evaluation_prints_ours_beside_the_papers(capsys, tmp_path) -> None:
    result = tmp_path / "paper.json"
    arguments = ["--sample", "4", "--best-sample", "2", "--json", str(result)]
    assert cli.main(["simulate-paper", "--testbed", "b", *arguments]) == 0
    captured = capsys.readouterr()
    for part in (
        "table 5, testbed B",
        "figure 6",
        "figure 7, by length",
        "figure 8",
        "sensitivity, testbed B",
        "assumed:",
    ):
        assert part in captured.out
    assert "the paper: 912 of 1458" in captured.out
    assert "4 of 4 layers" in captured.err
    found = json.loads(result.read_text())
    (table,) = found["table5"]
    assert table["num_layers"] == 4
    assert table["paper"]["fsmoe"] == 1.22
    assert table["ideal"]["fsmoe"] >= table["ideal"]["fsmoe_no_iio"] >= table["ideal"]["tutel"] == 1.0
    assert {row["what"] for row in found["sensitivity"]["b"]} == {"alpha", "beta", "both"}
    assert {row["off_by"] for row in found["sensitivity"]["b"]} == {0.1, 0.3, 0.5}
    assert all(row["worst"] >= row["mean"] >= 0 for row in found["sensitivity"]["b"])


def test_the_papers_timelines_come_out_by_name(capsys, tmp_path) -> None:
    ends_ms = {}
    for name in ("3a", "3b", "3c", "3d", "4.1", "4.2", "4.3", "4.4"):
        assert cli.main(["simulate-paper", "--timeline", name]) == 0
        ends_ms[name] = float(capsys.readouterr().out.splitlines()[-1].split()[0])
    assert ends_ms["3a"] > ends_ms["3b"] > ends_ms["3c"] > ends_ms["3d"]
    # Figure 4's formulas: 2ra + gar, 2a + g + s + re, 2ra + g + s, 2a + r(g + s), with r = 2.
    assert [ends_ms[f"4.{case}"] for case in (1, 2, 3, 4)] == [12.0, 11.0, 14.0, 14.0]
    picture = tmp_path / "3d.png"
    assert cli.main(["simulate-paper", "--timeline", "3d", "--png", str(picture)]) == 0
    assert picture.stat().st_size > 5_000
    assert cli.main(["simulate-paper", "--timeline", "5"]) == 2
    assert "no timeline is called '5': the choices are 3a, 3b, 3c, 3d, 4.1" in capsys.readouterr().err


def test_wrong_sizes_of_samples_are_refused(capsys) -> None:
    assert cli.main(["simulate-paper", "--sample", "0"]) == 2
    assert "--sample = 0, --best-sample = 54: must be at least 1 and 0" in capsys.readouterr().err
    assert cli.main(["simulate-paper", "--png", "x.png"]) == 2
    assert "--png draws a timeline: say which with --timeline" in capsys.readouterr().err
