# SPDX-License-Identifier: Apache-2.0
"""The simulations of the benchmarks: models on clusters of many sizes (plans composed of single layers, layouts, what
limits a step), and the paper's figures."""

from __future__ import annotations

import argparse
import csv
import json
import re
from collections import defaultdict
from functools import partial
from pathlib import Path

import pytest

from benchmarks.simulations import paper, scale
from benchmarks.simulations.layouts import (
    Job,
    crossings_of,
    dtype_bytes_of,
    ep_sizes,
    variants,
)
from benchmarks.simulations.scale import LIMITS, Row, limit_of, simulate_job, sweep, with_efficiency
from benchmarks.simulations.steady_state import plan_composed
from ds_fsmoe.offline.models.known import PlannedModel, load_model
from ds_fsmoe.offline.models.memory import largest_batch, memory_of
from ds_fsmoe.offline.models.model_layers import commonest_moe, model_layers, moe_shape
from ds_fsmoe.offline.models.training import Training
from ds_fsmoe.offline.plan import command as plan
from ds_fsmoe.offline.plan.memory import print_memory
from ds_fsmoe.offline.plan.report import PlannedJob
from ds_fsmoe.planning.cluster import load_cluster
from ds_fsmoe.planning.decide.plan import Planner, Settings, plan_by_name
from ds_fsmoe.planning.decide.presets import BEST, NAMES
from ds_fsmoe.planning.decide.step_time import StageTimes
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.schedule import A2A_IN, A2A_OUT
from ds_fsmoe.planning.workload import AllToAll, Layer, kind_costs

pytestmark = pytest.mark.long

ADAPTIVE = ("fsmoe_no_iio", "fsmoe", "best")
CASES = {
    "experts in a node, many ranks": ("olmoe", "h100_400", 512, 8, "flat"),
    "experts over nodes, once per node": ("olmoe", "h100_400", 64, 64, "node_deduplicated"),
    "experts over nodes, flat, links that contend": ("olmoe", "testbed_a", 16, 16, "flat"),
    "many gradients": ("mixtral-8x7b", "a100_200", 64, 8, "flat"),
    "a head with more gradients than a layer": ("deepseek-v3", "h100_400", 64, 64, "node_deduplicated"),
    "layers of two kinds in turns, a link that is far too slow": ("gpt-oss-20b", "ethernet_25", 32, 32, "flat"),
}
"""Case -> model, cluster, ranks, EP size, exchange."""


def case_of(name: str) -> tuple[Planner, tuple[Layer, ...]]:
    model, cluster_name, ranks, ep, alltoall = CASES[name]
    cluster = load_cluster(cluster_name)
    groups = Groups(ranks, cluster.gpus_per_node, ep=ep)
    layers = model_layers(load_model(model), groups, 1, 2048, dtype_bytes_of(cluster), alltoall)
    return Planner(kind_costs(cluster, groups, alltoall), Settings(cluster.contention, cluster.host_ms)), layers


def times_ms(planner: Planner, plan) -> float:
    settings = planner.settings
    return sum(plan.times_ms(planner.costs, settings.contention, settings.host_ms))


@pytest.mark.parametrize("case", CASES)
def test_a_plan_composed_of_single_layers_takes_what_the_whole_one_does_within_three_percent(case: str) -> None:
    planner, layers = case_of(case)
    settings = planner.settings
    for name in ADAPTIVE:
        composed_ms = times_ms(planner, plan_composed(planner, name, layers))
        whole = plan_by_name(planner, name, layers)
        whole_ms = whole.step_ms(planner.costs, settings.contention, settings.host_ms)
        # The head's gradients are more than a layer beside them can hide, where all layers together can.
        share = 0.06 if case == "a head with more gradients than a layer" else 0.03
        assert composed_ms == pytest.approx(whole_ms, rel=share), name


def test_layers_that_alternate_are_all_planned() -> None:
    planner, layers = case_of("layers of two kinds in turns, a link that is far too slow")
    assert len({id(each) for each in layers}) > 2
    for name in ADAPTIVE:
        plan = plan_composed(planner, name, layers)
        assert [count for _, count in plan.parts] == [1]
        assert plan.parts[0][0].layers == layers


@pytest.mark.parametrize("case", ["experts in a node, many ranks", "many gradients"])
def test_a_system_that_places_gradients_by_a_rule_is_planned_as_it_is_and_all_are_if_asked_to(case: str) -> None:
    planner, layers = case_of(case)
    settings = planner.settings
    for name in NAMES:
        whole_ms = plan_by_name(planner, name, layers).step_ms(planner.costs, settings.contention, settings.host_ms)
        is_exact = name in ADAPTIVE
        assert times_ms(planner, plan_composed(planner, name, layers, exact=is_exact)) == whole_ms, name


@pytest.mark.parametrize("case", CASES)
def test_every_byte_of_gradients_is_sent_once(case: str) -> None:
    planner, layers = case_of(case)
    expected: dict[str, float] = defaultdict(float)
    for layer in layers:
        for gradient in layer.gradients:
            expected[gradient.kind] += gradient.size_bytes
    for name in NAMES:
        plan = plan_composed(planner, name, layers)
        sent: dict[str, float] = defaultdict(float)
        for part, count in plan.parts:
            for block in part.backward:
                for each in (*block.moe_slices, *block.dense_slices):
                    sent[each.kind] += count * each.size_bytes
            for each in part.tail:
                sent[each.kind] += count * each.size_bytes
        for each in plan.tail:
            sent[each.kind] += each.size_bytes
        assert sent == pytest.approx(expected), name
        assert sum(len(part.layers) * count for part, count in plan.parts) == len(layers)


def test_gradients_are_summed_in_the_last_micro_batch_alone() -> None:
    planner, layers = case_of("many gradients")
    for name in ("tutel", "fsmoe"):
        plan = plan_composed(planner, name, layers)
        step_ms, alone_ms = (times_ms(planner, each) for each in (plan, plan.without_gradients()))
        assert alone_ms < step_ms
        for micro_batches in (1, 2, 7):
            expected_ms = step_ms + (micro_batches - 1) * alone_ms
            assert times_ms(planner, plan.accumulating(micro_batches)) == pytest.approx(expected_ms), name


# ---- layouts


@pytest.mark.parametrize(
    ("experts", "ranks", "gpus"),
    [(8, 8, 8), (128, 4096, 8), (60, 12, 8), (7, 8, 8), (64, 3, 4), (32, 64, 8), (1, 16, 8)],
)
def test_experts_lie_inside_a_node_over_as_many_ranks_as_can_be_and_over_doublings_between(
    experts: int, ranks: int, gpus: int
) -> None:
    widest = inside = 1
    for size in range(1, ranks + 1):
        if experts % size == 0 and ranks % size == 0:
            widest = size
            if gpus % size == 0:
                inside = size
    found = ep_sizes(experts, ranks, gpus)
    assert len(set(found)) == len(found)
    between = []
    size = inside
    while size < widest:
        size *= 2
        if experts % size == 0 and ranks % size == 0:
            between.append(size)
    assert set(found) == {widest, inside, *between}


def test_variants_are_in_a_node_and_over_nodes_flat_and_once_per_node() -> None:
    def found(model: str, cluster: str, ranks: int) -> list[tuple[int, str]]:
        return [(each.groups.ep, each.alltoall) for each in variants(Job(model, cluster, ranks))]

    assert found("mixtral-8x7b", "h100_400", 64) == [(8, "flat")]
    assert found("mixtral-8x7b", "testbed_b", 64) == [(8, "flat"), (8, "node_deduplicated"), (4, "flat")]
    assert found("olmoe", "h100_400", 8) == [(8, "flat")]
    over = [(64, "flat"), (64, "node_deduplicated")]
    between = [(ep, alltoall) for ep in (16, 32) for alltoall in ("flat", "node_deduplicated")]
    assert found("olmoe", "h100_400", 256) == [*over, (8, "flat"), *between]
    assert found("olmoe", "h100_400", 1) == [(1, "flat")]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize(
    ("model", "cluster", "ranks"),
    [("qwen3-30b-a3b", "h100_400", 8), ("gpt-oss-20b", "h100_400", 8), ("mixtral-8x7b", "a100_200", 32)],
)
def test_memory_is_what_plan_says_of_the_same_step(
    model: str, cluster: str, ranks: int, zero: int, checkpointing: bool
) -> None:
    job = Job(model, cluster, ranks, 2, 2048, zero=zero, checkpointing=checkpointing)
    asked = ["--cluster", cluster, "--nodes", str(ranks // 8), "--model", model, "--samples", "2", "--length", "2048"]
    asked += ["--zero", str(zero), "--layers", "1", "--max-degree", "1"]
    for variant in variants(job):
        groups = variant.groups
        training = Training(2, 2048, zero, checkpointing=checkpointing)
        memory = memory_of(load_model(model), groups, training)
        assert variant.memory_gb == memory.total / 1e9
        assert variant.fits == (largest_batch(load_model(model), groups, training, 80) >= 2)
        if variant.alltoall != "flat":
            continue
        parser = argparse.ArgumentParser()
        plan.add_arguments(parser)
        given = parser.parse_args([*asked, *["--activation-checkpointing"] * checkpointing])
        architecture = load_model(model)
        shape = moe_shape(architecture, commonest_moe(architecture), 2, 2048, 2)
        planned = PlannedModel(shape, len(architecture.blocks), architecture)
        said = print_memory(given, PlannedJob(load_cluster(cluster), groups, planned, Settings()))["memory"]
        assert said["peak_bytes"] == pytest.approx(1e9 * variant.memory_gb, abs=1)


def test_what_plan_says_cannot_run_is_not_drawn_as_fitting() -> None:
    # Weights, gradients and states alone would: 63.8 and 67 GB.
    for model in ("qwen3-30b-a3b", "gpt-oss-20b"):
        assert [each.fits for each in variants(Job(model, "h100_400", 8))] == [False]
    fits = {ranks: variants(Job("mixtral-8x7b", "h100_400", ranks))[0].fits for ranks in (8, 512)}
    assert fits == {8: False, 512: True}


@pytest.mark.parametrize(
    ("alltoall", "ep", "peers"), [("flat", 64, 64), ("node_deduplicated", 64, 8), ("flat", 16, 16)]
)
def test_a_flat_exchange_over_nodes_starts_a_message_to_every_rank(alltoall: AllToAll, ep: int, peers: int) -> None:
    cluster, groups = load_cluster("h100_400"), Groups(64, 8, ep=ep)
    costs, operation = kind_costs(cluster, groups, alltoall), cluster.operations["inter.all_to_all"]
    longer_ms = operation.cost.alpha_ms + (peers - 8) * operation.alpha_ms_per_rank
    assert costs[A2A_IN] == costs[A2A_OUT]
    assert costs[A2A_IN].alpha_ms == pytest.approx(longer_ms)
    assert costs[A2A_IN].beta_ms == operation.among(ep // 8).beta_ms
    paper = load_cluster("testbed_a")
    assert kind_costs(paper, groups, alltoall)[A2A_IN].alpha_ms == paper.operations["inter.all_to_all"].cost.alpha_ms


def test_groups_of_experts_keep_tokens_on_fewer_nodes() -> None:
    model = load_model("deepseek-v3")
    # A group of experts is a node here, and a token takes 4 of 8.
    grouped = crossings_of(model, Groups(64, 8, ep=64))
    assert grouped is not None
    assert grouped.nodes <= 4
    ungrouped = crossings_of(load_model("qwen3-30b-a3b"), Groups(64, 8, ep=64))
    assert ungrouped is not None
    assert 4 < ungrouped.nodes < 8
    assert crossings_of(model, Groups(64, 8, ep=8)) is None


# ---- rows


SYSTEMS = ("deepspeed", "tutel_improved", "lina", "best")
KEY = ("cluster", "ranks", "ep", "alltoall")


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """OLMoE on two clusters, 8 to 64 ranks."""
    jobs = [Job("olmoe", cluster, ranks, 1, 1024) for cluster in ("h100_400", "ethernet_25") for ranks in (8, 16, 64)]
    return with_efficiency(row for found in sweep(jobs, SYSTEMS, exact="none") for row in found)


def test_every_variant_has_a_row_every_choice_one_for_every_system_and_none_beats_the_bound(rows: list[Row]) -> None:
    keys = [(row["cluster"], row["ranks"], row["ep"], row["alltoall"], row["preset"]) for row in rows]
    assert len(set(keys)) == len(keys)
    # 8 ranks: in a node; 16: and over both; 64: 16, 32 and 64 ranks, flat and once per node.
    assert sum(row["preset"] == BEST for row in rows) == 2 * (1 + 3 + 7)
    for row in rows:
        of_variant = {each[-1] for each in keys if each[:-1] == tuple(row[name] for name in KEY)}
        assert of_variant == (set(SYSTEMS) if row["is_choice"] or row["is_flat_choice"] else {BEST})
        assert row["step_ms"] >= row["bound_ms"] * (1 - 1e-9)
        assert row["step_ms"] == pytest.approx(row["forward_ms"] + row["backward_ms"], abs=1e-3)
        assert row["tokens_per_s_per_gpu"] == pytest.approx(1024 / row["step_ms"] * 1e3, rel=1e-3)


def test_the_choice_is_the_fastest_variant_that_fits_and_the_flat_choice_of_those(rows: list[Row]) -> None:
    for cluster in ("h100_400", "ethernet_25"):
        for ranks in (8, 16, 64):
            best = [
                row
                for row in rows
                if (row["cluster"], row["ranks"], row["preset"]) == (cluster, ranks, BEST) and row["fits"]
            ]
            assert [row["step_ms"] for row in best if row["is_choice"]] == [min(row["step_ms"] for row in best)]
            flat = [row for row in best if row["alltoall"] == "flat"]
            assert [row["step_ms"] for row in best if row["is_flat_choice"]] == [min(row["step_ms"] for row in flat)]


def test_where_nothing_fits_the_choice_keeps_the_least() -> None:
    found = simulate_job(Job("deepseek-v3", "a100_200", 64, 1, 512), ("tutel",))
    assert not any(row["fits"] for row in found)
    assert {row["ep"] for row in found if row["is_choice"]} == {64}
    assert {row["preset"] for row in found if row["is_choice"]} == {"tutel", BEST}


def test_efficiency_is_over_the_smallest_size(rows: list[Row]) -> None:
    for row in rows:
        base = next(
            each
            for each in rows
            if each["is_choice"] and (each["cluster"], each["preset"]) == (row["cluster"], row["preset"])
        )
        assert base["ranks"] == 8
        ratio = row["tokens_per_s_per_gpu"] / base["tokens_per_s_per_gpu"]
        assert row["efficiency"] == pytest.approx(ratio, abs=1e-4)


def test_what_costs_nothing_anyway_limits_nothing(rows: list[Row]) -> None:
    best = [row for row in rows if row["preset"] == BEST]
    for row in best:
        shares = {name: row[f"without_{name}"] for name in LIMITS}
        if not row["is_choice"] and not row["is_flat_choice"]:
            assert set(shares.values()) == {None}
            continue
        assert all(-0.02 <= share < 1 for share in shares.values()), shares
        if row["ep_over"] == "a node":
            assert shares["inter"] == 0.0
        assert shares[limit_of(row)] == max(shares.values())
    assert all(row["without_inter"] is None for row in rows if row["preset"] != BEST)
    slow = [row for row in best if row["is_choice"] and row["cluster"] == "ethernet_25" and row["ranks"] > 8]
    assert {limit_of(row) for row in slow} <= {"gradients", "inter"}
    alone = [row for row in simulate_job(Job("olmoe", "h100_400", 1), (BEST,)) if row["preset"] == BEST]
    assert limit_of(alone[0]) == "compute"
    assert [alone[0][f"without_{name}"] for name in ("inter", "intra", "gradients")] == [0.0, 0.0, 0.0]


def test_more_micro_batches_make_gradients_cheaper() -> None:
    once, often = (
        next(row for row in simulate_job(Job("mixtral-8x7b", "a100_200", 32, 1, 1024, each), (BEST,)))
        for each in (1, 8)
    )
    assert often["step_ms"] >= often["bound_ms"]
    assert often["tokens_per_s_per_gpu"] > once["tokens_per_s_per_gpu"]
    assert often["without_gradients"] < once["without_gradients"]


@pytest.mark.parametrize("exact", ["none", "chosen", "all"])
def test_every_layer_is_planned_of_the_variants_that_are_asked_for(exact: str) -> None:
    found = simulate_job(Job("olmoe", "h100_400", 16, 1, 512), (BEST,), exact)
    for row in found:
        is_chosen = row["is_choice"] or row["is_flat_choice"]
        assert row["is_exact"] == (exact == "all" or (exact == "chosen" and is_chosen))
    assert sum(row["is_choice"] for row in found) == 1


def test_several_processes_give_the_same_rows_in_the_same_order() -> None:
    jobs = [Job("olmoe", "h100_400", ranks, 1, 512) for ranks in (16, 8)]
    alone = list(sweep(jobs, ("deepspeed",)))
    assert list(sweep(jobs, ("deepspeed",), processes=2)) == alone
    assert [found[0]["ranks"] for found in alone] == [16, 8]


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ({"ranks": 12}, r"ranks = 12: must fill whole nodes of 8 GPUs of h100_400"),
        ({"ranks": 0}, r"ranks = 0: must be at least 1"),
        ({"ranks": 8, "samples": 0}, r"samples = 0: must be at least 1"),
        ({"ranks": 8, "micro_batches": -1}, r"micro_batches = -1: must be at least 1"),
        ({"ranks": 8, "cluster": "h100"}, r"no cluster or file 'h100': did you mean 'h100_400'"),
    ],
)
def test_a_job_that_cannot_be_is_refused(job: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Job(**({"model": "olmoe", "cluster": "h100_400"} | job))


def test_a_run_prints_a_line_for_every_size_and_writes_every_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.csv"
    clusters = ("h100_400", "a100_200")
    arguments = ["--model", "olmoe", "--cluster", *clusters, "--ranks", "8", "16", "--exact", "none"]
    assert scale.main([*arguments, "--out", str(out)]) == 0
    text = capsys.readouterr().out
    for cluster in clusters:
        for ranks in (8, 16):
            assert len(re.findall(rf"(?m)^olmoe +{cluster} +{ranks} ", text)) == 1
    with open(out, newline="") as file:
        table = list(csv.DictReader(file))
    assert {row["preset"] for row in table} == {*NAMES}
    assert sum(row["is_choice"] == "True" for row in table) == len(clusters) * 2 * len(NAMES)


# ---- the paper


def test_the_papers_evaluation_prints_ours_beside_the_papers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paper, "figures", partial(paper.figures, ("deepspeed", "tutel", "fsmoe")))
    result = tmp_path / "paper.json"
    assert paper.main(["--sample", "4", "--json", str(result)]) == 0
    text = capsys.readouterr().out
    for part in ("table 5, testbed B", "figure 6", "figure 7, by length", "sensitivity, testbed B", "assumed:"):
        assert part in text
    assert "the paper: fsmoe over deepspeed 2.46, tutel 1.16" in text
    found = json.loads(result.read_text())
    for table in found["table5"]:
        assert table["num_layers"] == 4
        assert table["ideal"]["fsmoe"] >= table["ideal"]["fsmoe_no_iio"] >= table["ideal"]["tutel"] == 1.0
    assert {(row["what"], row["off_by"]) for row in found["sensitivity"]["b"]} == {
        (what, off_by) for what in ("alpha", "beta", "both") for off_by in (0.1, 0.3, 0.5)
    }
    assert all(row["worst"] >= row["mean"] >= 0 for row in found["sensitivity"]["b"])
    # Figure 8: fsmoe over tutel, on average over the models, as benchmarks/notes/planning.md has it.
    for title, bounds in (("", (1.03, 1.06)), (", on ideal links", (1.13, 1.23))):
        rows = [paper.ModelRow(**row) for row in found["figures"][f"figure 8, by micro-batches{title}"]]
        assert len(rows) == 3 * len(paper.FIGURE_8_MICRO_BATCHES)
        means = [
            paper.mean_over([row for row in rows if row.setting == setting], "tutel")["fsmoe"]
            for setting in dict.fromkeys(row.setting for row in rows)
        ]
        assert (round(min(means), 2), round(max(means), 2)) == bounds


def test_the_papers_timelines_come_out_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    ends_ms = {}
    for name in ("3a", "3b", "3c", "3d", "4.1", "4.2", "4.3", "4.4"):
        assert paper.main(["--timeline", name]) == 0
        ends_ms[name] = float(capsys.readouterr().out.splitlines()[-1].split()[0])
    assert ends_ms["3a"] > ends_ms["3b"] > ends_ms["3c"] > ends_ms["3d"]
    # Figure 4's formulas: 2ra + gar, 2a + g + s + re, 2ra + g + s, 2a + r(g + s), with r = 2.
    assert [ends_ms[f"4.{case}"] for case in (1, 2, 3, 4)] == [12.0, 11.0, 14.0, 14.0]
    with pytest.raises(ValueError, match="no timeline is called '5': the choices are 3a, 3b"):
        paper.main(["--timeline", "5"])


def test_a_batch_of_equal_stages_in_gpipes_order_takes_what_counting_gives() -> None:
    times = StageTimes(3.0, 5.0, 6.5, 2.0)
    for num_stages in (1, 2, 3, 4):
        for count in (1, 2, 5):
            # Without sends: the last stage is through with all but one backward, then each stage runs its last one.
            slots = count + num_stages - 1
            expected_ms = slots * 3.0 + (count - 1) * 5.0 + num_stages * 6.5 + 2.0
            assert paper.gpipe_ms(times, num_stages, count, 0.0) == pytest.approx(expected_ms)
    # A send holds both stages: with one micro-batch it lengthens each way between neighbours once.
    assert paper.gpipe_ms(times, 3, 1, 0.25) == pytest.approx(3 * (3.0 + 6.5) + 2.0 + 4 * 0.25)
