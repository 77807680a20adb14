# SPDX-License-Identifier: Apache-2.0
"""The plans that look best are trained with in turns, all ranks keep the same one, and training stays what it is."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_fsmoe.trials import Trials
from tests.hurry import hurry
from tests.ranks import run_on_ranks
from tests.small_model import Case, SmallModel, batch

CASE = Case(2, 0, "fp32", 1, 2, True, expert="gpt")
STEPS = 40


@dataclass
class Step:
    forward_ms: float
    backward_ms: float = 0.0
    has_both: bool = True


@dataclass
class Clock:
    """Takes so long for each plan, with something on top in every step."""

    ms: list[float]
    extra_ms: list[float]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    used: list[int] = field(default_factory=list)
    unseen: frozenset[int] = frozenset()
    """Steps that cannot be read."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def read(self) -> Step | None:
        at = len(self.used) - 1
        return None if at in self.unseen else Step(self.ms[self.used[at]] + self.extra_ms[at % len(self.extra_ms)])


def played(ms: list[float], extra_ms: list[float], rounds: int = 3, unseen: frozenset[int] = frozenset()) -> Any:
    clock = Clock(ms, extra_ms, unseen=unseen)
    trials = Trials([f"plan {i}" for i in range(len(ms))], rounds, clock.used.append, clock)
    kept, steps = None, 0
    while kept is None:
        kept, steps = trials.step_is_over(), steps + 1
    assert steps == 1 + rounds * len(ms)
    assert clock.used[-1] == kept
    return trials, kept, clock.used[:-1]


def test_the_fastest_plan_is_kept_though_a_step_of_it_was_disturbed() -> None:
    trials, kept, used = played([7.0, 3.0, 5.0], [0.0, 0.1, 0.0, 90.0, 0.0, 0.2, 0.1])
    assert kept == 1
    assert used == [0, 1, 2, 2, 1, 0, 0, 1, 2]
    assert "plan 1 3" in trials.describe(kept)
    assert trials.describe(kept).count("(kept)") == 1


def test_a_gain_of_less_than_a_hundredth_changes_nothing() -> None:
    assert played([7.0, 6.95, 6.94], [0.0])[1] == 0
    assert played([7.0, 6.92, 6.91], [0.0])[1] == 1


def test_steps_that_were_not_seen_whole_say_nothing() -> None:
    assert played([7.0, 3.0], [0.0], rounds=1, unseen=frozenset({1}))[1] == 0
    trials, kept, _ = played([7.0, 3.0], [0.0], rounds=2, unseen=frozenset({0, 1, 2, 3}))
    assert kept == 0
    assert "what was predicted stays" in trials.describe(kept)


def train(rank: int, world_size: int, block: dict[str, Any] | None, accumulation: int) -> dict[str, Any]:
    import deepspeed

    import ds_fsmoe

    hurry()
    torch.manual_seed(0)
    case = replace(CASE, accumulation=accumulation)
    model = SmallModel(case, rank)
    config = case.ds_config() if block is None else case.ds_config(fsmoe={"enabled": True} | block)
    initialize = deepspeed.initialize if block is None else ds_fsmoe.initialize
    engine, *_ = initialize(model=model, model_parameters=list(model.parameters()), config=config)
    losses, degrees, has_plan = [], [], []
    for step in range(STEPS * accumulation):
        torch.manual_seed(100 * step + rank)
        loss, _ = engine(*batch(step, rank, torch.float32))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if block is not None:
            pipeline = next(iter(engine.fsmoe.layers.values())).deepspeed_moe.pipeline
            degrees.append((pipeline.forward.block.degree, pipeline.backward.block.degree))
            has_plan.append(engine.fsmoe.reduction.reducer.plan is not None)
    found = {"losses": losses, "degrees": degrees, "has_plan": has_plan}
    if block is not None:
        found["open"] = engine.fsmoe.autotune.trials is not None
    engine.destroy()
    return found


def tried_and_stock(rank: int, world_size: int, accumulation: int) -> dict[str, Any]:
    block = {"autotune": {"enabled": True, "trials": 2, "watch_every": 3}, "pipeline_degree": {"max": 3}}
    return train(rank, world_size, block, accumulation) | {
        "stock": train(rank, world_size, None, accumulation)["losses"]
    }


@pytest.mark.parametrize("accumulation", [1, 2])
def test_plans_are_tried_in_whole_steps_and_ranks_keep_the_same(accumulation: int, tmp_path: Path) -> None:
    first, second = run_on_ranks(tried_and_stock, 2, tmp_path, accumulation)
    assert first["degrees"] == second["degrees"]
    for found in (first, second):
        assert not found["open"]
        torch.testing.assert_close(torch.tensor(found["losses"]), torch.tensor(found["stock"]), rtol=1e-4, atol=1e-5)
        # Several were run, each for all micro batches of a step, and one stays.
        steps = [found["degrees"][i : i + accumulation] for i in range(4, len(found["degrees"]), accumulation)]
        assert len({tuple(each) for each in found["degrees"]}) >= 3
        assert all(len(set(each[:-1])) <= 1 for each in steps)
        assert len(set(found["degrees"][-5:])) == 1
        # Gradients are planned by the plan that stays.
        first_plan = found["has_plan"].index(True)
        assert len(set(found["degrees"][first_plan:])) == 1
