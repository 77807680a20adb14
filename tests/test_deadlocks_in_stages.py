# SPDX-License-Identifier: Apache-2.0
"""Whole batches through pipeline stages: what ranks of a stage issue together, and what stages send each other, get
stuck in no order that a backend may choose.

A send is over when its receive has begun, and no earlier. It is looked at in three ways: in a stream of each pair of
ranks beside the lanes, as NCCL has it; with all sends of a rank in one stream, as where one communicator has them all;
and with a host that does nothing else until it is over, as with gloo.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_fsmoe.execution.stream_lanes import StreamLanes
from ds_fsmoe.gradients.background_lane import BackgroundStreams
from tests.deadlocks import (
    Collective,
    Devices,
    Program,
    common_order,
    difference,
    on_other_streams,
    search,
    slots_needed,
    with_a_host_that_waits,
)
from tests.ranks import run_on_ranks
from tests.recorded_collectives import COMPUTE, record, record_deepspeed
from tests.test_deadlocks_in_steps import check
from tests.test_pipeline_stages import CHUNKED, EARLY, TUNED, batches, make_engine


@dataclass(frozen=True)
class Job:
    """Batches of four ranks."""

    stages: tuple[str, ...]
    """What its pairs of layers have, equally many a stage."""
    accumulation: int
    zero_stage: int = 0
    num_stages: int = 2
    how: str = "early"
    steps: int = 3
    shares_weights: bool = False

    @property
    def block(self) -> dict[str, Any]:
        return {
            "early": EARLY,
            "uncut": {"enabled": True, "autotune": False, "deterministic": True},
            "stock's reduction": CHUNKED | {"autotune": False, "gradient_partition": {"mode": "off"}},
            "tuned": TUNED,
            "sharded": EARLY | {"esp_size": 2, "topology": {"ranks_per_node": 2}},
        }[self.how]


def record_jobs(rank: int, world_size: int, jobs: list[Job]) -> list[list[Program]]:
    """What this rank issues in each job: as the engine is made, and batch by batch."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    return [_record(rank, each) for each in jobs]


def _record(rank: int, job: Job) -> list[Program]:
    with pytest.MonkeyPatch.context() as patch:
        tape = record(patch)
        record_deepspeed(patch, tape)
        # On a CPU lanes would be threads.
        patch.setattr("ds_fsmoe.layer.runtime.make_lanes", lambda *_: StreamLanes(device=torch.device("cuda", 0)))
        patch.setattr(
            "ds_fsmoe.gradients.reduction.make_background_lane", lambda _: BackgroundStreams(torch.device("cuda", 0))
        )
        how = {"accumulation": job.accumulation, "num_stages": job.num_stages}
        how["shares_weights"] = job.shares_weights
        engine = make_engine(rank, job.zero_stage, job.stages, job.block, **how)
        batch = batches(engine.grid.data_parallel_id)
        programs = [tape.take()]
        for _ in range(job.steps):
            engine.train_batch(batch)
            programs.append(tape.take())
        engine.destroy()
    return programs


def is_send(each: Collective) -> bool:
    return each.kind.startswith("send")


def sends_in_one_stream(program: Program) -> Program:
    return on_other_streams(program, lambda each: "sends" if is_send(each) else each.stream)


def sends_that_block(program: Program) -> Program:
    """The host waits for what it has not given to a lane."""
    return with_a_host_that_waits(program, lambda each: is_send(each) or each.stream == COMPUTE)


WAYS = (tuple, sends_in_one_stream, sends_that_block)


def check_batch(programs: Sequence[Program]) -> None:
    """In each of the three ways."""
    for way in WAYS:
        check(tuple(map(way, programs)))


QUICK = [
    Job(("moe",) * 4, 4),
    Job(("moe", "dense"), 1, zero_stage=1, steps=2),
    Job(("moe", "moe", "dense", "moe"), 7, num_stages=4, steps=2),
]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> list[list[tuple[Program, ...]]]:
    """Job -> batch -> program of each rank; the first "batch" is the making of the engine."""
    of_ranks = run_on_ranks(record_jobs, 4, tmp_path_factory.mktemp("ranks"), QUICK)
    return [list(zip(*of_job, strict=True)) for of_job in zip(*of_ranks, strict=True)]


def test_batches_through_stages_get_stuck_in_no_order_that_a_backend_may_choose(
    recorded: list[list[tuple[Program, ...]]],
) -> None:
    for job, of_batches in zip(QUICK, recorded, strict=True):
        assert len(of_batches) == 1 + job.steps
        for programs in of_batches:
            check_batch(programs)
        # Each micro batch goes from stage to stage and comes back.
        sent = [sum(map(is_send, program)) for program in of_batches[-1]]
        assert sum(sent) == 2 * 2 * job.accumulation * (job.num_stages - 1) * 4 // job.num_stages
    *_, last = recorded[0]
    assert {"link 0", COMPUTE} < {each.stream for each in last[2]}
    of_gradients = [at for at, each in enumerate(last[2]) if "gradients" in each.group]
    last_send = max(at for at, each in enumerate(last[2]) if is_send(each))
    assert sum(at < last_send for at in of_gradients) > 1, "gradients are under way before the last micro batch is back"
    # A stage of two ranks has one link; sends wait for what is on it, and it waits for them.
    assert slots_needed(last) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "job",
    [
        *(Job(("moe", "moe"), accumulation, zero_stage) for accumulation in (1, 7) for zero_stage in (0, 1)),
        *(Job(("moe",) * 4, 4, zero_stage, how=how) for zero_stage in (0, 1) for how in ("uncut", "stock's reduction")),
        *(Job(("moe",) * 4, accumulation, num_stages=4) for accumulation in (1, 4)),
        Job(("dense", "moe"), 4),
        *(Job(("moe",) * 4, 4, zero_stage, shares_weights=True) for zero_stage in (0, 1)),
        # Measured ahead of the third batch, and tried in those after it.
        *(Job(stages, 2, how="tuned", steps=16) for stages in (("moe", "moe"), ("dense", "moe"))),
    ],
    ids=str,
)
def test_every_kind_of_job_in_stages(job: Job, tmp_path: Path) -> None:
    of_batches = list(zip(*(found for (found,) in run_on_ranks(record_jobs, 4, tmp_path, [job])), strict=True))
    assert len(of_batches) == 1 + job.steps
    for programs in of_batches:
        check_batch(programs)
    lengths = [len(programs[-1]) for programs in of_batches]
    assert (max(lengths) > 10 * lengths[-1]) == (job.how == "tuned")


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [0, 1])
def test_stages_of_four_ranks_with_two_links_need_no_more_room_for_their_sends(zero_stage: int, tmp_path: Path) -> None:
    job = Job(("moe",) * 4, 4, zero_stage, how="sharded")
    *_, last = zip(*(found for (found,) in run_on_ranks(record_jobs, 8, tmp_path, [job])), strict=True)
    assert {"link 0", "link 1"} < {each.stream for each in last[0]}
    check_batch(last)
    assert slots_needed([tuple(each for each in program if not is_send(each)) for program in last]) == 2
    assert slots_needed(last) == 2


# ---- what is found where somebody errs


def places(program: Program, kind: str) -> list[int]:
    return [at for at, each in enumerate(program) if each.kind == kind]


def with_all_at(program: Program, at: int) -> Program:
    """With one that all ranks of the job take part in, ahead of what is in this place; the host waits for it."""
    ahead = program[:at]
    counts = {name: sum(each.stream == name for each in ahead) for name in {each.stream for each in ahead}}
    of_all = Collective(COMPUTE, "all", (0, 1, 2, 3), "all_reduce", 8, "float64", tuple(sorted(counts.items())))
    return (*ahead, of_all, *program[at:])


def is_stuck(programs: Sequence[Program]) -> bool:
    blocked = [with_a_host_that_waits(each, lambda one: is_send(one) or one.stream == COMPUTE) for each in programs]
    found = search(Devices(blocked, 1, implicit=True)).stuck is not None
    assert found == (common_order(programs) is None)
    return found


def test_what_all_ranks_do_in_the_third_forward_of_each_stage_gets_stuck_and_between_batches_it_does_not(
    recorded: list[list[tuple[Program, ...]]],
) -> None:
    """A stage begins its third forward when the next one has its second input, and hands the third on after it."""
    *_, last = recorded[0]
    third = [places(program, f"send from {rank % 2} to {rank % 2 + 2}")[2] for rank, program in enumerate(last)]
    # The first stage before it sends, the second when it has received.
    inside = [with_all_at(program, third[rank] + (rank >= 2)) for rank, program in enumerate(last)]
    assert difference(inside) is None, "each communicator sees what it should"
    assert is_stuck(inside)
    for at in (0, -1):
        assert not is_stuck([with_all_at(program, range(len(program) + 1)[at]) for program in last])


def test_a_send_and_a_receive_that_are_swapped_are_named(recorded: list[list[tuple[Program, ...]]]) -> None:
    *_, last = recorded[0]
    there, back = places(last[0], "send from 0 to 2")[2], places(last[0], "send from 2 to 0")[1]
    swapped = list(last[0])
    swapped[there], swapped[back] = swapped[back], swapped[there]
    said = difference([tuple(swapped), *last[1:]])
    assert said is not None
    assert "send from 0 to 2" in said
    assert "send from 2 to 0" in said


def moved(program: Program, kind: str, before: int) -> Program:
    """With the first one of a kind moved to a place that was another's."""
    at = places(program, kind)[0]
    one = replace(program[at], after=())
    rest = [replace(each, after=()) for each in program]
    rest.insert(before, one)
    del rest[at + (before <= at)]
    return tuple(rest)


def test_a_micro_batch_that_leaves_before_a_layers_collectives_and_is_taken_in_behind_them_gets_stuck(
    recorded: list[list[tuple[Program, ...]]],
) -> None:
    """Each pair and each stage sees what it should; a square of four ranks is what they cannot get round."""
    *_, last = recorded[0]
    early = moved(last[1], "send from 1 to 3", 0)
    late = moved(last[3], "send from 1 to 3", places(last[3], "send from 3 to 1")[0])
    both = [last[0], early, last[2], late]
    assert difference(both) is None
    assert is_stuck(both)
    assert not is_stuck([last[0], early, last[2], last[3]])
    assert not is_stuck([last[0], last[1], last[2], late])


def test_a_line_of_single_ranks_cannot_get_stuck_while_each_pair_agrees(
    recorded: list[list[tuple[Program, ...]]],
) -> None:
    """Without a stage of several ranks nothing closes a circle, whatever a stage does first."""
    *_, last = recorded[2]
    in_a_line = [tuple(each for each in program if is_send(each)) for program in last]
    for rank in (1, 2):
        by_pair = tuple(sorted((replace(each, after=()) for each in in_a_line[rank]), key=lambda each: each.group))
        programs = [*in_a_line[:rank], by_pair, *in_a_line[rank + 1 :]]
        assert difference(programs) is None
        assert not is_stuck(programs)
