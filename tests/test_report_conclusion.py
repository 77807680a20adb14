# SPDX-License-Identifier: Apache-2.0
"""What the page concludes from runs, and how it shows steps: no more than the runs can tell."""

from __future__ import annotations

import html
import json
import random
import re
from pathlib import Path
from typing import Any

from ds_fsmoe.files import runs as run_files
from ds_fsmoe.files.traces import TracedRun, rank_file, trace_of, write_trace
from ds_fsmoe.planning.schedule import Lane, Task
from tests.report_runs import charts_of, page_of, record, without_programs


def section(page: str, name: str) -> str:
    """The words of a section; empty if there is none."""
    found = re.search(rf'(?s)<section id="{name}">(.*?)</section>', without_programs(page))
    text = re.sub(r"(?s)<script.*?</script>|<[^>]+>", " ", found[1]) if found else ""
    return re.sub(r"\s+", " ", html.unescape(text))


def two_runs(folder: Path, ratio: float, noise: float = 0.02, num_steps: int = 80, **plans: Any) -> Path:
    """Runs of which ours is so many times as fast."""
    draw = random.Random(1)
    for name, schedule, ms in (("stock", run_files.STOCK, 10 * ratio), ("ours", "best", 10.0)):
        record(folder / name, schedule)
        (folder / name / run_files.STEPS).unlink()
        steps = range(1, num_steps + 1)
        rows = [{"step": n, "loss": 1.0, "step_ms": ms * (1 + draw.uniform(-noise, noise))} for n in steps]
        run_files.append_lines(folder / name / run_files.STEPS, rows)
    run_files.write_json(folder / "ours" / run_files.PLANS, plans)
    return folder


# ---- the gain


def test_a_gain_is_told_with_its_interval_and_how_it_was_got(tmp_path: Path) -> None:
    said = section(page_of(two_runs(tmp_path / "both", 1.3)), "conclusion")
    assert re.search(r"is 1\.(29|30|31) times as fast as stock DeepSpeed in two runs, one after the other", said)
    assert re.search(r"with an interval of 1\.2\d to 1\.3\d", said)
    assert "which is not a fair comparison" in said
    assert "95% interval of that" in said


def test_where_the_interval_holds_1_or_steps_are_few_nobody_is_faster(tmp_path: Path) -> None:
    said = section(page_of(two_runs(tmp_path / "both", 1.0, noise=0.2)), "conclusion")
    assert "No measurable difference: ds_fsmoe is " in said
    assert re.search(r"no difference that can be measured, to stock DeepSpeed: [\d.]+x is within the noise", said)
    assert not re.match(r" ?Conclusion \d\.\d\dx", said), "no ratio stands large that the next sentence takes back"
    said = section(page_of(two_runs(tmp_path / "few", 1.3, num_steps=20)), "conclusion")
    assert "which decides nothing: no winner: an interval needs 10 blocks of 5 steps" in said
    assert "95% interval" not in said


def test_turns_are_what_counts_where_there_are_any_that_can_be_read(tmp_path: Path) -> None:
    folder = two_runs(tmp_path / "both", 3.0)
    for turn in range(10):
        two_runs(folder / "turns" / f"{turn:03}", 1.2 + 0.002 * turn, num_steps=12)
    page = page_of(folder)
    said = section(page, "conclusion")
    assert re.search(r"is 1\.2\d times as fast as stock DeepSpeed here, with an interval of 1\.2\d to 1\.2\d", said)
    assert "from 10 turns of a short run of each" in said
    assert len(charts_of(page)["stock's time over ours in each turn"]["datasets"]["rows"]) == 10
    assert "geometric mean 1.2" in json.dumps(charts_of(page)["stock's time over ours in each turn"])
    two_runs(folder / "turns" / "010", 1.2, num_steps=4)
    page = page_of(folder)
    assert "1 of 11 turns ended before plans were settled" in section(page, "what-is-missing")
    (folder / "turns" / "011").mkdir()
    assert "the turns of the comparison cannot be shown" in section(page_of(folder), "what-is-missing")


def test_of_a_run_alone_the_autotuner_tells_the_gain(tmp_path: Path) -> None:
    run = record(tmp_path / "run", "best")
    gain = {"ratio": 1.2345, "low": 1.1, "high": 1.3, "num_turns": 5}
    plans = {"gain": gain, "hints": ["try this"], "chosen": {"autotune": "so and so"}}
    run_files.write_json(run / run_files.PLANS, plans)
    said = section(page_of(run), "conclusion")
    assert "ds_fsmoe is 1.23 times as fast as DeepSpeed's schedule here, with an interval of 1.10 to 1.30" in said
    assert "not DeepSpeed's engine" in said
    assert "smallest to largest of that" in said
    assert "What the autotuner of ds_fsmoe, best says: So and so." in said
    assert "What to try next Try this." in said
    run_files.write_json(run / run_files.PLANS, plans | {"gain": gain | {"num_turns": 1}})
    said = section(page_of(run), "conclusion")
    assert "undecided" in said
    assert "which decides nothing: there was one step of each. That is from one step of each in the autotuner's" in said


# ---- what limits


def traced(folder: Path, spans_ms: list[tuple[str, Lane, float, float]], step_ms: float) -> Path:
    """A run with one chain of tasks in a traced step."""
    run = record(folder, "best", step_ms=step_ms)
    tasks = [Task(kind, lane, after=(at - 1,) if at else ()) for at, (kind, lane, *_) in enumerate(spans_ms)]
    spans_ns = [(round(begin * 1e6), round(end * 1e6)) for *_, begin, end in spans_ms]
    for rank in range(2):
        runs = [TracedRun(0, "L00/forward", 5, tasks, 0, spans_ns)]
        about = {"world_size": 2, "steps": [5], "complete": True}
        write_trace(trace_of(rank, "here", runs, about), rank_file(run / run_files.TRACE, rank))
    return run


def test_what_limits_a_step_is_told_apart_traffic_computation_and_the_time_between_tasks(tmp_path: Path) -> None:
    for at, (begins, ends, step_ms, part, is_outside) in enumerate(
        [(1, 9, 40.0, "Computation", True), (7, 8, 11.0, "The time between tasks", False)]
    ):
        spans = [("A2A_IN", Lane.INTER, 0, 1), ("EXPERT", Lane.COMPUTE, begins, ends), ("A2A_OUT", Lane.INTER, 9, 10)]
        said = section(page_of(traced(tmp_path / str(at), spans, step_ms)), "conclusion")
        assert f"{part} is the largest part" in said
        assert ("Most of a step is outside of the MoE layers" in said) == is_outside
    spans = [("A2A_IN", Lane.INTER, 0, 6), ("EXPERT", Lane.COMPUTE, 6, 8), ("A2A_OUT", Lane.INTER, 8, 10)]
    said = section(page_of(traced(tmp_path / "run", spans, 20.0)), "conclusion")
    assert "critical path 20% are computation, 80% are traffic that nothing hides, most of it dispatch (60%)" in said
    assert "The MoE layers are 50% of a step (10 of 20 ms)" in said
    assert "would make a step at most 1.67 times as fast" in said  # 20 / (20 - 8)
    assert "Traffic that nothing hides is the largest part" in said


def test_without_a_trace_the_page_says_how_to_get_one_and_an_expert_with_far_more_tokens_is_named(
    tmp_path: Path,
) -> None:
    run = record(tmp_path / "run", "best")
    load = {"tokens_E": [9.0, 1.0, 1.0, 1.0], "dropped_share": 0.0, "aux_loss": 1.0, "entropy": None}
    even = load | {"tokens_E": [3.0, 3.0, 3.0, 3.0]}
    run_files.append_lines(run / run_files.ROUTERS, [{"step": 10, "layers": {"L00": even, "L01": load}}])
    for path in (run / run_files.TRACE).iterdir():
        path.unlink()
    said = section(page_of(run), "conclusion")
    assert 'record a run with "trace": {"enabled": true}' in said
    assert "the fullest expert of L01 gets 3.00 times the mean" in said
    assert "let experts move" in said.lower()


# ---- steps


def test_steps_of_the_autotuner_are_shaded_and_do_not_squash_the_others(tmp_path: Path) -> None:
    run = record(tmp_path / "run", "best", num_steps=0)
    tuning = [n in (3, 4, 5, 9) for n in range(1, 31)]
    rows = [
        {"step": n, "step_ms": 9000.0 if n == 4 else 20.0} | ({"is_tuning": True} if each else {})
        for n, each in enumerate(tuning, start=1)
    ]
    run_files.append_lines(run / run_files.STEPS, rows)
    page = page_of(run)
    chart = charts_of(page)["time of each step"]
    assert [(each["x"], each["x2"]) for each in chart["datasets"]["stretches"]] == [(2.5, 5.5), (8.5, 9.5)]
    scales = [each["encoding"].get("y", {}).get("scale", {}) for each in chart["layer"]]
    assert {str(each["domain"]) for each in scales if each} == {"[0.0, 25.0]"}
    assert [row["x"] for row in chart["datasets"]["rows"] if row["is_cut"]] == [4]
    said = section(page, "step-times")
    assert "Shaded: steps 3 to 5, 9," in said
    assert "1 step is above it (triangles), of up to 9,000 ms" in said
