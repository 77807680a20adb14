# SPDX-License-Identifier: Apache-2.0
"""Gate, arrange and restore, forward and backward: our compiled ops and stock DeepSpeed's functions side by side.

``python benchmarks/cases/bench_ops.py`` (some minutes; ``--help`` for smaller sizes; ``OMP_NUM_THREADS`` is the number
of threads). Stock is what its layer runs, which is its fastest way: ``top1gating``, ``top2gating`` or ``topkgating``
with ``sparse_routes=True``, then ``_route_slots``, ``_sparse_encode`` and ``_sparse_decode``, which index rows. Its
dense way, one-hot [S, E, C] masks and einsum, is measured too with ``--einsum``, for sizes that fit.

Both compute the same, which is checked first: nothing is random, and there is room for every token. The experts are
left out, so what is arranged is restored. On a CPU times are CPU time of the process, so nothing else on the machine is
in them. They go to ``benchmarks/results/ops.csv``; how they compare with copying the least bytes that have to be read
and written goes to ``ops_bytes.csv`` beside it.

All have the same allocator, which keeps its memory (``--allocator``). Our ops ask for huge pages for what they return;
``THP_MEM_ALLOC_ENABLE=1`` makes torch do so for every tensor, stock's too, and the cases say so.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from deepspeed.moe import sharded_moe
from torch import Tensor

# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness import routing
from benchmarks.harness.harness import RESULTS, Case, CaseResult, Effort, Goal, Grid, Variant, run_grid
from benchmarks.harness.outcome import PACKAGES
from benchmarks.harness.result_files import append_rows, check_columns, made_with
from benchmarks.harness.routing import parsed
from ds_fsmoe.observing.clock import HOST, Clock
from ds_fsmoe.ops import Ops, load_ops

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MAX_EINSUM_BYTES = 1 << 30  # of one [S, E, C] mask
BYTES_COLUMNS = ("grid", "case", "variant", "settings", "least_MB", "ms", "GB_per_s", "times_copy")


class CpuClock(Clock):
    """Tells the CPU time of this process in the place of the time of day: what else runs on a machine is not in it."""

    perf_counter = staticmethod(time.process_time)


@dataclass(frozen=True)
class Layer:
    """S tokens of width M, each to k of E experts that have C slots."""

    S: int
    M: int
    E: int
    k: int
    dtype: str
    device: str
    threads: int
    huge_pages: bool
    """Whether torch asks for huge pages for every tensor."""
    capacity_factor: float = 1.5

    def __str__(self) -> str:
        threads = f", {self.threads} thr, CPU time" if self.device == "cpu" else ""
        return f"E = {self.E}, k = {self.k}, {self.dtype}{threads}{', huge pages' if self.huge_pages else ''}"

    @property
    def C(self) -> int:
        return math.ceil(self.S / self.E * self.capacity_factor * self.k)

    @property
    def least_bytes(self) -> int:
        """What arrange and restore have to read and write in one step: every row that is read and written once.

        Arrange: x, all slots. Restore: a row per choice, the result. Its backward: the result's gradient, a row per
        choice, all slots. Arrange's backward: a row per choice, the gradient of x.
        """
        rows = 4 * self.S + 3 * self.k * self.S + 2 * self.E * self.C
        return rows * self.M * DTYPES[self.dtype].itemsize


class Step:
    """One forward and backward on the same tokens and scores for every variant."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        generator = torch.Generator().manual_seed(0)
        dtype = DTYPES[layer.dtype]

        def rows(width: int, of: torch.dtype) -> Tensor:
            return torch.randn(layer.S, width, generator=generator).to(layer.device, of)

        logits_SE = rows(layer.E, torch.float32)
        if routing.forced is not None:
            chosen_SK = torch.from_numpy(routing.forced.routing.choices(layer.S, layer.E, layer.k)).to(layer.device)
            logits_SE.scatter_add_(1, chosen_SK, torch.full_like(chosen_SK, 10, dtype=torch.float32))
        self.logits_SE = logits_SE.requires_grad_()
        self.x_SM = rows(layer.M, dtype).requires_grad_()
        self.dy_SM = rows(layer.M, dtype)
        self.d_aux = torch.ones((), device=layer.device)
        self.factor_N1: Tensor | None = None

    def experts(self, x_NM: Tensor) -> Tensor:
        """Nothing when it is measured; to compare results, what sets the experts apart."""
        return x_NM if self.factor_N1 is None else x_NM * self.factor_N1

    def forward(self) -> tuple[Tensor, Tensor]:
        """(result [S, M], auxiliary loss)."""
        raise NotImplementedError(f"{type(self).__name__} must say what it does")

    def __call__(self) -> tuple[Tensor, ...]:
        y_SM, aux_loss = self.forward()
        gradients = torch.autograd.grad([y_SM, aux_loss], [self.x_SM, self.logits_SE], [self.dy_SM, self.d_aux])
        return y_SM, aux_loss, *gradients


class Stock(Step):
    """What the layer of DeepSpeed 0.19.8 calls between the router's matrix and the experts, and behind them."""

    def gate(self, sparse_routes: bool) -> tuple:
        layer, factor = self.layer, self.layer.capacity_factor
        logits_SE = self.logits_SE * 1.0  # top2gating may write to what it is given
        if layer.k == 1:
            return sharded_moe.top1gating(logits_SE, factor, 0, use_rts=False, sparse_routes=sparse_routes)
        if layer.k == 2:
            return sharded_moe.top2gating(
                logits_SE, factor, 0, top2_2nd_expert_sampling=False, sparse_routes=sparse_routes
            )
        return sharded_moe.topkgating(logits_SE, layer.k, factor, 0, sparse_routes=sparse_routes)

    def forward(self) -> tuple[Tensor, Tensor]:
        aux_loss, capacity, num_experts, indices, locations, gates, _ = self.gate(sparse_routes=True)
        slots = sharded_moe._route_slots(indices, locations, num_experts, int(capacity))
        x_ECM = sharded_moe._sparse_encode(self.x_SM, slots, num_experts, int(capacity))
        y_NM = self.experts(x_ECM.view(-1, self.layer.M))
        y_SM = sharded_moe._sparse_decode(y_NM, slots, gates, self.layer.S)
        return y_SM, aux_loss


class StockEinsum(Stock):
    """The dense way of GShard, as earlier versions of stock's layer had it."""

    def forward(self) -> tuple[Tensor, Tensor]:
        aux_loss, combine_SEC, dispatch_SEC, _ = self.gate(sparse_routes=False)
        x_ECM = sharded_moe.einsum("sec,sm->ecm", dispatch_SEC.type_as(self.x_SM), self.x_SM)
        return sharded_moe.einsum("sec,ecm->sm", combine_SEC.type_as(x_ECM), x_ECM), aux_loss


class Ours(Step):
    """The same formulas around our ops."""

    def __init__(self, layer: Layer, ops: Ops) -> None:
        super().__init__(layer)
        self.ops = ops

    def gate(self) -> tuple[Tensor, Tensor, Tensor]:
        """(slots [K, S], weights [K, S], auxiliary loss)."""
        layer = self.layer
        probs_SE = F.softmax(self.logits_SE, dim=1)
        # Stock's k >= 3 drops by probability, its k = 1 and 2 by position.
        priority = "choice" if layer.k <= 2 else "score"
        found = self.ops.top_k_slots(probs_SE.detach(), layer.k, layer.C, None, priority)
        kept_KS = found.slots_KS < layer.E * layer.C
        weights_KS = probs_SE.gather(1, found.experts_KS.t()).t() * kept_KS
        counts_E = found.counts_E
        if layer.k == 2:
            counts_E = torch.bincount(found.experts_KS[0], minlength=layer.E)
        aux_loss = (probs_SE.mean(dim=0) * (counts_E / layer.S)).sum() * layer.E / max(1, layer.k if layer.k > 2 else 1)
        if layer.k > 1:
            weights_KS = weights_KS / weights_KS.sum(dim=0).clamp(min=torch.finfo(weights_KS.dtype).eps)
        return found.slots_KS, weights_KS, aux_loss

    def forward(self) -> tuple[Tensor, Tensor]:
        slots_KS, weights_KS, aux_loss = self.gate()
        x_NM = self.ops.arrange(self.x_SM, slots_KS, self.layer.E * self.layer.C)
        return self.ops.restore(self.experts(x_NM), slots_KS, weights_KS), aux_loss


class OursRows(Ours):
    """Arrange and restore alone: the gate's part is done before."""

    def __init__(self, layer: Layer, ops: Ops) -> None:
        super().__init__(layer, ops)
        slots_KS, weights_KS, _ = self.gate()
        self.slots_KS, self.weights_KS = slots_KS, weights_KS.detach().requires_grad_()

    def __call__(self) -> tuple[Tensor, ...]:
        x_NM = self.ops.arrange(self.x_SM, self.slots_KS, self.layer.E * self.layer.C)
        y_SM = self.ops.restore(x_NM, self.slots_KS, self.weights_KS)
        return torch.autograd.grad(y_SM, [self.x_SM, self.weights_KS], self.dy_SM)


class Copy:
    """As many bytes as have to be read and written, by torch's own copy, from one tensor to another that is there."""

    PIECE_BYTES = 128 << 20  # beyond any cache

    def __init__(self, layer: Layer) -> None:
        self.pieces = [self.PIECE_BYTES] * (layer.least_bytes // 2 // self.PIECE_BYTES)
        self.pieces.append(layer.least_bytes // 2 % self.PIECE_BYTES)
        self.source, self.target = (
            torch.ones(self.PIECE_BYTES // 4, dtype=torch.float32, device=layer.device) for _ in range(2)
        )

    def __call__(self) -> None:
        for num_bytes in self.pieces:
            self.target[: num_bytes // 4].copy_(self.source[: num_bytes // 4])


def check_same(layer: Layer, one: Step, other: Step) -> None:
    """Raises ValueError unless both compute the same: result, loss, both gradients."""
    # With experts that are all the same, weights that add up to 1 would have no gradient to compare.
    factor_E = torch.linspace(0.5, 2.0, layer.E, device=layer.device, dtype=DTYPES[layer.dtype])
    for step in (one, other):
        step.factor_N1 = factor_E.repeat_interleave(layer.C).unsqueeze(1)
    bound = 1e-4 if layer.dtype == "fp32" else 3e-2
    for name, a, b in zip(("result", "loss", "gradient of x", "gradient of the scores"), one(), other(), strict=True):
        a, b = a.detach().float(), b.detach().float()
        if not torch.allclose(a, b, rtol=bound, atol=bound * float(b.abs().max())):
            raise ValueError(f"{layer}: {name} differs by {float((a - b).abs().max()):.3g}")


def append_bytes(file: Path, results: list[CaseResult], grid: Grid) -> None:
    """What the times mean for memory: GB/s moved, against those of a copy."""
    made, rows = made_with(PACKAGES), []
    print("\nbytes that have to be moved, per second of each; times what copying them takes")
    for result in results:
        layer: Layer = result.case.settings
        times_ms = {row.name: row.p50_ms for row in result.variants}
        for name in ("stock", "ours", "ours, rows only", "copy"):
            row = {"grid": grid.digest, "case": result.case.name, "variant": name}
            row["settings"] = json.dumps(result.case.plain(), sort_keys=True)
            row |= {"least_MB": f"{layer.least_bytes / 1e6:.1f}", "ms": f"{times_ms[name]:.6g}"}
            row["GB_per_s"] = f"{layer.least_bytes / times_ms[name] / 1e6:.3f}"
            row["times_copy"] = f"{times_ms[name] / times_ms['copy']:.3f}"
            rows.append(made | row)
            print(f"  {result.case.name:<36} {name:<16} {row['GB_per_s']:>8} GB/s  {row['times_copy']:>7}")
    append_rows(file, tuple(rows[0]), rows)
    print(f"rows in {file}")


def main() -> int:
    """Measure, print, append."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192, help="S")
    parser.add_argument("--width", type=int, default=1024, help="M")
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 64], help="E, each of them")
    parser.add_argument("--choices", type=int, nargs="+", default=[1, 2, 8], help="k, each of them")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32", "bf16"])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--steps", type=int, default=1, help="of each variant in a block")
    parser.add_argument("--warmup", type=int, default=2, help="steps that are not counted")
    parser.add_argument("--budget-s", type=float, help="seconds for a case, beyond which no block is begun")
    parser.add_argument("--einsum", action="store_true", help="stock's dense way too")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parsed(parser)
    ops = load_ops("required", args.device)
    huge_pages = os.environ.get("THP_MEM_ALLOC_ENABLE", "0") == "1"
    cases = [
        Layer(args.tokens, args.width, E, k, dtype, args.device, torch.get_num_threads(), huge_pages)
        for dtype, E, k in itertools.product(args.dtypes, args.experts, args.choices)
    ]
    grid = Grid("ops", tuple(Case(str(layer), layer) for layer in cases))
    variants: list[Variant] = [
        Variant("stock", Stock),
        Variant("ours", lambda layer: Ours(layer, ops)),
        Variant("ours, rows only", lambda layer: OursRows(layer, ops)),
        Variant("copy", Copy),
    ]
    if args.einsum:
        too_large = [c for c in cases if c.S * c.E * c.C * 4 > MAX_EINSUM_BYTES]
        if too_large:
            raise SystemExit(f"--einsum: a mask would have more than {MAX_EINSUM_BYTES} bytes for {too_large[0]}")
        variants.append(Variant("stock einsum", StockEinsum))
    for layer in cases:
        check_same(layer, Ours(layer, ops), Stock(layer))
    file = args.results / "ops_bytes.csv"
    check_columns(file, (*made_with(PACKAGES), *BYTES_COLUMNS))
    goals = [Goal("ours", at_least=2.0)] if args.blocks >= 10 else []
    effort = Effort(args.blocks, args.steps, args.warmup, budget_s=args.budget_s)
    host = CpuClock() if args.device == "cpu" else HOST
    results = run_grid(grid, variants, "stock", effort, goals, args.results, host)
    append_bytes(file, results, grid)
    return 0


if __name__ == "__main__":
    sys.exit(main())
