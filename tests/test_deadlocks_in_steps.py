# SPDX-License-Identifier: Apache-2.0
"""Whole training steps, as engines under DeepSpeed issue them: its own collectives and ours, gradients in slices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_fsmoe.execution.stream_lanes import StreamLanes
from ds_fsmoe.gradients.background_lane import BackgroundStreams
from tests.deadlocks import (
    Devices,
    Program,
    common_order,
    difference,
    search,
    search_at_random,
    slots_needed,
    waits_fit_the_order,
)
from tests.gradient_cases import LOOPS, Run, let_deepspeed_read_nothing, training
from tests.ranks import run_on_ranks
from tests.recorded_collectives import COMPUTE, record, record_deepspeed

TWO_NODES = (("deterministic", True), ("topology.ranks_per_node", 2))
CUT = (*TWO_NODES, ("pipeline_degree.forward", 2), ("pipeline_degree.backward", 3))
SHARDED = (*CUT, ("esp_size", 2))
GPT = frozenset({"gpt"})
OVERLAP = (("zero_optimization.overlap_comm", True), ("zero_optimization.contiguous_gradients", True))


@dataclass(frozen=True)
class Step:
    """One training step of a run, some steps in."""

    run: Run
    one_link: bool = False
    count: int = 1
    """The steps that are recorded."""
    ends_gathers: bool = True
    """Whether gradients wait for updated parameters that this rank has not read."""

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.run.name}{', links are used one at a time' if self.one_link else ''}"


def record_steps(rank: int, world_size: int, steps: list[Step]) -> list[Program]:
    """What this rank issues in each."""
    return [_record(rank, each) for each in steps]


def _record(rank: int, step: Step, between: Callable[[Any], None] = lambda _: None) -> Program:
    with pytest.MonkeyPatch.context() as patch:
        tape = record(patch)
        record_deepspeed(patch, tape)
        # On a CPU lanes would be threads.
        lanes = {"device": torch.device("cuda", 0), "one_link": step.one_link}
        patch.setattr("ds_fsmoe.layer.runtime.make_lanes", lambda *_: StreamLanes(**lanes))
        patch.setattr(
            "ds_fsmoe.gradients.reduction.make_background_lane", lambda _: BackgroundStreams(torch.device("cuda", 0))
        )
        if not step.ends_gathers:
            patch.setattr("ds_fsmoe.gradients.reducer.end_gathers", lambda: None)
        if "tail" in step.run.features:
            patch.setattr("ds_fsmoe.gradients.updated_parameters.FEWEST_NUMEL", 64)
            let_deepspeed_read_nothing(patch)
        if step.one_link:
            stated = property(lambda _: "it is asked for", lambda *_: None)
            patch.setattr("ds_fsmoe.layer.runtime.LayerRuntime.one_link", stated, raising=False)
        with training(step.run, rank) as script:
            for _ in range(2):  # the first backward is looked at, and gradients travel from the second on
                LOOPS[step.run.loop](script)
            if (updated := script.engine.fsmoe.updated) is not None:
                updated.wait()
            between(script.engine)
            tape.take()
            for _ in range(step.count):
                LOOPS[step.run.loop](script)
            return tape.take()


def check(programs: tuple[Program, ...]) -> None:
    """What all steps have in common."""
    assert difference(programs) is None
    assert common_order(programs) is not None
    assert all(map(waits_fit_the_order, programs))
    assert search(Devices(programs, 1, implicit=True)).is_free
    # As the proof has it, whoever is first.
    assert search_at_random(Devices(programs, 1, implicit=True), range(2)).stuck is None
    # With a slot for each stream no slot is contested, and no communicator of ours: so this is a proof as well.
    assert search(with_all_slots(programs)).is_free


def with_all_slots(programs: tuple[Program, ...]) -> Devices:
    """Devices with a slot for each stream, where a communicator of ours has one collective at a time."""
    streams = max(len({each.stream for each in program}) for program in programs)
    return Devices(programs, streams, one_of="fsmoe_")


SAMPLE = [
    Step(Run(0, block=SHARDED, features=GPT)),
    Step(Run(0, block=SHARDED, features=GPT), one_link=True),
    Step(Run(2, block=CUT, config=OVERLAP)),
    Step(Run(2, mode="off", block=CUT, config=OVERLAP), one_link=True),
]


def test_whole_steps_of_four_ranks_get_stuck_in_no_order_that_keeps_that_of_issue(tmp_path: Path) -> None:
    of_ranks = run_on_ranks(record_steps, 4, tmp_path, SAMPLE)
    two_links, turns, stage_2, stocks_own = zip(*of_ranks, strict=True)
    for each in (two_links, turns, stage_2, stocks_own):
        check(each)
    assert {COMPUTE, "link 0", "link 1"} <= {each.stream for each in stage_2[0]}
    beside = {each.stream for each in stage_2[0]} - {COMPUTE, "link 0", "link 1"}
    print(beside, slots_needed(two_links), slots_needed(stage_2), slots_needed(turns), slots_needed(stocks_own))
    assert len(beside) == 2, "between layers, gradients and updated parameters have the same two streams"
    # Without an order two links get stuck if one fits; where they take turns, nothing can.
    assert search_at_random(Devices(two_links, 1), range(50)).stuck is not None
    assert slots_needed(two_links) == slots_needed(stage_2) == 2
    assert {each.stream for each in turns[0]} == {COMPUTE, "link 0"}
    assert slots_needed(turns) == 1
    # Where DeepSpeed reduces, in a stream of its own, links that take turns are not enough: a warning says so.
    assert slots_needed(stocks_own) == 2


TAIL = [
    Step(Run(1, mode="fixed_chunk", block=CUT, features=frozenset({"tail"})), count=2, ends_gathers=ends)
    for ends in (True, False)
]


@pytest.mark.long
def test_gradients_wait_for_updated_parameters_that_one_rank_reads_and_another_does_not(tmp_path: Path) -> None:
    kept, taken_out = zip(*run_on_ranks(record_steps, 4, tmp_path, TAIL), strict=True)
    check(kept)
    # Each communicator still sees the same calls: what is missing is a wait of those who have not read.
    assert difference(taken_out) is None
    stuck = search(with_all_slots(taken_out)).stuck
    assert stuck is not None
    assert any("fsmoe_gradients" in name for names in stuck for name in names)


PLACED = (*CUT, ("dispatch", "unpadded"), ("placement.policy", "balanced"))


def record_placed(rank: int, world_size: int, steps: list[Step]) -> list[Program]:
    """A step whose experts have moved, and move on at its end."""

    def move(engine: Any) -> None:
        placement = engine.fsmoe.placement
        placement.go_to({label: now.swapped(1, now.num_local) for label, now in placement.now.items()})
        watch = engine.fsmoe.placement_watch
        watch.wanted = {label: now.swapped(0, now.num_local) for label, now in placement.now.items()}
        watch._mover = placement.mover()

    return [_record(rank, each, move) for each in steps]


def test_moves_get_stuck_in_no_order_that_keeps_that_of_issue(tmp_path: Path) -> None:
    steps = [Step(Run(stage, ep_size=ep, block=PLACED)) for stage, ep in ((1, 2), (0, 4))]
    for programs in zip(*run_on_ranks(record_placed, 4, tmp_path, steps), strict=True):
        check(programs)


MATRIX = [
    Step(replace(run, stage=stage, mode=mode, block=block, features=features))
    for stage in (0, 1, 2)
    for mode in ("adaptive", "fixed_chunk", "micro_ops", "dense_only", "off")
    for block, features in ((CUT, frozenset()), (SHARDED, GPT), ((*CUT, ("alltoall", "2dh")), frozenset()))
    for run in (Run(ep_size=2), Run(ep_size=2, config=OVERLAP if stage else (), checkpointing="saved"))
]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
def test_every_stage_mode_and_layout(part: int, tmp_path: Path) -> None:
    steps = MATRIX[part::6]
    of_ranks = run_on_ranks(record_steps, 4, tmp_path, steps, limit_s=600)
    for step, *programs in zip(steps, *of_ranks, strict=True):
        print(step.name)
        check(tuple(programs))


@pytest.mark.slow
def test_eight_ranks(tmp_path: Path) -> None:
    wide = (*SHARDED[:1], ("topology.ranks_per_node", 4), *SHARDED[2:])
    steps = [Step(Run(1, block=wide, features=GPT)), Step(Run(0, ep_size=4, block=wide[:-1]))]
    for programs in zip(*run_on_ranks(record_steps, 8, tmp_path, steps, limit_s=600), strict=True):
        check(tuple(programs))
