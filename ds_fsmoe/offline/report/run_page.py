# SPDX-License-Identifier: Apache-2.0
"""Assembles the page of recorded runs: the conclusion first, and last what ran and how configs differ. ``ds_fsmoe
report`` calls it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from ds_fsmoe.config.words import BLOCK, words_of
from ds_fsmoe.files.runs import Run
from ds_fsmoe.offline.report import conclusion, decisions, steps_section
from ds_fsmoe.offline.report.comparison import Turn, pair
from ds_fsmoe.offline.report.page import CONCLUSION, Page


def make_page(runs: Sequence[Run], turns: Sequence[Turn] = ()) -> Page:
    """Return a page with all records of the runs.

    Args:
        runs: one run, or stock's and ours.
        turns: the results of short alternating runs of both.
    """
    page = Page(" and ".join(run.name for run in runs))
    page.heading(CONCLUSION)
    for run in runs:
        for problem in run.problems:
            page.warn(f"{run.name}: {problem}")
    shown = [step for run in runs if (step := page.section(steps_section.trace, run)) is not None]
    page.section(conclusion.conclusion, runs, turns, shown)
    page.section(conclusion.gains, turns)
    page.section(steps_section.timelines, shown)
    for of_steps in (steps_section.step_times, steps_section.losses, steps_section.throughput, steps_section.memory):
        page.section(of_steps, runs)
    for run in runs:
        for of_run in (
            decisions.decided,
            decisions.trials,
            decisions.compared,
            decisions.loads,
            decisions.placement,
            decisions.measured_operations,
        ):
            page.section(of_run, run)
    page.section(config_difference, runs)
    page.section(what_ran, runs)
    return page


_NOT_SET, _NOT_RECORDED = "(not set)", "(not recorded)"


def what_ran(page: Page, runs: Sequence[Run]) -> None:
    """Write the section about what ran."""
    known = [run for run in runs if run.facts]
    if not known:
        return
    page.heading("What ran")
    rows = [(name, *(_fact(run, read) for run in known)) for name, read in _FACTS.items()]
    page.table(("", *(run.name for run in known)), rows, is_text=True)
    for run in known:
        if run.facts.get("command"):
            page.paragraph(f"The command of {run.name}, as rank 0 ran it:")
            page.code(shlex.join(portable(run.facts["command"], run.facts.get("cwd"))))


def portable(value: Any, cwd: str | None) -> Any:
    """Return a recorded value with paths relative to the folder of the run, as pages are shared.

    Args:
        value: a text, or lists and objects of texts.
        cwd: the folder; ``None``: not recorded. A path outside of it is reduced to its name.
    """
    if isinstance(value, Mapping):
        return {key: portable(each, cwd) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [portable(each, cwd) for each in value]
    name, sign, path = value.rpartition("=") if isinstance(value, str) else ("", "", "")
    if not path.startswith("/"):
        return value
    found = PurePosixPath(path)
    inside = cwd is not None and found.is_relative_to(cwd)
    return f"{name}{sign}{found.relative_to(cwd) if inside else f'.../{found.name}'}"


def _fact(run: Run, read: Any) -> str:
    found = read(run.facts)
    return _NOT_RECORDED if found is None else str(found)


def _batch(facts: Mapping[str, Any]) -> str | None:
    batch = facts.get("batch")
    if not batch:
        return None
    return (
        f"{batch.get('all')} samples per step: {batch.get('micro_per_rank')} per rank and micro-batch, "
        f"{batch.get('accumulation')} micro-batch(es)"
    )


_FACTS: dict[str, Any] = {
    "ranks": lambda facts: facts.get("world_size"),
    "device": lambda facts: facts.get("device"),
    "host": lambda facts: facts.get("host"),
    "MoE layers": lambda facts: len(facts["layers"]) if "layers" in facts else None,
    "precision": lambda facts: facts.get("dtype"),
    "ZeRO stage": lambda facts: facts.get("zero_stage"),
    "batch": _batch,
    "commit": lambda facts: facts.get("commit"),
    "ds_fsmoe": lambda facts: facts.get("ds_fsmoe"),
    "DeepSpeed": lambda facts: facts.get("deepspeed"),
    "torch": lambda facts: facts.get("torch"),
    "Python": lambda facts: facts.get("python"),
    "began": lambda facts: facts.get("began"),
    "ended": lambda facts: facts.get("ended", "no end recorded"),
}


def config_difference(page: Page, runs: Sequence[Run]) -> None:
    """Write the section about the fields in which the configs of two runs differ."""
    both = pair(runs) or (tuple(runs[:2]) if len(runs) == 2 else None)
    if both is None:
        return
    configs = [portable(_config_of(run), run.facts.get("cwd")) for run in both if _has_config(run)]
    if len(configs) < 2:
        return
    page.heading("Configuration difference")
    found = [(path, *(_shown(each) for each in values)) for path, *values in differences(*configs)]
    if found:
        page.table(("field", *(run.name for run in both)), found, is_text=True)
    else:
        page.paragraph("The configs are the same.")
    if not all(run.facts.get("config") for run in both):
        page.paragraph('Of the "fsmoe" block: the rest of the config was not recorded.')


def _config_of(run: Run) -> dict[str, Any]:
    """Return the recorded config of a run, with the block by today's words: other versions record others."""
    config = run.facts.get("config") or {BLOCK: run.facts["block"]}
    return config | ({BLOCK: words_of(config[BLOCK]).normalized} if BLOCK in config else {})


def _has_config(run: Run) -> bool:
    return bool(run.facts.get("config") or run.facts.get("block") is not None)


def differences(one: Any, other: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """Return (path, value, value) of every field in which two configs differ; unset values are None."""
    if isinstance(one, Mapping) and other is None:
        other = {}  # field by field all the same
    elif isinstance(other, Mapping) and one is None:
        one = {}
    if not (isinstance(one, Mapping) and isinstance(other, Mapping)):
        return [] if one == other else [(path, one, other)]
    found = []
    for key in [*one, *(each for each in other if each not in one)]:
        found += differences(one.get(key), other.get(key), f"{path}.{key}" if path else str(key))
    return found


def _shown(value: Any) -> str:
    return _NOT_SET if value is None else json.dumps(value, ensure_ascii=False)
