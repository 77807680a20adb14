# SPDX-License-Identifier: Apache-2.0
"""What was predicted beside what happens, in steps, in batches of stages and while ranks train: the same numbers on all
ranks, and what follows from them."""

from __future__ import annotations

import csv
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ds_fsmoe.config.blocks import AutotuneBlock
from ds_fsmoe.distributed.topology import Stages
from ds_fsmoe.observing import call_observer
from ds_fsmoe.observing.step_timer import MeasuredRun, MeasuredStep, StepClock
from ds_fsmoe.planning.block import BlockPlan
from ds_fsmoe.planning.call_shape import CallShape, sized
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.decide.step_time import StageTimes, StepTimes
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.phase_plan import PhasePlan
from ds_fsmoe.planning.schedule import A2A_IN, A2A_OUT, EXPERT, EXPERT_GRAD, GRAD, Schedule
from ds_fsmoe.planning.timeline import Span, Timeline, simulate
from ds_fsmoe.tuning.autotune import TuningResult
from ds_fsmoe.tuning.drift import BatchWatch, Compared, PredictionWatch, StepComparison
from ds_fsmoe.tuning.tuned_model import OfStages
from tests.fake_clock import FakeClock
from tests.logged import heard
from tests.ranks import run_on_ranks
from tests.small_model import BATCH, Case, SmallModel, batch, small_engine

PLANS = {
    name: PhasePlan(BlockPlan(), Groups(world=2, gpus_per_node=2, ep=2), backward=name == "backward")
    for name in ("forward", "backward")
}
# In each phase.
PREDICTED = {A2A_IN: 2.0, EXPERT: 5.0, A2A_OUT: 3.0}


def one_by_one(schedule: Schedule, times_ms: Mapping[str, float]) -> Timeline:
    spans, at_ms = [], 0.0
    for task in schedule.tasks:
        took_ms = times_ms.get(task.kind, 0.0)
        spans.append(Span(task, at_ms, at_ms + took_ms, None))
        at_ms += took_ms
    return Timeline(tuple(spans))


class Fixed:
    """Predicts the same whatever the sizes are."""

    capacity = 8
    """What the layers were planned for."""

    def timeline(self, schedule: Schedule, plan: PhasePlan, sizes: Any) -> Timeline:
        return one_by_one(schedule, PREDICTED)


class Played:
    """A clock that was given what it reads."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.step: MeasuredStep | None = None
        self.is_on = False

    def start(self) -> None:
        self.is_on = True

    def stop(self) -> None:
        self.is_on = False

    def read(self) -> MeasuredStep | None:
        assert self.is_on
        return self.step


def step_of(
    rest_ms: float = 80.0, batches: int = 1, label: str = "L00", sizes: CallShape | None = None, **times_ms: float
) -> MeasuredStep:
    runs = []
    for direction in batches * ("forward", "backward"):
        schedule = PLANS[direction].schedule
        timeline = one_by_one(schedule, PREDICTED | times_ms)
        about = label, PLANS[direction], sizes
        runs.append(MeasuredRun(f"{label}/{direction}", direction == "backward", schedule, timeline, about))
    inside_ms = sum(run.timeline.makespan_ms for run in runs)
    return MeasuredStep(batches, batches, rest_ms / 4, inside_ms + 3 * rest_ms / 4, tuple(runs))


@pytest.fixture
def said() -> Iterator[list[str]]:
    handler, logger = heard(), logging.getLogger("ds_fsmoe")
    level, _ = logger.level, logger.setLevel(logging.DEBUG)
    yield handler.lines
    handler.end()
    logger.setLevel(level)


class Watched:
    """A watch that is played steps."""

    def __init__(self, labels: tuple[str, ...] = ("L00",), predictors: Any = None, **autotune: Any) -> None:
        self.clock, self.asked = Played(), []
        block = AutotuneBlock(**{"enabled": True, "watch_every": 1} | autotune)
        predictors = {"L00": Fixed()} if predictors is None else predictors
        self.watch = self.made(block, labels, lambda: predictors)
        self.number = 0
        self.watch.step_is_over(0)

    def made(self, block: AutotuneBlock, labels: tuple[str, ...], predictors: Callable[[], Any]) -> Any:
        return PredictionWatch(block, self.clock, labels, predictors, self.asked.append)

    def play(self, step: MeasuredStep | None, times: int = 1) -> StepComparison | None:
        found = None
        for _ in range(times):
            self.clock.step = step
            self.number += 1
            found = self.watch.step_is_over(self.number)
        return found


# ---- one step


def test_a_step_is_its_predicted_phases_and_the_rest_as_it_was() -> None:
    watched = Watched()
    found = watched.play(step_of(rest_ms=80.0, EXPERT=7.0))
    assert found == watched.watch.last
    assert found.step == 0
    assert found.phases == {f"L00/{direction}": Compared(10.0, 12.0) for direction in PLANS}
    assert found.kinds == {A2A_IN: Compared(4.0, 4.0), EXPERT: Compared(10.0, 14.0), A2A_OUT: Compared(6.0, 6.0)}
    assert found.rest == Compared(80.0, 80.0)
    assert found.whole == Compared(100.0, 104.0)
    assert found.drift == pytest.approx(0.04)
    # What the rest is expected to be stays: the lower median of three steps.
    rests = [watched.play(step_of(rest_ms=rest_ms)).rest.predicted_ms for rest_ms in (90.0, 85.0, 500.0, 60.0)]
    assert rests == [80.0, 85.0, 85.0, 85.0]
    # A step of more micro-batches has a rest of its own.
    found = watched.play(step_of(250.0, batches=3))
    assert (found.rest, found.whole) == (Compared(250.0, 250.0), Compared(310.0, 310.0))
    assert watched.play(step_of(85.0, EXPERT=5.5)).whole == Compared(105.0, 106.0)
    # One in which plans change is not compared.
    watched.watch.plans_changed()
    assert not watched.clock.is_on
    assert watched.play(step_of()) is None
    assert watched.play(step_of()) is not None


def test_monitors_get_both_numbers_of_everything_when_they_want_details_and_else_sums_over_layers() -> None:
    found = Watched().play(step_of(80.0, EXPERT=7.0))
    values = found.values(is_detailed=True)
    assert len(values) == 2 * (1 + 1 + 2 + 2 + 3) + len(found.busy)
    assert (values["step/predicted_ms"], values["step/measured_ms"]) == (100.0, 104.0)
    assert (values["L00/forward/predicted_ms"], values["L00/forward/measured_ms"]) == (10.0, 12.0)
    assert (values["forward/predicted_ms"], values["forward/measured_ms"]) == (10.0, 12.0)
    assert (values["tasks/EXPERT/predicted_ms"], values["tasks/EXPERT/measured_ms"]) == (10.0, 14.0)
    # Two runs of 12 ms, in which experts compute for 7.
    assert values["busy/compute"] == pytest.approx(14 / 24)
    sums = {f"{name}/{which}_ms" for name in ("step", "rest", *PLANS) for which in ("predicted", "measured")}
    assert set(found.values(is_detailed=False)) == sums | {name for name in values if name.startswith("busy/")}


def test_every_nth_step_is_timed_once_there_are_predictions() -> None:
    predictors: dict[str, Fixed] = {}
    watched, timed = Watched(predictors=predictors, watch_every=3), []
    for number in range(1, 12):
        timed += [watched.number] if watched.clock.is_on else []
        watched.play(step_of())
        if number == 5:
            predictors["L00"] = Fixed()
    assert timed == [6, 9]
    watched = Watched(watch_every=0)
    watched.play(step_of(), 5)
    assert not watched.clock.is_on


def test_a_step_that_is_not_known_as_a_whole_is_left_out_and_that_is_said_once(said: list[str]) -> None:
    class Lacking:
        def timeline(self, *_: Any) -> Timeline:
            raise ValueError("no cost for GATHER")

    watched = Watched()
    assert watched.play(None, 2) is None
    assert watched.play(step_of()) is not None
    (line,) = said
    assert line.startswith("drift: step 0 cannot be compared with its prediction")
    assert Watched(predictors={"L00": Lacking()}).play(step_of()) is None
    assert "prediction: no cost for GATHER. On some rank" in said[-1]
    assert len(said) == 2


# ---- drift


def test_drift_is_said_once_until_steps_are_back(said: list[str]) -> None:
    watched = Watched()
    watched.play(step_of(80.0), 3)
    watched.play(step_of(80.0, EXPERT=17.0), 2)  # 24 ms more: still within
    watched.play(step_of(110.0), 2)
    assert said == []
    watched.play(step_of(110.0, EXPERT=6.5, A2A_OUT=6.0))
    (line,) = said
    assert line.startswith("drift: step 7 took 139 ms, predicted 100 ms (+39%); ")
    assert "predicted and measured: the rest of the model 80 and 110 ms, A2A_OUT 6 and 12 ms, L00/forward 10" in line
    assert "; fsmoe.autotune.retune_on_drift = true plans again. The 2 compared steps before it differed" in line
    watched.play(step_of(110.0), 5)
    assert len(said) == 1
    watched.play(step_of(80.0))
    watched.play(step_of(40.0), 3)
    assert len(said) == 2
    assert "took 60 ms, predicted 100 ms (-40%)" in said[1]
    assert watched.asked == []


def test_drift_asks_for_new_plans_and_not_again_before_ten_more_steps(said: list[str]) -> None:
    watched = Watched(retune_on_drift=True, drift_threshold=0.1)
    watched.play(step_of(80.0), 4)
    watched.play(step_of(95.0), 3)
    assert len(watched.asked) == 1
    assert watched.asked[0].startswith("step 6 took 115 ms, predicted 100 ms (+15%)")
    assert said[0].startswith(f"drift: {watched.asked[0]}; measuring and planning again. The 2 compared steps")
    # There are other plans, and by them nothing is wrong.
    watched.watch.plans_changed()
    watched.play(step_of(95.0), 5)
    for number in range(6):
        assert len(watched.asked) == 1, number
        watched.play(step_of(140.0))
    assert "; new plans follow after 3 more such comparisons" in said[1]
    assert (len(watched.asked), len(said)) == (2, 3)


def test_a_load_that_lasts_asks_for_new_plans_even_where_times_are_as_predicted(said: list[str]) -> None:
    def rows(number: int, num_tokens: int | None = 64) -> CallShape:
        return CallShape(4, number, 16, 4, 2, 512, num_tokens=num_tokens)

    watched = Watched(retune_on_drift=True, drift_threshold=0.25)
    watched.play(step_of(sizes=rows(9)), 3)
    watched.play(step_of(sizes=rows(12)), 2)
    watched.play(step_of(sizes=rows(8)))
    # Slots are as many as they are, whoever sits in them.
    watched.play(step_of(sizes=rows(12, None)), 5)
    assert said == []
    found = watched.play(step_of(sizes=rows(12)), 3)
    assert found is not None
    assert found.load == 1.5
    assert watched.asked == ["in step 13 the fullest rank had 1.50 times the planned rows"]
    watched.watch.plans_changed()
    watched.play(step_of(sizes=rows(4)), 2)
    assert len(watched.asked) == 1


# ---- batches that go through stages

RUNS = OfStages("2 and 2 chunks", StepTimes(30.0, 30.0, 40.0, None, 2.0, 1.0, 20.0), (StageTimes(3.0, 4.0, 6.0),))


class WatchedBatches(Watched):
    def made(self, block: AutotuneBlock, labels: tuple[str, ...], predictors: Callable[[], Any]) -> Any:
        return BatchWatch(block, self.clock, Stages(0, 1, 2), lambda: RUNS, self.asked.append)


def batch_of(ms: float) -> MeasuredStep:
    return MeasuredStep(2, 2, 7.0, 11.0, (), batch_ms=ms)


def test_a_batch_is_compared_with_what_is_predicted_of_it_and_what_was_left_over_at_first() -> None:
    watched = WatchedBatches()
    watched.play(batch_of(33.0), 3)
    found = watched.play(batch_of(44.0))
    assert found is watched.watch.last
    assert found.whole == Compared(33.0, 44.0)
    assert found.drift == pytest.approx(1 / 3)
    # Two forwards; a backward and the one that gradients travel in.
    assert found.phases == {"stage0/forward": Compared(6.0, 7.0), "stage0/backward": Compared(10.0, 11.0)}
    for step in (None, replace(batch_of(33.0), batch_ms=None), replace(batch_of(33.0), num_backwards=0)):
        assert watched.play(step) is None, "it was not seen whole"


# ---- ranks


def play_on_ranks(rank: int, world_size: int) -> list[StepComparison | None]:
    watched = Watched(labels=("L00", "L01"))
    # The first rank waits in an all-to-all for the second, which computes before it; then for its experts.
    found = [watched.play(step_of((50.0, 80.0)[rank], A2A_IN=(2.5, 17.5)[1 - rank]))]
    found.append(watched.play(step_of(80.0, EXPERT=(5.0, 9.0)[rank], A2A_OUT=(7.0, 3.0)[rank])))
    # Two micro batches and one; nothing at all on one rank; nothing that is known; nothing on any.
    found.append(watched.play(step_of((80.0, 160.0)[rank], batches=1 + rank, label=f"L0{rank}")))
    nothing = MeasuredStep(0, 0, 0.0, 0.0, ())
    found.append(watched.play((step_of(80.0), nothing)[rank]))
    found.append(watched.play((step_of(80.0), None)[rank]))
    found.append(watched.play(nothing))
    return found


def test_ranks_have_one_comparison_whatever_each_has_run(tmp_path: Path) -> None:
    one, other = run_on_ranks(play_on_ranks, 2, tmp_path)
    assert one == other
    # Of an exchange the time of the rank that came last: the others have waited, and what they waited for is dense.
    assert one[0].kinds[A2A_IN] == Compared(4.0, 5.0)
    assert one[0].phases["L00/forward"] == Compared(10.0, 10.5)
    assert one[0].rest.measured_ms == pytest.approx(80.0)
    # Of what is computed that of the slowest rank.
    assert one[1].kinds[EXPERT] == Compared(10.0, 18.0)
    assert one[1].kinds[A2A_OUT] == Compared(6.0, 6.0)
    assert one[1].phases["L00/backward"] == Compared(10.0, 14.0)
    assert one[2].phases["L00/forward"] == Compared(10.0, 10.0)
    assert "L01/forward" not in one[2].phases
    assert one[2].whole.measured_ms == 200.0
    assert one[3].phases["L00/forward"] == Compared(10.0, 10.0)
    assert one[3].whole.measured_ms == 100.0
    assert one[4:] == [None, None]


# ---- while two ranks train

PHASES = [f"L0{layer}/{direction}" for layer in range(2) for direction in ("forward", "backward")]
COSTS = {A2A_IN: 2.0, EXPERT: 1.0, A2A_OUT: 3.0, GRAD: 0.5, EXPERT_GRAD: 0.5}
WAIT_S = 0.05
"""What the dense part takes. All else takes some ticks of the clock, however busy the machine is."""
CLOCK = FakeClock(tick_ns=10_000)
"""Of this rank."""


class Noting:
    """Predicts so much for a task of each kind, and notes what it is asked about."""

    def __init__(self) -> None:
        self.asked: list[tuple[Schedule, PhasePlan, CallShape]] = []

    def timeline(self, schedule: Schedule, plan: PhasePlan, sizes: CallShape) -> Timeline:
        self.asked.append((schedule, plan, sizes))
        costs = {kind: LinearCost(cost_ms, 0.0) for kind, cost_ms in COSTS.items()}
        return simulate(sized(schedule, plan, sizes), costs)


def engine_of(rank: int, case: Case, blocks: dict[str, Any] | None = None, **autotune: Any) -> tuple[Any, SmallModel]:
    """A training whose stage is taken to have run."""
    call_observer.StepClock = functools.partial(StepClock, host=CLOCK)
    model = SmallModel(case, rank)
    model.first.wait_s, dense = WAIT_S, model.first.forward
    model.first.forward = lambda x: (CLOCK.sleep(model.first.wait_s), dense(x))[1]
    block = {"metrics": "detailed", "autotune": {"enabled": True, "watch_every": 1, "trials": 0} | autotune}
    engine = small_engine(case, rank, block, model, **blocks or {})
    asked: list[tuple[int, str]] = []
    engine.fsmoe.autotune = SimpleNamespace(
        trials=None,
        result=TuningResult(predictors={f"L0{layer}": Noting() for layer in range(2)}),
        asked=asked,
        counts_forward=lambda num_before: False,
        step_is_over=lambda: False,
        close=lambda: None,
        request_again=lambda reason: asked.append((engine.global_steps, reason)),
    )
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
    for moe in model.moes:
        moe.forward = functools.partial(checkpoint, moe.forward, use_reentrant=False)
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


def drift(rank: int, world_size: int) -> dict[bool, tuple[list[tuple[int, str]], list[str]]]:
    found = {}
    for retunes in (False, True):
        said = heard()
        logging.getLogger("ds_fsmoe").setLevel(logging.DEBUG)
        engine, model = engine_of(rank, Case(2, 0, expert="gpt"), drift_threshold=2.0, retune_on_drift=retunes)
        for step in range(9):
            if rank == 1 and step == 5:
                model.first.wait_s = 10 * WAIT_S
            train_step(engine, rank, step)
        found[retunes] = engine.fsmoe.autotune.asked, [line for line in said.lines if line.startswith("drift: ")]
        engine.destroy()
        said.end()
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
