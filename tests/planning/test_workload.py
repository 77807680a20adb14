# SPDX-License-Identifier: Apache-2.0
"""Bytes and operations of every task, against numbers worked out by hand for odd and prime shapes."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from ds_fsmoe.planning.cluster import Cluster, Operation
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.schedule import (
    A2A_IN,
    A2A_OUT,
    ATTENTION,
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
    Lane,
)
from ds_fsmoe.planning.workload import BlockWork, Shape, Work, kind_costs, layer_work

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
    assert sizes(layer.forward) == pytest.approx(
        {
            MP_GATHER: 15 * 14,
            ATTENTION: 2 * (15 * 4 * 49 + 2 * 3 * 25 * 7) / 3,
            SOFTMAX: 3 * 7 * 25 / 3,
            MP_REDUCE: 15 * 14,
            ROUTE: 2 * 5 * 7 * 3,
            ORDER: (3 + 1) * 5 * 14,
            A2A_IN: 5 * 3 * 14,
            GATHER: 2 * 5 * 3 * 14,
            EXPERT: 30 * (2 * 7 * 11) * 2,
            REDUCE: 2 * 5 * 3 * 14,
            A2A_OUT: 5 * 3 * 14,
            RESTORE: (3 + 1) * 5 * 14,
        },
        rel=1e-14,
    )
    assert layer.forward.moe.expert.launches == 2
    # Four 7 x 7 projections over 3 ranks, and a gate of 7 x 3 that every rank holds: 65.33 + 21 = 86.33 elements.
    # The gate comes first, with what is left of the projections, of which each has 16 whole elements on a rank.
    tensors_bytes = (22 * 2, 16 * 2, 16 * 2, 16 * 2, 16 * 2)
    assert layer.gradients == (type(layer.gradients[0])(GRAD, (Lane.INTER,), 86 * 2, tensors_bytes),)


def test_an_odd_layer_with_replicated_experts_gated_experts_and_few_key_heads_by_hand() -> None:
    shape = Shape(B=1, L=11, M=9, H=15, E=10, K=3, capacity_factor=None, ffn="mixtral", heads=3, kv_heads=1)
    layer = layer_work(shape, Groups(world=30, gpus_per_node=3, mp=1, esp=3, ep=5))
    assert shape.F == 3
    assert shape.attention_weights == pytest.approx((2 + 2 / 3) * 81)
    assert sizes(layer.forward) == pytest.approx(
        {
            ATTENTION: 2 * (11 * 216 + 2 * 121 * 9),
            SOFTMAX: 3 * 121,
            ROUTE: 2 * 11 * 9 * 10,
            ORDER: 4 * 11 * 36,
            A2A_IN: 33 * 36,
            GATHER: 3 * 33 * 36,
            EXPERT: 2 * 3 * (3 * 33) * 9 * 5,
            REDUCE: 3 * 33 * 36,
            A2A_OUT: 33 * 36,
            RESTORE: 4 * 11 * 36,
        },
        rel=1e-14,
    )
    assert layer.forward.moe.expert.launches == 3 * 2, "three products for each of two experts"
    dense, expert = layer.gradients
    assert (dense.kind, dense.size_bytes) == (GRAD, (216 + 90) * 4)
    # Two experts of three 9 x 15 matrices, a third of the width each.
    assert (expert.kind, expert.size_bytes) == (EXPERT_GRAD, 2 * 3 * 9 * 5 * 4)


def test_the_backward_does_twice_the_computation_and_the_same_traffic() -> None:
    layer = layer_work(ODD, ODD_GROUPS)
    forward, backward = ({each.kind: each for each in works(block)} for block in (layer.forward, layer.backward))
    assert set(forward) == set(backward)
    for kind, work in forward.items():
        twice = kind in (EXPERT, ATTENTION, SOFTMAX)
        assert backward[kind].size == work.size * (2 if twice else 1), kind
        assert backward[kind].launches == work.launches * (2 if twice else 1), kind
        assert backward[kind].lanes == work.lanes


def test_the_backward_meets_the_operations_in_the_opposite_order() -> None:
    layer = layer_work(ODD, ODD_GROUPS)
    assert [each.kind for each in layer.forward.before] == [MP_GATHER, ATTENTION, SOFTMAX, MP_REDUCE, ROUTE, ORDER]
    assert [each.kind for each in layer.forward.after] == [RESTORE]
    assert [each.kind for each in layer.backward.before] == [RESTORE]
    # What was a reduce-scatter is an all-gather now, and comes first again.
    assert [each.kind for each in layer.backward.after] == [ORDER, ROUTE, MP_GATHER, SOFTMAX, ATTENTION, MP_REDUCE]


BIG = Shape(B=2, L=24, M=8, H=48, E=24, K=2, capacity_factor=1.25, heads=4)


@pytest.mark.parametrize("dtype_bytes", [2, 4])
def test_group_sizes_and_the_bytes_of_an_element_are_independent_of_one_another(dtype_bytes: int) -> None:
    shape = dataclasses.replace(BIG, dtype_bytes=dtype_bytes)
    for mp, ep, esp in itertools.product((1, 2, 3, 4, 6), (1, 2, 3, 4), (1, 2, 3, 4, 6)):
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
    def kinds(**groups: int) -> list[str]:
        return [each.kind for each in layer_work(BIG, Groups(world=24, gpus_per_node=8, **groups)).gradients]

    assert kinds(mp=1, ep=24) == [GRAD]
    assert kinds(mp=24, ep=24) == []
    assert kinds(mp=24, ep=8) == [EXPERT_GRAD]
    assert kinds(mp=4, ep=4, esp=3) == [GRAD, EXPERT_GRAD]


def test_the_fullest_rank_sends_and_computes_more_and_orders_no_more() -> None:
    even = dataclasses.replace(BIG, capacity_factor=None)
    groups = Groups(world=8, gpus_per_node=2, ep=4, esp=2)
    one, other = (layer_work(each, groups) for each in (even, dataclasses.replace(even, imbalance=1.5)))
    for half in ("forward", "backward"):
        before, after = sizes(getattr(one, half)), sizes(getattr(other, half))
        grown = {kind for kind in before if after[kind] != before[kind]}
        assert grown <= {A2A_IN, A2A_OUT, GATHER, REDUCE, EXPERT}
        assert {A2A_IN, A2A_OUT, GATHER, REDUCE, EXPERT} <= grown
        for kind in grown:
            assert after[kind] == pytest.approx(1.5 * before[kind]), kind


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"B": 0}, "B = 0: must be a whole number of at least 1"),
        ({"L": 2.5}, "L = 2.5: must be a whole number"),
        ({"M": True}, "M = True: must be a whole number"),
        ({"H": "4096"}, "H = 4096: must be a whole number"),
        ({"E": -8}, "E = -8: must be a whole number"),
        ({"K": 4, "E": 3}, "K = 4: must be at most the number of experts, E = 3"),
        ({"capacity_factor": 0.0}, r"capacity_factor = 0.0: must be above 0, or none"),
        ({"capacity_factor": float("nan")}, "capacity_factor = nan: must be above 0"),
        ({"capacity_factor": float("inf")}, "capacity_factor = inf: must be above 0"),
        ({"capacity_factor": "1.2"}, "capacity_factor = "),
        ({"ffn": "mixtal"}, "ffn = 'mixtal': the choices are gpt, mixtral"),
        ({"heads": 7, "kv_heads": 2}, "kv_heads = 2: must divide the number of heads, 7"),
        ({"heads": 8, "kv_heads": 0}, "kv_heads = 0: must divide"),
        ({"heads": 8, "kv_heads": -4}, "kv_heads = -4: must divide"),
        ({"imbalance": 0.5}, "imbalance = 0.5: must be a number of at least 1"),
        ({"imbalance": float("nan")}, "imbalance = nan: must be a number of at least 1"),
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
