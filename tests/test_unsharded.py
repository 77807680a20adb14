# SPDX-License-Identifier: Apache-2.0
"""With ``esp_size`` 2, too, a script fills experts by DeepSpeed's rule, and nothing of them is lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.moe.layer import MoE
from torch import nn

import ds_fsmoe
from ds_fsmoe.components.experts.gpt import GPTFeedForward
from ds_fsmoe.distributed.agreement import DisagreementError
from tests.hurry import hurry
from tests.logged import heard
from tests.ranks import run_on_ranks
from tests.samples import draw
from tests.small_model import EXPERTS, WIDTH, Case, SmallModel, small_engine, train_steps

STEPS = 2
CASE = Case(2, 1, "fp32", 1, 2, moe_options=(("top2_2nd_expert_sampling", False),), expert="gpt")
CUT = {"esp_size": 2, "pipeline_degree": {"forward": 3, "backward": 2}}
NEIGHBOURS = {"use_data_before_expert_parallelism": True}
SHARDS = r"because a rank holds shards of experts with fsmoe\.expert_tensor_parallel_size = 2"
WRONG_RULE = "before initialize(); others are lost"


class Marked(GPTFeedForward):
    """An expert with a buffer of its own."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 28, activation="relu")
        self.register_buffer("mark", torch.zeros(3, dtype=torch.bfloat16))


def filled(rank: int, case: Case, moe_class: type = MoE) -> SmallModel:
    return SmallModel(case, rank, moe_class)


def drawn(rank: int, case: Case) -> SmallModel:
    """As a script leaves it that draws weights, by another seed on every rank."""
    model = SmallModel(case, rank)
    torch.manual_seed(rank)
    for layer in model.moes:
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.3)
    return model


def train(rank: int, engine: Any) -> list[float]:
    losses = train_steps(engine, rank, range(STEPS))
    engine.destroy()
    return losses


Losses = tuple[list[float], list[float]]
"""Those of stock's layers, and of ours."""


def from_stocks_checkpoint(rank: int, folder: str) -> Losses:
    stock = small_engine(CASE, rank, None, drawn(rank, CASE))
    stock.save_checkpoint(folder, "stock")
    cut = small_engine(CASE, rank, CUT, drawn(rank + 9, CASE))
    assert cut.load_checkpoint(folder, "stock", load_module_only=True)[0] is not None
    return train(rank, stock), train(rank, cut)


def in_both(make: Callable[..., SmallModel], case: Case = CASE, **of_ours: Any) -> Callable[[int, str], Losses]:
    def losses(rank: int, folder: str) -> Losses:
        ours = small_engine(case, rank, CUT, make(rank, case, **of_ours))
        return train(rank, small_engine(case, rank, None, make(rank, case))), train(rank, ours)

    return losses


def neighbours_share_data(rank: int, folder: str) -> Losses:
    """In this order of the ranks DeepSpeed's rule is another, and its numbers are the same."""
    stock = train(rank, small_engine(CASE, rank))
    return stock, train(rank, small_engine(CASE, rank // 2, CUT, **NEIGHBOURS))


WAYS: dict[str, Callable[[int, str], Losses]] = {
    "drawn": in_both(drawn),
    "bf16, in our class": in_both(filled, replace(CASE, dtype="bf16"), moe_class=ds_fsmoe.MoE),
    "drawn, every expert on every rank": in_both(drawn, replace(CASE, ep_size=1)),
    "neighbours share data": neighbours_share_data,
    "stock's checkpoint": from_stocks_checkpoint,
}


def train_in_both(rank: int, world_size: int, folder: str, ways: list[str]) -> None:
    hurry()
    listening = heard()
    for way in ways:
        stocks, ours = WAYS[way](rank, folder)
        assert ours == pytest.approx(stocks, rel=2e-2 if "bf16" in way else 2e-6), way
        assert stocks[0] != stocks[1]
    assert not [each for each in listening.lines if WRONG_RULE in each]


def test_sharded_experts_begin_as_stocks_whether_filled_drawn_or_loaded(tmp_path: Path) -> None:
    run_on_ranks(train_in_both, 4, tmp_path / "ranks", str(tmp_path / "saved"), draw("begins", list(WAYS), 2))


def look(rank: int, world_size: int) -> None:
    hurry()
    EXPERTS["marked"] = Marked
    marked = replace(CASE, expert="marked")

    def expert_of(model: SmallModel, layer: int, index: int) -> nn.Module:
        return model.moes[layer].deepspeed_moe.experts.deepspeed_experts[index]

    model = SmallModel(marked, rank)
    for index in range(2):
        expert_of(model, 0, index).mark.fill_(2 * (rank % 2) + index)
    engine = small_engine(marked, rank, CUT, model)
    for index in range(2):  # buffers go with their experts
        assert expert_of(engine.module, 0, index).mark.tolist() == [2.0 * (rank // 2) + index] * 3
    kept = {name: each.clone() for name, each in engine.module.state_dict().items()}
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=SHARDS) as told:
            engine.module.load_state_dict(SmallModel(marked, rank).state_dict(), strict=strict)
        assert str(told.value).count("a rank holds shards") == len(model.moes)
    engine.module.load_state_dict(kept)
    engine.destroy()

    listening = heard()
    small_engine(CASE, rank // 2, CUT).destroy()
    warned = [each.partition(":")[0] for each in listening.lines if WRONG_RULE in each]
    assert warned == (["moes.0", "moes.1"] if rank == 0 else [])

    model = SmallModel(CASE, rank)
    expert_of(model, 1, 1).requires_grad_(rank % 2 == 1)
    with pytest.raises(DisagreementError, match=r"moes\.1: frozen parameters of expert 1"):
        small_engine(CASE, rank, CUT, model)
    model = SmallModel(marked, rank)
    if rank == 3:
        expert_of(model, 0, 0).mark = torch.zeros(4)
    with pytest.raises(DisagreementError, match=r"moes\.0: buffers of expert 0"):
        small_engine(CASE, rank, CUT, model)


def test_what_cannot_be_handed_on_is_said_and_the_rest_is(tmp_path: Path) -> None:
    run_on_ranks(look, 4, tmp_path)
