# SPDX-License-Identifier: Apache-2.0
"""Finds the config in a user's training command, and makes the configs of other runs from it. ``ds_fsmoe compare``
and ``ds_fsmoe tune`` call it.

Where a training fails, it finds the cause: the error of the rank that died, not its consequences on other ranks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_fsmoe.engine.command_line import OPTION, read_given, take_option
from ds_fsmoe.untrusted import read_regular

STOCK, OURS = "stock", "ours"
FEWEST = 8
"""The fewest steps of a run: some warm up, two are traced, one ends the trace."""
_FEWEST_TUNED = 80
"""The fewest steps of a run whose layers are measured at its start, unless its config says otherwise: in fewer, plans
would hardly be settled."""
_LARGEST_BYTES = 1_000_000
"""The largest size of a config, in bytes."""


_PORTS = {
    "deepspeed": ("--master_port", (), ("--hostfile", "-H", "--num_nodes", "--launcher", "--no_ssh")),
    "torchrun": ("--master-port", (), ("--rdzv-endpoint", "--rdzv-id", "--standalone", "--nnodes", "--node-rank")),
    "torch.distributed.run": ("--master-port", (), ("--rdzv-endpoint", "--standalone", "--nnodes", "--node-rank")),
    "accelerate": ("--main_process_port", ("launch",), ("--config_file", "--num_machines", "--machine_rank")),
}
"""Launcher -> its option for a port, the words between, and options that name a port or several hosts; with one of them
the port is the user's affair."""


def with_free_port(command: Sequence[str], port: int) -> list[str]:
    """Return a command with a port for its launcher, unless the user named one or there are several hosts."""
    for place, each in enumerate(_options_ahead(command)):
        name, ahead = Path(each).name, command[place - 1] if place else ""
        # What follows another option is its value, such as the name of an environment or of a folder.
        if name not in _PORTS or (ahead.startswith("-") and ahead not in ("-m", "--")):
            continue
        option, words, others = _PORTS[name]
        after = command[place + 1 :]
        if list(after[: len(words)]) != list(words):
            continue
        own = {each.partition("=")[0].replace("_", "-") for each in _options_ahead(after[len(words) :])}
        if own & {each.replace("_", "-") for each in (option, "--rdzv-backend", *others)}:
            break
        at = place + 1 + len(words)
        return [*command[:at], option, str(port), *command[at:]]
    return list(command)


def _options_ahead(arguments: Sequence[str]) -> Sequence[str]:
    """Return the arguments ahead of the script, which has options of its own."""
    end = next((i for i, each in enumerate(arguments) if each.endswith(".py") or each == "ds_fsmoe.run"), None)
    return arguments[:end]


@dataclass(frozen=True)
class TrainingCommand:
    """Holds a training command split at its config file, so that another config can be put in."""

    config: Mapping[str, Any]
    before: Sequence[str]
    option: str
    """The text before the file's name: nothing, or an option such as ``--deepspeed_config=``."""
    after: Sequence[str]
    file: Path | None = None
    """The config file; ``None``: the block was given as JSON."""

    def command_with(self, file: Path) -> list[str]:
        """Return the command with another config file."""
        return [*self.before, f"{self.option}{file}", *self.after]


def find_given(command: Sequence[str], given: str | None) -> TrainingCommand | None:
    """Return the command if the block is given on the command line: to us, or to its ``ds_fsmoe.run``.

    Returns:
        The command; ``None`` if the block is given to neither.

    Raises:
        ValueError: the block is given to both, cannot be read, or the command lacks ``ds_fsmoe.run``.
    """
    runner = next((place for place, each in enumerate(command) if each in ("ds_fsmoe.run", "-mds_fsmoe.run")), None)
    if runner is None:
        if given is None:
            return None
        raise ValueError(
            f"{OPTION} reaches the script through ds_fsmoe.run, which is not in the command: start the script with "
            "deepspeed --module ds_fsmoe.run train.py (python and torchrun: -m ds_fsmoe.run)"
        )
    written, options, script = take_option(command[runner + 1 :])
    if given is not None and written is not None:
        raise ValueError(f"{OPTION} is given twice, also in the command; remove one")
    text = written if given is None else given
    if text is None:
        return None
    file = None if text.lstrip().startswith("{") else Path(text)
    return TrainingCommand({"fsmoe": read_given(text)}, [*command[: runner + 1], OPTION], "", [*options, *script], file)


def find_config(
    command: Sequence[str], of: str = "compare", given: Path | None = None, *, needs_block: bool = True
) -> TrainingCommand:
    """Return the command if one of its arguments names the DeepSpeed config.

    Args:
        command: the command.
        of: the command of ours that asks, for errors.
        given: the config; ``None``: it is looked for.
        needs_block: whether a config has to have our block.

    Raises:
        ValueError: no argument names a config, or several do.
    """
    from ds_fsmoe.engine.compat import load_ds_config

    found, stock, without = [], [], []
    for place, argument in enumerate(command):
        option, equals, name = argument.rpartition("=")
        path = Path(name)
        if given is None:
            if path.suffix != ".json" or not path.is_file() or path.stat().st_size > _LARGEST_BYTES:
                continue
        elif path.resolve() != given.resolve():
            continue
        try:
            config = load_ds_config(str(path))
        except ValueError:
            without.append(str(path))  # it may be anything, such as data
            continue
        subject = TrainingCommand(config, command[:place], option + equals, command[place + 1 :], path)
        if isinstance(config, Mapping) and isinstance(config.get("fsmoe"), Mapping):
            found.append((argument, subject))
        else:
            without.append(str(path))
            if isinstance(config, Mapping) and "fsmoe" not in config and not _OF_BATCH.isdisjoint(config):
                stock.append((argument, subject))
    found = found or ([] if needs_block else stock)
    if len(found) == 1:
        return found[0][1]
    block, verb = (" with an fsmoe block", "has") if needs_block else ("", "is")
    if found:
        names = ", ".join(argument for argument, _ in found)
        raise ValueError(f"several configs{block} in the command: {names}; keep one")
    others = f" ({', '.join(without)} {verb} none)" if without else ""
    what = f"no DeepSpeed config{block}" if given is None else f"{given} is not"
    raise ValueError(
        f"{what} among the arguments of the command{others}. {of} changes copies of that file, so the script has to "
        "take its name as an argument, such as --deepspeed_config ds_config.json; for a script whose config is inside "
        f"it, give the block with {OPTION}"
    )


_OF_BATCH = {"train_batch_size", "train_micro_batch_size_per_gpu"}
"""Fields of which a DeepSpeed config has one."""


@dataclass(frozen=True)
class PlannedRun:
    """Describes one of the compared runs: its layers, the folder of its record, and its length."""

    kind: str
    """``STOCK`` or ``OURS``."""
    folder: Path
    steps: int
    """The optimizer steps after which it ends."""
    is_traced: bool
    cache: Path
    """The folder of measurements that all runs share, unless the config names one."""
    is_tuned: bool = False
    """Whether layers are measured although the run is short, because the long run before it measured them."""
    settled_steps: int = 0
    """The steps with settled plans after which it ends, too; 0: their number does not count."""


def run_config(config: Mapping[str, Any], run: PlannedRun) -> dict[str, Any]:
    """Return the config of one of the runs. Runs of stock and ours with the same length differ only in ``enabled``."""
    changed = json.loads(json.dumps(config))
    block = changed.setdefault("fsmoe", {})
    block["enabled"] = run.kind == OURS
    if isinstance(changed.get("autotuning"), dict):  # DeepSpeed's own ends a run after a few steps
        changed["autotuning"]["enabled"] = False
    if not block.get("deterministic"):  # which decides nothing by a clock
        block["autotune"] = _autotune(block.get("autotune"), run)
    block["record"] = {"dir": str(run.folder), "stop_after": run.steps}
    if run.settled_steps:
        block["record"]["stop_after_settled"] = run.settled_steps
    # The last but one: by then all is settled, and the last one ends the trace.
    traced = {"enabled": True, "start_step": run.steps - 3, "num_steps": 2}
    written = block.get("trace")
    # ep_size may be chosen for the links of that cluster.
    links = {"cluster": written["cluster"]} if isinstance(written, Mapping) and "cluster" in written else {}
    block["trace"] = links | (traced if run.is_traced else {"enabled": False})
    return changed


def _autotune(written: object, run: PlannedRun) -> object:
    """Return ``fsmoe.autotune`` with a folder for measurements, turned on unless the config decides otherwise."""
    if written is None:
        written = True if run.steps >= _FEWEST_TUNED else "auto"
    options = dict(written) if isinstance(written, Mapping) else {"enabled": written}
    if options.get("enabled") is False:
        return written
    if run.is_tuned:
        options["enabled"] = True
    if run.settled_steps:
        # Layouts differ by more than what further turns of the same plans would tell.
        options.setdefault("trials", 1)
    options.setdefault("cache_dir", str(run.cache))
    return options


_BEGIN = "Traceback (most recent call last):"
_CHAINED = ("The above exception was the direct cause", "During handling of the above exception")
_PREFIX = re.compile(r"\[(?:rank|default)?(\d+)\]: ?")
"""The prefix that torch and its launchers put before each line of a rank."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_CONSEQUENCES = re.compile(
    r"closed by peer|reset by peer|remote worker|broken pipe|ChildFailedError|SignalException|CalledProcessError"
    r"|KeyboardInterrupt|NCCL communicator was aborted|ncclRemoteError|ncclSystemError|unhandled system error"
    r"|DistStoreError|wait timeout|Timed out waiting|recvValue failed|failed to recv|Application timeout|SystemExit",
    re.IGNORECASE,
)
"""Errors that a rank has because another one is gone."""
_MOST_LINES = 24


@dataclass(frozen=True)
class FirstError:
    """Holds the error that made a training fail."""

    of: str
    """The rank, if it is known, and where this was found."""
    lines: tuple[str, ...]
    """The end of its traceback."""


def first_error(log: Path, reports: Path, since_s: float) -> FirstError | None:
    """Return the first error of a rank that is not a consequence of another's end, or else the first of all.

    Args:
        log: the output of the training.
        reports: the folder with the error reports of our ranks.
        since_s: the start of this job; earlier reports are ignored.
    """
    text = log.read_text(errors="replace")
    found = [(f"rank {rank}, in {log}" if rank else str(log), lines) for rank, lines in _errors(text.splitlines())]
    for file in sorted(reports.glob("rank*.txt"), key=lambda each: each.stat().st_mtime):
        if file.stat().st_mtime >= since_s:
            try:
                errors = _errors(read_regular(file).splitlines())
            except (OSError, ValueError):
                continue
            found += [(f"rank {file.stem.removeprefix('rank')}, in {file}", lines) for _, lines in errors]
    causes = [each for each in found if not _CONSEQUENCES.search(each[1][-1])] or found
    return FirstError(causes[0][0], tuple(causes[0][1][-_MOST_LINES:])) if causes else None


def _errors(lines: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Return (rank, lines) of each traceback, ordered by its end, with the last of a chain; "" is an unknown rank."""
    done: list[tuple[str, list[str]]] = []
    # Ranks without a prefix write into each other's tracebacks: as many errors are awaited as tracebacks have begun.
    open_of: dict[str, list[str]] = {}
    awaited: dict[str, int] = {}
    for each in lines:
        line = _COLOUR.sub("", each)
        match = _PREFIX.match(line)
        rank, line = (match[1], line[match.end() :]) if match else ("", line)
        if line.startswith(_BEGIN):
            open_of.setdefault(rank, []).append(line)
            awaited[rank] = awaited.get(rank, 0) + 1
        elif awaited.get(rank):
            open_of[rank].append(line)
            if line and not line[0].isspace():
                done.append((rank, list(open_of[rank])))
                awaited[rank] -= 1
                if not awaited[rank]:
                    del open_of[rank]
        elif line.startswith(_CHAINED):
            last = max((place for place, (of, _) in enumerate(done) if of == rank), default=None)
            if last is not None:
                del done[last]
    return done
