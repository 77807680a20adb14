# SPDX-License-Identifier: Apache-2.0
"""The rows under ``benchmarks/results`` as tables and pictures: ``python -m benchmarks.report`` (``--help``).

Of every file the newest row of each case and variant is shown, with the hardware and the commits it was measured with.
Nothing is left out: a case in which something is slower than the baseline has its bar like any other.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.outcome import AA
from benchmarks.result_files import RESULTS

Row = dict[str, str]


@dataclass(frozen=True)
class Comparison:
    """What one benchmark of the harness found: every variant against the baseline.

    Attributes:
        name: of the benchmark.
        baseline: the variant that the others are compared with.
        cases: in the order of the file.
        variants: likewise, without the baseline.
        rows: newest for (case, variant).
    """

    name: str
    baseline: str
    cases: tuple[str, ...]
    variants: tuple[str, ...]
    rows: dict[tuple[str, str], Row]

    def ratio(self, case: str, variant: str) -> float | None:
        """Times faster than the baseline; ``None`` if it was not measured."""
        row = self.rows.get((case, variant))
        return None if row is None else float(row["ratio"])

    def mean(self, variant: str) -> float:
        """Geometric, over the cases that were measured."""
        ratios = [ratio for case in self.cases if (ratio := self.ratio(case, variant)) is not None]
        return math.exp(sum(map(math.log, ratios)) / len(ratios))

    def markdown(self) -> str:
        """A table: cases down, variants across."""
        heads = [f"times faster than {self.baseline}", *self.variants]
        lines = [f"### {self.name}", "", _made_with(list(self.rows.values())), ""]
        lines += [_line(heads), _line(["---", *("---:" for _ in self.variants)])]
        for case in self.cases:
            lines.append(_line([case, *(self._cell(case, variant) for variant in self.variants)]))
        lines.append(_line(["**geometric mean**", *(f"**{self.mean(each):.3f}**" for each in self.variants)]))
        return "\n".join(lines)

    def _cell(self, case: str, variant: str) -> str:
        row = self.rows.get((case, variant))
        if row is None:
            return ""
        marks = (" CPU" if row["cpu_bound"] == "True" else "") + (" noisy" if row["noisy"] == "True" else "")
        return f"{float(row['ratio']):.3f} ({float(row['ratio_low']):.2f} to {float(row['ratio_high']):.2f}){marks}"


def comparison(name: str, rows: Sequence[Row]) -> Comparison:
    """Of the rows of one file.

    Raises:
        ValueError: no row of a baseline, which is the one compared with itself as A/A.
    """
    newest = {(row["case"], row["variant"]): row for row in rows}
    cases = tuple(dict.fromkeys(case for case, _ in newest))
    variants = tuple(dict.fromkeys(variant for _, variant in newest))
    # A row's ratio is 1 and so is its interval: the baseline's, by how it is made.
    exact = {each for (_, each), row in newest.items() if row["ratio"] == row["ratio_low"] == row["ratio_high"]}
    if not exact:
        raise ValueError(f"{name}: no row of a baseline among {', '.join(variants)}")
    baseline = next(each for each in variants if each in exact)
    return Comparison(name, baseline, cases, tuple(each for each in variants if each != baseline), newest)


def read(file: Path) -> list[Row]:
    """The rows of a file of results, oldest first."""
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened))


def _made_with(rows: Sequence[Row]) -> str:
    facts = []
    for column in ("hardware", "deepspeed", "torch", "commit", "date"):
        values = sorted({row[column] for row in rows if row.get(column)})
        facts.append(f"{column} {', '.join(values[:3])}{' and more' if len(values) > 3 else ''}")
    return "; ".join(facts)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def draw_bars(found: Comparison, file: Path) -> None:
    """Speedups as bars with their intervals, one group for each case and one for the mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = [*found.cases, "geometric mean"]
    variants = [each for each in found.variants if each != AA]
    width = 0.8 / len(variants)
    figure, axes = pyplot.subplots(figsize=(max(7.0, 0.28 * len(groups) * len(variants) + 2), 4.5))
    for i, variant in enumerate(variants):
        ratios = [found.ratio(case, variant) or 0.0 for case in found.cases]
        spans = [
            (ratio - float(row["ratio_low"]), float(row["ratio_high"]) - ratio) if row else (0.0, 0.0)
            for case, ratio in zip(found.cases, ratios, strict=True)
            for row in [found.rows.get((case, variant))]
        ]
        errors = [[max(0.0, each[side]) for each in [*spans, (0.0, 0.0)]] for side in (0, 1)]
        at = [group + (i - (len(variants) - 1) / 2) * width for group in range(len(groups))]
        axes.bar(at, [*ratios, found.mean(variant)], width, yerr=errors, label=variant, error_kw={"linewidth": 0.6})
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(groups)), groups, rotation=35, ha="right", fontsize=7)
    axes.set_ylabel(f"times faster than {found.baseline}")
    axes.set_title(f"{found.name}: {_made_with(list(found.rows.values()))}", fontsize=6)
    axes.set_ylim(top=1.2 * axes.get_ylim()[1])  # room for the legend
    axes.legend(fontsize=7, ncols=3, loc="upper left")
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def draw_predictions(rows: Sequence[Row], file: Path) -> None:
    """Predicted against measured, a point for each row of the autotuner's benchmark."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 5))
    for predicted, measured, label in (
        ("predicted_ms", "measured_ms", "experts' parts"),
        ("isolated_ms", "measured_ms", "experts' parts, had lanes not slowed each other down"),
        ("step_predicted_ms", "step_measured_ms", "steps"),
    ):
        points = [(float(row[measured]), float(row[predicted])) for row in rows]
        axes.scatter(*zip(*points, strict=True), s=18, label=label)
    largest = max(float(row["step_measured_ms"]) for row in rows) * 1.05
    axes.plot([0, largest], [0, largest], color="black", linewidth=0.8)
    axes.set_xlabel("measured [ms]")
    axes.set_ylabel("predicted [ms]")
    axes.set_title(_made_with(rows), fontsize=5)
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def newest_commit(rows: Sequence[Row], keys: Sequence[str]) -> list[Row]:
    """The last row of each configuration, which is what ``keys`` names."""
    return list({tuple(row[key] for key in keys): row for row in rows}.values())


def main() -> int:
    """Prints all tables as Markdown and writes the pictures beside the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="files of results, without .csv (all that have a baseline)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    parser.add_argument("--plots", type=Path, help="folder for the pictures (plots, beside the rows)")
    args = parser.parse_args()
    names = args.names or sorted(each.stem for each in args.results.glob("*.csv"))
    missing = [name for name in names if not (args.results / f"{name}.csv").is_file()]
    if missing or not names:
        there = ", ".join(sorted(each.stem for each in args.results.glob("*.csv"))) or "none"
        print(f"report: no results of {', '.join(missing) or 'anything'} in {args.results}; there are: {there}")
        return 2
    plots = args.plots or args.results / "plots"
    plots.mkdir(parents=True, exist_ok=True)
    for name in names:
        rows = read(args.results / f"{name}.csv")
        if rows and "ratio_low" in rows[0]:
            found = comparison(name, rows)
            print(found.markdown(), end="\n\n")
            draw_bars(found, plots / f"{name}.png")
        elif rows and "step_predicted_ms" in rows[0]:
            draw_predictions(newest_commit(rows, ("layers", "S", "M", "H")), plots / f"{name}.png")
        else:
            continue
        print(f"![{name}]({plots / name}.png)", end="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
