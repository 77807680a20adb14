# SPDX-License-Identifier: Apache-2.0
"""The trace of a pipeline on two ranks."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch import nn

from ds_fsmoe.components.alltoalls.flat import FlatAllToAll
from ds_fsmoe.components.expert_compute.calls import ExpertSet
from ds_fsmoe.distributed.groups import make_groups
from ds_fsmoe.execution.collectives import Collectives
from ds_fsmoe.execution.lanes import make_lanes
from ds_fsmoe.execution.pipeline import LayerPipeline
from ds_fsmoe.files.traces import MEASURED, PREDICTED, merge_traces, range_name, rank_file, read_trace
from ds_fsmoe.planning.block import BlockPlan
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.phase_plan import PhasePlan
from ds_fsmoe.planning.schedule import HOLD
from ds_fsmoe.planning.timeline import simulate
from tests.lane_cases import CPU, KINDS
from tests.ranks import run_on_ranks
from tests.trace_cases import PredictingTracer, assert_no_overlap, assert_valid, events_of

EXPERTS, CAPACITY, WIDTH = 4, 23, 13


def pipeline_on_a_rank(rank: int, world_size: int, folder: str, esp: int) -> list[list[tuple[str, str]]]:
    """(name, lane) of every task of each phase, in the order of the schedule."""
    groups = make_groups(world_size // esp, esp, ranks_per_node=1 if esp == 1 else None)
    degrees = {"forward": 3, "backward": 2}
    plans = [
        PhasePlan(BlockPlan(degree), groups.planned, backward=phase == "backward") for phase, degree in degrees.items()
    ]
    costs = dict.fromkeys((*KINDS, HOLD), LinearCost(0.1, 0.0))
    predicted = {
        f"L{n:02d}/{phase}": simulate(plan.schedule, costs)
        for n in (2, 3)
        for phase, plan in zip(degrees, plans, strict=True)
    }
    lanes, tracer = make_lanes(CPU), PredictingTracer(Path(folder), rank, 1, 2, CPU, predicted=predicted)
    collectives = Collectives(FlatAllToAll().exchange, groups.ep_group, groups.esp_group)
    layers = [LayerPipeline(lanes, collectives, *plans, label=f"L{number:02d}", observer=tracer) for number in (2, 3)]
    experts = ExpertSet([nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS * esp // world_size)], keep_expert_dim=True)
    for step in range(4):
        tracer.step(step)
        x_RM = torch.randn(EXPERTS * CAPACITY, WIDTH, requires_grad=True)
        for layer in layers:
            x_RM = x_RM + layer(x_RM, EXPERTS, CAPACITY, experts)
        x_RM.sum().backward()
    lanes.close()
    return [
        [(range_name(f"L03/{phase}", task), str(task.lane)) for task in plan.schedule.tasks if task.kind != HOLD]
        for phase, plan in zip(degrees, plans, strict=True)
    ]


@pytest.mark.parametrize(("esp", "kinds"), [(1, ("A2A_IN", "A2A_OUT")), (2, ("GATHER", "REDUCE"))])
def test_two_ranks_trace_every_task_of_a_pipeline_and_nothing_else(
    esp: int, kinds: tuple[str, ...], tmp_path: Path
) -> None:
    folder = tmp_path / "traces"
    tasks_of_ranks = run_on_ranks(pipeline_on_a_rank, 2, tmp_path / "ranks", str(folder), esp)
    for rank, phases in enumerate(tasks_of_ranks):
        trace = read_trace(rank_file(folder, rank))
        assert_valid(trace)
        assert_no_overlap(trace)
        assert trace["otherData"]["complete"] is True
        assert trace["otherData"]["world_size"] == 2
        for category in ("measured", "predicted"):
            found = defaultdict(list)
            for event in events_of(trace, category):
                if event["args"]["layer"] == "L03":
                    found[event["args"]["step"], event["args"]["phase"]].append((event["name"], event["args"]["lane"]))
            expected = {(step, phase): phases[index] for step in (1, 2) for index, phase in enumerate(("fwd", "bwd"))}
            assert found == expected
        assert [name.rsplit("/", 2)[1] for name, _ in phases[0]].count("EXPERT") == 3
        assert {name.rsplit("/", 2)[1] for phase in phases for name, _ in phase} == {"EXPERT", *kinds}
        assert {lane for _, lane in phases[0]} == {"compute", "inter" if esp == 1 else "intra"}
    merged = json.loads(merge_traces(folder).read_text())
    assert_valid(merged)
    assert_no_overlap(merged)
    assert merged["otherData"]["missing"] == []
    for category in (MEASURED, PREDICTED):
        labels = {"/".join((each["args"]["layer"], each["args"]["phase"])) for each in events_of(merged, category)}
        assert labels == {"L02/bwd", "L02/fwd", "L03/bwd", "L03/fwd"}
    # A collective cannot end on one rank before it has begun on the other: their clocks are one.
    last = [event for event in events_of(merged) if event["args"]["kind"] == kinds[1] and event["args"]["step"] == 2]
    for name in {event["name"] for event in last}:
        starts, ends = zip(
            *((each["ts"], each["ts"] + each["dur"]) for each in last if each["name"] == name), strict=True
        )
        assert max(starts) <= min(ends) + 1000
