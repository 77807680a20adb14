# SPDX-License-Identifier: Apache-2.0
"""Reports the effect of recorded routing on experts and ranks: load, skew and drift, as numbers, a table and charts.
``ds_fsmoe report`` calls it.

Letters: N steps, E experts, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ds_fsmoe.offline.report.charts import draw_heat, draw_lines
from ds_fsmoe.offline.report.page import Page
from ds_fsmoe.routes.recorded import Recording, RoutingFileError, read_routing
from ds_fsmoe.routes.written import RoutedLayer, parts_of
from ds_fsmoe.terminal.progress import Progress
from ds_fsmoe.terminal.tables import Table

MOST_LOADS_BYTES = 1 << 28
"""The bytes of all loads, where a recording has fewer."""


@dataclass(frozen=True)
class RoutedLoad:
    """Holds the loads of the experts of one layer, over all ranks and micro-batches."""

    layer: RoutedLayer
    num_choices: int
    """k of the first token that was recorded."""
    load_NE: np.ndarray
    """[N, E] int64: choices of each expert in each step that was recorded."""
    fullest_rank_N: np.ndarray
    """[N]: choices that fall on the fullest rank over the mean, of the ranks that share the experts; nan where there
    are none."""

    @property
    def skew_N(self) -> np.ndarray:
        """Return the fullest expert's load over the mean, [N]; nan in a step without choices."""
        return _over_mean(self.load_NE)

    @property
    @np.errstate(invalid="ignore", divide="ignore")
    def variation_N(self) -> np.ndarray:
        """Return the standard deviation of the experts' loads over their mean, [N]."""
        return self.load_NE.std(axis=1) / self.load_NE.mean(axis=1)

    @property
    def drift_N(self) -> np.ndarray:
        """Return the share of choices on other experts than in the step before, [N]: ``sum |p - q| / 2`` of their
        shares. It is nan in the first step.
        """
        return np.concatenate([[np.nan], _distances(self.load_NE)])[: len(self.load_NE)]

    @property
    def drift_over_all(self) -> float:
        """Return the same share between the first quarter of the steps and the last."""
        quarter = max(1, len(self.load_NE) // 4)
        ends = self.load_NE[:quarter].sum(axis=0), self.load_NE[-quarter:].sum(axis=0)
        return float(_distances(np.stack(ends))[0])

    @property
    def num_idle(self) -> int:
        """Return the number of experts without tokens in all steps."""
        return int((self.load_NE.sum(axis=0) == 0).sum())


def loads_of(recording: Recording, report: Callable[[int, int], None] = lambda done, of: None) -> list[RoutedLoad]:
    """Return the loads of all layers. Each file is read once, without keeping it in memory.

    Args:
        recording: the recording.
        report: called with (choices read, all choices) from time to time.

    Raises:
        RoutingFileError: the loads need far more memory than the recording has bytes, as only forged files do.
    """
    size_bytes = 8 * len(recording.steps) * sum(each.num_experts for each in recording.layers)
    if size_bytes > max(MOST_LOADS_BYTES, recording.num_bytes):
        raise RoutingFileError(
            f"{len(recording.steps)} steps of {len(recording.layers)} layers: their loads would need "
            f"{size_bytes / 2**30:.1f} GiB, more than the recording"
        )
    steps = {step: row for row, step in enumerate(recording.steps)}
    layers = {layer.path: number for number, layer in enumerate(recording.layers)}
    loads = [np.zeros((len(steps), layer.num_experts), dtype=np.int64) for layer in recording.layers]
    groups: dict[tuple[int, tuple[int, ...]], np.ndarray] = {}
    num_choices = [0] * len(layers)
    for done, key in enumerate(recording):
        rank, step, _, number = key
        layer = recording.ranks[rank].layers[number]
        choices, at = recording.choices(*key), layers[layer.path]
        counts_E = choices.counts(layer.num_experts)
        loads[at][steps[step]] += counts_E
        num_choices[at] = num_choices[at] or choices.indices_SK.shape[1]
        num_ranks = len(layer.ep_ranks) if layer.num_experts % len(layer.ep_ranks) == 0 else 1
        of_group = groups.setdefault((at, layer.ep_ranks), np.zeros((len(steps), num_ranks), dtype=np.int64))
        of_group[steps[step]] += counts_E.reshape(num_ranks, -1).sum(axis=1)
        report(done + 1, len(recording))
    fullest = [np.full(len(steps), np.nan) for _ in layers]
    for (at, _), load_NR in groups.items():
        fullest[at] = np.fmax(fullest[at], _over_mean(load_NR))
    return [
        RoutedLoad(layer, k, load_NE, fullest_N)
        for layer, k, load_NE, fullest_N in zip(recording.layers, num_choices, loads, fullest, strict=True)
    ]


def mean_of(values_N: np.ndarray) -> float:
    """Return the mean over the steps with a value; nan if there are none."""
    return float(np.nanmean(values_N)) if np.isfinite(values_N).any() else float("nan")


@np.errstate(invalid="ignore", divide="ignore")
def _over_mean(load_NX: np.ndarray) -> np.ndarray:
    return load_NX.max(axis=1) / load_NX.mean(axis=1)


@np.errstate(invalid="ignore", divide="ignore")
def _distances(load_NE: np.ndarray) -> np.ndarray:
    """Return the distance of the experts' shares in each step from those in the step before, [N - 1]."""
    shares_NE = load_NE / load_NE.sum(axis=1, keepdims=True)
    return np.abs(shares_NE[1:] - shares_NE[:-1]).sum(axis=1) / 2


ROUTING = "routing"
"""The folder in that of a run in which its routing is looked for."""
_HEADS = (
    "layer",
    "experts",
    "k",
    "choices",
    "fullest expert",
    "fullest rank",
    "variation",
    "idle",
    "drift",
    "over all",
)
_MOST_PICTURES = 6


def has_routing(path: Path) -> bool:
    """Return True if a path is a folder of recorded routing, or a packed file."""
    return (path.suffix == ".npz" and path.is_file()) or bool(parts_of(path))


def add_routing(page: Page, path: Path) -> list[str | Table]:
    """Write a section about recorded routing, and return its text for printing.

    Args:
        page: the page.
        path: the folder or the packed file.

    Raises:
        RoutingFileError: the routing cannot be read.
    """
    recording = read_routing(path)
    with Progress(f"reading {path.name}", len(recording), "choices") as progress:
        loads = loads_of(recording, progress.update)
    steps = recording.steps
    which = f"{len(steps)} step(s), {steps[0]} to {steps[-1]}" if steps else "no step"
    about = f"Routing of {len(recording.layers)} MoE layer(s) on {len(recording.ranks)} rank(s): {which}."
    page.heading("Routing")
    page.paragraph(about)
    for problem in recording.problems:
        page.warn(problem)
    rows = [_row(each) for each in loads]
    page.table(_HEADS, rows)
    page.paragraph(_WORDS)
    _draw(page, loads, steps)
    return [about, *recording.problems, Table(_HEADS, rows, has_rule=False), _WORDS]


_WORDS = (
    "Fullest expert and rank: over the mean, as a mean over steps; rank: of those that share the experts. Variation: "
    "the standard deviation of loads over their mean. Idle: experts that got nothing at all. Drift: the share of "
    "choices on other experts than in the step recorded before, as a mean; over all: last quarter of steps against the "
    "first."
)


def _row(load: RoutedLoad) -> tuple[str, ...]:
    numbers = (mean_of(each) for each in (load.skew_N, load.fullest_rank_N, load.variation_N))
    drifts = (mean_of(load.drift_N), load.drift_over_all)
    return (
        *(load.layer.path, str(load.layer.num_experts), str(load.num_choices), f"{int(load.load_NE.sum()):,}"),
        *(_number(each) for each in numbers),
        str(load.num_idle),
        *(_number(each) for each in drifts),
    )


def _number(value: float) -> str:
    return f"{value:.2f}" if np.isfinite(value) else "-"


def _draw(page: Page, loads: Sequence[RoutedLoad], steps: Sequence[int]) -> None:
    if not steps:
        return
    worst = sorted(loads, key=lambda each: -np.nan_to_num(mean_of(each.skew_N)))[:_MOST_PICTURES]
    skews = {each.layer.path: list(zip(steps, each.skew_N, strict=True)) for each in worst}
    drifts = {each.layer.path: list(zip(steps, each.drift_N, strict=True))[1:] for each in worst}
    if len(loads) > len(worst):
        page.paragraph(f"Of the {len(loads)} layers the {len(worst)} most skewed are drawn.")
    about = "fullest expert over the mean, over steps"
    page.chart(draw_lines(about, skews, "fullest expert / mean", from_zero=True))
    if len(steps) > 1:
        about = "share of choices that differ from the step before"
        page.chart(draw_lines(about, drifts, "drift", from_zero=True))
    about = "load of the experts of {} over steps"
    heats = ((about.format(each.layer.path), each.layer.path, steps, each.load_NE) for each in worst)
    page.charts([draw_heat(*each, "load over the mean") for each in heats])
