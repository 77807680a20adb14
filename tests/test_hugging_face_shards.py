# SPDX-License-Identifier: Apache-2.0
"""Experts of Hugging Face models cut along their hidden width train as they do on one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

pytest.importorskip("transformers")

from ds_fsmoe.checkpoint_files.expert_parts import ExpertPart, Shard, part_of
from ds_fsmoe.layer.parts import LayerError
from tests.hf_families import batch, loss_of, model_of
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.test_hugging_face import TOLERANCE, OfTwice, ds_config, engine_of, furthest

BOTH = ("qwen3_moe", "gpt_oss")
"""Gate and value one behind the other, without bias; beside each other, transposed, with bias."""


def seen(whole: torch.Tensor, parameter: torch.Tensor, stage: int) -> torch.Tensor:
    """What DeepSpeed's functions return of a tensor: all of it, and without ZeRO this rank's part."""
    part = part_of(parameter)
    return whole if part is None or stage else part.take(whole)


def steps(rank: int, world_size: int, names: list[str], stage: int, ep_size: int, count: int) -> list[str]:
    """What differs from one process: losses, gradients of the first step, weights after ``count`` steps of SGD."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

    said = []
    for family in names:
        reference = model_of(family)
        cuts = {"forward": 2, "backward": 3}
        config = ds_config(stage, lr=0.1, ep_size=ep_size, expert_tensor_parallel_size=2, num_chunks=cuts)
        engine = engine_of(copy.deepcopy(reference), config)
        optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
        wanted = dict(reference.named_parameters())
        for step in range(count):
            x = batch(step, world_size)
            losses = torch.stack([loss_of(reference, each[None]) for each in x])
            optimizer.zero_grad()
            losses.mean().backward()
            loss = loss_of(engine, x[rank : rank + 1])
            engine.backward(loss)
            if not abs(loss.item() - losses[rank].item()) <= TOLERANCE * abs(losses[rank].item()):
                said.append(f"{family}, step {step}: loss {loss.item()} for {losses[rank].item()}")
            for name, parameter in engine.module.named_parameters() if step == 0 else ():
                if wanted[name].grad is None:
                    continue
                found = safe_get_full_grad(parameter)
                off = furthest(found, seen(wanted[name].grad, parameter, stage))
                if not off <= TOLERANCE:
                    said.append(f"{family}: gradient of {name} is off by {off:.1e}")
            engine.step()
            optimizer.step()
        for name, parameter in engine.module.named_parameters():
            found = safe_get_full_fp32_param(parameter) if stage else parameter.detach()
            found = parameter.detach() if found is None else found
            if not furthest(found, seen(wanted[name].detach(), parameter, stage)) <= TOLERANCE:
                said.append(f"{family}: {name} is off")
        said += _whole(engine, wanted) if family == "gpt_oss" else []
        engine.destroy()
    return said


def _whole(engine: Any, wanted: dict[str, torch.Tensor]) -> list[str]:
    import ds_fsmoe

    found = ds_fsmoe.whole_state_dict(engine)
    off = [] if found is None else [name for name in wanted if not furthest(found[name], wanted[name]) <= TOLERANCE]
    return [f"whole weights of {off} are off"] if off else []


# Each family in one layout; then each in all of them.
LAYOUTS = [(0, 2, 1, BOTH[:1], 2), (2, 4, 2, BOTH[1:], 2)]
SIZES = ((2, 1), (4, 2), (4, 1))
LAYOUTS += [(stage, *sizes, (family,), 3) for stage in (0, 1, 2) for sizes in SIZES for family in BOTH]


@sampled(("stage", "world_size", "ep_size", "names", "count"), LAYOUTS)
def test_losses_gradients_and_weights_are_those_of_one_process(
    stage: int, world_size: int, ep_size: int, names: tuple[str, ...], count: int, tmp_path: Path
) -> None:
    found = run_on_ranks(steps, world_size, tmp_path, list(names), stage, ep_size, count)
    assert [each for of_rank in found for each in of_rank] == []


@pytest.mark.parametrize(
    ("model", "size", "sentence"),
    [
        (
            lambda: model_of("olmoe"),
            5,
            r"must divide the hidden width of model.*mlp.experts \(24\); .* 1, 2, 3",
        ),
        (
            lambda: model_of("muse_spark"),
            2,
            "normalizes the output of its experts, of which a shard has only a part; use 1",
        ),
        (OfTwice, 2, "the experts of experts, a Twice, give other results in shards"),
    ],
)
def test_experts_that_cannot_be_cut_are_refused_with_the_reason(
    model: Callable[[], nn.Module], size: int, sentence: str
) -> None:
    with pytest.raises(LayerError, match=f"expert_tensor_parallel_size = {size}: .*{sentence}"):
        engine_of(model(), ds_config(1, expert_tensor_parallel_size=size))
    assert not dist.is_initialized()


def test_ranks_that_shards_do_not_divide_are_refused_before_any_group(monkeypatch: pytest.MonkeyPatch) -> None:
    from ds_fsmoe.config.reading import ConfigError

    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match=r"expert_tensor_parallel_size = 2: must divide the 3 ranks; .* 1, 3"):
        engine_of(model_of("olmoe"), ds_config(1, expert_tensor_parallel_size=2))
    assert not dist.is_initialized()


def test_parts_in_shards_are_joined_to_what_they_were_cut_from() -> None:
    whole = torch.randn(4, 12, 8)
    for shard in (Shard(2, 0, 1), Shard(2, 0, 1, pieces=2), Shard(3, 0, 1, pieces=2), Shard(4, 0, 2)):
        parts = [
            ExpertPart("stacked", 4, 2, ep_rank, Shard(shard.count, index, shard.dim, shard.pieces))
            for ep_rank in range(2)
            for index in range(shard.count)
        ]
        cut = [each.take(whole) for each in parts]
        assert {tuple(each.shape) for each in cut} == {parts[0].part_shape(whole.shape)}
        assert parts[0].whole_shape(cut[0].shape) == tuple(whole.shape)
        assert torch.equal(parts[0].join(cut), whole)


def test_gate_and_value_are_cut_alike_and_the_last_bias_is_the_first_shards() -> None:
    gate, value = torch.randn(2, 4, 3), torch.randn(2, 4, 3)
    mine = Shard(2, 1, 1, pieces=2).take(torch.cat([gate, value], 1))
    assert torch.equal(mine, torch.cat([gate[:, 2:], value[:, 2:]], 1))
    bias = torch.randn(2, 5)
    assert torch.equal(Shard(2, 0, None).take(bias), bias)
    assert not Shard(2, 1, None).take(bias).any()
