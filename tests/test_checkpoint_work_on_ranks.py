# SPDX-License-Identifier: Apache-2.0
"""Ranks share the checksums of a checkpoint, and one reads what one is enough for; a bad index is refused by all."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ds_fsmoe.checkpoint import loading, saving
from ds_fsmoe.checkpoint_files import manifest, pieces, whole
from ds_fsmoe.checkpoint_files.manifest import NAME, read_manifest, sum_of
from ds_fsmoe.checkpoint_files.tags import CheckpointError
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


def spoil(place: Path, change: Callable[[list[Any]], Any]) -> None:
    """Change the pieces of an index; whoever can write files can also sum them up."""
    path = place / pieces.NAME
    found = json.loads(path.read_text())
    change(found["groups"][0]["pieces"])
    path.write_text(json.dumps(found))
    described = json.loads((place / NAME).read_text())
    described["files"][pieces.NAME] = vars(sum_of(path))
    (place / NAME).write_text(json.dumps(described))


BAD: dict[str, tuple[Callable[[list[Any]], Any], str]] = {
    "twice": (lambda found: found.append([*found[0][:3], 10**6]), "is there twice in"),
    "hole": (lambda found: found.__setitem__(0, [found[0][0], 1, *found[0][2:]]), "leave a hole at element 0"),
    "bytes": (lambda found: found.append(["other", 0, 10**12, 10**6]), "elements in"),
    "ranks": (lambda found: found.extend([each[0], 0, 0, 0] for each in found * 999), "have at most"),
}


def unexpected(*_: Any, **__: Any) -> Any:
    raise AssertionError("a file is read")


def load_bad(rank: int, world_size: int, folder: str) -> dict[str, str]:
    hurry()
    engine = make(rank, Case(ep_size=2, stage=1, k=2))
    train(engine, rank, 0)
    for name in BAD:
        engine.save_checkpoint(folder, name)
        if rank == 0:
            spoil(Path(folder) / name, BAD[name][0])
        dist.barrier()
    engine.destroy()
    said = {}
    for at, stage in {"alike": 1, "moved": 2}.items():
        engine = make(rank, Case(ep_size=2, stage=stage, k=2), scale=0.3)
        before = engine.module.first.weight.detach().clone()
        for name in BAD:
            with (
                patch.object(loading, "read_file", unexpected),
                patch.object(whole, "read_file", unexpected),
                pytest.raises(CheckpointError) as caught,
            ):
                engine.load_checkpoint(folder, name)
            said[f"{name}, {at}"] = str(caught.value)
        assert torch.equal(engine.module.first.weight, before)
        engine.destroy()
    return said


def test_a_bad_index_is_refused_on_every_rank_before_anything_is_read(tmp_path: Path) -> None:
    first, second = run_on_ranks(load_bad, 2, tmp_path / "ranks", str(tmp_path / "saved"))
    assert first == second
    assert len(first) == 2 * len(BAD)
    for name in BAD:
        with pytest.raises(CheckpointError, match=BAD[name][1]):
            whole.Whole(tmp_path / "saved" / name)
    for name, said in first.items():
        assert BAD[name.partition(",")[0]][1] in said, said
        assert f"{pieces.NAME} is damaged, or not a manifest" in said
        assert "\n" not in said
