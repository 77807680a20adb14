# SPDX-License-Identifier: Apache-2.0
"""Shows what was measured and decided: plans with their runners-up, trials step by step, predictions beside times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ds_fsmoe.files.runs import Run
from ds_fsmoe.offline.report.charts import Chart, draw_against, draw_dots, draw_fit, draw_lines
from ds_fsmoe.planning.decide.block_times import order_words

if TYPE_CHECKING:
    from ds_fsmoe.offline.report.page import Page


def decided(page: Page, run: Run) -> None:
    """Write the section about the plans that ran."""
    plans = run.plans
    chosen = plans.get("chosen", run.facts.get("chosen", {}))
    if not plans and not chosen:
        return
    page.heading("What was decided")
    if chosen:
        rows = ((_WORDS_OF_BEFORE.get(name, name), words) for name, words in chosen.items())
        page.texts(("field", "what runs"), rows)
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
        bound = f"no order of tasks takes less than {step['bound_ms']:.4g} ms"
        if not step.get("is_bound", True):
            bound = f"steps take less than the {step['bound_ms']:.4g} ms that their tasks took when measured alone"
        page.paragraph(
            f"A step without the optimizer was predicted to take {own}{step['deepspeed_ms']:.4g} ms; {bound}. "
            f"Gradients take {step['gradients_ms']:.4g} ms, of which {step['exposed_ms']:.4g} find no idle link. "
            f"{plans['num_measured']} operations were measured; measuring and planning took {plans['took_s']:.3g} s."
        )


_WORDS_OF_BEFORE = {"pipeline_degree": "num_chunks", "esp_size": "expert_tensor_parallel_size"}
"""The words of runs that were recorded before fields had today's."""


def keeps_stock(run: Run) -> bool:
    """Return whether plans were tried and DeepSpeed's schedule was kept; earlier versions recorded the trials alone."""
    rounds = [each for each in run.plans.get("trials", ()) if each]
    was_kept = bool(rounds) and any(each["is_kept"] and each.get("is_baseline", False) for each in rounds[-1])
    return run.plans.get("is_stock", was_kept)


_CHOICE_HEADS = (
    *("layers", "phase", "chunks", "order of tasks", "predicted ms", "runner-up", "its ms", "1 chunk ms", "bound by"),
)


def _order(each: Mapping[str, Any]) -> str:
    return order_words(each["degree"], each["order"])


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
    """Write the section about the plans that were tried, a point for each step."""
    rounds = [each for each in run.plans.get("trials", ()) if each]
    if not rounds:
        return
    page.heading("Plans that were tried")
    page.paragraph(
        "Predictions only say what is worth a try: training steps were done with these plans in turns, and what they "
        "took decided, also against a prediction. A point is a step, without the optimizer; the stroke is their "
        "median. Slow plans are dropped early. The last round measures the speedup."
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
    """Write the section about predictions beside what was measured."""
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
    """Write the section about the operations that were measured, and the lines fitted to them."""
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
