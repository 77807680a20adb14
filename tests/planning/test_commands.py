# SPDX-License-Identifier: Apache-2.0
"""``ds_fsmoe plan`` as a user types it, on a machine without torch."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

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
from ds_fsmoe.planning.workload import Shape

SMALL = ["--width", "64", "--hidden", "192", "--length", "60", "--layers", "3", "--heads", "8"]
PLAN = ["plan", "--cluster", "testbed_b", *SMALL]
ON_TWO_NODES = [
    *("plan", "--cluster", "testbed_a", "--nodes", "2", *SMALL, "--experts", "64", "--top-k", "8"),
    *("--capacity-factor", "none", "--mp", "1", "--esp", "1", "--max-degree", "2"),
]
OLMOE = str(Path(__file__).parents[2] / "benchmarks" / "routing" / "olmoe.npz")


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command prints."""
    assert cli.main([*arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.skipif("DS_FSMOE_EXPECT_NO_TORCH" not in os.environ, reason="only where make test-planning runs")
def test_this_environment_has_no_torch() -> None:
    assert importlib.util.find_spec("torch") is None
    assert importlib.util.find_spec("deepspeed") is None


def test_a_plan_shows_every_preset_the_bound_and_the_reasons(capsys, tmp_path) -> None:
    files = {name: tmp_path / f"out.{name}" for name in ("json", "trace", "png")}
    arguments = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    text = said(capsys, *PLAN, "--preset", "fsmoe", "--max-degree", "4", "--gantt", *arguments)
    for name in ("stock (ep_size 8)", *NAMES[1:], "(lower bound)"):
        assert any(line.startswith(name) for line in text.splitlines()), name
    for each in ("ep_size = 8 (inter)", "expert_tensor_parallel_size = 4 (intra)", "kappa = 0.445", "bound by the"):
        assert each in text
    assert re.search(r"forward, layers 0-2: \d+ chunks?: the MoE part takes", text)
    assert "(case " in text
    assert "one layer, backward:" in text

    found = json.loads(files["json"].read_text())
    assert set(found["presets"]) == set(NAMES)
    assert len(found["plan"]["layers"]) == 6
    # The table says the same, the right way round.
    rows = text.partition("one step")[2].partition("the plan of")[0].replace("stock (ep_size 8)", "deepspeed")
    shown = {line.split()[0]: line.split()[1:] for line in rows.splitlines() if line.split()[:1]}
    steps_ms = {name: times["step_ms"] for name, times in found["presets"].items()}
    for name, times in found["presets"].items():
        assert steps_ms[name] >= sum(found["lower_bound_ms"].values()), name
        assert times["over_deepspeed"] == pytest.approx(steps_ms["deepspeed"] / steps_ms[name])
        over = [f"{steps_ms[base] / steps_ms[name]:.2f}x" for base in ("deepspeed", "tutel")]
        assert shown[name] == [*(f"{times[key]:.2f}" for key in ("forward_ms", "backward_ms", "step_ms")), *over]
    assert steps_ms["best"] == pytest.approx(min(steps_ms.values()))
    sent = sum(layer["moe_bytes"] + layer["dense_bytes"] for layer in found["plan"]["layers"])
    assert sent + found["plan"]["tail_bytes"] == 3 * 4 * (4 * 64 * 64 // 4 + 64 * 8)

    events = [each for each in json.loads(files["trace"].read_text())["traceEvents"] if each["ph"] == "X"]
    ends_ms = [max(e["ts"] + e["dur"] for e in events if e["pid"] == pid) / 1e3 for pid in (0, 1)]
    assert ends_ms == pytest.approx([found["presets"]["fsmoe"][f"{phase}_ms"] for phase in ("forward", "backward")])
    assert files["png"].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert files["png"].stat().st_size > 20_000
    # The paper's solvers can be asked for.
    solvers = ["--solver", "slsqp", "--gradient-solver", "de", "--contention", "ideal", "--max-degree", "3"]
    text = said(capsys, *PLAN, "--preset", "fsmoe", *solvers)
    assert "the plan of fsmoe" in text
    assert "kappa = 0 while both are busy" in text


def test_a_picture_compares_equal_work_and_equal_gradients() -> None:
    cluster, shape = load_cluster("testbed_b"), Shape(B=1, L=256, M=512, H=1024, E=8)
    settings = Settings(cluster.contention, max_degree=3)
    job = PlannedJob(cluster, Groups(32, 4, mp=4, esp=4, ep=4), PlannedModel(shape, 3), settings)
    made = report(job, "best")
    drawn, sizes = made.step_timelines(), []
    lengths_ms = [line.makespan_ms for _, line, _ in drawn]
    assert lengths_ms == pytest.approx(sorted((sum(each) for each in made.times_ms.values()), reverse=True))
    for title, line, backward_ms in drawn:
        assert 0.0 < backward_ms < line.makespan_ms
        gain = sum(made.times_ms["deepspeed"]) / line.makespan_ms
        assert title == f"{title.split(',')[0]}, {gain:.2f}x over deepspeed"
        sizes.append(Counter())
        for span in line.spans:
            sizes[-1][span.task.kind] += span.task.size
        del sizes[-1][HOLD]
    assert {GRAD, EXPERT_GRAD, EXPERT} <= set(sizes[0])
    assert all(each == pytest.approx(sizes[0]) for each in sizes[1:])


BED_B = json.loads((Path(cli.__file__).parent / "planning" / "clusters" / "testbed_b.json").read_text())


def own(tmp_path: Path, **changes: Any) -> str:
    """The file of a cluster of one's own."""
    (tmp_path / "own.json").write_text(json.dumps(BED_B | {"name": "mine"} | changes))
    return str(tmp_path / "own.json")


def test_what_a_cluster_says_of_the_host_and_of_contention_is_planned_with(capsys, tmp_path) -> None:
    cluster = own(tmp_path, host_ms=0.03, contention={"links": 0.25}, num_nodes=2)
    arguments = ["plan", "--cluster", cluster, *SMALL, "--layers", "1", "--max-degree", "1"]
    text = said(capsys, *arguments)
    for each in ("8 ranks, 4 per node", "30 us to launch a task", "kappa = 0.25"):
        assert each in text
    # Given by hand they are not those of the file.
    text = said(capsys, *arguments, "--host-us", "5", "--contention", "0.75")
    for each in ("5 us to launch a task", "kappa = 0.75"):
        assert each in text


FEW = ["--layers", "2", "--length", "128", "--max-degree", "1"]


@pytest.mark.parametrize(
    ("arguments", "groups", "experts"),
    [
        ("testbed_a", "expert_tensor_parallel_size = 8 (intra), ep_size = 2 (inter), edp = 3 (inter)", 8),
        ("testbed_b", "mp = 4 (intra), dp = 8 (inter), expert_tensor_parallel_size = 4 (intra), ep_size = 8", 8),
        ("testbed_b --nodes 1", "dp = 4 (intra), ep_size = 4 (intra)", 8),
        ("testbed_b --nodes 3 --experts 6", "expert_tensor_parallel_size = 4 (intra), ep_size = 3 (inter)", 6),
        ("testbed_b --ep 16 --experts 16", "expert_tensor_parallel_size = 2 (intra), ep_size = 16 (both links)", 16),
        ("testbed_b --dp 16", "mp = 2 (intra), dp = 16", 8),
        ("testbed_b --nodes 99", "testbed_b, extrapolated from 8 to 99 node(s): FSMoE", 8),
    ],
)
def test_experts_are_the_models_and_groups_fit_them_on_any_number_of_nodes(
    arguments: str, groups: str, experts: int, capsys
) -> None:
    text = said(capsys, "plan", "--cluster", *arguments.split(), "--model", "mixtral-7b", *FEW)
    assert groups in text
    assert f"E = {experts}, k = 2" in text
    beyond = "its numbers are for 8 node(s): costs of collectives among 99 are extrapolated"
    assert (beyond in text) is ("99" in arguments)


def test_what_was_not_given_is_shown_as_it_would_be_given(capsys) -> None:
    asked = ["plan", "--cluster", "testbed_a", "--model", "gpt2-xl", *FEW]
    assert "\ndefault  --experts 8 --mp 8 --ep-size 8\n" in said(capsys, *asked, "--esp", "1")
    # As many of the 8 ranks of a node share an expert as leave room for 24 among the 48.
    over_half = said(capsys, *asked, "--experts", "24", "--ep", "24")
    assert "\ndefault  --mp 8 --expert-tensor-parallel-size 2\n" in over_half
    assert "default" not in said(capsys, *asked, "--experts", "8", "--mp", "8", "--esp", "1", "--ep", "8")


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_cluster_of_one_node_is_planned_without_further_arguments(gpus: int, capsys, tmp_path) -> None:
    # As `profile` leaves it: one node has no links to others, and one rank has none at all.
    operations = {
        name: cost
        for name, cost in BED_B["operations"].items()
        if not name.startswith("inter.") and (gpus > 1 or "." not in name)
    }
    cluster = own(tmp_path, num_nodes=1, gpus_per_node=gpus, operations=operations)
    asked = ["plan", "--cluster", cluster, "--model", "gpt2-xl", *FEW]
    assert f"--mp 1 --expert-tensor-parallel-size 1 --ep-size {gpus}" in said(capsys, *asked)
    # The sizes of groups are independent of one another, so one of them alone is taken as well.
    for option in ("--ep", "--mp", "--esp") if gpus > 1 else ():
        assert cli.main([*asked, option, str(gpus)]) == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--cluster", "testbed_c"], "no cluster or file 'testbed_c': did you mean 'testbed_"),
        (["--model", "mixtral-8b"], "no model or file 'mixtral-8b': did you mean 'mixtral-"),
        (["--preset", "fastmoe"], "unknown preset 'fastmoe': did you mean 'fsmoe'?"),
        (["--ep", "5"], "ep_size = 5 times expert_tensor_parallel_size = 4 = 20: must divide the 32 ranks of"),
        (["--top-k", "9"], "--top-k = 9: must be at most the number of experts, 8; --experts sets it"),
        (["--capacity-factor", "much"], "--capacity-factor = 'much': must be a number, or none"),
        (["--ffn", "wide"], "ffn = 'wide': the choices are gpt, mixtral"),
        (["--contention", "-1"], "--contention = '-1': must be measured, ideal, or a number of at least 0"),
        (["--solver", "newton"], "solver = 'newton': the choices are exact, slsqp"),
        (["--gradient-solver", "sa"], "--gradient-solver = 'sa': the choices are dp, de"),
        (["--alltoall", "3dh"], "--alltoall = '3dh': did you mean '2dh'?"),
        (["--alltoall", "twice"], "--alltoall = 'twice': the choices are flat, 2dh, node_dedup"),
        (["--max-degree", "0"], "num_chunks.max = 0: must be a whole number from 1 to 256"),
        (["--host-us", "-3"], "--host-us = -3.0: must be a finite number of at least 0"),
        (["--nodes", "0"], "--nodes = 0: must be at least 1"),
        (["--layers", "0"], "--layers = 0: must be at least 1"),
        (["--json", "/no/such/folder/x.json"], "/no/such/folder/x.json: no folder /no/such/folder"),
        (["--nodes", "1", "--expert-groups", "8"], "--expert-groups = 8: needs whole experts"),
    ],
)
def test_a_wrong_argument_is_one_sentence(arguments: list[str], sentence: str, capsys) -> None:
    assert cli.main([*PLAN, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"ds_fsmoe plan: error: {sentence}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "--cluster", "testbed_a", "--width", "64"], "missing: --hidden, --length, --layers; or name a model"),
        ([*ON_TWO_NODES, "--top-k", "4", "--routing", OLMOE], "has no layer of 64 experts and 4 choices per token"),
    ],
)
def test_what_is_missing_is_named(arguments: list[str], message: str, capsys) -> None:
    assert cli.main(arguments) != 0
    assert message in capsys.readouterr().err


def test_a_missing_operation_of_a_cluster_of_ones_own_is_named(capsys, tmp_path) -> None:
    operations = {name: cost for name, cost in BED_B["operations"].items() if name != "inter.all_reduce"}
    assert cli.main(["plan", "--cluster", own(tmp_path, operations=operations, num_nodes=2), *SMALL]) == 2
    sentence = "cluster mine: operations.inter.all_reduce is missing, but the DP group (2 ranks, at most 1 in a node)"
    assert f"{sentence} needs it: the file has inter.all_to_all, " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("others", "crossings"),
    [([], "1.00"), (["--expert-groups", "8", "--groups-per-token", "1"], "0.50"), (["--routing", OLMOE], "1.00")],
)
def test_a_plan_compares_all_to_alls_by_how_often_tokens_cross(others: list[str], crossings: str, capsys) -> None:
    rows = [line.split() for line in said(capsys, *ON_TWO_NODES, "--alltoall", "auto", *others).splitlines()]
    found = {row[0]: row[1:] for row in rows if row and row[0] in ("flat", "2dh", "node_deduplicated")}
    assert {name: row[0] for name, row in found.items()} == {
        "flat": "4.00",
        "2dh": "4.00",
        "node_deduplicated": crossings,
    }
    (shown,) = (name for name, row in found.items() if row[-1] == "below")
    assert float(found[shown][1]) == min(float(row[1]) for row in found.values())


@pytest.mark.parametrize("alltoall", ["flat", "node_deduplicated"])
def test_on_one_node_a_token_cannot_be_sent_once_to_each_and_who_asks_for_it_is_told(alltoall: str, capsys) -> None:
    text = said(capsys, *ON_TWO_NODES, "--nodes", "1", "--alltoall", alltoall)
    assert ("node_deduplicated is run as flat: " in text) is (alltoall != "flat")


@pytest.mark.parametrize(
    ("stage", "option", "more", "less"),
    [
        (2, "--chunk-bytes 1000000", {"pipemoe_lina", "lina"}, set()),
        (3, "--reduce-bucket-size 1e7", set(), {"DeepSpeed's buckets"}),
        (3, "--optimizer sgd", set(), {"optimizer states"}),
        (3, "--grad-accum-fp32", {"gradients", "data_types"}, set()),
        # DeepSpeed adds up by itself, after the backward: no slices are sent between the layers.
        (1, "--grad-accum-fp32", {"gradients", "data_types"}, {"pipemoe_lina", "lina"}),
    ],
)
def test_an_option_changes_what_it_is_for(
    stage: int, option: str, more: set[str], less: set[str], capsys, tmp_path
) -> None:
    block = "plan --cluster testbed_a --model olmoe --layers 1 --nodes 1 --ep 8 --max-degree 1 --zero"
    found = []
    for each in ("", option):
        said(capsys, *block.split(), str(stage), *each.split(), "--json", str(tmp_path / "plan.json"))
        plan = json.loads((tmp_path / "plan.json").read_text())
        numbers = Counter(plan["memory"]["items_bytes"], data_types=len(plan["ds_config"].get("data_types", "")))
        found.append(numbers + Counter({name: times["step_ms"] for name, times in plan["presets"].items()}))
    without, with_it = found
    assert (set(with_it - without), set(without - with_it)) == (more, less)


def test_the_options_and_names_of_before_mean_todays(capsys) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert parser.parse_args(["--halves"]) == parser.parse_args(["--two-batch-overlap"])
    before, today = (said(capsys, *ON_TWO_NODES, "--alltoall", each) for each in ("once_per_node", "node_deduplicated"))
    assert before.replace("once_per_node", "node_deduplicated") == today
    assert re.search(r"\nnode_deduplicated .*shown below\n", before)


def test_what_two_batch_overlap_gives_over_best_is_shown_where_there_are_two_samples(capsys) -> None:
    small = "plan --cluster testbed_a --model olmoe --layers 2 --nodes 2 --ep 8 --max-degree 2 --two-batch-overlap"
    texts = {}
    for more in ("--samples 1", "--samples 2 --gantt", "--samples 3 --recompute"):
        texts[more] = said(capsys, *small.split(), *more.split())
        assert ("best, two-batch" in texts[more]) is (more != "--samples 1")
    one, two, three = texts.values()
    assert "--two-batch-overlap: needs at least two samples in a batch: --samples 2" in one
    for each in ("two-batch overlap, relative to best", "two layers, backward, best, two-batch:"):
        assert each in two
    assert "(lower bound, batches whole)" in two
    assert "computed as if both sub-batches had 1.5" in three
    # Timelines are drawn where they are asked for.
    assert "two layers" not in three
