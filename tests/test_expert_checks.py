# SPDX-License-Identifier: Apache-2.0
"""Experts that break their law are named, with the layer they are in: a change of shape always, the rest if asked."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

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
    rank: int, world_size: int, change: Callable[[nn.Module], nn.Module], block: dict[str, Any], on_rank: int | None
) -> dict[str, Any]:
    """Three steps; the second expert of the second layer is changed, on every rank or on one."""
    import ds_fsmoe

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
    words = ("row-wise", "run in one chunk", "runs in one chunk")
    return found | {"said": [each for each in said if any(word in each for word in words)], "losses": losses}


CHECKED = {"debug": {"check_experts": True}}


def in_chunks(forward: int, backward: int, **others: Any) -> dict[str, Any]:
    return {"pipeline_degree": {"forward": forward, "backward": backward}, **others}


def test_an_expert_that_looks_at_other_rows_is_named_with_its_layer(tmp_path: Path) -> None:
    for found in run_on_ranks(trained, 2, tmp_path, Centers, CHECKED, None):
        assert found["error"].startswith(
            "LayerError: moes.1: expert 1: expert Centers is not row-wise: a row of its result changes when other rows"
        )
        assert found["losses"] == []


def test_all_ranks_raise_if_one_has_to(tmp_path: Path) -> None:
    for found in run_on_ranks(trained, 2, tmp_path, Centers, CHECKED, 1):
        assert found["error"].startswith("DisagreementError: the ranks disagree about whether experts are row-wise")
        assert "experts of moes.1: rank 0: 'row-wise'; rank 1: 'moes.1: expert 1: expert Centers" in found["error"]


def test_nobody_looks_unless_asked(tmp_path: Path) -> None:
    for found in run_on_ranks(trained, 1, tmp_path, Centers, {}, None):
        assert found["error"] == ""
        assert len(found["losses"]) == 3
        assert found["calls of each step"] == [1, 1, 1]


def test_good_experts_are_tried_once_and_nothing_else_changes(tmp_path: Path) -> None:
    (checked,) = run_on_ranks(trained, 1, tmp_path / "checked", good, CHECKED, None)
    (unchecked,) = run_on_ranks(trained, 1, tmp_path / "unchecked", good, {}, None)
    assert checked["error"] == unchecked["error"] == ""
    assert checked["losses"] == unchecked["losses"]
    assert checked["said"] == []
    first, *later = checked["calls of each step"]
    assert first > 1
    assert later == [1, 1]


def test_dropout_is_no_error_where_it_would_be_wrong_in_chunks_for_it_is_not_cut(tmp_path: Path) -> None:
    (found,) = run_on_ranks(trained, 1, tmp_path, with_dropout, in_chunks(3, 2, **CHECKED), None)
    assert found["error"] == ""
    assert found["said"] == [
        "moes.1 runs in one chunk (expert 1: 1, a Dropout, draws random numbers, and in chunks it would draw others)"
    ]


def test_a_checked_expert_is_refused_though_another_one_has_dropout(tmp_path: Path) -> None:
    (found,) = run_on_ranks(trained, 1, tmp_path, with_both, in_chunks(2, 2, **CHECKED), None)
    assert found["error"].startswith("LayerError: moes.1: expert 1: expert Centers is not row-wise")


@sampled("block", [{}, in_chunks(3, 2), CHECKED], kept=[1], ids=str)
def test_an_expert_that_changes_the_number_of_rows_is_named_without_being_asked(block: dict, tmp_path: Path) -> None:
    def error_of(found: dict[str, Any]) -> str:
        return found["error"].split("\n")[0]

    (found,) = run_on_ranks(evaluated, 1, tmp_path, block)
    assert "moes.1: expert 1: expert Forgets returned (" in error_of(found)
    assert error_of(found).endswith("an expert must return a row of the same width for every row")


def evaluated(rank: int, world_size: int, block: dict[str, Any]) -> dict[str, Any]:
    """The error of one forward in training."""
    import ds_fsmoe

    model = SmallModel(CASE, 0)
    config = CASE.ds_config(fsmoe={"enabled": True, **block})
    engine, *_ = ds_fsmoe.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    model.moes[1].deepspeed_moe.experts.deepspeed_experts[1] = Forgets()
    with pytest.raises(ValueError, match="expert") as caught:
        engine(*batch(0, rank, torch.float32))
    return {"error": str(caught.value)}
