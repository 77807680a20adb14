# SPDX-License-Identifier: Apache-2.0
"""``{"enabled": true}`` alone measures and chooses once a job is under way, where there is something to gain."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_fsmoe.config.reading import read_block
from ds_fsmoe.tuning import autotune as stage
from ds_fsmoe.tuning.when import STEPS_BEFORE, known_steps, settled
from tests.hurry import hurry
from tests.logged import Said
from tests.ranks import run_on_ranks
from tests.small_model import Case, SmallModel, batch

CASE = Case(2, 1, "fp32", 1, 2, True, expert="gpt")
STEPS = 84


def why_not(block: dict[str, Any], num_ranks: int = 2, **config: Any) -> str | None:
    found, why = settled(read_block({"fsmoe": {"enabled": True} | block}), config, num_ranks)
    assert (found.autotune.enabled is False) == (why is not None or block.get("autotune") is False)
    return why


@pytest.mark.parametrize(
    ("block", "others", "reason"),
    [
        ({"deterministic": True}, {}, "fsmoe.deterministic = true"),
        ({}, {"num_ranks": 1}, "a single rank has no communication to hide"),
        ({"overlap": False}, {}, "fsmoe.overlap = false"),
        ({"schedule": "deepspeed"}, {}, "has nothing to choose"),
        ({"schedule": "lina"}, {}, "has nothing to choose"),
        ({"num_chunks": {"forward": 2, "backward": 3}}, {}, "fsmoe.num_chunks is set"),
        ({"record": {"dir": "x", "stop_after": 60}}, {}, "the job ends after 60 steps"),
        ({}, {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 99}}}, "ends after 99 steps"),
        ({}, {"autotuning": {"enabled": True}}, "DeepSpeed's own autotuner"),
    ],
)
def test_where_nothing_can_be_gained_nothing_is_measured_and_the_reason_is_told(
    block: dict[str, Any], others: dict[str, Any], reason: str
) -> None:
    assert reason in (why_not(block, **others) or "")


def test_a_job_that_may_gain_is_measured() -> None:
    assert why_not({}) is None
    assert why_not({"num_chunks": {"forward": 2, "backward": "auto"}}) is None
    assert why_not({}, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 5}}) is None
    assert why_not({}, scheduler={"type": "WarmupDecayLR", "params": {"total_num_steps": 100}}) is None
    assert why_not({"autotune": False}) is None
    # A schedule that cannot run without numbers gets them, however short the job is.
    assert why_not({"schedule": "fsmoe", "record": {"dir": "x", "stop_after": 20}}) is None
    # So does who asks for it.
    assert why_not({"autotune": True, "record": {"dir": "x", "stop_after": 20}}) is None


def test_the_end_of_a_job_is_known_from_its_config() -> None:
    block = read_block({"fsmoe": {"enabled": True}})
    decays = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 400}}}
    assert known_steps(block, {}) is None
    assert known_steps(block, {"scheduler": None}) is None
    assert known_steps(block, {"scheduler": {"type": "x", "params": {"total_num_steps": "auto"}}}) is None
    assert known_steps(block, decays) == 400
    recorded = read_block({"fsmoe": {"enabled": True, "record": {"dir": "x", "stop_after": 60}}})
    assert known_steps(recorded, decays) == 60


def train(
    rank: int, world_size: int, block: dict[str, Any], steps: int, fails: bool = False, is_training: bool = True
) -> dict[str, Any]:
    import ds_fsmoe

    hurry()
    handler, logger = Said(names_level=True), logging.getLogger("ds_fsmoe")
    logger.addHandler(handler)
    torch.manual_seed(0)
    model = SmallModel(CASE, rank).train(is_training)
    config = CASE.ds_config(fsmoe={"enabled": True} | block)
    measured_at, measure = [], stage.measure

    def watched(*args: Any, **kwargs: Any) -> Any:
        measured_at.append(engine.global_steps)
        if fails:
            raise stage.MeasuringError("rank 1 failed while measuring: out of memory")
        return measure(*args, **kwargs)

    stage.measure = watched
    try:
        engine, *_ = ds_fsmoe.initialize(model=model, model_parameters=list(model.parameters()), config=config)
        losses, steps_after_all = [], 6
        for step in range(steps):
            torch.manual_seed(100 * step + rank)
            loss, _ = engine(*batch(step, rank, torch.float32))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            if engine.fsmoe.autotune is not None and engine.fsmoe.autotune.is_settled:
                steps_after_all -= 1
            if not steps_after_all:
                break
        tuner = engine.fsmoe.autotune
        found = {
            "losses": losses,
            "measured_at": measured_at,
            "is_settled": tuner is not None and tuner.is_settled,
            "cluster": None if tuner is None or tuner.result.measured is None else tuner.result.measured.cluster,
            "plans": {name: text for name, text in engine.fsmoe.facts().items() if name.startswith("plan ")},
        }
        engine.destroy()
    finally:
        stage.measure = measure
        logger.removeHandler(handler)
    return found | {"said": handler.lines}


def train_all(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    unasked = train(rank, world_size, {}, STEPS)
    return {
        "unasked": unasked,
        "off": train(rank, world_size, {"autotune": False}, len(unasked["losses"])),
        "short": train(rank, world_size, {}, STEPS_BEFORE - 2),
        "failed": train(rank, world_size, {}, STEPS_BEFORE + 4, fails=True),
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    return run_on_ranks(train_all, 2, tmp_path_factory.mktemp("unasked"))


def test_measuring_begins_after_some_steps_and_the_job_settles_on_a_plan(runs: list[dict[str, dict[str, Any]]]) -> None:
    for each in runs:
        # Two more forwards tell the sizes.
        assert each["unasked"]["measured_at"] == [STEPS_BEFORE + 2]
        assert each["unasked"]["is_settled"]
        assert each["unasked"]["plans"] == runs[0]["unasked"]["plans"]
        assert each["unasked"]["cluster"] is None
    screen = [line for line in runs[0]["unasked"]["said"] if "autotune: " in line and "measuring took" in line]
    assert len(screen) == 1
    assert "  DeepSpeed's schedule" in screen[0]
    assert not [line for line in runs[1]["unasked"]["said"] if "autotune" in line]


def test_training_is_what_it_is_without(runs: list[dict[str, dict[str, Any]]]) -> None:
    for each in runs:
        for ours, plain in zip(each["unasked"]["losses"], each["off"]["losses"], strict=True):
            assert ours == pytest.approx(plain, rel=1e-5)


def test_a_short_job_is_not_measured_and_says_so_at_its_end(runs: list[dict[str, dict[str, Any]]]) -> None:
    for each in runs:
        assert each["short"]["measured_at"] == []
    assert "the job ended after 8 steps, before measuring begins (step 10)" in runs[0]["short"]["said"][-1]


def test_a_job_that_cannot_be_measured_goes_on_as_it_was(runs: list[dict[str, dict[str, Any]]]) -> None:
    for each in runs:
        assert each["failed"]["measured_at"] == [STEPS_BEFORE + 2]
        assert each["failed"]["losses"] == pytest.approx(each["off"]["losses"][: STEPS_BEFORE + 4], rel=1e-6)
    (warning,) = (line for line in runs[0]["failed"]["said"] if line.startswith("WARNING: autotune"))
    assert "measuring failed, so the schedule is unchanged" in warning
    assert "out of memory" in warning


def test_checkpoints_of_before_the_measuring_do_not_keep_it_from_happening(tmp_path: Path) -> None:
    for found in run_on_ranks(resume, 2, tmp_path / "ranks", str(tmp_path / "saved")):
        assert found["measured_at"] == [5 + STEPS_BEFORE + 2]


def resume(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    import ds_fsmoe

    hurry()
    measured_at: list[int] = []
    measure = stage.measure
    for is_resumed in (False, True):
        torch.manual_seed(0)
        model = SmallModel(CASE, rank)
        config = CASE.ds_config(fsmoe={"enabled": True, "autotune": {"trials": 0}})
        engine, *_ = ds_fsmoe.initialize(model=model, model_parameters=list(model.parameters()), config=config)

        def watched(*args: Any, engine: Any = engine, **kwargs: Any) -> Any:
            measured_at.append(engine.global_steps)
            return measure(*args, **kwargs)

        stage.measure = watched
        if is_resumed:
            engine.load_checkpoint(folder)
        for step in range(STEPS_BEFORE + 3 if is_resumed else 5):
            loss, _ = engine(*batch(step, rank, torch.float32))
            engine.backward(loss)
            engine.step()
        if not is_resumed:
            engine.save_checkpoint(folder)
        engine.destroy()
    stage.measure = measure
    return {"measured_at": measured_at}


def test_training_in_evaluation_mode_is_warned_of_once_as_nothing_is_measured_in_it(tmp_path: Path) -> None:
    found = run_on_ranks(partial(train, is_training=False), 2, tmp_path, {}, STEPS_BEFORE + 5)
    warned = [[line for line in each["said"] if "evaluation mode" in line] for each in found]
    assert [len(each) for each in warned] == [1, 0]
    assert "call model.train()" in warned[0][0]
    assert all(each["measured_at"] == [] for each in found)
