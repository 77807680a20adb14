# SPDX-License-Identifier: Apache-2.0
"""Corners of saving and loading in which something could get lost; ranks share the checksums of a checkpoint."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ds_fsmoe.checkpoint import saving
from ds_fsmoe.checkpoint_files import manifest
from ds_fsmoe.checkpoint_files.manifest import read_manifest, sum_of
from ds_fsmoe.checkpoint_files.pieces import MASTER
from ds_fsmoe.checkpoint_files.tags import CheckpointError
from ds_fsmoe.checkpoint_files.whole import Whole
from ds_fsmoe.cli import main
from tests.hurry import hurry
from tests.ranks import run_on_ranks
from tests.small_model import Case, SmallModel, scaled, small_engine, train_steps

pytestmark = pytest.mark.long

ADAM = {"type": "Adam", "params": {"lr": 0.02, "torch_adam": True}}


class Tied(SmallModel):
    """A model with two names for one parameter."""

    def __init__(self, case: Case, rank: int) -> None:
        super().__init__(case, rank)
        self.tied = self.first


def make(rank: int, case: Case, model_class: Any = SmallModel, scale: float = 1.0, **blocks: Any) -> Any:
    blocks = {"fsmoe": {}, "optimizer": ADAM, "gradient_clipping": 0.0} | blocks
    return small_engine(case, rank, blocks.pop("fsmoe"), scaled(model_class(case, rank), scale), **blocks)


def train(engine: Any, rank: int, first: int, steps: int = 2) -> list[float]:
    torch.manual_seed(first)
    return train_steps(engine, rank, range(first, first + steps))


def keep_all(rank: int, folder: str) -> dict[str, bool]:
    found = {}
    engine = make(rank, Case(ep_size=2, stage=1, dtype="bf16"), Tied)
    train(engine, rank, 0)
    engine.save_checkpoint(f"{folder}/tied")
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


SUMS, MERGES = "files summed up", "indices merged"


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """What this rank does within the block, by kind."""
    counts = Counter[str]({SUMS: 0, MERGES: 0})

    def counting(what: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def counted_act(*args: Any) -> Any:
            counts[what] += 1
            return act(*args)

        return counted_act

    with (
        patch.object(manifest, "sum_of", counting(SUMS, sum_of)),
        patch.object(saving, "merged", counting(MERGES, saving.merged)),
    ):
        yield counts


def save_and_load(rank: int, folder: str) -> dict[str, tuple[int, dict[str, int]]]:
    found: dict[str, tuple[int, dict[str, int]]] = {}
    for name, options in {"shared": {}, "of a node": {"checkpoint": {"use_node_local_storage": True}}}.items():
        engine = make(rank, Case(ep_size=2, stage=1, k=2), **options)
        train(engine, rank, 0)
        with counted() as counts:
            engine.save_checkpoint(f"{folder}/{name}", "tag")
        num_files = len(read_manifest(Path(folder) / name / "tag").files)
        found[f"save, {name}"] = num_files, counts
        with counted() as counts:
            engine.load_checkpoint(f"{folder}/{name}", "tag")
        found[f"load, {name}"] = num_files, counts
        engine.destroy()
    engine = make(rank, Case(ep_size=1, stage=2, k=2))
    with counted() as counts:
        engine.load_checkpoint(f"{folder}/shared", "tag")
    found["load, moved"] = found["load, shared"][0], counts
    engine.destroy()
    return found


def in_corners(rank: int, world_size: int, folder: str) -> tuple[dict[str, bool], dict[str, Any]]:
    hurry()
    return keep_all(rank, folder), save_and_load(rank, folder)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    root = tmp_path_factory.mktemp("corners")
    return root / "saved", run_on_ranks(in_corners, 2, root / "ranks", str(root / "saved"))


def test_nothing_is_lost_in_corners(found: tuple[Path, list[Any]], tmp_path: Path) -> None:
    saved, of_ranks = found
    for kept, _ in of_ranks:
        assert all(kept.values()), kept
    was, now = (Whole(saved / name / "global_step2") for name in ("sgd", "sgd moved"))
    for name in was.names():
        assert torch.equal(was.weights(name), now.part(name, MASTER)), name
    (states,) = (saved / "tied").glob("*/mp_rank_00_model_states.pt")
    shared = torch.load(states, weights_only=False)["shared_params"]
    assert shared == {"tied.weight": "first.weight", "tied.bias": "first.bias"}
    # Both names of a tied parameter have the optimizer's digits.
    assert main(["convert", str(saved / "tied"), str(tmp_path / "fp32"), "--to", "fp32"]) == 0
    weights = load_file(tmp_path / "fp32" / "model.safetensors")
    assert torch.equal(weights["tied.weight"], weights["first.weight"])
    assert not torch.equal(weights["tied.weight"], weights["tied.weight"].bfloat16().float())


def test_ranks_sum_up_each_file_once_and_one_makes_the_index(found: tuple[Path, list[Any]]) -> None:
    first, second = (counts for _, counts in found[1])
    assert len(first) == 5
    for name in first:
        num_files, of_first = first[name]
        _, of_second = second[name]
        assert of_first[SUMS] + of_second[SUMS] == num_files > 8, name
        assert abs(of_first[SUMS] - of_second[SUMS]) <= 1, name
        assert (of_first[MERGES], of_second[MERGES]) == (name.startswith("save"), 0), name
