# SPDX-License-Identifier: Apache-2.0
"""Batches that are not equally large on all ranks: named in words where they cannot be exchanged, else no matter."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch

from tests.ranks import run_on_ranks
from tests.small_model import Case, batch, small_engine

SIZES = (2, 0)
"""Samples of rank 1, where rank 0 has three."""


def make(rank: int, case: Case) -> Any:
    return small_engine(case, rank, {"ops": "reference", "pipeline_degree": {"forward": 2}})


def outcome(engine: Any, rank: int, size: int, is_training: bool = True) -> str:
    """Of a forward, and a step where that is trained."""
    engine.train(is_training)
    inputs = [each[: size if rank % 2 else None] for each in batch(0, rank, torch.float32)]
    try:
        loss = engine(*inputs)[0]
        if is_training:
            engine.backward(loss)
            engine.step()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "goes on"


def unequal(rank: int, world_size: int) -> None:
    for size, is_training in itertools.product(SIZES, (True, False)):
        engine = make(rank, Case(2, k=2))
        said = outcome(engine, rank, size, is_training)
        assert said.startswith("DisagreementError: the ranks disagree about the batch size in moes.0")
        assert f"tokens: rank 0: '21'; rank 1: '{7 * size}'" in said
        assert "slots of each expert: rank 0: '" in said
        assert "drop_tokens = False" in said
        assert outcome(engine, rank, 3) == "goes on", (
            "whoever has caught it goes on with batches that are equally large"
        )
        engine.destroy()
    for case in (Case(2, drop_tokens=False), Case(1)):  # nothing is dropped, nothing is exchanged
        engine = make(rank, case)
        assert outcome(engine, rank, 2) == "goes on"
        engine.destroy()


def test_batches_of_different_sizes_are_named_before_anything_is_exchanged(tmp_path: Path) -> None:
    run_on_ranks(unequal, 2, tmp_path)
