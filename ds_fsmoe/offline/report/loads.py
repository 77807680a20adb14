# SPDX-License-Identifier: Apache-2.0
"""Shows the load of experts and of ranks, what was decided about where experts are, and what came of it.

A decision about placement is taken from the rows of the steps before it, so that the next one measures what it gained.

Letters: E experts, G ranks that share them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ds_fsmoe.files.runs import Run
from ds_fsmoe.offline.report.charts import Chart, draw_heat, draw_lines, draw_ranks
from ds_fsmoe.planning.expert_placement import ExpertPlacement

if TYPE_CHECKING:
    from ds_fsmoe.offline.report.page import Page

_MOST_ROWS = 30
"""The decisions that a table has at most."""
_MOST_LAYERS = 12
"""The layers that are drawn at most."""


def loads(page: Page, run: Run) -> None:
    """Write a section about the load of experts, if routers were observed."""
    if not run.routers:
        return
    page.heading("Load of experts")
    page.paragraph("Orange: an expert got more tokens than the mean of its layer, up to twice as many; blue: fewer.")
    page.charts([_heat(layer, run.routers) for layer in _most_uneven(page, run.routers)])
    last = run.routers[-1]
    page.table(
        (f"step {last['step']}", "tokens per expert", "fullest", "variation", "dropped", "aux loss", "entropy"),
        ((name, *_load_cells(load)) for name, load in last["layers"].items()),
    )


def _most_uneven(page: Page, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the layers that are drawn: where there are many, those whose experts differ most in the last step."""
    layers = list(dict.fromkeys(name for row in rows for name in row["layers"]))
    if len(layers) <= _MOST_LAYERS:
        return layers
    last = rows[-1]["layers"]
    found = sorted(layers, key=lambda each: -max(last[each]["tokens_E"]) / (sum(last[each]["tokens_E"]) or 1.0))
    page.paragraph(f"Of the {len(layers)} layers the {_MOST_LAYERS} with the fullest experts are drawn.")
    return [each for each in layers if each in found[:_MOST_LAYERS]]


def _heat(layer: str, rows: Sequence[Mapping[str, Any]]) -> Chart:
    own = [(row["step"], row["layers"][layer]["tokens_E"]) for row in rows if layer in row["layers"]]
    if len({len(tokens) for _, tokens in own}) > 1:
        raise ValueError(f"{layer} has different numbers of experts in different steps")
    steps, tokens_NE = zip(*own, strict=True)
    return draw_heat(f"tokens per expert of {layer} over steps", layer, steps, tokens_NE, "tokens over the mean")


def _load_cells(load: Mapping[str, Any]) -> tuple[str, ...]:
    tokens = load["tokens_E"]
    mean = sum(tokens) / len(tokens)
    deviation = (sum((each - mean) ** 2 for each in tokens) / len(tokens)) ** 0.5
    entropy = "" if load["entropy"] is None else f"{load['entropy']:.3f}"
    return (
        f"{mean:.1f}",
        f"{max(tokens):.0f}",
        f"{deviation / mean:.2f}" if mean else "0",
        f"{load['dropped_share']:.1%}",
        f"{load['aux_loss']:.4g}",
        entropy,
    )


@dataclass(frozen=True)
class PlacementDecision:
    """What was decided about all layers after one step."""

    step: int
    rows: Mapping[str, Mapping[str, Any]]
    """Layer -> the row of the record."""
    following: Mapping[str, Mapping[str, Any]]
    """The same of the next decision; empty after the last one."""

    @property
    def changed(self) -> list[Mapping[str, Any]]:
        """The rows of the layers whose placement changes."""
        return [each for each in self.rows.values() if _changes(each)]

    @property
    def fullest(self) -> Mapping[str, Any]:
        """The row of the layer whose fullest rank lies highest above the mean, of those that change if any do."""
        return max(self.changed or self.rows.values(), key=lambda each: each["balance"])

    @property
    def measured(self) -> float | None:
        """The rows of the fullest rank of that layer over the mean at the next decision; ``None``: there is none."""
        row = self.following.get(self.fullest["layer"])
        return None if row is None else row["balance"]


def decisions_of(rows: Sequence[Mapping[str, Any]]) -> list[PlacementDecision]:
    """Return the decisions of a run, by their steps.

    Args:
        rows: the lines of ``placement.jsonl``.
    """
    by_step: dict[int, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        by_step.setdefault(row["step"], {})[row["layer"]] = row
    steps = sorted(by_step)
    after = [by_step[each] for each in steps[1:]]
    return [
        PlacementDecision(step, by_step[step], following) for step, following in zip(steps, [*after, {}], strict=True)
    ]


def _changes(row: Mapping[str, Any]) -> bool:
    return "places" in row or row["num_swaps"] > 0 or row["expected_balance"] != row["balance"]


def placement(page: Page, run: Run) -> None:
    """Write a section about where experts are, if that was decided during the run."""
    if not run.placement:
        return
    decisions = decisions_of(run.placement)
    changes = [each for each in decisions if each.changed]
    page.heading("Placement of experts")
    num_swaps = sum(row["num_swaps"] for each in changes for row in each.changed)
    page.paragraph(
        f"Where experts should be was decided {_times(len(decisions))}, {_times(len(changes))} with a change: "
        f"{num_swaps} exchange(s) of two experts in all. The fullest rank is given over the mean of the ranks that "
        "share the experts, in the layer of the decision where it was fullest."
    )
    page.paragraph(f"Last decision: {decisions[-1].fullest['why']}.")
    if changes:
        if len(changes) > _MOST_ROWS:
            page.paragraph(f"The last {_MOST_ROWS} changes of {len(changes)} are shown.")
        page.table(_HEADS, (_cells(each) for each in changes[-_MOST_ROWS:]))
    drawn = [each.fullest for each in changes if "places" in each.fullest]
    if any(row.get("num_replicas") for row in run.placement):
        page.paragraph(
            "Experts had replicas on other ranks in this run: they are part of what was measured, and not drawn."
        )
    if drawn:
        panels = _before_and_after(drawn[0])
        page.charts(draw_ranks(panels))
    if len(decisions) > 1:
        about = "rows of the fullest rank over the mean, over steps"
        page.chart(draw_lines(about, _balance_lines(decisions), "fullest rank / mean", from_zero=True))


_HEADS = (
    "after step",
    "layers that change",
    "exchanges",
    "fullest",
    "before",
    "expected",
    "measured next",
    "predicted gain, ms per step",
)


def _cells(decision: PlacementDecision) -> tuple[str, ...]:
    changed, fullest = decision.changed, decision.fullest
    gains_ms = [row["gain_ms"] for row in changed if row["gain_ms"] is not None]
    return (
        str(decision.step),
        f"{len(changed)} of {len(decision.rows)}",
        str(sum(row["num_swaps"] for row in changed)),
        fullest["layer"],
        f"{fullest['balance']:.2f}",
        f"{fullest['expected_balance']:.2f}",
        "-" if decision.measured is None else f"{decision.measured:.2f}",
        f"{sum(gains_ms):.3g}" if gains_ms else "-",
    )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _balance_lines(decisions: Sequence[PlacementDecision]) -> dict[str, list[tuple[float, float]]]:
    """Return what is measured at each decision, and what the one before it had expected for then."""
    lines: dict[str, list[tuple[float, float]]] = {"layer with the fullest rank": [], "mean of layers": []}
    expected: list[tuple[float, float]] = []
    for before, decision in zip([None, *decisions], decisions, strict=False):
        balances = [row["balance"] for row in decision.rows.values()]
        lines["layer with the fullest rank"].append((decision.step, max(balances)))
        lines["mean of layers"].append((decision.step, sum(balances) / len(balances)))
        if before is not None:
            expected.append((decision.step, max(row["expected_balance"] for row in before.rows.values())))
    return lines | {"fullest, as expected by the decision before": expected}


def _before_and_after(row: Mapping[str, Any]) -> list[tuple[str, list[list[tuple[int, float]]]]]:
    """Return pictures of the ranks of a layer, without the replicas that version 0.2.0 had."""
    places, rows_E = row["places"], np.array(row["rows_E"], dtype=float)
    sizes = {"num_experts": len(rows_E), "num_ranks": len(places["node_of_rank"])}
    before, after = (ExpertPlacement.from_dict(sizes | {"expert_of_place": places[at]}) for at in ("before", "after"))
    return [
        (f"{row['layer']} until step {row['step']}", rows_of_ranks(before, rows_E)),
        ("as was decided then", rows_of_ranks(after, rows_E)),
    ]


def rows_of_ranks(placed: ExpertPlacement, rows_E: np.ndarray) -> list[list[tuple[int, float]]]:
    """Return for each rank the experts that it holds, as (expert, rows that come to it there).

    Args:
        placed: where experts are.
        rows_E: the rows of each expert, of all ranks.
    """
    return [[(expert, float(rows_E[expert])) for expert in of_rank] for of_rank in placed.by_rank.tolist()]
