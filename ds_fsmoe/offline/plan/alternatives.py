# SPDX-License-Identifier: Apache-2.0
"""Prints alternatives in ``ds_fsmoe plan``: each all-to-all with its fan-out, and two-batch overlap."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ds_fsmoe.offline.plan.report import PlannedJob, Report, report
from ds_fsmoe.planning.block import BlockPlan
from ds_fsmoe.planning.decide.bounds import busiest_ms
from ds_fsmoe.planning.groups import Fanout, can_deduplicate, counted_fanout, expected_fanout
from ds_fsmoe.planning.workload import ALLTOALLS, ALLTOALLS_OF_BEFORE, NODE_DEDUPLICATED
from ds_fsmoe.routes.recorded import read_routing
from ds_fsmoe.terminal.tables import print_table
from ds_fsmoe.untrusted import suggested


def exchange_of(args: argparse.Namespace, job: PlannedJob) -> PlannedJob:
    """Return the job with the all-to-all and the fan-out that the arguments ask for."""
    alltoall = ALLTOALLS_OF_BEFORE.get(args.alltoall, args.alltoall)
    if alltoall not in (*ALLTOALLS, "auto"):
        nearest = suggested(args.alltoall, (*ALLTOALLS, "auto"), before=ALLTOALLS_OF_BEFORE)
        raise ValueError(f"--alltoall = {args.alltoall!r}: {nearest}")
    job = replace(job, fanout=_fanout(args, job))
    if alltoall == "auto":
        steps_ms = _steps_ms(job, args.preset)
        alltoall = min(steps_ms, key=steps_ms.__getitem__)
    return replace(job, alltoall=alltoall)


def _steps_ms(job: PlannedJob, preset: str) -> dict[str, float]:
    """Return the ms of a step by a preset with each all-to-all."""
    return {name: report(replace(job, alltoall=name), preset).step_ms(preset) for name in ALLTOALLS}


def print_exchanges(job: PlannedJob, args: argparse.Namespace) -> None:
    """Print the predicted time of each all-to-all, where there is a choice."""
    if not can_deduplicate(job.groups):
        if job.alltoall == NODE_DEDUPLICATED:
            print(f"{NODE_DEDUPLICATED} is run as flat: it needs whole experts on several ranks of several nodes")
        return
    at, shape, fanout = job.groups.placements["ep"], job.model.shape, job.fanout
    assert fanout is not None
    between = dict.fromkeys(ALLTOALLS, shape.F * (at.nodes - 1) / at.nodes)
    between[NODE_DEDUPLICATED] = shape.F * fanout.nodes / shape.K * (at.nodes - 1) / at.nodes
    steps = _steps_ms(job, args.preset)
    rows = [
        (
            name,
            f"{between[name]:.2f}",
            f"{time_ms:.2f}",
            f"{steps['flat'] / time_ms:.2f}x",
            "shown below" * (name == job.alltoall),
        )
        for name, time_ms in steps.items()
    ]
    print(f"\nall-to-alls, with {args.preset}")
    print_table(("all-to-all", "inter-node sends per token", "step ms", "over flat", ""), rows)


def _fanout(args: argparse.Namespace, job: PlannedJob) -> Fanout | None:
    groups, shape = job.groups, job.model.shape
    if not can_deduplicate(groups) or shape.E % groups.ep:
        given = {"--expert-groups": args.expert_groups, "--groups-per-token": args.groups_per_token}
        for flag, value in (given | {"--routing": args.routing}).items():
            if value is not None:
                raise ValueError(
                    f"{flag} = {value}: needs whole experts on several ranks of several nodes: "
                    "--expert-tensor-parallel-size 1, --ep-size a multiple of a node's GPUs"
                )
        return None
    at = groups.placements["ep"]
    if args.routing is not None:
        return counted_fanout(_recorded(args.routing, shape.E, shape.K), shape.E, at.nodes, at.per_node)
    limits = args.expert_groups or 1, args.groups_per_token or args.expert_groups or 1
    return expected_fanout(shape.E, shape.K, at.nodes, at.per_node, *limits)


def _recorded(path: Path, num_experts: int, k: int) -> Any:
    """Return the choices of all tokens in all layers with this number of experts and choices, [tokens, k]."""
    recording = read_routing(path)
    read = (
        recording.choices(rank, step, micro_batch, layer).indices_SK
        for rank, step, micro_batch, layer in recording
        if recording.ranks[rank].layers[layer].num_experts == num_experts
    )
    found = [indices_SK for indices_SK in read if indices_SK.shape[1] == k]
    if not found:
        raise ValueError(f"--routing = {path}: has no layer of {num_experts} experts and {k} choices per token")
    return np.concatenate(found)


# ---- two-batch overlap


def print_two_batch(args: argparse.Namespace, result: Report) -> dict[str, Any]:
    """Print the gain of two-batch overlap over ``best`` with each all-to-all; return it in plain types."""
    job, samples, zero = result.job, result.job.model.shape.B, result.job.zero
    if samples == 1:
        print("\n--two-batch-overlap: needs at least two samples in a batch: --samples 2")
        return {}
    print("\ntwo-batch overlap, relative to best")
    if zero.stage:
        job = replace(job, zero=replace(zero, gathers=False))
        result = report(job, "best")
        scatters = " and the reduce-scatters of gradients" if zero.stage == 3 else ""
        print(f"  both without the gathers of parameters{scatters} of ZeRO {zero.stage}")
    if samples % 2:
        print(f"--samples {samples}: computed as if both sub-batches had {samples / 2:g}")
    plans = []
    for name in ALLTOALLS if can_deduplicate(job.groups) else (job.alltoall,):
        found = result if name == job.alltoall else report(replace(job, alltoall=name), "best")
        plans.append(("best", name, found.plans["best"], found.times_ms["best"]))
        two_batch = found.best_two_batch()
        if two_batch is not None:
            plans.append(("best, two-batch", name, two_batch, found.planner.phases_ms(two_batch)))
    best_ms = min(sum(phases_ms) for _, _, plan, phases_ms in plans if not plan.is_two_batch)
    rows = [(*names, _degrees(plan.forward), _degrees(plan.backward), phases) for *names, plan, phases in plans]
    bounds_ms = busiest_ms(job.zero.layers("best", result.layers), result.planner.costs)
    rows.append(("(lower bound)", job.alltoall, "", "", bounds_ms))
    cells = [
        (*words, *(f"{each:.2f}" for each in (*phases, sum(phases))), f"{best_ms / sum(phases):.3f}x")
        for *words, phases in rows
    ]
    heads = ("plan", "all-to-all", "chunks", "in the backward", "forward ms", "backward ms", "step ms", "over best")
    print_table(heads, cells)
    for plan_name, name, plan, _ in plans:
        if args.gantt and name == job.alltoall:
            for phase, timeline in result.pair_timelines(plan).items():
                print(f"\ntwo layers, {phase}, {plan_name}:\n{timeline.gantt(110)}")
    return {
        "halves": [
            {
                "plan": plan_name,
                "alltoall": name,
                "forward_ms": forward_ms,
                "backward_ms": backward_ms,
                "step_ms": forward_ms + backward_ms,
                "over_best": best_ms / (forward_ms + backward_ms),
            }
            for plan_name, name, _, (forward_ms, backward_ms) in plans
        ]
    }


def _degrees(blocks: Sequence[BlockPlan]) -> str:
    return " or ".join(map(str, sorted({each.degree for each in blocks})))
