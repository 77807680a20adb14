# SPDX-License-Identifier: Apache-2.0
"""Training in chunks, on several lanes, with sharded experts, is training with stock DeepSpeed, to rounding.

Whatever a block asks for changes when things are computed and what is sent, and no number beyond its last bits.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ds_fsmoe import CallbackBase
from ds_fsmoe.planning.decide.presets import BEST, NAMES, PRESETS
from tests.covering import covering
from tests.distances import furthest
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.small_model import NUM_EXPERTS, Case, SmallModel, batch, small_engine, train_steps

STEPS = 2
# Of the largest number of its kind, after some steps with a learning rate of 0.5.
TOLERANCE = {"fp32": 2e-5, "bf16": 0.03}


class Doubtful(CallbackBase):
    """Named in a block; makes sure that the tensors it sees may be replaced by equal ones."""

    def before_dispatch_hook(self, args: Any) -> torch.Tensor:
        return args.tensor.clone()

    def after_combine_hook(self, args: Any) -> torch.Tensor:
        return args.tensor.clone()


def degrees(forward: int, backward: int, **others: Any) -> dict[str, Any]:
    return {"enabled": True, "pipeline_degree": {"forward": forward, "backward": backward}, **others}


BLOCKS: dict[str, dict[str, Any]] = {
    **{name: {"schedule": name} for name in NAMES},
    "lina": {"schedule": "lina", "gradient_partition": {"chunk_bytes": 900}},
    "one after another": {"schedule": "fsmoe", "overlap": False},
    "recomputed": {"recompute": True},
    "nodes of one rank": {"topology": {"ranks_per_node": 1}},
    "hooks": {"hooks": ["tests.test_chunked_training.Doubtful"]},
}
DEGREES = ((1, 5), (2, 2), (3, 2), (4, 4), (7, 3))
KINDS = {1: "smooth", 2: "smooth gpt"}
"""The number of ranks that share an expert -> an expert that can be shared so."""
NO_DRAWS = (("top2_2nd_expert_sampling", False),)
CASES = [Case(2, 0, "fp32", 1, 2, True), Case(2, 1, "fp32", 3, 3, False), Case(2, 2, "fp32", 1, 1, True, True)]


def pipeline_of(name: str) -> str:
    schedule = BLOCKS[name].get("schedule", BEST)
    return "per_phase" if schedule == BEST else PRESETS[schedule]().pipeline


def is_possible(
    name: str, of_phases: tuple[int, int], dispatch: str, sharing: tuple[int, int], stage: int, dtype: str, k: int,
    drops: bool,
) -> bool:  # fmt: skip
    # A schedule that is not cut by degrees has one pair of them in the array.
    wanted = {"per_phase": of_phases, "common": of_phases[:1] * 2}
    # In bf16 two scores may be equal but for the rounding: a token takes all experts, so that there is no choice.
    has_choice = k < NUM_EXPERTS or drops
    return of_phases == wanted.get(pipeline_of(name), DEGREES[0]) and not (dtype == "bf16" and has_choice)


def block_of(name: str, of_phases: tuple[int, int], **more: Any) -> dict[str, Any]:
    is_cut = pipeline_of(name) in ("per_phase", "common")
    return {"enabled": True} | (degrees(*of_phases) if is_cut else {}) | BLOCKS[name] | more


WAYS = [
    (name, block_of(name, of_phases, dispatch=dispatch, esp_size=esp), case)
    for (name, of_phases, dispatch, (ep, esp), stage, dtype, k, drops), accumulation, residual in zip(
        covering(
            tuple(BLOCKS), DEGREES, ("padded", "unpadded"), ((1, 1), (2, 1), (1, 2)), (0, 1, 2), ("fp32", "bf16"),
            (1, 2, 3, NUM_EXPERTS), (True, False), allowed=is_possible,
        ),
        itertools.cycle((1, 3)),
        itertools.cycle((False, False, True)),
    )
    for case in [Case(ep, stage, dtype, accumulation, k, drops, residual and esp == 1, (), KINDS[esp])]
]  # fmt: skip
"""Each pair of a block, degrees, a dispatch, ep_size with esp_size, a stage of ZeRO, a type, k, and whether tokens are
dropped."""
PARTS = 6
"""Into so many parts they are dealt: a part takes as long as a test may."""


Use = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]
"""``(engine, x, target) -> loss``: another use of a model than one forward in training."""


def train(case: Case, rank: int, block: dict[str, Any] | None, use: Use | None = None) -> dict[str, list[torch.Tensor]]:
    """Losses, outputs and input gradients of every step, and the dense parameters after the last."""
    torch.manual_seed(0)
    engine = small_engine(case, rank, block)
    model = engine.module
    seen: dict[str, list[torch.Tensor]] = {"losses": [], "outputs": [], "input gradients": []}
    for step in range(STEPS * case.accumulation):
        x_BLM, target_BLM = batch(step, rank, next(model.parameters()).dtype)
        x_BLM.requires_grad_()
        torch.manual_seed(step * 100 + rank)
        result = (use(engine, x_BLM, target_BLM),) if use else engine(x_BLM, target_BLM)
        engine.backward(result[0])
        engine.step()
        seen["losses"].append(result[0].detach())
        seen["outputs"].append(result[-1].detach())
        seen["input gradients"].append(x_BLM.grad)
    seen["dense parameters"] = [
        each.detach().clone() for name, each in model.named_parameters() if "experts" not in name
    ]
    engine.destroy()
    return seen


def differences(ours: dict[str, list[torch.Tensor]], stocks: dict[str, list[torch.Tensor]], dtype: str) -> list[str]:
    found = []
    for name, theirs in stocks.items():
        off = furthest(*(torch.cat([each.flatten() for each in run]) for run in (ours[name], theirs)))
        if not off < TOLERANCE[dtype]:
            found.append(f"{name} differ by {off:.2g}")
    return found


Work = list[tuple[Case, dict[str, dict[str, Any]], Use | None]]
"""Cases, the blocks, by name, to train each with, and how the model is used."""


def compare_blocks(rank: int, world_size: int, work: Work) -> list[str]:
    found = []
    for case, blocks, use in work:
        stocks = train(case, rank, None, use)
        for name, block in blocks.items():
            ours = train(case, rank, block, use)
            found += [f"{name}, {case}: {each}" for each in differences(ours, stocks, case.dtype)]
    return found


def assert_no_differences(world_size: int, work: Work, folder: Path) -> None:
    for rank, found in enumerate(run_on_ranks(compare_blocks, world_size, folder, work)):
        assert not found, f"rank {rank}: {found}"


def test_nan_is_no_rounding_wherever_it_is() -> None:
    right = torch.tensor([1.0, -4.0, 2.0])
    for at in range(3):
        wrong = right.clone()
        wrong[at] = torch.nan
        for found, wanted in itertools.permutations((wrong, right)):
            assert furthest(found, wanted) == furthest(found, wanted, order=2) == torch.inf
            sides = ({"losses": [right, each]} for each in (found, wanted))
            assert differences(*sides, "bf16") == ["losses differ by inf"]
    assert furthest(wrong, wrong) == furthest(right[:2], right) == torch.inf
    assert (furthest(right + 1, right), furthest(right[:0], right[:0]), furthest(None, right)) == (0.25, 0, 1)


@sampled("part", range(PARTS), drawn=2)
def test_every_schedule_and_dispatch_trains_to_stocks_numbers(part: int, tmp_path: Path) -> None:
    work: Work = [(case, {name: block}, None) for name, block, case in WAYS[part::PARTS]]
    assert_no_differences(2, work, tmp_path)


SHARDED: dict[str, dict[str, Any]] = {
    "unchunked": {"enabled": True},
    "chunked": degrees(3, 2, schedule="fsmoe"),
    "best, nodes of one rank": degrees(2, 5, topology={"ranks_per_node": 1}),
}
LAYOUTS = [(2, 1, 2), (4, 2, 2), (4, 1, 2)]
"""(ranks, ep, esp)"""


@sampled("layout", LAYOUTS, ids=str)
def test_sharded_experts_train_to_the_numbers_of_whole_ones(layout: tuple[int, int, int], tmp_path: Path) -> None:
    """Every pair of layout, stage and block, in a Latin square."""
    world_size, ep_size, esp_size = layout
    at = LAYOUTS.index(layout)
    names = itertools.islice(itertools.cycle(SHARDED), at, at + len(CASES))
    work = [
        (
            replace(case, ep_size=ep_size, expert="gpt", use_residual=False),
            {name: SHARDED[name] | {"esp_size": esp_size}},
            None,
        )
        for case, name in zip(CASES, names, strict=True)
    ]
    assert_no_differences(world_size, work, tmp_path)


def with_client_optimizer(rank: int, world_size: int) -> list[list[float]]:
    """Losses of whole and of sharded experts, with groups and an optimizer that the script has made."""
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    import ds_fsmoe

    case = Case(1, 1, "fp32", 1, 2, True, moe_options=NO_DRAWS, expert="gpt")
    losses: list[list[float]] = []
    for esp_size in (1, 2):
        model = SmallModel(case, 0)
        named = {"params": list(model.parameters()), "name": "all"}
        optimizer = torch.optim.SGD(split_params_into_different_moe_groups_for_optimizer(named), lr=0.5)
        config = case.ds_config(fsmoe={"enabled": True, "esp_size": esp_size})
        del config["optimizer"]
        engine, *_ = ds_fsmoe.initialize(model=model, optimizer=optimizer, config=config)
        losses.append(train_steps(engine, rank, range(STEPS)))
        engine.destroy()
    return losses


def test_shards_are_trained_by_an_optimizer_of_the_scripts_own(tmp_path: Path) -> None:
    for whole, sharded in run_on_ranks(with_client_optimizer, 2, tmp_path):
        assert sharded == pytest.approx(whole, rel=TOLERANCE["fp32"])


@pytest.mark.parametrize(
    ("esp_size", "expert", "sentence"),
    [
        (3, "gpt", "fsmoe.esp_size = 3: times ep_size, it must divide the 4 ranks; with ep_size = 1 (moes.0) the"),
        (4, "module", "fsmoe.esp_size = 4: moes.0: expert FeedForward cannot be sharded: its structure is unknown"),
        (8, "gpt", "has a hidden width of 28, which 8 shards do not divide: choose from 1, 2, 4, 7, 14, 28"),
    ],
)
def test_shards_that_cannot_be_are_refused_before_any_group(
    esp_size: int, expert: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ds_fsmoe

    monkeypatch.setenv("WORLD_SIZE", "8" if esp_size == 8 else "4")
    case = Case(expert=expert)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        ds_fsmoe.initialize(
            model=SmallModel(case, 0), config=case.ds_config(fsmoe={"enabled": True, "esp_size": esp_size})
        )


# ---- other uses than one plain step


def evaluation_between(engine: Any, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    engine.eval()
    first = engine(x, target)[0]
    engine.train()
    return first + engine(x, target)[0]


def recomputed(engine: Any, x: torch.Tensor, target: torch.Tensor, reentrant: bool) -> torch.Tensor:
    return checkpoint(lambda *args: engine(*args)[0], x, target, use_reentrant=reentrant)


USES: dict[str, Use] = {
    "evaluation between": evaluation_between,
    "two forwards before the backward": lambda engine, x, target: engine(x, target)[0] + engine(2 * x, target)[0],
    "reentrant": lambda *args: recomputed(*args, reentrant=True),
    "non-reentrant": lambda *args: recomputed(*args, reentrant=False),
}


def other_uses(rank: int, world_size: int) -> tuple[list[str], bool, str]:
    """What differs in each use; whether a batch that does not count is none; and what ranks that differ are told."""
    case = Case(2, 0, "fp32", 1, 2, True, moe_options=NO_DRAWS)
    ways = itertools.cycle([degrees(3, 2), degrees(4, 4, recompute=True)])
    work: Work = [(case, {name: way}, use) for (name, use), way in zip(USES.items(), ways, strict=False)]
    found, parameters = compare_blocks(rank, world_size, work), []
    for has_batch in (False, True):
        engine = small_engine(replace(case, accumulation=2), rank, degrees(3, 2))
        for step in range(2):
            if rank == 1 and step == 1:
                loss = 0.0 * engine(*batch(step, rank, torch.float32))[0] if has_batch else engine.fsmoe_dummy_forward()
            else:
                loss = engine(*batch(step, rank, torch.float32))[0]
            engine.backward(loss)
            engine.step()
        parameters.append(torch.cat([each.detach().flatten() for each in engine.module.parameters()]))
        engine.destroy()
    with pytest.raises(RuntimeError, match="the ranks disagree") as told:
        small_engine(case, rank, degrees(3, 4 if rank == 1 else 2))
    return found, torch.allclose(*parameters, rtol=1.3e-6, atol=1e-5), str(told.value)


def test_other_uses_train_to_stocks_numbers_in_chunks_and_ranks_with_other_batches_or_plans_never_hang(
    tmp_path: Path,
) -> None:
    of_ranks = run_on_ranks(other_uses, 2, tmp_path)
    for found, is_same_without_a_batch, told in of_ranks:
        assert not found
        assert is_same_without_a_batch
        assert "fsmoe.pipeline_degree.backward: rank 0: '2'; rank 1: '4'" in told
        assert told == of_ranks[0][2]
