# SPDX-License-Identifier: Apache-2.0
"""Lina's schedule as a static list: micro-ops of one size, slices of single tensors, and all-to-alls first."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_fsmoe.planning.call_shape import CallShape, moe_work
from ds_fsmoe.planning.chunks import MICRO_OP_BYTES, degree_by_bytes, micro_op_ends, num_micro_ops
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.decide.gradients import CHUNK_BYTES, QueuedGradient, partition, slice_bytes
from ds_fsmoe.planning.decide.plan import ModelPlan, Planner, Settings, plan_by_name
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.schedule import EXPERT_GRAD, GRAD, HOLD, Lane
from ds_fsmoe.planning.timeline import Contention, Timeline
from ds_fsmoe.planning.workload import MoEWork, Shape, Stage, Work, layer_work
from tests.planning.layers import LAYOUTS, SHAPE, layer_of, random_costs
from tests.planning.test_gradients import INTER, window

UNHURRIED = settings(deadline=None, derandomize=True)
GRADIENTS = (GRAD, EXPERT_GRAD)


# ---- all-to-alls


def moe(size_bytes: float, capacity: int | None = None) -> MoEWork:
    """An experts' part whose all-to-alls have so many bytes."""
    enter, leave = ((Stage(kind, INTER, size_bytes, group="ep"),) for kind in ("A2A_IN", "A2A_OUT"))
    return MoEWork(enter, Work("EXPERT", (Lane.COMPUTE,), 1.0), leave, capacity=capacity)


@UNHURRIED
@given(st.integers(0, 400), st.integers(1, 60), st.integers(1, 16), st.none() | st.integers(1, 20))
def test_a_degree_is_the_least_that_makes_an_alltoall_a_micro_op(
    size_bytes: int, micro_op_bytes: int, most: int, capacity: int | None
) -> None:
    found = degree_by_bytes(moe(float(size_bytes), capacity), micro_op_bytes, most)
    allowed = range(1, 1 + (most if capacity is None else min(most, capacity)))
    fitting = [each for each in allowed if size_bytes / each <= micro_op_bytes]
    assert found == (fitting[0] if fitting else allowed[-1])


def test_a_micro_op_is_30_megabytes() -> None:
    assert MICRO_OP_BYTES == 30e6
    assert [degree_by_bytes(moe(each), MICRO_OP_BYTES, 16) for each in (0, 1, 30e6, 30e6 + 1, 90e6, 1e9)] == [
        *(1, 1, 1, 2, 3, 16)
    ]
    assert slice_bytes("micro_ops", None) == MICRO_OP_BYTES
    assert slice_bytes("fixed_chunk", None) == CHUNK_BYTES == 31457280
    assert slice_bytes("micro_ops", 77) == slice_bytes("fixed_chunk", 77) == 77


def test_a_layer_whose_tokens_stay_on_their_rank_is_not_cut() -> None:
    alone = MoEWork((), Work("EXPERT", (Lane.COMPUTE,), 1e12), ())
    assert degree_by_bytes(alone, 1, 16) == 1


@pytest.mark.parametrize("wires", [(1.0, 1.0), (0.28125, 1.0), (1.0, 0.5)])
def test_both_phases_have_one_degree_even_where_wires_differ(wires: tuple[float, float]) -> None:
    groups = Groups(8, 4, ep=8)
    shape = CallShape(8, 13, 7, 4, 1, 1, wires=wires)
    degrees = {degree_by_bytes(moe_work(groups, backward, shape), 101, 99) for backward in (False, True)}
    # Every slot of a call travels, so many rows of 7 elements.
    assert degrees == {min(13, -(-8 * 13 * 7 * 4 // 101))}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("micro_op_bytes", [97, 480, 10**6])
def test_the_planner_runs_every_layer_in_as_many_chunks_as_its_bytes_make(layout: str, micro_op_bytes: int) -> None:
    layers = [layer_of(layout), layer_of(layout, Shape(1, 8, 8, 16, 8, 1, None, heads=2))]
    settings = Settings(Contention(0.3, 0.1), 0.01, max_degree=5, chunk_bytes=micro_op_bytes)
    plan = plan_by_name(Planner(random_costs(random.Random(layout)), settings), "lina", layers)
    for index, layer in enumerate(layers):
        forward, backward = plan.blocks(index)
        size_bytes = max((each.size for each in layer.forward.moe.exchange), default=0.0)
        assert forward.degree == backward.degree == min(5, max(1, -int(-size_bytes // micro_op_bytes)))
        assert forward.links == "shared"


def test_a_degree_by_hand_is_respected_and_said_to_be() -> None:
    planner = Planner(random_costs(random.Random(1)), Settings(chunk_bytes=97))
    space = planner.settings.space("lina").with_degrees(2, 2, "shared")
    for choice in planner.choose(layer_of("the paper's"), space):
        assert (choice.order.degree, choice.auto_degree) == (2, 2 * 12 * 8 * 4 * 3 // 4 // 97 + 1)


# ---- gradients in a plan of a model


def planned(layout: str, seed: int, contention: Contention, chunk_bytes: int) -> tuple[ModelPlan, Timeline]:
    """The backward of four layers of two kinds, as Lina would have it."""
    rng = random.Random(f"{layout}{seed}")
    costs = random_costs(rng)
    layers = [layer_of(layout, SHAPE if rng.random() < 0.7 else replace(SHAPE, L=5)) for _ in range(4)]
    host_ms = rng.choice([0.0, 0.01])
    plan = plan_by_name(Planner(costs, Settings(contention, host_ms, 3, chunk_bytes=chunk_bytes)), "lina", layers)
    return plan, plan.timelines(costs, contention, host_ms)[1]


@pytest.mark.parametrize("contention", [Contention(), Contention(0.5, 0.2, 0.1)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_alltoall_waits_for_no_slice_that_was_not_under_way(layout: str, contention: Contention) -> None:
    for seed in range(4):
        _, timeline = planned(layout, seed, contention, chunk_bytes=61)
        spans = timeline.spans
        for index, span in enumerate(spans):
            if not span.task.kind.startswith("A2A"):
                continue
            # What it needs of others than slices: then it could begin.
            needed = [each for each in span.task.after if spans[each].task.kind not in (*GRADIENTS, HOLD)]
            ready_ms = max((spans[each].end_ms for each in needed), default=0.0)
            for other in spans[:index]:
                if other.task.kind in GRADIENTS and other.end_ms > ready_ms:
                    assert other.start_ms <= ready_ms + 1e-9, (layout, seed, span.task.name, other.task.name)


def test_slices_travel_in_every_layout_whose_links_they_share() -> None:
    """Or the rule above would hold of nothing."""
    sent = dict.fromkeys(LAYOUTS, 0)
    for layout in LAYOUTS:
        for seed in range(4):
            plan, _ = planned(layout, seed, Contention(), chunk_bytes=61)
            sent[layout] += sum(len(each.dense_slices) for each in plan.backward)
    assert [layout for layout, count in sent.items() if not count] == ["one rank"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_slice_is_inside_a_layer_unless_tokens_stay_on_their_rank(layout: str) -> None:
    plan, _ = planned(layout, 0, Contention(), chunk_bytes=61)
    inside = sum(len(each.moe_slices) for each in plan.backward)
    assert inside == 0 or LAYOUTS[layout][0].ep == 1
    if layout == "no expert parallelism":
        assert inside > 0


def test_slices_of_a_layer_are_those_of_its_tensors() -> None:
    groups = Groups(16, 4, mp=4, esp=1, ep=2)
    layer = layer_work(Shape(B=1, L=8, M=24, H=40, E=8, K=1, heads=6, kv_heads=2), groups)
    # The gate, what attention gives, its values and keys, its queries; then two weights of four experts.
    dense = [24 * 8, 24 * 24 // 4, 24 * 8 // 4, 24 * 8 // 4, 24 * 24 // 4]
    expert = [24 * 40] * 8
    assert [each.tensors_bytes for each in layer.gradients] == [
        tuple(4 * n for n in dense),
        tuple(4 * n for n in expert),
    ]
    assert [each.size_bytes for each in layer.gradients] == [4 * sum(dense), 4 * sum(expert)]
    costs = random_costs(random.Random(5))
    plan = plan_by_name(Planner(costs, Settings(chunk_bytes=500)), "lina", [layer] * 3)
    sent: dict[str, list[float]] = {GRAD: [], EXPERT_GRAD: []}
    blocks = [slices for each in plan.backward for slices in (each.moe_slices, each.dense_slices)]
    for each in (each for slices in (*blocks, plan.tail) for each in slices):
        sent[each.kind].append(each.size_bytes)
    for kind, tensors in ((GRAD, dense), (EXPERT_GRAD, expert)):
        assert len(sent[kind]) == 3 * sum(-(-4 * numel // 500) for numel in tensors)
        assert max(sent[kind]) <= 500
        assert sum(sent[kind]) == 3 * 4 * sum(tensors)


def test_slices_begin_while_there_is_room_and_the_last_may_overrun() -> None:
    cost = LinearCost(0.0, 1e-3)
    pieces = [
        QueuedGradient(GRAD, INTER, 2500, cost, -1, (2300, 200)),
        QueuedGradient(GRAD, INTER, 1000, cost, 0),
    ]
    windows = [
        window(0, "moe", 1, 9.0),
        window(0, "dense", 1, 1.2),
        window(1, "moe", 2, 9.0),
        window(1, "dense", 2, 9.0),
    ]
    found = partition(pieces, windows, "micro_ops", chunk_bytes=1000)
    sizes = [[each.size_bytes for each in slices] for slices in found.slices]
    # 2300 in three parts; nothing inside layers, where an all-to-all waits.
    assert sizes == [[], [766, 767], [], [767, 200, 1000]]
    assert found.tail == ()
    assert found.extra_ms == pytest.approx(0.333)


@UNHURRIED
@given(st.integers(0, 5000), st.integers(1, 90))
def test_micro_ops_are_as_few_and_as_equal_as_can_be(size: int, most: int) -> None:
    count = num_micro_ops(size, most)
    ends = micro_op_ends(size, count)
    parts = [stop - first for first, stop in zip((0, *ends), ends, strict=False)]
    assert sum(parts) == size
    assert max(parts) <= most
    assert max(parts) - min(parts) <= 1
    assert count == 1 or (count - 1) * most < size
