# SPDX-License-Identifier: Apache-2.0
"""Whole engines on a pretended GPU: DeepSpeed's optimizer, our layers, gradients in windows; every rule is kept.

Each runs as one rank of several, the others of which give what this one gives. No GPU has run any of this.
"""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests import gradient_cases
from tests.engine_jobs import GPT, RUNS, TWO_NODES
from tests.gradient_cases import LOOPS, Run, training
from tests.pretended_gpu import Gpu, pretending
from tests.race_cases import counts_come_back, world_of
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.test_gradients_against_stock import BY_RULE, whole_list


@dataclass(frozen=True)
class Found:
    """What a run on the pretended device has left."""

    breaches: tuple[str, ...]
    num_operations: int
    lanes: str
    hidden: int
    losses: tuple[float, ...]


def degrees(forward: int, backward: int) -> tuple[tuple[str, int], ...]:
    return ("pipeline_degree.forward", forward), ("pipeline_degree.backward", backward)


def on_the_device(run: Run, ranks: int, overlap: bool = True) -> Found:
    """One engine of the first of so many ranks, whose device is the second of its machine."""
    from tests.pretended_gpu.accelerator import accelerated

    run = replace(run, block=(*BY_RULE, ("ops", "reference"), ("overlap", overlap), *run.block))
    gpu = Gpu(index=1, is_set=False)
    made = gradient_cases.batch
    os.environ |= {"LOCAL_RANK": "1", "RANK": "0", "WORLD_SIZE": str(ranks)}
    # Engines of earlier runs wait for the device when they are collected, wherever this one is then.
    gc.collect()
    gc.disable()
    with world_of(ranks, rank=0), counts_come_back(), accelerated(), pretending(gpu):
        gradient_cases.batch = lambda step, rank: tuple(each.cuda() for each in made(step, rank))
        try:
            with training(run, 0) as script:
                for _ in range(run.steps):
                    LOOPS[run.loop](script)
                kind = type(script.engine.fsmoe.running.lanes).__name__
        finally:
            gradient_cases.batch = made
            gc.enable()
        losses = tuple(each.item() for each in script.seen.numbers["losses"])
    return Found(tuple(map(str, gpu.breaches)), gpu.num_operations, kind, script.seen.hidden, losses)


def problems(_: int, __: int, runs: list[tuple[int, Run]]) -> list[str]:
    """What is wrong with runs of so many ranks, in words; in a process of its own."""
    dist.destroy_process_group()  # the process's own
    wrong = []
    for ranks, run in runs:
        streams, serial = on_the_device(run, ranks), on_the_device(run, ranks, overlap=False)
        if streams.breaches:
            wrong.append(f"{run.name}: {len(streams.breaches)} breaches, such as {streams.breaches[:3]}")
        if streams.losses != serial.losses:
            wrong.append(f"{run.name}: losses {streams.losses}, and one task after another {serial.losses}")
        if streams.lanes != "StreamLanes" or streams.num_operations < 1000:
            wrong.append(f"{run.name}: {streams.num_operations} operations on {streams.lanes}")
        if run.mode in ("fixed_chunk", "dense_only") and run.loop == "plain" and not streams.hidden:
            wrong.append(f"{run.name}: nothing travels in windows")
    _give_back()
    return wrong


def _give_back() -> None:
    """For whoever called, to be ended."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)


KEPT = [
    (4, Run(0, mode="fixed_chunk", features=GPT, block=(*degrees(2, 3), ("esp_size", 2), *TWO_NODES), steps=3)),
    *((2, Run(stage, mode="dense_only", block=degrees(2, 2), steps=3)) for stage in (1, 2)),
]
OF_TRAINING = [each for each in whole_list() if "sparse" not in each.features]
"""Those that gradients are compared with stock by. The memory of a sparse tensor's parts is not followed."""
ALL = [
    (1, Run(0, ep_size=1, block=degrees(2, 2))),
    *((4, replace(run, steps=3)) for run in RUNS),
    *((2 + 2 * (n % 2), replace(run, block=degrees(2, 2 + n % 3))) for n, run in enumerate(OF_TRAINING)),
]


def test_engines_keep_every_rule(tmp_path: Path) -> None:
    (wrong,) = run_on_ranks(problems, 1, tmp_path, KEPT)
    assert not wrong, "\n".join(wrong)


@pytest.mark.long
@sampled(("ranks", "run"), ALL, drawn=1, ids=lambda each: getattr(each, "name", str(each)))
def test_engines_of_every_part_and_way_to_train_keep_every_rule(ranks: int, run: Run, tmp_path: Path) -> None:
    (wrong,) = run_on_ranks(problems, 1, tmp_path, [(ranks, run)])
    assert not wrong, "\n".join(wrong)


# Mutations: what is proven by the rules is proven only if they are broken by programs that are wrong.


def breaches_of_wrong_engines(_: int, __: int) -> tuple[list[str], list[str]]:
    """Of one that leaves it to DeepSpeed to set the device, which does so once layers have been replaced; and of one
    whose gradients are sent beside it before they are there."""
    from ds_fsmoe.engine.engine import FSMoEEngine
    from ds_fsmoe.gradients.background_lane import BackgroundStreams

    def give(self: BackgroundStreams, between: bool, step: object, after: object) -> object:
        with torch.cuda.stream(self._streams[between]), torch.no_grad():
            step()
            return self._now()

    dist.destroy_process_group()
    found, right = [], FSMoEEngine._configure_with_arguments
    FSMoEEngine._configure_with_arguments = DeepSpeedEngine._configure_with_arguments
    found.append(list(on_the_device(Run(0, steps=1), 2).breaches))
    FSMoEEngine._configure_with_arguments, BackgroundStreams._give = right, give
    found.append(list(on_the_device(Run(1, mode="dense_only", steps=2, block=degrees(2, 2)), 2).breaches))
    _give_back()
    return found[0], found[1]


@pytest.mark.long
def test_an_engine_on_no_device_and_gradients_that_are_sent_before_they_are_there_are_reported(tmp_path: Path) -> None:
    """The device of a rank is 1, and 0 is current until somebody says otherwise."""
    ((of_device, of_gradients),) = run_on_ranks(breaches_of_wrong_engines, 1, tmp_path)
    assert any("device 0 of a rank whose device is 1" in each for each in of_device)
    assert any("[order]" in each for each in of_gradients)
    assert not any("of a rank whose device" in each for each in of_gradients)
