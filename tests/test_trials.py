# SPDX-License-Identifier: Apache-2.0
"""The plans that look best are trained with in turns, all ranks keep the same one, and training stays what it is."""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_fsmoe.planning.decide.block_times import Order
from ds_fsmoe.planning.decide.gradient_plan import BufferReadiness, plan_by_bytes, plan_by_rule
from ds_fsmoe.planning.decide.plan_requests import PlanRequest, SearchSpace
from ds_fsmoe.planning.schedule import EXPERT_GRAD, GRAD, Lane
from ds_fsmoe.planning.workload import Gradient
from ds_fsmoe.tuning.trials import Trials
from ds_fsmoe.tuning.tuned_model import windows_of
from tests.hurry import hurry
from tests.logged import Said
from tests.planning.measured_layers import Machine, layer_of, made_up
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.small_model import Case, SmallModel, batch

CASE = Case(2, 0, "fp32", 1, 2, True, expert="gpt")
STEPS = 84
"""More than it takes to try all the plans that there may be, neighbours of the fastest too, and to plan gradients."""


@dataclass
class Step:
    forward_ms: float
    backward_ms: float = 0.0
    has_both: bool = True
    dense_forward_ms: float = 0.25
    dense_backward_ms: float = 0.5
    is_interleaved: bool = False

    @property
    def step_ms(self) -> float:
        return self.forward_ms + self.backward_ms


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


def run_to_the_end(trials: Any) -> int:
    """The plan that is kept."""
    while (kept := trials.step_is_over()) is None:
        pass
    return kept


def played(ms: list[float], extra_ms: list[float], rounds: int = 3, unseen: frozenset[int] = frozenset()) -> Any:
    clock = Clock(ms, extra_ms, unseen=unseen)
    trials = Trials([f"plan {i}" for i in range(len(ms))], rounds, clock.used.append, clock)
    kept, steps = None, 0
    while kept is None:
        kept, steps = trials.step_is_over(), steps + 1
    assert steps == len(clock.used) <= 1 + rounds * len(ms)
    assert clock.used[-1] == kept
    return trials, kept, clock.used[:-1]


@pytest.mark.parametrize("step", [0, 1, 2])
def test_the_fastest_plan_is_kept_though_a_step_of_it_was_disturbed(step: int) -> None:
    turns = [0, 1, 2, 2, 1, 0, 0, 1, 2]
    # Plan 1, the fastest, has its first, second or third step disturbed: in the first one by less than ends its trial.
    extra_ms = [0.0] * len(turns)
    extra_ms[[at for at, plan in enumerate(turns) if plan == 1][step]] = 90.0 if step else 0.25
    trials, kept, used = played([3.2, 3.0, 3.1], extra_ms)
    assert (kept, used) == (1, turns)
    assert max(trials.times_ms[1]) > max(*trials.times_ms[0], *trials.times_ms[2])
    assert [line.split() for line in trials.describe(kept).splitlines()[2:]] == [
        ["3", "3", "plan", "1", "(kept)"],
        ["3.1", "3", "plan", "2"],
        ["3.2", "3", "plan", "0"],
    ]


def test_one_step_that_was_fast_by_chance_makes_no_plan_the_fastest() -> None:
    # The last step of plan 2, and it is faster than any other of them all.
    trials, kept, _ = played([3.2, 3.0, 3.1], [0.0] * 8 + [-0.5])
    assert kept == 1
    assert min(trials.times_ms[2]) < min(trials.times_ms[1])
    assert trials.describe(kept).splitlines()[3].split() == ["3.1", "3", "plan", "2"]


def test_a_plan_without_hope_is_not_tried_again() -> None:
    assert played([7.0, 3.0, 3.2, 5.0], [0.0])[1:] == (1, [0, 1, 2, 3, 2, 1, 1, 2])
    # Two go on whatever they took.
    assert played([7.0, 3.0, 5.0], [0.0])[1:] == (1, [0, 1, 2, 2, 1, 1, 2])
    # One that was disturbed in the first round is the loser; one whose step was not seen is tried on.
    assert played([7.0, 3.0, 3.2], [0.0], unseen=frozenset({1}))[1:] == (1, [0, 1, 2, 2, 1, 0, 1, 2])


def test_a_gain_of_less_than_a_hundredth_changes_nothing() -> None:
    assert played([7.0, 6.95, 6.94], [0.0])[1] == 0
    assert played([7.0, 6.92, 6.91], [0.0])[1] == 1


def test_steps_that_were_not_seen_whole_say_nothing() -> None:
    assert played([7.0, 3.0], [0.0], rounds=1, unseen=frozenset({1}))[1] == 0
    trials, kept, _ = played([3.1, 3.0], [0.0], rounds=2, unseen=frozenset({0, 1, 2, 3}))
    assert kept == 0
    assert "so the predicted plan is kept" in trials.describe(kept)


def phases_of(steps: list[list[Step]]) -> tuple[int | None, tuple[int, int]]:
    """Which of some plans is kept, and which had the fastest forward and backward.

    Args:
        steps: round -> what each plan takes in it.
    """
    clock = Clock([0.0] * len(steps[0]), [0.0])
    trials: Any = Trials([str(plan) for plan in range(len(steps[0]))], len(steps), clock.used.append, clock)  # type: ignore[arg-type]
    assert trials.fastest_phases(kept=2) == (2, 2)
    # Every second round is run backwards.
    taken = iter([each for number, of_round in enumerate(steps) for each in of_round[:: -1 if number % 2 else 1]])
    clock.read = lambda: next(taken)  # type: ignore[method-assign]
    return run_to_the_end(trials), trials.fastest_phases(kept=0)


def test_the_fastest_forward_and_the_fastest_backward_are_found_apart_from_the_fastest_step() -> None:
    assert phases_of([[Step(5.0, 9.0), Step(4.0, 11.0), Step(6.0, 7.0)]]) == (2, (1, 2))
    assert phases_of([[Step(5.0, 7.0), Step(4.0, 9.0), Step(6.0, 6.5)]]) == (0, (1, 2))


def test_the_fastest_phases_are_found_though_a_step_was_disturbed_and_another_fast_by_chance() -> None:
    quiet = [Step(5.0, 9.0), Step(4.0, 10.0), Step(5.5, 8.0)]
    # The fastest forward and the fastest backward are slow once, and the slowest of each fast once; in the first round
    # by less than ends a trial.
    little, much = ([Step(5.0, 9.0), Step(5.5 + by, 8.9), Step(3.9, 10.0 + by)] for by in (0.0, 40.0))
    for rounds in ([little, quiet, quiet], [quiet, much, quiet], [quiet, quiet, much]):
        assert phases_of(rounds)[1] == (1, 2)


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
    losses, degrees, windows, settled = [], [], [], []
    for step in range(STEPS * accumulation):
        torch.manual_seed(100 * step + rank)
        loss, _ = engine(*batch(step, rank, torch.float32))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if block is not None:
            pipeline = next(iter(engine.fsmoe.layers.values())).pipeline
            degrees.append((pipeline.forward.block.degree, pipeline.backward.block.degree))
            windows.append(foreseen_and_sent(engine.fsmoe.reduction))
            settled.append(engine.fsmoe.autotune.is_settled)
    found = {"losses": losses, "degrees": degrees, "windows": windows, "settled": settled}
    if block is not None:
        found["open"] = engine.fsmoe.autotune.trials is not None
        found["is_stock"] = engine.fsmoe.autotune.result.outcome.is_stock
    engine.destroy()
    return found


def foreseen_and_sent(reduction: Any) -> tuple[list[float] | None, list[int] | None]:
    """The bytes of each window: as the plan of layers that is tried has foreseen it, and as gradients were sent."""
    tried, plan, flats = reduction.predicted_windows, reduction.reducer.plan, reduction.reducer.flats
    foreseen = None
    if tried is not None:
        foreseen = [sum(size for _, size in part) for each in tried for part in (each.moe, each.dense)]
    if plan is None:
        return foreseen, None
    sent = [sum((each.stop - each.first) * flats[each.flat].element_bytes for each in part) for part in plan.parts]
    return foreseen, sent


def tried_and_stock(rank: int, world_size: int, accumulation: int) -> dict[str, Any]:
    block = {"autotune": {"enabled": True, "trials": 2, "watch_every": 3}, "pipeline_degree": {"max": 3}}
    # All that exists is sent behind each layer, whatever is measured.
    block |= {"gradient_partition": {"mode": "dense_only"}}
    return train(rank, world_size, block, accumulation) | {
        "stock": train(rank, world_size, None, accumulation)["losses"]
    }


@pytest.mark.long
@sampled("accumulation", [1, 2], kept=[0])
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
        # Each was tried with windows of its own; where two steps were not over, the first of all was observed for them.
        windows = found["windows"][accumulation - 1 :: accumulation]
        tried = [each for each in windows if each[0] is not None]
        assert (tried[0][1] is None) == (accumulation > 1)
        # At the end of a step the next plan is foreseen already, and the one of this step is still what was sent by.
        for (foreseen, _), (_, sent) in itertools.pairwise(tried):
            assert sent is not None
            assert all(b <= a for a, b in zip(foreseen, sent, strict=False))
        # DeepSpeed's schedule, with which all are compared, sends all at the end.
        assert any(sum(foreseen) == 0 for foreseen, _ in tried)
        assert any(sum(sent) for _, sent in tried[1:])
        # What stays is sent as it was tried; the first such step begins behind the one that decides.
        settled = found["settled"][accumulation - 1 :: accumulation].index(True)
        assert len({str(foreseen) for foreseen, _ in windows[settled:]}) == 1
        assert len({str(sent) for _, sent in windows[settled + 1 :]}) == 1
        if found["is_stock"]:
            assert all(sum(sent) == 0 for _, sent in windows[settled + 1 :])
        # The step that decides has run its earlier micro batches with what was tried last.
        assert len(set(found["degrees"][accumulation * (settled + 1) - 1 :])) == 1


def untried(rank: int, world_size: int) -> list[tuple[list[Any], bool, list[str]]]:
    """Without the autotuner, and with one that tries no plan: the windows of each step, whether the last ones are by
    rule, and what was said of the solver."""
    import ds_fsmoe

    hurry()
    found, said = [], Said()
    logging.getLogger("ds_fsmoe").addHandler(said)
    for autotune in (False, {"enabled": True, "trials": 0}):
        torch.manual_seed(0)
        model = SmallModel(CASE, rank)
        block = {"enabled": True, "autotune": autotune, "gradient_partition": {"mode": "adaptive", "solver": "de"}}
        config = CASE.ds_config(fsmoe=block)
        engine, *_ = ds_fsmoe.initialize(model=model, model_parameters=list(model.parameters()), config=config)
        reduction, windows = engine.fsmoe.reduction, []
        for step in range(6):
            engine.backward(engine(*batch(step, rank, torch.float32))[0])
            engine.step()
            windows.append(foreseen_and_sent(reduction))
        plan = reduction.reducer.plan
        by_rule = plan_by_rule(reduction.reducer._readiness(plan.num_windows), "adaptive", 1)
        found.append((windows, plan.parts == by_rule.parts, [each for each in said.lines if "solver" in each]))
        said.lines.clear()
        engine.destroy()
    return found


@pytest.mark.long
def test_adaptive_slices_by_rule_without_the_autotuner_and_as_it_has_planned_where_it_tries_nothing(
    tmp_path: Path,
) -> None:
    for rank, (by_rule, planned) in enumerate(run_on_ranks(untried, 2, tmp_path)):
        windows, is_by_rule, said = by_rule
        assert is_by_rule
        assert [foreseen for foreseen, _ in windows] == [None] * 6
        assert sum(windows[-1][1]) > 0
        assert ['fsmoe.gradient_partition.solver = "de" is not used' in each for each in said] == [True] * (rank == 0)
        windows, _, said = planned
        assert not said
        # Measured ahead of the third forward.
        assert [foreseen is None for foreseen, _ in windows] == [True, True, False, False, False, False]
        foreseen, sent = windows[-1]
        assert len({str(each) for each in windows[3:]}) == 1
        assert all(b <= a for a, b in zip(foreseen, sent, strict=True))


def test_gradients_at_once_are_all_that_there_are_whatever_layers_were_thought_to_have() -> None:
    gradients = tuple(Gradient(kind, (Lane.INTER,), size) for kind, size in ((GRAD, 400), (EXPERT_GRAD, 200)))
    layer = layer_of(made_up())
    request = PlanRequest([{"flat": layer}] * 2, SearchSpace.fixed(Order(2), Order(2)), "off")
    plan = Machine().planner().plan(request)
    plan = replace(plan, layers=(replace(layer, gradients=gradients),) * 2)
    # Of the dense ones more exist before the first window than a layer's share, as the head comes there.
    supplies = [BufferReadiness(EXPERT_GRAD, 4, (0, 40), 100), BufferReadiness(GRAD, 4, (120, 150), 200)]
    sent = plan_by_bytes(supplies, windows_of(plan.sending_at_once()))
    assert [[(each.kind, each.first, each.stop) for each in part] for part in sent.parts] == [
        [(GRAD, 0, 120)],
        [],
        [(GRAD, 120, 150), (EXPERT_GRAD, 0, 40)],
        [],
    ]
    assert plan_by_bytes(supplies, windows_of(plan.sending_at_the_end())).hidden() == 0


def test_the_baseline_is_tried_in_every_round_and_what_is_kept_is_compared_with_it() -> None:
    clock = Clock([4.0, 7.0, 8.0], [0.0, 0.0, 0.0, 1.0])
    trials: Any = Trials(["a", "b", "stock"], 3, clock.used.append, clock, baseline=2)  # type: ignore[arg-type]
    kept = run_to_the_end(trials)
    # Plan 1 has no hope, and nor has the baseline; both go on nevertheless, one as the second fastest.
    assert clock.used == [0, 1, 2, 2, 1, 0, 0, 1, 2, 0]
    gain = trials.gain(kept)
    assert (gain.ratio, gain.num_turns, gain.is_clear) == (pytest.approx(8.0 / 4.0), 3, True)
    assert (gain.low, gain.high) == (pytest.approx(8.0 / 4.0), pytest.approx(9.0 / 4.0))
    assert trials.num_steps == 9
    assert trials.total_ms == pytest.approx(4 + 7 + 8 + 9 + 7 + 4 + 4 + 8 + 8)
    assert [each.is_baseline for each in trials.results(kept)] == [False, False, True]


def test_the_baseline_is_kept_only_where_that_is_allowed() -> None:
    for may_keep, expected in ((True, 1), (False, 0)):
        clock = Clock([4.0, 3.0], [0.0])
        trials: Any = Trials(["a", "stock"], 2, clock.used.append, clock, None, 1, may_keep)  # type: ignore[arg-type]
        assert run_to_the_end(trials) == expected


def test_a_gain_that_not_every_turn_shows_is_not_clear() -> None:
    # One plan is faster in the first turn, the other in the second.
    clock = Clock([4.0, 4.0], [0.0, 1.0, 0.0, 1.0])
    trials: Any = Trials(["a", "stock"], 2, clock.used.append, clock, baseline=1)  # type: ignore[arg-type]
    assert not trials.gain(run_to_the_end(trials)).is_clear
    assert Trials(["a"], 1, clock.used.append, clock).gain(0) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("unseen", [0, 1])
def test_a_turn_in_which_one_of_the_two_was_not_seen_says_nothing_of_the_gain(unseen: int) -> None:
    clock = Clock([4.0, 8.0], [0.0, 1.0, 0.0, 0.0, 0.0, 0.0], unseen=frozenset({unseen}))
    trials: Any = Trials(["a", "stock"], 3, clock.used.append, clock, baseline=1)  # type: ignore[arg-type]
    run_to_the_end(trials)
    gain = trials.gain(0)
    assert (gain.low, gain.high, gain.num_turns) == (2.0, 2.0, 2)


def test_a_plan_that_was_dropped_after_a_lucky_step_is_not_kept() -> None:
    # Plan 2 is dropped after the first turn; then the machine is busier, and all others take more than it did.
    clock = Clock([7.0, 7.2, 8.0, 10.0], [0.0] * 4 + [1.8] * 20)
    trials: Any = Trials(["a", "b", "c", "stock"], 3, clock.used.append, clock, baseline=3)  # type: ignore[arg-type]
    assert run_to_the_end(trials) == 0
    assert 2 not in clock.used[4:]


def test_the_least_time_beside_the_layers_is_kept() -> None:
    clock = Clock([4.0, 3.0], [0.0])
    trials: Any = Trials(["a", "b"], 2, clock.used.append, clock)  # type: ignore[arg-type]
    assert trials.least_dense_ms is None
    run_to_the_end(trials)
    assert trials.least_dense_ms == 0.75


def test_the_time_beside_the_layers_is_kept_of_the_baselines_steps_alone() -> None:
    clock = Clock([4.0, 3.0], [0.0])
    clock.read = lambda: Step(4.0, dense_forward_ms=clock.used[-1] + 1.0)  # type: ignore[method-assign]
    trials: Any = Trials(["a", "stock"], 2, clock.used.append, clock, baseline=1)  # type: ignore[arg-type]
    run_to_the_end(trials)
    assert trials.rest_ms == [2.5, 2.5]
    clock.used.clear()
    without: Any = Trials(["a", "b"], 2, clock.used.append, clock)  # type: ignore[arg-type]
    run_to_the_end(without)
    assert without.rest_ms == []


def test_what_lies_beside_halves_that_take_turns_is_not_what_is_dense() -> None:
    clock = Clock([5.0], [0.0])
    trials = Trials(["halves"], 1, clock.used.append, clock)
    trials.step_is_over()
    clock.read = lambda: Step(5.0, is_interleaved=True)  # type: ignore[method-assign]
    assert trials.step_is_over() == 0
    assert trials.least_dense_ms is None
    assert trials.num_steps == 1


def test_the_best_plan_that_is_not_kept_has_the_ratio_by_which_it_was_not() -> None:
    trials: Any = Trials(["a", "stock"], 1, lambda _: None, None, baseline=1)  # type: ignore[arg-type]
    trials.times_ms = [[9.0, 30.0, 10.0], [10.0, 9.0, 9.5]]
    trials._of_turn = [dict(enumerate(each)) for each in trials.times_ms]
    gain = trials.gain_of_best()
    # In turns the middle ratio is 0.95, and of the medians 9.5 over 10.
    assert (gain.ratio, gain.low, gain.high) == (0.95, 0.3, pytest.approx(10 / 9))
    trials.times_ms[1], trials._of_turn[1] = [11.0, 9.0, 9.9], {0: 11.0, 1: 9.0, 2: 9.9}
    assert trials.gain(0).ratio == 0.99
    trials.times_ms[0], trials._of_turn[0] = [10.0, 5.0, 12.0], {0: 10.0, 1: 5.0, 2: 12.0}
    assert (trials.gain(0).ratio, trials.gain_of_best().ratio) == (1.1, 0.99)
