# SPDX-License-Identifier: Apache-2.0
"""The top-k gate gives the numbers of stock DeepSpeed's, bit for bit, and draws what stock draws. Hooks on the gate of
a layer see what they see on stock's, and what they put in its place is used."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.moe.sharded_moe import TopKGate, topkgating
from torch import nn

import ds_fsmoe
from ds_fsmoe.components.gates.topk import LinearGate, route_top_k
from ds_fsmoe.components.routing import Routing
from ds_fsmoe.layer.stock_layer import FSMoEGate
from tests.covering import covering, every_case
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.small_model import NUM_EXPERTS, WIDTH, Case, SmallModel, batch, small_engine, train_steps


def stock_as_routing(outcome: tuple) -> Routing:
    aux_loss, capacity, num_experts, expert_KS, position_KS, weights_KS, counts_E = outcome
    capacity = int(capacity)
    slots_KS = torch.where(expert_KS >= 0, expert_KS.long() * capacity + position_KS.long(), num_experts * capacity)
    return Routing(slots_KS, weights_KS, aux_loss, counts_E, capacity, num_experts)


def assert_same_routing(ours: Routing, stocks: Routing) -> None:
    assert (ours.capacity, ours.num_experts) == (stocks.capacity, stocks.num_experts)
    for name in ("slots_KS", "weights_KS", "aux_loss", "counts_E"):
        assert getattr(ours, name).dtype == getattr(stocks, name).dtype, name
        assert torch.equal(getattr(ours, name), getattr(stocks, name)), name


AXES = (
    (1, 2, 3, 5),
    (None, "Jitter", "RSample"),
    (True, False),
    (True, False),
    (torch.bfloat16, torch.float32),
    (True, False),
)
CASES = covering(*AXES)
# Every pair of any two of these always; the others are drawn.
OTHERS = [each for each in every_case(*AXES) if each not in CASES]


# Of the last two the capacity is rounded to float32 before it is rounded up: 10 * 1.1 is 11.000000000000002 in float64
# and 2.4 is 2.4000001 in float32.
SIZES = [((23, 5, 13), 0.6), ((7, 11, 3), 1.3), ((97, 7, 29), 0.6), ((97, 7, 29), 1.3)]
SIZES += [((50, 5, 13), 1.1), ((12, 5, 13), 1.25)]


@sampled(
    ("k", "noise", "random_choice", "drop_tokens", "dtype", "training"),
    [*CASES, *OTHERS],
    kept=range(len(CASES)),
    drawn=4,
    ids=str,
)
def test_top_k_equals_stock_number_for_number(
    k: int, noise: str | None, random_choice: bool, drop_tokens: bool, dtype: torch.dtype, training: bool
) -> None:
    for (num_tokens, num_experts, width), factor in SIZES:
        options = {
            "k": k,
            "capacity_factor": factor,
            "eval_capacity_factor": factor * 1.5,
            "min_capacity": 2,
            "noisy_gate_policy": noise,
            "drop_tokens": drop_tokens,
            "use_rts": random_choice,
            "top2_2nd_expert_sampling": random_choice,
        }
        torch.manual_seed(3)
        stock = TopKGate(width, num_experts, **options).to(dtype).train(training)
        gate = LinearGate(**options)
        gate.build(width, num_experts)
        gate.to(dtype).train(training).load_state_dict(stock.state_dict())
        x_SM = torch.randn(num_tokens, width).to(dtype).requires_grad_()

        torch.manual_seed(5)
        stocks = stock_as_routing(stock(x_SM, None, True))
        stocks_random_state = torch.get_rng_state()
        torch.manual_seed(5)
        ours = gate(x_SM)
        assert_same_routing(ours, stocks)
        assert torch.equal(torch.get_rng_state(), stocks_random_state)
        factor_KS = torch.linspace(-1.7, 2.3, ours.weights_KS.numel()).reshape(ours.weights_KS.shape)
        gradients = [
            torch.autograd.grad((routing.weights_KS * factor_KS).sum() + 0.01 * routing.aux_loss, (x_SM, weight))
            for routing, weight in ((ours, gate.wg.weight), (stocks, stock.wg.weight))
        ]
        for our_gradient, stocks_gradient in zip(*gradients, strict=True):
            assert stocks_gradient.abs().max() > 0
            assert torch.equal(our_gradient, stocks_gradient)


@pytest.mark.parametrize("k", [3, 5])
def test_dropping_by_position_equals_stocks_function(k: int) -> None:
    # Stock has this policy in its function only; its gate module never asks for it.
    logits_SE = torch.randn(53, 11, generator=torch.Generator().manual_seed(k))
    stocks = stock_as_routing(topkgating(logits_SE, k, 0.7, 2, drop_policy="position", sparse_routes=True))
    settings = LinearGate(k=k, capacity_factor=0.7, min_capacity=2, drop_policy="position").settings
    ours = route_top_k(logits_SE, torch.eye(11), settings, training=True)
    assert (stocks.slots_KS == stocks.num_slots).any()
    assert_same_routing(ours, stocks)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_under_autocast_and_with_a_mask_for_top_1_the_gate_is_still_stocks(k: int) -> None:
    x_SM, used_S = torch.randn(47, 13, generator=torch.Generator().manual_seed(0)), torch.arange(47) % 4 > 0
    for is_cast, mask_S, factor in ((True, None, 3.0), (False, used_S, 0.6))[: 1 + (k == 1)]:
        options = {"k": k, "capacity_factor": factor, "min_capacity": 2}
        stock, gate = TopKGate(13, 6, **options), LinearGate(**options)
        gate.build(13, 6)
        gate.load_state_dict(stock.state_dict())
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            torch.manual_seed(1)
            stocks = stock_as_routing(stock(x_SM, None if mask_S is None else mask_S.long(), True))
            torch.manual_seed(1)
            ours = gate(x_SM, mask_S)
        if not is_cast:
            assert_same_routing(ours, stocks)
        # Rounded scores may be equal, and which of two equal ones is first is left to each.
        for name in ("weights_KS", "aux_loss", "counts_E"):
            assert torch.equal(getattr(ours, name), getattr(stocks, name)), name


# ---- hooks


def describe(value: Any) -> Any:
    """Comparable, types and all."""
    if isinstance(value, torch.Tensor):
        return "tensor", str(value.dtype), value.detach().clone()
    if isinstance(value, (tuple, list)):
        return type(value).__name__, [describe(each) for each in value]
    return type(value).__name__, value


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def drop_choices(out: Any) -> list[Any]:
    experts_KS = out[3].clone()
    experts_KS[0, ::3] = -1
    return [out[0] + 1.0, *out[1:3], experts_KS, *out[4:]]


def another_forward(gate: nn.Module, seen: list) -> None:
    kept = gate.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = kept(*args, **kwargs)
        seen.append(describe((len(args), sorted(kwargs), out)))
        return (*out[:5], 0.25 * out[5], out[6])

    gate.forward = forward


# Each puts a hook on a gate, which notes in a list what it sees.
HOOKS: dict[str, Callable[[nn.Module, list], Any]] = {
    "looks at results": lambda gate, seen: gate.register_forward_hook(
        lambda _, args, out: seen.append(describe((args, out)))
    ),
    "with keywords": lambda gate, seen: gate.register_forward_hook(
        lambda _, args, kwargs, out: seen.append(describe((args[1:], sorted(kwargs), out))), with_kwargs=True
    ),
    "looks ahead": lambda gate, seen: gate.register_forward_pre_hook(lambda _, args: seen.append(describe(args))),
    "changes the tokens": lambda gate, _: gate.register_forward_pre_hook(lambda _, args: (args[0].flip(0), *args[1:])),
    "changes the weights": lambda gate, _: gate.register_forward_hook(
        lambda _, args, out: (*out[:5], 0.5 * out[5], out[6])
    ),
    "drops choices": lambda gate, _: gate.register_forward_hook(lambda _, args, out: drop_choices(out)),
    "looks at gradients": lambda gate, seen: gate.register_full_backward_hook(
        lambda _, given, got: seen.append(describe(given))
    ),
    "another forward": another_forward,
}


def compare(rank: int, world_size: int, names: list[str]) -> None:
    for name in names:
        # The formulas are three, and so each of them sees some of the hooks; what hooks see of each is tested below.
        number, results = [*HOOKS].index(name), []
        case, is_early = Case(ep_size=2, k=1 + number % 3, drop_tokens=number % 2 == 0), number % 2 == 1
        for block in (None, {"dispatch": "padded"}):
            model, seen = SmallModel(case, rank), []
            if is_early:
                HOOKS[name](model.moes[0].deepspeed_moe.gate, seen)
            engine = small_engine(case, rank, block, model)
            if not is_early:
                HOOKS[name](model.moes[0].deepspeed_moe.gate, seen)
            torch.manual_seed(rank)
            losses = train_steps(engine, rank, range(2))
            engine.eval()
            with torch.no_grad():
                losses.append(float(engine(*batch(7, rank, torch.float32))[0]))
            engine.destroy()
            results.append([seen, losses])
        assert same(*results), name


@sampled("names", [[*HOOKS][at::4] for at in range(4)], ids=str)
def test_hooks_on_the_gate_see_and_change_what_stocks_do(names: list[str], tmp_path: Path) -> None:
    run_on_ranks(compare, 2, tmp_path, names)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("drop_tokens", [True, False])
def test_a_gate_that_is_called_gives_stocks_tuple(k: int, drop_tokens: bool) -> None:
    torch.manual_seed(1)
    stock = TopKGate(WIDTH, 5, k=k, capacity_factor=0.7, min_capacity=2, drop_tokens=drop_tokens)
    ours, x_SM = copy.deepcopy(stock), torch.randn(17, WIDTH)
    ours.__class__ = FSMoEGate
    for sparse in (True, False):
        found = []
        for gate in (stock, ours):
            torch.manual_seed(2)
            found.append(gate(x_SM, None, sparse))
        if sparse:
            assert same(describe(found[0]), describe(found[1]))
        else:
            for theirs, own in zip(*found, strict=True):
                torch.testing.assert_close(own, theirs, check_dtype=True)


def test_made_up_tokens_of_the_autotuner_are_not_shown_to_hooks_and_entropy_is_known_with_them() -> None:
    layer = ds_fsmoe.MoE(WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=NUM_EXPERTS, k=2)
    inner, x_SM, seen = layer.deepspeed_moe, torch.randn(9, WIDTH), []
    inner.gate.says_entropy = True
    expected = inner.route(x_SM, None, None).entropy
    HOOKS["looks at results"](inner.gate, seen)
    inner.route_without_hooks(x_SM, None, None)
    assert not seen
    HOOKS["changes the weights"](inner.gate, seen)
    assert inner.route(x_SM, None, None).entropy == expected
    assert len(seen) == 1
