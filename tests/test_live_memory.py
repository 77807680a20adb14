# SPDX-License-Identifier: Apache-2.0
"""The counter of live memory, on programs of which every byte is known."""

from __future__ import annotations

import torch

from ds_fsmoe.execution.lanes import make_lanes
from ds_fsmoe.planning.block import BlockPlan
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.phase_plan import PhasePlan
from ds_fsmoe.planning.schedule import Lane
from tests.live_memory import LiveMemory

BYTES = torch.uint8


def test_a_sum_rises_and_falls_and_its_peak_stays() -> None:
    with LiveMemory() as memory:
        first = torch.empty(1000, dtype=BYTES)
        second = torch.empty(300, dtype=BYTES)
        assert (memory.live, memory.peak) == (1300, 1300)
        del first
        third = torch.empty(500, dtype=BYTES)
        assert (memory.live, memory.peak) == (800, 1300)
        view = third.view(5, 100)
        del second, third
        view.add_(1)
        assert memory.live == 500  # as long as a view of it is there
        del view
        assert (memory.live, memory.peak) == (0, 1300)
        for _ in range(50):  # at the same place it counts again
            torch.empty(0, dtype=BYTES).add_(1)
            again = torch.empty(64, dtype=BYTES)
            assert memory.live == 64
            del again
    assert memory.peak == 1300


def test_a_backward_counts_what_autograd_keeps_and_makes() -> None:
    weight = torch.randn(32, 32, requires_grad=True)
    block = weight.nbytes
    with LiveMemory() as memory:
        x = torch.randn(32, 32)
        y = torch.relu(x @ weight)
        assert (memory.live, memory.peak) == (2 * block, 3 * block)  # the product went when relu was done
        (gradient,) = torch.autograd.grad(y, weight, torch.ones_like(y))
        # Rows, result, ones, the gradient of the product, that of the weight.
        assert memory.peak == 5 * block
        del x, y
        assert memory.live == block
    assert gradient.shape == (32, 32)


def test_other_threads_are_counted_through_an_observer_of_their_lanes() -> None:
    # An EP group of two has all-to-alls, which are on lanes of their own.
    plan = PhasePlan(BlockPlan(3), Groups(world=2, gpus_per_node=1, ep=2), backward=False)
    lanes, made = make_lanes(torch.device("cpu")), []
    kinds = {task.kind for task in plan.schedule.tasks}
    assert any(task.lane is not Lane.COMPUTE for task in plan.schedule.tasks)

    def make(task: object) -> None:
        made.append(torch.empty(100, dtype=BYTES))

    with LiveMemory() as memory:
        lanes.run(plan.schedule, dict.fromkeys(kinds, make), observer=memory.in_every_thread())
        assert memory.live == memory.peak == 100 * len(plan.schedule.tasks)
        made.clear()
        assert memory.live == 0
    lanes.close()
