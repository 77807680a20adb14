# SPDX-License-Identifier: Apache-2.0
"""What a call of the experts keeps, and the parameters it gives gradients for."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from ds_fsmoe.components.expert_compute.calls import ExpertSet
from ds_fsmoe.components.expert_compute.saved import SavedTensors
from tests.expert_cases import (
    EVERY,
    EVERY_WRITTEN,
    C,
    H,
    M,
    assert_gradients,
    backward,
    backward_from_the_last,
    bounds,
    by_autograd,
    forward,
    make_experts,
    rows,
)


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
        call = ExpertSet(experts).call(True)
        forward(call, x_NeCM := rows(num_ranks, count, C, M), sizes)
        ours = sum(each.untyped_storage().nbytes() for each in tensors_within(call).values())
        assert 0 < ours <= theirs
        hidden = num_ranks * count * C * H * 8 * (2 if name == "mixtral" else 1)
        assert ours == hidden + (x_NeCM.nbytes if frozen in ("none", "down") else 0)


@EVERY
def test_without_a_backward_nothing_is_kept(name: str) -> None:
    call = ExpertSet(make_experts(name)).call(False)
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
        for walk in (backward, backward_from_the_last):
            call = ExpertSet(experts).call(True, same_chunks=False)
            torch.testing.assert_close(forward(call, x_NeCM, [6, 7]), y_NeCM, rtol=0, atol=1e-12)
            torch.testing.assert_close(walk(call, dy_NeCM, [3, 10]), dx_NeCM, rtol=0, atol=1e-12)
            assert_gradients(call.gradients(), gradients, atol=1e-12)


def test_the_set_lists_every_parameter_in_order_and_owns_none() -> None:
    experts = [*make_experts("gpt gelu", 2), *make_experts("identity", 1), *make_experts("bottleneck", 1)]
    experts[0].fc1.weight.requires_grad_(False)
    layer = ExpertSet(experts)
    expected = [each for expert in experts for each in expert.parameters()]
    assert [*map(id, layer.parameters)] == [*map(id, expected)]
    assert not isinstance(layer, nn.Module)


def test_parameters_replaced_after_the_set_was_made_are_refused() -> None:
    experts = make_experts("gpt gelu")
    layer = ExpertSet(experts)
    experts[1].fc1.weight = nn.Parameter(experts[1].fc1.weight.detach().clone())
    with pytest.raises(RuntimeError, match="replaced after ExpertSet"):
        layer.call(True)
    with pytest.raises(ValueError, match="at least one expert"):
        ExpertSet([])


@EVERY_WRITTEN
def test_a_weight_changed_before_the_backward_is_refused_as_autograd_does(name: str) -> None:
    experts = make_experts(name)
    call = ExpertSet(experts).call(True)
    forward(call, rows(2, 3, C, M), [13])
    with torch.no_grad():
        next(experts[1].parameters()).mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        backward(call, rows(2, 3, C, M), [13])
