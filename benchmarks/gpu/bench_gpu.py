# SPDX-License-Identifier: Apache-2.0
"""Schedules on one GPU: every preset's plan on CUDA streams, real computation beside links that are emulated.

``python benchmarks/gpu/bench_gpu.py`` on a machine with a GPU; ``--budget`` seconds are not exceeded by much.
``--device cpu --quick`` does the same on threads, in seconds and in small: a test of this file, no result.

1. What a rank computes is timed at several sizes, and lines are fitted: for some layers only.
2. For these and for others (``held_out``: the same layer with other tokens, or other widths) every preset is planned
   from these lines and the links of a cluster, and predicted: ``benchmarks/results/gpu_predicted.csv``.
3. When that is written, each plan is run, the presets in turns: ``gpu.csv``. The lines are in ``gpu_lines.csv``.

The layer is one in the middle of many: gradients of the one before travel in its backward. Ranks of a node share a
layer's attention and its experts' width, as in the paper. The device computes what one of the ranks would. It is given
its work ahead, as in training; ``issue_ms`` is what that took the host, and where that is more than ``measured`` the
host would have been the limit. Emulated links do not slow each other down, so the plans are those for ideal links.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.emulated_layer import KINDS, Computation
from benchmarks.gpu.emulated_links import link_bodies, task_cost_ms
from benchmarks.gpu.emulated_plans import (
    FULL,
    PHASES,
    QUICK,
    Configuration,
    Lines,
    Planned,
    link_costs,
    of_phase,
    plan_all,
    time_computation,
)
from benchmarks.harness.cases import Case
from benchmarks.harness.harness import RESULTS, Effort, block_order
from benchmarks.harness.intervals import MIN_BLOCKS, percentiles_ms, speedup
from benchmarks.harness.outcome import AA, PACKAGES
from benchmarks.harness.result_files import append_rows, check_columns, made_with
from benchmarks.harness.routing import parsed
from ds_fsmoe.execution.lanes import Body, Lanes, make_lanes
from ds_fsmoe.observing.clock import HOST, Clock
from ds_fsmoe.observing.device_time import Delay, elapsed_ms, issued_ms, pause_ms
from ds_fsmoe.observing.spans import Recorder
from ds_fsmoe.ops import Ops, load_ops
from ds_fsmoe.planning.cost import Fit
from ds_fsmoe.planning.schedule import Lane, Schedule
from ds_fsmoe.planning.timeline import Timeline

BASELINE = "deepspeed"
LINES_UNTIL = 0.25
"""Of the budget: until then what is timed for lines gets further rounds."""
WHERE = ("at", "device", "quick", "cluster", "configuration", "settings", "held_out", "preset", "phase", "plan", "unit")
BUSY = tuple(f"{lane}_ms" for lane in Lane)
PREDICTED = (*WHERE, "task_ms", "predicted", "predicted_ratio", *(f"predicted_{each}" for each in BUSY))
MEASURED = (
    *(*PREDICTED, "measured", "p20", "p80", "off", "ratio", "ratio_low", "ratio_high"),
    *(*(f"measured_{each}" for each in BUSY), "issue_ms", "blocks", "wanted_blocks", "runs"),
)
LINES = ("at", "device", "quick", "of", "kind", "alpha_ms", "beta_ms", "r2", "worst_share", "sizes", "times_ms")


@dataclass
class Run:
    """One run of this file: on what, how long, and what every row says."""

    device: torch.device
    quick: bool
    budget_s: float
    results: Path
    ops: Ops
    began_s: float
    """By the monotonic clock."""
    host: Clock
    made: dict[str, str] = field(init=False)
    lanes: Lanes = field(init=False)
    delay: Delay = field(init=False)
    task_ms: float = field(init=False)

    def __post_init__(self) -> None:
        torch.zeros(1, device=self.device)  # or the rows would not know of the GPU
        self.made = made_with(PACKAGES)
        for name, columns in (("gpu_predicted", PREDICTED), ("gpu", MEASURED), ("gpu_lines", LINES)):
            check_columns(self.file(name), (*self.made, *columns))
        self.lanes = make_lanes(self.device)
        self.delay = Delay(self.device, self.host)
        self.task_ms = task_cost_ms(self.lanes, self.device, self.delay)

    def used_s(self) -> float:
        return self.host.monotonic() - self.began_s

    def file(self, name: str) -> Path:
        return self.results / f"{name}.csv"

    def append(self, name: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
        """Rows at the end of a file, with when it was."""
        said = self.made | {"at": datetime.now(UTC).isoformat(timespec="seconds")}
        said |= {"device": self.device.type, "quick": self.quick}
        append_rows(self.file(name), (*self.made, *columns), [said | row for row in rows])

    def computation(self, configuration: Configuration) -> Computation:
        return Computation(configuration.shape, configuration.groups, self.device, self.ops)


# ---- 1: lines


def line_row(of: str, kind: str, line: Fit) -> dict[str, Any]:
    times_ms = [line.cost.ms(size) + off for size, off in zip(line.sizes, line.residuals_ms, strict=True)]
    row = {"of": of, "kind": kind, "alpha_ms": f"{line.cost.alpha_ms:.6g}", "beta_ms": f"{line.cost.beta_ms:.6g}"}
    row |= {"r2": f"{line.r2:.5f}", "worst_share": f"{line.worst_share:.4f}"}
    lists = {"sizes": line.sizes, "times_ms": times_ms}
    return row | {name: " ".join(f"{each:.6g}" for each in values) for name, values in lists.items()}


# ---- 2: predictions


def predicted_rows(
    configuration: Configuration, held_out: str, planned: Mapping[str, Planned], task_ms: float
) -> dict[tuple[str, str], dict[str, Any]]:
    """(preset, phase) -> its row."""
    settings = json.dumps(Case(str(configuration), configuration).plain(), sort_keys=True)
    found = {}
    for preset, each in planned.items():
        for phase in (*PHASES, "step"):
            row = {"cluster": configuration.cluster, "configuration": str(configuration), "settings": settings}
            row |= {"held_out": held_out, "preset": preset, "phase": phase, "plan": each.text(phase), "unit": "ms"}
            row |= {"task_ms": f"{task_ms:.6g}", "predicted": f"{each.ms(phase):.6g}"}
            row["predicted_ratio"] = f"{planned[BASELINE].ms(phase) / each.ms(phase):.4f}"
            found[preset, phase] = row | _busy("predicted", of_phase(phase, each.timelines))
    return found


def _busy(name: str, timelines: Sequence[Timeline]) -> dict[str, str]:
    return {f"{name}_{lane}_ms": f"{sum(each.busy_ms(lane) for each in timelines):.6g}" for lane in Lane}


# ---- 3: measurements


@dataclass(frozen=True)
class Measurement:
    """Of each preset (A/A is the baseline once more) and phase."""

    times_ms: dict[tuple[str, str], np.ndarray]
    """[blocks, runs]."""
    issue_ms: dict[tuple[str, str], float]
    """On CUDA: what it takes the host to issue a run."""
    timelines: dict[tuple[str, str], Timeline]
    """One run more, task by task."""

    def of(self, preset: str, phase: str) -> np.ndarray:
        return np.sum([self.times_ms[preset, each] for each in of_phase(phase, PHASES)], axis=0)


def bodies_of(run: Run, configuration: Configuration, schedules: Sequence[Schedule]) -> dict[str, Body]:
    """What does the tasks of these schedules: delays on links, computation elsewhere."""
    computation = run.computation(configuration)
    kinds = {task.kind for schedule in schedules for task in schedule.tasks} - set(KINDS)
    return link_bodies(link_costs(configuration), kinds, run.delay) | dict.fromkeys(KINDS, computation)


def measure(
    run: Run, configuration: Configuration, planned: Mapping[str, Planned], effort: Effort, until_s: float
) -> Measurement:
    """Run every preset's plan, in turns and in blocks, until there are enough or it is time."""
    host = run.delay.host
    run.delay.calibrate()  # as fast as the device runs now
    schedules = {(name, phase): each.schedules[i] for name, each in planned.items() for i, phase in enumerate(PHASES)}
    schedules |= {(AA, phase): schedules[BASELINE, phase] for phase in PHASES}
    bodies = bodies_of(run, configuration, list(schedules.values()))
    names = [BASELINE, AA, *(name for name in planned if name != BASELINE)]

    def walk(name: str, phase: str, observer: Recorder | None = None) -> None:
        run.lanes.run(schedules[name, phase], bodies, f"{name}/{phase}", observer)

    issue_ms: dict[tuple[str, str], float] = {}
    # In the first round tensors are made.
    for _ in range(1 + effort.warmup):
        issue_ms = {key: issued_ms(run.device, lambda at=key: walk(*at), host) for key in schedules}

    def wait_for_host(key: tuple[str, str]) -> None:
        """Keep a GPU waiting until it has all of its work."""
        if run.device.type == "cuda":
            run.delay(pause_ms(issue_ms[key]))

    blocks: list[dict[tuple[str, str], list[float]]] = []
    while len(blocks) < effort.blocks and (len(blocks) < MIN_BLOCKS or run.used_s() < until_s):
        block: dict[tuple[str, str], list[float]] = {key: [] for key in schedules}
        for _ in range(effort.steps):
            for name in (names[i] for i in block_order(len(names), len(blocks))):
                for key in ((name, phase) for phase in PHASES):
                    took_ms = elapsed_ms(run.device, lambda at=key: walk(*at), lambda at=key: wait_for_host(at), host)
                    block[key].append(took_ms)
        blocks.append(block)
    times_ms = {key: np.array([block[key] for block in blocks]) for key in schedules}
    timelines, recorder = {}, Recorder(run.device, host)
    for key, schedule in schedules.items():
        wait_for_host(key)
        walk(*key, observer=recorder)
        timelines[key] = recorder.timeline(schedule)
    return Measurement(times_ms, issue_ms if run.device.type == "cuda" else {}, timelines)


def measured_rows(
    predicted: Mapping[tuple[str, str], dict[str, Any]], found: Measurement | None, effort: Effort
) -> list[dict[str, Any]]:
    """The predictions, with what came of them; "" where there are none."""
    rows = []
    for (preset, phase), of_preset in predicted.items():
        for name in (preset, AA) if preset == BASELINE else (preset,):
            row = dict.fromkeys(MEASURED[3:], "") | of_preset | {"preset": name}
            row |= {"blocks": 0, "wanted_blocks": effort.blocks, "runs": 0}
            if found is not None:
                times_ms = found.of(name, phase)
                p20, p50, p80 = percentiles_ms(times_ms)
                ratio = speedup(found.of(BASELINE, phase), times_ms)
                numbers = {"measured": p50, "p20": p20, "p80": p80, "off": p50 / float(row["predicted"]) - 1}
                numbers |= {"ratio": ratio.middle}
                if ratio.low is not None:
                    numbers |= {"ratio_low": ratio.low, "ratio_high": ratio.high}
                phases = of_phase(phase, PHASES)
                if found.issue_ms:
                    numbers["issue_ms"] = sum(found.issue_ms[name, each] for each in phases)
                row |= {key: f"{value:.6g}" for key, value in numbers.items()}
                row |= _busy("measured", [found.timelines[name, each] for each in phases])
                row |= {"blocks": len(times_ms), "runs": times_ms.size}
            rows.append(row)
    return rows


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Steps: predicted, measured, how far off, times faster than the baseline."""
    last = None
    for row in (each for each in rows if each["phase"] == "step"):
        if row["configuration"] != last:
            last = row["configuration"]
            held_out = f", held out: {row['held_out']}" if row["held_out"] else ""
            print(f"\n{last} ({row['blocks']} of {row['wanted_blocks']} blocks{held_out})")
            head = f"  {'preset':<16} {'predicted ms':>12} {'measured':>9} {'off':>7}"
            print(f"{head}  {'times ' + BASELINE:>15} (predicted)")
        if not row["blocks"]:
            print(f"  {row['preset']:<16} {float(row['predicted']):>12.3f}   not measured")
            continue
        numbers = [float(row[key]) for key in ("predicted", "measured", "off", "ratio", "predicted_ratio")]
        host = "   the host is slower than that" if float(row["issue_ms"] or 0) > numbers[1] else ""
        print("  {:<16} {:>12.3f} {:>9.3f} {:>+7.1%}  {:>15.3f} ({:.3f}){}".format(row["preset"], *numbers, host))
    print()
    for held_out in ("", "tokens", "widths"):
        off = [abs(float(row["off"])) for row in rows if row["held_out"] == held_out and row["off"] != ""]
        if off:
            what = f"held out ({held_out})" if held_out else "timed"
            print(f"layers {what}: off by {statistics.median(off):.1%} in the middle, {max(off):.1%} at the most")


def main(arguments: Sequence[str] | None = None, host: Clock = HOST) -> int:
    """Exit status 0; 1 if a measurement failed, and says so; 2 if there is no such device."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="small layers and few blocks, as always on a CPU")
    parser.add_argument("--budget", type=float, default=500.0, help="seconds for everything")
    parser.add_argument("--blocks", type=int, help="of every configuration (20, quick 3), if there is time")
    parser.add_argument("--overhead", choices=("never",), help="the only choice left: speed.py has stock beside ours")
    parser.add_argument("--results", type=Path, default=RESULTS)
    said = "its layers are schedules of tasks of given sizes, without a router"
    args, began_s = parsed(parser, arguments, no_routers=said), host.monotonic()
    device, quick = torch.device(args.device), args.quick or args.device == "cpu"
    if device.type == "cuda" and not torch.cuda.is_available():
        print("bench_gpu: there is no CUDA device here; --device cpu --quick tests this file", file=sys.stderr)
        return 2
    ops = load_ops("reference" if quick else "auto", device.type)
    run = Run(device, quick, args.budget, args.results, ops, began_s, host)
    effort = Effort(args.blocks or (3 if quick else 20), steps=1 if quick else 2, warmup=1 if quick else 2)
    configurations = QUICK if quick else FULL
    about = f"on {run.made['hardware']}, device {device.type}, {ops.name} ops"
    print(f"{about}, {run.task_ms * 1e3:.1f} us per task", flush=True)

    status = 0
    with contextlib.closing(run.lanes):
        points, lines_until_s = {}, LINES_UNTIL * args.budget
        for each in (each for each in configurations if each.timed):
            computation = run.computation(each)
            points[each] = time_computation(computation, run.delay, lambda: run.used_s() < lines_until_s)
            print(f"{run.used_s():6.1f} s  timed {each}", flush=True)
        lines = Lines.of(points)
        of_lines = (device.type, "delay", run.delay.line), *lines.named()
        run.append("gpu_lines", LINES, [line_row(*each) for each in of_lines])
        planned = {each: plan_all(each, lines.costs(each), run.task_ms) for each in configurations}
        predicted = {each: predicted_rows(each, lines.held_out(each), planned[each], run.task_ms) for each in planned}
        run.append("gpu_predicted", PREDICTED, [row for rows in predicted.values() for row in rows.values()])
        print(f"{run.used_s():6.1f} s  predictions are in {run.file('gpu_predicted')}", flush=True)

        all_rows = []
        for number, each in enumerate(configurations):
            left_s, found, said = args.budget - run.used_s(), None, "no time left for"
            if left_s > 0:
                until_s = run.used_s() + left_s / (len(configurations) - number)
                try:
                    found, said = measure(run, each, planned[each], effort, until_s), "measured"
                except RuntimeError:  # too little memory, say: the others may have enough
                    traceback.print_exc()
                    status, said = 1, "failed"
            rows = measured_rows(predicted[each], found, effort)
            run.append("gpu", MEASURED, rows)
            all_rows += rows
            print(f"{run.used_s():6.1f} s  {said} {each}", flush=True)
    print_table(all_rows)
    print(f"rows in {run.file('gpu')}")
    if device.type == "cpu":
        print("device cpu: this says nothing of a GPU")
    print(f"{run.used_s():.0f} s of {args.budget:.0f}", flush=True)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
