# SPDX-License-Identifier: Apache-2.0
"""A layer's tasks run in the order of its plan, and the products of weight gradients are made in the experts' tasks.

Numbers are the same either way, so no test of numbers would see it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ds_fsmoe import GPTFeedForward, MixtralFeedForward
from ds_fsmoe.components.alltoalls.flat import FlatAllToAll
from ds_fsmoe.components.expert_compute.calls import ExpertSet
from ds_fsmoe.components.expert_compute.gradient_sums import make_contiguous
from ds_fsmoe.execution.collectives import Collectives
from ds_fsmoe.execution.lanes import Lanes, Observer, make_lanes
from ds_fsmoe.execution.pipeline import LayerPipeline
from ds_fsmoe.planning.block import ORDERS, BlockPlan
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.phase_plan import PhasePlan
from ds_fsmoe.planning.schedule import EXPERT, Lane, Schedule, Task

# With all links in the plan; here they lead back to this rank.
GROUPS = Groups(world=4, gpus_per_node=2, ep=2, esp=2)
# No number of rows is a width, so that a product's shape tells what it is.
WIDTH, HIDDEN, EXPERTS, CAPACITY = 16, 48, 2, 20
DEGREE = 4


class Executed(Observer):
    """Which tasks were done in the last phase, in what order, and by which schedule."""

    def __init__(self) -> None:
        self.schedules: dict[str, Schedule] = {}
        self.done: list[Task] = []

    def start(self, schedule: Schedule, label: str) -> None:
        self.schedules[label] = schedule
        self.done.clear()

    def begin(self, index: int, task: Task) -> None:
        self.done.append(task)


class WeightProducts(TorchDispatchMode):
    """Kind of task -> chunks in which a matrix product was made that has the shape of a weight."""

    def __init__(self, executed: Executed) -> None:
        super().__init__()
        self.chunks: dict[str, list[int]] = defaultdict(list)
        self._executed = executed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        is_product = func.overloadpacket.__name__.rstrip("_") in ("mm", "addmm", "bmm", "baddbmm")
        if is_product and set(found.shape[-2:]) == {WIDTH, HIDDEN}:
            task = self._executed.done[-1]
            if task.chunk not in self.chunks[task.kind]:
                self.chunks[task.kind].append(task.chunk)
        return found


@pytest.fixture(params=["serial", "threads"])
def lanes(request: pytest.FixtureRequest) -> Iterator[Lanes]:
    with closing(make_lanes(torch.device("cpu"), overlap=request.param == "threads")) as made:
        yield made


def pipeline_of(lanes: Lanes, block: BlockPlan, executed: Executed, recompute: bool = False) -> LayerPipeline:
    plans = PhasePlan(BlockPlan(3, block.links), GROUPS, False), PhasePlan(block, GROUPS, True)
    return LayerPipeline(
        lanes, Collectives(FlatAllToAll().exchange, None, None), *plans, recompute=recompute, observer=executed
    )


def run(pipeline: LayerPipeline, experts: list[nn.Module], products: Any = None, together: Any = "auto") -> None:
    """One forward and backward."""
    x_RM = torch.randn(EXPERTS * CAPACITY, WIDTH, requires_grad=True)
    y_RM = pipeline(x_RM, EXPERTS, CAPACITY, ExpertSet(experts, together=together))
    with products or nullcontext():
        y_RM.sum().backward()
    assert all(each.grad is not None for expert in experts for each in expert.parameters())


@pytest.mark.parametrize("links", ORDERS)
def test_tasks_are_done_in_the_order_of_the_plan(lanes: Lanes, links: Any) -> None:
    executed = Executed()
    pipeline = pipeline_of(lanes, BlockPlan(DEGREE, links), executed)
    run(pipeline, [GPTFeedForward(WIDTH, HIDDEN) for _ in range(EXPERTS)])
    planned = pipeline.backward.schedule
    assert executed.schedules["moe/backward"] == planned
    assert executed.schedules["moe/forward"] == pipeline.forward.schedule
    for lane, indices in planned.lanes.items():
        assert [each for each in executed.done if each.lane is lane] == [planned.tasks[index] for index in indices]
    # Spelt out, so that it does not hang on the planner alone.
    computed = [f"{task.kind} {task.chunk}" for task in planned.tasks if task.lane is Lane.COMPUTE]
    assert computed == [f"{EXPERT} {chunk}" for chunk in range(DEGREE)]
    assert len(executed.done) == len(planned.tasks)


@pytest.mark.parametrize("kind", [GPTFeedForward, MixtralFeedForward])
@pytest.mark.parametrize("together", ["never", "always"])
@pytest.mark.parametrize("recompute", [False, True])
def test_products_of_weight_gradients_are_made_in_the_tasks_of_experts_and_nowhere_else(
    kind: Any, together: str, recompute: bool
) -> None:
    executed = Executed()
    products = WeightProducts(executed)
    experts = [kind(WIDTH, HIDDEN) for _ in range(EXPERTS)]
    assert make_contiguous(experts)
    with closing(make_lanes(torch.device("cpu"), overlap=False)) as lanes:
        pipeline = pipeline_of(lanes, BlockPlan(DEGREE, "paper"), executed, recompute)
        run(pipeline, experts, products, together)
    assert products.chunks == {EXPERT: list(range(DEGREE))}
