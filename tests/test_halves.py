# SPDX-License-Identifier: Apache-2.0
"""Two halves of a batch that take turns give the numbers of Hugging Face's eager models, on every rank alike."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from tests.distances import furthest
from tests.hf_families import batch, model_of
from tests.hf_lora import lora_of, trained
from tests.logged import heard
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.sgd_engines import ds_config, engine_of
from tests.test_hugging_face import TOLERANCE

pytestmark = pytest.mark.long

FAMILIES = ("olmoe", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "glm4_moe")
SAMPLES = 3


def called(model: nn.Module, x: torch.Tensor, **options: Any) -> Any:
    return model(input_ids=x, labels=x, use_cache=False, **options)


def masked(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """A mask of which one sample is shorter."""
    mask = torch.ones_like(x)
    mask[-1, -3:] = 0
    return {"attention_mask": mask}


def check_against(
    engine: Any, reference: nn.Module, rank: int, world_size: int, samples: int, options: dict[str, Any]
) -> None:
    """Compare some steps of SGD with one process: losses, weights and what is returned besides."""
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    optimizer = torch.optim.SGD(trained(reference), lr=0.5)
    for number in range(3):
        parts = batch(number, world_size * samples).split(samples)
        wanted = [called(reference, each, **masked(each), **options) for each in parts]
        optimizer.zero_grad()
        torch.stack([each.loss for each in wanted]).mean().backward()
        optimizer.step()
        found = called(engine, parts[rank], **masked(parts[rank]), **options)
        engine.backward(found.loss)
        engine.step()
        own = wanted[rank]
        assert found.loss.item() == pytest.approx(own.loss.item(), rel=TOLERANCE), number
        for name in ("router_logits", "hidden_states", "attentions"):
            pairs = zip(found.get(name) or (), own.get(name) or (), strict=True)
            assert all(each is not None and furthest(each, other) <= 1e-4 for each, other in pairs), (number, name)
    of_name = dict(reference.named_parameters())
    for name, parameter in engine.module.named_parameters():
        with GatheredParameters([parameter]):
            assert furthest(parameter.detach().clone(), of_name[name].detach()) <= 2 * TOLERANCE, name


def trains_as_eager(
    rank: int,
    world_size: int,
    names: tuple[str, ...],
    stage: int,
    block: dict[str, Any],
    checkpoints: bool = False,
    samples: int = SAMPLES,
    **options: Any,
) -> list[int]:
    """How many forwards were run by halves, of each model; each trains as in one process."""
    found = []
    for family in names:
        reference = model_of(family)
        model = copy.deepcopy(reference)
        if checkpoints:
            model.gradient_checkpointing_enable()
        config = ds_config(stage, two_batch_overlap="on", autotune=False, **block)
        engine = engine_of(model, config | {"train_micro_batch_size_per_gpu": samples})
        check_against(engine, reference, rank, world_size, samples, options)
        found.append(engine.fsmoe.splitter.num_runs)
        engine.destroy()
    return found


# The first of three forwards is watched.
SPLIT = 2
BY_DEGREES = {"num_chunks": {"forward": 2, "backward": 3}}
TWO_NODES = {"alltoall": "node_deduplicated", "topology": {"ranks_per_node": 2}}
RUNS = [
    (2, FAMILIES, 1, BY_DEGREES, False),
    (4, FAMILIES[:2], 2, TWO_NODES, False),
    (2, FAMILIES[:2], 2, BY_DEGREES, True),
    *((2, FAMILIES, stage, block, False) for stage, block in ((0, {}), (2, {"recompute": True} | BY_DEGREES), (3, {}))),
    *((4, FAMILIES[:2], stage, TWO_NODES | BY_DEGREES, by) for stage in (0, 3) for by in (False, True)),
    *((2, FAMILIES[:2], stage, block, True) for stage, block in ((0, {}), (1, {}), (3, {"recompute": True}))),
]


@sampled(("world_size", "names", "stage", "block", "checkpoints"), RUNS, kept=[0, 1, 2])
def test_models_train_as_they_do_with_eager_experts_whether_activations_are_checkpointed_or_not(
    world_size: int, names: tuple[str, ...], stage: int, block: dict[str, Any], checkpoints: bool, tmp_path: Path
) -> None:
    found = run_on_ranks(trains_as_eager, world_size, tmp_path, names, stage, block, checkpoints)
    assert found == [[SPLIT] * len(names)] * world_size


def by_whole_batches(rank: int, world_size: int) -> tuple[float, int]:
    """How far weights are from those of whole batches after four steps of two micro-batches, and forwards by halves."""
    ends, runs = [], 0
    for split in ("off", "on"):
        engine = split_engine(split, 2, gradient_accumulation_steps=2)
        for number in range(8):
            engine.backward(called(engine, batch(10 * number + rank, 2)).loss)
            engine.step()
        ends.append([each.detach().clone() for each in engine.module.parameters()])
        runs = engine.fsmoe.splitter.num_runs if engine.fsmoe.splitter else 0
        engine.destroy()
    return max(furthest(each, other) for each, other in zip(*ends, strict=True)), runs


def split_engine(split: str = "on", samples: int = 2, **config: Any) -> Any:
    own = ds_config(1, two_batch_overlap=split, autotune=False) | {"train_micro_batch_size_per_gpu": samples}
    return engine_of(model_of("olmoe"), own | config)


def of_batches(rank: int, world_size: int, sizes: list[tuple[int, int]], has_cache: bool = False) -> list[int]:
    """The forwards by halves so far, after batches of so many samples on the two ranks: 0 for no batch."""
    engine, found = split_engine(), []
    for number, of_ranks in enumerate(sizes):
        x = batch(number, of_ranks[rank] or 1)
        loss = (
            engine(input_ids=x, labels=x, use_cache=has_cache).loss if of_ranks[rank] else engine.fsmoe_dummy_forward()
        )
        engine.backward(loss)
        engine.step()
        found.append(engine.fsmoe.splitter.num_runs)
    engine.destroy()
    return found


def in_turn(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {"accumulated": by_whole_batches(rank, world_size)}
    # Where what blocks return is asked for, halves are put together behind each of the two blocks.
    of_two = rank, world_size, FAMILIES[:2], 1, {}
    found["one"] = trains_as_eager(*of_two, output_router_logits=True)
    found["both"] = trains_as_eager(*of_two, output_router_logits=True, output_hidden_states=True)
    found["of one sample"] = trains_as_eager(rank, world_size, FAMILIES[:1], 1, {}, samples=1)
    # A rank that has a single sample would send half as often as the others.
    found["uneven"] = of_batches(rank, world_size, [(2, 2), (2, 2), (2, 1), (3, 2), (1, 1), (2, 5)])
    found["none"] = of_batches(rank, world_size, [(2, 2), (2, 2), (2, 0), (2, 2)])
    said = heard()
    found["cache"] = of_batches(rank, world_size, [(2, 2)] * 3, has_cache=True)[-1], " ".join(said.lines)
    return found


def test_ranks_cut_their_batches_all_or_none_and_what_is_collected_or_added_up_is_that_of_the_whole(
    tmp_path: Path,
) -> None:
    both = run_on_ranks(in_turn, 2, tmp_path)
    for each in both:
        off, runs = each["accumulated"]
        assert off < 2 * TOLERANCE
        assert runs == 7
        assert (each["one"], each["both"]) == ([SPLIT] * 2, [2 * SPLIT] * 2)
        assert each["of one sample"] == [0]
        assert each["uneven"] == [0, 1, 1, 2, 2, 3]
        assert each["none"][-1] == 2
        assert each["cache"][0] == 0
    assert "it gets a cache" in both[0]["cache"][1]


def adapters(rank: int, world_size: int) -> int:
    """A call of experts with adapters pauses while those of the other half come."""
    reference = lora_of("olmoe", ("up", "down"))
    model = copy.deepcopy(reference)
    config = ds_config(1, two_batch_overlap="on", autotune=False) | {"train_micro_batch_size_per_gpu": SAMPLES}
    engine = engine_of(model, config, trained(model))
    check_against(engine, reference, rank, world_size, SAMPLES, {})
    return engine.fsmoe.splitter.num_runs


def test_adapters_of_experts_are_those_of_each_half(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    assert run_on_ranks(adapters, 2, tmp_path) == [SPLIT] * 2
