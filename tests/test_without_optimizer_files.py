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


def wrong_weights(engine: Any, folder: str) -> list[str]:
    """What is not as it was saved, and whether the engine goes on from it."""
    import ds_fsmoe

    found = ds_fsmoe.whole_state_dict(engine)
    right = torch.load(f"{folder}.pt")
    wrong = [name for name in right if dist.get_rank() == 0 and not torch.equal(found[name], right[name])]
    train(engine, 2, 1)
    return wrong


# ---- Hugging Face models


def save_and_load(rank: int, world_size: int, folder: str) -> tuple[list[str], list[str]]:
    """What is wrong after loads in the same layout; what a load with states says, and one of ZeRO 3."""
    import ds_fsmoe

    wrong, said = [], []
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
            said.append(said_by(engine, place, **WEIGHTS))
            said.append(said_by(engine, place, load_module_only=True))
            engine.destroy()
            continue
        for how in ("cut", "one", "all"):
            thin_out(Path(place) / "tag", how)
            said.append(said_by(engine, place))
            _, state = engine.load_checkpoint(place, "tag", **WEIGHTS)
            wrong += [] if (state["seen"], engine.global_steps) == (17, 2) else [f"{layout.name} {how}: {state}"]
            wrong += [f"{layout.name} {how}: {each}" for each in wrong_weights(engine, place)]
        assert engine.load_checkpoint(place, "tag", load_module_only=True)[0] is not None
        wrong += [f"{layout.name} module only: {each}" for each in wrong_weights(engine, place)]
        engine.destroy()
    return wrong, said


def load_elsewhere(rank: int, world_size: int, folder: str, pairs: list[tuple[Layout, Layout]]) -> list[str]:
    wrong = []
    for source, target in pairs:
        engine = make(target, scale=1.5)
        engine.load_checkpoint(f"{folder}/{source.name}", "tag", **WEIGHTS)
        found = wrong_weights(engine, f"{folder}/{source.name}")
        wrong += [f"{source.name} in {target.name}: {each}" for each in found]
        engine.destroy()
    return wrong


def test_weights_are_loaded_where_files_of_the_optimizer_are_missing_or_cut_short(tmp_path: Path) -> None:
    saved = str(tmp_path)
    first, second = run_on_ranks(save_and_load, 2, tmp_path / "ranks", saved)
    assert first[0] == second[0] == []
    assert first[1] == second[1]
    *with_states, weights_of_3, module_of_3 = first[1]
    assert len(with_states) == 9
    for said in with_states:
        assert "optim_states.pt" in said, said
        assert "load_optimizer_states=False loads the weights without them" in said, said
    for said in (weights_of_3, module_of_3):
        file = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
        assert f"{file} is missing: at ZeRO 3 these files hold the weights as well" in said
    # In another layout, and by other numbers of ranks.
    at_0, at_2, in_bf16, _ = SAVED
    pairs = [(at_2, Layout(4, 2, 1)), (at_0, Layout(4, 4, 3)), (in_bf16, Layout(4, 2, 3, "bfloat16"))]
    assert run_on_ranks(load_elsewhere, 4, tmp_path / "four", saved, pairs) == [[]] * 4
    assert run_on_ranks(load_elsewhere, 1, tmp_path / "one", saved, [(at_2, Layout(1, 1, 0))]) == [[]]


# ---- layers of deepspeed.moe


def save_native(rank: int, world_size: int, folder: str) -> list[Any]:
    """The learning rate, steps and weights of engines that have loaded without the optimizer's files: of ours, of
    stock's, and of ours in another layout."""
    import deepspeed

    import ds_fsmoe

    hurry()
    found, ours = [], ds_fsmoe.initialize
    for stage in (0, 1, 2):
        case, place = Case(ep_size=2, stage=stage, k=2), f"{folder}/{stage}"
        engine = make_native(rank, case, scheduler=SCHEDULER)
        train_native(engine, rank, 0, 3)
        engine.save_checkpoint(place, "tag")
        right = [each.detach().clone() for each in engine.module.parameters()]
        engine.destroy()
        thin_out(Path(place) / "tag", "all")
        told = []
        for initialize in (ours, deepspeed.initialize):
            ds_fsmoe.initialize = initialize
            engine = make_native(rank, case, scale=0.3, scheduler=SCHEDULER)
            engine.load_checkpoint(place, "tag", **WEIGHTS)
            assert all(map(torch.equal, right, engine.module.parameters())), (stage, initialize)
            told.append((engine.get_lr(), engine.lr_scheduler.state_dict(), engine.global_steps))
            told.append(train_native(engine, rank, 3, 2))
            engine.destroy()
        found.append(told)
        ds_fsmoe.initialize = ours
        other = Case(ep_size=1, stage=2 - stage, k=2)
        engine = make_native(rank, other, scale=0.3, scheduler=SCHEDULER)
        engine.load_checkpoint(place, "tag", **WEIGHTS)
        engine.save_checkpoint(f"{folder}/{stage} moved", "tag")
        engine.destroy()
    return found


def test_deepspeeds_layers_too_go_on_as_with_stock(tmp_path: Path) -> None:
    for found in run_on_ranks(save_native, 2, tmp_path / "ranks", str(tmp_path)):
        for ours, our_losses, stock, stock_losses in found:
            assert ours == stock
            assert our_losses == pytest.approx(stock_losses, rel=1e-6)
    for stage in (0, 1, 2):
        was, now = Whole(tmp_path / str(stage) / "tag"), Whole(tmp_path / f"{stage} moved" / "tag")
        assert [name for name in was.names() if not torch.equal(was.weights(name), now.weights(name))] == []
    # What reads the optimizer's precision still says which file it misses.
    assert main(["convert", str(tmp_path / "1" / "tag"), str(tmp_path / "fp32"), "--to", "fp32"]) == 2
