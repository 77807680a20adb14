# SPDX-License-Identifier: Apache-2.0
"""What was measured is kept whole, read back equal, and never taken from a file that cannot be trusted."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_fsmoe.measuring.cache import MeasurementCache, Measurements
from ds_fsmoe.planning.cluster import Cluster, Operation, load_cluster
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.job.measured import Timing
from tests.logged import heard

FINGERPRINT = {"hosts": {"0-1": "node0", "2": "node1"}, "ranks_per_node": [2, 1], "links": {"node0": ["eth0 [up]"]}}
CLUSTER = Cluster("measured", 2, 1, {"gemm": Operation(LinearCost(1 / 3, 1e-10), None, "a [ b ] \n c")})
TIMING = Timing("byte", (3.0, 5.0, 7.0, 11.0), (1 / 3, 0.5, 0.7, 1.1))


def written(folder: Path) -> MeasurementCache:
    """What is kept in a folder that has some measurements."""
    cache = MeasurementCache(folder)
    cache.write(FINGERPRINT, some(), CLUSTER)
    return cache


def some() -> Measurements:
    """Of a CPU and of a GPU, whose host is timed as well."""
    on_gpu = replace(TIMING, issued_ms=(0.1, 1 / 3, 0.3, 0.2))
    return Measurements({"gemm [3, 5]": TIMING, "b": on_gpu}, {"host ms per task": 1 / 7, "draws": 0.0})


@pytest.fixture
def said() -> Iterator[list[str]]:
    handler = heard(names_level=True)
    yield handler.lines
    handler.end()


def test_what_is_kept_is_read_back_to_the_last_bit_and_is_a_cluster_file_for_all(
    tmp_path: Path, said: list[str]
) -> None:
    cache = MeasurementCache(tmp_path / "deeper" / "still")
    assert cache.read(FINGERPRINT) is None
    cache.write(FINGERPRINT, some(), CLUSTER)
    assert MeasurementCache(tmp_path / "deeper" / "still").read(FINGERPRINT) == some()
    path = cache.file_of(FINGERPRINT)
    assert load_cluster(str(path)) == CLUSTER
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert said == []
    assert '    "sizes": [3.0, 5.0, 7.0, 11.0],' in path.read_text().splitlines()
    assert path.read_text().count("issued_ms") == 1
    # As anybody's file: not for the one who wrote it alone.
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


def test_names_of_before_in_what_is_kept_are_read_as_todays(tmp_path: Path) -> None:
    cache, numbers = MeasurementCache(tmp_path), {"slowdown of a by b, gpt, node_deduplicated, 8 slots": 1.5}
    measurements = Measurements({"all-to-all (node_deduplicated) of float32 among 4 ranks": TIMING}, numbers)
    cache.write(FINGERPRINT, measurements, CLUSTER)
    path = cache.file_of(FINGERPRINT)
    path.write_text(path.read_text().replace("node_deduplicated", "once_per_node"))
    assert cache.read(FINGERPRINT) == measurements


def test_other_clusters_have_other_files_in_any_order_and_newer_measurements_win(tmp_path: Path) -> None:
    cache, turned = written(tmp_path), dict(reversed(FINGERPRINT.items()))
    assert cache.file_of(turned) == cache.file_of(FINGERPRINT)
    assert cache.read(turned) == some()
    assert cache.read(FINGERPRINT | {"ranks_per_node": [1, 2]}) is None
    newer = Timing("byte", (3.0, 5.0, 7.0), (1.0, 2.0, 3.0))
    cache.write(FINGERPRINT, Measurements({"other": newer, "gemm [3, 5]": newer}, {"draws": 1.0}), CLUSTER)
    before = some()
    found = Measurements(before.timings | {"gemm [3, 5]": newer, "other": newer}, before.numbers | {"draws": 1.0})
    assert cache.read(FINGERPRINT) == found, "those for other layers stay"


GONE = object()


def changed_at(value: Any, *path: Any) -> Callable[[dict], None]:
    def change(data: dict) -> None:
        for key in path[:-1]:
            data = data[key]
        if value is GONE:
            del data[path[-1]]
        else:
            data[path[-1]] = value

    return change


AT = ("measured", "timings", "gemm [3, 5]")
CHANGES: list[tuple[Callable[[dict], None], str]] = [
    (changed_at("3", "measured", "format"), "has format '3', and this version reads 2"),
    (changed_at("x", "measured", "fingerprint", "hosts"), "is from another cluster: it differs in hosts"),
    (changed_at(GONE, "measured", "fingerprint", "links"), "is from another cluster: it differs in links"),
    (changed_at(1, "measured", "fingerprint", "new"), "is from another cluster: it differs in new"),
    (changed_at([1], "measured", "fingerprint"), "is not a measurements file: AttributeError"),
    (changed_at(GONE, "measured", "timings"), "is not a measurements file: KeyError: 'timings'"),
    (changed_at(3, *AT, "unit"), "has the unknown unit 3 for gemm [3, 5]"),
    (changed_at(-0.5, *AT, "times_ms", 1), "has -0.5 in gemm [3, 5]: must be a finite number of at"),
    (changed_at(float("nan"), *AT, "times_ms", 1), "has nan in gemm [3, 5]: must be a finite number"),
    (changed_at(10**400, *AT, "times_ms", 0), "in gemm [3, 5]: must be a finite number of at least 0"),
    (changed_at(True, *AT, "times_ms", 0), "has True in gemm [3, 5]: must be a finite number"),
    (changed_at(4.0, *AT, "sizes", 0), ""),
    (changed_at(6.0, *AT, "sizes", 0), "has sizes of gemm [3, 5] that do not increase: [6.0, 5.0, 7.0, 11.0]"),
    (changed_at([1.0, 2.0, 3.0], *AT, "times_ms"), "is not a measurements file: ValueError: fit: 4"),
    (changed_at([0.1], "measured", "timings", "b", "issued_ms"), "has 1 times of the host for 4 sizes of b"),
    (changed_at(None, "measured", "numbers", "draws"), "has None in draws: must be a finite number"),
]


@pytest.mark.parametrize(("change", "why"), CHANGES)
def test_a_file_that_was_changed_is_named_with_why_and_not_trusted(
    tmp_path: Path, said: list[str], change: Callable[[dict], None], why: str
) -> None:
    cache = written(tmp_path)
    path = cache.file_of(FINGERPRINT)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    found = cache.read(FINGERPRINT)
    if not why:  # such numbers may well have been measured
        assert found not in (None, some())
        assert said == []
        return
    assert found is None
    (line,) = said
    assert line.startswith(f"WARNING: fsmoe.autotune.cache_dir: {path} ")
    assert why in line
    assert line.endswith("; measuring again")
    # Nothing of it is taken over when it is written anew.
    cache.write(FINGERPRINT, Measurements({}, {"new": 1.0}), CLUSTER)
    assert cache.read(FINGERPRINT) == Measurements({}, {"new": 1.0})


@pytest.mark.parametrize("text", ["", "null", '{"measured": 3}', "[" * 100_000, b"\xff\xfe", "cut", "folder"])
def test_what_is_cut_off_no_json_or_no_file_is_named_and_not_trusted(
    tmp_path: Path, said: list[str], text: str | bytes
) -> None:
    cache = written(tmp_path)
    path = cache.file_of(FINGERPRINT)
    whole = path.read_bytes()
    if text == "folder":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(whole[:-40] if text == "cut" else text if isinstance(text, bytes) else text.encode())
    assert cache.read(FINGERPRINT) is None
    (line,) = said
    assert str(path) in line
    if text != "folder":
        cache.write(FINGERPRINT, some(), CLUSTER)
        assert path.read_bytes() == whole


def test_a_folder_that_cannot_be_written_or_a_full_disk_is_said_once_and_leaves_what_was_there(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    blocked = MeasurementCache(tmp_path / "file" / "kept")
    for _ in range(3):
        blocked.write(FINGERPRINT, some(), CLUSTER)
    cache = written(tmp_path / "kept")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patched:
            patched.setattr(os, name, full)
            cache.write(FINGERPRINT, Measurements({}, {"new": 1.0}), CLUSTER)
    assert cache.read(FINGERPRINT) == some()
    assert [each.name for each in (tmp_path / "kept").iterdir()] == [cache.file_of(FINGERPRINT).name]
    of_blocked, of_full = said
    assert f"cannot write to {tmp_path / 'file' / 'kept'}, so the next run measures again: " in of_blocked
    assert "No space left on device" in of_full
