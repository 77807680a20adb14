# SPDX-License-Identifier: Apache-2.0
"""The choice of few cases among many leaves out no pair of values."""

from __future__ import annotations

import itertools

import pytest

from tests.covering import covering, every_case, pairs_of

AXES = ((1, 2, 3, 4, 7), ("a", "b", "c"), (True, False), (0.5,), (None, "x", "y", "z"))


def is_allowed(number: int, letter: str, flag: bool, share: float, other: str | None) -> bool:
    return not (letter == "c" and flag) and (number < 7 or other is None)


@pytest.mark.parametrize("allowed", [lambda *case: True, is_allowed], ids=["all", "some"])
def test_few_cases_hold_every_pair_that_many_hold(allowed) -> None:
    many, few = every_case(*AXES, allowed=allowed), covering(*AXES, allowed=allowed)
    assert many == [each for each in itertools.product(*AXES) if allowed(*each)]
    assert set(few) <= set(many)
    assert set().union(*map(pairs_of, few)) == set().union(*map(pairs_of, many))
    assert len(few) < len(many) / 2
    assert few == covering(*AXES, allowed=allowed)
