# SPDX-License-Identifier: Apache-2.0
"""``ds_fsmoe scale`` as a user types it."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from ds_fsmoe import cli
from ds_fsmoe.commands.scale import sizes_of

SMALL = ["scale", "--model", "olmoe", "--length", "512", "--presets", "deepspeed", "tutel", "best", "--processes", "1"]


def test_a_run_prints_every_size_and_writes_rows_and_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, pictures = tmp_path / "rows", tmp_path / "pictures"
    arguments = ["--cluster", "h100_400", "a100_200", "--ranks", "8..32", "--out", str(out), "--png", str(pictures)]
    assert cli.main([*SMALL, *arguments]) == 0
    text = capsys.readouterr().out
    for cluster in ("h100_400", "a100_200"):
        for ranks in (8, 16, 32):
            assert len(re.findall(rf"(?m)^olmoe +{cluster} +{ranks} ", text)) == 1
    assert "assumed:" in text
    rows = json.loads((out / "scale.json").read_text())["rows"]
    assert f"6 sizes of models on clusters, {len(rows)} simulated steps" in text
    with open(out / "scale.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert len(rows) == len(table) >= 6 * 3
    for row, cells in zip(rows, table, strict=True):
        assert {name: "" if value is None else str(value) for name, value in row.items()} == cells
    drawn = sorted(each.name for each in pictures.iterdir())
    assert drawn == [f"scale_{name}.png" for name in ("efficiency", "exchange", "limits", "systems")]
    for each in pictures.iterdir():
        data = each.read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        # At most 900 pixels on a page, each of two by two in the file.
        assert 400 < int.from_bytes(data[16:20], "big") <= 1800
        assert len(data) < 150_000


@pytest.mark.parametrize(
    ("text", "expected"),
    [("8..64", (8, 16, 32, 64)), ("8", (8,)), ("64,8,24", (64, 8, 24)), ("3..24", (3, 6, 12, 24)), ("5..5", (5,))],
)
def test_sizes_are_listed_or_doubled(text: str, expected: tuple[int, ...]) -> None:
    assert sizes_of(text) == expected


@pytest.mark.parametrize("text", ["", "8..60", "64..8", "0..8", "8,,16", "8,8", "a..b", "-8", "8..16..32", "1.5"])
def test_sizes_that_are_none_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"--ranks = .*: must be numbers of GPUs like 8,64,512, or a doubling like"):
        sizes_of(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--presets", "fastest"], "no preset is called 'fastest'"),
        (["--cluster", "h100"], "did you mean 'h100_400'"),
        (["--cluster", "h100_400", "--model", "olmo"], "did you mean 'olmoe'"),
        (["--cluster", "h100_400", "--ranks", "12"], "ranks = 12: must fill whole nodes"),
        (["--processes", "0"], "--processes = 0: must be at least 1"),
        (["--out", "/nowhere/at/all"], "there is no folder"),
    ],
)
def test_a_wrong_argument_is_one_sentence(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["scale", "--ranks", "8", "--processes", "1", *arguments]) == 2
    found = capsys.readouterr().err
    assert message in found
    assert "Traceback" not in found
