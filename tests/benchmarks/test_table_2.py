# SPDX-License-Identifier: Apache-2.0
"""The paper's own setting: single operations against its table 2 (PAPER.md, section 6), with what each is off by."""

from __future__ import annotations

import pytest

from benchmarks.reporting.table_2 import COLUMNS, COPIES, TABLE_2
from ds_fsmoe.planning.cluster import load_cluster
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.schedule import (
    A2A_IN,
    A2A_OUT,
    ATTENTION,
    EXPERT,
    GATHER,
    GRAD,
    MP_GATHER,
    MP_REDUCE,
    ORDER,
    REDUCE,
    RESTORE,
    ROUTE,
    SOFTMAX,
)
from ds_fsmoe.planning.workload import Shape, kind_costs, layer_work

TOLERANCE = {
    # One line through two models: collectives come out closely, experts of different shapes less so (PAPER.md: the
    # paper's own printed line is a third off). The all-reduce on A "looks computed, not measured".
    "a": {
        "a2a": 0.08,
        "all_reduce": 0.16,
        "all_gather": 0.07,
        "reduce_scatter": 0.05,
        "experts": 0.30,
        "routing": 0.01,
        "order": 0.41,
        "attention": 0.15,
    },
    # Order and routing are constants of 0.3 and 0.1 ms; the one large model on B has 1.2 and 0.2.
    "b": {
        "a2a": 0.09,
        "all_reduce": 0.06,
        "all_gather": 0.02,
        "reduce_scatter": 0.05,
        "experts": 0.05,
        "routing": 0.51,
        "order": 0.76,
        "attention": 0.10,
    },
}
# Of what the lines that the paper prints give, for its GPT and its Mixtral.
OFF_AS_PRINTED = {
    "a": {
        "a2a": (0.13, -0.02),
        "all_reduce": (0.31, 0.0),
        "all_gather": (0.14, 0.0),
        "reduce_scatter": (0.0, -0.08),
        "experts": (-0.35, 0.06),
        "attention": (0.11, -0.08),
    },
    "b": {
        "a2a": (-0.11, -0.155),
        "all_reduce": (-0.14, -0.21),
        "all_gather": (-0.03, -0.035),
        "reduce_scatter": (-0.03, -0.075),
        "experts": (0.38, 0.30),
        "attention": (-0.04, 0.065),
    },
}
GROUPS = {"a": Groups(48, 8, mp=8, esp=8, ep=6), "b": Groups(32, 4, mp=4, esp=4, ep=8)}


def operations_ms(testbed: str, ffn: str, phase: str, cluster_name: str) -> dict[str, float]:
    groups = GROUPS[testbed]
    M, H, heads, kv_heads = {"gpt": (1600, 6400, 25, 25), "mixtral": (4096, 14336, 32, 8)}[ffn]
    layer = layer_work(Shape(4, 1024, M, H, groups.ep, 2, COPIES[testbed] / 2, ffn, heads, kv_heads), groups)
    costs = kind_costs(load_cluster(cluster_name), groups)
    block = getattr(layer, phase)
    moe = block.moe
    spent: dict[str, float] = {}
    for each in (*block.before, *moe.stages, *block.after):
        spent[each.kind] = spent.get(each.kind, 0.0) + costs[each.kind].ms(each.size, each.launches)
    grads = {each.kind: costs[each.kind].ms(each.size_bytes) for each in layer.gradients}
    assert set(grads) == {GRAD}
    parts = (
        *((A2A_IN, A2A_OUT), (), (GATHER, MP_GATHER), (REDUCE, MP_REDUCE), (EXPERT,), (ROUTE,), (ORDER, RESTORE)),
        (ATTENTION, SOFTMAX),
    )
    result = {name: sum(spent[kind] for kind in kinds) for name, kinds in zip(COLUMNS, parts, strict=True)}
    result["all_reduce"] = grads[GRAD] if phase == "backward" else 0.0
    return result


@pytest.mark.parametrize(("testbed", "ffn", "phase"), TABLE_2)
def test_the_reference_set_gives_table_2(testbed: str, ffn: str, phase: str) -> None:
    ours = operations_ms(testbed, ffn, phase, f"testbed_{testbed}")
    for name, theirs_ms in zip(COLUMNS, TABLE_2[testbed, ffn, phase], strict=True):
        assert ours[name] == pytest.approx(theirs_ms, rel=TOLERANCE[testbed][name]), name


@pytest.mark.parametrize(("testbed", "ffn", "phase"), TABLE_2)
def test_the_printed_lines_in_their_corrected_units_are_off_table_2_by_what_is_known(
    testbed: str, ffn: str, phase: str
) -> None:
    ours = operations_ms(testbed, ffn, phase, f"testbed_{testbed}_printed")
    for name, theirs_ms in zip(COLUMNS, TABLE_2[testbed, ffn, phase], strict=True):
        if name in OFF_AS_PRINTED[testbed]:
            off = OFF_AS_PRINTED[testbed][name][("gpt", "mixtral").index(ffn)]
            assert ours[name] == pytest.approx(theirs_ms * (1 + off), rel=0.05), name


@pytest.mark.parametrize("testbed", ["a", "b"])
def test_volumes_are_those_of_the_papers_section_2(testbed: str) -> None:
    """In elements: n_a2a = F B L M / N_ESP, n_ag = n_rs = F B L M, experts F B L M H / N_ESP multiply-adds a GEMM."""
    groups, F = GROUPS[testbed], COPIES[testbed]
    B, L, M, H = 4, 1024, 1600, 6400
    layer = layer_work(Shape(B, L, M, H, groups.ep, 2, F / 2, "gpt", 25), groups)
    moe = layer.forward.moe
    assert moe.ahead[0].size / 4 == pytest.approx(F * B * L * M / groups.esp)
    assert moe.ahead[1].size / 4 == moe.behind[0].size / 4 == pytest.approx(F * B * L * M)
    assert moe.expert.size / 2 == pytest.approx(2 * F * B * L * M * H / groups.esp)
    attention, softmax = layer.forward.before[1:3]
    assert attention.size / 2 == pytest.approx((4 * B * L * M**2 + 2 * B * L**2 * M) / groups.mp)
    assert softmax.size == pytest.approx(B * 25 * L**2 / groups.mp)
    assert layer.gradients[0].size_bytes / 4 == 4 * M**2 / groups.mp + M * groups.ep
