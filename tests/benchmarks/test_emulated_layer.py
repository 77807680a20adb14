# SPDX-License-Identifier: Apache-2.0
"""What the benchmark for a GPU computes is what the planner counts: rows, floating-point operations, gradients."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.gpu.emulated_layer import CUT, EXPERT_BACK, KINDS, Computation, whole_tasks
from benchmarks.gpu.emulated_plans import FULL, QUICK, Configuration, Lines, plan_all
from ds_fsmoe.ops import load_ops
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.schedule import (
    ATTENTION,
    EXPERT,
)
from ds_fsmoe.planning.workload import GEMMS, Shape

CPU = torch.device("cpu")


def computation(configuration: Configuration) -> Computation:
    return Computation(configuration.shape, configuration.groups, CPU, load_ops("reference", "cpu"))


@pytest.mark.parametrize("configuration", [*FULL, *QUICK], ids=str)
def test_rows_of_the_experts_are_as_many_as_the_planner_counts(configuration: Configuration) -> None:
    shape, groups = configuration.shape, configuration.groups
    assert shape.heads % groups.mp == 0
    of_rank = computation(configuration)
    assert set(of_rank.whole_size) == set(KINDS)
    rows, local_e = of_rank._amount[EXPERT], shape.E // groups.ep
    row_flops = 2 * GEMMS[shape.ffn] * shape.M * shape.H / groups.esp
    assert of_rank.whole_size[EXPERT] == pytest.approx(local_e * rows * row_flops, rel=4e-3)
    assert of_rank.whole_size[EXPERT_BACK] == 2 * of_rank.whole_size[EXPERT]


def test_the_full_grid_holds_out_tokens_and_widths_on_every_cluster() -> None:
    lines = Lines({each.widths: {} for each in FULL if each.timed})
    for cluster in ("testbed_a", "testbed_b", "modern"):
        found = {lines.held_out(each) for each in FULL if each.cluster == cluster}
        assert found == {"", "tokens", "widths"}
    types = {each.shape.dtype_bytes for each in FULL if each.timed}
    assert types == {each.shape.dtype_bytes for each in FULL}


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_of_a_task_has_its_part_of_the_size(kind: str) -> None:
    of_rank = computation(QUICK[0])
    size, done = of_rank.of(kind, 0.5)
    done()
    share = size / of_rank.whole_size[kind]
    if kind.startswith(ATTENTION):  # half of the positions: less than half of the products with each other
        assert 0.3 < share < 0.5
    else:
        assert share == pytest.approx(0.5, rel=0.05)
    assert of_rank.of(kind, 1.0)[0] == of_rank.whole_size[kind]
    assert of_rank.of(kind, 0.5)[1] is done


@pytest.mark.parametrize("ffn", ["gpt", "mixtral"])
def test_experts_compute_what_autograd_does(ffn: str) -> None:
    """All experts together compute what they compute one by one."""
    shape = Shape(2, 24, 16, 40, 4, heads=2, ffn=ffn)
    torch.manual_seed(0)
    of_rank = Computation(shape, Groups(4, 2, mp=2, esp=2, ep=2, dp=2), CPU, load_ops("reference", "cpu"))
    modules, rows = of_rank._modules, 7
    assert len(modules) == 2  # 4 experts on 2 EP ranks
    x_RM, dy_RM = torch.randn(2 * rows, 16, requires_grad=True), torch.randn(2 * rows, 16)
    y_RM = torch.cat([module(part_RM) for module, part_RM in zip(modules, x_RM.split(rows), strict=True)])
    parameters = [parameter for module in modules for parameter in module.parameters()]
    dx_RM, *gradients = torch.autograd.grad(y_RM, [x_RM, *parameters], dy_RM)
    numbers = iter([x_RM.detach(), x_RM.detach(), dy_RM])
    of_rank._randn = lambda *_: next(numbers)
    with torch.no_grad():
        torch.testing.assert_close(of_rank._experts_together(rows, False)(), y_RM)
        found_RM, found = of_rank._experts_together(rows, True)()
    torch.testing.assert_close(found_RM, dx_RM)
    for ours, theirs in zip(found, gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_plan_computes_all_of_a_layer_whatever_its_chunks_are() -> None:
    """The parts of each kind of task in a schedule add up to that task, and every kind has a body and a cost."""
    configuration = FULL[2]
    of_rank = computation(configuration)
    computing = {kind: LinearCost(0.01, 1e-11) for kind in KINDS}
    for name, planned in plan_all(configuration, computing, 0.005).items():
        for schedule, phase in zip(planned.schedules, ("forward", "backward"), strict=True):
            parts: dict[str, float] = {}
            for task in schedule.tasks:
                parts[task.kind] = parts.get(task.kind, 0.0) + task.size
            layer = getattr(whole_tasks(configuration.shape, configuration.groups), phase)
            for work in (*layer.before, *layer.after, *layer.moe.exchange):
                assert math.isclose(parts[work.kind], work.size), (name, work.kind)
            experts = sum(parts.get(kind, 0.0) for kind in CUT)
            assert math.isclose(experts, of_rank.whole_size[EXPERT] * (1 if phase == "forward" else 2)), name
