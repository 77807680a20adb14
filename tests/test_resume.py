# SPDX-License-Identifier: Apache-2.0
"""A run that was stopped goes on to the bit, with its plans and generators, from a checkpoint of stock DeepSpeed too;
and in any other layout as exactly as rounding allows: other ranks, ep, esp, ZeRO stage, precision."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from benchmarks.models.layers import StockGroups
from ds_fsmoe.checkpoint_files.pieces import MASTER
from ds_fsmoe.checkpoint_files.whole import Whole
from ds_fsmoe.planning.block import BlockPlan
from tests import test_checkpoint_corners as corners
from tests.hurry import hurry
from tests.ranks import run_on_ranks
from tests.samples import draw, sampled
from tests.small_model import Case, SmallModel, batch, scaled, small_engine

BEFORE, AFTER = 3, 2
ENABLED = {"enabled": True}
CUT = {"enabled": True, "pipeline_degree": {"forward": 2, "backward": 3}}


class Run(NamedTuple):
    case: Case
    block: dict[str, Any] = ENABLED
    chain: tuple[str, ...] = ("stock", "ours", "stock")
    """Who trains first and saves, and who go on, each from what the one before has saved."""

    @property
    def draws(self) -> bool:
        """Whether what is drawn follows from what was drawn before. Stock DeepSpeed does not save its generators."""
        return "stock" not in self.chain


class WithDropout(nn.Module):
    """Draws from torch's generator in every forward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.inner(x), 0.2, self.training)


def make(rank: int, run: Run, who: str = "ours", scale: float = 1.0) -> Any:
    torch.manual_seed(rank)
    model = SmallModel(run.case, rank)
    if run.draws:
        model.first = WithDropout(model.first)
    blocks: dict[str, Any] = {"optimizer": {"type": "Adam", "params": {"lr": 0.02, "torch_adam": True}}}
    blocks["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 20}}
    return small_engine(run.case, rank, run.block if who == "ours" else None, scaled(model, scale), **blocks)


def train(engine: Any, rank: int, run: Run, first: int, steps: int) -> list[float]:
    dtype, losses = next(engine.module.parameters()).dtype, []
    for step in range(first * run.case.accumulation, (first + steps) * run.case.accumulation):
        if not run.draws:
            torch.manual_seed(step * 100 + rank)
        loss, _ = engine(*batch(step, rank, dtype))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def stop_and_go_on(rank: int, world_size: int, runs: list[Run], folder: str) -> list[str]:
    hurry()
    said = []
    for number, run in enumerate(runs):
        expected, keys = None, None
        for place, who in enumerate(run.chain):
            # From other weights than were saved, so that a load that did nothing would be seen.
            engine = make(rank, run, who, scale=0.3 if place else 1.0)
            keys = keys or list(engine.module.state_dict())
            assert list(engine.module.state_dict()) == keys
            if place:
                path, state = engine.load_checkpoint(f"{folder}/{number}/{place - 1}")
                assert path is not None
                assert state["mine"] == 7
            else:
                train(engine, rank, run, 0, BEFORE)
            engine.save_checkpoint(f"{folder}/{number}/{place}", client_state={"mine": 7})
            losses = train(engine, rank, run, BEFORE, AFTER)
            expected = expected or losses
            if losses != expected:
                said.append(f"{run}: {who}")
            engine.destroy()
    return said


STAGES = [Case(2, stage, k=1 + stage, use_residual=stage == 1) for stage in (0, 1, 2)]
STAGES += [Case(2, 1, "bf16", k=2), Case(2, 2, "bf16")]
# Over more than two ranks the last bits of a sum depend on where in a message it lies.
WHOLE = ENABLED | {"gradient_partition": {"mode": "off"}}


@sampled(
    ("world_size", "runs"),
    # Each stage, both precisions, and a residual.
    [
        (2, [Run(STAGES[each]) for each in (0, 1, 4)]),
        *((2, [Run(case)]) for case in STAGES),
        *((4, [Run(case, WHOLE)]) for case in STAGES),
    ],
    kept=[0],
)
def test_stock_to_ours_to_stock_goes_on_with_the_same_losses(world_size: int, runs: list[Run], tmp_path: Path) -> None:
    for said in run_on_ranks(stop_and_go_on, world_size, tmp_path, runs, str(tmp_path / "saved")):
        assert not said


class FirstIsLast(SmallModel):
    """Has the parameters of its first layer behind all others."""

    def __init__(self, case: Case, rank: int) -> None:
        super().__init__(case, rank)
        self.first = self._modules.pop("first")


def save_and_reorder(rank: int, world_size: int, folder: str) -> None:
    hurry()
    for saved, model_class in (("was", SmallModel), ("now", FirstIsLast)):
        engine = corners.make(rank, Case(ep_size=2, stage=1, k=2), model_class)
        if saved == "was":
            corners.train(engine, rank, 0)
        else:
            engine.load_checkpoint(f"{folder}/was", "tag")
        engine.save_checkpoint(f"{folder}/{saved}", "tag")
        engine.destroy()


def test_states_go_with_their_parameters_where_these_come_in_another_order(tmp_path: Path) -> None:
    run_on_ranks(save_and_reorder, 2, tmp_path / "ranks", str(tmp_path))
    was, now = (Whole(tmp_path / each / "tag") for each in ("was", "now"))
    for name in was.names():
        for item in (MASTER, "exp_avg"):
            assert torch.equal(was.part(name, item), now.part(name, item)), (name, item)


TWICE = ("ours", "ours")
RESUMED = [
    Run(Case(2, 0, "fp32", 1, 2, True), CUT, TWICE),
    Run(Case(2, 1, "fp32", 2, 1, True), CUT, TWICE),
    Run(Case(2, 2, "bf16", 1, 2, False), CUT, TWICE),
    Run(Case(2, 0, k=2), CUT | {"gate": {"type": "deepseek", "k": 2, "bias_update_speed": 0.1}}, TWICE),
    Run(Case(2, 1, "bf16", k=2), {"enabled": True, "gate": {"type": "gshard", "k": 2, "noise": True}}, TWICE),
]


@pytest.mark.long
@sampled("run", RESUMED, drawn=2)
def test_losses_after_a_resume_are_those_of_the_run_that_went_on(run: Run, tmp_path: Path) -> None:
    for said in run_on_ranks(stop_and_go_on, 2, tmp_path, [run], str(tmp_path / "saved")):
        assert not said


def plans_in(engine: Any) -> dict[str, str]:
    return {name: each for name, each in engine.fsmoe.facts().items() if name.startswith(("plan ", "dispatch of "))}


def tuned_and_resumed(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    hurry()
    tuned = {"enabled": True, "autotune": {"enabled": True, "trials": 1}, "pipeline_degree": {"max": 3}}
    run = Run(Case(2, k=2, expert="gpt"), tuned, TWICE)
    engine = make(rank, run)
    train(engine, rank, run, 0, 31)
    assert engine.fsmoe.autotune.trials is None
    # Whatever was the fastest, these plans are not those of an engine that has not measured.
    for layer in engine.fsmoe.inner_layers.values():
        layer.fsmoe.apply(replace(layer.fsmoe.plan, forward=BlockPlan(3)))
    engine.fsmoe.plans_changed()
    engine.save_checkpoint(folder)
    plans, own = dict(engine.fsmoe.facts()), plans_in(engine)
    expected = train(engine, rank, run, 31, AFTER)
    gradients = engine.fsmoe.reduction.reducer.plan
    engine.destroy()

    engine = make(rank, run, scale=0.3)
    engine.load_checkpoint(folder)
    same = dict(engine.fsmoe.facts()) == plans and engine.fsmoe.reduction.reducer.plan == gradients
    losses = train(engine, rank, run, 31, AFTER)
    measured = engine.fsmoe.autotune.result.num_measured
    engine.destroy()
    found = {"same": same, "equal": losses == expected, "measured": measured}

    # A job that is too short to be measured goes on with what was, and so does the one after it.
    short = {"autotune": "auto", "record": {"dir": f"{folder}/record", "stop_after": 50}}
    untuned = Run(run.case, tuned | short, TWICE)
    for place in ("second", "third"):
        engine = make(rank, untuned, scale=0.3)
        engine.load_checkpoint(folder)
        found[place] = plans_in(engine) == own
        engine.save_checkpoint(folder := f"{folder}/{place}")
        engine.destroy()
    # What the config newly asks for counts.
    for name, others in (("autotune", {"autotune": False}), ("num_chunks", {"pipeline_degree": 1})):
        engine = make(rank, Run(run.case, {"enabled": True} | others, TWICE), scale=0.3)
        before = plans_in(engine)
        engine.load_checkpoint(folder)
        found[name] = before != own and plans_in(engine) == before
        engine.destroy()
    return found


@pytest.mark.long
def test_plans_are_taken_from_the_checkpoint_and_not_measured_again(tmp_path: Path) -> None:
    for found in run_on_ranks(tuned_and_resumed, 2, tmp_path, str(tmp_path / "saved")):
        kept = dict.fromkeys(("same", "equal", "second", "third", "autotune", "num_chunks"), True)
        assert found == kept | {"measured": 0}


# ---- in any other layout: every number arrives, to the bit


class Layout(NamedTuple):
    world: int
    ep: int
    esp: int
    stage: int
    dtype: str = "fp32"
    order: str = ""
    """How ranks are ordered."""


SOURCES = [
    *(Layout(4, 2, 1, 1), Layout(4, 2, 2, 2), Layout(2, 2, 1, 0)),
    *(Layout(2, 1, 2, 0, "bf16"), Layout(2, 2, 1, 2, "bf16")),
]
TARGETS = [
    *(Layout(4, 4, 1, 2), Layout(4, 1, 2, 1), Layout(4, 2, 1, 0, "bf16"), Layout(2, 1, 1, 1, "bf16")),
    *(Layout(2, 1, 2, 0), Layout(2, 2, 1, 2), Layout(1, 1, 1, 1), Layout(4, 2, 1, 1, "fp32", "data before experts")),
]


def make_in(rank: int, layout: Layout, scale: float = 1.0, lr: float = 0.02) -> Any:
    # DeepSpeed forgets the groups of the layout before, which may have been ordered otherwise.
    StockGroups().put()
    case = Case(ep_size=layout.ep, stage=layout.stage, dtype=layout.dtype, k=2, expert="gpt")
    # Ranks of a group of experts have the same first experts.
    place = rank * layout.ep // layout.world if layout.order else rank
    blocks = {"optimizer": {"type": "Adam", "params": {"lr": lr, "torch_adam": True}}}
    blocks |= {"fsmoe": {"enabled": True, "esp_size": layout.esp}}
    blocks["use_data_before_expert_parallelism"] = bool(layout.order)
    return corners.make(rank, case, lambda case, _: SmallModel(case, place), scale, **blocks)


def save_and_move(
    rank: int, world_size: int, sources: list[int], pairs: list[tuple[int, int]], folder: str
) -> dict[Any, list[float]]:
    """Save sources, and move pairs of a source and a target; the losses of each that goes on."""
    hurry()
    losses: dict[Any, list[float]] = {}
    for number in sources:
        engine = make_in(rank, SOURCES[number])
        engine.save_checkpoint(f"{folder}/{number}", "start")
        corners.train(engine, rank, 0, BEFORE)
        engine.save_checkpoint(f"{folder}/{number}", "tag")
        losses[number] = corners.train(engine, rank, BEFORE, AFTER)
        engine.destroy()
    for source, target in pairs:
        engine = make_in(rank, TARGETS[target], scale=0.3, lr=0.5)
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
        sources = [at for at in needed if SOURCES[at].world == ranks and at not in losses]
        ready = [(at, to) for at, to in pairs if TARGETS[to].world == ranks and at in {*losses, *sources}]
        ready = [each for each in ready if each not in losses]
        if sources or ready:
            ranks_folder = tmp_path / f"ranks {len(losses)}"
            losses |= run_on_ranks(save_and_move, ranks, ranks_folder, sources, ready, str(folder))[0]
    # Whatever the layout, the same model is read: shards that were put together wrongly would come back as they were.
    first, *others = (Whole(folder / str(at) / "start") for at in needed if SOURCES[at].dtype == "fp32")
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
        was, now = SOURCES[source], TARGETS[target]
        if was.world == now.world and was.dtype == now.dtype == "fp32":
            assert losses[source, target] == pytest.approx(losses[source], rel=2e-5), (source, target)
