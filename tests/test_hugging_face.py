# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's models train as they do on one process with their own eager experts, at every stage of ZeRO."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from benchmarks.models.routed_model import Experts
from tests.distances import furthest
from tests.hf_families import (
    NUM_EXPERTS,
    WIDTH,
    batch,
    families,
    is_shown,
    loss_of,
    losses_of_steps,
    model_of,
    shown_in,
    why_not,
)
from tests.ranks import run_on_ranks
from tests.samples import draw, sampled
from tests.sgd_engines import ds_config, engine_of

SIX = ("mixtral", "qwen3_moe", "deepseek_v3", "olmoe", "glm4_moe", "gpt_oss")
TOLERANCE = 1e-5
# Sums of numbers that cancel: the family itself differs by more between one batch and its halves.
CANCELLING = {"hy_v4": 1e-3, "lara_mini": 1e-4}


def own_part(whole: torch.Tensor, part_shape: torch.Size, ep_rank: int) -> torch.Tensor:
    """Of a tensor of all experts, what this rank has; all of any other."""
    if whole.shape == part_shape:
        return whole
    num_local = part_shape[0]
    return whole[ep_rank * num_local : (ep_rank + 1) * num_local]


def part_for(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Of a whole tensor, what a rank has of it."""
    from ds_fsmoe.checkpoint_files.expert_parts import part_of

    part = part_of(parameter)
    return whole if part is None else part.take(whole)


def differing_gradients(engine: Any, reference: nn.Module, tolerance: float = TOLERANCE) -> Iterator[str]:
    from deepspeed.utils import safe_get_full_grad

    wanted = {name: each.grad for name, each in reference.named_parameters() if each.requires_grad}
    own = {name: each for name, each in engine.module.named_parameters() if each.requires_grad}
    if wanted.keys() != own.keys():
        yield f"other parameters train: {sorted(wanted.keys() ^ own.keys())}"
    for name, parameter in own.items():
        if wanted[name] is None:
            continue
        found = safe_get_full_grad(parameter)
        # Without ZeRO it is the parameter's own.
        whole = wanted[name] if engine.zero_optimization_stage() else part_for(parameter, wanted[name])
        if not furthest(found, whole) <= tolerance:
            yield f"gradient of {name} is off by {furthest(found, whole):.1e}"


def off_loss(found: torch.Tensor, wanted: torch.Tensor) -> list[str]:
    # That of a model of text alone is a mean of numbers between -1 and 1 that cancel, each rounded at 6e-8.
    close = abs(found.item() - wanted.item()) <= TOLERANCE * abs(wanted.item()) + 1e-8
    return [] if close else [f"loss {found.item()} for {wanted.item()}"]


def first_backward(engine: Any, reference: nn.Module, rank: int, world_size: int, tolerance: float) -> Iterator[str]:
    """What differs from one process, of the loss and the gradients of a step that is not made yet."""
    x = batch(3, world_size)
    losses = [loss_of(reference, each[None]) for each in x]
    torch.stack(losses).mean().backward()
    loss = loss_of(engine, x[rank : rank + 1])
    engine.backward(loss)
    yield from off_loss(loss, losses[rank])
    yield from differing_gradients(engine, reference, tolerance)


def called_ones(engine: Any) -> Iterator[str]:
    layers = engine.fsmoe.layers
    if not layers or any(each.fsmoe.own_forward is not None for each in layers.values()):
        yield f"{len(layers)} layers, not all written out"


def gradients(
    rank: int,
    world_size: int,
    names: list[str],
    stage: int,
    degrees: dict[str, int],
    block: dict[str, Any] | None = None,
) -> list[str]:
    """What differs from one process, of losses and gradients of some families."""
    said = []
    for family in names:
        reference = model_of(family)
        engine = engine_of(copy.deepcopy(reference), ds_config(stage, num_chunks=degrees, **(block or {})))
        differs = first_backward(engine, reference, rank, world_size, CANCELLING.get(family, 3 * TOLERANCE))
        said += [f"{family}: {each}" for each in (*differs, *called_ones(engine))]
        engine.destroy()
    return said


# ---- the law, over all families

FAMILIES = families()
PAGE = Path(__file__).parents[1] / "docs" / "huggingface.md"
KEPT = {"gpt_oss": 3, "deepseek_v3": 2, "nemotron_h": 0}
"""Family -> stage of ZeRO, where it is drawn: transposed, interleaved weights with biases; gated ones, as most families
have them, beside shared experts; plain ones without a gate."""
SILENT = ("deepseek_v4", "ernie4_5_vl_moe")
"""The first layers of the one choose by a token's number; a block of the other has experts of text and of images."""
UNCUT = ("muse_spark",)
"""It normalizes the output of its experts, of which a shard has only a part."""
LR = 0.1
LATER = (4, 5)
"""The batches of steps with which a training goes on."""


def law_of(rank: int, world_size: int, family: str, stage: int, folder: str) -> list[str]:
    """What of a family is not as with its own eager experts in one process: claim by claim."""
    whole = model_of(family)
    claims = {
        "trains": trains_and_is_saved(rank, world_size, family, stage, folder),
        "goes on": goes_on(rank, world_size, family, stage, folder),
        "adapters": adapters_train(rank, world_size, family, stage),
        "routers": routers_are_found(whole, family),
        "cuts": cuts(whole, family),
    }
    return [f"{family}, ZeRO {stage}, {claim}: {each}" for claim, found in claims.items() for each in found]


def is_causal(model: nn.Module) -> bool:
    return type(model).__name__.endswith("ForCausalLM")


def config_of_law(stage: int, **block: Any) -> dict[str, Any]:
    config = ds_config(stage, lr=LR, num_chunks={"forward": 2, "backward": 3}, **block)
    config["optimizer"]["params"]["momentum"] = 0.9
    return config


def trains_and_is_saved(rank: int, world_size: int, family: str, stage: int, folder: str) -> Iterator[str]:
    """Train a step beside one process, save, generate, and note how the training goes on."""
    import ds_fsmoe

    reference = model_of(family)
    if rank == 0 and is_causal(reference):
        # Expert by expert, as files are published; at one stage stacked, as experts are in memory.
        reference.save_pretrained(f"{folder}/files", max_shard_size="40KB", save_original_format=stage != 1)
    engine = engine_of(copy.deepcopy(reference), config_of_law(stage))
    optimizer = torch.optim.SGD(reference.parameters(), lr=LR)
    yield from first_backward(engine, reference, rank, world_size, CANCELLING.get(family, 3 * TOLERANCE))
    yield from called_ones(engine)
    optimizer.step()
    engine.step()
    yield from off_weights(ds_fsmoe.whole_state_dict(engine), reference, family)
    if is_causal(reference):
        # At ZeRO 3 all ranks must run the same modules, and some families run one at every fourth token only.
        yield from generates(engine, reference, rank if stage < 3 or family in KEPT else 0)
    engine.save_checkpoint(folder, "tag")
    weights = ds_fsmoe.whole_state_dict(engine)
    torch.save((losses_of_steps(engine, rank, world_size, LATER), weights), f"{folder}/went_on{rank}.pt")
    engine.destroy()


def off_weights(found: dict[str, torch.Tensor] | None, reference: nn.Module, family: str) -> list[str]:
    if found is None:  # only the first rank has them
        return []
    wanted = reference.state_dict()
    if list(found) != list(wanted):
        return [f"weights are called otherwise: {sorted(found.keys() ^ wanted.keys())}"]
    off = {name: furthest(found[name], each) for name, each in wanted.items() if each.is_floating_point()}
    return [
        f"after a step {name} is off by {far:.1e}"
        for name, far in off.items()
        if not far <= CANCELLING.get(family, 5 * TOLERANCE)
    ]


def goes_on(rank: int, world_size: int, family: str, stage: int, folder: str) -> Iterator[str]:
    """Go on from what was saved in an engine of other weights: those of files, of which this rank reads its experts."""
    import ds_fsmoe

    model, config = model_of(family), config_of_law(stage)
    if is_causal(model):
        from transformers import AutoModelForCausalLM

        files, names = f"{folder}/files", dict(model.named_parameters())
        with ds_fsmoe.own_experts(config):
            model = AutoModelForCausalLM.from_pretrained(files, dtype=torch.float32)
        for name, each in model.named_parameters():
            each.requires_grad_(names[name].requires_grad)  # or transformers trains biases of routers, too
        # Under zero.Init a parameter is shared out from the beginning.
        own = {name: each for name, each in model.named_parameters() if not hasattr(each, "ds_id")}
        parts = {name: own_part(names[name].detach(), each.shape, rank) for name, each in own.items()}
        yield from (f"of files, {name} differs" for name, each in own.items() if not torch.equal(each, parts[name]))
        if own and not any(each.shape != names[name].shape for name, each in own.items()):
            yield "experts of files are not cut"
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(1.5)
    engine = engine_of(model, config)
    engine.load_checkpoint(folder, "tag")
    losses, weights = torch.load(f"{folder}/went_on{rank}.pt")
    found = ds_fsmoe.whole_state_dict(engine)
    if weights is not None:
        yield from (f"{name} is not what was saved" for name in weights if not torch.equal(found[name], weights[name]))
    now = losses_of_steps(engine, rank, world_size, LATER)
    if now != losses:
        yield f"losses {now} for {losses}"
    engine.destroy()


def adapters_train(rank: int, world_size: int, family: str, stage: int) -> Iterator[str]:
    """LoRA of both weights of all experts."""
    pytest.importorskip("peft")
    from tests.hf_lora import BOTH, engine_with, lora_of

    reference = lora_of(family, BOTH, target_modules=[])
    engine = engine_with(copy.deepcopy(reference), config_of_law(stage))
    # Those of B are sums over all tokens of numbers that cancel.
    yield from first_backward(engine, reference, rank, world_size, 5 * CANCELLING.get(family, TOLERANCE))
    engine.destroy()


def generates(engine: Any, reference: nn.Module, seed: int) -> Iterator[str]:
    """Texts that are unlike on each rank in number and length."""
    prompt = batch(seed, 1 + seed, 9 + 4 * seed)
    how = {"max_new_tokens": 2 + seed, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    engine.eval()
    for model in (reference.eval(), engine.module):
        model.generation_config.eos_token_id = None
    wanted, found = (model.generate(input_ids=prompt, **how) for model in (reference, engine.module))
    engine.train()
    reference.train()
    if not torch.equal(found, wanted):
        yield f"{found.tolist()} is generated for {wanted.tolist()}"


def routers_are_found(model: nn.Module, family: str) -> Iterator[str]:
    """Monitors are told the probabilities of every router that a family declares."""
    from ds_fsmoe.components.expert_compute.contract import follows_contract
    from ds_fsmoe.components.gate import entropy_of
    from ds_fsmoe.telemetry.routers import probabilities_of, router_outputs

    experts = {name: each for name, each in model.named_modules() if follows_contract(each)}
    outputs = router_outputs(model, experts)
    if (set(outputs) != set(experts)) != (family in SILENT):
        yield f"of {sorted(experts)} {sorted(outputs)} are found"
    seen: list[Any] = []
    for output in outputs.values():
        output.module.register_forward_hook(lambda _, args, found, output=output: seen.append(output.of(found)))
    loss_of(model, batch(0, 1))
    if len(seen) < len(outputs):
        yield f"{len(seen)} routers of {len(outputs)} have been called"
    for logits in seen:
        probs_SE = probabilities_of(logits)
        if not torch.allclose(probs_SE.sum(1), torch.ones(len(probs_SE)), atol=1e-3):
            yield "no probabilities"
        if not 0 <= entropy_of(probs_SE, None) < 3:
            yield f"an entropy of {entropy_of(probs_SE, None)}"


def cuts(model: nn.Module, family: str) -> Iterator[str]:
    """Experts may be cut along their hidden width."""
    from ds_fsmoe.config.blocks import FSMoEBlock
    from ds_fsmoe.engine.convert_experts import find_experts
    from ds_fsmoe.engine.shard_experts import check_shards_of_experts
    from ds_fsmoe.layer.parts import LayerError

    try:
        check_shards_of_experts(FSMoEBlock(expert_tensor_parallel_size=2), {}, find_experts(model))
    except LayerError as error:
        if family not in UNCUT:
            yield str(error)
    else:
        if family in UNCUT:
            yield "are not refused"


@sampled("family", FAMILIES, drawn=3)
def test_a_family_trains_is_loaded_saved_adapted_and_generates_as_its_eager_experts_do(
    family: str, tmp_path: Path
) -> None:
    assert why_not(family) == ""
    assert is_shown(family, PAGE.read_text("utf-8"))
    stage = KEPT.get(family, draw(f"stage of {family}", range(4), 1)[0])
    found = run_on_ranks(law_of, 2, tmp_path / "ranks", family, stage, str(tmp_path))
    assert [each for of_rank in found for each in of_rank] == []


def test_the_page_of_families_has_those_of_the_installed_transformers() -> None:
    page = shown_in(PAGE.read_text("utf-8"))
    shown = [each.split()[0] for row in page.splitlines()[2:] for each in row.split("|")[2].split(",")]
    assert sorted(shown) == FAMILIES
    assert set(KEPT) | set(SILENT) | set(UNCUT) | set(SIX) <= set(FAMILIES)


# ---- experts of which the contract does not say what they compute


class Twice(Experts):
    """Experts that follow the contract by their flags, and give twice what it says."""

    def __init__(self) -> None:
        super().__init__(NUM_EXPERTS, WIDTH, 24)

    def forward(self, x_SM: torch.Tensor, index_SK: torch.Tensor, weights_SK: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x_SM, index_SK, weights_SK)


class TwiceOnOneRank(Twice):
    """As far as the first rank can see, they give what the contract says: its experts give nothing."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.down_proj[: NUM_EXPERTS // 2] = 0


class OfTwice(nn.Module):
    def __init__(self, experts: type[nn.Module] = Twice) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(WIDTH, NUM_EXPERTS)
        self.experts = experts()

    def forward(self, x_SM: torch.Tensor) -> torch.Tensor:
        weights_SK, index_SK = self.router(x_SM).softmax(-1).topk(2)
        return self.experts(x_SM, index_SK, weights_SK).square().mean()
