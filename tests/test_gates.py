# SPDX-License-Identifier: Apache-2.0
"""The laws of every gate on the shelf, and the top-k gate against stock DeepSpeed's, number for number."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from deepspeed.moe.sharded_moe import TopKGate as StockTopKGate

from ds_fsmoe import LinearGate, Routing, registry
from ds_fsmoe.components.gate import dropping_capacity

S, M, E = 37, 13, 5


def make_gate(name: str = "topk", seed: int = 0, **settings: Any) -> Any:
    gate = registry.lookup("gate", name)(**settings)
    torch.manual_seed(seed)
    gate.build(M, E)
    return gate


def tokens(dtype: torch.dtype = torch.float32, count: int = S) -> torch.Tensor:
    return torch.randn(count, M, generator=torch.Generator().manual_seed(3)).to(dtype)


def experts_and_positions(routing: Routing) -> list[tuple[int, int, int]]:
    """(token, expert, position) of every kept choice."""
    kept = []
    for choice_S in routing.slots_KS:
        for token, slot in enumerate(choice_S.tolist()):
            if slot < routing.num_slots:
                kept.append((token, slot // routing.capacity, slot % routing.capacity))
    return kept


LAW_SETTINGS = [
    {"k": k, "capacity_factor": factor, "drop_tokens": drop}
    for k, factor, drop in itertools.product((1, 2, 3, 5), (0.4, 1.0, 3.0), (True, False))
]


@pytest.mark.parametrize("settings", LAW_SETTINGS, ids=str)
@pytest.mark.parametrize("name", registry.known("gate"))
def test_a_gate_keeps_its_laws(name: str, settings: dict) -> None:
    gate = make_gate(name, **settings)
    routing = gate(tokens())
    assert routing.slots_KS.shape == routing.weights_KS.shape == (settings["k"], S)
    assert routing.slots_KS.dtype == torch.int64
    assert routing.slots_KS.min() >= 0
    assert routing.slots_KS.max() <= routing.num_slots
    kept = experts_and_positions(routing)
    places = [(expert, position) for _, expert, position in kept]
    assert len(set(places)) == len(places), "a slot is taken twice"
    pairs = [(token, expert) for token, expert, _ in kept]
    assert len(set(pairs)) == len(pairs), "an expert takes a token twice"
    for expert in range(E):
        positions = [position for each, position in places if each == expert]
        assert len(positions) <= routing.capacity
    dropped_KS = routing.slots_KS == routing.num_slots
    assert torch.all(routing.weights_KS[dropped_KS] == 0)
    assert torch.all(routing.weights_KS[~dropped_KS] > 0)
    assert routing.counts_E.sum() == settings["k"] * S
    if settings["drop_tokens"]:
        assert routing.capacity == max(-(-S * settings["k"] * settings["capacity_factor"] // E), 4)
    else:
        assert not dropped_KS.any()
        assert routing.capacity == routing.counts_E.max()


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_full_expert_is_filled_to_the_last_slot(k: int) -> None:
    routing = make_gate(k=k, capacity_factor=0.4, use_rts=False, top2_2nd_expert_sampling=False)(tokens())
    taken_E = torch.zeros(E, dtype=torch.int64)
    for _, expert, _ in experts_and_positions(routing):
        taken_E[expert] += 1
    assert torch.equal(taken_E, routing.counts_E.clamp(max=routing.capacity))


@pytest.mark.parametrize("k", [1, 2, 3])
def test_masked_tokens_take_no_slot_and_do_not_count(k: int) -> None:
    used_S = torch.arange(S) % 3 != 0
    routing = make_gate(k=k, capacity_factor=0.7)(tokens(), used_S)
    assert not {token for token, _, _ in experts_and_positions(routing)} & set(range(0, S, 3))
    assert routing.counts_E.sum() == k * used_S.sum()
    assert torch.all(routing.weights_KS[:, ~used_S] == 0)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_evaluation_has_its_own_capacity_and_no_noise(k: int) -> None:
    gate = make_gate(k=k, capacity_factor=1.0, eval_capacity_factor=2.0, min_capacity=0, noisy_gate_policy="Jitter")
    assert gate(tokens()).capacity == -(-S * k // E)
    gate.eval()
    assert gate(tokens()).capacity == -(-S * k * 2 // E)


@pytest.mark.parametrize(("dtype", "router"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_the_router_computes_in_float32_at_least(dtype: torch.dtype, router: torch.dtype) -> None:
    routing = make_gate(k=2).to(dtype)(tokens(dtype))
    assert routing.weights_KS.dtype == router
    assert routing.aux_loss.dtype == router


@pytest.mark.parametrize("k", [1, 2, 3])
def test_one_token_alone_finds_its_way(k: int) -> None:
    routing = make_gate(k=k)(tokens(count=1))
    assert len(experts_and_positions(routing)) == k


def test_capacity_is_rounded_in_float32() -> None:
    """10 * 1.1 is 11.000000000000002 in float64, which would round up to 12."""
    assert dropping_capacity(10, 1, 1.1, 0) == 11
    assert dropping_capacity(10, 1, 1.1, 13) == 13


STOCK_CASES = [
    *({"k": 1, "use_rts": rts, "noisy": noisy} for rts in (True, False) for noisy in (None, "Jitter", "RSample")),
    *({"k": 2, "sampling": sampling, "noisy": noisy} for sampling in (True, False) for noisy in (None, "Jitter")),
    *({"k": k, "noisy": noisy} for k in (3, 4, 5) for noisy in (None, "Jitter")),
]


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("drop", [True, False], ids=["drop", "dropless"])
@pytest.mark.parametrize("case", STOCK_CASES, ids=str)
def test_the_top_k_gate_is_stocks_number_for_number(case: dict, drop: bool, dtype: torch.dtype, training: bool) -> None:
    rts, sampling, noisy = case.get("use_rts", True), case.get("sampling", True), case["noisy"]
    for factor, count in itertools.product((0.5, 1.1), (S, 64)):
        stock = StockTopKGate(M, E, case["k"], factor, 2 * factor, 4, noisy, drop, rts, None, sampling).to(dtype)
        ours = LinearGate(
            k=case["k"],
            capacity_factor=factor,
            eval_capacity_factor=2 * factor,
            min_capacity=4,
            noisy_gate_policy=noisy,
            drop_tokens=drop,
            use_rts=rts,
            top2_2nd_expert_sampling=sampling,
        )
        ours.build(M, E)
        ours.to(dtype).load_state_dict(stock.state_dict())
        x_stock, x_ours = (tokens(dtype, count).requires_grad_() for _ in range(2))
        torch.manual_seed(11)
        aux, capacity, _, expert_KS, position_KS, weights_KS, counts_E = stock.train(training)(x_stock, None, True)
        torch.manual_seed(11)
        routing = ours.train(training)(x_ours)

        slots_KS = torch.where(expert_KS < 0, E * int(capacity), expert_KS.long() * int(capacity) + position_KS.long())
        assert routing.capacity == int(capacity)
        assert torch.equal(routing.slots_KS, slots_KS)
        assert torch.equal(routing.weights_KS, weights_KS)
        assert torch.equal(routing.aux_loss, aux)
        assert torch.equal(routing.counts_E, counts_E)
        for weights, loss in ((weights_KS, aux), (routing.weights_KS, routing.aux_loss)):
            grading_KS = torch.linspace(-1, 1, weights.numel()).view_as(weights)
            ((weights * grading_KS).sum() + 0.3 * loss).backward()
        assert torch.equal(ours.wg.weight.grad, stock.wg.weight.grad)
        assert torch.equal(x_ours.grad, x_stock.grad)


def test_the_random_stream_stands_where_stock_leaves_it() -> None:
    for case in STOCK_CASES:
        stock = StockTopKGate(M, E, case["k"], 1.0, 1.0, 4, case["noisy"], True, case.get("use_rts", True))
        ours = make_gate(k=case["k"], noisy_gate_policy=case["noisy"], use_rts=case.get("use_rts", True))
        after = []
        for gate in (stock, ours):
            torch.manual_seed(5)
            gate(tokens())
            after.append(torch.rand(1).item())
        assert after[0] == after[1], case


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"kk": 1}, "LinearGate has no setting 'kk': the choices are k, capacity_factor"),
        ({"k": 0}, r"k = 0: must be between 1 and num_experts \(5\)"),
        ({"k": 6}, r"k = 6: must be between 1 and num_experts \(5\)"),
        ({"capacity_factor": 0.0}, "capacity_factor = 0.0: must be above 0"),
        ({"drop_policy": "best"}, "drop_policy = 'best': the choices are 'probs', 'position'"),
        ({"noisy_gate_policy": "loud"}, "noisy_gate_policy = 'loud': the choices are None, 'Jitter', 'RSample'"),
    ],
)
def test_an_impossible_setting_is_named(settings: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make_gate(**settings)
