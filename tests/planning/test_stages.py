# SPDX-License-Identifier: Apache-2.0
"""A layer is a list of stages: what each kind of layer has, and what the order of issue makes of any list."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_fsmoe.planning.block import ORDERS, BlockPlan, block_schedule
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.decide.block_times import BlockTimes, Order
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.schedule import EXPERT, HOLD, Lane, Schedule
from ds_fsmoe.planning.timeline import simulate
from ds_fsmoe.planning.two_batch import entering, sub_batch_moe, two_batch_schedule
from ds_fsmoe.planning.workload import BlockWork, Layer, MoEWork, Stage, Work, layer_work, stage_kinds
from tests.planning.layers import LAYOUTS, SHAPE

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
    "sharded experts alone": (
        (Groups(4, 4, mp=4, esp=4), "flat"),
        "GATHER intra inner, EXPERT compute, REDUCE intra inner",
    ),
    "one rank": ((Groups(1, 4), "flat"), "EXPERT compute"),
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
    layer = layer_work(SHAPE, groups, alltoall)
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

    def converted(moe: MoEWork) -> list[str]:
        return [each.kind for each in moe.stages if "QUANTISE" in each.kind]

    assert converted(one.forward.moe) == ["QUANTISE_IN", "DEQUANTISE_IN"]
    assert converted(one.backward.moe) == ["QUANTISE_OUT", "DEQUANTISE_OUT"]
    assert one.forward.moe.exchange == plain.forward.moe.exchange
    assert one.forward.moe.behind == plain.forward.moe.behind
    assert layer_work(SHAPE, groups, narrow=(False, False)) == plain


def test_every_kind_of_stage_says_among_which_ranks_it_sends() -> None:
    lists = [listed for _, listed in (*LISTS.values(), *NARROW.values())]
    in_lists = {stage.split()[0]: stage for listed in lists for stage in listed.split(", ")}
    shards = {"GATHER", "REDUCE"}

    def group_of(kind: str) -> str:
        sends = "compute" not in in_lists[kind] and "QUANTISE" not in kind
        return ("esp" if kind in shards else "ep") if sends else ""

    wanted = {kind: group_of(kind) for kind in in_lists}
    assert stage_kinds() == wanted


def test_an_exchange_is_what_sends_rows_to_their_experts_and_back() -> None:
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

    def inner(name: str) -> list[Stage]:
        return [Stage(f"{name}{i}", INTRA, 1.0, is_inner=True) for i in range(draw(st.integers(0, 2)))]

    def side(name: str) -> list[Stage]:
        found = sorted(draw(st.lists(STAGES, max_size=3)), key=lambda each: -each.offset)
        return [replace(each, kind=f"{name}{index}") for index, each in enumerate(found)]

    ahead = (*side("IN"), *inner("GATHER"))
    behind = (*inner("REDUCE"), *side("OUT")[::-1])
    return MoEWork(ahead, Work(EXPERT, COMPUTE, 3.0), behind)


def ways_of(schedule: Schedule, chunk: int) -> list[str]:
    return [task.kind for task in schedule.tasks if task.chunk == chunk and task.kind != HOLD]


@given(parts(), st.integers(1, 5), st.sampled_from(ORDERS))
def test_every_chunk_passes_every_stage_in_the_order_of_the_list(moe: MoEWork, degree: int, links: str) -> None:
    schedule = block_schedule(BlockWork((), moe, ()), BlockPlan(degree, links))
    kinds = [each.kind for each in moe.stages]
    for chunk in range(degree):
        assert ways_of(schedule, chunk) == kinds
    # Each task needs the one before it in the list.
    place = {(task.kind, task.chunk): index for index, task in enumerate(schedule.tasks)}
    for (kind, chunk), index in place.items():
        if kind != HOLD and kind != kinds[0]:
            assert place[kinds[kinds.index(kind) - 1], chunk] in schedule.tasks[index].after


@given(parts(), st.integers(1, 4), st.sampled_from(ORDERS))
def test_any_list_is_priced_as_it_is_simulated(moe: MoEWork, degree: int, links: str) -> None:
    work = BlockWork((), moe, ())
    costs = {each.kind: LinearCost(0.25, 1.0) for each in moe.stages} | {HOLD: LinearCost(0.0, 0.0)}
    times = BlockTimes(work, costs)
    order = Order(degree, links)
    wanted_ms = simulate(block_schedule(work, order.plan()), costs).makespan_ms
    assert times.with_ms([order], 0.0)[0] == pytest.approx(wanted_ms)


@given(parts(), st.integers(1, 3), st.sampled_from(ORDERS))
def test_any_list_runs_in_halves(moe: MoEWork, degree: int, links: str) -> None:
    work = BlockWork((), moe, ())
    tasks = two_batch_schedule([Layer(work, work, ())], [BlockPlan(degree, links)], "forward")
    for chunk in range(2 * degree):
        assert ways_of(tasks, chunk) == [each.kind for each in moe.stages]


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
