# SPDX-License-Identifier: Apache-2.0
"""Reads and writes the folder of a run (``fsmoe.record.dir``); writers and readers share the names here.

The record and the call observer write, ``ds_fsmoe/offline`` reads. The files are:

``run.json`` the facts of the run; ``steps.jsonl`` a line per optimizer step; ``routers.jsonl`` one per step whose
routers were observed; ``compared.jsonl`` one per step that was compared with its prediction; ``placement.jsonl`` one
per layer and decision on expert placement; ``plans.json`` the measurements and decisions; ``measured.json`` the layers
and the costs of their tasks, for planning them again; ``cluster.json`` a cluster file for ``ds_fsmoe plan --cluster``,
with the costs of collectives among other ranks; ``trace/`` each rank's trace.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, create_model

from ds_fsmoe.files.hiding import command_of, config_of
from ds_fsmoe.files.whole_files import append_to, write_whole
from ds_fsmoe.shapes import Items, Known, Named, Number, Whole, error_in, fits
from ds_fsmoe.untrusted import parsed, read_json, read_regular

RUN, STEPS, ROUTERS, COMPARED, PLANS = "run.json", "steps.jsonl", "routers.jsonl", "compared.jsonl", "plans.json"
PLACEMENT = "placement.jsonl"
MEASURED, CLUSTER = "measured.json", "cluster.json"
TRACE = "trace"
FILES = (RUN, STEPS, ROUTERS, COMPARED, PLANS, PLACEMENT, MEASURED, CLUSTER)
FORMAT = 1
STOCK = "stock"
"""The word that ``run.json`` has for a run of DeepSpeed's own engine and layers; for ours it names the schedule."""


# ---- the shapes of what is in them, as far as a page reads it

_Numbers = Annotated[Items[Number], Field(min_length=1)]
_Places = Annotated[Items[Annotated[int, Field(ge=-1, lt=1 << 63)]], Field(min_length=1)]
"""The expert of each place; -1: it is empty."""
_BOTH = create_model("_BOTH", __base__=Known, predicted_ms=(Number, ...), measured_ms=(Number, ...))
_LOAD = create_model(
    "_LOAD",
    __base__=Known,
    tokens_E=(_Numbers, ...),
    dropped_share=(Number, ...),
    aux_loss=(Number, ...),
    entropy=(Number | None, ...),
)
STEP = create_model(
    "STEP",
    __base__=Known,
    step=(Whole, ...),
    loss=(Number | None, None),
    **dict.fromkeys(("step_ms", "forward_ms", "backward_ms", "optimizer_ms"), (Number, 0)),
    **dict.fromkeys(("samples", "tokens_of_rank", "memory_bytes", "memory_peak_bytes"), (Whole, 0)),
    is_tuning=(bool, False),
)
ROUTER = create_model("ROUTER", __base__=Known, step=(Whole, ...), layers=(Named[_LOAD], ...))
COMPARISON = create_model(
    "COMPARISON",
    __base__=Known,
    step=(Whole, ...),
    whole=(_BOTH, ...),
    rest=(_BOTH, ...),
    phases=(Named[_BOTH], ...),
    busy=(Named[Number], {}),
)
_PLACES = create_model(
    "_PLACES",
    __base__=Known,
    before=(_Places, ...),
    after=(_Places, ...),
    node_of_rank=(Annotated[Items[Whole], Field(min_length=1)], ...),
)
DECIDED = create_model(
    "DECIDED",
    __base__=Known,
    step=(Whole, ...),
    layer=(str, ...),
    rows_E=(_Numbers, ...),
    balance=(Number, ...),
    expected_balance=(Number, ...),
    num_swaps=(Whole, ...),
    num_replicas=(Whole, 0),  # of runs of version 0.2.0
    gain_ms=(Number | None, ...),
    why=(str, ...),
    places=(_PLACES, None),
)
_CHOICE = create_model(
    "_CHOICE",
    __base__=Known,
    layers=(Annotated[Items[str], Field(min_length=1)], ...),
    phase=(str, ...),
    degree=(Whole, ...),
    asked=(Whole | None, ...),
    order=(str, ...),
    predicted_ms=(Number, ...),
    runner_up=(Whole | str | None, ...),
    runner_up_ms=(Number | None, ...),
    uncut_ms=(Number, ...),
    bound_by=(str, ""),
)
_LAYER = create_model(
    "_LAYER", __base__=Known, layer=(str, ...), phase=(str, ...), degree=(Whole, ...), order=(str, ...)
)
_LINE = create_model("_LINE", __base__=Known, alpha_ms=(Number, ...), beta_ms=(Number, ...))
_FIT = create_model(
    "_FIT",
    __base__=Known,
    operation=(str, ...),
    unit=(str, ...),
    **dict.fromkeys(("sizes", "times_ms", "line_ms"), (Items[Number], ...)),
    lines=(Items[_LINE], ...),
    typical_share=(Number, ...),
    worst_share=(Number, ...),
    is_good=(bool, ...),
)
_TRIED = create_model(
    "_TRIED",
    __base__=Known,
    name=(str, ...),
    step_ms=(Number, ...),
    num_steps=(Whole, ...),
    is_kept=(bool, ...),
    is_baseline=(bool, False),
    times_ms=(Items[Number], []),
)
_PREDICTED = create_model(
    "_PREDICTED",
    __base__=Known,
    **dict.fromkeys(("chosen_ms", "deepspeed_ms", "bound_ms", "gradients_ms", "exposed_ms"), (Number, ...)),
    is_bound=(bool, False),
)
_GAIN = create_model(
    "_GAIN", __base__=Known, **dict.fromkeys(("ratio", "low", "high"), (Number, ...)), num_turns=(Whole, ...)
)
PLANNED = create_model(
    "PLANNED",
    __base__=Known,
    chosen=(Named[str], {}),
    choices=(Items[_CHOICE], []),
    layers=(Items[_LAYER], []),
    step=(_PREDICTED | None, None),
    **dict.fromkeys(("settled_at", "num_measured", "num_plans", "num_steps"), (Whole, 0)),
    took_s=(Number, 0),
    is_stock=(bool, False),
    fits=(Items[_FIT], []),
    trials=(Items[Items[_TRIED]], []),
    gain=(_GAIN | None, None),
    hints=(Items[str], []),
)
FACTS = create_model(
    "FACTS",
    __base__=Known,
    **dict.fromkeys(("schedule", "memory", "cwd"), (str, "")),
    **dict.fromkeys(("layers", "batch", "config", "block"), (dict, {})),
    chosen=(Named[str], {}),
    command=(Items[str], []),
    commit=(str | None, None),
    token_ranks=(Whole, 0),
)


def _plain(value: Any) -> Any:
    """Return numpy's numbers and similar objects as Python's own types, and other objects as text."""
    return value.item() if hasattr(value, "item") else str(value)


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, completely or not at all.

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
    """Represents the content of a run's folder. Missing parts are empty, and unreadable ones are listed in
    ``problems``."""

    folder: Path
    facts: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    routers: list[dict[str, Any]] = field(default_factory=list)
    compared: list[dict[str, Any]] = field(default_factory=list)
    placement: list[dict[str, Any]] = field(default_factory=list)
    plans: dict[str, Any] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)
    """What :func:`~ds_fsmoe.planning.job.recorded_costs.job_from_data` reads."""
    problems: list[str] = field(default_factory=list)
    title: str = ""
    """The title, set where several runs would have the same name."""

    @property
    def is_stock(self) -> bool:
        """Return True if DeepSpeed's own layers ran."""
        return self.facts.get("schedule") == STOCK

    @property
    def name(self) -> str:
        """Return the name of the run, in a word or two."""
        if self.title:
            return self.title
        return "stock DeepSpeed" if self.is_stock else f"ds_fsmoe, {self.facts.get('schedule', 'unknown schedule')}"


def check_run_folder(folder: Path) -> None:
    """Check that a run may be recorded in a folder: existing files of its names are from a run.

    Raises:
        FileExistsError: a file is from no run; names the files.
    """
    found = [name for name in FILES if (folder / name).exists()]
    if found and not _is_of_a_run(folder / RUN):
        raise FileExistsError(f"contains {', '.join(found)}, which are not from a recorded run: choose another folder")


def clear_run(folder: Path) -> None:
    """Remove only the files of an earlier run from a folder.

    Raises:
        OSError: a file cannot be removed, or the files are of no run.
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
    """Says that a folder has no run; the message lists its content."""


def read_run(folder: Path) -> Run:
    """Read a run from its folder, complete or not.

    Raises:
        NoRunError: the folder has none of the files of a run.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise NoRunError(f"{folder}: no such folder")
    run = Run(folder)
    run.facts = _without_secrets(_object(run, RUN, FACTS))
    run.plans = _object(run, PLANS, PLANNED)
    run.measured = _object(run, MEASURED, Known)
    run.steps = _lines(run, STEPS, STEP)
    run.routers = _lines(run, ROUTERS, ROUTER)
    run.compared = _lines(run, COMPARED, COMPARISON)
    run.placement = _lines(run, PLACEMENT, DECIDED)
    if not (run.facts or run.steps or has_trace(folder)):
        names = ", ".join(sorted(each.name for each in folder.iterdir())[:8]) or "nothing"
        raise NoRunError(
            f"{folder}: no run has been recorded here: {RUN}, {STEPS} and traces are missing (found: {names}). "
            'Give the folder that is "dir" in the run\'s "fsmoe": {"record": {"dir": ...}}'
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
    """Return the facts of a run without secrets, also those that earlier versions did not remove."""
    hidden = {name: config_of(facts[name]) for name in ("config", "block") if name in facts}
    if "command" in facts:
        hidden["command"] = command_of(facts["command"])
    return facts | hidden


def has_trace(folder: Path) -> bool:
    """Return True if a folder has traces of ranks."""
    return any(trace_folder(folder).glob("rank*.json"))


def trace_folder(folder: Path) -> Path:
    """Return the folder of the ranks' traces: the ``trace`` folder inside, or, without one, this folder."""
    return folder / TRACE if (folder / TRACE).is_dir() else folder


def _read(run: Run, name: str, read: Callable[[Path], Any], nothing: Any) -> Any:
    """Return the content of a file; ``nothing`` if it is missing or unreadable, which is recorded as a problem."""
    try:
        return read(run.folder / name)
    except FileNotFoundError:
        return nothing
    except (OSError, ValueError) as error:
        run.problems.append(f"{name} cannot be read: {error}")
        return nothing


def _object(run: Run, name: str, shape: type[BaseModel]) -> dict[str, Any]:
    """Read an object from a file, without fields that no run writes."""
    value = _read(run, name, read_json, {})
    if not isinstance(value, dict):
        run.problems.append(f"{name} is not what a run writes")
        return {}
    if (error := error_in(value, shape)) is None:
        return value
    damaged = {str(each["loc"][0]): None for each in error.errors(include_url=False, include_input=False)}
    run.problems.append(f"{name}: not what a run writes, and left out: {', '.join(damaged)}")
    return {field: each for field, each in value.items() if field not in damaged}


def _lines(run: Run, name: str, shape: type[BaseModel]) -> list[dict[str, Any]]:
    """Return the lines of a file that have the form of a run's lines."""
    # Not splitlines: inside of a text there may be characters that it takes for line breaks.
    lines = [each for each in _read(run, name, read_regular, "").split("\n") if each]
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
