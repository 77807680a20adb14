# SPDX-License-Identifier: Apache-2.0
"""One layer, sending slots and sending rows: what empty slots cost, and what rows cost instead. The last cases drop.

``cluster.py up --inter 50mbit --intra 200mbit``, then ``cluster.py run -- benchmarks/cases/bench_rows.py``. Experts are
spread over all ranks, gate and order included, forward and backward. Tokens prefer experts by a factor that is
log-normal over the experts, with a sigma of 0 (balanced), 0.6 or 1. Times go to ``benchmarks/results/rows.csv``; how
many rows and slots there were, and the goal that follows from it, to ``rows_counted.csv`` beside it.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.harness import Case, Effort, Grid, Variant, join_on_gloo, run_grid
from benchmarks.harness.outcome import PACKAGES
from benchmarks.harness.result_files import append_rows, made_with
from ds_fsmoe import LinearGate, MOELayer, SimpleOrder
from ds_fsmoe.components.experts.mixtral import MixtralFeedForward

GUMBEL_STD = 1.28
"""Of the noise with which the largest logits are drawn in proportion to the experts' factors."""
GOAL_SHARE = 0.85
"""Of (slots / rows of the fullest rank), which the speed-up is to reach."""


@dataclass(frozen=True)
class Layer:
    """S tokens on every rank, of width M; E experts over all ranks, of hidden width H; each token takes k."""

    S: int
    M: int
    H: int
    E: int
    k: int
    sigma: float
    degree: int = 1
    """Chunks, in both phases."""
    capacity_factor: float | None = None
    """Tokens above it are dropped; ``None``: none are."""


def _cases() -> tuple[Case, ...]:
    found = [Case("E 4, k 2, balanced", Layer(256, 64, 128, 4, 2, 0.0))]
    found += [
        Case(f"E {E}, k 8, sigma {sigma:g}", Layer(256, 64, 32, E, 8, sigma))
        for E in (16, 32, 128)
        for sigma in (0.0, 0.6, 1.0)
    ]
    found += [Case("E 128, k 8, sigma 0.6, 2 chunks", Layer(256, 64, 32, 128, 8, 0.6, 2))]
    found += [
        Case(f"E {E}, k 2, sigma {sigma:g}, factor {factor:g}", Layer(256, 64, 128, E, 2, sigma, 1, factor))
        for E, sigma, factor in ((4, 0.0, 1.0), (16, 0.0, 1.0), (16, 0.0, 1.25), (16, 1.0, 1.25), (16, 1.0, 2.0))
    ]
    return tuple(found)


GRID = Grid("rows", _cases())


class Step:
    """Forward and backward."""

    def __init__(self, layer: Layer, dispatch: str) -> None:
        # The same on every rank, as the gate has to be, and for every variant.
        torch.manual_seed(0)
        self.layer = MOELayer(
            LinearGate(
                k=layer.k,
                capacity_factor=layer.capacity_factor,
                drop_tokens=layer.capacity_factor is not None,
                top2_2nd_expert_sampling=False,
            ),
            SimpleOrder(),
            model_dim=layer.M,
            num_experts=layer.E,
            expert_impl=MixtralFeedForward(layer.M, layer.H),
            group=dist.group.WORLD,
            pipeline_degree=layer.degree,
            dispatch=dispatch,
            return_stats=True,
        )
        # The first feature is 1 for every token: with it the gate prefers some experts.
        with torch.no_grad():
            weight_EM = torch.randn(layer.E, layer.M) * GUMBEL_STD / layer.M**0.5
            weight_EM[:, 0] = layer.sigma * torch.randn(layer.E)
            self.layer.gate.wg.weight.copy_(weight_EM)
        torch.manual_seed(1 + dist.get_rank())
        self.x_SM = torch.randn(layer.S, layer.M)
        self.x_SM[:, 0] = 1.0
        self.x_SM.requires_grad_()
        self.dy_SM = torch.randn(layer.S, layer.M)
        self.parameters = [each for each in self.layer.parameters() if each is not self.layer.gate.wg.weight]

    def __call__(self) -> torch.Tensor:
        result = self.layer(self.x_SM)
        torch.autograd.grad(result.output, [self.x_SM, *self.parameters], self.dy_SM)
        return result.counts_E


def counted(layer: Layer) -> dict[str, float]:
    """The slots that a rank computes, the rows of the mean and of the fullest rank, and what rows can gain."""
    counts_E = Step(layer, "unpadded")()
    of_ranks = [torch.empty_like(counts_E) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, counts_E)
    counts_GE = torch.stack(of_ranks)
    capacity = int(counts_GE.max())
    if layer.capacity_factor is not None:
        capacity = math.ceil(layer.capacity_factor * layer.k * layer.S / layer.E)
        counts_GE = counts_GE.clamp(max=capacity)
    slots = capacity * layer.E
    of_rank_G = counts_GE.sum(0).view(dist.get_world_size(), -1).sum(1)
    fullest, mean = int(of_rank_G.max()), float(of_rank_G.double().mean())
    return {"slots": slots, "mean_rows": mean, "fullest_rows": fullest, "most": slots / fullest}


def main() -> None:
    args = join_on_gloo(__doc__)
    dispatches = {"slots": "padded", "rows": "unpadded"}
    variants = tuple(Variant(name, partial(_step, dispatch=each)) for name, each in dispatches.items())
    run_grid(GRID, variants, "slots", Effort(blocks=args.blocks, steps=2), results=args.results)
    made = made_with(PACKAGES)
    for case in GRID.cases:
        numbers = counted(case.settings)
        if dist.get_rank() == 0:
            facts = {"ranks": dist.get_world_size(), "grid": GRID.digest, "case": case.name}
            facts |= {"settings": json.dumps(case.plain(), sort_keys=True)}
            goal = max(0.98, GOAL_SHARE * numbers["most"])
            row = made | facts | {name: f"{value:.4g}" for name, value in (numbers | {"goal": goal}).items()}
            append_rows(args.results / "rows_counted.csv", tuple(row), [row])
            print(f"{case.name}: {numbers}, goal {goal:.2f}")
    dist.destroy_process_group()


def _step(layer: Layer, dispatch: str) -> Step:
    return Step(layer, dispatch)


if __name__ == "__main__":
    main()
