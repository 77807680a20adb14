# SPDX-License-Identifier: Apache-2.0
"""``ds_fsmoe plan`` as a user types it, on a machine without torch."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
from pathlib import Path

import pytest

from ds_fsmoe import cli
from ds_fsmoe.offline.models.known import PlannedModel
from ds_fsmoe.offline.plan import command
from ds_fsmoe.offline.plan.report import PlannedJob, report
from ds_fsmoe.planning.cluster import load_cluster
from ds_fsmoe.planning.decide.plan import Settings
from ds_fsmoe.planning.decide.presets import NAMES
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.schedule import EXPERT, EXPERT_GRAD, GRAD, HOLD
from ds_fsmoe.planning.timeline import Timeline
from ds_fsmoe.planning.workload import Shape

SMALL = ["--width", "64", "--hidden", "192", "--length", "60", "--layers", "3", "--heads", "8"]
PLAN = ["plan", "--cluster", "testbed_b", *SMALL]


@pytest.mark.skipif("DS_FSMOE_EXPECT_NO_TORCH" not in os.environ, reason="only where make test-planning runs")
def test_this_environment_has_no_torch() -> None:
    assert importlib.util.find_spec("torch") is None
    assert importlib.util.find_spec("deepspeed") is None


def test_a_plan_shows_every_preset_the_bound_and_the_reasons(capsys, tmp_path) -> None:
    files = {name: tmp_path / f"out.{name}" for name in ("json", "trace", "png")}
    arguments = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    assert cli.main([*PLAN, "--preset", "fsmoe", "--max-degree", "4", "--gantt", *arguments]) == 0
    text = capsys.readouterr().out
    for name in ("stock (ep_size 8)", *NAMES[1:], "(lower bound)"):
        assert any(line.startswith(name) for line in text.splitlines()), name
    assert "ep_size = 8 (inter)" in text
    assert "expert_tensor_parallel_size = 4 (intra)" in text
    assert "kappa = 0.445" in text
    assert re.search(r"forward, layers 0-2: \d+ chunks?: the MoE part takes", text)
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
    rows = text.partition("one step")[2].partition("the plan of")[0].replace("stock (ep_size 8)", "deepspeed")
    shown_names = [line.split() for line in rows.splitlines() if line.split()[:1] and line.split()[0] in NAMES]
    assert len(shown_names) == len(NAMES)
    for name, *cells in shown_names:
        times = found["presets"][name]
        shown = [f"{times[key]:.2f}" for key in ("forward_ms", "backward_ms", "step_ms")]
        over = [found["presets"][base]["step_ms"] / times["step_ms"] for base in ("deepspeed", "tutel")]
        assert cells == [*shown, *(f"{each:.2f}x" for each in over)]
    least_ms = min(each["step_ms"] for each in found["presets"].values())
    assert found["presets"]["best"]["step_ms"] == pytest.approx(least_ms)
    sent = sum(layer["moe_bytes"] + layer["dense_bytes"] for layer in found["plan"]["layers"])
    assert sent + found["plan"]["tail_bytes"] == 3 * 4 * (4 * 64 * 64 // 4 + 64 * 8)

    events = [each for each in json.loads(files["trace"].read_text())["traceEvents"] if each["ph"] == "X"]
    ends_ms = [max(e["ts"] + e["dur"] for e in events if e["pid"] == pid) / 1e3 for pid in (0, 1)]
    assert ends_ms == pytest.approx([found["presets"]["fsmoe"][f"{phase}_ms"] for phase in ("forward", "backward")])
    assert files["png"].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert files["png"].stat().st_size > 20_000


def test_a_picture_compares_equal_work_and_equal_gradients() -> None:
    cluster = load_cluster("testbed_b")
    groups = Groups(32, 4, mp=4, esp=4, ep=4)
    shape = Shape(B=1, L=256, M=512, H=1024, E=8)
    settings = Settings(cluster.contention, max_degree=3)
    made = report(PlannedJob(cluster, groups, PlannedModel(shape, 3), settings), "best")
    drawn = made.step_timelines()
    lengths_ms = [line.makespan_ms for _, line, _ in drawn]
    assert lengths_ms == pytest.approx(sorted((sum(each) for each in made.times_ms.values()), reverse=True))
    for title, line, backward_ms in drawn:
        assert 0.0 < backward_ms < line.makespan_ms
        name = title.split(",")[0]
        gain = sum(made.times_ms["deepspeed"]) / line.makespan_ms
        assert title == f"{name}, {gain:.2f}x over deepspeed"
    sizes = [work_of(line) for _, line, _ in drawn]
    assert {GRAD, EXPERT_GRAD, EXPERT} <= set(sizes[0])
    assert all(each == pytest.approx(sizes[0]) for each in sizes[1:])


def work_of(line: Timeline) -> dict[str, float]:
    """Kind -> how much of it there is."""
    found: dict[str, float] = {}
    for span in line.spans:
        if span.task.kind != HOLD:
            found[span.task.kind] = found.get(span.task.kind, 0.0) + span.task.size
    return found


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


FEW = ["--layers", "2", "--length", "128", "--max-degree", "1"]


@pytest.mark.parametrize(
    ("arguments", "groups", "experts"),
    [
        ("testbed_a", "expert_tensor_parallel_size = 8 (intra), ep_size = 2 (inter), edp = 3 (inter)", 8),
        ("testbed_b", "mp = 4 (intra), dp = 8 (inter), expert_tensor_parallel_size = 4 (intra), ep_size = 8", 8),
        ("testbed_b --nodes 4", "expert_tensor_parallel_size = 4 (intra), ep_size = 4 (inter)", 8),
        ("testbed_b --nodes 1", "dp = 4 (intra), ep_size = 4 (intra)", 8),
        ("testbed_b --nodes 3 --experts 6", "expert_tensor_parallel_size = 4 (intra), ep_size = 3 (inter)", 6),
        ("testbed_b --ep 16 --experts 16", "expert_tensor_parallel_size = 2 (intra), ep_size = 16 (both links)", 16),
        ("testbed_b --dp 16", "mp = 2 (intra), dp = 16", 8),
    ],
)
def test_experts_are_the_models_and_groups_fit_them_on_any_number_of_nodes(
    arguments: str, groups: str, experts: int, capsys
) -> None:
    assert cli.main(["plan", "--cluster", *arguments.split(), "--model", "mixtral-7b", *FEW]) == 0
    said = capsys.readouterr().out
    assert groups in said
    assert f"E = {experts}, k = 2" in said


def test_what_was_not_given_is_shown_as_it_would_be_given(capsys) -> None:
    assert cli.main(["plan", "--cluster", "testbed_a", "--model", "gpt2-xl", *FEW, "--esp", "1"]) == 0
    assert "\ndefault  --experts 8 --mp 8 --ep-size 8\n" in capsys.readouterr().out
    # As many of the 8 ranks of a node share an expert as leave room for 24 among the 48.
    over_half = ["--experts", "24", "--ep", "24"]
    assert cli.main(["plan", "--cluster", "testbed_a", "--model", "gpt2-xl", *FEW, *over_half]) == 0
    assert "\ndefault  --mp 8 --expert-tensor-parallel-size 2\n" in capsys.readouterr().out
    given = ["--experts", "8", "--mp", "8", "--esp", "1", "--ep", "8"]
    assert cli.main(["plan", "--cluster", "testbed_a", "--model", "gpt2-xl", *FEW, *given]) == 0
    assert "default" not in capsys.readouterr().out


def test_more_nodes_than_were_measured_are_said_to_be_extrapolated(capsys) -> None:
    sentence = "its numbers are for 8 node(s): costs of collectives among 99 are extrapolated"
    for nodes in ("99", "8"):
        assert cli.main(["plan", "--cluster", "testbed_b", "--model", "gpt2-xl", *FEW, "--nodes", nodes]) == 0
        said = capsys.readouterr().out
        assert (sentence in said) is (nodes == "99")
        beyond = ", extrapolated from 8 to 99 node(s)" if nodes == "99" else ""
        assert f"\ncluster  testbed_b{beyond}: FSMoE" in said


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_cluster_of_one_node_is_planned_without_further_arguments(gpus: int, capsys, tmp_path) -> None:
    shipped = Path(cli.__file__).parent / "planning" / "clusters" / "testbed_b.json"
    data = json.loads(shipped.read_text()) | {"num_nodes": 1, "gpus_per_node": gpus}
    # As `profile` leaves it: one node has no links to others, and one rank has none at all.
    data["operations"] = {
        name: cost
        for name, cost in data["operations"].items()
        if not name.startswith("inter.") and (gpus > 1 or "." not in name)
    }
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(data))
    assert cli.main(["plan", "--cluster", str(path), "--model", "gpt2-xl", *FEW]) == 0
    assert f"--mp 1 --expert-tensor-parallel-size 1 --ep-size {gpus}" in capsys.readouterr().out
    # The sizes of groups are independent of one another, so one of them alone is taken as well.
    for option in ("--ep", "--mp", "--esp") if gpus > 1 else ():
        assert cli.main(["plan", "--cluster", str(path), "--model", "gpt2-xl", *FEW, option, str(gpus)]) == 0


def test_the_papers_solvers_can_be_asked_for(capsys) -> None:
    arguments = ["--solver", "slsqp", "--gradient-solver", "de", "--preset", "fsmoe", "--contention", "ideal"]
    assert cli.main([*PLAN, *arguments, "--max-degree", "3"]) == 0
    text = capsys.readouterr().out
    assert "the plan of fsmoe" in text
    assert "kappa = 0 while both are busy" in text


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
        "--max-degree",
        "2",
    ]
    assert cli.main([*PLAN, *arguments]) == 0
    text = capsys.readouterr().out
    assert "24 ranks, 4 per node" in text
    assert "\nstages   3 alike; the layers below are those of the first\n" in text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--cluster", "testbed_c"], "no cluster or file 'testbed_c': did you mean 'testbed_"),
        (["--model", "mixtral-8b"], "no model or file 'mixtral-8b': did you mean 'mixtral-"),
        (["--preset", "fastmoe"], "unknown preset 'fastmoe': did you mean 'fsmoe'?"),
        (["--ep", "5"], "ep_size = 5 times expert_tensor_parallel_size = 4 = 20: must divide the 32 ranks of"),
        (["--dp", "3"], "mp = 4 and dp = 3 do not multiply to the 32 ranks of the world"),
        (["--pp", "5"], "pp = 5: must divide the world size 32"),
        (["--mp", "0"], "mp = 0: must be a whole number of at least 1"),
        (["--experts", "9", "--ep", "8"], "ep_size = 8: must divide the 9 experts"),
        (["--top-k", "9"], "--top-k = 9: must be at most the number of experts, 8; --experts sets it"),
        (["--capacity-factor", "much"], "--capacity-factor = 'much': must be a number, or none"),
        (["--capacity-factor", "-1"], "capacity_factor = -1.0: must be above 0, or none where nothing drops"),
        (["--ffn", "wide"], "ffn = 'wide': the choices are gpt, mixtral"),
        (["--contention", "-1"], "--contention = '-1': must be measured, ideal, or a number of at least 0"),
        (["--contention", "nan"], "--contention = 'nan': must be measured, ideal, or a number of at least 0"),
        (["--solver", "newton"], "solver = 'newton': the choices are exact, slsqp"),
        (["--gradient-solver", "sa"], "--gradient-solver = 'sa': the choices are dp, de"),
        (["--alltoall", "3dh"], "--alltoall = '3dh': did you mean '2dh'?"),
        (["--max-degree", "0"], "num_chunks.max = 0: must be a whole number from 1 to 256"),
        (["--chunk-bytes", "0"], "gradient_partition.chunk_bytes = 0: must be a whole number of at least 1"),
        (["--host-us", "-3"], "--host-us = -3.0: must be a finite number of at least 0"),
        (["--nodes", "0"], "--nodes = 0: must be at least 1"),
        (["--layers", "0"], "--layers = 0: must be at least 1"),
        (["--json", "/no/such/folder/x.json"], "/no/such/folder/x.json: no folder /no/such/folder"),
    ],
)
def test_a_wrong_argument_is_one_sentence(arguments: list[str], sentence: str, capsys) -> None:
    assert cli.main([*PLAN, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"ds_fsmoe plan: error: {sentence}")


def test_what_is_missing_without_a_model_is_named(capsys) -> None:
    assert cli.main(["plan", "--cluster", "testbed_a", "--width", "64"]) == 2
    said = capsys.readouterr().err
    assert "missing: --hidden, --length, --layers; or name a model with --model (gpt2-xl, mixtral-7b, " in said


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
    sentence = "cluster mine: operations.inter.all_reduce is missing, but the DP group (2 ranks, at most 1 in a node)"
    assert f"{sentence} needs it: the file has inter.all_to_all, " in capsys.readouterr().err


ON_TWO_NODES = [
    *("plan", "--cluster", "testbed_a", "--nodes", "2", *SMALL, "--experts", "64", "--top-k", "8"),
    *("--capacity-factor", "none", "--mp", "1", "--esp", "1", "--max-degree", "2"),
]
OLMOE = str(Path(__file__).parents[2] / "benchmarks" / "routing" / "olmoe.npz")


@pytest.mark.parametrize(
    ("others", "crossings"),
    [
        ([], "1.00"),
        (["--expert-groups", "8", "--groups-per-token", "1"], "0.50"),
        (["--routing", OLMOE], "1.00"),
    ],
)
def test_a_plan_compares_all_to_alls_by_how_often_tokens_cross(others: list[str], crossings: str, capsys) -> None:
    assert cli.main([*ON_TWO_NODES, "--alltoall", "auto", *others]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    found = {row[0]: row[1:] for row in rows if row and row[0] in ("flat", "2dh", "node_deduplicated")}
    assert [found[name][0] for name in ("flat", "2dh", "node_deduplicated")] == ["4.00", "4.00", crossings]
    (shown,) = (name for name, row in found.items() if row[-1] == "below")
    assert float(found[shown][1]) == min(float(row[1]) for row in found.values())


@pytest.mark.parametrize("alltoall", ["flat", "node_deduplicated"])
def test_on_one_node_a_token_cannot_be_sent_once_to_each_and_who_asks_for_it_is_told(alltoall: str, capsys) -> None:
    on_one = [{"2": "1"}.get(each, each) for each in ON_TWO_NODES[:5]] + ON_TWO_NODES[5:]
    assert cli.main([*on_one, "--alltoall", alltoall]) == 0
    assert ("node_deduplicated is run as flat: " in capsys.readouterr().out) is (alltoall != "flat")


def test_the_options_and_names_of_before_mean_todays(capsys) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert parser.parse_args(["--halves"]) == parser.parse_args(["--two-batch-overlap"])
    said = []
    for name in ("once_per_node", "node_deduplicated"):
        assert cli.main([*ON_TWO_NODES, "--alltoall", name]) == 0
        said.append(capsys.readouterr().out)
    assert said[0].replace("once_per_node", "node_deduplicated") == said[1]
    assert re.search(r"\nnode_deduplicated .*shown below\n", said[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*ON_TWO_NODES, "--alltoall", "twice"], "--alltoall = 'twice': the choices are flat, 2dh, node_dedup"),
        ([*ON_TWO_NODES, "--nodes", "1", "--expert-groups", "8"], "--expert-groups = 8: needs whole experts"),
        ([*ON_TWO_NODES, "--top-k", "4", "--routing", OLMOE], "has no layer of 64 experts and 4 choices per token"),
    ],
)
def test_what_says_nothing_of_crossings_is_refused(arguments: list[str], message: str, capsys) -> None:
    assert cli.main(arguments) != 0
    assert message in capsys.readouterr().err


def test_what_two_batch_overlap_gives_over_best_is_shown_where_there_are_two_samples(capsys) -> None:
    small = [
        "--cluster",
        "testbed_a",
        "--model",
        "olmoe",
        "--layers",
        "2",
        "--nodes",
        "2",
        "--ep",
        "8",
        "--max-degree",
        "2",
        "--two-batch-overlap",
    ]
    said = {}
    for more in ("--samples 1", "--samples 2 --gantt", "--samples 3 --recompute", "--samples 3"):
        assert cli.main(["plan", *small, *more.split()]) == 0
        said[more] = capsys.readouterr().out
        assert ("best, two-batch" in said[more]) is (more != "--samples 1")
    assert "--two-batch-overlap: needs at least two samples in a batch: --samples 2" in said["--samples 1"]
    shown = said["--samples 2 --gantt"]
    assert "two-batch overlap, relative to best" in shown
    assert "two layers, backward, best, two-batch:" in shown
    assert "(lower bound, batches whole)" in shown
    assert "computed as if both sub-batches had 1.5" in said["--samples 3"]
    # Timelines are drawn where they are asked for.
    assert "two layers" not in said["--samples 3"]
