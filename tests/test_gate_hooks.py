# SPDX-License-Identifier: Apache-2.0
"""Hooks on the gate of a layer: they see what they see on DeepSpeed's own, and what they put in its place is used."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.moe.sharded_moe import TopKGate
from torch import nn

import ds_fsmoe
from ds_fsmoe.components.routing import Routing, routing_of, stock_routes
from ds_fsmoe.layer.stock_layer import FSMoEGate
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.small_model import NUM_EXPERTS, WIDTH, Case, SmallModel, batch

Put = Callable[[nn.Module, list], Any]
"""Puts a hook on a gate, which notes what it sees."""


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


def looks_at_results(gate: nn.Module, seen: list) -> Any:
    return gate.register_forward_hook(lambda module, args, out: seen.append(describe((args, out))))


def with_keywords(gate: nn.Module, seen: list) -> Any:
    return gate.register_forward_hook(
        lambda module, args, kwargs, out: seen.append(describe((args[1:], sorted(kwargs), out))), with_kwargs=True
    )


def looks_ahead(gate: nn.Module, seen: list) -> Any:
    return gate.register_forward_pre_hook(lambda module, args: seen.append(describe(args)))


def changes_the_tokens(gate: nn.Module, seen: list) -> Any:
    return gate.register_forward_pre_hook(lambda module, args: (args[0].flip(0), *args[1:]))


def changes_the_weights(gate: nn.Module, seen: list) -> Any:
    return gate.register_forward_hook(lambda module, args, out: (*out[:5], 0.5 * out[5], out[6]))


def drops_choices(gate: nn.Module, seen: list) -> Any:
    def drop(module: nn.Module, args: Any, out: Any) -> Any:
        experts_KS = out[3].clone()
        experts_KS[0, ::3] = -1
        return [out[0] + 1.0, *out[1:3], experts_KS, *out[4:]]

    return gate.register_forward_hook(drop)


def looks_at_gradients(gate: nn.Module, seen: list) -> Any:
    return gate.register_full_backward_hook(lambda module, given, got: seen.append(describe(given)))


def another_forward(gate: nn.Module, seen: list) -> Any:
    kept = gate.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = kept(*args, **kwargs)
        seen.append(describe((len(args), sorted(kwargs), out)))
        return (*out[:5], 0.25 * out[5], out[6])

    gate.forward = forward


HOOKS: tuple[Put, ...] = (
    looks_at_results,
    with_keywords,
    looks_ahead,
    changes_the_tokens,
    changes_the_weights,
    drops_choices,
    looks_at_gradients,
    another_forward,
)


def trained(initialize: Any, block: dict, case: Case, rank: int, put: Put, early: bool) -> list:
    model, seen = SmallModel(case, rank), []
    gate = model.moes[0].deepspeed_moe.gate
    if early:
        put(gate, seen)
    config = case.ds_config(fsmoe=block)
    engine, *_ = initialize(model=model, model_parameters=list(model.parameters()), config=config)
    if not early:
        put(gate, seen)
    torch.manual_seed(rank)
    losses = []
    for step in range(2):
        loss, _ = engine(*batch(step, rank, torch.float32))
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    engine.eval()
    with torch.no_grad():
        losses.append(engine(*batch(7, rank, torch.float32))[0])
    engine.destroy()
    return [seen, losses]


def compared(rank: int, world_size: int, number: int) -> bool:
    # The formulas are three, and so each of them sees some of the hooks; what hooks see of each is tested below.
    case = Case(ep_size=2, k=1 + number % 3, drop_tokens=number % 2 == 0)
    stocks, ours = (
        trained(initialize, block, case, rank, HOOKS[number], early=number % 2 == 1)
        for initialize, block in (
            (deepspeed.initialize, {}),
            (ds_fsmoe.initialize, {"enabled": True, "dispatch": "padded"}),
        )
    )
    return same(stocks, ours)


@sampled("number", range(len(HOOKS)), drawn=2, ids=[each.__name__ for each in HOOKS])
def test_hooks_on_the_gate_see_and_change_what_stocks_do(number: int, tmp_path: Path) -> None:
    assert run_on_ranks(compared, 2, tmp_path, number) == [True, True]


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("drop_tokens", [True, False])
@pytest.mark.parametrize("sparse", [True, False])
def test_a_gate_that_is_called_gives_stocks_tuple(k: int, drop_tokens: bool, sparse: bool) -> None:
    torch.manual_seed(1)
    stock = TopKGate(WIDTH, 5, k=k, capacity_factor=0.7, min_capacity=2, drop_tokens=drop_tokens)
    ours = copy.deepcopy(stock)
    ours.__class__ = FSMoEGate
    x_SM, found = torch.randn(17, WIDTH), []
    for gate in (stock, ours):
        torch.manual_seed(2)
        found.append(gate(x_SM, None, sparse))
    if sparse:
        assert same(describe(found[0]), describe(found[1]))
    else:
        for theirs, own in zip(*found, strict=True):
            torch.testing.assert_close(own, theirs, check_dtype=True)


def test_a_decision_survives_the_way_to_stocks_form_and_back() -> None:
    routing = Routing(
        torch.tensor([[0, 5, 9, 10], [6, 10, 10, 2]]), torch.rand(2, 4), torch.tensor(0.3), torch.arange(2), 5, 2
    )
    back = routing_of(stock_routes(routing))
    assert same([*vars(back).values()], [*vars(routing).values()])
    empty = Routing(torch.empty(1, 0, dtype=torch.long), torch.empty(1, 0), torch.tensor(0.0), torch.zeros(2), 0, 2)
    assert routing_of(stock_routes(empty)).slots_KS.shape == (1, 0)


def test_made_up_tokens_of_the_autotuner_are_not_shown_to_hooks() -> None:
    layer = ds_fsmoe.MoE(WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=NUM_EXPERTS)
    seen: list = []
    looks_at_results(layer.deepspeed_moe.gate, seen)
    layer.deepspeed_moe.route_without_hooks(torch.randn(9, WIDTH), None, None)
    assert not seen
    layer.deepspeed_moe.route(torch.randn(9, WIDTH), None, None)
    assert len(seen) == 1


def test_the_entropy_of_a_gate_with_hooks_is_known_too() -> None:
    layer = ds_fsmoe.MoE(WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=NUM_EXPERTS, k=2)
    inner, x_SM = layer.deepspeed_moe, torch.randn(9, WIDTH)
    inner.gate.says_entropy = True
    expected = inner.route(x_SM, None, None).entropy
    changes_the_weights(inner.gate, [])
    assert inner.route(x_SM, None, None).entropy == expected
