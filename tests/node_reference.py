# SPDX-License-Identifier: Apache-2.0
"""The oracle of "each token once per node": all ranks as plain loops over tokens, in one process, every row counted.

Written from the law alone (docs/dispatch.md), with as little cleverness as possible: no buffers, chunks, collectives.
Every row that is to go from one rank to another is handed on by one call, which notes it; autograd hands the gradients
back through these calls, each the other way, and they note that too. So the rows are counted as they occur, in both
phases, and no formula for their number is needed. Meant for float64.

Letters: S tokens of a rank, K choices of a token, M width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

Formula = Callable[..., torch.Tensor]
"""``(x_M, *weights) -> y_M``: what an expert with these weights makes of one token."""


class Leg(NamedTuple):
    """A row's way from one rank to one rank."""

    phase: str
    """``"forward"`` or ``"backward"``."""
    way: str
    """``"in"`` to the experts, or ``"out"`` from them."""
    hop: str
    """``"between"`` nodes, or ``"inside"`` one."""
    source: int
    target: int


@dataclass(frozen=True)
class NodeResult:
    """What all ranks compute, and what they send each other for it."""

    y_per_rank: list[torch.Tensor]
    """[S, M] of each rank."""
    dx_per_rank: list[torch.Tensor]
    """[S, M] of each rank; of the way through the experts alone, whatever the weights depend on."""
    dweights_per_rank: list[torch.Tensor]
    """[S, K] of each rank; 0 where the choice was dropped."""
    dexperts: list[tuple[torch.Tensor, ...]]
    """Of each expert, as its weights are."""
    rows: Counter[Leg]
    """How many rows went each way. What stays on its rank is none: nothing has to travel."""
    computed: Counter[int]
    """How many rows each expert was given in the forward."""


def once_per_node(
    x_per_rank: Sequence[torch.Tensor],
    choices_per_rank: Sequence[torch.Tensor],
    weights_per_rank: Sequence[torch.Tensor],
    dy_per_rank: Sequence[torch.Tensor],
    node_of_rank: Sequence[int],
    formula: Formula,
    experts: Sequence[Sequence[torch.Tensor]],
) -> NodeResult:
    """Do what the layer is to do, forward and backward.

    Args:
        x_per_rank: one [S, M] per rank; S may differ.
        choices_per_rank: [S, K] integers per rank: the expert of every choice, -1 where it was dropped.
        weights_per_rank: [S, K] per rank: what the result of every choice is multiplied with.
        dy_per_rank: [S, M] per rank: the gradients of the outputs.
        node_of_rank: the node of each rank; in each are equally many.
        formula: what all experts compute, each with its own weights.
        experts: the weights of each; the first of them belong to rank 0, as many next ones to rank 1, and so on.
    """
    x_per_rank = [x_SM.detach().clone().requires_grad_() for x_SM in x_per_rank]
    weights_per_rank = [weights_SK.detach().clone().requires_grad_() for weights_SK in weights_per_rank]
    experts = [tuple(each.detach().clone().requires_grad_() for each in expert) for expert in experts]
    run = _Run(list(node_of_rank), formula, experts, Counter(), Counter())
    y_per_rank = []
    for rank, (x_SM, choices_SK, weights_SK) in enumerate(
        zip(x_per_rank, choices_per_rank, weights_per_rank, strict=True)
    ):
        rows = []
        for x_M, choices_K, weights_K in zip(x_SM, choices_SK.tolist(), weights_SK, strict=True):
            weight_of = {expert: weight for expert, weight in zip(choices_K, weights_K, strict=True) if expert >= 0}
            rows.append(run.token(rank, x_M, weight_of))
        y_per_rank.append(torch.stack(rows) if rows else x_SM)
    parameters = [each for expert in experts for each in expert]
    gradients = iter(
        torch.autograd.grad(
            y_per_rank, [*x_per_rank, *weights_per_rank, *parameters], list(dy_per_rank), materialize_grads=True
        )
    )
    return NodeResult(
        [y_SM.detach() for y_SM in y_per_rank],
        [next(gradients) for _ in x_per_rank],
        [next(gradients) for _ in weights_per_rank],
        [tuple(next(gradients) for _ in expert) for expert in experts],
        run.rows,
        run.computed,
    )


@dataclass(frozen=True)
class _Run:
    """The ranks, and what has happened so far."""

    node_of_rank: list[int]
    formula: Formula
    experts: Sequence[Sequence[torch.Tensor]]
    rows: Counter[Leg]
    computed: Counter[int]

    def token(self, rank: int, x_M: torch.Tensor, weight_of: dict[int, torch.Tensor]) -> torch.Tensor:
        """One token of this rank, to each node of its experts and back."""
        y_M = 0 * x_M  # not zeros: the result of a token without experts has a gradient, too
        for node in sorted({self.node_of_rank[self.holder(expert)] for expert in weight_of}):
            relay = self.ranks_of(node)[self.place(rank)]
            x_of_node_M = self.sent(x_M, "in", "between", rank, relay)
            y_of_node_M = torch.zeros_like(x_M)
            for holder in self.ranks_of(node):
                held = {expert: weight for expert, weight in weight_of.items() if self.holder(expert) == holder}
                if held:
                    x_of_rank_M = self.sent(x_of_node_M, "in", "inside", relay, holder)
                    y_of_rank_M = self.weighed(x_of_rank_M, held)
                    y_of_node_M = y_of_node_M + self.sent(y_of_rank_M, "out", "inside", holder, relay)
            y_M = y_M + self.sent(y_of_node_M, "out", "between", relay, rank)
        return y_M

    def weighed(self, x_M: torch.Tensor, weight_of: dict[int, torch.Tensor]) -> torch.Tensor:
        """What one rank makes of one token: the sum over those of its experts that were chosen."""
        y_M = torch.zeros_like(x_M)
        for expert, weight in weight_of.items():
            self.computed[expert] += 1
            y_M = y_M + weight * self.formula(x_M, *self.experts[expert])
        return y_M

    def sent(self, row_M: torch.Tensor, way: str, hop: str, source: int, target: int) -> torch.Tensor:
        if source == target:
            return row_M
        return _Sent.apply(row_M, self.rows, Leg("forward", way, hop, source, target))

    def holder(self, expert: int) -> int:
        """The rank that an expert lies on."""
        return expert // (len(self.experts) // len(self.node_of_rank))

    def ranks_of(self, node: int) -> list[int]:
        return [rank for rank, other in enumerate(self.node_of_rank) if other == node]

    def place(self, rank: int) -> int:
        """Which one of its node a rank is."""
        return self.ranks_of(self.node_of_rank[rank]).index(rank)


class _Sent(torch.autograd.Function):
    """A row on another rank. Its gradient is sent back: the gradient of what came from the experts goes to them."""

    @staticmethod
    def forward(ctx: Any, row_M: torch.Tensor, rows: Counter[Leg], leg: Leg) -> torch.Tensor:
        ctx.rows, ctx.leg = rows, leg
        rows[leg] += 1
        return row_M.clone()

    @staticmethod
    def backward(ctx: Any, drow_M: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        leg = ctx.leg
        back = "in" if leg.way == "out" else "out"
        ctx.rows[Leg("backward", back, leg.hop, leg.target, leg.source)] += 1
        return drow_M.clone(), None, None
