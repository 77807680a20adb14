# SPDX-License-Identifier: Apache-2.0
"""One layer in float32, sending float32 and sending bfloat16: what half the bytes gain, and what they cost in accuracy.

``cluster.py up --inter 50mbit --intra 200mbit``, then ``cluster.py run -- benchmarks/cases/bench_wire.py``. Experts are
spread over the nodes, gate and order included, forward and backward. Rows go to ``benchmarks/results/wire.csv``, the
errors to ``wire_error.csv`` beside it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.harness import Case, Effort, Grid, Variant, join_on_gloo, run_grid
from benchmarks.harness.outcome import PACKAGES
from benchmarks.harness.result_files import append_rows, made_with
from ds_fsmoe import BFloat16Wire, CallbackBase, LinearGate, MOELayer, SimpleOrder
from ds_fsmoe.distributed.groups import make_groups


@dataclass(frozen=True)
class Layer:
    """S tokens on every rank, of width M; an expert of hidden width H per node, as many slots as tokens."""

    S: int
    M: int
    H: int
    degree: int
    """Chunks, in both phases."""


GRID = Grid(
    "wire",
    (
        Case("traffic", Layer(512, 256, 256, 1)),
        Case("traffic, 4 chunks", Layer(512, 256, 256, 4)),
        Case("traffic and compute, 4 chunks", Layer(512, 256, 2048, 4)),
    ),
)


class Step:
    """Forward and backward."""

    def __init__(self, layer: Layer, callbacks: Sequence[CallbackBase] = ()) -> None:
        nodes = max(make_groups().topology.node_of_rank) + 1
        # One rank of every node: neighbours would exchange inside a node.
        group = make_groups(nodes, dist.get_world_size() // nodes).ep_group
        # The same on every rank, as the gate has to be, and for every variant.
        torch.manual_seed(0)
        self.layer = MOELayer(
            LinearGate(k=1, capacity_factor=1.0, use_rts=False),
            SimpleOrder(),
            model_dim=layer.M,
            num_experts=nodes,
            expert_dim=layer.H,
            callbacks=callbacks,
            group=group,
            pipeline_degree=layer.degree,
        )
        torch.manual_seed(1 + dist.get_rank())
        self.x_SM = torch.randn(layer.S, layer.M, requires_grad=True)
        self.dy_SM = torch.randn(layer.S, layer.M)
        self.parameters = list(self.layer.parameters())

    def __call__(self) -> dict[str, list[torch.Tensor]]:
        y_SM = self.layer(self.x_SM)
        dx_SM, *of_parameters = torch.autograd.grad(y_SM, [self.x_SM, *self.parameters], self.dy_SM)
        return {"output": [y_SM.detach()], "gradient of the input": [dx_SM], "gradients of parameters": of_parameters}


def relative_errors(layer: Layer) -> dict[str, float]:
    """What is off by how much of its norm: the largest over ranks."""
    exact, rounded = Step(layer)(), Step(layer, [BFloat16Wire()])()
    errors = torch.tensor([_relative_error(exact[what], rounded[what]) for what in exact])
    dist.all_reduce(errors, op=dist.ReduceOp.MAX)
    return dict(zip(exact, errors.tolist(), strict=True))


def _relative_error(exact: Sequence[torch.Tensor], rounded: Sequence[torch.Tensor]) -> float:
    one, other = (torch.cat([each.flatten() for each in tensors]) for tensors in (exact, rounded))
    return float((one - other).norm() / one.norm())


def main() -> None:
    args = join_on_gloo(__doc__)
    variants = (Variant("float32", Step), Variant("bfloat16 wire", lambda layer: Step(layer, [BFloat16Wire()])))
    run_grid(GRID, variants, "float32", Effort(blocks=args.blocks, steps=2), results=args.results)
    made = made_with(PACKAGES)
    for case in GRID.cases:
        errors = relative_errors(case.settings)
        if dist.get_rank() == 0:
            of_case = {
                **made,
                "ranks": dist.get_world_size(),
                "grid": GRID.digest,
                "case": case.name,
                "settings": json.dumps(case.plain(), sort_keys=True),
            }
            rows = [of_case | {"what": what, "relative_error": f"{error:.3g}"} for what, error in errors.items()]
            append_rows(args.results / "wire_error.csv", tuple(rows[0]), rows)
            print(f"{case.name}: relative errors " + ", ".join(f"{what} {error:.2g}" for what, error in errors.items()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
