# SPDX-License-Identifier: Apache-2.0
"""The paper's closed form, its four cases and its Algorithm 1, on layers that have the paper's pattern: the form is the
simulation, the exact degree is the best of all, and the paper's method is comparable with it."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.decide.degree import (
    NOTHING,
    Load,
    Phase,
    bounds_ms,
    choose_exact,
    choose_slsqp,
    makespan_ms,
    paper_case,
    paper_case_ms,
)
from tests.planning.layers import random_phase, simulated_ms


def loads(largest: float = 1e3) -> st.SearchStrategy[Load]:
    """Work of any size: nothing, tiny, gigantic; start-up and slope may be 0."""
    numbers = st.one_of(st.just(0.0), st.floats(1e-6, largest), st.integers(1, 40).map(float))
    return st.builds(Load, st.builds(LinearCost, numbers, numbers), numbers, st.integers(1, 3))


def phases(largest: float = 1e3) -> st.SearchStrategy[Phase]:
    """Any layer in any of the two orders that have a closed form."""
    load = loads(largest)
    grads = st.one_of(st.just(0.0), st.floats(1e-6, largest**2))
    return st.builds(Phase, load, load, load, load, grads, st.sampled_from(["paper", "shared"]))


def by_hand_ms(phase: Phase, degree: int) -> float:
    """The time from the paper's figure 3 and nothing else: end times, task by task."""
    a, g, e, s = (
        each.launches * each.cost.alpha_ms + each.size / degree * each.cost.beta_ms
        for each in (phase.a2a, phase.gather, phase.expert, phase.reduce)
    )
    shared = phase.links == "shared"
    inter = intra = compute = 0.0
    gathered, computed, reduced = [], [], []
    for _ in range(degree):
        inter += a
        intra = max(inter, intra) + g
        inter = intra if shared else inter
        gathered.append(intra)
    inter += phase.grad_ms
    intra = inter if shared else intra
    for ready in gathered:
        compute = max(compute, ready) + e
        computed.append(compute)
    for ready in computed:
        intra = max(intra, ready) + s
        if shared:
            inter = intra = intra + a
        reduced.append(intra)
    if not shared:
        for ready in reduced:
            inter = max(inter, ready) + a
    return inter


def by_formula_ms(phase: Phase, r: int) -> float:
    """T = max{2ra + gar, 2a+g+e+s + (r-1)max(a,g,e,s), 2a+g+s + (r-1)(max(a,g)+max(a,s))}."""
    a, g, e, s = phase.chunk_times_ms(r)
    if phase.links == "shared":
        return max(2 * r * a + r * (g + s) + phase.grad_ms, 2 * a + g + e + s + (r - 1) * max(a + g, e, a + s))
    return max(
        2 * r * a + phase.grad_ms,
        2 * a + g + e + s + (r - 1) * max(a, g, e, s),
        2 * a + g + s + (r - 1) * (max(a, g) + max(a, s)),
    )


@settings(max_examples=100, derandomize=True)
@given(phases(), st.integers(1, 64))
def test_closed_form_formula_simulation_and_figure_3_agree(phase: Phase, degree: int) -> None:
    expected_ms = pytest.approx(by_hand_ms(phase, degree), rel=1e-12, abs=0.0)
    assert makespan_ms(phase, degree) == expected_ms
    assert by_formula_ms(phase, degree) == expected_ms
    assert simulated_ms(phase, degree) == expected_ms
    if not phase.grad_ms:
        assert simulated_ms(phase, degree, with_gradient=False) == expected_ms, "an empty slice is none"


@settings(max_examples=40, derandomize=True)
@given(phases(largest=100.0))
def test_the_exact_degree_is_the_smallest_of_the_best_integers(phase: Phase) -> None:
    degree = choose_exact(phase, 64)
    times_ms = [by_hand_ms(phase, each) for each in range(1, 65)]
    assert times_ms[degree - 1] <= min(times_ms) * (1 + 2e-12)
    assert all(each > min(times_ms) * (1 + 0.5e-12) for each in times_ms[: degree - 1]), "a smaller one ties"


@pytest.mark.parametrize("links", ["paper", "shared"])
def test_a_layer_of_one_lane_or_of_nothing_takes_that_at_any_degree_and_is_not_cut(links: str) -> None:
    for lane in ("a2a", "gather", "expert", "reduce"):
        only = dict.fromkeys(("a2a", "gather", "expert", "reduce"), NOTHING) | {lane: Load(LinearCost(0.0, 2.0), 24.0)}
        phase = Phase(**only, links=links)
        for degree in (1, 2, 3, 8):
            assert makespan_ms(phase, degree) == simulated_ms(phase, degree) == (96.0 if lane == "a2a" else 48.0)
        assert choose_exact(phase, 64) == 1
    assert makespan_ms(Phase(NOTHING, NOTHING, NOTHING, NOTHING, 7.0, links), 5) == 7.0
    assert choose_exact(Phase(NOTHING, NOTHING, NOTHING, NOTHING, 0.0, links), 64) == 1


def test_start_ups_alone_ask_for_one_chunk_and_slopes_alone_for_as_many_as_allowed() -> None:
    start_up, slope = Load(LinearCost(1.0, 0.0), 8.0), Load(LinearCost(0.0, 1.0), 8.0)
    assert choose_exact(Phase(start_up, start_up, start_up, start_up), 64) == 1
    assert choose_exact(Phase(slope, slope, Load(LinearCost(0.0, 2.0), 8.0), slope), 64) == 64


@pytest.mark.parametrize("scale", [1e-9, 1e12])
def test_the_choice_does_not_depend_on_the_unit_of_time(scale: float) -> None:
    def phase(unit: float) -> Phase:
        parts = ((0.2, 13.0), (0.1, 7.0), (0.3, 31.0), (0.15, 9.0))
        return Phase(*(Load(LinearCost(alpha * unit, unit), size) for alpha, size in parts), 5.0 * unit)

    here, there = choose_exact(phase(1.0), 64), choose_exact(phase(scale), 64)
    assert here == there
    assert paper_case(phase(1.0), here) == paper_case(phase(scale), there)
    assert bounds_ms(phase(scale), 3) == pytest.approx([each * scale for each in bounds_ms(phase(1.0), 3)], rel=1e-12)


# ---- the paper's predicates Q1 to Q7 and its four cases, in numbers that floating point holds exactly


def phase_of(r: int, a: int, g: int, e: int, s: int, gar: int) -> Phase:
    """A layer whose chunks take exactly so long at degree r, a power of two."""
    return Phase(*(Load(LinearCost(0.0, 1.0), float(r * each)) for each in (a, g, e, s)), float(gar))


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
    if q["Q1"]:
        if q["Q2"]:
            return 1 if q["Q5"] else 2
        return 1 if q["Q4"] else 3
    if q["Q3"]:
        return 1 if q["Q7"] else 2
    return 1 if q["Q6"] else 4


def times_by_the_text(r: int, a: int, g: int, e: int, s: int, gar: int) -> dict[int, int]:
    """PAPER.md, section 3: case -> time."""
    return {1: 2 * r * a + gar, 2: 2 * a + g + s + r * e, 3: 2 * r * a + g + s, 4: 2 * a + r * (g + s)}


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


NAMES = ("Q1", "Q2", "Q3", "Q4", "Q5", "Q6", "Q7")
NUMBERS = st.tuples(st.sampled_from([1, 2, 4, 8, 16, 32, 64]), *[st.integers(0, 30)] * 4, st.integers(0, 200))


@settings(max_examples=300, derandomize=True)
@given(st.sampled_from(NAMES), NUMBERS, st.booleans())
def test_on_a_boundary_case_and_time_are_the_texts_and_the_closed_form_still_exact(
    name: str, free: tuple[int, ...], equal_links: bool
) -> None:
    if equal_links:
        free = (*free[:4], free[2], free[5])
    at = on_the_boundary(name, *free)
    if at[5] < 0:
        return
    assert margins(*at)[name] == 0
    phase, r = phase_of(*at), at[0]
    assert paper_case(phase, r) == case_by_the_text(at)
    assert {case: paper_case_ms(phase, case, r) for case in (1, 2, 3, 4)} == times_by_the_text(*at)
    assert makespan_ms(phase, r) == simulated_ms(phase, r) == by_hand_ms(phase, r)
    if equal_links:
        # The paper's cases are exact where both collectives inside a node take as long.
        assert paper_case_ms(phase, paper_case(phase, r), r) == makespan_ms(phase, r)


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
def test_a_predicate_holds_only_behind_its_boundary_where_both_formulas_meet(name: str) -> None:
    at, raised, case_at, case_behind = SIDES[name]
    behind = tuple(each + (place == raised) for place, each in enumerate(at))
    assert margins(*at)[name] == 0 < margins(*behind)[name]
    r = at[0]
    assert paper_case(phase_of(*at), r) == case_at == case_by_the_text(at)
    assert paper_case(phase_of(*behind), r) == case_behind == case_by_the_text(behind)
    for case in (case_at, case_behind):
        assert paper_case_ms(phase_of(*at), case, r) == makespan_ms(phase_of(*at), r)
    # The paper's method survives it.
    paper = choose_slsqp(phase_of(*at), 8)
    assert 1 <= paper <= 8
    assert makespan_ms(phase_of(*at), choose_exact(phase_of(*at), 8)) <= by_hand_ms(phase_of(*at), paper) * (1 + 1e-12)


def test_all_small_layers_fall_in_the_case_of_the_text() -> None:
    seen = set()
    for at in itertools.product((1, 2, 4), (0, 1, 2), (0, 1, 2), (0, 1, 3), (0, 2), (0, 1, 4)):
        seen.add(paper_case(phase_of(*at), at[0]))
        assert paper_case(phase_of(*at), at[0]) == case_by_the_text(at)
    assert seen == {1, 2, 3, 4}
    nothing = phase_of(1, 0, 0, 0, 0, 0)
    assert makespan_ms(nothing, choose_slsqp(nothing, 16)) == 0.0


# ---- Algorithm 1


def test_the_papers_method_is_never_better_and_seldom_much_worse() -> None:
    rng, losses = random.Random(4), []
    for _ in range(15):
        phase = random_phase(rng)
        losses.append(makespan_ms(phase, choose_slsqp(phase)) / makespan_ms(phase, choose_exact(phase)) - 1)
    assert min(losses) >= -1e-12
    assert max(losses) > 0.001
    assert sum(losses) / len(losses) < 0.05


def test_what_the_methods_cannot_answer_is_refused() -> None:
    drawn = random_phase(random.Random(8))
    shared = Phase(drawn.a2a, drawn.gather, drawn.expert, drawn.reduce, links="shared")
    with pytest.raises(ValueError, match="solver = 'slsqp': the paper's four cases need two parallel links"):
        choose_slsqp(shared)
    for choose, degree in itertools.product((choose_exact, choose_slsqp), (0, -3)):
        with pytest.raises(ValueError, match=f"max_degree = {degree}: must be at least 1"):
            choose(drawn, degree)
