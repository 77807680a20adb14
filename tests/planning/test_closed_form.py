# SPDX-License-Identifier: Apache-2.0
"""The closed form of a layer's time is the simulation, whatever the layer."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.decide.degree import NOTHING, Load, Phase, bounds_ms, choose_exact, makespan_ms, paper_case
from tests.planning.layers import by_hand_ms, phases, simulated_ms

MODEST = settings(deadline=None, max_examples=80, derandomize=True)


def close(value: float) -> object:
    return pytest.approx(value, rel=1e-12, abs=0.0)


@MODEST
@given(phases(), st.integers(1, 64))
def test_closed_form_simulation_and_figure_3_agree(phase: Phase, degree: int) -> None:
    by_hand = by_hand_ms(phase, degree)
    assert makespan_ms(phase, degree) == close(by_hand)
    assert simulated_ms(phase, degree) == close(by_hand)


@MODEST
@given(phases(), st.integers(1, 64))
def test_a_gradient_that_is_not_there_changes_nothing(phase: Phase, degree: int) -> None:
    without = Phase(phase.a2a, phase.gather, phase.expert, phase.reduce, 0.0, phase.links)
    assert simulated_ms(without, degree, with_gradient=False) == close(makespan_ms(without, degree))
    assert simulated_ms(without, degree, with_gradient=True) == close(makespan_ms(without, degree))


@MODEST
@given(phases(), st.integers(1, 64))
def test_the_closed_form_is_the_formula_of_the_paper_page(phase: Phase, degree: int) -> None:
    """T = max{2ra + gar, 2a+g+e+s + (r-1)max(a,g,e,s), 2a+g+s + (r-1)(max(a,g)+max(a,s))}."""
    r, gar = degree, phase.grad_ms
    a, g, e, s = phase.chunk_times_ms(r)
    if phase.links == "shared":
        expected = max(2 * r * a + r * (g + s) + gar, 2 * a + g + e + s + (r - 1) * max(a + g, e, a + s))
    else:
        expected = max(
            2 * r * a + gar,
            2 * a + g + e + s + (r - 1) * max(a, g, e, s),
            2 * a + g + s + (r - 1) * (max(a, g) + max(a, s)),
        )
    assert makespan_ms(phase, degree) == close(expected)


@MODEST
@given(phases(), st.integers(1, 64))
def test_no_time_beats_a_chain_or_a_lane(phase: Phase, degree: int) -> None:
    a, g, e, s = phase.chunk_times_ms(degree)
    time_ms = simulated_ms(phase, degree)
    lanes_ms = (2 * degree * a + phase.grad_ms, degree * (g + s), degree * e)
    chain_ms = 2 * a + g + e + s
    assert time_ms >= max(*lanes_ms, chain_ms) * (1 - 1e-12)
    assert time_ms <= (sum(lanes_ms)) * (1 + 1e-12), "never longer than one task after another"


@settings(deadline=None, max_examples=40, derandomize=True)
@given(phases(largest=100.0))
def test_the_exact_choice_is_the_smallest_of_the_best_integers(phase: Phase) -> None:
    degree = choose_exact(phase, 64)
    times_ms = [by_hand_ms(phase, each) for each in range(1, 65)]
    assert times_ms[degree - 1] <= min(times_ms) * (1 + 2e-12)
    assert all(each > min(times_ms) * (1 + 0.5e-12) for each in times_ms[: degree - 1]), "a smaller one ties"


@pytest.mark.parametrize("links", ["paper", "shared"])
@pytest.mark.parametrize("lane", ["a2a", "gather", "expert", "reduce"])
def test_a_single_lane_with_work_takes_exactly_that_work_at_any_degree(links: str, lane: str) -> None:
    only = dict.fromkeys(("a2a", "gather", "expert", "reduce"), NOTHING) | {lane: Load(LinearCost(0.0, 2.0), 24.0)}
    phase = Phase(**only, links=links)
    for degree in (1, 2, 3, 4, 6, 8):
        assert makespan_ms(phase, degree) == simulated_ms(phase, degree) == (96.0 if lane == "a2a" else 48.0)
    assert choose_exact(phase, 64) == 1, "all degrees are equally good, so the smallest"


@pytest.mark.parametrize("links", ["paper", "shared"])
def test_a_layer_of_nothing_takes_nothing(links: str) -> None:
    phase = Phase(NOTHING, NOTHING, NOTHING, NOTHING, 0.0, links)
    assert choose_exact(phase, 64) == 1
    assert makespan_ms(phase, 1) == 0.0
    assert makespan_ms(Phase(NOTHING, NOTHING, NOTHING, NOTHING, 7.0, links), 5) == 7.0


def test_start_ups_alone_ask_for_one_chunk_and_slopes_alone_for_as_many_as_allowed() -> None:
    start_up, slope = Load(LinearCost(1.0, 0.0), 8.0), Load(LinearCost(0.0, 1.0), 8.0)
    assert choose_exact(Phase(start_up, start_up, start_up, start_up), 64) == 1
    balanced = Phase(slope, slope, Load(LinearCost(0.0, 2.0), 8.0), slope)
    assert choose_exact(balanced, 64) == 64


@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1e6, 1e12])
def test_the_choice_does_not_depend_on_the_unit_of_time(scale: float) -> None:
    def phase(unit: float) -> Phase:
        def load(alpha: float, size: float) -> Load:
            return Load(LinearCost(alpha * unit, unit), size)

        return Phase(load(0.2, 13.0), load(0.1, 7.0), load(0.3, 31.0), load(0.15, 9.0), 5.0 * unit)

    here, there = choose_exact(phase(1.0), 64), choose_exact(phase(scale), 64)
    assert here == there
    assert paper_case(phase(1.0), here) == paper_case(phase(scale), there)
    assert makespan_ms(phase(scale), there) == pytest.approx(makespan_ms(phase(1.0), here) * scale, rel=1e-12)
    assert bounds_ms(phase(scale), 3) == pytest.approx([each * scale for each in bounds_ms(phase(1.0), 3)], rel=1e-12)
