# SPDX-License-Identifier: Apache-2.0
"""The autotuner is in one of five states, and goes from one to another as its table says, whatever happens to it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.config.reading import read_block
from ds_fsmoe.distributed.fail_together import MeasuringError
from ds_fsmoe.tuning.autotune import FORWARDS_BEFORE, Autotune
from ds_fsmoe.tuning.states import NEXT, Profiling, Settled, State, Trying, Waiting, Watching
from ds_fsmoe.tuning.when import STEPS_BEFORE

STEPS_OF_TRIALS = 3


def rounds() -> Any:
    """Trials that settle after some steps."""
    left = iter(range(STEPS_OF_TRIALS - 1, -1, -1))
    return SimpleNamespace(step_is_over=lambda: next(left) == 0, rounds=[])


class Stage(Autotune):
    """Measures nothing: measuring ends as it is told."""

    ends: str = "settled"

    def _run(self, *_: Any) -> None:
        assert isinstance(self.state, Profiling)
        if self.ends == "failed":
            raise MeasuringError("the clock fell from the wall")
        self._become(Trying(rounds()) if self.ends == "tried" else Settled())


def stage_of(enabled: bool | None) -> Stage:
    written: dict[str, Any] = {"enabled": True} if enabled is None else {"enabled": True, "autotune": enabled}
    block = read_block({"fsmoe": written})
    assert isinstance(block, FSMoEBlock)
    first_forwards = SimpleNamespace(watch_again=lambda: None, calls={})
    running: Any = SimpleNamespace(first_forwards=first_forwards)
    return Stage(block, running)


def forward(stage: Stage, ends: str = "settled") -> None:
    """One forward in training, as an engine runs it."""
    if stage.counts_forward():
        stage.ends = ends
        try:
            stage.run({})
        except MeasuringError:
            assert stage._block.autotune.enabled is True


def step(stage: Stage) -> None:
    """The end of an optimizer step, as an engine runs it."""
    if stage.trials is None:
        stage.step_is_over()
    else:
        stage.trial_is_over()


def test_a_stage_that_was_asked_for_watches_two_forwards_then_measures_tries_and_settles() -> None:
    stage = stage_of(True)
    seen: list[State] = [stage.state]
    for _ in range(FORWARDS_BEFORE + 1):
        forward(stage, "tried")
        seen.append(stage.state)
    assert seen[:-1] == [Watching(), Watching(1), Watching(0)]
    for _ in range(STEPS_OF_TRIALS):
        assert stage.trials is not None
        step(stage)
    assert stage.state == Settled("no layer was called")


def test_a_stage_that_nobody_asked_for_waits_first() -> None:
    stage = stage_of(None)
    for left in range(STEPS_BEFORE, 0, -1):
        assert stage.state == Waiting(left)
        forward(stage)
        step(stage)
    assert stage.state == Watching(2)
    for _ in range(3):
        forward(stage)
    assert stage.state == Settled()


EVENTS = st.sampled_from(["forward", "tried", "failed", "step", "again", "given"])


@given(st.sampled_from([True, None]), st.lists(EVENTS, max_size=60))
def test_whatever_happens_states_follow_each_other_as_the_table_says(enabled: bool | None, events: list[str]) -> None:
    """`_become` refuses what is not in the table; and no stage measures unless its forwards were watched."""
    stage = stage_of(enabled)
    for event in events:
        before = stage.state
        if event == "again":
            stage.request_again("a drift")
        elif event == "given":
            stage.need_not_run()
        elif event == "step":
            step(stage)
        else:
            forward(stage, "settled" if event == "forward" else event)
        if type(stage.state) is not type(before):
            assert isinstance(before, Watching) or type(stage.state) in NEXT[type(before)]
        # Where a stage was asked for, a failure goes up to the user, who ends the job.
        assert not isinstance(stage.state, Profiling) or (enabled and event == "failed") or stage.state == before
        assert stage.has_chosen <= stage.is_settled
        assert not (stage.is_settled and stage.trials is not None)
        stage.describe() if stage.trials is None else None
    stage.close()
