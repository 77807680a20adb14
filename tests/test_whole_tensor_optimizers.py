# SPDX-License-Identifier: Apache-2.0
"""Optimizers that see whole tensors are found by trying, and named in one warning at start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_fsmoe.engine.optimizer_groups import depends_on_others
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


class Sign(torch.optim.Optimizer):
    """Lion's kind: takes options that it has no name for."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"lr": 1e-3} | options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                each.add_(each.grad.sign(), alpha=-group["lr"])


def adafactor_of_transformers(parameters: Any) -> torch.optim.Optimizer:
    return pytest.importorskip("transformers").optimization.Adafactor(parameters, lr=1e-3, relative_step=False)


ELEMENTWISE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda given: torch.optim.Adam(given, lr=1e-3, amsgrad=True),
    "adamw": lambda given: torch.optim.AdamW(given, lr=0.0),  # a warm-up begins so
    "foreach": lambda given: torch.optim.AdamW(given, foreach=True),
    "fused": lambda given: torch.optim.AdamW(given, fused=True),
    "adagrad": lambda given: torch.optim.Adagrad(given),
    "rmsprop": lambda given: torch.optim.RMSprop(given, centered=True, momentum=0.5),
    "rprop": lambda given: torch.optim.Rprop(given),
    "nadam": lambda given: torch.optim.NAdam(given),
    "sign": lambda given: Sign(given),
    "at random": lambda given: AtRandom(given, lr=0.1),
}
OF_WHOLE_TENSORS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "lamb": lambda given: Lamb(given),
    "adafactor": lambda given: torch.optim.Adafactor(given),
    "adafactor of transformers": adafactor_of_transformers,
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
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_optimizer_that_treats_elements_by_themselves_is_found_to_do_so(name: str, is_flat: bool) -> None:
    assert not tried(ELEMENTWISE[name], is_flat)


@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize("name", OF_WHOLE_TENSORS)
def test_an_optimizer_that_sees_whole_tensors_is_found_to_do_so(name: str, is_flat: bool) -> None:
    assert tried(OF_WHOLE_TENSORS[name], is_flat)


def test_muon_is_tried_with_matrices_and_is_right_for_stacked_experts() -> None:
    muon = pytest.importorskip("deepspeed.runtime.zero.muon.muon_optimizer")
    options = {"use_muon": True, "lr": 0.02, "momentum": 0.9, "weight_decay": 0.0, "ns_method": "gram"}
    assert not tried(lambda given: muon.MuonWithAuxAdam([given[0] | options]), is_flat=False)


def said_at_start(rank: int, world_size: int, jobs: list[tuple[str, int]]) -> list[list[str]]:
    """The warnings and notes of each job that are about its optimizer."""
    import logging

    import ds_fsmoe
    from tests.hf_families import model_of
    from tests.test_hugging_face import ds_config

    made = ELEMENTWISE | OF_WHOLE_TENSORS | {"lbfgs": torch.optim.LBFGS}
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    logging.getLogger("ds_fsmoe").addHandler(handler)
    logging.getLogger("ds_fsmoe").setLevel(logging.DEBUG)
    found = []
    for name, stage in jobs:
        model = model_of("mixtral")
        config = ds_config(stage, ep_size=1 if name == "lamb, not spread" else 2)
        del config["optimizer"]
        optimizer = made[name.split(",")[0]](model.parameters())
        lines.clear()
        engine, *_ = ds_fsmoe.initialize(model=model, optimizer=optimizer, config=config)
        found.append([each for each in lines if "element" in each])
        engine.destroy()
    return found


def test_one_warning_on_the_first_rank_names_the_optimizer_and_what_to_do(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    jobs = [("lamb", 0), ("adafactor", 1), ("adamw", 0), ("lamb, not spread", 0)]
    first, second = run_on_ranks(said_at_start, 2, tmp_path, jobs)
    assert [len(each) for each in first] == [1, 1, 0, 0]
    assert second == [[], [], [], []]
    assert first[0][0].startswith(
        "WARNING tests.test_whole_tensor_optimizers.Lamb trains experts differently than stock"
    )
    assert "a rank has its own experts only" in first[0][0]
    assert '"ep_size": 1' in first[0][0]
    assert "flat partitions" in first[1][0]
    assert "ep_size" not in first[1][0]
