# SPDX-License-Identifier: Apache-2.0
"""What ZeRO sends is in the planned times; ``plan`` says first whether a job fits, and last how to run it."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

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
    EXPERT_GRAD_PARTS,
    EXPERT_PARAMETERS,
    GRAD_PARTS,
    GRADIENT_TASKS,
    PARAMETERS,
    Lane,
)

CLUSTER, MODEL = load_cluster("testbed_a"), load_model("olmoe").first(4)
GROUPS = Groups(16, 8, ep=8)
SETTINGS = Settings(CLUSTER.contention, max_degree=2)
SHAPE = moe_shape(MODEL, commonest_moe(MODEL), 1, 256, 2)


def planned(stage: int, micro_batches: int = 1, **options: int) -> Report:
    settings = replace(SETTINGS, num_micro_batches=micro_batches)
    job = PlannedJob(CLUSTER, GROUPS, PlannedModel(SHAPE, 4, MODEL), settings, zero=Zero(stage, 2, **options))
    return report(job, "best")


def sent(found: Report, name: str) -> dict[str, float]:
    """Kind -> the bytes of what a step sends."""
    of_kinds: dict[str, float] = {}
    for schedule in found.plans[name].schedules():
        for task in schedule.tasks:
            of_kinds[task.kind] = of_kinds.get(task.kind, 0.0) + task.size
    return of_kinds


@pytest.mark.parametrize("name", ["deepspeed", "best"])
def test_every_stage_sends_what_it_has_to(name: str) -> None:
    layers = model_layers(MODEL, GROUPS, 1, 256, 2)
    gradients = {"GRAD": 0, "EXPERT_GRAD": 0}
    for each in (gradient for layer in layers for gradient in layer.gradients):
        gradients[each.kind] += each.size_bytes
    dense, experts = gradients.values()
    for stage in (0, 1, 2):
        found = sent(planned(stage), name)
        assert (found["GRAD"], found["EXPERT_GRAD"]) == pytest.approx((dense, experts))
        gathered = found.get(PARAMETERS, 0), found.get(EXPERT_PARAMETERS, 0)
        assert gathered == pytest.approx((dense, experts) if stage else (0, 0))
    found = sent(planned(3, persistence=0, max_reuse=0), name)
    assert not set(found) & set(GRADIENT_TASKS), "stage 3 has no windows"
    assert (found[PARAMETERS], found[EXPERT_PARAMETERS]) == pytest.approx((2 * dense, 2 * experts))
    assert (found[GRAD_PARTS], found[EXPERT_GRAD_PARTS]) == pytest.approx((dense, experts))


def test_stage_3_is_planned_apart_from_stage_0_and_gains_less() -> None:
    gains = []
    for stage in (0, 3):
        found = planned(stage)
        gains.append(sum(found.times_ms["deepspeed"]) / sum(found.times_ms["best"]))
    assert gains[0] > 1.05 > gains[1] >= 1


def test_a_gather_runs_beside_the_layer_before_unless_that_one_fills_the_memory_for_parameters() -> None:
    begins = {}
    for max_live in (10**9, 1):
        found = planned(3, max_live=max_live, max_reuse=0)
        forward = found.plans["deepspeed"].timelines(found.planner.costs, SETTINGS.contention)[0]
        gather = next(each for each in forward.spans if each.task.kind == EXPERT_PARAMETERS and each.task.layer == 1)
        ends_ms = max(e.end_ms for e in forward.spans if e.task.layer == 0 and e.task.lane is Lane.COMPUTE)
        begins[max_live] = gather.start_ms - ends_ms
        assert gather.end_ms <= min(
            each.start_ms for each in forward.spans if each.task.layer == 1 and each.task.kind == "EXPERT"
        )
    assert begins[10**9] < 0 <= begins[1] + 1e-9


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


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_nothing_is_faster_than_best_or_than_the_bound_at_any_stage(stage: int) -> None:
    found = planned(stage)
    steps_ms = {name: sum(each) for name, each in found.times_ms.items()}
    assert min(steps_ms.values()) == pytest.approx(steps_ms["best"])
    assert sum(found.bounds_ms) <= steps_ms["best"]
    assert set(steps_ms) == set(NAMES)


def test_without_overlap_comm_nothing_is_computed_while_parameters_or_gradients_are_sent() -> None:
    found = planned(3, overlap_comm=False, max_reuse=0)
    sent = PARAMETERS, EXPERT_PARAMETERS, GRAD_PARTS, EXPERT_GRAD_PARTS
    times = found.plans["deepspeed"].timelines(found.planner.costs)
    for timeline in times:
        computed = [each for each in timeline.spans if each.task.lane is Lane.COMPUTE and each.end_ms > each.start_ms]
        for span in (each for each in timeline.spans if each.task.kind in sent):
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
    for stage in "0123":
        text = said(capsys, "--zero", stage, "--memory-gb", "1000")
        needs[stage] = float(re.match(rf"fits: ([\d.]+) GB of 1000 at ZeRO {stage}, ep_size 8\n", text)[1])
    limit = (needs["0"] + needs["1"]) / 2
    text = said(capsys, "--memory-gb", f"{limit}")
    assert text.startswith(f"fits: {needs['1']:.1f} GB of {limit:g} at ZeRO 1, ep_size 8; the lowest stage that fits")
    assert '"zero_optimization": {"stage": 1}' in text
    text = said(capsys, "--memory-gb", f"{limit}", "--zero", "0")
    assert text.startswith(
        f"does not fit: {needs['0']:.1f} GB of {limit:g} at ZeRO 0, ep_size 8; the lowest stage that"
    )
    assert "\nto run this" not in text
    text = said(capsys, "--memory-gb", "5")
    assert text.startswith("does not fit at any stage: at least ")


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


def test_a_layout_that_is_not_the_usual_one_is_said_with_its_reason(capsys) -> None:
    arguments = ["plan", "--cluster", "testbed_a", "--model", "mixtral-7b", "--layers", "2", "--length", "128"]
    assert cli.main([*arguments, "--pp", "2", "--max-chunks", "2"]) == 0
    text = capsys.readouterr().out
    assert "no ep_size above 1 divides both 8 experts and the 3 groups of a stage; with --nodes 4 or 8 or 12 it" in text
    assert cli.main([*arguments, "--pp", "2", "--nodes", "4", "--max-chunks", "2"]) == 0
    assert "no ep_size above 1" not in capsys.readouterr().out


@pytest.mark.parametrize("stage", ["1", "3"])
def test_halves_are_held_against_whole_batches_that_send_as_much(stage: str, capsys, tmp_path) -> None:
    out = tmp_path / "plan.json"
    said(capsys, "--zero", stage, "--samples", "2", "--halves", "--json", str(out))
    best, *others = json.loads(out.read_text())["halves"]
    assert best["plan"] == "best"
    assert all(0.8 < each["over_best"] < 1.5 for each in others)


def test_a_stage_that_deepspeed_refuses_is_refused(capsys) -> None:
    assert cli.main(["plan", "--cluster", "testbed_a", "--model", "gpt2-xl", "--zero", "3"]) == 2
    assert "--zero = 3: not supported by DeepSpeed's own MoE layers" in capsys.readouterr().err
    assert cli.main([*FEW, "--pp", "2", "--zero", "2"]) == 2
    assert "--zero = 2: DeepSpeed's pipelines support ZeRO 0 and 1 only" in capsys.readouterr().err


def test_what_plan_prints_has_the_words_of_the_config(capsys) -> None:
    text = said(capsys, "--recompute") + said(capsys, "--pp", "2", "--zero", "1")
    assert not re.search(r"\b(degree|esp|esp_size|uncut|pipeline_degree)\b", text)
    with pytest.raises(SystemExit):
        cli.main(["plan", "--help"])
    text = capsys.readouterr().out
    assert text.index("ds_fsmoe plan --cluster h100_400 --model qwen3-30b-a3b") < text.index("--hf-config PATH  ")
