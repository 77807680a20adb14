# SPDX-License-Identifier: Apache-2.0
"""A checkpoint goes on in any layout: other ranks, ep, esp, ZeRO stage, precision; every number arrives, to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_fsmoe.checkpoint_files import manifest, pieces
from ds_fsmoe.checkpoint_files.expert_parts import of_one_expert
from ds_fsmoe.checkpoint_files.numbering import Numbering
from ds_fsmoe.checkpoint_files.pieces import MASTER
from ds_fsmoe.checkpoint_files.tags import CheckpointError
from ds_fsmoe.checkpoint_files.whole import Whole
from tests.hurry import hurry
from tests.ranks import run_on_ranks
from tests.samples import draw
from tests.small_model import Case, SmallModel, train_steps

pytestmark = pytest.mark.long

BEFORE, AFTER = 3, 2
MOMENTS = ("exp_avg", "exp_avg_sq")
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
    import ds_fsmoe

    world, ep, esp, stage, dtype, order = layout
    case = Case(ep_size=ep, stage=stage, dtype=dtype, k=2, expert="gpt")
    # Ranks of a group of experts have the same first experts.
    model = SmallModel(case, rank * ep // world if order else rank)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    blocks = {"optimizer": {"type": "Adam", "params": {"lr": lr, "torch_adam": True}}, "gradient_clipping": 0.0}
    blocks |= {"use_data_before_expert_parallelism": bool(order)}
    config = case.ds_config(fsmoe={"enabled": True, "esp_size": esp}, **blocks)
    return ds_fsmoe.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def train(engine: Any, rank: int, first: int, steps: int) -> list[float]:
    return train_steps(engine, rank, range(first, first + steps))


def save_sources(rank: int, world_size: int, numbers: list[int], folder: str) -> dict[int, list[float]]:
    hurry()
    losses = {}
    for number in numbers:
        engine = make(rank, SOURCES[number])
        engine.save_checkpoint(f"{folder}/{number}", "start")
        train(engine, rank, 0, BEFORE)
        engine.save_checkpoint(f"{folder}/{number}", "tag")
        losses[number] = train(engine, rank, BEFORE, AFTER)
        engine.destroy()
    return losses


def move(rank: int, world_size: int, pairs: list[tuple[int, int]], folder: str) -> dict[tuple[int, int], list[float]]:
    hurry()
    losses = {}
    for source, target in pairs:
        engine = make(rank, TARGETS[target], scale=0.3, lr=0.5)
        path, state = engine.load_checkpoint(f"{folder}/{source}", "tag")
        assert path is not None
        assert "optimizer" not in state
        assert engine.global_steps == BEFORE
        engine.save_checkpoint(f"{folder}/{source}-{target}", "tag")
        losses[source, target] = train(engine, rank, BEFORE, AFTER)
        engine.destroy()
    return losses


PAIRS = [(source, target) for source in range(len(SOURCES)) for target in range(len(TARGETS))]
# The same ranks and fp32, so that losses can be compared; and three others, which move everything else.
SAMPLE = [(2, 5), *draw("layouts that move", [pair for pair in PAIRS if pair != (2, 5)], 3)]


def save_and_move(
    rank: int, world_size: int, numbers: list[int], pairs: list[tuple[int, int]], folder: str
) -> tuple[dict[int, list[float]], dict[tuple[int, int], list[float]]]:
    return save_sources(rank, world_size, numbers, folder), move(rank, world_size, pairs, folder)


@pytest.fixture(
    scope="module",
    params=[SAMPLE, pytest.param(PAIRS, marks=pytest.mark.slow)],
    ids=["a sample", "all"],
)
def moved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict, dict]:
    """Every source in some of the targets."""
    root = tmp_path_factory.mktemp("moved")
    folder = str(root / "saved")
    needed = {1, 2, *(source for source, _ in request.param)}  # one with shards, whose model is compared, too
    sources = {ranks: sorted(at for at in needed if SOURCES[at][0] == ranks) for ranks in (4, 2)}
    pairs = {ranks: [pair for pair in request.param if TARGETS[pair[1]][0] == ranks] for ranks in (4, 2, 1)}
    before = run_on_ranks(save_sources, 2, root / "from2", sources[2], folder)[0]
    saved, after = run_on_ranks(save_and_move, 4, root / "from4", sources[4], pairs[4], folder)[0]
    before |= saved
    for ranks in (2, 1):
        if pairs[ranks]:
            after |= run_on_ranks(move, ranks, root / f"to{ranks}", pairs[ranks], folder)[0]
    return root / "saved", before, after


def test_weights_and_states_of_the_optimizer_arrive_to_the_bit(moved: tuple[Path, dict, dict]) -> None:
    folder, _, after = moved
    for source, target in after:
        was, now = Whole(folder / str(source) / "tag"), Whole(folder / f"{source}-{target}" / "tag")
        assert sorted(was.names()) == sorted(now.names())
        assert len(list(now.names())) == 4 + 2 + 2 * 4 * 4
        for name in was.names():
            for item in (MASTER, *MOMENTS):
                assert torch.equal(was.part(name, item), now.part(name, item)), (source, target, name, item)
            expected = was.part(name, MASTER).to(now.weights(name).dtype)
            assert torch.equal(now.weights(name), expected), (source, target, name)
        steps, steps_now = ({group.scalars["step"] for group in each.index.groups} for each in (was, now))
        # DeepSpeed's ZeRO counts one more: it makes a step with zeros when it begins.
        assert steps == steps_now
        assert steps in ({float(BEFORE)}, {float(BEFORE + 1)})
        assert {group.options["lr"] for group in now.index.groups} == {0.02}


def test_whatever_the_layout_the_same_model_is_read(moved: tuple[Path, dict, dict]) -> None:
    """Shards that were put together wrongly would come back as they were, and be wrong in between."""
    first, *others = (Whole(moved[0] / str(at) / "start") for at in moved[1] if SOURCES[at][4] == "fp32")
    for other in others:
        for name in first.names():
            assert torch.equal(first.weights(name), other.weights(name)), name


def test_a_run_goes_on_as_if_it_had_not_been_moved(moved: tuple[Path, dict, dict]) -> None:
    _, before, after = moved
    compared = 0
    for (source, target), losses in after.items():
        was, now = SOURCES[source], TARGETS[target]
        if was[0] == now[0] and was[4] == now[4] == "fp32":
            assert losses == pytest.approx(before[source], rel=2e-5), (source, target)
            compared += 1
    assert compared


def refusals(rank: int, world_size: int, folder: str) -> dict[str, str]:
    hurry()
    said = {}
    for name in ("optimizer", "no index"):
        engine = make(rank, (2, 1, 1, 1, "fp32", ""))
        if name == "optimizer":
            engine.optimizer.optimizer.__class__ = torch.optim.RAdam
        elif rank == 0:
            place = Path(folder) / "2" / "tag"
            (place / pieces.NAME).unlink()
            described = json.loads((place / manifest.NAME).read_text())
            del described["files"][pieces.NAME]
            (place / manifest.NAME).write_text(json.dumps(described))
        torch.distributed.barrier()
        with pytest.raises(CheckpointError) as caught:
            engine.load_checkpoint(f"{folder}/2", "tag")
        said[name] = str(caught.value)
        engine.destroy()
    return said


def test_what_cannot_be_moved_whole_is_refused_on_every_rank(moved: tuple[Path, dict, dict], tmp_path: Path) -> None:
    first, second = run_on_ranks(refusals, 2, tmp_path, str(moved[0]))
    assert first == second
    for name, words in {
        "optimizer": "has optimizer states of AdamW, and this job's optimizer is RAdam",
        "no index": "does not contain the layout of its optimizer states",
    }.items():
        for each in ("zero_stage 0 -> 1", "ep_size [2] -> [1]", "load_optimizer_states=False", words):
            assert each in first[name], first[name]


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
