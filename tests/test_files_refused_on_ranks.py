# SPDX-License-Identifier: Apache-2.0
"""What a job reads of others' files is refused on every rank alike, whichever ranks read it; none is left waiting."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ds_fsmoe.config.reading import ConfigError
from ds_fsmoe.engine.routing_data import RoutingData
from ds_fsmoe.placement.placements import Placements
from ds_fsmoe.planning.expert_placement import ExpertPlacement
from tests.ranks import run_on_ranks
from tests.test_files_refused import NESTED, pipe, routing, written

PLACES = ExpertPlacement.at_start(8, 2).as_dict()
NAMES = ("nested", "far", "experts", "ranks", "negative", "list", "text", "pipe", "folder")


def files_of_placements(folder: Path) -> None:
    changed = {
        "far": {"expert_of_place": [2**70, *range(1, 8)]},
        "experts": {"num_experts": 10**9},
        "ranks": {"num_ranks": 2**64},
        "negative": {"expert_of_place": [-(2**64), *range(1, 8)]},
    }
    for name, each in changed.items():
        written(folder / name, {"format": 1, "layers": {"moe": PLACES | each}})
    written(folder / "list", {"format": 1, "layers": [1]})
    written(folder / "nested", NESTED)
    written(folder / "text", "\x00")
    pipe(folder / "pipe")
    (folder / "folder").mkdir()


def errors_of_placements(rank: int, world_size: int, folder: str) -> list[str]:
    placements: Any = Placements.__new__(Placements)
    placements.now, placements._paths, placements._group = {"L00": ExpertPlacement.at_start(8, 2)}, {"L00": "moe"}, None
    said = []
    for name in NAMES:
        with pytest.raises(ConfigError) as caught:
            placements.load(os.path.join(folder, name))
        said.append(str(caught.value))
    return said


def test_a_placement_that_cannot_be_read_is_a_config_error_on_all_ranks(tmp_path: Path) -> None:
    files_of_placements(tmp_path)
    first, second = run_on_ranks(errors_of_placements, 2, tmp_path / "job", str(tmp_path))
    assert first == second
    for name, text in zip(NAMES, first, strict=True):
        assert text.startswith(f"fsmoe.placement.file = {str(tmp_path / name)!r}: "), text
        assert len(text) < 1000
        assert "\n" not in text
    words = dict(zip(NAMES, first, strict=True))
    assert "is not a regular file" in words["pipe"]
    assert "nested too deeply" in words["nested"]
    assert "1 to 65536 experts" in words["experts"]


def errors_of_replays(rank: int, world_size: int, folder: str, names: list[str]) -> list[str]:
    data: Any = RoutingData.__new__(RoutingData)
    data._has_stages = False
    said = []
    for name in names:
        with pytest.raises(ConfigError) as caught:
            data._read(Path(folder) / name)
        said.append(str(caught.value))
    return said


def test_a_recording_that_cannot_be_replayed_is_a_config_error_on_all_ranks(tmp_path: Path) -> None:
    pipe(tmp_path / "pipe" / "rank_00000.0000.npy")
    routing(tmp_path / "experts", 10**9)
    file = routing(tmp_path / "changed") / "rank_00000.0000.npy"
    file.write_bytes(file.read_bytes().replace(json.dumps("blocks.0.moe").encode(), b'"blocks.1.moe"'))
    (tmp_path / "none").mkdir()
    names = ["pipe", "experts", "changed", "none"]
    first, second = run_on_ranks(errors_of_replays, 2, tmp_path / "ranks", str(tmp_path), names)
    assert first == second
    for name, words, text in zip(
        names, ("not a regular file", "num_experts", "was changed after", "no recorded"), first, strict=True
    ):
        assert text.startswith(f"fsmoe.routing.replay = {str(tmp_path / name)!r}: "), text
        assert words in text
