# SPDX-License-Identifier: Apache-2.0
"""One HTML page of a recorded run, or of several beside each other.

A run is recorded with ``"fsmoe": {"record": {"dir": "runs/one"}}``; ``ds_fsmoe compare`` records two.
"""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "a page of what a run measured, decided and did"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of a run, or a folder of such folders")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the page (RUN_DIR/report.html)")


def run(args: argparse.Namespace) -> int:
    """Write the page, and its pictures beside it."""
    from ds_fsmoe.files.runs import NoRunError, read_run
    from ds_fsmoe.files.whole_files import write_whole
    from ds_fsmoe.reporting.page import make_page

    folder: Path = args.run_dir
    try:
        runs = [read_run(folder)]
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
        runs.sort(key=lambda each: not each.is_stock)
    out = args.out or folder / "report.html"
    if not out.resolve().parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.resolve().parent}")
    names = [each.name for each in runs]
    for each in runs:
        if names.count(each.name) > 1:
            each.title = f"{each.name} ({each.folder.name})"
    pictures = out.with_suffix("") if out.suffix else out.with_name(f"{out.name}_pictures")
    try:
        page = make_page(runs, pictures).html()
        if args.out is None:
            write_whole(out, page)
        else:  # named by whoever called: /dev/stdout, or a link of theirs
            out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{out} cannot be written: {error}") from error
    for each in runs:
        for problem in each.problems:
            print(f"{each.folder}: {problem}")
    print(f"{out}: open it in any browser; its pictures are in {pictures}")
    return 0
