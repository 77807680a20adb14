# SPDX-License-Identifier: Apache-2.0
"""Whatever fails while a checkpoint is saved or loaded, on whichever rank, ends it on all of them with the cause, and
what was there before is as it was. A rank that went on alone would wait for the others in the next collective."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ds_fsmoe.checkpoint import saving
from ds_fsmoe.checkpoint_files import manifest, pieces, publishing, tags
from tests.hurry import hurry
from tests.ranks import run_on_ranks
from tests.small_model import Case
from tests.test_checkpoint_corners import make, train
from tests.test_loads_refused import said_by

FULL = OSError(errno.ENOSPC, "No space left on device")


def failing(*_: Any, **__: Any) -> Any:
    raise FULL


@contextmanager
def a_hook(engine: Any) -> Iterator[None]:
    """A user's hook that raises while DeepSpeed collects weights of experts."""
    expert = engine.module.moes[1].deepspeed_moe.experts.deepspeed_experts[0]
    handle = expert.register_state_dict_pre_hook(failing)
    try:
        yield
    finally:
        handle.remove()


# What fails -> on which ranks, and how.
Failure = tuple[tuple[int, ...], Callable[[Any], Any]]
FAILURES: dict[str, Failure] = {
    "the folder": ((0,), lambda _: patch.object(Path, "mkdir", failing)),
    "the owner's file": ((0,), lambda _: patch.object(publishing, "Ownership", failing)),
    "a folder of DeepSpeed's": ((0,), lambda engine: patch.object(engine.checkpoint_engine, "makedirs", failing)),
    "what begins a save of DeepSpeed's": (
        (1,),
        lambda engine: patch.object(engine.checkpoint_engine, "create", failing),
    ),
    "collecting weights": ((1,), a_hook),
    "collecting states": ((1,), lambda engine: patch.object(engine.optimizer, "state_dict", failing)),
    "a file of DeepSpeed's": ((1,), lambda engine: patch.object(engine.checkpoint_engine, "save", failing)),
    "the script beside it": ((0,), lambda engine: patch.object(engine, "_copy_recovery_script", failing)),
    "what ends a save of DeepSpeed's": ((1,), lambda engine: patch.object(engine.checkpoint_engine, "commit", failing)),
    "torch's own": ((1,), lambda _: patch.object(torch, "save", failing)),
    "every rank": ((0, 1), lambda engine: patch.object(engine.checkpoint_engine, "save", failing)),
    "generators": ((1,), lambda _: patch.object(saving, "random_states", failing)),
    "where states lie": ((1,), lambda _: patch.object(saving, "index_of", failing)),
    "the index": ((0,), lambda _: patch.object(pieces.Index, "as_json", failing)),
    "listing": ((1,), lambda _: patch.object(manifest, "names_in", failing)),
    "summing up": ((1,), lambda _: patch.object(manifest, "sum_of", failing)),
    "the manifest": ((0,), lambda _: patch.object(manifest.Manifest, "write", failing)),
    "syncing what one has written": ((1,), lambda _: patch.object(os, "fsync", failing)),
    "publishing": ((0,), lambda _: patch.object(Path, "rename", failing)),
    "no latest": ((0,), lambda _: patch.object(tags, "write_whole", failing)),
}


# What is said where ranks ask for different things -> the call.
DIFFERING: dict[str, Callable[[Any, int, str], Any]] = {
    "tag: rank 0: 'of rank 0'; rank 1: 'of rank 1'": lambda e, r, at: e.save_checkpoint(at, f"of rank {r}"),
    "save_latest: rank 0: 'True'; rank 1: 'False'": lambda e, r, at: e.save_checkpoint(at, "a", save_latest=not r),
    "save_dir is given: rank 0: 'False'; rank 1: 'True'": lambda e, r, at: e.save_checkpoint(at if r else "", "a"),
    "saved/1 is not the folder that rank 0 writes to": lambda e, r, at: e.save_checkpoint(f"{at}/{r}", "a"),
    "tag 'latest': that name is reserved": lambda e, r, at: e.save_checkpoint(at, "latest"),
    "tag: rank 0: 'other'; rank 1: 'good'": lambda e, r, at: e.load_checkpoint(at, "good" if r else "other"),
    "load_module_only: rank 0: 'False'": lambda e, r, at: e.load_checkpoint(at, "good", load_module_only=r == 1),
}


def said_where_nothing_is(engine: Any, folder: str) -> dict[str, str]:
    """What loads say of folders that are not those of checkpoints, while one tag is being saved in one of them."""
    said = {"no folder": said_by(lambda: engine.load_checkpoint(folder))}
    torch.distributed.barrier()
    Path(folder).mkdir(exist_ok=True, parents=True)
    said["no checkpoint"] = said_by(lambda: engine.load_checkpoint(folder))
    engine.save_checkpoint(folder, "good", save_latest=False)
    said["one tag"] = said_by(lambda: engine.load_checkpoint(folder))
    said["of a tag"] = said_by(lambda: engine.load_checkpoint(f"{folder}/good"))
    said["of a tag, named"] = said_by(lambda: engine.load_checkpoint(f"{folder}/good", "good"))
    assert engine.load_checkpoint(folder, "good")[0] is not None
    return said


def fail_everywhere(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    hurry()
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 20}}
    engine = make(rank, Case(ep_size=2, stage=1, k=2), scheduler=scheduler)
    train(engine, rank, 0)
    said: dict[str, Any] = said_where_nothing_is(engine, f"{folder}/0")
    engine.save_checkpoint(folder, "good")
    for name, (ranks, failure) in FAILURES.items():
        with ExitStack() as stack:
            if rank in ranks:
                stack.enter_context(failure(engine))
            said[name] = said_by(lambda name=name: engine.save_checkpoint(folder, name))
        # Not one collective too many or too few.
        train(engine, rank, 0, 1)
    # What only rank 0 writes, and what only rank 1 cannot take in.
    said["a script's state"] = said_by(lambda: engine.save_checkpoint(folder, "a", client_state={"x": lambda: None}))
    with patch.object(type(engine), "load_module_state_dict", failing if rank else type(engine).load_module_state_dict):
        said["loading"] = said_by(lambda: engine.load_checkpoint(folder))
    describe = manifest.Manifest.write

    def beside_another_job(self: manifest.Manifest, place: Path) -> None:
        describe(self, place)
        other = publishing.Publication(Path(folder), "good", "00000000")
        other.begin()
        (other.unfinished / "theirs").write_text("x")
        other.publish()

    with patch.object(manifest.Manifest, "write", beside_another_job):
        said["two jobs"] = said_by(lambda: engine.save_checkpoint(folder, "good"))
    assert (Path(folder) / "good" / "theirs").exists()
    engine.save_checkpoint(folder, "good")
    for words, call in DIFFERING.items():
        said[words] = said_by(lambda call=call: call(engine, rank, folder))
    with pytest.raises(ValueError, match="save_dir must be a non-empty string"):
        engine.save_checkpoint("", "a")
    torch.distributed.barrier()
    said["folders"] = sorted(each.name for each in Path(folder).iterdir() if each.is_dir() and each.name not in "01")
    assert engine.load_checkpoint(folder)[0] is not None
    train(engine, rank, 2)
    engine.save_checkpoint(folder, "better", {}, True, False)  # by position, as DeepSpeed has them
    engine.destroy()
    return said


def test_a_save_that_fails_on_one_rank_ends_on_all_with_its_cause_and_nothing_is_left(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    first, second = run_on_ranks(fail_everywhere, 2, tmp_path / "ranks", str(folder))
    assert first == second
    for name, (ranks, _) in FAILURES.items():
        where = "ranks 0-1" if len(ranks) > 1 else f"rank {ranks[0]}"
        assert f"failed on {where}: OSError: [Errno 28] No space left on device" in first[name], (name, first[name])
        assert str(folder) in first[name]
    for words in DIFFERING:
        assert words in first[words]
    assert "lambda" in first["a script's state"]
    assert "failed on rank 1: OSError: [Errno 28] No space left on device" in first["loading"]
    assert "another job has saved" in first["two jobs"]
    place = folder / "0"
    begin, new_run = f"{place}: no tag was given, and the folder has no latest file; ", "; to start a new run"
    assert first["no folder"].startswith(f"{begin}there is no such folder{new_run}")
    assert first["no checkpoint"].startswith(f"{begin}there is no checkpoint in this folder{new_run}")
    assert first["one tag"] == f"{begin}there are: good"
    of_a_tag = f"this is the folder of one checkpoint: call load_checkpoint('{place}', tag='good')"
    assert first["of a tag"] == f"{begin.replace(str(place), str(place / 'good'))}{of_a_tag}"
    assert first["of a tag, named"] == f"{place / 'good' / 'good'}: no such checkpoint; {of_a_tag}"
    # Where latest alone could not be written, the tag is there.
    assert first["folders"] == ["good", "no latest"]
    assert (folder / "latest").read_text() == "better"
