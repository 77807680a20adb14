# SPDX-License-Identifier: Apache-2.0
"""What the planner says that each stage of ZeRO sends in a step is what ranks are seen to send."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from ds_fsmoe.offline.models.architecture import Architecture
from ds_fsmoe.offline.models.hf_config import read_hf_config
from ds_fsmoe.offline.models.model_layers import model_layers
from ds_fsmoe.planning.decide.zero import Zero
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.schedule import EXPERT_GRAD_PARTS, EXPERT_PARAMETERS, GRAD_PARTS, PARAMETERS
from tests.memory_cases import config_of
from tests.ranks import run_on_ranks

FAMILY, WORLD, MICRO_BATCHES, STEPS = "qwen3_moe", 2, 2, 4
SMALLEST = 32
"""Bytes of a message below which it is a norm, a loss or a flag."""
FP32 = 4
OPERATIONS = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all_single": "exchange",
}


def count_in(counted: Counter[str]) -> None:
    """Count the bytes of the largest buffer of every collective of this process from now on."""
    for name, kind in OPERATIONS.items():
        function = getattr(dist, name)
        signature = inspect.signature(function)

        def collective(*args: Any, kind=kind, function=function, signature=signature, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            # Owners receive from all ranks what each of them gives once.
            tensors = [given["input"]] if kind == "exchange" else list(given.values())
            size = max(each.nbytes for each in tensors if isinstance(each, torch.Tensor))
            if size >= SMALLEST and dist.get_world_size(given.get("group")) > 1:
                counted[kind] += size
            return function(*args, **kwargs)

        setattr(dist, name, functools.wraps(function)(collective))


class Job(NamedTuple):
    stage: int
    block: dict[str, Any] | None = None
    """Of ours; without one, stock DeepSpeed's layers."""
    zero: dict[str, int] | None = None


def sent(rank: int, world_size: int, jobs: list[Job]) -> list[dict[str, int]]:
    """The bytes that a step of each job sends by each collective."""
    counted: Counter[str] = Counter()
    count_in(counted)
    from transformers import AutoModelForCausalLM

    from tests.sgd_engines import ds_config, engine_of

    found = []
    for stage, block, zero in jobs:
        config = ds_config(stage, autotune=False, **(block or {}))
        config["fsmoe"] = {"enabled": False} if block is None else config["fsmoe"]
        config["gradient_accumulation_steps"] = MICRO_BATCHES
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
        config["zero_optimization"] |= zero or {}
        torch.manual_seed(0)
        engine = engine_of(AutoModelForCausalLM.from_config(config_of(FAMILY)), config)
        for _ in range(STEPS):
            counted.clear()
            for _ in range(MICRO_BATCHES):
                x = torch.randint(3, 900, (1, 16), generator=torch.Generator().manual_seed(rank))
                engine.backward(engine(input_ids=x, labels=x).loss)
                engine.step()
            if block is not None:
                engine.fsmoe.wait_for_parameters()  # otherwise some are sent in the next step
        found.append(dict(counted))
        engine.destroy()
    return found


def planned(stage: int, ep: int, **options: int) -> Counter[str]:
    """Kind of task -> its bytes in one micro-batch, as they are planned."""
    model: Architecture = read_hf_config(config_of(FAMILY).to_dict())
    layers = model_layers(model, Groups(WORLD, WORLD, ep=ep), 1, 16, FP32)
    found: Counter[str] = Counter()
    for layer in Zero(stage, FP32, **options).layers("best", layers):
        for each in layer.gradients:
            found[each.kind] += each.size_bytes
        if layer.sharing is not None:
            for each in (*layer.sharing.forward, *layer.sharing.backward, *layer.sharing.gradients):
                found[each.kind] += round(each.size)
    return found


ALL_AGAIN = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
KEPT = {"stage3_max_reuse_distance": 1_000_000_000, "stage3_prefetch_bucket_size": 0}


@pytest.mark.long
def test_stage_3_gathers_and_scatters_in_every_micro_batch_what_is_planned(tmp_path: Path) -> None:
    ways = [(ep, zero, options) for ep in (1, 2) for zero, options in ((ALL_AGAIN, {"max_reuse": 0}), (KEPT, {}))]
    jobs = [Job(3, {"ep_size": ep}, zero) for ep, zero, _ in ways]
    for found, (ep, _, options) in zip(run_on_ranks(sent, WORLD, tmp_path, jobs)[0], ways, strict=True):
        plan = planned(3, ep, persistence=0, **options)
        assert found["all_gather"] == MICRO_BATCHES * (plan[PARAMETERS] + plan[EXPERT_PARAMETERS])
        assert found["reduce_scatter"] == MICRO_BATCHES * (plan[GRAD_PARTS] + plan[EXPERT_GRAD_PARTS])


@pytest.mark.long
def test_stock_and_ours_sum_once_a_step_at_stage_1_and_in_every_micro_batch_at_stage_2(tmp_path: Path) -> None:
    jobs = [Job(stage, block) for stage in (1, 2) for block in (None, {"ep_size": 1})]
    of_ranks = run_on_ranks(sent, WORLD, tmp_path, jobs)
    for stage, stock, ours in ((1, 0, 1), (2, 2, 3)):
        times, plan = MICRO_BATCHES if stage == 2 else 1, planned(stage, 1)
        summed, gathered = plan["GRAD"] + plan["EXPERT_GRAD"], plan[PARAMETERS] + plan[EXPERT_PARAMETERS]
        assert of_ranks[0][stock]["all_reduce"] == times * summed
        assert of_ranks[0][stock]["all_gather"] == gathered == summed
        # Each rank gives all its gradients to their owners, and what it owns of the parameters to all others.
        exchanged = sum(each[ours]["exchange"] for each in of_ranks)
        assert exchanged == times * WORLD * summed + (WORLD - 1) * gathered
