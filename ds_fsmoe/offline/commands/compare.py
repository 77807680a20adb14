# SPDX-License-Identifier: Apache-2.0
"""Runs your own training command with stock DeepSpeed's layers and with ours, alternately, and compares them.

  ds_fsmoe compare -- deepspeed train.py --deepspeed_config ds_config.json

The command has to name a DeepSpeed config with an "fsmoe" block. Each run gets a copy of it that differs in
fsmoe.enabled, is recorded, and ends after some optimizer steps. First each runs once for --steps, with a timeline; the
layers are measured then, for all later runs. Then both run again and again for fewer steps, stock first, ours first,
and so on (--turns), and the ratio has an interval over these turns. If the config is a dict inside the script, give the
block on the command line, and start the script with --module ds_fsmoe.run:

  ds_fsmoe compare --fsmoe '{"enabled": true}' -- deepspeed --module ds_fsmoe.run train.py

Two existing recordings are compared by --recorded STOCK OURS.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ds_fsmoe.engine.command_line import HELP as HELP_ON_BLOCK
from ds_fsmoe.engine.command_line import OPTION
from ds_fsmoe.files.runs import RUN, Run, has_trace, read_run
from ds_fsmoe.files.whole_files import OF_COMPARISON
from ds_fsmoe.offline.commands.training_command import (
    FEWEST,
    OURS,
    STOCK,
    PlannedRun,
    TrainingCommand,
    find_config,
    find_given,
    first_error,
)
from ds_fsmoe.offline.commands.training_run import LOG, NO_ENTRY_POINT, REPORTS, claim_out, run_training
from ds_fsmoe.offline.report.comparison import (
    BLOCK,
    FEWEST_STEPS,
    Interval,
    RunTimes,
    Turn,
    disturbance,
    interval_of,
    losses_of,
    middle,
    order_of,
    ratio_interval,
    read_turns,
    reasons,
    settled_after,
    step_times_ms,
    times_of,
    winner,
)
from ds_fsmoe.terminal.screen import RED, YELLOW, print_coloured
from ds_fsmoe.terminal.tables import print_table

HELP = "run your training command with and without the block, and compare speed, losses and timelines"
TURNS = "turns"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps of the two long runs (150)")
    parser.add_argument(
        "--turns", type=int, default=10, help=("short runs of each after them (10; 0: none, and no verdict)")
    )
    parser.add_argument("--turn-steps", type=int, default=20, help="counted steps of a short run (20)")
    parser.add_argument("--out", type=Path, default=Path("fsmoe_compare"), help="output folder (fsmoe_compare)")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="stop a run after so many seconds")
    parser.add_argument(OPTION, metavar="FILE|JSON", help=f"{HELP_ON_BLOCK}, if it has one; with ds_fsmoe.run")
    parser.add_argument("--no-trace", action="store_true", help="do not record timelines")
    about = "compare two recorded runs (fsmoe.record), and start none"
    parser.add_argument("--recorded", type=Path, nargs=2, metavar=("STOCK", "OURS"), help=about)
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="command that trains")


def run(args: argparse.Namespace) -> int:
    """Run and compare the trainings. Return 0 if all ran, 1 if one of them failed."""
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if args.recorded:
        if command:
            raise ValueError("--recorded starts no training, but there is a training command; remove one of them")
        return _print_two_runs(*(read_run(folder) for folder in args.recorded))
    if not command:
        raise ValueError("no training command: ds_fsmoe compare [OPTIONS] -- deepspeed train.py ...")
    if args.steps < FEWEST:
        raise ValueError(f"--steps = {args.steps}: must be at least {FEWEST}: the first steps are slow and not counted")
    if args.turns < 0 or args.turn_steps < FEWEST_STEPS:
        raise ValueError(
            f"--turns = {args.turns}, --turn-steps = {args.turn_steps}: must be at least 0, and at least {FEWEST_STEPS}"
        )
    trainings = _Trainings(find_given(command, args.fsmoe) or find_config(command), args)
    owner = claim_out(trainings.out, OF_COMPARISON)
    try:
        status = trainings.long_runs() or trainings.turns()
        return status or print_comparison(trainings.out)
    finally:
        owner.release()


class _Trainings:
    """Runs one training command repeatedly: long runs, then turns."""

    def __init__(self, subject: TrainingCommand, args: argparse.Namespace) -> None:
        self._subject, self._args, self._steps = subject, args, args.steps
        self.out: Path = args.out.resolve()

    def long_runs(self) -> int:
        """Run both trainings for all steps, or for as many as the script has; return the exit status."""
        is_traced = not self._args.no_trace
        for kind in (STOCK, OURS):
            status, trained = self._train_as(kind, self.out / kind, self._steps, is_traced)
            if kind == STOCK and not status and trained < self._steps:
                print(f"compare: {kind}: the script ended after {trained} of {self._steps} steps", flush=True)
                if trained < FEWEST:
                    raise ValueError(
                        f"the script ended after {trained} steps: must be at least {FEWEST}, as the first steps are "
                        "slow and not counted"
                    )
                self._steps = trained
                if is_traced:
                    # What is traced are the last steps but one, so its timeline was never begun.
                    print(f"compare: {kind}: again with --steps {trained}, for its timeline", flush=True)
                    status, _ = self._train_as(kind, self.out / kind, trained, is_traced=True)
            if status:
                return 1
        return 0

    def turns(self) -> int:
        """Run both trainings alternately; return the exit status."""
        num_turns, counted = self._args.turns, self._args.turn_steps
        # An earlier comparison's turns would be counted.
        shutil.rmtree(self.out / TURNS, ignore_errors=True)
        stock, ours = (read_run(self.out / kind) for kind in (STOCK, OURS))
        if not num_turns or stock.is_stock == ours.is_stock:
            return 0
        steps = min(self._steps, max(FEWEST, max(settled_after(stock), settled_after(ours)) + counted))
        print(f"compare: {num_turns} turns of both; the last {counted} steps of each count", flush=True)
        began_s, turn = time.monotonic(), 0
        while turn < num_turns:
            left_s = (time.monotonic() - began_s) / max(1, turn) * (num_turns - turn)
            about = f"; about {left_s / 60:.0f} min left" if turn and left_s >= 60 else ""
            print(f"compare: turn {turn + 1} of {num_turns}{about}", flush=True)
            for is_ours in order_of(turn):
                kind = OURS if is_ours else STOCK
                is_tuned = bool(ours.plans.get("choices"))
                if self._train_as(kind, self._folder_of(turn, kind), steps, is_tuned=is_tuned)[0]:
                    return 1
            after = max(settled_after(read_run(self._folder_of(turn, kind))) for kind in (STOCK, OURS))
            if steps - after >= FEWEST_STEPS or steps == self._steps:
                turn += 1
                continue
            # How many plans are tried, and so how long that takes, depends on what steps took.
            steps = min(self._steps, max(after + counted, steps * 3 // 2))
            print(f"compare: plans were settled too late to count; repeating this turn with {steps} steps", flush=True)
        return 0

    def _folder_of(self, turn: int, kind: str) -> Path:
        return self.out / TURNS / f"{turn:03}" / kind

    def _train_as(
        self, kind: str, folder: Path, steps: int, is_traced: bool = False, is_tuned: bool = False
    ) -> tuple[int, int]:
        """Run one training, and return (exit status, recorded optimizer steps).

        Raises:
            ValueError: the training cannot be started, or recorded no run.
        """
        planned, log = PlannedRun(kind, folder, steps, is_traced, self.out / "measured", is_tuned), folder / LOG
        print(f"compare: {kind}, {steps} steps; log: {log}", flush=True)
        began_s = time.time()
        status = run_training("compare", self._subject, planned, self._args.timeout)
        if status:
            print_coloured(f"compare: {kind}: training failed with exit status {status}; log: {log}", RED)
            _print_failure(log, began_s)
            return status, 0
        if not (folder / RUN).exists():
            raise ValueError(f"the training ended without a record: {NO_ENTRY_POINT}")
        recorded = read_run(folder).steps
        return status, recorded[-1]["step"] if recorded else 0


def _print_failure(log: Path, began_s: float) -> None:
    found = first_error(log, Path(REPORTS), began_s)
    if found is None:
        print("its last lines:", *log.read_text(errors="replace").splitlines()[-15:], sep="\n", file=sys.stderr)
    else:
        print(f"the first error, from {found.of}:", *found.lines, sep="\n", file=sys.stderr)


def print_comparison(out: Path) -> int:
    """Print the comparison of the runs in a folder.

    Returns:
        The exit status: 0, or 1 if the runs cannot be compared.
    """
    status = _print_two_runs(*(read_run(out / kind) for kind in (STOCK, OURS)), turns=out / TURNS)
    if not status:
        is_traced = any(has_trace(out / kind) for kind in (STOCK, OURS))
        print(f"{'timelines, ' if is_traced else ''}plans and loads: ds_fsmoe report {out}")
    return status


def _print_two_runs(stock: Run, ours: Run, turns: Path | None = None) -> int:
    """Print the comparison of two runs and of the turns in a folder, and return the exit status."""
    for each in (stock, ours):
        for problem in each.problems:
            print_coloured(f"compare: {each.name}: {problem}", YELLOW)
    if stock.is_stock == ours.is_stock:
        print_coloured(f"compare: both runs used the same layers: {NO_ENTRY_POINT}", RED)
        return 1
    if ours.is_stock:
        raise ValueError(f"{ours.folder} is stock DeepSpeed and {stock.folder} is not: name the stock run first")
    # The same steps of both, so that they have seen the same batches.
    after = max(settled_after(stock), settled_after(ours))
    times = times_of(stock, after), times_of(ours, after)
    if times[0] is None or times[1] is None:
        last = min(run.steps[-1]["step"] if run.steps else 0 for run in (stock, ours))
        print_coloured(
            f"compare: no steps to compare: plans were settled after step {after}, and the runs ended after {last}; "
            f"use --steps {after + 20} or more",
            RED,
        )
        return 1
    names = list(times[0].parts_ms)
    rows = [
        (run.name, f"{each.step_ms:.2f}", *(f"{each.parts_ms[name]:.2f}" for name in names))
        for run, each in zip((stock, ours), times, strict=True)
    ]
    found = None if turns is None else read_turns(turns, STOCK, OURS)
    if not found:
        # The ratio over turns is the result; a second ratio would be confusing.
        ratios = [(times[0].step_ms, times[1].step_ms), *((times[0].parts_ms[n], times[1].parts_ms[n]) for n in names)]
        rows.append(("ratio", *(f"{a / b:.2f}x" if b > 0 and a > 0 else "-" for a, b in ratios)))
    print()
    print_table(
        (f"medians of {times[0].num_steps} steps{' of the long runs' if found else ''}, ms", "step", *names), rows
    )
    interval = _print_turns(*found) if found else _print_one_after_another(stock, ours, after, times[0], times[1])
    if interval is None or interval.low <= 1:
        for reason in reasons(stock, ours, times[0]):
            print(f"  possible cause: {reason}")
    losses = losses_of(stock, ours)
    if losses is None:
        print("losses: not recorded (the script passes no loss to engine.backward)")
    elif not losses.largest_difference and losses.not_finite_from == (None, None):
        print(f"losses: identical in all {losses.num_steps} steps; the last is {losses.last[0]:.6g}")
    else:
        print(
            f"losses: differ by at most {losses.largest_difference:.2g} (relative, at step {losses.at_step}) in "
            f"{losses.num_steps} steps; the last are {losses.last[0]:.6g} and {losses.last[1]:.6g}"
        )
        for run, step in zip((stock, ours), losses.not_finite_from, strict=True):
            if step is not None:
                print(f"losses of {run.name} are not finite from step {step} on")
    return 0


def _print_turns(turns: Sequence[Turn], num_run: int) -> Interval | None:
    """Print the ratio of ours to stock over turns, and whether it is decisive. Return the interval."""
    if len(turns) < num_run:
        print(f"\n{num_run - len(turns)} of {num_run} turns ended before plans were settled, and are excluded")
    if not turns:
        print("use more --steps")
        return None
    interval, ratios = interval_of(turns), [each.ratio for each in turns]
    print(f"\nover {len(turns)} turns ours is {middle(turns):.2f} times as fast as stock DeepSpeed here")
    if interval is not None:
        print(f"  95% interval over turns: {interval.low:.2f} to {interval.high:.2f}")
    print(f"  {winner(interval, 'turns')}")
    counted = sorted({each.num_steps for each in turns})
    print(
        f"  single turns: {min(ratios):.2f} to {max(ratios):.2f}, each the ratio of medians of "
        f"{' to '.join(map(str, dict.fromkeys((counted[0], counted[-1]))))} steps; the long runs and steps before "
        "plans were settled (warm-up, measuring, trials) are excluded"
    )
    return interval


def _print_one_after_another(
    stock: Run, ours: Run, after: int, of_stock: RunTimes, of_ours: RunTimes
) -> Interval | None:
    """Print the ratio of two runs, one after the other, and its limits. Return the interval."""
    print(f"\nours is {of_stock.step_ms / of_ours.step_ms:.2f} times as fast as stock DeepSpeed in these two runs")
    interval = ratio_interval(*(step_times_ms(run, after) for run in (stock, ours)))
    if interval is not None:
        print(f"  95% interval, by how much the steps of each run vary: {interval.low:.2f} to {interval.high:.2f}")
    print(f"  {winner(interval, f'blocks of {BLOCK} steps in each run')}")
    print(
        "  not a fair comparison: the machine may have been busy during one of the two runs; --turns alternates "
        "between them"
    )
    if disturbed := disturbance(of_stock, of_ours):
        print(f"  {disturbed}")
    return interval
