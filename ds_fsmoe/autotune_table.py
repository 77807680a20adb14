# SPDX-License-Identifier: Apache-2.0
"""What the autotuner has measured and chosen, as a table to be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_fsmoe.runtime.profiler import LayerProfile
from ds_fsmoe.tuned_degrees import Degree, PhaseChoice


@dataclass(frozen=True)
class Row:
    """Equal layers."""

    labels: tuple[str, ...]
    """Such as "L03"."""
    profile: LayerProfile
    choices: tuple[PhaseChoice, PhaseChoice]
    """(forward, backward)."""
    asked: tuple[Degree, Degree]
    """Degrees given by hand."""


def describe(rows: Sequence[Row], took_s: float, source: str) -> str:
    """Two tables: what operations cost, and how layers are run.

    Args:
        rows: one per kind of layer.
        took_s: seconds of the stage.
        source: where the numbers are from.
    """
    costs = [("layers", "operation", "alpha [ms]", "beta [ms per unit]", "unit", "r^2", "worst residual [ms]")]
    plans = [("layers", "phase", "degree", "predicted [ms]", "runner-up", "predicted [ms]", "degree 1 [ms]", "order")]
    notes: list[str] = []
    measured: dict[int, list[Row]] = {}
    for row in rows:
        measured.setdefault(id(row.profile), []).append(row)
    for alike in measured.values():
        profile = alike[0].profile
        layers = _span(sorted(label for row in alike for label in row.labels))
        for name, timing in profile.operations.items():
            fit = timing.fit
            cells = (f"{fit.cost.alpha_ms:.4f}", f"{fit.cost.beta_ms:.3e}", timing.unit, f"{fit.r2:.4f}")
            costs.append((layers, name, *cells, f"{fit.worst_residual_ms:.4f}"))
        costs.append((layers, "each task, besides", f"{profile.task_ms:.4f}", "", "", "", ""))
        bad = [name for name, timing in profile.operations.items() if not timing.fit.is_good]
        if bad:
            notes.append(f"{layers}: a straight line does not describe what was measured of {', '.join(bad)}")
        if profile.draws:
            notes.append(f"{layers}: experts draw random numbers, so both phases have one degree")
    for row in rows:
        layers = _span(row.labels)
        for phase, choice, asked in zip(("forward", "backward"), row.choices, row.asked, strict=True):
            block = choice.block
            runner_up = ("-", "-")
            if choice.runner_up is not None and choice.runner_up_ms is not None:
                runner_up = (str(choice.runner_up), f"{choice.runner_up_ms:.3f}")
            late = f", {block.late_dw} late dW" if block.late_dw else ""
            cells = (f"{choice.time_ms:.3f}", *runner_up, f"{choice.uncut_ms:.3f}", f"{block.links}{late}")
            plans.append((layers, phase, str(block.degree), *cells))
            if asked is not None:
                notes.append(
                    f"{layers} {phase}: degree {asked} is given by hand; auto would have chosen {choice.auto_degree}, "
                    f"predicted {choice.auto_ms:.3f} ms"
                )
    head = f"autotune: {source}; the stage took {took_s:.2f} s"
    return "\n".join([head, *_aligned(costs), "", *_aligned(plans), *notes])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _span(labels: Sequence[str]) -> str:
    """``L00..L03``, and what does not follow on one by one: ``L01, L03``."""
    numbers = [int(each.removeprefix("L")) for each in labels]
    if len(labels) > 2 and numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return f"{labels[0]}..{labels[-1]}"
    return ", ".join(labels)
