# SPDX-License-Identifier: Apache-2.0
"""Optimizers that see whole tensors are found by trying, and named in one warning at start."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_fsmoe.engine.optimizer_groups import depends_on_others
from tests.logged import heard
from tests.ranks import run_on_ranks


class Lamb(torch.optim.Optimizer):
    """Scales the update of a tensor by its norm."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                moment = self.state[each].setdefault("moment", torch.zeros_like(each))
                update = moment.lerp_(each.grad, 0.1).sign() + group["weight_decay"] * each
                each.add_(update, alpha=-group["lr"] * (each.norm() / update.norm()).item())


class Guess(torch.optim.Optimizer):
    """Estimates a scale from all that it has seen, as Prodigy does: nothing tells in the first step."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"lr": 1.0} | options)
        self.scale = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        every = [each for group in self.param_groups for each in group["params"]]
        for each in every:
            each.sub_(each.grad * self.scale)
        self.scale = max(each.grad.norm().item() for each in every)


class AtRandom(torch.optim.SGD):
    """Moves elements at random."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                each.add_(torch.randn_like(each))


ELEMENTWISE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adamw": lambda given: torch.optim.AdamW(given, lr=0.0),  # a warm-up begins so
    "foreach": lambda given: torch.optim.AdamW(given, foreach=True),
    "fused": lambda given: torch.optim.AdamW(given, fused=True),
    "rmsprop": lambda given: torch.optim.RMSprop(given, centered=True, momentum=0.5),
    "rprop": lambda given: torch.optim.Rprop(given),
    "at random": lambda given: AtRandom(given, lr=0.1),
}
OF_WHOLE_TENSORS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "lamb": lambda given: Lamb(given),
    "adafactor": lambda given: torch.optim.Adafactor(given),
    "guess": lambda given: Guess(given),
}


def tried(make: Callable[..., torch.optim.Optimizer], is_flat: bool) -> bool:
    weight = torch.nn.Parameter(torch.randn(4, 3, 3))
    optimizer = make([{"params": [weight], "moe": True, "name": "ep_size_2"}])
    before, seed = str(optimizer.state_dict()), torch.random.get_rng_state()
    found = depends_on_others(optimizer, optimizer.param_groups[0], is_flat, torch.device("cpu"))
    assert str(optimizer.state_dict()) == before
    assert weight.grad is None
    assert torch.equal(seed, torch.random.get_rng_state())
    return found


@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize("name", [*ELEMENTWISE, *OF_WHOLE_TENSORS])
def test_an_optimizer_is_found_to_treat_elements_by_themselves_or_to_see_whole_tensors(
    name: str, is_flat: bool
) -> None:
    assert tried((ELEMENTWISE | OF_WHOLE_TENSORS)[name], is_flat) == (name in OF_WHOLE_TENSORS)


def test_muon_is_tried_with_matrices_and_is_right_for_stacked_experts() -> None:
    muon = pytest.importorskip("deepspeed.runtime.zero.muon.muon_optimizer")
    options = {"use_muon": True, "lr": 0.02, "momentum": 0.9, "weight_decay": 0.0, "ns_method": "gram"}
    assert not tried(lambda given: muon.MuonWithAuxAdam([given[0] | options]), is_flat=False)


def said_at_start(rank: int, world_size: int, jobs: list[tuple[str, int, int]]) -> list[list[str]]:
    """The warnings and notes of each job that are about its optimizer."""
    import ds_fsmoe
    from tests.hf_families import model_of
    from tests.sgd_engines import ds_config

    said = heard(names_level=True)
    logging.getLogger("ds_fsmoe").setLevel(logging.DEBUG)
    found = []
    for name, stage, ep_size in jobs:
        model = model_of("mixtral")
        config = ds_config(stage, ep_size=ep_size)
        del config["optimizer"]
        optimizer = (ELEMENTWISE | OF_WHOLE_TENSORS)[name](model.parameters())
        said.lines.clear()
        ds_fsmoe.initialize(model=model, optimizer=optimizer, config=config)[0].destroy()
        found.append([each for each in said.lines if "element" in each])
    return found


def test_one_warning_on_the_first_rank_names_the_optimizer_and_what_to_do(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    jobs = [("lamb", 0, 2), ("adafactor", 1, 2), ("adamw", 0, 2), ("lamb", 0, 1)]
    first, second = run_on_ranks(said_at_start, 2, tmp_path, jobs)
    assert [len(each) for each in first] == [1, 1, 0, 0]
    assert second == [[], [], [], []]
    assert first[0][0].startswith(
        "WARNING: tests.test_whole_tensor_optimizers.Lamb trains experts differently than stock"
    )
    assert "a rank has its own experts only" in first[0][0]
    assert '"ep_size": 1' in first[0][0]
    assert "flat partitions" in first[1][0]
    assert "ep_size" not in first[1][0]
