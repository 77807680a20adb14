# SPDX-License-Identifier: Apache-2.0
"""Where experts lie is chosen ahead of a job: over all sizes that divide, by what the planner predicts, and as was
measured on the bed.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulations.ep_sizes import bed_of, gains, job_of, measured_rows, stages_of_stock
from ds_fsmoe.offline.models.known import PlannedModel, load_model
from ds_fsmoe.offline.models.memory import memory_of
from ds_fsmoe.offline.models.model_layers import commonest_moe, moe_shape
from ds_fsmoe.offline.models.training import Training
from ds_fsmoe.offline.plan.report import PlannedJob, report
from ds_fsmoe.planning.cluster import load_cluster
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.decide.ep_size import (
    EpSize,
    ExpertJob,
    alltoalls_of,
    choose_ep_size,
    ep_sizes,
    likely_ep_sizes,
    states_bytes,
    step_ms,
)
from ds_fsmoe.planning.decide.plan import Settings
from ds_fsmoe.planning.decide.zero import Zero
from ds_fsmoe.planning.groups import Groups, can_deduplicate
from ds_fsmoe.planning.timeline import Contention
from ds_fsmoe.planning.workload import NODE_DEDUPLICATED, Shape
from tests.planning.measured_layers import cluster

MOST_OFF = 0.1
"""By how much predicted ratios may be off the measured ones on average, before anything may be chosen by them."""
SERIAL = "deepspeed"


@st.composite
def jobs(draw: st.DrawFn) -> ExpertJob:
    per_node, nodes = draw(st.sampled_from((1, 2, 4))), draw(st.sampled_from((1, 2, 3)))
    sizes = {"B": st.integers(1, 4), "L": st.sampled_from((32, 256)), "H": st.sampled_from((16, 128))}
    sizes |= {"E": st.sampled_from((4, 6, 8)), "K": st.integers(1, 4), "capacity_factor": st.sampled_from((None, 1.25))}
    shape = Shape(M=32, heads=4, **{name: draw(values) for name, values in sizes.items()})
    return ExpertJob(
        (shape,) * draw(st.integers(1, 2)),
        per_node * nodes,
        per_node,
        num_dense=draw(st.integers(10_000, 100_000)),
        esp=draw(st.sampled_from((1, 2))) if per_node > 1 else 1,
        zero=draw(st.sampled_from((0, 1, 2, 3))),
        micro_batches=draw(st.integers(1, 3)),
    )


@given(jobs())
@settings(max_examples=25)
def test_every_size_that_divides_ranks_and_experts_is_predicted_and_no_other(job: ExpertJob) -> None:
    experts, sharing = job.shapes[0].E, job.world // job.esp
    dividing = [ep for ep in range(1, sharing + 1) if sharing % ep == 0 and experts % ep == 0]
    assert [each.ep for each in ep_sizes(job, cluster(1e-4, 1e-5), SERIAL)] == dividing
    assert [(each.ep, each.esp, each.world) for each in job.layouts()] == [(ep, job.esp, job.world) for ep in dividing]


@given(jobs(), st.sampled_from(("best", SERIAL)))
@settings(max_examples=8)
def test_a_size_takes_what_its_fastest_all_to_all_does(job: ExpertJob, schedule: str) -> None:
    links = cluster(1e-4, 1e-5)
    for found, groups in zip(ep_sizes(job, links, schedule), job.layouts(), strict=True):
        ways = {each: step_ms(job, links, groups, each, schedule) for each in alltoalls_of(job, groups)}
        assert (found.step_ms, found.alltoall) == (min(ways.values()), min(ways, key=ways.__getitem__))
        # Tokens cross once per node where nothing is padded, and several ranks are in several nodes.
        at, is_padded = groups.placements["ep"], job.shapes[0].capacity_factor is not None
        assert (NODE_DEDUPLICATED in ways) == (can_deduplicate(groups) and not is_padded)
        assert ("2dh" in ways) == (at.nodes > 1 and at.per_node > 1)
    # What no size changes is in all steps.
    for found, more in zip(
        ep_sizes(job, links, SERIAL), ep_sizes(replace(job, rest_ms=7.0), links, SERIAL), strict=True
    ):
        assert more.step_ms - found.step_ms == pytest.approx(7.0)


@given(jobs())
@settings(max_examples=10)
def test_all_parameters_are_in_the_layers_of_a_rank(job: ExpertJob) -> None:
    job = replace(job, num_dense=len(job.shapes) * (job.num_dense // len(job.shapes)))
    shape = job.shapes[0]
    for groups in job.layouts():
        layers = job.layers(groups, "flat", cluster(1e-4, 1e-5))
        experts = len(layers) * 2 * shape.M * (shape.H // groups.esp) * shape.E // groups.ep
        of_kinds = {"GRAD": job.num_dense * (groups.stage > 1), "EXPERT_GRAD": experts * (groups.edp > 1)}
        assert sum(layer.numel for layer in layers) == experts + (of_kinds["GRAD"] or sum_of_attention(job))
        for kind, numel in of_kinds.items():
            sent = [each for layer in layers for each in layer.gradients if each.kind == kind]
            assert sum(each.size_bytes for each in sent) == numel * shape.dtype_bytes
            assert all(sum(each.tensors_bytes) == each.size_bytes for each in sent)


def sum_of_attention(job: ExpertJob) -> int:
    return sum(round(each.attention_weights + each.M * each.E) for each in job.shapes)


sizes = st.lists(st.tuples(st.sampled_from((1.0, 2.0, 3.0)), st.floats(0, 9)), min_size=1, max_size=6)


@given(sizes, st.floats(0, 9))
def test_the_fastest_that_fits_is_chosen_and_the_next_one_named(drawn: list[tuple[float, float]], most: float) -> None:
    found = [EpSize(2**n, ms, "flat", needed, needed <= most) for n, (ms, needed) in enumerate(drawn)]
    choice, fitting = choose_ep_size(found), [each for each in found if each.fits]
    if not fitting:
        assert choice.best.memory_bytes == min(needed for _, needed in drawn)
        assert choice.runner_up is choice.runner_up_costs is None
        return
    assert choice.best.fits
    assert choice.best == min(fitting, key=lambda each: (each.step_ms, each.ep))
    others = [each for each in fitting if each != choice.best]
    assert choice.runner_up == min(others, key=lambda each: (each.step_ms, each.ep), default=None)
    assert (choice.runner_up_costs or 1.0) >= 1.0


def test_a_size_whose_memory_does_not_fit_is_not_chosen() -> None:
    model, links = load_model("qwen3-30b-a3b").first(2), load_cluster("h100_400")
    shape, training = moe_shape(model, commonest_moe(model), 1, 512, 2), Training(1, 512)
    dense = model.num_parameters - model.num_expert_parameters
    job = ExpertJob((shape,) * 2, 8, 8, dense)

    def needed(groups: Groups) -> float:
        return memory_of(model, groups, training).total

    known = ep_sizes(job, links, SERIAL, needed)
    assert [each.memory_bytes for each in known] == [needed(each) for each in job.layouts()]
    assert all(each.fits for each in known), "nobody knows what a rank has"
    most_bytes = sorted(each.memory_bytes or 0.0 for each in known)[1]
    tight = ep_sizes(job, links, SERIAL, needed, most_bytes)
    assert sum(each.fits for each in tight) == 2
    assert choose_ep_size(tight).best.ep >= 4, "more ranks keep fewer experts each"

    for zero in range(4):
        least = [states_bytes(replace(job, zero=zero), each, 12.0) for each in job.layouts()]
        assert least == sorted(least, reverse=True)
        most = [memory_of(model, each, replace(training, zero=zero)).total for each in job.layouts()]
        assert all(0.2 * b < a < b for a, b in zip(least, most, strict=True)), zero


DEEP = Shape(B=1, L=256, M=64, H=48, E=8, K=2, capacity_factor=None, ffn="mixtral", heads=4)


@pytest.mark.parametrize(
    ("zero", "length", "inter"), [(0, 256, 1e-4), (1, 2048, 1e-6), (2, 16, 1e-6), (3, 256, 1e-4), (3, 2048, 1e-6)]
)
def test_a_few_layers_of_each_shape_tell_what_all_of_them_take(zero: int, length: int, inter: float) -> None:
    shape = replace(DEEP, L=length)
    job = ExpertJob((*(shape,) * 5, replace(shape, H=96)), 4, 2, 400_000, zero=zero, micro_batches=2)
    links = cluster(inter, 1e-6, 0.05, LinearCost(0.0, 1e-8))
    whole = {each.ep: each for each in ep_sizes(job, links)}
    few = {each.ep: each for each in likely_ep_sizes(job, links)}
    assert all(each.step_ms == pytest.approx(whole[ep].step_ms, rel=0.06) for ep, each in few.items())
    wanted, found = (choose_ep_size([*of.values()]) for of in (whole, few))
    assert whole[found.best.ep].step_ms <= 1.02 * wanted.best.step_ms
    assert found.runner_up_costs == pytest.approx(wanted.runner_up_costs, rel=0.06)
    # Layers with other numbers of experts lie alike: over what divides all of them.
    assert [each.ep for each in replace(job, shapes=(shape, replace(shape, E=6))).layouts()] == [1, 2]


def test_the_usual_size_stays_unless_another_is_clearly_faster() -> None:
    def chosen(*steps_ms: float) -> tuple[int, float | None]:
        found = choose_ep_size([EpSize(1 << at, each, "flat") for at, each in enumerate(steps_ms)], usual=2)
        return found.best.ep, found.runner_up_costs

    assert chosen(100.0, 104.0, 300.0) == (2, 100 / 104)
    assert chosen(100.0, 106.0, 300.0) == (1, 1.06)
    assert chosen(300.0, 100.0, 96.0) == (2, 0.96)
    assert chosen(300.0, 100.0, 94.0) == (4, 100 / 94)


@given(jobs(), st.floats(1e-6, 1e-3), st.floats(0.0, 1.0))
@settings(max_examples=15)
def test_more_tokens_or_micro_batches_never_spread_experts_wider_over_like_links(
    job: ExpertJob, inter: float, share: float
) -> None:
    # Without overlap a step is what its gradients take and what each token takes. The more tokens, the less a token
    # takes in the fastest size and the longer its gradients take, and these are fewer with more ranks.
    links, shape = cluster(inter, share * inter, 0.0), replace(job.shapes[0], L=1)
    job = replace(job, esp=1, zero=0, micro_batches=1, shapes=(shape,) * len(job.shapes))
    more_tokens, more_batches = [], []
    for times in (1, 8, 64, 512, 4096):
        longer = replace(job, shapes=(replace(shape, L=times),) * len(job.shapes))
        for at, more in ((more_tokens, longer), (more_batches, replace(job, micro_batches=times))):
            at.append(choose_ep_size(ep_sizes(more, links, SERIAL)).best.ep)
    for at in (more_tokens, more_batches):
        assert at == sorted(at, reverse=True)


@given(jobs())
@settings(max_examples=15)
def test_it_is_what_ds_fsmoe_plan_predicts(job: ExpertJob) -> None:
    shape, groups, contention = job.shapes[0], job.layouts()[-1], Contention(0.2, 0.3, 0.1)
    links = replace(cluster(1e-4, 1e-5), host_ms=0.02, contention=contention)
    job = replace(job, num_dense=sum_of_attention(job))
    how = Settings(contention, links.host_ms, num_micro_batches=job.micro_batches)
    model = PlannedModel(shape, len(job.layers(groups, "flat", links)))
    planned = PlannedJob(links, groups, model, how, zero=Zero(job.zero, shape.dtype_bytes))
    found = report(planned, "best", ("best",))
    assert step_ms(job, links, groups, "flat") == pytest.approx(found.planner.batch_ms(found.plan))


def test_sizes_whose_links_nobody_measured_are_left_out_and_none_at_all_is_refused() -> None:
    job, links = ExpertJob((Shape(B=1, L=64, M=32, H=64, E=4, heads=4),), 4, 4, 1000), cluster(1e-4, 1e-5)
    inside = replace(links, operations={k: v for k, v in links.operations.items() if not k.startswith("inter")})
    assert [each.ep for each in ep_sizes(job, inside)] == [1, 2, 4]
    no_exchange = {k: v for k, v in links.operations.items() if not k.endswith("all_to_all")}
    assert [each.ep for each in ep_sizes(job, replace(links, operations=no_exchange))] == [1]
    with pytest.raises(ValueError, match=r"operations\.inter\.all_reduce is missing"):
        ep_sizes(replace(job, ranks_per_node=2), inside)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"shapes": ()}, "shapes: must have at least one layer"),
        ({"world": 0}, "world = 0: must be at least 1"),
        ({"num_dense": -1}, "num_dense = -1: must be at least 0"),
        ({"esp": 3}, "expert_tensor_parallel_size = 3: must divide the 4 ranks"),
    ],
)
def test_a_job_that_cannot_be_is_refused(wrong: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(ExpertJob((Shape(B=1, L=8, M=8, H=8, E=4, heads=4),), 4, 2, 0), **wrong)


# ---- what was measured on the bed: 2 nodes of 2 ranks, 100 Mbit/s between nodes and 400 inside


def test_predicted_gains_of_ep_sizes_are_within_10_percent_of_measured_ones_on_average() -> None:
    found = list(gains(measured_rows()))
    assert {(each.of.ep, each.over.ep) for each in found} == {(1, 1), (2, 1), (4, 1), (4, 2)}
    assert {each.of.zero for each in found} == {0, 3}
    assert mean(abs(each.error) for each in found) <= MOST_OFF
    for layouts in ((2, 1), (4, 1), (4, 2)):
        of_layouts = [each for each in found if (each.of.ep, each.over.ep) == layouts]
        assert mean(abs(each.error) for each in of_layouts) <= MOST_OFF
    # Single ones are further off (benchmarks/LOG.md): at ZeRO 3 over all ranks a quarter of the measured step is in no
    # prediction.
    assert all(abs(each.error) < (0.3 if (each.of.zero, each.of.ep) == (3, 4) else 0.21) for each in found)


def test_predicted_costs_of_zero_stages_are_within_10_percent_of_measured_ones() -> None:
    found = stages_of_stock()
    assert {stage for _, stage, *_ in found} == {1, 2, 3}
    assert all(abs(predicted / measured - 1) <= MOST_OFF for *_, measured, predicted in found)


BEHIND = {"OLMoE, k 8, H 1/2 M, L 128, one node": 1.06}
"""The one case of all in which the chosen size is not the fastest one, and how many times as long its step may take."""


@pytest.mark.parametrize("case", sorted({each.case for each in measured_rows()}))
def test_the_size_is_chosen_that_was_measured_to_be_the_fastest(case: str) -> None:
    measured = {
        each.ep: each.measured_ms
        for each in measured_rows()
        if (each.source, each.case) == ("whole.csv", case) and "AutoEP" not in each.variant
    }
    choice = choose_ep_size(ep_sizes(replace(job_of(case), sums_in_slices=True), bed_of(case)))
    assert measured[choice.best.ep] <= BEHIND.get(case, 1.0) * min(measured.values())
