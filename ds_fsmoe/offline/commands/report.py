# SPDX-License-Identifier: Apache-2.0
"""Writes one HTML page of a recorded run, of several side by side, or of recorded routing.

A run is recorded with ``"fsmoe": {"record": {"dir": "runs/one"}}``; ``ds_fsmoe compare`` records two, and turns of
both. Routing is recorded with ``"fsmoe": {"routing": {"record": "runs/one/routing"}}``; the ``routing`` folder of a run
is shown too. The page is one file, without references to others.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ds_fsmoe.files.runs import NoRunError, Run, read_run
from ds_fsmoe.files.whole_files import write_whole
from ds_fsmoe.offline.commands.compare import TURNS
from ds_fsmoe.offline.commands.training_command import OURS, STOCK
from ds_fsmoe.offline.report.comparison import Turn, read_turns
from ds_fsmoe.terminal.tables import print_parts

HELP = "write an HTML page of a recorded run: measurements, decisions, timeline"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument(
        "run_dir", type=Path, metavar="RUN_DIR", help="folder of a run, a folder of such folders, or of routing"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="output file (RUN_DIR/report.html)")


def run(args: argparse.Namespace) -> int:
    """Write the page."""
    from ds_fsmoe.offline.report.routing import ROUTING, add_routing, has_routing
    from ds_fsmoe.offline.report.run_page import make_page

    folder: Path = args.run_dir
    if has_routing(folder):
        # In a folder, or next to a packed file.
        beside = folder / "report.html" if folder.is_dir() else folder.with_name(f"{folder.stem}_report.html")
        return _of_routing(folder, args.out or beside)
    runs = _runs(folder)
    out = args.out or folder / "report.html"
    if not out.resolve().parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.resolve().parent}")
    names = [each.name for each in runs]
    for each in runs:
        if names.count(each.name) > 1:
            each.title = f"{each.name} ({each.folder.name})"
    turns, problems = _turns(folder)
    try:
        page = make_page(runs, turns)
        for problem in problems:
            page.warn(problem)
        for each in runs:
            if has_routing(each.folder / ROUTING):
                add_routing(page, each.folder / ROUTING)
        text = page.html()
        if args.out is None:
            write_whole(out, text)
        else:  # named by whoever called: /dev/stdout, or a link of theirs
            out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{out}: cannot be written: {error}") from error
    for each in runs:
        for problem in each.problems:
            print(f"{each.folder}: {problem}")
    print(f"{out}: open it in a browser; it is one file without external references")
    return 0


def _runs(folder: Path) -> list[Run]:
    """Return the run of a folder, or those of its subfolders, stock's first."""
    try:
        return [read_run(folder)]
    except NoRunError:
        inside = sorted(each for each in folder.iterdir() if each.is_dir()) if folder.is_dir() else []
        runs = []
        for each in inside:
            try:
                runs.append(read_run(each))
            except NoRunError:
                continue
        if not runs:
            raise
    return sorted(runs, key=lambda each: not each.is_stock)


def _turns(folder: Path) -> tuple[list[Turn], list[str]]:
    """Return the turns of a comparison, and the problems with them."""
    try:
        found = read_turns(folder / TURNS, STOCK, OURS)
    except (ValueError, LookupError, TypeError, ArithmeticError) as error:
        return [], [f"the turns of the comparison cannot be shown: {error}"]
    if found is None:
        return [], []
    turns, num_run = found
    lost = num_run - len(turns)
    return turns, [f"{lost} of {num_run} turns ended before plans were settled, and do not count"] if lost else []


def _of_routing(path: Path, out: Path) -> int:
    """Print and write the report of recorded routing."""
    from ds_fsmoe.offline.report.page import Page
    from ds_fsmoe.offline.report.routing import add_routing

    try:
        page = Page(f"Routing in {path.name}")
        print_parts(add_routing(page, path), sys.stdout)
        write_whole(out, page.html())
    except OSError as error:
        raise ValueError(f"{out}: cannot be written: {error}") from error
    print(f"{out}: open it in a browser; it is one file without external references")
    return 0
