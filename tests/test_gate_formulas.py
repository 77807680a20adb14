# SPDX-License-Identifier: Apache-2.0
"""Gates equal their formulas written as loops, in every number and gradient."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import nn

from ds_fsmoe import GPTFeedForward, MOELayer, registry
from ds_fsmoe.components.routing import Routing
from ds_fsmoe.components.token_choice import TokenChoiceGate
from tests.covering import covering
from tests.gate_formulas import Loop, expert_choice_layer, run_loop, softmoe_layer
from tests.reference import LayerSettings, RankRouting, capacity_of, route
from tests.samples import sampled
from tests.test_gates import BY_SCORES, kept_choices, make_gate

LOSSES = {"balance_loss_factor": 0.7, "z_loss_factor": 0.3}
TIGHT = {"capacity_factor": 0.6, "eval_capacity_factor": 0.5, "min_capacity": 0}
CASES: list[tuple[str, dict[str, Any]]] = [
    (name, {"k": k, **LOSSES, **more})
    for name in BY_SCORES
    for k in (1, 3)
    for more in ({**TIGHT, "drop_policy": "probs"}, {**TIGHT, "drop_policy": "position"}, {"drop_tokens": False})
]
CASES += [("qwen", {"k": 2, "norm_topk_prob": True, **TIGHT}), ("qwen", {"k": 2, **TIGHT})]
CASES += [
    ("deepseek", {"k": k, "num_groups": groups, "kept_groups": kept, "routed_scaling_factor": 2.5, **LOSSES, **TIGHT})
    for k, groups, kept in ((2, 2, 1), (3, 3, 2), (2, 6, None), (4, 3, None))
]
CASES += [("deepseek", {"k": 2, "norm_topk_prob": False, "drop_tokens": False})]

pytestmark = pytest.mark.filterwarnings("ignore:.*with k = 1 every weight is 1")


def built(name: str, options: dict[str, Any], size_SEM: tuple[int, int, int]) -> tuple[TokenChoiceGate, torch.Tensor]:
    gate, x_SM = make_gate(name, options, size_SEM)
    with torch.no_grad():
        for parameter in gate.parameters():
            parameter.mul_(0.4)
        if name == "deepseek":
            gate.balance_bias.copy_(0.3 * torch.randn(size_SEM[1]))
    return gate, x_SM.requires_grad_()


def kept_weights(routing: Routing) -> dict[tuple[int, int], torch.Tensor]:
    """(token, expert) of every kept choice -> its weight."""
    return {
        (token, slot // routing.capacity): routing.weights_KS[choice, token]
        for choice, slots_S in enumerate(routing.slots_KS.tolist())
        for token, slot in enumerate(slots_S)
        if slot != routing.num_slots
    }


def assert_equal_loop(routing: Routing, loop: Loop | RankRouting, inputs: list[torch.Tensor], atol: float) -> None:
    """Every kept choice, its weight, the loss, the counts, and the gradients of all inputs."""
    found = kept_weights(routing)
    assert found.keys() == loop.weights.keys()
    assert routing.counts_E.tolist() == loop.counts_E
    for choice, weight in loop.weights.items():
        assert found[choice].item() == pytest.approx(weight.item(), abs=1e-12)
    assert routing.aux_loss.item() == pytest.approx(loop.aux_loss.item(), abs=1e-12)
    factors = dict(zip(found, torch.randn(len(found), dtype=torch.float64), strict=True))
    ours, loops = (
        torch.autograd.grad(
            sum(factors[choice] * weights[choice] for choice in factors) + 0.37 * aux_loss,
            inputs,
            materialize_grads=True,
        )
        for weights, aux_loss in ((found, routing.aux_loss), (loop.weights, loop.aux_loss))
    )
    for one, other in zip(ours, loops, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=atol)
    assert loops[0].norm() > 1e-3


# Every other case in the sample, in one of four ways, in turns: in training or evaluation, all tokens used or some.
LOOPS = [(*case, training, masked) for case in CASES for training in (True, False) for masked in (True, False)]


@sampled(
    ("name", "options", "training", "masked"),
    LOOPS,
    kept=[4 * at + (at // 2 + at // 8) % 4 for at in range(0, len(CASES), 2)],
    drawn=6,
    ids=str,
)
def test_a_gate_equals_the_loop_over_tokens(name: str, options: dict, training: bool, masked: bool) -> None:
    gate, x_SM = built(name, options, (19, 6, 7))
    gate.train(training)
    used_S = torch.arange(19) % 5 > 0 if masked else None
    torch.manual_seed(3)
    routing = gate(x_SM, used_S)
    loop = run_loop(name, gate, x_SM, None if used_S is None else used_S.tolist(), seed=3)

    dropped = sum(loop.counts_E) - len(loop.weights)
    assert (dropped > 0) == options.get("drop_tokens", True)
    assert_equal_loop(routing, loop, [x_SM, *gate.parameters()], atol=1e-11)


@pytest.mark.parametrize("name", BY_SCORES)
def test_weights_that_are_always_1_are_warned_of_and_no_others(name: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gate, x_SM = make_gate(name, {"k": 1, "drop_tokens": False}, (23, 6, 13))
    is_warned = any("with k = 1 every weight is 1" in str(each.message) for each in caught)
    assert is_warned == bool((gate(x_SM).weights_KS == 1).all())


# ---- the top-k gate

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


@pytest.mark.parametrize(("settings", "use_rts"), ORACLE_CASES, ids=str)
def test_top_k_equals_the_loop_over_tokens(settings: LayerSettings, use_rts: bool) -> None:
    for size_SEM, masked in (((23, 5, 13), False), ((31, 7, 11), True)):
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

        assert loop.capacity in (routing.capacity, None)
        assert_equal_loop(routing, loop, [x_SM, gate.wg.weight], atol=1e-12)


# ---- gates in which slots choose: a whole layer

CHOOSING: list[dict[str, Any]] = [{}, {"k": 2, "capacity_factor": 1.3}, {"k": 3, "capacity_factor": 0.4}]
CHOOSING += [{"k": 5}, {"k": 2, "capacity_factor": 40.0}]
MIXING: list[dict[str, Any]] = [{}, {"slots_per_expert": 5}]
LAYERS = [("expert_choice", each, order) for each in CHOOSING for order in ("sparse", "einsum")]
LAYERS += [("softmoe", each, "dense") for each in MIXING]
MASKS = {
    "all used": lambda num_tokens: None,
    "some masked": lambda num_tokens: torch.arange(num_tokens) % 3 > 0,
    "two used": lambda num_tokens: torch.arange(num_tokens).remainder(num_tokens // 2 + 1) == num_tokens // 3,
}
LAYER_CASES = covering(LAYERS, [(23, 5, 13), (7, 7, 11), (1, 5, 3), (31, 3, 17)], list(MASKS))


def test_every_gate_in_which_slots_choose_has_a_formula_here() -> None:
    names = {name for name, _, _ in LAYERS}
    assert names == {*registry.known("gate")} - {*BY_SCORES, "topk"}


@pytest.mark.parametrize(("layer", "size_SEM", "mask"), LAYER_CASES, ids=str)
def test_a_layer_whose_slots_choose_equals_the_plain_loop(layer: tuple, size_SEM: tuple, mask: str) -> None:
    (name, options, order), (num_tokens, num_experts, width) = layer, size_SEM
    if options.get("k", 1) > num_experts:
        options = options | {"k": num_experts}
    torch.manual_seed(num_tokens)
    parts = registry.lookup("gate", name)(**options), registry.lookup("order", order)()
    sizes = {"model_dim": width, "num_experts": num_experts, "expert_impl": GPTFeedForward(width, 19)}
    ours = MOELayer(*parts, **sizes, return_stats=True, pipeline_degree=(3, 2)).double()
    nn.init.normal_(ours.gate.wg.weight)
    experts = list(ours.experts.experts)
    for parameter in ours.experts.parameters():  # made as copies of one
        nn.init.normal_(parameter, std=0.5)
    x_SM = torch.randn(num_tokens, width, dtype=torch.float64, requires_grad=True)
    used_S = MASKS[mask](num_tokens)
    found = ours(x_SM, used_S)
    if name == "softmoe":
        loop_SM = softmoe_layer(x_SM, ours.gate.wg.weight, experts, options.get("slots_per_expert", 1), used_S)
        counts = [num_tokens if used_S is None else int(used_S.sum())] * num_experts
    else:
        settings = LayerSettings(options.get("k", 1), options.get("capacity_factor", 1.0), 0)
        num_taken = min(num_tokens, capacity_of(num_tokens, num_experts, settings))
        loop_SM, taken = expert_choice_layer(x_SM, ours.gate.wg.weight, experts, num_taken, used_S)
        counts = list(map(len, taken))
    assert (found.counts_E.dtype, found.counts_E.tolist()) == (torch.int64, counts)
    assert (found.aux_loss.shape, float(found.aux_loss)) == ((), 0.0)
    torch.testing.assert_close(found.output, loop_SM, rtol=0, atol=1e-12)
    dy_SM, inputs = torch.randn_like(x_SM), [x_SM, *ours.parameters()]
    of_ours, of_loop = (
        torch.autograd.grad(output, inputs, dy_SM, materialize_grads=True, allow_unused=True)
        for output in (found.output, loop_SM)
    )
    for one, other in zip(of_ours, of_loop, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_a_nan_is_not_hidden_from_the_experts_that_choose() -> None:
    gate, x_SM = make_gate("expert_choice", {}, (23, 5, 13))
    x_SM[11, 3] = torch.nan
    assert gate(x_SM).weights_R.isnan().any()
    assert gate(x_SM, torch.ones(23)).weights_R.isnan().any()


@pytest.mark.parametrize(
    ("gate", "order", "right", "kind"),
    [("softmoe", "sparse", "dense", "DenseRouting"), ("expert_choice", "dense", "sparse", "SlotRouting")],
)
def test_a_layer_by_hand_refuses_an_order_that_cannot_read_the_gate(
    gate: str, order: str, right: str, kind: str
) -> None:
    parts = registry.lookup("gate", gate)(), registry.lookup("order", order)()
    with pytest.raises(ValueError, match=f"cannot read the {kind} that .* returns; use the order '{right}'"):
        MOELayer(*parts, model_dim=13, num_experts=5, expert_dim=19)
