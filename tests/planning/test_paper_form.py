# SPDX-License-Identifier: Apache-2.0
"""The paper's closed form, its four cases and its Algorithm 1, on layers that have the paper's pattern: the form is the
simulation, the exact degree is the best of all, and the paper's method is comparable with it."""

from __future__ import annotations

import itertools
import random

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


@settings(max_examples=100)
@given(phases(), st.integers(1, 64))
def test_closed_form_simulation_and_figure_3_agree(phase: Phase, degree: int) -> None:
    expected_ms = pytest.approx(by_hand_ms(phase, degree), rel=1e-12, abs=0.0)
    assert makespan_ms(phase, degree) == expected_ms
    assert simulated_ms(phase, degree) == expected_ms
    if not phase.grad_ms:
        assert simulated_ms(phase, degree, with_gradient=False) == expected_ms, "an empty slice is none"


@settings(max_examples=40)
@given(phases(largest=100.0))
def test_the_exact_degree_is_the_smallest_of_the_best_integers(phase: Phase) -> None:
    degree = choose_exact(phase, 64)
    times_ms = [by_hand_ms(phase, each) for each in range(1, 65)]
    assert times_ms[degree - 1] <= min(times_ms) * (1 + 2e-12)
    assert all(each > min(times_ms) * (1 + 0.5e-12) for each in times_ms[: degree - 1]), "a smaller one ties"


# ---- the paper's predicates Q1 to Q7 and its four cases, in numbers that floating point holds exactly


def phase_of(r: int, a: int, g: int, e: int, s: int, gar: int) -> Phase:
    """A layer whose chunks take exactly so long at degree r, a power of two."""
    return Phase(*(Load(LinearCost(0.0, 1.0), float(r * each)) for each in (a, g, e, s)), float(gar))


def margins(r: int, a: int, g: int, e: int, s: int, gar: int) -> dict[str, int]:
    """PAPER.md, section 3: each predicate as what has to be above 0."""
    q5 = gar - (r * e - 2 * (r - 1) * a + g + s)
    q6 = gar - (r * g + r * s - 2 * (r - 1) * a)
    q2, q3 = r * e - 2 * (r - 1) * a, r * e - (r - 1) * (g + s)
    return {"Q1": a - g, "Q2": q2, "Q3": q3, "Q4": gar - (g + s), "Q5": q5, "Q6": q6, "Q7": q5}


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


def on_the_boundary(name: str, r: int, a: int, g: int, e: int, s: int, gar: int) -> tuple[int, ...]:
    """The same layer with one number changed, so that a predicate's two sides are equal."""
    if name == "Q1":
        a = g
    elif name == "Q2":
        a, e = r * a, 2 * (r - 1) * a
    elif name == "Q3":
        g, s, e = r * g, r * s, (r - 1) * (g + s)
    else:
        gar -= margins(r, a, g, e, s, gar)[name]
    return r, a, g, e, s, gar


NAMES = ("Q1", "Q2", "Q3", "Q4", "Q5", "Q6", "Q7")
NUMBERS = st.tuples(st.sampled_from([1, 2, 4, 8, 16, 32, 64]), *[st.integers(0, 30)] * 4, st.integers(0, 200))


@settings(max_examples=300)
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
    _, a, g, e, s, gar = at
    by_the_text = {1: 2 * r * a + gar, 2: 2 * a + g + s + r * e, 3: 2 * r * a + g + s, 4: 2 * a + r * (g + s)}
    assert {case: paper_case_ms(phase, case, r) for case in (1, 2, 3, 4)} == by_the_text
    assert makespan_ms(phase, r) == simulated_ms(phase, r) == by_hand_ms(phase, r)
    if equal_links:
        # The paper's cases are exact where both collectives inside a node take as long.
        assert paper_case_ms(phase, paper_case(phase, r), r) == makespan_ms(phase, r)


def test_all_small_layers_fall_in_the_case_of_the_text() -> None:
    seen = set()
    for at in itertools.product((1, 2, 4), (0, 1, 2), (0, 1, 2), (0, 1, 3), (0, 2), (0, 1, 4)):
        seen.add(paper_case(phase_of(*at), at[0]))
        assert paper_case(phase_of(*at), at[0]) == case_by_the_text(at)
    assert seen == {1, 2, 3, 4}
    nothing = phase_of(1, 0, 0, 0, 0, 0)
    assert makespan_ms(nothing, choose_slsqp(nothing, 16)) == 0.0


# ---- Algorithm 1


def test_the_papers_method_is_never_better_and_seldom_much_worse_also_on_boundaries() -> None:
    rng, losses = random.Random(4), []
    at_boundaries = [on_the_boundary(name, 4, 3, 2, 9, 5, 30) for name in NAMES]
    for phase in (*(random_phase(rng) for _ in range(15)), *(phase_of(*each) for each in at_boundaries)):
        losses.append(makespan_ms(phase, choose_slsqp(phase)) / makespan_ms(phase, choose_exact(phase)) - 1)
    assert min(losses) >= -1e-12
    assert max(losses) > 0.001
    assert sum(losses[:15]) / 15 < 0.05


def test_what_the_methods_cannot_answer_is_refused() -> None:
    drawn = random_phase(random.Random(8))
    shared = Phase(drawn.a2a, drawn.gather, drawn.expert, drawn.reduce, links="shared")
    with pytest.raises(ValueError, match="solver = 'slsqp': the paper's four cases need two parallel links"):
        choose_slsqp(shared)
    for choose, degree in itertools.product((choose_exact, choose_slsqp), (0, -3)):
        with pytest.raises(ValueError, match=f"max_degree = {degree}: must be at least 1"):
            choose(drawn, degree)
