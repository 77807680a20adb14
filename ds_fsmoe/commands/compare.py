# SPDX-License-Identifier: Apache-2.0
"""Runs your own training command twice for some steps, with stock DeepSpeed's layers and with ours, and compares them.

  ds_fsmoe compare --steps 50 -- deepspeed train.py --deepspeed_config ds_config.json

The command has to name a DeepSpeed config with an "fsmoe" block. Each run gets a copy of it that differs in
fsmoe.enabled, is recorded and traced, and ends after so many optimizer steps. Where the config is a dict inside the
script, the block comes from outside, and the command starts the script with --module ds_fsmoe.run:

  ds_fsmoe compare --fsmoe '{"enabled": true}' -- deepspeed --module ds_fsmoe.run train.py
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_fsmoe.commands.tables import print_table
from ds_fsmoe.engine.command_line import HELP as HELP_ON_BLOCK
from ds_fsmoe.engine.command_line import OPTION, read_given, take_option
from ds_fsmoe.files.runs import RUN, STEPS, Run
from ds_fsmoe.reporting.comparison import StepTimes, step_times_ms

HELP = "your training command with and without the block: speed, losses, where the time went"
STOCK, OURS = "stock", "ours"
_NO_DOOR = (
    "does the script go through one of the doors? It has to call ds_fsmoe.initialize, or ds_fsmoe.install() first, or "
    "be started with --module ds_fsmoe.run"
)
_LARGEST_BYTES = 1_000_000
"""The largest size of a config, in bytes."""
_SOON_S = 300.0
"""The seconds after which a run without a record is considered to have none."""
_FEWEST_TUNED = 80
"""The fewest steps of a run whose layers are measured at its start, unless its config says otherwise: in fewer, plans
would hardly be settled."""
_FEWEST = 8
"""The fewest steps: some warm up, two are traced, one ends the trace."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps of each run (150)")
    parser.add_argument("--out", type=Path, default=Path("fsmoe_compare"), help="folder for both runs (fsmoe_compare)")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="end a run that takes longer")
    parser.add_argument(OPTION, metavar="FILE|JSON", help=f"{HELP_ON_BLOCK}, if it has one; with ds_fsmoe.run")
    parser.add_argument("--no-trace", action="store_true", help="leave out the timelines")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="that trains")


def run(args: argparse.Namespace) -> int:
    """Run and compare both trainings. Return 0 if both ran, 1 if one of them failed."""
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise ValueError("no training command: ds_fsmoe compare [OPTIONS] -- deepspeed train.py ...")
    if args.steps < _FEWEST:
        raise ValueError(
            f"--steps = {args.steps}: must be at least {_FEWEST}: the first ones are slow and do not count"
        )
    subject = find_given(command, args.fsmoe) or find_config(command)
    out = args.out.resolve()
    steps = args.steps
    for kind in (STOCK, OURS):
        status, trained = _train_as(kind, subject, out, steps, args)
        if kind == STOCK and not status and trained < steps:
            print(f"compare: {kind}: the script ended by itself after {trained} of {steps} steps", flush=True)
            if trained < _FEWEST:
                raise ValueError(
                    f"the script ends after {trained} steps: it must train at least {_FEWEST}, as the first ones are "
                    "slow and do not count"
                )
            steps = trained
            if not args.no_trace:
                # What is traced are the last steps but one, so its timeline was never begun.
                print(f"compare: {kind}: once more with --steps {steps}, for its timeline", flush=True)
                status, _ = _train_as(kind, subject, out, steps, args)
        if status:
            return 1
    return tell(out)


def _train_as(
    kind: str,
    subject: Subject,
    out: Path,
    steps: int,
    args: argparse.Namespace,
) -> tuple[int, int]:
    """Run one of the two trainings, and return (exit status, recorded optimizer steps).

    Raises:
        ValueError: it cannot be started, or has recorded nothing.
    """
    from ds_fsmoe.files.runs import read_run

    folder = out / kind
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "ds_config.json"
    file.write_text(json.dumps(config_of(subject.config, kind, folder, steps, not args.no_trace), indent=2))
    print(f"compare: {kind}, {steps} steps; its log is {folder / 'log.txt'}", flush=True)
    status = _train(subject.command_with(file), folder, steps, args.timeout)
    if status:
        print(f"compare: {kind}: the training ended with exit status {status}; its last lines:", file=sys.stderr)
        print("\n".join((folder / "log.txt").read_text(errors="replace").splitlines()[-15:]), file=sys.stderr)
        return status, 0
    if not (folder / RUN).exists():
        raise ValueError(f"the training has ended and recorded nothing: {_NO_DOOR}")
    recorded = read_run(folder).steps
    return status, recorded[-1]["step"] if recorded else 0


@dataclass(frozen=True)
class Subject:
    """What is compared: a config with an "fsmoe" block, and the command that reads it from a file."""

    config: Mapping[str, Any]
    before: Sequence[str]
    option: str
    """The text before the file's name: nothing, or an option such as ``--deepspeed_config=``."""
    after: Sequence[str]

    def command_with(self, file: Path) -> list[str]:
        """Return the command with another file."""
        return [*self.before, f"{self.option}{file}", *self.after]


def find_given(command: Sequence[str], given: str | None) -> Subject | None:
    """Return the subject if the block is given from outside: to us, or to the ``ds_fsmoe.run`` in the command.

    Returns:
        ``None`` if it is given to neither.

    Raises:
        ValueError: it is given to both, or cannot be read, or there is no ``ds_fsmoe.run`` to hand it to.
    """
    door = next((place for place, each in enumerate(command) if each in ("ds_fsmoe.run", "-mds_fsmoe.run")), None)
    if door is None:
        if given is None:
            return None
        raise ValueError(
            f"{OPTION} reaches the script through ds_fsmoe.run, which is not in the command: start the script with "
            "deepspeed --module ds_fsmoe.run train.py (python and torchrun: -m ds_fsmoe.run)"
        )
    written, options, script = take_option(command[door + 1 :])
    if given is not None and written is not None:
        raise ValueError(f"{OPTION} is given to compare and in the command; leave one of them")
    text = written if given is None else given
    if text is None:
        return None
    return Subject({"fsmoe": read_given(text)}, [*command[: door + 1], OPTION], "", [*options, *script])


def find_config(command: Sequence[str]) -> Subject:
    """Return the subject if an argument of the command names the DeepSpeed config.

    Raises:
        ValueError: none does, or several do.
    """
    from ds_fsmoe.engine.compat import load_ds_config

    found, without = [], []
    for place, argument in enumerate(command):
        option, equals, name = argument.rpartition("=")
        path = Path(name)
        if path.suffix != ".json" or not path.is_file() or path.stat().st_size > _LARGEST_BYTES:
            continue
        try:
            config = load_ds_config(str(path))
        except ValueError:
            without.append(str(path))  # it may be anything, such as data
            continue
        if isinstance(config, Mapping) and isinstance(config.get("fsmoe"), Mapping):
            found.append((argument, Subject(config, command[:place], option + equals, command[place + 1 :])))
        else:
            without.append(str(path))
    if len(found) == 1:
        return found[0][1]
    if found:
        names = ", ".join(argument for argument, _ in found)
        raise ValueError(f"several configs with an fsmoe block in the command: {names}; leave one of them")
    others = f" ({', '.join(without)} has none)" if without else ""
    raise ValueError(
        f"no DeepSpeed config with an fsmoe block among the arguments of the command{others}. compare changes copies "
        "of that file, so the script has to take its name as an argument, such as --deepspeed_config ds_config.json; "
        f"for a script whose config is inside it, give the block with {OPTION}"
    )


def config_of(config: Mapping[str, Any], kind: str, folder: Path, steps: int, is_traced: bool) -> dict[str, Any]:
    """Return the config of one of the two runs."""
    changed = json.loads(json.dumps(config))
    block = changed["fsmoe"]
    block["enabled"] = kind == OURS
    if kind == OURS and steps >= _FEWEST_TUNED:
        block.setdefault("autotune", True)
    block["record"] = {"dir": str(folder), "stop_after": steps}
    # The last but one: by then all is settled, and the last one ends the trace.
    traced = {"enabled": True, "start_step": steps - 3, "num_steps": 2}
    block["trace"] = traced if is_traced else {"enabled": False}
    return changed


def _train(command: Sequence[str], folder: Path, steps: int, timeout_s: float | None) -> int:
    from tqdm import tqdm

    for name in (RUN, STEPS):
        (folder / name).unlink(missing_ok=True)
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    with (folder / "log.txt").open("w") as log:
        try:
            # A session of its own, so that all of it can be ended.
            job = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        except OSError as error:
            raise ValueError(f"{command[0]}: cannot be started: {error}") from error
        try:
            with tqdm(total=steps, unit="step", disable=not sys.stderr.isatty(), leave=False) as bar:
                start_s, is_told = time.monotonic(), False
                while job.poll() is None:
                    time.sleep(0.2)
                    if not is_told and time.monotonic() - start_s > _SOON_S and not (folder / RUN).exists():
                        is_told = True
                        print(f"compare: nothing recorded after {_SOON_S:.0f} s: {_NO_DOOR}", file=sys.stderr)
                    if (folder / STEPS).exists():
                        bar.update((folder / STEPS).read_text().count("\n") - bar.n)
                    if deadline_s is not None and time.monotonic() > deadline_s:
                        print(f"compare: ended after {timeout_s:.0f} s", file=sys.stderr)
                        return 124
            return job.returncode
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()


def tell(out: Path) -> int:
    """Print the comparison of the two runs in a folder.

    Returns:
        The exit status: 0, or 1 if one of them has recorded nothing that can be compared.
    """
    from ds_fsmoe.files.runs import has_trace, read_run
    from ds_fsmoe.reporting.comparison import losses_of, settled_after, times_of

    stock, ours = (read_run(out / kind) for kind in (STOCK, OURS))
    for each in (stock, ours):
        for problem in each.problems:
            print(f"compare: {each.name}: {problem}", file=sys.stderr)
    if stock.is_stock == ours.is_stock:
        print(
            f"compare: both runs trained with the same layers: {_NO_DOOR}",
            file=sys.stderr,
        )
        return 1
    # The same steps of both, so that they have seen the same batches.
    after = max(settled_after(stock), settled_after(ours))
    times = times_of(stock, after), times_of(ours, after)
    if times[0] is None or times[1] is None:
        last = min(run.steps[-1]["step"] if run.steps else 0 for run in (stock, ours))
        print(
            f"compare: no step to compare: plans were settled after step {after}, and the runs ended after {last}; "
            f"use --steps {after + 20} or more",
            file=sys.stderr,
        )
        return 1
    names = list(times[0].parts_ms)
    rows = [
        (run.name, f"{each.step_ms:.2f}", *(f"{each.parts_ms[name]:.2f}" for name in names))
        for run, each in zip((stock, ours), times, strict=True)
    ]
    ratios = [(times[0].step_ms, times[1].step_ms), *((times[0].parts_ms[n], times[1].parts_ms[n]) for n in names)]
    rows.append(("ratio", *(f"{a / b:.2f}x" if b > 0 and a > 0 else "-" for a, b in ratios)))
    print()
    print_table((f"medians of {times[0].num_steps} steps, ms", "step", *names), rows)
    _print_verdict(stock, ours, after, times[0], times[1])
    losses = losses_of(stock, ours)
    if losses is None:
        print("losses: none were recorded (the script does not give one to engine.backward)")
    else:
        print(
            f"losses: at most {losses.largest_difference:.2g} apart (relative, at step {losses.at_step}) over "
            f"{losses.num_steps} steps; the last are {losses.last[0]:.6g} and {losses.last[1]:.6g}"
        )
        for run, step in zip((stock, ours), losses.not_finite_from, strict=True):
            if step is not None:
                print(f"losses of {run.name} are not finite from step {step} on")
    what = "timelines, plans and loads" if all(has_trace(run.folder) for run in (stock, ours)) else "plans and loads"
    print(f"{what}: ds_fsmoe report {out}")
    return 0


def _print_verdict(stock: Run, ours: Run, after: int, of_stock: StepTimes, of_ours: StepTimes) -> None:
    """Print how much faster ours is, how certain that is, and what to look at where it is not faster."""
    from ds_fsmoe.reporting.verdict import disturbance, ratio_interval, reasons

    print(f"\nours is {of_stock.step_ms / of_ours.step_ms:.2f} times as fast as stock DeepSpeed here")
    interval = ratio_interval(*(step_times_ms(run, after) for run in (stock, ours)))
    if interval is None:
        print("  too few steps for an interval: use more --steps")
    else:
        print(f"  95% interval, by how much the steps of each run vary: {interval.low:.2f} to {interval.high:.2f}")
    print(
        "  the two ran one after the other: whatever else the machine did during one of them is in this number too, so "
        "compare on an idle machine, and more than once"
    )
    if disturbed := disturbance(of_stock, of_ours):
        print(f"  {disturbed}")
    if interval is None or interval.low <= 1:
        for reason in reasons(stock, ours, of_stock):
            print(f"  a possible cause: {reason}")
