# SPDX-License-Identifier: Apache-2.0
"""Several experts computed together are the same experts computed one after another."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import nn

from ds_fsmoe.components.expert_compute.calls import ExpertSet
from ds_fsmoe.components.expert_compute.expert_call import ExpertCall
from ds_fsmoe.components.expert_compute.gradient_sums import GradientSums, make_contiguous
from ds_fsmoe.components.expert_compute.shards import shard_expert
from ds_fsmoe.components.expert_compute.written_call import WrittenCall
from ds_fsmoe.components.experts.mixtral import MixtralFeedForward
from tests.covering import covering
from tests.expert_cases import (
    EVERY_WRITTEN,
    C,
    M,
    assert_gradients,
    backward,
    backward_from_the_last,
    by_autograd,
    forward,
    make_experts,
    rows,
)

CUTS = ((13,), (6, 7), (0, 12, 1), (3, 3, 3, 0, 4))


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


def assert_as_autograd(
    call: ExpertCall, experts: Sequence[nn.Module], forward_sizes=(6, 7), backward_sizes=(6, 7), walk=backward
) -> None:
    x_NeCM, dy_NeCM = rows(2, len(experts), C, M), rows(2, len(experts), C, M, seed=2)
    y_NeCM, dx_NeCM, gradients = by_autograd(experts, x_NeCM, dy_NeCM)
    torch.testing.assert_close(forward(call, x_NeCM, forward_sizes), y_NeCM, rtol=0, atol=1e-12)
    torch.testing.assert_close(walk(call, dy_NeCM, backward_sizes), dx_NeCM, rtol=0, atol=1e-12)
    assert_gradients(call.gradients(), gradients, atol=1e-12)


# ---- the same numbers


@EVERY_WRITTEN
def test_every_pair_of_cuts_gives_the_gradients_of_the_whole(name: str, alone: list[str]) -> None:
    layer = ExpertSet(experts := side_by_side(name), together="always")
    for forward_sizes, backward_sizes, recompute, walk in covering(
        CUTS, CUTS, (False, True), (backward, backward_from_the_last)
    ):
        call = layer.call(True, same_chunks=forward_sizes == backward_sizes, recompute=recompute)
        alone.clear()
        assert_as_autograd(call, experts, forward_sizes, backward_sizes, walk)
        assert not alone


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@EVERY_WRITTEN
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


# ---- whose turn it is


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


@EVERY_WRITTEN
def test_frozen_parameters_get_no_gradient_and_the_others_keep_theirs(name: str, alone: list[str]) -> None:
    num_parameters = len(list(make_experts(name, 1)[0].parameters()))
    for frozen in range(num_parameters + 1):  # each alone, then all
        for walk in (backward, backward_from_the_last):
            experts = side_by_side(name)
            for expert in experts:
                for position, parameter in enumerate(expert.parameters()):
                    parameter.requires_grad_(position != frozen and frozen != num_parameters)
            assert_as_autograd(ExpertSet(experts, together="always").call(True), experts, walk=walk)
    assert not alone


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


def test_no_rows_give_zero_gradients(alone: list[str]) -> None:
    experts, empty = side_by_side("gpt gelu"), rows(2, 3, 0, M)
    call = ExpertSet(experts, together="always").call(True)
    assert forward(call, empty, [0, 0]).shape == backward_from_the_last(call, empty, [0, 0]).shape == (2, 3, 0, M)
    for gradient, parameter in zip(call.gradients(), nn.ModuleList(experts).parameters(), strict=True):
        assert gradient.shape == parameter.shape
        assert (gradient == 0).all()
    assert not alone


# ---- what surrounds a call


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


def test_a_weight_changed_before_the_backward_is_refused() -> None:
    experts = side_by_side("mixtral")
    call = ExpertSet(experts, together="always").call(True)
    forward(call, rows(2, 3, C, M), [13])
    with torch.no_grad():
        experts[2].w2.weight.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        backward(call, rows(2, 3, C, M), [13])
