# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint says of its files is read, or refused in words, and held against them."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ds_fsmoe.checkpoint.plan_state import random_states, set_random_states
from ds_fsmoe.checkpoint_files.manifest import (
    NAME,
    FileSum,
    LayerSizes,
    Manifest,
    Sizes,
    faults,
    names_in,
    read_manifest,
    sum_of,
)
from ds_fsmoe.checkpoint_files.tags import CheckpointError

SIZES = Sizes(world=2, mp=1, pp=1, zero_stage=1, esp=1, dtype="float32")


def write(folder: Path, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "weights.pt").write_text(text)


def described(folder: Path) -> Manifest:
    write(folder, "some bytes")
    (folder / "inner").mkdir()
    (folder / "inner" / "more.pt").write_text("more")
    files = {name: sum_of(folder / name) for name in names_in(folder)}
    manifest = Manifest(SIZES, (LayerSizes("blocks.0.moe", 4, 2),), {"torch": "2"}, files)
    manifest.write(folder)
    return manifest


def test_a_manifest_reads_as_it_was_written(tmp_path: Path) -> None:
    manifest = described(tmp_path / "tag")
    assert read_manifest(tmp_path / "tag") == manifest
    assert set(manifest.files) == {"weights.pt", "inner/more.pt"}
    assert faults(tmp_path / "tag", manifest.files, manifest.files) == []
    assert read_manifest(tmp_path) is None


def test_files_that_are_missing_cut_short_or_changed_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "tag"
    manifest = described(folder)
    (folder / "weights.pt").write_text("some bytez")
    (folder / "inner" / "more.pt").write_text("mo")
    changed, short = faults(folder, manifest.files, ["weights.pt", "inner/more.pt"])
    assert "weights.pt is not what was saved: its checksum differs" in changed
    assert "more.pt has 2 bytes and should have 4: it is cut short" in short
    (folder / "weights.pt").unlink()
    assert faults(folder, manifest.files, ["weights.pt"]) == [f"{folder / 'weights.pt'} is missing"]


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"sizes": {}},
        {"sizes": 3},
        {"layers": [{"path": "x"}]},
        {"files": {"../../etc/passwd": {"size_bytes": 1, "sha256": "x"}}},
        {"files": {"/etc/passwd": {"size_bytes": 1, "sha256": "x"}}},
        {"files": {"a": {"size_bytes": "1", "sha256": "x"}}},
        {"files": []},
        {"versions": None},
        # More parts than there could be files of: names of all would be made.
        {"parts": {"experts": {"layout": "stacked", "num_experts": 10**9, "ep": 10**9}}},
    ],
)
def test_a_damaged_manifest_is_an_error_that_names_it(change: dict[str, Any], tmp_path: Path) -> None:
    described(tmp_path / "tag")
    path = tmp_path / "tag" / NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=NAME):
        read_manifest(tmp_path / "tag")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', "{}", "\x00", "[" * 10_000])
def test_what_is_no_manifest_at_all_is_an_error_that_names_it(text: str, tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(text)
    with pytest.raises(CheckpointError, match=NAME):
        read_manifest(tmp_path)


def test_random_bytes_and_cut_manifests_never_raise_anything_else(tmp_path: Path) -> None:
    described(tmp_path / "tag")
    path = tmp_path / "tag" / NAME
    text, generator = path.read_text(), random.Random(0)
    for _ in range(300):
        cut = list(text[: generator.randrange(len(text))] if generator.random() < 0.3 else text)
        for _ in range(generator.randrange(4)):
            if cut:
                cut[generator.randrange(len(cut))] = generator.choice('{}[]",:0x-.e')
        path.write_text("".join(cut))
        with suppress(CheckpointError):
            read_manifest(tmp_path / "tag")


def test_differences_of_layouts_are_told_in_words() -> None:
    assert SIZES.differences(SIZES) == []
    assert SIZES.differences(replace(SIZES, world=4, dtype="bfloat16")) == ["world 2 -> 4", "dtype float32 -> bfloat16"]
    assert FileSum(1, "x") != FileSum(1, "y")


def test_generators_go_on_as_they_were(tmp_path: Path) -> None:
    random.gauss(0, 1), np.random.normal()
    torch.save(random_states(), tmp_path / "states.pt")
    drawn = random.random(), random.gauss(0, 1), np.random.rand(), np.random.normal(), torch.rand(3).tolist()
    set_random_states(torch.load(tmp_path / "states.pt", weights_only=True))
    again = random.random(), random.gauss(0, 1), np.random.rand(), np.random.normal(), torch.rand(3).tolist()
    assert drawn == again
