# SPDX-License-Identifier: Apache-2.0
"""A hierarchical all-to-all in a layer: two tasks on two lanes, and the numbers of the flat one."""

from __future__ import annotations

import random
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_fsmoe import registry
from ds_fsmoe.components.callback import CallbackArgs, CallbackBase
from ds_fsmoe.distributed.groups import make_groups
from ds_fsmoe.execution.collectives import Collectives
from ds_fsmoe.execution.lanes import Observer, make_lanes
from ds_fsmoe.execution.pipeline import LayerPipeline
from ds_fsmoe.layer.parts import exchange_in
from ds_fsmoe.planning.block import BlockPlan
from ds_fsmoe.planning.call_shape import CallShape, sized
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.phase_plan import PhasePlan
from ds_fsmoe.planning.schedule import (
    A2A_IN,
    A2A_IN_NODE,
    A2A_OUT,
    A2A_OUT_NODE,
    EXPERT,
    GATHER,
    HOLD,
    REDUCE,
    Lane,
)
from ds_fsmoe.planning.timeline import simulate
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.test_alltoalls import on_nodes
from tests.test_rows import Case, named, run_layer
from tests.waiting import pause

CAPACITY, WIDTH, HIDDEN = 11, 7, 28
TASKS = (A2A_IN_NODE, A2A_IN, A2A_OUT, A2A_OUT_NODE)
LINKS = ("shared", "paper", "reduce_first")

# ---- the schedule


def plan(links: str = "paper", degree: int = 4, backward: bool = False, **groups: int) -> PhasePlan:
    sizes = {"world": 4, "gpus_per_node": 2, "ep": 4} | groups
    return PhasePlan(BlockPlan(degree, links), Groups(**sizes), backward, "2dh")


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("links", ["paper", "reduce_first"])
def test_the_two_tasks_lie_on_two_lanes_in_the_order_of_travel(links: str, backward: bool) -> None:
    schedule = plan(links, 3, backward).schedule
    lane_of = {task.kind: task.lane for task in schedule.tasks}
    assert [lane_of[kind] for kind in TASKS] == [Lane.INTRA, Lane.INTER, Lane.INTER, Lane.INTRA]
    assert HOLD not in lane_of, "no lane waits for the other"
    for chunk in range(3):
        places = {task.kind: index for index, task in enumerate(schedule.tasks) if task.chunk == chunk}
        enter_node, enter, leave, leave_node = (places[kind] for kind in TASKS)
        assert schedule.tasks[enter].after == (enter_node,)
        assert schedule.tasks[leave_node].after == (leave,)


@pytest.mark.parametrize("backward", [False, True])
def test_a_chunk_is_inside_its_node_while_another_is_between_nodes(backward: bool) -> None:
    two, flat = plan(backward=backward), replace(plan(backward=backward), alltoall="flat")
    costs = dict.fromkeys(TASKS, LinearCost(1.0, 0.0)) | dict.fromkeys((HOLD, EXPERT), LinearCost(0.0, 0.0))
    spans = simulate(two.schedule, costs).spans
    at = {(each.task.kind, each.task.chunk): (each.start_ms, each.end_ms) for each in spans}
    for chunk in range(3):
        assert at[A2A_IN_NODE, chunk + 1] == at[A2A_IN, chunk], "side by side"
        assert at[A2A_OUT, chunk + 1] == at[A2A_OUT_NODE, chunk]
    # Flat holds both links for as long as both tasks take.
    longer = costs | dict.fromkeys((A2A_IN, A2A_OUT), LinearCost(2.0, 0.0))
    assert simulate(two.schedule, costs).makespan_ms == 10.0
    assert simulate(flat.schedule, longer).makespan_ms == 16.0


@pytest.mark.parametrize("links", ["paper", "reduce_first"])
def test_with_sharded_experts_the_link_inside_the_node_is_never_idle_for_another_chunk(links: str) -> None:
    """Gathers and reduces are on that link, too: it is at work from the first task to the last."""
    of_phase = plan(links, 4, world=8, gpus_per_node=4, ep=4, esp=2)
    costs = dict.fromkeys((*TASKS, GATHER, REDUCE), LinearCost(1.0, 0.0))
    timeline = simulate(of_phase.schedule, costs | dict.fromkeys((HOLD, EXPERT), LinearCost(0.0, 0.0)))
    inside = [span for span in timeline.spans if span.task.lane is Lane.INTRA]
    assert len(inside) == 4 * 4
    assert timeline.makespan_ms == 16.0


@pytest.mark.parametrize("groups", [{"gpus_per_node": 1}, {"gpus_per_node": 4}, {"ep": 1}, {"ep": 2, "esp": 2}])
def test_on_one_kind_of_link_the_schedule_is_the_flat_one(groups: dict[str, int]) -> None:
    for backward in (False, True):
        two = plan(backward=backward, **groups)
        assert two.schedule == replace(two, alltoall="flat").schedule
        assert not {A2A_IN_NODE, A2A_OUT_NODE} & {task.kind for task in two.schedule.tasks}


def test_every_task_has_its_size() -> None:
    of_phase = plan(degree=2)
    found = sized(of_phase.schedule, of_phase, CallShape(8, CAPACITY, WIDTH, 4, 2, 2 * WIDTH * HIDDEN))
    sent_bytes = 8 * CAPACITY * WIDTH * 4
    for kind in TASKS:
        assert sum(task.size for task in found.tasks if task.kind == kind) == pytest.approx(sent_bytes)
        assert all(task.launches == 1 for task in found.tasks if task.kind == kind)


def test_two_tasks_without_legs_are_refused() -> None:
    plans = plan(), plan(backward=True)
    with pytest.raises(ValueError, match="L07: an all-to-all in two tasks is planned, but its two parts are missing"):
        LayerPipeline(
            make_lanes(torch.device("cpu"), overlap=False), Collectives(lambda x, group: x, None, None), *plans, "L07"
        )


# ---- layers


class Delays(Observer):
    """Sleeps a random while at the start of a task, another one on every rank."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def begin(self, index: int, task: Any) -> None:
        pause(self.random, 0, 0, 0.001, 0.004)


def delayed(rank: int, world_size: int, runs: int) -> int:
    found = []
    for ep, esp, nodes in ((4, 1, (0, 0, 1, 1)), (4, 1, (0, 1, 1, 1)), (2, 1, (0, 0, 0, 1)), (2, 2, (0, 0, 1, 1))):
        with on_nodes(*nodes):
            found.append(make_groups(ep, esp))
    lanes, serial = make_lanes(torch.device("cpu")), make_lanes(torch.device("cpu"), overlap=False)
    delays, different = Delays(rank), 0
    for number in range(runs):
        groups, name = found[number % 4], ("2dh", "flat", "1dh")[number % 3]
        case = Case((1 + number % 5, 1 + number % 4), links=LINKS[number % 7 % 3])
        in_rows = number % 2 == 1
        ours = run_layer(case, groups, lanes, in_rows, alltoall=name, observer=delays)
        theirs = run_layer(case, groups, serial, in_rows)
        different += not all(map(torch.equal, ours, theirs))
    lanes.close()
    return different


@sampled("runs", [9, 60], kept=[0], drawn=0)
def test_whoever_is_late_the_numbers_are_those_of_flat_one_task_after_another(runs: int, tmp_path: Path) -> None:
    assert run_on_ranks(delayed, 4, tmp_path, runs) == [0] * 4


# ---- hooks and lanes


class Watch(Observer, CallbackBase):
    """Notes at every point of a hook which task is under way."""

    def __init__(self) -> None:
        super().__init__()
        self.under_way = ""
        self.seen: list[tuple[str, str]] = []

    def begin(self, index: int, task: Any) -> None:
        self.under_way = task.kind

    def note(self, point: str, args: CallbackArgs) -> torch.Tensor:
        self.seen.append((point, self.under_way))
        # What travels is half as wide then, in all steps.
        return args.tensor.float() if point.startswith("before") else args.tensor.double()

    def before_dispatch_hook(self, args: CallbackArgs) -> torch.Tensor:
        return self.note("before_dispatch_hook", args)

    def after_dispatch_hook(self, args: CallbackArgs) -> torch.Tensor:
        return self.note("after_dispatch_hook", args)

    def before_combine_hook(self, args: CallbackArgs) -> torch.Tensor:
        return self.note("before_combine_hook", args)

    def after_combine_hook(self, args: CallbackArgs) -> torch.Tensor:
        return self.note("after_combine_hook", args)


def with_hooks(rank: int, world_size: int) -> tuple[list[tuple[str, str]], bool]:
    with on_nodes(0, 0, 1, 1):
        groups = make_groups(4)
    lanes, watch = make_lanes(torch.device("cpu"), overlap=False), Watch()
    case = Case((2, 1))
    ours = run_layer(case, groups, lanes, False, alltoall="2dh", callbacks=(watch,), observer=watch)
    flat = run_layer(case, groups, lanes, False, callbacks=(Watch(),))
    return watch.seen, all(map(torch.equal, ours, flat))


def test_hooks_come_before_the_first_part_and_after_the_last(tmp_path: Path) -> None:
    points = ("before_dispatch_hook", "after_dispatch_hook", "before_combine_hook", "after_combine_hook")
    for seen, equal in run_on_ranks(with_hooks, 4, tmp_path):
        assert equal
        assert len(seen) == 4 * 3
        assert set(seen) == set(zip(points, TASKS, strict=True))


def one_group_per_lane(rank: int, world_size: int) -> dict[str, set[str]]:
    """Communicator -> the lanes on which it was used in an overlapped run."""
    used: dict[str, set[str]] = {}
    lane_of_thread: dict[int, str] = {}

    class Where(Observer):
        def begin(self, index: int, task: Any) -> None:
            lane_of_thread[threading.get_ident()] = str(task.lane)

    all_to_all = dist.all_to_all_single

    def counted(*args: Any, group: Any, **options: Any) -> Any:
        used.setdefault(f"{group.group_desc}", set()).add(lane_of_thread[threading.get_ident()])
        return all_to_all(*args, group=group, **options)

    with on_nodes(0, 0, 0, 1):
        groups = make_groups(2)
    lanes = make_lanes(torch.device("cpu"))
    dist.all_to_all_single = counted
    try:
        run_layer(Case(), groups, lanes, False, alltoall="2dh", observer=Where())
    finally:
        dist.all_to_all_single = all_to_all
    lanes.close()
    return used


def test_each_communicator_is_used_on_one_lane(tmp_path: Path) -> None:
    used = run_on_ranks(one_group_per_lane, 4, tmp_path)
    # Ranks 0 and 1 exchange inside the node, 2 and 3 between nodes.
    for rank in (0, 1):
        assert used[rank]["fsmoe_a2a_intra"] == {"intra"}
        assert "fsmoe_a2a_inter" not in used[rank]
    for rank in (2, 3):
        assert used[rank]["fsmoe_a2a_inter"] == {"inter"}
        assert "fsmoe_a2a_intra" not in used[rank]
    assert all("fsmoe_ep" not in each for each in used), "not the group that flat would use"


# ---- one of one's own

PLUGIN = '''
from ds_fsmoe import register_alltoall
from ds_fsmoe.components.hierarchical import HierarchicalAllToAll


@register_alltoall("last")
class ByTheLast(HierarchicalAllToAll):
    """All of a node goes out through its last rank."""

    links = ("intra", "inter")

    def forwarding_ranks(self, source, destination, nodes):
        node = nodes.neighbours(source)
        return (destination if destination in node else node[-1],)
'''


def own(rank: int, world_size: int, folder: str) -> tuple[bool, int]:
    sys.path.insert(0, folder)
    module: ModuleType = __import__("my_alltoall")
    assert registry.lookup("alltoall", "last") is module.ByTheLast
    with on_nodes(0, 0, 0, 1, 1):
        groups = make_groups(5)
    lanes = make_lanes(torch.device("cpu"))
    ours, flat = (run_layer(Case(), groups, lanes, False, alltoall=name) for name in ("last", "flat"))
    lanes.close()
    return all(map(torch.equal, ours, flat)), len(exchange_in(groups, named("last")).legs)


def test_one_of_ones_own_is_a_file_with_a_decorator(tmp_path: Path) -> None:
    (tmp_path / "my_alltoall.py").write_text(PLUGIN)
    assert run_on_ranks(own, 5, tmp_path / "ranks", str(tmp_path)) == [(True, 4)] * 5
