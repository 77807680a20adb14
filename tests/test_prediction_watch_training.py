# SPDX-License-Identifier: Apache-2.0
"""Predicted beside measured, while two ranks train."""

from __future__ import annotations

import csv
import functools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ds_fsmoe.observing import call_observer
from ds_fsmoe.observing.step_timer import StepClock
from ds_fsmoe.planning.call_shape import CallShape, sized
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.phase_plan import PhasePlan
from ds_fsmoe.planning.schedule import A2A_IN, A2A_OUT, EXPERT, EXPERT_GRAD, GRAD, Schedule
from ds_fsmoe.planning.timeline import Timeline, simulate
from ds_fsmoe.tuning.autotune import TuningResult
from ds_fsmoe.tuning.drift import StepComparison
from tests.fake_clock import FakeClock
from tests.logged import Said
from tests.ranks import run_on_ranks
from tests.small_model import BATCH, Case, SmallModel, batch

PHASES = [f"L0{layer}/{direction}" for layer in range(2) for direction in ("forward", "backward")]
COSTS = {A2A_IN: 2.0, EXPERT: 1.0, A2A_OUT: 3.0, GRAD: 0.5, EXPERT_GRAD: 0.5}
WAIT_S = 0.05
"""What the dense part takes. All else takes some ticks of the clock, however busy the machine is."""
CLOCK = FakeClock(tick_ns=10_000)
"""Of this rank."""


class Fixed:
    """Predicts so much for a task of each kind, and notes what it is asked about."""

    def __init__(self) -> None:
        self.asked: list[tuple[Schedule, PhasePlan, CallShape]] = []

    def timeline(self, schedule: Schedule, plan: PhasePlan, sizes: CallShape) -> Timeline:
        self.asked.append((schedule, plan, sizes))
        costs = {kind: LinearCost(cost_ms, 0.0) for kind, cost_ms in COSTS.items()}
        return simulate(sized(schedule, plan, sizes), costs)


class Planned:
    """Stands for a stage that has run."""

    trials = None

    def __init__(self) -> None:
        self.result = TuningResult(predictors={f"L0{layer}": Fixed() for layer in range(2)})
        self.asked: list[tuple[int, str]] = []
        self.engine: Any = None

    def counts_forward(self, num_before: int) -> bool:
        return False

    def step_is_over(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def request_again(self, reason: str) -> None:
        self.asked.append((self.engine.global_steps, reason))


class Slow(torch.nn.Module):
    """The dense layer, in its place, and slower."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.wait_s = inner, WAIT_S

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CLOCK.sleep(self.wait_s)
        return self.inner(x)


class Again(torch.nn.Module):
    """A layer whose activations are not kept."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


def engine_of(rank: int, case: Case, blocks: dict[str, Any] | None = None, **autotune: Any) -> tuple[Any, SmallModel]:
    """A training whose stage is taken to have run."""
    import ds_fsmoe

    call_observer.StepClock = functools.partial(StepClock, host=CLOCK)
    model = SmallModel(case, rank)
    model.first = Slow(model.first)
    block = {"enabled": True, "metrics": "detailed"}
    block["autotune"] = {"enabled": True, "watch_every": 1, "trials": 0} | autotune
    config = case.ds_config(fsmoe=block, **blocks or {})
    engine, *_ = ds_fsmoe.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    engine.fsmoe.autotune = Planned()
    engine.fsmoe.autotune.engine = engine
    return engine, model


def train_step(engine: Any, rank: int, step: int, is_dummy: bool = False) -> StepComparison | None:
    """An optimizer step; what has been found of it."""
    before = engine.fsmoe.watch.last
    for micro in range(engine.gradient_accumulation_steps()):
        if is_dummy:
            loss = engine.fsmoe_dummy_forward()
        else:
            loss, _ = engine(*batch(10 * step + micro, rank, torch.float32))
        engine.backward(loss)
        engine.step()
    found = engine.fsmoe.watch.last
    return None if found is before else found


def train(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    logging.getLogger("ds_fsmoe").setLevel(logging.ERROR)
    # Every second step, of three micro batches, with an evaluation between, and everything is written to files.
    monitor = {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "job"}}
    case = Case(2, 1, "fp32", 3, 2, True, expert="gpt")
    engine, _ = engine_of(rank, case, monitor, watch_every=2)
    # Where gradients travel is not to depend on how busy this machine is.
    engine.fsmoe.reduction._by_rule = True
    found["accumulated"] = []
    for step in range(7):
        found["accumulated"].append(train_step(engine, rank, step))
        engine.eval()
        engine(*batch(99, rank, torch.float32))
        engine.train()
    predictors = engine.fsmoe.autotune.result.predictors
    found["asked"] = predictors["L00"].asked
    sent, flats = engine.fsmoe.reduction.reducer.plan.parts, engine.fsmoe.reduction.reducer.flats
    found["sent"] = {(each.stop - each.first) * flats[each.flat].element_bytes for part in sent for each in part}
    engine.destroy()
    # Layers whose forwards are run again in the backward.
    engine, model = engine_of(rank, Case(2, 0, expert="gpt"))
    model.moes = torch.nn.ModuleList(Again(moe) for moe in model.moes)
    found["checkpointed"] = [train_step(engine, rank, step) for step in range(3)]
    engine.destroy()
    # One rank runs out of batches.
    engine, _ = engine_of(rank, Case(2, 0, expert="gpt"))
    found["dummy"] = [train_step(engine, rank, step, is_dummy=rank == 1 and step == 2) for step in range(4)]
    engine.destroy()
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What has been found, which is the same on all ranks, and where monitors have written it."""
    folder = tmp_path_factory.mktemp("watched")
    first, second = run_on_ranks(train, 2, folder / "ranks", str(folder))
    for name in ("accumulated", "checkpointed", "dummy"):
        assert first[name] == second[name]
    return first | {"folder": folder}


def one_run_ms(direction: str) -> float:
    """Uncut, and without gradients."""
    # Two products of each of two experts, and twice as many in the backward.
    return COSTS[A2A_IN] + COSTS[A2A_OUT] + (2 if direction == "backward" else 1) * 2 * 2 * COSTS[EXPERT]


def test_steps_of_several_micro_batches_are_compared_as_one_on_all_ranks_alike(run: dict[str, Any]) -> None:
    assert [each and each.step for each in run["accumulated"]] == [None, None, 2, None, 4, None, 6]
    for each in filter(None, run["accumulated"]):
        assert list(each.phases) == PHASES
        assert each.rest.measured_ms >= 3 * WAIT_S * 1e3
        # No gradients are there yet when the last layer's backward begins.
        for phase in ("L00/forward", "L01/forward", "L01/backward"):
            assert each.phases[phase].predicted_ms == pytest.approx(3 * one_run_ms(phase.split("/")[1]))
        inside_ms = sum(phase.predicted_ms for phase in each.phases.values())
        assert each.whole.predicted_ms == pytest.approx(each.rest.predicted_ms + inside_ms)
        assert each.kinds[A2A_IN].predicted_ms == pytest.approx(3 * 4 * COSTS[A2A_IN])
        assert each.kinds[A2A_IN].measured_ms > 0
        assert each.whole.measured_ms > each.rest.measured_ms


def test_gradients_that_travel_in_a_backward_are_in_its_prediction(run: dict[str, Any]) -> None:
    backwards = [(schedule, sizes) for schedule, plan, sizes in run["asked"] if plan.backward]
    assert len(backwards) == 3 * 3
    for schedule, sizes in backwards:
        slices = [task for task in schedule.tasks if task.kind in (GRAD, EXPERT_GRAD)]
        assert len(slices) == len(sizes.slices_bytes)
    # Looked at for three rounds, they travel from then on, with the last of the micro batches.
    assert any(sizes.slices_bytes for _, sizes in backwards)
    assert {each for _, sizes in backwards[-3:] for each in sizes.slices_bytes} <= run["sent"] - {0}


def test_monitors_write_what_was_found(run: dict[str, Any]) -> None:
    for name, value in (("step", "whole"), ("rest", "rest"), ("L01_backward", None), ("tasks_EXPERT", None)):
        for which in ("predicted_ms", "measured_ms"):
            with (run["folder"] / "job" / f"fsmoe_{name}_{which}.csv").open() as file:
                rows = list(csv.DictReader(file))
            # Samples of two ranks with three micro batches each.
            assert [int(row["step"]) for row in rows] == [2 * 3 * BATCH * (step + 1) for step in (2, 4, 6)]
            for row, found in zip(rows, filter(None, run["accumulated"]), strict=True):
                compared = getattr(found, value) if value else found.phases.get(name.replace("_", "/"))
                compared = compared or found.kinds[EXPERT]
                assert float(row[which]) == pytest.approx(getattr(compared, which))


def test_a_forward_that_is_run_again_is_predicted_again(run: dict[str, Any]) -> None:
    for each in run["checkpointed"][1:]:
        assert each.phases["L00/forward"].predicted_ms == pytest.approx(2 * one_run_ms("forward"))
        assert each.phases["L00/backward"].predicted_ms == pytest.approx(one_run_ms("backward"))
        # The dense layer is not run again, and nothing of the second forward counts as dense.
        assert each.rest.measured_ms >= WAIT_S * 1e3


def test_a_rank_without_a_batch_takes_part(run: dict[str, Any]) -> None:
    assert [each and each.step for each in run["dummy"]] == [None, 1, 2, 3]
    dummy, whole = run["dummy"][2:]
    for name, each in whole.phases.items():
        assert dummy.phases[name].predicted_ms == each.predicted_ms
    assert dummy.rest.measured_ms >= WAIT_S * 1e3


# ---- drift


def drift(rank: int, world_size: int) -> dict[bool, tuple[list[tuple[int, str]], list[str]]]:
    found = {}
    for retunes in (False, True):
        said = Said()
        logging.getLogger("ds_fsmoe").setLevel(logging.DEBUG)
        logging.getLogger("ds_fsmoe").addHandler(said)
        engine, model = engine_of(rank, Case(2, 0, expert="gpt"), drift_threshold=2.0, retune_on_drift=retunes)
        for step in range(9):
            if rank == 1 and step == 5:
                model.first.wait_s = 10 * WAIT_S
            train_step(engine, rank, step)
        found[retunes] = engine.fsmoe.autotune.asked, [line for line in said.lines if line.startswith("drift: ")]
        engine.destroy()
        logging.getLogger("ds_fsmoe").removeHandler(said)
    return found


def test_one_slow_rank_makes_all_of_them_plan_again_in_the_same_step(tmp_path: Path) -> None:
    one, other = run_on_ranks(drift, 2, tmp_path)
    assert one[False][0] == other[False][0] == []
    ((step, reason),) = one[True][0]
    assert other[True][0] == [(step, reason)]
    # Steps 5, 6 and 7 were slow.
    assert step == 8
    assert reason.startswith("step 7 took ")
    for retunes in (False, True):
        (line,) = one[retunes][1]
        assert line.startswith("drift: step 7 took ")
        assert "largest difference, predicted and measured: the rest of the model" in line
        assert other[retunes][1] == []
    assert "fsmoe.autotune.retune_on_drift = true plans again" in one[False][1][0]
