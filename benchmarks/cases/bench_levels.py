# SPDX-License-Identifier: Apache-2.0
"""How gradients are added up and updated parameters come back: whole steps of a GPT at ZeRO 1, way by way.

``cluster.py up --nodes 2 --ranks-per-node 2 --inter 25mbit --intra 100mbit``, then
``cluster.py run -- benchmarks/cases/bench_levels.py``. Attention and MoE layer, block after block; experts are spread
over all ranks and nothing is dropped. The first variant is stock DeepSpeed on the same model; the last one is what
``"autotune": {"enabled": true}`` alone makes of it. Rows go to ``benchmarks/results/levels.csv``.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import ds_fsmoe
from benchmarks.harness.harness import RESULTS, Case, Effort, Grid, Variant, run_grid
from benchmarks.harness.join import join
from benchmarks.harness.routing import parsed
from benchmarks.models.layer_steps import wait_for_parameters
from ds_fsmoe.gradients.reduction import OBSERVED_ROUNDS


@dataclass(frozen=True)
class GPT:
    """``layers`` blocks of width M over S tokens a rank; E experts of hidden width H, each token to k of them."""

    layers: int
    S: int
    M: int
    H: int
    E: int
    k: int


GRID = Grid(
    "levels",
    (
        Case("dense a third of the traffic", GPT(layers=4, S=320, M=128, H=256, E=8, k=2)),
        Case("narrow experts, k 8", GPT(layers=4, S=96, M=128, H=64, E=32, k=8)),
    ),
)


class Blocks(nn.Module):
    """The model."""

    def __init__(self, sizes: GPT) -> None:
        super().__init__()
        M = sizes.M
        self.norms = nn.ModuleList(nn.LayerNorm(M) for _ in range(sizes.layers))
        self.qkv = nn.ModuleList(nn.Linear(M, 3 * M) for _ in range(sizes.layers))
        self.out = nn.ModuleList(nn.Linear(M, M) for _ in range(sizes.layers))
        self.moes = nn.ModuleList(
            ds_fsmoe.MoE(
                M,
                ds_fsmoe.GPTFeedForward(M, sizes.H),
                **{"num_experts": sizes.E, "ep_size": dist.get_world_size(), "k": sizes.k, "drop_tokens": False},
            )
            for _ in range(sizes.layers)
        )

    def forward(self, x_BLM: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        total = x_BLM.new_zeros(())
        for norm, qkv, out, moe in zip(self.norms, self.qkv, self.out, self.moes, strict=True):
            heads = [each.unflatten(-1, (4, -1)).transpose(1, 2) for each in qkv(norm(x_BLM)).chunk(3, dim=-1)]
            mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
            x_BLM = x_BLM + out(mixed.transpose(1, 2).flatten(2))
            y_BLM, aux_loss, _ = moe(x_BLM)
            x_BLM, total = x_BLM + y_BLM, total + aux_loss
        return x_BLM.square().mean() + 0.01 * total


def _gradients(collective: str, levels: int, gather: str) -> dict[str, Any]:
    return {"gradient_partition": {"collective": collective, "levels": levels, "gather_parameters": gather}}


def _chunks(degree: int) -> dict[str, Any]:
    return {"pipeline_degree": {"forward": degree, "backward": degree}}


BEFORE = _gradients("all_reduce", 1, "at_end") | _chunks(2)
LEVELS = _gradients("reduce_scatter", 2, "at_end") | _chunks(2)
ALL = _gradients("reduce_scatter", 2, "overlapped")
ONCE = {"alltoall": "node_deduplicated"} | _chunks(4)


def _by(schedule: str) -> dict[str, Any]:
    """The last but one of the ways below, in another order: the same all-to-all, chunks, and gradients in windows."""
    gradients = {"gradient_partition": ALL["gradient_partition"] | {"mode": "adaptive"}}
    return ALL | ONCE | gradients | {"schedule": schedule}


WAYS: dict[str, tuple[dict[str, Any], bool]] = {
    "stock": ({"enabled": False}, False),
    "all-reduce, gathered at the end": (BEFORE, False),
    "reduce-scatter": (BEFORE | _gradients("reduce_scatter", 1, "at_end"), False),
    "reduce-scatter in two levels": (LEVELS, False),
    "and gathered under the forward": (ALL | _chunks(2), False),
    "and tokens once per node": (ALL | ONCE, False),
    "and owners in turns": (ALL | ONCE, True),
    "the same by tutel": (_by("tutel"), False),
    "the same by fsmoe": (_by("fsmoe"), False),
    "by one word": ({"autotune": {"enabled": True, "watch_every": 0}}, False),
}
"""Name -> the block, and whether ZeRO deals parameters out to owners in turns."""


class TrainingStep:
    """An engine over the model, and a step of it; the same weights and tokens whoever makes it."""

    def __init__(self, block: dict[str, Any], in_turns: bool, sizes: GPT) -> None:
        torch.manual_seed(0)
        model = Blocks(sizes)
        of_engine = {"enabled": True, "metrics": "off", "autotune": False, "topology": {"ranks_per_node": 2}}
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "torch_adam": True}},
            "zero_optimization": {"stage": 1, "round_robin_gradients": in_turns},
            "zero_force_ds_cpu_optimizer": False,
            "fsmoe": {"enabled": False} if not block.get("enabled", True) else of_engine | block,
            "steps_per_print": 1_000_000,
        }
        self.engine = ds_fsmoe.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
        torch.manual_seed(dist.get_rank())
        self.x_BLM = torch.randn(2, sizes.S // 2, sizes.M)
        # Gradients are planned after some steps; plans are measured and tried first, if that is asked for.
        for _ in range(OBSERVED_ROUNDS + 1):
            self()
        while self._is_trying():
            self()

    def _is_trying(self) -> bool:
        state = getattr(self.engine, "fsmoe", None)
        if state is None or state.autotune is None:
            return False
        return state.autotune.trials is not None or state.reduction.reducer.plan is None

    def __call__(self) -> None:
        self.engine.backward(self.engine(self.x_BLM))
        self.engine.step()

    def finish(self) -> None:
        """Wait for what the last step has left under way."""
        wait_for_parameters(self.engine)

    def close(self) -> None:
        """End the engine."""
        self.engine.destroy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=10, help="of a turn of two steps of each variant")
    parser.add_argument("--only", nargs="*", choices=[each for each in WAYS if each != "stock"], help="ways (all)")
    parser.add_argument("--cases", type=int, nargs="*", help="numbers of the cases to measure (all)")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    args = parsed(parser)
    join()
    chosen = WAYS if args.only is None else {name: WAYS[name] for name in ("stock", *args.only)}
    variants = tuple(Variant(name, partial(TrainingStep, *way)) for name, way in chosen.items())
    every = GRID.cases
    grid = Grid(GRID.name, every if args.cases is None else tuple(every[number] for number in args.cases))
    run_grid(grid, variants, baseline="stock", effort=Effort(args.blocks, 1, in_a_row=2), results=args.results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
