# SPDX-License-Identifier: Apache-2.0
"""Plans the job in the arguments of ``ds_fsmoe plan``, and prints the whole result. The command calls it unless
``--from-trace`` is given.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ds_fsmoe.files.whole_files import check_folders
from ds_fsmoe.offline.plan.alternatives import exchange_of, print_exchanges, print_two_batch
from ds_fsmoe.offline.plan.baselines import (
    Baselines,
    baselines_of,
    first_line,
    other_stages,
    print_larger_ep,
    print_summary,
)
from ds_fsmoe.offline.plan.command import MICRO_BATCHES_PER_STAGE
from ds_fsmoe.offline.plan.draw import save_png
from ds_fsmoe.offline.plan.memory import fit_of, print_memory
from ds_fsmoe.offline.plan.model import model_of, other_layouts, planned_groups, print_taken, take_expert_groups
from ds_fsmoe.offline.plan.placement import check_loads, print_placement, read_loads
from ds_fsmoe.offline.plan.report import PlannedJob, Report, report
from ds_fsmoe.offline.plan.stages import batch_of, is_batch, print_batch
from ds_fsmoe.planning.cluster import Cluster, load_cluster
from ds_fsmoe.planning.decide.gradients import SOLVERS
from ds_fsmoe.planning.decide.plan import Settings
from ds_fsmoe.planning.decide.zero import Zero
from ds_fsmoe.planning.timeline import IDEAL, Contention
from ds_fsmoe.terminal.tables import print_table
from ds_fsmoe.untrusted import suggested

DRAWN_LAYERS = 3
"""The number of layers of a stage that are drawn; with more, tasks are too small to be seen."""


def print_plan(args: argparse.Namespace) -> int:
    """Plan, and print the result; return the exit status.

    Raises:
        ValueError: arguments contradict each other, or the job is impossible.
    """
    if args.cluster is None:
        raise ValueError(
            "--cluster is missing: a name or a file of a cluster, or --from-trace with the folder of a run"
        )
    check_folders(args.trace, args.png, args.json)
    job = _job(args)
    take_expert_groups(args, job)
    loads = None
    if args.loads is not None:
        check_loads(args.loads, job)
        loads = read_loads(args.loads, job.model.shape.E)
    stage, fits, fit_line = fit_of(args, job)
    args.named_zero, args.zero = args.zero, stage
    size_bytes = job.model.shape.dtype_bytes
    other_type = args.grad_accum_fp32 and size_bytes < 4
    job = replace(job, zero=Zero(stage, size_bytes, has_windows=not (other_type and stage == 1)))
    job = exchange_of(args, job)
    alone = report(job, args.preset)
    bases = baselines_of(args, job)
    batch = batch_of(alone) if is_batch(args) else None
    steps_ms = {name: alone.step_ms(name) if batch is None else batch.batch_ms(name) for name in alone.plans}
    step_ms = steps_ms[args.preset]
    print(fit_line)
    print(first_line(args.preset, step_ms, steps_ms, bases))
    for note in (*bases.notes, *other_stages(args, job, steps_ms)):
        print(f"  {note}")
    _print_head(alone, args)
    print_exchanges(job, args)
    if batch is not None:
        print_batch(batch, bases, is_default=args.micro_batches is None)
    result = alone if batch is None else batch.of_stage()
    _print_presets(args, result, bases)
    two_batch = print_two_batch(args, alone) if args.two_batch else {}
    memory = print_memory(args, job)
    _print_plan(result)
    placed = {} if loads is None else print_placement(args.loads, loads, result)
    batched = {} if batch is None else {"batch": batch.as_dict()}
    summary = {"fits": fits, "zero": stage} | print_summary(args, job, step_ms, fits)
    print_larger_ep(args, job, step_ms)
    if bases.stock is not None:
        zero, stock_ms = bases.stock.job.zero.stage, bases.stock_ms(steps_ms)
        summary["stock"] = {"ep": 1, "zero": zero, "step_ms": stock_ms, "over_stock": stock_ms / step_ms}
    if args.gantt:
        for phase, timeline in result.block_timelines(args.preset).items():
            print(f"\none layer, {phase}:\n{timeline.gantt(110)}")
    if args.trace is not None:
        args.trace.write_text(result.trace())
        print(f"\ntrace of the step: {args.trace}")
    if args.png is not None:
        drawn = report(job, args.preset, max_layers=DRAWN_LAYERS)
        is_two_batch = drawn.best_two_batch() if args.two_batch and job.model.shape.B > 1 else None
        save_png(drawn.step_timelines(is_two_batch=is_two_batch), args.png)
        print(f"\npicture of a step of {len(drawn.layers)} layer(s) by every preset: {args.png}")
    if args.json is not None:
        data = result.as_dict() | placed | memory | two_batch | batched | summary
        args.json.write_text(json.dumps(data, indent=1) + "\n")
        print(f"\neverything: {args.json}")
    return 0


def _job(args: argparse.Namespace) -> PlannedJob:
    """Return the job in the arguments, with the fastest of the possible layouts."""
    cluster = load_cluster(args.cluster)
    nodes = cluster.num_nodes if args.nodes is None else args.nodes
    if nodes < 1:
        raise ValueError(f"--nodes = {nodes}: must be at least 1")
    model = model_of(args)
    groups = planned_groups(args, nodes, cluster.gpus_per_node, model)
    layers = model.num_layers
    if layers < 1 or (model.architecture is None and layers % groups.pp):
        raise ValueError(f"--layers = {layers}: must be at least 1 and divisible by --pp = {groups.pp}")
    settings = _settings(args, cluster)
    if args.memory_gb is not None and args.memory_gb <= 0:
        raise ValueError(f"--memory-gb = {args.memory_gb:g}: must be above 0")
    if args.lora < 0:
        raise ValueError(f"--lora = {args.lora}: must be at least 0, the rank of adapters")
    memory_gb = cluster.memory_gb if args.memory_gb is None else args.memory_gb
    job = PlannedJob(cluster, groups, model, settings, recompute=args.recompute, memory_gb=memory_gb)
    ways = [replace(job, groups=each) for each in other_layouts(args, model, groups)]
    if len(ways) == 1:
        return job
    return min(ways, key=lambda each: report(each, "best", ("best",), DRAWN_LAYERS).step_ms("best"))


def _settings(args: argparse.Namespace, cluster: Cluster) -> Settings:
    if args.gradient_solver not in SOLVERS:
        raise ValueError(f"--gradient-solver = {args.gradient_solver!r}: {suggested(args.gradient_solver, SOLVERS)}")
    if args.host_us is not None and not 0 <= args.host_us < float("inf"):
        raise ValueError(f"--host-us = {args.host_us}: must be a finite number of at least 0")
    contention = {"measured": cluster.contention, "ideal": IDEAL}.get(args.contention)
    if contention is None:
        try:
            contention = Contention(float(args.contention))
        except ValueError as error:
            raise ValueError(
                f"--contention = {args.contention!r}: must be measured, ideal, or a number of at least 0"
            ) from error
    asked, pp = args.micro_batches, args.pp or 1
    if asked is not None and asked < 1:
        raise ValueError(f"--micro-batches = {asked}: must be at least 1")
    default = MICRO_BATCHES_PER_STAGE * pp if pp > 1 else 1
    return Settings(
        contention,
        cluster.host_ms if args.host_us is None else args.host_us / 1e3,
        args.max_degree,
        args.solver,
        args.gradient_solver,
        args.chunk_bytes,
        num_micro_batches=default if asked is None else asked,
    )


def _print_head(result: Report, args: argparse.Namespace) -> None:
    cluster, groups = result.job.cluster, result.job.groups
    nodes = groups.world // groups.gpus_per_node
    is_beyond = nodes > cluster.num_nodes
    beyond = f", extrapolated from {cluster.num_nodes} to {nodes} node(s)" if is_beyond else ""
    print(f"cluster  {cluster.name}{beyond}: {cluster.source}")
    if is_beyond:
        print(
            f"         its numbers are for {cluster.num_nodes} node(s): costs of collectives among {nodes} are "
            "extrapolated, not measured"
        )
    dtype = args.dtype or result.job.model.taken.get("dtype", "fp32")
    if cluster.dtype not in (None, dtype):
        print(f"         its computation costs are for {cluster.dtype}, and communication is in {dtype}")
    for name, text in result.head():
        print(f"{name:8s} {text}")
    print_taken(args, result.job)


def _print_presets(args: argparse.Namespace, result: Report, bases: Baselines) -> None:
    """Print the ms of a step by all systems. For a batch, it is the step of its last micro-batch, without stock in
    another layout, whose batch is printed above.
    """
    stage = result.job.zero.stage
    gathers = f", gathers of parameters (ZeRO {stage})" if stage else ""
    what = f"forward, backward, sums of gradients{gathers}; without the optimizer"
    if is_batch(args):
        number = 1 if result.stage is None else result.stage.index + 1
        where = "" if result.job.groups.pp == 1 else f" on stage {number}"
        print(f"\nthe last micro-batch{where} ({what})")
    else:
        print(f"\none step ({what})")
    steps_ms = {name: sum(each) for name, each in result.times_ms.items()}
    times = {bases.label(name): each for name, each in result.times_ms.items()}
    if bases.stock is not None:
        times = {bases.stock_label: bases.stock.times_ms["deepspeed"]} | times
    times["(lower bound, batches whole)" if args.two_batch else "(lower bound)"] = result.bounds_ms
    in_one_step = replace(bases, stock_batch_ms=None)
    rows = [
        (name, *(f"{each:.2f}" for each in (*phases, sum(phases))), *in_one_step.ratios(sum(phases), steps_ms))
        for name, phases in times.items()
    ]
    print_table(("system", "forward ms", "backward ms", "step ms", *bases.heads), rows)


def _print_plan(result: Report) -> None:
    print(f"\nthe plan of {result.preset_name}")
    heads = ("layers", "phase", "chunks", "order", "ms", "bound ms", "gradients MB (MoE + rest)")
    groups = result.plan_groups()
    print_table(heads, [_cells(group) for group in groups])
    for group in groups:
        places = _places(group)
        print(f"  {group[0]['phase']}, layer{'s' * ('-' in places)} {places}: {group[0]['why']}")
    if result.plan.tail_bytes:
        print(f"  after the backward: {result.plan.tail_bytes / 1e6:.1f} MB of gradients")


def _places(group: Sequence[dict[str, Any]]) -> str:
    first, last = group[0]["layer"], group[-1]["layer"]
    return f"{first}" if first == last else f"{first}-{last}"


def _cells(group: Sequence[dict[str, Any]]) -> tuple[object, ...]:
    row = group[0]
    times = (_range([each[key] for each in group], 2) for key in ("ms", "bound_ms"))
    sent = (_range([each[key] / 1e6 for each in group], 1) for key in ("moe_bytes", "dense_bytes"))
    gradients = " + ".join(sent) if row["phase"] == "backward" else ""
    return (_places(group), row["phase"], row["degree"], row["order"], *times, gradients)


def _range(values: Sequence[float], digits: int) -> str:
    low, high = (f"{each:.{digits}f}" for each in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"
