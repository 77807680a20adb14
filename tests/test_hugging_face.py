# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's models train as they do on one process with their own eager experts, at every stage of ZeRO."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

pytest.importorskip("transformers")

from tests.hf_families import NUM_EXPERTS, UNTRIED, WIDTH, batch, families, loss_of, model_of, shown_in, table, why_not
from tests.ranks import run_on_ranks
from tests.samples import sampled

SIX = ("mixtral", "qwen3_moe", "deepseek_v3", "olmoe", "glm4_moe", "gpt_oss")
TOLERANCE = 1e-5
# Sums of numbers that cancel: the family itself differs by more between one batch and its halves.
CANCELLING = {"hy_v4": 1e-3}


def ds_config(stage: int, lr: float = 0.5, **block: Any) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        # Or tiny parameters stay whole.
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": lr}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
        "fsmoe": {"enabled": True} | block,
    }


def engine_of(model: nn.Module, config: dict[str, Any], parameters: Any = None) -> Any:
    import ds_fsmoe

    return ds_fsmoe.initialize(model=model, model_parameters=parameters or list(model.parameters()), config=config)[0]


def own_part(whole: torch.Tensor, part_shape: torch.Size, ep_rank: int) -> torch.Tensor:
    """Of a tensor of all experts, what this rank has; all of any other."""
    if whole.shape == part_shape:
        return whole
    num_local = part_shape[0]
    return whole[ep_rank * num_local : (ep_rank + 1) * num_local]


def furthest(found: torch.Tensor | None, wanted: torch.Tensor) -> float:
    if found is None:
        return float(wanted.abs().max() > 0)
    scale = wanted.abs().max().item()
    return (found.float() - wanted).abs().max().item() / (scale if scale > 1e-9 else 1.0)


def gradients(
    rank: int,
    world_size: int,
    names: list[str],
    stage: int,
    degrees: dict[str, int],
    block: dict[str, Any] | None = None,
) -> list[str]:
    """What differs from one process, of losses and gradients of some families."""
    from deepspeed.utils import groups as stock_groups
    from deepspeed.utils import safe_get_full_grad

    said = []
    for family in names:
        reference = model_of(family)
        engine = engine_of(copy.deepcopy(reference), ds_config(stage, num_chunks=degrees, **(block or {})))
        x = batch(3, world_size)
        losses = [loss_of(reference, each[None]) for each in x]
        torch.stack(losses).mean().backward()
        loss = loss_of(engine, x[rank : rank + 1])
        engine.backward(loss)
        # That of a model of text alone is a mean of numbers between -1 and 1 that cancel, each rounded at 6e-8.
        if not abs(loss.item() - losses[rank].item()) <= TOLERANCE * abs(losses[rank].item()) + 1e-8:
            said.append(f"{family}: loss {loss.item()} for {losses[rank].item()}")
        ep_rank = stock_groups._get_expert_parallel_rank(f"ep_size_{world_size}")
        wanted = {name: each.grad for name, each in reference.named_parameters()}
        tolerance = CANCELLING.get(family, TOLERANCE)
        for name, parameter in engine.module.named_parameters():
            if wanted[name] is None:
                continue
            found = safe_get_full_grad(parameter)
            part = wanted[name] if found is None else own_part(wanted[name], found.shape, ep_rank)
            if not furthest(found, part) <= tolerance:
                said.append(f"{family}: gradient of {name} is off by {furthest(found, part):.1e}")
        layers = engine.fsmoe.layers
        if not layers or any(each.fsmoe.own_forward is not None for each in layers.values()):
            said.append(f"{family}: {len(layers)} layers, not all written out")
        engine.destroy()
    return said


@sampled(("stage", "forward", "backward"), [(0, 1, 1), (2, 3, 2), (3, 2, 3)], kept=[1])
def test_six_families_have_the_losses_and_gradients_of_eager_experts(
    stage: int, forward: int, backward: int, tmp_path: Path
) -> None:
    degrees = {"forward": forward, "backward": backward}
    found = run_on_ranks(gradients, 2, tmp_path, list(SIX), stage, degrees)
    assert [each for of_rank in found for each in of_rank] == []


@pytest.mark.long
def test_families_from_all_over_the_table_have_the_losses_and_gradients_of_eager_experts(tmp_path: Path) -> None:
    spread = [each for each in families() if each not in (*SIX, *UNTRIED)][7::20]
    assert len(spread) >= 2
    found = run_on_ranks(gradients, 2, tmp_path, spread, 2, {"forward": 2, "backward": 3})
    assert [each for of_rank in found for each in of_rank] == []


@pytest.mark.slow
def test_every_family_that_can_be_tiny_has_the_losses_and_gradients_of_eager_experts(tmp_path: Path) -> None:
    assert {each: why for each in families() if (why := why_not(each))} == UNTRIED
    tried = [each for each in families() if each not in UNTRIED]
    found = run_on_ranks(gradients, 2, tmp_path, tried, 2, {"forward": 2, "backward": 3}, limit_s=600)
    assert [each for of_rank in found for each in of_rank] == []


@pytest.mark.slow
def test_the_documentation_has_the_families_that_are_tried() -> None:
    page = (Path(__file__).parents[1] / "docs" / "huggingface.md").read_text("utf-8")
    assert shown_in(page) == table()


def five_steps(rank: int, world_size: int, families: list[str], stage: int, ep_size: int) -> list[str]:
    """What of the weights differs from one process after five steps of SGD."""
    from deepspeed.utils import groups as stock_groups
    from deepspeed.utils import safe_get_full_fp32_param

    said = []
    for family in families:
        reference = model_of(family)
        engine = engine_of(copy.deepcopy(reference), ds_config(stage, lr=0.1, ep_size=ep_size, num_chunks=2))
        optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
        for step in range(5):
            x = batch(step, world_size)
            losses = [reference(input_ids=each[None], labels=each[None]).loss for each in x]
            optimizer.zero_grad()
            torch.stack(losses).mean().backward()
            optimizer.step()
            engine.backward(engine(input_ids=x[rank : rank + 1], labels=x[rank : rank + 1]).loss)
            engine.step()
        ep_rank = stock_groups._get_expert_parallel_rank(f"ep_size_{ep_size}")
        wanted = dict(reference.named_parameters())
        for name, parameter in engine.module.named_parameters():
            found = safe_get_full_fp32_param(parameter) if stage else parameter.detach()
            found = parameter.detach() if found is None else found
            part = own_part(wanted[name].detach(), found.shape, ep_rank)
            if not furthest(found, part) <= TOLERANCE:
                said.append(f"{family}: {name} is off by {furthest(found, part):.1e}")
        engine.destroy()
    return said


@sampled(
    ("stage", "names"),
    [*((stage, ["olmoe", "gpt_oss"]) for stage in (0, 1, 2, 3)), (3, ["gpt_oss"])],
    kept=[-1],
)
def test_weights_after_five_steps_are_those_of_one_process_with_replicas_of_experts(
    stage: int, names: list[str], tmp_path: Path
) -> None:
    found = run_on_ranks(five_steps, 4, tmp_path, names, stage, 2)
    assert [each for of_rank in found for each in of_rank] == []


def from_zero_init(rank: int, world_size: int) -> list[str]:
    """Trainer's way at stage 3: parameters are shared out while the model is built."""
    import deepspeed
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    from tests.hf_families import config_of

    said = []
    reference = model_of("mixtral")
    config = ds_config(3, ep_size=2, num_chunks=2)
    asked = HfDeepSpeedConfig(config)
    model = AutoModelForCausalLM.from_config(config_of("mixtral"))
    model.set_experts_implementation("eager")
    del asked  # transformers asked whether it lived
    if not all(hasattr(each, "ds_id") for each in model.parameters()):
        said.append("nothing was shared out")
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        if rank == 0:
            for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
                ours.data.copy_(theirs.data)
    import ds_fsmoe

    engine = ds_fsmoe.initialize(model=model, config=config)[0]
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    for step in range(3):
        x = batch(step, world_size)
        optimizer.zero_grad()
        wanted = torch.stack([reference(input_ids=each[None], labels=each[None]).loss for each in x])
        wanted.mean().backward()
        optimizer.step()
        loss = engine(input_ids=x[rank : rank + 1], labels=x[rank : rank + 1]).loss
        engine.backward(loss)
        engine.step()
        if not abs(loss.item() - wanted[rank].item()) <= 1e-5 * wanted[rank].item():
            said.append(f"step {step}: loss {loss.item()} for {wanted[rank].item()}")
    engine.destroy()
    return said


def test_experts_that_zero_init_has_shared_out_are_cut_and_shared_out_again(tmp_path: Path) -> None:
    assert run_on_ranks(from_zero_init, 4, tmp_path) == [[]] * 4


def uneven(rank: int, world_size: int, checkpointing: str) -> list[str]:
    """Sequences of other lengths on each rank, padding, checkpointing, evaluation between steps."""
    said = []
    reference = model_of("qwen3_moe")
    engine = engine_of(copy.deepcopy(reference), ds_config(2, num_chunks={"forward": 3, "backward": 2}))
    if checkpointing:
        options = {"use_reentrant": checkpointing == "reentrant"}
        engine.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        if checkpointing == "reentrant":
            engine.module.enable_input_require_grads()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    for step in range(3):
        xs = [batch(10 * step + each, 1, (5, 13)[each]) for each in range(world_size)]
        losses = [reference(input_ids=x, labels=x).loss for x in xs]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
        loss = engine(input_ids=xs[rank], labels=xs[rank]).loss
        engine.backward(loss)
        engine.step()
        if not abs(loss.item() - losses[rank].item()) <= 1e-5 * losses[rank].item():
            said.append(f"step {step}: loss {loss.item()} for {losses[rank].item()}")
        engine.eval()
        with torch.no_grad():
            x = batch(99, 1, 7 + 4 * rank)
            wanted, found = reference.eval()(input_ids=x).logits, engine(input_ids=x).logits
        if furthest(found, wanted) > 1e-4:
            said.append(f"step {step}: logits are off by {furthest(found, wanted):.1e}")
        reference.train()
        engine.train()
    engine.destroy()
    return said


@sampled("checkpointing", ["", "reentrant", "saved"], kept=[1])
def test_sequences_may_have_other_lengths_on_each_rank(checkpointing: str, tmp_path: Path) -> None:
    assert run_on_ranks(uneven, 2, tmp_path, checkpointing) == [[], []]


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
    said = [] if losses == sorted(losses, reverse=True) else [f"losses {losses}"]
    return said + ([] if labels == ["OlmoeExperts", "OlmoeExperts", "FSMoELayer"] else [f"layers {labels}"])


def test_both_kinds_of_layers_train_in_one_model(tmp_path: Path) -> None:
    assert run_on_ranks(both_kinds, 2, tmp_path) == [[], []]


class Twice(nn.Module):
    """Experts that follow the contract by their flags, and give twice what it says."""

    has_bias, is_transposed, num_experts = False, False, NUM_EXPERTS

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(NUM_EXPERTS, 48, WIDTH) * 0.1)
        self.down_proj = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, 24) * 0.1)

    def _apply_gate(self, up: torch.Tensor) -> torch.Tensor:
        gate, value = up.chunk(2, dim=-1)
        return gate.sigmoid() * value

    def forward(self, x_SM: torch.Tensor, index_SK: torch.Tensor, weights_SK: torch.Tensor) -> torch.Tensor:
        y_SM = torch.zeros_like(x_SM)
        for expert in range(self.num_experts):
            tokens, choices = torch.where(index_SK == expert)
            h = self._apply_gate(x_SM[tokens] @ self.gate_up_proj[expert].t())
            y = 2 * h @ self.down_proj[expert].t() * weights_SK[tokens, choices, None]
            y_SM = y_SM.index_add(0, tokens, y)
        return y_SM


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


def called(rank: int, world_size: int, stage: int, experts: type[nn.Module] = Twice) -> list[str]:
    from deepspeed.utils import safe_get_full_grad

    reference = OfTwice(experts)
    engine = engine_of(copy.deepcopy(reference), ds_config(stage, num_chunks={"forward": 2, "backward": 3}))
    xs = torch.randn(world_size, 7, WIDTH, generator=torch.Generator().manual_seed(1))
    torch.stack([reference(each) for each in xs]).mean().backward()
    engine.backward(engine(xs[rank]))
    said = []
    for name, parameter in engine.module.named_parameters():
        found = safe_get_full_grad(parameter)
        wanted = own_part(dict(reference.named_parameters())[name].grad, found.shape, rank)
        if not furthest(found, wanted) <= TOLERANCE:
            said.append(f"{name} is off by {furthest(found, wanted):.1e}")
    ways = [each.fsmoe.own_forward is None for each in engine.fsmoe.layers.values()]
    engine.destroy()
    return said + ([] if ways == [False] else ["it was not called itself"])


@sampled("stage", [1, 3], kept=[1])
def test_experts_that_compute_something_else_are_called_themselves(stage: int, tmp_path: Path) -> None:
    assert run_on_ranks(called, 2, tmp_path, stage) == [[], []]


def test_experts_are_called_on_all_ranks_where_one_has_to(tmp_path: Path) -> None:
    assert run_on_ranks(called, 2, tmp_path, 1, TwiceOnOneRank) == [[], []]


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


@pytest.mark.slow
def test_losses_and_gradients_are_those_of_hugging_faces_own_expert_parallelism(tmp_path: Path) -> None:
    pytest.importorskip("transformers.distributed")
    names = ["mixtral", "qwen3_moe", "olmoe"]
    found = run_on_ranks(beside_their_own, 2, tmp_path / "ranks", names, str(tmp_path))
    assert [each for of_rank in found for each in of_rank] == []
