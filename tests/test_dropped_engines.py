# SPDX-License-Identifier: Apache-2.0
"""Nothing stays of engines that a script has ended or dropped, nor of measuring and planning anew: no tensor, thread,
open file, group or native memory."""

from __future__ import annotations

import ctypes
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
import torch.distributed as dist

from tests.hurry import hurry

pytest.importorskip("transformers")

from tests.hf_families import batch, loss_of, model_of
from tests.ranks import run_on_ranks
from tests.sgd_engines import ds_config, engine_of
from tests.small_model import Case, SmallModel
from tests.small_model import batch as batch_of_small
from tests.waiting import until

STEPS, ROUNDS = 2, 2
OFF = {"autotune": {"enabled": False}}
TUTEL = {"schedule": "tutel", "pipeline_degree": {"forward": 2, "backward": 2}}
# Every second one is ended, the others are dropped.
SMALL = [
    (Case(2, 1), OFF | {"record": {"dir": "run0"}, "routing": {"record": "routing0"}}),
    (Case(1, 1), TUTEL | {"record": {"dir": "run1"}}),
    (Case(2, 2), OFF | {"overlap": False}),
    (Case(1, 0, "bf16", expert="gpt"), {"esp_size": 2, "trace": {"enabled": True, "start_step": 0, "num_steps": 1}}),
    (None, OFF),
]
FAMILY = [(None, OFF | {"routing": {"record": f"routing{at}"}}) for at in range(2)]  # at stage 3


def trained(case: Case | None, block: dict[str, Any], rank: int) -> Any:
    if case is None:
        engine = engine_of(model_of("mixtral"), ds_config(3, **block))
    else:
        own = {"enabled": True, "ops": "reference"} | block
        engine = engine_of(SmallModel(case, rank), case.ds_config(fsmoe=own))
    dtype = next(engine.module.parameters()).dtype
    for number in range(STEPS):
        loss = loss_of(engine, batch(number, 1)) if case is None else engine(*batch_of_small(number, rank, dtype))[0]
        engine.backward(loss)
        engine.step()
    return engine


def own_threads() -> list[str]:
    """Those of engines; one that waits for SIGTERM is the process's, and serves the next engine."""
    ours = ("fsmoe", "ds_fsmoe")
    return [each.name for each in threading.enumerate() if each.name.startswith(ours) and each.name != "fsmoe-sigterm"]


def has_gone(engine: weakref.ref[Any]) -> bool:
    gc.collect()
    return engine() is None and not own_threads()


def held() -> dict[str, int]:
    """What this process has open, and its tensors."""
    # A thread that looked after SIGTERM has been told to end, and closes its pipe; nobody joins it.
    until(lambda: all(each.name != "fsmoe-sigterm" for each in threading.enumerate()))
    gc.collect()
    return {
        "file descriptors": len(os.listdir("/proc/self/fd")),
        "process groups": len(dist.distributed_c10d._world.pg_map),
        "tensors": sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()),
    }


def in_turn(rank: int, world_size: int, folder: str, kinds: list[tuple[Case | None, dict[str, Any]]]) -> list[dict]:
    """What is held after each of several rounds of engines of all kinds. Each goes with its threads, or this never
    returns."""
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

    found = []
    for number in range(ROUNDS):
        os.chdir(Path(folder, str(number)))
        for at, (case, block) in enumerate(kinds):
            engine = trained(case, block, rank)
            known = weakref.ref(engine)
            if at % 2:
                engine.destroy()
            del engine
            until(partial(has_gone, known))
            # What is left there of a model that has gone fails a later engine's compiled forward.
            assert not FWD_MODULE_STACK
        found.append(held())
        dist.barrier()  # a rank that leaves closes its ends of what the others count
    return found


@pytest.mark.parametrize("kinds", [SMALL, pytest.param(FAMILY, marks=pytest.mark.long)], ids=["small", "family"])
def test_nothing_stays_of_engines_of_several_kinds_in_turn_that_were_ended_or_only_dropped(
    kinds: list[tuple[Case | None, dict[str, Any]]], tmp_path: Path
) -> None:
    for number in range(ROUNDS):
        (tmp_path / str(number)).mkdir()
    # What the first round leaves is the process's, such as communicators.
    for first, *others in run_on_ranks(in_turn, 2, tmp_path / "ranks", str(tmp_path), kinds):
        assert others == [first] * (ROUNDS - 1)
    from ds_fsmoe.routes.recorded import read_routing

    for folder in (tmp_path / str(number) for number in range(ROUNDS)):
        for each in (folder / "routing0", *([folder / "routing1"] if kinds is FAMILY else [])):
            routing = read_routing(each)
            assert (routing.problems, sorted(routing.steps)) == ((), list(range(STEPS)))
        for run in (folder / "run0", folder / "run1") if kinds is SMALL else ():
            assert len((run / "steps.jsonl").read_text().splitlines()) == STEPS
            assert "ended" in json.loads((run / "run.json").read_text())


def by_the_model_alone(rank: int, world_size: int, stage: int) -> bool:
    """A script keeps its model alone, whose hooks know the engine, and trains on by that."""
    case = Case(2, stage)
    model = SmallModel(case, rank)
    engine = engine_of(model, case.ds_config(fsmoe={"enabled": True, "autotune": {"enabled": False}}))
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


class Mallinfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _names = "arena ordblks smblks hblks in_maps_bytes usmblks fsmblks in_arenas_bytes free_bytes keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def in_use_bytes() -> int:
    """What native code has been given and has not given back, in all arenas. What glibc keeps besides, for each arena
    up to the most that was ever in use there, is no matter of ours: it stays within MALLOC_ARENA_MAX."""
    gc.collect()
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Mallinfo
    found = mallinfo2()
    return found.in_maps_bytes + found.in_arenas_bytes


def tune_again_and_again(rank: int, world_size: int, times: int) -> list[int]:
    hurry()
    case = Case(2, 0, k=2, expert="gpt")
    block = {"enabled": True, "ops": "reference", "autotune": {"enabled": True, "trials": 0}}
    engine = engine_of(SmallModel(case, rank), case.ds_config(fsmoe=block | {"pipeline_degree": {"max": 2}}))
    found, before = [], engine.fsmoe.autotune.result
    for _ in range(times):
        for step in range(4):  # the tuning is due ahead of the third
            loss, _ = engine(*batch_of_small(step, rank, torch.float32))
            engine.backward(loss)
            engine.step()
        result = engine.fsmoe.autotune.result
        assert result is not before
        assert result.num_measured > 0
        before = result
        found.append(in_use_bytes())
        engine.fsmoe.autotune.request_again("asked to")
    engine.destroy()
    return found


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33 or newer")
@pytest.mark.parametrize("times", [pytest.param(4, marks=pytest.mark.long), pytest.param(30, marks=pytest.mark.slow)])
def test_tuning_again_on_two_ranks_takes_no_more_native_memory(times: int, tmp_path: Path) -> None:
    for _, second, *others in run_on_ranks(tune_again_and_again, 2, tmp_path, times):
        assert max(others) - second < 2 * 2**20
