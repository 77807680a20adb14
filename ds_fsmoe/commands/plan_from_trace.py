# SPDX-License-Identifier: Apache-2.0
"""Say in ``ds_fsmoe plan --from-trace`` what another plan would have given in a job that was recorded."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_fsmoe.commands.plan_other_ranks import print_elsewhere, print_placed
from ds_fsmoe.commands.tables import check_folders, print_table

if TYPE_CHECKING:
    from ds_fsmoe.files.runs import Run
    from ds_fsmoe.planning.cluster import Cluster
    from ds_fsmoe.planning.recorded_costs import RecordedJob
    from ds_fsmoe.planning.what_if import Prediction, Ran, WhatIf

MOST_DEGREE = 4
"""The largest degree in the table; the one that ran is in it, too."""


def add_from_trace(where: Any) -> None:
    """Add the arguments that name the folder of a run, and ranks that it did not have."""
    where.add_argument(
        "--from-trace",
        type=Path,
        metavar="DIR",
        help="the folder of a recorded run: what another plan would have given in that same job",
    )
    where.add_argument("--ranks-per-node", type=int, metavar="N", help="with --from-trace: so many ranks in a node")


@dataclass
class Calibrated:
    """A run, and the predictions for its job, held against what the run took."""

    run: Run
    ran: Ran
    step_ms: float
    """The time of a step, the median over those in which nothing was tried any more."""
    parts_ms: Mapping[str, float]
    """The parts of such a step: forward, backward, optimizer, rest."""
    num_steps: int
    predicted: Prediction
    """The prediction for what ran, as it was made before the run could correct it."""
    raw_job: RecordedJob
    """The job with the costs as they were before that."""
    what_if: WhatIf
    """Predicts other plans, with the costs that the run has corrected."""
    cluster: Cluster | None
    """What collectives cost among other ranks; ``None``: not known."""
    others_ms: float
    """The time of a step outside of its forwards and backwards: of the optimizer, and between steps."""
    notes: list[str] = field(default_factory=list)

    @property
    def predicted_ms(self) -> float:
        """The predicted time of a whole step as it was run, before corrections."""
        return self.predicted.step_ms + self.others_ms

    def step_of(self, prediction: Prediction) -> float:
        """Return the time of a whole step, with the optimizer."""
        return prediction.step_ms + self.others_ms


def run_from_trace(args: argparse.Namespace) -> int:
    """Read a run, and print what other plans would have given."""
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


def calibrated(folder: Path, cluster_name: str | None = None) -> Calibrated:
    """Return a run with predictions for its job.

    Args:
        folder: the folder of the run.
        cluster_name: a cluster, for what the run itself does not tell.

    Raises:
        ValueError: no run, one of DeepSpeed's own layers, or one without what is needed; it says what to record.
    """
    from ds_fsmoe.files.runs import MEASURED, read_run
    from ds_fsmoe.planning.recorded_data import job_from_data
    from ds_fsmoe.planning.timeline import IDEAL
    from ds_fsmoe.planning.traced_costs import corrected, fit_costs
    from ds_fsmoe.planning.traced_tasks import read_traces
    from ds_fsmoe.planning.what_if import WhatIf, ran_of
    from ds_fsmoe.reporting.comparison import settled_after, times_of

    run = read_run(folder)
    if run.is_stock:
        raise ValueError(f"--from-trace {folder}: DeepSpeed's own layers ran, which have no tasks to plan with")
    if not run.measured:
        raise ValueError(f"--from-trace {folder}: it has no {MEASURED}, which runs of this version leave there")
    times = times_of(run)
    if times is None or "forward" not in times.parts_ms:
        raise ValueError(f"--from-trace {folder}: no step is told in parts after those in which something was tried")
    try:
        job = job_from_data(run.measured)
        ran = ran_of(job, run.plans.get("layers", ()))
    except ValueError as error:
        raise ValueError(f"--from-trace {folder}: {MEASURED}: {error}") from error
    notes = []
    cluster = _cluster_of(run, cluster_name)
    settled = settled_after(run)
    ranks, problem = _traces_of(run, settled)
    parts_ms = times.parts_ms
    measured_ms = parts_ms["forward"], parts_ms["backward"]
    others_ms = times.step_ms - sum(measured_ms)
    if job.is_measured:
        raw = WhatIf(job)
        predicted = raw.as_ran(ran)
        if ranks:
            traced = read_traces(ranks, job.contention, settled)
            rest_ms = _rest_ms(run, traced, len(job.labels), job.micro_batches, knows_gradients=job.mode != "off")
            what_if = WhatIf(corrected(job, traced), rest_ms or raw.rest_ms).with_gradients_of(measured_ms[1], ran)
            notes.append(
                "costs: as the autotuner has measured them, each task corrected by what it took in the trace, on the "
                "rank that waits least; gradients by what is left of the backward"
            )
        else:
            what_if = raw
            notes.append(
                f"costs: as the autotuner has measured them; {problem}, so what its predictions are off by is taken to "
                "be in what no plan changes"
            )
    elif ranks:
        contention = IDEAL if cluster is None else cluster.contention
        traced = read_traces(ranks, contention, settled)
        costs, one_size = fit_costs(job, traced, cluster)
        # Beyond the chunks that were seen nothing tells what start-up adds up to.
        most = min(job.max_degree, max(MOST_DEGREE, *ran.degrees))
        job = replace(job.with_fitted(costs, contention), max_degree=most)
        rest_ms = _rest_ms(run, traced, len(job.labels), job.micro_batches, knows_gradients=False)
        what_if = WhatIf(job, rest_ms)
        raw, predicted = what_if, what_if.as_ran(ran)
        notes.append("costs: fitted to the spans of the trace, on the rank that waits least; nothing was measured")
        notes += _of_fit(one_size, cluster)
    else:
        raise ValueError(
            f'--from-trace {folder}: nothing tells what tasks cost: {problem}; record one with "trace": '
            '{"enabled": true}, or a run with "autotune": {"enabled": true}'
        )
    what_if = what_if.with_rest_of(measured_ms, ran)
    if not job.gradients_bytes:
        notes.append(
            "gradients: what they cost is not known of this run, so each plan has them as they were, and presets that "
            "differ by gradients alone are not told apart"
        )
    of_run = run, ran, times.step_ms, parts_ms, times.num_steps
    return Calibrated(*of_run, predicted, raw.job, what_if, cluster, others_ms, notes)


def _cluster_of(run: Run, name: str | None) -> Cluster | None:
    """Return the cluster that was named, or the one that the run has measured."""
    from ds_fsmoe.files.runs import CLUSTER
    from ds_fsmoe.planning.cluster import load_cluster

    own = run.folder / CLUSTER
    if name is None and not own.is_file():
        return None
    return load_cluster(name or str(own))


def _traces_of(run: Run, settled: int) -> tuple[dict[int, Any], str]:
    """Return rank -> its traced tasks, from the second step on, as the first one is slow; and why there are none.

    Some have to be of steps in which nothing is tried any more. A trace counts steps from 0, and the log from 1.
    """
    from ds_fsmoe.files.runs import trace_folder
    from ds_fsmoe.files.traces import read_trace
    from ds_fsmoe.planning.traced_tasks import traced_tasks

    paths = sorted(trace_folder(run.folder).glob("rank*.json"))
    if not paths:
        return {}, "there is no trace"
    found = {}
    for number, path in enumerate(paths):
        try:
            events = read_trace(path)["traceEvents"]
        except (OSError, ValueError) as error:
            return {}, f"the trace is of no use: {error}"
        found[number] = [each for each in traced_tasks(events) if each.step > 0]
    if not all(any(each.step >= settled for each in tasks) for tasks in found.values()):
        return {}, f"what is traced is before step {settled}, until which something was measured or tried"
    return found, ""


def _rest_ms(
    run: Run, traced: Any, num_layers: int, micro_batches: int, knows_gradients: bool
) -> tuple[float, float] | None:
    """Return what a forward and a backward of one micro batch take outside of the runs of layers; where the cost of
    gradients is known, without those that are sent when the backward is over."""
    rows = {row["step"]: row for row in run.steps}
    pairs = [
        (rows[step + 1]["forward_ms"] - of_runs[0], rows[step + 1]["backward_ms"] - of_runs[1])
        for step, of_runs in traced.runs_ms.items()
        if "forward_ms" in rows.get(step + 1, {}) and "backward_ms" in rows[step + 1]
    ]
    if not pairs:
        return None
    forward_ms, backward_ms = (max(0.0, statistics.median(each) / micro_batches) for each in zip(*pairs, strict=True))
    if knows_gradients:
        behind_ms = 2 * forward_ms if traced.behind_ms is None else traced.behind_ms * num_layers
        backward_ms = min(backward_ms, behind_ms)
    return forward_ms, backward_ms


def _of_fit(one_size: Iterable[str], cluster: Cluster | None) -> list[str]:
    notes = []
    if kinds := ", ".join(one_size):
        notes.append(
            f"degrees: {kinds} had one size in the trace, so nobody can tell what of their time is start-up: it is "
            "taken to be none, and more chunks seem to cost nothing. --cluster FILE says it, or a run with two degrees"
        )
    if cluster is None:
        notes.append("lanes: how they slow each other down is in the spans, and taken to be the same in other plans")
    return notes


def _print_run(found: Calibrated) -> dict[str, Any]:
    run, parts = found.run, ", ".join(f"{name} {time_ms:.1f}" for name, time_ms in found.parts_ms.items())
    off = found.predicted_ms / found.step_ms - 1
    print(f"run       {run.folder}: {run.name}, {_how(found.ran)}")
    print(f"measured  {found.step_ms:.1f} ms a step, the median of {found.num_steps} ({parts})")
    print(
        f"predicted {found.predicted_ms:.1f} ms for what ran, {off:+.1%}: what other predictions may be off by before "
        "they are corrected"
    )
    return {
        "folder": str(run.folder),
        "schedule": found.what_if.job.schedule,
        "ran": _as_data(found.ran),
        "measured_ms": found.step_ms,
        "parts_ms": dict(found.parts_ms),
        "num_steps": found.num_steps,
        "predicted_ms": found.predicted_ms,
        "off": off,
        "gradient_factor": found.what_if.job.gradient_factor,
        "rest_ms": list(found.what_if.rest_ms),
    }


def _as_data(ran: Ran) -> dict[str, Any]:
    return {
        "layers": [
            [{"degree": each.degree, "order": each.links, "late_dw": each.late_dw} for each in pair]
            for pair in ran.orders
        ],
        "alltoalls": list(ran.alltoalls),
    }


def _how(ran: Ran) -> str:
    """Say in a few words how layers are run; the first one, where they differ."""
    forward, backward = ran.orders[0]
    late = f", {backward.late_dw} late dW" if backward.late_dw else ""
    orders = forward.links if forward.links == backward.links else f"{forward.links}/{backward.links}"
    differ = " (first layer)" if len(set(zip(ran.orders, ran.alltoalls, strict=True))) > 1 else ""
    return f"{forward.degree} and {backward.degree} chunks, {orders}{late}, {ran.alltoalls[0]}{differ}"


def _cells(found: Calibrated, name: str, prediction: Prediction, note: str = "") -> tuple[str, ...]:
    step_ms = found.step_of(prediction)
    return (name, f"{step_ms:.1f}", f"{found.step_ms / step_ms:.2f}x", _how(prediction.ran), note)


def _row(found: Calibrated, name: str, prediction: Prediction) -> dict[str, Any]:
    step_ms = found.step_of(prediction)
    return {
        "name": name,
        "step_ms": step_ms,
        "forward_ms": prediction.forward_ms,
        "backward_ms": prediction.backward_ms,
        "gain": found.step_ms / step_ms,
        "plan": _as_data(prediction.ran),
    }


HEADS = ("predicted ms", "over what ran", "how")


def _print_presets(found: Calibrated) -> list[dict[str, Any]]:
    from ds_fsmoe.planning.presets import NAMES

    print("\na step by each schedule, with the degrees that it would choose")
    predictions = {name: found.what_if.by_schedule(name) for name in NAMES}
    own = found.what_if.job.schedule
    rows = [_cells(found, name, each, "ran" * (name == own)) for name, each in predictions.items()]
    print_table(("schedule", *HEADS, ""), rows)
    return [_row(found, *each) for each in predictions.items()]


def _print_degrees(found: Calibrated) -> list[dict[str, Any]]:
    job, ran = found.what_if.job, found.ran.degrees
    if all(job.uncut):
        print("\nits layers may not be cut: there is one degree")
        return []
    most = min(job.max_degree, max(MOST_DEGREE, *ran))
    degrees = [each for each in range(1, most + 1) if each <= MOST_DEGREE or each in ran]
    # Some have one degree for both phases.
    pairs = [(a, b) for a in degrees for b in degrees if a == b or not found.what_if.must_match]
    found_of = {pair: found.what_if.with_degrees(*pair) for pair in pairs}
    print(f"\na step by {job.schedule} with given degrees, in ms: chunks of the forward down, of the backward across")
    steps = {pair: f"{found.step_of(each):.1f}" for pair, each in found_of.items()}
    rows = [(str(forward), *(steps.get((forward, each), "") for each in degrees)) for forward in degrees]
    print_table(("", *map(str, degrees)), rows)
    return [{"degrees": list(pair)} | _row(found, job.schedule, each) for pair, each in found_of.items()]
