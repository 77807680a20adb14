# SPDX-License-Identifier: Apache-2.0
"""Widths that do not fit are named with the layer, M and the shape, by hand and in an engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import ds_fsmoe
from ds_fsmoe import (
    DenseOrder,
    GPTFeedForward,
    LayerError,
    LinearGate,
    MixtralFeedForward,
    MOELayer,
    SimpleOrder,
    SoftMoEGate,
)
from tests.ranks import run_on_ranks
from tests.small_model import Case, SmallModel


def two(first: int, hidden: int, second: int, last: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(first, hidden), nn.ReLU(), nn.Linear(second, last))


@pytest.mark.parametrize(
    ("expert", "words"),
    [
        (nn.Linear(4, 16), "does not accept rows of shape [1, 1, 16]: "),
        (two(16, 32, 32, 8), "returned [1, 1, 8] for [1, 1, 16]"),
        (two(16, 32, 33, 16), "does not accept rows of shape [1, 1, 16]"),
        (GPTFeedForward(8, 32), "does not accept rows of shape [1, 1, 16]"),
        (MixtralFeedForward(8, 32), "does not accept rows of shape [1, 1, 16]"),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, nn.Module) else "",
)
@pytest.mark.parametrize("degree", [1, 2])
def test_an_expert_of_another_width_is_named(expert: nn.Module, words: str, degree: int) -> None:
    layer = MOELayer(
        LinearGate(k=2), SimpleOrder(), model_dim=16, num_experts=4, expert_impl=expert, pipeline_degree=degree
    )
    with pytest.raises(LayerError) as caught:
        layer(torch.randn(3, 5, 16))
    assert str(caught.value).startswith(f"MOELayer: expert 0, a {type(expert).__name__}, {words}")
    assert str(caught.value).endswith("must return a row of the layer's width, M = 16, for every row")


@pytest.mark.parametrize(("gate", "order"), [(LinearGate, SimpleOrder), (SoftMoEGate, DenseOrder)])
@pytest.mark.parametrize("shape", [(3, 5, 6), (3, 32), ()], ids=str)
def test_an_input_of_another_width_is_named(gate: type, order: type, shape: tuple[int, ...]) -> None:
    layer = MOELayer(gate(), order(), model_dim=16, num_experts=4, expert_dim=8)
    with pytest.raises(LayerError) as caught:
        layer(torch.randn(shape))
    assert str(caught.value) == f"MOELayer: its input has shape {list(shape)}: must be [..., M = 16]"


@pytest.mark.parametrize("degree", [1, 2])
def test_an_expert_that_autograd_runs_is_named_with_the_rows_it_had(degree: int) -> None:
    layer = MOELayer(
        *(LinearGate(k=2), SimpleOrder()),
        model_dim=16,
        num_experts=4,
        expert_impl=nn.Linear(16, 8),
        pipeline_degree=degree,
    )
    with pytest.raises(
        ValueError, match=r"^MOELayer: expert 0: expert Linear returned \(\d, \d, 8\) for \(\d, \d, 16\): an expert"
    ):
        layer(torch.randn(3, 5, 16))


class Failing(nn.Linear):
    """Fails for another reason, which stays what it is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the disk is on fire")


def test_another_failure_of_an_expert_is_left_as_it_is() -> None:
    layer = MOELayer(LinearGate(k=2), SimpleOrder(), model_dim=16, num_experts=4, expert_impl=Failing(16, 16))
    with pytest.raises(RuntimeError, match=r"^the disk is on fire"):
        layer(torch.randn(3, 16))


def errors_in_an_engine(rank: int, world_size: int) -> list[str]:
    case = Case(ep_size=2, stage=1)
    found = []
    for is_input in (True, False):
        model = SmallModel(case, rank)
        width = model.moes[1].deepspeed_moe.gate.wg.in_features
        if not is_input:
            model.moes[1].deepspeed_moe.experts.deepspeed_experts[0] = nn.Linear(width, width + 1)
        for parameter in model.moes[1].deepspeed_moe.experts.parameters():
            parameter.allreduce, parameter.group_name = False, "ep_size_2"
        config = case.ds_config(fsmoe={"enabled": True, "ops": "reference"})
        engine, *_ = ds_fsmoe.initialize(model=model, model_parameters=model.parameters(), config=config)
        with pytest.raises(ValueError, match=r"^moes\.1: ") as caught:
            engine.module.moes[1](torch.randn(7, width + is_input))
        found.append(str(caught.value))
    return found


def test_in_an_engine_the_layer_is_named_by_its_path(tmp_path: Path) -> None:
    for of_input, of_expert in run_on_ranks(errors_in_an_engine, 2, tmp_path):
        assert of_input.startswith("moes.1: its input has shape [7, ")
        assert of_expert.startswith("moes.1: expert 0: expert Linear returned (")
