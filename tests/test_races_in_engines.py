# SPDX-License-Identifier: Apache-2.0
"""Whole engines on a pretended GPU: DeepSpeed's optimizer, our layers, gradients in windows; every rule is kept.

Each runs as one rank of several, the others of which give what this one gives. No GPU has run any of this.
"""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds_fsmoe.planning.decide.presets import PRESETS
from tests import gradient_cases
from tests.gradient_cases import LOOPS, Run, training
from tests.pretended_gpu import Gpu, pretending
from tests.race_cases import world_of
from tests.ranks import run_on_ranks
from tests.test_gradients_against_stock import BY_RULE, STAGES, whole_list

GPT = frozenset({"gpt"})
TWO_NODES = (("topology.ranks_per_node", 2),)


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
    with world_of(ranks, rank=0), accelerated(), pretending(gpu):
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


def layouts() -> list[tuple[int, Run]]:
    """(ranks, run): shards, two-step all-to-alls, hooks, recomputing, one rank."""
    some = [
        (4, Run(0, mode="fixed_chunk", features=GPT, block=(*degrees(2, 3), ("esp_size", 2), *TWO_NODES))),
        (4, Run(2, ep_size=4, mode="fixed_chunk", block=(*degrees(3, 2), ("alltoall", "2dh"), *TWO_NODES))),
        (2, Run(1, mode="dense_only", block=(*degrees(2, 2), ("hooks", ("ds_fsmoe.BFloat16Communication",))))),
        (4, Run(1, features=GPT, block=(*degrees(2, 4), ("recompute", True)), checkpointing="saved")),
        (1, Run(0, ep_size=1, block=degrees(2, 2))),
        (2, Run(1, mode="fixed_chunk", block=degrees(2, 2))),
    ]
    for schedule in PRESETS:
        block = () if schedule == "deepspeed" else degrees(2, 2)
        of_schedule = (("schedule", schedule), *block, *TWO_NODES)
        some += [(4, Run(stage, features=GPT, block=(*of_schedule, ("esp_size", 2)))) for stage in STAGES]
    return some


def parts() -> list[tuple[int, Run]]:
    """Every gate and order by name."""
    gates: list[dict[str, Any]] = [
        {"type": name} for name in ("gshard", "switch", "mixtral", "qwen", "sigmoid", "xmoe")
    ]
    gates += [{"type": "deepseek", "num_groups": 2, "kept_groups": 1}, {"type": "softmoe", "causal": False}]
    gates += [{"type": "expert_choice", "k": 2, "capacity_factor": 1.1, "causal": False}]
    runs = [Run(n % 3, mode="dense_only", block=(*degrees(2, 2), ("gate", gate))) for n, gate in enumerate(gates)]
    return [(2, run) for run in (*runs, Run(1, block=(*degrees(3, 2), ("order", "einsum"))))]


def of_training() -> list[tuple[int, Run]]:
    """The runs that gradients are compared with stock by, at degrees that cut. Not with sparse gradients: the memory
    of a sparse tensor's parts is not followed."""
    runs = [each for each in whole_list() if "sparse" not in each.features]
    return [(2 + 2 * (n % 2), replace(run, block=degrees(2, 2 + n % 3))) for n, run in enumerate(runs)]


def test_engines_keep_every_rule(tmp_path: Path) -> None:
    (wrong,) = run_on_ranks(problems, 1, tmp_path, layouts()[:2])
    assert not wrong, "\n".join(wrong)


def test_gradients_beside_dense_parts_keep_every_rule_at_both_stages(tmp_path: Path) -> None:
    runs = [(2, Run(stage, mode="dense_only", steps=3, block=degrees(2, 2))) for stage in (1, 2)]
    (wrong,) = run_on_ranks(problems, 1, tmp_path, runs)
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_engines_keep_every_rule_in_all_runs(part: int, tmp_path: Path) -> None:
    (wrong,) = run_on_ranks(problems, 1, tmp_path, [*layouts(), *parts(), *of_training()][part::4], limit_s=1200)
    assert not wrong, "\n".join(wrong)


def without_setting_the_device(_: int, __: int) -> tuple[str, ...]:
    """Breaches of an engine that leaves it to DeepSpeed, which does so once layers have been replaced."""
    from ds_fsmoe.engine.engine import FSMoEEngine

    dist.destroy_process_group()
    FSMoEEngine._configure_with_arguments = DeepSpeedEngine._configure_with_arguments
    found = on_the_device(Run(0, steps=1), 2)
    _give_back()
    return found.breaches


def test_an_engine_that_touches_the_device_before_it_is_set_is_reported(tmp_path: Path) -> None:
    """The device of a rank is 1, and 0 is current until somebody says otherwise."""
    (breaches,) = run_on_ranks(without_setting_the_device, 1, tmp_path)
    assert any("device 0 of a rank whose device is 1" in each for each in breaches)
