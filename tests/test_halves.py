# SPDX-License-Identifier: Apache-2.0
"""Two halves of a batch that take turns give the numbers of Hugging Face's eager models, on every rank alike."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from tests.hf_families import batch, model_of
from tests.hf_lora import lora_of, trained
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.test_hugging_face import TOLERANCE, ds_config, engine_of, furthest

pytestmark = pytest.mark.long

FAMILIES = ("olmoe", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "glm4_moe")
SAMPLES = 3
TWO_NODES = {"alltoall": "node_deduplicated", "topology": {"ranks_per_node": 2}}


def called(model: nn.Module, x: torch.Tensor, **options: Any) -> Any:
    return model(input_ids=x, labels=x, use_cache=False, **options)


def masked(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """A mask of which one sample is shorter."""
    mask = torch.ones_like(x)
    mask[-1, -3:] = 0
    return {"attention_mask": mask}


def differing(
    engine: Any, reference: nn.Module, rank: int, world_size: int, samples: int, options: dict[str, Any], steps: int = 3
) -> list[str]:
    """What differs from one process in some steps of SGD, of losses, weights and what is returned besides."""
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    said = []
    optimizer = torch.optim.SGD(trained(reference), lr=0.5)
    for number in range(steps):
        x = batch(number, world_size * samples)
        parts = x.split(samples)
        wanted = [called(reference, each, **masked(each), **options) for each in parts]
        optimizer.zero_grad()
        torch.stack([each.loss for each in wanted]).mean().backward()
        optimizer.step()
        found = called(engine, parts[rank], **masked(parts[rank]), **options)
        engine.backward(found.loss)
        engine.step()
        own = wanted[rank]
        if not abs(found.loss.item() - own.loss.item()) <= TOLERANCE * abs(own.loss.item()):
            said.append(f"step {number}: loss {found.loss.item()} for {own.loss.item()}")
        for name in ("router_logits", "hidden_states", "attentions"):
            pairs = list(zip(found.get(name) or (), own.get(name) or (), strict=True))
            if any(each is None or not furthest(each, other) <= 1e-4 for each, other in pairs):
                said.append(f"step {number}: {name} differ")
    of_name = dict(reference.named_parameters())
    for name, parameter in engine.module.named_parameters():
        with GatheredParameters([parameter]):
            found_now = parameter.detach().clone()
        if not furthest(found_now, of_name[name].detach()) <= 2 * TOLERANCE:
            said.append(f"{name} is off by {furthest(found_now, of_name[name].detach()):.1e}")
    return said


def trains_as_eager(
    rank: int,
    world_size: int,
    names: list[str],
    stage: int,
    block: dict[str, Any],
    options: dict[str, Any],
    samples: int = SAMPLES,
    checkpoints: bool = False,
) -> list[Any]:
    """What differs from one process, and how many forwards were run by halves."""
    said: list[Any] = []
    for family in names:
        reference = model_of(family)
        model = copy.deepcopy(reference)
        if checkpoints:
            model.gradient_checkpointing_enable()
        config = ds_config(stage, two_batch_overlap="on", autotune=False, **block)
        engine = engine_of(model, config | {"train_micro_batch_size_per_gpu": samples})
        said += [f"{family}: {each}" for each in differing(engine, reference, rank, world_size, samples, options)]
        said.append(engine.fsmoe.splitter.num_runs)
        engine.destroy()
    return said


# The first of three forwards is watched.
SPLIT = 2
BY_DEGREES = {"num_chunks": {"forward": 2, "backward": 3}}


@sampled(
    ("stage", "block"),
    [(0, {}), (1, BY_DEGREES), (2, {"recompute": True} | BY_DEGREES), (3, {})],
    kept=[1],
    ids=str,
)
def test_models_train_as_they_do_with_eager_experts(stage: int, block: dict[str, Any], tmp_path: Path) -> None:
    found = run_on_ranks(trains_as_eager, 2, tmp_path, list(FAMILIES), stage, block, {})
    assert found == [[SPLIT] * len(FAMILIES)] * 2


@sampled(
    ("stage", "block"), [(2, TWO_NODES), (0, TWO_NODES | BY_DEGREES), (3, TWO_NODES | BY_DEGREES)], kept=[0], ids=str
)
def test_four_ranks_on_two_nodes_train_as_eager_models_do(stage: int, block: dict[str, Any], tmp_path: Path) -> None:
    found = run_on_ranks(trains_as_eager, 4, tmp_path, ["olmoe", "mixtral"], stage, block, {})
    assert found == [[SPLIT] * 2] * 4


def test_what_is_collected_of_modules_is_that_of_the_whole_batch(tmp_path: Path) -> None:
    """Losses of routers are made of it."""
    for options in ({"output_router_logits": True}, {"output_router_logits": True, "output_hidden_states": True}):
        found = run_on_ranks(trains_as_eager, 2, tmp_path / str(len(options)), ["olmoe", "mixtral"], 1, {}, options)
        assert [len(each) for each in found] == [2, 2], found
        # Where what blocks return is asked for, halves are put together behind each of the two blocks.
        assert found[0] == [SPLIT * len(options)] * 2


def accumulated(rank: int, world_size: int) -> tuple[float, int]:
    """How far weights are from those of whole batches after four steps of two micro-batches, and forwards by halves."""
    ends, runs = [], 0
    for split in ("off", "on"):
        config = ds_config(1, two_batch_overlap=split, autotune=False) | {"train_micro_batch_size_per_gpu": 2}
        engine = engine_of(model_of("olmoe"), config | {"gradient_accumulation_steps": 2})
        for number in range(8):
            engine.backward(called(engine, batch(10 * number + rank, 2)).loss)
            engine.step()
        ends.append([each.detach().clone() for each in engine.module.parameters()])
        runs = engine.fsmoe.splitter.num_runs if engine.fsmoe.splitter else 0
        engine.destroy()
    return max(furthest(each, other) for each, other in zip(*ends, strict=True)), runs


def test_gradients_of_halves_are_added_up_over_micro_batches(tmp_path: Path) -> None:
    for off, runs in run_on_ranks(accumulated, 2, tmp_path):
        assert off < 2 * TOLERANCE
        assert runs == 7


def test_a_batch_of_one_stays_whole(tmp_path: Path) -> None:
    found = run_on_ranks(trains_as_eager, 2, tmp_path, ["olmoe"], 1, {}, {}, 1)
    assert found == [[0]] * 2


def adapters(rank: int, world_size: int) -> list[Any]:
    """A call of experts with adapters pauses while those of the other half come."""
    reference = lora_of("olmoe", ("up", "down"))
    model = copy.deepcopy(reference)
    config = ds_config(1, two_batch_overlap="on", autotune=False) | {"train_micro_batch_size_per_gpu": SAMPLES}
    engine = engine_of(model, config, trained(model))
    said = differing(engine, reference, rank, world_size, SAMPLES, {})
    return [*said, engine.fsmoe.splitter.num_runs]


def test_adapters_of_experts_are_those_of_each_half(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    assert run_on_ranks(adapters, 2, tmp_path) == [[SPLIT]] * 2


def uneven(rank: int, world_size: int) -> list[int]:
    """The forwards by halves so far, after batches of which ranks have as many samples, or not."""
    config = ds_config(1, two_batch_overlap="on", autotune=False) | {"train_micro_batch_size_per_gpu": 2}
    engine = engine_of(model_of("olmoe"), config)
    found = []
    for number, sizes in enumerate([(2, 2), (2, 2), (2, 1), (3, 2), (1, 1), (2, 5)]):
        x = batch(number, sizes[rank])
        engine.backward(called(engine, x).loss)
        engine.step()
        found.append(engine.fsmoe.splitter.num_runs)
    return found


def test_ranks_cut_their_batches_all_or_none(tmp_path: Path) -> None:
    """One that has a single sample would send half as often as the others."""
    assert run_on_ranks(uneven, 2, tmp_path) == [[0, 1, 1, 2, 2, 3]] * 2


def without_a_batch(rank: int, world_size: int) -> int:
    """The forwards by halves, where one rank runs out of batches once."""
    engine = engine_of(model_of("olmoe"), ds_config(1, two_batch_overlap="on", autotune=False))
    for number in range(4):
        x = batch(number, 2)
        engine.backward(engine.fsmoe_dummy_forward() if rank and number == 2 else called(engine, x).loss)
        engine.step()
    return engine.fsmoe.splitter.num_runs


def test_a_rank_without_a_batch_keeps_those_of_the_others_whole(tmp_path: Path) -> None:
    assert run_on_ranks(without_a_batch, 2, tmp_path) == [2, 2]


def test_a_cache_keeps_batches_whole_and_is_said(tmp_path: Path) -> None:
    found = run_on_ranks(with_cache, 2, tmp_path)
    assert [each[0] for each in found] == [0, 0]
    assert "it gets a cache" in found[0][1]


def with_cache(rank: int, world_size: int) -> tuple[int, str]:
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("ds_fsmoe").addHandler(handler)
    engine = engine_of(model_of("olmoe"), ds_config(1, two_batch_overlap="on", autotune=False))
    for number in range(3):
        x = batch(number, 2)
        engine.backward(engine(input_ids=x, labels=x, use_cache=True).loss)
        engine.step()
    return engine.fsmoe.splitter.num_runs, " ".join(heard)
