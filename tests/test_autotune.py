# SPDX-License-Identifier: Apache-2.0
"""``"autotune": {"enabled": true}``: degrees are measured for, agreed on and run, and training stays what it is."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_fsmoe.planning.block import BlockPlan
from ds_fsmoe.planning.decide.block_times import Order
from ds_fsmoe.planning.decide.candidates import Search
from ds_fsmoe.planning.decide.model_plan import ModelPlan
from ds_fsmoe.planning.decide.plan_requests import SearchSpace
from ds_fsmoe.planning.job.measured import Slowdowns
from ds_fsmoe.planning.schedule import Lane
from ds_fsmoe.planning.timeline import Contention
from ds_fsmoe.tuning import measure as measuring
from ds_fsmoe.tuning.autotune import FORWARDS_BEFORE
from tests.hurry import hurry
from tests.logged import heard
from tests.ranks import run_on_ranks
from tests.small_model import Case, batch, small_engine

CASE = Case(2, 0, "fp32", 1, 2, True, expert="gpt")
STEPS = 3


@dataclass
class Run:
    """One training run, as one rank saw it: of each layer (forward, backward), and by which contention it is predicted;
    as numbers losses and outputs of every step, then all parameters."""

    numbers: list[torch.Tensor] = field(default_factory=list)
    degrees: list[tuple[int, int]] = field(default_factory=list)
    plans: dict[str, str] = field(default_factory=dict)
    blocks: list[tuple[BlockPlan, BlockPlan]] = field(default_factory=list)
    contention: list[Contention] = field(default_factory=list)
    num_measured: int | None = None
    said: str = ""


def train(rank: int, block: dict[str, Any], case: Case = CASE, steps: int = STEPS) -> Run:

    hurry()
    said = heard(names_level=True)
    torch.manual_seed(0)
    run, engine = Run(), small_engine(case, rank, block)
    # Nothing comes of the first two forwards but sizes: so what is trained is run with one plan throughout.
    for _ in range(FORWARDS_BEFORE):
        engine(*batch(99, rank, torch.float32))
    for step in range(steps * case.accumulation):
        torch.manual_seed(100 * step + rank)
        loss, y_BLM = engine(*batch(step, rank, torch.float32))
        engine.backward(loss)
        engine.step()
        run.numbers += [loss.detach(), y_BLM.detach()]
    pipelines = [layer.pipeline for layer in engine.fsmoe.layers.values()]
    run.degrees = [each.degrees for each in pipelines]
    run.blocks = [(each.forward.block, each.backward.block) for each in pipelines]
    run.plans = {name: text for name, text in engine.fsmoe.facts().items() if name.startswith("plan ")}
    if engine.fsmoe.autotune is not None:
        result = engine.fsmoe.autotune.result
        run.contention = [each.contention for each in result.predictors.values()]
        run.num_measured = result.num_measured
    run.numbers += [each.detach().clone() for each in engine.module.parameters()]
    engine.destroy()
    said.end()
    run.said = "\n".join(said.lines)
    return run


def tuned(cache_dir: Path | str | None = None, **others: Any) -> dict[str, Any]:
    # What is predicted is run, and not tried beside others: tests/test_trials.py does that.
    folder = None if cache_dir is None else str(cache_dir)
    # Rows and slots are rounded otherwise; here chunks are what is compared.
    measured = {"enabled": True, "cache_dir": folder, "trials": 0, "details": True}
    return {"autotune": measured, "dispatch": "padded"} | others


SLOWED = {(Lane.INTRA, Lane.COMPUTE): 1.5, (Lane.COMPUTE, Lane.INTRA): 1.25}
CHOSEN = Order(3, "paper"), Order(4, "reduce_first")


def train_as_chosen(rank: int, kept: Path) -> tuple[Run, list[Contention]]:
    """What it is like, and by which contention plans are chosen, where lanes were measured to slow each other so and
    these plans are chosen."""
    seen: list[Contention] = []

    def candidates(search: Search) -> list[ModelPlan]:
        seen.append(search.planner.settings.contention)
        request = replace(search.request, space=SearchSpace.fixed(*CHOSEN))
        return [Search(search.planner, request).fastest()]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Search, "candidates", candidates)
        patch.setattr(measuring, "slowdowns_of", lambda *args: Slowdowns(SLOWED))
        return train(rank, tuned(kept), steps=1), seen


def rewrite(folder: Path, factors: dict[str, float]) -> None:
    """Make operations of the only file dearer, as if measured so on another machine."""
    (path,) = folder.glob("*.json")
    data = json.loads(path.read_text())
    for name, at in data["measured"]["timings"].items():
        for start, factor in factors.items():
            if name.startswith((f"{start} of ", f"{start} (flat) of ")):
                # A line without a start, so that cutting costs nothing.
                at["times_ms"] = [factor * size / max(at["sizes"]) for size in at["sizes"]]
    numbers = data["measured"]["numbers"]
    for name in numbers:
        numbers[name] = {"an empty": 0.0, "slowdown": 1.0}.get(name[:8], numbers[name])
    path.write_text(json.dumps(data))


FACTORS = {"all-to-all": 8.0, "experts forward": 16.0, "experts backward": 20.0}
# Next to nothing: by what gradients took here, one layer's backward may come to be cut otherwise than the other's.
FACTORS |= {"all-reduce of gradients": 1e-3}


def tune_and_keep(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    kept = Path(folder) / "kept" / "deeper"
    runs = {"measured": train(rank, tuned(kept)), "known": train(rank, tuned(kept))}
    torch.distributed.barrier()
    if rank == 0:
        rewrite(kept, FACTORS)
    torch.distributed.barrier()
    runs["cut"] = train(rank, tuned(kept, pipeline_degree={"max": 6}))
    (forward, backward), *_ = runs["cut"].degrees
    by_hand = {"pipeline_degree": {"forward": forward, "backward": backward}}
    runs["by hand"] = train(rank, by_hand)
    runs["fixed"] = train(rank, tuned(kept, pipeline_degree={"forward": 5, "backward": "auto"}))
    runs["chosen"] = train_as_chosen(rank, kept)
    return runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Run]]:
    folder = tmp_path_factory.mktemp("tuned")
    return run_on_ranks(tune_and_keep, 2, folder / "ranks", str(folder))


def test_the_table_says_what_was_measured_and_chosen(runs: list[dict[str, Run]]) -> None:
    said = runs[0]["measured"].said
    assert runs[0]["measured"].num_measured > 4
    heads = ("alpha [ms]", "typically off", "at most", "slowed down", "runner-up", "isolated ms", "1 chunk")
    operations = (
        f"L00, L01  {each}" for each in ("all-to-all", "experts forward", "experts backward", "gate", "order")
    )
    for words in (*heads, *operations, "the stage took", "a step without the optimizer, predicted: ", "deepspeed "):
        assert words in said
    assert "autotune" not in runs[1]["measured"].said


def test_what_was_measured_before_is_not_measured_again(runs: list[dict[str, Run]]) -> None:
    for each in runs:
        assert each["known"].num_measured == 0
        assert each["known"].degrees == each["measured"].degrees
    assert " has is not measured again" in runs[0]["known"].said
    assert "cache_dir: " not in runs[0]["known"].said


def test_training_with_degrees_found_is_training_with_them_given_by_hand_to_the_bit(
    runs: list[dict[str, Run]],
) -> None:
    for each in runs:
        found, given = each["cut"], each["by hand"]
        assert found.degrees == given.degrees
        assert all(degree > 1 for pair in found.degrees for degree in pair)
        assert len(found.numbers) > 2 * STEPS
        assert all(torch.equal(a, b) for a, b in zip(found.numbers, given.numbers, strict=True))
    assert runs[0]["cut"].plans == runs[1]["cut"].plans


def test_what_was_measured_and_chosen_is_what_layers_are_predicted_by_and_run_by(runs: list[dict[str, Any]]) -> None:
    slowed = Contention(compute=0.25, traffic=0.5)
    for rank, each in enumerate(runs):
        run, chosen_by = each["chosen"]
        assert run.blocks == [tuple(each.plan() for each in CHOSEN)] * 2
        assert run.contention == [slowed, slowed]
        assert chosen_by == [slowed] * (rank == 0)
    table = runs[0]["chosen"][0].said
    assert "reduces first" in table
    assert [line.split() for line in table.splitlines() if line.startswith(("compute", "intra"))] == [
        ["intra", "-", "1.50"],
        ["compute", "1.25", "-"],
    ]


def test_a_degree_given_by_hand_is_kept_and_the_table_says_what_would_have_been_chosen(
    runs: list[dict[str, Run]],
) -> None:
    for each in runs:
        assert {forward for forward, _ in each["fixed"].degrees} == {5}
        assert {backward for _, backward in each["fixed"].degrees} != {1}
    assert "L00, L01 forward: num_chunks = 5 is given by hand; auto would have chosen " in runs[0]["fixed"].said
    assert "L00, L01 backward: num_chunks" not in runs[0]["fixed"].said
    assert "next: L00, L01 forward: num_chunks = 5 was given; auto would choose " in runs[0]["fixed"].said


# ---- files that are of no use


def meet_bad_file(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    runs: dict[str, Any] = {"first": train(rank, tuned(folder), steps=1)}
    torch.distributed.barrier()
    (path,) = Path(folder).glob("*.json")
    if rank == 0:
        path.write_text(path.read_text()[:-40])
    torch.distributed.barrier()
    runs |= {name: train(rank, tuned(folder), steps=1) for name in ("cut off", "mended")}
    return runs | {"path": path, "left": len(list(path.parent.iterdir()))}


@pytest.mark.daily("autotuning anew", 1)
def test_a_file_of_no_use_is_named_and_measured_again(tmp_path: Path) -> None:
    """What else makes a file one of no use, and that a folder may be, is in tests/test_autotune_cache.py."""
    found = run_on_ranks(meet_bad_file, 2, tmp_path / "ranks", str(tmp_path / "kept"))
    names = ("first", "cut off", "mended")
    for each in found:
        assert [each[name].num_measured > 0 for name in names] == [True, True, False]
    of_file = f"WARNING: fsmoe.autotune.cache_dir: {found[0]['path']} cannot be read: "
    assert [of_file in found[0][name].said for name in names] == [False, True, False]
    assert found[0]["left"] == 1


# ---- other ranks and other ways


def train_sharded(rank: int, world_size: int) -> tuple[Run, Run]:
    case = Case(2, 1, "fp32", 2, 1, False, expert="gpt")
    return train(rank, tuned(esp_size=2), case, steps=2), train(rank, {"esp_size": 2}, case, steps=2)


@pytest.mark.daily("autotuning anew", 1)
def test_sharded_experts_on_four_ranks_are_tuned_while_gradients_are_looked_at(tmp_path: Path) -> None:
    found = run_on_ranks(train_sharded, 4, tmp_path / "ranks")
    for ours, plain in found:
        assert ours.plans == found[0][0].plans
        # All-to-all, all-gather, reduce-scatter, four of the experts, and more.
        assert ours.num_measured > 8
        for a, b in zip(ours.numbers, plain.numbers, strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)
