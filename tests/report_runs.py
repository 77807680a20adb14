# SPDX-License-Identifier: Apache-2.0
"""Runs as they are recorded, made up for tests of the page that shows them."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

from ds_fsmoe.cli import main
from ds_fsmoe.files import runs as run_files
from ds_fsmoe.files.traces import TracedRun, rank_file, trace_of, write_trace
from ds_fsmoe.planning.schedule import Lane, Task

TASKS = [Task("A2A_IN", Lane.INTER), Task("EXPERT", Lane.COMPUTE, after=(0,)), Task("A2A_OUT", Lane.INTER, after=(1,))]


def record(folder: Path, schedule: str, step_ms: float = 20.0, num_steps: int = 20, **facts: Any) -> Path:
    """A run as one is recorded."""
    folder.mkdir(parents=True)
    about = {"format": 1, "schedule": schedule, "world_size": 2, "device": "a <CPU>", "host": "here", "layers": {}}
    about |= {"command": ["python", "train it.py", "--lr=<1>"], "commit": "abc1234, with changes", "token_ranks": 2}
    about |= {"config": {"zero_optimization": {"stage": 1}, "fsmoe": {"enabled": schedule != run_files.STOCK}}}
    run_files.write_json(folder / run_files.RUN, about | {"ended": "now"} | facts)
    rows = [
        {"step": n, "samples": 8 * n, "loss": 3.0 / n, "step_ms": step_ms, "forward_ms": 5.0, "backward_ms": 9.0}
        for n in range(1, num_steps + 1)
    ]
    more = {"optimizer_ms": 1.0, "tokens_of_rank": 512, "memory_bytes": 2 << 30, "memory_peak_bytes": 3 << 30}
    run_files.append_lines(folder / run_files.STEPS, [each | more for each in rows])
    for rank in range(2):
        spans_ns = [(0, 2_000_000), (2_000_000, 7_000_000), (7_000_000, 9_000_000)]
        runs = [TracedRun(0, "L00/forward", 5, TASKS, 0, spans_ns)]
        (folder / run_files.TRACE).mkdir(exist_ok=True)
        trace = trace_of(rank, "here", runs, {"world_size": 2, "steps": [5], "complete": True})
        write_trace(trace, rank_file(folder / run_files.TRACE, rank))
    return folder


def placement_rows() -> list[dict[str, Any]]:
    """What was decided twice about two layers: the second one changes once."""
    stays = {"rows_E": [5.0, 4.0, 5.0, 4.0], "num_swaps": 0, "num_replicas": 0, "gain_ms": 0.0, "why": "stays <so>"}
    stays |= {"balance": 1.25, "expected_balance": 1.25}
    places = {"before": [0, 1, -1, 2, 3, -1], "after": [0, 2, -1, 1, 3, 0], "node_of_rank": [0, 0]}
    moves = {"rows_E": [9.0, 8.0, 2.0, 1.0], "balance": 1.7, "expected_balance": 1.15, "num_swaps": 1}
    moves |= {"num_replicas": 1, "gain_ms": 2.75, "why": "1 expert moves", "places": places}
    now = stays | {"balance": 1.35, "expected_balance": 1.35}
    rows = [{"layer": "L00", **stays}, {"layer": "L01", **moves}, {"layer": "L00", **stays}, {"layer": "L01", **now}]
    return [{"step": 10 if at < 2 else 20} | row for at, row in enumerate(rows)]


def record_details(folder: Path) -> None:
    """What ours tells besides."""
    load = {"tokens_E": [7.0, 1.0, 3.0], "dropped_share": 0.125, "aux_loss": 1.5, "entropy": None}
    run_files.append_lines(folder / run_files.ROUTERS, [{"step": step, "layers": {"L00": load}} for step in (10, 20)])
    run_files.append_lines(folder / run_files.PLACEMENT, placement_rows())
    both = {"predicted_ms": 4.0, "measured_ms": 5.0}
    compared = {"step": 10, "whole": both, "rest": both, "phases": {"L00/forward": both, "L00/backward": both}}
    run_files.append_lines(folder / run_files.COMPARED, [compared | {"kinds": {}, "busy": {"compute": 0.5}}])
    fit = {"operation": "all-to-all", "unit": "byte", "sizes": [1e4, 2e4], "times_ms": [1.0, 2.0]}
    fit |= {"line_ms": [1.0, 2.0], "lines": [{"alpha_ms": 0.1, "beta_ms": 1e-4}]}
    fit |= {"typical_share": 0.3, "worst_share": 0.5, "is_good": False}
    choice = {"layers": ["L00", "L01"], "phase": "backward", "degree": 3, "order": "reduce_first", "asked": None}
    choice |= {"late_dw": 1}  # of 0.2.0, and ignored
    choice |= {"predicted_ms": 4.0, "runner_up": 2, "runner_up_ms": 4.5, "uncut_ms": 6.0}
    choice |= {"bound_by": "the link <between> nodes"}
    step = {"chosen_ms": 18.0, "deepspeed_ms": 27.0, "bound_ms": 15.0, "gradients_ms": 2.0, "exposed_ms": 0.5}
    plans = {"layers": [], "choices": [choice], "fits": [fit], "step": step, "num_measured": 8, "took_s": 2.0}
    tried = {"name": "L00.. 3 paper and 3 paper", "step_ms": 17.0, "num_steps": 4, "is_kept": True}
    tried["times_ms"] = [16.5, 17.0, 17.0, 18.0]
    plans["trials"] = [[tried, tried | {"name": "uncut", "step_ms": 19.5, "is_kept": False}], []]
    plans |= {"hints": ["<more> micro-batches"], "gain": {"ratio": 1.15, "low": 1.1, "high": 1.2, "num_turns": 5}}
    run_files.write_json(folder / run_files.PLANS, plans)


def record_both(folder: Path) -> Path:
    """A folder with a run of stock and one of ours that tells all it can."""
    record(folder / "stock", run_files.STOCK, step_ms=30.0)
    record_details(record(folder / "ours", "best"))
    return folder


def page_of(folder: Path) -> str:
    """The page that the command line makes of a run, or of two."""
    assert main(["report", str(folder)]) == 0
    return (folder / "report.html").read_text()


def charts_of(page: str) -> dict[str, dict[str, Any]]:
    """The charts of a page, by what they say that they show."""
    places = re.findall(r'data-spec="([^"]+)" role="img" aria-label="([^"]*)"', page)
    return {
        html.unescape(about): json.loads(re.search(rf'(?s)id="{name}">(.*?)</script>', page)[1])
        for name, about in places
    }


def without_programs(page: str) -> str:
    """A page without what draws its charts."""
    return re.sub(r"(?s)<script>.*?</script>", "", page)
