# SPDX-License-Identifier: Apache-2.0
"""Runs your own training command for some steps with each of the layouts that are predicted to be fastest, and writes a
config with the fastest one next to yours.

  ds_fsmoe tune -- deepspeed train.py --deepspeed_config ds_config.json

A layout is what a job cannot change while it runs: ep_size, expert_tensor_parallel_size for DeepSpeed's own layers and,
where you allow others by --zero-stages and --micro-batch-sizes, the ZeRO stage and the micro-batch; the batch of a step
stays. The config as it is runs first. From what it measures the others are predicted, and the --most best run, each
with a copy of the config, until the autotuner has chosen and --steps more are over. One that is predicted to take 1.3
times as long as the fastest took runs only if you name its size. Those whose intervals overlap the fastest's run again.
A run that fails, needs too much memory or hangs is a line of the table. If the config is a dict inside the script, give
the block, and start the script with --module ds_fsmoe.run:

  ds_fsmoe tune --fsmoe '{"enabled": true}' -- deepspeed --module ds_fsmoe.run train.py
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_fsmoe.engine.command_line import HELP as HELP_ON_BLOCK
from ds_fsmoe.engine.command_line import OPTION
from ds_fsmoe.files.runs import RUN, Run, read_run
from ds_fsmoe.files.whole_files import OF_TUNE, check_folders, write_whole
from ds_fsmoe.offline.commands.layouts import (
    BEHIND,
    FAR,
    MICRO_BATCH,
    AllowedSizes,
    Change,
    ExpertLayout,
    Job,
    changes_of,
    in_order,
    layouts_of,
    micro_batches_of,
    predicted_ms,
    with_changes,
    words_of_changes,
)
from ds_fsmoe.offline.commands.training_command import (
    OURS,
    STOCK,
    PlannedRun,
    TrainingCommand,
    find_config,
    find_given,
    first_error,
)
from ds_fsmoe.offline.commands.training_run import (
    LOG,
    NO_ENTRY_POINT,
    OUT_OF_TIME,
    REPORTS,
    claim_out,
    run_training,
)
from ds_fsmoe.offline.report.comparison import FEWEST_STEPS, WARM_UP, reach_of_mean, settled_after, step_times_ms
from ds_fsmoe.terminal.screen import RED, print_coloured
from ds_fsmoe.terminal.tables import print_table

HELP = "try layouts with your training command, and write a config with the fastest one"
AS_IT_IS = "the config as it is"
OK, _UNFINISHED = "ok", "not finished"
_OUT_OF_MEMORY, _ENDED_AFTER = "out of memory", "ended after"
_MOST_STEPS = 100
"""The optimizer steps after which a run ends whose plans are never settled."""
_FIRST_S, _LEAST_S, _TIMES = 1800.0, 120.0, 3.0
"""Seconds for the first run of stock and of ours; at the least for each other one, and how many times as long as the
first of ours it may take."""
_OTHER_TOKENS = 1.25
"""The ratio of tokens from which a script is said not to follow the config's micro-batch."""
_NO_MEMORY = re.compile(r"OutOfMemoryError|out of memory|can't allocate memory|bad_alloc|MemoryError", re.IGNORECASE)
_KILLED = re.compile(r"(return code =|exitcode\s*:) -9\b")
"""A rank that got signal 9: by the system, as nobody else sends it to a training that goes on."""
_WIDEST_ERROR = 90


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    sizes: dict[str, Any] = {"type": _sizes, "metavar": "N,N,..."}
    parser.add_argument("--steps", type=int, default=6, help="counted optimizer steps of a run (6)")
    parser.add_argument("--rounds", type=int, default=2, help="times that layouts run which are about as fast (2)")
    parser.add_argument("--most", type=int, default=6, metavar="N", help="layouts that are tried, besides yours (6)")
    parser.add_argument(
        "--ep-sizes", **sizes, help="ep_sizes of Hugging Face models (all that divide ranks and experts)"
    )
    parser.add_argument(
        "--expert-tensor-parallel-sizes",
        **sizes,
        help="ranks that share an expert (all that fit for DeepSpeed's layers; else the config's)",
    )
    parser.add_argument("--zero-stages", **sizes, help="ZeRO stages (the config's)")
    parser.add_argument("--micro-batch-sizes", **sizes, help=f"values of {MICRO_BATCH} (the config's)")
    parser.add_argument(
        "--limit-s",
        type=float,
        metavar="SECONDS",
        help="end a run after so many seconds (half an hour for the first of stock and of ours, then three times ours)",
    )
    about = "the DeepSpeed config, if several arguments of the command could be it"
    parser.add_argument("--config", type=Path, metavar="FILE", help=about)
    parser.add_argument(OPTION, metavar="FILE|JSON", help=f"{HELP_ON_BLOCK}, if it has one; with ds_fsmoe.run")
    parser.add_argument("--out", type=Path, default=Path("fsmoe_tune"), help="folder of the runs (fsmoe_tune)")
    about = "config to write (ds_config.tuned.json beside ds_config.json)"
    parser.add_argument("--output", type=Path, metavar="FILE", help=about)
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="command that trains")


def _sizes(text: str) -> list[int] | None:
    if text == "auto":
        return None
    try:
        found = [int(each) for each in text.split(",")]
    except ValueError:
        found = [-1]
    if min(found) < 0:
        raise argparse.ArgumentTypeError(f"{text!r}: must be whole numbers with commas between them, such as 1,2,4")
    return found


def run(args: argparse.Namespace) -> int:
    """Try layouts. Return 0 if the fastest was found, 1 if no run could be timed."""
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise ValueError("no training command: ds_fsmoe tune [OPTIONS] -- deepspeed train.py ...")
    for name, least in (("steps", FEWEST_STEPS), ("rounds", 1), ("most", 1)):
        if getattr(args, name) < least:
            raise ValueError(f"--{name} = {getattr(args, name)}: must be at least {least}")
    if args.limit_s is not None and args.limit_s <= 0:
        raise ValueError(f"--limit-s = {args.limit_s:g}: must be above 0")
    for flag, sizes in (
        ("--ep-sizes", args.ep_sizes),
        ("--expert-tensor-parallel-sizes", args.expert_tensor_parallel_sizes),
        ("--micro-batch-sizes", args.micro_batch_sizes),
    ):
        if 0 in (sizes or ()):
            raise ValueError(f"{flag} 0: must be at least 1")
    if bad := [each for each in args.zero_stages or () if each > 3]:
        raise ValueError(f"--zero-stages {bad[0]}: must be 0, 1, 2 or 3")
    given = find_given(command, args.fsmoe)
    if given is not None and (args.zero_stages or args.micro_batch_sizes):
        raise ValueError(
            f"--zero-stages and --micro-batch-sizes need a DeepSpeed config among the command's arguments: {OPTION} "
            "replaces the block alone; leave them out"
        )
    subject = given or find_config(command, "tune", args.config, needs_block=False)
    micro_batches = micro_batches_of(subject.config, args.micro_batch_sizes or (), str(subject.file))
    asked = AllowedSizes(args.ep_sizes, args.expert_tensor_parallel_sizes, args.zero_stages or (), micro_batches)
    output = args.output
    if output is None and subject.file is not None:
        output = subject.file.with_name(f"{subject.file.stem}.tuned.json")
    if output is not None and subject.file is not None and output.resolve() == subject.file.resolve():
        raise ValueError(f"--output {output}: is the config of the command, which stays as it is; name another file")
    check_folders(output)
    owner = claim_out(args.out, OF_TUNE)
    try:
        tuning = Tuning(subject, asked, args)
        try:
            is_timed = tuning.try_all()
        finally:  # also of a command that is interrupted
            print()
            print_trials(tuning.trials)
        if not is_timed:
            return 1
        conclude(tuning.trials, subject, output)
        return 0
    finally:
        owner.release()


@dataclass
class LayoutTrial:
    """Holds a layout and what its runs took."""

    name: str
    changes: Sequence[Change] = ()
    chosen: Sequence[Change] = ()
    """What its first run chose by itself, and another start might choose otherwise."""
    predicted_ms: float | None = None
    state: str = _UNFINISHED
    times_ms: list[float] = field(default_factory=list)
    """The counted steps of all runs that were timed."""

    @property
    def is_ok(self) -> bool:
        """Return True if a run was timed."""
        return len(self.times_ms) > 1

    @property
    def needs_too_much(self) -> bool:
        """Return True if its run was ended for its memory or its time, which another layout may not need."""
        return self.state == _OUT_OF_MEMORY or self.state.startswith(_ENDED_AFTER)

    @property
    def step_ms(self) -> float:
        """Return the mean step."""
        return statistics.fmean(self.times_ms)

    @property
    def reach_ms(self) -> float:
        """Return half the length of the 95% interval of that mean, over the steps."""
        return reach_of_mean(self.times_ms)

    def is_apart(self, slower: LayoutTrial) -> bool:
        """Return True if the whole interval is below another's."""
        return self.step_ms + self.reach_ms < slower.step_ms - slower.reach_ms


def contenders(trials: Sequence[LayoutTrial]) -> list[LayoutTrial]:
    """Return the fastest trial and those whose intervals overlap its interval, the fastest first."""
    timed = sorted((each for each in trials if each.is_ok), key=lambda each: each.step_ms)
    return [each for each in timed if not timed[0].is_apart(each)]


class Tuning:
    """Tries layouts of one training command.

    Args:
        subject: the command with its config.
        asked: the sizes that are allowed.
        args: the arguments of this command.
    """

    def __init__(self, subject: TrainingCommand, asked: AllowedSizes, args: argparse.Namespace) -> None:
        self._subject, self._asked, self._args = subject, asked, args
        self._out: Path = args.out.resolve()
        self._limit_s: float = args.limit_s or _FIRST_S
        self._num_runs = 0
        self._tokens: float | None = None
        self.trials: list[LayoutTrial] = [LayoutTrial(AS_IT_IS)]

    def try_all(self) -> bool:
        """Run the config as it is and the layouts that are predicted to be fastest, and again those that are about as
        fast.

        Returns:
            True if a run could be timed.

        Raises:
            ValueError: a size that was asked for is impossible.
        """
        print("tune: all runs write to the folders that the script writes to: give it an output folder of its own")
        folder = self._try_first(self.trials[0])
        is_stock = not self._subject.config.get("fsmoe", {}).get("enabled")
        # A model with all experts on every rank may need too much memory, or its first step too much time.
        if is_stock and ((folder / RUN).exists() or self.trials[0].needs_too_much):
            # Of stock's layers nothing is measured, and a size may be chosen by the engine.
            self.trials.append(LayoutTrial(words_of_changes(enabled := [(("fsmoe", "enabled"), True)]), enabled))
            folder = self._try_first(self.trials[-1])
        if (folder / RUN).exists():
            self._try_layouts(folder)
        elif self.trials[-1].needs_too_much and self._asked.ep_sizes:
            for size in self._asked.ep_sizes:
                changes = [*([(("fsmoe", "enabled"), True)] if is_stock else []), (("fsmoe", "ep_size"), size)]
                self.trials.append(LayoutTrial(words_of_changes(changes), changes))
                self._try(self.trials[-1])
        else:
            words = "no other layout was tried, as a run recorded nothing from which it could be predicted"
            advice = "; name sizes by --ep-sizes to try them all the same" if self.trials[-1].needs_too_much else ""
            print_coloured(f"tune: {words}{advice}; log: {folder / LOG}", RED)
        for number in range(1, self._args.rounds):
            close = contenders(self.trials)
            if len(close) < 2:
                break
            print(f"tune: round {number + 1}: {len(close)} layouts are about as fast, and run again", flush=True)
            for each in reversed(close):
                self._try(each)
        return any(each.is_ok for each in self.trials)

    def _try_first(self, trial: LayoutTrial) -> Path:
        """Run a layout, and limit the time of the others by what it took."""
        began_s = time.monotonic()
        folder = self._try(trial)
        if self._args.limit_s is None and trial.state == OK:
            # A run of stock has fewer steps, as nothing is measured and tried in it.
            is_tuned = not read_run(folder).is_stock
            self._limit_s = max(_LEAST_S, _TIMES * (time.monotonic() - began_s)) if is_tuned else _FIRST_S
        return folder

    def _try_layouts(self, folder: Path) -> None:
        """Try layouts, from the measurements of an earlier run."""
        run = read_run(folder)
        job = Job.of(run)
        layouts = layouts_of(job, self._asked)
        known_ms = predicted_ms(folder, job, [job.layout, *layouts])
        if not known_ms:
            print("tune: nothing was measured to predict layouts from: the nearest are tried first", flush=True)
        self.trials[-1].name += f" (ep_size {job.layout.ep_size})"
        block = self._subject.config.get("fsmoe", {})
        # Expert packing chooses in its own way, and takes no number.
        is_packed = "lina" in json.dumps(block.get("placement"))
        if not job.own_ep_size and not is_packed and block.get("ep_size", "auto") in ("auto", None):
            self.trials[-1].chosen = [(("fsmoe", "ep_size"), job.layout.ep_size)]
        least_ms, num_tried = min(known_ms.values(), default=0.0), 0
        for layout in in_order(layouts, job, known_ms):
            changes = changes_of(layout, job, self._subject.config)
            shown_ms = self._shown_ms(layout, job, known_ms)
            trial = LayoutTrial(words_of_changes(changes), changes, predicted_ms=shown_ms)
            self.trials.append(trial)
            ms = known_ms.get((layout.ep_size, layout.esp_size), 0.0)
            if ms > FAR * least_ms:
                trial.state = f"not tried: predicted to take {ms / least_ms:.1f} times as long as the fastest"
            elif (behind := self._behind(trial)) > BEHIND and not self._asked.names(layout, job.layout):
                times = f"{behind:.1f} times as long as the fastest took"
                trial.state = f"not tried: predicted to take {times}; name its size to try it"
            elif num_tried >= self._args.most:
                trial.state = f"not tried: --most {self._args.most}"
            else:
                num_tried += 1
                self._try(trial)

    def _behind(self, trial: LayoutTrial) -> float:
        """Return how many times as long as the fastest took a layout is predicted to take; 0 if nobody knows."""
        fastest = contenders(self.trials)[:1]
        return sum((trial.predicted_ms or 0.0) / each.step_ms for each in fastest)

    def _shown_ms(self, layout: ExpertLayout, job: Job, known_ms: Mapping[tuple[int, int], float]) -> float | None:
        """Return the prediction of a layout: other ZeRO stages and micro-batches have none."""
        is_known = layout.zero_stage == job.layout.zero_stage and layout.micro_batch is None
        return known_ms.get((layout.ep_size, layout.esp_size)) if is_known else None

    def _try(self, trial: LayoutTrial) -> Path:
        """Run a layout, and return the folder of the run."""
        folder = self._out / f"{self._num_runs:02}"
        self._num_runs += 1
        subject = with_changes(self._subject, [*trial.changes, *trial.chosen])
        kind = OURS if subject.config.get("fsmoe", {}).get("enabled") else STOCK
        counted = self._args.steps
        planned = PlannedRun(
            kind, folder, _MOST_STEPS + counted, False, self._out / "measured", True, counted + WARM_UP
        )
        predicted = "" if trial.predicted_ms is None else f" (predicted {trial.predicted_ms:.4g} ms)"
        print(
            f"tune: {trial.name}{predicted}, at most {self._limit_s:.0f} s; log: {folder / LOG}",
            flush=True,
        )
        began_s = time.time()
        status = run_training("tune", subject, planned, self._limit_s, DS_FSMOE="1")
        state = self._state_of(status, folder, began_s)
        if (folder / RUN).exists():
            times_ms, problem = self._read(read_run(folder), trial, state)
        else:
            times_ms, problem = [], state if state != OK else f"no record: {NO_ENTRY_POINT}"
        trial.times_ms += times_ms
        if problem:
            trial.state = problem
            if trial is not self.trials[0]:  # which the others are compared with
                trial.times_ms.clear()
        elif state != OK:
            trial.state = f"timed; then {state}"
        elif trial.state == _UNFINISHED:
            trial.state = OK
        if trial.is_ok:
            print(f"tune: {trial.name}: {trial.step_ms:.1f} ms +- {trial.reach_ms:.1f}", flush=True)
        if trial.state != OK:
            print_coloured(f"tune: {trial.name}: {trial.state}", RED)
        return folder

    def _state_of(self, status: int, folder: Path, began_s: float) -> str:
        if not status:
            return OK
        if status == OUT_OF_TIME:
            return f"{_ENDED_AFTER} {self._limit_s:.0f} s"
        error = first_error(folder / LOG, Path(REPORTS), began_s)
        last = "" if error is None else error.lines[-1]
        if _NO_MEMORY.search(last) or _KILLED.search((folder / LOG).read_text(errors="replace")):
            return _OUT_OF_MEMORY
        return f"failed: {last[:_WIDEST_ERROR] or f'exit status {status}'}"

    def _read(self, run: Run, trial: LayoutTrial, state: str) -> tuple[list[float], str]:
        """Return the ms of the counted steps of a run that ended in a state, and what is wrong with it; one with an
        error counts if all of its steps were over."""
        settled = settled_after(run)
        # The first ones after that may still set something up.
        times_ms = step_times_ms(run, settled)[-self._args.steps :]
        if state != OK and len(times_ms) < self._args.steps:
            return [], state
        if len(times_ms) < FEWEST_STEPS:
            seen = f"{len(times_ms)} steps after the autotuner has chosen, of {len(run.steps)}"
            return [], f"{seen}: must be {FEWEST_STEPS}"
        tokens = statistics.fmean(row.get("tokens_of_rank", 0) for row in run.steps if row["step"] > settled)
        self._tokens = self._tokens or tokens
        has_other = any(path == (MICRO_BATCH,) for path, _ in trial.changes)
        if has_other and self._tokens and not 1 / _OTHER_TOKENS < tokens / self._tokens < _OTHER_TOKENS:
            return [], (
                f"{tokens:.0f} tokens of rank 0 in a step instead of {self._tokens:.0f}: the script does not follow "
                f"{MICRO_BATCH}; name its own option in autotuning.arg_mappings"
            )
        return times_ms, ""


def print_trials(trials: Sequence[LayoutTrial]) -> None:
    """Print the table of layouts."""
    as_it_is = trials[0]
    rows = []
    for each in trials:
        predicted = "" if each.predicted_ms is None else f"{each.predicted_ms:.1f}"
        measured, ratio = ("", "")
        if each.is_ok:
            measured = f"{each.step_ms:.1f} +- {each.reach_ms:.1f}"
            ratio = f"{as_it_is.step_ms / each.step_ms:.2f}x" if as_it_is.is_ok else ""
        rows.append((each.name, predicted, measured, ratio, each.state))
    print_table(("layout", "predicted ms", "measured ms", "as fast as yours", "state"), rows)
    print("+-: 95% interval of the mean, by how much steps vary; layouts ran one after another")


def conclude(trials: Sequence[LayoutTrial], subject: TrainingCommand, output: Path | None) -> None:
    """Print the fastest layout, and write its config if it is faster than the config as it is.

    Args:
        trials: the layouts, the config as it is first.
        subject: the training command with its config.
        output: the file to write; ``None``: the block is printed.

    Raises:
        ValueError: the file cannot be written.
    """
    fastest, *close = contenders(trials)
    if trials[0] in (fastest, *close):
        print(
            f"no layout is faster than {AS_IT_IS} beyond the intervals: it stays, and nothing is written"
            + (f"; {output} is of an earlier run" if output is not None and output.exists() else "")
        )
        if trials[0].chosen:
            print(f"to have it at every start: {words_of_changes(trials[0].chosen)}")
        return
    print(f"fastest: {fastest.name}")
    if close:
        print(f"as fast within the intervals: {'; '.join(each.name for each in close)}")
    changes = [*fastest.changes, *fastest.chosen]
    tuned = with_changes(subject, changes)
    for path, value in changes:
        before: Any = subject.config
        for each in path:
            before = before.get(each) if isinstance(before, Mapping) else None
        print(f"  {'.'.join(path)}: {'left out' if before is None else json.dumps(before)} -> {json.dumps(value)}")
    arguments = (*subject.before, *subject.after), (*tuned.before, *tuned.after)
    for before, after in itertools.zip_longest(*arguments):
        if before != after:
            print(f"  argument of the command: {'left out' if before is None else before} -> {after}")
    if output is None:
        print(f"give it instead: {OPTION} '{json.dumps(tuned.config['fsmoe'])}'")
        return
    indent = re.search(r"\n( +)\"", subject.file.read_text()) if subject.file is not None else None
    try:
        write_whole(output, json.dumps(tuned.config, indent=len(indent[1]) if indent else 2) + "\n")
    except OSError as error:
        raise ValueError(f"--output {output}: cannot be written to: {error}") from error
    print(f"{output}: written; give it in place of {subject.file}")
