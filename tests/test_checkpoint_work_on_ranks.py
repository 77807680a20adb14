# SPDX-License-Identifier: Apache-2.0
"""Ranks share the checksums of a checkpoint, and one makes the index."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from ds_fsmoe.checkpoint import saving
from ds_fsmoe.checkpoint_files import manifest
from ds_fsmoe.checkpoint_files.manifest import read_manifest, sum_of
from tests.hurry import hurry
from tests.ranks import run_on_ranks
from tests.small_model import Case
from tests.test_checkpoint_corners import make, train

pytestmark = pytest.mark.long

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


def save_and_load(rank: int, world_size: int, folder: str) -> dict[str, tuple[int, dict[str, int]]]:
    hurry()
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


def test_ranks_sum_up_each_file_once_and_one_makes_the_index(tmp_path: Path) -> None:
    first, second = run_on_ranks(save_and_load, 2, tmp_path / "ranks", str(tmp_path / "saved"))
    assert len(first) == 5
    for name in first:
        num_files, of_first = first[name]
        _, of_second = second[name]
        assert of_first[SUMS] + of_second[SUMS] == num_files > 8, name
        assert abs(of_first[SUMS] - of_second[SUMS]) <= 1, name
        assert (of_first[MERGES], of_second[MERGES]) == (name.startswith("save"), 0), name
