# SPDX-License-Identifier: Apache-2.0
"""Gates in which slots choose their tokens: expert choice and SoftMoE, their laws and formulas, in one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from ds_fsmoe import GPTFeedForward, LinearGate, MOELayer, SimpleOrder, registry
from ds_fsmoe.components.gate import GateBase
from ds_fsmoe.components.gates.expert_choice import ExpertChoiceGate
from ds_fsmoe.components.gates.softmoe import SoftMoEGate
from ds_fsmoe.components.orders.dense import DenseOrder
from ds_fsmoe.components.orders.einsum import EinsumOrder
from ds_fsmoe.components.routing import DenseRouting, SlotRouting
from tests.reference import LayerSettings, capacity_of
from tests.slot_gate_loops import expert_choice_layer, softmoe_layer

SIZES_SEM = [(23, 5, 13), (7, 7, 11), (1, 5, 3), (31, 3, 17)]
EVERY_SIZE = pytest.mark.parametrize("size_SEM", SIZES_SEM, ids=str)
CHOOSING: list[dict[str, Any]] = [{}, {"k": 2, "capacity_factor": 1.3}, {"k": 3, "capacity_factor": 0.4}]
MIXING: list[dict[str, Any]] = [{}, {"slots_per_expert": 5}]
EVERY_GATE = pytest.mark.parametrize(
    ("gate_class", "options"),
    [*((ExpertChoiceGate, each) for each in CHOOSING), *((SoftMoEGate, each) for each in MIXING)],
    ids=str,
)
ONE_OF_EACH = pytest.mark.parametrize(
    ("gate_class", "options"), [(ExpertChoiceGate, {"k": 2}), (SoftMoEGate, {"slots_per_expert": 3})], ids=str
)


def make_gate(
    gate_class: type[GateBase], options: dict[str, Any], size_SEM: tuple[int, int, int]
) -> tuple[GateBase, torch.Tensor]:
    """(gate, x [S, M]) in float64, seeded."""
    num_tokens, num_experts, width = size_SEM
    torch.manual_seed(num_tokens)
    gate = gate_class(**options)
    gate.build_once(width, num_experts)
    nn.init.normal_(gate.double().wg.weight)
    return gate, torch.randn(num_tokens, width, dtype=torch.float64)


def weights_of(routing: SlotRouting | DenseRouting) -> list[torch.Tensor]:
    if isinstance(routing, SlotRouting):
        return [routing.weights_R]
    return [routing.dispatch_SR, routing.combine_SR]


def mask_of(num_tokens: int) -> torch.Tensor:
    return torch.tensor([token % 3 > 0 for token in range(num_tokens)])


# ---- both


def test_they_are_on_the_shelf() -> None:
    assert registry.lookup("gate", "expert_choice") is ExpertChoiceGate
    assert registry.lookup("gate", "softmoe") is SoftMoEGate


@EVERY_GATE
def test_router_arithmetic_is_in_float32_whatever_comes_in(gate_class: type, options: dict) -> None:
    gate, x_SM = make_gate(gate_class, options, (23, 5, 13))
    exact = gate(x_SM)
    assert exact.aux_loss.dtype == torch.float64
    assert all(each.dtype == torch.float64 for each in weights_of(exact))
    assert not all(torch.equal(each.float().double(), each) for each in weights_of(exact))
    single, x_SM = gate.float(), x_SM.float()
    plain = single(x_SM)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = single(x_SM)
    for low in (torch.bfloat16, torch.float16):
        low_x_SM = x_SM.to(low)
        from_low = gate.to(low)(low_x_SM)
        as_single = gate.float()(low_x_SM.float())
        assert all(map(torch.equal, weights_of(from_low), weights_of(as_single)))
    for each in (*weights_of(plain), *weights_of(cast), *weights_of(from_low), plain.aux_loss, from_low.aux_loss):
        assert each.dtype == torch.float32
    assert all(map(torch.equal, weights_of(plain), weights_of(cast)))


@EVERY_GATE
def test_there_is_no_auxiliary_loss(gate_class: type, options: dict) -> None:
    gate, x_SM = make_gate(gate_class, options, (23, 5, 13))
    assert gate(x_SM).aux_loss.shape == ()
    assert gate(x_SM).aux_loss == 0


@EVERY_GATE
def test_masked_tokens_change_nothing_for_the_others(gate_class: type, options: dict) -> None:
    """Whatever stands in them: neither slots nor weights of the others depend on it."""
    gate, x_SM = make_gate(gate_class, options, (23, 5, 13))
    used_S = mask_of(23)
    other_SM = torch.where(used_S[:, None], x_SM, 50 * torch.randn_like(x_SM))
    for mask_S in (used_S, used_S.long(), used_S.double().reshape(1, 23)):
        of_one, of_other = gate(x_SM, mask_S), gate(other_SM, mask_S)
        assert all(map(torch.equal, weights_of(of_one), weights_of(of_other)))
        assert torch.equal(of_one.counts_E, of_other.counts_E)
    assert not all(map(torch.equal, weights_of(of_one), weights_of(gate(x_SM))))


@EVERY_GATE
def test_nobody_may_be_used_at_all(gate_class: type, options: dict) -> None:
    gate, x_SM = make_gate(gate_class, options, (23, 5, 13))
    routing = gate(x_SM.requires_grad_(), torch.zeros(23))
    assert routing.counts_E.tolist() == [0] * 5
    assert not any(each.any() for each in weights_of(routing))
    sum(each.sum() for each in weights_of(routing)).backward()
    assert not gate.wg.weight.grad.any()
    assert not x_SM.grad.any()


@EVERY_GATE
def test_there_may_be_no_tokens(gate_class: type, options: dict) -> None:
    gate, _ = make_gate(gate_class, options, (23, 5, 13))
    order = registry.lookup("order", gate_class.gives.order)()
    routing = gate(torch.zeros(0, 13, dtype=torch.float64))
    x_ECM = order.arrange(torch.zeros(0, 13, dtype=torch.float64), routing)
    assert x_ECM.shape == (5, routing.capacity, 13)
    assert order.restore(x_ECM, routing).shape == (0, 13)


@EVERY_GATE
def test_a_mask_of_another_length_is_refused(gate_class: type, options: dict) -> None:
    gate, x_SM = make_gate(gate_class, options, (23, 5, 13))
    with pytest.raises(ValueError, match="used_token has 22 entries for 23 tokens"):
        gate(x_SM, torch.ones(22))


@ONE_OF_EACH
def test_gradients_of_the_router_are_those_of_finite_differences(gate_class: type, options: dict) -> None:
    gate, x_SM = make_gate(gate_class, options, (7, 3, 5))
    for used_S in (None, mask_of(7)):

        def weights(x_SM: torch.Tensor, weight: torch.Tensor, used_S=used_S) -> tuple[torch.Tensor, ...]:
            return tuple(weights_of(torch.func.functional_call(gate, {"wg.weight": weight}, (x_SM, used_S))))

        inputs = x_SM.requires_grad_(), gate.wg.weight.detach().requires_grad_()
        assert torch.autograd.gradcheck(weights, inputs)


def make_layer(gate: GateBase, order: Any, size_SEM: tuple[int, int, int], **options: Any) -> MOELayer:
    _, num_experts, width = size_SEM
    expert = GPTFeedForward(width, 19)
    options = {"model_dim": width, "num_experts": num_experts, "expert_impl": expert} | options
    layer = MOELayer(gate, order, return_stats=True, **options).double()
    nn.init.normal_(layer.gate.wg.weight)
    return layer


@ONE_OF_EACH
def test_gradients_of_the_layer_are_those_of_finite_differences(gate_class: type, options: dict) -> None:
    torch.manual_seed(3)
    size_SEM = (7, 3, 5)
    order = registry.lookup("order", gate_class.gives.order)()
    layer = make_layer(gate_class(**options), order, size_SEM, pipeline_degree=(3, 2), overlap=False)
    x_SM = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)

    def outputs(x_SM: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return layer(x_SM, mask_of(7)).output

    # Gradients of the experts' parameters are held against the loop below.
    assert torch.autograd.gradcheck(outputs, (x_SM, layer.gate.wg.weight))


CASES = [(ExpertChoiceGate, each, order) for each in CHOOSING for order in (SimpleOrder, EinsumOrder)]
CASES += [(SoftMoEGate, each, DenseOrder) for each in MIXING]


@pytest.mark.parametrize("masked", [False, True], ids=["all used", "some masked"])
@pytest.mark.parametrize(("gate_class", "options", "order_class"), CASES, ids=str)
@EVERY_SIZE
def test_the_layer_equals_the_plain_loop(
    gate_class: type, options: dict, order_class: type, size_SEM: tuple[int, int, int], masked: bool
) -> None:
    num_tokens, num_experts, width = size_SEM
    torch.manual_seed(num_tokens)
    layer = make_layer(gate_class(**options), order_class(), size_SEM, pipeline_degree=(3, 2))
    experts = list(layer.experts.experts)
    for expert in experts:  # made as copies of one
        for parameter in expert.parameters():
            nn.init.normal_(parameter, std=0.5)
    x_SM = torch.randn(num_tokens, width, dtype=torch.float64, requires_grad=True)
    used_S = mask_of(num_tokens) if masked else None
    ours = layer(x_SM, used_S)
    if gate_class is SoftMoEGate:
        loop_SM = softmoe_layer(x_SM, layer.gate.wg.weight, experts, options.get("slots_per_expert", 1), used_S)
        counts = [num_tokens if used_S is None else int(used_S.sum())] * num_experts
    else:
        settings = LayerSettings(options.get("k", 1), options.get("capacity_factor", 1.0), 0)
        num_taken = min(num_tokens, capacity_of(num_tokens, num_experts, settings))
        loop_SM, taken = expert_choice_layer(x_SM, layer.gate.wg.weight, experts, num_taken, used_S)
        counts = list(map(len, taken))
    assert ours.counts_E.dtype == torch.int64
    assert ours.counts_E.tolist() == counts
    torch.testing.assert_close(ours.output, loop_SM, rtol=0, atol=1e-12)
    dy_SM = torch.randn_like(x_SM)
    inputs = [x_SM, *layer.parameters()]
    for of_ours, of_loop in zip(
        torch.autograd.grad(ours.output, inputs, dy_SM, materialize_grads=True),
        torch.autograd.grad(loop_SM, inputs, dy_SM, materialize_grads=True, allow_unused=True),
        strict=True,
    ):
        torch.testing.assert_close(of_ours, of_loop, rtol=0, atol=1e-12)


@EVERY_GATE
def test_a_short_training_run_gets_nearer_to_a_teacher(gate_class: type, options: dict) -> None:
    torch.manual_seed(5)
    size_SEM = (64, 5, 13)
    order = registry.lookup("order", gate_class.gives.order)()
    layer = make_layer(gate_class(**options), order, size_SEM, pipeline_degree=(2, 3)).float()
    x_SM = torch.randn(64, 13)
    target_SM = torch.tanh(x_SM @ torch.randn(13, 13))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5, momentum=0.9)
    before = layer.gate.wg.weight.detach().clone()
    losses = []
    for _ in range(60):
        result = layer(x_SM)
        if gate_class is ExpertChoiceGate:
            assert len(set(result.counts_E.tolist())) == 1
        loss = ((result.output - target_SM) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0], losses
    assert (layer.gate.wg.weight - before).abs().max() > 1e-3


# ---- expert choice


@pytest.mark.parametrize("options", CHOOSING, ids=str)
@EVERY_SIZE
def test_every_expert_takes_equally_many_and_none_twice(options: dict, size_SEM: tuple[int, int, int]) -> None:
    num_tokens, num_experts, _ = size_SEM
    gate, x_SM = make_gate(ExpertChoiceGate, options, size_SEM)
    routing = gate(x_SM)
    settings = LayerSettings(options.get("k", 1), options.get("capacity_factor", 1.0), 0)
    assert routing.capacity == min(num_tokens, capacity_of(num_tokens, num_experts, settings))
    assert routing.counts_E.tolist() == [routing.capacity] * num_experts
    for tokens in routing.tokens_R.view(num_experts, routing.capacity).tolist():
        assert len(set(tokens)) == len(tokens)
        assert all(0 <= token < num_tokens for token in tokens)
    assert (routing.weights_R > 0).all()


def test_an_expert_takes_its_best_tokens_and_weighs_them_with_their_scores() -> None:
    # Two experts with two slots: both want token 1, nobody token 3.
    gate = ExpertChoiceGate()
    gate.build(2, 2)
    gate.double().wg.weight.data = torch.eye(2, dtype=torch.float64)
    x_SM = torch.tensor([[3.0, 0.0], [1.0, 1.0], [0.0, 3.0], [0.2, 1.1]], dtype=torch.float64)
    scores_SE = torch.softmax(x_SM, dim=1)
    routing = gate(x_SM)
    assert routing.capacity == 2
    taken = [dict(zip(*each, strict=True)) for each in zip(
        routing.tokens_R.view(2, 2).tolist(), routing.weights_R.view(2, 2).tolist(), strict=True
    )]  # fmt: skip
    assert [set(each) for each in taken] == [{0, 1}, {2, 3}]
    for expert, each in enumerate(taken):
        for token, weight in each.items():
            assert weight == pytest.approx(scores_SE[token, expert].item(), abs=1e-15)


def test_a_token_may_be_taken_by_all_experts_or_by_none() -> None:
    gate = ExpertChoiceGate()
    gate.build(3, 3)
    # Scores are softmaxes over experts, so an even token beats what leans to one other expert.
    gate.double().wg.weight.data = 9 * torch.eye(3, dtype=torch.float64)
    x_SM = torch.tensor([[0.0, 0.0, 0.0], [1, 1, -9], [-9, 1, 1], [1, -9, 1], [0.5, 0.5, 0.5]], dtype=torch.float64)
    tokens = gate(x_SM).tokens_R.view(3, 2).tolist()
    times_taken = [sum(token in each for each in tokens) for token in range(5)]
    assert sum(times_taken) == 6
    assert max(times_taken) == 2
    assert 0 in times_taken
    everybody = ExpertChoiceGate(k=3)
    everybody.build(3, 3)
    assert [sorted(each) for each in everybody.double()(x_SM).tokens_R.view(3, 5).tolist()] == [[0, 1, 2, 3, 4]] * 3


def test_slots_stay_empty_where_too_few_tokens_are_used() -> None:
    gate, x_SM = make_gate(ExpertChoiceGate, {"k": 3}, (11, 5, 13))
    used_S = torch.tensor([token in (2, 7) for token in range(11)])
    routing = gate(x_SM, used_S)
    assert routing.capacity == 7
    assert routing.counts_E.tolist() == [2] * 5
    for tokens in routing.tokens_R.view(5, 7).tolist():
        assert sorted(tokens) == [2, 7] + [11] * 5
    assert ((routing.weights_R > 0) == (routing.tokens_R < 11)).all()


def test_nothing_is_dropped_with_k_equal_to_the_experts() -> None:
    """Then every expert takes every token, and the layer is the mean of the experts weighted with the scores."""
    torch.manual_seed(1)
    size_SEM = (23, 5, 13)
    layer = make_layer(ExpertChoiceGate(k=5), SimpleOrder(), size_SEM)
    x_SM = torch.randn(23, 13, dtype=torch.float64)
    scores_SE = torch.softmax(x_SM @ layer.gate.wg.weight.t(), dim=1)
    whole_SM = sum(scores_SE[:, e, None] * expert(x_SM) for e, expert in enumerate(layer.experts.experts))
    result = layer(x_SM)
    assert result.counts_E.tolist() == [23] * 5
    torch.testing.assert_close(result.output, whole_SM, rtol=0, atol=1e-13)


def test_evaluation_has_a_capacity_factor_of_its_own() -> None:
    gate, x_SM = make_gate(ExpertChoiceGate, {"k": 2, "capacity_factor": 0.5, "eval_capacity_factor": 1.7}, (47, 11, 5))
    assert gate(x_SM).capacity == 5  # 47 / 11 * 2 * 0.5 = 4.27
    assert gate.eval()(x_SM).capacity == 15  # 47 / 11 * 2 * 1.7 = 14.5


def test_no_expert_takes_more_tokens_than_there_are() -> None:
    gate, x_SM = make_gate(ExpertChoiceGate, {"k": 2, "capacity_factor": 40.0}, (7, 5, 13))
    assert gate(x_SM).capacity == 7


def test_a_nan_is_not_hidden() -> None:
    gate, x_SM = make_gate(ExpertChoiceGate, {}, (23, 5, 13))
    x_SM[11, 3] = math.nan
    assert gate(x_SM).weights_R.isnan().any()
    assert gate(x_SM, torch.ones(23)).weights_R.isnan().any()


# ---- SoftMoE


@EVERY_SIZE
@pytest.mark.parametrize("options", MIXING, ids=str)
def test_slots_are_means_of_tokens_and_results_are_means_of_slots(
    options: dict, size_SEM: tuple[int, int, int]
) -> None:
    num_tokens, num_experts, _ = size_SEM
    gate, x_SM = make_gate(SoftMoEGate, options, size_SEM)
    for used_S in (None, torch.arange(num_tokens) % 2 == 0):
        routing = gate(x_SM, used_S)
        assert routing.capacity == options.get("slots_per_expert", 1)
        assert routing.dispatch_SR.shape == routing.combine_SR.shape == (num_tokens, num_experts * routing.capacity)
        is_used_S = torch.ones(num_tokens) if used_S is None else used_S.double()
        for each in weights_of(routing):
            assert (each >= 0).all()
            assert ((each > 0).any(dim=1) == (is_used_S > 0)).all()
        torch.testing.assert_close(routing.dispatch_SR.sum(dim=0), torch.ones(routing.num_slots, dtype=torch.float64))
        torch.testing.assert_close(routing.combine_SR.sum(dim=1), is_used_S.double())


def test_the_capacity_of_softmoe_does_not_depend_on_the_tokens() -> None:
    gate, x_SM = make_gate(SoftMoEGate, {"slots_per_expert": 3}, (23, 5, 13))
    assert {gate(x_SM[:num_tokens]).capacity for num_tokens in (0, 1, 7, 23)} == {3}


# ---- what does not go together


@pytest.mark.parametrize(
    ("gate_class", "options", "sentence"),
    [
        (ExpertChoiceGate, {"k": 0}, "ExpertChoiceGate: k = 0: must be an integer >= 1"),
        (ExpertChoiceGate, {"k": 1.5}, "k = 1.5: must be an integer >= 1"),
        (ExpertChoiceGate, {"k": 6}, r"k = 6: must be between 1 and num_experts \(5\)"),
        (ExpertChoiceGate, {"capacity_factor": 0.0}, "capacity_factor = 0.0: must be a number above 0"),
        (ExpertChoiceGate, {"eval_capacity_factor": math.nan}, "eval_capacity_factor = nan: must be a number above 0"),
        (ExpertChoiceGate, {"agree_capacity": 1}, "agree_capacity = 1: must be true or false"),
        (SoftMoEGate, {"slots_per_expert": 0}, "SoftMoEGate: slots_per_expert = 0: must be an integer >= 1"),
        (SoftMoEGate, {"slots_per_expert": True}, "slots_per_expert = True: must be an integer >= 1"),
        (SoftMoEGate, {"causal": "no"}, "causal = 'no': must be true or false"),
    ],
    ids=str,
)
def test_an_impossible_option_is_refused_by_name(gate_class: type, options: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        gate_class(**options).build(13, 5)


@pytest.mark.parametrize(
    ("gate", "order", "sentence"),
    [
        (
            SoftMoEGate(),
            SimpleOrder(),
            "cannot read the DenseRouting that SoftMoEGate returns; use the order 'dense'",
        ),
        (SoftMoEGate(), EinsumOrder(), "EinsumOrder: cannot read the DenseRouting"),
        (
            ExpertChoiceGate(),
            DenseOrder(),
            "cannot read the SlotRouting that ExpertChoiceGate returns; use the order 'sparse'",
        ),
        (LinearGate(), DenseOrder(), "cannot read the Routing that LinearGate returns; use the order 'sparse'"),
    ],
    ids=lambda each: each if isinstance(each, str) else type(each).__name__,
)
def test_a_layer_by_hand_refuses_an_order_that_cannot_read_the_gate(gate: Any, order: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        MOELayer(gate, order, model_dim=13, num_experts=5, expert_dim=19)
