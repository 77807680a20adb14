# SPDX-License-Identifier: Apache-2.0
"""What routers chose out of range on a device is reported with the engine's step, and nothing waits for it before.

The device is pretended; see tests/pretended_gpu.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch.distributed as dist  # noqa: E402

from tests.ranks import run_on_ranks  # noqa: E402

WAYS = ("train", "eval", "call", "step", "destroy")


def on_the_device(rank: int, world_size: int, ranks: int) -> dict[str, Any]:
    """A block of a model on a pretended device: where the host waited in a step, and what is said of a bad choice by
    each of the ways in which a script goes on."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from tests.pretended_gpu import Gpu, pretending
    from tests.pretended_gpu.accelerator import accelerated
    from tests.pretended_nccl import fake_ranks
    from tests.test_one_rank import engine_of, qwen3

    dist.destroy_process_group()
    gpu = Gpu(index=0, is_set=False)
    os.environ |= {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": str(ranks)}
    gc.collect()
    gc.disable()
    found: dict[str, Any] = {}
    with fake_ranks(0, ranks), accelerated(), pretending(gpu):
        engine = engine_of(qwen3(), "plain", gradient_partition={"mode": "off"}, ep_size=1)
        experts = engine.module.model.layers[0].mlp.experts
        index = torch.randint(0, 17, (24, 4)).cuda()
        weights = torch.rand(24, 4, dtype=torch.bfloat16).cuda()
        x, dy = (torch.randn(1, 24, 64, dtype=torch.bfloat16).cuda() for _ in range(2))

        def step(choices: Any) -> Any:
            leaf = x.clone().requires_grad_()
            experts(leaf, choices, weights.clone().requires_grad_()).backward(dy)
            return leaf.grad

        def with_one(choice: int) -> Any:
            choices = index.clone()
            choices[3, 1] = choice
            return choices

        wrong, as_none = with_one(40), with_one(16)
        go_on: dict[str, Callable[[], object]] = {
            "train": engine.module.train,
            "eval": engine.module.eval,
            "call": lambda: (torch.cuda.synchronize(), step(index)),
            "step": engine.step,
            "destroy": engine.destroy,
        }
        step(index)
        waits, host_waits = [], gpu.host_waits
        gpu.host_waits = lambda what, *rest: (waits.append(what), host_waits(what, *rest))[1]
        step(index)
        gpu.host_waits = host_waits
        found["waits"], found["taken"] = waits, experts.fsmoe.fast_path.why_general
        for way in WAYS:
            engine.module.train()
            found[way] = ""
            try:
                of_none = step(as_none).float().cpu()
                found[f"{way}: gradient"] = torch.equal(step(wrong).float().cpu(), of_none)
                go_on[way]()
            except ValueError as error:
                found[way] = f"{type(error).__name__}: {error}"
            # Said once, at the step at the latest.
            if ranks > 1 and way != "destroy":
                with suppress(ValueError):
                    engine.step()
            engine.module.eval()
        gc.enable()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    return found


@pytest.mark.parametrize(("ranks", "said_by"), [(1, WAYS), (2, ("step", "destroy"))])
def test_a_bad_choice_counts_as_none_and_is_reported_without_a_wait_before_by_several_ranks_in_their_step(
    ranks: int, said_by: tuple[str, ...], tmp_path: Path
) -> None:
    (found,) = run_on_ranks(on_the_device, 1, tmp_path, ranks)
    assert (found["taken"], found["waits"]) == ("", [])
    said = "RoutingError: model.layers.0.mlp.experts: the gate's result on rank 0: slots_KS"
    assert {way: found[way].startswith(said) for way in WAYS} == {way: way in said_by for way in WAYS}
    assert all(found[f"{way}: gradient"] for way in WAYS)


def sharing(rank: int, world_size: int) -> list[str]:
    """What each rank is told of three steps, of which the last rank finds one layer wrong in the second; and of two
    after an evaluation on rank 1 that had a bad choice."""
    from ds_fsmoe.layer.runtime import LateFaults

    def checked() -> str:
        faults.share()
        try:
            faults.check()
        except ValueError as error:
            return str(error)
        return ""

    faults, told = LateFaults(), []
    faults.begin_sharing(["first", "second"], torch.device("cpu"))
    for number in (0, 3, 0):
        faults.add("second", torch.tensor(number if rank == world_size - 1 else 0), in_training=True)
        # Of an accumulation, which must not hide it.
        faults.add("second", torch.tensor(0), in_training=True)
        if rank == 0:
            faults.add("first", torch.tensor(0), in_training=True)
        told.append(checked())
    faults.add("first", torch.tensor(int(rank == 1)), in_training=False)
    told += [checked(), checked()]
    # The next evaluation refuses what this rank has chosen in the one before, without the others.
    faults.add("first", torch.tensor(1), in_training=False)
    with pytest.raises(ValueError, match=f"first: the gate's result on rank {rank}"):
        faults.add("first", torch.tensor(0), in_training=False)
    return told


def test_what_one_rank_has_found_in_training_or_evaluation_is_raised_by_all_once_with_its_number(
    tmp_path: Path,
) -> None:
    for first, second, third, after, later in run_on_ranks(sharing, 2, tmp_path):
        assert first == third == later == ""
        assert second.startswith("second: the gate's result on rank 1: slots_KS")
        assert after.startswith("first: the gate's result on rank 1")


def accumulating(rank: int, world_size: int) -> list[tuple[int, int, str]]:
    """What the engine counts and says after each micro-batch, two for a step, where the second has a bad choice."""
    import ds_fsmoe
    from tests.test_one_rank import config_of, qwen3

    config = config_of("plain") | {"gradient_accumulation_steps": 2}
    engine = ds_fsmoe.initialize(model=qwen3(torch.float32), config=config)[0]
    ids, found = torch.randint(0, 64, (1, 8)), []
    for number in range(4):
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        if number == 1:
            engine.fsmoe.running.late_faults.add("layer", torch.tensor(1), in_training=True)
        said = ""
        try:
            engine.step()
        except ValueError as error:
            said = str(error)
        found.append((engine.micro_steps, engine.global_steps, said))
    return found


def test_an_engine_that_reported_a_bad_choice_counts_on_as_before(tmp_path: Path) -> None:
    (found,) = run_on_ranks(accumulating, 1, tmp_path)
    assert [counts[:2] for counts in found] == [(1, 0), (2, 1), (3, 1), (4, 2)]
    assert [bool(said) for *_, said in found] == [False, True, False, False]
