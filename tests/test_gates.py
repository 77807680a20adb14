# SPDX-License-Identifier: Apache-2.0
"""The laws of every registered gate: stable choices, capacity, masks, gradients, types of numbers, entropy."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch.func import functional_call

from ds_fsmoe import registry
from ds_fsmoe.components.gate import GateBase, entropy_of
from ds_fsmoe.components.routing import Routing, kind_of
from ds_fsmoe.components.token_choice import TokenChoiceGate
from tests.call_counts import Operations
from tests.pretended_gpu.modes import READ_BY_HOST
from tests.reference import LayerSettings, capacity_of
from tests.samples import sampled

SIZES_SEM = [(23, 5, 13), (7, 7, 11), (1, 5, 3), (47, 11, 17)]
EVERY_NAME = registry.known("gate")
TOKENS_CHOOSE = [name for name in EVERY_NAME if kind_of(registry.lookup("gate", name)) is Routing]
BY_SCORES = [name for name in EVERY_NAME if issubclass(registry.lookup("gate", name), TokenChoiceGate)]

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
OPTIONS: dict[str, list[dict[str, Any]]] = dict.fromkeys(BY_SCORES, _CHOICE) | {
    "topk": _TOP_K,
    "expert_choice": [{}, {"k": 2, "capacity_factor": 1.3}, {"k": 3, "capacity_factor": 0.4}],
    "softmoe": [{}, {"slots_per_expert": 5}],
}
CASES = [(name, options) for name in EVERY_NAME for options in OPTIONS.get(name, [{}])]
EVERY_GATE = pytest.mark.parametrize(("name", "options"), CASES, ids=str)

pytestmark = pytest.mark.filterwarnings("ignore:.*with k = 1 every weight is 1")


def taking(names: list[str] | tuple[str, ...], **options: Any) -> list[str]:
    """Those of the gates that take these options."""
    found = []
    for name in names:
        try:
            registry.lookup("gate", name)(**options)
        except (TypeError, ValueError):
            continue
        found.append(name)
    return found


def make_gate(name: str, options: dict[str, Any], size_SEM: tuple[int, int, int]) -> tuple[GateBase, torch.Tensor]:
    """(gate, x [S, M]) in float64, seeded; scores far enough apart that experts differ in popularity."""
    num_tokens, num_experts, width = size_SEM
    torch.manual_seed(num_tokens)
    gate = registry.lookup("gate", name)(**options)
    gate.build_once(width, num_experts)
    gate.double()
    with torch.no_grad():
        for parameter in gate.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64))
    return gate, torch.randn(num_tokens, width, dtype=torch.float64)


def decide(gate: GateBase, x_SM: torch.Tensor, used_S: torch.Tensor | None = None) -> Any:
    """The decision with the same noise each time."""
    torch.manual_seed(7)
    return gate(x_SM, used_S)


def tensors_of(routing: Any) -> dict[str, torch.Tensor]:
    return {name: each for name, each in vars(routing).items() if isinstance(each, torch.Tensor)}


def weights_of(routing: Any) -> dict[str, torch.Tensor]:
    """Those of tokens in slots, by the names of their fields."""
    return {name: each for name, each in tensors_of(routing).items() if each.is_floating_point() and each.dim()}


def differing(one: Any, other: Any) -> list[str]:
    """Fields of two decisions that have other bits or other types."""
    pairs = {name: (each, tensors_of(other)[name]) for name, each in tensors_of(one).items()}
    return [name for name, (a, b) in pairs.items() if a.dtype != b.dtype or not torch.equal(a, b)]


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


# ---- choices, slots and capacity


@pytest.mark.parametrize(("name", "options"), [case for case in CASES if case[0] in TOKENS_CHOOSE], ids=str)
def test_every_choice_has_a_slot_of_its_own_in_range_or_none(name: str, options: dict) -> None:
    for size_SEM in SIZES_SEM:
        gate, x_SM = make_gate(name, options, size_SEM)
        used_S = torch.arange(size_SEM[0]) % 3 > 0
        for mask_S in (None, used_S, used_S.long(), used_S.double().reshape(1, -1)):
            routing = gate(x_SM, mask_S)
            slots_KS, weights_KS, kept = routing.slots_KS, routing.weights_KS, kept_choices(routing)
            assert routing.num_experts == size_SEM[1]
            assert slots_KS.dtype == routing.counts_E.dtype == torch.int64
            assert slots_KS.shape == weights_KS.shape == (options.get("k", len(slots_KS)), size_SEM[0])
            assert ((slots_KS >= 0) & (slots_KS <= routing.num_experts * routing.capacity)).all()
            taken = [slot for slot in slots_KS.flatten().tolist() if slot != routing.num_slots]
            assert len(taken) == len(set(taken)), "a slot is used twice"
            assert len(kept) == len(set(kept)), "an expert takes a token twice"
            # An expert drops only what exceeds its capacity.
            assert kept_per_expert(routing) == [min(count, routing.capacity) for count in routing.counts_E.tolist()]
            assert torch.isfinite(weights_KS).all()
            assert ((weights_KS > 0) == (slots_KS != routing.num_slots)).all(), "a weight is zero where dropped alone"
            if mask_S is None:
                assert kept
                if not options.get("drop_tokens", True):  # all are kept, in as many slots as that takes
                    assert len(kept) == routing.counts_E.sum() == len(slots_KS) * size_SEM[0]
                    assert routing.capacity == routing.counts_E.max()
            else:
                assert all(used_S[token] for token, _ in kept), "an unused token has a slot"
                assert routing.counts_E.sum() <= len(slots_KS) * used_S.sum()


@pytest.mark.parametrize("name", taking(EVERY_NAME, capacity_factor=1.0, eval_capacity_factor=2.0))
def test_evaluation_has_a_capacity_factor_of_its_own(name: str) -> None:
    for k, (is_training, factor) in itertools.product((1, 2, 3), ((True, 0.5), (False, 1.7))):
        options = {"k": k, "capacity_factor": 0.5, "eval_capacity_factor": 1.7}
        options |= {"min_capacity": 0} if taking([name], min_capacity=0) else {}
        gate, x_SM = make_gate(name, options, (47, 11, 17))
        routing = gate.train(is_training)(x_SM)
        assert routing.capacity == capacity_of(47, 11, LayerSettings(k, factor, 0))


# ---- masks


@EVERY_GATE
def test_what_masked_tokens_hold_changes_nothing_for_the_others(name: str, options: dict) -> None:
    if name == "topk":
        pytest.skip("as stock's does, its loss is a mean over all tokens: test_gate_against_stock.py")
    gate, x_SM = make_gate(name, options, (23, 5, 13))
    used_S = torch.arange(23) % 3 > 0
    hidden_SM = x_SM.masked_fill(~used_S.unsqueeze(1), 0.0 if name == "softmoe" else math.nan)
    for mask_S in (used_S, used_S.long(), used_S.double().reshape(1, 23)):
        plain = decide(gate, x_SM, mask_S)
        # What masked tokens would choose is nobody's.
        assert {*differing(plain, decide(gate, hidden_SM, mask_S))} <= {"experts_KS"}
    assert differing(plain, decide(gate, x_SM)) != []


@EVERY_GATE
def test_there_may_be_no_tokens_or_none_that_takes_part_and_no_mask_of_another_length(name: str, options: dict) -> None:
    gate, x_SM = make_gate(name, options, (23, 5, 13))
    nobody = gate(x_SM.requires_grad_(), torch.zeros(23))
    assert nobody.counts_E.tolist() == [0] * 5
    weights = weights_of(nobody)
    assert not any(each.any() for each in weights.values())
    found = torch.autograd.grad(sum(each.sum() for each in weights.values()), (x_SM, *gate.parameters()))
    assert not any(each.any() for each in found)
    if name != "topk":  # the mean of stock's is over all tokens
        assert nobody.aux_loss == 0
        empty = gate(x_SM[:0])
        order = registry.lookup("order", kind_of(gate).order)()
        x_ECM = order.arrange(x_SM[:0], empty)
        assert x_ECM.shape == (5, empty.capacity, 13)
        assert order.restore(x_ECM, empty).shape == (0, 13)
    with pytest.raises(ValueError, match="used_token has 22 entries for 23 tokens"):
        gate(x_SM, torch.ones(22))


# ---- gradients


@EVERY_GATE
def test_the_weights_carry_a_gradient_to_every_parameter_of_the_gate(name: str, options: dict) -> None:
    gate, x_SM = make_gate(name, options, (23, 7, 13))
    weights = weights_of(gate(x_SM)).values()
    sum((each * torch.randn_like(each)).sum() for each in weights).backward()
    for parameter in gate.parameters():
        assert parameter.grad is not None
        assert parameter.grad.norm() > 1e-6


# In the sample every gate in training or in evaluation, in turns.
WAYS = list(itertools.product(EVERY_NAME, (True, False)))


@sampled(("name", "training"), WAYS, kept=[2 * at + at % 2 for at in range(len(WAYS) // 2)])
def test_gradients_of_every_gate_are_those_of_finite_differences(name: str, training: bool) -> None:
    gate, x_SM = make_gate(name, {}, (5, 3, 4))
    gate.train(training)
    names = [each for each, _ in gate.named_parameters()]

    def numbers(x_SM: torch.Tensor, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(5)  # the same noise each time
        routing = functional_call(gate, dict(zip(names, parameters, strict=True)), (x_SM,))
        return tuple(each for each in tensors_of(routing).values() if each.is_floating_point() and each.requires_grad)

    parameters = [each.detach().clone().requires_grad_() for each in gate.parameters()]
    assert numbers(x_SM.requires_grad_(), *parameters)
    assert torch.autograd.gradcheck(numbers, (x_SM, *parameters), eps=1e-6, atol=1e-6, nondet_tol=0.0)


# ---- types of numbers


@EVERY_GATE
def test_a_router_computes_in_float64_if_tokens_are_and_in_float32_otherwise(name: str, options: dict) -> None:
    gate, x_SM = make_gate(name, options, (23, 7, 13))
    exact = decide(gate, x_SM)
    assert exact.aux_loss.dtype == torch.float64
    assert all(each.dtype == torch.float64 for each in weights_of(exact).values())
    # What has been through float32 is not changed by going there once more.
    assert not all(torch.equal(each.float().double(), each) for each in weights_of(exact).values())
    for dtype in (torch.bfloat16, torch.float16):
        low_SM = x_SM.to(dtype)
        low, full = decide(gate.to(dtype), low_SM), decide(gate.float(), low_SM.float())
        assert differing(low, full) == []
        assert low.aux_loss.dtype == torch.float32
    if name == "topk":  # stock's, autocast included: test_gate_against_stock.py
        return
    with torch.autocast("cpu", torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
        assert differing(decide(gate, low_SM.float()), full) == []


# ---- what a GPU is waited for, and what is told to monitors


@EVERY_GATE
def test_a_gate_waits_for_the_device_only_to_size_what_drops_nothing(name: str, options: dict) -> None:
    gate, x_SM = make_gate(name, options, (31, 6, 13))
    drops = options.get("drop_tokens", True)
    for used_S in (None, torch.arange(31) % 3 > 0):
        gate(x_SM, used_S)  # a capacity that follows from sizes is worked out once, on the host
        with Operations(*READ_BY_HOST) as seen:
            gate(x_SM, used_S)
        assert [name for name, _ in seen.found] == ([] if drops else ["_local_scalar_dense"])


@pytest.mark.parametrize("name", EVERY_NAME)
def test_every_gate_says_its_entropy_when_asked_and_only_then(name: str) -> None:
    gate, x_SM = make_gate(name, {}, (11, 5, 7))
    assert gate(x_SM).entropy is None
    gate.says_entropy = True
    entropy = gate(x_SM).entropy
    assert 0 < float(entropy) <= math.log(5) + 1e-6
    assert not entropy.requires_grad


def test_entropy_is_the_mean_over_tokens_that_take_part() -> None:
    probs_SE = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25], [0.5, 0.5, 0.0, 0.0]])
    assert float(entropy_of(probs_SE, None)) == pytest.approx((math.log(4) + math.log(2)) / 3)
    assert float(entropy_of(3 * probs_SE, torch.tensor([True, True, False]))) == pytest.approx(math.log(4) / 2)
