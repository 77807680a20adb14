# SPDX-License-Identifier: Apache-2.0
"""Writes the conclusion of a report in plain words: the gain and its evidence, what limits a step, and what to try."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds_fsmoe.files.runs import Run
from ds_fsmoe.offline.report.charts import draw_dots
from ds_fsmoe.offline.report.comparison import (
    BLOCK,
    FEWEST_BLOCKS,
    Interval,
    RunTimes,
    Turn,
    disturbance,
    interval_of,
    losses_of,
    middle,
    pair,
    ratio_interval,
    reasons,
    step_times_ms,
    times_of,
    winner,
)
from ds_fsmoe.offline.report.critical_path import BETWEEN
from ds_fsmoe.offline.report.decisions import keeps_stock
from ds_fsmoe.offline.report.page import CONCLUSION, Page
from ds_fsmoe.offline.report.palette import task_name
from ds_fsmoe.offline.report.steps_section import ShownStep, counted_after
from ds_fsmoe.planning.schedule import DEQUANTISING, EXPERT, ORDER, QUANTISING, RESTORE, ROUTE

_COMPUTED = (EXPERT, ROUTE, ORDER, RESTORE, *QUANTISING, *DEQUANTISING)
_LITTLE, _MOST = 0.05, 0.5
"""The shares from which something is said to limit a step, and to be most of it."""
_UNEVEN = 1.5
"""The load of the fullest expert, over the mean, from which it is said to be uneven."""


@dataclass(frozen=True)
class SpeedUp:
    """Holds the speedup of ours over a baseline, with its evidence."""

    ratio: float
    interval: Interval | None
    over: str
    """What it is compared with."""
    how: str
    """How the ratio and its interval were got."""
    verdict: str
    where: str = ""
    """The words that keep a reader from taking it for more than it is."""
    is_of_rejected: bool = False
    """Whether it is that of the best plan that was not kept: DeepSpeed's schedule runs."""

    @property
    def is_unsure(self) -> bool:
        """Return True if the interval contains 1, so that neither is known to be faster."""
        return self.interval is not None and self.interval.low <= 1 <= self.interval.high


def gain_of(runs: Sequence[Run], turns: Sequence[Turn] = ()) -> SpeedUp | None:
    """Return the speedup by the best evidence there is, or None without a comparison.

    Args:
        runs: stock's and ours, or ours alone, whose autotuner may have compared schedules.
        turns: short alternating runs of both.
    """
    both = pair(runs)
    if both is not None and turns:
        interval = interval_of(turns)
        few, many = min(each.num_steps for each in turns), max(each.num_steps for each in turns)
        how = (
            f"from {len(turns)} turns of a short run of each, stock first in one turn and ds_fsmoe in the next; of "
            f"each run the median of {few if few == many else f'{few} to {many}'} steps counts"
        )
        return SpeedUp(middle(turns), interval, both[0].name, how, winner(interval, "turns"))
    if both is not None:
        after = counted_after(runs)
        times = [times_of(run, after) for run in both]
        if times[0] is None or times[1] is None or times[1].step_ms <= 0:
            return None
        interval = ratio_interval(*(step_times_ms(run, after) for run in both))
        how = (
            f"from the medians of {min(times[0].num_steps, times[1].num_steps)} steps of two runs, one after the "
            f"other, which is not a fair comparison: the interval is over blocks of {BLOCK} steps, and what else the "
            "machine did during one of the runs is in no interval; ds_fsmoe compare --turns compares in turns"
        )
        verdict = winner(interval, f"blocks of {BLOCK} steps in each run")
        ratio, where = times[0].step_ms / times[1].step_ms, "in two runs, one after the other"
        return SpeedUp(ratio, interval, both[0].name, how, verdict, where)
    for run in runs:
        found = run.plans.get("gain")
        if found:
            interval = Interval(found["low"], found["high"]) if found["num_turns"] > 1 else None
            steps = "one step" if interval is None else f"{found['num_turns']} steps"
            how = (
                f"from {steps} of each in the autotuner's last trial: median ratio, smallest and largest; it compares "
                "two schedules of ds_fsmoe, not DeepSpeed's engine"
            )
            verdict = "there was one step of each" if interval is None else ""
            return SpeedUp(
                found["ratio"], interval, "DeepSpeed's schedule", how, verdict, is_of_rejected=keeps_stock(run)
            )
    return None


def conclusion(page: Page, runs: Sequence[Run], turns: Sequence[Turn], shown: Sequence[ShownStep]) -> None:
    """Write the first section, with the conclusion."""
    page.heading(CONCLUSION)
    gain, after = gain_of(runs, turns), counted_after(runs)
    timed = [(run, times) for run in runs if (times := times_of(run, after)) is not None]
    both = pair(runs)
    agree = None if both is None else losses_of(*both)
    unequal = None
    if both is not None and len(timed) == 2 and not turns:
        unequal = disturbance(timed[0][1], timed[1][1])
    tiles, words = ([], "") if gain is None else _describe_gain(gain, both is not None, unequal is not None)
    tiles += [
        (f"{times.step_ms:.4g} ms", f"per step, {run.name} (median of {times.num_steps})") for run, times in timed
    ]
    if agree is not None:
        apart = f"{agree.largest_difference:.2g}"
        tiles.append((apart, f"largest relative difference of {agree.num_steps} losses"))
    elif len(runs) == 1 and runs[0].steps and isinstance(runs[0].steps[-1].get("loss"), float):
        last = runs[0].steps[-1]
        tiles.append((f"{last['loss']:.4g}", f"loss at step {last['step']} (rank 0)"))
    page.tiles(tiles)
    if words:
        page.paragraph(words)
    for run in runs:
        if told := run.plans.get("chosen", {}).get("autotune"):
            page.paragraph(f"What the autotuner of {run.name} says: {_sentence(told)}")
    if agree is not None and agree.apart_from is not None and not any(agree.not_finite_from):
        page.paragraph(
            f"Losses are equal to rounding before step {agree.apart_from}, and at most {agree.largest_difference:.2g} "
            f"apart (step {agree.at_step}). Rounding grows from step to step where routers choose experts, in stock "
            "DeepSpeed too; losses that are apart from the first step on are another matter."
        )
    for run, step in zip(both or (), agree.not_finite_from if agree else (), strict=False):
        if step is not None:
            page.paragraph(f"{run.name}: losses are not finite from step {step} on", True)
    if unequal is not None:
        page.paragraph(_sentence(unequal), True)
    subject = both[1] if both else runs[-1]
    times = next((each for run, each in timed if run is subject), None)
    step = next((each for each in shown if each.run is subject), None)
    limits, tries = limits_of(subject, times, step)
    if both is not None and gain is not None and (gain.interval is None or gain.interval.low <= 1):
        stock_times = next((each for run, each in timed if run is both[0]), None)
        tries = [*(reasons(*both, stock_times) if stock_times else ()), *tries]
    if limits:
        page.subheading(f"What limits a step of {subject.name}")
        page.points(limits)
    if tries := list(dict.fromkeys([*subject.plans.get("hints", ()), *tries])):
        page.subheading("What to try next")
        page.points(_sentence(each) for each in tries)


def _describe_gain(gain: SpeedUp, is_pair: bool, is_disturbed: bool) -> tuple[list[tuple[str, str]], str]:
    """Return (the large figures about a gain, sentences). Figures that a sentence qualifies are left out."""
    how, interval = f"That is {gain.how}.", gain.interval
    ends = "" if interval is None else f"{interval.low:.2f} to {interval.high:.2f}"
    faster = f"ds_fsmoe is {gain.ratio:.2f} times as fast as {gain.over} {gain.where or 'here'}"
    if gain.is_of_rejected:
        words = (
            f"No plan was faster than DeepSpeed's schedule, which is kept; the best other plan was {gain.ratio:.2f} "
            f"times as fast{ends and f' ({ends})'}. {how}"
        )
        return [("DeepSpeed's schedule", "is used: no plan that was tried was faster")], words
    if gain.is_unsure:
        what = f"that can be measured, to {gain.over}: {gain.ratio:.2f}x is within the noise"
        tiles = [("no difference", what)]
        words = f"No measurable difference: {faster}, and its interval, {ends}, contains 1. {how}"
    elif interval is None and gain.verdict:
        tiles = [("undecided", f"{gain.ratio:.2f}x {gain.over}, of too few steps or turns for an interval")]
        words = f"{faster}, which decides nothing: {gain.verdict}. {how}"
    else:
        tiles = [(f"{gain.ratio:.2f}x", ", ".join(filter(None, (f"as fast as {gain.over}", gain.where))))]
        words = f"{faster}{ends and f', with an interval of {ends}'}. {how}"
        if ends:
            tiles.append((ends, "95% interval of that" if is_pair else "smallest to largest of that"))
    if is_disturbed:
        tiles = [("not comparable", "the machine was not equally busy in the two runs")]
    return tiles, words


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:] + ("" if words.endswith((".", "!", "?")) else ".")


def limits_of(run: Run, times: RunTimes | None, step: ShownStep | None) -> tuple[list[str], list[str]]:
    """Return (what limits a step of a run, what may change that), one sentence each."""
    limits, tries = [], []
    if step is not None and step.path_ms > 0:
        of_path, of_tries = _by_path(run, step)
        limits += of_path
        tries += of_tries
        if times is not None and times.step_ms > 0:
            share = min(1.0, step.path_ms / times.step_ms)
            hidden = (
                sum(ms for what, ms in step.shares_ms().items() if what not in (*_COMPUTED, BETWEEN)) / times.step_ms
            )
            limits.append(
                f"The MoE layers are {share:.0%} of a step ({step.path_ms:.4g} of {times.step_ms:.4g} ms). The rest is "
                "the model around them, the optimizer and data, which no schedule of the layers makes shorter. Hiding "
                "all of their traffic that is left would make a step at most "
                f"{1 / max(0.01, 1 - min(hidden, share)):.2f} times as fast."
            )
            if share < _MOST:
                tries.append(
                    "most of a step is outside of the MoE layers: look there first, for instance with torch.profiler"
                )
    elif times is not None:
        limits.append(
            'Where the time of the MoE layers goes is not known: record a run with "trace": {"enabled": true}.'
        )
    predicted = run.plans.get("step")
    if predicted and predicted["chosen_ms"] > 0 and predicted["exposed_ms"] > _LITTLE * predicted["chosen_ms"]:
        limits.append(
            f"{predicted['exposed_ms']:.4g} of the predicted {predicted['chosen_ms']:.4g} ms are gradients that find "
            "no idle link."
        )
    uneven = _fullest(run)
    if uneven is not None and uneven[1] > _UNEVEN:
        limits.append(
            f"Load is uneven: the fullest expert of {uneven[0]} gets {uneven[1]:.2f} times the mean, and all ranks "
            "wait for the one that has it."
        )
        if not run.placement:
            tries.append('let experts move to where they balance ranks: "fsmoe": {"placement": {"enabled": true}}')
    return limits, tries


def _by_path(run: Run, step: ShownStep) -> tuple[list[str], list[str]]:
    """Return limits and remedies from the critical path of a step."""
    shares = {what: ms / step.path_ms for what, ms in step.shares_ms().items()}
    computed = sum(share for what, share in shares.items() if what in _COMPUTED)
    between = shares.get(BETWEEN, 0.0)
    travel = {what: share for what, share in shares.items() if what not in _COMPUTED and what != BETWEEN}
    sent = sum(travel.values())
    most = max(travel, key=travel.__getitem__, default="")
    largest = f", most of it {task_name(most)} ({travel[most]:.0%})" if most else ""
    limits = [
        f"Of the MoE layers' critical path {computed:.0%} are computation, {sent:.0%} are traffic that nothing hides"
        f"{largest}, and {between:.0%} lie between tasks."
    ]
    tries = []
    if sent == max(computed, sent, between):
        tries.append(
            "traffic that nothing hides is the largest part: give it more computation to hide behind (a larger "
            "micro-batch), or fewer bytes (expert groups inside a node, or node-deduplicated dispatch)"
        )
    elif computed == max(computed, between):
        tries.append(
            "computation is the largest part of the layers: faster experts, or fewer tokens on the fullest rank, gain "
            "more now than another order of tasks"
        )
    else:
        tries.append(
            "the time between tasks is the largest part: the host, or a processor that is busy elsewhere, cannot start "
            "tasks as fast as they end; fewer chunks and larger micro-batches start fewer"
        )
    return limits, tries


def _fullest(run: Run) -> tuple[str, float] | None:
    """Return the layer whose fullest expert is highest above the mean in the last counted steps, with that ratio."""
    loads: Mapping[str, Any] = run.routers[-1]["layers"] if run.routers else {}
    found = {
        layer: max(load["tokens_E"]) * len(load["tokens_E"]) / sum(load["tokens_E"])
        for layer, load in loads.items()
        if sum(load["tokens_E"]) > 0
    }
    layer = max(found, key=found.__getitem__, default=None)
    return None if layer is None else (layer, found[layer])


def gains(page: Page, turns: Sequence[Turn]) -> None:
    """Write the section with the ratio of every turn."""
    if not turns:
        return
    page.heading("Gain, turn by turn")
    interval = interval_of(turns)
    ends = "" if interval is None else f"; 95% interval {interval.low:.2f} to {interval.high:.2f}"
    rows = [
        {
            "name": f"turn {each.number + 1}",
            "x": each.ratio,
            "is_kept": each.ratio > 1,
            "note": f"{each.stock_ms:.4g} ms and {each.fsmoe_ms:.4g} ms",
        }
        for each in turns
    ]
    page.chart(
        draw_dots(
            "stock's time over ours in each turn",
            rows,
            "stock's time over ours",
            f"geometric mean {middle(turns):.3f}{ends}",
        )
    )
    if interval is None:
        page.paragraph(f"There is no interval: it takes {FEWEST_BLOCKS} turns, and there are {len(turns)}.")
