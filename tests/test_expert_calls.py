# SPDX-License-Identifier: Apache-2.0
"""The experts of a rank, computed chunk by chunk, against autograd on the whole capacity at once."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from ds_fsmoe import registry
from ds_fsmoe.components.cuts import Cuts
from ds_fsmoe.components.expert import ExpertArgs, ExpertBase
from ds_fsmoe.components.expert_calls import ExpertCall, expert_set
from ds_fsmoe.components.experts.gpt import GPTFeedForward
from ds_fsmoe.components.experts.mixtral import MixtralFeedForward
from ds_fsmoe.components.row_wise import check_row_wise

M, H, C = 7, 11, 13
CUTS = ([13], [6, 7], [5, 5, 3], [0, 12, 1], [3, 3, 3, 0, 4])


def sequential(activation: nn.Module, bias: bool = True, width: int = M, hidden: int = H) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden, bias=bias), activation, nn.Linear(hidden, width, bias=bias))


# Name -> expert of width M and hidden width H.
WRITTEN: dict[str, Callable[[int, int], nn.Module]] = {
    **{
        f"gpt {activation}{'' if bias else ' without bias'}": lambda m, h, a=activation, b=bias: GPTFeedForward(
            m, h, a, b
        )
        for activation in ("relu", "gelu", "silu")
        for bias in (True, False)
    },
    "mixtral": MixtralFeedForward,
    "sequential relu": lambda m, h: sequential(nn.ReLU(), width=m, hidden=h),
    "sequential relu in place": lambda m, h: sequential(nn.ReLU(inplace=True), False, m, h),
    "sequential gelu": lambda m, h: sequential(nn.GELU(), width=m, hidden=h),
    "sequential gelu tanh": lambda m, h: sequential(nn.GELU(approximate="tanh"), width=m, hidden=h),
    "sequential silu": lambda m, h: sequential(nn.SiLU(), False, m, h),
}


class Bottleneck(nn.Module):
    """An expert nobody has written out: a normalisation, a parameter that is not used, a tuple as its result."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, hidden)
        self.unused = nn.Parameter(torch.ones(3))
        self.outer = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + self.outer(torch.tanh(self.inner(self.norm(x)))), self.outer.bias


GRAPH: dict[str, Callable[[int, int], nn.Module]] = {
    "bottleneck": Bottleneck,
    "identity": lambda m, h: nn.Identity(),
    "linear": lambda m, h: nn.Linear(m, m),
    "three layers": lambda m, h: nn.Sequential(nn.Linear(m, h), nn.Tanh(), nn.Linear(h, m)),
}
EVERY = pytest.mark.parametrize("name", [*WRITTEN, *GRAPH])
EVERY_WRITTEN = pytest.mark.parametrize("name", WRITTEN)


def make_experts(name: str, count: int = 3, width: int = M, hidden: int = H, dtype=torch.float64) -> list[nn.Module]:
    torch.manual_seed(3)
    make = {**WRITTEN, **GRAPH}[name]
    return [make(width, hidden).to(dtype) for _ in range(count)]


def rows(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def bounds(sizes: Sequence[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))


def by_autograd(
    experts: Sequence[nn.Module], x_NeCM: torch.Tensor, dy_NeCM: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor | None]]:
    """Results, gradient of the rows, gradients of the parameters, of the experts called on the whole capacity."""
    x_NeCM = x_NeCM.detach().requires_grad_()
    results = [expert(x_NeCM[:, i]) for i, expert in enumerate(experts)]
    y_NeCM = torch.stack([each[0] if isinstance(each, tuple) else each for each in results], dim=1)
    parameters = [each for expert in experts for each in expert.parameters() if each.requires_grad]
    dx_NeCM, *gradients = torch.autograd.grad(y_NeCM, [x_NeCM, *parameters], dy_NeCM, allow_unused=True)
    by_parameter = dict(zip(parameters, gradients, strict=True))
    return y_NeCM.detach(), dx_NeCM, [by_parameter.get(each) for expert in experts for each in expert.parameters()]


def forward(call: ExpertCall, x_NeCM: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    return torch.cat([call.forward(a, b, x_NeCM[:, :, a:b]) for a, b in bounds(sizes)], dim=2)


def backward(call: ExpertCall, dy_NeCM: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    return torch.cat([call.backward(a, b, dy_NeCM[:, :, a:b]) for a, b in bounds(sizes)], dim=2)


def backward_split(call: ExpertCall, dy_NeCM: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """All gradients of rows first, then those of weights, last cut first."""
    cuts = bounds(sizes)
    dx_NeCM = torch.cat([call.backward_dx(a, b, dy_NeCM[:, :, a:b]) for a, b in cuts], dim=2)
    for start, stop in reversed(cuts):
        call.backward_dw(start, stop)
    return dx_NeCM


def assert_gradients(
    found: Iterable[torch.Tensor | None], expected: Iterable[torch.Tensor | None], atol: float
) -> None:
    for one, other in zip(found, expected, strict=True):
        if other is None:
            assert one is None
        else:
            torch.testing.assert_close(one, other, rtol=0, atol=atol)


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
        elif isinstance(each, dict):
            for one in each.values():
                visit(one)
        elif isinstance(each, (list, tuple, set)):
            for one in each:
                visit(one)
        elif type(each).__module__.startswith("ds_fsmoe"):
            visit(vars(each))

    visit(thing)
    return found


# ---- any cuts


@EVERY
def test_every_pair_of_cuts_gives_the_gradients_of_the_whole(name: str) -> None:
    experts = make_experts(name)
    x_NeCM, dy_NeCM = rows(2, 3, C, M), rows(2, 3, C, M, seed=2)
    y_NeCM, dx_NeCM, gradients = by_autograd(experts, x_NeCM, dy_NeCM)
    assert dx_NeCM.norm() > 1
    layer = expert_set(experts)
    for forward_sizes, backward_sizes in itertools.product(CUTS, CUTS):
        for recompute, walk in itertools.product((False, True), (backward, backward_split)):
            same_cuts = forward_sizes == backward_sizes
            call = layer.call(True, same_cuts=same_cuts, recompute=recompute)
            close = {"rtol": 0, "atol": 1e-12}
            torch.testing.assert_close(forward(call, x_NeCM, forward_sizes), y_NeCM, **close)
            torch.testing.assert_close(walk(call, dy_NeCM, backward_sizes), dx_NeCM, **close)
            assert_gradients(call.gradients(), gradients, atol=1e-12)


@pytest.mark.parametrize("name", ["gpt gelu", "mixtral", "bottleneck"])
def test_cuts_may_differ_although_none_were_announced(name: str) -> None:
    experts = make_experts(name)
    x_NeCM, dy_NeCM = rows(2, 3, C, M), rows(2, 3, C, M, seed=2)
    _, dx_NeCM, gradients = by_autograd(experts, x_NeCM, dy_NeCM)
    call = expert_set(experts).call(True, same_cuts=True)
    forward(call, x_NeCM, [5, 5, 3])
    torch.testing.assert_close(backward(call, dy_NeCM, [2, 8, 3]), dx_NeCM, rtol=0, atol=1e-12)
    assert_gradients(call.gradients(), gradients, atol=1e-12)


@EVERY
def test_chunks_may_come_in_any_order(name: str) -> None:
    experts = make_experts(name)
    x_NeCM, dy_NeCM = rows(2, 3, C, M), rows(2, 3, C, M, seed=2)
    y_NeCM, dx_NeCM, gradients = by_autograd(experts, x_NeCM, dy_NeCM)
    call = expert_set(experts).call(True, same_cuts=False)
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
    for walk in (backward, backward_split):
        call = expert_set(experts).call(True)
        assert forward(call, empty, [0, 0]).shape == (2, 3, 0, M)
        assert walk(call, empty, [0, 0, 0]).shape == (2, 3, 0, M)
        found = call.gradients()
        assert_gradients(found, expected, atol=0)
        assert all(each is None or (each == 0).all() for each in found)


@EVERY
def test_two_calls_in_flight_keep_their_own(name: str) -> None:
    experts = make_experts(name)
    inputs = [(rows(2, 3, C, M, seed=seed), rows(2, 3, C, M, seed=seed + 10)) for seed in (1, 2)]
    layer = expert_set(experts)
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
    call = expert_set(experts).call(True)
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
        call = expert_set(experts).call(True)
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
    call = expert_set(experts).call(True)
    forward(call, x_NeCM, [5, 5, 3])
    backward(call, dy_NeCM, [5, 5, 3])
    assert_gradients(call.gradients(), gradients, atol=1e-12)


def test_experts_may_share_parameters() -> None:
    experts = make_experts("gpt gelu", 2)
    experts[1].fc1 = experts[0].fc1
    both = [*experts, make_experts("bottleneck", 1)[0]]
    both[2].outer = experts[0].fc2
    layer = expert_set(both)
    assert len(layer.parameters) == 4 + 2 + 5
    x_NeCM, dy_NeCM = rows(2, 3, C, M), rows(2, 3, C, M, seed=2)
    x_leaf = x_NeCM.clone().requires_grad_()
    y_NeCM = torch.stack([both[0](x_leaf[:, 0]), both[1](x_leaf[:, 1]), both[2](x_leaf[:, 2])[0]], dim=1)
    expected = torch.autograd.grad(y_NeCM, layer.parameters, dy_NeCM, allow_unused=True)
    call = layer.call(True)
    assert not call.splits
    forward(call, x_NeCM, [6, 7])
    backward_split(call, dy_NeCM, [6, 7])
    assert_gradients(call.gradients(), expected, atol=1e-12)


# ---- bits


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@EVERY
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
            for walk in (backward, backward_split):
                call = expert_set(experts).call(True)
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
    call = expert_set(list(stock.deepspeed_experts), keep_expert_dim=True).call(True)
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
        layer = expert_set([Looks(), Looks()], keep_expert_dim)
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
        call = expert_set(experts).call(True)
        ours = forward(call, x_NeCM, sizes), backward(call, dy_NeCM, sizes), call.gradients()
        each_with_its_truth = ((*y_and_dx, *gradients) for *y_and_dx, gradients in (ours, plain, exact))
        for found, other, truth in zip(*each_with_its_truth, strict=True):
            if truth is not None:
                assert found.dtype is dtype
                assert (found.float() - truth).norm() <= 2 * (other.float() - truth).norm()


# ---- what is kept


def bytes_kept_by_autograd(experts: Sequence[nn.Module], x_NeCM: torch.Tensor) -> int:
    kept: dict[int, int] = {}
    parameters = {each.untyped_storage().data_ptr() for expert in experts for each in expert.parameters()}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        results = [expert(x_NeCM.requires_grad_()[:, i]) for i, expert in enumerate(experts)]
    assert len(results) == len(experts)
    return sum(kept.values())


@pytest.mark.parametrize("frozen", ["none", "up", "down", "all"])
@pytest.mark.parametrize("shape", [(1, 3), (2, 1), (2, 3)], ids=str)
@EVERY_WRITTEN
def test_no_more_is_kept_than_autograd_keeps(name: str, shape: tuple[int, int], frozen: str) -> None:
    num_ranks, count = shape
    experts = make_experts(name, count)
    for expert in experts:
        linears = [module for module in expert.modules() if isinstance(module, nn.Linear)]
        for linear in linears:
            is_up = linear.out_features == H
            linear.requires_grad_(not (frozen == "all" or frozen == ("up" if is_up else "down")))
    theirs = bytes_kept_by_autograd(experts, rows(num_ranks, count, C, M))
    for sizes in ([13], [5, 5, 3]):
        call = expert_set(experts).call(True)
        forward(call, x_NeCM := rows(num_ranks, count, C, M), sizes)
        ours = sum(each.untyped_storage().nbytes() for each in tensors_within(call).values())
        assert 0 < ours <= theirs
        hidden = num_ranks * count * C * H * 8 * (2 if name == "mixtral" else 1)
        assert ours == hidden + (x_NeCM.nbytes if frozen in ("none", "down") else 0)


@EVERY
def test_without_a_backward_nothing_is_kept(name: str) -> None:
    call = expert_set(make_experts(name)).call(False)
    x_NeCM = rows(2, 3, C, M)
    forward(call, x_NeCM, [6, 7])
    watched = weakref.ref(x_NeCM)
    del x_NeCM
    gc.collect()
    assert watched() is None
    assert tensors_within(call) == {}
    with pytest.raises(RuntimeError, match="needs_backward=False"):
        call.backward(0, 6, rows(2, 3, 6, M))


@EVERY
def test_recompute_keeps_the_rows_alone(name: str) -> None:
    experts = expert_set(make_experts(name))
    call = experts.call(True, recompute=True)
    x_NeCM = rows(2, 3, C, M)
    forward(call, x_NeCM, [6, 7])
    # States of random-number generators apart: they are bytes, rows are not.
    kept = [each for each in tensors_within(call).values() if each.dtype is not torch.uint8]
    memory = {each.untyped_storage().data_ptr() for each in kept}
    assert memory - {each.untyped_storage().data_ptr() for each in experts.parameters} == {
        x_NeCM.untyped_storage().data_ptr()
    }


@EVERY
def test_a_hook_on_a_parameter_runs_once_on_what_the_call_returns(name: str) -> None:
    """That is, not here: whoever puts the gradients into autograd has it run."""
    experts = expert_set(make_experts(name))
    seen: list[torch.Tensor] = []
    for parameter in experts.parameters:
        if parameter.requires_grad:
            parameter.register_hook(seen.append)
    call = experts.call(True)
    forward(call, rows(2, 3, C, M), [C])
    call.backward(0, C, rows(2, 3, C, M))
    assert any(each is not None for each in call.gradients()) or not experts.parameters
    assert not seen


def test_announcing_other_cuts_keeps_no_graph() -> None:
    experts = make_experts("bottleneck")
    for same_cuts in (True, False):
        call = expert_set(experts).call(True, same_cuts=same_cuts)
        forward(call, rows(2, 3, C, M), [6, 7])
        graphs = [each for each in tensors_within(call).values() if each.grad_fn is not None]
        assert bool(graphs) is same_cuts


def test_cuts_are_read_without_copying_where_they_can_be() -> None:
    cuts = Cuts()
    parts = rows(2, 13, 5).split([6, 0, 7], dim=1)
    for (start, stop), part in zip(bounds([6, 0, 7]), parts, strict=True):
        cuts.put(start, stop, (part.contiguous(), None))
    inside, across = ((0, 6), (2, 5), (6, 13), (8, 9)), ((5, 7), (0, 13))
    for start, stop in (*inside, *across):
        found, nothing = cuts.take(start, stop)
        assert nothing is None
        assert torch.equal(found, rows(2, 13, 5)[:, start:stop])
        sources = {tensor.untyped_storage().data_ptr() for _, _, (tensor, _) in cuts._pieces}
        assert (found.untyped_storage().data_ptr() in sources) is ((start, stop) in inside)
    assert cuts.take(6, 6)[0].shape == (2, 0, 5)
    with pytest.raises(ValueError, match=r"slots \[5, 14\): only \[0, 6\), \[6, 6\), \[6, 13\) came through"):
        cuts.take(5, 14)
    with pytest.raises(ValueError, match=r"slots \[4, 7\) were given twice: \[0, 6\) came before"):
        cuts.put(4, 7, (None, None))
    gap = Cuts()
    gap.put(0, 3, (torch.zeros(2, 3),))
    gap.put(5, 8, (torch.zeros(2, 3),))
    with pytest.raises(ValueError, match=r"slots \[2, 7\): only \[0, 3\), \[5, 8\) came through"):
        gap.take(2, 7)
    with pytest.raises(ValueError, match="nothing has come through the forward yet"):
        Cuts().take(0, 1)


# ---- parameters


@EVERY
def test_frozen_parameters_get_no_gradient_and_the_others_keep_theirs(name: str) -> None:
    x_NeCM, dy_NeCM = rows(2, 3, C, M), rows(2, 3, C, M, seed=2)
    num_parameters = len(list(make_experts(name, 1)[0].parameters()))
    for frozen in range(num_parameters + 1):  # each alone, then all
        experts = make_experts(name)
        for expert in experts[:2]:
            for position, parameter in enumerate(expert.parameters()):
                parameter.requires_grad_(position != frozen and frozen != num_parameters)
        y_NeCM, dx_NeCM, gradients = by_autograd(experts, x_NeCM, dy_NeCM)
        for walk in (backward, backward_split):
            call = expert_set(experts).call(True)
            torch.testing.assert_close(forward(call, x_NeCM, [6, 7]), y_NeCM, rtol=0, atol=1e-12)
            torch.testing.assert_close(walk(call, dy_NeCM, [3, 10]), dx_NeCM, rtol=0, atol=1e-12)
            assert_gradients(call.gradients(), gradients, atol=1e-12)


def test_the_set_lists_every_parameter_in_order_and_owns_none() -> None:
    experts = [*make_experts("gpt gelu", 2), *make_experts("identity", 1), *make_experts("bottleneck", 1)]
    experts[0].fc1.weight.requires_grad_(False)
    layer = expert_set(experts)
    expected = [each for expert in experts for each in expert.parameters()]
    assert [*map(id, layer.parameters)] == [*map(id, expected)]
    assert not isinstance(layer, nn.Module)


def test_parameters_replaced_after_the_set_was_made_are_refused() -> None:
    experts = make_experts("gpt gelu")
    layer = expert_set(experts)
    experts[1].fc1.weight = nn.Parameter(experts[1].fc1.weight.detach().clone())
    with pytest.raises(RuntimeError, match="replaced after expert_set"):
        layer.call(True)
    with pytest.raises(ValueError, match="at least one expert"):
        expert_set([])


@EVERY_WRITTEN
def test_a_weight_changed_before_the_backward_is_refused_as_autograd_does(name: str) -> None:
    experts = make_experts(name)
    call = expert_set(experts).call(True)
    forward(call, rows(2, 3, C, M), [13])
    with torch.no_grad():
        next(experts[1].parameters()).mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        backward(call, rows(2, 3, C, M), [13])


# ---- which way an expert is computed


@EVERY_WRITTEN
def test_weight_gradients_of_written_experts_are_left_for_later(name: str) -> None:
    experts = make_experts(name)
    layer = expert_set(experts)
    assert layer.splits
    call = layer.call(True)
    assert call.splits
    x_NeCM = rows(2, 3, C, M)
    forward(call, x_NeCM, [13])
    call.backward_dx(0, 13, x_NeCM)
    with pytest.raises(RuntimeError, match=r"backward_dw of \[\(0, 13\)\] is missing"):
        call.gradients()
    call.backward_dw(0, 13)
    assert all((each != 0).any() for each in call.gradients())


@pytest.mark.parametrize("name", GRAPH)
def test_other_experts_do_not_split(name: str) -> None:
    layer = expert_set([*make_experts("gpt gelu", 2), *make_experts(name, 1)])
    assert not layer.splits
    assert not layer.call(True).splits


HOOKS: dict[str, Callable[[nn.Module, list[str]], object]] = {
    "forward": lambda module, seen: module.register_forward_hook(lambda m, args, out: seen.append("hook")),
    "forward pre": lambda module, seen: module.register_forward_pre_hook(lambda m, args: seen.append("hook")),
    "backward": lambda module, seen: module.register_full_backward_hook(lambda m, dx, dy: seen.append("hook")),
    "backward pre": lambda module, seen: module.register_full_backward_pre_hook(lambda m, dy: seen.append("hook")),
}


@pytest.mark.parametrize("on_submodule", [False, True], ids=["expert", "layer of an expert"])
@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("name", ["gpt relu", "mixtral", "sequential gelu"])
def test_hooks_run_once_for_each_chunk(name: str, kind: str, on_submodule: bool) -> None:
    experts = make_experts(name)
    x_NeCM, dy_NeCM = rows(2, 3, C, M), rows(2, 3, C, M, seed=2)
    _, dx_NeCM, gradients = by_autograd(experts, x_NeCM, dy_NeCM)
    layer = expert_set(experts)
    assert layer.splits
    seen: list[str] = []
    handle = HOOKS[kind](next(iter(experts[1].children())) if on_submodule else experts[1], seen)
    assert not layer.splits
    call = layer.call(True)
    forward(call, x_NeCM, [5, 5, 3])
    torch.testing.assert_close(backward(call, dy_NeCM, [5, 5, 3]), dx_NeCM, rtol=0, atol=1e-12)
    assert_gradients(call.gradients(), gradients, atol=1e-12)
    assert seen == ["hook"] * 3
    handle.remove()
    assert layer.splits


def test_hooks_for_all_modules_run() -> None:
    layer = expert_set(make_experts("gpt relu"))
    seen: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, out: seen.append(type(m).__name__))
    try:
        call = layer.call(True)
        forward(call, rows(2, 3, C, M), [13])
    finally:
        handle.remove()
    assert seen == ["Linear", "Linear", "GPTFeedForward"] * 3
    assert layer.splits


def test_a_hook_may_replace_what_an_expert_returns() -> None:
    experts = make_experts("gpt relu")
    experts[2].register_forward_hook(lambda module, args, output: output * 3)
    x_NeCM, dy_NeCM = rows(2, 3, C, M), rows(2, 3, C, M, seed=2)
    y_NeCM, dx_NeCM, gradients = by_autograd(experts, x_NeCM, dy_NeCM)
    call = expert_set(experts).call(True, same_cuts=False)
    torch.testing.assert_close(forward(call, x_NeCM, [6, 7]), y_NeCM, rtol=0, atol=1e-12)
    torch.testing.assert_close(backward(call, dy_NeCM, [3, 10]), dx_NeCM, rtol=0, atol=1e-12)
    assert_gradients(call.gradients(), gradients, atol=1e-12)


def triple_forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return 3 * self.fc2(torch.relu(self.fc1(x)))


class OtherComputation(GPTFeedForward):
    def do_experts(self, args: ExpertArgs) -> torch.Tensor:
        return 3 * super().do_experts(args)


class OtherForward(GPTFeedForward):
    forward = triple_forward


class MyLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 3 * super().forward(x)


def with_own_linear() -> nn.Module:
    expert = GPTFeedForward(M, H)
    expert.fc2 = MyLinear(H, M)
    return expert


def with_patched_forward() -> nn.Module:
    expert = GPTFeedForward(M, H, "relu")
    expert.forward = triple_forward.__get__(expert)
    return expert


def with_new_activation() -> nn.Module:
    from ds_fsmoe.components.experts import gpt

    expert = GPTFeedForward(M, H)
    expert.activation = "cube"
    gpt.ACTIVATIONS.setdefault("cube", lambda x: x**3)
    return expert


def parametrised() -> nn.Module:
    expert = GPTFeedForward(M, H)
    nn.utils.parametrizations.weight_norm(expert.fc1)
    return expert


def pruned() -> nn.Module:
    expert = GPTFeedForward(M, H)
    prune.l1_unstructured(expert.fc1, "weight", 0.5)
    return expert


NOT_WHAT_THEY_SEEM: dict[str, Callable[[], nn.Module]] = {
    "subclass with its own do_experts": lambda: OtherComputation(M, H),
    "subclass with its own forward": lambda: OtherForward(M, H),
    "subclass of a linear layer": with_own_linear,
    "forward set on the object": with_patched_forward,
    "activation of the user's": with_new_activation,
    "parametrised": parametrised,
    "pruned": pruned,
    "subclass of nn.Sequential": lambda: type("Mine", (nn.Sequential,), {})(*sequential(nn.ReLU())),
    "four layers": lambda: nn.Sequential(*sequential(nn.ReLU()), nn.Dropout(0.0)),
    "activation not known": lambda: sequential(nn.Softplus()),
    "subclass of an activation": lambda: sequential(type("MyReLU", (nn.ReLU,), {"forward": lambda s, x: x * 2})()),
    "one weight twice": lambda: tied(),
}


def tied() -> nn.Module:
    expert = GPTFeedForward(M, M)
    expert.fc2.weight = expert.fc1.weight
    return expert


@pytest.mark.parametrize("kind", NOT_WHAT_THEY_SEEM)
def test_what_is_not_exactly_a_known_expert_goes_through_autograd(kind: str) -> None:
    torch.manual_seed(4)
    experts = [NOT_WHAT_THEY_SEEM[kind]().double() for _ in range(2)]
    x_NeCM, dy_NeCM = rows(2, 2, C, M), rows(2, 2, C, M, seed=2)
    y_NeCM, dx_NeCM, gradients = by_autograd(experts, x_NeCM, dy_NeCM)
    layer = expert_set(experts)
    assert not layer.splits
    call = layer.call(True, same_cuts=False)
    torch.testing.assert_close(forward(call, x_NeCM, [6, 7]), y_NeCM, rtol=0, atol=1e-12)
    torch.testing.assert_close(backward(call, dy_NeCM, [3, 10]), dx_NeCM, rtol=0, atol=1e-12)
    assert_gradients(call.gradients(), gradients, atol=1e-12)


def test_a_subclass_that_computes_the_same_is_still_written_out() -> None:
    assert expert_set([type("Named", (GPTFeedForward,), {"note": "mine"})(M, H)]).splits


def test_every_registered_expert_is_written_out() -> None:
    assert "gpt" in registry.known("expert")
    for name in ("gpt", "mixtral"):
        assert expert_set([registry.lookup("expert", name)(M, H)]).splits


def test_a_plain_expert_need_not_be_written_out() -> None:
    class Scale(ExpertBase):
        def do_experts(self, args: ExpertArgs) -> torch.Tensor:
            return args.tokens * 2

    assert Scale().written() is None
    assert not expert_set([Scale()]).splits


# ---- what surrounds a call


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("keep_in_region", [False, True], ids=["backward after", "backward inside"])
@pytest.mark.parametrize("name", ["gpt gelu", "mixtral", "bottleneck"])
def test_under_autocast_results_and_gradients_are_autograd_s(name: str, keep_in_region: bool, recompute: bool) -> None:
    experts = make_experts(name, dtype=torch.float32)
    x_NeCM, dy_NeCM = rows(2, 3, C, M, dtype=torch.float32), rows(2, 3, C, M, seed=2, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        leaf = x_NeCM.clone().requires_grad_()
        results = [expert(leaf[:, i]) for i, expert in enumerate(experts)]
        y_NeCM = torch.stack([each[0] if isinstance(each, tuple) else each for each in results], dim=1)
    parameters = [each for expert in experts for each in expert.parameters()]
    expected = torch.autograd.grad(y_NeCM, [leaf, *parameters], dy_NeCM.to(y_NeCM.dtype), allow_unused=True)
    assert name == "bottleneck" or y_NeCM.dtype is torch.bfloat16

    with torch.autocast("cpu", dtype=torch.bfloat16):
        call = expert_set(experts).call(True, recompute=recompute)
        assert not call.splits
        assert torch.equal(call.forward(0, C, x_NeCM), y_NeCM)
        if keep_in_region:
            dx_NeCM = call.backward(0, C, dy_NeCM.to(y_NeCM.dtype))
    if not keep_in_region:
        dx_NeCM = call.backward(0, C, dy_NeCM.to(y_NeCM.dtype))
    for found, other in zip([dx_NeCM, *call.gradients()], expected, strict=True):
        assert (found is None and other is None) or torch.equal(found, other)


def test_a_backward_inside_autocast_of_a_forward_outside_is_not_cast() -> None:
    for name in ("gpt gelu", "bottleneck"):
        experts = make_experts(name, dtype=torch.float32)
        x_NeCM, dy_NeCM = rows(2, 3, C, M, dtype=torch.float32), rows(2, 3, C, M, seed=2, dtype=torch.float32)
        y_NeCM, dx_NeCM, gradients = by_autograd(experts, x_NeCM, dy_NeCM)
        call = expert_set(experts).call(True, recompute=True)
        assert torch.equal(call.forward(0, C, x_NeCM), y_NeCM)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(call.backward(0, C, dy_NeCM), dx_NeCM)
        assert_gradients(call.gradients(), gradients, atol=0)


def test_a_call_without_backward_under_autocast_leaves_later_gradients_alone() -> None:
    experts = make_experts("bottleneck", dtype=torch.float32)
    layer, x_NeCM = expert_set(experts), rows(2, 3, C, M, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        forward(layer.call(False), x_NeCM, [C])
        call = layer.call(True)
        forward(call, x_NeCM, [C])
    backward(call, x_NeCM, [C])
    by_parameter = dict(zip(layer.parameters, call.gradients(), strict=True))
    assert all(by_parameter[expert.inner.weight] is not None for expert in experts)


def dropout_experts() -> list[nn.Module]:
    torch.manual_seed(4)
    return [nn.Sequential(nn.Linear(M, H), nn.Dropout(0.5), nn.Linear(H, M)).double() for _ in range(3)]


@pytest.mark.parametrize("recompute", [False, True])
def test_dropout_with_equal_cuts_is_that_of_autograd_with_the_same_seed(recompute: bool) -> None:
    experts = dropout_experts()
    layer = expert_set(experts)
    x_NeCM, dy_NeCM = rows(2, 3, C, M), rows(2, 3, C, M, seed=2)
    torch.manual_seed(9)
    leaf = x_NeCM.clone().requires_grad_()
    chunks = [
        torch.stack([expert(leaf[:, i, start:stop]) for i, expert in enumerate(experts)], dim=1)
        for start, stop in bounds([5, 5, 3])
    ]
    expected = torch.autograd.grad(torch.cat(chunks, dim=2), [leaf, *layer.parameters], dy_NeCM)
    after = torch.rand(3)

    torch.manual_seed(9)
    call = layer.call(True, recompute=recompute)
    assert torch.equal(forward(call, x_NeCM, [5, 5, 3]), torch.cat(chunks, dim=2))
    assert torch.equal(torch.rand(3), after)
    before = torch.get_rng_state()
    torch.testing.assert_close(backward(call, dy_NeCM, [5, 5, 3]), expected[0], rtol=0, atol=1e-12)
    assert torch.equal(torch.get_rng_state(), before)
    assert_gradients(call.gradients(), expected[1:], atol=1e-12)


def test_an_expert_in_eval_mode_draws_nothing_and_a_graph_is_right_there_too() -> None:
    experts = [expert.eval() for expert in dropout_experts()]
    x_NeCM, dy_NeCM = rows(2, 3, C, M), rows(2, 3, C, M, seed=2)
    y_NeCM, dx_NeCM, gradients = by_autograd(experts, x_NeCM, dy_NeCM)
    call = expert_set(experts).call(True, same_cuts=False)
    torch.testing.assert_close(forward(call, x_NeCM, [6, 7]), y_NeCM, rtol=0, atol=1e-12)
    torch.testing.assert_close(backward(call, dy_NeCM, [3, 10]), dx_NeCM, rtol=0, atol=1e-12)
    assert_gradients(call.gradients(), gradients, atol=1e-12)


def test_nothing_is_recorded_for_a_caller_with_grad_enabled() -> None:
    for name in ("gpt gelu", "bottleneck"):
        x_NeCM = rows(2, 3, C, M).requires_grad_()
        call = expert_set(make_experts(name)).call(True)
        y_NeCM = forward(call, x_NeCM, [6, 7])
        dx_NeCM = backward(call, y_NeCM, [6, 7])
        assert not y_NeCM.requires_grad
        assert not dx_NeCM.requires_grad
        assert not any(each is not None and each.requires_grad for each in call.gradients())


def test_a_result_that_depends_on_nothing_has_zero_gradients_of_rows_and_none_of_weights() -> None:
    class Constant(nn.Module):
        def __init__(self, of_weight: bool) -> None:
            super().__init__()
            self.weight, self.of_weight = nn.Parameter(torch.ones(M).double()), of_weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.weight if self.of_weight else self.weight.detach()).expand(x.shape)

    call = expert_set([Constant(False), Constant(True)]).call(True)
    dy_NeCM = rows(2, 2, C, M)
    assert (forward(call, rows(2, 2, C, M), [6, 7]) == 1).all()
    assert (backward(call, dy_NeCM, [6, 7]) == 0).all()
    none, gradient = call.gradients()
    assert none is None
    torch.testing.assert_close(gradient, dy_NeCM[:, 1].sum(dim=(0, 1)), rtol=0, atol=1e-12)


# ---- misuse


def test_wrong_shapes_and_slots_are_refused() -> None:
    call = expert_set(make_experts("gpt gelu")).call(True)
    with pytest.raises(ValueError, match=r"rows of slots \[0, 5\) are \(2, 3, 6, 7\): must be \[N, 3 experts, 5 slots"):
        call.forward(0, 5, rows(2, 3, 6, M))
    with pytest.raises(ValueError, match=r"\(2, 4, 5, 7\)"):
        call.forward(0, 5, rows(2, 4, 5, M))
    call.forward(0, 5, rows(2, 3, 5, M))
    with pytest.raises(ValueError, match=r"slots \[4, 6\) were given twice"):
        call.forward(4, 6, rows(2, 3, 2, M))
    with pytest.raises(ValueError, match=r"gradients of slots \[0, 5\) are \(2, 3, 4, 7\)"):
        call.backward(0, 5, rows(2, 3, 4, M))
    with pytest.raises(ValueError, match=r"slots \[2, 8\): only \[0, 5\) came through"):
        call.backward(2, 8, rows(2, 3, 6, M))
    call.backward(0, 3, rows(2, 3, 3, M))
    with pytest.raises(ValueError, match=r"slots \[2, 5\) came back twice: \[0, 3\) came before"):
        call.backward(2, 5, rows(2, 3, 3, M))
    with pytest.raises(RuntimeError, match="5 slots went through the forward and 3 through the backward"):
        call.gradients()
    with pytest.raises(RuntimeError, match="without a backward_dx of the same cut"):
        call.backward_dw(3, 5)


@pytest.mark.parametrize("keep_expert_dim", [False, True])
def test_an_expert_that_changes_the_number_of_rows_is_named(keep_expert_dim: bool) -> None:
    class Shortens(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[..., 1:, :]

    call = expert_set([Shortens()], keep_expert_dim).call(True)
    with pytest.raises(ValueError, match="expert Shortens made"):
        call.forward(0, 5, rows(2, 1, 5, M))


# ---- the law


class CentersRows(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(dim=-2, keepdim=True)


class LooksBack(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.roll(x, 1, dims=-2)


class MixesRanks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x.flip(0)


class AddsPlace(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(x.shape[-2], dtype=x.dtype).unsqueeze(-1)


class Widens(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x], dim=-1)


class DropsRows(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x[:, :-1], None


class NormalisesOverRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(M)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.reshape(-1, M)).view(x.shape)


@pytest.mark.parametrize("keep_expert_dim", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "expert", [CentersRows, LooksBack, MixesRanks, AddsPlace, NormalisesOverRows], ids=lambda each: each.__name__
)
def test_an_expert_that_is_not_row_wise_is_named(
    expert: type[nn.Module], dtype: torch.dtype, keep_expert_dim: bool
) -> None:
    with pytest.raises(ValueError, match=f"expert {expert.__name__} is not row-wise"):
        check_row_wise(expert().to(dtype), M, dtype=dtype, keep_expert_dim=keep_expert_dim)


@pytest.mark.parametrize("expert", [Widens, DropsRows], ids=lambda each: each.__name__)
def test_an_expert_of_another_shape_is_named_by_the_check(expert: type[nn.Module]) -> None:
    with pytest.raises(ValueError, match=rf"expert {expert.__name__} made \(2, \d, \d+\) of \(2, 5, 7\)"):
        check_row_wise(expert(), M)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@EVERY
def test_row_wise_experts_pass_the_check(name: str, dtype: torch.dtype) -> None:
    check_row_wise(make_experts(name, 1, dtype=dtype)[0], M)
    check_row_wise(make_experts(name, 1, dtype=dtype)[0], M, keep_expert_dim=True)


def test_dropout_passes_the_check_and_nothing_is_disturbed_by_it() -> None:
    expert = nn.Sequential(nn.Linear(M, H), nn.Dropout(0.5), nn.Linear(H, M))
    normalises = nn.Sequential(NormalisesOverRows(), nn.Dropout(0.5))
    for parameter in [*expert.parameters(), *normalises.parameters()]:
        parameter.grad = torch.full_like(parameter, 3.0)
    buffers = {name: (buffer, buffer.clone()) for name, buffer in normalises.named_buffers()}
    assert len(buffers) == 3
    state = torch.get_rng_state()
    check_row_wise(expert, M)
    with pytest.raises(ValueError, match="expert Sequential is not row-wise"):
        check_row_wise(normalises, M)
    check_row_wise(normalises.eval(), M)
    assert torch.equal(torch.get_rng_state(), state)
    assert all((each.grad == 3).all() for each in [*expert.parameters(), *normalises.parameters()])
    for name, buffer in normalises.named_buffers():
        was, values = buffers[name]
        assert buffer is was
        assert torch.equal(buffer, values)
