# SPDX-License-Identifier: Apache-2.0
"""The named systems as schedules: the orders of the paper's figure 3, and what each switch changes."""

from __future__ import annotations

import dataclasses

import pytest

from ds_fsmoe.planning.block import BlockPlan, Slice, block_schedule
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.decide.block_times import Order
from ds_fsmoe.planning.decide.gradients import MODES
from ds_fsmoe.planning.decide.plan import Settings
from ds_fsmoe.planning.decide.plan_requests import MIN_GAIN, SearchSpace
from ds_fsmoe.planning.decide.presets import NAMES, PRESETS, Switches, preset
from ds_fsmoe.planning.schedule import (
    A2A_IN,
    A2A_OUT,
    EXPERT,
    GATHER,
    GRAD,
    REDUCE,
    Lane,
    Schedule,
)
from ds_fsmoe.planning.timeline import Contention, simulate
from ds_fsmoe.planning.workload import BlockWork, MoEWork, Stage, Work

INTER, INTRA, COMPUTE = (Lane.INTER,), (Lane.INTRA,), (Lane.COMPUTE,)
COSTS = dict.fromkeys([A2A_IN, A2A_OUT, GATHER, REDUCE, EXPERT, GRAD, "NEXT"], LinearCost(0.1, 1.0))
LETTERS = {A2A_IN: "D", A2A_OUT: "C", GATHER: "G", REDUCE: "R", EXPERT: "E", GRAD: "A", "NEXT": "N"}


def layer(a2a: float = 4.0, gather: float = 3.0, expert: float = 6.0, reduce: float = 3.0) -> BlockWork:
    """The MoE part of a backward, and one dense operation behind it."""
    moe = MoEWork(
        (Stage(A2A_IN, INTER, a2a, group="ep"), Stage(GATHER, INTRA, gather, is_inner=True, group="esp")),
        Work(EXPERT, COMPUTE, expert),
        (Stage(REDUCE, INTRA, reduce, is_inner=True, group="esp"), Stage(A2A_OUT, INTER, a2a, group="ep")),
    )
    return BlockWork((), moe, (Work("NEXT", COMPUTE, 2.0),))


def schedule_of(links: str, degree: int, grads: int = 0, dense: int = 0) -> Schedule:
    slices = [tuple(Slice(GRAD, INTER, 2.0) for _ in range(each)) for each in (grads, dense)]
    return block_schedule(layer(), BlockPlan(degree, links, *slices))


def rows(schedule: Schedule) -> dict[str, str]:
    """The tasks of each lane, as the figure writes them: D for dispatch, C for combine, and so on, with the chunk."""
    return {
        lane.value: " ".join(
            LETTERS[task.kind] + str(task.chunk + 1) for task in (schedule.tasks[i] for i in schedule.lanes[lane])
        )
        for lane in Lane
    }


IN_TWO, OUT = "G1 G2 G3 G4 R1 R2 R3 R4", "C1 C2 C3 C4"
IN_ONE = "D1 G1 D2 G2 D3 G3 D4 G4 R1 C1 R2 C2 R3 C3 R4 C4 A1"
FIGURE_3 = [
    # schedule, chunks, gradients behind the last dispatch and beside the dense part, and the tasks of each lane
    ("deepspeed", 1, 0, 0, "D1 G1 R1 C1", "", "E1 N1"),
    ("tutel_improved", 4, 0, 1, IN_ONE, "", "E1 E2 E3 E4 N1"),
    ("fsmoe", 4, 0, 1, f"D1 D2 D3 D4 {OUT} A1", IN_TWO, "E1 E2 E3 E4 N1"),
    ("fsmoe", 4, 1, 0, f"D1 D2 D3 D4 A1 {OUT}", IN_TWO, "E1 E2 E3 E4 N1"),
    ("fsmoe_no_iio", 2, 1, 0, "D1 G1 D2 G2 A1 R1 C1 R2 C2", "", "E1 E2 N1"),
]


@pytest.mark.parametrize(("name", "degree", "grads", "dense", "inter", "intra", "compute"), FIGURE_3)
def test_systems_run_their_tasks_in_the_order_of_figure_3(
    name: str, degree: int, grads: int, dense: int, inter: str, intra: str, compute: str
) -> None:
    (links,) = {order.links for order in SearchSpace.of(name, 16).orders if order.degree == degree}
    schedule = schedule_of(links, degree, grads, dense)
    assert rows(schedule) == {"inter": inter, "intra": intra, "compute": compute}
    # The dense part waits for every chunk to come back, and a gradient beside it for nothing more.
    tasks = schedule.tasks
    (after,) = (task.after for task in tasks if task.kind == "NEXT")
    assert set(after) == {index for index, task in enumerate(tasks) if task.kind == A2A_OUT}
    start_ms = {span.task.kind: span.start_ms for span in simulate(schedule, COSTS).spans}
    assert not dense or links == "paper" or start_ms[GRAD] == start_ms["NEXT"]


def test_reduce_first_sends_a_reduce_ahead_of_later_gathers() -> None:
    cut = rows(schedule_of("reduce_first", 4))
    assert (cut["intra"], cut["inter"]) == ("G1 G2 R1 G3 R2 G4 R3 R4", f"D1 D2 D3 D4 {OUT}")
    assert rows(schedule_of("reduce_first", 1)) == rows(schedule_of("paper", 1))


def test_the_presets_are_the_papers_systems() -> None:
    assert NAMES == ("deepspeed", "tutel", "tutel_improved", "pipemoe_lina", "lina", "fsmoe_no_iio", "fsmoe", "best")
    assert {name: dataclasses.astuple(make()) for name, make in PRESETS.items()} == {
        "deepspeed": ("off", "shared", "off"),
        "tutel": ("common", "shared", "off"),
        "tutel_improved": ("common", "shared", "dense_only"),
        "pipemoe_lina": ("common", "shared", "fixed_chunk"),
        "lina": ("by_bytes", "shared", "micro_ops"),
        "fsmoe_no_iio": ("per_phase", "shared", "adaptive"),
        "fsmoe": ("per_phase", "paper", "adaptive"),
    }
    with pytest.raises(ValueError, match=r"unknown preset 'fastmoe': did you mean 'fsmoe'"):
        preset("fastmoe")


def test_every_switch_alone_changes_only_what_it_says() -> None:
    for links in ("shared", "paper", "reduce_first"):
        assert SearchSpace.of(Switches(links=links), 8).orders == (Order(1, links),)
    for pipeline in ("common", "per_phase", "by_bytes"):
        orders = SearchSpace.of(Switches(pipeline=pipeline), 8).orders
        assert orders == tuple(Order(degree, "shared") for degree in range(1, 9))
    for mode in MODES:
        assert SearchSpace.of(Switches(gradients=mode), 8) == SearchSpace.of(Switches(), 8)


def test_best_looks_at_every_order_of_every_degree_and_wants_a_gain_of_three_hundredths() -> None:
    every = {Order(degree, links) for degree in (2, 3) for links in ("shared", "paper", "reduce_first")}
    space = SearchSpace.of("best", 3)
    assert {*space.orders} == every | {Order(1, "reduce_first"), Order(1, "shared")}
    # Uncut, collectives on lanes of their own leave the other link to gradients.
    assert space.orders[0] == Order(1, "reduce_first")
    assert (space.min_gain, space.common_degree) == (MIN_GAIN, False) == (0.03, False)
    one_wire = SearchSpace.of("best", 3, shared_link=True)
    assert one_wire.orders == tuple(Order(degree, "shared") for degree in (1, 2, 3))
    # Links that slow each other down by 0.8 or more are one wire, too.
    for settings in (Settings(shared_link=True), Settings(Contention(0.8))):
        assert {each.links for each in settings.space("best").orders} == {"shared"}
    assert Settings(Contention(0.79)).space("best") == Settings().space("best")


def test_an_impossible_plan_of_a_layer_is_refused() -> None:
    with pytest.raises(ValueError, match="num_chunks = 0: must be at least 1"):
        BlockPlan(0)
    with pytest.raises(ValueError, match="links = 'both': the choices are shared, paper, reduce_first"):
        BlockPlan(links="both")
