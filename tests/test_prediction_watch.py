# SPDX-License-Identifier: Apache-2.0
"""What was predicted beside what happens: the same numbers on all ranks, and what follows from them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from ds_fsmoe.config.blocks import AutotuneBlock
from ds_fsmoe.config.reading import ConfigError, read_block
from ds_fsmoe.observing.step_timer import MeasuredRun, MeasuredStep
from ds_fsmoe.planning.block import BlockPlan
from ds_fsmoe.planning.call_shape import CallShape
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.phase_plan import PhasePlan
from ds_fsmoe.planning.schedule import A2A_IN, A2A_OUT, EXPERT, Schedule
from ds_fsmoe.planning.timeline import Span, Timeline
from ds_fsmoe.tuning.drift import Compared, PredictionWatch, StepComparison
from tests.logged import Said
from tests.ranks import run_on_ranks

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
    handler, logger = Said(), logging.getLogger("ds_fsmoe")
    level, _ = logger.level, logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    yield handler.lines
    logger.removeHandler(handler)
    logger.setLevel(level)


class Watched:
    """A watch that is played steps."""

    def __init__(self, labels: tuple[str, ...] = ("L00",), predictors: Any = None, **autotune: Any) -> None:
        self.clock, self.asked = Played(), []
        block = AutotuneBlock(**{"enabled": True, "watch_every": 1} | autotune)
        predictors = {"L00": Fixed()} if predictors is None else predictors
        self.watch = PredictionWatch(block, self.clock, labels, lambda: predictors, self.asked.append)
        self.number = 0
        self.watch.step_is_over(0)

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


def test_a_step_of_more_micro_batches_has_a_rest_of_its_own() -> None:
    watched = Watched()
    watched.play(step_of(80.0), 3)
    found = watched.play(step_of(250.0, batches=3))
    assert found.rest == Compared(250.0, 250.0)
    assert found.whole == Compared(310.0, 310.0)
    assert watched.play(step_of(80.0, EXPERT=5.5)).whole == Compared(100.0, 101.0)


def test_a_layer_that_nobody_predicts_belongs_to_the_rest() -> None:
    watched = Watched(labels=("L00", "L01"))
    found = watched.play(step_of(80.0, label="L01"))
    assert (found.phases, found.kinds) == ({}, {})
    assert found.whole == Compared(100.0, 100.0)


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


def test_a_step_in_which_plans_change_is_not_compared() -> None:
    watched = Watched()
    watched.watch.plans_changed()
    assert not watched.clock.is_on
    assert watched.play(step_of()) is None
    assert watched.play(step_of()) is not None


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


def test_ranks_have_one_comparison_whatever_each_has_run(tmp_path: Any) -> None:
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


# ---- config


@pytest.mark.parametrize(
    ("autotune", "sentence"),
    [
        (
            {"enabled": False, "watch_every": 5},
            "fsmoe.autotune.watch_every = 5: only with fsmoe.autotune.enabled = true",
        ),
        (
            {"enabled": True, "retune_on_drift": True, "watch_every": 0},
            "fsmoe.autotune.retune_on_drift = true: only with fsmoe.autotune.watch_every above 0, and it is 0",
        ),
    ],
)
def test_options_that_mean_nothing_are_refused(autotune: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_block({"fsmoe": {"enabled": True, "autotune": autotune}})
    assert str(caught.value).startswith(sentence)
