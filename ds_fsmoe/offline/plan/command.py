# SPDX-License-Identifier: Apache-2.0
"""Predict the step time and the memory of a model on a cluster, without a GPU, and print the config that runs it.

ds_fsmoe plan --cluster h100_400 --model qwen3-30b-a3b
ds_fsmoe plan --cluster a100_200 --nodes 4 --hf-config my-model/config.json --zero 3 --samples 2
ds_fsmoe plan --cluster cluster.json --layers 24 --length 2048 --width 2048 --hidden 8192
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_fsmoe.files.whole_files import check_folders
from ds_fsmoe.offline.plan.baselines import (
    Baselines,
    baselines_of,
    first_line,
    other_stages,
    print_larger_ep,
    print_summary,
)
from ds_fsmoe.offline.plan.exchange import add_alltoall, exchange_of, print_exchanges
from ds_fsmoe.offline.plan.from_trace import add_from_trace, run_from_trace
from ds_fsmoe.offline.plan.halves import add_halves, halves_to_draw, print_halves
from ds_fsmoe.offline.plan.memory import add_memory, fit_of, print_memory
from ds_fsmoe.offline.plan.model import (
    PlannedModel,
    add_groups,
    add_model,
    model_of,
    other_layouts,
    planned_groups,
    print_taken,
    take_expert_groups,
)
from ds_fsmoe.offline.plan.placement import add_loads, print_placement, read_loads
from ds_fsmoe.offline.plan.stages import add_micro_batches, batch_of, batch_settings, is_batch, print_batch
from ds_fsmoe.terminal.tables import print_table

if TYPE_CHECKING:
    from ds_fsmoe.offline.models.architecture import Architecture
    from ds_fsmoe.offline.models.zero import Zero
    from ds_fsmoe.offline.plan.report import Report
    from ds_fsmoe.planning.cluster import Cluster
    from ds_fsmoe.planning.decide.plan import Settings
    from ds_fsmoe.planning.groups import Groups

HELP = "predict step time and memory of a model on a cluster"
DRAWN_LAYERS = 3
"""The number of layers of a stage that are drawn; with more, tasks are too small to be seen."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: what is planned, on what, how, and where the result goes."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = "%(prog)s --cluster CLUSTER (--model NAME | --hf-config PATH | the model in numbers) [options]"
    where = parser.add_argument_group("the cluster")
    where.add_argument("--cluster", help="testbed_a, testbed_b, ..., or a JSON file like those")
    where.add_argument("--nodes", type=int, help="so many nodes (as many as were measured)")
    add_from_trace(where)
    add_model(parser)
    add_groups(parser)
    how = parser.add_argument_group("how")
    how.add_argument("--preset", default="best", help="whose plan is shown (best)")
    add_micro_batches(how)
    add_alltoall(how)
    add_loads(how)
    how.add_argument("--recompute", action="store_true", help="layers run their forward again in the backward")
    how.add_argument("--solver", default="exact", help="numbers of chunks: exact or slsqp, the paper's")
    how.add_argument("--gradient-solver", default="dp", help="gradients: dp or de, the paper's")
    how.add_argument(
        "--max-chunks",
        "--max-degree",
        dest="max_degree",
        type=int,
        default=16,
        metavar="N",
        help="the largest number of chunks that is tried (16)",
    )
    how.add_argument("--chunk-bytes", type=int, help="slices of fixed_chunk (31457280), micro-ops of lina (30000000)")
    how.add_argument(
        "--contention", default="measured", help="measured (the cluster's), ideal, or kappa of the two links"
    )
    how.add_argument("--host-us", type=float, help="cost of launching one task, in microseconds (the cluster's)")
    add_memory(parser)
    out = parser.add_argument_group("results")
    out.add_argument("--gantt", action="store_true", help="one layer of the plan as text")
    add_halves(out)
    out.add_argument("--trace", type=Path, metavar="FILE", help="the step, for Perfetto and chrome://tracing")
    out.add_argument(
        "--png", type=Path, metavar="FILE", help="a step of up to three layers by every preset, as a picture"
    )
    out.add_argument("--json", type=Path, metavar="FILE", help="everything, for programs")


def run(args: argparse.Namespace) -> int:
    """Plan, and print the result."""
    from ds_fsmoe.offline.plan.report import report

    if args.from_trace is not None:
        return run_from_trace(args)
    if args.cluster is None:
        raise ValueError("--cluster is missing: a cluster's name or its file, or --from-trace with the folder of a run")
    check_folders(args.trace, args.png, args.json)
    model, job = _job(args)
    take_expert_groups(args, model, job["groups"])
    loads = read_loads(args, job)
    fit = fit_of(args, model, job["groups"])
    args.named_zero, args.zero = args.zero, fit.stage
    job["zero"] = _zero(args, job)
    job |= exchange_of(args, job)
    result = report(**job, preset_name=args.preset)
    bases = baselines_of(args, model, job)
    found = batch_of(result, job) if is_batch(args) else None
    steps_ms = {name: sum(each) for name, each in result.times_ms.items()}
    if found is not None:
        steps_ms = {name: found.batch_ms(name) for name in found.plans}
    step_ms = steps_ms[args.preset]
    print(fit.line)
    print(first_line(args.preset, step_ms, steps_ms, bases))
    for note in (*bases.notes, *other_stages(args, model, job, steps_ms)):
        print(f"  {note}")
    _print_head(result, args, model)
    print_exchanges(job, args)
    alone = result
    result, batch = print_batch(args, alone, found, bases)
    _print_presets(args, result, bases, "lower bound, batches whole" if args.halves else "lower bound")
    halves = print_halves(args, alone, job)
    memory = print_memory(args, model.architecture, job["groups"], job["shape"])
    _print_plan(result)
    placed = print_placement(loads, result, job)
    summary = {"fits": fit.fits, "zero": fit.stage} | print_summary(args, model, job, step_ms, fit.fits)
    print_larger_ep(args, model, job, step_ms)
    if bases.stock is not None:
        zero, stock_ms = bases.stock.zero.stage, bases.stock_ms(steps_ms)
        summary["stock"] = {"ep": 1, "zero": zero, "step_ms": stock_ms, "over_stock": stock_ms / step_ms}
    if args.gantt:
        for phase, timeline in result.block_timelines(args.preset):
            print(f"\none layer, {phase}:\n{timeline.gantt(110)}")
    if args.trace is not None:
        args.trace.write_text(result.trace())
        print(f"\ntrace of the step: {args.trace}")
    if args.png is not None:
        from ds_fsmoe.offline.plan.draw import save_png

        drawn = report(**job, preset_name=args.preset, max_layers=DRAWN_LAYERS)
        save_png(drawn.step_timelines(in_halves=halves_to_draw(args, drawn, job)), args.png)
        print(f"\npicture of a step of {len(drawn.layers)} layer(s) by every preset: {args.png}")
    if args.json is not None:
        args.json.write_text(json.dumps(result.as_dict() | placed | memory | halves | batch | summary, indent=1) + "\n")
        print(f"\neverything: {args.json}")
    return 0


def _job(args: argparse.Namespace) -> tuple[PlannedModel, dict[str, Any]]:
    """Return the model that the arguments name, and the planner's job for it."""
    from ds_fsmoe.planning.cluster import load_cluster

    cluster = load_cluster(args.cluster)
    nodes = cluster.num_nodes if args.nodes is None else args.nodes
    if nodes < 1:
        raise ValueError(f"--nodes = {nodes}: must be at least 1")
    model = model_of(args)
    groups = planned_groups(args, nodes, cluster.gpus_per_node, model)
    layers = model.num_layers
    if layers < 1 or (model.architecture is None and layers % groups.pp):
        raise ValueError(f"--layers = {layers}: must be at least 1 and divisible by --pp = {groups.pp}")
    job = {
        "cluster": cluster,
        "groups": groups,
        "shape": model.shape,
        "num_layers": layers,
        "settings": _settings(args, cluster, model.architecture),
        "recompute": args.recompute,
        "architecture": model.architecture,
    }
    layouts = other_layouts(args, model, groups)
    if len(layouts) > 1:
        from ds_fsmoe.offline.plan.report import report

        def best_ms(layout: Groups) -> float:
            found = report(**(job | {"groups": layout}), preset_name="best", names=("best",), max_layers=DRAWN_LAYERS)
            return sum(found.times_ms["best"])

        job["groups"] = min(layouts, key=best_ms)
    return model, job


def _zero(args: argparse.Namespace, job: dict[str, Any]) -> Zero:
    """Return the stage of ZeRO with what follows from the type in which gradients are added up."""
    from ds_fsmoe.offline.models.zero import Zero

    size = job["shape"].dtype_bytes
    other_type = args.grad_accum_fp32 and size < 4
    return Zero(args.zero, size, has_windows=not (other_type and args.zero == 1))


def _settings(args: argparse.Namespace, cluster: Cluster, architecture: Architecture | None) -> Settings:
    from ds_fsmoe.planning.decide.gradients import SOLVERS
    from ds_fsmoe.planning.decide.plan import Settings
    from ds_fsmoe.planning.timeline import IDEAL, Contention

    if args.gradient_solver not in SOLVERS:
        raise ValueError(f"--gradient-solver = {args.gradient_solver!r}: the choices are {', '.join(SOLVERS)}")
    if args.host_us is not None and not 0 <= args.host_us < float("inf"):
        raise ValueError(f"--host-us = {args.host_us}: must be a finite number of at least 0")
    contention = {"measured": cluster.contention, "ideal": IDEAL}.get(args.contention)
    if contention is None:
        try:
            contention = Contention(float(args.contention))
        except ValueError as error:
            raise ValueError(
                f"--contention = {args.contention!r}: the choices are measured, ideal, or a number of at least 0"
            ) from error
    return Settings(
        contention,
        cluster.host_ms if args.host_us is None else args.host_us / 1e3,
        args.max_degree,
        args.solver,
        args.gradient_solver,
        args.chunk_bytes,
        **batch_settings(args),
    )


def _print_head(result: Report, args: argparse.Namespace, model: PlannedModel) -> None:
    cluster, nodes = result.cluster, result.groups.world // result.groups.gpus_per_node
    is_beyond = nodes > cluster.num_nodes
    beyond = f", extrapolated from {cluster.num_nodes} to {nodes} node(s)" if is_beyond else ""
    print(f"cluster  {cluster.name}{beyond}: {cluster.source}")
    if is_beyond:
        print(
            f"         its numbers are of {cluster.num_nodes} node(s): what collectives among {nodes} take is "
            "extrapolated from them, not measured"
        )
    dtype = args.dtype or model.taken.get("dtype", "fp32")
    if cluster.dtype not in (None, dtype):
        print(f"         its computing is that of {cluster.dtype}, and what is sent is {dtype}")
    for name, text in result.head():
        print(f"{name:8s} {text}")
    print_taken(args, model, result.groups)


def _print_presets(args: argparse.Namespace, result: Report, bases: Baselines, of_bound: str) -> None:
    """Print the times of a step by all systems; of a batch those of its last micro-batch, without stock in another
    layout, whose batch stands above."""
    gathers = f", gathers of parameters (ZeRO {result.zero.stage})" if result.zero.stage else ""
    what = f"forward, backward, sums of gradients{gathers}; without the optimizer"
    if is_batch(args):
        number = 1 if result.stage is None else result.stage.index + 1
        where = "" if result.groups.pp == 1 else f" on stage {number}"
        print(f"\nthe last micro-batch{where} ({what})")
    else:
        print(f"\none step ({what})")
    steps_ms = {name: sum(each) for name, each in result.times_ms.items()}
    times = {bases.label(name): each for name, each in result.times_ms.items()}
    if bases.stock is not None:
        times = {bases.stock_label: bases.stock.times_ms["deepspeed"]} | times
    times[f"({of_bound})"] = result.bounds_ms
    rows = []
    for name, (forward_ms, backward_ms) in times.items():
        step_ms = forward_ms + backward_ms
        ratios = bases.in_one_step().ratios(step_ms, steps_ms)
        rows.append((name, f"{forward_ms:.2f}", f"{backward_ms:.2f}", f"{step_ms:.2f}", *ratios))
    print_table(("system", "forward ms", "backward ms", "step ms", *bases.heads), rows)


def _print_plan(result: Report) -> None:
    print(f"\nthe plan of {result.preset_name}")
    heads = ("layers", "phase", "chunks", "order", "ms", "bound ms", "gradients MB (MoE + rest)")
    groups = result.plan_groups()
    print_table(heads, [_cells(group) for group in groups])
    for group in groups:
        print(f"  {group[0]['phase']}, {_layers(group)}: {group[0]['why']}")
    if result.tail_bytes:
        print(f"  after the backward: {result.tail_bytes / 1e6:.1f} MB of gradients")


def _layers(group: Sequence[dict[str, Any]]) -> str:
    first, last = group[0]["layer"], group[-1]["layer"]
    return f"layer {first}" if first == last else f"layers {first}-{last}"


def _cells(group: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    row = group[0]
    times = (_range([each[key] for each in group], 2) for key in ("ms", "bound_ms"))
    sent = (_range([each[key] / 1e6 for each in group], 1) for key in ("moe_bytes", "dense_bytes"))
    gradients = " + ".join(sent) if row["phase"] == "backward" else ""
    return (_layers(group).split()[1], row["phase"], str(row["degree"]), row["order"], *times, gradients)


def _range(values: Sequence[float], digits: int) -> str:
    low, high = (f"{each:.{digits}f}" for each in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"
