# SPDX-License-Identifier: Apache-2.0
""" "expert" in the name of what is no expert's: saved, gone on from, moved and converted like any other parameter."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_fsmoe.cli import main
from tests.hurry import hurry
from tests.ranks import run_on_ranks
from tests.small_model import EXPERTS, WIDTH, Case, FeedForward, SmallModel
from tests.test_checkpoint_corners import make, train

pytestmark = pytest.mark.long


LOCAL = re.compile(r"(\.deepspeed_experts\.)(\d+)")


class Scaled(nn.Linear):
    """A gate's own projection, with a parameter and a buffer of such names."""

    def __init__(self, old: nn.Linear) -> None:
        super().__init__(old.in_features, old.out_features, bias=False)
        self.weight = old.weight
        self.experts_scale = nn.Parameter(torch.ones(old.out_features))
        self.register_buffer("expert_counts", torch.zeros(old.out_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.expert_counts += self.training
        return super().forward(x) * self.experts_scale


class Named(FeedForward):
    """An expert, and in a residual layer what is computed beside them, with parameters and buffers of such names."""

    def __init__(self) -> None:
        super().__init__()
        self.expert_bias = nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("experts_seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.experts_seen += self.training
        return super().forward(x) + self.expert_bias


class ManyNames(SmallModel):
    def __init__(self, case: Case, rank: int) -> None:
        super().__init__(case, rank)
        for moe in self.moes:
            moe.deepspeed_moe.gate.wg = Scaled(moe.deepspeed_moe.gate.wg)
        self.shared_experts = nn.Linear(WIDTH, WIDTH)
        self.expert_bias = nn.Parameter(torch.zeros(WIDTH))
        nn.init.eye_(self.shared_experts.weight)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(self.shared_experts(x) + self.expert_bias, target)


def state_of(engine: Any) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in engine.module.state_dict().items()}


def go_on(rank: int, world_size: int, folder: str) -> None:
    hurry()
    EXPERTS["named"] = Named
    for stage in (0, 1, 2):
        case, place = Case(ep_size=2, stage=stage, k=2, use_residual=True, expert="named"), f"{folder}/{stage}"
        engine = make(rank, case, ManyNames)
        train(engine, rank, 0, 3)
        engine.save_checkpoint(place, "tag")
        right = state_of(engine)
        assert sum("expert" in name and "deepspeed_experts" not in name for name in right) >= 10
        straight = train(engine, rank, 3)
        engine.destroy()
        for ep_size in (2, 1):
            engine = make(rank, replace(case, ep_size=ep_size), ManyNames, scale=0.3)
            engine.load_checkpoint(place, "tag")
            found = state_of(engine)
            for name, value in right.items():
                # A rank that has all experts now has what one with its own had under a local number.
                there = LOCAL.sub(lambda at, e=ep_size: f"{at[1]}{int(at[2]) + (e == 1) * 2 * rank}", name)
                assert torch.equal(found[there], value), (stage, ep_size, name)
            again = train(engine, rank, 3)
            assert again == (straight if ep_size == 2 else pytest.approx(straight, rel=1e-5))
            engine.destroy()


def test_expert_in_the_names_of_gates_buffers_and_dense_modules_is_no_matter(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    run_on_ranks(go_on, 2, tmp_path / "ranks", str(saved))
    for form in ("fp32", "stock"):
        assert main(["convert", str(saved / "1" / "tag"), str(tmp_path / form), "--to", form]) == 0
    from safetensors.torch import load_file

    names = load_file(tmp_path / "fp32" / "model.safetensors").keys()
    of_gates = {"moes.0.deepspeed_moe.gate.wg.experts_scale", "moes.1.deepspeed_moe.gate.wg.expert_counts"}
    assert of_gates | {"moes.0.mlp.expert_bias", "shared_experts.weight", "expert_bias"} <= names
    run_on_ranks(load_stock, 2, tmp_path / "stock ranks", str(saved / "1"), str(tmp_path / "stock"))


def load_stock(rank: int, world_size: int, saved: str, converted: str) -> None:
    """Stock DeepSpeed loads what was saved and what was converted."""
    import deepspeed

    import ds_fsmoe

    EXPERTS["named"] = Named
    states, case, own = [], Case(ep_size=2, stage=1, k=2, use_residual=True, expert="named"), ds_fsmoe.initialize
    for initialize, folder in ((own, saved), (deepspeed.initialize, saved), (deepspeed.initialize, converted)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ds_fsmoe, "initialize", initialize)
            engine = make(rank, case, ManyNames, scale=0.3)
        engine.load_checkpoint(folder, "tag")
        states.append(state_of(engine))
        engine.destroy()
    for other in states[1:]:
        assert [name for name in other if not torch.equal(states[0][name], other[name])] == []
