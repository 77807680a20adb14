# SPDX-License-Identifier: Apache-2.0
"""Whatever the timing, the numbers are those of one task after another."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from ds_fsmoe.execution.lanes import Observer
from ds_fsmoe.planning.schedule import Task
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.small_model import Case, SmallModel, batch
from tests.waiting import pause


class Pauses(Observer):
    """Now and then a task starts late, on each rank others."""

    def __init__(self, rank: int) -> None:
        self._random = random.Random(rank)
        self.count = 0

    def begin(self, index: int, task: Task) -> None:
        if self._random.random() < 0.1:
            self.count += 1
            pause(self._random, 0.0002, 0.001, 0.0018)


def train(rank: int, steps: int, overlap: bool, case: Case) -> tuple[list[torch.Tensor], int]:
    import ds_fsmoe

    torch.manual_seed(0)
    model = SmallModel(case, rank)
    # By rule, because what is cut by a clock may be cut elsewhere in the other run.
    block = {"enabled": True, "overlap": overlap, "deterministic": True}
    block["pipeline_degree"] = {"forward": 3, "backward": 2}
    config = case.ds_config(fsmoe=block)
    engine, *_ = ds_fsmoe.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    pauses = Pauses(rank)
    seen = []
    for step in range(steps):
        if step == 2 and overlap:  # gradients travel in the lanes by now
            for moe in model.moes:
                state = moe.deepspeed_moe.fsmoe
                state.attach(state.pipeline.window, pauses)
        loss, _ = engine(*batch(step, rank, torch.float32))
        engine.backward(loss)
        engine.step()
        seen.append(loss.detach())
    seen += [each.detach().clone() for each in model.parameters()]
    assert engine.fsmoe.reduction.reducer.plan.hidden() > 0
    engine.destroy()
    return seen, pauses.count


def compare(rank: int, world_size: int, steps: int, case: Case) -> tuple[bool, int]:
    serial, _ = train(rank, steps, False, case)
    paused, count = train(rank, steps, True, case)
    return all(torch.equal(a, b) for a, b in zip(serial, paused, strict=True)), count


@sampled("drop_tokens", [False, True])
def test_training_steps_with_random_pauses_equal_the_serial_run(drop_tokens: bool, tmp_path: Path) -> None:
    for equal, count in run_on_ranks(compare, 2, tmp_path, 20, Case(ep_size=2, k=2, drop_tokens=drop_tokens)):
        assert equal
        assert count > 20
