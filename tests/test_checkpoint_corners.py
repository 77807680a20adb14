# SPDX-License-Identifier: Apache-2.0
"""Corners of saving and loading in which something could get lost."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ds_fsmoe.checkpoint_files.pieces import MASTER
from ds_fsmoe.checkpoint_files.tags import CheckpointError
from ds_fsmoe.checkpoint_files.whole import Whole
from ds_fsmoe.cli import main
from tests.hurry import hurry
from tests.ranks import run_on_ranks
from tests.small_model import Case, SmallModel, train_steps

pytestmark = pytest.mark.long

ADAM = {"type": "Adam", "params": {"lr": 0.02, "torch_adam": True}}


class Wrapped(nn.Module):
    """A model whose path has "expert" in it, with two names for one parameter."""

    def __init__(self, case: Case, rank: int) -> None:
        super().__init__()
        self.expert_part = SmallModel(case, rank)
        self.tied = self.expert_part.first

    def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.expert_part(*args)


def make(rank: int, case: Case, model_class: Any = SmallModel, scale: float = 1.0, **blocks: Any) -> Any:
    import ds_fsmoe

    model = model_class(case, rank)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    config = case.ds_config(**({"fsmoe": {"enabled": True}, "optimizer": ADAM, "gradient_clipping": 0.0} | blocks))
    return ds_fsmoe.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def train(engine: Any, rank: int, first: int, steps: int = 2) -> list[float]:
    torch.manual_seed(first)
    return train_steps(engine, rank, range(first, first + steps))


def keep_all(rank: int, world_size: int, folder: str) -> dict[str, bool]:
    hurry()
    found = {}
    # Weights under a path with "expert" in it, of a residual layer.
    case = Case(ep_size=2, stage=1, dtype="bf16", use_residual=True)
    engine = make(rank, case, Wrapped)
    train(engine, rank, 0)
    engine.save_checkpoint(f"{folder}/path")
    expected = train(engine, rank, 2)
    engine.destroy()
    engine = make(rank, case, Wrapped, scale=0.3)
    engine.load_checkpoint(f"{folder}/path")
    found["path"] = train(engine, rank, 2) == expected
    engine.destroy()
    # An optimizer without states, and weights alone where the optimizer has copies of its own.
    sgd = {"type": "SGD", "params": {"lr": 0.5}}
    engine = make(rank, Case(ep_size=2, k=2), optimizer=sgd)
    train(engine, rank, 0)
    engine.save_checkpoint(f"{folder}/sgd")
    engine.destroy()
    engine = make(rank, Case(ep_size=1, stage=1, k=2), scale=0.3, optimizer=sgd)
    engine.load_checkpoint(f"{folder}/sgd")
    engine.save_checkpoint(f"{folder}/sgd moved")
    engine.destroy()
    case = Case(ep_size=2, dtype="bf16", k=2)
    engine = make(rank, case, optimizer=sgd)
    engine.save_checkpoint(f"{folder}/weights", client_state={"a": np.float64(1), "b": Path("x"), "c": Namespace(d=1)})
    kept = engine.module.first.weight.detach().clone()
    engine.destroy()
    engine = make(rank, case, scale=0.3, optimizer={"type": "SGD", "params": {"lr": 0.0}})
    _, state = engine.load_checkpoint(f"{folder}/weights", load_optimizer_states=False)
    train(engine, rank, 0)
    found["weights"] = torch.equal(engine.module.first.weight, kept)
    found["state"] = state["a"] == 1 and state["b"] == Path("x") and state["c"].d == 1
    engine.load_universal_checkpoint = lambda: True
    with pytest.raises(CheckpointError, match=r"load_universal = true"):
        engine.load_checkpoint(f"{folder}/weights")
    engine.destroy()
    return found


def test_nothing_is_lost_in_corners(tmp_path: Path) -> None:
    for found in run_on_ranks(keep_all, 2, tmp_path / "ranks", str(tmp_path / "saved")):
        assert all(found.values()), found
    saved = tmp_path / "saved"
    was, now = (Whole(saved / name / "global_step2") for name in ("sgd", "sgd moved"))
    for name in was.names():
        assert torch.equal(was.weights(name), now.part(name, MASTER)), name
    # Both names of a tied parameter have the optimizer's digits.
    assert main(["convert", str(saved / "path"), str(tmp_path / "fp32"), "--to", "fp32"]) == 0
    from safetensors.torch import load_file

    found = load_file(tmp_path / "fp32" / "model.safetensors")
    assert torch.equal(found["tied.weight"], found["expert_part.first.weight"])
    assert not torch.equal(found["tied.weight"], found["tied.weight"].bfloat16().float())
