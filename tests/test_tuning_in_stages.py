# SPDX-License-Identifier: Apache-2.0
"""The autotuner in pipeline stages: all stages plan, each for itself, and try, refine and watch together, by whole
batches; and where one of them fails, all hear of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_fsmoe.distributed.fail_together import MeasuringError
from ds_fsmoe.tuning.trial_rounds import TrialRounds
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.test_pipeline_stages import batches, make_engine

pytestmark = pytest.mark.long

STEPS = 48
"""More than it takes to begin to measure, and all rounds of trials."""


def block_of(**autotune: Any) -> dict[str, Any]:
    """A schedule by name, so that DeepSpeed's may not stay and end the rounds early."""
    asked = {"enabled": "auto", "trials": 2, "watch_every": 1} | autotune
    return {"enabled": True, "schedule": "fsmoe", "autotune": asked, "num_chunks": {"max": 2}}


class Kept(TrialRounds):
    """Keeps what it was given to try, and goes on from a plan in chunks, whichever was fastest: it has neighbours."""

    rounds_of_plans: list[list[Any]]

    def _next_round(self, trials: Any, kept: int) -> None:
        if self._can_refine:
            kept = next(i for i, each in enumerate(self.plans) if "2 and 2 chunks" in each.of_stages.name)
        super()._next_round(trials, kept)

    def _near(self, best: Any, forward: Any, backward: Any, spread: float) -> list[Any]:
        found = super()._near(best, forward, backward, spread)
        # By what was measured none may be worth a trial.
        return [best, best] if len(found) == 1 and self.model.search.request.options else found

    def _begin(self, plans: Any, turns: int, max_steps: int | None) -> Any:
        self.rounds_of_plans = [*getattr(self, "rounds_of_plans", []), list(plans)]
        return super()._begin(plans, turns, max_steps)


def endless(engine: Any) -> Iterator[Any]:
    return itertools.cycle(list(batches(engine.grid.data_parallel_id)))


def tune(rank: int, world_size: int, stages: tuple[str, ...], num_stages: int) -> dict[str, Any]:
    import deepspeed

    deepspeed.init_distributed("gloo")
    tried: list[Kept] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ds_fsmoe.tuning.autotune.TrialRounds", lambda *a, **k: tried.append(Kept(*a, **k)) or tried[-1])
        engine = make_engine(rank, 1, stages, block_of(), num_stages=num_stages)
        batch = endless(engine)
        for _ in range(STEPS):
            engine.train_batch(batch)
    tuner, watch = engine.fsmoe.autotune, engine.fsmoe.watch
    assert tuner.is_settled
    # What a rank of a pipeline has to have as all others have it.
    found = {
        "runs": tuner.result.of_stages,
        "told": [[each.of_stages for each in plans] for plans in tried[0].rounds_of_plans],
        "tried": tuner.result.tried,
        "step": tuner.result.step,
        "watched": watch.last,
        "outcome": replace(tuner.result.outcome, took_s=0.0, least_dense_ms=None),
    }
    engine.destroy()
    return found


@sampled(
    ("stages", "num_stages"), [(("dense", "moe"), 2), (("moe",) * 4, 2), (("moe", "dense", "moe", "moe"), 4)], kept=[0]
)
def test_all_stages_try_refine_and_watch_the_same_batches(
    stages: tuple[str, ...], num_stages: int, tmp_path: Path
) -> None:
    first, *others = run_on_ranks(tune, 4, tmp_path, stages, num_stages)
    for other in others:
        for name, found in first.items():
            assert other[name] == found, name
    candidates, near, last = first["told"]
    assert len(first["tried"]) == 3
    assert len(near) > 2, "neighbours of the fastest"
    assert len(last) == 2
    assert all(len(each.times) == num_stages for each in candidates)
    for times in (each for candidate in candidates for each in candidate.times):
        assert min(times.forward_ms, times.backward_ms) > 0
        # Gradients travel in the last one alone.
        assert times.last_backward_ms >= times.backward_ms * (1 - 1e-9)
    # A stage without layers of ours has one way, however many the others have.
    for stage in (index for index, kind in enumerate(stages) if kind == "dense" and len(stages) == num_stages):
        assert len({each.times[stage] for each in candidates}) == 1
    # What is told beside the measured batch is that of the plan that stays.
    assert first["step"] == first["runs"].step == last[0].step
    # The work of the stage that takes longest: two micro-batches, of which the second sends gradients.
    for each in candidates:
        assert each.step.chosen_ms >= max(2 * times.forward_ms + 2 * times.backward_ms for times in each.times)
    watched = first["watched"]
    assert set(watched.phases) == {f"stage{i}/{phase}" for i in range(num_stages) for phase in ("forward", "backward")}
    assert all(each.measured_ms > 0 for each in watched.phases.values())
    assert watched.whole.predicted_ms == pytest.approx(first["step"].chosen_ms + watched.rest.predicted_ms)


# ---- a stage that fails


def fail_in_measuring(rank: int, world_size: int, enabled: bool | str) -> tuple[str, bool]:
    """What is said, and whether training went on."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    engine = make_engine(rank, 0, ("moe", "moe"), block_of(enabled=enabled) | {"schedule": "best"})
    batch, said = endless(engine), ""

    def fails(*_: Any) -> Any:
        raise ArithmeticError("experts of this stage do not like to be timed")

    with pytest.MonkeyPatch.context() as patch:
        # It takes long, and all ranks do it together.
        patch.setattr("ds_fsmoe.tuning.measure.profile_cluster", lambda *_, **__: None)
        if engine.stage_id == 1:
            patch.setattr("ds_fsmoe.tuning.measure.profile", fails)
        try:
            for _ in range(16):
                engine.train_batch(batch)
        except MeasuringError as error:
            said = str(error)
    return said or engine.fsmoe.autotune.describe(), not said


@sampled("enabled", [True, "auto"], kept=[0, 1])
def test_a_stage_that_fails_to_be_measured_fails_on_every_rank_or_goes_on_on_every_rank(
    enabled: bool | str, tmp_path: Path
) -> None:
    for said, goes_on in run_on_ranks(fail_in_measuring, 4, tmp_path, enabled):
        assert goes_on == (enabled == "auto")
        assert said == "not measured: measuring failed" if goes_on else "ArithmeticError: experts of this" in said


class Broken(RuntimeError):
    """Of a user's layer."""


def fail_in_a_trial(rank: int, world_size: int) -> str:
    """The type of what is raised. A process that is through takes its connections with it, as a failed one does."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    engine = make_engine(rank, 0, ("moe", "moe"), block_of())
    batch = endless(engine)

    def breaks(*_: Any) -> None:
        if engine.stage_id == 1 and engine.fsmoe.autotune.trials is not None:
            raise Broken

    engine.module.register_forward_pre_hook(breaks)
    try:
        for _ in range(STEPS):
            engine.train_batch(batch)
    except RuntimeError as error:
        return type(error).__name__
    return ""


def test_a_layer_that_fails_in_a_trial_of_one_stage_leaves_no_rank_waiting(tmp_path: Path) -> None:
    first, second, *failed = run_on_ranks(fail_in_a_trial, 4, tmp_path)
    assert failed == ["Broken"] * 2
    # They have lost those who had to send to them.
    assert first == second == "RuntimeError"


# ---- communicators


def tune_on_two_nodes(rank: int, world_size: int) -> float:
    """The sum over a communicator that is made after one stage has looked for ways that need some of their own."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    block = block_of(trials=0) | {"alltoall": "auto", "topology": {"ranks_per_node": 2}}
    engine = make_engine(rank, 0, ("moe", "dense"), block, ep_size=4)
    batch = endless(engine)
    for _ in range(13):
        engine.train_batch(batch)
    assert len(engine.fsmoe.autotune.result.job.labels) == (engine.stage_id == 0)
    total = torch.ones(())
    dist.all_reduce(total, group=dist.new_group([0, 7, 3, 4]))
    return total.item()


@pytest.mark.long
def test_communicators_of_one_stages_ways_are_made_by_all_ranks(tmp_path: Path) -> None:
    assert run_on_ranks(tune_on_two_nodes, 8, tmp_path) == [4.0, 1.0, 1.0, 4.0, 4.0, 1.0, 1.0, 4.0]
