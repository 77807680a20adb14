# SPDX-License-Identifier: Apache-2.0
"""Gates in which tokens choose: equal to their formulas written as loops, differentiable, and in float32 everywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.moe.sharded_moe import TopKGate
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from ds_fsmoe import registry
from ds_fsmoe.components.routing import Routing, kind_of
from ds_fsmoe.components.token_choice import TokenChoiceGate
from tests.gate_formulas import run_loop
from tests.samples import sampled
from tests.test_gates import kept_choices, make_gate

TOKENS_CHOOSE = [name for name in registry.known("gate") if issubclass(registry.lookup("gate", name), TokenChoiceGate)]
LOSSES = {"balance_loss_factor": 0.7, "z_loss_factor": 0.3}
TIGHT = {"capacity_factor": 0.6, "eval_capacity_factor": 0.5, "min_capacity": 0}
CASES: list[tuple[str, dict[str, Any]]] = [
    (name, {"k": k, **LOSSES, **more})
    for name in TOKENS_CHOOSE
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


def test_the_gates_with_a_formula_here_are_those_on_the_shelf() -> None:
    assert {name for name, _ in CASES} == set(TOKENS_CHOOSE)
    assert {"gshard", "sigmoid", "xmoe", "switch", "deepseek", "mixtral", "qwen"} <= set(TOKENS_CHOOSE)


@sampled("masked", [False, True], kept=[1], ids=["all used", "some unused"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_a_gate_equals_the_loop_over_tokens(name: str, options: dict, training: bool, masked: bool) -> None:
    gate, x_SM = built(name, options, (19, 6, 7))
    gate.train(training)
    used_S = torch.arange(19) % 5 > 0 if masked else None
    torch.manual_seed(3)
    routing = gate(x_SM, used_S)
    loop = run_loop(name, gate, x_SM, None if used_S is None else used_S.tolist(), seed=3)

    found = {
        (token, slot // routing.capacity): routing.weights_KS[choice, token]
        for choice, slots_S in enumerate(routing.slots_KS.tolist())
        for token, slot in enumerate(slots_S)
        if slot != routing.num_slots
    }
    assert found.keys() == loop.weights.keys()
    assert routing.counts_E.tolist() == loop.counts_E
    if options.get("drop_tokens", True):
        assert len(found) < sum(loop.counts_E)
    else:
        assert len(found) == sum(loop.counts_E)
    for choice, weight in loop.weights.items():
        assert found[choice].item() == pytest.approx(weight.item(), abs=1e-12)
    assert routing.aux_loss.item() == pytest.approx(loop.aux_loss.item(), abs=1e-12)

    factors = dict(zip(found, torch.randn(len(found), dtype=torch.float64), strict=True))
    gradients = [
        torch.autograd.grad(
            sum(factors[choice] * weights[choice] for choice in factors) + 0.37 * aux_loss,
            (x_SM, *gate.parameters()),
            materialize_grads=True,
        )
        for weights, aux_loss in ((found, routing.aux_loss), (loop.weights, loop.aux_loss))
    ]
    for ours, loops in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, loops, rtol=0, atol=1e-11)
    assert gradients[1][0].norm() > 1e-3


# In the sample every gate in training or in evaluation, in turns.
WAYS = [(name, training) for name in registry.known("gate") for training in (True, False)]


@sampled(("name", "training"), WAYS, kept=[2 * at + at % 2 for at in range(len(WAYS) // 2)])
def test_gradients_of_every_gate_are_those_of_finite_differences(name: str, training: bool) -> None:
    gate, x_SM = make_gate(name, {}, (7, 6, 5))
    gate.train(training)
    names = [each for each, _ in gate.named_parameters()]

    def decide(x_SM: torch.Tensor, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(5)  # the same noise each time
        routing = functional_call(gate, dict(zip(names, parameters, strict=True)), (x_SM,))
        values = [each for each in vars(routing).values() if isinstance(each, torch.Tensor)]
        return tuple(each for each in values if each.is_floating_point() and each.requires_grad)

    parameters = [each.detach().clone().requires_grad_() for each in gate.parameters()]
    assert decide(x_SM.requires_grad_(), *parameters)
    assert torch.autograd.gradcheck(decide, (x_SM, *parameters), eps=1e-6, atol=1e-6, nondet_tol=0.0)


# "topk" is stock's, autocast included: bit-equal to it there as everywhere.
@pytest.mark.parametrize("name", [name for name in registry.known("gate") if name != "topk"])
def test_a_router_computes_in_float32_under_autocast(name: str) -> None:
    gate, x_SM = make_gate(name, {}, (47, 6, 13))
    gate, x_SM = gate.float(), x_SM.float()
    outcomes = []
    for enabled in (False, True):
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == (torch.bfloat16 if enabled else torch.float32)
            outcomes.append(vars(gate(x_SM)))
    for field, plain in outcomes[0].items():
        if isinstance(plain, torch.Tensor):
            assert outcomes[1][field].dtype == plain.dtype, field
            assert torch.equal(outcomes[1][field], plain), field


@pytest.mark.parametrize("k", [1, 2, 3])
def test_under_autocast_the_gate_of_stock_is_still_stocks(k: int) -> None:
    stock = TopKGate(13, 6, k=k, min_capacity=2)
    gate, x_SM = make_gate("topk", {"k": k, "min_capacity": 2}, (47, 6, 13))
    gate.float().load_state_dict(stock.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        torch.manual_seed(1)
        theirs = stock(x_SM.float(), None, True)
        torch.manual_seed(1)
        ours = gate(x_SM.float())
    assert torch.equal(ours.weights_KS, theirs[5])
    assert torch.equal(ours.aux_loss, theirs[0])
    assert torch.equal(ours.counts_E, theirs[6])


class Waits(TorchDispatchMode):
    """Collects operators whose result, or its size, the host has to have: on a GPU it waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique2"):
            self.found.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


NOISY = [("topk", {"k": 2}), ("topk", {"k": 3}), ("topk", {"k": 1, "noisy_gate_policy": "RSample"})]
NOISY += [("topk", {"k": 3, "noisy_gate_policy": "Jitter"}), ("deepseek", {"k": 2, "num_groups": 3})]


@pytest.mark.parametrize("masked", [False, True], ids=["all used", "some unused"])
@pytest.mark.parametrize(("name", "options"), [(name, {}) for name in registry.known("gate")] + NOISY, ids=str)
def test_a_gate_waits_for_the_device_only_to_size_what_drops_nothing(name: str, options: dict, masked: bool) -> None:
    used_S = torch.arange(31) % 3 > 0 if masked else None
    waits = {}
    for drop_tokens in (True, False) if kind_of(registry.lookup("gate", name)) is Routing else (True,):
        more = {} if drop_tokens else {"drop_tokens": False}
        gate, x_SM = make_gate(name, options | more, (31, 6, 13))
        gate(x_SM, used_S)  # a capacity that follows from sizes is worked out once, on the host
        with Waits() as seen:
            gate(x_SM, used_S)
        waits[drop_tokens] = seen.found
    assert waits[True] == []
    assert waits.get(False, ["_local_scalar_dense"]) == ["_local_scalar_dense"]


@pytest.mark.parametrize("name", TOKENS_CHOOSE)
def test_what_masked_tokens_hold_changes_nothing_for_the_others(name: str) -> None:
    gate, x_SM = make_gate(name, LOSSES, (23, 6, 13))
    gate.eval()
    used_S = torch.arange(23) % 4 > 0
    plain = gate(x_SM, used_S)
    garbage = gate(x_SM.masked_fill(~used_S.unsqueeze(1), float("nan")), used_S)
    assert torch.equal(plain.weights_KS, garbage.weights_KS)
    assert torch.equal(plain.aux_loss, garbage.aux_loss)
    assert kept_choices(plain) == kept_choices(garbage)
    nobody = gate(x_SM, torch.zeros(23))
    assert kept_choices(nobody) == []
    assert nobody.aux_loss == 0
    assert nobody.counts_E.sum() == 0


@pytest.mark.parametrize("name", TOKENS_CHOOSE)
def test_a_full_expert_keeps_the_best_or_the_first(name: str) -> None:
    kept = {}
    for policy in ("probs", "position"):
        options = {"k": 1, "capacity_factor": 0.3, "eval_capacity_factor": 0.3, "min_capacity": 0}
        gate, x_SM = make_gate(name, options | {"drop_policy": policy}, (47, 5, 13))
        routing = gate.eval()(x_SM)
        kept[policy] = {e: [s for s, each in kept_choices(routing) if each == e] for e in range(5)}
        whole, _ = make_gate(name, options | {"drop_tokens": False}, (47, 5, 13))
        everyone = whole.eval()(x_SM)
        chosen = {e: [s for s, each in kept_choices(everyone) if each == e] for e in range(5)}
        assert routing.capacity < max(map(len, chosen.values()))
        if policy == "position":
            assert kept[policy] == {e: tokens[: routing.capacity] for e, tokens in chosen.items()}
        else:
            affinity_SE = gate.score(x_SM).affinity_SE
            for e, tokens in chosen.items():
                best = sorted(tokens, key=lambda s: -affinity_SE[s, e].item())[: routing.capacity]
                assert set(kept[policy][e]) == set(best)
    assert kept["probs"] != kept["position"]


@pytest.mark.parametrize("name", TOKENS_CHOOSE)
def test_the_losses_are_one_in_balance_and_have_the_factors_asked_for(name: str) -> None:
    found = {}
    for factors in ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (3.0, 5.0)):
        options = {"k": 2, "balance_loss_factor": factors[0], "z_loss_factor": factors[1]}
        gate, x_SM = make_gate(name, options, (23, 6, 13))
        found[factors] = gate.eval()(x_SM).aux_loss.item()
    assert found[0.0, 0.0] == 0.0
    expected = 3.0 * found[1.0, 0.0] + 5.0 * found[0.0, 1.0]
    assert found[3.0, 5.0] == pytest.approx(expected, abs=1e-12)
    assert found[1.0, 0.0] > 1.0
    even, x_SM = make_gate(name, {"k": 2, "balance_loss_factor": 1.0, "z_loss_factor": 0.0}, (23, 6, 13))
    assert even.eval()(torch.zeros_like(x_SM)).aux_loss.item() == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("name", ["gshard", "mixtral", "deepseek"])
def test_weights_that_are_always_1_are_warned_of(name: str) -> None:
    with pytest.warns(UserWarning, match="with k = 1 every weight is 1"):
        registry.lookup("gate", name)(k=1).build(13, 5)
