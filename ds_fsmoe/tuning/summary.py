# SPDX-License-Identifier: Apache-2.0
"""Formats a summary of one screen: what the autotuner has chosen, what it gains, why, and what to do next.

The autotuner logs it once plans are settled, and the engine writes it into the folder of a run.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from operator import itemgetter
from typing import Any

from ds_fsmoe.planning.cost import GOOD_SHARE
from ds_fsmoe.planning.decide.step_time import StepTimes
from ds_fsmoe.planning.schedule import Lane
from ds_fsmoe.terminal.tables import Message, Table
from ds_fsmoe.tuning.table import MIN_OVERLAP_GAIN, Row, TuningContext, aligned, choices_table, span, timings_of
from ds_fsmoe.tuning.trials import TrialGain, Tried
from ds_fsmoe.tuning.when import STEPS_BEFORE

LITTLE = 0.03
"""The share of a step below which a part of it is not worth a hint."""
_MOST_NAMES = 2
MOST_ROWS = 8
"""Rows of layers, each with two lines, on the screen without details."""
IN_EVALUATION = "autotune: nothing is measured in evaluation mode: call model.train() before the first step"


@dataclass
class Outcome:
    """Holds the result of the trials, and the time of finding it."""

    took_s: float = 0.0
    """The seconds of measuring and planning."""
    num_plans: int = 0
    """The number of plans that were tried, DeepSpeed's schedule among them."""
    num_steps: int = 0
    """The training steps of the trials that were seen whole."""
    total_ms: float = 0.0
    """The time of these steps."""
    least_dense_ms: float | None = None
    """The least time, over these steps, of all but the layers' runs."""
    gain: TrialGain | None = None
    """The gain over DeepSpeed's schedule of what stays, or, if ``is_stock``, of the best of the others; ``None``: not
    measured."""
    kept_ms: float | None = None
    """The median step with what stays, and with DeepSpeed's schedule, in the last round."""
    baseline_ms: float | None = None
    is_stock: bool = False
    """Whether DeepSpeed's schedule stays."""
    tried: Sequence[Tried] = field(default_factory=list)
    """The turns in which it was found: what each plan took, the fastest first."""
    rest_ms: list[float] = field(default_factory=list)
    """The time of all but the layers' runs in each step with DeepSpeed's schedule; none where there are stages."""

    def with_observed_rest(self, step: StepTimes | None) -> StepTimes | None:
        """Return the times of a step with what is beside its layers as it was in the trials: what was seen of that
        before is a single forward and backward, and those of one step are far from those of another."""
        if step is None:
            return None
        seen = step.with_rest(statistics.median(self.rest_ms)) if self.rest_ms else step
        if seen.dense_ms is None or self.least_dense_ms is None:
            return seen
        # The bound has the least that was seen.
        return replace(seen, bound_ms=seen.bound_ms - max(0.0, seen.dense_ms - self.least_dense_ms))

    def is_bound(self, step: StepTimes) -> bool:
        """Return True if every step, measured or predicted, takes at least the bound."""
        known_ms = [each for each in (self.kept_ms, self.baseline_ms) if each is not None]
        return step.bound_ms <= min([step.chosen_ms, *known_ms, *(each.step_ms for each in self.tried)])

    def as_data(self, step: StepTimes | None) -> dict[str, Any]:
        """Return the decision as data, for the record of a run: the page shows the same as the log.

        Args:
            step: the times of a step as they are predicted, see :meth:`seen`.
        """
        return {
            "took_s": self.took_s,
            "num_plans": self.num_plans,
            "num_steps": self.num_steps,
            "is_stock": self.is_stock,
            "gain": None if self.gain is None else asdict(self.gain),
            "step": None if step is None else asdict(step) | {"is_bound": self.is_bound(step)},
        }

    def steps_to_break_even(self) -> int | None:
        """Return after how many steps, from now on, the gain has made up for measuring and for trying slower plans;
        ``None``: no gain is clear."""
        if self.is_stock or self.gain is None or not self.gain.is_clear:
            return None
        if self.kept_ms is None or self.baseline_ms is None:
            return None
        lost_ms = 1e3 * self.took_s + self.total_ms - self.num_steps * self.baseline_ms
        return max(0, math.ceil(lost_ms / max(1e-9, self.baseline_ms - self.kept_ms)))


def summarize(
    rows: Sequence[Row], context: TuningContext, outcome: Outcome, most_rows: int | None = MOST_ROWS
) -> Message:
    """Return the screen, in lines of at most 120 characters: choice, gain, cost, steps, layers, fits and hints.

    Args:
        rows: the rows of layers that run alike, as they run now.
        context: the facts that hold for all of them.
        outcome: what was tried, and what it took.
        most_rows: the rows that are shown at the most; ``None``: all.
    """
    choice, *result = headline(rows, context, outcome)
    again = [f"measured again because {context.why_again}"] if context.why_again else []
    lines = [f"autotune: {choice}", *(f"  {each}" for each in (*again, *result)), _steps(context, outcome)]
    lines += [] if outcome.is_stock else _second(outcome)
    is_whole = all(choice.order.degree == 1 and not row.why_unchunked for row in rows for choice in row.choices)
    if outcome.is_stock or is_whole:
        # Rows of layers would say one chunk, one task after another, and nothing else.
        lines += [f"  why: {_why_whole(rows, context, outcome)}"]
    else:
        lines += ["", *_layers(rows, most_rows, bool(outcome.tried)), ""]
    if why := why_unpadded(rows):
        layers = sorted(label for row in rows if row.empty_share for label in row.labels)
        lines.append(f"  dispatch: {span(layers)} unpadded: {why}")
    lines += [f"  cost model: {_fits(rows)}"]
    lines += [f"  next: {each}" for each in hints(rows, context, outcome)]
    lines.append('  more: "details": true in fsmoe.autotune logs all that was measured; ds_fsmoe report shows it')
    return Message(lines)


def too_short(outcome: Outcome, steps_since: int, is_waiting: bool, is_trying: bool) -> str:
    """Return a sentence for the end of a job that was too short for measuring to pay; empty if it was not.

    Args:
        outcome: what measuring took and gained.
        steps_since: the optimizer steps since plans were settled, or since the job began.
        is_waiting: whether nothing was measured yet.
        is_trying: whether plans were being tried.
    """
    if is_waiting:
        if not steps_since:
            return ""
        return (
            f"autotune: the job ended after {steps_since} steps, before measuring begins (step {STEPS_BEFORE}); "
            "layers ran in one chunk"
        )
    if is_trying:
        return f"autotune: the job ended during trials, so {outcome.took_s:.3g} s of measuring were lost"
    needed = outcome.steps_to_break_even()
    if needed is None or steps_since >= needed:
        return ""
    return (
        f"autotune: the job ended {steps_since} steps after the plans were settled, and breaks even after {needed} "
        '("autotune": false is faster)'
    )


def headline(rows: Sequence[Row], context: TuningContext, outcome: Outcome) -> list[str]:
    """Return lines with the choice, its gain if known, and the cost of tuning."""
    alike: dict[str, list[str]] = {}
    for row in rows:
        alike.setdefault(_chunks(row), []).extend(row.labels)
    each = [f"{span(sorted(labels))} in {chunks}" for chunks, labels in alike.items()]
    how = "; ".join(each[:_MOST_NAMES]) or "no layer of ours"
    if len(each) > _MOST_NAMES:
        how += f"; {len(each) - _MOST_NAMES} more"
    cost = f"measuring took {outcome.took_s:.3g} s"
    if outcome.num_plans:
        cost += f", tried {outcome.num_plans} plans in {outcome.num_steps} steps"
    gain = outcome.gain
    if outcome.is_stock:
        return [*_kept_stock(outcome), cost]
    if gain is None:
        unseen = ", as steps of the trials were not complete" if outcome.num_plans else ", not tried"
        return [how, f"predicted {context.step.speedup:.2f} times as fast as DeepSpeed's schedule{unseen}", cost]
    measured = f"{gain.ratio:.2f} times as fast as DeepSpeed's schedule"
    if gain.num_turns == 1:
        return [how, f"{measured} (one step of each: no interval)", cost]
    measured += f" ({gain.low:.2f} to {gain.high:.2f} in {gain.num_turns} turns)"
    if gain.high < 1:
        return [how, f"slower than stock, but set by name: {measured}", cost]
    if not gain.is_clear:
        return [how, f"{measured}, within the noise", cost]
    needed = outcome.steps_to_break_even()
    return [how, measured, cost + ("" if needed is None else f", breaks even {needed} steps from now")]


def _kept_stock(outcome: Outcome) -> list[str]:
    """Return that DeepSpeed's schedule stays, and how far the best other plan is from it."""
    others, gain = outcome.num_plans - 1, outcome.gain
    which = f"none of {others} other plans" if others > 0 else "no other plan"
    said = f"DeepSpeed's schedule stays: {which} was faster"
    if gain is None:
        return [said]
    turns = f" ({gain.low:.2f} to {gain.high:.2f} in {gain.num_turns} turns)" if gain.num_turns > 1 else ""
    return [said, f"the best of them was {gain.ratio:.2f} times as fast as it{turns}"]


def _why_whole(rows: Sequence[Row], context: TuningContext, outcome: Outcome) -> str:
    """Return in one line what keeps chunks from being faster, as far as that was measured."""
    by: dict[str, float] = {}
    for choice in (each for row in rows for each in row.choices):
        by[choice.bottleneck] = by.get(choice.bottleneck, 0.0) + choice.time_ms
    busiest = max(by, key=by.__getitem__, default="") or "none of the lanes alone"
    step = context.step
    if not outcome.is_bound(step) or step.bound_ms <= 0:
        return f"bottleneck of the layers: {busiest}"
    return (
        f"bottleneck of the layers: {busiest}; predicted, no order is more than "
        f"{step.deepspeed_ms / step.bound_ms:.2f} times as fast as DeepSpeed's"
    )


def _chunks(row: Row) -> str:
    forward, backward = (choice.order.degree for choice in row.choices)
    chunks = f"{forward} and {backward} chunks" if (forward, backward) != (1, 1) else "one chunk"
    return chunks if row.alltoall == "flat" else f"{chunks}, {row.alltoall}"


def why_unpadded(rows: Sequence[Row]) -> str:
    """Return why dispatch is unpadded by choice, and what that changes; empty if no layer of these has that."""
    shares = [row.empty_share for row in rows if row.empty_share]
    return f"{min(shares):.0%} of the slots are empty; equal to padded to rounding" if shares else ""


def _steps(context: TuningContext, outcome: Outcome) -> Table:
    step = context.step
    cells = [("", "measured ms", "predicted ms", "")]
    stock_ms, own_ms = ("" if each is None else f"{each:.4g}" for each in (outcome.baseline_ms, outcome.kept_ms))
    how = "one chunk, gradients after the backward"
    cells.append(("  DeepSpeed's schedule", stock_ms, f"{step.deepspeed_ms:.4g}", how))
    if not outcome.is_stock:
        cells.append(("  chosen", own_ms, f"{step.chosen_ms:.4g}", ""))
    if outcome.is_bound(step):
        cells.append(("  bound", "", f"{step.bound_ms:.4g}", "no order of these tasks takes less"))
    else:
        cells.append(("  bound", "", "", f"none: steps take less than the {step.bound_ms:.4g} ms of their tasks alone"))
    return aligned(cells)


def _second(outcome: Outcome) -> list[str]:
    """Return a line on the plan that came second, over the rounds in which both were tried."""
    kept = next((each for each in outcome.tried if each.is_kept), None)
    others = [each for each in outcome.tried if not each.is_kept and not each.is_baseline]
    if kept is None or not others:
        return []
    found = min(others, key=lambda each: each.step_ms)
    return [f"  second: {found.name}, {found.step_ms / kept.step_ms - 1:+.1%}"]


def _layers(rows: Sequence[Row], most: int | None, is_tried: bool) -> list[str | Table]:
    notes = {
        f"  the first {most} of {len(rows)} groups of layers": len(rows[:most]) < len(rows),
        "  one chunk is predicted to be faster, but was slower in trials, which decide": is_tried
        and any(choice.time_ms > choice.unchunked_ms for row in rows for choice in row.choices),
    }
    return [choices_table(rows[:most], indent="  "), *(note for note, applies in notes.items() if applies)]


def _fits(rows: Sequence[Row]) -> str:
    """Describe the fit of the cost model to the measurements, at the sizes that are used."""
    shares = sorted(((timing.best_fit.typical_share, name) for name, timing, _ in timings_of(rows)), reverse=True)
    if not shares:
        return "none"
    bad = [(name, share) for share, name in shares if share > GOOD_SHARE]
    if not bad:
        return f"{len(shares)} operations, each within {max(shares[0][0], 0.005):.1%} of its line at the sizes used"
    named = ", ".join(f"{name} {share:.0%}" for name, share in bad[:_MOST_NAMES])
    more = f" and {len(bad) - _MOST_NAMES} more" if len(bad) > _MOST_NAMES else ""
    return f"{len(bad)} of {len(shares)} operations fit poorly ({named}{more})"


def hints(rows: Sequence[Row], context: TuningContext, outcome: Outcome) -> list[str]:
    """Return advice on what to change, the most important first."""
    found = []
    step = context.step
    for row in rows:
        for phase, choice, asked in row.phases():
            if asked is not None and asked != choice.auto_degree:
                found.append(
                    f"{span(row.labels)} {phase}: num_chunks = {asked} was given; auto would choose "
                    f"{choice.auto_degree} (predicted {choice.auto_ms:.4g} ms, not {choice.time_ms:.4g})"
                )
    if any(not timing.best_fit.is_good for _, timing, _ in timings_of(rows)):
        judged = "the choice is from real steps" if outcome.tried else "set fsmoe.autotune.trials above 0"
        found.append(f"measurements were noisy (busy machine?), so predictions are rough; {judged}")
    has_gained = not outcome.is_stock and outcome.gain is not None and outcome.gain.low > 1
    if context.slowed.factors and not has_gained:
        for (a, b), both in context.slowed.overlap_gains().items():
            if both < MIN_OVERLAP_GAIN and Lane.COMPUTE in (a, b):
                link = b if a is Lane.COMPUTE else a
                found.append(
                    f"overlap of computation and the {link}-node link gains little: {both:.2f} times the work of one "
                    "alone (shared cores?)"
                )
    if step.exposed_ms > LITTLE * step.chosen_ms:
        found.append(
            f"{step.exposed_ms:.4g} ms of a step are gradients without an idle link: more gradient_accumulation_steps "
            "send less often"
        )
    best = min(context.sharded_ms.items(), key=itemgetter(1), default=None)
    as_is = context.sharded_ms.get(context.esp_size)
    if best is not None and as_is is not None and as_is - best[1] > LITTLE * step.chosen_ms:
        found.append(
            f"expert_tensor_parallel_size = {best[0]} would take {as_is - best[1]:.4g} ms off a step, by the cluster's "
            "numbers"
        )
    return found
