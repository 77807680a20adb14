# SPDX-License-Identifier: Apache-2.0
"""The paper's predicates Q1 to Q7 on their boundaries, in numbers that floating point holds exactly."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.decide.degree import (
    Load,
    Phase,
    choose_exact,
    choose_slsqp,
    makespan_ms,
    paper_case,
    paper_case_ms,
)
from tests.planning.layers import by_hand_ms, simulated_ms

UNIT = LinearCost(0.0, 1.0)


def phase_of(r: int, a: int, g: int, e: int, s: int, gar: int) -> Phase:
    """A layer whose chunks take exactly so long at degree r, a power of two."""
    return Phase(*(Load(UNIT, float(r * each)) for each in (a, g, e, s)), float(gar))


def margins(r: int, a: int, g: int, e: int, s: int, gar: int) -> dict[str, Fraction]:
    """PAPER.md, section 3: each predicate as what has to be above 0."""
    q5 = Fraction(gar) - (r * e - 2 * (r - 1) * a + g + s)
    return {
        "Q1": Fraction(a - g),
        "Q2": Fraction(r * e - 2 * (r - 1) * a),
        "Q3": Fraction(r * e - (r - 1) * (g + s)),
        "Q4": Fraction(gar - (g + s)),
        "Q5": q5,
        "Q6": Fraction(gar) - (r * g + r * s - 2 * (r - 1) * a),
        "Q7": q5,
    }


def case_by_the_text(numbers: tuple[int, ...]) -> int:
    """PAPER.md, section 3: which case."""
    q = {name: margin > 0 for name, margin in margins(*numbers).items()}
    one = (
        (q["Q1"] and not q["Q2"] and q["Q4"])
        or (q["Q1"] and q["Q2"] and q["Q5"])
        or (not q["Q1"] and not q["Q3"] and q["Q6"])
        or (not q["Q1"] and q["Q3"] and q["Q7"])
    )
    two = (q["Q1"] and q["Q2"] and not q["Q5"]) or (not q["Q1"] and q["Q3"] and not q["Q7"])
    three = q["Q1"] and not q["Q2"] and not q["Q4"]
    four = not q["Q1"] and not q["Q3"] and not q["Q6"]
    assert one + two + three + four == 1
    return 1 if one else 2 if two else 3 if three else 4


def on_the_boundary(name: str, r: int, a: int, g: int, e: int, s: int, gar: int) -> tuple[int, ...]:
    """The same layer with one number changed, so that a predicate's two sides are equal."""
    if name == "Q1":
        a = g
    elif name == "Q2":
        a = r * a
        e = 2 * (r - 1) * a // r
    elif name == "Q3":
        g, s = r * g, r * s
        e = (r - 1) * (g + s) // r
    elif name == "Q4":
        gar = g + s
    elif name in ("Q5", "Q7"):
        gar = r * e - 2 * (r - 1) * a + g + s
    else:
        gar = r * g + r * s - 2 * (r - 1) * a
    return r, a, g, e, s, gar


numbers = st.tuples(st.sampled_from([1, 2, 4, 8, 16, 32, 64]), *[st.integers(0, 30)] * 4, st.integers(0, 200))


@settings(deadline=None, max_examples=400, derandomize=True)
@given(st.sampled_from(["Q1", "Q2", "Q3", "Q4", "Q5", "Q6", "Q7"]), numbers, st.booleans())
def test_on_a_boundary_the_case_is_the_texts_and_the_closed_form_still_exact(
    name: str, free: tuple[int, ...], equal_links: bool
) -> None:
    if equal_links:
        free = (*free[:4], free[2], free[5])
    at = on_the_boundary(name, *free)
    if at[5] < 0:
        return
    assert margins(*at)[name] == 0
    phase, r = phase_of(*at), at[0]
    case = paper_case(phase, r)
    assert case == case_by_the_text(at)
    assert makespan_ms(phase, r) == simulated_ms(phase, r) == by_hand_ms(phase, r)
    if equal_links:
        assert paper_case_ms(phase, case, r) == makespan_ms(phase, r)


SIDES = {
    # name: (r, a, g, e, s, gar) on the boundary, which number is raised, case on it, case behind it
    "Q1": ((4, 3, 3, 2, 3, 0), 1, 4, 3),
    "Q2": ((4, 8, 2, 12, 2, 0), 3, 3, 2),
    "Q3": ((4, 2, 8, 12, 8, 0), 3, 4, 2),
    "Q4": ((4, 8, 2, 1, 2, 4), 5, 3, 1),
    "Q5": ((4, 3, 2, 9, 2, 22), 5, 2, 1),
    "Q6": ((4, 2, 5, 1, 5, 28), 5, 4, 1),
    "Q7": ((4, 2, 3, 9, 3, 30), 5, 2, 1),
}


@pytest.mark.parametrize("name", SIDES)
def test_a_predicate_holds_only_behind_its_boundary_and_both_formulas_meet_on_it(name: str) -> None:
    at, raised, case_at, case_behind = SIDES[name]
    assert margins(*at)[name] == 0
    behind = tuple(each + (place == raised) for place, each in enumerate(at))
    assert margins(*behind)[name] > 0
    r = at[0]
    assert paper_case(phase_of(*at), r) == case_at == case_by_the_text(at)
    assert paper_case(phase_of(*behind), r) == case_behind == case_by_the_text(behind)
    for case in (case_at, case_behind):
        assert paper_case_ms(phase_of(*at), case, r) == makespan_ms(phase_of(*at), r)
    assert paper_case_ms(phase_of(*behind), case_behind, r) == makespan_ms(phase_of(*behind), r)


def test_all_small_layers_fall_in_exactly_one_case() -> None:
    seen = set()
    for at in itertools.product((1, 2, 4), (0, 1, 2), (0, 1, 2), (0, 1, 3), (0, 2), (0, 1, 4)):
        seen.add(paper_case(phase_of(*at), at[0]))
        assert paper_case(phase_of(*at), at[0]) == case_by_the_text(at)
    assert seen == {1, 2, 3, 4}


@pytest.mark.parametrize("name", SIDES)
def test_the_papers_method_survives_its_own_boundaries(name: str) -> None:
    phase = phase_of(*SIDES[name][0])
    exact, paper = choose_exact(phase, 8), choose_slsqp(phase, 8)
    assert 1 <= paper <= 8
    assert makespan_ms(phase, exact) <= by_hand_ms(phase, paper) * (1 + 1e-12)


def test_a_layer_of_zeros_has_a_case_and_a_degree_in_the_papers_method_too() -> None:
    nothing = phase_of(1, 0, 0, 0, 0, 0)
    assert paper_case(nothing, 1) == 4
    assert makespan_ms(nothing, choose_slsqp(nothing, 16)) == 0.0
