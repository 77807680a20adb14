# SPDX-License-Identifier: Apache-2.0
"""How sure the ratio of two runs is, and what may be behind it."""

from __future__ import annotations

import json
import random
from pathlib import Path

from ds_fsmoe.files.runs import Run
from ds_fsmoe.offline.report.comparison import RunTimes, disturbance, ratio_interval, reasons


def noisy(mean_ms: float, num_steps: int, share: float, seed: int) -> list[float]:
    draw = random.Random(seed)
    return [mean_ms * (1 + draw.gauss(0, share)) for _ in range(num_steps)]


def test_the_interval_holds_the_ratio_and_grows_with_the_noise() -> None:
    calm = [ratio_interval(noisy(30, 60, 0.02, seed), noisy(20, 60, 0.02, -seed)) for seed in range(1, 21)]
    # Of 20, a 95% interval misses one; with 12 blocks a bootstrap misses some more.
    assert sum(each.low < 1.5 < each.high for each in calm) >= 16
    wild = ratio_interval(noisy(30, 60, 0.3, 1), noisy(20, 60, 0.3, -1))
    assert wild.high - wild.low > 3 * (calm[0].high - calm[0].low)
    same = ratio_interval([10.0] * 60, [5.0] * 60)
    assert (same.low, same.high) == (2, 2)


def test_few_steps_have_no_interval() -> None:
    assert ratio_interval([10.0] * 49, [5.0] * 60) is None
    assert ratio_interval([10.0] * 50, [5.0] * 50) is not None
    assert ratio_interval([], []) is None


def run_with_trace(folder: Path, task_us: float, num_ranks: int = 2) -> Run:
    """Two steps with one phase each: an all-to-all and an expert."""
    for rank in range(num_ranks):
        events = []
        for step in (7, 8):
            for index, (kind, lane) in enumerate((("A2A_IN", "inter"), ("EXPERT", "compute"))):
                args = {"layer": "L00", "phase": "fwd", "step": step, "run": 0, "index": index, "kind": kind}
                args |= {"chunk": 0, "lane": lane, "waits_for": list(range(index))}
                ts = step * 1e6 + index * task_us
                args |= {"ms": task_us / 1e3}
                span = {"ph": "X", "cat": "measured", "name": kind, "ts": ts, "dur": task_us, "pid": rank}
                events.append(span | {"args": args})
        (folder / f"rank{rank}.json").write_text(json.dumps({"traceEvents": events, "otherData": {"steps": [7, 8]}}))
    return Run(folder)


def test_short_tasks_and_little_traffic_are_named(tmp_path: Path) -> None:
    ours = Run(tmp_path, plans={"choices": [{}]})
    tiny = reasons(run_with_trace(tmp_path, 200), ours, RunTimes(10, 10.0, {}))
    assert "takes 0.20 ms on average" in tiny[0]
    # One all-to-all of 0.2 ms in a step of 10 ms.
    assert "is 2% of a step of stock, so hiding all of it would make a step 1.02 times as fast at most" in tiny[1]
    assert reasons(run_with_trace(tmp_path, 5000), ours, RunTimes(10, 10.0, {})) == []


def test_without_a_trace_or_with_one_that_cannot_be_read_nothing_is_made_up(tmp_path: Path) -> None:
    ours = Run(tmp_path, plans={"choices": [{}]})
    assert reasons(Run(tmp_path), ours, RunTimes(10, 10.0, {})) == []
    for text in ("{", "[]", '{"traceEvents": 3}', '{"traceEvents": [], "otherData": {}}'):
        (tmp_path / "rank0.json").write_text(text)
        assert reasons(Run(tmp_path), ours, RunTimes(10, 10.0, {})) == []


def test_a_part_that_is_the_same_in_both_tells_whether_the_machine_was() -> None:
    def times(step_ms: float, optimizer_ms: float) -> RunTimes:
        return RunTimes(20, step_ms, {"optimizer": optimizer_ms})

    assert "took 12.4 and 4.79 ms: the machine was not equally busy" in disturbance(
        times(42.6, 12.4), times(18.0, 4.79)
    )
    assert disturbance(times(42.6, 4.9), times(18.0, 4.79)) is None
    # Too small to say anything.
    assert disturbance(times(42.6, 0.4), times(18.0, 0.1)) is None
    assert disturbance(RunTimes(20, 10.0, {}), RunTimes(20, 10.0, {})) is None


def test_why_layers_are_not_cut_is_told_from_what_was_asked_for(tmp_path: Path) -> None:
    def said(why: str | None = None, **block: object) -> str:
        ours = Run(tmp_path, {"block": block, "why_untuned": why})
        return " ".join(reasons(Run(tmp_path), ours, RunTimes(10, 10.0, {})))

    assert said().endswith("it ended too soon for that")
    assert said(autotune={"enabled": False}).endswith('"autotune" is false')
    assert said("a single rank has no communication to hide", autotune={"enabled": False}).endswith(
        "because a single rank has no communication to hide"
    )
    assert "num_chunks was set by hand (2 forward)" in said(pipeline_degree={"forward": 2})
    assert said(schedule="lina") == ""
