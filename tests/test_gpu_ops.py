# SPDX-License-Identifier: Apache-2.0
"""The compiled ops equal the reference, each library on the device for which it is compiled."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ds_fsmoe.ops import Ops, load_ops
from ds_fsmoe.ops.reference import PRIORITIES
from tests.covering import covering
from tests.gpu_cases import ON_DEVICE
from tests.ops_cases import DTYPES as ALL_DTYPES
from tests.ops_cases import SHAPES_SMKN, assert_same_bits, compiled_ops, random_rows, random_slots
from tests.test_ops_slots import SHAPES_SEkC, make_scores

REFERENCE = load_ops("reference", "cpu")
DTYPES = {"cuda": [torch.float32, torch.bfloat16, torch.float16], "cpu": ALL_DTYPES}
# In the sample each shape, and each type with each other one.
ROWS = covering(SHAPES_SMKN, ALL_DTYPES, ALL_DTYPES)


@pytest.fixture(scope="session")
def ops_of() -> Callable[[torch.device], Ops]:
    """Device -> its compiled ops."""
    return lambda device: compiled_ops(device.type)


def check_rows(
    ops: Ops,
    device: torch.device,
    shape_SMKN: tuple[int, ...],
    dtype: torch.dtype,
    out: torch.dtype,
    weight: torch.dtype = torch.float32,
) -> None:
    """Arrange, restore and their gradients."""
    num_tokens, width, num_choices, num_slots = shape_SMKN
    slots_KS = random_slots(num_tokens, num_choices, num_slots)
    x_SM, d_out_NM = random_rows(num_tokens, width, dtype), random_rows(num_slots, width, out, 2)
    y_NM, weights_KS = random_rows(num_slots, width, dtype, 3), random_rows(num_choices, num_tokens, weight, 4)
    d_out_SM = random_rows(num_tokens, width, out, 5)

    def forward_and_backward(of: Ops, where: torch.device) -> list[Tensor]:
        at = [each.detach().to(where).requires_grad_() for each in (x_SM, y_NM, weights_KS)]
        slots, y = slots_KS.to(where), at[1].detach()
        arranged = of.arrange(at[0], slots, num_slots, out)
        restored, unweighted = of.restore(at[1], slots, at[2], out), of.restore(y, slots, None, out)
        by_slot = of.restore(y, slots, at[2].detach(), out, True)
        arranged.backward(d_out_NM.to(where))
        restored.backward(d_out_SM.to(where))
        found = [arranged, restored, unweighted, by_slot, at[1].grad, at[0].grad, at[2].grad]
        assert all(each.device.type == where.type for each in found)
        return [each.detach().cpu() for each in found]

    found = forward_and_backward(ops, device)
    expected = forward_and_backward(REFERENCE, torch.device("cpu"))
    for one, other in zip(found[:5], expected[:5], strict=True):
        assert_same_bits(one, other)
    # Rounded once, in the order of the slots; autograd rounds after each.
    assert_same_bits(found[5], REFERENCE.restore(d_out_NM, slots_KS, None, dtype, True))
    bound = 8 * max(1, num_choices) * max(torch.finfo(each).eps for each in (dtype, out))
    torch.testing.assert_close(found[5], expected[5], rtol=bound, atol=bound)
    # A dot product over the width: the order of the sum is each one's own.
    largest = 0.0 if 0 in shape_SMKN else float(d_out_SM.double().abs().sum(1).max() * y_NM.double().abs().max())
    is_double = weight == torch.float64 and device.type == "cpu"
    torch.testing.assert_close(found[6], expected[6], rtol=0, atol=largest * (1e-15 if is_double else 1e-6))


def check_gather(ops: Ops, device: torch.device, shape_SMKN: tuple[int, ...], dtype: torch.dtype) -> None:
    """Rows by number, some of them often and some not there, and the gradient."""
    num_rows, width, _, num_slots = shape_SMKN
    index_N = torch.randint(-1, num_rows + 2, (num_slots,), generator=torch.Generator().manual_seed(0))
    x_RM, dy_NM = random_rows(num_rows, width, dtype), random_rows(num_slots, width, dtype, 2)
    found = []
    for of, where in ((ops, device), (REFERENCE, torch.device("cpu"))):
        x = x_RM.detach().to(where).requires_grad_()
        y_NM = of.gather_rows(x, index_N.to(where))
        y_NM.backward(dy_NM.to(where))
        found.append((y_NM.detach().cpu(), x.grad.cpu()))
    assert_same_bits(found[0][0], found[1][0])
    if device.type == "cpu":  # in the order of index_add
        assert_same_bits(found[0][1], found[1][1])
    # A row may have been taken by every slot, and its sum has no particular order.
    bound = 8 * max(1, num_slots) * torch.finfo(dtype).eps
    torch.testing.assert_close(found[0][1], found[1][1], rtol=bound, atol=bound)


def check_slots(ops: Ops, device: torch.device, shape_SEkC: tuple[int, ...], priority: str) -> None:
    """From scores, and from choices made elsewhere, to slots."""
    num_tokens, num_experts, k, capacity = shape_SEkC
    for seed in range(3):
        # In float64 as well where the library has that.
        dtype = torch.float64 if seed and device.type == "cpu" else torch.float32
        scores_SE = make_scores(num_tokens, num_experts, seed, dtype)
        used_S = torch.rand(num_tokens, generator=torch.Generator().manual_seed(seed)) < 0.8 if seed else None
        used = None if used_S is None else used_S.to(device)
        expected = REFERENCE.top_k_slots(scores_SE, k, capacity, used_S, priority)
        found = ops.top_k_slots(scores_SE.to(device), k, capacity, used, priority)
        # Scores that decide who stays need not be those that experts were chosen by, and a token may choose less.
        scores_KS, generator = make_scores(k, num_tokens, seed), torch.Generator().manual_seed(seed)
        none = torch.tensor([-1, num_experts, 2**62])[torch.randint(3, (k, num_tokens), generator=generator)]
        experts_KS = torch.where(torch.rand(k, num_tokens, generator=generator) < 0.2 * seed, none, expected.experts_KS)
        taken = ops.take_slots(experts_KS.to(device), num_experts, capacity, used, priority, scores_KS.to(device))
        by_reference = REFERENCE.take_slots(experts_KS, num_experts, capacity, used_S, priority, scores_KS)
        for one, other in zip((*found, *taken), (*expected, *by_reference), strict=True):
            assert one.device.type == device.type
            assert one.dtype == torch.int64
            assert torch.equal(one.cpu(), other)


@ON_DEVICE
@pytest.mark.parametrize("shape_SMKN", SHAPES_SMKN, ids=str)
def test_rows_on_the_device_equal_the_reference(
    ops_of: Callable[[torch.device], Ops], device: torch.device, shape_SMKN: tuple[int, ...]
) -> None:
    types = DTYPES[device.type]
    weights = (torch.float32, torch.float64) if device.type == "cpu" else (torch.float32,)
    pairs = [(dtype, out) for shape, dtype, out in ROWS if shape == shape_SMKN and {dtype, out} <= {*types}]
    for dtype, out in pairs if device.type == "cpu" else itertools.product(types, types):
        for weight in weights:
            check_rows(ops_of(device), device, shape_SMKN, dtype, out, weight)
    for dtype in types:
        check_gather(ops_of(device), device, shape_SMKN, dtype)


@ON_DEVICE
@pytest.mark.parametrize("shape_SEkC", SHAPES_SEkC, ids=str)
def test_slots_on_the_device_equal_the_reference(
    ops_of: Callable[[torch.device], Ops], device: torch.device, shape_SEkC: tuple[int, ...]
) -> None:
    for priority in PRIORITIES:
        check_slots(ops_of(device), device, shape_SEkC, priority)


@ON_DEVICE
def test_torch_accepts_the_operators_on_the_device(ops_of: Callable[[torch.device], Ops], device: torch.device) -> None:
    assert ops_of(device).name == "compiled"
    num_tokens, width, num_choices, num_slots = 7, 5, 2, 11
    slots_KS = random_slots(num_tokens, num_choices, num_slots).to(device)
    x_SM, y_NM = (random_rows(rows, width, torch.bfloat16).to(device) for rows in (num_tokens, num_slots))
    weights_KS = random_rows(num_choices, num_tokens, torch.float32).to(device)
    for tensor in (x_SM, y_NM, weights_KS):
        tensor.requires_grad_()
    fsmoe, scores_SE = torch.ops.fsmoe, make_scores(num_tokens, 5).to(device)
    used_S = torch.arange(num_tokens, device=device) % 3 > 0
    segments_3T = torch.tensor([[num_tokens // 2, num_tokens], [0, 1], [2, 2]], device=device)
    x_RF, dh_RH = (random_rows(19, width, torch.float32).to(device) for width in (74, 37))
    none_KS = torch.zeros_like(slots_KS)
    # Both derivatives, shapes without data, and dynamic shapes are in these.
    for operator, arguments in (
        (fsmoe.arrange, (x_SM, slots_KS, num_slots, torch.float32)),
        (fsmoe.restore, (y_NM, slots_KS, weights_KS)),
        (fsmoe.restore, (y_NM, slots_KS, None, torch.float32)),
        (fsmoe.gather_rows, (x_SM, slots_KS[0])),
        (fsmoe.gather_rows_backward, (x_SM, slots_KS[0], 7)),
        (fsmoe.restore_backward, (x_SM, y_NM, slots_KS, weights_KS)),
        (fsmoe.restore_backward, (x_SM, y_NM, slots_KS, weights_KS.detach().t().contiguous().t())),
        (fsmoe.top_k_slots, (scores_SE, 2, 3, None, "score")),
        (fsmoe.take_slots, (none_KS, 5, 3)),
        (fsmoe.take_slots, (none_KS, 5, 3, used_S, "score", weights_KS)),
        (fsmoe.number_rows, (none_KS, 5, 1, segments_3T, torch.full((5,), 9, device=device))),
        (fsmoe.gated, (x_RF, "gelu", True, 0.0, 0.0)),
        (fsmoe.gated_backward, (x_RF, dh_RH, "silu", False, 0.0, 0.0)),
    ):
        torch.library.opcheck(operator.default, arguments)
