# SPDX-License-Identifier: Apache-2.0
"""Ways in which models use a layer besides one plain training step: ours does what stock does in each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.small_model import Case, SmallModel, batch, small_engine

Use = Callable[[Any, SmallModel, int], list[torch.Tensor]]


def gradients(model: SmallModel) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def evaluate(engine: Any, model: SmallModel, rank: int) -> list[torch.Tensor]:
    engine.eval()
    with torch.no_grad():
        results = engine(*batch(0, rank, torch.float32))
    engine.train()
    return list(results)


def two_forwards_before_the_backward(engine: Any, model: SmallModel, rank: int) -> list[torch.Tensor]:
    losses = [engine(*batch(step, rank, torch.float32))[0] for step in range(2)]
    engine.backward(losses[0] + 2 * losses[1])
    return [*losses, *gradients(model)]


def recompute(engine: Any, model: SmallModel, rank: int, reentrant: bool) -> list[torch.Tensor]:
    x_BLM, target_BLM = batch(0, rank, torch.float32)
    hidden = model.first(x_BLM.requires_grad_())
    y_BLM = checkpoint(lambda h: model.moes[0](h)[0], hidden, use_reentrant=reentrant)
    loss = (y_BLM - target_BLM).square().mean()
    engine.backward(loss)
    return [loss, x_BLM.grad, *gradients(model)]


def on_tokens(engine: Any, model: SmallModel, rank: int, change: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    loss, y_BLM = engine(*map(change, batch(0, rank, torch.float32)))
    engine.backward(loss)
    return [loss, y_BLM, *gradients(model)]


USES: dict[str, Use] = {
    "evaluation": evaluate,
    "two forwards before the backward": two_forwards_before_the_backward,
    "reentrant recomputation": lambda *args: recompute(*args, reentrant=True),
    "recomputation": lambda *args: recompute(*args, reentrant=False),
    # Stock wants at least min_capacity tokens at k = 1, so both get as many as that.
    "few tokens": lambda *args: on_tokens(*args, lambda x_BLM: x_BLM[:1, :4]),
    "strided input": lambda *args: on_tokens(*args, lambda x_BLM: x_BLM.transpose(0, 1)),
}


CHOICES = [(1, True), (2, False), (3, True)]
"""(k, whether tokens are dropped)"""


def compare(rank: int, world_size: int, in_turns: bool) -> None:
    """Compare each use with all of these; ``in_turns``: with one of them."""
    for number, (name, use) in enumerate(USES.items()):
        for k, drop_tokens in [CHOICES[number % len(CHOICES)]] if in_turns else CHOICES:
            seen, case = [], Case(ep_size=2, stage=0, k=k, drop_tokens=drop_tokens)
            for dispatch in ("", "padded", "auto")[: 3 - drop_tokens]:
                engine = small_engine(case, rank, {"dispatch": dispatch} if dispatch else None)
                torch.manual_seed(rank)
                seen.append(use(engine, engine.module, rank))
                engine.destroy()
            for stocks, padded, last in zip(seen[0], seen[1], seen[-1], strict=True):
                assert torch.equal(stocks, padded), f"{name}, k = {k}"
                # Rows meet in other products than slots do, so the last bits may differ.
                assert torch.allclose(stocks, last, rtol=1e-4, atol=1e-5), f"{name}, k = {k}, on rows"


@sampled("in_turns", [True, False])
def test_every_use_gives_stocks_numbers(in_turns: bool, tmp_path: Path) -> None:
    run_on_ranks(compare, 2, tmp_path, in_turns)


def timed_and_masked(rank: int, world_size: int) -> None:
    case = Case(ep_size=2, stage=1, k=2, moe_options=(("top2_2nd_expert_sampling", False),))
    engine = small_engine(case, rank, {}, wall_clock_breakdown=True)
    model = engine.module
    x_BLM, target_BLM = batch(0, rank, torch.float32)
    engine.backward(engine(x_BLM, target_BLM)[0])
    engine.step()
    inner = model.moes[0].deepspeed_moe
    parts_ms = [inner.time_falltoall, inner.time_salltoall, inner.gate.gate_time]
    assert min(parts_ms) > 0
    assert inner.time_moe > sum(parts_ms)
    used = torch.arange(21) % 4 != 0
    y_BLM, _, counts_E = model.moes[0](x_BLM, used)
    assert not y_BLM.reshape(21, -1)[~used].any()
    assert counts_E.sum() == 2 * used.sum()


def test_stocks_wall_clock_breakdown_finds_its_times_and_masked_tokens_come_back_as_zeros(tmp_path: Path) -> None:
    run_on_ranks(timed_and_masked, 2, tmp_path)
