# SPDX-License-Identifier: Apache-2.0
"""A layer is a list of stages: what each kind of layer has, what the order of issue makes of any list, and on which
lane the planner has rows for narrow wires converted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_fsmoe.planning.block import ORDERS, BlockPlan, block_schedule
from ds_fsmoe.planning.call_shape import CallShape, layer_of_call, moe_work
from ds_fsmoe.planning.cost import LayerCosts, LinearCost
from ds_fsmoe.planning.decide.block_times import BlockTimes, Order, order_words
from ds_fsmoe.planning.decide.bounds import lower_bound_ms
from ds_fsmoe.planning.decide.plan import Planner
from ds_fsmoe.planning.decide.plan_requests import PlanRequest, SearchSpace
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.job.measured import DEQUANTISED, QUANTISED
from ds_fsmoe.planning.phase_plan import PhasePlan
from ds_fsmoe.planning.schedule import DEQUANTISING, EXPERT, HOLD, QUANTISING, REST, Lane, Schedule
from ds_fsmoe.planning.timeline import simulate
from ds_fsmoe.planning.two_batch import entering, sub_batch_moe, two_batch_schedule
from ds_fsmoe.planning.workload import ALLTOALLS, BlockWork, Layer, MoEWork, Stage, Work, layer_work, stage_kinds
from tests.planning.layers import LAYOUTS, SHAPE
from tests.planning.measured_layers import GROUPS, SIZES, line, made_up

INTER, INTRA, COMPUTE = (Lane.INTER,), (Lane.INTRA,), (Lane.COMPUTE,)
LISTS = {
    "the paper's own layer": (
        (Groups(8, 4, mp=4, esp=4, ep=2), "flat"),
        "A2A_IN inter, GATHER intra inner, EXPERT compute, REDUCE intra inner, A2A_OUT inter",
    ),
    "each token once per node": (
        (Groups(8, 4, ep=8), "node_deduplicated"),
        "A2A_IN inter, SPREAD intra inner, EXPERT compute, COLLECT intra inner, A2A_OUT inter",
    ),
    "an all-to-all in two steps": (
        (Groups(8, 4, ep=8), "2dh"),
        "A2A_IN_NODE intra apart 1, A2A_IN inter, EXPERT compute, A2A_OUT inter, A2A_OUT_NODE intra apart 1",
    ),
    "two steps, and sharded experts": (
        (Groups(8, 4, mp=2, esp=2, ep=4), "2dh"),
        "A2A_IN_NODE intra apart 1, A2A_IN inter, GATHER intra inner, EXPERT compute, "
        "REDUCE intra inner, A2A_OUT inter, A2A_OUT_NODE intra apart 1",
    ),
    "sharded experts alone": (
        (Groups(4, 4, mp=4, esp=4), "flat"),
        "GATHER intra inner, EXPERT compute, REDUCE intra inner",
    ),
    "an all-to-all over both links": (
        (Groups(8, 4, ep=8), "flat"),
        "A2A_IN inter+intra, EXPERT compute, A2A_OUT inter+intra",
    ),
    "one rank": ((Groups(1, 4), "flat"), "EXPERT compute"),
}


NARROW = {
    "an all-to-all over both links": (
        (Groups(8, 4, ep=8), "flat"),
        "QUANTISE_IN inter beside 2, A2A_IN inter+intra, DEQUANTISE_IN inter beside 0, EXPERT compute, "
        "QUANTISE_OUT inter beside 0, A2A_OUT inter+intra, DEQUANTISE_OUT inter beside 0",
    ),
    "each token once per node": (
        (Groups(8, 4, ep=8), "node_deduplicated"),
        "QUANTISE_IN inter beside 2, A2A_IN inter, DEQUANTISE_IN inter, QUANTISE_SPREAD intra inner, "
        "SPREAD intra inner, DEQUANTISE_SPREAD intra inner beside 0, EXPERT compute, "
        "QUANTISE_COLLECT intra inner beside 0, COLLECT intra inner, DEQUANTISE_COLLECT intra inner, "
        "QUANTISE_OUT inter, A2A_OUT inter, DEQUANTISE_OUT inter beside 0",
    ),
    "two steps, and sharded experts": (
        (Groups(8, 4, mp=2, esp=2, ep=4), "2dh"),
        "QUANTISE_IN intra apart 1 beside 3, A2A_IN_NODE intra apart 1, A2A_IN inter, DEQUANTISE_IN inter, "
        "GATHER intra inner, EXPERT compute, REDUCE intra inner, QUANTISE_OUT inter, A2A_OUT inter, "
        "A2A_OUT_NODE intra apart 1, DEQUANTISE_OUT intra apart 1 beside 1",
    ),
}
"""What these layers have where both wires are narrow."""


def words(moe: MoEWork) -> str:
    """The stages of a layer in one line."""

    def of(stage: Work) -> str:
        said = [stage.kind, "+".join(stage.lanes)]
        if isinstance(stage, Stage):
            said += ["inner"] * stage.is_inner + [f"apart {stage.offset}"] * bool(stage.offset)
            said += [] if stage.offset_on_compute is None else [f"beside {stage.offset_on_compute}"]
        return " ".join(said)

    return ", ".join(map(of, moe.stages))


@pytest.mark.parametrize("name", LISTS)
def test_each_kind_of_layer_has_its_list_of_stages_in_both_phases_and_in_halves(name: str) -> None:
    (groups, alltoall), wanted = LISTS[name]
    # Narrow wires are of all-to-alls.
    for narrow in ((False, False), *([(True, True)] if "A2A" not in wanted else ())):
        layer = layer_work(SHAPE, groups, alltoall, narrow=narrow)
        for block in (layer.forward, layer.backward):
            assert words(block.moe) == words(sub_batch_moe(block.moe)) == wanted


@pytest.mark.parametrize("name", NARROW)
def test_rows_on_narrow_wires_are_converted_around_the_links_that_send_them(name: str) -> None:
    (groups, alltoall), wanted = NARROW[name]
    layer = layer_work(SHAPE, groups, alltoall, narrow=(True, True))
    for block in (layer.forward, layer.backward):
        assert words(block.moe) == words(sub_batch_moe(block.moe)) == wanted
        # They cost what whole rows do, whatever their bytes on the link.
        sizes = {each.kind.split("_")[-1]: each.size for each in block.moe.exchange + block.moe.collectives}
        converted = [each for each in block.moe.stages if "QUANTISE" in each.kind]
        assert all(each.size == sizes.get(each.kind.split("_")[-1], block.moe.exchange[0].size) for each in converted)


def test_gradients_take_the_wires_the_other_way_and_wires_of_the_models_own_type_change_no_list() -> None:
    groups = Groups(8, 4, ep=8)
    plain, one = layer_work(SHAPE, groups), layer_work(SHAPE, groups, narrow=(True, False))
    for block, way in ((one.forward, "IN"), (one.backward, "OUT")):
        converted = [each.kind for each in block.moe.stages if "QUANTISE" in each.kind]
        assert converted == [f"QUANTISE_{way}", f"DEQUANTISE_{way}"]
    assert one.forward.moe.exchange == plain.forward.moe.exchange
    assert one.forward.moe.behind == plain.forward.moe.behind
    assert layer_work(SHAPE, groups, narrow=(False, False)) == plain


def test_every_kind_of_stage_says_among_which_ranks_it_sends_and_an_exchange_is_what_sends_rows_to_experts() -> None:
    lists = [listed for _, listed in (*LISTS.values(), *NARROW.values())]
    in_lists = {stage.split()[0]: stage for listed in lists for stage in listed.split(", ")}
    groups = {kind: "esp" if kind in ("GATHER", "REDUCE") else "ep" for kind in in_lists}
    silent = {kind: "" for kind in in_lists if "compute" in in_lists[kind] or "QUANTISE" in kind}
    assert stage_kinds() == groups | silent
    moe = layer_work(SHAPE, Groups(8, 4, mp=2, esp=2, ep=4), "2dh").forward.moe
    assert [each.kind for each in moe.exchange] == ["A2A_IN_NODE", "A2A_IN", "A2A_OUT", "A2A_OUT_NODE"]
    assert entering(moe) - entering(moe, gathers=False) == {"GATHER"}


# ---- any list of stages

QUANTISE = Stage("QUANTISE", COMPUTE, 2.0, offset=1)
STAGES = st.builds(
    Stage,
    kind=st.just(""),
    lanes=st.sampled_from([INTER, INTRA, COMPUTE, (Lane.INTER, Lane.INTRA)]),
    size=st.integers(1, 5).map(float),
    launches=st.integers(1, 2),
    is_inner=st.just(False),
    offset=st.integers(0, 2),
)


@st.composite
def parts(draw: st.DrawFn) -> MoEWork:
    """Any list: stages that are apart come first on the way in, and last on the way out; inner ones are at the
    experts."""

    def side(name: str) -> list[Stage]:
        found = sorted(draw(st.lists(STAGES, max_size=3)), key=lambda each: -each.offset)
        inner = [Stage(f"{name}_INNER{i}", INTRA, 1.0, is_inner=True) for i in range(draw(st.integers(0, 2)))]
        return [*(replace(each, kind=f"{name}{index}") for index, each in enumerate(found)), *inner]

    return MoEWork(tuple(side("IN")), Work(EXPERT, COMPUTE, 3.0), tuple(side("OUT")[::-1]))


def ways_of(schedule: Schedule, chunk: int) -> list[str]:
    return [task.kind for task in schedule.tasks if task.chunk == chunk and task.kind != HOLD]


@given(parts(), st.integers(1, 5), st.sampled_from(ORDERS))
def test_every_chunk_passes_every_stage_of_any_list_in_its_order_whole_or_in_halves_and_is_priced_as_simulated(
    moe: MoEWork, degree: int, links: str
) -> None:
    work, kinds = BlockWork((), moe, ()), [each.kind for each in moe.stages]
    schedule = block_schedule(work, BlockPlan(degree, links))
    halves = two_batch_schedule([Layer(work, work, ())], [BlockPlan(degree, links)], "forward")
    for found, chunks in ((schedule, degree), (halves, 2 * degree)):
        for chunk in range(chunks):
            assert ways_of(found, chunk) == kinds
    # Each task needs the one before it in the list.
    place = {(task.kind, task.chunk): index for index, task in enumerate(schedule.tasks)}
    for (kind, chunk), index in place.items():
        if kind != HOLD and kind != kinds[0]:
            assert place[kinds[kinds.index(kind) - 1], chunk] in schedule.tasks[index].after
    costs = {kind: LinearCost(0.25, 1.0) for kind in kinds} | {HOLD: LinearCost(0.0, 0.0)}
    found_ms = BlockTimes(work, costs).with_ms([Order(degree, links)], 0.0)[0]
    assert found_ms == pytest.approx(simulate(schedule, costs).makespan_ms)


def in_lanes(schedule: Schedule, lane: Lane) -> list[str]:
    return [f"{schedule.tasks[i].kind} {schedule.tasks[i].chunk}" for i in schedule.lanes[lane]]


def test_conversions_run_on_their_links_or_beside_the_experts_with_none_waiting_for_a_chunk_behind() -> None:
    moe = layer_work(SHAPE, Groups(8, 1, ep=8), narrow=(True, True)).forward.moe
    on_links, beside = (
        block_schedule(BlockWork((), moe, ()), BlockPlan(3, "paper", conversions=each)) for each in ("links", "compute")
    )
    assert in_lanes(on_links, Lane.COMPUTE) == ["EXPERT 0", "EXPERT 1", "EXPERT 2"]
    arrive = [f"{kind} {chunk}" for chunk in range(3) for kind in ("QUANTISE_IN", "A2A_IN", "DEQUANTISE_IN")]
    leave = [f"{kind} {chunk}" for chunk in range(3) for kind in ("QUANTISE_OUT", "A2A_OUT", "DEQUANTISE_OUT")]
    assert in_lanes(on_links, Lane.INTER) == arrive + leave
    assert in_lanes(beside, Lane.INTER) == [f"{kind} {chunk}" for kind in ("A2A_IN", "A2A_OUT") for chunk in range(3)]
    assert in_lanes(beside, Lane.COMPUTE) == [
        *("QUANTISE_IN 0", "QUANTISE_IN 1", "DEQUANTISE_IN 0", "QUANTISE_IN 2", "EXPERT 0", "QUANTISE_OUT 0"),
        *("DEQUANTISE_IN 1", "EXPERT 1", "QUANTISE_OUT 1"),
        *("DEQUANTISE_IN 2", "EXPERT 2", "QUANTISE_OUT 2"),
        *("DEQUANTISE_OUT 0", "DEQUANTISE_OUT 1", "DEQUANTISE_OUT 2"),
    ]


def test_the_papers_closed_form_holds_where_the_papers_stages_are_found_and_nowhere_else() -> None:
    papers = layer_work(SHAPE, *LAYOUTS["the paper's"]).forward.moe
    costs = {each.kind: LinearCost(0.25, 1.0) for each in (*papers.stages, QUANTISE)} | {HOLD: LinearCost(0.0, 0.0)}

    def is_papers(moe: MoEWork) -> bool:
        return BlockTimes(BlockWork((), moe, ()), costs).is_papers

    assert is_papers(papers)
    assert is_papers(replace(papers, ahead=papers.ahead[:1], behind=papers.behind[1:]))
    assert not is_papers(replace(papers, ahead=(QUANTISE, *papers.ahead)))
    assert not is_papers(replace(papers, behind=(*papers.behind, QUANTISE)))
    assert not is_papers(replace(papers, behind=papers.behind[:1]))
    # The form has one all-to-all for both ways: what comes back in another type is none of the paper's layers.
    smaller = replace(papers.behind[-1], size=papers.behind[-1].size / 2)
    assert not is_papers(replace(papers, behind=(*papers.behind[:-1], smaller)))


# ---- on which lane rows for narrow wires are converted


SPREAD_OUT = Groups(8, 1, ep=8)
CALL = CallShape(8, 64, 16, 2, 1, 100, num_tokens=64, wires=(0.625, 0.625))


def converting(expert_ms: float, conversion_ms: float, shape: CallShape = CALL) -> Layer:
    """A layer whose links take 10 ms each way."""
    costs = {HOLD: LinearCost(0.0, 0.0), REST: LinearCost(0.0, 1.0)}
    for each in moe_work(SPREAD_OUT, False, replace(shape, wires=(0.625, 0.625))).stages:
        time_ms = conversion_ms if "QUANTISE" in each.kind else expert_ms if each.kind == EXPERT else 10.0
        costs[each.kind] = LinearCost(0.01, time_ms / each.size)
    return layer_of_call(SPREAD_OUT, shape, LayerCosts.written(costs, 0.0))


def chosen(of: Layer, schedule: str = "best") -> list[Order]:
    planner = Planner({})
    found = planner.plan(PlanRequest([{"flat": of}], planner.settings.space(schedule), "off"))
    return list(found.orders[0])


def test_conversions_are_beside_the_experts_where_links_are_full_and_on_links_where_experts_are() -> None:
    assert {each.conversions for each in chosen(converting(expert_ms=60.0, conversion_ms=3.0))} == {"links"}
    of = converting(expert_ms=2.0, conversion_ms=3.0)
    for work, choice in zip((of.forward, of.backward), Planner({}).choose(of, SearchSpace.of("best", 8)), strict=True):
        assert choice.order.conversions == "compute"
        assert lower_bound_ms(work, of.costs.forward, 8) <= choice.time_ms
    assert order_words(2, "paper") == order_words(2, "paper", "links") == "links side by side"
    assert order_words(2, "paper", "compute") == "links side by side, conversions beside experts"


def test_without_narrow_wires_there_is_nothing_to_choose() -> None:
    wide = converting(2.0, 3.0, replace(CALL, wires=(1.0, 1.0)))
    space = SearchSpace.of("best", 8)
    assert not wide.forward.moe.may_convert_on_compute
    assert list(space.orders_of(wide.forward.moe, False)) == list(SearchSpace.of("best", 8).orders)
    narrow = converting(2.0, 3.0).forward.moe
    found = space.orders_of(narrow, False)
    assert [each for each in found if each.conversions == "links"] == list(space.orders)
    assert {each.degree for each in found if each.conversions == "compute"} == set(range(2, 9))
    # In halves the other half computes meanwhile.
    assert {each.conversions for each in space.orders_of(sub_batch_moe(narrow), False, is_two_batch=True)} == {"links"}


@given(st.integers(1, 5), st.sampled_from(ORDERS), st.booleans(), st.sampled_from(ALLTOALLS))
def test_on_either_lane_the_same_tasks_send_in_the_same_order(
    degree: int, links: str, backward: bool, alltoall: str
) -> None:
    sending, computing = [], []
    for where in ("links", "compute"):
        plan = PhasePlan(
            Order(degree, links, where).plan(), Groups(8, 4, ep=8), backward, alltoall, narrow=(True, True)
        )
        tasks, kinds = plan.schedule.tasks, {each.kind for each in plan._moe.collectives}
        sending.append([(each.kind, each.chunk) for each in tasks if each.kind in kinds])
        computing.append({each.kind for each in tasks if each.lane is Lane.COMPUTE})
        for chunk in range(degree):
            assert ways_of(plan.schedule, chunk) == [each.kind for each in plan._moe.stages]
    assert sending[0] == sending[1]
    assert {EXPERT} <= computing[0] < computing[1]
    assert not computing[0] & {*QUANTISING, *DEQUANTISING}


def test_a_conversion_costs_what_was_measured_of_it_and_nothing_where_it_was_not() -> None:
    before = made_up()
    narrowing, widening = line(0.5, 2.0, 1e6), line(0.25, 1.0, 1e6)
    measured = replace(
        before, operations={**before.operations, QUANTISED: narrowing, DEQUANTISED: widening}, task_ms=0.125
    )
    for costs, kinds, wanted_ms in (
        (measured.costs(), QUANTISING, 0.5 + 2.0 + 0.125),
        (measured.costs(), DEQUANTISING, 0.25 + 1.0 + 0.125),
        # A recording of before conversions were tasks has them in the times of links.
        (before.costs(), (*QUANTISING, *DEQUANTISING), 0.0),
    ):
        for kind in kinds:
            assert costs.forward[kind].ms(1e6) == costs.backward[kind].ms(1e6) == pytest.approx(wanted_ms)
    of = layer_of_call(GROUPS, replace(SIZES, wires=(0.3, 0.3), num_tokens=840), before.costs())
    assert {each.conversions for each in chosen(of)} == {"links"}


def test_the_bytes_of_links_are_those_of_the_wire_and_of_conversions_those_of_whole_rows() -> None:
    for backward in (False, True):
        moe = moe_work(SPREAD_OUT, backward, replace(CALL, wires=(0.625, 1.0)))
        whole = moe_work(SPREAD_OUT, backward, replace(CALL, wires=(1.0, 1.0)))
        narrow, wide = (moe.behind, moe.ahead) if backward else (moe.ahead, moe.behind)
        (sent,) = whole.ahead
        assert [each.size for each in narrow] == [sent.size, 0.625 * sent.size, sent.size]
        assert [each.size for each in wide] == [sent.size]
        assert [each.size for each in moe.exchange] == [each.size for each in moe.collectives]
