# SPDX-License-Identifier: Apache-2.0
"""Reads and writes the folder of a run (``fsmoe.record.dir``); writers and readers share the names here.

``run.json`` says what ran; ``steps.jsonl`` has a line per optimizer step, ``routers.jsonl`` one per step whose routers
were observed, ``compared.jsonl`` one per step that was compared with its prediction, ``placement.jsonl`` one for each
layer whenever it was decided where its experts should be; ``plans.json`` has what was measured and decided;
``measured.json`` has what the layers are and what their tasks cost, so that they can be planned again, and
``cluster.json``, a cluster file as ``ds_fsmoe plan --cluster`` takes it, what collectives cost among other ranks;
``trace/`` has what each rank has traced.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_fsmoe.files import run_shapes
from ds_fsmoe.files.hiding import command_of, config_of
from ds_fsmoe.files.json_shapes import Shape, fits
from ds_fsmoe.files.whole_files import append_to, write_whole
from ds_fsmoe.untrusted import parsed, read_json, read_regular

RUN, STEPS, ROUTERS, COMPARED, PLANS = "run.json", "steps.jsonl", "routers.jsonl", "compared.jsonl", "plans.json"
PLACEMENT = "placement.jsonl"
MEASURED, CLUSTER = "measured.json", "cluster.json"
TRACE = "trace"
FILES = (RUN, STEPS, ROUTERS, COMPARED, PLANS, PLACEMENT, MEASURED, CLUSTER)
FORMAT = 1
STOCK = "stock"
"""The word that ``run.json`` has for a run of DeepSpeed's own engine and layers; for ours it names the schedule."""


def _plain(value: Any) -> Any:
    """Turn numpy's numbers and similar objects into Python's own types, and anything else into text."""
    return value.item() if hasattr(value, "item") else str(value)


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    write_whole(path, json.dumps(value, indent=1, default=_plain))


def append_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append each row to a file as a JSON line.

    Raises:
        OSError: it cannot be written.
    """
    append_to(path, "".join(json.dumps(row, default=_plain) + "\n" for row in rows))


@dataclass
class Run:
    """What a run's folder holds. Missing parts are empty, and what cannot be read is named in ``problems``."""

    folder: Path
    facts: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    routers: list[dict[str, Any]] = field(default_factory=list)
    compared: list[dict[str, Any]] = field(default_factory=list)
    placement: list[dict[str, Any]] = field(default_factory=list)
    plans: dict[str, Any] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)
    """What :func:`~ds_fsmoe.planning.recorded_data.job_from_data` reads."""
    problems: list[str] = field(default_factory=list)
    title: str = ""
    """The title, set where several runs would have the same name."""

    @property
    def is_stock(self) -> bool:
        """Whether DeepSpeed's own layers ran."""
        return self.facts.get("schedule") == STOCK

    @property
    def name(self) -> str:
        """The name of the run, in a word or two."""
        if self.title:
            return self.title
        return "stock DeepSpeed" if self.is_stock else f"ds_fsmoe, {self.facts.get('schedule', 'unknown schedule')}"


def check_run_folder(folder: Path) -> None:
    """Check that a run may be recorded in a folder: that what has the names of its files is of a run.

    Raises:
        FileExistsError: it is not; the message names the files.
    """
    found = [name for name in FILES if (folder / name).exists()]
    if found and not _is_of_a_run(folder / RUN):
        raise FileExistsError(f"it has {', '.join(found)}, which no recorded run has left: name another folder")


def clear_run(folder: Path) -> None:
    """Remove what an earlier run has left in a folder, and nothing else.

    Raises:
        OSError: it cannot be removed, or the files are of no run.
    """
    check_run_folder(folder)
    if (folder / RUN).exists():
        traces = folder / TRACE
        # The facts go last: while they are there, all else is known to be of a run.
        for old in (*traces.glob("rank*.json"), traces / "trace.json", *(folder / name for name in reversed(FILES))):
            old.unlink(missing_ok=True)


def _is_of_a_run(path: Path) -> bool:
    try:
        value = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(value, dict) and {"format", "schedule"} <= set(value)


class NoRunError(ValueError):
    """Raised when a folder has no run; the message says what it has."""


def read_run(folder: Path) -> Run:
    """Read what a folder has of a run, complete or not.

    Raises:
        NoRunError: none of the files of a run is there.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise NoRunError(f"{folder}: there is no such folder")
    run = Run(folder)
    run.facts = _without_secrets(_object(run, RUN, run_shapes.FACTS))
    run.plans = _object(run, PLANS, run_shapes.PLANS)
    run.measured = _object(run, MEASURED, {})
    run.steps = _lines(run, STEPS, run_shapes.STEP)
    run.routers = _lines(run, ROUTERS, run_shapes.ROUTER)
    run.compared = _lines(run, COMPARED, run_shapes.COMPARED)
    run.placement = _lines(run, PLACEMENT, run_shapes.PLACEMENT)
    if not (run.facts or run.steps or has_trace(folder)):
        names = ", ".join(sorted(each.name for each in folder.iterdir())[:8]) or "nothing"
        raise NoRunError(
            f"{folder}: no run has been recorded here: neither {RUN} nor {STEPS} nor a trace; it has {names}. "
            'A run leaves them in the folder that "fsmoe": {"record": {"dir": ...}} names'
        )
    if run.facts.get("format", FORMAT) != FORMAT:
        run.problems.append(f"{RUN}: format {run.facts['format']}, and this version reads {FORMAT}")
    if not run.facts:
        run.problems.append(f"{RUN} is missing: what ran is not known")
    numbers = [row["step"] for row in run.steps]
    back = next(((one, other) for one, other in itertools.pairwise(numbers) if other <= one), None)
    if back is not None:
        run.problems.append(
            f"{STEPS}: step {back[1]} comes after step {back[0]}: a checkpoint of an earlier step was loaded, or two "
            "jobs have written here; what is here is shown"
        )
    if not run.steps:
        run.problems.append(f"{STEPS} has no step: the run ended before its first one was written")
    elif "failed" in run.facts:
        run.problems.append(f"the run has failed, and what is here is shown: {run.facts['failed']}")
    elif run.facts and "ended" not in run.facts:
        run.problems.append("the run did not say that it has ended: it goes on, or was killed; what is here is shown")
    return run


def _without_secrets(facts: dict[str, Any]) -> dict[str, Any]:
    """Return what a run says of itself as this version would have written it; earlier ones have hidden less."""
    hidden = {name: config_of(facts[name]) for name in ("config", "block") if name in facts}
    if "command" in facts:
        hidden["command"] = command_of(facts["command"])
    return facts | hidden


def has_trace(folder: Path) -> bool:
    """Return whether ranks have left traces in a folder."""
    return any(trace_folder(folder).glob("rank*.json"))


def trace_folder(folder: Path) -> Path:
    """Return where ranks leave traces: in a folder of their own, or, if it has nothing else, in this folder."""
    return folder / TRACE if (folder / TRACE).is_dir() else folder


def _object(run: Run, name: str, fields: Mapping[str, Shape]) -> dict[str, Any]:
    """Read an object from a file, without the fields that differ from what a run writes."""
    path = run.folder / name
    try:
        value = read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        run.problems.append(f"{name} cannot be read: {error}")
        return {}
    if not isinstance(value, dict):
        run.problems.append(f"{name} is not what a run writes")
        return {}
    damaged = [field for field, shape in fields.items() if field in value and not fits(value[field], shape)]
    if damaged:
        run.problems.append(f"{name}: not what a run writes, and left out: {', '.join(damaged)}")
    return {field: each for field, each in value.items() if field not in damaged}


def _lines(run: Run, name: str, shape: Shape) -> list[dict[str, Any]]:
    """Return the lines of a file that have the form that a run writes."""
    try:
        # Not splitlines: inside of a text there may be characters that it takes for line breaks.
        lines = [each for each in read_regular(run.folder / name).split("\n") if each]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        run.problems.append(f"{name} cannot be read: {error}")
        return []
    rows, bad = [], 0
    for line in lines:
        try:
            row = parsed(line)
        except ValueError:
            row = None
        if fits(row, shape):
            rows.append(row)
        else:
            bad += 1
    if bad:
        # A run that was killed has left half a line at the end.
        run.problems.append(f"{name}: {bad} of {len(lines)} lines cannot be read, and are left out")
    return rows
