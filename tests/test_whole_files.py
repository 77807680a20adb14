# SPDX-License-Identifier: Apache-2.0
"""Files under names that others can guess: links are not followed, pipes are not waited at, and each is there whole."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ds_fsmoe.checkpoint_files import tags
from ds_fsmoe.cli import main
from ds_fsmoe.execution.lanes import SerialLanes
from ds_fsmoe.files import runs
from ds_fsmoe.files.traces import rank_file, trace_of, write_trace
from ds_fsmoe.files.whole_files import append_to, new_file, write_whole
from ds_fsmoe.measuring.cache import MeasurementCache, Measurements
from ds_fsmoe.observing.watchdog import Watchdog
from ds_fsmoe.planning.cluster import Cluster
from ds_fsmoe.planning.timeline import Contention
from ds_fsmoe.untrusted import read_regular
from tests.fake_clock import Patient
from tests.waiting import LIMIT_S, make_older

FINGERPRINT = {"host": "here"}


CLUSTER = Cluster("here", 1, 1, {}, Contention(0.0, 0.0, 0.0), 0.0, "")


def keep(folder: Path) -> Path:
    """Measurements, in the cache."""
    cache = MeasurementCache(folder)
    cache.write(FINGERPRINT, Measurements({}, {"some": 1.0}), CLUSTER)
    return cache.file_of(FINGERPRINT)


def report_error(folder: Path) -> Path:
    file = folder / "rank0.txt"
    with closing(SerialLanes()) as lanes, closing(Watchdog(lanes, 300, file, host=Patient())) as watchdog:
        watchdog.failed(RuntimeError("seen"))
    return file


def record_run(folder: Path) -> Path:
    runs.write_json(folder / runs.RUN, {"format": 1, "schedule": "best"})
    return folder / runs.RUN


def save_trace(folder: Path) -> Path:
    write_trace(trace_of(0, "here", [], {"world_size": 1}), rank_file(folder, 0))
    return rank_file(folder, 0)


def point(folder: Path) -> Path:
    (folder / "step1").mkdir(exist_ok=True)
    tags.point(folder, "step1")
    return folder / tags.LATEST


def make_page(folder: Path) -> Path:
    record_run(folder)
    assert main(["report", str(folder)]) == 0
    return folder / "report.html"


WRITERS = [keep, report_error, record_run, save_trace, point, make_page]


@pytest.mark.parametrize("write", WRITERS)
def test_a_link_in_the_place_of_a_file_gives_way_to_it(write: Callable[[Path], Path], tmp_path: Path) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "folder"
    victim.write_text("mine")
    folder.mkdir()
    place = write(folder)
    expected = place.read_text()
    place.unlink()
    place.symlink_to(victim)
    for guessed in (f"{place.name}.{os.getpid()}.tmp", f".{place.name}.{os.getpid()}", f"{place.name}.saving"):
        (folder / guessed).symlink_to(victim)
    (folder / f".{place.name}.{socket.gethostname()}.{os.getpid()}.part").symlink_to(victim)
    assert write(folder) == place
    assert victim.read_text() == "mine"
    assert not place.is_symlink()
    if write not in (report_error, save_trace):  # those say when they were written
        assert place.read_text() == expected
    assert not [each.name for each in folder.iterdir() if each.name.endswith(".part") and not each.is_symlink()]


def test_a_file_is_written_whole_over_another_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, victim = tmp_path / ("x" * 255), tmp_path / "victim"
    for text in ("a longer text", "short"):
        write_whole(path, text)
        assert path.read_text() == text

    def fail() -> None:
        with new_file(path) as file:
            file.write("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert path.read_text() == "short"
    assert list(tmp_path.iterdir()) == [path]
    # A name that was guessed all the same is an error.
    victim.write_text("mine")
    monkeypatch.setattr(secrets, "token_hex", lambda size: "guessed")
    (tmp_path / ".place.guessed.part").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_whole(tmp_path / "place", "text")
    assert victim.read_text() == "mine"
    assert not (tmp_path / "place").exists()


def test_lines_are_not_added_to_what_a_link_names(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "steps.jsonl").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="is a link, and is not followed"):
        append_to(tmp_path / "steps.jsonl", "line\n")
    assert (tmp_path / "victim").read_text() == "mine"


def unless_it_waits(do: Callable[[], Any]) -> Any:
    """What it returns, or the error; in a thread, for a pipe keeps whoever waits at it for ever."""
    found: list[Any] = []

    def call() -> None:
        try:
            found.append(do())
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert found, "it waits"
    return found[0]


def test_pipes_and_devices_are_neither_read_nor_waited_at_nor_replaced(tmp_path: Path, capsys: Any) -> None:
    pipe, device, folder = tmp_path / "pipe", tmp_path / "device", tmp_path / "cache"
    os.mkfifo(pipe)
    device.symlink_to("/dev/zero")
    for refused in (
        lambda: read_regular(pipe),
        lambda: read_regular(device),
        lambda: write_whole(pipe, "x"),
        lambda: write_whole(Path("/dev/full"), "x"),
    ):
        assert "is not a regular file" in str(unless_it_waits(refused))
    # Nobody reads at the other end, so it cannot be opened; were there somebody, it would be refused.
    assert "No such device" in str(unless_it_waits(lambda: append_to(pipe, "x")))
    place, cache = keep(folder), MeasurementCache(folder)
    for put in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        place.unlink()
        put(place)
        assert unless_it_waits(lambda: [cache.read(FINGERPRINT)]) == [None]
        unless_it_waits(lambda: keep(folder))
        place.unlink()
        keep(folder)
        assert cache.read(FINGERPRINT) is not None
    record_run(tmp_path)
    for name in (runs.STEPS, runs.PLANS):
        os.mkfifo(tmp_path / name)
    assert unless_it_waits(lambda: [main(["report", str(tmp_path)])]) == [0]
    assert f"{runs.STEPS} cannot be read" in capsys.readouterr().out


def test_a_host_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "../a/b\n<c>")
    for write in (keep, report_error, record_run, save_trace):
        assert write(tmp_path).is_file()


def test_what_a_killed_writer_has_left_goes_with_a_later_one_and_that_of_a_living_one_stays(tmp_path: Path) -> None:
    place = tmp_path / "latest"
    old, young = (tmp_path / f".latest.{digit * 16}.part" for digit in "ab")
    other = tmp_path / f".latest2.{'a' * 16}.part"
    for each in (old, young, other):
        each.write_text("half")
    for each in (old, other):
        make_older(each, 7200)
    write_whole(place, "step1")
    assert place.read_text() == "step1"
    assert {each.name for each in tmp_path.iterdir()} == {"latest", young.name, other.name}
