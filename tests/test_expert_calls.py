# SPDX-License-Identifier: Apache-2.0
"""The experts of a rank, alone and together, chunk by chunk: the numbers and the memory of autograd on the whole."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from functools import lru_cache

import pytest
import torch
from torch import nn

from ds_fsmoe.components.expert_compute import grouped_products
from ds_fsmoe.components.expert_compute.calls import ExpertSet
from ds_fsmoe.components.expert_compute.expert_call import ExpertCall, sizes_of_call
from ds_fsmoe.components.expert_compute.gradient_sums import GradientSums, make_contiguous
from ds_fsmoe.components.expert_compute.saved import SavedTensors
from ds_fsmoe.components.expert_compute.written_call import WrittenCall
from tests.covering import covering
from tests.expert_cases import (
    EVERY,
    EVERY_WRITTEN,
    GRAPH,
    WRITTEN,
    C,
    H,
    M,
    assert_as_autograd,
    assert_gradients,
    backward,
    bounds,
    by_autograd,
    calls_modules,
    forward,
    make_experts,
    rows,
)
from tests.live_memory import LiveMemory
from tests.samples import sampled

CUTS = ((13,), (6, 7), (5, 5, 3), (0, 12, 1), (3, 3, 3, 0, 4))
ORDERS = ("from the first", "from the last", "from the second")


def side_by_side(name: str, *args, **kwargs) -> list[nn.Module]:
    experts = make_experts(name, *args, **kwargs)
    assert make_contiguous(experts)
    return experts


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was computed for a written-out expert alone; several have a dimension more."""
    seen: list[str] = []
    for name in ("forward", "backward"):
        method = getattr(WrittenCall, name)

        def noted(call: WrittenCall, start: int, stop: int, x: torch.Tensor, *args, name=name, method=method):
            if x.ndim == 3:
                seen.append(name)
            return method(call, start, stop, x, *args)

        monkeypatch.setattr(WrittenCall, name, noted)
    return seen


EVERY_WAY = [*((each, "never") for each in (*WRITTEN, *GRAPH)), *((each, "always") for each in WRITTEN)]
"""Each kind of expert alone, and those that are written out together."""


@lru_cache
def every_cut() -> list[tuple]:
    """Each pair of values of kinds, cuts and orders of both phases, of whether the forward is run again, and of what is
    frozen: nothing, all parameters, or the one at a place."""
    return covering(EVERY_WAY, CUTS, CUTS, ORDERS, ORDERS, (False, True), ("none", "all", 0, 1, 2, 3, 4))


# ---- any cuts


@pytest.mark.parametrize(("name", "together"), EVERY_WAY)
def test_chunks_in_any_cut_and_order_have_the_numbers_of_the_whole(name: str, together: str, alone: list[str]) -> None:
    ways = [way for of, *way in every_cut() if of == (name, together)]
    for forward_sizes, backward_sizes, *orders, recompute, frozen in ways:
        experts = side_by_side(name) if together == "always" else make_experts(name)
        # Where each is by itself, the last one keeps all its gradients.
        for expert in experts if together == "always" else experts[:2]:
            for place, parameter in enumerate(expert.parameters()):
                parameter.requires_grad_(frozen not in ("all", place))
        layer = ExpertSet(experts, together=together)
        call = layer.call(True, same_chunks=forward_sizes == backward_sizes, recompute=recompute)
        alone.clear()
        assert_as_autograd(call, experts, forward_sizes, backward_sizes, *orders)
        assert together == "never" or not alone


@EVERY
def test_calls_in_flight_keep_their_own_and_may_be_walked_back_again_and_nobody_else_has_their_results(
    name: str,
) -> None:
    experts = make_experts(name)
    inputs = [(rows(2, 3, C, M, seed=seed), rows(2, 3, C, M, seed=seed + 10)) for seed in (1, 2)]
    layer = ExpertSet(experts)
    calls = [layer.call(True) for _ in inputs]
    for call, (x_NeCM, _) in zip(calls, inputs, strict=True):
        for start, stop in bounds([6, 7]):
            y_chunk = call.forward(start, stop, x_NeCM[:, :, start:stop])
            assert y_chunk.is_contiguous()
            assert not y_chunk.requires_grad
            y_chunk.fill_(torch.nan)
    for factor in (1, -2):
        for call, (x_NeCM, dy_NeCM) in zip(calls, inputs, strict=True):
            _, dx_NeCM, gradients = by_autograd(experts, x_NeCM, dy_NeCM * factor)
            for start, stop in bounds([6, 7]):
                dx_chunk = call.backward(start, stop, dy_NeCM[:, :, start:stop] * factor)
                torch.testing.assert_close(dx_chunk, dx_NeCM[:, :, start:stop], rtol=0, atol=1e-12)
                assert dx_chunk.is_contiguous()
                dx_chunk.fill_(torch.nan)
            assert_gradients(call.gradients(), gradients, atol=1e-12)


@pytest.mark.parametrize("together", ["never", "always"])
def test_a_capacity_of_zero_gives_zero_gradients(together: str) -> None:
    empty = rows(2, 3, 0, M)
    for name in (*WRITTEN, *GRAPH) if together == "never" else WRITTEN:
        experts = side_by_side(name) if together == "always" else make_experts(name)
        _, _, expected = by_autograd(experts, empty, empty)
        call = ExpertSet(experts, together=together).call(True)
        assert forward(call, empty, [0, 0]).shape == (2, 3, 0, M)
        assert backward(call, empty, [0, 0, 0], ORDERS[1]).shape == (2, 3, 0, M)
        assert_gradients(call.gradients(), expected, atol=0)
        assert all(each is None or (each == 0).all() for each in call.gradients())


@pytest.mark.parametrize("recompute", [False, True])
def test_tensors_and_weights_that_somebody_has_moved_are_used_where_they_are(recompute: bool, alone: list[str]) -> None:
    experts = side_by_side("mixtral")
    x_NeCM, dy_NeCM = rows(2, 3, C, M), rows(2, 3, C, M, seed=2)
    _, dx_NeCM, gradients = by_autograd(experts, x_NeCM, dy_NeCM)
    call = ExpertSet(experts, together="always").call(True, recompute=recompute)
    forward(call, x_NeCM, [6, 7])
    call.restore([None if each is None else each.clone() for each in call.release()])
    experts[1].w2.weight.data = experts[1].w2.weight.data.clone()
    torch.testing.assert_close(backward(call, dy_NeCM, [6, 3, 4]), dx_NeCM, rtol=0, atol=1e-12)
    assert_gradients(call.gradients(), gradients, atol=1e-12)
    assert not alone


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


def assert_bits(call: ExpertCall, x_NeCM: torch.Tensor, dy_NeCM: torch.Tensor, *expected) -> None:
    y_NeCM, dx_NeCM, gradients = expected
    assert torch.equal(call.forward(0, x_NeCM.shape[2], x_NeCM), y_NeCM)
    assert torch.equal(call.backward(0, x_NeCM.shape[2], dy_NeCM), dx_NeCM)
    for found, other in zip(call.gradients(), gradients, strict=True):
        assert (found is None and other is None) or torch.equal(found, other)


@sampled(("name", "dtype"), IN_TYPES, kept=[3 * at + at % 3 for at in range(len(IN_TYPES) // 3)], ids=str)
def test_one_chunk_has_the_bits_of_autograd_and_of_stock(name: str, dtype: torch.dtype) -> None:
    from deepspeed.moe.experts import Experts

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
            expected = by_autograd(experts, plain_NeCM, dy_NeCM)
            assert_bits(ExpertSet(experts).call(True), x_NeCM, dy_NeCM, *expected)
    # Stock keeps the dimension of experts.
    stock = Experts(make_experts(name, 1, width, hidden, dtype)[0], num_local_experts=3)
    x_NeCM, dy_NeCM = rows(2, 3, 53, width, dtype=dtype), rows(2, 3, 53, width, seed=2, dtype=dtype)
    leaf = x_NeCM.clone().requires_grad_()
    y_NeCM = stock(leaf)
    y_NeCM.backward(dy_NeCM)
    call = ExpertSet(list(stock.deepspeed_experts), keep_expert_dim=True).call(True)
    assert_bits(call, x_NeCM, dy_NeCM, y_NeCM, leaf.grad, [each.grad for each in stock.parameters()])


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

    for keep_expert_dim, recompute in itertools.product((False, True), repeat=2):
        call = ExpertSet([Looks(), Looks()], keep_expert_dim).call(True, recompute=recompute)
        assert torch.equal(call.backward(0, 5, call.forward(0, 5, rows(2, 2, 5, M))), 4 * rows(2, 2, 5, M))
    assert seen == [(2, 5, M)] * (2 + 4) + [(2, 1, 5, M)] * (2 + 4)


@pytest.mark.parametrize("name", ["gpt relu", "gpt gelu", "mixtral", "bottleneck", "three layers"])
def test_bf16_gradients_of_many_chunks_err_at_most_twice_as_much_as_those_of_one(name: str) -> None:
    slots, dtype = 16 * 16, torch.bfloat16
    exact_experts = make_experts(name, 2, 67, 131, torch.float32)
    for parameter in (each for expert in exact_experts for each in expert.parameters()):
        parameter.data = parameter.data.to(dtype).float()
    experts = [copy.deepcopy(expert).to(dtype) for expert in exact_experts]
    x_NeCM, dy_NeCM = (rows(2, 2, slots, 67, seed=seed, dtype=dtype) for seed in (1, 2))
    exact = by_autograd(exact_experts, x_NeCM.float(), dy_NeCM.float())
    plain = by_autograd(experts, x_NeCM, dy_NeCM)
    for num_chunks in (2, 5, 16):
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
    x_NeCM, dy_NeCM = rows(1, 3, 352, 32).bfloat16(), rows(1, 3, 352, 32, seed=2).bfloat16()
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


def test_the_rule_goes_by_rows_sizes_and_places(alone: list[str]) -> None:
    def num_alone(experts: list[nn.Module], slots: int, num_ranks: int = 1) -> int:
        width = next(experts[0].parameters()).shape[1]
        alone.clear()
        x_NeCM = rows(num_ranks, len(experts), slots, width, dtype=torch.float32)
        ExpertSet(experts).call(True).forward(0, slots, x_NeCM)
        return len(alone)

    fitting = side_by_side("gpt gelu", 3, 32, 64, torch.float32)
    assert [num_alone(fitting, 32), num_alone(fitting, 16, num_ranks=2)] == [0, 0]
    assert [num_alone(fitting, 33), num_alone(fitting, 17, num_ranks=2)] == [3, 3]
    assert num_alone(side_by_side("gpt gelu", 3, 33, 64, torch.float32), 5) == 3
    assert num_alone(side_by_side("mixtral", 3, 32, 65, torch.float32), 5) == 3
    assert num_alone(make_experts("gpt gelu", 3, 32, 64, torch.float32), 5) == 3
    for frozen in (fitting[1:2], fitting):  # of another structure, between the two others; and all of them
        for expert in frozen:
            expert.fc2.weight.requires_grad_(False)
        assert num_alone(fitting, 5) == 3


def test_on_a_cpu_as_many_go_together_as_have_8_megabytes_of_one_weight() -> None:
    experts = side_by_side("gpt relu", 5, 32, 32768, torch.float32)  # 4 MiB each
    for together, numbers in (("never", [1] * 5), ("auto", [2, 2, 1]), ("always", [5])):
        call = ExpertSet(experts, together=together).call(True)
        call.forward(0, 3, rows(2, 5, 3, 32, dtype=torch.float32))
        assert [run.last - run.first for run in call._runs] == numbers


def test_experts_of_other_kinds_and_activations_are_kept_apart(alone: list[str]) -> None:
    relu, gelu = side_by_side("gpt relu", 2), side_by_side("gpt gelu", 2)
    experts = [*relu, *gelu, *make_experts("mixtral", 1), *make_experts("bottleneck", 1), *side_by_side("mixtral", 2)]
    assert_as_autograd(ExpertSet(experts, together="always").call(True), experts)
    assert alone == ["forward", "forward", "backward", "backward"]


# ---- what a call keeps


def tensors_within(thing: object) -> dict[int, torch.Tensor]:
    """Storage -> a tensor on it, for all that an object holds, parameters and what they hold left out."""
    found: dict[int, torch.Tensor] = {}
    seen: set[int] = set()

    def visit(each: object) -> None:
        if id(each) in seen or isinstance(each, (nn.Module, nn.Parameter, str, int, torch.device, torch.dtype)):
            return
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            found[each.untyped_storage().data_ptr()] = each
        elif type(each).__module__.startswith("ds_fsmoe"):
            visit(vars(each))
        elif isinstance(each, (dict, list, tuple, set)):
            for one in each.values() if isinstance(each, dict) else each:
                visit(one)

    visit(thing)
    return found


@EVERY_WRITTEN
def test_no_more_is_kept_than_autograd_keeps(name: str) -> None:
    for (num_ranks, count), frozen in itertools.product(((1, 3), (2, 1), (2, 3)), ("none", "up", "down", "all")):
        experts = make_experts(name, count)
        for linear in (module for expert in experts for module in expert.modules() if isinstance(module, nn.Linear)):
            is_up = linear.out_features == H
            linear.requires_grad_(not (frozen == "all" or frozen == ("up" if is_up else "down")))
        kept: dict[int, int] = {}
        parameters = {each.untyped_storage().data_ptr() for expert in experts for each in expert.parameters()}
        leaf_NeCM = rows(num_ranks, count, C, M).requires_grad_()

        def note(tensor: torch.Tensor, kept=kept) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            results = [expert(leaf_NeCM[:, i]) for i, expert in enumerate(experts)]
        theirs = sum(nbytes for storage, nbytes in kept.items() if storage not in parameters)
        assert len(results) == count
        for sizes in ([13], [5, 5, 3]):
            call = ExpertSet(experts).call(True)
            forward(call, x_NeCM := rows(num_ranks, count, C, M), sizes)
            ours = sum(each.untyped_storage().nbytes() for each in tensors_within(call).values())
            assert 0 < ours <= theirs
            hidden = num_ranks * count * C * H * 8 * (2 if name == "mixtral" else 1)
            assert ours == hidden + (x_NeCM.nbytes if frozen in ("none", "down") else 0)


def test_without_a_backward_nothing_is_kept() -> None:
    calls, watched = [], []
    for name in (*WRITTEN, *GRAPH):
        call = ExpertSet(make_experts(name)).call(False)
        x_NeCM = rows(2, 3, C, M)
        forward(call, x_NeCM, [6, 7])
        watched.append(weakref.ref(x_NeCM))
        del x_NeCM
        assert tensors_within(call) == {}, name
        with pytest.raises(RuntimeError, match="needs_backward=False"):
            call.backward(0, 6, rows(2, 3, 6, M))
        calls.append(call)
    gc.collect()
    assert [each() for each in watched] == [None] * len(calls)


@EVERY
def test_recompute_keeps_the_rows_alone(name: str) -> None:
    experts = ExpertSet(make_experts(name))
    call = experts.call(True, recompute=True)
    x_NeCM = rows(2, 3, C, M)
    forward(call, x_NeCM, [6, 7])
    # States of random-number generators apart: they are bytes, rows are not.
    kept = [each for each in tensors_within(call).values() if each.dtype is not torch.uint8]
    memory = {each.untyped_storage().data_ptr() for each in kept}
    assert memory - {each.untyped_storage().data_ptr() for each in experts.parameters} == {
        x_NeCM.untyped_storage().data_ptr()
    }


def test_a_hook_on_a_parameter_is_not_run_by_the_call() -> None:
    """Whoever puts the gradients that it returns into autograd has it run."""
    seen: list[torch.Tensor] = []
    for name in (*WRITTEN, *GRAPH):
        experts = ExpertSet(make_experts(name))
        for parameter in experts.parameters:
            parameter.register_hook(seen.append)
        call = experts.call(True)
        backward(call, forward(call, rows(2, 3, C, M), [C]), [C])
        assert any(each is not None for each in call.gradients()) or not experts.parameters
        assert not seen, name


@pytest.mark.parametrize("order", [None, torch.tensor([4, 0, 1, 3, 2])], ids=["same chunks", "other chunks"])
def test_what_was_kept_goes_when_the_last_chunk_that_needs_it_has_read_it(order: torch.Tensor | None) -> None:
    saved, left = SavedTensors(order), []
    cuts = (0, 3), (3, 5)
    with LiveMemory() as memory:
        for start, stop in cuts:
            saved.put(start, stop, (torch.ones(stop - start, M), None))
        saved.restore(iter(saved.release()))
        for start, stop in cuts:
            left.append(memory.live)
            saved.take(start, stop)
        left.append(memory.live)
    # Chunks of other rows need those of all.
    whole, second = 5 * M * 4, 2 * M * 4
    assert left == [whole, second if order is None else whole, 0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_gradient_that_autograd_has_given_is_never_added_to_in_place(dtype: torch.dtype) -> None:
    """It may have given the same tensor to somebody else."""
    parameters = [nn.Parameter(torch.zeros(5, 7, dtype=dtype)) for _ in range(3)]
    given, own = rows(3, 5, 7, dtype=dtype), rows(3, 5, 7, seed=2, dtype=dtype)
    before = given.clone()
    for together, to_all in itertools.product((True, False), repeat=2):
        sums = GradientSums(parameters)
        for pair in [(parameters, given)] if together else zip(parameters, given, strict=True):
            sums.add(*pair)
        sums.add(*((parameters, own) if to_all else (parameters[1], own[1])))
        found = sums.take()
        for index in range(3) if to_all else (1,):
            torch.testing.assert_close(found[index], before[index] + own[index])
        assert torch.equal(given, before)


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
    call = ExpertSet(make_experts("bottleneck")).call(True, same_chunks=True)
    forward(call, rows(2, 3, C, M), [5, 5, 3])
    with pytest.raises(ValueError, match="for other chunks in the backward, pass same_chunks=False"):
        backward(call, rows(2, 3, C, M), [2, 8, 3])


@pytest.mark.parametrize("together", ["never", "always"])
def test_a_weight_changed_before_the_backward_is_refused_as_autograd_does(together: str) -> None:
    for name in WRITTEN:
        experts = side_by_side(name)
        call = ExpertSet(experts, together=together).call(True)
        forward(call, rows(2, 3, C, M), [13])
        with torch.no_grad():
            next(experts[1].parameters()).mul_(2)
        with pytest.raises(RuntimeError, match="changed in place"):
            backward(call, rows(2, 3, C, M), [13])
