# SPDX-License-Identifier: Apache-2.0
"""Experts that break their law are named, with the layer they are in: a change of shape always, the rest if asked.

So are widths that do not fit, in a layer by hand and in an engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from tests.samples import sampled
from tests.small_model import Case, SmallModel, batch

CASE = Case(1, 0, "fp32", 1, 2, True)


class Forgets(nn.Module):
    """Its last row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[..., :-1, :]


class Centers(nn.Module):
    """Takes the mean of all rows out of each."""

    def __init__(self, like: nn.Module) -> None:
        super().__init__()
        self.inner = like

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) - x.mean(dim=-2, keepdim=True)


def with_dropout(expert: nn.Module) -> nn.Module:
    return nn.Sequential(expert, nn.Dropout(0.5))


def with_both(expert: nn.Module) -> nn.Module:
    return Centers(with_dropout(expert))


def good(expert: nn.Module) -> nn.Module:
    return expert


def trained(
    rank: int, change: Callable[[nn.Module], nn.Module], block: dict[str, Any], on_rank: int | None
) -> dict[str, Any]:
    """Three steps; the second expert of the second layer is changed, on every rank or on one."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("ds_fsmoe").addHandler(handler)
    model = SmallModel(CASE, 0)
    config = CASE.ds_config(fsmoe={"enabled": True, **block})
    engine, *_ = ds_fsmoe.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    experts = model.moes[1].deepspeed_moe.experts.deepspeed_experts
    if on_rank in (None, rank):
        experts[1] = change(experts[1])
    found: dict[str, Any] = {"error": "", "calls": 0}

    def count(*_: Any) -> None:
        found["calls"] += 1

    experts[0].register_forward_hook(count)
    engine.eval()
    engine(*batch(0, rank, torch.float32))
    engine.train()
    losses = []
    torch.manual_seed(rank)
    for step in range(3):
        found["calls"] = 0
        try:
            loss, _ = engine(*batch(step, rank, torch.float32))
        except Exception as error:
            found["error"] = f"{type(error).__name__}: {error}"
            break
        found.setdefault("calls of each step", []).append(found["calls"])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    logging.getLogger("ds_fsmoe").removeHandler(handler)
    engine.destroy()
    words = ("row-wise", "run in one chunk", "runs in one chunk")
    return found | {"said": [each for each in said if any(word in each for word in words)], "losses": losses}


CHECKED = {"debug": {"check_experts": True}}


def in_chunks(forward: int, backward: int, **others: Any) -> dict[str, Any]:
    return {"pipeline_degree": {"forward": forward, "backward": backward}, **others}


RUNS: dict[str, tuple[Callable[[nn.Module], nn.Module], dict[str, Any], int | None]] = {
    "centers": (Centers, CHECKED, None),
    "one rank centers": (Centers, CHECKED, 1),
    "nobody asks": (Centers, {}, None),
    "good": (good, CHECKED, None),
    "good, nobody asks": (good, {}, None),
    "dropout in chunks": (with_dropout, in_chunks(3, 2, **CHECKED), None),
    "dropout and centers": (with_both, in_chunks(2, 2, **CHECKED), None),
}


def train_all(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    return {name: trained(rank, *run) for name, run in RUNS.items()}


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    return run_on_ranks(train_all, 2, tmp_path_factory.mktemp("ranks"))


def test_an_expert_that_looks_at_other_rows_is_named_with_its_layer(of_ranks: list) -> None:
    for found in of_ranks:
        for name in ("centers", "dropout and centers"):
            assert found[name]["error"].startswith(
                "LayerError: moes.1: expert 1: expert Centers is not row-wise: a row"
            )
            assert found[name]["losses"] == []


def test_all_ranks_raise_if_one_has_to(of_ranks: list) -> None:
    for found in of_ranks:
        error = found["one rank centers"]["error"]
        assert error.startswith("DisagreementError: the ranks disagree about whether experts are row-wise")
        assert "experts of moes.1: rank 0: 'row-wise'; rank 1: 'moes.1: expert 1: expert Centers" in error


def test_nobody_looks_unless_asked(of_ranks: list) -> None:
    for found in of_ranks:
        assert found["nobody asks"]["error"] == ""
        assert len(found["nobody asks"]["losses"]) == 3
        assert found["nobody asks"]["calls of each step"] == [1, 1, 1]


def test_good_experts_are_tried_once_and_nothing_else_changes(of_ranks: list) -> None:
    for found in of_ranks:
        checked, unchecked = found["good"], found["good, nobody asks"]
        assert checked["error"] == unchecked["error"] == ""
        assert checked["losses"] == unchecked["losses"]
        assert checked["said"] == []
        first, *later = checked["calls of each step"]
        assert first > 1
        assert later == [1, 1]


def test_dropout_is_no_error_where_it_would_be_wrong_in_chunks_for_it_is_not_cut(of_ranks: list) -> None:
    said = "moes.1 runs in one chunk (expert 1: 1, a Dropout, draws random numbers, and in chunks it would draw others)"
    for rank, found in enumerate(of_ranks):
        assert found["dropout in chunks"]["error"] == ""
        assert found["dropout in chunks"]["said"] == ([said] if rank == 0 else [])


@sampled("block", [{}, in_chunks(3, 2), CHECKED], ids=str)
def test_an_expert_that_changes_the_number_of_rows_is_named_without_being_asked(block: dict, tmp_path: Path) -> None:
    def error_of(found: dict[str, Any]) -> str:
        return found["error"].split("\n")[0]

    (found,) = run_on_ranks(evaluated, 1, tmp_path, block)
    assert "moes.1: expert 1: expert Forgets returned (" in error_of(found)
    assert error_of(found).endswith("an expert must return a row of the same width for every row")


def evaluated(rank: int, world_size: int, block: dict[str, Any]) -> dict[str, Any]:
    """The error of one forward in training."""
    model = SmallModel(CASE, 0)
    config = CASE.ds_config(fsmoe={"enabled": True, **block})
    engine, *_ = ds_fsmoe.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    model.moes[1].deepspeed_moe.experts.deepspeed_experts[1] = Forgets()
    with pytest.raises(ValueError, match="expert") as caught:
        engine(*batch(0, rank, torch.float32))
    return {"error": str(caught.value)}


# ---- widths


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
