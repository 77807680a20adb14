# SPDX-License-Identifier: Apache-2.0
"""The rows under ``benchmarks/results`` as tables and pictures: ``python -m benchmarks.report`` (``--help``).

Of every file the newest row of each case and variant is shown, with the hardware and the commits it was measured with.
Nothing is left out: a case in which something is slower than the baseline has its bar like any other. All times are of
processors and emulated links unless a row's hardware names a GPU: several GPUs over NCCL have not been measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness.result_files import RESULTS
from benchmarks.reporting import proportions
from benchmarks.reporting.claims import PAGE
from benchmarks.reporting.costs import memory, tuning
from benchmarks.reporting.figures import NoRowError, Results
from benchmarks.reporting.page import NAME, page
from benchmarks.reporting.plots import draw_fits, draw_predictions, draw_ratios, draw_timelines
from benchmarks.reporting.rows import Row, comparison, further_baselines, newest, read
from benchmarks.reporting.tables import beside_table_5, gains_in_two, losses, operations, predictions

OF_AUTOTUNE = (
    ("predicted_ms", "measured_ms", "experts' parts"),
    ("isolated_ms", "measured_ms", "experts' parts, had lanes not slowed each other down"),
    ("step_predicted_ms", "step_measured_ms", "steps"),
)
OF_LAYERS = (("predicted_ms", "measured_ms", "steps"), ("bound_ms", "measured_ms", "what no schedule could beat"))


def sections(name: str, rows: list[Row], plots: Path) -> Iterator[str]:
    """What there is to show of one file, by its columns; pictures are written on the way."""
    picture = plots / f"{name}.png"
    columns = rows[0].keys() if rows else ()
    if {"case", "ratio_low"} <= set(columns):
        found = comparison(name, rows)
        yield found.markdown()
        for over in further_baselines(rows):
            yield comparison(name, rows, over).markdown()
        if found.baseline == "stock" and {"deepspeed", "fsmoe"} <= set(found.variants):
            yield gains_in_two(found)
            yield beside_table_5(found)
        draw_ratios(found, picture)
    elif "step_predicted_ms" in columns:
        draw_predictions(newest(rows, ("layers", "S", "M", "H")), OF_AUTOTUNE, picture)
    elif {"bound_ms", "measured_ms"} <= set(columns):
        rows = newest(rows, ("case", "variant"))
        yield f"### {name}\n\n{predictions(rows)}"
        draw_predictions(rows, OF_LAYERS, picture)
    elif "operation" in columns and "layout" in columns:
        yield f"### {name}\n\n{operations(newest(rows, ('case', 'layout', 'phase', 'operation')))}"
        return
    elif {"held", "peak"} <= set(columns):
        yield f"### {name}\n\n{memory(rows)}"
        return
    elif "steps_of_trials" in columns:
        yield f"### {name}\n\n{tuning(rows)}"
        return
    elif {"loss", "step"} <= set(columns):
        yield f"### {name}\n\n{losses(rows)}"
        return
    elif "lane" in columns and "start_ms" in columns:
        draw_timelines([row for row in rows if row["date"] == rows[-1]["date"]], picture)
    elif "line_ms" in columns and "operation" in columns:
        draw_fits(newest(rows, ("operation", "size")), picture)
    else:
        return
    yield f"![{name}]({picture})"


def write_page(results: Path) -> int:
    """Write the page of the figures in README and docs/, and the tables that docs/ have of proportions; return the exit
    status: 2 if a figure has no row."""
    try:
        text = page(Results(results))
    except NoRowError as error:
        print(f"report: {error}; the page is not written")
        return 2
    (results / NAME).write_text(text)
    print(f"report: {results / NAME}")
    if results == RESULTS:
        docs = RESULTS.parents[1] / PAGE
        proportions.write_into(docs, Results(results))
        print(f"report: the tables of proportions in {docs}")
    return 0


def main() -> int:
    """Prints all tables as Markdown and writes the pictures beside the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="files of results, without .csv (all that can be shown)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    parser.add_argument("--plots", type=Path, help="folder for the pictures (plots, beside the rows)")
    parser.add_argument("--page", action="store_true", help="write the page that says where figures are from, only")
    args = parser.parse_args()
    if args.page:
        return write_page(args.results)
    names = args.names or sorted(each.stem for each in args.results.glob("*.csv"))
    missing = [name for name in names if not (args.results / f"{name}.csv").is_file()]
    if missing or not names:
        there = ", ".join(sorted(each.stem for each in args.results.glob("*.csv"))) or "none"
        print(f"report: no results of {', '.join(missing) or 'anything'} in {args.results}; there are: {there}")
        return 2
    plots = args.plots or args.results / "plots"
    plots.mkdir(parents=True, exist_ok=True)
    for name in names:
        if name == proportions.NAME:
            print(f"### {name}\n\n{proportions.tables(Results(args.results))}\n")
            continue
        for section in sections(name, read(args.results / f"{name}.csv"), plots):
            print(section, end="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
