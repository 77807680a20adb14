# SPDX-License-Identifier: Apache-2.0
"""A checkpoint goes on in any layout: other ranks, ep, esp, ZeRO stage, precision; every number arrives, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ds_fsmoe.checkpoint_files.expert_parts import of_one_expert
from ds_fsmoe.checkpoint_files.numbering import Numbering
from ds_fsmoe.checkpoint_files.pieces import MASTER
from ds_fsmoe.checkpoint_files.whole import Whole
from tests import test_checkpoint_corners as corners
from tests.hurry import hurry
from tests.ranks import run_on_ranks
from tests.samples import draw, sampled
from tests.small_model import Case, SmallModel

BEFORE, AFTER = 3, 2
# (ranks, ep, esp, stage, dtype), and how ranks are ordered.
Layout = tuple[int, int, int, int, str, str]
SOURCES: list[Layout] = [
    (4, 2, 1, 1, "fp32", ""),
    (4, 2, 2, 2, "fp32", ""),
    (2, 2, 1, 0, "fp32", ""),
    (2, 1, 2, 0, "bf16", ""),
    (2, 2, 1, 2, "bf16", ""),
]
TARGETS: list[Layout] = [
    (4, 4, 1, 2, "fp32", ""),
    (4, 1, 2, 1, "fp32", ""),
    (4, 2, 1, 0, "bf16", ""),
    (2, 1, 1, 1, "bf16", ""),
    (2, 1, 2, 0, "fp32", ""),
    (2, 2, 1, 2, "fp32", ""),
    (1, 1, 1, 1, "fp32", ""),
    (4, 2, 1, 1, "fp32", "data before experts"),
]


def make(rank: int, layout: Layout, scale: float = 1.0, lr: float = 0.02) -> Any:
    world, ep, esp, stage, dtype, order = layout
    case = Case(ep_size=ep, stage=stage, dtype=dtype, k=2, expert="gpt")
    # Ranks of a group of experts have the same first experts.
    place = rank * ep // world if order else rank
    blocks = {"optimizer": {"type": "Adam", "params": {"lr": lr, "torch_adam": True}}}
    blocks |= {"fsmoe": {"enabled": True, "esp_size": esp}, "use_data_before_expert_parallelism": bool(order)}
    return corners.make(rank, case, lambda case, _: SmallModel(case, place), scale, **blocks)


def save_and_move(
    rank: int, world_size: int, sources: list[int], pairs: list[tuple[int, int]], folder: str
) -> dict[Any, list[float]]:
    """Save sources, and move pairs of a source and a target; the losses of each that goes on."""
    hurry()
    losses: dict[Any, list[float]] = {}
    for number in sources:
        engine = make(rank, SOURCES[number])
        engine.save_checkpoint(f"{folder}/{number}", "start")
        corners.train(engine, rank, 0, BEFORE)
        engine.save_checkpoint(f"{folder}/{number}", "tag")
        losses[number] = corners.train(engine, rank, BEFORE, AFTER)
        engine.destroy()
    for source, target in pairs:
        engine = make(rank, TARGETS[target], scale=0.3, lr=0.5)
        path, state = engine.load_checkpoint(f"{folder}/{source}", "tag")
        assert path is not None
        assert "optimizer" not in state
        assert engine.global_steps == BEFORE
        engine.save_checkpoint(f"{folder}/{source}-{target}", "tag")
        losses[source, target] = corners.train(engine, rank, BEFORE, AFTER)
        engine.destroy()
    return losses


PAIRS = [(source, target) for source in range(len(SOURCES)) for target in range(len(TARGETS))]
# The same ranks and fp32, so that losses can be compared; and three others, which move everything else.
SAMPLE = [(2, 5), *draw("layouts that move", [pair for pair in PAIRS if pair != (2, 5)], 3)]


@pytest.mark.long
@sampled("pairs", [SAMPLE, PAIRS], kept=[0], drawn=0, ids=["a sample", "all"])
def test_weights_and_states_arrive_to_the_bit_and_a_run_goes_on_as_if_it_had_not_been_moved(
    pairs: list[tuple[int, int]], tmp_path: Path
) -> None:
    folder, losses = tmp_path / "saved", {}
    needed = {1, 2, *(source for source, _ in pairs)}  # one with shards, whose model is compared, too
    for ranks in (2, 4, 2, 1):
        sources = [at for at in needed if SOURCES[at][0] == ranks and at not in losses]
        ready = [(at, to) for at, to in pairs if TARGETS[to][0] == ranks and at in {*losses, *sources}]
        ready = [each for each in ready if each not in losses]
        if sources or ready:
            ranks_folder = tmp_path / f"ranks {len(losses)}"
            losses |= run_on_ranks(save_and_move, ranks, ranks_folder, sources, ready, str(folder))[0]
    # Whatever the layout, the same model is read: shards that were put together wrongly would come back as they were.
    first, *others = (Whole(folder / str(at) / "start") for at in needed if SOURCES[at][4] == "fp32")
    for name in first.names():
        assert all(torch.equal(first.weights(name), other.weights(name)) for other in others), name
    for source, target in pairs:
        was, now = Whole(folder / str(source) / "tag"), Whole(folder / f"{source}-{target}" / "tag")
        assert sorted(was.names()) == sorted(now.names())
        assert len(list(now.names())) == 4 + 2 + 2 * 4 * 4
        for name in was.names():
            for item in (MASTER, "exp_avg", "exp_avg_sq"):
                assert torch.equal(was.part(name, item), now.part(name, item)), (source, target, name, item)
            expected = was.part(name, MASTER).to(now.weights(name).dtype)
            assert torch.equal(now.weights(name), expected), (source, target, name)
        steps, steps_now = ({group.scalars["step"] for group in each.index.groups} for each in (was, now))
        # DeepSpeed's ZeRO counts one more: it makes a step with zeros when it begins.
        assert steps == steps_now
        assert steps in ({float(BEFORE)}, {float(BEFORE + 1)})
        assert {group.options["lr"] for group in now.index.groups} == {0.02}
        if SOURCES[source][0] == TARGETS[target][0] and SOURCES[source][4] == TARGETS[target][4] == "fp32":
            assert losses[source, target] == pytest.approx(losses[source], rel=2e-5), (source, target)


@pytest.mark.parametrize(("experts", "ep", "esp"), [(4, 2, 1), (4, 2, 2), (6, 3, 2), (6, 1, 3), (5, 5, 2)])
def test_numbers_of_shards_lead_to_each_shard_of_each_expert_once(experts: int, ep: int, esp: int) -> None:
    numbering = Numbering(experts, ep, esp)
    met = [numbering.meant(number) for number in range(experts * esp)]
    assert sorted(met) == [(expert, shard) for expert in range(experts) for shard in range(esp)]
    assert [numbering.number(*each) for each in met] == list(range(experts * esp))


def test_shards_that_are_cut_out_join_to_the_whole() -> None:
    whole = torch.randn(6, 12)
    for cut in (0, 1, "first", "whole"):
        shards = [of_one_expert(cut, shard, 3).take(whole[None])[0] for shard in range(3)]
        shard = of_one_expert(cut, 0, 3).shard
        found = shards[0] if shard is None else shard.join([each.unsqueeze(0) for each in shards])[0]
        assert torch.equal(found, whole)
    with pytest.raises(ValueError, match=r"shape \[1, 6, 12\]: dimension 2 does not divide into 5 shards"):
        of_one_expert(1, 0, 5).take(whole[None])
