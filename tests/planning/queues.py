# SPDX-License-Identifier: Apache-2.0
"""Queues of gradients and windows for the tests of the partition, and its laws."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np

from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.decide.gradients import Partition, QueuedGradient, SendWindow
from ds_fsmoe.planning.schedule import EXPERT_GRAD, GRAD, Lane

INTER = (Lane.INTER,)


def window(layer: int, kind: str, num_pieces: int, slack_ms: float, slope: float = 1.0) -> SendWindow:
    """A window with room for so many milliseconds, in which an all-to-all waits if it is inside a layer."""
    room_ms = slack_ms if kind == "dense" else 0.0
    return SendWindow(layer, kind, num_pieces, lambda time_ms: slope * np.maximum(0.0, time_ms - slack_ms), room_ms)


def dense(layer: int, size_bytes: int, cost: LinearCost) -> QueuedGradient:
    return QueuedGradient(GRAD, INTER, size_bytes, cost, layer)


def expert(layer: int, size_bytes: int, cost: LinearCost) -> QueuedGradient:
    return QueuedGradient(EXPERT_GRAD, INTER, size_bytes, cost, layer)


def random_queue(rng: random.Random, layers: int, two_kinds: bool) -> tuple[list[QueuedGradient], list[SendWindow]]:
    """A backward of so many layers: each has its windows, and leaves a dense and perhaps an expert gradient."""
    cost = LinearCost(rng.choice([0.0, 0.3, 1.0]), 10 ** rng.uniform(-7, -5))
    other = LinearCost(rng.choice([0.0, 0.4]), 10 ** rng.uniform(-7, -5))
    pieces: list[QueuedGradient] = [dense(-1, rng.randint(1, 10**7), cost)] if rng.random() < 0.3 else []
    windows = []
    for layer in range(layers):
        slope = rng.choice([1.0, 1.0, 0.5])
        windows.append(window(layer, "moe", len(pieces), rng.choice([0.0, 20 * rng.random()]), slope))
        if two_kinds:
            pieces.append(expert(layer, rng.randint(1, 10**7), other))
        windows.append(window(layer, "dense", len(pieces), rng.choice([0.0, 20 * rng.random()])))
        pieces.append(dense(layer, rng.randint(1, 10**7), cost))
    return pieces, windows


def extra_ms(found: Partition, pieces: Sequence[QueuedGradient], windows: Sequence[SendWindow]) -> float:
    """What a partition costs, from its slices alone: each window's price, and the tail."""
    costs = {each.kind: each.cost for each in pieces}

    def ms(slices: tuple) -> float:
        return sum(costs[each.kind].ms(each.size_bytes) for each in slices)

    pairs = zip(windows, found.slices, strict=True)
    prices = sum(float(each.extra_ms(np.array([ms(slices)]))[0]) if slices else 0.0 for each, slices in pairs)
    return prices + ms(found.tail)


def by_brute_force_ms(pieces: Sequence[QueuedGradient], windows: Sequence[SendWindow], steps: int) -> float:
    """The best way to empty a queue of one kind in whole steps: all ways."""
    cost = pieces[0].cost
    total = sum(each.size_bytes for each in pieces)
    step_bytes = total / steps
    exists = [
        int(sum(each.size_bytes for each in pieces[: window.num_slices]) / step_bytes + 1e-9) for window in windows
    ]
    best_ms = np.inf
    for cuts in itertools.combinations_with_replacement(range(steps + 1), len(windows)):
        if any(cut > there for cut, there in zip(cuts, exists, strict=True)):
            continue
        time_ms, before = 0.0, 0
        for cut, each in zip(cuts, windows, strict=True):
            if cut > before:
                time_ms += float(each.extra_ms(np.array([cost.ms((cut - before) * step_bytes)]))[0])
            before = cut
        if before < steps:
            time_ms += cost.ms((steps - before) * step_bytes)
        best_ms = min(best_ms, time_ms)
    return best_ms
