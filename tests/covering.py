# SPDX-License-Identifier: Apache-2.0
"""Few cases that hold what many hold: every pair of values of any two axes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any


def every_case(*axes: Sequence[Any], allowed: Callable[..., bool] = lambda *case: True) -> list[tuple]:
    """All combinations of one value per axis that are ``allowed(*case)``."""
    return [case for case in itertools.product(*axes) if allowed(*case)]


def pairs_of(case: Sequence[Any]) -> set[tuple]:
    """Each as (axis, value, other axis, value there)."""
    return {(i, case[i], j, case[j]) for i, j in itertools.combinations(range(len(case)), 2)}


def covering(*axes: Sequence[Any], allowed: Callable[..., bool] = lambda *case: True) -> list[tuple]:
    """Cases among :func:`every_case` in which each of its pairs occurs; the same ones every time.

    Greedily: each is the one, of some drawn at random, that has the most pairs that are still missing.
    """
    draw = random.Random(1)
    cases = every_case(*axes, allowed=allowed)
    # By their places on the axes, which have an order whatever the values are.
    places = [tuple(axis.index(value) for axis, value in zip(axes, case, strict=True)) for case in cases]
    pairs = [pairs_of(each) for each in places]
    missing = set().union(*pairs)
    chosen: list[tuple] = []
    while missing:
        drawn = draw.sample(range(len(cases)), min(len(cases), 150))
        # One that has a missing pair at least, so that this comes to an end.
        some = min(missing)
        drawn.append(next(number for number, each in enumerate(pairs) if some in each))
        best = max(drawn, key=lambda number: len(pairs[number] & missing))
        chosen.append(cases[best])
        missing -= pairs[best]
    return chosen
