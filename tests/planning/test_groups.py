# SPDX-License-Identifier: Apache-2.0
"""Which links a group crosses, what that costs, and group sizes that cannot be."""

from __future__ import annotations

import pytest

from ds_fsmoe.planning.cluster import Cluster, Operation
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.schedule import (
    A2A_IN,
    A2A_IN_NODE,
    A2A_OUT,
    A2A_OUT_NODE,
    EXPERT,
    EXPERT_GRAD,
    GATHER,
    GRAD,
    MP_GATHER,
    REDUCE,
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


def lanes(groups: Groups) -> dict[str, tuple[Lane, ...]]:
    return {name: at.lanes for name, at in groups.placements.items()}


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (Groups(16, 4, mp=4, esp=4, ep=4), {"mp": INSIDE, "dp": BETWEEN, "esp": INSIDE, "ep": BETWEEN, "edp": ()}),
        (Groups(16, 4, mp=2, esp=1, ep=4), {"mp": INSIDE, "dp": BOTH, "esp": (), "ep": INSIDE, "edp": BETWEEN}),
        (Groups(16, 4, mp=1, esp=2, ep=8), {"mp": (), "dp": BOTH, "esp": INSIDE, "ep": BOTH, "edp": ()}),
        (Groups(16, 4, mp=8, esp=8, ep=1), {"mp": BOTH, "dp": BETWEEN, "esp": BOTH, "ep": (), "edp": BETWEEN}),
        (Groups(4, 4, mp=2, esp=2, ep=2), {"mp": INSIDE, "dp": INSIDE, "esp": INSIDE, "ep": INSIDE, "edp": ()}),
        (Groups(4, 1, mp=1, esp=1, ep=2), {"mp": (), "dp": BETWEEN, "esp": (), "ep": BETWEEN, "edp": BETWEEN}),
        (Groups(1, 8), {"mp": (), "dp": (), "esp": (), "ep": (), "edp": ()}),
        # 3 does not divide 4: the second group is split over two nodes.
        (Groups(12, 4, mp=3, esp=3, ep=2), {"mp": BOTH, "dp": BOTH, "esp": BOTH, "ep": BOTH, "edp": BETWEEN}),
    ],
)
def test_a_group_is_on_the_links_that_its_ranks_cross(groups: Groups, expected: dict) -> None:
    assert lanes(groups) == expected


def test_placements_are_those_of_ranks_looked_up_one_by_one() -> None:
    groups = Groups(24, 4, mp=3, esp=2, ep=3)
    ranks = {
        "mp": [range(first, first + 3) for first in range(0, 24, 3)],
        "esp": [range(first, first + 2) for first in range(0, 24, 2)],
        "ep": [range(block + i, block + 6, 2) for block in range(0, 24, 6) for i in range(2)],
        "edp": [range(i, 24, 6) for i in range(6)],
        "dp": [range(i, 24, 3) for i in range(3)],
    }
    for name, members in ranks.items():
        nodes = [[rank // 4 for rank in each] for each in members]
        at = groups.placements[name]
        assert at.size == len(members[0])
        assert at.per_node == max(each.count(node) for each in nodes for node in each)
        assert (at.lanes == INSIDE) == all(len(set(each)) == 1 for each in nodes)
        assert (at.lanes == BETWEEN) == (at.per_node == 1)


def test_with_pipeline_stages_groups_stay_inside_a_stage() -> None:
    groups = Groups(16, 4, mp=4, esp=4, ep=2, pp=2)
    assert (groups.stage, groups.edp) == (8, 1)
    assert groups.placements["dp"].size == 2
    assert lanes(groups)["ep"] == BETWEEN


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
    # DP: 4 ranks, 2 on each of 2 nodes: a ring crosses the link once for both.
    assert numbers(costs[GRAD]) == pytest.approx((5.0, 8 * 2 / 3 / 2))
    assert costs[EXPERT] == LinearCost(0.1, 0.1)


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
