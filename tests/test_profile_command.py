# SPDX-License-Identifier: Apache-2.0
"""``ds_fsmoe profile`` as a user types it: a cluster file without training, that ``ds_fsmoe plan`` takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ds_fsmoe import cli
from ds_fsmoe.planning.cluster import load_cluster
from ds_fsmoe.planning.cluster_schema import UNITS
from tests.scripts import on_ranks

COMPUTING = {name for name in UNITS if "." not in name}
SMALL = ["--max-bytes", "4099"]
MODEL = ["--width", "16", "--hidden", "32", "--length", "8", "--layers", "1", "--heads", "2"]


IN_HASTE = """
import sys
from ds_fsmoe import cli
from tests.hurry import hurry

hurry()
local_rank, status, *arguments = sys.argv[1:]
assert cli.main([local_rank, *arguments]) == int(status)
"""


def in_haste(folder: Path, *arguments: str, status: int = 0) -> str:
    """Return what two ranks print, measured as briefly as can be. A launcher starts them in docs/planning.md."""
    script = folder / "typed.py"
    script.write_text(IN_HASTE)
    return on_ranks(folder, str(script), str(status), *arguments)


def test_two_ranks_write_a_file_that_a_plan_is_made_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "written" / "ours.json"
    out.parent.mkdir()
    printed = in_haste(tmp_path, "profile", "--out", str(out), *SMALL, "--ranks-per-node", "1", "--dtype", "bf16")
    cluster = load_cluster(str(out))
    assert (cluster.name, cluster.num_nodes, cluster.gpus_per_node) == ("ours", 2, 1)
    assert (cluster.dtype, len(cluster.date)) == ("bf16", len("2026-11-25"))
    assert set(cluster.operations) == COMPUTING | {name for name in UNITS if name.startswith("inter.")}
    assert "; 2 ranks of " in cluster.source
    assert ", bf16; hosts " in cluster.source
    lines = printed.splitlines()
    assert sum("2 nodes of 1 rank" in line for line in lines) == 1, "one rank tells it"
    rows = {line.split()[0]: line.split() for line in lines if line.startswith(tuple(UNITS))}
    assert set(rows) == set(cluster.operations)
    assert rows["inter.all_to_all"][1] == "2"
    for name, row in rows.items():
        # Messages so small may well take the same time all.
        assert any(each.endswith("/s") for each in row) == (cluster.operations[name].cost.beta_ms > 0)
    assert any("operation" in line and "alpha ms" in line and "typically off" in line for line in lines)
    assert "computation and transfers at the same time: computation takes " in printed
    assert "both links busy" not in printed, "there is one"
    assert f"{out}: written after " in printed
    measured = json.loads(out.read_text())["measured"]
    assert measured["fingerprint"]["ranks_per_node"] == [1, 1]
    assert len(measured["timings"]) == len(cluster.operations)
    assert [*out.parent.iterdir()] == [out]

    assert cli.main(["plan", "--cluster", str(out), *MODEL]) == 0
    planned = capsys.readouterr().out
    assert "2 ranks, 1 per node: dp = 2 (inter), ep_size = 2 (inter)" in planned
    assert "the plan of best" in planned


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "{folder}"], "--out {folder}: is a folder; name a file in it"),
        (["--out", "{folder}/file/x.json"], "--out {folder}/file/x.json: cannot be written: Not a directory"),
        (["--out", "{folder}/x", "--max-bytes", "3"], "--max-bytes = 3: must be at least 1024"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_is_measured(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    from ds_fsmoe.measuring import profile_job

    def measures(*_: object, **__: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(profile_job, "profile_cluster", measures)
    (tmp_path / "file").write_text("in the way")
    given = [each.replace("{folder}", str(tmp_path)) for each in arguments]
    assert cli.main(["profile", *given]) == 2
    assert f"ds_fsmoe profile: error: {message.replace('{folder}', str(tmp_path))}" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(("error", "status"), [("ValueError", 2), ("MeasuringError", 1)])
def test_other_ranks_than_the_first_end_with_its_status_and_print_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: str, status: int
) -> None:
    from ds_fsmoe.measuring import profile_job

    def fails(*_: object) -> None:
        raise {"ValueError": ValueError, "MeasuringError": profile_job.MeasuringError}[error]("does not fit")

    monkeypatch.setattr(profile_job, "measure_and_write", fails)
    monkeypatch.setenv("RANK", "1")
    assert cli.main(["profile", "--out", str(tmp_path / "x.json")]) == status
    printed = capsys.readouterr()
    assert printed.out == printed.err == ""


def test_a_rank_that_fails_is_said_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ds_fsmoe.measuring import cluster_profile as microbenchmarks

    def fails(*_: object) -> None:
        raise OSError("the disk is on fire")

    monkeypatch.setattr(microbenchmarks.F, "one_hot", fails)
    assert cli.main(["profile", "--out", str(tmp_path / "x.json"), *SMALL]) == 1
    said = capsys.readouterr().err
    assert "ds_fsmoe profile: error: failed while measuring how long routing takes: OSError: the disk is on" in said
    assert list(tmp_path.iterdir()) == []
