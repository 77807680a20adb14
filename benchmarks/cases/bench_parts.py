# SPDX-License-Identifier: Apache-2.0
"""What each part of ours is worth in a whole model: left out of all that is on by default, and alone.

``cluster.py up --inter 100mbit --intra 400mbit``, then ``cluster.py run -- benchmarks/cases/bench_parts.py --only
olmoe``. The models are those of ``bench_one_word.py``. The first table has ``ours`` as its baseline: what is left when
a part is taken away, which is below 1 if the part gains. The second has ``nothing``, our layers with DeepSpeed's
schedule and all parts off: what a part gains alone. Parts that a model cannot use have no row there: the GPT drops by
capacity, so that it has slots, which cross no node once and are not split into halves. The experts of Hugging Face's
models always have rows; ``bench_rows.py`` compares rows with slots.

Rows go to ``benchmarks/results/parts.csv``; the column ``over`` names the baseline.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.harness import RESULTS, Effort, Grid, Variant, run_grid
from benchmarks.harness.join import join
from benchmarks.harness.routing import parsed
from benchmarks.models.whole_models import CASES, IN_A_ROW, Setting, Training, Whole, tiny
from ds_fsmoe.planning.block import BlockPlan

OURS, NOTHING = "ours", "nothing"


@dataclass(frozen=True)
class Part:
    """A part, and how it is taken away from what is on by default.

    Attributes:
        name: as in the table.
        without: what the block says instead of its default.
        change: what is done to each phase of the plan that the autotuner has kept.
        needs_rows: whether only layers that drop nothing have it.
        only_without: whether it is no part alone: it is a way in which another one is done.
    """

    name: str
    without: dict[str, Any]
    change: Callable[[BlockPlan, BlockPlan], BlockPlan] | None = None
    needs_rows: bool = False
    only_without: bool = False


PARTS = (
    Part("chunks", {"num_chunks": {"max": 1}}),
    Part("a number per phase", {}, lambda phase, forward: replace(phase, degree=forward.degree), only_without=True),
    Part("both links at once", {}, lambda phase, _: replace(phase, links="shared"), only_without=True),
    Part("gradients in windows", {"gradient_partition": {"mode": "off"}}),
    Part("gradients in two levels", {"gradient_partition": {"levels": 1}}, only_without=True),
    Part("parameters under the forward", {"gradient_partition": {"gather_parameters": "at_end"}}, only_without=True),
    Part("once per node", {"alltoall": "flat"}, needs_rows=True),
    Part("halves", {"two_batch_overlap": "off"}, needs_rows=True),
)
"""Experts that move are measured in ``bench_placement.py``: they gain by skew, of which there is none here."""

_OFF = {"schedule": "deepspeed", "autotune": False, "gradient_partition": {"mode": "off"}, "two_batch_overlap": "off"}
ALONE: dict[str, dict[str, Any]] = {
    "chunks": {"schedule": "best", "autotune": True},
    "gradients in windows": {"gradient_partition": {"mode": "adaptive"}},
    "once per node": {"alltoall": "node_deduplicated"},
    "halves": {"schedule": "best", "autotune": True, "num_chunks": {"max": 1}, "two_batch_overlap": "on"},
}


class Changed(Training):
    """Ours with a part of its plan taken back."""

    def __init__(self, model: Whole, part: Part, **options: Any) -> None:
        super().__init__(model, **options)
        if part.change is None:
            return
        for layer in self.engine.fsmoe.inner_layers.values():
            plan = layer.fsmoe.plan
            phases = (part.change(each, plan.forward) for each in (plan.forward, plan.backward))
            layer.fsmoe.apply(replace(plan, **dict(zip(("forward", "backward"), phases, strict=True))))


STAGES = {"gpt": 1, "olmoe": 2}
"""Of ZeRO, by family."""


def variants_of(model: Whole, cache: str) -> tuple[list[Variant], dict[str, list[str]]]:
    """Return all variants of a model, and the second baseline with what is compared with it.

    Args:
        model: the model.
        cache: a folder for measurements, which all of them share.
    """
    has_rows = model.family != "gpt"
    parts = [part for part in PARTS if has_rows or not part.needs_rows]
    everywhere = {"ep_size": dist.get_world_size()} if has_rows else {}
    tuned = {"enabled": True, "autotune": {"enabled": True, "cache_dir": cache}}

    def made(name: str, block: dict[str, Any], part: Part | None = None) -> Variant:
        setting = Setting(STAGES.get(model.family, 1))
        options = {"setting": setting, "more": {"fsmoe": everywhere | block}, "name": name}
        return Variant(name, partial(Changed, part=part or Part(name, {}), **options))

    found = [made(OURS, tuned)]
    found += [made(f"without {part.name}", tuned | part.without, part) for part in parts]
    off = {"enabled": True} | _OFF | ({"alltoall": "flat"} if has_rows else {})
    alone = []
    for part in (part for part in parts if not part.only_without):
        block = off | ALONE[part.name]
        if block["autotune"]:
            block |= {"autotune": {"enabled": True, "cache_dir": cache}}
        alone.append(made(f"{part.name} alone", block))
    found += [made(NOTHING, off), *alone]
    return found, {NOTHING: [each.name for each in alone]}


def main() -> None:
    """Measure the models that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--only", nargs="*", default=["gpt", "olmoe"], choices=list(CASES))
    parser.add_argument("--tiny", action="store_true", help="to see that all runs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    args = parsed(parser)
    join()
    with tempfile.TemporaryDirectory() as cache:
        for key in args.only:
            case = CASES[key]
            if args.tiny:
                case = tiny(case)
            variants, over = variants_of(case.settings, cache)
            effort = Effort(args.blocks, steps=1, warmup=1, in_a_row=IN_A_ROW)
            run_grid(Grid("parts", (case,)), variants, OURS, effort, results=args.results, further=over)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
