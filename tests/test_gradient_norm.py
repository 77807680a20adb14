# SPDX-License-Identifier: Apache-2.0
"""The gradient norm without ZeRO: every distinct parameter once, whatever ep and esp, the same on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_fsmoe.gradients.norm import clip_by_norm
from tests.logged import heard
from tests.ranks import run_on_ranks
from tests.samples import draw
from tests.small_model import Case, SmallModel, batch, small_engine

STEPS = 2
SPREADS = [(1, 1), (2, 1), (4, 1), (2, 2)]  # (ep, esp)


def norms_of_a_run(case: Case, rank: int, esp_size: int, clipping: float) -> tuple[list[float], list[float], float]:
    """What the engine reports, what the gradients say, and a number that all of training went into."""
    torch.manual_seed(0)
    engine = small_engine(case, rank, {"esp_size": esp_size}, gradient_clipping=clipping)
    model = engine.module
    reported, true = [], []
    for step in range(STEPS):
        loss, _ = engine(*batch(step, rank, next(model.parameters()).dtype))
        engine.backward(loss)
        true.append(true_norm(model, case.ep_size * esp_size))
        engine.step()
        reported.append(engine.get_global_grad_norm())
    checksum = sum(each.float().abs().sum().item() for name, each in model.named_parameters() if "experts" not in name)
    engine.destroy()
    return reported, true, checksum


def true_norm(model: SmallModel, num_parts: int) -> float:
    """From all gradients of all ranks, put together by hand: block 0 holds each expert, or shard of one, once."""
    squares = {True: 0.0, False: 0.0}
    for name, parameter in model.named_parameters():
        squares["deepspeed_experts" in name] += parameter.grad.double().pow(2).sum().item()
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, squares[True])
    return (squares[False] + sum(of_ranks[:num_parts])) ** 0.5


def compare_spreads(rank: int, world_size: int, dtype: str, clipping: float) -> list:
    said = heard("WARNING")
    found = [
        norms_of_a_run(Case(ep_size, 0, dtype, 1, 2, False, expert="gpt"), rank, esp_size, clipping)
        for ep_size, esp_size in SPREADS
    ]
    # Stock's norm is another one, which the first rank says of each engine.
    assert sum("clips unlike stock" in each for each in said.lines) == len(SPREADS) * (rank == 0)
    return found


@pytest.mark.parametrize(("max_norm", "expected"), [(4.9, 4.9), (5.1, 5.0), (100.0, 5.0), (0.0, 0.0)])
def test_gradients_below_the_limit_are_not_touched_and_others_are_scaled_down_to_it(
    max_norm: float, expected: float
) -> None:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(3))]
    gradients = [torch.tensor([3.0, 0.0]), torch.tensor([-4.0])]
    for parameter, gradient in zip(parameters, gradients, strict=False):
        parameter.grad = gradient.clone()
    assert clip_by_norm(parameters, max_norm).item() == 5.0
    if max_norm > 5:
        assert all(torch.equal(one.grad, other) for one, other in zip(parameters, gradients, strict=False))
    found = torch.cat([each.grad for each in parameters[:2]])
    torch.testing.assert_close(found, torch.cat(gradients) * expected / 5)
    assert parameters[2].grad is None


def test_the_norm_does_not_depend_on_how_experts_are_spread(tmp_path: Path) -> None:
    [dtype], clipping = draw("norms", ["fp32", "bf16"], 1), 0.05
    of_ranks = run_on_ranks(compare_spreads, 4, tmp_path, dtype, clipping)
    for spread, of_rank in zip(SPREADS, zip(*of_ranks, strict=True), strict=True):
        reported, true, _ = of_rank[0]
        assert all(each[0] == reported for each in of_rank), f"{spread}: ranks report other norms"
        assert reported == pytest.approx(true, rel=1e-5)
    rounding = 1e-4 if dtype == "fp32" else 0.02
    for reported, _, checksum in of_ranks[0][1:]:
        assert reported == pytest.approx(of_ranks[0][0][0], rel=rounding)
        assert checksum == pytest.approx(of_ranks[0][0][2], rel=rounding)
    assert min(of_ranks[0][0][0]) > clipping, "gradients are to be clipped in every step"
