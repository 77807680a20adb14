# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel ranks have the same tokens: gradients and their norm are those of one process, each counted once.
What cannot be run so is refused at start, on every rank, with the way out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_fsmoe
from tests.ranks import run_on_ranks
from tests.small_model import NUM_EXPERTS, WIDTH, Case, SmallModel, batch
from tests.tensor_parallel import begin
from tests.test_training_against_loop import LEARNING_RATE, LoopModel, global_name

CASE = Case(k=2, drop_tokens=False, moe_options=(("top2_2nd_expert_sampling", False), ("use_rts", False)))
LIMIT = 0.05
"""Below the norm, so that weights tell by what gradients were clipped."""
SPLIT = "first.weight"
"""A weight that says that each rank has a part of its own, which here are equal: it counts twice."""


def train(rank: int, world_size: int) -> list[dict[str, Any]]:
    """For experts on every rank, and spread over the ranks: a step of two ranks that have the same tokens."""
    found = []
    for ep_size in (1, 2):
        case, mpu = replace(CASE, ep_size=ep_size), begin(2)
        model = SmallModel(case, rank)
        model.first.weight.tensor_model_parallel = True
        parameters = list(model.parameters())
        config = case.ds_config(fsmoe={"enabled": True}, gradient_clipping=LIMIT)
        engine, *_ = ds_fsmoe.initialize(model=model, model_parameters=parameters, config=config, mpu=mpu)
        loss, _ = engine(*batch(0, 0, torch.float32))
        engine.backward(loss)
        first = rank % ep_size * (NUM_EXPERTS // ep_size)
        named = {global_name(name, first): parameter for name, parameter in model.named_parameters()}
        gradients = {name: parameter.grad.clone() for name, parameter in named.items()}
        engine.step()
        weights = {name: parameter.detach() for name, parameter in named.items()}
        found.append({"norm": engine.get_global_grad_norm(), "gradients": gradients, "weights": weights})
        engine.destroy()
    return found


def test_gradients_norm_and_clipping_of_tensor_parallel_ranks_are_those_of_one_process(tmp_path: Path) -> None:
    model = LoopModel(CASE)
    model(*batch(0, 0, torch.float64)).backward()
    gradients = {name: parameter.grad for name, parameter in model.whole.named_parameters()}
    weights = {name: parameter.detach() for name, parameter in model.whole.named_parameters()}
    squares = {name: gradient.square().sum().item() for name, gradient in gradients.items()}
    norm = (sum(squares.values()) + squares[SPLIT]) ** 0.5
    assert norm > 2 * LIMIT
    for of_rank in run_on_ranks(train, 2, tmp_path):
        for found in of_rank:
            assert found["norm"] == pytest.approx(norm, rel=1e-5)
            for name, gradient in found["gradients"].items():
                theirs = gradients[name]
                torch.testing.assert_close(gradient.double(), theirs, rtol=2e-5, atol=2e-6, msg=name)
                stepped = weights[name] - LEARNING_RATE * LIMIT / norm * theirs
                torch.testing.assert_close(found["weights"][name].double(), stepped, rtol=2e-5, atol=2e-6, msg=name)


# ---- what is refused

TENSOR_PARALLEL = (("enable_expert_tensor_parallelism", True),)


def parts_of_a_sequence() -> nn.Module:
    return nn.ModuleDict({"moe": ds_fsmoe.MoE(WIDTH, nn.Linear(WIDTH, WIDTH), 4, sequence_parallel=True)})


def refused(model: nn.Module, world_size: int, monkeypatch: pytest.MonkeyPatch, **block: Any) -> str:
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    mpu = SimpleNamespace(get_tensor_model_parallel_world_size=lambda: 2)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the callers look at the message
        ds_fsmoe.initialize(model=model, config=Case().ds_config(fsmoe=block), mpu=mpu)
    assert not dist.is_initialized()
    return str(caught.value)


def test_tensor_parallel_ranks_divide_the_ranks_and_stocks_layer_has_whole_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    message = refused(SmallModel(Case(), 0), 3, monkeypatch, enabled=True)
    assert message == "mpu: 2 tensor-parallel ranks: must divide the 3 ranks"
    message = refused(parts_of_a_sequence(), 2, monkeypatch, enabled=False)
    assert message.startswith("fsmoe.enabled = false, but sequence_parallel = True in moe and mpu has 2 tensor-paral")


def test_experts_are_split_by_themselves_or_by_us_and_not_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SmallModel(Case(expert="gpt", moe_options=TENSOR_PARALLEL), 0)
    message = refused(model, 4, monkeypatch, enabled=True, esp_size=2)
    assert message.startswith("fsmoe.esp_size = 2: with enable_expert_tensor_parallelism = True (moes.0) the experts")
    assert message.endswith("set it to 1, or leave enable_expert_tensor_parallelism out")


def test_split_experts_are_spread_over_data_parallel_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    message = refused(SmallModel(Case(ep_size=4, moe_options=TENSOR_PARALLEL), 0), 4, monkeypatch, enabled=True)
    assert "moes.1.ep_size = 4: with enable_expert_tensor_parallelism = True it must divide the 2 data-p" in message
    assert message.endswith("for 4 experts the choices are 1, 2")


def test_layers_have_to_be_split_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SmallModel(Case(), 0)
    model.moes[1].enable_expert_tensor_parallelism = True
    message = refused(model, 4, monkeypatch, enabled=True)
    assert message.startswith("moes.0.enable_expert_tensor_parallelism = False, and moes.1 has True: DeepSpeed goes by")


def strided_mpu(rank: int, world_size: int, ranks_of: dict[int, list[int]]) -> tuple[str, str]:
    """What is said of tensor-parallel ranks that are no neighbours, and of our layer in an engine of stock's."""
    import deepspeed

    mpu = begin(2)
    with pytest.raises(ValueError, match="tensor-parallel") as of_stock:
        deepspeed.initialize(model=parts_of_a_sequence(), config=Case().ds_config(), mpu=mpu)
    for ranks in ([0, 2], [1, 3]):
        group = dist.new_group(ranks)
        if rank in ranks and ranks_of[rank] == ranks:
            mpu.groups["model"] = group
    with pytest.raises((ValueError, RuntimeError)) as caught:
        ds_fsmoe.initialize(model=SmallModel(Case(), rank), config=Case().ds_config(fsmoe={"enabled": True}), mpu=mpu)
    return str(caught.value), str(of_stock.value)


@pytest.mark.parametrize(
    ("ranks_of", "words", "end"),
    [
        ({0: [0, 2], 1: [1, 3], 2: [0, 2], 3: [1, 3]}, "not consecutive", "or set fsmoe.enabled to false"),
        ({0: [0, 2], 2: [0, 2], 1: [], 3: []}, "consecutive: ranks 0, 2: 'False'", ""),
    ],
)
def test_tensor_parallel_ranks_that_are_no_neighbours_are_refused_on_every_rank_as_is_our_layer_in_stocks_engine(
    ranks_of: dict[int, list[int]], words: str, end: str, tmp_path: Path
) -> None:
    messages = run_on_ranks(strided_mpu, 4, tmp_path, ranks_of)
    assert len(set(messages)) == 1
    strided, of_stock = messages[0]
    assert f"tensor-parallel ranks of a group are {words}" in strided
    assert strided.endswith(end)
    assert of_stock.startswith("a ds_fsmoe.MoE with 2 tensor-parallel ranks, in a stock DeepSpeed engine: call")
