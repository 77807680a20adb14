# SPDX-License-Identifier: Apache-2.0
"""Schedulers see the groups that a script has made, whoever makes them and when, and experts follow their groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

pytest.importorskip("transformers")

from tests.hf_families import batch, model_of
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.sgd_engines import ds_config

ONE_CYCLE = {
    "type": "OneCycle",
    "params": {
        "cycle_min_lr": [0.2, 0.05],
        "cycle_max_lr": [0.4, 0.1],
        "cycle_first_step_size": 2,
        "cycle_momentum": False,
        "decay_lr_rate": 0.1,
    },
}
COSINE = {"type": "WarmupCosineLR", "params": {"total_num_steps": 8, "warmup_num_steps": 2}}
FACTORS = [lambda step: 1 / (1 + step), lambda step: 0.5 + step]


def by_transformers(optimizer: Any) -> Any:
    from transformers import get_scheduler

    return get_scheduler("linear", optimizer, 1, 6)


def in_sequence(optimizer: Any) -> Any:
    first = lr_scheduler.LambdaLR(optimizer, FACTORS)
    return lr_scheduler.SequentialLR(optimizer, [first, lr_scheduler.ConstantLR(optimizer, 0.5)], [2])


def that_counts(optimizer: Any) -> Any:
    assert len(optimizer.param_groups) == 2
    return lr_scheduler.MultiplicativeLR(optimizer, [lambda step: 0.5, lambda step: 2.0])


MADE: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, FACTORS),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, [0.4, 0.1], total_steps=8),
    "sequence": in_sequence,
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, min_lr=[0.1, 0.02]),
    "counts": that_counts,
    "transformers": by_transformers,
}


def groups_of(model: torch.nn.Module, experts_first: bool) -> list[dict[str, Any]]:
    """Two groups with options of their own: with experts in the first, or of experts alone and of all else."""
    experts = [each for name, each in model.named_parameters() if ".experts." in name]
    others = [each for name, each in model.named_parameters() if ".experts." not in name]
    first, second = (experts, others) if experts_first else (experts + others[::2], others[1::2])
    return [{"params": first, "lr": 0.2, "weight_decay": 0.1}, {"params": second, "lr": 0.05, "weight_decay": 0.0}]


def trained(rank: int, world_size: int, block: dict[str, Any], stage: int, way: str, folder: str) -> Iterator[Any]:
    """Rates after each step, and weights at the end, of a run with a scheduler that is made in some way.

    ``way``: "config NAME", "experts NAME" (with experts alone in a group), "given NAME" (a function), "after NAME"
    (made for what initialize has returned), "hand" (options changed by hand), "resumed" (saved and read again).
    """
    import ds_fsmoe

    kind, _, name = way.partition(" ")
    resumes = kind == "resumed"
    for again in (False, True) if resumes else (False,):
        model = model_of("mixtral")
        groups = groups_of(model, kind == "experts")
        config = ds_config(stage) | {"fsmoe": block}
        given: dict[str, Any] = {"model_parameters": groups}
        if kind in ("config", "experts"):
            config["scheduler"] = {"OneCycle": ONE_CYCLE, "WarmupCosineLR": COSINE}[name]
        else:
            del config["optimizer"]
            given = {"optimizer": torch.optim.SGD(groups, lr=0.5, momentum=0.9)}
        if kind in ("given", "resumed"):
            given["lr_scheduler"] = MADE[name or "lambda"]
        engine, optimizer, _, scheduler = ds_fsmoe.initialize(model=model, config=config, **given)
        if again:
            engine.load_checkpoint(folder)
            yield engine.get_lr()
        if kind == "after":
            scheduler = MADE[name](optimizer)
        for step in range(3):
            x = batch(step, world_size)[rank : rank + 1]
            engine.backward(engine(input_ids=x, labels=x).loss)
            engine.step()
            if kind == "after":
                scheduler.step(*([1.0] if name == "plateau" else []))
            if kind == "hand" and step == 0:
                engine.optimizer.param_groups[0]["lr"] *= 0.1
                engine.optimizer.param_groups[0]["weight_decay"] = 0.3
            yield engine.get_lr()
        if scheduler is not None:
            yield list(scheduler.get_last_lr())
        if resumes and not again:
            engine.save_checkpoint(folder)
        yield {key: each.norm().item() for key, each in (ds_fsmoe.whole_state_dict(engine) or {}).items()}
        engine.destroy()


def compared(rank: int, world_size: int, stage: int, ways: list[str], folder: str) -> list[tuple[str, Any, Any]]:
    found = []
    for way in ways:
        stock, ours = (
            list(trained(rank, world_size, block, stage, way, f"{folder}/{name}"))
            for name, block in (("stock", {"enabled": False}), ("ours", {"enabled": True, "ep_size": 2}))
        )
        found.append((way, stock, ours))
    return found


GIVEN = ["config OneCycle", "config WarmupCosineLR", "experts OneCycle", "hand", "resumed"]
AT = [
    (0, ["config OneCycle", *(f"after {name}" for name in MADE if name != "counts")]),
    (1, [*GIVEN, *(f"given {name}" for name in MADE if name != "plateau")]),
    (2, ["experts OneCycle", "given lambda", "hand"]),
    (3, [*GIVEN, "given sequence"]),
]


@sampled(("stage", "ways"), AT)
def test_rates_and_weights_are_those_of_stock_with_a_value_or_a_function_for_each_group(
    stage: int, ways: list[str], tmp_path: Path
) -> None:
    for of_rank in run_on_ranks(compared, 2, tmp_path / "ranks", stage, ways, str(tmp_path)):
        assert [way for way, *_ in of_rank] == ways
        for way, stock, ours in of_rank:
            assert len(stock) == len(ours), way
            for wanted, found in zip(stock, ours, strict=True):
                assert found == pytest.approx(wanted, rel=2e-5, abs=1e-9), way
