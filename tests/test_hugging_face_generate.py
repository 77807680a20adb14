# SPDX-License-Identifier: Apache-2.0
"""Ranks that share experts generate together, each its own texts, between the steps of a training."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from tests.hf_families import batch, model_of
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.test_hugging_face import ds_config, engine_of


def generate_between_steps(rank: int, world_size: int, stage: int, adapted: bool) -> list[str]:
    """What differs from one process, of texts that are unlike on each rank in number and length."""
    reference = model_of("olmoe")
    reference.generation_config.eos_token_id = None
    if adapted:
        from peft import LoraConfig, get_peft_model

        parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        reference = get_peft_model(reference, LoraConfig(target_modules=["q_proj"], target_parameters=parameters))
    engine = engine_of(copy.deepcopy(reference), ds_config(stage, ep_size=world_size, num_chunks=2))
    trained = [each for each in reference.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.5)
    said = []
    for step in range(2):
        x = batch(step, world_size)
        engine.backward(engine(input_ids=x[rank : rank + 1], labels=x[rank : rank + 1]).loss)
        engine.step()
        losses = [reference(input_ids=each[None], labels=each[None]).loss for each in x]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
        prompt = batch(step + rank, 1 + rank, 3 + 4 * rank)
        how = {"max_new_tokens": 5 + 6 * rank, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
        engine.eval()
        found = engine.module.generate(input_ids=prompt, **how)
        engine.train()
        wanted = reference.eval().generate(input_ids=prompt, **how)
        reference.train()
        if not torch.equal(found, wanted):
            said.append(f"step {step}: {found.tolist()} for {wanted.tolist()}")
    engine.destroy()
    return said


@sampled(("stage", "adapted"), [(stage, adapted) for stage in range(4) for adapted in (False, True)], kept=[5])
def test_every_rank_writes_what_one_process_writes(stage: int, adapted: bool, tmp_path: Path) -> None:
    assert run_on_ranks(generate_between_steps, 2, tmp_path, stage, adapted) == [[], []]


def generate_in_whole_weights(rank: int, world_size: int, adapted: bool) -> list[str]:
    """What differs where a script gathers all weights around the generation, as TRL does at ZeRO 3."""
    from deepspeed import zero
    from trl.models.utils import add_hooks, remove_hooks

    reference = model_of("olmoe")
    reference.generation_config.eos_token_id = None
    if adapted:
        from peft import LoraConfig, get_peft_model

        parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        reference = get_peft_model(reference, LoraConfig(target_modules=["q_proj"], target_parameters=parameters))
    engine = engine_of(copy.deepcopy(reference), ds_config(3, ep_size=world_size, num_chunks=2))
    said = []
    for step in range(2):
        x = batch(step, world_size)[rank : rank + 1]
        engine.backward(engine(input_ids=x, labels=x).loss)
        prompt = batch(step + rank, 1, 3 + 4 * rank)
        how = {"max_new_tokens": 5 + 6 * rank, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
        engine.eval()
        wanted = engine.module.generate(input_ids=prompt, **how)
        with zero.GatheredParameters(list(engine.module.parameters())):
            remove_hooks(engine)
            shapes = [tuple(each.shape) for each in engine.module.parameters()]
            found = engine.module.generate(input_ids=prompt, **how)
            if shapes != [tuple(each.shape) for each in engine.module.parameters()]:
                said.append(f"step {step}: weights are not whole afterwards")
            changed = [each for each in engine.module.parameters() if each.dim() == 3]
            for each in changed:
                each.data.mul_(2.0)
            halved = engine.module.generate(input_ids=prompt, **how)
            for each in changed:
                each.data.mul_(0.5)
            if changed and torch.equal(halved, found):
                said.append(f"step {step}: changes within the block do not count")
            add_hooks(engine)
        if not torch.equal(found, wanted) or not torch.equal(wanted, engine.module.generate(input_ids=prompt, **how)):
            said.append(f"step {step}: {found.tolist()} for {wanted.tolist()}")
        engine.train()
        engine.step()
    engine.destroy()
    return said


@sampled(("adapted",), [(False,), (True,)], kept=[0])
def test_ranks_generate_where_all_weights_are_gathered(adapted: bool, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    assert run_on_ranks(generate_in_whole_weights, 2, tmp_path, adapted) == [[], []]
