# SPDX-License-Identifier: Apache-2.0
"""A tag is there whole or not at all, whatever step a save is killed at; saves remove only what saves have made."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import socket
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ds_fsmoe.checkpoint.plan_state import random_states, set_random_states
from ds_fsmoe.checkpoint_files import publishing, tags
from ds_fsmoe.checkpoint_files.manifest import (
    NAME,
    LayerSizes,
    Manifest,
    Sizes,
    faults,
    names_in,
    read_manifest,
    sum_of,
)
from ds_fsmoe.checkpoint_files.publishing import Publication, recover
from ds_fsmoe.checkpoint_files.tags import CheckpointError
from ds_fsmoe.files import whole_files
from ds_fsmoe.files.whole_files import OWNER, owner_of

TOKENS = [f"{number:08x}" for number in range(1000)]
SIZES = Sizes(world=1, mp=1, pp=1, zero_stage=0, esp=1, dtype="float32")


class Killed(BaseException):
    """Stands for SIGKILL: nothing that follows is run."""


def write(publication: Publication, text: str) -> None:
    (publication.unfinished / "weights.pt").write_text(text)
    Manifest(SIZES, (), {}, {"weights.pt": sum_of(publication.unfinished / "weights.pt")}).write(publication.unfinished)


def save(folder: Path, tag: str, text: str, token: str) -> None:
    publication = Publication(folder, tag, token)
    try:
        publication.begin()
        write(publication, text)
        publication.sync()
        publication.publish()
        tags.point(folder, tag)
    finally:
        publication.end()  # as the system does when a process ends


def text_of(place: Path) -> str:
    return (place / "weights.pt").read_text()


def everything(folder: Path) -> set[str]:
    """The files and links in it."""
    found = (each for each in folder.rglob("*") if each.is_symlink() or not each.is_dir())
    return {each.relative_to(folder).as_posix() for each in found}


@pytest.mark.parametrize("tag", ["step2", "step1", "deep/step1"])
def test_a_kill_at_any_step_of_a_save_leaves_a_tag_that_can_be_read(
    tag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call that changes a file system is one at which to be killed, before it and after it."""
    calls = ("rename", "replace", "write_text", "mkdir", "unlink", "rmdir")
    total, at = 200, 0
    while at < total:
        folder, old = tmp_path / str(at), "step1" if tag == "step2" else tag
        save(folder, old, "old", "aaaaaaaa")
        (folder / old / "notes.txt").write_text("mine")
        good = tags.latest(folder)
        count = 0

        def dying(name: str, original: Any, at: int = at) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal count
                count += 1
                if count == at + 1 and at % 2:
                    raise Killed
                result = original(*args, **kwargs)
                if count == at + 1:
                    raise Killed
                return result

            return call

        with monkeypatch.context() as patch:
            for name in calls:
                patch.setattr(Path, name, dying(name, getattr(Path, name)))
            patch.setattr(os, "fsync", dying("fsync", os.fsync))
            try:
                save(folder, tag, "new", "bbbbbbbb")
                total = at
            except Killed:
                pass
        now = tags.latest(folder)
        assert now in (good, tag)
        recover(folder, now)
        assert text_of(folder / now) in ("old", "new")
        # And the next save works, whatever was left behind.
        save(folder, tag, "newer", "cccccccc")
        assert text_of(folder / tag) == "newer"
        assert tags.latest(folder) == tag
        left = {each.name for each in (folder / tag).parent.iterdir() if each.is_dir()}
        assert not any(each.endswith((tags.SAVING, tags.BEFORE)) for each in left)
        assert (folder / old / "notes.txt").read_text() == "mine"
        at += 1
    assert at >= 8


@pytest.mark.parametrize("before", [None, "old"])
def test_two_saves_of_one_tag_at_a_time_never_mix_and_the_later_one_hears_of_the_other_and_moves_nothing(
    before: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if before is not None:
        save(tmp_path, "a", before, TOKENS[0])
    one, other = Publication(tmp_path, "a", TOKENS[1]), Publication(tmp_path, "a", TOKENS[2])
    one.begin()
    other.begin()
    assert one.unfinished != other.unfinished
    write(one, "one")
    write(other, "other")
    other.publish()
    with monkeypatch.context() as patch:
        # Not even for a moment: a reader would find no tag.
        patch.setattr(Path, "rename", lambda self, target: pytest.fail(f"{self} was renamed"))
        with pytest.raises(CheckpointError, match=r"another job has saved .*a since this save began"):
            one.publish()
    one.abandon()
    assert text_of(tmp_path / "a") == "other"
    assert everything(tmp_path) - {tags.LATEST} == {"a/weights.pt", f"a/{NAME}"}


def test_one_that_publishes_between_the_two_steps_of_another_wins_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, "a", "old", TOKENS[0])
    one, rename = Publication(tmp_path, "a", TOKENS[1]), Path.rename
    one.begin()
    write(one, "one")

    def with_another(self: Path, target: Path) -> Path:
        if self == one.unfinished:
            (tmp_path / "a").mkdir()
            (tmp_path / "a" / "weights.pt").write_text("other")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", with_another)
    with pytest.raises(CheckpointError, match="another job has saved"):
        one.publish()
    one.abandon()
    assert text_of(tmp_path / "a") == "other"
    assert text_of(tmp_path / f"a.{TOKENS[1]}.before") == "old"


def test_a_reader_leaves_a_save_under_way_alone_and_puts_back_what_a_killed_one_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The moment between the two renames of a save, held."""
    save(tmp_path, "a", "old", TOKENS[0])
    publication = Publication(tmp_path, "a", TOKENS[1])
    publication.begin()
    write(publication, "new")
    (tmp_path / "a").rename(tmp_path / f"a.{TOKENS[1]}.before")
    looks = 0

    def publish_at_the_third(_: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            publication.unfinished.rename(tmp_path / "a")

    monkeypatch.setattr(publishing.time, "sleep", publish_at_the_third)
    assert not recover(tmp_path, "a")
    assert looks == 3
    assert text_of(tmp_path / "a") == "new"
    (tmp_path / "a").rename(publication.unfinished)
    monkeypatch.setattr(publishing.time, "sleep", lambda _: None)
    with pytest.raises(CheckpointError, match=rf"being overwritten by process {os.getpid()} on .*does not finish"):
        recover(tmp_path, "a")
    publication.end()
    assert recover(tmp_path, "a")
    assert text_of(tmp_path / "a") == "old"


def test_of_what_several_killed_saves_took_the_last_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for token in TOKENS[:3]:
        (tmp_path / f"a.{token}.before").mkdir()
        (tmp_path / f"a.{token}.before" / "weights.pt").write_text(token)
    found = list(tmp_path.iterdir())
    in_any_order = iter([sorted(found), sorted(found, reverse=True)])
    monkeypatch.setattr(Path, "iterdir", lambda _: iter(next(in_any_order)))
    for _ in range(2):
        assert recover(tmp_path, "a")
        assert text_of(tmp_path / "a") == TOKENS[2]
        (tmp_path / "a").rename(tmp_path / f"a.{TOKENS[2]}.before")


def test_what_a_killed_save_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path: Path) -> None:
    killed, living = Publication(tmp_path, "a", TOKENS[1]), Publication(tmp_path, "a", TOKENS[2])
    for each in (killed, living):
        each.begin()
        write(each, "x")
    killed.end()
    save(tmp_path, "a", "new", TOKENS[3])
    assert not killed.unfinished.exists()
    assert living.unfinished.exists()
    living.abandon()
    assert everything(tmp_path) == {"a/weights.pt", f"a/{NAME}", "latest"}


def test_where_locks_are_not_known_the_process_is_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    publication = Publication(tmp_path, "a", TOKENS[1])
    publication.begin()
    publication.end()
    assert owner_of(publication.unfinished).life == "alive"
    file = publication.unfinished / OWNER
    said = json.loads(file.read_text())
    assert (said["host"], said["process"], said["is_locked"]) == (socket.gethostname(), os.getpid(), False)
    monkeypatch.setattr(whole_files.os, "kill", lambda *_: (_ for _ in ()).throw(ProcessLookupError()))
    assert owner_of(publication.unfinished).life == "dead"
    file.write_text(json.dumps(said | {"host": "elsewhere"}))
    assert owner_of(publication.unfinished).life == "unknown"
    save(tmp_path, "a", "new", TOKENS[3])
    assert publication.unfinished.exists()


@pytest.mark.parametrize(
    ("tag", "files"),
    [
        ("a", ["a/thesis.txt", "a/deep/notes.txt", "a/mp_rank_01_model_states.pt"]),
        ("a", ["a/b/weights.pt", "a/b/fsmoe.json"]),
        ("x", ["x.before/mine", "x.saving/mine", "x.0123456.saving/mine", "x.zzzzzzzz.before/mine"]),
        ("x", [f"x.{TOKENS[5]}.saving/mine"]),
    ],
    ids=["a folder without a manifest", "a tag in a tag", "names like ours", "ours by its name alone"],
)
def test_a_save_deletes_nothing_that_no_save_has_written(tag: str, files: list[str], tmp_path: Path) -> None:
    for each in files:
        (tmp_path / each).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / each).write_text("mine")
    for token in TOKENS[:3]:
        save(tmp_path, tag, token, token)
        assert text_of(tmp_path / tag) == token
        assert {(tmp_path / each).read_text() for each in files} == {"mine"}
    assert everything(tmp_path) == {*files, f"{tag}/weights.pt", f"{tag}/{NAME}", "latest"}


def test_a_users_own_files_stay_in_folders_of_ours_and_ours_go(tmp_path: Path) -> None:
    publication = Publication(tmp_path, "a", TOKENS[0])
    publication.begin()
    names = {"sub/old.pt", "gone/old.pt", "fsmoe_rank_00007.pt"}
    for name in names:
        (publication.unfinished / name).parent.mkdir(exist_ok=True)
        (publication.unfinished / name).write_text("x")
    files = {name: sum_of(publication.unfinished / name) for name in names_in(publication.unfinished)}
    assert set(files) == names
    Manifest(SIZES, (), {}, files).write(publication.unfinished)
    publication.publish()
    (tmp_path / "a" / "sub" / "mine").write_text("mine")
    (tmp_path / "a" / "link").symlink_to(tmp_path)
    save(tmp_path, "a", "new", TOKENS[1])
    assert everything(tmp_path / "a") == {"weights.pt", NAME, "sub/mine", "link"}
    assert not (tmp_path / "a" / "gone").exists()


def test_nothing_is_put_in_the_place_of_a_file_or_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for tag in ("file", "link"):
        with pytest.raises(CheckpointError, match=f"{tag} is a {tag}: remove it, or choose another tag"):
            save(tmp_path, tag, "x", TOKENS[0])
    assert everything(tmp_path) == {"file", "link"}


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_file_that_is_not_on_disk_is_an_error_and_a_folder_that_cannot_be_synced_is_none(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, "a", "old", TOKENS[0])

    def failing(opened: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(opened).st_mode)
        raise OSError(errno.EINVAL if is_folder else number, "from fsync")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        with pytest.raises(OSError, match="from fsync"):
            save(tmp_path, "a", "new", TOKENS[1])
        with pytest.raises(OSError, match="from fsync"):
            tags.point(tmp_path, "b")
        assert (text_of(tmp_path / "a"), tags.latest(tmp_path)) == ("old", "a")
        patch.setattr(os, "fsync", lambda opened: failing(opened) if stat.S_ISDIR(os.fstat(opened).st_mode) else None)
        save(tmp_path, "a", "new", TOKENS[2])
    assert text_of(tmp_path / "a") == "new"


@pytest.mark.parametrize(
    "tag",
    [
        *("", ".", "..", "/", "/tmp/elsewhere", "../a", "a/../../b", "a\0b"),
        *("latest", "latest/", "latest/a", "latest.saving", "latest_universal", "zero_to_fp32.py"),
        *("a ", " a", "a\n", "a\t", "a\nb", "a\u2028", "a\u3000", "\udcff"),
        *("a.01234567.saving", "a.89abcdef.before", "a.01234567.saving/b"),
    ],
)
def test_a_tag_that_could_not_be_found_again_is_refused(tag: str) -> None:
    with pytest.raises(CheckpointError, match=r"save_checkpoint: tag .*: (must be|that name is reserved)"):
        tags.check_new("folder", tag)


@pytest.mark.parametrize(
    "tag", ["step1", "a/b", "a b", "x.before", "x.saving", ".hidden", "latest2", "Schritt-ß", "👍"]
)
def test_any_other_tag_is_found_again(tag: str, tmp_path: Path) -> None:
    tags.check_new(tmp_path, tag)
    save(tmp_path, tag, "x", TOKENS[0])
    assert text_of(tmp_path / tags.latest(tmp_path)) == "x"


def test_latest_names_a_tag_of_its_folder_or_is_refused_in_words(tmp_path: Path) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    assert tags.latest(folder) is None
    save(folder, "step7", "x", TOKENS[0])
    save(outside, "a", "x", TOKENS[0])
    (outside / "a").rename(outside / f"a.{TOKENS[3]}.before")
    path = folder / tags.LATEST
    for content, words in {
        b"": r"latest is empty: name a tag; there are: step7",
        b" \n": r"latest is empty",
        b"../outside/a": r"latest names '../outside/a', which is not a folder in",
        str(outside / "a").encode(): r"which is not a folder in",
        b"..": r"which is not a folder in",
        b"\xff\xfe": r"latest cannot be read",
        b"a" * 100_000: r"latest has more than 4096 bytes",
    }.items():
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=words):
            tags.latest(folder)
    for target, words in {"../outside/latest": "outside of", "nowhere": "is missing", "step7": "is a folder"}.items():
        path.unlink()
        path.symlink_to(target)
        with pytest.raises(CheckpointError, match=words):
            tags.latest(folder)
    tags.point(folder, "step7")  # is written through no link
    assert tags.latest(folder) == "step7"
    assert (folder / "step7").is_dir()
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="latest is a FIFO, not a regular file"):
        tags.latest(folder)
    # Nor is anything put back there, however it is named.
    assert not recover(folder, "../outside/a")
    (folder / "way").symlink_to(outside)
    assert not recover(folder, "way/a")
    assert not (outside / "a").exists()


# ---- what a checkpoint says of its files


def described(folder: Path) -> Manifest:
    (folder / "inner").mkdir(parents=True)
    (folder / "weights.pt").write_text("some bytes")
    (folder / "inner" / "more.pt").write_text("more")
    files = {name: sum_of(folder / name) for name in names_in(folder)}
    sizes = Sizes(world=2, mp=1, pp=1, zero_stage=1, esp=1, dtype="float32")
    manifest = Manifest(sizes, (LayerSizes("blocks.0.moe", 4, 2),), {"torch": "2"}, files)
    manifest.write(folder)
    return manifest


def test_a_manifest_reads_as_it_was_written(tmp_path: Path) -> None:
    manifest = described(tmp_path / "tag")
    assert read_manifest(tmp_path / "tag") == manifest
    assert set(manifest.files) == {"weights.pt", "inner/more.pt"}
    assert faults(tmp_path / "tag", manifest.files, manifest.files) == []
    assert read_manifest(tmp_path) is None


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"sizes": {}},
        {"layers": [{"path": "x"}]},
        {"files": {"../../etc/passwd": {"size_bytes": 1, "sha256": "x"}}},
        {"files": {"/etc/passwd": {"size_bytes": 1, "sha256": "x"}}},
        {"files": {"a": {"size_bytes": "1", "sha256": "x"}}},
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


def test_sizes_that_cannot_be_are_named_with_their_file(tmp_path: Path) -> None:
    described(tmp_path / "tag")
    path = tmp_path / "tag" / NAME
    whole = path.read_text()
    wrong = [*(("ep", each) for each in (0, 3, 8, True)), ("num_experts", -4), ("zero_stage", -1)]
    for field, value in wrong + [(each, 0) for each in ("world", "mp", "pp", "esp")]:
        found = json.loads(whole)
        (found["layers"][0] if field in ("ep", "num_experts") else found["sizes"])[field] = value
        path.write_text(json.dumps(found))
        with pytest.raises(CheckpointError, match=rf"{NAME} is damaged, or not a manifest"):
            read_manifest(tmp_path / "tag")


def test_generators_go_on_as_they_were(tmp_path: Path) -> None:
    random.gauss(0, 1), np.random.normal()
    torch.save(random_states(), tmp_path / "states.pt")
    drawn = random.random(), random.gauss(0, 1), np.random.rand(), np.random.normal(), torch.rand(3).tolist()
    set_random_states(torch.load(tmp_path / "states.pt", weights_only=True))
    again = random.random(), random.gauss(0, 1), np.random.rand(), np.random.normal(), torch.rand(3).tolist()
    assert drawn == again
