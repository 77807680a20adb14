# SPDX-License-Identifier: Apache-2.0
"""What a layer asks of its host stays within what is written down here, and what is written down stays near to it.

Counts have no noise: a number that goes up has a change behind it, in ours or, by a little, in another torch. After a
change for the better the budget is to be lowered to the new count, so that nobody spends it again.
"""

from __future__ import annotations

import sys

import pytest
import torch

from tests.call_counts import Counts, layer_counts
from tests.samples import sampled

# (experts of this rank, chunks, way) -> calls and launches of: the experts' part forward, the same backward, the whole
# layer forward, the same backward. On a CPU, with the reference ops and no other ranks, and with these versions:
COUNTED_WITH = (3, 11), "2.13"
BUDGETS: dict[tuple[int, int, str], tuple[tuple[int, int], ...]] = {
    (1, 1, "auto"): ((199, 5), (287, 12), (423, 93), (292, 28)),
    (1, 4, "auto"): ((479, 24), (738, 52), (718, 114), (743, 68)),
    (8, 1, "never"): ((536, 48), (1059, 104), (758, 149), (1064, 142)),
    (8, 1, "always"): ((369, 5), (432, 12), (591, 106), (437, 50)),
    (8, 4, "never"): ((1407, 196), (3322, 420), (1644, 299), (3327, 458)),
    (8, 4, "always"): ((685, 24), (925, 52), (922, 127), (930, 90)),
    (16, 1, "never"): ((920, 96), (1939, 208), (1142, 197), (1944, 246)),
    (16, 1, "always"): ((441, 5), (456, 12), (663, 106), (461, 50)),
    (16, 4, "never"): ((2463, 388), (6266, 836), (2700, 491), (6271, 874)),
    (16, 4, "always"): ((757, 24), (949, 52), (994, 127), (954, 90)),
    (32, 4, "never"): ((4575, 772), (12154, 1668), (4812, 875), (12159, 1706)),
    (32, 4, "always"): ((901, 24), (997, 52), (1138, 127), (1002, 90)),
    (1, 1, "rows"): ((190, 5), (278, 12), (527, 129), (278, 28)),
    (1, 4, "rows"): ((428, 24), (690, 52), (794, 155), (690, 68)),
    (8, 4, "rows"): ((733, 24), (1053, 61), (1097, 169), (1053, 99)),
    (16, 1, "rows"): ((465, 5), (470, 12), (800, 143), (470, 50)),
    (16, 4, "rows"): ((805, 24), (1077, 61), (1169, 169), (1077, 99)),
    (32, 4, "rows"): ((949, 24), (1125, 61), (1313, 169), (1125, 99)),
}
PARTS = ("part forward", "part backward", "layer forward", "layer backward")
# What a patch of torch may take more or less for the same, in Python of its own and in operations. With other versions
# than those, only what is over the budget is complained of: Python 3.12 makes no calls of list comprehensions.
CALLS_MARGIN, LAUNCHES_MARGIN = 0.1, 0.05


def is_counted_here() -> bool:
    """Whether the table was counted with what runs now."""
    python, of_torch = COUNTED_WITH
    return sys.version_info[:2] == python and torch.__version__.startswith(f"{of_torch}.")


def complaints(found: dict[str, Counts], budget: tuple[tuple[int, int], ...]) -> list[str]:
    """What is over its budget, and what has fallen clearly under it."""
    said = []
    for part, (calls, launches) in zip(PARTS, budget, strict=True):
        counts = found[part]
        of_calls = "calls", counts.calls, calls, CALLS_MARGIN
        of_launches = "launches", counts.launches, launches, LAUNCHES_MARGIN
        for what, number, allowed, margin in (of_calls, of_launches):
            if number > allowed * (1 + margin):
                said.append(f"{part}: {number} {what}, and {allowed} are allowed: what has become dearer?")
            elif number < allowed * (1 - margin) and is_counted_here():
                said.append(f"{part}: {number} {what} of {allowed} allowed: lower the budget to what it is now")
    return said


DAILY = (1, 4, "auto"), (8, 4, "never"), (8, 4, "always"), (8, 4, "rows")


@sampled(("num_experts", "degree", "together"), list(BUDGETS), kept=map(list(BUDGETS).index, DAILY))
def test_a_layer_keeps_to_its_budget_of_calls_and_launches(num_experts: int, degree: int, together: str) -> None:
    found = layer_counts(num_experts, degree, together)
    assert complaints(found, BUDGETS[num_experts, degree, together]) == []


def test_a_count_is_the_same_every_time() -> None:
    assert layer_counts(2, 2, "always") == layer_counts(2, 2, "always")


@pytest.mark.parametrize("together", ["always", "rows"])
def test_together_launches_and_calls_do_not_grow_with_the_experts(together: str) -> None:
    """The goal: what is done for each expert is done in one operation, of all of them."""
    few, many = (layer_counts(num_experts, 4, together) for num_experts in (8, 32))
    for part in PARTS:
        assert many[part].launches == few[part].launches
        # Two for each of the three parameters of an expert: autograd's own.
        assert many[part].calls - few[part].calls < 24 * 3 * 4


def test_a_budget_complains_of_more_and_of_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "is_counted_here", lambda: True)

    def said(calls: int, launches: int) -> list[str]:
        return complaints(dict.fromkeys(PARTS, Counts(calls, launches)), ((100, 20),) * 4)

    assert said(105, 20) == []
    assert len(said(111, 20)) == 4
    assert said(100, 22)[0] == "part forward: 22 launches, and 20 are allowed: what has become dearer?"
    assert said(80, 20)[0] == "part forward: 80 calls of 100 allowed: lower the budget to what it is now"
    monkeypatch.setitem(globals(), "is_counted_here", lambda: False)
    assert said(80, 20) == []
