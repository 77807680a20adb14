# SPDX-License-Identifier: Apache-2.0
"""Which links a group crosses, how often tokens do, what that costs, and group sizes that cannot be."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ds_fsmoe.planning.cluster import Cluster, Operation
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.groups import Groups, can_deduplicate, counted_fanout, expected_fanout
from ds_fsmoe.planning.schedule import (
    A2A_IN,
    A2A_IN_NODE,
    A2A_OUT,
    A2A_OUT_NODE,
    COLLECT,
    EXPERT,
    EXPERT_GRAD,
    GATHER,
    GRAD,
    MP_GATHER,
    REDUCE,
    SPREAD,
    Lane,
)
from ds_fsmoe.planning.workload import Shape, kind_costs, layer_work

INSIDE, BETWEEN, BOTH = (Lane.INTRA,), (Lane.INTER,), (Lane.INTER, Lane.INTRA)
SHAPE = Shape(B=2, L=24, M=8, H=48, E=24, K=2, heads=4)
_COLLECTIVES = ("all_to_all", "all_reduce", "all_gather", "reduce_scatter")


def cluster_of(**changes: Operation) -> Cluster:
    """Between nodes 8 a byte among 4 nodes, inside a node 1 a byte among 4 ranks."""
    operations = {f"inter.{each}": Operation(LinearCost(5.0, 8.0), 4) for each in _COLLECTIVES}
    operations |= {f"intra.{each}": Operation(LinearCost(1.0, 1.0), 4) for each in _COLLECTIVES}
    operations |= {each: Operation(LinearCost(0.1, 0.1)) for each in ("gemm", "attention", "softmax", "routing")}
    operations |= {"order": Operation(LinearCost(0.2, 0.0))} | changes
    return Cluster("mine", 4, 4, operations)


def numbers(cost: LinearCost) -> tuple[float, float]:
    return cost.alpha_ms, cost.beta_ms


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("per_node", [1, 2, 4, 8])
def test_a_group_is_on_the_links_that_its_ranks_cross_looked_up_one_by_one(per_node: int, pp: int) -> None:
    """Groups lie inside a stage of a pipeline; 3 does not divide nodes of 4, so that some groups are split over two."""
    size = 24
    for mp, esp, ep in itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 4), (1, 2, 6)):
        if size % (esp * ep):
            continue
        groups, block = Groups(size * pp, per_node, mp=mp, esp=esp, ep=ep, pp=pp), esp * ep
        assert (groups.stage, groups.edp) == (size, size // block)
        members = {
            "mp": [range(first, first + mp) for first in range(0, size, mp)],
            "dp": [range(i, size, mp) for i in range(mp)],
            "esp": [range(first, first + esp) for first in range(0, size, esp)],
            "ep": [range(first + i, first + block, esp) for first in range(0, size, block) for i in range(esp)],
            "edp": [range(i, size, block) for i in range(block)],
        }
        for name, of_name in members.items():
            nodes = [[rank // per_node for rank in each] for each in of_name]
            at = groups.placements[name]
            assert (at.size, at.per_node) == (
                len(of_name[0]),
                max(each.count(node) for each in nodes for node in each),
            ), (groups, name)
            inside = all(len(set(each)) == 1 for each in nodes)
            wanted = () if at.size == 1 else INSIDE if inside else BETWEEN if at.per_node == 1 else BOTH
            assert at.lanes == wanted, (groups, name)


def test_2dh_is_two_tasks_on_two_lanes_and_flat_one_on_both() -> None:
    groups = Groups(16, 4, ep=8)
    flat, two = (layer_work(SHAPE, groups, each).forward.moe for each in ("flat", "2dh"))
    assert [(each.kind, each.lanes) for each in flat.exchange] == [(A2A_IN, BOTH), (A2A_OUT, BOTH)]
    assert [(each.kind, each.lanes) for each in two.exchange] == [
        (A2A_IN_NODE, INSIDE),
        (A2A_IN, BETWEEN),
        (A2A_OUT, BETWEEN),
        (A2A_OUT_NODE, INSIDE),
    ]
    assert {each.size for each in two.exchange} == {flat.ahead[0].size}
    one_per_node = Groups(16, 4, esp=4, ep=4)
    assert layer_work(SHAPE, one_per_node, "2dh") == layer_work(SHAPE, one_per_node, "flat"), "they coincide there"


def test_costs_follow_the_size_of_the_group_by_what_goes_over_the_wire() -> None:
    costs = kind_costs(cluster_of(), Groups(8, 4, mp=2, esp=2, ep=2))
    # Inside a node among 2 instead of 4 ranks: 1/2 of a buffer goes over the wire instead of 3/4.
    for kind in (GATHER, REDUCE, MP_GATHER):
        assert numbers(costs[kind]) == pytest.approx((1.0, 2 / 3))
    assert costs[A2A_IN] == costs[A2A_OUT] == costs[GATHER], "EP strides over ESP: one node"
    # The experts' replicas: one on each of 2 nodes, 1/2 instead of 3/4.
    assert numbers(costs[EXPERT_GRAD]) == pytest.approx((5.0, 8 * 2 / 3))
    # DP: 4 ranks, 2 on each of 2 nodes: a ring of 4 crosses the link once for both ranks of a node.
    assert numbers(costs[GRAD]) == pytest.approx((5.0, 8 / 2))
    assert costs[EXPERT] == LinearCost(0.1, 0.1)


@pytest.mark.parametrize("inside", [0.01, 100.0])
def test_a_sum_over_nodes_goes_in_two_levels_where_links_inside_nodes_are_fast(inside: float) -> None:
    given = {f"intra.{each}": Operation(LinearCost(1.0, inside), 4) for each in _COLLECTIVES}
    costs = kind_costs(cluster_of(**given), Groups(8, 4, mp=2, esp=2, ep=2))
    # Between 2 nodes half of a buffer goes over the link in place of 3/4; inside each it is scattered and gathered.
    two_levels = 7.0, 8 * 2 / 3 / 2 + 2 * inside * 2 / 3
    assert numbers(costs[GRAD]) == pytest.approx(two_levels if inside < 1 else (5.0, 8 / 2))
    without = Cluster("mine", 4, 4, {k: v for k, v in cluster_of().operations.items() if k != "intra.reduce_scatter"})
    assert numbers(kind_costs(without, Groups(8, 4, ep=4))[GRAD]) == pytest.approx((5.0, 8 * 7 / 6 / 4))


def test_an_all_to_all_over_nodes_is_charged_what_leaves_the_node() -> None:
    costs = kind_costs(cluster_of(), Groups(16, 4, ep=16), "2dh")
    assert costs[A2A_IN] == LinearCost(5.0, 8.0)
    assert costs[A2A_IN_NODE] == costs[A2A_OUT_NODE] == LinearCost(1.0, 1.0)
    assert A2A_IN_NODE not in kind_costs(cluster_of(), Groups(16, 4, ep=16))


@pytest.mark.parametrize(
    "groups",
    [Groups(12, 4, mp=3, esp=3, ep=2), Groups(12, 4, esp=3), Groups(12, 8, esp=6), Groups(10, 4, mp=5)],
    ids=str,
)
def test_a_collective_that_crosses_nodes_is_never_free_even_where_groups_and_nodes_do_not_line_up(
    groups: Groups,
) -> None:
    layer, costs = layer_work(SHAPE, groups), kind_costs(cluster_of(), groups)
    moe = layer.forward.moe
    for each in (*layer.forward.before, *moe.collectives, *layer.gradients):
        if Lane.INTER in each.lanes:
            assert costs[each.kind].alpha_ms > 0, each.kind
            assert costs[each.kind].beta_ms > 0, each.kind


def test_an_operation_that_is_missing_is_asked_for_only_by_groups_that_need_it() -> None:
    without = dict(cluster_of().operations)
    del without["inter.all_to_all"]
    cluster = Cluster("mine", 4, 4, without)
    assert kind_costs(cluster, Groups(4, 4, ep=4))[A2A_IN] == LinearCost(1.0, 1.0)
    with pytest.raises(
        ValueError,
        match=r"cluster mine: operations.inter.all_to_all is missing, but the EP group \(16 ranks, at most 4 in a "
        r"node\) needs it: the file has inter.all_reduce, ",
    ):
        kind_costs(cluster, Groups(16, 4, ep=16))
    with pytest.raises(ValueError, match=r"operations.gemm is missing, but every layer needs it: the file has none"):
        kind_costs(Cluster("mine", 1, 1, {}), Groups(1, 1))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"world": 0}, "world = 0: must be a whole number of at least 1"),
        ({"gpus_per_node": -1}, "gpus_per_node = -1: must be"),
        ({"mp": 2.0}, "mp = 2.0: must be a whole number"),
        ({"esp": True}, "esp = True: must be a whole number"),
        ({"ep": "2"}, "ep = 2: must be a whole number"),
        ({"dp": 0}, "dp = 0: must be a whole number"),
        ({"pp": float("nan")}, "pp = nan: must be a whole number"),
        ({"pp": 3}, "pp = 3: must divide the world size 8"),
        ({"mp": 3}, "mp = 3 and any dp do not multiply to the 8 ranks of the world"),
        ({"mp": 2, "dp": 2}, "mp = 2 and dp = 2 do not multiply to the 8 ranks of the world"),
        ({"mp": 8, "pp": 2}, "mp = 8 and any dp do not multiply to the 4 ranks of a pipeline stage"),
        ({"ep": 3}, "ep_size = 3 times expert_tensor_parallel_size = 1 = 3: must divide the 8 ranks of the world"),
        ({"ep": 4, "esp": 4}, "ep_size = 4 times expert_tensor_parallel_size = 4 = 16: must divide the 8 ranks"),
        (
            {"ep": 8, "pp": 2},
            "ep_size = 8 times expert_tensor_parallel_size = 1 = 8: must divide the 4 ranks of a pipeline stage",
        ),
    ],
)
def test_group_sizes_that_cannot_be_are_refused_by_field_and_value(sizes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Groups(**{"world": 8, "gpus_per_node": 4} | sizes)


def every_choice(num_experts: int, k: int, groups: int = 1, of_groups: int = 1) -> np.ndarray:
    """All that a router may choose, each as often as any other."""
    size = num_experts // groups
    kept = itertools.combinations(range(groups), of_groups)
    return np.array(
        [
            chosen
            for each in kept
            for chosen in itertools.combinations([g * size + e for g in each for e in range(size)], k)
        ]
    )


@pytest.mark.parametrize(
    ("num_experts", "k", "nodes", "per_node", "groups", "of_groups"),
    [(8, 3, 2, 2, 1, 1), (12, 4, 2, 3, 1, 1), (8, 1, 4, 2, 1, 1), (12, 3, 2, 2, 4, 2), (16, 4, 2, 2, 8, 3)],
)
def test_expected_crossings_are_the_mean_over_every_choice(
    num_experts: int, k: int, nodes: int, per_node: int, groups: int, of_groups: int
) -> None:
    found = expected_fanout(num_experts, k, nodes, per_node, groups, of_groups)
    counted = counted_fanout(every_choice(num_experts, k, groups, of_groups), num_experts, nodes, per_node)
    assert found.nodes == pytest.approx(counted.nodes)
    assert found.ranks == pytest.approx(counted.ranks)


def test_routing_by_groups_crosses_no_more_than_its_groups() -> None:
    assert expected_fanout(256, 8, 8, 8, 8, 4).nodes <= 4


def test_dropped_choices_cross_nowhere() -> None:
    found = counted_fanout(np.array([[0, 8], [-1, 8], [0, 7]]), 8, 2, 2)
    assert (found.nodes, found.ranks) == (1.0, 1.0)
    assert counted_fanout(np.empty((0, 2), dtype=int), 8, 2, 2).nodes == 0.0


@pytest.mark.parametrize(("num_experts", "k", "groups", "of_groups"), [(9, 2, 1, 1), (8, 5, 2, 1), (8, 2, 2, 3)])
def test_what_does_not_fit_is_refused(num_experts: int, k: int, groups: int, of_groups: int) -> None:
    with pytest.raises(ValueError, match="must"):
        expected_fanout(num_experts, k, 2, 2, groups, of_groups)


def test_a_layer_sends_each_token_once_to_a_node_and_copies_it_inside() -> None:
    shape = Shape(B=1, L=64, M=32, H=16, E=16, K=8, capacity_factor=None, heads=1, dtype_bytes=2)
    groups = Groups(8, 4, ep=8)
    assert can_deduplicate(groups)
    moe = layer_work(shape, groups, "node_deduplicated").forward.moe
    expected = expected_fanout(16, 8, 2, 4)
    sizes = {each.kind: (each.lanes, each.size) for each in moe.collectives}
    row_bytes = 64 * 32 * 2
    assert sizes[A2A_IN] == sizes[A2A_OUT] == ((Lane.INTER,), pytest.approx(row_bytes * expected.nodes))
    assert sizes[SPREAD] == sizes[COLLECT] == ((Lane.INTRA,), pytest.approx(row_bytes * expected.ranks))


@pytest.mark.parametrize("groups", [Groups(8, 8, ep=8), Groups(4, 1, ep=4), Groups(8, 4, ep=2, esp=4)])
def test_elsewhere_a_layer_is_the_flat_one(groups: Groups) -> None:
    shape = Shape(B=1, L=64, M=32, H=16, E=16, K=8, capacity_factor=None, heads=1)
    assert not can_deduplicate(groups)
    assert layer_work(shape, groups, "node_deduplicated") == layer_work(shape, groups, "flat")
