# SPDX-License-Identifier: Apache-2.0
"""The experts of a rank, alone and together, chunk by chunk: the numbers and the memory of autograd on the whole."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from ds_fsmoe.components.expert_compute import grouped_products
from ds_fsmoe.components.expert_compute.calls import ExpertSet
from ds_fsmoe.components.expert_compute.expert_call import sizes_of_call
from ds_fsmoe.components.expert_compute.gradient_sums import make_contiguous
from ds_fsmoe.components.expert_compute.shards import shard_expert
from ds_fsmoe.components.expert_compute.written_call import WrittenCall
from ds_fsmoe.components.experts.mixtral import MixtralFeedForward
from tests.covering import covering
from tests.expert_cases import (
    EVERY,
    EVERY_WRITTEN,
    GRAPH,
    WRITTEN,
    C,
    M,
    assert_as_autograd,
    assert_gradients,
    backward,
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
ORDERS = ("from the first", "from the last", "from the second")


def side_by_side(name: str, *args, **kwargs) -> list[nn.Module]:
    experts = make_experts(name, *args, **kwargs)
    assert make_contiguous(experts)
    return experts


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What was computed for a written-out expert alone."""
    seen: list[str] = []
    for name in ("forward", "backward"):
        monkeypatch.setattr(WrittenCall, name, noting(seen, name, getattr(WrittenCall, name)))
    return seen


def noting(seen: list[str], name: str, method):
    def noted(call: WrittenCall, start: int, stop: int, x: torch.Tensor, *args):
        if x.ndim == 3:  # several experts have a dimension more
            seen.append(name)
        return method(call, start, stop, x, *args)

    return noted


# ---- any cuts


@pytest.mark.parametrize(
    ("name", "together"), [*((each, "never") for each in (*WRITTEN, *GRAPH)), *((each, "always") for each in WRITTEN)]
)
def test_chunks_in_any_cut_and_order_have_the_numbers_of_the_whole(name: str, together: str, alone: list[str]) -> None:
    """Frozen is none of the parameters, all, or the one at a place."""
    num_parameters = len(list(make_experts(name, 1)[0].parameters()))
    frozen = (None, "all", *range(num_parameters))
    for forward_sizes, backward_sizes, *orders, recompute, left_out in covering(
        CUTS, CUTS, ORDERS, ORDERS, (False, True), frozen
    ):
        experts = side_by_side(name) if together == "always" else make_experts(name)
        # Where each is by itself, the last one keeps all its gradients.
        for expert in experts if together == "always" else experts[:2]:
            for place, parameter in enumerate(expert.parameters()):
                parameter.requires_grad_(left_out not in ("all", place))
        layer = ExpertSet(experts, together=together)
        call = layer.call(True, same_chunks=forward_sizes == backward_sizes, recompute=recompute)
        alone.clear()
        assert_as_autograd(call, experts, forward_sizes, backward_sizes, *orders)
        assert together == "never" or not alone


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
def test_a_capacity_of_zero_gives_zero_gradients(name: str) -> None:
    empty = rows(2, 3, 0, M)
    for together in ("never", "always") if name in WRITTEN else ("never",):
        experts = side_by_side(name) if together == "always" else make_experts(name)
        _, _, expected = by_autograd(experts, empty, empty)
        for order in ORDERS[:2]:
            call = ExpertSet(experts, together=together).call(True)
            assert forward(call, empty, [0, 0]).shape == (2, 3, 0, M)
            assert backward(call, empty, [0, 0, 0], order).shape == (2, 3, 0, M)
            found = call.gradients()
            assert_gradients(found, expected, atol=0)
            assert all(each is None or (each == 0).all() for each in found)


@EVERY
def test_calls_in_flight_keep_their_own_and_may_be_walked_back_again(name: str) -> None:
    experts = make_experts(name)
    inputs = [(rows(2, 3, C, M, seed=seed), rows(2, 3, C, M, seed=seed + 10)) for seed in (1, 2)]
    layer = ExpertSet(experts)
    calls = [layer.call(True) for _ in inputs]
    for call, (x_NeCM, _) in zip(calls, inputs, strict=True):
        forward(call, x_NeCM, [6, 7])
    for factor in (1, -2):
        for call, (x_NeCM, dy_NeCM) in zip(calls, inputs, strict=True):
            _, dx_NeCM, gradients = by_autograd(experts, x_NeCM, dy_NeCM * factor)
            torch.testing.assert_close(backward(call, dy_NeCM * factor, [6, 7]), dx_NeCM, rtol=0, atol=1e-12)
            assert_gradients(call.gradients(), gradients, atol=1e-12)


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
    backward(call, dy_NeCM, [6, 7], ORDERS[1])
    assert_gradients(call.gradients(), expected, atol=1e-12)


# ---- rows

KINDS = (("gpt relu", 2), ("mixtral", 3), ("bottleneck", 1), ("gpt relu", 2))
"""Two structures together, one expert alone, and one of them again."""
SIZES = [[3, 1, 0, 4, 2, 5, 1, 2], [0, 2, 3, 1, 0, 1, 4, 0], [0] * 8, [2, 0, 5, 0, 1, 3, 0, 6]]
"""Chunk -> the rows of each expert."""


@pytest.mark.parametrize("way", ["backward", "recomputed"])
def test_runs_of_experts_of_several_structures_have_their_own_rows_in_every_chunk(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = {"products": 0}
    grouped_mm = torch.nn.functional.grouped_mm

    def counted(*args, **options) -> torch.Tensor:
        counts["products"] += 1
        return grouped_mm(*args, **options)

    monkeypatch.setattr(grouped_products.F, "grouped_mm", counted)
    experts = []
    for kind, count in KINDS:
        made = make_experts(kind, count, 8, 16, torch.float32)
        assert kind == "bottleneck" or make_contiguous(made)
        experts += made
    sizes = torch.tensor(SIZES)
    sizes_of_chunks = sizes_of_call(SIZES, sizes.cumsum(1).to(torch.int32))
    x, dy = (rows(int(sizes.sum()), 8, seed=seed, dtype=torch.float32) for seed in (1, 2))
    call = ExpertSet(experts).call(True, sizes_of_chunks, x, recompute=way == "recomputed")
    chunks = list(itertools.pairwise([0, *sizes.sum(1).cumsum(0).tolist()]))
    y = torch.cat([call.forward(start, stop, x[start:stop]) for start, stop in chunks])
    dx = torch.cat([call.backward(start, stop, dy[start:stop]) for start, stop in chunks])
    assert counts["products"] > 0, "nothing was computed together"
    # Of each row its expert: chunk by chunk, expert by expert.
    of_row = torch.arange(len(experts)).repeat(len(SIZES)).repeat_interleave(sizes.flatten())
    leaf, wanted = x.clone().requires_grad_(), torch.zeros_like(y)
    for index, expert in enumerate(experts):
        result = expert(leaf[of_row == index])
        wanted = wanted.index_put((of_row == index,), result[0] if isinstance(result, tuple) else result)
    parameters = [each for expert in experts for each in expert.parameters()]
    gradients = torch.autograd.grad(wanted, [leaf, *parameters], dy, allow_unused=True)
    for ours, theirs in zip((y, dx, *call.gradients()), (wanted.detach(), *gradients), strict=True):
        if theirs is None:
            assert ours is None
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


# ---- bits


# In the sample each kind in one type, in turns.
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
IN_TYPES = [(name, dtype) for name in (*WRITTEN, *GRAPH) for dtype in DTYPES]
WRITTEN_IN_TYPES = [(name, dtype) for name in WRITTEN for dtype in DTYPES]


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
            call = ExpertSet(experts).call(True)
            assert torch.equal(call.forward(0, slots, x_NeCM), y_NeCM)
            assert torch.equal(call.backward(0, slots, dy_NeCM), dx_NeCM)
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


@sampled(("name", "dtype"), WRITTEN_IN_TYPES, kept=[3 * at + at % 3 for at in range(len(WRITTEN))], ids=str)
def test_no_bit_changes_where_it_is_done_by_itself(name: str, dtype: torch.dtype, alone: list[str]) -> None:
    for count, num_ranks, slots in ((2, 1, 1), (3, 1, 23), (3, 2, 1), (2, 2, 23), (5, 3, 7)):
        experts = side_by_side(name, count, 96, 160, dtype)
        shape = (num_ranks, count, slots, 96)
        x_NeCM, dy_NeCM = rows(*shape, dtype=dtype), rows(*shape, seed=2, dtype=dtype)
        found = []
        for together in ("never", "auto"):
            alone.clear()
            call = ExpertSet(experts, together=together).call(True)
            y_NeCM, dx_NeCM = forward(call, x_NeCM, [slots]), backward(call, dy_NeCM, [slots])
            found.append([y_NeCM, dx_NeCM, *call.gradients()])
            assert bool(alone) is (together == "never")
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
        assert all(each.isfinite().all() and each.abs().max() > 0 for each in found[0])


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


@pytest.mark.parametrize("kind", ["gpt relu", "mixtral"])
def test_many_chunks_in_half_precision_err_no_more_than_one_by_one(kind: str) -> None:
    experts = side_by_side(kind, 3, 32, 64, torch.bfloat16)
    x_NeCM, dy_NeCM = rows(1, 3, 352, 32), rows(1, 3, 352, 32, seed=2)
    x_NeCM, dy_NeCM = x_NeCM.bfloat16(), dy_NeCM.bfloat16()
    exact = by_autograd([copy.deepcopy(each).double() for each in experts], x_NeCM.double(), dy_NeCM.double())[2]
    errors = []
    for together in ("never", "auto"):
        call = ExpertSet(experts, together=together).call(True)
        forward(call, x_NeCM, [32] * 11)
        backward(call, dy_NeCM, [32] * 11)
        errors.append([float((a.double() - b).norm() / b.norm()) for a, b in zip(call.gradients(), exact, strict=True)])
    assert all(0 < ours <= 1.1 * theirs for theirs, ours in zip(*errors, strict=True))
    # Eleven terms that are rounded, and sums of four of them.
    assert max(errors[0]) < 6e-3


# ---- whose turn it is to be computed together


def computed_alone(alone: list[str], experts: list[nn.Module], slots: int, num_ranks: int = 1) -> int:
    """How many calls of experts alone a forward makes by itself."""
    weight = next(experts[0].parameters())
    width = experts[0].w1.in_features if isinstance(experts[0], MixtralFeedForward) else experts[0].fc1.in_features
    alone.clear()
    ExpertSet(experts).call(True).forward(0, slots, rows(num_ranks, len(experts), slots, width, dtype=weight.dtype))
    return len(alone)


def test_the_rule_goes_by_rows_sizes_and_places(alone: list[str]) -> None:
    fitting = side_by_side("gpt gelu", 3, 32, 64, torch.float32)
    assert computed_alone(alone, fitting, slots=32) == 0
    assert computed_alone(alone, fitting, slots=16, num_ranks=2) == 0
    assert computed_alone(alone, fitting, slots=33) == 3
    assert computed_alone(alone, fitting, slots=17, num_ranks=2) == 3
    assert computed_alone(alone, side_by_side("gpt gelu", 3, 33, 64, torch.float32), slots=5) == 3
    assert computed_alone(alone, side_by_side("mixtral", 3, 32, 65, torch.float32), slots=5) == 3
    assert computed_alone(alone, make_experts("gpt gelu", 3, 32, 64, torch.float32), slots=5) == 3
    assert computed_alone(alone, fitting[:1], slots=5) == 1
    fitting[1].fc2.bias.requires_grad_(False)  # of another structure now, and between the two others
    assert computed_alone(alone, fitting, slots=5) == 3
    fitting[1].fc2.bias.requires_grad_(True)
    for expert in fitting:
        expert.fc2.weight.requires_grad_(False)
    assert computed_alone(alone, fitting, slots=5) == 3


def test_on_a_cpu_as_many_go_together_as_have_8_megabytes_of_one_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = side_by_side("gpt relu", 5, 32, 32768, torch.float32)  # 4 MiB each
    numbers: list[int] = []
    monkeypatch.setattr(WrittenCall, "backward", noting_number(numbers, WrittenCall.backward))
    x_NeCM, dy_NeCM = rows(2, 5, 3, 32, dtype=torch.float32), rows(2, 5, 3, 32, seed=2, dtype=torch.float32)
    found = []
    for together, expected in (("never", []), ("auto", [2, 2]), ("always", [5])):
        numbers.clear()
        call = ExpertSet(experts, together=together).call(True)
        found.append([forward(call, x_NeCM, [3]), backward(call, dy_NeCM, [3]), *call.gradients()])
        assert numbers == expected
        assert all(torch.equal(*pair) for pair in zip(found[0], found[-1], strict=True))


def noting_number(numbers: list[int], method):
    def noted(call: WrittenCall, start: int, stop: int, dy: torch.Tensor, *args):
        if dy.ndim == 4:
            numbers.append(len(dy))
        return method(call, start, stop, dy, *args)

    return noted


def test_under_autocast_experts_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WrittenCall, "forward", lambda *args: pytest.fail("together"))
    experts = side_by_side("gpt gelu", 3, 32, 64, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x_NeCM = rows(1, 3, 5, 32, dtype=torch.float32)
        y_NeCM = ExpertSet(experts, together="always").call(True).forward(0, 5, x_NeCM)
        assert torch.equal(y_NeCM, torch.stack([expert(x_NeCM[:, i]) for i, expert in enumerate(experts)], dim=1))


def test_a_hook_on_one_expert_runs_and_its_neighbours_stay_together(alone: list[str]) -> None:
    experts = side_by_side("gpt silu", 5)
    seen: list[str] = []
    experts[2].fc1.register_forward_hook(lambda module, args, y: seen.append("hook") or 2 * y)
    call = ExpertSet(experts, together="always").call(True)
    assert_as_autograd(call, experts)
    assert seen == ["hook"] * 3  # two chunks, and once in what they are compared with
    assert not alone


def test_experts_of_other_kinds_and_activations_are_kept_apart(alone: list[str]) -> None:
    relu, gelu = side_by_side("gpt relu", 2), side_by_side("gpt gelu", 2)
    experts = [*relu, *gelu, *make_experts("mixtral", 1), *make_experts("bottleneck", 1), *side_by_side("mixtral", 2)]
    assert_as_autograd(ExpertSet(experts, together="always").call(True), experts)
    assert alone == ["forward", "forward", "backward", "backward"]


@pytest.mark.parametrize("name", ["gpt gelu", "gpt relu without bias", "mixtral", "sequential silu"])
def test_shards_together_sum_to_the_experts(name: str, alone: list[str]) -> None:
    experts = make_experts(name, hidden=12)
    x_NeCM, dy_NeCM = rows(2, 3, C, M), rows(2, 3, C, M, seed=2)
    y_NeCM, dx_NeCM, _ = by_autograd(experts, x_NeCM, dy_NeCM)
    for index in range(3):
        shards = [shard_expert(expert, index, 3)[0] for expert in experts]
        assert make_contiguous(shards)
        _, _, gradients = by_autograd(shards, x_NeCM, dy_NeCM)
        call = ExpertSet(shards, together="always").call(True)
        y_NeCM = y_NeCM - forward(call, x_NeCM, [6, 7])
        dx_NeCM = dx_NeCM - backward(call, dy_NeCM, [3, 3, 7])
        assert_gradients(call.gradients(), gradients, atol=1e-12)
    assert max(float(y_NeCM.abs().max()), float(dx_NeCM.abs().max())) < 1e-12
    assert not alone


def test_kept_tensors_that_somebody_has_moved_are_used_where_they_are(alone: list[str]) -> None:
    experts = side_by_side("mixtral")
    x_NeCM, dy_NeCM = rows(2, 3, C, M), rows(2, 3, C, M, seed=2)
    _, dx_NeCM, gradients = by_autograd(experts, x_NeCM, dy_NeCM)
    for recompute in (False, True):
        call = ExpertSet(experts, together="always").call(True, recompute=recompute)
        forward(call, x_NeCM, [6, 7])
        call.restore([None if each is None else each.clone() for each in call.release()])
        torch.testing.assert_close(backward(call, dy_NeCM, [6, 3, 4]), dx_NeCM, rtol=0, atol=1e-12)
        assert_gradients(call.gradients(), gradients, atol=1e-12)
    assert not alone


def test_a_weight_that_is_moved_before_the_backward_is_found_where_it_is(alone: list[str]) -> None:
    experts = side_by_side("gpt gelu")
    call = ExpertSet(experts, together="always").call(True)
    y_NeCM = forward(call, x_NeCM := rows(2, 3, C, M), [13])
    assert not alone
    experts[1].fc2.weight.data = experts[1].fc2.weight.data.clone()
    expected, dx_NeCM, gradients = by_autograd(experts, x_NeCM, dy_NeCM := rows(2, 3, C, M, seed=2))
    torch.testing.assert_close(y_NeCM, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(backward(call, dy_NeCM, [13]), dx_NeCM, rtol=0, atol=1e-12)
    assert_gradients(call.gradients(), gradients, atol=1e-12)
    assert not alone


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


@EVERY_WRITTEN
def test_a_weight_changed_before_the_backward_is_refused_as_autograd_does(name: str) -> None:
    for together in ("never", "always"):
        experts = side_by_side(name)
        call = ExpertSet(experts, together=together).call(True)
        forward(call, rows(2, 3, C, M), [13])
        with torch.no_grad():
            next(experts[1].parameters()).mul_(2)
        with pytest.raises(RuntimeError, match="changed in place"):
            backward(call, rows(2, 3, C, M), [13])
