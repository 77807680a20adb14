# SPDX-License-Identifier: Apache-2.0
"""Samples of what is too long for the gates, drawn anew each day from a seed that a run prints; ``make nightly`` takes
all of it."""

from __future__ import annotations

import os
import random
import sys
from collections import defaultdict
from collections.abc import Collection, Sequence
from datetime import date
from typing import Any

import pytest

SEED = "DS_FSMOE_TEST_SEED"  # the variable that draws a sample again


def todays_seed() -> str:
    """Return the seed of this run: that of the environment, or the date; workers and ranks inherit it."""
    return os.environ.setdefault(SEED, date.today().isoformat())


def draw(what: str, values: Sequence[Any], count: int) -> list[Any]:
    """Return ``count`` of the values, or all where there are fewer, as they are drawn today for ``what``."""
    return random.Random(f"{todays_seed()} {what}").sample(values, min(count, len(values)))


def sampled(
    names: str | tuple[str, ...], values: Sequence[Any], kept: Collection[int] = (), drawn: int = 1, **options: Any
) -> pytest.MarkDecorator:
    """Return ``pytest.mark.parametrize`` over all values, of which few run in a gate and the others are slow.

    Args:
        kept: the indices of values that run every day.
        drawn: how many of the others run, drawn anew each day.

    Raises:
        IndexError: if there is no value at an index, so that a sample cannot become empty unnoticed.
    """
    indices = {range(len(values))[index] for index in kept}
    place = sys._getframe(1)
    others = [index for index in range(len(values)) if index not in indices]
    indices.update(draw(f"{place.f_globals['__name__']} {names} {len(values)}", others, drawn))

    def marked(number: int, value: Any) -> Any:
        if number in indices:
            return value
        return pytest.param(*(value if isinstance(names, tuple) else (value,)), marks=pytest.mark.slow)

    return pytest.mark.parametrize(names, [marked(*each) for each in enumerate(values)], **options)


def at_night_alone(items: Sequence[pytest.Item]) -> list[str]:
    """Return the functions whose cases are all slow, before :func:`draw_daily` has marked others."""
    of_items = [(item.nodeid.partition("[")[0], item.get_closest_marker("slow")) for item in items]
    return sorted({name for name, _ in of_items} - {name for name, slow in of_items if not slow})


def draw_daily(items: Sequence[pytest.Item]) -> None:
    """Mark the tests of ``daily(group, count)``: ``count`` of each group, drawn today of those that are collected,
    whichever files they are in, are long, the others slow."""
    groups: dict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if (mark := item.get_closest_marker("daily")) and not item.get_closest_marker("slow"):
            groups[mark.args].append(item)
    for (group, count), members in groups.items():
        names = draw(group, sorted(each.nodeid for each in members), count)
        for each in members:
            each.add_marker(pytest.mark.long if each.nodeid in names else pytest.mark.slow)
