# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's models, with and without PEFT's LoRA, train as on one process whichever way they are trained: over
replicas and shards, with checkpointing, other lengths, several adapters."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("peft")

from tests.distances import furthest
from tests.hf_families import WIDTH, batch, config_of, model_of
from tests.hf_lora import (
    BOTH,
    differing_gradients,
    differing_weights,
    engine_with,
    fill,
    lora_config,
    lora_of,
    train,
    trained,
    with_lora,
)
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.sgd_engines import ds_config, engine_of
from tests.test_hugging_face import TOLERANCE, OfTwice, Twice, TwiceOnOneRank, called_ones, own_part

Weights = tuple[str, ...] | None
"""Which weights of experts have adapters, by the contract; none: those of attention alone; ``None``: no LoRA."""


def made(family: str, weights: Weights) -> nn.Module:
    return model_of(family) if weights is None else lora_of(family, weights)


def steps(
    rank: int,
    world_size: int,
    family: str,
    weights: Weights,
    stage: int,
    every: bool = False,
    ep_size: int = 2,
    shards: int = 1,
) -> list[str]:
    """Three steps over replicas of experts, or shards; given to the engine is what trains, or every parameter."""
    import ds_fsmoe

    reference, lr = made(family, weights), 0.1 if weights is None else 0.3
    cut = {"expert_tensor_parallel_size": shards} if shards > 1 else {}
    config = ds_config(stage, lr=lr, ep_size=ep_size, num_chunks={"forward": 2, "backward": 3}, **cut)
    engine = engine_with(copy.deepcopy(reference), config, every)
    said = list(train(engine, reference, rank, world_size, 3, lr))
    said += differing_weights(engine, reference)
    if shards > 1 and (whole := ds_fsmoe.whole_state_dict(engine)) is not None:
        wanted = dict(reference.named_parameters())
        said += [f"whole {name}: {each}" for name in wanted for each in off_by(whole[name], wanted[name], TOLERANCE)]
    if stage == 3 and any(each.numel() for each in engine.module.parameters()):
        said.append("weights were left whole")
    engine.destroy()
    return said


def from_zero_init(rank: int, world_size: int, weights: Weights) -> list[str]:
    """Trainer's way at stage 3: the model is shared out while it is built, and then wrapped by PEFT."""
    import deepspeed
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    reference = made("mixtral", weights)
    config = ds_config(3, lr=0.3, ep_size=2, num_chunks=2)
    asked = HfDeepSpeedConfig(config)
    model = AutoModelForCausalLM.from_config(config_of("mixtral"))
    model.set_experts_implementation("eager")
    said = [] if all(hasattr(each, "ds_id") for each in model.parameters()) else ["nothing was shared out"]
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        for ours, theirs in zip(model.parameters(), model_of("mixtral").parameters(), strict=True):
            ours.data.copy_(theirs.data)
    model = model if weights is None else with_lora(model, weights)
    del asked  # transformers asked whether it lived
    engine = engine_with(model, config)
    said += train(engine, reference, rank, world_size, 2, 0.3)
    said += differing_weights(engine, reference)
    engine.destroy()
    return said


def called(rank: int, world_size: int, stage: int, experts: type[nn.Module], adapted: bool = False) -> list[str]:
    """Experts that compute something else than the contract says, differentiated by autograd."""
    from peft import LoraConfig, get_peft_model

    reference: Any = OfTwice(experts)
    if adapted:
        targets = ["experts.gate_up_proj", "experts.down_proj"]
        reference = get_peft_model(reference, LoraConfig(r=4, target_modules=["router"], target_parameters=targets))
        fill(reference)
    engine = engine_with(copy.deepcopy(reference), ds_config(stage, num_chunks={"forward": 2, "backward": 3}))
    xs = torch.randn(world_size, 7, WIDTH, generator=torch.Generator().manual_seed(1))
    torch.stack([reference(each) for each in xs]).mean().backward()
    engine.backward(engine(xs[rank]))
    said = list(differing_gradients(engine, reference))
    ways = [each.fsmoe.own_forward is None for each in engine.fsmoe.layers.values()]
    engine.destroy()
    return said + ([] if ways == [False] else ["it was not called itself"])


def both_kinds(rank: int, world_size: int) -> list[str]:
    """A model with stock's layers and Hugging Face's experts."""
    from deepspeed.moe.layer import MoE

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.theirs = model_of("olmoe")
            expert = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, WIDTH))
            self.stocks = MoE(WIDTH, expert, num_experts=4, ep_size=2, k=1, drop_tokens=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = self.theirs(input_ids=x, labels=x, output_hidden_states=True)
            y, _, _ = self.stocks(found.hidden_states[-1])
            return found.loss + y.square().mean()

    torch.manual_seed(0)
    engine = engine_of(Both(), ds_config(1, ep_size=2))
    losses = []
    for _ in range(3):
        loss = engine(batch(rank, 1))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    labels = [type(each).__name__ for each in engine.fsmoe.layers.values()]
    engine.destroy()
    said = [] if losses == sorted(set(losses), reverse=True) else [f"losses {losses}"]
    return said + ([] if labels == ["OlmoeExperts", "OlmoeExperts", "FSMoELayer"] else [f"layers {labels}"])


def off_by(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = 1e-4) -> list[str]:
    return [] if furthest(found, wanted) <= tolerance else [f"{furthest(found, wanted):.1e} off"]


def evaluated(engine: Any, reference: nn.Module, x: torch.Tensor) -> list[str]:
    engine.eval()
    reference.eval()
    with torch.no_grad():
        differs = off_by(engine(input_ids=x).logits, reference(input_ids=x).logits)
    engine.train()
    reference.train()
    return differs


def uneven(rank: int, world_size: int, weights: Weights, stage: int, checkpointing: str) -> list[str]:
    """Sequences of other lengths on each rank, checkpointing, the base model and evaluation between steps."""
    said = []
    reference = made("qwen3_moe", weights)
    engine = engine_with(copy.deepcopy(reference), ds_config(stage, num_chunks={"forward": 3, "backward": 2}))
    if checkpointing:
        options = {"use_reentrant": checkpointing == "reentrant"}
        engine.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        engine.module.enable_input_require_grads()
    for number in range(2):
        xs = [batch(10 * number + each, 1, (5, 13)[each]) for each in range(world_size)]
        differs = train(engine, reference, rank, world_size, 1, 0.5, lambda _, xs=xs: xs)
        said += [f"{number}: {each}" for each in differs]
        x = batch(99, 1, 7 + 4 * rank)
        said += [f"evaluated: {each}" for each in evaluated(engine, reference, x)]
        if weights is not None:
            with engine.module.disable_adapter(), reference.disable_adapter():
                said += [f"without adapters: {each}" for each in evaluated(engine, reference, x)]
    said += differing_weights(engine, reference)
    engine.destroy()
    return said


def several(rank: int, world_size: int, stage: int) -> list[str]:
    """Two adapters: each, both at once, merged, taken away."""
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    from ds_fsmoe.checkpoint_files.expert_parts import parts_in

    said: list[str] = []
    reference = lora_of("gpt_oss", BOTH)
    reference.add_adapter("other", lora_config(model_of("gpt_oss"), BOTH, r=2, lora_alpha=1))
    reference.base_model.set_adapter(["default", "other"])
    fill(reference)
    engine = engine_with(copy.deepcopy(reference), ds_config(stage, lr=0.3, ep_size=2, num_chunks=2))
    model, x = engine.module, batch(99, 1, 9)
    said += train(engine, reference, rank, world_size, 2, 0.3)
    said += [f"both: {each}" for each in evaluated(engine, reference, x)]
    for each in (model, reference):
        each.base_model.set_adapter("other")
    said += [f"the other one: {each}" for each in evaluated(engine, reference, x)]
    before = len(list(parts_in(model)))
    for change in ("merge_adapter", "unmerge_adapter", "merge_and_unload"):
        with GatheredParameters(list(model.parameters()), modifier_rank=0):
            for each in (model, reference):
                getattr(each, change)()
        said += [f"{change}: {each}" for each in evaluated(engine, reference, x)]
    wanted = dict(reference.base_model.model.named_parameters())
    for name, parameter, _ in parts_in(model.base_model.model):
        with GatheredParameters([parameter]):
            said += [f"{name}: {each}" for each in off_by(parameter.detach(), wanted[name].detach())]
    if len(list(parts_in(model))) != before - 2 * 2 * 2 * 2:
        said.append("adapters are left")
    engine.destroy()
    return said


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


def generate_in_whole_weights(rank: int, world_size: int, weights: Weights) -> list[str]:
    """What differs where a script gathers all weights around the generation, as TRL does at ZeRO 3."""
    from deepspeed import zero
    from trl.models.utils import add_hooks, remove_hooks

    model = made("olmoe", weights)
    model.generation_config.eos_token_id = None
    engine = engine_of(model, ds_config(3, ep_size=world_size, num_chunks=2))
    said = []
    for number in range(2):
        x = batch(number, world_size)[rank : rank + 1]
        engine.backward(engine(input_ids=x, labels=x).loss)
        prompt = batch(number + rank, 1, 3 + 4 * rank)
        how = {"max_new_tokens": 5 + 6 * rank, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
        engine.eval()
        wanted = engine.module.generate(input_ids=prompt, **how)
        with zero.GatheredParameters(list(engine.module.parameters())):
            remove_hooks(engine)
            shapes = [tuple(each.shape) for each in engine.module.parameters()]
            found = engine.module.generate(input_ids=prompt, **how)
            if shapes != [tuple(each.shape) for each in engine.module.parameters()]:
                said.append(f"step {number}: weights are not whole afterwards")
            changed = [each for each in engine.module.parameters() if each.dim() == 3]
            for each in changed:
                each.data.mul_(2.0)
            halved = engine.module.generate(input_ids=prompt, **how)
            for each in changed:
                each.data.mul_(0.5)
            if changed and torch.equal(halved, found):
                said.append(f"step {number}: changes within the block do not count")
            add_hooks(engine)
        if not torch.equal(found, wanted) or not torch.equal(wanted, engine.module.generate(input_ids=prompt, **how)):
            said.append(f"step {number}: {found.tolist()} for {wanted.tolist()}")
        engine.train()
        engine.step()
    engine.destroy()
    return said


# Attention alone, both weights, one of them; transposed, interleaved and biased weights (gpt_oss), plain ones
# (nemotron_h), a scaling of another kind, ranks that no grouped product takes, adapters of the last layer alone.
ADAPTERS: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
    ("olmoe", (), {}),
    ("olmoe", (), {"layers_to_transform": [1]}),
    ("olmoe", BOTH, {"use_rslora": True}),
    ("gpt_oss", BOTH, {"r": 3}),
    ("gpt_oss", ("down",), {"target_modules": []}),
    ("nemotron_h", BOTH, {}),
    ("qwen3_moe", ("up",), {}),
    ("mixtral", BOTH, {"target_modules": [], "rank_pattern": {"down_proj": 2}, "modules_to_save": ["lm_head"]}),
]


def adapters(rank: int, world_size: int, stage: int, forward: int, backward: int) -> list[str]:
    """One step of adapters of every kind, and its norm."""
    said = []
    for family, weights, options in ADAPTERS:
        reference = lora_of(family, weights, **options)
        config = ds_config(stage, num_chunks={"forward": forward, "backward": backward})
        engine = engine_with(copy.deepcopy(reference), config | {"gradient_clipping": 1e6})  # or stage 0 has no norm
        differs = [*train(engine, reference, rank, world_size, 1, 0.5), *called_ones(engine)]
        norm = torch.stack([each.grad.norm() for each in trained(reference) if each.grad is not None]).norm().item()
        if not abs(engine.get_global_grad_norm() - norm) <= 1e-4 * norm:
            differs.append(f"norm {engine.get_global_grad_norm()} for {norm}")
        said += [f"{family} {weights}: {each}" for each in differs]
        engine.destroy()
    return said


WAYS: list[tuple[Any, ...]] = [
    (without_tokens, 2),
    (called, 2, 3, Twice),
    (called, 2, 1, TwiceOnOneRank),
    (steps, 4, "gpt_oss", None, 3),
    (uneven, 2, None, 2, "reentrant"),
    (uneven, 2, BOTH, 3, "saved"),
    (several, 2, 2),
    (both_kinds, 2),
    *((generate_in_whole_weights, 2, weights) for weights in (None, BOTH)),
    *((called, 2, stage, Twice, adapted) for stage, adapted in ((1, False), (1, True), (3, True))),
    *((steps, 4, family, None, stage) for family in ("olmoe", "gpt_oss") for stage in (0, 1, 2)),
    *((steps, 4, "olmoe", BOTH, stage, stage in (0, 2)) for stage in range(4)),
    *((steps, 4, family, weights, 3) for family, weights in (("gpt_oss", ("up",)), ("nemotron_h", BOTH))),
    *((uneven, 2, None, stage, how) for stage, how in ((2, ""), (3, "reentrant"), (1, "saved"))),
    *((uneven, 2, BOTH, stage, how) for stage, how in ((2, ""), (2, "reentrant"), (3, "reentrant"), (1, "saved"))),
    *((adapters, 2, *how) for how in ((0, 1, 1), (1, 2, 2), (2, 3, 2), (3, 2, 3))),
    *((from_zero_init, 4, weights) for weights in (None, BOTH)),
    (several, 2, 0),
]
"""A way to train, on how many ranks, and its other arguments."""
# Gate and value one behind the other, without bias; beside each other, transposed, with bias.
CUT = [
    (steps, ranks, family, None, stage, False, ep_size, 2)
    for stage in (0, 1, 2)
    for ranks, ep_size in ((2, 1), (4, 2), (4, 1))
    for family in ("qwen3_moe", "gpt_oss")
]


def differing(way: tuple[Any, ...], folder: Path) -> list[str]:
    function, ranks, *arguments = way
    return [each for of_rank in run_on_ranks(function, ranks, folder, *arguments) for each in of_rank]


@sampled("way", WAYS, drawn=3, ids=lambda way: f"{way[0].__name__}-{way[1:]}")
def test_experts_and_adapters_train_as_in_one_process_whichever_way_they_are_trained(
    way: tuple[Any, ...], tmp_path: Path
) -> None:
    if way[0] is generate_in_whole_weights:
        pytest.importorskip("trl")
    assert differing(way, tmp_path / "ranks") == []


@sampled("way", CUT, ids=lambda way: str(way[1:]))
def test_experts_that_are_cut_along_their_hidden_width_train_as_in_one_process(
    way: tuple[Any, ...], tmp_path: Path
) -> None:
    assert differing(way, tmp_path / "ranks") == []


@pytest.mark.long
@pytest.mark.xfail(
    strict=True, raises=RuntimeError, reason="GatheredParameters leaves adapters of replicas cut at ZeRO 3"
)
def test_several_adapters_are_merged_over_replicas_at_zero_3(tmp_path: Path) -> None:
    assert run_on_ranks(several, 4, tmp_path, 3) == [[]] * 4


# ---- beside what Hugging Face itself has


def beside_their_own(rank: int, world_size: int, names: list[str], folder: str) -> list[str]:
    """What differs from Hugging Face's own expert parallelism: FSDP2 and an all-to-all, in the same processes."""
    from deepspeed import comm as deepspeed_comm
    from deepspeed.utils import safe_get_full_grad
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    if not deepspeed_comm.is_initialized():
        deepspeed_comm.init_distributed("gloo")
    said = []
    for family in names:
        place = Path(folder, family)
        model = model_of(family)
        if rank == 0:
            model.save_pretrained(place)
        dist.barrier()
        x = batch(3, world_size)[rank : rank + 1]
        options = DistributedConfig(fsdp_size=world_size, ep_size=world_size)
        theirs = AutoModelForCausalLM.from_pretrained(place, distributed_config=options, dtype=torch.float32)
        theirs.train()
        their_loss = theirs(input_ids=x, labels=x).loss
        their_loss.backward()
        wanted = {name: each.grad for name, each in theirs.named_parameters()}
        engine = engine_of(model, ds_config(2, num_chunks=2))
        loss = engine(input_ids=x, labels=x).loss
        engine.backward(loss)
        if not abs(loss.item() - their_loss.item()) <= TOLERANCE * their_loss.item():
            said.append(f"{family}: loss {loss.item()} for {their_loss.item()}")
        for name, parameter in engine.module.named_parameters():
            found, gradient = safe_get_full_grad(parameter), wanted[name]
            whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            if not furthest(found, own_part(whole, found.shape, rank)) <= TOLERANCE:
                said.append(f"{family}: gradient of {name} is off by {furthest(found, whole):.1e}")
        engine.destroy()
    return said


@pytest.mark.long
def test_losses_and_gradients_are_those_of_hugging_faces_own_expert_parallelism(tmp_path: Path) -> None:
    pytest.importorskip("transformers.distributed")
    names = ["mixtral", "qwen3_moe", "olmoe"]
    found = run_on_ranks(beside_their_own, 2, tmp_path / "ranks", names, str(tmp_path))
    assert [each for of_rank in found for each in of_rank] == []
