# SPDX-License-Identifier: Apache-2.0
"""Predicts other plans for a recorded job: ``ds_fsmoe plan --from-trace``.

Predictions are calibrated to the measured times of the run. Other plans differ in schedule, chunks, ranks, all-to-alls
or expert placement.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ds_fsmoe.files.runs import CLUSTER, MEASURED, Run, read_run, trace_folder
from ds_fsmoe.files.traces import rank_file, read_trace
from ds_fsmoe.files.whole_files import check_folders
from ds_fsmoe.offline.plan.placement import moved_bytes, on_ranks, place, print_layers, read_loads
from ds_fsmoe.offline.plan.traced_costs import (
    TracedJob,
    corrected,
    counted_tasks,
    fit_costs,
    read_tasks,
    with_slowdown_of,
)
from ds_fsmoe.offline.report.comparison import RunTimes, settled_after, times_of
from ds_fsmoe.offline.report.critical_path import MeasuredTask
from ds_fsmoe.offline.report.routing import ROUTING, has_routing
from ds_fsmoe.planning.block import LayerPlan
from ds_fsmoe.planning.cluster import Cluster, load_cluster
from ds_fsmoe.planning.decide.presets import NAMES
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.job.other_ranks import OtherRanks, on_other_ranks
from ds_fsmoe.planning.job.recorded_costs import RecordedJob, RecordedKind, job_from_data
from ds_fsmoe.planning.job.what_if import Prediction, Ran, WhatIf, ran_of, with_dispatch_of
from ds_fsmoe.planning.placement_costs import Prices
from ds_fsmoe.planning.timeline import IDEAL
from ds_fsmoe.planning.workload import ALLTOALLS
from ds_fsmoe.terminal.tables import print_table

NO_GRADIENTS = (
    "gradients: their cost is unknown for this run, so each plan keeps the recorded ones, and presets that differ "
    "only in gradients look equal"
)
MOST_DEGREE = 4
"""The largest degree in the table; the one that ran is in it, too."""


@dataclass(frozen=True)
class Calibrated:
    """Holds a run, and the predictions for its job that are calibrated to its times."""

    run: Run
    ran: Ran
    times: RunTimes
    """The medians over the steps in which nothing was tried any more: of a step, and of its parts."""
    predicted: Prediction
    """The prediction for what ran, as it was made before the run could correct it."""
    what_if: WhatIf
    """Predicts other plans, with the costs that the run has corrected."""
    cluster: Cluster | None
    """The cluster that says what collectives cost among other ranks; ``None``: it is not known."""
    notes: list[str]

    def step_of(self, prediction: Prediction) -> float:
        """Return the ms of a whole step, with the optimizer and the time between steps."""
        parts_ms = self.times.parts_ms
        return prediction.step_ms + (self.times.step_ms - (parts_ms["forward"] + parts_ms["backward"]))


def calibrated(folder: Path, cluster_name: str | None = None) -> Calibrated:
    """Return a run with calibrated predictions for its job.

    Args:
        folder: the folder of the run.
        cluster_name: a cluster, for costs that the run did not record.

    Raises:
        ValueError: there is no run, it has stock layers, or records are missing; the message says what to record.
    """
    run = read_run(folder)
    if run.is_stock:
        raise ValueError(f"--from-trace {folder}: stock DeepSpeed layers ran, which have no tasks to plan with")
    if not run.measured:
        raise ValueError(f"--from-trace {folder}: contains no {MEASURED}, which runs of this version write")
    times = times_of(run)
    if times is None or "forward" not in times.parts_ms:
        raise ValueError(f"--from-trace {folder}: no step after the trials has a breakdown")
    try:
        job = job_from_data(run.measured)
        job, ran = with_dispatch_of(job, ran_of(job, run.plans.get("layers", ())))
    except ValueError as error:
        raise ValueError(f"--from-trace {folder}: {MEASURED}: {error}") from error
    own = run.folder / CLUSTER
    asked = cluster_name or (str(own) if own.is_file() else None)
    cluster = None if asked is None else load_cluster(asked)
    settled = settled_after(run)
    tasks, problem = _trace_of(run, settled)
    measured_ms = times.parts_ms["forward"], times.parts_ms["backward"]
    notes = [] if job.is_measured and job.gradients_bytes else [NO_GRADIENTS]
    if job.is_measured:
        raw = what_if = WhatIf(job)
        said = (
            f"costs: measured by the autotuner; {problem}, so the error of its predictions is added to the part "
            "that plans do not change"
        )
        if tasks:
            found, traced = with_slowdown_of(job, tasks, settled)
            rest_ms = _rest_ms(run, traced, found, knows_gradients=found.mode != "off")
            what_if = WhatIf(corrected(found, traced), rest_ms or raw.rest_ms).with_gradients_of(measured_ms[1], ran)
            said = (
                "costs: measured by the autotuner, each task corrected by its time in the trace of rank 0 "
                "(including waits for other ranks), lanes slowed down as in the trace; gradients: the rest of the "
                "backward"
            )
    elif tasks:
        contention = IDEAL if cluster is None else cluster.contention
        traced = read_tasks(tasks, contention, settled)
        costs, one_size = fit_costs(job, traced, cluster)
        # Beyond the chunks that were seen nothing tells what start-up adds up to.
        most = min(job.max_degree, max(MOST_DEGREE, *ran.degrees))
        found = replace(job.with_fitted(costs, contention), max_degree=most)
        raw = what_if = WhatIf(found, _rest_ms(run, traced, found, knows_gradients=False))
        said = (
            "costs: fitted to the spans of the trace of rank 0 (including waits for other ranks), without measurements"
        )
        notes = [*_of_fit(one_size, cluster), *notes]
    else:
        raise ValueError(
            f"--from-trace {folder}: the costs of tasks are unknown: {problem}. Record a run with "
            '"trace": {"enabled": true}, or with "autotune": {"enabled": true}'
        )
    what_if = what_if.with_rest_of(measured_ms, ran)
    return Calibrated(run, ran, times, raw.as_ran(ran), what_if, cluster, [said, *notes])


def _trace_of(run: Run, settled: int) -> tuple[list[MeasuredTask], str]:
    """Return (traced tasks, reason why there are none) of the rank whose steps are logged.

    Tasks are those from the second step on, as the first one is slow. Some have to be from steps after all trials. A
    trace counts steps from 0, and the log from 1.
    """
    path = rank_file(trace_folder(run.folder), 0)
    if not path.is_file():
        return [], "there is no trace of rank 0"
    try:
        trace = read_trace(path)
    except (OSError, ValueError) as error:
        return [], f"the trace is of no use: {error}"
    found = [each for each in counted_tasks(trace) if each.step > 0]
    if not any(each.step >= settled for each in found):
        return [], f"what is traced is before step {settled}, until which something was measured or tried"
    return found, ""


def _rest_ms(run: Run, traced: TracedJob, job: RecordedJob, knows_gradients: bool) -> tuple[float, float] | None:
    """Return the ms of (forward, backward) of one micro-batch outside the layers. If the cost of gradients is known,
    those sent after the backward are left out.
    """
    rows = {row["step"]: row for row in run.steps}
    pairs = [
        (rows[step + 1]["forward_ms"] - of_runs[0], rows[step + 1]["backward_ms"] - of_runs[1])
        for step, of_runs in traced.runs_ms.items()
        if "forward_ms" in rows.get(step + 1, {}) and "backward_ms" in rows[step + 1]
    ]
    if not pairs:
        return None
    forward_ms, backward_ms = (
        max(0.0, statistics.median(each) / job.micro_batches) for each in zip(*pairs, strict=True)
    )
    if knows_gradients:
        behind_ms = 2 * forward_ms if traced.behind_ms is None else traced.behind_ms * len(job.labels)
        backward_ms = min(backward_ms, behind_ms)
    return forward_ms, backward_ms


def _of_fit(one_size: Iterable[str], cluster: Cluster | None) -> list[str]:
    notes = []
    if kinds := ", ".join(one_size):
        notes.append(
            f"chunks: {kinds} had one size in the trace, which does not show their start-up time. It is taken as 0, so "
            "more chunks seem to cost nothing. Give --cluster FILE, or record a run with two numbers of chunks"
        )
    if cluster is None:
        notes.append("lanes: how they slow each other down is in the spans, and taken to be the same in other plans")
    return notes


def print_elsewhere(found: Calibrated, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Print predictions for the same schedule with other all-to-alls and on other ranks."""
    was = found.what_if.job.kinds[0]
    rows: list[tuple[str, ...]] = []
    data: list[dict[str, Any]] = []
    for name, other in _wanted(was, args):
        try:
            what_if = what_if_on(found, other)
        except ValueError as error:
            rows.append((name, "", "", "", str(error)))
            data.append({"name": name, "why_not": str(error)})
            continue
        step_ms = found.step_of(what_if.by_schedule(what_if.job.schedule))
        now = what_if.job.kinds[0].groups
        gain = found.times.step_ms / step_ms * now.world / was.groups.world
        is_timed = now == was.groups and other.alltoall in was.alltoalls
        note = "timed in the job" if is_timed else "extrapolated by the cluster's numbers"
        rows.append((name, _describe(now), f"{step_ms:.1f}", f"{gain:.2f}x", note))
        sizes = {size: getattr(now, size) for size in ("world", "gpus_per_node", "ep", "esp")}
        times = {"step_ms": step_ms, "tokens_gain": gain, "is_extrapolated": not is_timed}
        data.append({"name": name, "groups": sizes, **times})
    if rows:
        print(f"\na step by {found.what_if.job.schedule} with other all-to-alls and ranks; each rank keeps its tokens")
        print_table(("", "ranks", "predicted ms", "tokens a second", ""), rows)
    return data


def _wanted(kind: RecordedKind, args: argparse.Namespace) -> list[tuple[str, OtherRanks]]:
    """Return the layouts to predict: the requested one, each all-to-all, and other layouts of the same ranks."""
    groups, found = kind.groups, []
    asked = {
        "--nodes": args.nodes,
        "--ranks-per-node": args.ranks_per_node,
        "--ep-size": args.ep,
        "--expert-tensor-parallel-size": args.esp,
    }
    given = [f"{flag} {size}" for flag, size in asked.items() if size is not None]
    if given:
        found.append((" ".join(given), OtherRanks(args.nodes, args.ranks_per_node, args.ep, args.esp)))
    if len(groups.placements["ep"].lanes) == 2:
        found += [(f"all-to-all {name}", OtherRanks(alltoall=name)) for name in ALLTOALLS]
    found += [
        (f"ep_size {ep}, expert_tensor_parallel_size {esp}", OtherRanks(ep=ep, esp=esp))
        for esp in range(1, groups.gpus_per_node + 1)
        for ep in range(1, groups.stage + 1)
        if ep * esp > 1 and groups.stage % (ep * esp) == 0 and kind.shape.num_experts % ep == 0
        if (ep, esp) != (groups.ep, groups.esp)
    ]
    if args.nodes is None:
        found.append(("twice the nodes", OtherRanks(nodes=2 * max(1, groups.world // groups.gpus_per_node))))
    return found


def what_if_on(found: Calibrated, other: OtherRanks) -> WhatIf:
    """Return predictions for the job on other ranks.

    Raises:
        ValueError: the job is impossible there, or the cluster is unknown.
    """
    job = found.what_if.job
    kinds, name = job.kinds, other.alltoall
    if name is not None and other == OtherRanks(alltoall=name) and all(name in kind.alltoalls for kind in kinds):
        only = tuple(replace(kind, alltoalls={name: kind.alltoalls[name]}) for kind in kinds)
        return WhatIf(replace(job, kinds=only, _costs={}), found.what_if.rest_ms)
    if found.cluster is None:
        raise ValueError("the costs of collectives among other ranks are unknown: add --cluster FILE")
    return WhatIf(on_other_ranks(job, found.cluster, other), found.what_if.rest_ms)


def _describe(groups: Groups) -> str:
    nodes = groups.world // groups.gpus_per_node
    cut = f", expert_tensor_parallel_size {groups.esp}" if groups.esp > 1 else ""
    return f"{nodes} x {groups.gpus_per_node}, ep_size {groups.ep}{cut}"


# ---- places of experts


def print_placed(found: Calibrated, args: argparse.Namespace) -> dict[str, Any] | None:
    """Print the predicted gain of placing experts by the recorded routing. Return None if there is no routing, or no
    gain.
    """
    asked = (found.run.facts.get("block", {}).get("routing") or {}).get("record")
    folder = args.loads or next(
        (each for each in (found.run.folder / ROUTING, Path(asked or ".")) if has_routing(each)), None
    )
    if folder is None:
        return None
    job = found.what_if.job
    kind = job.kinds[0]
    if kind.shape.num_tokens is None or kind.groups.ep == 1:
        print(
            f"\nrouting in {folder}: placement has no effect where experts have equally many slots, or are on every "
            "rank"
        )
        return None
    data = []
    for index, (layer, rows_RE) in enumerate(read_loads(Path(folder), kind.shape.num_experts).items()):
        label = job.labels[min(index, len(job.labels) - 1)]
        of_kind = job.kind_of(label)
        rows_GE = on_ranks(rows_RE, of_kind.groups.ep)
        data.append(place(layer, rows_GE, _prices(found, of_kind, label, rows_GE)))
    print(f"\nexperts placed by the routing in {folder}")
    print_layers(data)
    step_ms = found.times.step_ms - sum(each["now_ms"] - each["placed_ms"] for each in data)
    gain = found.times.step_ms / step_ms
    print(f"  a step: {step_ms:.1f} ms placed, {gain:.2f}x over what ran")
    return {"layers": data, "step_ms": step_ms, "gain": gain}


def _prices(found: Calibrated, kind: RecordedKind, label: str, rows_GE: np.ndarray) -> Prices:
    """Return the costs of a layer as it was run, for balanced routing."""
    job, at = found.what_if.job, found.what_if.job.labels.index(label)
    name = found.ran.alltoalls[at]
    forward, backward = (each.plan() for each in found.ran.orders[at])
    shape = replace(kind.shape, capacity=max(1, round(rows_GE.sum() / kind.shape.num_experts / len(rows_GE))))
    weights = max(1, shape.num_weights * kind.groups.ep // shape.num_experts)
    return Prices(
        shape,
        kind.groups,
        LayerPlan(forward, backward, name),
        job.costs_of(kind, name),
        moved_bytes=moved_bytes(weights, shape.dtype_bytes),
        alltoall=kind.alltoalls[name].planned,
        contention=job.contention,
        is_serial=job.is_serial,
        micro_batches=job.micro_batches,
    )


def run_from_trace(args: argparse.Namespace) -> int:
    """Read a run, and print predictions for other plans."""
    check_folders(args.json)
    found = calibrated(args.from_trace, args.cluster)
    data: dict[str, Any] = {
        "run": _print_run(found),
        "presets": _print_presets(found),
        "degrees": _print_degrees(found),
    }
    data |= {"elsewhere": print_elsewhere(found, args), "placement": print_placed(found, args)}
    for note in found.notes:
        print(f"\n{note}")
    if args.json is not None:
        args.json.write_text(json.dumps(data | {"notes": found.notes}, indent=1) + "\n")
        print(f"\neverything: {args.json}")
    return 0


def _print_run(found: Calibrated) -> dict[str, Any]:
    run, times, job = found.run, found.times, found.what_if.job
    parts = ", ".join(f"{name} {time_ms:.1f}" for name, time_ms in times.parts_ms.items())
    predicted_ms = found.step_of(found.predicted)
    off = predicted_ms / times.step_ms - 1
    print(f"run       {run.folder}: {run.name}, {_how(found.ran)}")
    print(f"measured  {times.step_ms:.1f} ms a step, the median of {times.num_steps} ({parts})")
    print(f"predicted {predicted_ms:.1f} ms for what ran, {off:+.1%}: the error of other predictions before correction")
    return {
        "folder": str(run.folder),
        "schedule": job.schedule,
        "ran": _as_data(found.ran),
        "measured_ms": times.step_ms,
        "parts_ms": times.parts_ms,
        "num_steps": times.num_steps,
        "predicted_ms": predicted_ms,
        "off": off,
        "gradient_factor": job.gradient_factor,
        "rest_ms": list(found.what_if.rest_ms),
    }


def _as_data(ran: Ran) -> dict[str, Any]:
    return {
        "layers": [
            [{"degree": each.degree, "order": each.links, "conversions": each.conversions} for each in pair]
            for pair in ran.orders
        ],
        "alltoalls": list(ran.alltoalls),
    }


def _how(ran: Ran) -> str:
    """Return a few words on how layers run; those of the first one, where they differ."""
    forward, backward = ran.orders[0]
    orders = "/".join(dict.fromkeys((forward.links, backward.links)))
    if "compute" in (forward.conversions, backward.conversions):
        orders += ", conversions beside experts"
    differ = " (first layer)" if len(set(zip(ran.orders, ran.alltoalls, strict=True))) > 1 else ""
    return f"{forward.degree} and {backward.degree} chunks, {orders}, {ran.alltoalls[0]}{differ}"


def _row(found: Calibrated, name: str, prediction: Prediction) -> dict[str, Any]:
    step_ms = found.step_of(prediction)
    return {
        "name": name,
        "step_ms": step_ms,
        "forward_ms": prediction.forward_ms,
        "backward_ms": prediction.backward_ms,
        "gain": found.times.step_ms / step_ms,
        "plan": _as_data(prediction.ran),
    }


def _print_presets(found: Calibrated) -> list[dict[str, Any]]:
    print("\na step by each schedule, with the numbers of chunks that it would choose")
    predictions = {name: found.what_if.by_schedule(name) for name in NAMES}
    data = [_row(found, *each) for each in predictions.items()]
    own = found.what_if.job.schedule
    rows = [
        (row["name"], f"{row['step_ms']:.1f}", f"{row['gain']:.2f}x", _how(each.ran), "ran" * (row["name"] == own))
        for row, each in zip(data, predictions.values(), strict=True)
    ]
    print_table(("schedule", "predicted ms", "over what ran", "how", ""), rows)
    return data


def _print_degrees(found: Calibrated) -> list[dict[str, Any]]:
    job, ran = found.what_if.job, found.ran.degrees
    if all(job.unchunked):
        print("\nits layers run in one chunk only")
        return []
    most = min(job.max_degree, max(MOST_DEGREE, *ran))
    degrees = [each for each in range(1, most + 1) if each <= MOST_DEGREE or each in ran]
    # Some have one degree for both phases.
    pairs = [(a, b) for a in degrees for b in degrees if a == b or not found.what_if.must_match]
    found_of = {pair: found.what_if.with_degrees(*pair) for pair in pairs}
    print(f"\na step by {job.schedule} with given chunks, in ms: of the forward down, of the backward across")
    steps = {pair: f"{found.step_of(each):.1f}" for pair, each in found_of.items()}
    rows = [(str(forward), *(steps.get((forward, each), "") for each in degrees)) for forward in degrees]
    print_table(("", *map(str, degrees)), rows)
    return [{"degrees": list(pair)} | _row(found, job.schedule, each) for pair, each in found_of.items()]
