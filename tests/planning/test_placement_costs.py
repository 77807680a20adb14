# SPDX-License-Identifier: Apache-2.0
"""What a placement costs: against loops over rows, sums of tasks, and exchanges by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from ds_fsmoe.planning.block import BlockPlan, LayerPlan
from ds_fsmoe.planning.call_shape import CallShape, call_timeline
from ds_fsmoe.planning.cost import LayerCosts, LinearCost, SwitchedCost
from ds_fsmoe.planning.expert_placement import ExpertPlacement
from ds_fsmoe.planning.groups import Fanout, Groups, expected_fanout
from ds_fsmoe.planning.phase_plan import PhasePlan
from ds_fsmoe.planning.placement_costs import (
    BALANCED,
    ObservedRouting,
    Pressure,
    Prices,
    as_alltoall_bytes,
    node_deduplicated_pressure,
    pressure_of,
)
from ds_fsmoe.planning.schedule import (
    A2A_IN,
    A2A_IN_NODE,
    A2A_OUT,
    A2A_OUT_NODE,
    COLLECT,
    EXPERT,
    GATHER,
    HOLD,
    REDUCE,
    SPREAD,
)
from ds_fsmoe.planning.timeline import Contention
from ds_fsmoe.planning.workload import AllToAll
from tests.covering import covering
from tests.planning.placements import load, placements

KINDS = (A2A_IN, A2A_IN_NODE, A2A_OUT, A2A_OUT_NODE, COLLECT, EXPERT, GATHER, REDUCE, SPREAD)
COSTS = LayerCosts.written(
    {kind: LinearCost(0.1 + 0.01 * index, 1e-3 * (1 + index)) for index, kind in enumerate(KINDS)}
    | {HOLD: LinearCost(0.0, 0.0)}
)
SHAPE = CallShape(num_experts=8, capacity=12, width=3, dtype_bytes=4, num_products=2, num_weights=6)
WAYS: dict[str, tuple[Groups, AllToAll]] = {
    "flat over both links": (Groups(4, 2, ep=4), "flat"),
    "2dh": (Groups(4, 2, ep=4), "2dh"),
    "once per node": (Groups(4, 2, ep=4), "node_deduplicated"),
    "one node": (Groups(4, 4, ep=4), "flat"),
    "one rank in each node": (Groups(4, 1, ep=4), "flat"),
    "sharded experts": (Groups(4, 2, ep=2, esp=2), "flat"),
}
PRESSURE = Pressure(compute=2.0, inter=3.0, intra=5.0)


def moves_ms(
    now: ExpertPlacement,
    after: ExpertPlacement,
    moved_bytes: float,
    cost: LinearCost | SwitchedCost,
    nodes: tuple[int, ...],
) -> float:
    """What moves take by the cost of an all-to-all."""
    plan = LayerPlan(BlockPlan(), BlockPlan(), "flat")
    prices = Prices(SHAPE, Groups(len(nodes), 1), plan, LayerCosts.written({A2A_IN: cost}), moved_bytes)
    return prices.moves_ms(now, after, nodes)


def shape_for(alltoall: AllToAll) -> CallShape:
    return replace(SHAPE, crossings=Fanout(1.5, 2.5) if alltoall == "node_deduplicated" else None)


@settings(max_examples=150)
@given(placements())
def test_pressure_is_what_a_loop_over_rows_counts(drawn) -> None:
    placement, nodes, rows_GE = drawn
    ranks, to_E = range(len(nodes)), [each // placement.num_local for each in placement.place_of_expert]

    def ports(sent) -> tuple[list[float], list[float]]:
        """The rows of each direction of each node's port, and of each rank's inside its node."""
        between, inside = {}, {}
        for first in ranks:
            for second in ranks:
                if nodes[first] != nodes[second]:
                    for port in (("out", nodes[first]), ("in", nodes[second])):
                        between[port] = between.get(port, 0.0) + sent[first][second]
                elif first != second:
                    for port in (("out", first), ("in", second)):
                        inside[port] = inside.get(port, 0.0) + sent[first][second]
        return list(between.values()), list(inside.values())

    sent = [[0.0 for _ in ranks] for _ in ranks]
    for rank in ranks:
        for expert in range(placement.num_experts):
            sent[rank][to_E[expert]] += rows_GE[rank, expert]
    total = float(rows_GE.sum())
    ours, even = ports(sent), ports([[total / len(ranks) ** 2 for _ in ranks] for _ in ranks])
    inter, intra = (max(a) / max(b) if b and total else 1.0 for a, b in zip(ours, even, strict=True))
    full = max(sum(sent[rank][at] for rank in ranks) for at in ranks)
    found = pressure_of(placement, ObservedRouting(rows_GE, nodes))
    assert found.compute == pytest.approx(full / (total / len(ranks)) if total else 1.0)
    assert (found.inter, found.intra) == pytest.approx((inter, intra))


@pytest.mark.parametrize(
    ("way", "degrees", "is_serial"), covering(sorted(WAYS), ((1, 1), (2, 3), (3, 3)), (False, True))
)
def test_a_layer_takes_what_is_predicted_of_its_calls_with_sizes_times_the_pressure(way, degrees, is_serial) -> None:
    groups, alltoall = WAYS[way]
    plan = LayerPlan(*(BlockPlan(each, "paper") for each in degrees), alltoall)
    shape, contention = shape_for(alltoall), Contention(0.3, 0.1, 0.2)
    for pressure in (BALANCED, PRESSURE):
        of_kinds = dict.fromkeys((EXPERT, GATHER, REDUCE), pressure.compute)
        of_kinds |= dict.fromkeys((A2A_IN, A2A_OUT), pressure.intra if way == "one node" else pressure.inter)
        of_kinds |= dict.fromkeys((A2A_IN_NODE, A2A_OUT_NODE, SPREAD, COLLECT, HOLD), pressure.intra)
        costs = LayerCosts.written(
            {kind: replace(cost, beta_ms=cost.beta_ms * of_kinds[kind]) for kind, cost in COSTS.forward.items()}
        )
        how, expected_ms = (costs, degrees[0] == degrees[1], contention, is_serial), []
        for backward, block in enumerate((plan.forward, plan.backward)):
            phase = PhasePlan(block, groups, bool(backward), alltoall)
            expected_ms.append(call_timeline(phase.schedule, phase, shape, *how).makespan_ms)
        for recompute in (False, True):
            prices = Prices(shape, groups, plan, COSTS, 0.0, alltoall, contention, is_serial, recompute=recompute)
            assert prices.layer_ms(pressure) == pytest.approx((1 + recompute) * expected_ms[0] + expected_ms[1])


def test_an_even_exchange_is_an_all_to_all_and_of_others_the_fullest_port_counts() -> None:
    for nodes in ((0, 0, 1, 1), (0, 1, 2, 3), (0, 0, 0, 0), (0, 1), (0, 0, 0, 1, 1)):
        even = np.full((len(nodes), len(nodes)), 100 / len(nodes))
        # What a rank keeps is not sent.
        assert as_alltoall_bytes(even + 1e9 * np.eye(len(nodes)), nodes) == pytest.approx(100)
    assert as_alltoall_bytes(np.eye(3), (0, 1, 1)) == 0.0
    sent = np.zeros((4, 4))
    # Of an all-to-all's buffer a rank sends three quarters. Two ranks of a node send half of theirs over its port.
    for (source, target), expected in (((0, 1), 40), ((1, 2), 40), ((0, 3), 80)):
        sent[source, target] = 30
        assert as_alltoall_bytes(sent, (0, 0, 1, 1)) == pytest.approx(expected)
    sent = np.zeros((4, 4))
    sent[:2, 2:] = 10
    for each in (sent, sent.T):
        assert as_alltoall_bytes(each, (0, 0, 1, 1)) == pytest.approx(40)
    assert as_alltoall_bytes(sent, (0, 1, 2, 3)) == pytest.approx(20 / 0.75)


def test_swaps_of_one_step_are_one_exchange_that_is_priced_where_its_size_lies_on_the_costs() -> None:
    now, nodes, cost = (
        ExpertPlacement.at_start(8, 4),
        (0, 0, 1, 1),
        SwitchedCost(LinearCost(2, 0.5), LinearCost(9, 1), 70),
    )

    def of(*swaps: tuple[int, int]) -> float:
        after = now
        for each in swaps:
            after = after.swapped(*each)
        return moves_ms(now, after, 30, cost, nodes)

    # An expert goes to its last rank directly, or stays.
    assert of() == of((0, 2), (0, 2)) == 0.0
    # One expert there and one back: each of two ranks sends one, in the node or across.
    for swaps in ([(0, 2)], [(0, 4)], [(0, 2), (4, 6)], [(0, 2), (2, 4)]):
        assert of(*swaps) == pytest.approx(2.0 + 0.5 * 40)
    # Two across the ports of two nodes, and two of one rank.
    assert of((0, 4), (2, 6)) == pytest.approx(2.0 + 0.5 * 60)
    assert of((0, 2), (1, 4)) == pytest.approx(9.0 + 80)
    alone = ExpertPlacement.at_start(4, 1)
    assert moves_ms(alone, alone.swapped(0, 2), 24, cost, (0,)) == 0.0


def test_prices_add_up_a_step() -> None:
    groups, alltoall = WAYS["flat over both links"]
    plan = LayerPlan(BlockPlan(2), BlockPlan(1), alltoall)
    prices = Prices(SHAPE, groups, plan, COSTS, 700.0, alltoall, micro_batches=3)
    seen, now = load("hot_expert", 8, 4), ExpertPlacement.at_start(8, 4)
    for each in (now, now.swapped(0, 3)):
        assert prices.step_ms(each, seen) == pytest.approx(3 * prices.layer_ms(pressure_of(each, seen)))
        expected_ms = moves_ms(now, each, 700.0, COSTS.forward[A2A_IN], seen.node_of_rank)
        assert prices.moves_ms(now, each, seen.node_of_rank) == pytest.approx(expected_ms)
    assert prices.step_ms(now, seen) != pytest.approx(prices.step_ms(now.swapped(0, 3), seen))


# ---- where tokens cross to each node once


def once(placement: ExpertPlacement, rows_GE, tokens, nodes, planned: Fanout) -> tuple[float, float, float]:
    found = node_deduplicated_pressure(placement, ObservedRouting(rows_GE, nodes, tuple(tokens)), planned)
    return found.compute, found.inter, found.intra


def by_loop(
    placement: ExpertPlacement, tokens: list[np.ndarray], node_of_rank: tuple[int, ...], planned: Fanout
) -> tuple[float, float, float]:
    """The same, token by token; all rows were seen."""
    num_ranks, nodes = placement.num_ranks, sorted(set(node_of_rank))
    place = {
        rank: [each for each in range(num_ranks) if node_of_rank[each] == node_of_rank[rank]].index(rank)
        for rank in range(num_ranks)
    }
    at_experts, leaves, enters, arrives, passes = Counter(), Counter(), Counter(), Counter(), Counter()
    total = 0
    for source, experts_SK in enumerate(tokens):
        for experts in experts_SK:
            chosen = [each for each in experts if 0 <= each < placement.num_experts]
            total += len(chosen)
            ranks = [placement.place_of_expert[each] // placement.num_local for each in chosen]
            at_experts.update(ranks)
            for node in {node_of_rank[each] for each in ranks}:
                if node != node_of_rank[source]:
                    leaves[node_of_rank[source]] += 1
                    enters[node] += 1
            for rank in set(ranks):
                (relay,) = (
                    each for each in place if node_of_rank[each] == node_of_rank[rank] and place[each] == place[source]
                )
                if relay != rank:
                    passes[relay] += 1
                    arrives[rank] += 1
    n, p = len(nodes), num_ranks // len(nodes)
    between = total / n * planned.nodes * (n - 1) / n
    inside = total / num_ranks * planned.ranks * (p - 1) / p
    return (
        max(at_experts.values()) * num_ranks / total,
        max(*leaves.values(), *enters.values()) / between,
        max(*arrives.values(), *passes.values()) / inside,
    )


CASES = [
    (8, 4, (0, 0, 1, 1), 2),
    (12, 4, (0, 1, 0, 1), 3),
    (12, 6, (0, 0, 1, 1, 2, 2), 4),
    (6, 6, (0, 0, 0, 1, 1, 1), 1),
]


@pytest.mark.parametrize(("num_experts", "ranks", "nodes", "k"), CASES)
def test_the_pressure_of_tokens_that_cross_once_is_that_of_a_loop(
    num_experts: int, ranks: int, nodes: tuple[int, ...], k: int
) -> None:
    draw = np.random.default_rng(num_experts + k)
    placement = ExpertPlacement(tuple(draw.permutation(num_experts)), num_experts, ranks)
    tokens = [np.argsort(draw.random((37 + rank, num_experts)) ** 2, axis=1)[:, :k] for rank in range(ranks)]
    tokens[1] = np.where(draw.random(tokens[1].shape) < 0.2, -1, tokens[1])
    rows_GE = np.array([np.bincount(each[each >= 0], minlength=num_experts) for each in tokens], dtype=float)
    planned = Fanout(0.7, 0.9)
    found = once(placement, rows_GE, tokens, nodes, planned)
    assert found == pytest.approx(by_loop(placement, tokens, nodes, planned))


def test_balanced_routing_crosses_once_as_planned() -> None:
    draw = np.random.default_rng(0)
    tokens = [np.argsort(draw.random((4000, 16)), axis=1)[:, :4] for _ in range(4)]
    rows_GE = np.array([np.bincount(each.reshape(-1), minlength=16) for each in tokens], dtype=float)
    each = expected_fanout(16, 4, 2, 2)
    planned = Fanout(each.nodes / 4, each.ranks / 4)
    found = once(ExpertPlacement.at_start(16, 4), rows_GE, tokens, (0, 0, 1, 1), planned)
    assert found == pytest.approx((1, 1, 1), rel=0.02)
    few = [each[::8] for each in tokens]  # they stand for all rows
    assert once(ExpertPlacement.at_start(16, 4), rows_GE, few, (0, 0, 1, 1), planned) == pytest.approx(found, rel=0.1)
    nothing = [np.zeros((0, 2), int)] * 4
    assert once(ExpertPlacement.at_start(16, 4), 0 * rows_GE, nothing, (0, 0, 1, 1), planned) == (1, 1, 1)
