# SPDX-License-Identifier: Apache-2.0
"""What a call of the experts keeps until its backward, and the sums of gradients that it makes."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from ds_fsmoe.components.expert_compute.calls import ExpertSet
from ds_fsmoe.components.expert_compute.gradient_sums import GradientSums
from ds_fsmoe.components.expert_compute.saved import SavedTensors
from tests.expert_cases import EVERY, EVERY_WRITTEN, GRAPH, WRITTEN, C, H, M, bounds, forward, make_experts, rows
from tests.live_memory import LiveMemory


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


@EVERY_WRITTEN
def test_no_more_is_kept_than_autograd_keeps(name: str) -> None:
    for (num_ranks, count), frozen in itertools.product(((1, 3), (2, 1), (2, 3)), ("none", "up", "down", "all")):
        experts = make_experts(name, count)
        for linear in (module for expert in experts for module in expert.modules() if isinstance(module, nn.Linear)):
            is_up = linear.out_features == H
            linear.requires_grad_(not (frozen == "all" or frozen == ("up" if is_up else "down")))
        theirs = bytes_kept_by_autograd(experts, rows(num_ranks, count, C, M))
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


@EVERY
def test_a_hook_on_a_parameter_runs_once_on_what_the_call_returns(name: str) -> None:
    """That is, not here: whoever puts the gradients into autograd has it run."""
    experts = ExpertSet(make_experts(name))
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
        call = ExpertSet(experts).call(True, same_chunks=same_cuts)
        forward(call, rows(2, 3, C, M), [6, 7])
        assert all(bool(run.call._runs) is same_cuts for run in call._runs)


def test_cuts_are_read_without_copying_where_they_can_be() -> None:
    cuts = SavedTensors()
    parts = rows(2, 13, 5).split([6, 0, 7], dim=1)
    for (start, stop), part in zip(bounds([6, 0, 7]), parts, strict=True):
        cuts.put(start, stop, (part.contiguous(), None))
    inside, across = ((0, 6), (2, 5), (6, 13), (8, 9)), ((5, 7), (0, 13))
    for start, stop in (*inside, *across):
        found, nothing = cuts.take(start, stop)
        assert nothing is None
        assert torch.equal(found, rows(2, 13, 5)[:, start:stop])
        sources = {tensor.untyped_storage().data_ptr() for tensor, _ in cuts._saved.values()}
        assert (found.untyped_storage().data_ptr() in sources) is ((start, stop) in inside)
    assert cuts.take(6, 6)[0].shape == (2, 0, 5)
    with pytest.raises(ValueError, match=r"slots \[5, 14\): the forward saved only \[0, 6\), \[6, 6\), \[6, 13\)"):
        cuts.take(5, 14)
    with pytest.raises(ValueError, match=r"slots \[4, 7\) were saved twice: \[0, 6\) before"):
        cuts.put(4, 7, (None, None))
    gap = SavedTensors()
    gap.put(0, 3, (torch.zeros(2, 3, 5),))
    gap.put(5, 8, (torch.zeros(2, 3, 5),))
    with pytest.raises(ValueError, match=r"slots \[2, 7\): the forward saved only \[0, 3\), \[5, 8\)"):
        gap.take(2, 7)
    with pytest.raises(ValueError, match="no forward has saved them yet"):
        SavedTensors().take(0, 1)


def test_the_set_lists_every_parameter_in_order_and_owns_none() -> None:
    experts = [*make_experts("gpt gelu", 2), *make_experts("identity", 1), *make_experts("bottleneck", 1)]
    experts[0].fc1.weight.requires_grad_(False)
    layer = ExpertSet(experts)
    expected = [each for expert in experts for each in expert.parameters()]
    assert [*map(id, layer.parameters)] == [*map(id, expected)]
    assert not isinstance(layer, nn.Module)


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


# ---- sums of gradients


def test_gradients_are_added_up_side_by_side_and_alone_alike() -> None:
    parameters = [nn.Parameter(torch.zeros(5, 7).double()) for _ in range(3)]
    sums = GradientSums(parameters)
    expected = torch.zeros(3, 5, 7).double()
    for seed in range(6):
        left, right = rows(3, 5, 4, seed=seed), rows(3, 4, 7, seed=seed + 10)
        expected += left @ right
        if seed == 4:
            for each, *factors in zip(parameters, left, right, strict=True):
                sums.add_product(each, *factors)
        else:
            sums.add_product(parameters, left, right)
    sums.add(parameters[1], rows(5, 7))  # from now on not side by side
    expected[1] += rows(5, 7)
    sums.add_product(parameters, rows(3, 5, 4), rows(3, 4, 7))
    expected += rows(3, 5, 4) @ rows(3, 4, 7)
    torch.testing.assert_close(torch.stack(sums.take()), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("together", [True, False], ids=["side by side", "alone"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_gradient_that_autograd_has_given_is_never_added_to_in_place(dtype: torch.dtype, together: bool) -> None:
    """It may have given the same tensor to somebody else."""
    parameters = [nn.Parameter(torch.zeros(5, 7, dtype=dtype)) for _ in range(3)]
    given, own = rows(3, 5, 7, dtype=dtype), rows(3, 5, 7, seed=2, dtype=dtype)
    left, right = rows(3, 5, 4, seed=3, dtype=dtype), rows(3, 4, 7, seed=4, dtype=dtype)
    before = given.clone()
    for then, to_all in ((then, to_all) for then in ("add", "add_product") for to_all in (False, True)):
        sums = GradientSums(parameters)
        if together:
            sums.add(parameters, given)
        else:
            for each, gradient in zip(parameters, given, strict=True):
                sums.add(each, gradient)
        added = (own,) if then == "add" else (left, right)
        if to_all:
            getattr(sums, then)(parameters, *added)
        else:
            getattr(sums, then)(parameters[1], *(each[1] for each in added))
        found = sums.take()
        added = own if then == "add" else left @ right
        for index in range(3) if to_all else (1,):
            torch.testing.assert_close(found[index], before[index] + added[index])
        assert torch.equal(given, before), then
