# SPDX-License-Identifier: Apache-2.0
"""Two halves of a micro-batch that take turns: in which order their tasks are, and how long a step takes so."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_fsmoe.planning.block import BlockPlan, Slice, block_schedule
from ds_fsmoe.planning.decide.bounds import busiest_ms
from ds_fsmoe.planning.decide.model_plan import ModelPlan
from ds_fsmoe.planning.phase_plan import PhasePlan
from ds_fsmoe.planning.schedule import (
    A2A_IN,
    A2A_OUT,
    ATTENTION,
    EXPERT,
    EXPERT_GRAD,
    GRAD,
    GRAD_GATHER,
    GRAD_SCATTER,
    GRADIENT_TASKS,
    HOLD,
    MP_GATHER,
    RESTORE,
    Lane,
    Schedule,
)
from ds_fsmoe.planning.timeline import Contention, simulate
from ds_fsmoe.planning.two_batch import entering, entering_first, sub_batch_layer, sub_batch_moe, two_batch_schedule
from ds_fsmoe.planning.workload import ALLTOALLS, BlockWork, Gradient, Layer, MoEWork, Stage, Work, layer_work
from tests.covering import covering
from tests.planning.layers import KINDS, LAYOUTS, SHAPE, layer_of, random_costs

BETWEEN, AT = (Lane.INTER,), (Lane.COMPUTE,)
SENT = Gradient(GRAD, BETWEEN, 30)
OF_EXPERTS = Gradient(EXPERT_GRAD, BETWEEN, 50)


def small(recompute: bool = False) -> Layer:
    """A layer of one operation of each kind, of which a half has a whole number."""
    enter, leave = ((Stage(kind, BETWEEN, 40, group="ep"),) for kind in (A2A_IN, A2A_OUT))
    attention, restore = (Work(ATTENTION, AT, 20),), (Work(RESTORE, AT, 8),)
    forward, backward = (MoEWork(enter, Work(EXPERT, AT, size), leave) for size in (60, 120))
    blocks = BlockWork(attention, forward, restore), BlockWork(restore, backward, attention)
    return Layer(*blocks, (SENT, OF_EXPERTS), recompute)


def names(schedule: Schedule) -> list[tuple[str, int, int]]:
    return [(task.kind, task.layer, task.chunk) for task in schedule.tasks]


def test_halves_enter_one_after_the_other_and_then_finish_one_after_the_other() -> None:
    found = two_batch_schedule([small()] * 2, [BlockPlan(1, "paper"), BlockPlan(2, "paper")], "forward")
    assert names(found) == [
        *((ATTENTION, 0, 0), (A2A_IN, 0, 0), (ATTENTION, 0, 1), (A2A_IN, 0, 1)),
        *((EXPERT, 0, 0), (A2A_OUT, 0, 0), (EXPERT, 0, 1), (A2A_OUT, 0, 1)),
        *((RESTORE, 0, 0), (ATTENTION, 1, 0), (A2A_IN, 1, 0), (A2A_IN, 1, 1)),
        *((RESTORE, 0, 1), (ATTENTION, 1, 1), (A2A_IN, 1, 2), (A2A_IN, 1, 3)),
        *((EXPERT, 1, 0), (EXPERT, 1, 1), (A2A_OUT, 1, 0), (A2A_OUT, 1, 1)),
        *((EXPERT, 1, 2), (EXPERT, 1, 3), (A2A_OUT, 1, 2), (A2A_OUT, 1, 3)),
        *((RESTORE, 1, 0), (RESTORE, 1, 1)),
    ]
    # Neither half waits for the other's results.
    half_of = [
        int(task.chunk >= (2 if task.kind in (A2A_IN, EXPERT, A2A_OUT) and task.layer else 1)) for task in found.tasks
    ]
    for task, half in zip(found.tasks, half_of, strict=True):
        assert {half_of[each] for each in task.after} <= {half}


def test_gradients_travel_in_the_half_that_is_second_in_the_backward() -> None:
    old = Slice(GRAD, BETWEEN, 5.0), Slice(EXPERT_GRAD, BETWEEN, 7.0)
    first = BlockPlan(1, "paper", old[:1], old[1:])
    young = Slice(GRAD, BETWEEN, 30.0, newest_layer=0), Slice(EXPERT_GRAD, BETWEEN, 50.0, newest_layer=0)
    second = BlockPlan(1, "paper", young)
    tail = (Slice(GRAD, BETWEEN, 9.0),)
    found = two_batch_schedule([small()] * 2, [first, second], "backward", tail)
    assert names(found) == [
        *((RESTORE, 0, 0), (A2A_IN, 0, 0), (RESTORE, 0, 1), (A2A_IN, 0, 1)),
        *((EXPERT, 0, 0), (A2A_OUT, 0, 0)),
        *((GRAD, 0, 0), (EXPERT, 0, 1), (A2A_OUT, 0, 1)),
        *((ATTENTION, 0, 0), (RESTORE, 1, 0), (A2A_IN, 1, 0)),
        *((EXPERT_GRAD, 0, 1), (ATTENTION, 0, 1), (RESTORE, 1, 1), (A2A_IN, 1, 1)),
        *((EXPERT, 1, 0), (A2A_OUT, 1, 0)),
        *((GRAD, 1, 0), (EXPERT_GRAD, 1, 1), (EXPERT, 1, 1), (A2A_OUT, 1, 1)),
        *((ATTENTION, 1, 0), (ATTENTION, 1, 1), (GRAD, 2, 0)),
    ]
    # A layer's gradients are there when both halves have added to them.
    at = {name: index for index, name in enumerate(names(found))}
    needs = {name: set(found.tasks[at[name]].after) for name in ((GRAD, 1, 0), (EXPERT_GRAD, 1, 1))}
    assert needs[GRAD, 1, 0] == {at[ATTENTION, 0, 0], at[ATTENTION, 0, 1]}
    assert needs[EXPERT_GRAD, 1, 1] == {at[EXPERT, 0, 0], at[EXPERT, 0, 1]}


PHASES = st.tuples(
    st.sampled_from(sorted(LAYOUTS)),
    st.sampled_from(ALLTOALLS),
    st.integers(1, 5),
    st.sampled_from(("shared", "paper", "reduce_first")),
    st.booleans(),
    st.sampled_from((None, False, True)),
)


@given(PHASES, st.booleans())
def test_what_enters_first_keeps_what_each_task_needs(drawn, is_second) -> None:
    layout, alltoall, degree, links, backward, in_levels = drawn
    groups, _ = LAYOUTS[layout]
    plan = BlockPlan(degree, links)
    is_alone = groups.placements["dp"].size == 1
    slices = () if in_levels is None or is_alone else ((GRAD_SCATTER, GRAD, GRAD_GATHER) if in_levels else (GRAD,),)
    phase = PhasePlan(plan, groups, backward, alltoall, is_two_batch=True)
    behind_gathers = replace(phase, block=replace(plan, links="paper")) if links == "reduce_first" else phase
    before, (after, pause) = behind_gathers.sending(slices), phase.paused(slices, is_second)
    assert phase.paused(slices, is_second)[0] is after
    moe = layer_work(SHAPE, groups, alltoall).forward.moe
    ahead_of_pause = entering(moe, not (is_second and links == "reduce_first"))
    # The same tasks; those that bring tokens, and no others, are ahead of the pause.
    assert Counter((task.kind, task.lane, task.chunk) for task in after.tasks) == Counter(
        (task.kind, task.lane, task.chunk) for task in before.tasks
    )
    ahead, behind = after.tasks[:pause], after.tasks[pause:]
    assert {task.kind for task in ahead} <= {*ahead_of_pause, HOLD}
    assert not {task.kind for task in behind} & ahead_of_pause
    # Whoever waited for a result still does. Only what is issued later to a lane that is held is waited for no more.
    for kept in (HOLD, *KINDS):
        of_kind = [[task for task in each.tasks if task.kind == kept] for each in (before, after)]
        for old, new in zip(*of_kind, strict=True):
            wanted, found = (
                {(of.tasks[each].kind, of.tasks[each].chunk, of.tasks[each].lane) for each in task.after}
                for of, task in ((before, old), (after, new))
            )
            missing = wanted - found
            assert found <= wanted
            assert all(kind in GRADIENT_TASKS or kind in entering(moe) - ahead_of_pause for kind, *_ in missing)
            assert not missing or kept in ahead_of_pause


@given(PHASES)
def test_the_list_of_a_model_has_each_halfs_tasks_in_the_order_in_which_they_are_run(drawn) -> None:
    layout, alltoall, degree, links, backward, in_levels = drawn
    groups, _ = LAYOUTS[layout]
    layer = layer_work(SHAPE, groups, alltoall, whole_slots=True)
    work = layer.backward if backward else layer.forward
    inside = (GRAD_SCATTER, GRAD_GATHER) if in_levels else ()
    sent = Slice(GRAD, groups.placements["dp"].lanes[:1] or BETWEEN, 5.0, inside=inside)
    slices = () if in_levels is None or not backward else (sent,)
    plan = BlockPlan(degree, links, slices)
    found = two_batch_schedule([layer], [plan], "backward" if backward else "forward")
    of_moe = [task for task in found.tasks if task.kind in {each.kind for each in work.moe.stages}]
    half = sub_batch_moe(work.moe)
    for number in range(2):
        behind_gathers = "paper" if links == "reduce_first" else links
        alone = replace(plan, links=behind_gathers, moe_slices=slices if number else ())
        ahead_of_pause = entering(half, not (number and links == "reduce_first"))
        wanted, pause = entering_first(block_schedule(BlockWork((), half, ()), alone), ahead_of_pause)
        mine = [each for each in of_moe if number * degree <= each.chunk < (number + 1) * degree]
        kinds = {each.kind for each in of_moe}
        assert [(each.kind, each.lane, each.chunk - number * degree, each.size) for each in mine] == [
            (each.kind, each.lane, each.chunk, each.size) for each in wanted.tasks if each.kind in kinds
        ]
        assert all(
            each.kind in ahead_of_pause for each in mine[: sum(task.kind in kinds for task in wanted.tasks[:pause])]
        )


def sizes(schedule: Schedule) -> Counter[str]:
    """Kind -> how much of it there is."""
    found: Counter[str] = Counter()
    for task in schedule.tasks:
        found[task.kind] += task.size
    del found[HOLD]
    return found


@pytest.mark.parametrize(("layout", "degree", "num_layers"), covering(sorted(LAYOUTS), (1, 2), (1, 3)))
def test_halves_do_the_work_of_the_whole_and_take_no_less_than_a_lane_or_a_chain(layout, degree, num_layers) -> None:
    layer, costs = layer_of(layout), random_costs(random.Random(f"{layout}{degree}{num_layers}"))
    plan, grads = BlockPlan(degree, "paper"), tuple(Slice(e.kind, e.lanes, e.size_bytes, 0) for e in layer.gradients)
    backward = [plan, replace(plan, moe_slices=grads), plan][:num_layers]
    whole = ModelPlan((layer,) * num_layers, (plan,) * num_layers, tuple(backward), (), (), ())
    halves = replace(whole, is_two_batch=True)
    for of_whole, schedule in zip(whole.schedules(), halves.schedules(), strict=True):
        assert sizes(schedule) == pytest.approx(sizes(of_whole))
        alone, ends_ms = simulate(schedule, costs), list[float]()
        for task in schedule.tasks:
            start_ms = max((ends_ms[each] for each in task.after), default=0.0)
            ends_ms.append(start_ms + costs[task.kind].ms(task.size, task.launches))
        least_ms = max(*(alone.busy_ms(lane) for lane in Lane), *ends_ms) * (1 - 1e-9)
        assert min(alone.makespan_ms, simulate(schedule, costs, Contention(0.3, 0.1, 0.1)).makespan_ms) >= least_ms
    # The gradients of one layer are sent, where there are several.
    silent = replace(layer, gradients=())
    sending = (silent,) * (num_layers - 1) + (layer if num_layers > 1 else silent,)
    for bound_ms, line in zip(busiest_ms(sending, costs), halves.timelines(costs), strict=True):
        assert line.makespan_ms >= bound_ms * (1 - 1e-9)


def test_a_half_of_slots_is_rounded_up_and_rows_are_halved() -> None:
    slots = replace(small().forward.moe, capacity=5)
    half = sub_batch_moe(slots)
    assert (half.capacity, half.ahead[0].size) == (3, pytest.approx(40 * 3 / 5))
    assert sub_batch_moe(replace(slots, capacity=1)) == replace(slots, capacity=1)
    assert sub_batch_moe(replace(slots, capacity=None)).expert.size == 30
    assert sub_batch_layer(small()).gradients == ()
    # What lies between layers holds the computing lane.
    tasks = two_batch_schedule([layer_of("the paper's")], [BlockPlan()], "forward").tasks
    gathers = [index for index, task in enumerate(tasks) if task.kind == MP_GATHER]
    assert [tasks[each].lane for each in gathers] == [Lane.INTRA] * 2
    holds = [tasks[each + 1] for each in gathers]
    assert [(each.kind, each.lane, each.after) for each in holds] == [(HOLD, Lane.COMPUTE, (at,)) for at in gathers]


def test_a_layer_that_recomputes_runs_again_in_turns_when_the_first_half_has_come_to_it() -> None:
    layers = [small(), small(recompute=True), small()]
    plans = [BlockPlan(1, "paper")] * 3
    plan = ModelPlan(tuple(layers), tuple(plans), tuple(plans), (), (), (), is_two_batch=True)
    forward, backward = plan.schedules()
    assert names(forward) == names(two_batch_schedule([small()] * 3, plans, "forward"))
    of_layer = [(at, task) for at, task in enumerate(backward.tasks) if task.layer == 1]
    experts = [(at, task) for at, task in of_layer if task.kind == EXPERT]
    assert [task.chunk for _, task in experts] == [0, 1, 0, 1]
    # First the forward: both halves are sent before the experts of the first, and all of it is needed by what follows.
    again = [at for at, task in of_layer if at < experts[2][0] and task.kind == A2A_IN][:2]
    assert again[1] < experts[0][0]
    # The first half's gradients of the layer behind are what it waits for; the second half's are still under way.
    first_again = next(task for at, task in of_layer)
    done = {backward.tasks[each].chunk for each in first_again.after}
    assert done == {0}
    whole = replace(plan, is_two_batch=False).schedules()
    assert [sizes(each) for each in (forward, backward)] == [sizes(each) for each in whole]
