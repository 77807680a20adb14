# SPDX-License-Identifier: Apache-2.0
"""Reads a recorded run for ``ds_fsmoe plan --from-trace``: what it took, and predictions that are held against that."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_fsmoe.files.runs import Run
    from ds_fsmoe.offline.plan.traced_tasks import Traced, TracedTask
    from ds_fsmoe.planning.cluster import Cluster
    from ds_fsmoe.planning.recorded_costs import RecordedJob
    from ds_fsmoe.planning.what_if import Prediction, Ran, WhatIf

NO_GRADIENTS = (
    "gradients: what they cost is not known of this run, so each plan has them as they were, and presets that differ "
    "by gradients alone are not told apart"
)
MOST_DEGREE = 4
"""The largest degree in the table; the one that ran is in it, too."""


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
    """The cluster that says what collectives cost among other ranks; ``None``: it is not known."""
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


def calibrated(folder: Path, cluster_name: str | None = None) -> Calibrated:
    """Return a run with predictions for its job.

    Args:
        folder: the folder of the run.
        cluster_name: a cluster, for what the run itself does not tell.

    Raises:
        ValueError: no run, one of DeepSpeed's own layers, or one without what is needed; it says what to record.
    """
    from ds_fsmoe.files.runs import MEASURED, read_run
    from ds_fsmoe.offline.report.comparison import settled_after, times_of
    from ds_fsmoe.planning.recorded_data import job_from_data
    from ds_fsmoe.planning.what_if import ran_of

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
    cluster = _cluster_of(run, cluster_name)
    settled = settled_after(run)
    tasks, problem = _trace_of(run, settled)
    spans = _Spans(run, tasks, problem, settled)
    measured_ms = times.parts_ms["forward"], times.parts_ms["backward"]
    if job.is_measured:
        raw, what_if, notes = _by_measurements(job, spans, ran, measured_ms[1])
    elif tasks:
        raw, what_if, notes = _by_trace_alone(job, spans, ran, cluster)
    else:
        raise ValueError(
            f'--from-trace {folder}: nothing tells what tasks cost: {problem}; record one with "trace": '
            '{"enabled": true}, or a run with "autotune": {"enabled": true}'
        )
    of_run = run, ran, times.step_ms, times.parts_ms, times.num_steps
    what_if, others_ms = what_if.with_rest_of(measured_ms, ran), times.step_ms - sum(measured_ms)
    return Calibrated(*of_run, raw.as_ran(ran), raw.job, what_if, cluster, others_ms, notes)


@dataclass(frozen=True)
class _Spans:
    """Holds what a run has traced."""

    run: Run
    tasks: list[TracedTask]
    problem: str
    settled: int


def _by_measurements(job: RecordedJob, spans: _Spans, ran: Ran, backward_ms: float) -> tuple[WhatIf, WhatIf, list[str]]:
    """Return predictions by what the autotuner has measured, those corrected by the trace, and what to say of them."""
    from ds_fsmoe.offline.plan.traced_costs import corrected, with_slowdown_of
    from ds_fsmoe.planning.what_if import WhatIf

    raw = WhatIf(job)
    notes = [] if job.gradients_bytes else [NO_GRADIENTS]
    if not spans.tasks:
        said = (
            f"costs: as the autotuner has measured them; {spans.problem}, so what its predictions are off by is taken "
            "to be in what no plan changes"
        )
        return raw, raw, [said, *notes]
    found, traced = with_slowdown_of(job, spans.tasks, spans.settled)
    rest_ms = _rest_ms(spans.run, traced, found, knows_gradients=found.mode != "off")
    what_if = WhatIf(corrected(found, traced), rest_ms or raw.rest_ms).with_gradients_of(backward_ms, ran)
    said = (
        "costs: as the autotuner has measured them, each task corrected by what it took in the trace of rank 0, "
        "waiting for others included, and lanes slowed down as far as it shows; gradients by what is left of the "
        "backward"
    )
    return raw, what_if, [said, *notes]


def _by_trace_alone(
    job: RecordedJob, spans: _Spans, ran: Ran, cluster: Cluster | None
) -> tuple[WhatIf, WhatIf, list[str]]:
    """Return predictions by the trace of a run that measured nothing, twice, and what to say of them."""
    from ds_fsmoe.offline.plan.traced_costs import fit_costs
    from ds_fsmoe.offline.plan.traced_tasks import read_tasks
    from ds_fsmoe.planning.timeline import IDEAL
    from ds_fsmoe.planning.what_if import WhatIf

    contention = IDEAL if cluster is None else cluster.contention
    traced = read_tasks(spans.tasks, contention, spans.settled)
    costs, one_size = fit_costs(job, traced, cluster)
    # Beyond the chunks that were seen nothing tells what start-up adds up to.
    most = min(job.max_degree, max(MOST_DEGREE, *ran.degrees))
    found = replace(job.with_fitted(costs, contention), max_degree=most)
    what_if = WhatIf(found, _rest_ms(spans.run, traced, found, knows_gradients=False))
    said = "costs: fitted to the spans of the trace of rank 0, waiting for others included; nothing was measured"
    return what_if, what_if, [said, *_of_fit(one_size, cluster), NO_GRADIENTS]


def _cluster_of(run: Run, name: str | None) -> Cluster | None:
    """Return the cluster that was named, or the one that the run has measured."""
    from ds_fsmoe.files.runs import CLUSTER
    from ds_fsmoe.planning.cluster import load_cluster

    own = run.folder / CLUSTER
    if name is None and not own.is_file():
        return None
    return load_cluster(name or str(own))


def _trace_of(run: Run, settled: int) -> tuple[list[TracedTask], str]:
    """Return the traced tasks of the rank whose steps are logged, from the second step on, as the first one is slow;
    and why there are none.

    Some have to be of steps in which nothing is tried any more. A trace counts steps from 0, and the log from 1.
    """
    from ds_fsmoe.files.runs import trace_folder
    from ds_fsmoe.files.traces import rank_file, read_trace
    from ds_fsmoe.offline.plan.traced_tasks import traced_tasks

    path = rank_file(trace_folder(run.folder), 0)
    if not path.is_file():
        return [], "there is no trace of rank 0"
    try:
        events = read_trace(path)["traceEvents"]
    except (OSError, ValueError) as error:
        return [], f"the trace is of no use: {error}"
    found = [each for each in traced_tasks(events) if each.step > 0]
    if not any(each.step >= settled for each in found):
        return [], f"what is traced is before step {settled}, until which something was measured or tried"
    return found, ""


def _rest_ms(run: Run, traced: Traced, job: RecordedJob, knows_gradients: bool) -> tuple[float, float] | None:
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
            f"chunks: {kinds} had one size in the trace, which does not tell their start-up time. It is taken as 0, so "
            "more chunks seem to cost nothing. --cluster FILE tells it, or a run with two numbers of chunks"
        )
    if cluster is None:
        notes.append("lanes: how they slow each other down is in the spans, and taken to be the same in other plans")
    return notes
