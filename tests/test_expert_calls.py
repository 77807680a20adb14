# SPDX-License-Identifier: Apache-2.0
"""The experts of a rank, computed chunk by chunk, against autograd on the whole capacity at once."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from ds_fsmoe.components.expert_compute.calls import ExpertSet
from tests.covering import covering, every_case
from tests.expert_cases import (
    EVERY,
    GRAPH,
    WRITTEN,
    C,
    M,
    assert_gradients,
    backward,
    backward_from_the_last,
    bounds,
    by_autograd,
    calls_modules,
    forward,
    is_written,
    make_experts,
    rows,
)
from tests.samples import sampled

CUTS = ((13,), (6, 7), (5, 5, 3), (0, 12, 1), (3, 3, 3, 0, 4))
# Forward, backward, recomputed or not, gradients of weights with those of rows or after them.
AXES = (CUTS, CUTS, (False, True), (backward, backward_from_the_last))


# ---- any cuts


@EVERY
def test_every_pair_of_cuts_gives_the_gradients_of_the_whole(name: str) -> None:
    assert_gradients_of_the_whole(name, covering(*AXES))


@pytest.mark.slow
@EVERY
def test_every_pair_of_cuts_gives_the_gradients_of_the_whole_in_every_way(name: str) -> None:
    assert_gradients_of_the_whole(name, every_case(*AXES))


def assert_gradients_of_the_whole(name: str, cases: list[tuple]) -> None:
    experts = make_experts(name)
    x_NeCM, dy_NeCM = rows(2, 3, C, M), rows(2, 3, C, M, seed=2)
    y_NeCM, dx_NeCM, gradients = by_autograd(experts, x_NeCM, dy_NeCM)
    assert dx_NeCM.norm() > 1
    layer = ExpertSet(experts)
    for forward_sizes, backward_sizes, recompute, walk in cases:
        call = layer.call(True, same_chunks=forward_sizes == backward_sizes, recompute=recompute)
        close = {"rtol": 0, "atol": 1e-12}
        torch.testing.assert_close(forward(call, x_NeCM, forward_sizes), y_NeCM, **close)
        torch.testing.assert_close(walk(call, dy_NeCM, backward_sizes), dx_NeCM, **close)
        assert_gradients(call.gradients(), gradients, atol=1e-12)


@pytest.mark.parametrize("name", ["gpt gelu", "mixtral", "bottleneck"])
def test_cuts_may_differ_although_none_were_announced_unless_graphs_are_kept(name: str) -> None:
    experts = make_experts(name)
    x_NeCM, dy_NeCM = rows(2, 3, C, M), rows(2, 3, C, M, seed=2)
    _, dx_NeCM, gradients = by_autograd(experts, x_NeCM, dy_NeCM)
    call = ExpertSet(experts).call(True, same_chunks=True)
    forward(call, x_NeCM, [5, 5, 3])
    if not is_written(ExpertSet(experts)):
        with pytest.raises(ValueError, match="for other chunks in the backward, pass same_chunks=False"):
            backward(call, dy_NeCM, [2, 8, 3])
        return
    torch.testing.assert_close(backward(call, dy_NeCM, [2, 8, 3]), dx_NeCM, rtol=0, atol=1e-12)
    assert_gradients(call.gradients(), gradients, atol=1e-12)


@EVERY
def test_chunks_may_come_in_any_order(name: str) -> None:
    experts = make_experts(name)
    x_NeCM, dy_NeCM = rows(2, 3, C, M), rows(2, 3, C, M, seed=2)
    y_NeCM, dx_NeCM, gradients = by_autograd(experts, x_NeCM, dy_NeCM)
    call = ExpertSet(experts).call(True, same_chunks=False)
    for start, stop in ((9, 13), (0, 4), (4, 9)):
        y_chunk = call.forward(start, stop, x_NeCM[:, :, start:stop])
        torch.testing.assert_close(y_chunk, y_NeCM[:, :, start:stop], rtol=0, atol=1e-12)
    for start, stop in ((2, 11), (11, 13), (0, 2)):
        dx_chunk = call.backward(start, stop, dy_NeCM[:, :, start:stop])
        torch.testing.assert_close(dx_chunk, dx_NeCM[:, :, start:stop], rtol=0, atol=1e-12)
    assert_gradients(call.gradients(), gradients, atol=1e-12)


@EVERY
def test_a_capacity_of_zero_gives_zero_gradients(name: str) -> None:
    experts = make_experts(name)
    empty = rows(2, 3, 0, M)
    _, _, expected = by_autograd(experts, empty, empty)
    for walk in (backward, backward_from_the_last):
        call = ExpertSet(experts).call(True)
        assert forward(call, empty, [0, 0]).shape == (2, 3, 0, M)
        assert walk(call, empty, [0, 0, 0]).shape == (2, 3, 0, M)
        found = call.gradients()
        assert_gradients(found, expected, atol=0)
        assert all(each is None or (each == 0).all() for each in found)


@EVERY
def test_two_calls_in_flight_keep_their_own(name: str) -> None:
    experts = make_experts(name)
    inputs = [(rows(2, 3, C, M, seed=seed), rows(2, 3, C, M, seed=seed + 10)) for seed in (1, 2)]
    layer = ExpertSet(experts)
    calls = [layer.call(True) for _ in inputs]
    for call, (x_NeCM, _) in zip(calls, inputs, strict=True):
        forward(call, x_NeCM, [6, 7])
    for call, (x_NeCM, dy_NeCM) in zip(calls, inputs, strict=True):
        _, dx_NeCM, gradients = by_autograd(experts, x_NeCM, dy_NeCM)
        torch.testing.assert_close(backward(call, dy_NeCM, [6, 7]), dx_NeCM, rtol=0, atol=1e-12)
        assert_gradients(call.gradients(), gradients, atol=1e-12)


@EVERY
def test_the_backward_may_be_walked_again(name: str) -> None:
    experts = make_experts(name)
    x_NeCM, dy_NeCM = rows(2, 3, C, M), rows(2, 3, C, M, seed=2)
    _, dx_NeCM, gradients = by_autograd(experts, x_NeCM, dy_NeCM)
    call = ExpertSet(experts).call(True)
    forward(call, x_NeCM, [6, 7])
    for factor in (1, -2):
        torch.testing.assert_close(backward(call, dy_NeCM * factor, [6, 7]), dx_NeCM * factor, rtol=0, atol=1e-12)
        expected = [None if each is None else each * factor for each in gradients]
        assert_gradients(call.gradients(), expected, atol=1e-12)


@EVERY
def test_results_are_memory_of_their_own(name: str) -> None:
    for count in (1, 3):
        experts = make_experts(name, count)
        x_NeCM, dy_NeCM = rows(2, count, C, M), rows(2, count, C, M, seed=2)
        _, dx_NeCM, gradients = by_autograd(experts, x_NeCM, dy_NeCM)
        call = ExpertSet(experts).call(True)
        for start, stop in bounds([6, 7]):
            y_chunk = call.forward(start, stop, x_NeCM[:, :, start:stop])
            assert y_chunk.is_contiguous()
            assert not y_chunk.requires_grad
            y_chunk.fill_(torch.nan)
        for start, stop in bounds([6, 7]):
            dx_chunk = call.backward(start, stop, dy_NeCM[:, :, start:stop])
            torch.testing.assert_close(dx_chunk, dx_NeCM[:, :, start:stop], rtol=0, atol=1e-12)
            assert dx_chunk.is_contiguous()
            dx_chunk.fill_(torch.nan)
        assert_gradients(call.gradients(), gradients, atol=1e-12)


def test_gradients_that_autograd_hands_out_twice_are_summed_apart() -> None:
    class TwoOffsets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Parameter(torch.ones(M).double()), nn.Parameter(torch.ones(M).double())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (self.one + self.other)

    experts = [TwoOffsets()]
    x_NeCM, dy_NeCM = rows(2, 1, C, M), rows(2, 1, C, M, seed=2)
    _, _, gradients = by_autograd(experts, x_NeCM, dy_NeCM)
    call = ExpertSet(experts).call(True)
    forward(call, x_NeCM, [5, 5, 3])
    backward(call, dy_NeCM, [5, 5, 3])
    assert_gradients(call.gradients(), gradients, atol=1e-12)


def test_experts_may_share_parameters() -> None:
    experts = make_experts("gpt gelu", 2)
    experts[1].fc1 = experts[0].fc1
    both = [*experts, make_experts("bottleneck", 1)[0]]
    both[2].outer = experts[0].fc2
    layer = ExpertSet(both)
    assert len(layer.parameters) == 4 + 2 + 5
    x_NeCM, dy_NeCM = rows(2, 3, C, M), rows(2, 3, C, M, seed=2)
    x_leaf = x_NeCM.clone().requires_grad_()
    y_NeCM = torch.stack([both[0](x_leaf[:, 0]), both[1](x_leaf[:, 1]), both[2](x_leaf[:, 2])[0]], dim=1)
    expected = torch.autograd.grad(y_NeCM, layer.parameters, dy_NeCM, allow_unused=True)
    call = layer.call(True)
    assert calls_modules(call)
    forward(call, x_NeCM, [6, 7])
    backward_from_the_last(call, dy_NeCM, [6, 7])
    assert_gradients(call.gradients(), expected, atol=1e-12)


# ---- bits


# In the sample each kind in one type, in turns.
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
IN_TYPES = [(name, dtype) for name in (*WRITTEN, *GRAPH) for dtype in DTYPES]


@sampled(("name", "dtype"), IN_TYPES, kept=[3 * at + at % 3 for at in range(len(IN_TYPES) // 3)], ids=str)
def test_one_chunk_has_the_bits_of_autograd(name: str, dtype: torch.dtype) -> None:
    width, hidden = (67, 131) if name != "linear" else (67, 67)
    # Rows from one rank or two, one expert or three, contiguous or a strided view.
    for (num_ranks, count), slots in itertools.product(((1, 1), (1, 3), (2, 1), (2, 3)), (1, 53)):
        experts = make_experts(name, count, width, hidden, dtype)
        shape = (num_ranks, count, slots, width)
        contiguous = rows(*shape, dtype=dtype), rows(*shape, seed=2, dtype=dtype)
        wider = (num_ranks, count, slots + 5, width)
        strided = rows(*wider, dtype=dtype)[:, :, 3:-2], rows(*wider, seed=2, dtype=dtype)[:, :, 3:-2]
        for x_NeCM, dy_NeCM in (contiguous, strided):
            # An only expert has contiguous rows in an unchunked layer. Otherwise the very same memory is given to both:
            # the bits of a matrix product on a CPU depend on where its operands lie.
            plain_NeCM = x_NeCM.contiguous() if count == 1 else x_NeCM
            y_NeCM, dx_NeCM, gradients = by_autograd(experts, plain_NeCM, dy_NeCM)
            for walk in (backward, backward_from_the_last):
                call = ExpertSet(experts).call(True)
                assert torch.equal(call.forward(0, slots, x_NeCM), y_NeCM)
                assert torch.equal(walk(call, dy_NeCM, [slots]), dx_NeCM)
                for found, expected in zip(call.gradients(), gradients, strict=True):
                    assert (found is None and expected is None) or torch.equal(found, expected)


@EVERY
def test_one_chunk_has_the_bits_of_stock_which_keeps_the_dimension_of_experts(name: str) -> None:
    from deepspeed.moe.experts import Experts

    width, hidden = (67, 131) if name != "linear" else (67, 67)
    torch.manual_seed(0)
    stock = Experts({**WRITTEN, **GRAPH}[name](width, hidden), num_local_experts=3)
    x_NeCM, dy_NeCM = (rows(2, 3, 53, width, seed=seed, dtype=torch.float32) for seed in (1, 2))
    leaf = x_NeCM.clone().requires_grad_()
    y_NeCM = stock(leaf)
    y_NeCM.backward(dy_NeCM)
    call = ExpertSet(list(stock.deepspeed_experts), keep_expert_dim=True).call(True)
    assert torch.equal(call.forward(0, 53, x_NeCM), y_NeCM)
    assert torch.equal(call.backward(0, 53, dy_NeCM), leaf.grad)
    for found, parameter in zip(call.gradients(), stock.parameters(), strict=True):
        assert (found is None and parameter.grad is None) or torch.equal(found, parameter.grad)


def test_a_module_sees_the_dimensions_it_is_promised() -> None:
    seen: list[torch.Size] = []

    class Looks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x.shape)
            return x * 2

    for keep_expert_dim, shape in ((False, (2, 5, M)), (True, (2, 1, 5, M))):
        seen.clear()
        layer = ExpertSet([Looks(), Looks()], keep_expert_dim)
        for recompute in (False, True):
            call = layer.call(True, recompute=recompute)
            y_NeCM = call.forward(0, 5, x_NeCM := rows(2, 2, 5, M))
            assert torch.equal(y_NeCM, x_NeCM * 2)
            assert torch.equal(call.backward(0, 5, x_NeCM), x_NeCM * 2)
        assert seen == [shape] * (2 + 4)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", ["gpt relu", "gpt gelu", "mixtral", "bottleneck", "three layers"])
def test_bf16_gradients_of_many_chunks_err_at_most_twice_as_much_as_those_of_one(name: str, count: int) -> None:
    slots, dtype = 16 * 16, torch.bfloat16
    exact_experts = make_experts(name, count, 67, 131, torch.float32)
    for parameter in (each for expert in exact_experts for each in expert.parameters()):
        parameter.data = parameter.data.to(dtype).float()
    experts = [copy.deepcopy(expert).to(dtype) for expert in exact_experts]
    x_NeCM, dy_NeCM = (rows(2, count, slots, 67, seed=seed, dtype=dtype) for seed in (1, 2))
    exact = by_autograd(exact_experts, x_NeCM.float(), dy_NeCM.float())
    plain = by_autograd(experts, x_NeCM, dy_NeCM)
    for num_chunks in (2, 3, 5, 16):
        sizes = [slots // num_chunks] * (num_chunks - 1)
        sizes.append(slots - sum(sizes))
        call = ExpertSet(experts).call(True)
        ours = forward(call, x_NeCM, sizes), backward(call, dy_NeCM, sizes), call.gradients()
        each_with_its_truth = ((*y_and_dx, *gradients) for *y_and_dx, gradients in (ours, plain, exact))
        for found, other, truth in zip(*each_with_its_truth, strict=True):
            if truth is not None:
                assert found.dtype is dtype
                assert (found.float() - truth).norm() <= 2 * (other.float() - truth).norm()


# ---- misuse


def test_wrong_shapes_and_slots_are_refused() -> None:
    call = ExpertSet(make_experts("gpt gelu")).call(True)
    with pytest.raises(ValueError, match=r"rows of slots \[0, 5\) are \(2, 3, 6, 7\): must be \[N, 3 experts, 5 slots"):
        call.forward(0, 5, rows(2, 3, 6, M))
    with pytest.raises(ValueError, match=r"\(2, 4, 5, 7\)"):
        call.forward(0, 5, rows(2, 4, 5, M))
    call.forward(0, 5, rows(2, 3, 5, M))
    with pytest.raises(ValueError, match=r"slots \[4, 6\) were saved twice"):
        call.forward(4, 6, rows(2, 3, 2, M))
    with pytest.raises(ValueError, match=r"gradients of slots \[0, 5\) are \(2, 3, 4, 7\)"):
        call.backward(0, 5, rows(2, 3, 4, M))
    with pytest.raises(ValueError, match=r"slots \[2, 8\): the forward saved only \[0, 5\)"):
        call.backward(2, 8, rows(2, 3, 6, M))
    call.backward(0, 3, rows(2, 3, 3, M))
    with pytest.raises(ValueError, match=r"slots \[2, 5\) came back twice: \[0, 3\) came before"):
        call.backward(2, 5, rows(2, 3, 3, M))
    with pytest.raises(RuntimeError, match="5 slots went through the forward and 3 through the backward"):
        call.gradients()


@pytest.mark.parametrize("keep_expert_dim", [False, True])
def test_an_expert_that_changes_the_number_of_rows_is_named(keep_expert_dim: bool) -> None:
    class Shortens(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[..., 1:, :]

    call = ExpertSet([Shortens()], keep_expert_dim).call(True)
    with pytest.raises(ValueError, match="expert Shortens returned"):
        call.forward(0, 5, rows(2, 1, 5, M))
