# SPDX-License-Identifier: Apache-2.0
"""What cannot be gone on from is refused when it is loaded, on every rank; what a save will not keep is said then."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from ds_fsmoe.checkpoint import loading
from ds_fsmoe.checkpoint_files import convert, pieces, whole
from ds_fsmoe.checkpoint_files.manifest import NAME, sum_of
from ds_fsmoe.checkpoint_files.tags import CheckpointError
from tests.hurry import hurry
from tests.logged import heard
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
    # In another layout too it is the optimizer that is named.
    engine = make(rank, Case(ep_size=1, k=2), optimizer=SGD)
    said["ours elsewhere Adam"] = said_by(lambda: engine.load_checkpoint(f"{folder}/ours 0 Adam"))
    engine.destroy()
    return said


def test_another_optimizer_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    first, second = run_on_ranks(other_optimizers, 2, tmp_path / "ranks", str(tmp_path / "saved"))
    assert first == second
    assert len(first) == 4
    for name, said in first.items():
        saver, _, kept = name.split()
        kept, now = ("AdamW", "SGD") if kept == "Adam" else ("SGD", "AdamW")
        words = f"has optimizer states of {kept}, and this job's optimizer is {now}. Load it with "
        words += "load_optimizer_states=False (weights only), or with the original optimizer"
        assert (words if saver == "ours" else "has states of another optimizer than SGD: its groups lack") in said
        assert "load_optimizer_states=False" in said


# ---- files

EXPERT, DENSE, OWN = "layer_0_expert_0_mp_rank_00_model_states.pt", "mp_rank_00_model_states.pt", "fsmoe_rank_00001.pt"


def rewrite(place: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    found = json.loads((place / NAME).read_text())
    change(found)
    (place / NAME).write_text(json.dumps(found))


def sum_up(place: Path, file: Path) -> None:
    """Somebody who can write files can also sum them up."""
    rewrite(place, lambda found: found["files"].update({file.name: vars(sum_of(file))}))


def of_state(place: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change what the second rank has saved of itself."""
    state = torch.load(place / OWN, weights_only=True)
    change(state)
    torch.save(state, place / OWN)
    sum_up(place, place / OWN)


def with_plans(state: dict[str, Any], shares: int) -> None:
    plans = json.loads(state["plans"])
    for layer in plans["layers"].values():
        layer["forward"]["shares"] = [1 / shares] * shares
    state["plans"] = json.dumps(plans)


def of_index(place: Path, change: Callable[[list[Any]], Any]) -> None:
    """Change the pieces of a group of the index."""
    found = json.loads((place / pieces.NAME).read_text())
    change(found["groups"][0]["pieces"])
    (place / pieces.NAME).write_text(json.dumps(found))
    sum_up(place, place / pieces.NAME)


def instead(place: Path, name: str, make_it: Callable[[Path, bytes], Any]) -> None:
    """Put something in the place of a file, and tell it the content; ``latest`` lies beside the tag's folder."""
    path = (place.parent if name == "latest" else place) / name
    content = path.read_bytes()
    path.unlink()
    make_it(path, content)


def a_pipe(path: Path, _: bytes) -> None:
    os.mkfifo(path)


def flipped(path: Path, was: bytes) -> None:
    path.write_bytes(was[:-1] + bytes([was[-1] ^ 1]))


def linked(target: str) -> Callable[[Path, bytes], None]:
    return lambda path, _: path.symlink_to(target)


def resize(place: Path, **changed: int) -> None:
    rewrite(place, lambda found: found["sizes"].update(changed))


BYTES, NUMPY = torch.zeros(3, dtype=torch.uint8), {"keys": torch.zeros(3, dtype=torch.int64)}
CHANGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    # Files that are not those that were saved.
    "changed": (lambda at: instead(at, EXPERT, flipped), "is not what was saved: its checksum differs"),
    "short": (lambda at: instead(at, EXPERT, lambda new, was: new.write_bytes(was[:100])), "100 bytes and should have"),
    "missing": (lambda at: (at / EXPERT).unlink(), f"{EXPERT} is missing"),
    # What is no file.
    "a FIFO": (lambda at: instead(at, DENSE, a_pipe), "is a FIFO, not a regular"),
    "a device": (lambda at: instead(at, EXPERT, linked("/dev/zero")), "is a device, not a regular file"),
    "a link": (lambda at: instead(at, OWN, linked("/etc/hostname")), "is a link to /etc/hostname"),
    # What describes them.
    "no manifest": (lambda at: (at / NAME).unlink(), "fsmoe.json is missing, and fsmoe_pieces.json says that"),
    "a FIFO for a manifest": (lambda at: instead(at, NAME, a_pipe), "fsmoe.json is a FIFO"),
    "no files": (lambda at: rewrite(at, lambda found: found.update(files={})), "does not name fsmoe_pieces.json"),
    "layout": (lambda at: resize(at, mp=2, world=8), "layout (world 8 -> 2; mp 2 -> 1) and cannot be converted"),
    "shards": (lambda at: resize(at, esp=2), "has 4 files of experts of moes.0, and should have 8"),
    "index: twice": (lambda at: of_index(at, lambda of: of.append([*of[0][:3], 10**6])), "is there twice in"),
    "index: ranks": (lambda at: of_index(at, lambda of: of.extend([each[0], 0, 0, 0] for each in of * 999)), "at most"),
    # What a rank says of itself, with a checksum that fits. Of the generators, torch's is set last.
    "torch's generator": (lambda at: of_state(at, lambda of: of["random"].update(torch=BYTES)), "_00001.pt failed"),
    "numpy's": (lambda at: of_state(at, lambda of: of["random"]["numpy"].update(NUMPY)), "_00001.pt failed"),
    "format": (lambda at: of_state(at, lambda of: of.update(format=99)), "has format 99"),
    "no plans": (lambda at: of_state(at, lambda of: of.update(plans='{"layers": {}}')), "_00001.pt failed"),
    "100000 chunks": (lambda at: of_state(at, lambda of: with_plans(of, 100_000)), "a plan of 100000 chunks for L00"),
    # Which tag it is.
    "latest gone": (lambda at: (at.parent / "latest").write_text("gone"), "gone: no such checkpoint; there are: tag"),
    "latest a FIFO": (lambda at: instead(at, "latest", a_pipe), "latest is a FIFO"),
}


def unexpected(*_: Any, **__: Any) -> Any:
    raise AssertionError("a file is read")


def refused(rank: int, world_size: int, folder: str) -> dict[str, str]:
    hurry()
    engine = make(rank, Case(ep_size=2, stage=1, k=2))
    train(engine, rank, 0)
    for name, (change, _) in CHANGES.items():
        engine.save_checkpoint(f"{folder}/{name}", "tag")
        torch.distributed.barrier()
        if rank == 0:
            change(Path(folder) / name / "tag")
        torch.distributed.barrier()
    engine.save_checkpoint(f"{folder}/over", "tag")
    said = {}
    with torch.no_grad():
        engine.module.middle.weight.fill_(0.5)
    generator = torch.get_rng_state()
    for name in CHANGES:
        said[name] = said_by(lambda name=name: engine.load_checkpoint(f"{folder}/{name}"))
        assert bool((engine.module.middle.weight == 0.5).all()), f"{name}: weights were changed"
        assert torch.equal(torch.get_rng_state(), generator), f"{name}: a generator was changed"

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
    # An index is refused in any layout, and before anything is read.
    engine = make(rank, Case(ep_size=2, stage=2, k=2))
    for name in CHANGES:
        if name.startswith("index"):
            with patch.object(loading, "read_file", unexpected), patch.object(whole, "read_file", unexpected):
                moved = said_by(lambda name=name: engine.load_checkpoint(f"{folder}/{name}"))
            assert moved == said[name]
    engine.destroy()
    return said


def test_what_is_not_a_whole_checkpoint_of_regular_files_is_refused_on_every_rank(tmp_path: Path) -> None:
    first, second = run_on_ranks(refused, 2, tmp_path / "ranks", str(tmp_path / "saved"))
    assert first == second
    for name, (_, words) in CHANGES.items():
        assert words in first[name], (name, first[name])
        assert str(tmp_path) in first[name]
        assert name.startswith("index") <= (f"{pieces.NAME} is damaged, or not a manifest" in first[name]), name
    assert "was overwritten while it was read: load it again" in first["over"]


# ---- what is said when it is saved


def what_is_lost(rank: int, world_size: int, folder: str) -> list[list[str]]:
    hurry()
    engine = make(rank, Case(k=2))
    engine.save_checkpoint(f"{folder}/whole", "tag")
    engine.destroy()
    listening = heard("WARNING")
    engine = make(rank, Case(stage=1, accumulation=3, k=2))
    kept: dict[str, Any] = {"numbers": np.ones(3), "names": [np.array(["a"])], "day": np.datetime64("2020-01-01")}
    found = []

    def saved(**state: Any) -> None:
        listening.lines.clear()
        engine.save_checkpoint(f"{folder}/partly", "tag", **state)
        found.append([each for each in listening.lines if "tag" in each])

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


@pytest.fixture(scope="module")
def saved_alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[str]]]:
    root = tmp_path_factory.mktemp("alone")
    return root / "saved", run_on_ranks(what_is_lost, 1, root / "ranks", str(root / "saved"))[0]


def test_a_save_says_what_it_does_not_keep(saved_alone: tuple[Path, list[list[str]]]) -> None:
    first = saved_alone[1]
    assert [len(each) for each in first] == [0, 1, 1, 1, 1, 1, 0, 2]
    assert all("gradients are lost: save after engine.step()" in each for said in first[1:6] for each in said)
    assert [each.split(": ")[1].split(" is a")[0] for each in first[7]] == [
        "client_state['names'][0]",
        "client_state['day']",
    ]


def test_a_checkpoint_is_converted_from_what_it_names_and_nothing_else(
    saved_alone: tuple[Path, Any], tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    shutil.copytree(saved_alone[0] / "whole", saved)
    (tmp_path / "secret").write_text("secret")
    (saved / "tag" / "link.txt").symlink_to("../../secret")
    for name in ("out.saving", "out.before"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("mine")

    def converted(to: str) -> list[str]:
        opened = convert.open_checked(convert.find_tag(saved, None))
        return [name for name, _ in convert.export_stock(opened, tmp_path / to)]

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
