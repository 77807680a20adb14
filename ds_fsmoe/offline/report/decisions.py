# SPDX-License-Identifier: Apache-2.0
"""Writes the sections about decisions and their results: plans, trials, predictions, the loads and places of
experts. The report's page calls it.

A placement decision is made from the rows of the steps before it, so the next decision measures its gain.

Letters: E experts, G ranks that share them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ds_fsmoe.config.words import words_of
from ds_fsmoe.files.runs import Run
from ds_fsmoe.offline.report.charts import Chart, draw_against, draw_dots, draw_fit, draw_heat, draw_lines, draw_ranks
from ds_fsmoe.offline.report.page import Page
from ds_fsmoe.planning.decide.block_times import order_words
from ds_fsmoe.planning.expert_placement import ExpertPlacement


def decided(page: Page, run: Run) -> None:
    """Write the section about the plans that ran."""
    plans = run.plans
    chosen = plans.get("chosen", run.facts.get("chosen", {}))
    if not plans and not chosen:
        return
    page.heading("What was decided")
    if chosen:
        page.table(
            ("field", "what runs"),
            (row for name, text in chosen.items() for row in _in_todays_words(name, text)),
            is_text=True,
        )
    if keeps_stock(run):
        page.paragraph("Layers run in one chunk, in DeepSpeed's order: the plans that were tried were not faster.")
    elif "choices" in plans:
        page.table(_CHOICE_HEADS, (_choice_cells(each) for each in plans["choices"]))
    elif plans.get("layers"):
        heads = ("layer", "phase", "chunks", "order of tasks")
        page.table(heads, ((each["layer"], each["phase"], each["degree"], _order(each)) for each in plans["layers"]))
        page.paragraph("Nothing was measured: num_chunks was given, is 1, or came from a checkpoint.")
    step = plans.get("step")
    if step:
        own = f"{step['chosen_ms']:.4g} ms, with DeepSpeed's schedule " if not keeps_stock(run) else ""
        bound = f"the lower bound of these tasks is {step['bound_ms']:.4g} ms"
        if not step.get("is_bound", True):
            bound = f"steps take less than the {step['bound_ms']:.4g} ms that their tasks took alone"
        page.paragraph(
            f"A step without the optimizer was predicted to take {own}{step['deepspeed_ms']:.4g} ms; {bound}. "
            f"Gradients take {step['gradients_ms']:.4g} ms, of which {step['exposed_ms']:.4g} find no idle link. "
            f"{plans['num_measured']} operations were measured; measuring and planning took {plans['took_s']:.3g} s."
        )


def _in_todays_words(name: str, text: str) -> list[tuple[str, str]]:
    """Return (field, what runs) of a record of any version; nothing for a field that has no effect any more."""
    parts = [words_of({name: each}).normalized for each in re.split("([,;] )", text)]
    return [(word, "".join(each[word] for each in parts)) for word in parts[0]]


def keeps_stock(run: Run) -> bool:
    """Return True if plans were tried and DeepSpeed's schedule was kept. Earlier versions recorded only the trials."""
    rounds = [each for each in run.plans.get("trials", ()) if each]
    was_kept = bool(rounds) and any(each["is_kept"] and each.get("is_baseline", False) for each in rounds[-1])
    return run.plans.get("is_stock", was_kept)


_CHOICE_HEADS = (
    *("layers", "phase", "chunks", "order of tasks", "predicted ms", "runner-up", "its ms", "1 chunk ms", "bound by"),
)


def _order(each: Mapping[str, Any]) -> str:
    # Runs of before conversions were tasks do not say where they are.
    return order_words(each["degree"], each["order"], each.get("conversions", "links"))


def _choice_cells(each: Mapping[str, Any]) -> tuple[Any, ...]:
    return (
        _span(each["layers"]),
        each["phase"],
        f"{each['degree']}{' (given)' if each['asked'] is not None else ''}",
        _order(each),
        each["predicted_ms"],
        "-" if each["runner_up"] is None else each["runner_up"],
        "-" if each["runner_up_ms"] is None else each["runner_up_ms"],
        each["uncut_ms"],
        each.get("bound_by", "-"),
    )


def _span(labels: Sequence[str]) -> str:
    return labels[0] if len(labels) == 1 else f"{labels[0]} to {labels[-1]} ({len(labels)})"


def trials(page: Page, run: Run) -> None:
    """Write the section about the tried plans, with a point for each step."""
    rounds = [each for each in run.plans.get("trials", ()) if each]
    if not rounds:
        return
    page.heading("Plans that were tried")
    page.paragraph(
        "Predictions only say what is worth a try: training steps were done with these plans in turns, and what they "
        "took decided, also against a prediction. A point is a step, without the optimizer; the stroke is their "
        "median." + (" Slow plans are dropped early. The last round measures the speedup." if len(rounds) > 1 else "")
    )
    if "num_plans" in run.plans:
        page.paragraph(f"{run.plans['num_plans']} plans were tried in {run.plans['num_steps']} steps.")
    for number, of_round in enumerate(rounds, start=1):
        page.chart(_round(f"round {number}", of_round))
    for number, of_round in enumerate(rounds, start=1):
        page.table(
            (f"plans tried, round {number}", "ms per step", "steps", ""),
            (
                (each["name"], each["step_ms"], each["num_steps"], "kept" if each["is_kept"] else "")
                for each in of_round
            ),
        )


def _round(title: str, tried: Sequence[Mapping[str, Any]]) -> Chart:
    def note(each: Mapping[str, Any]) -> dict[str, Any]:
        return {"name": each["name"], "is_kept": each["is_kept"], "note": "kept" if each["is_kept"] else ""}

    medians = [note(each) | {"x": each["step_ms"]} for each in tried]
    steps = [note(each) | {"x": ms} for each in tried for ms in each.get("times_ms", ())]
    return draw_dots(f"what steps took with each plan, {title}", steps, "ms per step", title, medians)


def compared(page: Page, run: Run) -> None:
    """Write the section about predicted and measured times."""
    if not run.compared:
        return
    page.heading("Predicted and measured")
    whole = {
        which.removesuffix("_ms"): [(row["step"], row["whole"][which]) for row in run.compared]
        for which in ("measured_ms", "predicted_ms")
    }
    of_phases = [
        {"x": each["measured_ms"], "y": each["predicted_ms"], "kind": kind, "name": f"{name}, step {row['step']}"}
        for row in run.compared
        for name, each in row["phases"].items()
        for kind in ("forward", "backward")
        if name.endswith(kind)
    ]
    about = "predicted and measured steps"
    charts = [draw_lines(about, whole, "step without the optimizer, ms", from_zero=True, is_zoomable=False)]
    if of_phases:
        about = "phases of layers, predicted against measured"
        charts.append(draw_against(about, of_phases, "phase of a layer, measured ms", "predicted ms", ""))
    page.charts(charts)
    last = run.compared[-1]
    named = {"step": last["whole"], "rest of the model": last["rest"], **last["phases"]}
    page.table(
        (f"step {last['step']}", "predicted ms", "measured ms"),
        ((name, each["predicted_ms"], each["measured_ms"]) for name, each in named.items()),
    )
    if last.get("busy"):
        shares = ", ".join(f"{lane} {share:.0%}" for lane, share in last["busy"].items())
        page.paragraph(f"Of the layers' phases, lanes were busy: {shares}.")


def measured_operations(page: Page, run: Run) -> None:
    """Write the section about the measured operations and their fitted lines."""
    found = run.plans.get("fits")
    if not found:
        return
    page.heading("What was measured")
    page.charts([_fit(each) for each in found])
    bad = [each["operation"] for each in found if not each["is_good"]]
    if bad:
        page.paragraph(f"No straight line describes {', '.join(bad)}: predictions of these are rough.", True)
    page.table(
        ("operation", "alpha ms", "beta ms per unit", "unit", "typically off", "at most"),
        (
            (
                each["operation"],
                f"{line['alpha_ms']:.4f}",
                f"{line['beta_ms']:.3e}",
                each["unit"],
                f"{each['typical_share']:.1%}",
                f"{each['worst_share']:.1%}",
            )
            for each in found
            for line in each["lines"]
        ),
    )


def _fit(fit: Mapping[str, Any]) -> Chart:
    points = sorted(zip(fit["sizes"], fit["times_ms"], fit["line_ms"], strict=True))
    good = "" if fit["is_good"] else ", bad fit"
    title = f"{fit['operation']}, off by {fit['typical_share']:.1%}{good}"
    return draw_fit(f"measured times and line of {fit['operation']}", points, fit["unit"], title)


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
    """Return the layers to draw; of many, those whose experts differ most in the last step."""
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
    """Holds the decisions about all layers after one step."""

    step: int
    rows: Mapping[str, Mapping[str, Any]]
    """Layer -> the row of the record."""
    following: Mapping[str, Mapping[str, Any]]
    """The same of the next decision; empty after the last one."""

    @property
    def changed(self) -> list[Mapping[str, Any]]:
        """Return the rows of the layers whose placement changes."""
        return [each for each in self.rows.values() if _changes(each)]

    @property
    def fullest(self) -> Mapping[str, Any]:
        """Return the row of the layer whose fullest rank is highest above the mean, among changing layers if there
        are any.
        """
        return max(self.changed or self.rows.values(), key=lambda each: each["balance"])

    @property
    def measured(self) -> float | None:
        """Return the rows of that layer's fullest rank over the mean at the next decision, or None."""
        row = self.following.get(self.fullest["layer"])
        return None if row is None else row["balance"]


def decisions_of(rows: Sequence[Mapping[str, Any]]) -> list[PlacementDecision]:
    """Return the decisions of a run, in the order of their steps.

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
    """Write a section about expert placement, if it was decided during the run."""
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
    """Return the measured balance at each decision, and the one that the decision before expected."""
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
    """Return (title, ranks) before and after a decision about a layer, without replicas of version 0.2.0."""
    places, rows_E = row["places"], np.array(row["rows_E"], dtype=float)
    sizes = {"num_experts": len(rows_E), "num_ranks": len(places["node_of_rank"])}
    before, after = (ExpertPlacement.from_dict(sizes | {"expert_of_place": places[at]}) for at in ("before", "after"))
    return [
        (f"{row['layer']} until step {row['step']}", rows_of_ranks(before, rows_E)),
        ("as was decided then", rows_of_ranks(after, rows_E)),
    ]


def rows_of_ranks(placed: ExpertPlacement, rows_E: np.ndarray) -> list[list[tuple[int, float]]]:
    """Return for each rank its experts, as (expert, rows).

    Args:
        placed: the placement of the experts.
        rows_E: the rows of each expert over all ranks, [E].
    """
    return [[(expert, float(rows_E[expert])) for expert in of_rank] for of_rank in placed.by_rank.tolist()]
