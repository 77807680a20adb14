# SPDX-License-Identifier: Apache-2.0
"""Tiny models of Hugging Face's families with PEFT's adapters, and what differs from one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from tests.distances import furthest
from tests.hf_families import batch, model_of
from tests.sgd_engines import engine_of
from tests.test_hugging_face import TOLERANCE, differing_gradients, off_loss

ATTENTION = ["q_proj", "v_proj"]
BOTH = ("up", "down")


def lora_config(model: nn.Module, weights: tuple[str, ...] = (), **options: Any) -> Any:
    """Adapters of attention, and of experts' weights: ``"up"`` and ``"down"`` by the contract."""
    from peft import LoraConfig

    from ds_fsmoe.components.expert_compute.contract import contract_of, follows_contract

    targets = [
        f"{name}.{getattr(contract_of(module), weight)}"
        for name, module in model.named_modules()
        if follows_contract(module)
        for weight in weights
    ]
    given = {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION} | ({"target_parameters": targets} if targets else {})
    return LoraConfig(**given | options)


def with_lora(model: nn.Module, weights: tuple[str, ...] = (), **options: Any) -> nn.Module:
    """The model with adapters whose B is not zero, as after some training."""
    from peft import get_peft_model

    torch.manual_seed(1)
    adapted = get_peft_model(model, lora_config(model, weights, **options))
    fill(adapted)
    return adapted


def fill(model: nn.Module) -> None:
    """Give every B numbers that are not zero, the same on each rank."""
    with torch.no_grad():
        for name, each in model.named_parameters():
            if "lora_B" in name:
                each.copy_(torch.randn(each.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [each for each in model.parameters() if each.requires_grad]


def lora_of(family: str, weights: tuple[str, ...] = (), **options: Any) -> nn.Module:
    return with_lora(model_of(family), weights, **options)


def engine_with(model: nn.Module, config: dict[str, Any], every: bool = False) -> Any:
    """An engine that is given what trains, or every parameter."""
    return engine_of(model, config, list(model.parameters()) if every else trained(model))


def step(engine: Any, x: torch.Tensor, rank: int) -> float:
    loss = engine(input_ids=x[rank : rank + 1], labels=x[rank : rank + 1]).loss
    engine.backward(loss)
    return loss.item()


def differing_weights(engine: Any, reference: nn.Module) -> Iterator[str]:
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    wanted = dict(reference.named_parameters())
    for name, parameter in engine.module.named_parameters():
        with GatheredParameters([parameter]):
            found = parameter.detach().clone()
        whole = wanted[name].detach()
        if found.shape != whole.shape:
            yield f"{name} is {list(found.shape)} for {list(whole.shape)}"
        elif not furthest(found, whole) <= TOLERANCE:
            yield f"{name} is off by {furthest(found, whole):.1e}"


def train(
    engine: Any,
    reference: nn.Module,
    rank: int,
    world_size: int,
    steps: int,
    lr: float,
    batches: Callable[[int], Sequence[torch.Tensor]] | None = None,
) -> Iterator[str]:
    """Take steps of SGD on both, of the batches of all ranks; what differs, of losses and of the first gradients."""
    optimizer = torch.optim.SGD(trained(reference), lr=lr)
    for number in range(steps):
        xs = batch(number, world_size).split(1) if batches is None else batches(number)
        losses = [reference(input_ids=x, labels=x).loss for x in xs]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
        loss = engine(input_ids=xs[rank], labels=xs[rank]).loss
        engine.backward(loss)
        if number == 0:
            yield from differing_gradients(engine, reference, 3 * TOLERANCE)
        engine.step()
        yield from (f"step {number}: {each}" for each in off_loss(loss, losses[rank]))
