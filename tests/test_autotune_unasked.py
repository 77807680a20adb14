# SPDX-License-Identifier: Apache-2.0
"""``{"enabled": true}`` alone measures and chooses once a job is under way, where there is something to gain."""

from __future__ import annotations

import logging
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
    assert why_not({}, scheduler={"type": "x", "params": {"total_num_steps": "auto"}}) is None
    assert why_not({"autotune": False}, scheduler=None) is None
    # A schedule that cannot run without numbers gets them, however short the job is; so does who asks for it.
    for asked in ({"schedule": "fsmoe"}, {"autotune": True}):
        assert why_not(asked | {"record": {"dir": "x", "stop_after": 20}}) is None
    both_known = read_block({"fsmoe": {"enabled": True, "record": {"dir": "x", "stop_after": 60}}})
    assert known_steps(both_known, {"scheduler": {"type": "x", "params": {"total_num_steps": 400}}}) == 60


def train(
    rank: int,
    block: dict[str, Any],
    steps: int,
    fails: bool = False,
    is_training: bool = True,
    save: str | None = None,
    load: str | None = None,
) -> dict[str, Any]:
    """Steps of an engine, up to some after it has settled on a plan; from a checkpoint, and with one at the end."""
    import ds_fsmoe

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
        if load is not None:
            engine.load_checkpoint(load)
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
        if save is not None:
            engine.save_checkpoint(save)
        engine.destroy()
    finally:
        stage.measure = measure
        logger.removeHandler(handler)
    return found | {"said": handler.lines}


def train_all(rank: int, world_size: int, folder: str) -> dict[str, dict[str, Any]]:
    hurry()
    unasked = train(rank, {}, STEPS)
    untried = {"autotune": {"trials": 0}}
    return {
        "unasked": unasked,
        "off": train(rank, {"autotune": False}, len(unasked["losses"])),
        "short": train(rank, {}, STEPS_BEFORE - 2),
        "failed": train(rank, {}, STEPS_BEFORE + 4, fails=True),
        "evaluation": train(rank, {}, STEPS_BEFORE + 5, is_training=False),
        "saved": train(rank, untried, 5, save=folder),
        "resumed": train(rank, untried, STEPS_BEFORE + 3, load=folder),
    }


def test_unasked_a_job_settles_on_a_plan_after_some_steps_and_trains_as_it_did_or_says_why_nothing_was_measured(
    tmp_path: Path,
) -> None:
    first, second = runs = run_on_ranks(train_all, 2, tmp_path / "ranks", str(tmp_path / "saved"))
    for each in runs:
        unasked, off = each["unasked"], each["off"]
        measured_at = {name: run["measured_at"] for name, run in each.items()}
        # Two more forwards tell the sizes. A checkpoint of before the measuring does not keep it from happening.
        begins = STEPS_BEFORE + 2
        assert measured_at == {
            **{"unasked": [begins], "off": [], "short": [], "failed": [begins]},
            **{"evaluation": [], "saved": [], "resumed": [5 + begins]},
        }
        assert (unasked["is_settled"], unasked["cluster"]) == (True, None)
        assert unasked["plans"] == first["unasked"]["plans"]
        assert unasked["losses"] == pytest.approx(off["losses"], rel=1e-5)
        assert each["failed"]["losses"] == pytest.approx(off["losses"][: STEPS_BEFORE + 4], rel=1e-6)
    (screen,) = (line for line in first["unasked"]["said"] if "autotune: " in line and "measuring took" in line)
    assert "  DeepSpeed's schedule" in screen
    assert not [line for line in second["unasked"]["said"] if "autotune" in line]
    assert "the job ended after 8 steps, before measuring begins (step 10)" in first["short"]["said"][-1]
    (warning,) = (line for line in first["failed"]["said"] if line.startswith("WARNING: autotune"))
    assert "measuring failed, so the schedule is unchanged" in warning
    assert "out of memory" in warning
    warned = [[line for line in each["evaluation"]["said"] if "evaluation mode" in line] for each in runs]
    assert [len(each) for each in warned] == [1, 0]
    assert "call model.train()" in warned[0][0]
