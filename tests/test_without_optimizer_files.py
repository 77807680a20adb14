# SPDX-License-Identifier: Apache-2.0
"""Weights are loaded without the optimizer's files: from a checkpoint in which they were deleted to save space."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

from ds_fsmoe.checkpoint_files.tags import CheckpointError
from ds_fsmoe.checkpoint_files.whole import Whole
from ds_fsmoe.cli import main
from tests.hurry import hurry
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.small_model import Case
from tests.test_checkpoint_corners import make as make_native
from tests.test_checkpoint_corners import train as train_native
from tests.test_hugging_face_files import Layout, make, train

pytestmark = pytest.mark.long

WEIGHTS = {"load_optimizer_states": False}
SCHEDULER = {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 1e-2}}
SAVED = [Layout(2, 2, 0), Layout(2, 2, 2), Layout(2, 2, 2, "bfloat16"), Layout(2, 2, 3)]


def thin_out(place: Path, how: str) -> None:
    """Remove, or cut short, files of the optimizer's states; on rank 0."""
    dist.barrier()
    if dist.get_rank() == 0:
        files = sorted(place.glob("*optim_states.pt"))
        assert files
        for each in files if how == "all" else files[:1]:
            each.write_bytes(each.read_bytes()[:100]) if how == "cut" else each.unlink()
    dist.barrier()


def said_by(engine: Any, folder: str, **asked: Any) -> str:
    before = [each.detach().clone() for each in engine.module.parameters()]
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(folder, "tag", **asked)
    assert all(map(torch.equal, before, engine.module.parameters()))
    return str(caught.value)


def check_weights(engine: Any, folder: str) -> None:
    """They are as they were saved, and the engine goes on from them."""
    import ds_fsmoe

    found = ds_fsmoe.whole_state_dict(engine)
    right = torch.load(f"{folder}.pt")
    assert [name for name in right if dist.get_rank() == 0 and not torch.equal(found[name], right[name])] == []
    train(engine, 2, 1)


# ---- Hugging Face models


def save_and_load(rank: int, world_size: int, folder: str) -> None:
    """Load in the same layout, with ever fewer of the files."""
    import ds_fsmoe

    for layout in SAVED:
        place = f"{folder}/{layout.name}"
        engine = make(layout)
        train(engine, 0, 2)
        engine.save_checkpoint(place, "tag", client_state={"seen": 17})
        whole = ds_fsmoe.whole_state_dict(engine)
        if rank == 0:
            torch.save(whole, f"{place}.pt")
        engine.destroy()
        engine = make(layout, scale=1.5)
        if layout.stage == 3:
            thin_out(Path(place) / "tag", "one")
            for asked in (WEIGHTS, {"load_module_only": True}):
                said = said_by(engine, place, **asked)
                assert "zero_pp_rank_0_mp_rank_00_optim_states.pt is missing: at ZeRO 3 these files hold the w" in said
            engine.destroy()
            continue
        for how in ("cut", "one", "all"):
            thin_out(Path(place) / "tag", how)
            said = said_by(engine, place)
            assert "optim_states.pt" in said
            assert "load_optimizer_states=False loads the weights without them" in said
            _, state = engine.load_checkpoint(place, "tag", **WEIGHTS)
            assert (state["seen"], engine.global_steps) == (17, 2)
            check_weights(engine, place)
        assert engine.load_checkpoint(place, "tag", load_module_only=True)[0] is not None
        check_weights(engine, place)
        engine.destroy()


def load_elsewhere(rank: int, world_size: int, folder: str, pairs: list[tuple[Layout, Layout]]) -> None:
    for source, target in pairs:
        engine = make(target, scale=1.5)
        engine.load_checkpoint(f"{folder}/{source.name}", "tag", **WEIGHTS)
        check_weights(engine, f"{folder}/{source.name}")
        engine.destroy()


def test_weights_are_loaded_where_files_of_the_optimizer_are_missing_or_cut_short(tmp_path: Path) -> None:
    run_on_ranks(save_and_load, 2, tmp_path / "ranks", str(tmp_path))
    # In another layout, and by other numbers of ranks.
    at_0, at_2, in_bf16, _ = SAVED
    pairs = [(at_2, Layout(4, 2, 1)), (at_0, Layout(4, 4, 3)), (in_bf16, Layout(4, 2, 3, "bfloat16"))]
    run_on_ranks(load_elsewhere, 4, tmp_path / "four", str(tmp_path), pairs)
    run_on_ranks(load_elsewhere, 1, tmp_path / "one", str(tmp_path), [(at_2, Layout(1, 1, 0))])


# ---- layers of deepspeed.moe


def save_native(rank: int, world_size: int, folder: str, stage: int) -> None:
    """Engines that have loaded without the optimizer's files, of ours and of stock's, go on alike."""
    import deepspeed

    import ds_fsmoe

    hurry()
    ours = ds_fsmoe.initialize
    case, place = Case(ep_size=2, stage=stage, k=2), f"{folder}/saved"
    engine = make_native(rank, case, scheduler=SCHEDULER)
    train_native(engine, rank, 0, 3)
    engine.save_checkpoint(place, "tag")
    right = [each.detach().clone() for each in engine.module.parameters()]
    engine.destroy()
    thin_out(Path(place) / "tag", "all")
    states, losses = [], []
    for initialize in (ours, deepspeed.initialize):
        ds_fsmoe.initialize = initialize
        engine = make_native(rank, case, scale=0.3, scheduler=SCHEDULER)
        engine.load_checkpoint(place, "tag", **WEIGHTS)
        assert all(map(torch.equal, right, engine.module.parameters())), initialize
        states.append((engine.get_lr(), engine.lr_scheduler.state_dict(), engine.global_steps))
        losses.append(train_native(engine, rank, 3, 2))
        engine.destroy()
    assert states[0] == states[1]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    ds_fsmoe.initialize = ours
    engine = make_native(rank, Case(ep_size=1, stage=2 - stage, k=2), scale=0.3, scheduler=SCHEDULER)
    engine.load_checkpoint(place, "tag", **WEIGHTS)
    engine.save_checkpoint(f"{folder}/moved", "tag")
    engine.destroy()


@sampled("stage", [0, 1, 2], kept=[1])
def test_deepspeeds_layers_too_go_on_as_with_stock(stage: int, tmp_path: Path) -> None:
    run_on_ranks(save_native, 2, tmp_path / "ranks", str(tmp_path), stage)
    was, now = (Whole(tmp_path / each / "tag") for each in ("saved", "moved"))
    assert [name for name in was.names() if not torch.equal(was.weights(name), now.weights(name))] == []
    # What reads the optimizer's precision still says which file it misses.
    if stage:
        assert main(["convert", str(was.place), str(tmp_path / "fp32"), "--to", "fp32"]) == 2
