# SPDX-License-Identifier: Apache-2.0
"""Experts that would compute something else in chunks run in one, with stock's numbers; all ranks decide alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_fsmoe import LinearGate, MOELayer, SimpleOrder
from tests.hurry import hurry
from tests.ranks import run_on_ranks
from tests.small_model import WIDTH, Case, SmallModel
from tests.test_containers import Change, alike, trained

CASE = Case(ep_size=2, stage=0, k=2)
CUT = {"pipeline_degree": {"forward": 2, "backward": 3}, "debug": {"check_every": 1}}


class Around(nn.Module):
    """An expert with something behind it, deep inside."""

    def __init__(self, inner: nn.Module, behind: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"inner": inner, "rest": nn.Sequential(behind)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts["rest"](self.parts["inner"](x))


class Function(nn.Module):
    """A function as a module, so that its class says nothing."""

    def __init__(self, function: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


class NormOfRows(nn.BatchNorm1d):
    """Over all rows, in whatever shape they come."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.reshape(-1, x.shape[-1])).view(x.shape)


def functional_dropout(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.dropout(x, 0.3, module.training)


def centred(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(dim=-2, keepdim=True)


def refuses_few(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if x.shape[-2] < 6:
        raise RuntimeError("at least six rows")
    return x


UNCUT: dict[str, Callable[[], nn.Module]] = {
    "rest.0, a Dropout, draws random numbers": lambda: nn.Dropout(0.3),
    "rest.0, a NormOfRows, is not row-wise": lambda: NormOfRows(WIDTH),
    "expert Around draws random numbers": lambda: Function(functional_dropout),
    "expert Around is not row-wise: a row of its result changes": lambda: Function(centred),
    "could not be tried on a few rows (RuntimeError: at least six rows)": lambda: Function(refuses_few),
}
STAY_CUT: dict[str, Callable[[], nn.Module]] = {
    "no dropout": lambda: nn.Dropout(0.0),
    "all dropped": lambda: nn.Dropout(1.0),
    "a norm within rows": lambda: nn.LayerNorm(WIDTH),
    "frozen dropout": lambda: nn.Dropout(0.3).eval(),
    "frozen statistics": lambda: NormOfRows(WIDTH).eval(),
    "no functional dropout": lambda: Function(lambda module, x: nn.functional.dropout(x, 0.0, True)),
}


def behind_experts(behind: Callable[[], nn.Module], ranks: tuple[int, ...] = (0, 1)) -> Change:
    """What puts a module behind each expert of a layer on these ranks."""

    def change(model: SmallModel, layer: nn.Module, seen: list) -> None:
        experts = layer.experts.deepspeed_experts
        for index in range(len(experts)):
            experts[index] = Around(experts[index], behind() if dist.get_rank() in ranks else nn.Identity())
            for parameter in experts[index].parameters():
                parameter.allreduce, parameter.group_name = False, "ep_size_2"

    return change


def one_chunk(said: list[str]) -> list[str]:
    """The sentences about layers that are not cut."""
    return [each for each in said if "in one chunk (" in each or "in one chunk: " in each]


def compared(rank: int, names: list[str]) -> list[str]:
    wrong = []
    for number, what in enumerate(names):
        change = behind_experts((UNCUT | STAY_CUT)[what])
        block = CUT | {"recompute": number % 2 == 1}
        seen, lines, degrees = trained(rank, block, change, True, CASE)
        if not alike(seen, trained(rank, None, change, True, CASE)[0], rtol=1e-4):
            wrong.append(f"{what}, {block}: other numbers")
        if degrees != [(2, 3), (1, 1) if what in UNCUT else (2, 3)]:
            wrong.append(f"{what}, {block}: {degrees}")
        said = one_chunk(lines)
        if rank == 0 and [what in each and "moes.1 runs" in each for each in said] != [True] * (what in UNCUT):
            wrong.append(f"{what}, {block}: {said}")
    return wrong


def alone(rank: int) -> list[tuple[list[tuple[int, int]], int]]:
    """Degrees and the number of sentences where experts differ on one rank alone, as they are made or later."""
    found = []
    by_class, by_trial = lambda: nn.Dropout(0.3), lambda: Function(functional_dropout)
    for behind, on_rank, late in ((by_class, 1, False), (by_trial, 0, False), (by_class, 1, True)):
        _, said, degrees = trained(rank, CUT, behind_experts(behind, (on_rank,)), not late, CASE)
        found.append((degrees, len(one_chunk(said))))
    return found


def on_two_ranks(rank: int, world_size: int) -> tuple[list[str], list[tuple[list[tuple[int, int]], int]]]:
    by_class, norm, by_trial, mixes, _ = UNCUT
    return compared(rank, [by_class, norm, by_trial, mixes, "frozen dropout"]), alone(rank)


def test_experts_that_differ_in_chunks_are_not_cut_on_any_rank_and_others_are(tmp_path: Path) -> None:
    for rank, (wrong, of_one) in enumerate(run_on_ranks(on_two_ranks, 2, tmp_path)):
        assert wrong == []
        assert of_one == [([(2, 3), (1, 1)], 1 - rank)] * 3


def tuned(rank: int, world_size: int) -> tuple[list[tuple[int, int]], list[bool]]:
    hurry()
    block = CUT | {"autotune": {"enabled": True, "trials": 0}}
    change = behind_experts(lambda: Function(functional_dropout), (1,))
    _, said, degrees = trained(rank, block, change, False, CASE)
    return degrees, ["in one chunk: expert 0: expert Around draws" in line for line in one_chunk(said)]


@pytest.mark.long
def test_the_autotuner_does_not_cut_them_either(tmp_path: Path) -> None:
    first, second = run_on_ranks(tuned, 2, tmp_path)
    assert first == ([(2, 3), (1, 1)], [False, True])
    assert second[0] == [(2, 3), (1, 1)]


@pytest.mark.parametrize("what", [*UNCUT, *STAY_CUT])
def test_a_layer_put_together_by_hand_is_not_cut_either(what: str) -> None:
    behind = (UNCUT | STAY_CUT)[what]
    results = []
    for degree in (1, (2, 3)):
        torch.manual_seed(0)
        expert = Around(nn.Linear(WIDTH, WIDTH), behind())
        layer = MOELayer(
            LinearGate(k=2), SimpleOrder(), model_dim=WIDTH, num_experts=3, expert_impl=expert, pipeline_degree=degree
        )
        x_SM = torch.randn(23, WIDTH, requires_grad=True)
        y_SM = layer(x_SM)
        y_SM.square().sum().backward()
        results.append([y_SM, x_SM.grad, *(each.grad for each in layer.parameters()), *layer.buffers()])
        if degree != 1:
            assert layer._state.pipeline.is_chunked == (what in STAY_CUT)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
