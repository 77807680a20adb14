# SPDX-License-Identifier: Apache-2.0
"""Whole steps of Hugging Face models that are run by halves in turns, some of whose blocks run again: they get stuck in
no order that keeps that of issue."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from ds_fsmoe.execution.stream_lanes import StreamLanes
from ds_fsmoe.gradients.background_lane import BackgroundStreams
from tests.deadlocks import Program
from tests.hf_families import batch, model_of
from tests.ranks import run_on_ranks
from tests.recorded_collectives import record, record_deepspeed
from tests.samples import sampled
from tests.test_deadlocks_in_steps import check
from tests.test_halves import called
from tests.test_hugging_face import ds_config, engine_of


@dataclass(frozen=True)
class Step:
    """The third training step of a family; batches are run by halves from the second on."""

    stage: int = 1
    alltoall: str = "node_deduplicated"
    checkpoints: bool = False
    split: str = "on"
    ep_size: int = 4
    family: str = "olmoe"


def issued(rank: int, world_size: int, steps: list[Step]) -> list[tuple[Program, int]]:
    """What this rank issues in each, and the forwards of it by halves."""
    return [_issued(rank, each) for each in steps]


def _issued(rank: int, step: Step) -> tuple[Program, int]:
    import deepspeed
    from deepspeed.comm import comm

    model = model_of(step.family)  # transformers looks at streams when it is imported
    if step.checkpoints:
        model.gradient_checkpointing_enable()
    with pytest.MonkeyPatch.context() as patch:
        tape = record(patch)
        record_deepspeed(patch, tape)
        # On a CPU lanes would be threads.
        patch.setattr("ds_fsmoe.layer.runtime.make_lanes", lambda *_: StreamLanes(device=torch.device("cuda", 0)))
        patch.setattr(
            "ds_fsmoe.gradients.reduction.make_background_lane", lambda _: BackgroundStreams(torch.device("cuda", 0))
        )
        block = {"num_chunks": {"forward": 2, "backward": 3}, "two_batch_overlap": step.split, "autotune": False}
        nodes = {"topology": {"ranks_per_node": 2}, "alltoall": step.alltoall}
        config = ds_config(step.stage, ep_size=step.ep_size, **block, **nodes)
        deepspeed.init_distributed("gloo")
        if step.stage == 3:
            # Taken when it was made.
            patch.setattr(comm.cdb, "all_gather_function", torch.distributed.all_gather_into_tensor)
            patch.setattr(comm.cdb, "reduce_scatter_function", torch.distributed.reduce_scatter_tensor)
        engine = engine_of(model, config)
        for number in range(3):
            if (updated := engine.fsmoe.updated) is not None:
                updated.wait()
            tape.take()
            engine.backward(called(engine, batch(10 * number + rank, 2)).loss)
            engine.step()
        program, runs = tape.take(), engine.fsmoe.splitter.num_runs if engine.fsmoe.splitter else 0
        engine.destroy()
    return program, runs


CASES = [
    Step(),
    Step(checkpoints=True),
    Step(2, "flat", ep_size=2),
    Step(3, "flat", checkpoints=True),
    Step(1, "2dh", checkpoints=True, family="mixtral"),
    Step(3, ep_size=2),
]


@pytest.mark.long
@sampled("step", CASES, kept=[1], ids=str)
def test_halves_in_turns_get_stuck_in_no_order_that_keeps_that_of_issue(step: Step, tmp_path: Path) -> None:
    whole = Step(step.stage, step.alltoall, step.checkpoints, "off", step.ep_size, step.family)
    of_ranks = run_on_ranks(issued, 4, tmp_path, [step, whole])
    (halves, counts), (at_once, none) = (zip(*each, strict=True) for each in zip(*of_ranks, strict=True))
    assert (counts, none) == ((2,) * 4, (0,) * 4)
    check(halves)
    # Both halves send, and where blocks run again both send once more; gradients travel as often as before.
    sent = [
        sum(each.stream.startswith("link") and "all_to_all" in each.kind for each in program)
        for program in (halves[0], at_once[0])
    ]
    assert 0 <= 2 * sent[1] - sent[0] <= 8
