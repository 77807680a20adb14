# SPDX-License-Identifier: Apache-2.0
"""What tasks cost is measured on all ranks together, leaves nothing behind, and fails on all ranks or on none."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_fsmoe.checks.first_forwards import FirstCall
from ds_fsmoe.components.alltoalls.flat import FlatAllToAll
from ds_fsmoe.components.expert_compute.calls import ExpertSet
from ds_fsmoe.components.experts.gpt import GPTFeedForward
from ds_fsmoe.distributed.fail_together import MeasuringError
from ds_fsmoe.distributed.groups import FSMoEGroups, make_groups
from ds_fsmoe.execution.collectives import Collectives
from ds_fsmoe.execution.lanes import SerialLanes, make_lanes
from ds_fsmoe.execution.pipeline import CallSizes
from ds_fsmoe.measuring import cluster_profile, profiler
from ds_fsmoe.measuring.cache import Measurements, Measuring
from ds_fsmoe.measuring.profiler import (
    ProfiledLayer,
    fastest,
    measured_slots,
    prepared,
    profile,
    slowdowns_of,
    time_links,
)
from ds_fsmoe.measuring.stopwatch import Stopwatch, empty_task_ms
from ds_fsmoe.planning.block import BlockPlan
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.job.measured import (
    ALL_GATHER,
    ALL_TO_ALL,
    BACKWARD,
    BACKWARD_ANEW,
    BETWEEN_NODES,
    DEQUANTISED,
    FORWARD,
    IN_NODES,
    QUANTISED,
    REDUCE_SCATTER,
    LayerProfile,
    Slowdowns,
    Timing,
)
from ds_fsmoe.planning.phase_plan import PhasePlan
from ds_fsmoe.planning.schedule import HOLD, Lane, Schedule
from ds_fsmoe.tuning import layer_kinds
from tests.fake_clock import FakeClock
from tests.hurry import hurry
from tests.ranks import run_on_ranks

WIDTH, HIDDEN, CAPACITY, LOCAL = 13, 29, 97, 2
MEASURED = 104
"""The capacity, up to the next multiple of an eighth of 64."""
CPU = torch.device("cpu")


class Counting(nn.Module):
    """A user's expert: it counts its calls, and drops out."""

    def __init__(self, drop: float = 0.0, fails: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(drop)
        self.fails = fails
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise OSError("the disk is on fire")
        self.calls += 1
        return self.drop(self.linear(x))


def subject_of(experts: list[nn.Module], groups: FSMoEGroups, ep: int, esp: int) -> ProfiledLayer:
    found = ExpertSet(experts)
    return ProfiledLayer(
        "L00",
        "/".join(type(each).__name__ for each in experts),
        Collectives(FlatAllToAll().exchange, groups.ep_group, groups.esp_group),
        found,
        len(experts),
        max(1, sum(each.numel() for each in found.parameters if each.dim() > 1)),
        None not in found.written_now(),
        False,
        CallSizes(ep * esp, CAPACITY, WIDTH, torch.float32, 1, True),
        nullcontext,
    )


def profile_of(experts: list[nn.Module], ep: int, esp: int, wires: tuple[float, float] = (1.0, 1.0)) -> LayerProfile:
    groups = make_groups(ep, esp)
    subject = subject_of(experts, groups, ep, esp)
    subject = replace(subject, sizes=replace(subject.sizes, comm_byte_shares=wires))
    lanes = make_lanes(CPU)
    try:
        schedule = PhasePlan(BlockPlan(3), groups.planned, backward=False).schedule
        measuring = Measuring(Stopwatch(CPU), Measurements())
        found = time_links(measuring, [subject])
        of_links = {name: found.timings[subject.link_name(name)] for name in subject.links}
        measured = profile(measuring, subject, lanes, schedule)
        return replace(measured, operations={**of_links, **measured.operations})
    finally:
        lanes.close()


def made_up_slowdowns(lanes: Iterable[Lane]) -> Slowdowns:
    """As if every pair of the lanes that were given work had been measured to be slowed otherwise."""
    pairs = itertools.permutations(sorted(lanes), 2)
    return Slowdowns({pair: 1.1 + number / 10 for number, pair in enumerate(pairs)})


def slowed_as_measured(ep: int, esp: int) -> tuple[Slowdowns, Slowdowns, list[dict[Lane, int]]]:
    """What is made of what was measured; the same from what is known of it; for each time that it was measured, the
    rows of every lane."""
    calls: list[dict[Lane, int]] = []

    def measured(watch: Any, lanes: Any, work: dict[Lane, Any], what: str) -> Slowdowns:
        calls.append({lane: each.args[0] for lane, each in work.items()})
        return made_up_slowdowns(work)

    profiler.slowdowns = measured
    subject = subject_of([GPTFeedForward(WIDTH, HIDDEN)], make_groups(ep, esp), ep, esp)
    lane_of = {ALL_TO_ALL: Lane.INTER, ALL_GATHER: Lane.INTRA, REDUCE_SCATTER: Lane.INTRA}.__getitem__
    measuring = Measuring(Stopwatch(CPU), Measurements())
    found, again = (slowdowns_of(measuring, subject, SerialLanes(), lane_of) for _ in range(2))
    return found, again, calls


def be_profiled(rank: int, world_size: int, ep: int, esp: int) -> dict[str, Any]:
    hurry()
    experts = [Counting() for _ in range(LOCAL)]
    written = profile_of([GPTFeedForward(WIDTH, HIDDEN) for _ in range(LOCAL)], ep, esp)
    torch.manual_seed(rank)
    state = torch.get_rng_state()
    graphs = profile_of(experts, ep, esp)
    # Nothing is left behind.
    assert torch.equal(state, torch.get_rng_state())
    assert [each.calls.item() for each in experts] == [0] * LOCAL
    assert all(each.grad is None for expert in experts for each in expert.parameters())
    assert not graphs.uses_rng
    assert profile_of([Counting(0.3)], ep, esp).uses_rng
    return {
        "written": written,
        "graphs": graphs,
        "narrow": profile_of([GPTFeedForward(WIDTH, HIDDEN)], ep, esp, wires=(0.5, 1.0)),
        "slowed": slowed_as_measured(ep, esp),
    }


@pytest.mark.parametrize("esp", [2, pytest.param(1, marks=pytest.mark.long)], ids="{} shards".format)
def test_what_is_measured_is_so_on_all_ranks_alike_at_the_sizes_of_the_planners_tasks_and_leaves_nothing_behind(
    esp: int, tmp_path: Path
) -> None:
    results = run_on_ranks(be_profiled, 2 * esp, tmp_path / "ranks", 2, esp)
    written, graphs, narrow = (results[0][name] for name in ("written", "graphs", "narrow"))
    sent_bytes = 2 * LOCAL * MEASURED * WIDTH * 4
    flops = 2 * 2 * esp * MEASURED * LOCAL * 2 * WIDTH * HIDDEN
    largest = {ALL_TO_ALL: sent_bytes, FORWARD: flops, BACKWARD: 2 * flops}
    if esp > 1:
        largest |= dict.fromkeys((ALL_GATHER, REDUCE_SCATTER), 2 * sent_bytes)
    assert {name: timing.sizes[-1] for name, timing in written.operations.items()} == largest
    assert set(graphs.operations) == {*largest, BACKWARD_ANEW}
    for found in (written, graphs):
        assert found.task_ms > 0
        for timing in found.operations.values():
            assert len(timing.sizes) >= len(measured_slots(CAPACITY))
            assert all(each > 0 for each in timing.times_ms)
            # More never costs less by the line, whatever the clock has said.
            predicted_ms = [timing.fit.cost.ms(size) for size in timing.sizes]
            assert predicted_ms == sorted(predicted_ms)
    # Conversions are measured where wires ask for them, by the bytes of whole rows: on a rank with one expert, from two
    # ranks of each shard, in float32.
    for name in (QUANTISED, DEQUANTISED):
        assert (narrow.operations[name].unit, narrow.operations[name].sizes[-1]) == (
            "byte",
            2 * esp * MEASURED * WIDTH * 4,
        )
    lanes = [Lane.INTER, Lane.INTRA, Lane.COMPUTE] if esp > 1 else [Lane.INTER, Lane.COMPUTE]
    for each in results:
        assert (each["written"], each["graphs"], each["narrow"]) == (written, graphs, narrow)
        # How lanes slow each other is kept pair by pair, and measured once.
        found, again, (rows_of,) = each["slowed"]
        assert found == again == made_up_slowdowns(lanes)
        assert sorted(rows_of) == sorted(lanes)
        # A quarter of the slots of a layer: an expert on each of two ranks, and as many of those that share its shards.
        assert all(1 <= rows <= 2 * esp * MEASURED // 4 for lane, rows in rows_of.items() if lane is not Lane.COMPUTE)


@pytest.mark.parametrize(("num_written", "is_measured"), [(0, True), (1, True), (2, False)])
def test_a_backward_in_other_chunks_is_measured_as_soon_as_one_expert_is_not_written_out(
    num_written: int, is_measured: bool
) -> None:
    place = SimpleNamespace(size=1, per_node=1, lanes=())
    forward = SimpleNamespace(groups=SimpleNamespace(placements={"ep": place, "esp": place}))
    collectives = SimpleNamespace(ep_group=None, esp_group=None, nodes=None)
    pipeline = SimpleNamespace(forward=forward, collectives=collectives, recompute=False)
    layer: Any = SimpleNamespace(pipeline=pipeline, fsmoe=SimpleNamespace(is_unchunked=False))
    experts: Any = SimpleNamespace(shapes=[(4, 2)], num_experts=2)
    forms: Any = (*["written"] * num_written, *[None] * (2 - num_written))
    sizes: Any = SimpleNamespace(width=2, dtype=torch.float32, comm_byte_shares=(1.0, 1.0))
    call = FirstCall(experts, forms, sizes, SimpleNamespace(restored=nullcontext), 3)
    assert (BACKWARD_ANEW in layer_kinds._subject("L00", layer, call).computations) is is_measured


@pytest.mark.parametrize("capacity", [0, 1, 3, 16, 97])
def test_a_line_can_be_fitted_at_any_capacity(capacity: int) -> None:
    slots = measured_slots(capacity)
    assert len(slots) >= 4
    assert slots == sorted(set(slots))
    assert slots[0] >= 1
    assert capacity in slots or capacity == 0


def test_a_task_costs_its_share_of_what_runs_of_empty_ones_take() -> None:
    plan = PhasePlan(BlockPlan(3, "paper"), Groups(4, 2, ep=4), backward=False)
    kinds = [task.kind for task in plan.schedule.tasks]
    assert HOLD in kinds
    runs: list[Schedule] = []

    def host_ms(what: str, size: int, prepare: Any) -> float:
        # Each run takes half a millisecond for each task that is one; holding a lane is nothing.
        runs.clear()
        prepare(size)()
        return sum(0.5 for schedule in runs for task in schedule.tasks if task.kind != HOLD)

    lanes: Any = SimpleNamespace(run=lambda schedule, *_: runs.append(schedule))
    watch: Any = SimpleNamespace(host_ms=host_ms)
    assert empty_task_ms(watch, "empty tasks", lanes, plan.schedule, "empty") == pytest.approx(0.5)
    assert runs == [plan.schedule] * len(runs)
    # The same of a whole cluster.
    of_cluster: Any = SimpleNamespace(_lanes=lanes, _measuring=SimpleNamespace(watch=watch))
    by_host = {"gemm": Timing("flop", (1.0, 2.0, 3.0), (1.0, 2.0, 3.0))}
    assert cluster_profile._Profiler._host_ms(of_cluster, by_host) == pytest.approx(0.5)
    # Where the host issues ahead, what it takes to issue an operation comes on top.
    issued = {"a": (0.1, 0.2, 9.0), "b": (0.1, 0.4, 9.0)}
    ahead = {name: replace(by_host["gemm"], issued_ms=times_ms) for name, times_ms in issued.items()}
    assert cluster_profile._Profiler._host_ms(of_cluster, ahead) == pytest.approx(0.5 + 0.3)
    assert len(runs) > 1


def test_the_doubt_about_a_layer_is_how_far_off_its_lines_it_is_of_all_that_it_takes() -> None:
    def off_by(whole_ms: float, share: float) -> Timing:
        # Of a constant time, in such turns that no line is nearer.
        times_ms = (whole_ms * (1 + share), whole_ms / (1 + share), whole_ms / (1 + share), whole_ms * (1 + share))
        return Timing("flop", (1.0, 2.0, 3.0, 4.0), times_ms)

    operations = {FORWARD: off_by(10.0, 0.02), BACKWARD: off_by(30.0, 0.01), ALL_TO_ALL: off_by(19.0, 0.0)}
    profile = LayerProfile(operations, 0.0, False)
    assert profile.relative_residual == pytest.approx(math.hypot(0.2, 0.3) / (10.0 + 30.0 + 19.0), rel=0.05)
    # What is not planned by adds nothing to it: 0.2.0 measured the two parts of a backward, too.
    late = replace(profile, operations=operations | {"experts dX": off_by(9.0, 0.3)})
    assert late.relative_residual == pytest.approx(profile.relative_residual)
    assert LayerProfile({}, 0.0, False).relative_residual == 0.0


def test_of_two_ways_the_faster_one_is_taken_by_size_with_one_change_at_most() -> None:
    sizes = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
    early, slow = Timing("byte", sizes, sizes), Timing("byte", sizes, tuple(3 * size for size in sizes))
    late = Timing("byte", sizes, (5.0, 5.1, 5.2, 5.4, 5.8, 6.6))
    rule, taken = fastest({"exchange": early, "backend": late})
    assert rule == ((0.0, "exchange"), (8.0, "backend"))
    assert taken.times_ms == (1.0, 2.0, 4.0, 5.4, 5.8, 6.6)
    assert fastest({"exchange": late, "backend": early})[0] == ((0.0, "backend"), (8.0, "exchange"))
    assert fastest({"exchange": early, "backend": slow}) == (((0.0, "exchange"),), early)
    # Two changes would be best. What is a little longer at the largest size is less than a quarter more at another.
    one, other = (Timing("byte", sizes[:3], times) for times in ((1.0, 10.0, 100.0), (3.0, 8.0, 103.0)))
    assert fastest({"exchange": one, "backend": other})[0] == ((0.0, "exchange"), (2.0, "backend"))


def sleep_by_rank(rank: int) -> list[float]:
    clock = FakeClock()
    watch = Stopwatch(CPU, host=clock)

    def prepare(size: int) -> Callable[[], None]:
        return lambda: clock.sleep(0.1 if rank == 0 else 0.01)

    group = dist.new_group(list(range(3)))
    return [*watch.times_ms("a collective", [1], prepare, group), *watch.times_ms("a computation", [1], prepare)]


def error_of_measuring(fails: bool) -> str:
    try:
        profile_of([Counting(fails=fails)], 3, 1)
    except MeasuringError as error:
        return f"{error} | {error.__cause__!r}"
    return "went through"


def reduced_by_every_way(rank: int) -> list[torch.Tensor]:
    groups = make_groups(1, 3)
    y_NecM = torch.arange(2.0 * 3 * 3 * 5).view(2 * 3, 1, 3, 5) * (rank + 1)
    ways = ((), ((0.0, "exchange"),), ((0.0, "backend"),), ((0.0, "backend"), (y_NecM.nbytes + 1.0, "exchange")))
    collectives = [Collectives(FlatAllToAll().exchange, None, groups.esp_group, reduces=each) for each in ways]
    assert [each.reduce_method(y_NecM) for each in collectives] == ["exchange", "exchange", "backend", "backend"]
    return [each.reduce(y_NecM) for each in collectives]


def on_three(rank: int, world_size: int) -> tuple[list[float], list[torch.Tensor], str]:
    hurry()
    return sleep_by_rank(rank), reduced_by_every_way(rank), error_of_measuring(rank == 1)


def test_ranks_share_one_time_of_an_operation_one_sum_by_every_way_to_reduce_and_one_error(tmp_path: Path) -> None:
    said = "rank 1 failed while measuring experts forward of Counting, 104 slots: OSError: the disk is on fire"
    for rank, (times_ms, reduced, error) in enumerate(run_on_ranks(on_three, 3, tmp_path / "ranks")):
        # A collective takes what it takes its ranks on average, and a computation what it takes the slowest.
        assert times_ms == pytest.approx([40.0, 100.0])
        assert all(torch.equal(each, reduced[0]) for each in reduced)
        assert error == f"{said} | {OSError('the disk is on fire') if rank == 1 else None!r}"


def test_between_nodes_the_mean_over_the_groups_of_all_places_counts() -> None:
    """They share the ports of the same nodes; one of them is through first, and in a step they make up for that."""
    links = SimpleNamespace(per_node=2, num_nodes=3, inside="of this node", between="of this place")
    links.exchange_inside = links.exchange_between = lambda x_RM, sends, receives: x_RM
    collectives: Any = SimpleNamespace(num_exchanging=6, num_sharing=1, ep_group="all", esp_group=None, nodes=links)
    subject: Any = SimpleNamespace(sizes=SimpleNamespace(width=5, dtype=torch.float32))
    for name, blocks, ranks in ((BETWEEN_NODES, 3, "all"), (IN_NODES, 2, "of this node")):
        prepare, row_bytes, counted = prepared(subject, name, collectives, torch.device("cpu"))
        assert (row_bytes, counted) == (blocks * 5 * 4, ranks)
        assert prepare(7)().shape == (blocks * 7, 5)
