# SPDX-License-Identifier: Apache-2.0
"""Placements are saved, resumed and read from files, also between two moves and after a job that ended in one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

pytest.importorskip("transformers")

from ds_fsmoe.config.reading import ConfigError
from ds_fsmoe.planning.expert_placement import ExpertPlacement
from tests.placed_models import BALANCED, NUM_EXPERTS, made, trained
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.test_moved_experts import drawn, everywhere

pytestmark = pytest.mark.long


def resumed(rank: int, world_size: int, folder: str, stage: int) -> list[str]:
    """A checkpoint between two moves; a job that resumes has the losses of the job that goes on."""
    said = []
    engine = made(stage, world_size, BALANCED)
    trained(engine, rank, range(6), (0, 1, 2), world_size)
    watch = engine.fsmoe.placement_watch
    if not watch.wanted or all(each.is_at_start for each in engine.fsmoe.placement.now.values()):
        said.append("the checkpoint is not between two moves")
    before, where = everywhere(engine.fsmoe.placement), dict(engine.fsmoe.placement.now)
    engine.save_checkpoint(folder, tag="between")
    if everywhere(engine.fsmoe.placement) != before or engine.fsmoe.placement.now != where:
        said.append("saving has changed where experts are, or what they hold")
    wanted = trained(engine, rank, range(6, 10), (0, 1, 2), world_size)
    at_end = dict(engine.fsmoe.placement.now)
    engine.destroy()
    again = made(stage, world_size, BALANCED)
    again.load_checkpoint(folder, tag="between")
    if everywhere(again.fsmoe.placement) != before or again.fsmoe.placement.now != where:
        said.append("loading has not brought everything back")
    found = trained(again, rank, range(6, 10), (0, 1, 2), world_size)
    if found != wanted:
        said.append(f"losses {found} for {wanted}")
    if again.fsmoe.placement.now != at_end:
        said.append("experts went elsewhere")
    again.destroy()
    # One whose experts stay reads the same checkpoint.
    plain = made(stage, world_size, None)
    plain.load_checkpoint(folder, tag="between")
    if not np.allclose(trained(plain, rank, range(6, 10), (0, 1, 2), world_size), wanted, rtol=2e-5):
        said.append("a job whose experts stay goes on otherwise")
    plain.destroy()
    return said


@sampled(("world_size", "stage"), [(2, 2), (2, 3), (4, 0)], kept=[0])
def test_a_checkpoint_between_two_moves_is_whole_and_resumes(world_size: int, stage: int, tmp_path: Path) -> None:
    found = run_on_ranks(resumed, world_size, tmp_path, str(tmp_path / "saved"), stage)
    assert [each for of_rank in found for each in of_rank] == []


def files_of_placements(rank: int, world_size: int, folder: str) -> list[str]:
    said = []
    file = Path(folder) / "placement.json"
    engine = made(2, world_size, BALANCED)
    trained(engine, rank, range(8), (0, 1), world_size)
    engine.fsmoe.placement.save(file)
    dist.barrier()
    where = dict(engine.fsmoe.placement.now)
    engine.destroy()
    engine = made(2, world_size, {"file": str(file)})
    if engine.fsmoe.placement.now != where or engine.fsmoe.placement_watch is not None:
        said.append("experts are not where the file says")
    engine.destroy()
    whole = json.loads(file.read_text())
    paths = list(whole["layers"])
    # As version 0.2.0 wrote it, with two spare places on each rank, one of them with a replica.
    local, with_spare = NUM_EXPERTS // world_size, Path(folder) / "spare.json"
    for each in whole["layers"].values():
        homes = each["expert_of_place"]
        by_rank = [homes[at : at + local] for at in range(0, NUM_EXPERTS, local)]
        each["expert_of_place"] = [e for at in range(world_size) for e in (*by_rank[at], by_rank[at - 1][0], -1)]
    if rank == 0:
        with_spare.write_text(json.dumps(whole))
    dist.barrier()
    engine = made(2, world_size, {"file": str(with_spare)})
    if engine.fsmoe.placement.now != where:
        said.append("experts are not at the homes of a file with spare places")
    engine.destroy()
    damaged = {
        "other.json": {"format": 1, "layers": {"model.other": whole["layers"][paths[0]]}},
        "format.json": whole | {"format": 99},
        "twice.json": {
            "format": 1,
            "layers": {each: whole["layers"][each] | {"expert_of_place": [0] * NUM_EXPERTS} for each in paths},
        },
        "fewer.json": {
            "format": 1,
            "layers": {each: ExpertPlacement.at_start(4 * world_size, world_size).as_dict() for each in paths},
        },
    }
    for name, content in damaged.items():
        bad = Path(folder) / name
        if rank == 0:
            bad.write_text(json.dumps(content))
        dist.barrier()
        try:
            made(2, world_size, {"file": str(bad)})
            said.append(f"{name} was taken")
        except ConfigError as error:
            if str(bad) not in str(error) or "fsmoe.placement.file" not in str(error):
                said.append(f"{name}: {error}")
    return said


def test_a_placement_is_read_from_a_file_and_one_of_another_model_is_refused(tmp_path: Path) -> None:
    found = run_on_ranks(files_of_placements, 2, tmp_path, str(tmp_path))
    assert [each for of_rank in found for each in of_rank] == []


def ends_while_moving(rank: int, world_size: int, folder: str) -> None:
    engine = made(2, world_size, BALANCED)
    trained(engine, rank, range(3), (0, 1, 2), world_size)
    engine.save_checkpoint(folder, tag="before")

    def ends(operations: Any) -> Any:
        if rank == 1:
            os._exit(9)
        return exchange(operations)

    exchange, dist.batch_isend_irecv = dist.batch_isend_irecv, ends
    trained(engine, rank, range(3, 9), (0, 1, 2), world_size)


def goes_on(rank: int, world_size: int, folder: str) -> tuple[list[float], list[float], bool]:
    losses, has_moved = [], False
    for placement in (BALANCED, None):
        engine = made(2, world_size, placement)
        engine.load_checkpoint(folder)
        losses.append(trained(engine, rank, range(3, 9), (0, 1, 2), world_size))
        if placement is not None:
            has_moved = not all(each.is_at_start for each in engine.fsmoe.placement.now.values())
        engine.destroy()
    return losses[0], losses[1], has_moved


def test_the_last_checkpoint_is_whole_after_a_rank_has_ended_in_the_middle_of_a_move(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    with pytest.raises(RuntimeError):
        run_on_ranks(ends_while_moving, 2, tmp_path / "first", folder)
    for placed, stays, moved in run_on_ranks(goes_on, 2, tmp_path / "second", folder):
        assert moved
        assert np.allclose(placed, stays, rtol=2e-5)


def paths_resume(rank: int, world_size: int, folder: str) -> list[str]:
    said = []
    engine = made(2, world_size, {"profile_paths": True})
    trained(engine, rank, range(3), None, world_size)
    counted = {label: each.as_arrays() for label, each in engine.fsmoe.paths.profiles().items()}
    if not all(int(each["counts"].sum()) for each in counted.values()):
        said.append("nothing was counted")
    engine.save_checkpoint(folder, tag="counted")
    engine.destroy()
    again = made(2, world_size, {"profile_paths": True})
    again.load_checkpoint(folder, tag="counted")
    found = {label: each.as_arrays() for label, each in again.fsmoe.paths.profiles().items()}
    for label, arrays in counted.items():
        said += [f"{label}: {name}" for name, each in arrays.items() if not np.array_equal(each, found[label][name])]
    again.destroy()
    plain = made(2, world_size, None)
    plain.load_checkpoint(folder, tag="counted")
    plain.destroy()
    return said


@pytest.mark.daily("layers", 2)
def test_counts_of_paths_are_saved_and_go_on(tmp_path: Path) -> None:
    found = run_on_ranks(paths_resume, 2, tmp_path, str(tmp_path / "saved"))
    assert [each for of_rank in found for each in of_rank] == []


def decided_often(rank: int, world_size: int, folder: str) -> list[str]:
    """Experts change places again and again, within ranks too; what is saved is in the model's own order."""
    said = []
    engine = made(2, world_size, {"policy": "balanced", "every": 1000})
    placement = engine.fsmoe.placement
    for step in range(5):
        trained(engine, rank, range(step, step + 1), None, world_size)
        # As decisions do it, who do not care for places within a rank.
        mover = placement.mover()
        for label, now in list(placement.now.items()):
            for first, second in now.swaps_to(drawn(now, 17 * step + len(label))):
                placement.swap(mover, [(label, first, second)])
    where = dict(placement.now)
    engine.save_checkpoint(folder, tag="often")
    if placement.now != where:
        said.append("experts did not come back to their places")
    wanted = trained(engine, rank, range(5, 8), None, world_size)
    engine.destroy()
    plain = made(2, world_size, None)
    plain.load_checkpoint(folder, tag="often")
    if not np.allclose(trained(plain, rank, range(5, 8), None, world_size), wanted, rtol=2e-5):
        said.append("a job whose experts stay goes on otherwise")
    plain.destroy()
    return said


def test_what_is_saved_after_many_moves_is_in_the_models_own_order(tmp_path: Path) -> None:
    found = run_on_ranks(decided_often, 3, tmp_path, str(tmp_path / "saved"))
    assert [each for of_rank in found for each in of_rank] == []
