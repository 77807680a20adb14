# SPDX-License-Identifier: Apache-2.0
"""Whole layers of every gate with every order that reads its decision, with slots for all tokens, some or none."""

from __future__ import annotations

import inspect
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_fsmoe import MOELayer, registry
from ds_fsmoe.components.gates.expert_choice import ExpertChoiceGate
from ds_fsmoe.components.order import OrderBase
from ds_fsmoe.components.routing import Routing, kind_of
from tests.covering import covering
from tests.ranks import run_on_ranks
from tests.samples import draw, sampled

S, M, H, E = 23, 8, 5, 4
PAIRS = [
    (gate, order)
    for gate, order in itertools.product(registry.known("gate"), registry.known("order"))
    if issubclass(kind_of(registry.lookup("gate", gate)), registry.lookup("order", order).reads)
]
FEWEST_SLOTS = {"k": 2, "drop_tokens": False, "min_capacity": 0, "slots_per_expert": 1}


def options_of(gate: str, **wanted: Any) -> dict[str, Any]:
    """Those that the gate has: of ``wanted``, and those with which it asks for as few slots as it can."""
    known = inspect.signature(registry.lookup("gate", gate)).parameters
    return {name: value for name, value in (FEWEST_SLOTS | wanted).items() if name in known}


def layer_of(gate: str, order: str | OrderBase, options: dict[str, Any], **how: Any) -> MOELayer:
    """The same parameters each time."""
    torch.manual_seed(0)
    sizes = {"model_dim": M, "num_experts": E, "expert_dim": H, "return_stats": True}
    order = registry.lookup("order", order)() if isinstance(order, str) else order
    return MOELayer(registry.lookup("gate", gate)(**options), order, **sizes | how)


def gradients_of(layer: MOELayer, x_SM: torch.Tensor, used_S: torch.Tensor | None) -> list[torch.Tensor | None]:
    """The result and the gradients of the tokens and of all parameters."""
    x_SM.requires_grad_()
    torch.manual_seed(1)
    result = layer(x_SM, used_S)
    loss = result.output.square().sum() + result.aux_loss
    return [result.output, *torch.autograd.grad(loss, [x_SM, *layer.parameters()], allow_unused=True)]


def assert_same(found: list[torch.Tensor | None], expected: list[torch.Tensor | None], tolerance: float = 0.0) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("gate", "order"), [pair for pair in PAIRS if pair[1] not in ("sparse", "dense")])
def test_a_layer_is_the_same_with_every_order_that_reads_its_gate(gate: str, order: str) -> None:
    for dropping in ({"drop_tokens": True, "capacity_factor": 0.6}, {"drop_tokens": False}):
        for used_S in (None, torch.arange(S) % 4 > 0):
            found, expected = (
                gradients_of(
                    layer_of(gate, each, options_of(gate, **dropping), pipeline_degree=(3, 2)).double(),
                    torch.randn(S, M, dtype=torch.float64, generator=torch.Generator().manual_seed(2)),
                    used_S,
                )
                for each in (order, "sparse")
            )
            assert expected[0].abs().max() > 1e-3
            assert_same(found, expected, 1e-13)


class Products(OrderBase):
    """As a user may write one: products of every slot with masks, of which most numbers are zero."""

    def arrange(self, x_SM: torch.Tensor, routing: Routing) -> torch.Tensor:
        x_RM = self.masks(routing, torch.ones_like(routing.weights_KS)).t().to(x_SM) @ x_SM
        return x_RM.view(routing.num_experts, routing.capacity, -1)

    def restore(self, y_ECM: torch.Tensor, routing: Routing) -> torch.Tensor:
        return self.masks(routing, routing.weights_KS).to(y_ECM) @ y_ECM.flatten(0, 1)

    def masks(self, routing: Routing, weights_KS: torch.Tensor) -> torch.Tensor:
        masks_SR = weights_KS.new_zeros(weights_KS.shape[1], routing.num_slots + 1)
        return masks_SR.scatter_add(1, routing.slots_KS.t(), weights_KS.t())[:, :-1]


@pytest.mark.parametrize("dispatch", ["unpadded", "padded"])
@pytest.mark.parametrize("degrees", [1, (3, 2)])
def test_memory_that_no_token_took_has_numbers_for_an_order_that_reads_it(degrees: Any, dispatch: str) -> None:
    """Whatever lay there before: new memory is nan here."""
    used_S, found = torch.arange(S) % 4 > 0, []
    torch.use_deterministic_algorithms(True)
    try:
        for order in ("sparse", Products()):
            layer = layer_of("topk", order, options_of("topk"), pipeline_degree=degrees, dispatch=dispatch).double()
            x_SM = torch.randn(S, M, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
            found.append(gradients_of(layer, x_SM, used_S))
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same(found[1], found[0], 1e-12)


class Unchanged(nn.Module):
    """An expert whose results are its tokens, so that a token comes back as often as it was sent."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1.0 * x


@pytest.mark.parametrize("order", [order for gate, order in PAIRS if gate == "topk"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_without_dropping_every_token_comes_back_whole_however_crowded(order: str, k: int) -> None:
    x_SM = torch.randn(S, M, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x_SM[:, 0] = 2.0
    used_S = torch.arange(S) % 4 > 0
    for drop_tokens, crowded in itertools.product((False, True), (False, True)):
        # With dropping there are 8 slots for 17 tokens, and those that are in none come back as zeros.
        options = {"k": k, "drop_tokens": drop_tokens, "capacity_factor": 0.3 / k, "min_capacity": 0}
        layer = layer_of("topk", order, options, expert_impl=Unchanged(), pipeline_degree=(3, 2)).double()
        if crowded:  # all of them want expert 1 first
            layer.gate.wg.weight.data[1, 0] = 9.0
        result = layer(x_SM, used_S)
        # For k = 1 the weight is the probability of the expert, for others weights sum to 1.
        scale_S1 = torch.softmax(x_SM @ layer.gate.wg.weight.t(), dim=1).max(dim=1, keepdim=True).values
        whole_SM = used_S[:, None] * x_SM * (scale_S1 if k == 1 else 1.0)
        came_back_S = (result.output - whole_SM).abs().amax(dim=1) < 1e-12
        assert came_back_S.all() == (not drop_tokens)
        assert result.counts_E.sum() == k * used_S.sum()
        assert not crowded or result.counts_E[1] == used_S.sum()


# ---- where no rank has a token that takes part, a gate that drops nothing asks for no slots, and nothing travels

DEGREES = [(1, 1), (2, 2), (1, 3), (3, 1), (4, 2)]
# Each pair with one of them, in turns.
TOKENS = {"padding alone": 6, "no token": 0}
CASES = [(gate, order, kind) for gate, order in PAIRS for kind in TOKENS]


def without_slots(gate: str, order: str, num_tokens: int, is_training: bool = True, **how: Any) -> list[Any]:
    layer = layer_of(gate, order, options_of(gate), **how).train(is_training)
    capacities: list[int] = []
    layer.gate.register_forward_hook(lambda module, args, routing: capacities.append(routing.capacity))
    found = gradients_of(layer, torch.randn(num_tokens, M), torch.zeros(num_tokens))
    # Others have slots by the number of tokens, used or not, and rows need none.
    if "drop_tokens" in options_of(gate) and how["dispatch"] == "padded":
        assert capacities == [0]
    return found


@sampled(("gate", "order", "kind"), CASES, kept=[2 * at + at % 2 for at in range(len(PAIRS))])
def test_a_layer_with_no_slots_is_the_same_in_any_number_of_chunks(gate: str, order: str, kind: str) -> None:
    for is_training in (True, False):
        case = gate, order, TOKENS[kind], is_training
        whole = without_slots(*case, pipeline_degree=(1, 1), dispatch="padded")
        for degrees, dispatch in itertools.product(DEGREES, ("padded", "auto")):
            assert_same(without_slots(*case, pipeline_degree=degrees, dispatch=dispatch), whole)


def with_no_slots(rank: int, world_size: int) -> None:
    for gate, degrees, num_tokens in (("topk", (2, 3), 6), ("expert_choice", (3, 2), 0)):
        case = gate, "sparse", num_tokens, True
        whole = without_slots(*case, pipeline_degree=(1, 1), dispatch="padded", group=dist.group.WORLD)
        for dispatch in ("padded", "auto"):
            cut = without_slots(*case, pipeline_degree=degrees, dispatch=dispatch, group=dist.group.WORLD)
            assert_same(cut, whole)


def test_ranks_without_a_token_exchange_nothing_and_go_on(tmp_path: Path) -> None:
    run_on_ranks(with_no_slots, 2, tmp_path)


# ---- on ranks

ON_RANKS = covering(PAIRS, [(1, 1), (3, 2), (2, 5)], (False, True))
TODAYS = [draw(f"{pair} on ranks", [each for each in ON_RANKS if each[0] == pair], 1)[0] for pair in PAIRS]
OTHERS = [each for each in ON_RANKS if each not in TODAYS]


def differ_from_one_rank(rank: int, world_size: int, cases: list[tuple[Any, tuple[int, int], bool]]) -> list[str]:
    """Numbers of a layer whose experts are spread over ranks that are not those of a layer on one rank."""
    found = []
    for (gate, order), degrees, masked in cases:
        options = options_of(gate, drop_tokens=True, capacity_factor=1.1, agree_capacity=True, slots_per_expert=3)
        whole = layer_of(gate, order, options, dispatch="padded").double()
        spread = layer_of(gate, order, options, pipeline_degree=degrees, group=dist.group.WORLD).double()
        spread.gate.load_state_dict(whole.gate.state_dict())
        for number, parameter in enumerate(whole.experts.parameters()):  # made as copies of one
            nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(number))
        here = E // world_size
        local = [*whole.experts.experts][rank * here : (rank + 1) * here]
        for ours, theirs in zip(spread.experts.experts, local, strict=True):
            ours.load_state_dict(theirs.state_dict())
        # Ranks may have different numbers of tokens where a capacity is agreed on or does not follow from them.
        num_tokens = S - 5 * rank if {"agree_capacity", "slots_per_expert"} & {*options} else S
        x_SM = torch.randn(num_tokens, M, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
        used_S = torch.arange(num_tokens) % 3 > 0 if masked else None
        results = [gradients_of(layer, x_SM.clone(), used_S) for layer in (spread, whole)]
        shared = 2 + len([*whole.gate.parameters()])
        # Experts' gradients are sums over all ranks' tokens.
        of_whole = dict(zip(whole.parameters(), results[1][2:], strict=True))
        for parameter, gradient in of_whole.items():
            of_whole[parameter] = torch.zeros_like(parameter) if gradient is None else gradient.clone()
        for parameter in whole.experts.parameters():
            dist.all_reduce(of_whole[parameter])
        expected = [*results[1][:2], *(of_whole[each] for each in whole.gate.parameters())]
        expected += [of_whole[each] for expert in local for each in expert.parameters()]
        of_spread = dict(zip(spread.parameters(), results[0][2:], strict=True))
        ours = [*results[0][:2], *(of_spread[each] for each in spread.gate.parameters())]
        ours += [of_spread[each] for each in spread.experts.parameters()]
        for number, (one, other) in enumerate(zip(ours, expected, strict=True)):
            one = torch.zeros_like(other) if one is None else one
            if not (one - other).abs().max() < 1e-12:
                what = ("output", "dx")[number] if number < 2 else ("router" if number < shared else "experts")
                found.append(f"{gate}, {order}, {degrees}, masked {masked}: {what}, by {(one - other).abs().max():.1e}")
        assert expected[1].abs().max() > 1e-3
    return found


@sampled("world_size", [2, 4])
@sampled("cases", [TODAYS, OTHERS], kept=[0], drawn=0, ids=["today's", "others"])
def test_a_layer_whose_experts_are_spread_over_ranks_equals_the_layer_on_one(
    cases: list[Any], world_size: int, tmp_path: Path
) -> None:
    assert {pair for pair, _, _ in cases} == set(PAIRS)
    for found in run_on_ranks(differ_from_one_rank, world_size, tmp_path, cases):
        assert found == []


def agreed_capacity(rank: int, world_size: int, tokens: list[int]) -> tuple[int, list[int], int]:
    """(capacity, counts, empty slots) of a rank that has so many tokens."""
    gate = ExpertChoiceGate(k=2, agree_capacity=True)
    gate.build(M, E)
    routing = gate(torch.randn(tokens[rank], M), None, dist.group.WORLD)
    return routing.capacity, routing.counts_E.tolist(), int((routing.tokens_R == tokens[rank]).sum())


def test_ranks_with_different_numbers_of_tokens_agree_on_the_largest_capacity(tmp_path: Path) -> None:
    seen = run_on_ranks(agreed_capacity, 4, tmp_path, [3, 23, 1, 11])
    # What an expert takes of a rank's tokens does not depend on those of others.
    assert seen == [(12, [each] * 4, 4 * (12 - each)) for each in (2, 12, 1, 6)]
