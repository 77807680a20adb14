# SPDX-License-Identifier: Apache-2.0
"""What routers chose out of range on a device is reported with the engine's step, and nothing waits for it before.

The device is pretended; see tests/pretended_gpu.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch.distributed as dist  # noqa: E402

from tests.ranks import run_on_ranks  # noqa: E402


def on_the_device(rank: int, world_size: int, ranks: int, how: str) -> dict[str, Any]:
    """A block of a model on a pretended device: where the host waited in a step, and what was said of a bad choice."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from tests.pretended_gpu import Gpu, pretending
    from tests.pretended_gpu.accelerator import accelerated
    from tests.race_cases import world_of
    from tests.test_one_rank import engine_of, qwen3

    dist.destroy_process_group()
    gpu = Gpu(index=0, is_set=False)
    os.environ |= {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": str(ranks)}
    gc.collect()
    gc.disable()
    waits: list[str] = []
    found: dict[str, Any] = {"waits": waits, "said": ""}
    with world_of(ranks, rank=0), accelerated(), pretending(gpu):
        engine = engine_of(qwen3(), "plain", gradient_partition={"mode": "off"}, ep_size=1)
        experts = engine.module.model.layers[0].mlp.experts
        index = torch.randint(0, 17, (24, 4)).cuda()
        weights = torch.rand(24, 4, dtype=torch.bfloat16).cuda()
        x, dy = (torch.randn(1, 24, 64, dtype=torch.bfloat16).cuda() for _ in range(2))

        def step(choices: Any) -> None:
            leaf, leaf_weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
            experts(leaf, choices, leaf_weights).backward(dy)
            found["gradient"] = leaf.grad.float().cpu()

        host_waits = gpu.host_waits
        step(index)
        gpu.host_waits = lambda what, *rest: (waits.append(what), host_waits(what, *rest))[1]
        leaf, leaf_weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
        experts(leaf, index, leaf_weights).backward(dy)
        gpu.host_waits = host_waits
        found["waits"] = list(waits)
        found["taken"] = experts.fsmoe.fast_path.why_general
        wrong = index.clone()
        wrong[3, 1] = 40
        as_none = index.clone()
        as_none[3, 1] = 16
        step(as_none)
        of_none = found["gradient"]
        try:
            step(wrong)
            found["same"] = torch.equal(found["gradient"], of_none)
            if how == "step":
                engine.step()
            elif how == "train":
                engine.module.train()
            elif how == "eval":
                engine.module.eval()
            elif how == "call":
                torch.cuda.synchronize()
                step(index)
            else:
                engine.destroy()
        except ValueError as error:
            found["said"] = f"{type(error).__name__}: {error}"
        # Said once.
        engine.module.eval()
        gc.enable()
        del found["gradient"]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    return found


@pytest.mark.parametrize("how", ["step", "train", "eval", "call", "destroy"])
def test_a_bad_choice_counts_as_none_and_is_reported_without_a_wait_before(how: str, tmp_path: Path) -> None:
    (found,) = run_on_ranks(on_the_device, 1, tmp_path, 1, how)
    assert found["taken"] == ""
    assert found["waits"] == []
    assert found["same"]
    assert found["said"].startswith("RoutingError: model.layers.0.mlp.experts: the gate's result on rank 0: slots_KS")


@pytest.mark.parametrize(
    ("how", "is_said"), [("step", True), ("train", False), ("eval", False), ("call", False), ("destroy", True)]
)
def test_of_several_ranks_none_raises_in_training_before_the_step_they_share(
    how: str, is_said: bool, tmp_path: Path
) -> None:
    (found,) = run_on_ranks(on_the_device, 1, tmp_path, 2, how)
    assert found["taken"] == ""
    assert found["waits"] == []
    assert found["same"]
    assert ("model.layers.0.mlp.experts: the gate's result on rank 0" in found["said"]) == is_said


def sharing(rank: int, world_size: int) -> list[str]:
    """What each rank is told of three steps: nothing wrong, one layer on the last rank, and nothing again."""
    from ds_fsmoe.layer.runtime import LateFaults

    faults = LateFaults()
    faults.begin_sharing(["first", "second"], torch.device("cpu"))
    said = []
    for number in (0, 3, 0):
        found = number if rank == world_size - 1 else 0
        faults.add("second", torch.tensor(found), in_training=True)
        # Of an accumulation, which must not hide it.
        faults.add("second", torch.tensor(0), in_training=True)
        if rank == 0:
            faults.add("first", torch.tensor(0), in_training=True)
        faults.share()
        try:
            faults.check()
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


def test_what_one_rank_has_found_is_raised_by_all_once_with_its_number(tmp_path: Path) -> None:
    for first, second, third in run_on_ranks(sharing, 2, tmp_path):
        assert first == third == ""
        assert second.startswith("second: the gate's result on rank 1: slots_KS")


def accumulating(rank: int, world_size: int) -> dict[str, Any]:
    """Steps of two micro batches: what the engine counts after a step that reported a bad choice, and two more."""
    import ds_fsmoe
    from tests.test_one_rank import config_of, qwen3

    config = config_of("plain") | {"gradient_accumulation_steps": 2}
    engine = ds_fsmoe.initialize(model=qwen3(torch.float32), config=config)[0]
    ids = torch.randint(0, 64, (1, 8))
    found: dict[str, Any] = {"counts": []}
    for number in range(4):
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        if number == 1:
            engine.fsmoe.running.late_faults.add("layer", torch.tensor(1), in_training=True)
        try:
            engine.step()
        except ValueError as error:
            found["said"] = (number, str(error))
        found["counts"].append((engine.micro_steps, engine.global_steps))
    return found


def test_an_engine_that_reported_a_bad_choice_counts_on_as_before(tmp_path: Path) -> None:
    (found,) = run_on_ranks(accumulating, 1, tmp_path)
    assert found["said"][0] == 1
    assert found["counts"] == [(1, 0), (2, 1), (3, 1), (4, 2)]


def evaluating(rank: int, world_size: int) -> list[str]:
    """A bad choice of a forward in evaluation on rank 1, ahead of a step that the ranks share."""
    from ds_fsmoe.layer.runtime import LateFaults

    faults = LateFaults()
    faults.begin_sharing(["first"], torch.device("cpu"))
    faults.add("first", torch.tensor(int(rank == 1)), in_training=False)
    said = []
    for _ in range(2):
        faults.share()
        try:
            faults.check()
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


def test_a_bad_choice_of_an_evaluation_ahead_of_a_step_is_raised_there_by_all_and_once(tmp_path: Path) -> None:
    for first, second in run_on_ranks(evaluating, 2, tmp_path):
        assert "the gate's result on rank 1" in first
        assert second == ""


def test_in_evaluation_a_rank_refuses_its_own_choices_without_the_others() -> None:
    from ds_fsmoe.layer.runtime import LateFaults

    faults = LateFaults()
    faults.begin_sharing(["first"], torch.device("cpu"))
    faults.add("first", torch.tensor(1), in_training=False)
    with pytest.raises(ValueError, match="first: the gate's result on rank 0"):
        faults.add("first", torch.tensor(0), in_training=False)
