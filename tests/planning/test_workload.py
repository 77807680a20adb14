# SPDX-License-Identifier: Apache-2.0
"""Bytes and operations of every task, against numbers worked out by hand for odd and prime shapes; which links a group
crosses, how often tokens do, what that costs, and group sizes that cannot be."""

from __future__ import annotations

import dataclasses
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
    ATTENTION,
    COLLECT,
    DENSE,
    EXPERT,
    EXPERT_GRAD,
    GATHER,
    GRAD,
    MP_GATHER,
    MP_REDUCE,
    ORDER,
    REDUCE,
    RESTORE,
    ROUTE,
    SOFTMAX,
    SPREAD,
    Lane,
)
from ds_fsmoe.planning.workload import BlockWork, Gradient, Shape, Work, kind_costs, layer_work
from tests.covering import covering

ODD = Shape(B=3, L=5, M=7, H=22, E=3, K=2, capacity_factor=1.5, ffn="gpt", heads=7, dtype_bytes=2)
ODD_GROUPS = Groups(world=6, gpus_per_node=3, mp=3, esp=2, ep=3)


def works(block: BlockWork) -> list[Work]:
    moe = block.moe
    return [*block.before, *moe.stages, *block.after]


def sizes(block: BlockWork) -> dict[str, float]:
    return {each.kind: each.size for each in works(block)}


def test_an_odd_layer_by_hand() -> None:
    """15 tokens in an MP group of 3: 5 each, sent as F = 3 copies of 14 bytes; 2 shards of 11 of the experts' width."""
    layer = layer_work(ODD, ODD_GROUPS)
    sent = {A2A_IN: 5 * 3 * 14, GATHER: 2 * 5 * 3 * 14, REDUCE: 2 * 5 * 3 * 14, A2A_OUT: 5 * 3 * 14}
    computed = {ATTENTION: 2 * (15 * 4 * 49 + 2 * 3 * 25 * 7) / 3, SOFTMAX: 3 * 7 * 25 / 3, ROUTE: 2 * 5 * 7 * 3}
    copied = {MP_GATHER: 15 * 14, MP_REDUCE: 15 * 14, ORDER: (3 + 1) * 5 * 14, RESTORE: (3 + 1) * 5 * 14}
    of_experts = {EXPERT: 30 * (2 * 7 * 11) * 2}
    assert sizes(layer.forward) == pytest.approx(sent | computed | copied | of_experts, rel=1e-14)
    assert layer.forward.moe.expert.launches == 2
    # Four 7 x 7 projections over 3 ranks, and a gate of 7 x 3 that every rank holds: 65.33 + 21 = 86.33 elements.
    # The gate comes first, with what is left of the projections, of which each has 16 whole elements on a rank.
    tensors_bytes = (22 * 2, 16 * 2, 16 * 2, 16 * 2, 16 * 2)
    assert layer.gradients == (Gradient(GRAD, (Lane.INTER,), 86 * 2, tensors_bytes),)


def test_an_odd_layer_with_replicated_experts_gated_experts_and_few_key_heads_by_hand() -> None:
    shape = Shape(B=1, L=11, M=9, H=15, E=10, K=3, capacity_factor=None, ffn="mixtral", heads=3, kv_heads=1)
    layer = layer_work(shape, Groups(world=30, gpus_per_node=3, mp=1, esp=3, ep=5))
    assert shape.F == 3
    assert shape.attention_weights == pytest.approx((2 + 2 / 3) * 81)
    sent = {A2A_IN: 33 * 36, GATHER: 3 * 33 * 36, REDUCE: 3 * 33 * 36, A2A_OUT: 33 * 36}
    computed = {ATTENTION: 2 * (11 * 216 + 2 * 121 * 9), SOFTMAX: 3 * 121, ROUTE: 2 * 11 * 9 * 10}
    of_experts = {ORDER: 4 * 11 * 36, EXPERT: 2 * 3 * (3 * 33) * 9 * 5, RESTORE: 4 * 11 * 36}
    assert sizes(layer.forward) == pytest.approx(sent | computed | of_experts, rel=1e-14)
    assert layer.forward.moe.expert.launches == 3 * 2, "three products for each of two experts"
    dense, expert = layer.gradients
    assert (dense.kind, dense.size_bytes) == (GRAD, (216 + 90) * 4)
    # Two experts of three 9 x 15 matrices, a third of the width each.
    assert (expert.kind, expert.size_bytes) == (EXPERT_GRAD, 2 * 3 * 9 * 5 * 4)
    assert expert.tensors_bytes == (9 * 5 * 4,) * 6


def test_the_backward_does_twice_the_computation_and_the_same_traffic_in_the_opposite_order() -> None:
    layer = layer_work(ODD, ODD_GROUPS)
    forward, backward = ({each.kind: each for each in works(block)} for block in (layer.forward, layer.backward))
    assert set(forward) == set(backward)
    for kind, work in forward.items():
        twice = 2 if kind in (EXPERT, ATTENTION, SOFTMAX) else 1
        assert (backward[kind].size, backward[kind].launches) == (work.size * twice, work.launches * twice), kind
        assert backward[kind].lanes == work.lanes
    assert [each.kind for each in layer.forward.before] == [MP_GATHER, ATTENTION, SOFTMAX, MP_REDUCE, ROUTE, ORDER]
    assert [each.kind for each in layer.forward.after] == [each.kind for each in layer.backward.before] == [RESTORE]
    # What was a reduce-scatter is an all-gather now, and comes first again.
    assert [each.kind for each in layer.backward.after] == [ORDER, ROUTE, MP_GATHER, SOFTMAX, ATTENTION, MP_REDUCE]


BIG = Shape(B=2, L=24, M=8, H=48, E=24, K=2, capacity_factor=1.25, heads=4)


@pytest.mark.parametrize("dtype_bytes", [2, 4])
def test_group_sizes_and_the_bytes_of_an_element_are_independent_of_one_another(dtype_bytes: int) -> None:
    shape = dataclasses.replace(BIG, dtype_bytes=dtype_bytes)
    for mp, ep, esp in covering((1, 2, 3, 4, 6), (1, 2, 3, 4), (1, 2, 3, 4, 6)):
        layer = layer_work(shape, Groups(world=288, gpus_per_node=8, mp=mp, esp=esp, ep=ep))
        size, tokens, row = sizes(layer.forward), 48 / mp, 8 * dtype_bytes
        assert size[EXPERT] == pytest.approx(2 * 2 * 2.5 * tokens * 8 * 48), "however the experts are spread"
        assert size[ATTENTION] == pytest.approx(2 * (48 * 4 * 64 + 2 * 2 * 24**2 * 8) / mp)
        # A group of one leaves no task.
        assert size.get(A2A_IN) == (pytest.approx(2.5 * tokens * row) if ep > 1 else None)
        assert size.get(GATHER) == size.get(REDUCE) == (pytest.approx(esp * 2.5 * tokens * row) if esp > 1 else None)
        assert size.get(MP_GATHER) == size.get(MP_REDUCE) == (48 * row if mp > 1 else None)
        assert layer.forward.moe.expert.launches == 2 * 24 // ep
        gradients = {each.kind: each.size_bytes for each in layer.gradients}
        assert gradients[GRAD] == round(256 / mp + 192) * dtype_bytes
        assert gradients[EXPERT_GRAD] == 24 // ep * 2 * 8 * 48 // esp * dtype_bytes
    assert layer_work(shape, Groups(world=1, gpus_per_node=8)).gradients == ()


def test_gradients_are_summed_only_where_there_are_replicas() -> None:
    found = ((1, 24, 1, [GRAD]), (24, 24, 1, []), (24, 8, 1, [EXPERT_GRAD]), (4, 4, 3, [GRAD, EXPERT_GRAD]))
    for mp, ep, esp, kinds in found:
        layer = layer_work(BIG, Groups(world=24, gpus_per_node=8, mp=mp, ep=ep, esp=esp))
        assert [each.kind for each in layer.gradients] == kinds


def test_the_fullest_rank_sends_and_computes_more_and_orders_no_more() -> None:
    even = dataclasses.replace(BIG, capacity_factor=None)
    groups = Groups(world=8, gpus_per_node=2, ep=4, esp=2)
    one, other = (layer_work(each, groups) for each in (even, dataclasses.replace(even, imbalance=1.5)))
    for half in ("forward", "backward"):
        before, after = sizes(getattr(one, half)), sizes(getattr(other, half))
        grown = {A2A_IN, A2A_OUT, GATHER, REDUCE, EXPERT}
        assert after == pytest.approx({kind: (1.5 if kind in grown else 1) * size for kind, size in before.items()})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"B": 0}, "B = 0: must be a whole number of at least 1"),
        ({"L": 2.5}, "L = 2.5: must be a whole number"),
        ({"K": 4, "E": 3}, "K = 4: must be at most the number of experts, E = 3"),
        ({"capacity_factor": 0.0}, r"capacity_factor = 0.0: must be above 0, or none"),
        ({"capacity_factor": float("nan")}, "capacity_factor = nan: must be above 0"),
        ({"ffn": "mixtal"}, "ffn = 'mixtal': the choices are gpt, mixtral"),
        ({"heads": 7, "kv_heads": 2}, "kv_heads = 2: must divide the number of heads, 7"),
        ({"imbalance": 0.5}, "imbalance = 0.5: must be a number of at least 1"),
        ({"imbalance": 1.5, "capacity_factor": 1.2}, "imbalance = 1.5: must be 1 with a capacity factor"),
    ],
)
def test_an_impossible_shape_is_refused_by_field_and_value(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(BIG, **change)


def test_experts_that_do_not_divide_over_the_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="ep_size = 2: must divide the 3 experts"):
        layer_work(ODD, Groups(world=2, gpus_per_node=2, ep=2))
    with pytest.raises(ValueError, match="expert_tensor_parallel_size = 3: must divide the hidden width, 22"):
        layer_work(ODD, Groups(world=3, gpus_per_node=3, esp=3))
    with pytest.raises(ValueError, match="alltoall = '3dh': the choices are flat, 2dh"):
        layer_work(ODD, Groups(world=3, gpus_per_node=3, ep=3), "3dh")


def test_a_flat_all_to_all_over_nodes_starts_a_message_to_every_rank() -> None:
    """Measured among 4 nodes with 0.5 ms; every further rank adds 0.25 ms, and every further node to what goes by
    nodes."""
    grows = Operation(LinearCost(0.5, 1e-6), ranks=4, alpha_ms_per_rank=0.25)
    inside = Operation(LinearCost(0.1, 1e-8), ranks=3)
    names = (*("gemm", "attention", "softmax", "routing", "order"), "intra.all_to_all", "inter.all_reduce")
    cluster = Cluster("grown", 4, 3, dict.fromkeys(names, inside) | {"inter.all_to_all": grows})
    groups = Groups(world=18, gpus_per_node=3, ep=18)
    flat, once = (kind_costs(cluster, groups, each)[A2A_IN].alpha_ms for each in ("flat", "node_deduplicated"))
    assert flat == pytest.approx(0.5 + 0.25 * (18 - 4))
    assert once == pytest.approx(0.5 + 0.25 * (6 - 4))
    assert kind_costs(cluster, groups)[DENSE] == inside.cost


# ---- which links groups cross, and how often tokens do


INSIDE, BETWEEN, BOTH = (Lane.INTRA,), (Lane.INTER,), (Lane.INTER, Lane.INTRA)
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
            nodes, at = [[rank // per_node for rank in each] for each in of_name], groups.placements[name]
            assert at.size == len(of_name[0]), (groups, name)
            assert at.per_node == max(each.count(node) for each in nodes for node in each), (groups, name)
            inside = all(len(set(each)) == 1 for each in nodes)
            wanted = () if at.size == 1 else INSIDE if inside else BETWEEN if at.per_node == 1 else BOTH
            assert at.lanes == wanted, (groups, name)


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
    over_all = Groups(16, 4, ep=16)
    costs = kind_costs(cluster_of(), over_all, "2dh")
    assert costs[A2A_IN] == LinearCost(5.0, 8.0)
    assert costs[A2A_IN_NODE] == costs[A2A_OUT_NODE] == LinearCost(1.0, 1.0)
    assert A2A_IN_NODE not in kind_costs(cluster_of(), over_all)


@pytest.mark.parametrize("inside", [0.01, 100.0])
def test_a_sum_over_nodes_goes_in_two_levels_where_links_inside_nodes_are_fast(inside: float) -> None:
    given = {f"intra.{each}": Operation(LinearCost(1.0, inside), 4) for each in _COLLECTIVES}
    costs = kind_costs(cluster_of(**given), Groups(8, 4, mp=2, esp=2, ep=2))
    # Between 2 nodes half of a buffer goes over the link in place of 3/4; inside each it is scattered and gathered.
    two_levels = 7.0, 8 * 2 / 3 / 2 + 2 * inside * 2 / 3
    assert numbers(costs[GRAD]) == pytest.approx(two_levels if inside < 1 else (5.0, 8 / 2))
    without = Cluster("mine", 4, 4, {k: v for k, v in cluster_of().operations.items() if k != "intra.reduce_scatter"})
    assert numbers(kind_costs(without, Groups(8, 4, ep=4))[GRAD]) == pytest.approx((5.0, 8 * 7 / 6 / 4))


def test_an_operation_that_is_missing_is_asked_for_only_by_groups_that_need_it() -> None:
    without = {name: each for name, each in cluster_of().operations.items() if name != "inter.all_to_all"}
    cluster = Cluster("mine", 4, 4, without)
    assert kind_costs(cluster, Groups(4, 4, ep=4))[A2A_IN] == LinearCost(1.0, 1.0)
    missing = (
        r"cluster mine: operations.inter.all_to_all is missing, but the EP group \(16 ranks, at most 4 in a node\)"
    )
    with pytest.raises(ValueError, match=f"{missing} needs it: the file has inter.all_reduce, "):
        kind_costs(cluster, Groups(16, 4, ep=16))
    with pytest.raises(ValueError, match=r"operations.gemm is missing, but every layer needs it: the file has none"):
        kind_costs(Cluster("mine", 1, 1, {}), Groups(1, 1))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"world": 0}, "world = 0: must be a whole number of at least 1"),
        ({"esp": True}, "esp = True: must be a whole number"),
        ({"pp": float("nan")}, "pp = nan: must be a whole number"),
        ({"pp": 3}, "pp = 3: must divide the world size 8"),
        ({"mp": 2, "dp": 2}, "mp = 2 and dp = 2 do not multiply to the 8 ranks of the world"),
        ({"mp": 8, "pp": 2}, "mp = 8 and any dp do not multiply to the 4 ranks of a pipeline stage"),
        ({"ep": 4, "esp": 4}, "ep_size = 4 times expert_tensor_parallel_size = 4 = 16: must divide the 8 ranks"),
        ({"ep": 8, "pp": 2}, "ep_size = 8 times .* = 8: must divide the 4 ranks of a pipeline stage"),
    ],
)
def test_group_sizes_that_cannot_be_are_refused_by_field_and_value(sizes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Groups(**{"world": 8, "gpus_per_node": 4} | sizes)


def every_choice(num_experts: int, k: int, groups: int = 1, of_groups: int = 1) -> np.ndarray:
    """All that a router may choose, each as often as any other."""
    of_group = np.arange(num_experts).reshape(groups, -1)
    kept = (of_group[list(each)].reshape(-1) for each in itertools.combinations(range(groups), of_groups))
    return np.array([chosen for experts in kept for chosen in itertools.combinations(experts, k)])


@pytest.mark.parametrize(
    ("num_experts", "k", "nodes", "per_node", "groups", "of_groups"),
    [(12, 4, 2, 3, 1, 1), (8, 1, 4, 2, 1, 1), (12, 3, 2, 2, 4, 2), (16, 4, 2, 2, 8, 3)],
)
def test_expected_crossings_are_the_mean_over_every_choice_and_dropped_ones_cross_nowhere(
    num_experts: int, k: int, nodes: int, per_node: int, groups: int, of_groups: int
) -> None:
    found = expected_fanout(num_experts, k, nodes, per_node, groups, of_groups)
    chosen = every_choice(num_experts, k, groups, of_groups)
    for each in (chosen, np.hstack([chosen, np.full_like(chosen, num_experts), np.full_like(chosen, -1)])):
        counted = counted_fanout(each, num_experts, nodes, per_node)
        assert (found.nodes, found.ranks) == pytest.approx((counted.nodes, counted.ranks))
    assert counted_fanout(chosen[:0], num_experts, nodes, per_node).nodes == 0.0
    for wrong in ((9, 2, 2, 2, 1, 1), (8, 5, 2, 2, 2, 1), (8, 2, 2, 2, 2, 3)):
        with pytest.raises(ValueError, match="must"):
            expected_fanout(*wrong)


def test_a_layer_sends_each_token_once_to_a_node_and_copies_it_inside_and_elsewhere_is_the_flat_one() -> None:
    shape = Shape(B=1, L=64, M=32, H=16, E=16, K=8, capacity_factor=None, heads=1, dtype_bytes=2)
    groups = Groups(8, 4, ep=8)
    assert can_deduplicate(groups)
    expected, row_bytes = expected_fanout(16, 8, 2, 4), 64 * 32 * 2
    moe = layer_work(shape, groups, "node_deduplicated").forward.moe
    sizes = {each.kind: (each.lanes, each.size) for each in moe.collectives}
    assert sizes[A2A_IN] == sizes[A2A_OUT] == (BETWEEN, pytest.approx(row_bytes * expected.nodes))
    assert sizes[SPREAD] == sizes[COLLECT] == (INSIDE, pytest.approx(row_bytes * expected.ranks))
    for other in (Groups(8, 8, ep=8), Groups(4, 1, ep=4), Groups(8, 4, ep=2, esp=4)):
        assert not can_deduplicate(other)
        assert layer_work(shape, other, "node_deduplicated") == layer_work(shape, other, "flat")
    # Where a node has one rank of a group, an all-to-all in two steps is the flat one too.
    one_per_node = Groups(16, 4, esp=4, ep=4)
    assert layer_work(BIG, one_per_node, "2dh") == layer_work(BIG, one_per_node, "flat")
