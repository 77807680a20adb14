# SPDX-License-Identifier: Apache-2.0
"""What cannot be gone on from is refused when it is loaded, on every rank; what a save will not keep is said then."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ds_fsmoe.checkpoint_files.manifest import NAME, sum_of
from ds_fsmoe.checkpoint_files.tags import CheckpointError
from tests.hurry import hurry
from tests.logged import Said
from tests.ranks import run_on_ranks
from tests.small_model import Case, batch
from tests.test_checkpoint_corners import ADAM, make, train

SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}


def said_by(call: Callable[[], Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        call()
    return str(caught.value)


# ---- another optimizer


def other_optimizers(rank: int, world_size: int, folder: str) -> dict[str, str]:
    import deepspeed

    import ds_fsmoe

    hurry()
    said = {}
    stock, ours = deepspeed.initialize, ds_fsmoe.initialize
    for saver, stage, kept, other in (("ours", 0, ADAM, SGD), ("ours", 1, SGD, ADAM), ("stock", 1, ADAM, SGD)):
        case, name = Case(ep_size=2, stage=stage, k=2), f"{saver} {stage} {kept['type']}"
        ds_fsmoe.initialize = stock if saver == "stock" else ours
        engine = make(rank, case, optimizer=kept)
        train(engine, rank, 0)
        engine.save_checkpoint(f"{folder}/{name}")
        engine.destroy()
        ds_fsmoe.initialize = ours
        engine = make(rank, case, scale=0.3, optimizer=other)
        before = engine.module.first.weight.detach().clone()
        said[name] = said_by(lambda engine=engine, name=name: engine.load_checkpoint(f"{folder}/{name}"))
        if saver == "ours":
            assert torch.equal(engine.module.first.weight, before)
            engine.load_checkpoint(f"{folder}/{name}", load_optimizer_states=False)
            assert not torch.equal(engine.module.first.weight, before)
            train(engine, rank, 2)
        engine.destroy()
    # Without an optimizer there is nothing to be refused.
    engine = make(rank, Case(ep_size=2, k=2), optimizer={})
    assert engine.load_checkpoint(f"{folder}/ours 0 Adam")[0] is not None
    engine.destroy()
    return said


def test_another_optimizer_in_the_same_layout_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    first, second = run_on_ranks(other_optimizers, 2, tmp_path / "ranks", str(tmp_path / "saved"))
    assert first == second
    assert len(first) == 3
    for name, said in first.items():
        saver, _, kept = name.split()
        kept, now = ("AdamW", "SGD") if kept == "Adam" else ("SGD", "AdamW")
        words = f"has optimizer states of {kept}, and this job's optimizer is {now}"
        assert (words if saver == "ours" else "has states of another optimizer than SGD: its groups lack") in said
        assert "load_optimizer_states=False" in said


# ---- files


def rewrite(place: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    found = json.loads((place / NAME).read_text())
    change(found)
    (place / NAME).write_text(json.dumps(found))


def with_plans(place: Path, shares: int) -> None:
    """Somebody who can write files can also sum them up."""
    for file in place.glob("fsmoe_rank_*.pt"):
        state = torch.load(file)
        plans = json.loads(state["plans"])
        for layer in plans["layers"].values():
            layer["forward"]["shares"] = [1 / shares] * shares
        torch.save(state | {"plans": json.dumps(plans)}, file)
        found = sum_of(file)
        rewrite(place, lambda each, file=file, found=found: each["files"].update({file.name: vars(found)}))


def instead(path: Path, make_it: Callable[[Path], Any]) -> None:
    path.unlink()
    make_it(path)


ZERO = "/dev/zero"
CHANGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no manifest": (lambda place: (place / NAME).unlink(), "fsmoe.json is missing, and fsmoe_pieces.json says that"),
    "no files": (lambda place: rewrite(place, lambda found: found.update(files={})), "does not name fsmoe_pieces.json"),
    "no files, twice": (
        lambda place: (place / NAME).write_text((place / NAME).read_text()[:-1] + ', "files": {}}'),
        "'files' is listed twice",
    ),
    "a FIFO": (lambda place: instead(place / "mp_rank_00_model_states.pt", os.mkfifo), "is a FIFO, not a regular"),
    "a device": (
        lambda place: instead(place / "layer_1_expert_2_mp_rank_00_model_states.pt", lambda at: at.symlink_to(ZERO)),
        "is a device, not a regular file",
    ),
    "a link": (
        lambda place: instead(place / "fsmoe_rank_00001.pt", lambda at: at.symlink_to("/etc/hostname")),
        "is a link to /etc/hostname, outside of",
    ),
    "a FIFO for a manifest": (lambda place: instead(place / NAME, os.mkfifo), "fsmoe.json is a FIFO"),
    "100000 chunks": (lambda place: with_plans(place, 100_000), "a plan of 100000 chunks for L00"),
    "latest elsewhere": (
        lambda place: (place.parent / "latest").write_text(f"../{place.parent.name}/tag"), "is not a folder in"
    ),
    "latest a FIFO": (lambda place: instead(place.parent / "latest", os.mkfifo), "latest is a FIFO"),
}  # fmt: skip


def refused(rank: int, world_size: int, folder: str) -> dict[str, str]:
    hurry()
    engine = make(rank, Case(ep_size=2, stage=1, k=2))
    train(engine, rank, 0)
    said = {}
    for name, (change, _) in CHANGES.items():
        engine.save_checkpoint(f"{folder}/{name}", "tag")
        torch.distributed.barrier()
        if rank == 0:
            change(Path(folder) / name / "tag")
        torch.distributed.barrier()
        said[name] = said_by(lambda name=name: engine.load_checkpoint(f"{folder}/{name}"))
    engine.save_checkpoint(f"{folder}/over", "tag")

    def save_over(src: Any, dst: Any) -> None:
        if rank == 0:
            rewrite(Path(folder) / "over" / "tag", lambda found: found["versions"].update(torch="another"))
        dst.load_state_dict(src)

    said["over"] = said_by(lambda: engine.load_checkpoint(f"{folder}/over", custom_load_fn=save_over))
    # Files of somebody else beside them are no matter, nor is a link to the folder.
    if rank == 0:
        place = Path(folder) / "over" / "tag"
        (place / "layer_7_expert_0_mp_rank_00_model_states.pt").write_text("mine")
        (place.parent / "best").symlink_to("tag")
    torch.distributed.barrier()
    assert engine.load_checkpoint(f"{folder}/over", "best")[0] is not None
    engine.destroy()
    return said


def test_what_is_not_a_whole_checkpoint_of_regular_files_is_refused_on_every_rank(tmp_path: Path) -> None:
    first, second = run_on_ranks(refused, 2, tmp_path / "ranks", str(tmp_path / "saved"))
    assert first == second
    for name, (_, words) in CHANGES.items():
        assert words in first[name], (name, first[name])
        assert str(tmp_path) in first[name]
    assert "was overwritten while it was read: load it again" in first["over"]


# ---- what is said when it is saved


def what_is_lost(rank: int, world_size: int, folder: str) -> list[list[str]]:
    hurry()
    heard = Said(logging.WARNING)
    logging.getLogger("ds_fsmoe").addHandler(heard)
    engine = make(rank, Case(stage=1, accumulation=3, k=2))
    kept: dict[str, Any] = {"numbers": np.ones(3), "names": [np.array(["a"])], "day": np.datetime64("2020-01-01")}
    found = []

    def saved(**state: Any) -> None:
        heard.lines.clear()
        engine.save_checkpoint(folder, "tag", **state)
        found.append([each for each in heard.lines if "tag" in each])

    saved()
    for micro in range(3):
        loss, _ = engine(*batch(micro, rank, torch.float32))
        engine.backward(loss)
        saved()
        engine.step()
        saved()
    saved(client_state=kept)
    engine.destroy()
    return found


def test_a_save_says_what_it_does_not_keep(tmp_path: Path) -> None:
    (first,) = run_on_ranks(what_is_lost, 1, tmp_path / "ranks", str(tmp_path / "saved"))
    assert [len(each) for each in first] == [0, 1, 1, 1, 1, 1, 0, 2]
    assert all("gradients are lost: save after engine.step()" in each for said in first[1:6] for each in said)
    assert [each.split(": ")[1].split(" is a")[0] for each in first[7]] == [
        "client_state['names'][0]",
        "client_state['day']",
    ]


def test_a_checkpoint_is_converted_from_what_it_names_and_nothing_else(tmp_path: Path) -> None:
    from ds_fsmoe.checkpoint_files import convert

    saved = tmp_path / "saved"
    run_on_ranks(save_one, 1, tmp_path / "ranks", str(saved))
    (tmp_path / "secret").write_text("secret")
    (saved / "tag" / "link.txt").symlink_to("../../secret")
    for name in ("out.saving", "out.before"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("mine")

    def converted(to: str) -> list[str]:
        whole = convert.open_checked(convert.find_tag(saved, None))
        return [name for name, _ in convert.export_stock(whole, tmp_path / to)]

    assert "mp_rank_00_model_states.pt" in converted("out")
    assert not (tmp_path / "out" / "tag" / "link.txt").exists()
    assert all((tmp_path / name / "mine").exists() for name in ("out.saving", "out.before"))
    files = convert.export_stock(convert.open_checked(saved / "tag"), tmp_path / "again")
    next(files)
    rewrite(saved / "tag", lambda found: found["versions"].update(torch="another"))
    with pytest.raises(CheckpointError, match="was overwritten while it was read: convert it again"):
        list(files)
    rewrite(saved / "tag", lambda found: found["files"].update({"link.txt": {"size_bytes": 6, "sha256": "x"}}))
    with pytest.raises(CheckpointError, match=r"link\.txt is a link to"):
        converted("again")
    shutil.copytree(saved, tmp_path / "stock", symlinks=True)
    for each in (tmp_path / "stock" / "tag").glob("fsmoe*"):
        each.unlink()
    saved = tmp_path / "stock"
    with pytest.raises(CheckpointError, match=r"link\.txt is a link to"):
        converted("again")
    assert sorted(each.name for each in tmp_path.glob("*again*")) == []


def save_one(rank: int, world_size: int, folder: str) -> None:
    hurry()
    engine = make(rank, Case(k=2))
    engine.save_checkpoint(folder, "tag")
    engine.destroy()
