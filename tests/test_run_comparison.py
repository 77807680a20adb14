# SPDX-License-Identifier: Apache-2.0
"""What is said of two runs follows from their records: medians of settled steps, ratios the right way round, losses,
how sure a ratio is, and what may be behind it."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from ds_fsmoe.files import runs
from ds_fsmoe.files.runs import Run, read_run
from ds_fsmoe.offline.commands.compare import print_comparison
from ds_fsmoe.offline.commands.training_command import OURS, STOCK
from ds_fsmoe.offline.report.comparison import (
    WARM_UP,
    RunTimes,
    Turn,
    interval_of,
    losses_of,
    middle,
    ratio_interval,
    reasons,
    settled_after,
    times_of,
)

QUIET = {"step_ms": 20.0, "forward_ms": 5.0, "backward_ms": 9.0, "optimizer_ms": 1.0}


def record(folder: Path, schedule: str, steps: list[dict[str, Any]], first: int = 1, settled_at: int = 0) -> Run:
    """A run as one is recorded; its steps are numbered from ``first`` on."""
    folder.mkdir(parents=True)
    about = {"format": 1, "schedule": schedule, "world_size": 2, "device": "a CPU", "host": "here", "layers": {}}
    runs.write_json(folder / runs.RUN, about | {"ended": "now"})
    runs.append_lines(folder / runs.STEPS, [{"step": n} | row for n, row in enumerate(steps, first)])
    runs.write_json(folder / runs.PLANS, {"layers": [], "settled_at": settled_at})
    return read_run(folder)


def disturbed(factor: float, times: dict[str, float]) -> dict[str, float]:
    return {name: factor * time_ms for name, time_ms in times.items()}


def test_times_are_medians_of_the_steps_after_which_nothing_is_measured_or_tried(tmp_path: Path) -> None:
    # Slow while it warms up and while it tries; of those that count some were disturbed, one was fast by chance.
    steps = [disturbed(50.0, QUIET)] * 12
    steps += [QUIET, disturbed(9.0, QUIET), QUIET, disturbed(0.1, QUIET), QUIET, disturbed(7.0, QUIET), QUIET]
    run = record(tmp_path / "run", "best", steps, settled_at=12)
    assert settled_after(run) == 12
    found = times_of(run)
    assert found is not None
    assert (found.num_steps, found.step_ms) == (7, 20.0)
    assert sorted(found.parts_ms.values()) == [1.0, 5.0, 5.0, 9.0]
    assert found.parts_ms["rest"] == 20.0 - 5.0 - 9.0 - 1.0
    # The step named counts no more.
    assert times_of(run, after=18).num_steps == 1
    assert times_of(run, after=19) is None
    # The first steps never count, whatever they are numbered.
    run = record(tmp_path / "later", "best", [disturbed(50.0, QUIET)] * WARM_UP + [QUIET] * 3, first=101)
    assert settled_after(run) == 100 + WARM_UP
    assert (times_of(run).num_steps, times_of(run).step_ms) == (3, 20.0)


def test_losses_are_apart_by_the_largest_relative_difference_of_the_steps_that_both_have(tmp_path: Path) -> None:
    ours = [2.0, 3.99, 8.4, 1.0]
    one = record(tmp_path / "one", "stock", [{"loss": loss} for loss in (2.0, 4.0, 8.0)])
    other = record(tmp_path / "other", "best", [{"loss": loss} for loss in ours])
    found = losses_of(one, other)
    assert found is not None
    assert (found.num_steps, found.at_step, found.last) == (3, 3, (8.0, 8.4))
    assert found.largest_difference == pytest.approx(0.4 / 8.0)
    assert found.not_finite_from == (None, None)
    broken = record(tmp_path / "broken", "best", [{"loss": loss} for loss in (2.0, math.nan, math.inf)])
    found = losses_of(one, broken)
    assert found is not None
    assert (found.largest_difference, found.at_step, found.not_finite_from) == (math.inf, 2, (None, 2))
    assert losses_of(broken, broken).largest_difference == 0
    assert losses_of(one, record(tmp_path / "none", "best", [QUIET])) is None


def test_compare_says_how_many_times_as_fast_ours_is_and_not_the_other_way_round(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = {"step_ms": 30.0, "forward_ms": 10.0, "backward_ms": 4.5, "optimizer_ms": 1.0}
    # Ours has settled after step 10: the same steps count of both, though stock's before it were faster.
    record(tmp_path / STOCK, runs.STOCK, [disturbed(0.1, slow)] * 10 + [slow] * 8)
    record(tmp_path / OURS, "best", [disturbed(50.0, QUIET)] * 10 + [QUIET] * 8, settled_at=10)
    assert print_comparison(tmp_path) == 0
    said = capsys.readouterr().out
    lines = [line.split() for line in said.splitlines()]
    (head,) = [line for line in lines if line[:3] == ["medians", "of", "8"]]
    (ratios,) = [line for line in lines if line[:1] == ["ratio"]]
    (stock,) = [line for line in lines if line[:2] == ["stock", "DeepSpeed"]]
    assert dict(zip(head[-len(ratios) + 1 :], ratios[1:], strict=True))["step"] == "1.50x"
    assert ratios[1:4] == ["1.50x", "2.00x", "0.50x"]
    assert stock[2:5] == ["30.00", "10.00", "4.50"]
    assert "1.50 times as fast" in said


# ---- how sure a ratio is, and what is behind it


def noisy(mean_ms: float, num_steps: int, share: float, seed: int) -> list[float]:
    draw = random.Random(seed)
    return [mean_ms * (1 + draw.gauss(0, share)) for _ in range(num_steps)]


def test_the_interval_holds_the_ratio_grows_with_the_noise_and_is_not_made_of_few_steps() -> None:
    calm = [ratio_interval(noisy(30, 60, 0.02, seed), noisy(20, 60, 0.02, -seed)) for seed in range(1, 21)]
    # Of 20, a 95% interval misses one; with 12 blocks a bootstrap misses some more.
    assert sum(each.low < 1.5 < each.high for each in calm) >= 16
    wild = ratio_interval(noisy(30, 60, 0.3, 1), noisy(20, 60, 0.3, -1))
    assert wild.high - wild.low > 3 * (calm[0].high - calm[0].low)
    same = ratio_interval([10.0] * 60, [5.0] * 60)
    assert (same.low, same.high) == (2, 2)
    assert ratio_interval([10.0] * 49, [5.0] * 60) is None
    assert ratio_interval([10.0] * 50, [5.0] * 50) is not None


def run_with_trace(folder: Path, task_us: float) -> Run:
    """Two steps with one phase each: an all-to-all and an expert."""
    for rank in range(2):
        events = []
        for step in (7, 8):
            for index, (kind, lane) in enumerate((("A2A_IN", "inter"), ("EXPERT", "compute"))):
                args = {"layer": "L00", "phase": "fwd", "step": step, "run": 0, "index": index, "kind": kind}
                args |= {"chunk": 0, "lane": lane, "waits_for": list(range(index)), "ms": task_us / 1e3}
                span = {"ph": "X", "cat": "measured", "name": kind, "dur": task_us, "pid": rank}
                events.append(span | {"ts": step * 1e6 + index * task_us, "args": args})
        (folder / f"rank{rank}.json").write_text(json.dumps({"traceEvents": events, "otherData": {"steps": [7, 8]}}))
    return Run(folder)


def test_short_tasks_and_little_traffic_are_named(tmp_path: Path) -> None:
    ours = Run(tmp_path, plans={"choices": [{}]})
    tiny = reasons(run_with_trace(tmp_path, 200), ours, RunTimes(10, 10.0, {}))
    assert "takes 0.20 ms on average" in tiny[0]
    # One all-to-all of 0.2 ms in a step of 10 ms.
    assert "is 2% of a step of stock, so hiding all of it would make a step 1.02 times as fast at most" in tiny[1]
    assert reasons(run_with_trace(tmp_path, 5000), ours, RunTimes(10, 10.0, {})) == []
    # Of a trace that cannot be read, or is not there, nothing is made up.
    for text in ("{", "[]", '{"traceEvents": 3}', '{"traceEvents": [], "otherData": {}}'):
        (tmp_path / "rank0.json").write_text(text)
        assert reasons(Run(tmp_path), ours, RunTimes(10, 10.0, {})) == []


# ---- runs that took turns


def turns_of(ratio: float, noise: float, seed: int, num: int = 10) -> list[Turn]:
    """Both runs of a turn share what the machine does then, which is a lot; each has noise of its own."""
    draw = random.Random(seed)
    found = []
    for number in range(num):
        machine = math.exp(draw.gauss(0, 0.5))
        stock_ms, ours_ms = (machine * each * math.exp(draw.gauss(0, noise)) for each in (10 * ratio, 10))
        found.append(Turn(number, 20, stock_ms, ours_ms))
    return found


def test_the_interval_over_turns_holds_the_truth_in_about_95_of_100() -> None:
    held = 0
    for seed in range(400):
        interval = interval_of(turns_of(1.2, 0.05, seed))
        held += interval.low <= 1.2 <= interval.high
    assert 366 <= held <= 394  # 380 and three times what chance makes of it


def test_what_a_machine_does_to_both_runs_of_a_turn_does_not_widen_it() -> None:
    found = turns_of(1.3, 0.0, 1)
    interval = interval_of(found)
    assert math.isclose(middle(found), 1.3)
    assert math.isclose(interval.low, 1.3)
    assert math.isclose(interval.high, 1.3)
    assert interval_of(turns_of(2.0, 0.01, 1, num=9)) is None, "fewer than ten"
