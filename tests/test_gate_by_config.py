# SPDX-License-Identifier: Apache-2.0
"""A gate chosen by config: settings of the layer's own gate, or another gate whose parameters are trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn

import ds_fsmoe
from ds_fsmoe import registry
from ds_fsmoe.components.gates.topk import LinearGate
from ds_fsmoe.config.reading import read_block
from ds_fsmoe.engine.convert_layers import check_layers, convert
from ds_fsmoe.layer.parts import LayerError, choose_parts
from tests.ranks import run_on_ranks
from tests.small_model import Case, SmallModel, batch

pytestmark = pytest.mark.long


class ScaledGate(LinearGate):
    """Another gate: the same choice, its scores scaled by a parameter of its own."""

    def build(self, model_dim: int, num_experts: int) -> None:
        super().build(model_dim, num_experts)
        self.scale = nn.Parameter(torch.full((1,), 1.5))

    def forward(self, x_SM, used_token_S=None, group=None):
        return super().forward(x_SM * self.scale, used_token_S, group)


def train(rank: int, case: Case, optimizer: str, gate: dict[str, Any]) -> tuple[Any, SmallModel]:
    model = SmallModel(case, rank)
    config = case.ds_config(fsmoe={"enabled": True, "gate": gate})
    arguments: dict[str, Any] = {"model": model}
    if optimizer == "by config":
        arguments["model_parameters"] = list(model.parameters())
    else:
        del config["optimizer"]
        groups = [{"params": list(model.parameters()), "name": "all"}]
        arguments["optimizer"] = torch.optim.SGD(split_params_into_different_moe_groups_for_optimizer(groups), lr=0.5)
    engine, *_ = ds_fsmoe.initialize(config=config, **arguments)
    loss, _ = engine(*batch(0, rank, torch.float32))
    engine.backward(loss)
    engine.step()
    return engine, model


def replaced_gate_is_trained(rank: int, world_size: int) -> dict[str, bool]:
    registry.register_gate("scaled")(ScaledGate)
    trained = {}
    for stage in (0, 1, 2):
        for optimizer in ("by config", "by the client"):
            engine, model = train(rank, Case(ep_size=2, stage=stage), optimizer, {"type": "scaled", "k": 2})
            gate = model.moes[0].deepspeed_moe.gate
            assert type(gate) is ScaledGate
            assert "deepspeed_moe.gate.scale" in model.moes[0].state_dict()
            assert gate.settings.k == 2
            assert gate.settings.capacity_factor == 1.25  # left out of the block, so it stays the layer's
            trained[f"stage {stage}, optimizer {optimizer}"] = gate.scale.item() != 1.5
            engine.destroy()
    return trained


def test_a_replaced_gate_is_trained_whoever_made_the_optimizer(tmp_path: Path) -> None:
    seen = run_on_ranks(replaced_gate_is_trained, 2, tmp_path)
    assert seen[0] == seen[1]
    assert len(seen[0]) == 6
    assert all(seen[0].values()), seen[0]


def settings_of_the_own_gate(rank: int, world_size: int) -> tuple:
    engine, model = train(rank, Case(ep_size=2, stage=1), "by config", {"k": 2, "capacity_factor": 0.5})
    moe = model.moes[0].deepspeed_moe
    return moe.gate.k, moe.gate.capacity_factor, moe.gate.min_capacity, engine.fsmoe.chosen()["gate"]


def test_settings_left_out_stay_those_of_the_layer(tmp_path: Path) -> None:
    for seen in run_on_ranks(settings_of_the_own_gate, 2, tmp_path):
        assert seen == (2, 0.5, 4, "topk, k = 2, capacity factor 0.5")


class ExpertishGate(ScaledGate):
    def build(self, model_dim: int, num_experts: int) -> None:
        super().build(model_dim, num_experts)
        self.register_buffer("expert_bias", torch.zeros(num_experts))


def test_a_gate_that_deepspeed_could_not_save_is_refused(monkeypatch) -> None:
    monkeypatch.setitem(registry._PARTS["gate"], "expertish", ExpertishGate)
    block = read_block({"fsmoe": {"enabled": True, "gate": {"type": "expertish"}}})
    layer = SmallModel(Case(), rank=0).moes[0]
    with pytest.raises(LayerError, match="has a parameter or buffer 'expert_bias'"):
        convert(layer, choose_parts(block, "cpu"), block.gate)


class CallersGate(deepspeed.moe.sharded_moe.TopKGate):
    """A user's own subclass of stock's gate: everything to expert 1."""

    def forward(self, input, used_token=None, sparse_routes=False, use_tutel=False):
        tokens = torch.arange(input.shape[0])
        weights = torch.softmax(input.float() @ self.wg.weight.float().t(), dim=1)[:, 1]
        counts = torch.tensor([0, input.shape[0], 0, 0])
        return weights.sum() * 0, input.shape[0], 4, torch.ones_like(tokens)[None], tokens[None], weights[None], counts


def own_gate_class_is_kept(rank: int, world_size: int) -> tuple[str, bool, list[int]]:
    outputs = []
    for initialize, blocks in ((deepspeed.initialize, {}), (ds_fsmoe.initialize, {"fsmoe": {"enabled": True}})):
        case = Case(ep_size=2, stage=1)
        model = SmallModel(case, rank)
        for moe in model.moes:
            moe.deepspeed_moe.gate.__class__ = CallersGate
        engine, *_ = initialize(model=model, model_parameters=list(model.parameters()), config=case.ds_config(**blocks))
        outputs.append(engine(*batch(0, rank, torch.float32))[1])
        engine.destroy()
    inner = model.moes[0].deepspeed_moe
    return type(inner.gate).__name__, torch.equal(*outputs), inner.exp_counts.tolist()


def test_a_users_own_subclass_of_stocks_gate_keeps_its_say(tmp_path: Path) -> None:
    for seen in run_on_ranks(own_gate_class_is_kept, 2, tmp_path):
        assert seen == ("CallersGate", True, [0, 21, 0, 0])


def test_a_gate_block_is_refused_where_it_would_not_reach_the_gate() -> None:
    layers = {"h.0": SmallModel(Case(), rank=0).moes[0]}
    layers["h.0"].deepspeed_moe.gate.__class__ = CallersGate
    check_layers(layers, None)
    with pytest.raises(LayerError, match=r"h\.0 has its own gate, a CallersGate, which fsmoe\.gate would not change"):
        check_layers(layers, read_block({"fsmoe": {"enabled": True, "gate": {"k": 2}}}).gate)


class WrappedGate(nn.Module):
    """A user's module around stock's gate, as one that logs would be."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def _set_ep_group(self, group) -> None:
        self.inner._set_ep_group(group)

    def forward(self, *args):
        return self.inner(*args)


def wrapped_gate_gets_its_group(rank: int, world_size: int) -> bool:
    outputs = []
    for initialize, blocks in ((deepspeed.initialize, {}), (ds_fsmoe.initialize, {"fsmoe": {"enabled": True}})):
        case = Case(ep_size=2, stage=1, k=2, drop_tokens=False)
        model = SmallModel(case, rank)
        for moe in model.moes:
            moe.deepspeed_moe.gate = WrappedGate(moe.deepspeed_moe.gate)
        config = case.ds_config(**blocks)
        engine, *_ = initialize(model=model, model_parameters=list(model.parameters()), config=config)
        torch.manual_seed(rank)
        outputs.append(engine(*batch(0, rank, torch.float32))[1])
        engine.destroy()
    return torch.equal(*outputs)


def test_a_wrapped_gate_agrees_with_the_other_ranks_on_the_capacity(tmp_path: Path) -> None:
    assert all(run_on_ranks(wrapped_gate_gets_its_group, 2, tmp_path))
