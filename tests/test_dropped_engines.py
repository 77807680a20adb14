# SPDX-License-Identifier: Apache-2.0
"""Nothing stays of an engine that a script has dropped, ended before or not: no tensor, thread or open file."""

from __future__ import annotations

import gc
import json
import os
import threading
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tests.hf_families import batch, loss_of, model_of
from tests.ranks import run_on_ranks
from tests.small_model import Case, SmallModel
from tests.small_model import batch as batch_of_small
from tests.test_hugging_face import ds_config, engine_of
from tests.waiting import until

STEPS, NUM_ENGINES = 3, 4


def trained(stage: int, rank: int, folder: Path) -> Any:
    block = {"autotune": {"enabled": False}, "routing": {"record": str(folder / "routing")}}
    if stage == 3:
        engine = engine_of(model_of("mixtral"), ds_config(3, **block))
    else:
        block["record"] = {"dir": str(folder / "run")}
        case = Case(2, stage)
        engine = engine_of(SmallModel(case, rank), case.ds_config(fsmoe={"enabled": True} | block))
    for number in range(STEPS):
        loss = (
            loss_of(engine, batch(number, 1)) if stage == 3 else engine(*batch_of_small(number, rank, torch.float32))[0]
        )
        engine.backward(loss)
        engine.step()
    return engine


def own_threads() -> list[str]:
    """Those of engines; one that waits for SIGTERM is the process's, and serves the next engine."""
    ours = ("fsmoe", "ds_fsmoe")
    return [each.name for each in threading.enumerate() if each.name.startswith(ours) and each.name != "fsmoe-sigterm"]


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def has_gone(engine: weakref.ref[Any], most_files: int) -> bool:
    gc.collect()
    return engine() is None and not own_threads() and num_files() <= most_files


def num_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


def in_a_row(rank: int, world_size: int, folder: str, stage: int, destroys: bool) -> list[int]:
    """For each of several engines the tensors that it left. Each goes with its threads and files, down to the files
    after the second one, or this never returns."""
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

    found, most_files = list[int](), 1_000_000
    for number in range(NUM_ENGINES):
        before = num_tensors()
        engine = trained(stage, rank, Path(folder, str(number)))
        known = weakref.ref(engine)
        if destroys:
            engine.destroy()
        del engine
        # The first ones leave what is the process's, such as communicators.
        until(partial(has_gone, known, most_files))
        # What is left there of a model that has gone fails a later engine's compiled forward.
        assert not FWD_MODULE_STACK
        most_files = num_files() if number == 1 else most_files
        found.append(num_tensors() - before)
    return found


@pytest.mark.parametrize(
    ("stage", "destroys"),
    [
        (1, False),
        pytest.param(1, True, marks=pytest.mark.long),
        (3, False),
        pytest.param(3, True, marks=pytest.mark.long),
    ],
)
def test_nothing_stays_of_engines_in_a_row(stage: int, destroys: bool, tmp_path: Path) -> None:
    for of_rank in run_on_ranks(in_a_row, 2, tmp_path / "ranks", str(tmp_path), stage, destroys):
        # What the first one leaves is the process's, such as a flag on the device.
        assert of_rank[1:] == [0] * (NUM_ENGINES - 1)
    from ds_fsmoe.routes.recorded import read_routing

    for number in range(NUM_ENGINES):
        routing = read_routing(tmp_path / str(number) / "routing")
        assert (routing.problems, sorted(routing.steps)) == ((), list(range(STEPS)))
        if stage == 1:
            run = tmp_path / str(number) / "run"
            assert len((run / "steps.jsonl").read_text().splitlines()) == STEPS
            assert "ended" in json.loads((run / "run.json").read_text())


def by_the_model_alone(rank: int, world_size: int, stage: int) -> bool:
    """A script keeps its model alone, whose hooks know the engine, and trains on by that."""
    case = Case(2, stage)
    config = case.ds_config(fsmoe={"enabled": True, "autotune": {"enabled": False}})
    import ds_fsmoe

    model = SmallModel(case, rank)
    engine = ds_fsmoe.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    known, before = weakref.ref(engine), model.first.weight.detach().clone()
    del engine
    gc.collect()
    engine = known()
    assert engine is not None
    # By the hooks of its gradients, which are still there.
    engine(*batch_of_small(0, rank, torch.float32))[0].backward()
    engine.step()
    return not torch.equal(model.first.weight, before)


def test_an_engine_stays_as_long_as_the_script_has_its_model(tmp_path: Path) -> None:
    assert run_on_ranks(by_the_model_alone, 2, tmp_path, 1) == [True] * 2
