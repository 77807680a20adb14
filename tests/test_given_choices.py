# SPDX-License-Identifier: Apache-2.0
"""A gate that is given its choice weighs, drops and learns by its own scores, as the formulas have it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ds_fsmoe import registry
from ds_fsmoe.components.gates.topk import TopKSettings, route_top_k
from ds_fsmoe.components.routing import ReplayedRouting, Routing
from ds_fsmoe.ops.reference import take_slots
from tests.gate_formulas import run_loop
from tests.reference import LayerSettings, route
from tests.samples import sampled
from tests.test_gate_formulas import CASES, as_priority, assert_equal_loop, built
from tests.test_gates import make_gate

S, E, M = 19, 6, 7

pytestmark = pytest.mark.filterwarnings("ignore:.*with k = 1 every weight is 1")


def some_choice(k: int, seed: int = 5) -> torch.Tensor:
    """[k, S]: different experts, drawn."""
    return torch.rand(S, E, generator=torch.Generator().manual_seed(seed)).argsort(dim=1)[:, :k].t().contiguous()


def given_to(gate: Any, given: ReplayedRouting, *args: Any) -> Routing:
    gate.given = given
    routing = gate(*args)
    gate.given = None
    return routing


@pytest.mark.parametrize("masked", [False, True], ids=["all used", "some unused"])
@sampled(("name", "options"), CASES, kept=range(0, len(CASES), 6), ids=str)
def test_weights_losses_and_gradients_follow_the_formula_at_the_choice_that_is_given(
    name: str, options: dict[str, Any], masked: bool
) -> None:
    gate, x_SM = built(name, options, (S, E, M))
    given_KS = some_choice(options["k"])
    used_S = torch.arange(S) % 5 > 0 if masked else None
    torch.manual_seed(3)
    routing = given_to(gate, ReplayedRouting(given_KS), x_SM, used_S)
    used = None if used_S is None else used_S.tolist()
    assert torch.equal(routing.experts_KS, given_KS)
    loop = run_loop(name, gate, x_SM, used, seed=3, given=given_KS.t().tolist())
    assert_equal_loop(routing, loop, [x_SM, *gate.parameters()], atol=1e-11)


@pytest.mark.parametrize("drop_tokens", [False, True])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_stocks_gate_follows_its_formula_at_the_choice_that_is_given(k: int, drop_tokens: bool) -> None:
    torch.manual_seed(0)
    x_SM = torch.randn(S, M, dtype=torch.float64)
    weight_EM = torch.randn(E, M, dtype=torch.float64, requires_grad=True)
    given_KS = some_choice(k)
    settings = TopKSettings(k=k, capacity_factor=0.6, min_capacity=0, drop_tokens=drop_tokens, use_rts=k > 1)
    routing = route_top_k(x_SM, weight_EM, settings, True, given=ReplayedRouting(given_KS))
    # Who stays, where k is 1, is as topk breaks ties: what the gate itself said.
    priority_SE = as_priority(routing, S)
    names = ("k", "capacity_factor", "min_capacity", "drop_tokens", "drop_policy")
    plain = LayerSettings(**{name: getattr(settings, name) for name in names})
    loop = route(x_SM, weight_EM, plain, None, priority_SE, given_KS.t().tolist())
    assert_equal_loop(routing, loop, [weight_EM], atol=1e-12)


def alike(first: Routing, second: Routing) -> bool:
    fields = ("slots_KS", "weights_KS", "aux_loss", "counts_E", "experts_KS")
    return first.capacity == second.capacity and all(
        torch.equal(getattr(first, name), getattr(second, name)) for name in fields
    )


@pytest.mark.parametrize("name", [each for each in registry.known("gate") if registry.lookup("gate", each).takes_given])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_its_own_choice_gives_the_same_decision_to_the_bit(name: str, k: int) -> None:
    gate, x_SM = make_gate(name, {"k": k, "capacity_factor": 0.7}, (S, E, M))
    torch.manual_seed(1)
    own = gate(x_SM.float())
    torch.manual_seed(1)
    assert alike(given_to(gate, ReplayedRouting(own.experts_KS.to(torch.int32)), x_SM.float()), own)
    torch.manual_seed(1)
    assert alike(given_to(gate, own.given(), x_SM.float()), own)


@pytest.mark.parametrize("name", ["topk", "mixtral", "deepseek"])
def test_tokens_that_are_given_nothing_choose_by_themselves(name: str) -> None:
    gate, x_SM = make_gate(name, {"k": 2, "drop_tokens": False}, (S, E, M))
    torch.manual_seed(1)
    own = gate(x_SM.float())
    given_KS = torch.where(torch.arange(S) % 3 == 0, -1, some_choice(2))
    torch.manual_seed(1)
    routing = given_to(gate, ReplayedRouting(given_KS, leaves_some=True), x_SM.float())
    assert torch.equal(routing.experts_KS, torch.where(torch.arange(S) % 3 == 0, own.experts_KS, given_KS))


def test_slots_that_are_given_stay_whatever_the_scores_are_now() -> None:
    gate, x_SM = make_gate("mixtral", {"k": 2, "capacity_factor": 0.5, "min_capacity": 0}, (S, E, M))
    first = gate(x_SM.float())
    again = given_to(gate, first.given(), x_SM.float() + 10 * torch.randn(S, M))
    assert torch.equal(again.slots_KS, first.slots_KS)
    assert again.capacity == first.capacity
    other = given_to(gate, replace(first.given(), slots_KS=None), x_SM.float() + 10 * torch.randn(S, M))
    assert not torch.equal(other.slots_KS, first.slots_KS)


@pytest.mark.parametrize("masked", [False, True])
def test_experts_that_chose_tokens_choose_them_again_whatever_the_scores_are_now(masked: bool) -> None:
    gate, x_SM = make_gate("expert_choice", {"k": 2}, (S, E, M))
    used_S = torch.arange(S) < 3 if masked else None
    first = gate(x_SM.float(), used_S)
    same = given_to(gate, first.given(), x_SM.float(), used_S)
    assert torch.equal(same.tokens_R, first.tokens_R)
    assert torch.equal(same.weights_R, first.weights_R)
    assert torch.equal(same.counts_E, first.counts_E)
    again = given_to(gate, first.given(), x_SM.float() + 10 * torch.randn(S, M), used_S)
    assert torch.equal(again.tokens_R, first.tokens_R)
    assert not torch.equal(again.weights_R, first.weights_R)


def test_a_gate_that_does_not_say_what_it_chose_is_known_by_its_slots() -> None:
    experts_KS = some_choice(2)
    slots = take_slots(experts_KS, E, 3)
    weights_KS = torch.rand(2, S)
    routing = Routing(slots.slots_KS, weights_KS, torch.zeros(()), slots.counts_E, 3, E)
    assert torch.equal(routing.chosen(), torch.where(slots.slots_KS < E * 3, experts_KS, E))
