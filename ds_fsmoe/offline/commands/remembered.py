# SPDX-License-Identifier: Apache-2.0
"""Lists what earlier runs have learned for the next start of the same job, which ``"ep_size": "auto"`` takes where the
length of samples is not known otherwise; or removes it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ds_fsmoe.terminal.tables import print_table

HELP = "list or forget the ep_size that earlier runs have found for the next start"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument(
        "--forget", nargs="*", metavar="NAME", help="remove the files of these names, all without a name"
    )


def run(args: argparse.Namespace) -> int:
    """List the files, or remove some. Return 1 if a name is not there, otherwise 0.

    Raises:
        ValueError: a file cannot be removed.
    """
    from ds_fsmoe.files.learned_batches import all_files, folder

    files = {each.stem: each for each in all_files()}
    if not files:
        print("nothing is remembered")
        return int(bool(args.forget))
    if args.forget is not None:
        names = args.forget or list(files)
        for unknown in (lacking := [each for each in names if each not in files]):
            print(f"{unknown}: not in {folder()}")
        for name in names:
            if name in files:
                _remove(files[name])
        print(f"removed {len(names) - len(lacking)} of {len(files)} from {folder()}")
        return int(bool(lacking))
    heads = ("name", "layers", "experts", "ranks", "hosts", "ZeRO", "samples", "tokens", "ep_size", "next")
    print_table(heads, [_row(each) for each in files.values()])
    return 0


def _remove(file: Path) -> None:
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(f"{file}: cannot be removed: {error}") from error


def _row(file: Path) -> tuple[str, ...]:
    from ds_fsmoe.files.learned_batches import UselessLearnedError, read_learned

    try:
        job, learned = read_learned(file)
    except UselessLearnedError as error:
        return (file.stem, f"ignored: {str(error).partition(': ')[2]}", *[""] * 8)
    layers = [each for each in _list_of(job, "layers") if isinstance(each, dict)]
    return (
        file.stem,
        _words(sum(each["count"] for each in layers if isinstance(each.get("count"), int))),
        ", ".join(_words(each.get("E")) for each in layers),
        _words(job.get("ranks")),
        ", ".join(map(_words, _list_of(job, "hosts"))),
        _words(job.get("zero")),
        _words(job.get("samples") or "not known"),
        str(learned.tokens),
        str(learned.ep_size),
        "" if learned.runner_up is None else f"{learned.runner_up} takes {learned.runner_up_costs:.2f}x",
    )


def _list_of(job: dict[str, Any], name: str) -> list[Any]:
    found = job.get(name)
    return found if isinstance(found, list) else []


def _words(value: Any) -> str:
    """Return a value of a file as text that a terminal can show."""
    return "".join(each for each in str(value)[:40] if each.isprintable())
