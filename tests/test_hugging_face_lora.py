# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's models with PEFT's LoRA train as they do on one process, at every stage of ZeRO."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

from tests.hf_families import WIDTH, batch, model_of
from tests.hf_lora import (
    BOTH,
    differing_gradients,
    differing_weights,
    engine_with,
    fill,
    lora_of,
    losses_of,
    step,
    train,
    trained,
    with_lora,
)
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.test_hugging_face import TOLERANCE, ds_config, furthest

Case = tuple[str, tuple[str, ...], dict[str, Any]]
# Attention alone, both weights, one of them; transposed, interleaved and biased weights (gpt_oss), plain ones
# (nemotron_h), a scaling of another kind, ranks that no grouped product takes, adapters of the last layer alone.
CASES: list[Case] = [
    ("olmoe", (), {}),
    ("olmoe", (), {"layers_to_transform": [1]}),
    ("olmoe", BOTH, {"use_rslora": True}),
    ("gpt_oss", BOTH, {"r": 3}),
    ("gpt_oss", ("down",), {"target_modules": []}),
    ("nemotron_h", BOTH, {}),
    ("qwen3_moe", ("up",), {}),
    ("mixtral", BOTH, {"target_modules": [], "rank_pattern": {"down_proj": 2}, "modules_to_save": ["lm_head"]}),
]


def gradients(rank: int, world_size: int, cases: list[Case], stage: int, degrees: dict[str, int]) -> list[str]:
    said = []
    for family, weights, options in cases:
        reference = lora_of(family, weights, **options)
        config = ds_config(stage, num_chunks=degrees) | {"gradient_clipping": 1e6}  # or stage 0 has no norm
        engine = engine_with(copy.deepcopy(reference), config)
        x = batch(3, world_size)
        losses = losses_of(reference, x)
        torch.stack(losses).mean().backward()
        loss = step(engine, x, rank)
        differs = list(differing_gradients(engine, reference))
        if not abs(loss - losses[rank].item()) <= TOLERANCE * losses[rank].item():
            differs.append(f"loss {loss} for {losses[rank].item()}")
        if any(each.fsmoe.own_forward is not None for each in engine.fsmoe.layers.values()):
            differs.append("not all layers are written out")
        engine.step()
        norm = torch.stack([each.grad.norm() for each in trained(reference) if each.grad is not None]).norm().item()
        if not abs(engine.get_global_grad_norm() - norm) <= 1e-4 * norm:
            differs.append(f"norm {engine.get_global_grad_norm()} for {norm}")
        said += [f"{family} {weights}: {each}" for each in differs]
        engine.destroy()
    return said


@sampled(
    ("stage", "forward", "backward", "cases"),
    [*((*each, CASES) for each in ((0, 1, 1), (1, 2, 2), (2, 3, 2), (3, 2, 3))), (2, 3, 2, CASES[1::2])],
    kept=[-1],
)
def test_adapters_have_the_losses_and_gradients_of_one_process(
    stage: int, forward: int, backward: int, cases: list[Case], tmp_path: Path
) -> None:
    degrees = {"forward": forward, "backward": backward}
    found = run_on_ranks(gradients, 2, tmp_path, cases, stage, degrees)
    assert [each for of_rank in found for each in of_rank] == []


def five_steps(rank: int, world_size: int, cases: list[Case], stage: int, every: bool) -> list[str]:
    said = []
    for family, weights, options in cases:
        reference = lora_of(family, weights, **options)
        config = ds_config(stage, lr=0.3, ep_size=2, num_chunks=2)
        engine = engine_with(copy.deepcopy(reference), config, every)
        said += [f"{family}: {each}" for each in train(engine, reference, rank, world_size, 5, 0.3)]
        said += [f"{family}: {each}" for each in differing_weights(engine, reference)]
        if stage == 3 and any(each.numel() for each in engine.module.parameters()):
            said.append(f"{family}: weights were left whole")
        engine.destroy()
    return said


@sampled("stage", [0, 1, 2, 3], kept=[3])
def test_weights_after_five_steps_are_those_of_one_process_with_replicas_of_experts(stage: int, tmp_path: Path) -> None:
    found = run_on_ranks(five_steps, 4, tmp_path, [("olmoe", BOTH, {})], stage, stage in (0, 2))
    assert [each for of_rank in found for each in of_rank] == []


def off_by(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = 1e-4) -> list[str]:
    return [] if furthest(found, wanted) <= tolerance else [f"{furthest(found, wanted):.1e} off"]


def uneven(rank: int, world_size: int, stage: int, checkpointing: str) -> list[str]:
    """Sequences of other lengths on each rank, checkpointing, the base model and evaluation between steps."""
    said = []
    reference = lora_of("qwen3_moe", BOTH)
    engine = engine_with(copy.deepcopy(reference), ds_config(stage, num_chunks={"forward": 3, "backward": 2}))
    if checkpointing:
        options = {"use_reentrant": checkpointing == "reentrant"}
        engine.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        engine.module.enable_input_require_grads()
    optimizer = torch.optim.SGD(trained(reference), lr=0.5)
    for number in range(2):
        xs = [batch(10 * number + each, 1, (5, 13)[each]) for each in range(world_size)]
        losses = [reference(input_ids=x, labels=x).loss for x in xs]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
        loss = engine(input_ids=xs[rank], labels=xs[rank]).loss
        engine.backward(loss)
        engine.step()
        if not abs(loss.item() - losses[rank].item()) <= TOLERANCE * losses[rank].item():
            said.append(f"step {number}: loss {loss.item()} for {losses[rank].item()}")
        x = batch(99, 1, 7 + 4 * rank)
        engine.eval()
        reference.eval()
        with torch.no_grad():
            said += [f"evaluated: {each}" for each in off_by(engine(input_ids=x).logits, reference(input_ids=x).logits)]
            with engine.module.disable_adapter(), reference.disable_adapter():
                found, wanted = engine(input_ids=x).logits, reference(input_ids=x).logits
            said += [f"without adapters: {each}" for each in off_by(found, wanted)]
        reference.train()
        engine.train()
    said += differing_weights(engine, reference)
    engine.destroy()
    return said


CHECKPOINTED = [(2, ""), (2, "reentrant"), (1, "saved"), (3, "reentrant"), (3, "saved")]


@sampled(("stage", "checkpointing"), CHECKPOINTED, kept=[4])
def test_adapters_go_with_checkpointing_other_lengths_and_evaluation(
    stage: int, checkpointing: str, tmp_path: Path
) -> None:
    assert run_on_ranks(uneven, 2, tmp_path, stage, checkpointing) == [[], []]


def several(rank: int, world_size: int, stage: int) -> list[str]:
    """Two adapters: each, both at once, merged, taken away."""
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    from ds_fsmoe.checkpoint_files.expert_parts import parts_in
    from tests.hf_lora import lora_config

    said: list[str] = []
    reference = lora_of("gpt_oss", BOTH)
    reference.add_adapter("other", lora_config(model_of("gpt_oss"), BOTH, r=2, lora_alpha=1))
    reference.base_model.set_adapter(["default", "other"])
    fill(reference)
    ep_size = 2
    engine = engine_with(copy.deepcopy(reference), ds_config(stage, lr=0.3, ep_size=ep_size, num_chunks=2))
    model = engine.module
    said += train(engine, reference, rank, world_size, 2, 0.3)
    x = batch(99, 1, 9)

    def compared(what: str) -> None:
        engine.eval()
        reference.eval()
        with torch.no_grad():
            differs = off_by(engine(input_ids=x).logits, reference(input_ids=x).logits)
        said.extend(f"{what}: {each}" for each in differs)

    compared("both")
    for each in (model, reference):
        each.base_model.set_adapter("other")
    compared("the other one")
    before = [each.detach().clone() for _, each, _ in parts_in(model)]
    for change in ("merge_adapter", "unmerge_adapter", "merge_and_unload"):
        with GatheredParameters(list(model.parameters()), modifier_rank=0):
            for each in (model, reference):
                getattr(each, change)()
        compared(change)
    wanted = dict(reference.base_model.model.named_parameters())
    for name, parameter, _ in parts_in(model.base_model.model):
        with GatheredParameters([parameter]):
            said += [f"{name}: {each}" for each in off_by(parameter.detach(), wanted[name].detach())]
    if len(list(parts_in(model))) != len(before) - 2 * 2 * 2 * 2:
        said.append("adapters are left")
    engine.destroy()
    return said


@sampled(("stage", "ranks"), [(0, 2), (2, 2), (3, 4)], kept=[1])
def test_several_adapters_are_used_merged_and_taken_away(stage: int, ranks: int, tmp_path: Path) -> None:
    assert run_on_ranks(several, ranks, tmp_path, stage) == [[]] * ranks


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_weights_after_five_steps_are_those_of_one_process_where_experts_are_laid_out_otherwise(
    stage: int, tmp_path: Path
) -> None:
    found = run_on_ranks(five_steps, 4, tmp_path, [("gpt_oss", ("up",), {}), ("nemotron_h", BOTH, {})], stage, False)
    assert [each for of_rank in found for each in of_rank] == []


def from_zero_init(rank: int, world_size: int) -> list[str]:
    """Trainer's way at stage 3: the model is shared out while it is built, and then wrapped by PEFT."""
    import deepspeed
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    from tests.hf_families import config_of

    reference = lora_of("mixtral", BOTH)
    config = ds_config(3, lr=0.3, ep_size=2, num_chunks=2)
    asked = HfDeepSpeedConfig(config)
    model = AutoModelForCausalLM.from_config(config_of("mixtral"))
    model.set_experts_implementation("eager")
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        for ours, theirs in zip(model.parameters(), model_of("mixtral").parameters(), strict=True):
            ours.data.copy_(theirs.data)
    model = with_lora(model, BOTH)
    del asked  # transformers asked whether it lived
    engine = engine_with(model, config)
    said = list(train(engine, reference, rank, world_size, 2, 0.3))
    said += differing_weights(engine, reference)
    engine.destroy()
    return said


@pytest.mark.slow
def test_adapters_of_experts_that_zero_init_has_shared_out_are_cut(tmp_path: Path) -> None:
    assert run_on_ranks(from_zero_init, 4, tmp_path) == [[]] * 4


def without_tokens(rank: int, world_size: int) -> list[str]:
    """The last rank has no batch, and takes part with its experts and their adapters."""
    reference = lora_of("olmoe", BOTH)
    engine = engine_with(copy.deepcopy(reference), ds_config(2, num_chunks=2))
    engine.eval()
    with torch.no_grad():  # or the size of a batch is not known
        x = batch(3, 1)
        engine(input_ids=x)
    engine.train()
    loss = reference(input_ids=x, labels=x).loss
    (loss / world_size).backward()
    engine.backward(engine(input_ids=x, labels=x).loss if rank == 0 else engine.fsmoe_dummy_forward())
    said = list(differing_gradients(engine, reference))
    engine.destroy()
    return said


def test_a_rank_without_a_batch_takes_part_with_its_adapters(tmp_path: Path) -> None:
    assert run_on_ranks(without_tokens, 2, tmp_path) == [[], []]


def with_frozen_groups(rank: int, world_size: int, weights: tuple[str, ...]) -> list[str]:
    """Frozen weights of experts in groups of their own, and in a script's own optimizer."""
    import ds_fsmoe

    losses = {}
    for way in ("trained", "groups", "optimizer"):
        model, config = lora_of("olmoe", weights), ds_config(2, lr=0.1, ep_size=2, num_chunks=2)
        given: dict[str, Any] = {"model_parameters": trained(model)}
        if way == "groups":
            frozen = [each for each in model.parameters() if not each.requires_grad and each.dim() == 3]
            given = {"model_parameters": [{"params": trained(model)}, {"params": frozen}]}
        elif way == "optimizer":
            given = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
            del config["optimizer"]
        engine = ds_fsmoe.initialize(model=model, config=config, **given)[0]
        for number in range(2):
            loss = step(engine, batch(number, world_size), rank)
            engine.step()
        losses[way] = loss
        engine.destroy()
    return [f"{way}: {loss}" for way, loss in losses.items() if abs(loss - losses["trained"]) > 1e-6]


@sampled("weights", [BOTH, ()], kept=[0])
def test_frozen_experts_make_no_groups_of_their_own(weights: tuple[str, ...], tmp_path: Path) -> None:
    assert run_on_ranks(with_frozen_groups, 2, tmp_path, weights) == [[], []]


def resumed(rank: int, world_size: int, stage: int, weights: tuple[str, ...], folder: str) -> list[float]:
    """The losses after a save, and the same losses of an engine that goes on from it."""
    losses = []
    for is_resumed in (False, True):
        engine = engine_with(lora_of("olmoe", weights), ds_config(stage, lr=0.3, ep_size=2, num_chunks=2))
        if is_resumed:
            engine.load_checkpoint(folder)
        else:
            step(engine, batch(0, world_size), rank)
            engine.step()
            engine.save_checkpoint(folder)
        for number in (1, 2):
            losses.append(step(engine, batch(number, world_size), rank))
            engine.step()
        engine.destroy()
    return losses


# With adapters of experts and without.
@sampled(("stage", "weights"), [(stage, each) for stage in (0, 2, 3) for each in (BOTH, ())], kept=[2])
def test_adapters_are_resumed_from_a_checkpoint_to_the_bit(
    stage: int, weights: tuple[str, ...], tmp_path: Path
) -> None:
    for losses in run_on_ranks(resumed, 2, tmp_path / "ranks", stage, weights, str(tmp_path / "saved")):
        assert len(losses) == 4
        assert losses[:2] == losses[2:]


def called(rank: int, world_size: int, stage: int) -> list[str]:
    """Experts that compute something else than the contract says, differentiated by autograd."""
    from peft import LoraConfig, get_peft_model

    from tests.test_hugging_face import OfTwice

    targets = ["experts.gate_up_proj", "experts.down_proj"]
    reference = get_peft_model(OfTwice(), LoraConfig(r=4, target_modules=["router"], target_parameters=targets))
    fill(reference)
    engine = engine_with(copy.deepcopy(reference), ds_config(stage, num_chunks={"forward": 2, "backward": 3}))
    xs = torch.randn(world_size, 7, WIDTH, generator=torch.Generator().manual_seed(1))
    torch.stack([reference(each) for each in xs]).mean().backward()
    engine.backward(engine(xs[rank]))
    said = list(differing_gradients(engine, reference))
    ways = [each.fsmoe.own_forward is None for each in engine.fsmoe.layers.values()]
    engine.destroy()
    return said + ([] if ways == [False] else ["it was not called itself"])


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_experts_that_are_called_themselves_have_adapters(stage: int, tmp_path: Path) -> None:
    assert run_on_ranks(called, 2, tmp_path, stage) == [[], []]
