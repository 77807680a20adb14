# SPDX-License-Identifier: Apache-2.0
"""Shows runs as one self-contained HTML page: pictures are in it, with no script, no font, and no external address."""

from __future__ import annotations

import base64
import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ds_fsmoe.files.runs import Run, has_trace, trace_folder
from ds_fsmoe.reporting import pictures
from ds_fsmoe.reporting.comparison import losses_of, pair, settled_after, times_of
from ds_fsmoe.reporting.critical_path import Phase
from ds_fsmoe.reporting.loads import loads, placement
from ds_fsmoe.reporting.merged_trace import merged

_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;margin:0 auto;padding:1rem;max-width:60rem;color:#222;background:#fff}
h1{font-size:1.5rem;margin:.2rem 0}h2{font-size:1.15rem;margin:2rem 0 .4rem;border-bottom:1px solid #ddd}
p{margin:.4rem 0}img{max-width:100%;height:auto;display:block;margin:.5rem 0}
.wide{overflow-x:auto}.broad img{min-width:50rem}table{border-collapse:collapse;font-size:.85rem;margin:.4rem 0}
th,td{padding:.25rem .6rem;border-bottom:1px solid #e5e5e5;text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left}th{font-weight:600;background:#f6f6f6}
.tiles{display:flex;flex-wrap:wrap;gap:.6rem;margin:.8rem 0}
.tile{border:1px solid #ddd;border-radius:.5rem;padding:.5rem .9rem;min-width:7rem}
.tile b{display:block;font-size:1.4rem;line-height:1.2}.tile span{font-size:.8rem;color:#555}
.warn{background:#fff4e0;border-left:4px solid #f58518;padding:.4rem .8rem;margin:.5rem 0}
small{color:#555}
"""


class Page:
    """A page of sections; its pictures are kept beside it as files, too.

    Args:
        title: the title of the page.
        folder: the folder for the pictures, created if needed.
    """

    def __init__(self, title: str, folder: Path) -> None:
        self._title = title
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._parts: list[str] = [f"<h1>{_text(title)}</h1>"]

    def section(self, write: Callable[[Page, Any], None], about: Run | Sequence[Run]) -> None:
        """Let a function write a section. If its numbers contradict themselves, the section says only that."""
        before = len(self._parts)
        try:
            write(self, about)
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError) as error:
            del self._parts[before:]
            names = about.name if isinstance(about, Run) else " and ".join(each.name for each in about)
            what = write.__name__.strip("_")
            self.paragraph(
                f"{names}: what was recorded cannot be shown ({what}): {type(error).__name__}: {error}", "warn"
            )

    def heading(self, words: str) -> None:
        """Write the heading of a section."""
        self._parts.append(f"<h2>{_text(words)}</h2>")

    def paragraph(self, words: str, kind: str = "") -> None:
        """Write a sentence or two; ``kind`` "warn" makes them stand out."""
        self._parts.append(f'<p class="{kind}">{_text(words)}</p>' if kind else f"<p>{_text(words)}</p>")

    def table(self, heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Write a table with the first column left-aligned, the others right-aligned; it scrolls on narrow screens."""
        head = "".join(f"<th>{_text(each)}</th>" for each in heads)
        body = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        self._parts.append(f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>')

    def tiles(self, values: Iterable[tuple[str, str]]) -> None:
        """Write pairs of (value, what it is) in large type."""
        tiles = "".join(f'<div class="tile"><b>{_text(v)}</b><span>{_text(what)}</span></div>' for v, what in values)
        self._parts.append(f'<div class="tiles">{tiles}</div>')

    def picture(self, name: str, about: str, draw: Callable[[Path], None], is_broad: bool = False) -> None:
        """Draw a picture into a file of that name, and into the page; a broad one scrolls on narrow screens."""
        file = self._folder / f"{name}.png"
        draw(file)
        data = base64.b64encode(file.read_bytes()).decode()
        image = f'<img alt="{_text(about)}" src="data:image/png;base64,{data}">'
        self._parts.append(f'<div class="wide broad">{image}</div>' if is_broad else image)

    def html(self) -> str:
        """Return the page as HTML."""
        head = (
            '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
            f"<title>{_text(self._title)}</title><style>{_STYLE}</style>"
        )
        return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(self._parts)}</body></html>\n'


def _text(value: Any) -> str:
    return html.escape(f"{value:.4g}" if isinstance(value, float) else str(value))


def make_page(runs: Sequence[Run], folder: Path) -> Page:
    """Return a page with everything that runs have recorded.

    Args:
        runs: one run, or stock's and ours.
        folder: the folder for pictures.
    """
    page = Page(" and ".join(run.name for run in runs), folder)
    for run in runs:
        page.section(_about, run)
        for problem in run.problems:
            page.paragraph(f"{run.name}: {problem}", "warn")
    for section in (_result, _losses, _steps):
        page.section(section, runs)
    for run in runs:
        page.section(_decided, run)
        page.section(_compared, run)
    page.section(_timelines, runs)
    for run in runs:
        page.section(loads, run)
        page.section(placement, run)
        page.section(_fits, run)
    return page


def _about(page: Page, run: Run) -> None:
    facts = run.facts
    if not facts:
        return
    batch = facts.get("batch", {})
    words = [
        f"{run.name}: {facts.get('world_size', '?')} rank(s) on {facts.get('device', '?')} ({facts.get('host', '?')})",
        f"{len(facts.get('layers', {}))} MoE layer(s), {facts.get('dtype', '?')}, ZeRO stage "
        f"{facts.get('zero_stage', '?')}" + (f", {batch.get('all')} samples per step" if batch else ""),
        f"DeepSpeed {facts.get('deepspeed', '?')}, torch {facts.get('torch', '?')}, ds_fsmoe {facts.get('ds_fsmoe')}",
        f"began {facts.get('began', '?')}, " + (f"ended {facts['ended']}" if "ended" in facts else "no end recorded"),
    ]
    page.paragraph("; ".join(words) + ".")


def _result(page: Page, runs: Sequence[Run]) -> None:
    both = pair(runs)
    if both is None:
        tiles = []
        for run in runs:
            times = times_of(run, _after(runs))
            if times is not None:
                tiles.append((f"{times.step_ms:.4g} ms", f"per step, median of {times.num_steps}"))
            if run.steps and isinstance(run.steps[-1].get("loss"), float):
                tiles.append((f"{run.steps[-1]['loss']:.4g}", f"loss at step {run.steps[-1]['step']} (rank 0)"))
        if tiles:
            page.tiles(tiles)
        return
    stock, ours = both
    after = _after(runs)
    times, losses = (times_of(stock, after), times_of(ours, after)), losses_of(stock, ours)
    tiles = []
    if times[0] is not None and times[1] is not None:
        speedup = times[0].step_ms / times[1].step_ms
        tiles.append((f"{speedup:.2f}x", f"as fast as {stock.name}"))
        tiles += [
            (f"{each.step_ms:.4g} ms", f"per step, {run.name}") for each, run in zip(times, both, strict=True) if each
        ]
    if losses is not None:
        tiles.append((f"{losses.largest_difference:.2g}", f"largest relative difference of {losses.num_steps} losses"))
    page.tiles(tiles)
    for run, step in zip(both, losses.not_finite_from if losses else (), strict=False):
        if step is not None:
            page.paragraph(f"{run.name}: losses are not finite from step {step} on", "warn")


def _after(runs: Sequence[Run]) -> int:
    """Return the last step that does not count, the same for all runs."""
    return max((settled_after(run) for run in runs if run.steps), default=0)


def _losses(page: Page, runs: Sequence[Run]) -> None:
    lines = pictures.loss_lines(runs)
    if lines:
        page.heading("Losses")
        page.paragraph("Of rank 0's batches.")
        page.picture("losses", "loss over steps", lambda file: pictures.draw_lines(lines, "loss", file, False))


def _steps(page: Page, runs: Sequence[Run]) -> None:
    lines = pictures.step_lines(runs)
    if not lines:
        return
    page.heading("Steps")
    page.picture("steps", "time of each step", lambda file: pictures.draw_lines(lines, "ms per step", file, True))
    rows = []
    for run in runs:
        times = times_of(run, _after(runs))
        if times is not None:
            parts = (f"{times.parts_ms[part]:.4g}" if part in times.parts_ms else "" for part in _PARTS)
            rows.append((run.name, times.num_steps, f"{times.step_ms:.4g}", *parts))
    if rows:
        page.table(("medians in ms", "steps", "step", *_PARTS), rows)
    page.paragraph(f"Counted after step {_after(runs)}: until then things are made, measured and tried.")


_PARTS = ("forward", "backward", "optimizer", "rest")


def _decided(page: Page, run: Run) -> None:
    plans = run.plans
    chosen = plans.get("chosen", run.facts.get("chosen", {}))
    if not plans and not chosen:
        return
    page.heading("What was decided")
    if chosen:
        page.table(("part", "chosen"), chosen.items())
    if "choices" in plans:
        heads = ("layers", "phase", "degree", "order", "predicted ms", "runner-up", "its ms", "degree 1 ms")
        page.table(
            heads,
            (
                (
                    _span(each["layers"]),
                    each["phase"],
                    f"{each['degree']}{' (given)' if each['asked'] is not None else ''}",
                    each["order"] + (f", {each['late_dw']} late dW" if each["late_dw"] else ""),
                    each["predicted_ms"],
                    "-" if each["runner_up"] is None else each["runner_up"],
                    "-" if each["runner_up_ms"] is None else each["runner_up_ms"],
                    each["uncut_ms"],
                )
                for each in plans["choices"]
            ),
        )
    elif plans.get("layers"):
        heads = ("layer", "phase", "degree", "order")
        page.table(heads, ((each["layer"], each["phase"], each["degree"], each["order"]) for each in plans["layers"]))
        page.paragraph("Nothing was measured that degrees could follow from: they were given, are 1, or were resumed.")
    step = plans.get("step")
    if step:
        page.paragraph(
            f"A step without the optimizer was predicted to take {step['chosen_ms']:.4g} ms, with DeepSpeed's schedule "
            f"{step['deepspeed_ms']:.4g} ms; no schedule takes less than {step['bound_ms']:.4g} ms. Gradients take "
            f"{step['gradients_ms']:.4g} ms, of which {step['exposed_ms']:.4g} have no idle link to travel on. "
            f"{plans['num_measured']} operations were measured in {plans['took_s']:.3g} s."
        )
    trials = [each for each in plans.get("trials", ()) if each]
    if trials:
        page.paragraph(
            "Predictions only say what is worth a try: training steps were done with these plans in turns, and what "
            "they took decided, also against a prediction."
        )
    for number, of_round in enumerate(trials, start=1):
        page.table(
            (f"plans tried, round {number}", "ms per step", "steps", ""),
            (
                (each["name"], each["step_ms"], each["num_steps"], "kept" if each["is_kept"] else "")
                for each in of_round
            ),
        )


def _span(labels: Sequence[str]) -> str:
    return labels[0] if len(labels) == 1 else f"{labels[0]} to {labels[-1]} ({len(labels)})"


def _compared(page: Page, run: Run) -> None:
    if not run.compared:
        return
    page.heading("Predicted and measured")
    rows = run.compared
    page.picture("predicted", "predicted against measured", lambda file: pictures.draw_compared(rows, file))
    last = rows[-1]
    named = {"step": last["whole"], "rest of the model": last["rest"], **last["phases"]}
    page.table(
        (f"step {last['step']}", "predicted ms", "measured ms"),
        ((name, each["predicted_ms"], each["measured_ms"]) for name, each in named.items()),
    )
    if last.get("busy"):
        shares = ", ".join(f"{lane} {share:.0%}" for lane, share in last["busy"].items())
        page.paragraph(f"Of the layers' phases, lanes were busy: {shares}.")


def _timelines(page: Page, runs: Sequence[Run]) -> None:
    drawn, explained = [], []
    for run in runs:
        if not has_trace(run.folder):
            continue
        try:
            file, traces, phases, lacks = merged(trace_folder(run.folder))
        except (OSError, ValueError) as error:
            page.paragraph(f"{run.name}: its trace cannot be shown: {error}", "warn")
            continue
        for problem in [*lacks, *_incomplete(traces)]:
            page.paragraph(f"{run.name}: the trace is incomplete: {problem}", "warn")
        rank = min(traces)
        about = traces[rank]["otherData"]
        timelines = ((step, pictures.timeline_of(traces[rank], step)) for step in reversed(about.get("steps", [])))
        # The last step that has anything: a run may have ended in the one after.
        step, timeline = next(((step, each) for step, each in timelines if each.spans), (None, None))
        if timeline is not None:
            drawn.append((f"{run.name}, step {step}, rank {rank}", timeline))
            explained.append((run, file, [each for each in phases if each.key.step == step]))
    if not drawn:
        return
    page.heading("One step, task by task")
    draw = partial(pictures.draw_timelines, drawn)
    page.picture("timelines", "tasks of one step on their lanes", draw, is_broad=True)
    for run, file, phases in explained:
        page.paragraph(
            f"{run.name}: all ranks, critical path and idle times for Perfetto (ui.perfetto.dev): {file.name}"
        )
        _explain(page, run, phases)


def _incomplete(traces: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each way in which ranks' traces have ended early."""
    ranks_of: dict[str, list[int]] = {}
    for rank, trace in traces.items():
        about = trace["otherData"]
        if not about.get("complete", False):
            seen = ", ".join(map(str, about.get("steps", []))) or "none"
            ranks_of.setdefault(f"{about.get('ended', 'no end')}; steps there are: {seen}", []).append(rank)
    return [f"{how} (rank {', '.join(map(str, ranks))})" for how, ranks in ranks_of.items()]


def _explain(page: Page, run: Run, phases: Sequence[Phase]) -> None:
    total_ms = sum(each.ms for each in phases)
    if not total_ms:
        return
    shares = _added(each.shares_ms() for each in phases)
    page.table(
        (f"critical path, {run.name}", "ms", "share"),
        ((what, f"{ms:.3f}", f"{ms / total_ms:.0%}") for what, ms in shares.items()),
    )
    rows = []
    for lane in dict.fromkeys(lane for each in phases for lane in each.busy_ms):
        busy_ms = sum(each.busy_ms.get(lane, 0.0) for each in phases)
        idle = _added(each.idle_ms.get(lane, {}) for each in phases)
        rows.append((lane, "busy", f"{busy_ms:.3f}"))
        rows += [("", f"idle, {what}", f"{ms:.3f}") for what, ms in idle.items()]
    page.table((f"lanes, {run.name}", "what", "ms, mean of ranks"), rows)


def _added(each: Iterable[Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for values in each:
        for name, value in values.items():
            found[name] = found.get(name, 0.0) + value
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _fits(page: Page, run: Run) -> None:
    fits = run.plans.get("fits")
    if not fits:
        return
    page.heading("What was measured")
    page.picture("fits", "measured times and lines", lambda file: pictures.draw_fits(fits, file))
    bad = [each["operation"] for each in fits if not each["is_good"]]
    if bad:
        page.paragraph(f"No straight line describes {', '.join(bad)}: predictions of these are rough.", "warn")
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
            for each in fits
            for line in each["lines"]
        ),
    )
