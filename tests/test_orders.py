# SPDX-License-Identifier: Apache-2.0
"""Orders: tokens into slots and back, held against loops over slots with every kind of routing that an order reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ds_fsmoe import registry
from ds_fsmoe.components.order import OrderBase
from ds_fsmoe.components.routing import DenseRouting, Routing, RoutingBase, SlotRouting
from ds_fsmoe.execution import slot_chunks
from ds_fsmoe.execution.device_tables import DeviceTables
from ds_fsmoe.execution.slot_chunks import CapacityChunks
from tests.call_counts import Operations

# (S, M, E, C, K); in the second some slots stay empty whatever happens, in the third most choices find none.
SIZES_SMECK = [(23, 13, 5, 7, 2), (3, 1, 2, 29, 1), (31, 7, 3, 2, 3), (1, 5, 1, 1, 1)]


def as_slots(routing: Routing) -> SlotRouting:
    """The same decision, slot by slot."""
    slots, num_tokens = routing.slots_KS.reshape(-1), routing.slots_KS.shape[1]
    tokens = torch.arange(num_tokens).expand_as(routing.slots_KS).reshape(-1)
    tokens_R = torch.full((routing.num_slots + 1,), num_tokens).scatter(0, slots, tokens)[:-1]
    weights_R = routing.weights_KS.new_zeros(routing.num_slots + 1)
    weights_R = weights_R.scatter(0, slots, routing.weights_KS.reshape(-1))[:-1]
    return SlotRouting(tokens_R, weights_R, num_tokens, *of_all(routing))


def as_matrices(routing: Routing) -> DenseRouting:
    """The same decision with a weight, mostly 0, for every token in every slot."""
    no_weights_SR = routing.weights_KS.new_zeros(routing.slots_KS.shape[1], routing.num_slots + 1)
    dispatch_SR = no_weights_SR.scatter(1, routing.slots_KS.t(), 1.0)[:, :-1]
    combine_SR = no_weights_SR.scatter(1, routing.slots_KS.t(), routing.weights_KS.t())[:, :-1]
    return DenseRouting(dispatch_SR, combine_SR, *of_all(routing))


def of_all(routing: Routing) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    return routing.aux_loss, routing.counts_E, routing.capacity, routing.num_experts


AS_KIND = {Routing: lambda routing: routing, SlotRouting: as_slots, DenseRouting: as_matrices}


class WithKind(OrderBase):
    """An order that is told what a ``Routing`` says by another kind of routing."""

    def __init__(self, order: OrderBase, kind: type[RoutingBase]) -> None:
        self.order = order
        self.kind = kind

    def arrange(self, x_SM: torch.Tensor, routing: Routing) -> torch.Tensor:
        return self.order.arrange(x_SM, AS_KIND[self.kind](routing))

    def restore(self, y_ECM: torch.Tensor, routing: Routing) -> torch.Tensor:
        return self.order.restore(y_ECM, AS_KIND[self.kind](routing))


ORDERS = [(name, kind) for name in registry.known("order") for kind in registry.lookup("order", name).reads]
# A matrix of weights has no empty slots: 0 times nan is nan.
BY_SLOT = [(name, kind) for name, kind in ORDERS if kind is not DenseRouting]


@pytest.fixture(params=ORDERS, ids=lambda each: f"{each[0]}-{each[1].__name__}")
def order(request: pytest.FixtureRequest) -> WithKind:
    name, kind = request.param
    return WithKind(registry.lookup("order", name)(), kind)


def routing_of(slots_KS: torch.Tensor, weights_KS: torch.Tensor, num_experts: int, capacity: int) -> Routing:
    counts_E = torch.zeros(num_experts, dtype=torch.int64)
    return Routing(slots_KS, weights_KS, torch.zeros(()), counts_E, capacity, num_experts)


def random_case(size_SMECK: tuple[int, ...], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, Routing]:
    """(x [S, M], y [E, C, M], routing) in float64: about a third of the choices is dropped, every slot used once."""
    num_tokens, width, num_experts, capacity, num_choices = size_SMECK
    generator = torch.Generator().manual_seed(seed)
    num_slots = num_experts * capacity
    shuffled = torch.randperm(num_slots, generator=generator)[: num_choices * num_tokens]
    slots = torch.full((num_choices * num_tokens,), num_slots)
    slots[: len(shuffled)] = shuffled
    slots = slots[torch.randperm(len(slots), generator=generator)]
    if len(slots) > 1:
        slots[torch.rand(len(slots), generator=generator) < 0.3] = num_slots
    slots_KS = slots.reshape(num_choices, num_tokens)
    weights_KS = torch.rand(num_choices, num_tokens, generator=generator, dtype=torch.float64) + 0.1
    weights_KS = weights_KS * (slots_KS < num_slots)
    x_SM = torch.randn(num_tokens, width, generator=generator, dtype=torch.float64)
    y_ECM = torch.randn(num_experts, capacity, width, generator=generator, dtype=torch.float64)
    return x_SM, y_ECM, routing_of(slots_KS, weights_KS, num_experts, capacity)


def kept_choices(routing: Routing) -> list[tuple[int, int, int, int]]:
    """(choice, token, expert, position) of all that have a slot."""
    return [
        (choice, token, slot // routing.capacity, slot % routing.capacity)
        for choice, slots_S in enumerate(routing.slots_KS.tolist())
        for token, slot in enumerate(slots_S)
        if slot < routing.num_slots
    ]


def loop_arrange(x_SM: torch.Tensor, routing: Routing) -> torch.Tensor:
    x_ECM = x_SM.new_zeros(routing.num_experts, routing.capacity, x_SM.shape[1])
    for _, token, expert, position in kept_choices(routing):
        x_ECM[expert, position] = x_SM[token]
    return x_ECM


def loop_restore(y_ECM: torch.Tensor, routing: Routing) -> torch.Tensor:
    y_SM = y_ECM.new_zeros(routing.slots_KS.shape[1], y_ECM.shape[2])
    for choice, token, expert, position in kept_choices(routing):
        y_SM[token] = y_SM[token] + routing.weights_KS[choice, token] * y_ECM[expert, position]
    return y_SM


def assert_near(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


def test_restore_undoes_arrange_with_one_slot_per_token_and_weight_1(order: OrderBase) -> None:
    for num_tokens, num_experts, capacity in ((23, 5, 7), (35, 5, 7), (1, 3, 2)):
        slots_KS = torch.randperm(num_experts * capacity)[:num_tokens].unsqueeze(0)
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            x_SM = torch.randn(num_tokens, 13).to(dtype)
            for of_weights in (torch.float32, dtype):  # a user's gate may be in 16 bits
                routing = routing_of(slots_KS, torch.ones(1, num_tokens, dtype=of_weights), num_experts, capacity)
                y_SM = order.restore(order.arrange(x_SM, routing), routing)
                assert y_SM.dtype == dtype
                assert torch.equal(y_SM, x_SM)


def with_gaps(slots: torch.Tensor, num_experts: int, capacity: int) -> torch.Tensor:
    """From the last row to the first, and one row of every expert left empty."""
    num_rows = num_experts * (capacity + 1)
    return torch.where(slots < num_experts * capacity, num_rows - 1 - slots, num_rows)


@pytest.mark.parametrize("size_SMECK", SIZES_SMECK, ids=str)
@pytest.mark.parametrize("way", ["whole", "chunks", "gaps"])
def test_an_order_and_its_gradients_equal_the_loops_over_slots_wherever_rows_lie(
    order: WithKind, size_SMECK: tuple, way: str
) -> None:
    x_SM, _, routing = random_case(size_SMECK)
    weights_KS, of_kind = routing.weights_KS.requires_grad_(), AS_KIND[order.kind](routing)
    _, width, num_experts, capacity, _ = size_SMECK
    if way != "whole":
        cuts = CapacityChunks((0, capacity // 3, capacity // 3, capacity))
        place = partial(cuts.chunked_slots, num_experts=num_experts)
        if way == "gaps":
            place = partial(with_gaps, num_experts=num_experts, capacity=capacity)
            capacity += 1
        routing, of_kind = routing.relaid(place, capacity), of_kind.relaid(place, capacity)
        assert (of_kind.capacity, of_kind.num_experts) == (capacity, num_experts)
    y_ECM = torch.randn(num_experts, capacity, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    inputs = [x_SM.requires_grad_(), y_ECM.requires_grad_(), weights_KS]
    ours = order.order.arrange(x_SM, of_kind), order.order.restore(y_ECM, of_kind)
    loops = loop_arrange(x_SM, routing), loop_restore(y_ECM, routing)
    assert torch.equal(ours[0], loops[0])
    assert_near(ours[1:], loops[1:])
    d_outputs = [torch.randn_like(each) for each in ours]
    assert_near(*(torch.autograd.grad(each, inputs, d_outputs) for each in (ours, loops)))


@pytest.mark.parametrize("order", BY_SLOT, indirect=True, ids=lambda each: f"{each[0]}-{each[1].__name__}")
def test_nan_and_inf_of_dropped_tokens_and_of_empty_slots_reach_nobody(order: OrderBase) -> None:
    # Three tokens, two experts with two slots: token 1 is dropped, slot (1, 1) is empty.
    routing = routing_of(torch.tensor([[0, 4, 2]]), torch.tensor([[0.5, 0.0, 2.0]]), num_experts=2, capacity=2)
    x_SM = torch.tensor([[1.0, 2.0], [math.nan, math.inf], [3.0, 4.0]], requires_grad=True)
    x_ECM = order.arrange(x_SM, routing)
    assert x_ECM.tolist() == [[[1.0, 2.0], [0.0, 0.0]], [[3.0, 4.0], [0.0, 0.0]]]
    y_ECM = torch.tensor([[[1.0, 2.0], [5.0, 5.0]], [[3.0, 4.0], [math.inf, math.nan]]])
    assert order.restore(y_ECM, routing).tolist() == [[0.5, 1.0], [0.0, 0.0], [6.0, 8.0]]
    (dx_SM,) = torch.autograd.grad(x_ECM, x_SM, torch.full_like(x_ECM, 7.0))
    assert dx_SM.tolist() == [[7.0, 7.0], [0.0, 0.0], [7.0, 7.0]]


def test_choices_are_summed_and_weighed_in_float32_whatever_the_experts_type(order: OrderBase) -> None:
    # In bfloat16 256 + 1 is 256, and the 1 would be lost; a weight of 1 + 2**-12 would be 1.
    for results, weights in (([256.0, 1.0, -256.0], [1.0, 1.0, 1.0]), ([2.0**12, -(2.0**12)], [1 + 2**-12, 1.0])):
        count = len(results)
        slots_KS, weights_KS = torch.arange(count).unsqueeze(1), torch.tensor(weights).unsqueeze(1)
        routing = routing_of(slots_KS, weights_KS, num_experts=count, capacity=1)
        y_SM = order.restore(torch.tensor(results, dtype=torch.bfloat16).view(count, 1, 1), routing)
        assert y_SM.dtype == torch.bfloat16
        assert y_SM.tolist() == [[1.0]]


def test_neither_autocast_nor_gaps_in_memory_change_a_number(order: OrderBase) -> None:
    x_SM, y_ECM, routing = random_case(SIZES_SMECK[0])
    x_SM, y_ECM = x_SM.float(), y_ECM.float()
    plain = order.arrange(x_SM, routing), order.restore(y_ECM, routing)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = order.arrange(x_SM, routing), order.restore(y_ECM, routing)
    apart_ECM = y_ECM.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    apart = order.arrange(x_SM.t().contiguous().t(), routing), order.restore(apart_ECM, routing)
    for found in (cast, apart):
        assert [each.dtype for each in found] == [torch.float32] * 2
        assert all(map(torch.equal, found, plain))


# ---- where slots lie is worked out once for sizes that stay, and kept in bounds where they do not


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> DeviceTables:
    """New ones, empty."""
    made = DeviceTables(limit_bytes=1000)
    monkeypatch.setattr(slot_chunks, "TABLES", made)
    return made


def copies(capacity: int) -> bool:
    """Whether a table is made for a call."""
    with Operations("cat") as making:
        CapacityChunks((0, 1, capacity)).chunked_slots(torch.zeros(3, dtype=torch.long), 2)
    return bool(making.found)


def test_a_second_call_copies_nothing_and_capacities_that_never_come_again_do_not_fill_memory(
    tables: DeviceTables,
) -> None:
    assert copies(2)
    for capacity in range(3, 60):
        assert copies(capacity)
        assert not copies(2)  # used between all the others
    kept = list(tables._tables.values())
    assert 0 < sum(each.nbytes for each in kept) == tables._num_bytes <= 1000
    # One that is larger than all that may be kept is made every time.
    assert copies(500)
    assert [*tables._tables.values()] == kept


def test_no_table_is_kept_that_only_a_tracer_could_read(tables: DeviceTables) -> None:
    with FakeTensorMode() as mode:
        slots = mode.from_tensor(torch.zeros(3, dtype=torch.long))
        assert CapacityChunks((0, 1, 2)).chunked_slots(slots, 2).shape == (3,)
    assert not tables._tables
    with torch.inference_mode():
        copies(2)
    (table,) = tables._tables.values()
    assert not table.is_inference()
