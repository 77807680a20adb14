# SPDX-License-Identifier: Apache-2.0
"""Says what recorded routing does to experts and ranks: load, skew, drift.

Letters: N steps, E experts, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ds_fsmoe.routes.parts import RoutingFileError
from ds_fsmoe.routes.recorded import Recording
from ds_fsmoe.routes.written import RoutedLayer

MOST_LOADS_BYTES = 1 << 28
"""The bytes of all loads, where a recording has fewer."""


@dataclass(frozen=True)
class LayerLoad:
    """What the experts of one layer got, over all ranks and micro-batches."""

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
        """[N]: the fullest expert over the mean; nan in a step without choices."""
        return _over_mean(self.load_NE)

    @property
    def variation_N(self) -> np.ndarray:
        """[N]: the standard deviation of experts' loads over their mean."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.load_NE.std(axis=1) / self.load_NE.mean(axis=1)

    @property
    def drift_N(self) -> np.ndarray:
        """[N]: the share of choices that fall on other experts than in the step before, ``sum |p - q| / 2`` of their
        shares; nan in the first."""
        return np.concatenate([[np.nan], _distance(self._shares[1:], self._shares[:-1])])[: len(self.load_NE)]

    @property
    def drift_over_all(self) -> float:
        """The same between the first quarter of the steps and the last."""
        quarter = max(1, len(self.load_NE) // 4)
        ends = self.load_NE[:quarter].sum(axis=0), self.load_NE[-quarter:].sum(axis=0)
        return float(_distance(*(_shares(each[None]) for each in ends))[0])

    @property
    def num_idle(self) -> int:
        """The experts that got nothing in any step."""
        return int((self.load_NE.sum(axis=0) == 0).sum())

    @property
    def _shares(self) -> np.ndarray:
        return _shares(self.load_NE)


def loads_of(recording: Recording, tell: Callable[[int, int], None] = lambda done, of: None) -> list[LayerLoad]:
    """Return the loads of all layers, each file read once and never held whole.

    Args:
        recording: the recording.
        tell: told of (choices read, choices in all) from time to time.

    Raises:
        RoutingFileError: the loads would take far more memory than the recording has bytes, as no real one's do.
    """
    size_bytes = 8 * len(recording.steps) * sum(each.num_experts for each in recording.layers)
    if size_bytes > max(MOST_LOADS_BYTES, recording.num_bytes):
        raise RoutingFileError(
            f"{len(recording.steps)} steps of {len(recording.layers)} layers: their loads would take "
            f"{size_bytes / 2**30:.1f} GiB, more than what was recorded"
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
        tell(done + 1, len(recording))
    fullest = [np.full(len(steps), np.nan) for _ in layers]
    for (at, _), load_NR in groups.items():
        fullest[at] = np.fmax(fullest[at], _over_mean(load_NR))
    return [
        LayerLoad(layer, k, load_NE, fullest_N)
        for layer, k, load_NE, fullest_N in zip(recording.layers, num_choices, loads, fullest, strict=True)
    ]


def mean_of(values_N: np.ndarray) -> float:
    """Return the mean over steps, of those that have a value; nan where none has."""
    return float(np.nanmean(values_N)) if np.isfinite(values_N).any() else float("nan")


def _over_mean(load_NX: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", divide="ignore"):
        return load_NX.max(axis=1) / load_NX.mean(axis=1)


def _shares(load_NE: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", divide="ignore"):
        return load_NE / load_NE.sum(axis=1, keepdims=True)


def _distance(first_NE: np.ndarray, second_NE: np.ndarray) -> np.ndarray:
    return np.abs(first_NE - second_NE).sum(axis=1) / 2
