# SPDX-License-Identifier: Apache-2.0
"""What one word in the config gains: whole models as users write them, ``"enabled"`` false and true.

``cluster.py up --inter 100mbit --intra 400mbit``, then ``cluster.py run -- benchmarks/cases/bench_one_word.py --sweep
--only gpt``, a job for each case. The GPT has DeepSpeed's own MoE layers, the others are Hugging Face's. ``stock`` is
DeepSpeed with the stage of ZeRO, buckets and ``overlap_comm`` that it is fastest with, and ``"enabled": false``: for a
Hugging Face model every rank has all experts then. ``stock, no more memory`` is the fastest of those whose tensors take
no more than ours. ``ours`` is ``stock``'s config with ``true`` and nothing else, measured once the autotuner, which
nobody has asked for, has settled; then come schedules by name, of which ``tutel`` and ``pipemoe_lina`` have the number
of chunks that they are fastest with. ``--sweep`` looks for all that first, and keeps what it saw in
``whole_sweep.csv``; without it an earlier one is read. Steps are whole: forward, backward, optimizer, the gather of
parameters. A turn is two steps of one engine: ours gathers parameters under the next forward, so the first step's are
hidden, and the second's are waited for before the clock stops, where in training all are hidden. ``ours, chosen`` has
``sequence_length`` besides; ``ours`` is a first start, which knows nothing of an earlier one. AutoEP has rows where
the installed transformers is one that it knows (5.22.2 or older), over the ranks of a node and over all; OLMoE, of
which it has no preset, is described to it by hand.

Rows go to ``benchmarks/results/whole.csv``, what stock's step spends its time on to ``whole_operations.csv``,
what each variant's tensors take, in one step that is not timed, to ``whole_memory.csv``, and what tuning took, with
after how many steps it has paid, to ``whole_tuning.csv``; how much lanes slow each other
down to ``whole_slowdowns.csv``, and the size that was chosen to ``whole_chosen.csv``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch.distributed as dist
from packaging.version import Version

# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.harness import RESULTS, Case, Effort, Goal, Grid, Variant, run_grid
from benchmarks.harness.intervals import MIN_BLOCKS_TO_JUDGE
from benchmarks.harness.join import join
from benchmarks.harness.outcome import PACKAGES
from benchmarks.harness.result_files import append_rows, made_with
from benchmarks.harness.routing import parsed
from benchmarks.models.layers import ranks_per_node
from benchmarks.models.step_costs import StepMemory, storages_now, write_memory, write_slowdowns, write_tuning
from benchmarks.models.sweeps import CUT, OFF, OURS, STOCK, Swept, counted, found, sweep, with_chunks
from benchmarks.models.whole_models import CASES, IN_A_ROW, Setting, Training, Whole, tiny
from ds_fsmoe.engine.auto_ep_size import choice_of

NEWEST_FOR_AUTOEP = Version("5.22.2")
NO_MORE_MEMORY = "stock, no more memory"
CHOSEN = "ours, chosen"
AUTOEP: dict[str, dict[str, Any]] = {
    "qwen3": {"preset_model": "qwen3_moe"},
    "mixtral": {"preset_model": "mixtral"},
    "olmoe": {
        "moe_layer_pattern": r"model\.layers\.\d+\.mlp",
        "router_pattern": "gate",
        "expert_pattern": "experts",
        "expert_w1": "gate_up_proj",
        "expert_w2": "down_proj",
        "expert_w3": None,
        "expert_activation": "swiglu",
        "num_experts_attr": "num_experts",
        "top_k_attr": "num_experts_per_tok",
        "score_func": "softmax",
        "route_norm": False,
    },
}
"""How AutoEP is told of a family: by a preset, or by its modules."""


@dataclass(frozen=True)
class Way:
    """How a variant trains.

    Attributes:
        setting: of DeepSpeed.
        more: what the config has besides.
    """

    setting: Setting
    more: dict[str, Any]


def ways(model: Whole, swept: Swept) -> dict[str, Way]:
    """Return all variants of a model, the baseline first.

    Args:
        model: the sizes.
        swept: what each is fastest with.
    """
    blocks: dict[str, dict[str, Any]] = {OURS: {"enabled": True}}
    if model.family == "gpt":
        # Slots are what stock sends where tokens are dropped.
        blocks["ours, rows"] = {"enabled": True, "dispatch": "unpadded"}
    else:
        # One word takes the size of a node where no length is known.
        blocks["ours, over all ranks"] = {"enabled": True, "ep_size": dist.get_world_size()}
        smaller = [size for size in range(1, dist.get_world_size()) if dist.get_world_size() % size == 0]
        blocks |= {f"ours, ep_size {size}": {"enabled": True, "ep_size": size} for size in smaller}
        blocks[CHOSEN] = {"enabled": True, "sequence_length": model.L}
    blocks["deepspeed"] = {"enabled": True, "schedule": "deepspeed"}
    blocks |= {preset: with_chunks(preset, swept.num_chunks[preset])["fsmoe"] for preset in CUT}
    blocks["fsmoe"] = {"enabled": True, "schedule": "fsmoe", "autotune": True}
    of_stock = {STOCK: Way(swept.stock, OFF)}
    if swept.no_more_memory is not None:
        of_stock[NO_MORE_MEMORY] = Way(swept.no_more_memory, OFF)
    every = of_stock | {name: Way(swept.stock, {"fsmoe": block}) for name, block in blocks.items()}
    if model.family in AUTOEP and Version(version("transformers")) <= NEWEST_FOR_AUTOEP:
        for size in sorted({ranks_per_node(), dist.get_world_size()}):
            asked = {"enabled": True, "autoep_size": size, "use_grouped_mm": False} | AUTOEP[model.family]
            every[f"AutoEP over {size}"] = Way(swept.stock, {"expert_parallel": asked})
    return every


def write_operations(case: Case, setting: Setting, file: Path) -> None:
    """Append what stock's step spends its time on, and print it. Collective."""
    stock = Training(case.settings, setting, OFF, STOCK)
    of_step = stock.operations_ms()
    stock.close()
    if dist.get_rank():
        return
    step_ms = sum(of_step.values())
    made_now = made_with(PACKAGES) | {"ranks": dist.get_world_size(), "case": case.name}
    rows = [
        made_now | {"operation": name, "ms": f"{ms:.1f}", "share": f"{ms / step_ms:.3f}"}
        for name, ms in of_step.items()
        if ms > 0
    ]
    append_rows(file, tuple(rows[0]), rows)
    print(f"stock's step of {case.name}: " + ", ".join(f"{row['operation']} {float(row['share']):.0%}" for row in rows))


def write_chosen(case: Case, engine: Any, file: Path) -> None:
    """Append the size that was chosen for an engine, with what the table at its start says of it."""
    layers = list(engine.fsmoe.layers.values())
    facts = {"ep_size": str(layers[0].ep_size), "said": choice_of(layers).reason}
    row = made_with(PACKAGES) | {"ranks": dist.get_world_size(), "case": case.name} | facts
    append_rows(file, tuple(row), [row])


def main() -> None:
    """Measure the models that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--steps", type=int, default=1, help="turns of each variant in a block")
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument(
        "--length", type=int, help="of samples, in place of each model's own; settings stay those of it"
    )
    parser.add_argument(
        "--links", help="words for the links, in the case's name, where they are not 100 and 400 Mbit/s"
    )
    parser.add_argument("--variants", nargs="*", help="besides stock (all, and stock with no more memory)")
    parser.add_argument("--sweep", action="store_true", help="look for the fastest settings first")
    parser.add_argument("--tiny", action="store_true", help="to see that all runs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    args = parsed(parser)
    join()
    for key in args.only:
        case = CASES[key]
        if args.tiny:
            case = tiny(case)
        if args.sweep:
            sweep(case, args.results)
        swept = found(case, args.results)
        if args.length:
            where = ", one node" if ranks_per_node() == dist.get_world_size() else ""
            case = Case(f"{case.name}, L {args.length}{where}", replace(case.settings, L=args.length))
        if args.links:
            case = replace(case, name=f"{case.name}, {args.links}")
        named: dict[str, Training] = {}
        memories: dict[str, StepMemory] = {}
        wanted = {
            name: way
            for name, way in ways(case.settings, swept).items()
            if name == STOCK or args.variants is None or name in args.variants
        }
        variants = [Variant(name, _made(way, name, named, memories)) for name, way in wanted.items()]
        is_judged = args.blocks >= MIN_BLOCKS_TO_JUDGE
        goals = [Goal(OURS, at_least=0.98)] if is_judged and OURS in wanted else []
        effort = Effort(args.blocks, args.steps, warmup=1, in_a_row=IN_A_ROW)
        over = {NO_MORE_MEMORY: [OURS]} if {NO_MORE_MEMORY, OURS} <= set(wanted) else {}
        write_operations(case, swept.stock, args.results / "whole_operations.csv")
        (result,) = run_grid(Grid("whole", (case,)), variants, STOCK, effort, goals, args.results, further=over)
        write_memory(case, memories, args.results / "whole_memory.csv")
        if dist.get_rank() == 0:
            engines = {name: training.engine for name, training in named.items()}
            write_tuning(case, engines, result, args.results / "whole_tuning.csv")
            write_slowdowns(case, engines, args.results / "whole_slowdowns.csv")
            if CHOSEN in engines:
                write_chosen(case, engines[CHOSEN], args.results / "whole_chosen.csv")
    dist.destroy_process_group()


def _made(
    way: Way, name: str, named: dict[str, Training], memories: dict[str, StepMemory]
) -> Callable[[Whole], Training]:
    """Return what makes a variant, and runs one step of it, before any is timed, whose memory is counted."""

    def make(model: Whole) -> Training:
        before = storages_now()
        training = Training(model, way.setting, way.more, name)
        named[name] = training
        # Baselines are made twice.
        if name not in memories:
            memories[name] = counted(training, before)
        return training

    return make


if __name__ == "__main__":
    main()
