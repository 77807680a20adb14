# SPDX-License-Identifier: Apache-2.0
"""Where every parameter is known to be used, gradients travel without a second copy, and to the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.small_model import Case, SmallModel, batch
from tests.test_stock_parity import differences, train
from tests.waiting import LIMIT_S

BLOCK = {"enabled": True, "deterministic": True, "gradient_partition": {"mode": "adaptive", "all_used": True}}
CASES = [Case(1, 0, "fp32", 1, 2), Case(2, 1, "fp32", 2, 1), Case(2, 2, "bf16", 1, 2), Case(1, 2, "fp32", 2, 2)]


def compare_with_stock(rank: int, world_size: int, cases: list[Case]) -> list[str]:
    import deepspeed

    import ds_fsmoe

    found = []
    for case in cases:
        stocks = train(case, rank, deepspeed.initialize, None)
        # Stock sums every micro-batch at stage 2.
        adds = {"accumulate": "after_sum"} if case.stage == 2 else {}
        ours = train(
            case, rank, ds_fsmoe.initialize, BLOCK | {"gradient_partition": BLOCK["gradient_partition"] | adds}
        )
        found += [f"{case}: {name}" for name in differences(ours, stocks)]
    return found


@sampled("cases", [CASES[1:3], CASES], kept=[0], ids=["with experts spread", "all"])
def test_training_equals_stock_bit_for_bit(cases: list[Case], tmp_path: Path) -> None:
    for found in run_on_ranks(compare_with_stock, 2, tmp_path, cases):
        assert not found


def make_engine(rank: int) -> Any:
    import ds_fsmoe

    torch.manual_seed(0)
    model = SmallModel(Case(ep_size=2, k=2), rank)
    model.spare = nn.Parameter(torch.ones(5))
    config = Case(ep_size=2, k=2).ds_config(fsmoe=BLOCK)
    return ds_fsmoe.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def step(engine: Any, number: int, spare: bool) -> None:
    loss, y_BLM = engine(*batch(number, 0, torch.float32))
    # Used at the end of the forward, its gradient comes first; used at the start, it comes last.
    use = engine.module.spare.sum()
    engine.backward(loss + use * (y_BLM.sum() if spare else 0.0) + 0.0 * use)


def where_gradients_lie(rank: int, world_size: int) -> tuple[bool, list[tuple[int, ...]]]:
    engine = make_engine(rank)
    reducer = engine.fsmoe.reduction.reducer
    step(engine, 0, spare=True)
    held = [each for flat in reducer.flats for each in flat._reduced if each is not None]
    once = not held and all(each.grad is not None for each in reducer.parameters)
    engine.step()
    return once, [tuple(each.extra.shape) for each in reducer.flats]


def test_there_is_no_second_copy_and_nothing_to_tell(tmp_path: Path) -> None:
    for once, extras in run_on_ranks(where_gradients_lie, 2, tmp_path):
        assert once
        assert set(extras) == {(0,)}


def come_twice(rank: int, world_size: int) -> None:
    engine = make_engine(rank)
    for number in range(2):
        step(engine, number, spare=True)
        engine.step()
    reducer = engine.fsmoe.reduction.reducer
    assert reducer.plan.hidden() > 0
    # Behind the backward's windows, as a gradient that comes again would.

    def comes_again(*_: Any) -> None:
        engine.module.spare.grad = torch.ones_like(engine.module.spare)
        reducer.ready(engine.module.spare)

    engine.module.first.register_full_backward_hook(comes_again)
    step(engine, 2, spare=True)


def test_a_gradient_that_comes_late_after_all_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"\[\(5,\)\] came after their slices were sent") as caught:
        run_on_ranks(come_twice, 2, tmp_path, grace_s=LIMIT_S)
    assert str(caught.value).count("although fsmoe.gradient_partition.all_used = true: remove it") == 2
