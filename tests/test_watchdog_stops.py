# SPDX-License-Identifier: Apache-2.0
"""A rank that stops, or goes other ways than the others, is noticed wherever the others wait for it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from tests.hf_families import batch, loss_of, model_of
from tests.ranks import run_on_ranks
from tests.sgd_engines import ds_config, engine_of
from tests.test_one_rank_alone import looks_soon, step


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_in(words: str) -> None:
    """Stop as soon as this rank is about to wait with these words."""
    from ds_fsmoe.distributed.waits import waiting

    begin = waiting.__enter__

    def enter(self: waiting) -> None:
        if words in self.what:
            stop()
        begin(self)

    waiting.__enter__ = enter  # type: ignore[method-assign]


def in_trials(engine: Any) -> None:
    while engine.fsmoe.autotune.trials is None:
        step(engine, 3)
    stop()


def in_an_error(engine: Any) -> None:
    """Caught by one rank, which goes on with its next batch."""

    def fail(*args: Any) -> None:
        hook.remove()
        raise MemoryError

    hook = engine.module.model.layers[0].register_forward_pre_hook(fail)
    with suppress(MemoryError):
        step(engine, 3)


def without_a_step(engine: Any) -> None:
    engine.backward(loss_of(engine, batch(3, 1)))


def evaluated(engine: Any) -> None:
    engine.module.eval()
    loss_of(engine.module, batch(3, 1))


def saved(engine: Any) -> None:
    engine.save_checkpoint("saved")


FIRST = "the first forward"
OFF = {"autotune": {"enabled": False}}
PLACED = {"placement": {"policy": "balanced", "every": 2, "moves_per_step": 2}}
# The stage, more of the block, what rank 1 does instead of what all do then, and what they do, if it is no training.
CASES: dict[str, tuple[int, dict[str, Any], Callable[[Any], object], Callable[[Any], object] | None]] = {
    "the gathers of ZeRO 3": (3, OFF, lambda engine: stop(), evaluated),
    FIRST: (3, OFF, lambda engine: stop(), None),
    "a step less": (1, OFF, without_a_step, None),
    "an error that is caught": (3, OFF, in_an_error, None),
    "measuring": (3, {}, lambda engine: stop_in("measuring"), None),
    "measured times": (3, {}, lambda engine: stop_in("measured times"), None),
    "trials": (3, {}, in_trials, None),
    "experts that move": (3, OFF | PLACED, lambda engine: stop_in("experts that move"), None),
    "a save": (3, OFF, lambda engine: (stop_in(""), saved(engine)), saved),
    "recording": (3, OFF | {"routing": {"record": "routing"}}, lambda engine: stop_in("the exchange of counts"), None),
    "the step of ZeRO 2": (2, OFF, lambda engine: (without_a_step(engine), stop()), None),
}


def with_one_astray(rank: int, world_size: int, folder: str, name: str) -> None:
    os.chdir(folder)
    stage, block, instead, together = CASES[name]
    engine = engine_of(model_of("mixtral"), ds_config(stage, **block))
    if name != FIRST:
        step(engine, 0)
    looks_soon(engine)
    if rank:
        instead(engine)
    elif together is not None:
        together(engine)
    for number in range(100):
        step(engine, number)
    raise AssertionError("it has gone on")


# Those of a group are some of ours, some of DeepSpeed's: three of them a day, and one that both kinds share in short.
QUICK = "the gathers of ZeRO 3"
OTHERS = pytest.mark.daily("a rank that does not come", 3)


@pytest.mark.parametrize("name", [each if each == QUICK else pytest.param(each, marks=OTHERS) for each in CASES])
def test_a_rank_that_does_not_come_is_a_hang_wherever_the_others_wait(name: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"exit codes \[") as caught:
        run_on_ranks(with_one_astray, 2, tmp_path / "ranks", str(tmp_path), name, grace_s=0)
    reports = [each.read_text() for each in (tmp_path / "fsmoe_reports").glob("rank*.txt")]
    assert re.match(r"exit codes \[.*\b86\b", str(caught.value)), caught.value
    assert any(
        "\nreason: hang: waits for other ranks in " in each or "\nreason: hang: a run" in each for each in reports
    )
