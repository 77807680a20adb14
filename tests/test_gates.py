# SPDX-License-Identifier: Apache-2.0
"""Gates: the laws every one of them keeps, and the top-k gate against hand-worked cases and the oracle's formulas."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from typing import Any

import pytest
import torch

from ds_fsmoe import registry
from ds_fsmoe.components.gate import GateBase
from ds_fsmoe.components.gates.topk import LinearGate, route_top_k
from ds_fsmoe.components.routing import Routing, kind_of
from ds_fsmoe.components.token_choice import TokenChoiceGate
from tests.reference import LayerSettings, capacity_of, route
from tests.samples import sampled

SIZES_SEM = [(23, 5, 13), (7, 7, 11), (1, 5, 3), (47, 11, 17)]

# A gate that is not named here is held to the laws with its defaults.
_TOP_K: list[dict[str, Any]] = [
    {"k": k, "capacity_factor": factor, "min_capacity": 0, **more}
    for k, factor in itertools.product((1, 2, 3, 5), (0.4, 1.0))
    for more in ({}, {"drop_tokens": False})
]
_TOP_K += [{"k": 1, "use_rts": False, "min_capacity": 2}, {"k": 2, "top2_2nd_expert_sampling": False}]
_TOP_K += [{"k": k, "drop_policy": "position", "capacity_factor": 0.6, "min_capacity": 0} for k in (3, 5)]
_TOP_K += [{"k": k, "noisy_gate_policy": "Jitter", "capacity_factor": 0.7, "min_capacity": 1} for k in (1, 2, 3)]
_TOP_K += [{"k": 1, "noisy_gate_policy": "RSample", "min_capacity": 1}, {"min_capacity": 60}]
_CHOICE: list[dict[str, Any]] = [{}, {"k": 3, "drop_tokens": False}]
_CHOICE += [
    {"k": k, "drop_policy": policy, "capacity_factor": 0.4, "min_capacity": 0}
    for k, policy in ((2, "position"), (5, "probs"))
]
OPTIONS: dict[str, list[dict[str, Any]]] = {
    name: _CHOICE for name in registry.known("gate") if issubclass(registry.lookup("gate", name), TokenChoiceGate)
} | {"topk": _TOP_K}

# Where slots choose their tokens, other laws hold: see test_slot_gates.py.
TOKENS_CHOOSE = [name for name in registry.known("gate") if kind_of(registry.lookup("gate", name)) is Routing]
GATES = [(name, options) for name in TOKENS_CHOOSE for options in OPTIONS.get(name, [{}])]
EVERY_GATE = pytest.mark.parametrize(("name", "options"), GATES, ids=str)
EVERY_SIZE = sampled("size_SEM", SIZES_SEM, kept=[0, 2], ids=str)


def taking(**options: Any) -> list[str]:
    """The gates on the shelf that take these options."""
    names = []
    for name in TOKENS_CHOOSE:
        try:
            registry.lookup("gate", name)(**options)
        except (TypeError, ValueError):
            continue
        names.append(name)
    return names


def make_gate(name: str, options: dict[str, Any], size_SEM: tuple[int, int, int]) -> tuple[GateBase, torch.Tensor]:
    """(gate, x [S, M]) in float64, seeded; scores far enough apart that experts differ in popularity."""
    num_tokens, num_experts, width = size_SEM
    torch.manual_seed(num_tokens)
    gate = registry.lookup("gate", name)(**options)
    gate.build(width, num_experts)
    gate.double()
    with torch.no_grad():
        for parameter in gate.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64))
    return gate, torch.randn(num_tokens, width, dtype=torch.float64)


def kept_choices(routing: Routing) -> list[tuple[int, int]]:
    """(token, expert) of every choice that has a slot."""
    return [
        (token, slot // routing.capacity)
        for slots_S in routing.slots_KS.tolist()
        for token, slot in enumerate(slots_S)
        if slot != routing.num_slots
    ]


def kept_per_expert(routing: Routing) -> list[int]:
    experts = [expert for _, expert in kept_choices(routing)]
    return [experts.count(expert) for expert in range(routing.num_experts)]


# ---- laws of every gate


@EVERY_GATE
@EVERY_SIZE
def test_every_slot_is_in_range_or_dropped(name: str, options: dict, size_SEM: tuple[int, int, int]) -> None:
    gate, x_SM = make_gate(name, options, size_SEM)
    routing = gate(x_SM)
    assert routing.num_experts == size_SEM[1]
    assert routing.slots_KS.dtype == torch.int64
    assert routing.slots_KS.shape == routing.weights_KS.shape
    assert routing.slots_KS.shape[1] == size_SEM[0]
    assert (routing.slots_KS >= 0).all()
    assert (routing.slots_KS <= routing.num_experts * routing.capacity).all()
    assert kept_choices(routing)


@EVERY_GATE
@EVERY_SIZE
def test_no_slot_is_used_twice(name: str, options: dict, size_SEM: tuple[int, int, int]) -> None:
    gate, x_SM = make_gate(name, options, size_SEM)
    routing = gate(x_SM)
    taken = [slot for slot in routing.slots_KS.flatten().tolist() if slot != routing.num_slots]
    assert len(taken) == len(set(taken))


@EVERY_GATE
@EVERY_SIZE
def test_no_expert_takes_a_token_twice(name: str, options: dict, size_SEM: tuple[int, int, int]) -> None:
    gate, x_SM = make_gate(name, options, size_SEM)
    choices = kept_choices(gate(x_SM))
    assert len(choices) == len(set(choices))


@EVERY_GATE
@EVERY_SIZE
def test_an_expert_drops_only_what_exceeds_its_capacity(
    name: str, options: dict, size_SEM: tuple[int, int, int]
) -> None:
    gate, x_SM = make_gate(name, options, size_SEM)
    routing = gate(x_SM)
    assert routing.counts_E.dtype == torch.int64
    assert kept_per_expert(routing) == [min(count, routing.capacity) for count in routing.counts_E.tolist()]


@EVERY_GATE
@EVERY_SIZE
def test_weights_are_finite_and_zero_where_dropped(name: str, options: dict, size_SEM: tuple[int, int, int]) -> None:
    gate, x_SM = make_gate(name, options, size_SEM)
    routing = gate(x_SM)
    is_dropped_KS = routing.slots_KS == routing.num_slots
    assert torch.isfinite(routing.weights_KS).all()
    assert (routing.weights_KS[is_dropped_KS] == 0).all()
    assert (routing.weights_KS[~is_dropped_KS] > 0).all()


@EVERY_GATE
def test_unused_tokens_take_no_slot_and_are_not_counted(name: str, options: dict) -> None:
    gate, x_SM = make_gate(name, options, (23, 5, 13))
    used_S = torch.tensor([token % 3 > 0 for token in range(23)])
    for mask_S in (used_S, used_S.long(), used_S.double().reshape(1, 23)):
        routing = gate(x_SM, mask_S)
        assert all(used_S[token] for token, _ in kept_choices(routing))
        choices_per_token = routing.slots_KS.shape[0]
        assert routing.counts_E.sum() <= choices_per_token * used_S.sum()
        assert kept_per_expert(routing) == [min(count, routing.capacity) for count in routing.counts_E.tolist()]


@EVERY_GATE
def test_the_weights_carry_a_gradient_to_every_parameter_of_the_gate(name: str, options: dict) -> None:
    gate, x_SM = make_gate(name, options, (23, 7, 13))
    routing = gate(x_SM)
    (routing.weights_KS * torch.randn(routing.weights_KS.shape, dtype=torch.float64)).sum().backward()
    for parameter in gate.parameters():
        assert parameter.grad is not None
        assert parameter.grad.norm() > 1e-6


@EVERY_GATE
def test_float64_tokens_are_routed_in_float64(name: str, options: dict) -> None:
    gate, x_SM = make_gate(name, options, (23, 7, 13))
    routing = gate(x_SM)
    assert routing.weights_KS.dtype == torch.float64
    assert routing.aux_loss.dtype == torch.float64
    # What has been through float32 is not changed by going there once more.
    assert not torch.equal(routing.weights_KS.float().double(), routing.weights_KS)


@EVERY_GATE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_tokens_are_routed_in_float32(name: str, options: dict, dtype: torch.dtype) -> None:
    gate, x_SM = make_gate(name, options, (23, 5, 13))
    gate, x_SM = gate.to(dtype), x_SM.to(dtype)
    torch.manual_seed(7)
    low = gate(x_SM)
    torch.manual_seed(7)
    full = gate.float()(x_SM.float())
    assert low.weights_KS.dtype == low.aux_loss.dtype == torch.float32
    assert torch.equal(low.slots_KS, full.slots_KS)
    assert torch.equal(low.weights_KS, full.weights_KS)
    assert torch.equal(low.aux_loss, full.aux_loss)


@pytest.mark.parametrize("name", taking(drop_tokens=False))
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_dropless_drops_nothing_and_wastes_no_slot(name: str, k: int) -> None:
    gate, x_SM = make_gate(name, {"k": k, "drop_tokens": False, "capacity_factor": 0.1}, (47, 11, 17))
    routing = gate(x_SM)
    assert (routing.slots_KS < routing.num_slots).all()
    assert kept_per_expert(routing) == routing.counts_E.tolist()
    assert routing.counts_E.sum() == k * 47
    assert routing.capacity == routing.counts_E.max()


@pytest.mark.parametrize("name", taking(capacity_factor=1.0, eval_capacity_factor=2.0))
@pytest.mark.parametrize("k", [1, 2, 3])
def test_evaluation_has_a_capacity_factor_of_its_own(name: str, k: int) -> None:
    options = {"k": k, "capacity_factor": 0.5, "eval_capacity_factor": 1.7, "min_capacity": 0}
    gate, x_SM = make_gate(name, options, (47, 11, 17))
    for gate_is_training, factor in ((True, 0.5), (False, 1.7)):
        routing = gate.train(gate_is_training)(x_SM)
        assert routing.capacity == capacity_of(47, 11, LayerSettings(k, factor, 0))


# ---- the top-k gate: formulas


def scoring_gate(logits_SE: list[list[float]], **settings: Any) -> Routing:
    """The routing of a top-k gate whose logits are just these."""
    x_SE = torch.tensor(logits_SE, dtype=torch.float64)
    weight_EE = torch.eye(x_SE.shape[1], dtype=torch.float64)
    gate = LinearGate(**settings)
    return route_top_k(x_SE, weight_EE, gate.settings, training=True)


def test_capacity_is_rounded_to_float32_before_it_is_rounded_up() -> None:
    # In float64 the product is 11.000000000000002, and the slots would be 12.
    assert scoring_gate([[0.0]] * 10, capacity_factor=1.1, min_capacity=4).capacity == 11
    # The share of an expert is rounded to float32 as well: 2.4 becomes 2.4000001, the product 15.000001.
    logits_SE = torch.randn(12, 5, generator=torch.Generator().manual_seed(0)).tolist()
    assert scoring_gate(logits_SE, k=5, capacity_factor=1.25, min_capacity=4).capacity == 16


def test_min_capacity_counts_per_expert_whatever_k_is() -> None:
    for k in (1, 2, 3):
        assert scoring_gate([[3.0, 2.0, 1.0]] * 7, k=k, capacity_factor=0.1, min_capacity=5).capacity == 5


def test_second_choices_queue_behind_all_first_choices() -> None:
    # Expert 0 has two slots. Token 0 comes first but names it second; tokens 1 and 3 name it first.
    logits_SE = [[1.0, 2.0, 0.0], [2.0, 0.0, 1.0], [0.0, 1.0, 2.0], [2.0, 1.0, 0.0]]
    routing = scoring_gate(logits_SE, k=2, capacity_factor=0.75, min_capacity=0, top2_2nd_expert_sampling=False)
    assert routing.capacity == 2
    dropped = 6
    assert routing.slots_KS.tolist() == [[2, 0, 4, 1], [dropped, 5, 3, dropped]]
    assert routing.counts_E.tolist() == [3, 3, 2]


def test_first_choices_of_later_tokens_displace_second_choices_of_earlier_ones() -> None:
    logits_SE = [[1.0, 2.0], [2.0, 1.0], [2.0, 1.0]]
    routing = scoring_gate(logits_SE, k=2, capacity_factor=0.5, min_capacity=0, top2_2nd_expert_sampling=False)
    assert routing.slots_KS.tolist() == [[2, 0, 1], [4, 3, 4]]


def test_positions_follow_the_order_of_the_tokens() -> None:
    logits_SE = [[5.0, 0.0], [1.0, 0.0], [0.0, 1.0], [3.0, 0.0], [0.0, 4.0]]
    assert scoring_gate(logits_SE, capacity_factor=2.0, min_capacity=0).slots_KS.tolist() == [[0, 1, 5, 2, 6]]


def test_a_full_expert_keeps_its_most_probable_tokens_or_the_first() -> None:
    # Four tokens, three experts, all of them chosen by every token; an expert has two slots.
    logits_SE = [[3.0, 1.0, 0.0], [0.0, 1.0, 3.0], [4.0, 1.0, 0.0], [0.0, 5.0, 0.0]]
    settings = {"k": 3, "capacity_factor": 0.5, "min_capacity": 0}
    by_probs = scoring_gate(logits_SE, **settings, drop_policy="probs")
    by_position = scoring_gate(logits_SE, **settings, drop_policy="position")
    assert by_probs.capacity == by_position.capacity == 2
    experts_0_kept = [
        {token for token, expert in kept_choices(each) if expert == 0} for each in (by_probs, by_position)
    ]
    assert experts_0_kept == [{0, 2}, {0, 1}]
    assert {token for token, _ in kept_choices(by_position)} == {0, 1}
    assert by_probs.counts_E.tolist() == by_position.counts_E.tolist() == [4, 4, 4]


def test_switch_weights_are_probabilities_and_others_are_renormalised_over_what_was_kept() -> None:
    logits_SE = [[2.0, 1.0, 0.0], [0.5, 2.5, 1.0]]
    probs_SE = torch.softmax(torch.tensor(logits_SE, dtype=torch.float64), dim=1)
    top_1 = scoring_gate(logits_SE, min_capacity=2)
    assert top_1.weights_KS[0].tolist() == pytest.approx([probs_SE[0, 0].item(), probs_SE[1, 1].item()], abs=1e-15)
    top_2 = scoring_gate(logits_SE, k=2, min_capacity=2, top2_2nd_expert_sampling=False)
    assert top_2.weights_KS.sum(dim=0).tolist() == pytest.approx([1.0, 1.0], abs=1e-15)
    assert top_2.weights_KS[0, 0].item() == pytest.approx((probs_SE[0, 0] / (1 - probs_SE[0, 2])).item(), abs=1e-15)


# ---- the top-k gate against the oracle

ORACLE_CASES = [
    (LayerSettings(k, factor, min_capacity, drop_tokens, policy), use_rts)
    for k in (1, 2, 3, 5)
    for factor, min_capacity, drop_tokens in ((0.35, 0, True), (1.0, 2, True), (1.0, 4, False))
    for policy in (("probs", "position") if k > 2 and drop_tokens else ("probs",))
    for use_rts in ((False, True) if k == 1 else (False,))
]


def as_priority(routing: Routing, num_tokens: int) -> torch.Tensor:
    """[S, E], 1 for what was kept: the answer to who stays where the formula leaves it open."""
    priority_SE = torch.zeros(num_tokens, routing.num_experts)
    for token, expert in kept_choices(routing):
        priority_SE[token, expert] = 1.0
    return priority_SE


@pytest.mark.parametrize("masked", [False, True], ids=["all used", "some unused"])
@pytest.mark.parametrize(("settings", "use_rts"), ORACLE_CASES, ids=str)
def test_top_k_equals_the_loop_over_tokens(settings: LayerSettings, use_rts: bool, masked: bool) -> None:
    for size_SEM in ((23, 5, 13), (31, 7, 11)):
        num_tokens, num_experts, _ = size_SEM
        options = asdict(settings) | {"use_rts": use_rts, "top2_2nd_expert_sampling": False}
        gate, x_SM = make_gate("topk", options, size_SEM)
        used_S = torch.rand(num_tokens) > 0.3 if masked else None
        torch.manual_seed(11)
        routing = gate(x_SM.requires_grad_(), used_S)
        torch.manual_seed(11)
        # With random selection a full expert keeps the largest of one uniform number per token and expert.
        priority_SE = torch.rand(num_tokens, num_experts) if use_rts else as_priority(routing, num_tokens)
        loop = route(x_SM, gate.wg.weight, settings, None if used_S is None else used_S.tolist(), priority_SE)

        choices = [
            (token, expert, routing.weights_KS[choice, token])
            for choice in range(settings.k)
            for token, expert in enumerate((routing.slots_KS[choice] // max(routing.capacity, 1)).tolist())
            if expert < num_experts
        ]
        weights = {(token, expert): weight for token, expert, weight in choices}
        assert weights.keys() == loop.weights.keys()
        assert routing.counts_E.tolist() == loop.counts_E
        assert loop.capacity in (routing.capacity, None)
        assert routing.aux_loss.item() == pytest.approx(loop.aux_loss.item(), abs=1e-12)
        for choice, weight in loop.weights.items():
            assert weights[choice].item() == pytest.approx(weight.item(), abs=1e-12)

        factors = dict(zip(weights, torch.randn(len(weights), dtype=torch.float64), strict=True))
        gradients = [
            torch.autograd.grad(
                sum(factors[choice] * found[choice] for choice in factors) + 0.37 * aux_loss, (x_SM, gate.wg.weight)
            )
            for found, aux_loss in ((weights, routing.aux_loss), (loop.weights, loop.aux_loss))
        ]
        for ours, loops in zip(*gradients, strict=True):
            assert loops.norm() > 1e-3
            torch.testing.assert_close(ours, loops, rtol=0, atol=1e-12)


# ---- settings that cannot be


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"k": 0}, r"k = 0: must be between 1 and num_experts \(5\)"),
        ({"k": 6}, r"k = 6: must be between 1 and num_experts \(5\)"),
        ({"kk": 2}, "no setting 'kk': choose from k, capacity_factor"),
        ({"noisy_gate_policy": "rsample"}, "'rsample': choose from None, 'Jitter', 'RSample'"),
        ({"drop_policy": "last"}, "'last': the choices are 'probs', 'position'"),
        ({"capacity_factor": 0.0}, "capacity_factor = 0.0: must be above 0"),
        ({"eval_capacity_factor": -1.0}, "eval_capacity_factor = -1.0: must be above 0"),
        ({"capacity_factor": float("nan")}, "capacity_factor = nan: must be above 0"),
    ],
    ids=str,
)
def test_an_impossible_setting_is_refused_by_name(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        LinearGate(**settings).build(13, 5)
