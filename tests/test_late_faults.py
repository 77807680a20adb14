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
        found["taken"] = experts.fsmoe.short_way.why_general
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
                engine.fsmoe.step_ends(1)
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
    assert found["said"].startswith(
        "RoutingError: model.layers.0.mlp.experts: what the gate of rank 0 returned: slots_KS"
    )


def test_with_several_ranks_the_call_itself_refuses(tmp_path: Path) -> None:
    (found,) = run_on_ranks(on_the_device, 1, tmp_path, 2, "step")
    assert found["taken"] == "several ranks on devices"
    assert "model.layers.0.mlp.experts: what the gate of rank 0 returned" in found["said"]
