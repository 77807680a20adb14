# SPDX-License-Identifier: Apache-2.0
"""Say in ``ds_fsmoe plan --from-trace`` what another plan would have given in a job that was recorded."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_fsmoe.files.whole_files import check_folders
from ds_fsmoe.offline.plan.other_ranks import print_elsewhere, print_placed
from ds_fsmoe.offline.plan.recorded_run import MOST_DEGREE, Calibrated, calibrated
from ds_fsmoe.terminal.tables import print_table

if TYPE_CHECKING:
    from ds_fsmoe.planning.what_if import Prediction, Ran


def add_from_trace(where: Any) -> None:
    """Add the arguments that name the folder of a run, and ranks that it did not have."""
    where.add_argument(
        "--from-trace",
        type=Path,
        metavar="DIR",
        help="the folder of a recorded run: what another plan would have given in that same job",
    )
    where.add_argument("--ranks-per-node", type=int, metavar="N", help="with --from-trace: so many ranks in a node")


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
        "layers": [[{"degree": each.degree, "order": each.links} for each in pair] for pair in ran.orders],
        "alltoalls": list(ran.alltoalls),
    }


def _how(ran: Ran) -> str:
    """Say in a few words how layers are run; the first one, where they differ."""
    forward, backward = ran.orders[0]
    orders = forward.links if forward.links == backward.links else f"{forward.links}/{backward.links}"
    differ = " (first layer)" if len(set(zip(ran.orders, ran.alltoalls, strict=True))) > 1 else ""
    return f"{forward.degree} and {backward.degree} chunks, {orders}, {ran.alltoalls[0]}{differ}"


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

    print("\na step by each schedule, with the numbers of chunks that it would choose")
    predictions = {name: found.what_if.by_schedule(name) for name in NAMES}
    own = found.what_if.job.schedule
    rows = [_cells(found, name, each, "ran" * (name == own)) for name, each in predictions.items()]
    print_table(("schedule", *HEADS, ""), rows)
    return [_row(found, *each) for each in predictions.items()]


def _print_degrees(found: Calibrated) -> list[dict[str, Any]]:
    job, ran = found.what_if.job, found.ran.degrees
    if all(job.uncut):
        print("\nits layers may not be cut: there is one number of chunks")
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
