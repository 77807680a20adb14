# SPDX-License-Identifier: Apache-2.0
"""A hierarchical all-to-all in a layer: two tasks on two lanes, and the numbers of the flat one."""

from __future__ import annotations

import random
import threading
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ds_fsmoe import registry
from ds_fsmoe.components.callback import CallbackArgs, CallbackBase
from ds_fsmoe.distributed.groups import make_groups
from ds_fsmoe.execution.lanes import Observer, make_lanes
from ds_fsmoe.planning.block import BlockPlan
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.phase_plan import PhasePlan
from ds_fsmoe.planning.schedule import A2A_IN, A2A_IN_NODE, A2A_OUT, A2A_OUT_NODE, EXPERT, HOLD
from ds_fsmoe.planning.timeline import simulate
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.test_alltoalls import on_nodes
from tests.test_rows import Case, run_layer
from tests.waiting import pause

TASKS = (A2A_IN_NODE, A2A_IN, A2A_OUT, A2A_OUT_NODE)
LINKS = ("shared", "paper", "reduce_first")

# ---- the schedule


def plan(backward: bool, alltoall: str = "2dh") -> PhasePlan:
    return PhasePlan(BlockPlan(4, "paper"), Groups(world=4, gpus_per_node=2, ep=4), backward, alltoall)


@pytest.mark.parametrize("backward", [False, True])
def test_a_chunk_is_inside_its_node_while_another_is_between_nodes(backward: bool) -> None:
    two, flat = plan(backward), plan(backward, "flat")
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


# ---- layers


class Delays(Observer):
    """Sleeps a random while at the start of a task, another one on every rank."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def begin(self, index: int, task: Any) -> None:
        pause(self.random, 0, 0, 0.001, 0.004)


EXACT = [name for name in registry.known("alltoall") if name != "node_deduplicated"]
"""Once per node has sums in another order."""


def delayed(rank: int, world_size: int, runs: int) -> int:
    found = []
    for ep, esp, nodes in ((4, 1, (0, 0, 1, 1)), (4, 1, (0, 1, 1, 1)), (2, 1, (0, 0, 0, 1)), (2, 2, (0, 0, 1, 1))):
        with on_nodes(*nodes):
            found.append(make_groups(ep, esp))
    lanes, serial = make_lanes(torch.device("cpu")), make_lanes(torch.device("cpu"), overlap=False)
    delays, different = Delays(rank), 0
    for number in range(runs):
        groups, name = found[number % 4], EXACT[number % len(EXACT)]
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
    """Notes which task is under way at every point of a hook, and on which lane each thread is."""

    def __init__(self) -> None:
        super().__init__()
        self.under_way = ""
        self.seen: list[tuple[str, str]] = []
        self.lane_of_thread: dict[int, str] = {}

    def begin(self, index: int, task: Any) -> None:
        self.under_way = task.kind
        self.lane_of_thread[threading.get_ident()] = str(task.lane)

    def note(self, point: str, args: CallbackArgs) -> torch.Tensor:
        self.seen.append((point, self.under_way))
        # What travels is half as wide then, in all steps.
        return args.tensor.float() if point.startswith("before") else args.tensor.double()

    before_dispatch_hook = partialmethod(note, "before_dispatch_hook")
    after_dispatch_hook = partialmethod(note, "after_dispatch_hook")
    before_combine_hook = partialmethod(note, "before_combine_hook")
    after_combine_hook = partialmethod(note, "after_combine_hook")


def watched(rank: int, world_size: int) -> tuple[list[tuple[str, str]], bool, dict[str, set[str]]]:
    """Points and tasks, whether results are flat's, and of an overlapped run the lanes of each communicator."""
    lanes, watch = make_lanes(torch.device("cpu"), overlap=False), Watch()
    with on_nodes(0, 0, 1, 1):
        groups = make_groups(4)
    ours = run_layer(Case((2, 1)), groups, lanes, False, alltoall="2dh", callbacks=(watch,), observer=watch)
    flat = run_layer(Case((2, 1)), groups, lanes, False, callbacks=(Watch(),))
    used: dict[str, set[str]] = {}
    send = dist.all_to_all_single

    def noted(*args: Any, group: Any, **options: Any) -> Any:
        used.setdefault(f"{group.group_desc}", set()).add(watch.lane_of_thread[threading.get_ident()])
        return send(*args, group=group, **options)

    with on_nodes(0, 0, 0, 1):
        groups = make_groups(2)
    lanes = make_lanes(torch.device("cpu"))
    with patch.object(dist, "all_to_all_single", noted):
        run_layer(Case(), groups, lanes, False, alltoall="2dh", observer=watch)
    lanes.close()
    return watch.seen, all(map(torch.equal, ours, flat)), used


def test_hooks_come_before_the_first_part_and_after_the_last_and_a_communicator_is_used_on_one_lane(
    tmp_path: Path,
) -> None:
    points = ("before_dispatch_hook", "after_dispatch_hook", "before_combine_hook", "after_combine_hook")
    for rank, (seen, equal, used) in enumerate(run_on_ranks(watched, 4, tmp_path)):
        assert equal
        assert len(seen) == 4 * 3
        assert set(seen) == set(zip(points, TASKS, strict=True))
        # Ranks 0 and 1 exchange inside the node, 2 and 3 between nodes; none in the group that flat would use.
        link = "intra" if rank < 2 else "inter"
        assert {name: lanes for name, lanes in used.items() if "a2a" in name or "ep" in name} == {
            f"fsmoe_a2a_{link}": {link}
        }
