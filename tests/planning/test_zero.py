# SPDX-License-Identifier: Apache-2.0
"""What ZeRO sends is in the planned times; ``plan`` says first whether a job fits, and last how to run it; and what
layers and models take by the rates of a cluster, against what an H100 took and what others have published."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.simulations.layouts import Job
from benchmarks.simulations.scale import simulate_job
from ds_fsmoe import cli
from ds_fsmoe.offline.models.architecture import step_flops
from ds_fsmoe.offline.models.known import PlannedModel, load_model
from ds_fsmoe.offline.models.model_layers import commonest_moe, model_layers, moe_shape
from ds_fsmoe.offline.plan.report import PlannedJob, Report, report
from ds_fsmoe.planning.cluster import load_cluster
from ds_fsmoe.planning.decide.plan import Settings
from ds_fsmoe.planning.decide.presets import NAMES
from ds_fsmoe.planning.decide.step_time import stage_times
from ds_fsmoe.planning.decide.zero import Zero, sharing_costs
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.schedule import (
    EXPERT,
    EXPERT_GRAD_PARTS,
    EXPERT_PARAMETERS,
    GRAD_PARTS,
    GRADIENT_TASKS,
    ORDER,
    PARAMETERS,
    RESTORE,
    ROUTE,
    Lane,
)
from ds_fsmoe.planning.workload import Shape, experts_cost, kind_costs

CLUSTER, MODEL = load_cluster("testbed_a"), load_model("olmoe").first(4)
GROUPS = Groups(16, 8, ep=8)
SETTINGS = Settings(CLUSTER.contention, max_degree=2)
SHAPE = moe_shape(MODEL, commonest_moe(MODEL), 1, 256, 2)


def planned(stage: int, micro_batches: int = 1, **options: int) -> Report:
    settings = replace(SETTINGS, num_micro_batches=micro_batches)
    job = PlannedJob(CLUSTER, GROUPS, PlannedModel(SHAPE, 4, MODEL), settings, zero=Zero(stage, 2, **options))
    return report(job, "best")


def sent(found: Report, name: str) -> Counter[str]:
    """Kind -> the bytes of what a step sends."""
    of_kinds: Counter[str] = Counter()
    for task in (each for schedule in found.plans[name].schedules() for each in schedule.tasks):
        of_kinds[task.kind] += task.size
    return of_kinds


@pytest.mark.parametrize("name", ["deepspeed", "best"])
def test_every_stage_sends_what_it_has_to(name: str) -> None:
    gradients: Counter[str] = Counter()
    for each in (gradient for layer in model_layers(MODEL, GROUPS, 1, 256, 2) for gradient in layer.gradients):
        gradients[each.kind] += each.size_bytes
    dense, experts = gradients["GRAD"], gradients["EXPERT_GRAD"]
    for stage in (0, 1, 2):
        found = sent(planned(stage), name)
        assert (found["GRAD"], found["EXPERT_GRAD"]) == pytest.approx((dense, experts))
        assert (found[PARAMETERS], found[EXPERT_PARAMETERS]) == pytest.approx((dense, experts) if stage else (0, 0))
    found = sent(planned(3, persistence=0, max_reuse=0), name)
    assert not set(found) & set(GRADIENT_TASKS), "stage 3 has no windows"
    assert (found[PARAMETERS], found[EXPERT_PARAMETERS]) == pytest.approx((2 * dense, 2 * experts))
    assert (found[GRAD_PARTS], found[EXPERT_GRAD_PARTS]) == pytest.approx((dense, experts))


def test_a_gather_runs_beside_the_layer_before_unless_that_one_fills_the_memory_for_parameters() -> None:
    behind_ms = {}
    for max_live in (10**9, 1):
        found = planned(3, max_live=max_live, max_reuse=0)
        spans = found.plans["deepspeed"].timelines(found.planner.costs, SETTINGS.contention)[0].spans
        gather = next(each for each in spans if (each.task.kind, each.task.layer) == (EXPERT_PARAMETERS, 1))
        before = [each.end_ms for each in spans if each.task.layer == 0 and each.task.lane is Lane.COMPUTE]
        behind_ms[max_live] = gather.start_ms - max(before)
        computed = [each.start_ms for each in spans if (each.task.kind, each.task.layer) == ("EXPERT", 1)]
        assert gather.end_ms <= min(computed)
    assert behind_ms[10**9] < 0 <= behind_ms[1] + 1e-9


def test_parameters_that_the_backward_needs_soon_are_not_gathered_again() -> None:
    again, kept = (sent(planned(3, persistence=0, max_reuse=each), "deepspeed") for each in (0, 10**10))
    assert again[PARAMETERS] == pytest.approx(2 * kept[PARAMETERS])
    few = sent(planned(3, max_reuse=0), "deepspeed")[PARAMETERS]
    assert 0.99 * again[PARAMETERS] < few < again[PARAMETERS], "norms and routers stay"


@pytest.mark.parametrize(("stage", "sums"), [(1, 1), (2, 4)])
def test_gradients_are_summed_in_every_micro_batch_at_stage_2_alone(stage: int, sums: int) -> None:
    found = planned(stage, micro_batches=4)
    planner = found.planner
    plan = found.plans["deepspeed"]
    forward_ms, bare_ms = planner.phases_ms(plan.without_gradients())
    sum_ms, gather_ms = (
        sum(planner.costs[each.kind].ms(each.size_bytes) for each in plan.tail if (each.kind in GRADIENT_TASKS) is kind)
        for kind in (True, False)
    )
    times = stage_times(planner, plan).times
    assert times.busy_ms(4) == pytest.approx(4 * (forward_ms + bare_ms) + sums * sum_ms + gather_ms, rel=1e-6)
    assert planner.batch_ms(plan) == pytest.approx(times.busy_ms(4))
    ours = stage_times(planner, found.plans["best"]).times
    assert (ours.backward_ms < ours.last_backward_ms) is (sums == 1)


def test_nothing_is_faster_than_best_or_than_the_bound_at_any_stage_and_stage_3_gains_less() -> None:
    gains = []
    for stage in range(4):
        found = planned(stage)
        steps_ms = {name: sum(each) for name, each in found.times_ms.items()}
        assert set(steps_ms) == set(NAMES)
        assert min(steps_ms.values()) == pytest.approx(steps_ms["best"])
        assert sum(found.bounds_ms) <= steps_ms["best"]
        gains.append(steps_ms["deepspeed"] / steps_ms["best"])
    assert gains[0] > 1.05 > gains[3] >= 1


def test_without_overlap_comm_nothing_is_computed_while_parameters_or_gradients_are_sent() -> None:
    found = planned(3, overlap_comm=False, max_reuse=0)
    times = found.plans["deepspeed"].timelines(found.planner.costs)
    for spans in (each.spans for each in times):
        computed = [each for each in spans if each.task.lane is Lane.COMPUTE and each.end_ms > each.start_ms]
        for span in spans:
            if span.task.kind in (PARAMETERS, EXPERT_PARAMETERS, GRAD_PARTS, EXPERT_GRAD_PARTS):
                # What a layer's experts need is waited for by these alone.
                beside = [e for e in computed if e.start_ms < span.end_ms - 1e-9 and span.start_ms < e.end_ms - 1e-9]
                assert span.task.kind == EXPERT_PARAMETERS or not beside
                assert {e.task.layer for e in beside} <= {span.task.layer}
    with_overlap = planned(3, max_reuse=0).plans["deepspeed"].timelines(found.planner.costs)
    assert sum(each.makespan_ms for each in with_overlap) < sum(each.makespan_ms for each in times)


def test_gathers_between_nodes_share_a_nodes_links_as_gradients_do() -> None:
    costs = sharing_costs(CLUSTER, GROUPS)
    between = CLUSTER.operation("inter.all_gather", "").among(2)
    assert costs[EXPERT_PARAMETERS].beta_ms == pytest.approx(between.beta_ms)
    # Gathers of all ranks go between nodes first, a part of a node's buffer in each rank, and then inside it.
    inside = CLUSTER.operation("intra.all_gather", "").among(8)
    in_levels, in_a_ring = between.beta_ms / 8 + inside.beta_ms, between.beta_ms / 8 * (15 / 16) / (1 / 2)
    assert costs[PARAMETERS].beta_ms == pytest.approx(min(in_levels, in_a_ring))


def test_model_flops_are_six_for_a_parameter_and_twelve_for_a_pair_of_positions() -> None:
    block = MODEL.blocks[0]
    assert block.experts is not None
    of_block = block.num_active(MODEL.M)
    head = MODEL.M * MODEL.vocab + MODEL.num_other
    pairs = 4 * 12 * block.attention.heads * block.attention.head_dim * 256**2
    assert step_flops(SHAPE, 4, MODEL) == pytest.approx(6 * 256 * (4 * of_block + head) + pairs, rel=1e-3)


FEW = ["plan", "--cluster", "h100_400", "--model", "qwen3-30b-a3b", "--layers", "2", "--max-chunks", "2"]


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main([*FEW, *arguments]) == 0
    return capsys.readouterr().out


def test_the_lowest_stage_that_fits_is_planned_and_said_first(capsys) -> None:
    needs = {}
    for stage in "01":
        text = said(capsys, "--zero", stage, "--memory-gb", "1000")
        needs[stage] = float(re.match(rf"fits: ([\d.]+) GB of 1000 at ZeRO {stage}, ep_size 8\n", text)[1])
    limit = sum(needs.values()) / 2
    text = said(capsys, "--memory-gb", f"{limit}")
    assert text.startswith(f"fits: {needs['1']:.1f} GB of {limit:g} at ZeRO 1, ep_size 8; the lowest stage that fits")
    assert '"zero_optimization": {"stage": 1}' in text
    text = said(capsys, "--memory-gb", f"{limit}", "--zero", "0")
    assert text.startswith(f"does not fit: {needs['0']:.1f} GB of {limit:g} at ZeRO 0, ep_size 8; the lowest stage")
    assert "\nto run this" not in text
    assert said(capsys, "--memory-gb", "5").startswith("does not fit at any stage: at least ")


def test_stock_has_every_expert_on_every_rank_at_a_stage_that_it_fits_at(capsys, tmp_path) -> None:
    out = tmp_path / "plan.json"
    text = said(capsys, "--zero", "3", "--json", str(out))
    found = json.loads(out.read_text())
    alone = said(capsys, "--zero", "3", "--ep-size", "1", "--preset", "deepspeed")
    stock_ms = float(re.match(r"stock \(ep_size 1\): ([\d.]+) ms a step", alone.splitlines()[1])[1])
    assert found["stock"]["step_ms"] == pytest.approx(stock_ms, abs=0.01)
    over = found["stock"]["step_ms"] / found["presets"]["best"]["step_ms"]
    assert f"{over:.2f}x stock (ep_size 1, ZeRO 3)" in text.splitlines()[1]
    assert re.search(r"\nAutoEP \(ep_size 8\) .* 1\.00x\n", text)
    assert found["ds_config"]["fsmoe"] == {"enabled": True, "ep_size": 8}
    tokens = 4096 / found["presets"]["best"]["step_ms"] * 1e3
    assert found["tokens_per_s_per_gpu"] == pytest.approx(tokens)
    assert f"tokens: {tokens:.0f} a second per GPU" in text


def test_a_stage_that_deepspeed_refuses_is_refused_and_a_layout_that_is_not_the_usual_one_is_explained(capsys) -> None:
    assert cli.main(["plan", "--cluster", "testbed_a", "--model", "gpt2-xl", "--zero", "3"]) == 2
    assert "--zero = 3: not supported by DeepSpeed's own MoE layers" in capsys.readouterr().err
    assert cli.main([*FEW, "--pp", "2", "--zero", "2"]) == 2
    assert "--zero = 2: DeepSpeed's pipelines support ZeRO 0 and 1 only" in capsys.readouterr().err
    asked = ["plan", "--cluster", "testbed_a", "--model", "mixtral-7b", "--layers", "2", "--length", "128", "--pp", "2"]
    why = "no ep_size above 1 divides both 8 experts and the 3 groups of a stage; with --nodes 4 or 8 or 12 it"
    for more, is_said in (([], True), (["--nodes", "4"], False)):
        assert cli.main([*asked, "--max-chunks", "2", *more]) == 0
        text = capsys.readouterr().out
        assert (why in text) is is_said
        assert "\nstages   2 alike; the layers below are those of the first\n" in text


def test_what_plan_prints_has_the_words_of_the_config(capsys) -> None:
    text = said(capsys, "--recompute") + said(capsys, "--pp", "2", "--zero", "1")
    assert not re.search(r"\b(degree|esp|esp_size|uncut|pipeline_degree)\b", text)
    with pytest.raises(SystemExit):
        cli.main(["plan", "--help"])
    text = capsys.readouterr().out
    assert text.index("ds_fsmoe plan --cluster h100_400 --model qwen3-30b-a3b") < text.index("--hf-config PATH  ")


# ---- against what was measured


H100, ONE_GPU = load_cluster("h100_400"), Groups(1, 1)
TOLERANCE, KINDS = 0.1, (ROUTE, ORDER, RESTORE, EXPERT)
LAYERS_MS = {
    "qwen3-30b-a3b": (4.692, 10.429, 6.7),
    "olmoe": (4.820, 10.182, 7.0),
    "mixtral-8x7b": (12.985, 37.214, 32.5),
}
"""Model -> forward, both phases, and their kernels alone: one layer of ours with compiled ops, 8192 tokens in bf16, on
one H100."""
PUBLISHED = {"qwen3-30b-a3b": 12_040, "gpt-oss-20b": 13_058}
"""Model -> tokens/s and GPU on 8 H100 with 4 samples of 4096 and 16 micro-batches (NVIDIA NeMo AutoModel,
docs/performance-summary.mdx)."""


def phases_ms(name: str) -> list[float]:
    """What a layer with experts takes on one GPU, without attention."""
    model = load_model(name)
    costs = kind_costs(H100, ONE_GPU, shape=moe_shape(model, commonest_moe(model), 1, 8192, 2))
    layer, found = model_layers(model, ONE_GPU, 1, 8192, 2)[-2], []
    for work in (layer.forward, layer.backward):
        of_moe = (each for each in (*work.before, work.moe.expert, *work.after) if each.kind in KINDS)
        found.append(sum(costs[each.kind].ms(each.size, each.launches) for each in of_moe))
    return found


@pytest.mark.parametrize("name", LAYERS_MS)
def test_a_layer_takes_what_it_took_on_an_h100(name: str) -> None:
    forward_ms, both_ms, kernels_ms = LAYERS_MS[name]
    found = phases_ms(name)
    assert sum(found) == pytest.approx(both_ms, rel=TOLERANCE)
    assert found[0] == pytest.approx(forward_ms, rel=TOLERANCE)
    assert sum(found) - 2 * H100.layer_wait_ms == pytest.approx(kernels_ms, rel=TOLERANCE)


@pytest.mark.parametrize(("name", "layers", "step_ms"), [("qwen3-30b-a3b", 3, 146.3), ("olmoe", 5, 189.3)])
def test_a_cut_model_takes_less_than_its_measured_step_which_has_the_optimizer_too(
    name: str, layers: int, step_ms: float
) -> None:
    model = replace(load_model(name).first(layers), vocab=1024)
    shape = moe_shape(model, commonest_moe(model), 4, 2048, 2)
    settings = Settings(H100.contention, max_degree=1)
    found = report(PlannedJob(H100, ONE_GPU, PlannedModel(shape, layers, model), settings), "best")
    layers_ms = layers * LAYERS_MS[name][1]
    assert layers_ms < sum(found.times_ms["best"]) < step_ms


@pytest.mark.parametrize("name", PUBLISHED)
def test_nothing_is_predicted_above_the_best_that_was_published(name: str) -> None:
    rows = simulate_job(Job(name, "h100_400", 8, 4, 4096, 16), ("best",), "none")
    assert max(row["tokens_per_s_per_gpu"] for row in rows) <= PUBLISHED[name]


def test_narrow_experts_and_experts_with_few_rows_are_slower() -> None:
    def tflops(M: int, H: int, rows: int) -> float:
        shape, flops = Shape(1, rows, M, H, 1, 1, None, "mixtral", dtype_bytes=2), 6 * rows * M * H
        return flops / experts_cost(H100, shape, 3, ONE_GPU).ms(flops, 3) * 1e-9

    assert tflops(4096, 14336, 2048) > tflops(2048, 1024, 2048) > tflops(1024, 1024, 2048)
    assert tflops(2048, 768, 4096) > tflops(2048, 768, 512) > tflops(2048, 768, 64)
    assert tflops(8192, 8192, 8192) < 770
    # Weights are passed over twice a product, on average: as many rows are computed while they are read.
    rows = 2 * 770 / 3.0
    assert tflops(8192, 8192, 1 << 20) / tflops(8192, 8192, round(rows)) == pytest.approx(2, rel=0.05)
    # A file without these numbers has one rate for all products.
    paper = load_cluster("testbed_a")
    for H in (768, 14336):
        shape = Shape(1, 4096, 2048, H, 8, 2, None, "mixtral")
        assert experts_cost(paper, shape, 3, ONE_GPU) == paper.operations["gemm"].cost
        assert kind_costs(paper, ONE_GPU, shape=shape) == kind_costs(paper, ONE_GPU)
    # A layer waits in its router.
    costs, slow = (kind_costs(replace(H100, layer_wait_ms=H100.layer_wait_ms + each), ONE_GPU) for each in (0, 1))
    assert slow[ROUTE].alpha_ms == costs[ROUTE].alpha_ms + 1
