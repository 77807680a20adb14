# SPDX-License-Identifier: Apache-2.0
"""The degree of the pipeline: the exact choice is the best there is, the paper's is comparable with it."""

from __future__ import annotations

import random

import pytest

from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.decide import degree as degree_module
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


@pytest.mark.parametrize("links", ["paper", "shared"])
def test_the_exact_choice_is_the_best_of_all_integers_by_simulation(links: str) -> None:
    rng = random.Random(links)
    for _ in range(8):
        drawn = random_phase(rng)
        phase = Phase(drawn.a2a, drawn.gather, drawn.expert, drawn.reduce, drawn.grad_ms, links)
        chosen = choose_exact(phase, 64)
        times_ms = [simulated_ms(phase, degree) for degree in range(1, 65)]
        assert makespan_ms(phase, chosen) == pytest.approx(min(times_ms), rel=1e-12)
        assert times_ms[chosen - 1] == pytest.approx(min(times_ms), rel=1e-12)


def test_ties_take_the_smaller_degree() -> None:
    nothing = Load(LinearCost(0.0, 0.0), 1.0)
    phase = Phase(Load(LinearCost(0.0, 1.0), 5.0), nothing, nothing, nothing)
    assert makespan_ms(phase, 1) == makespan_ms(phase, 7) == 10.0
    assert choose_exact(phase) == 1


@pytest.mark.parametrize("links", ["paper", "shared"])
def test_the_time_is_convex_in_the_degree(links: str) -> None:
    rng = random.Random(1)
    for _ in range(300):
        drawn = random_phase(rng)
        phase = Phase(drawn.a2a, drawn.gather, drawn.expert, drawn.reduce, drawn.grad_ms, links)
        times_ms = [makespan_ms(phase, degree) for degree in range(1, 33)]
        for left, middle, right in zip(times_ms, times_ms[1:], times_ms[2:], strict=False):
            assert right - middle >= middle - left - 1e-9


def test_the_four_cases_of_the_paper_are_exact_where_both_intra_node_collectives_are_equal() -> None:
    rng = random.Random(2)
    seen = set()
    for _ in range(2000):
        phase, degree = random_phase(rng, equal_links=True), rng.randint(1, 16)
        case = paper_case(phase, degree)
        seen.add(case)
        assert paper_case_ms(phase, case, degree) == pytest.approx(makespan_ms(phase, degree), rel=1e-9)
    assert seen == {1, 2, 3, 4}


def test_the_four_cases_mispredict_some_layers_where_they_differ() -> None:
    rng = random.Random(3)
    wrong = 0
    for _ in range(1000):
        phase, degree = random_phase(rng), rng.randint(2, 16)
        predicted_ms = paper_case_ms(phase, paper_case(phase, degree), degree)
        wrong += abs(predicted_ms / makespan_ms(phase, degree) - 1) > 1e-6
    assert 50 < wrong < 500


def test_the_papers_method_is_never_better_and_seldom_much_worse() -> None:
    rng = random.Random(4)
    losses = []
    for _ in range(15):
        phase = random_phase(rng)
        losses.append(makespan_ms(phase, choose_slsqp(phase)) / makespan_ms(phase, choose_exact(phase)) - 1)
    assert min(losses) >= -1e-12
    assert max(losses) > 0.001
    assert sum(losses) / len(losses) < 0.05


def test_the_papers_method_speaks_of_two_links_only() -> None:
    drawn = random_phase(random.Random(8))
    shared = Phase(drawn.a2a, drawn.gather, drawn.expert, drawn.reduce, links="shared")
    with pytest.raises(
        ValueError, match="solver = 'slsqp': the paper's four cases need two parallel links, not one stream"
    ):
        choose_slsqp(shared)


def test_the_case_of_the_paper_follows_from_the_largest_cost() -> None:
    quick, slow, steep = (
        Load(LinearCost(*cost), size) for *cost, size in ((0.1, 0.0, 1.0), (0.1, 1.0, 40.0), (0.0, 1.0, 40.0))
    )
    by_link, by_experts = Phase(slow, quick, quick, quick, grad_ms=9.0), Phase(quick, quick, slow, quick)
    assert (choose_exact(by_link), makespan_ms(by_link, 1), paper_case(by_link, 1)) == (1, pytest.approx(89.2), 1)
    assert paper_case(by_experts, choose_exact(by_experts)) == 2
    by_intra = Phase(quick, steep, quick, steep)
    assert paper_case(by_intra, choose_exact(by_intra)) == 4


@pytest.mark.parametrize("choose", [choose_exact, choose_slsqp])
def test_a_degree_below_one_is_refused(choose: object) -> None:
    for degree in (0, -3):
        with pytest.raises(ValueError, match=f"max_degree = {degree}: must be at least 1"):
            choose(random_phase(random.Random(5)), degree)


def test_an_exact_choice_looks_at_every_degree_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[int] = []
    bounds_ms = degree_module.bounds_ms

    def counted(phase: Phase, degree: int) -> tuple[float, float, float]:
        looked_at.append(degree)
        return bounds_ms(phase, degree)

    monkeypatch.setattr(degree_module, "bounds_ms", counted)
    choose_exact(random_phase(random.Random(6)), 16)
    assert looked_at == [*range(1, 17)]
