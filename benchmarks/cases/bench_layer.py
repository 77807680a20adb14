# SPDX-License-Identifier: Apache-2.0
"""Attention and MoE layers on two levels of network: stock DeepSpeed beside every schedule, in one run (Table 5).

``cluster.py up --inter 25mbit --intra 100mbit``, then ``cluster.py run -- benchmarks/cases/bench_layer.py``. The two
layouts are explained in ``models/layers.py``. Nobody is a straw man: all run at the ZeRO stage and bucket size that
stock is fastest with, and ``pipemoe_lina`` with its fastest slice size: ``--sweep`` tries them first, in each case,
and keeps what it saw in ``layer_sweep.csv``; without it they are those of an earlier one. ``tutel`` and its kin
get the best single degree, found in each case by trying all; ``fsmoe`` and ``best`` get what the autotuner chooses.
Stock runs in the node layout only with two fixes, so every case says that it is fixed: a flat view in its gather, for
gloo, and a capacity that it can cut where nothing is dropped. ``overlap_comm`` has no stream on a CPU and changes
nothing there.

``--table2`` has 12 other layers, for ``cluster.py up --inter 25mbit --intra 50mbit``: there traffic inside a node and
gradients weigh, beside the all-to-alls, what they do in the paper's Table 2.

AutoEP, of the same package, has a row where it can run (``models/auto_ep.py``).

Give each case a job of its own (``--only``): groups of ranks that earlier cases leave behind are threads, and threads
take processor time. Rows go to ``benchmarks/results/layer.csv`` (``layer_table2.csv`` with ``--table2``,
``layer_shared.csv`` on links that contend, ``layer_skew.csv`` with ``--skew``); predictions, and what no schedule could
beat, beside measurements to ``layer_predicted.csv`` and so on. ``--judged`` measures eight of the 24 layers in ten
blocks or more, and each schedule beside every baseline that is named in the docs, each of these twice; without it there
are few blocks, no interval and nothing to judge by. ``--best-layout`` measures stock and every schedule with experts
over all ranks and nothing split, which stock is fastest in (``layer_best.csv``). ``--ablation`` measures the parts of
``fsmoe`` and ``best`` one by one (``ablation.csv``). ``--many`` puts ours beside AutoEP alone, with rows and with
slots, in layers with up to 128 narrow experts (``layer_many.csv``).
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

import torch.distributed as dist

# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.harness import RESULTS, Case, CaseResult, Effort, Grid, Variant, run_grid
from benchmarks.harness.intervals import MIN_BLOCKS_TO_JUDGE
from benchmarks.harness.outcome import PACKAGES
from benchmarks.harness.result_files import BED_VARIABLE, append_rows, made_with
from benchmarks.harness.routing import parsed
from benchmarks.models.auto_ep import AutoEPSteps, can_run
from benchmarks.models.contenders import FEW_BLOCKS, TUNED, Contenders, further
from benchmarks.models.layer_steps import Steps
from benchmarks.models.layers import SKEWS, TINY, Layer, Layout, Skew, begin
from ds_fsmoe.planning.block import BlockPlan


def links() -> str:
    """For the names of cases: whether the links of the bed are in each other's way."""
    return ", shared links" if os.environ.get(BED_VARIABLE, "").endswith("shared") else ""


def cases(table2: bool = False) -> tuple[Case, ...]:
    """24 of Table 4's kinds, each length, width and ratio with every capacity factor.

    Experts are much wider than in Table 4: processors multiply faster, for what such links send, than GPUs do. So
    communication has about the share of stock's step that it has in Table 2 (``bench_operations.py``).

    Args:
        table2: 12 others, with wider tokens and narrower experts, for a bed of 25 and 50 Mbit/s. So traffic inside a
            node and gradients weigh, beside the all-to-alls, what they do in Table 2 (testbed A), and the processors,
            which links here take time of, are not what a step waits for.
    """
    found = []
    sizes = ((64,), (96, 128), (24, 48)) if table2 else ((64, 128), (64, 96), (64, 128))
    for i, ((L, M, ratio), f) in enumerate(itertools.product(itertools.product(*sizes), (1.25, 2.5, None))):
        B = 2 if (L, M) == (128, 96) else 4
        layer = Layer(B=B, L=L, M=M, ratio=ratio, f=f, ffn=("gpt", "mixtral")[i // 2 % 2])
        found.append(Case(f"{layer}, stock fixed{links()}", layer))
    return tuple(found)


JUDGED = (2, 4, 6, 9, 13, 15, 20, 23)
"""The layers that are judged: each length, width and ratio once, both kinds of experts and all capacity factors."""


def many_experts() -> tuple[Case, ...]:
    """Layers as AutoEP can run them, in the layout of all ranks: one of the grid, and today's with many narrow experts
    of which each token takes eight; each balanced and with a hot expert."""
    found = []
    for layer in (
        Layer(B=4, L=64, M=64, ratio=64, f=None, ffn="mixtral"),
        Layer(B=4, L=64, M=64, ratio=1, f=None, ffn="mixtral", E=16, k=8),
        Layer(B=4, L=64, M=64, ratio=1, f=None, ffn="mixtral", E=32, k=8),
        Layer(B=4, L=64, M=128, ratio=1, f=None, ffn="mixtral", E=128, k=8),
    ):
        skews: tuple[Skew, ...] = ("", "hot expert")
        found += [Case(f"{each}, all ranks{links()}", each) for each in (replace(layer, skew=skew) for skew in skews)]
    return tuple(found)


def skewed(case: Case, skew: Skew) -> Case:
    """The same with another routing. Where slots are counted beforehand nothing takes longer but what is dropped; with
    nothing dropped, every expert gets as many slots as the fullest needs."""
    layer = replace(case.settings, skew=skew)
    return Case(f"{layer}, stock fixed{links()}", layer)


class Parts(Contenders):
    """``fsmoe`` and ``best``, taken apart."""

    def best_without(self, change: Callable[[BlockPlan], BlockPlan], layer: Layer) -> Steps:
        """``best`` with what it has chosen taken back in part."""
        steps = self.ours("node", "best", layer)
        steps.change_blocks(change)
        return steps

    def links_only(self, layer: Layer) -> Steps:
        """Traffic of both kinds at once, and nothing else of ``fsmoe``: one degree, gradients after the backward."""
        degree = self.common_degree("node", layer)
        steps = self.ours("node", "fsmoe", layer, gradients="off")
        steps.set_degree(degree)
        return steps

    def beside_auto_ep(self) -> list[Variant]:
        """AutoEP first, the baseline; ours in its layout, with rows, as it is, and with slots."""
        return [
            Variant("AutoEP", partial(AutoEPSteps, found=self.found["ranks"])),
            Variant("best", partial(self.ours, "ranks", "best")),
            Variant("best, slots", partial(self.ours, "ranks", "best", dispatch="padded")),
        ]

    def ablation(self) -> list[Variant]:
        """Each part of ``fsmoe`` alone, and ``best`` without each of its own."""
        return [
            Variant("deepspeed", partial(self.ours, "node", "deepspeed")),
            Variant("pipeline only", partial(self.ours, "node", "fsmoe_no_iio", gradients="off")),
            Variant("two links only", self.links_only),
            Variant("gradients only", partial(self.ours, "node", "deepspeed", gradients="adaptive")),
            Variant("fsmoe", partial(self.ours, "node", "fsmoe")),
            Variant("best", partial(self.ours, "node", "best")),
            Variant("best, gathers first", partial(self.best_without, lambda block: replace(block, links="paper"))),
        ]


def write_predictions(result: CaseResult, contenders: Contenders, file: Path, layout: Layout = "node") -> None:
    """Rows of predicted beside measured, on rank 0."""
    made, rows = made_with(PACKAGES), []
    measured_ms = {each.name: each.p50_ms for each in result.variants}
    for schedule in (each for each in TUNED if each in measured_ms):
        step = contenders.predicted[layout, result.case.settings, schedule]
        of_step = {"measured_ms": measured_ms[schedule], "uncut_measured_ms": measured_ms["deepspeed"]}
        of_step |= {"predicted_ms": step.chosen_ms, "uncut_predicted_ms": step.deepspeed_ms}
        of_step |= {"bound_ms": step.bound_ms}
        facts = {"ranks": dist.get_world_size(), "case": result.case.name, "variant": schedule}
        rows.append(made | facts | {name: f"{value:.5g}" for name, value in of_step.items()})
    append_rows(file, tuple(rows[0]), rows)


def write_sweep(case: Case, contenders: Contenders, layouts: Sequence[Layout], folder: Path) -> None:
    """Find what stock is fastest with in a case; on rank 0 print it and append what was tried."""
    tried = contenders.sweep(case.settings, layouts)
    if dist.get_rank():
        return
    made = made_with(PACKAGES) | {"ranks": dist.get_world_size(), "case": str(case.settings)}
    append_rows(folder / "layer_sweep.csv", (*made, *tried[0]), [made | row for row in tried])
    for row in tried:
        if row["fastest"]:
            print("fastest:", ", ".join(f"{name} {value}" for name, value in row.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, help=f"({FEW_BLOCKS}; {MIN_BLOCKS_TO_JUDGE} with --judged)")
    parser.add_argument("--judged", action="store_true", help=f"the layers {JUDGED}, unless --only says which")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the cases to measure (all)")
    parser.add_argument("--sweep", action="store_true", help="find what stock and pipemoe_lina are fastest with, first")
    parser.add_argument("--smoke", action="store_true", help="a tiny layer, as fast as can be, to see that all runs")
    parser.add_argument("--table2", action="store_true", help="layers with Table 2's proportions, for 25 and 50 Mbit/s")
    parser.add_argument("--skew", action="store_true", help="the same with routing to hot experts, balanced first")
    parser.add_argument("--ablation", action="store_true", help="the parts of fsmoe and best, one by one")
    parser.add_argument("--best-layout", action="store_true", help="all in the layout that stock is fastest in, only")
    parser.add_argument("--many", action="store_true", help="layers with many narrow experts too, beside AutoEP alone")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    args = parsed(parser)
    begin()
    every = many_experts() if args.many else cases(args.table2)
    only = JUDGED if args.judged and args.only is None and not args.many else args.only
    chosen = every if only is None else tuple(every[i] for i in only)
    if args.skew:
        chosen = tuple(skewed(case, skew) for case in chosen for skew in SKEWS)
    if args.smoke:
        chosen = (Case(f"{TINY}, stock fixed", TINY),)
    # Files of their own: a mean over balanced and skewed cases, or over two kinds of links, would mean nothing.
    name = "layer" + "_table2" * args.table2 + "_shared" * bool(links()) + "_skew" * args.skew
    blocks = args.blocks or (MIN_BLOCKS_TO_JUDGE if args.judged else FEW_BLOCKS)
    effort = Effort(2 if args.smoke else blocks, steps=1, warmup=1, judged=args.judged)
    with tempfile.TemporaryDirectory() as cache:
        contenders = Parts(cache, args.smoke)
        for case in chosen:
            if args.sweep:
                write_sweep(case, contenders, ("ranks",) if args.best_layout else get_args(Layout), args.results)
            if args.many:
                grid = Grid("layer_many", (case,))
                run_grid(grid, contenders.beside_auto_ep(), "AutoEP", effort, results=args.results)
                continue
            if args.ablation:
                run_grid(Grid("ablation", (case,)), contenders.ablation(), "deepspeed", effort, results=args.results)
                continue
            if args.best_layout:
                of_best = replace(case, name=f"{case.settings}, all ranks{links()}")
                variants, over = contenders.in_best_layout(), further(contenders.in_best_layout(), args.judged)
                grid = Grid("layer_best", (of_best,))
                (result,) = run_grid(grid, variants, "stock", effort, results=args.results, further=over)
                if dist.get_rank() == 0:
                    write_predictions(result, contenders, args.results / "layer_best_predicted.csv", "ranks")
                continue
            variants = contenders.variants()
            if can_run(case.settings) is None:
                variants.append(Variant("AutoEP, best layout", partial(AutoEPSteps, found=contenders.found["ranks"])))
            over = further(variants, args.judged)
            (result,) = run_grid(Grid(name, (case,)), variants, "stock", effort, results=args.results, further=over)
            if dist.get_rank() == 0:
                write_predictions(result, contenders, args.results / f"{name}_predicted.csv")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
