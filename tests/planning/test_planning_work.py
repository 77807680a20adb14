# SPDX-License-Identifier: Apache-2.0
"""How many candidates are simulated for a model: each way to run a kind of layer once, whatever number of plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from ds_fsmoe.planning.call_shape import layer_of_call
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.decide import block_times
from ds_fsmoe.planning.decide.candidates import Search
from ds_fsmoe.planning.decide.plan_requests import SearchSpace
from ds_fsmoe.planning.schedule import EXPERT_GRAD, GRAD, Lane
from ds_fsmoe.planning.workload import Gradient, Layer
from tests.planning.measured_layers import GROUPS, SIZES, made_up
from tests.planning.test_candidates import search_of

GRADIENTS = Gradient(GRAD, (Lane.INTER,), 3000), Gradient(EXPERT_GRAD, (Lane.INTER,), 2000)


@contextmanager
def counting() -> Iterator[list[int]]:
    """The candidates of each batch that is simulated meanwhile."""
    counts: list[int] = []
    simulate = block_times.makespans_ms

    def counted(jobs: Sequence[Any], *how: Any) -> list[np.ndarray]:
        counts.append(sum(task_ms.shape[1] for _, task_ms, _ in jobs))
        return simulate(jobs, *how)

    block_times.makespans_ms = counted
    try:
        yield counts
    finally:
        block_times.makespans_ms = simulate


def kind(number: int, gradients: tuple[Gradient, ...]) -> Layer:
    costs = made_up(number).costs()
    costs.backward.update({each.kind: LinearCost(0.01, 1e-3) for each in gradients})
    return layer_of_call(GROUPS, SIZES, costs, "flat", (2.0, 4.0), gradients)


def search(layers: int, kinds: int, gradients: tuple[Gradient, ...] = ()) -> Search:
    made = [{"flat": kind(each, gradients)} for each in range(kinds)]
    return search_of(*(made[each % kinds] for each in range(layers)), space=SearchSpace.of("best", 6))


def all_plans(of: Search) -> None:
    first, second, *_ = of.candidates()
    assert len(of.refinements(first, first, second)) > 1


def simulated(of: Search, plan: Callable[[Search], Any] = all_plans) -> int:
    with counting() as counts:
        plan(of)
    return sum(counts)


def test_a_way_to_run_a_layer_is_simulated_once_for_all_plans_that_are_tried() -> None:
    assert 0 < simulated(search(2, 1)) <= 2.2 * simulated(search(2, 1), Search.fastest)


@pytest.mark.parametrize("gradients", [(), GRADIENTS], ids=["without gradients", "with gradients"])
def test_twice_the_layers_and_twice_the_kinds_take_twice_the_work_at_the_most(gradients: tuple[Gradient, ...]) -> None:
    few = simulated(search(8, 1, gradients))
    assert simulated(search(16, 1, gradients)) <= 2.2 * few
    assert simulated(search(16, 2, gradients)) <= 2.2 * few


def test_layers_of_all_kinds_are_simulated_together() -> None:
    batches = []
    for kinds in (2, 8):
        with counting() as counts:
            search(8, kinds).whole()
        batches.append(len(counts))
    # Besides, each choice is looked at by itself for what it takes on lanes that do not slow each other down.
    assert batches[1] <= batches[0] + 2 * 6
