# SPDX-License-Identifier: Apache-2.0
"""Plan a model on a cluster, from numbers alone: what every system would take there, how the chosen one runs every
layer and why, and what no plan could beat."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_fsmoe.commands.plan_exchange import add_alltoall, exchange_of, print_exchanges
from ds_fsmoe.commands.plan_placement import add_loads, print_placement, read_loads
from ds_fsmoe.commands.tables import check_folders, print_table

if TYPE_CHECKING:
    from ds_fsmoe.planning.cluster import Cluster
    from ds_fsmoe.planning.groups import Groups
    from ds_fsmoe.planning.plan import Settings
    from ds_fsmoe.planning.report import Report
    from ds_fsmoe.planning.workload import Shape

HELP = "what would it give: a model planned on a cluster, from numbers alone"
DRAWN_LAYERS = 3
"""The number of layers of a stage that are drawn; with more, tasks are too small to be seen."""
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: what is planned, on what, how, and where the result goes."""
    where = parser.add_argument_group("the cluster")
    where.add_argument("--cluster", required=True, help="testbed_a, testbed_b, ..., or a JSON file like those")
    where.add_argument("--nodes", type=int, help="so many nodes (as many as were measured)")
    model = parser.add_argument_group("the model (all of it, or a known one and what is different)")
    model.add_argument("--model", help="gpt2-xl, mixtral-7b (or mixtral-8x7b) or mixtral-22b (or mixtral-8x22b)")
    model.add_argument("--layers", type=int, help="number of layers")
    model.add_argument("--samples", type=int, metavar="B", help="samples per model-parallel group")
    model.add_argument("--length", type=int, metavar="L", help="positions of a sample")
    model.add_argument("--width", type=int, metavar="M", help="width of the model")
    model.add_argument("--hidden", type=int, metavar="H", help="width inside an expert")
    model.add_argument("--experts", type=int, metavar="E", help="number of experts (the model's, or 8)")
    model.add_argument("--top-k", type=int, metavar="K", help="experts per token")
    model.add_argument("--capacity-factor", metavar="F", help="a number, or none where no token is dropped")
    model.add_argument(
        "--imbalance",
        type=float,
        metavar="X",
        help="rows of the fullest rank over those of the mean rank, where no token is dropped (1)",
    )
    model.add_argument("--ffn", help="gpt (two products) or mixtral (three)")
    model.add_argument("--heads", type=int, help="attention heads")
    model.add_argument("--kv-heads", type=int, help="heads of keys and values (as many)")
    model.add_argument(
        "--dtype",
        choices=DTYPE_BYTES,
        default="fp32",
        help="of what is sent; computing costs what the cluster's file says",
    )
    groups = parser.add_argument_group(
        "group sizes (as in the paper, as far as they fit: mp = esp = GPUs of a node, ep = nodes; on one node mp = esp "
        "= 1, ep = GPUs)"
    )
    for name, what in (
        ("mp", "model parallel"),
        ("esp", "expert sharding"),
        ("ep", "expert parallel"),
        ("dp", "data parallel (what is left)"),
        ("pp", "pipeline stages (1)"),
    ):
        groups.add_argument(f"--{name}", type=int, help=what)
    how = parser.add_argument_group("how")
    how.add_argument("--preset", default="best", help="whose plan is shown (best)")
    add_alltoall(how)
    add_loads(how)
    how.add_argument("--recompute", action="store_true", help="layers run their forward again in the backward")
    how.add_argument("--solver", default="exact", help="degrees: exact or slsqp, the paper's")
    how.add_argument("--gradient-solver", default="dp", help="gradients: dp or de, the paper's")
    how.add_argument("--max-degree", type=int, default=16)
    how.add_argument("--chunk-bytes", type=int, help="slices of fixed_chunk (31457280), micro-ops of lina (30000000)")
    how.add_argument(
        "--contention", default="measured", help="measured (the cluster's), ideal, or kappa of the two links"
    )
    how.add_argument("--host-us", type=float, help="cost of launching one task, in microseconds (the cluster's)")
    out = parser.add_argument_group("results")
    out.add_argument("--gantt", action="store_true", help="one layer of the plan as text")
    out.add_argument("--trace", type=Path, metavar="FILE", help="the step, for Perfetto and chrome://tracing")
    out.add_argument(
        "--png", type=Path, metavar="FILE", help="a step of up to three layers by every preset, as a picture"
    )
    out.add_argument("--json", type=Path, metavar="FILE", help="everything, for programs")


def run(args: argparse.Namespace) -> int:
    """Plan, and print the result."""
    from ds_fsmoe.planning.report import report

    check_folders(args.trace, args.png, args.json)
    job = _job(args)
    loads = read_loads(args, job)
    job |= exchange_of(args, job)
    result = report(**job, preset_name=args.preset)
    _print_head(result, args)
    print_exchanges(job, args)
    _print_presets(result)
    _print_plan(result)
    placed = print_placement(loads, result, job)
    if args.gantt:
        for phase, timeline in result.block_timelines(args.preset):
            print(f"\none layer, {phase}:\n{timeline.gantt(110)}")
    if args.trace is not None:
        args.trace.write_text(result.trace())
        print(f"\ntrace of the step: {args.trace}")
    if args.png is not None:
        from ds_fsmoe.planning.draw import save_png

        stages = job["groups"].pp
        num_layers = min(job["num_layers"], DRAWN_LAYERS * stages)
        drawn = report(**(job | {"num_layers": num_layers}), preset_name=args.preset)
        save_png(drawn.step_timelines(), args.png)
        print(f"\npicture of a step of {num_layers // stages} layer(s) by every preset: {args.png}")
    if args.json is not None:
        args.json.write_text(json.dumps(result.as_dict() | placed, indent=1) + "\n")
        print(f"\neverything: {args.json}")
    return 0


def _job(args: argparse.Namespace) -> dict[str, Any]:
    """Return the planner's job for the arguments."""
    from ds_fsmoe.planning.cluster import load_cluster

    cluster = load_cluster(args.cluster)
    nodes = cluster.num_nodes if args.nodes is None else args.nodes
    if nodes < 1:
        raise ValueError(f"--nodes = {nodes}: must be at least 1")
    shape, layers = _model(args)
    groups = _groups(args, nodes, cluster.gpus_per_node, shape.E)
    if layers < 1 or layers % groups.pp:
        raise ValueError(f"--layers = {layers}: must be at least 1 and divisible by --pp = {groups.pp}")
    return {
        "cluster": cluster,
        "groups": groups,
        "shape": shape,
        "num_layers": layers,
        "settings": _settings(args, cluster),
        "recompute": args.recompute,
    }


def _model(args: argparse.Namespace) -> tuple[Shape, int]:
    """Return one layer, and the number of such layers."""
    from ds_fsmoe.planning.paper.grid import DEFAULT_EXPERTS, MODELS, model
    from ds_fsmoe.planning.workload import Shape

    given = {
        "B": args.samples,
        "L": args.length,
        "M": args.width,
        "H": args.hidden,
        "E": args.experts,
        "K": args.top_k,
        "ffn": args.ffn,
        "heads": args.heads,
        "kv_heads": args.kv_heads,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if args.capacity_factor is not None:
        given["capacity_factor"] = _capacity_factor(args.capacity_factor)
    if args.imbalance is not None:
        given["imbalance"] = args.imbalance
    given["dtype_bytes"] = DTYPE_BYTES[args.dtype]
    known = None if args.model is None else model(args.model)
    num_experts = given.get("E", DEFAULT_EXPERTS if known is None else known.shape.E)
    if args.top_k is not None and args.top_k > num_experts:
        raise ValueError(
            f"--top-k = {args.top_k}: must be at most the number of experts, {num_experts}; --experts sets it"
        )
    if known is not None:
        changed = known.with_(**given)
        return changed.shape, known.num_layers if args.layers is None else args.layers
    missing = [flag for flag, name in (("--width", "M"), ("--hidden", "H"), ("--length", "L")) if name not in given]
    if args.layers is None:
        missing.append("--layers")
    if missing:
        raise ValueError(f"without --model ({', '.join(MODELS)}) also needed: {', '.join(missing)}")
    return Shape(**({"B": 1, "E": num_experts} | given)), args.layers


def _groups(args: argparse.Namespace, nodes: int, gpus: int, num_experts: int) -> Groups:
    """Return the given sizes, and the paper's for the others: attention and experts split inside a node, experts
    spread over nodes as far as there are experts. On a single node experts are spread over its ranks instead.

    Where no size fits those that are given, ``Groups`` says so.
    """
    from ds_fsmoe.planning.groups import Groups

    pp = args.pp or 1
    stage = nodes * gpus // max(1, pp)
    inside = gpus if nodes > 1 else 1
    mp, esp, ep = args.mp, args.esp, args.ep
    if mp is None:
        mp = inside if args.dp is None or args.dp < 1 or stage % args.dp else stage // args.dp
    if esp is None:
        fitting = [size for size in range(1, inside + 1) if inside % size == 0 and stage % (size * (ep or 1)) == 0]
        esp = max(fitting, default=inside)
    if ep is None:
        left = max(1, stage // max(1, esp))
        ep = max(size for size in range(1, left + 1) if left % size == 0 and num_experts % size == 0)
    return Groups(nodes * gpus, gpus, mp, esp, ep, args.dp, pp)


def _settings(args: argparse.Namespace, cluster: Cluster) -> Settings:
    from ds_fsmoe.planning.gradients import SOLVERS
    from ds_fsmoe.planning.plan import Settings
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
    )


def _capacity_factor(text: str) -> float | None:
    if text == "none":
        return None
    try:
        return float(text)
    except ValueError as error:
        raise ValueError(f"--capacity-factor = {text!r}: must be a number, or none") from error


def _print_head(result: Report, args: argparse.Namespace) -> None:
    print(f"cluster  {result.cluster.name}: {result.cluster.source}")
    nodes = result.groups.world // result.groups.gpus_per_node
    if nodes > result.cluster.num_nodes:
        print(
            f"         its numbers are of {result.cluster.num_nodes} node(s): what collectives among {nodes} take is "
            "extrapolated from them, not measured"
        )
    for name, text in result.head():
        print(f"{name:8s} {text}")
    taken = {"experts": result.shape.E, **{name: getattr(result.groups, name) for name in ("mp", "esp", "ep")}}
    not_given = [f"--{name} {size}" for name, size in taken.items() if getattr(args, name) is None]
    if not_given:
        print(f"default  {' '.join(not_given)}")


def _print_presets(result: Report) -> None:
    print("\none step (forward and backward of all layers, without the optimizer)")
    rows = []
    for name, (forward_ms, backward_ms) in result.times_ms.items():
        step_ms = forward_ms + backward_ms
        speedups = (f"{sum(result.times_ms[base]) / step_ms:.2f}x" for base in ("deepspeed", "tutel"))
        rows.append((name, f"{forward_ms:.2f}", f"{backward_ms:.2f}", f"{step_ms:.2f}", *speedups))
    bound = result.bounds_ms
    step_ms = sum(bound)
    speedups = (f"{sum(result.times_ms[base]) / step_ms:.2f}x" for base in ("deepspeed", "tutel"))
    rows.append(("(no plan can beat)", f"{bound[0]:.2f}", f"{bound[1]:.2f}", f"{step_ms:.2f}", *speedups))
    print_table(("preset", "forward ms", "backward ms", "step ms", "over deepspeed", "over tutel"), rows)


def _print_plan(result: Report) -> None:
    print(f"\nthe plan of {result.preset_name}")
    heads = ("layers", "phase", "degree", "order", "ms", "bound ms", "gradients MB (MoE + rest)")
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
