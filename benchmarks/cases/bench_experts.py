# SPDX-License-Identifier: Apache-2.0
"""Several experts of a rank, one after another and together, with weights that lie side by side as at ZeRO 1 and 2.

``OMP_NUM_THREADS=1 python benchmarks/cases/bench_experts.py``. Forward and backward of one chunk, weight gradients
included. "by rule" is what training does (``pays`` and ``most_together`` in
``ds_fsmoe/components/expert_compute/grouped_call.py``): one after another again where it does not pay, and on a CPU in
groups of few megabytes. Rows go to ``benchmarks/results/experts.csv``, what they take of memory at the most to
``experts_memory.csv`` beside it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.harness import RESULTS, Case, Effort, Grid, Variant, run_grid
from benchmarks.harness.outcome import PACKAGES
from benchmarks.harness.result_files import append_rows, made_with
from benchmarks.harness.routing import parsed
from ds_fsmoe import GPTFeedForward, MixtralFeedForward
from ds_fsmoe.components.expert_compute.calls import ExpertSet
from ds_fsmoe.components.expert_compute.grouped_call import GroupedExperts
from ds_fsmoe.components.expert_compute.stacked import lay_side_by_side
from tests.live_memory import LiveMemory


@dataclass(frozen=True)
class Experts:
    """e experts of hidden width 4 M, of R rows each, which came from N ranks."""

    e: int
    R: int
    M: int = 256
    dtype: str = "fp32"
    kind: str = "gpt"
    N: int = 2

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.dtype}, M = {self.M}, e = {self.e}, R = {self.R}, N = {self.N}"


SIZES = (
    *(Experts(e, R) for e, R in itertools.product((2, 4, 8, 16), (8, 64, 256))),
    Experts(4, 1024),
    *(Experts(e, R, M=64) for e, R in itertools.product((4, 16), (8, 64))),
    *(Experts(4, R, M=1024) for R in (8, 64)),
    Experts(8, 64, N=1),
    Experts(8, 64, kind="mixtral"),
    # Without instructions for bf16 a processor takes ten times as long for it.
    *(Experts(e, R, dtype="bf16") for e, R in ((2, 8), (8, 8), (16, 8), (4, 64))),
)
GRID = Grid("experts", tuple(Case(each.name, each) for each in SIZES))


class Step:
    """Forward and backward of all experts."""

    def __init__(self, sizes: Experts, together: GroupedExperts) -> None:
        torch.manual_seed(0)
        expert_class = {"gpt": GPTFeedForward, "mixtral": MixtralFeedForward}[sizes.kind]
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[sizes.dtype]
        experts = [expert_class(sizes.M, 4 * sizes.M).to(dtype) for _ in range(sizes.e)]
        if not lay_side_by_side(experts):
            raise RuntimeError("the experts could not be laid side by side")
        self.experts = ExpertSet(experts, together=together)
        self.slots = sizes.R // sizes.N
        shape = (sizes.N, sizes.e, self.slots, sizes.M)
        self.x_NeCM, self.dy_NeCM = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)

    def __call__(self) -> list[torch.Tensor]:
        call = self.experts.call(needs_backward=True)
        y_NeCM = call.forward(0, self.slots, self.x_NeCM)
        dx_NeCM = call.backward(0, self.slots, self.dy_NeCM)
        return [y_NeCM, dx_NeCM, *call.gradients()]


VARIANTS = (
    Variant("one after another", lambda sizes: Step(sizes, "never")),
    Variant("all together", lambda sizes: Step(sizes, "always")),
    Variant("by rule", lambda sizes: Step(sizes, "auto")),
)


def measure_memory(file: Path) -> None:
    """The peak of a step's tensors, and whether its numbers are the same bit for bit."""
    columns = ("date", "commit", "hardware", "python", *PACKAGES, "ds_fsmoe", "grid", "case", "settings")
    columns = (*columns, "unit", "one_after_another", "all_together", "by_rule", "weights", "same_bits")
    made, rows = made_with(PACKAGES), []
    for case in GRID.cases:
        peaks, results = {}, []
        for variant in VARIANTS:
            step = variant.make(case.settings)
            results.append(step())
            with LiveMemory() as memory:
                step()
            peaks[variant.name] = memory.peak / 1e6
        weights = sum(each.nbytes for each in step.experts.parameters) / 1e6
        same = all(torch.equal(each[0], other) for each in zip(*results, strict=True) for other in each[1:])
        numbers = {name.replace(" ", "_"): peak for name, peak in peaks.items()} | {"weights": weights}
        rows.append(
            made
            | {"grid": GRID.digest, "case": case.name, "settings": json.dumps(case.plain(), sort_keys=True)}
            | {"unit": "MB", "same_bits": same}
            | {key: f"{value:.6g}" for key, value in numbers.items()}
        )
        alone, *others = peaks.values()
        times = ", ".join(
            f"{name} {peak / alone:.3f} times" for name, peak in zip(list(peaks)[1:], others, strict=True)
        )
        print(f"{case.name:<46} peak {alone:8.4g} MB, {times}, same bits: {same}", flush=True)
    append_rows(file, columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, default=6.0, help="seconds for each case")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parsed(parser, no_routers="experts are called with chunks of equal sizes by themselves, without a router")
    torch.set_num_threads(1)
    measure_memory(args.results / "experts_memory.csv")
    effort = Effort(blocks=20, steps=2, warmup=2, budget_s=args.budget)
    run_grid(GRID, VARIANTS, baseline="one after another", effort=effort, results=args.results)


if __name__ == "__main__":
    main()
