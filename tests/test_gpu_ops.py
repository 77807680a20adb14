# SPDX-License-Identifier: Apache-2.0
"""The compiled ops on the device for which they are compiled, against the reference on the CPU. The same bodies run
here with the library for the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ds_fsmoe.ops import Ops, load_ops
from ds_fsmoe.ops.reference import PRIORITIES
from tests.gpu_cases import ON_DEVICE
from tests.ops_cases import SHAPES_SMKN, assert_same_bits, compiled_ops, random_rows, random_slots
from tests.test_ops_slots import SHAPES_SEkC, make_scores

REFERENCE = load_ops("reference", "cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="session")
def ops_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[torch.device], Ops]:
    """Device -> its compiled ops."""
    return lambda device: compiled_ops(tmp_path_factory, device.type)


def check_rows(
    ops: Ops, device: torch.device, shape_SMKN: tuple[int, ...], dtype: torch.dtype, out: torch.dtype
) -> None:
    """Arrange, restore and their gradients."""
    num_tokens, width, num_choices, num_slots = shape_SMKN
    slots_KS = random_slots(num_tokens, num_choices, num_slots)
    x_SM, d_out_NM = random_rows(num_tokens, width, dtype), random_rows(num_slots, width, out, 2)
    y_NM, weights_KS = random_rows(num_slots, width, dtype, 3), random_rows(num_choices, num_tokens, torch.float32, 4)
    d_out_SM = random_rows(num_tokens, width, out, 5)

    def forward_and_backward(of: Ops, where: torch.device) -> list[Tensor]:
        at = [each.detach().to(where).requires_grad_() for each in (x_SM, y_NM, weights_KS)]
        slots = slots_KS.to(where)
        arranged = of.arrange(at[0], slots, num_slots, out)
        restored, unweighted = of.restore(at[1], slots, at[2], out), of.restore(at[1].detach(), slots, None, out)
        arranged.backward(d_out_NM.to(where))
        restored.backward(d_out_SM.to(where))
        found = [arranged, restored, unweighted, at[1].grad, at[0].grad, at[2].grad]
        assert all(each.device.type == where.type for each in found)
        return [each.detach().cpu() for each in found]

    found = forward_and_backward(ops, device)
    expected = forward_and_backward(REFERENCE, torch.device("cpu"))
    for one, other in zip(found[:4], expected[:4], strict=True):
        assert_same_bits(one, other)
    # In float32 and in the order of the slots, rounded once; autograd rounds after each.
    assert_same_bits(found[4], REFERENCE.restore(d_out_NM, slots_KS.sort(dim=0).values, None, dtype))
    # A dot product over the width: the order of the sum is each one's own.
    largest = 0.0 if 0 in shape_SMKN else float(d_out_SM.float().abs().sum(1).max() * y_NM.float().abs().max())
    torch.testing.assert_close(found[5], expected[5], rtol=0, atol=1e-6 * largest)


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
    # A row may have been taken by every slot, and its sum has no particular order.
    bound = 8 * max(1, num_slots) * torch.finfo(dtype).eps
    torch.testing.assert_close(found[0][1], found[1][1], rtol=bound, atol=bound)


def check_slots(ops: Ops, device: torch.device, shape_SEkC: tuple[int, ...], priority: str) -> None:
    """From scores, and from choices made elsewhere, to slots."""
    num_tokens, num_experts, k, capacity = shape_SEkC
    for seed in range(2):
        scores_SE = make_scores(num_tokens, num_experts, seed)
        used_S = torch.rand(num_tokens, generator=torch.Generator().manual_seed(seed)) < 0.8 if seed else None
        used = None if used_S is None else used_S.to(device)
        expected = REFERENCE.top_k_slots(scores_SE, k, capacity, used_S, priority)
        found = ops.top_k_slots(scores_SE.to(device), k, capacity, used, priority)
        scores_KS = make_scores(k, num_tokens, seed)
        taken = ops.take_slots(
            expected.experts_KS.to(device), num_experts, capacity, used, priority, scores_KS.to(device)
        )
        by_reference = REFERENCE.take_slots(expected.experts_KS, num_experts, capacity, used_S, priority, scores_KS)
        for one, other in zip((*found, *taken), (*expected, *by_reference), strict=True):
            assert one.device.type == device.type
            assert torch.equal(one.cpu(), other)


@ON_DEVICE
@pytest.mark.parametrize("shape_SMKN", SHAPES_SMKN, ids=str)
def test_rows_on_the_device_equal_the_reference(
    ops_of: Callable[[torch.device], Ops], device: torch.device, shape_SMKN: tuple[int, ...]
) -> None:
    pairs = list(itertools.product(DTYPES, DTYPES))
    for dtype, out in pairs if device.type == "cuda" else pairs[::4]:
        check_rows(ops_of(device), device, shape_SMKN, dtype, out)
    check_gather(ops_of(device), device, shape_SMKN, torch.float32)


@ON_DEVICE
@pytest.mark.parametrize("shape_SEkC", SHAPES_SEkC, ids=str)
def test_slots_on_the_device_equal_the_reference(
    ops_of: Callable[[torch.device], Ops], device: torch.device, shape_SEkC: tuple[int, ...]
) -> None:
    for priority in PRIORITIES if device.type == "cuda" else PRIORITIES[-1:]:
        check_slots(ops_of(device), device, shape_SEkC, priority)


@ON_DEVICE
@pytest.mark.parametrize("shape_SMKN", [(7, 5, 2, 11), (0, 5, 2, 7)], ids=str)
def test_torch_accepts_the_operators_on_the_device(
    ops_of: Callable[[torch.device], Ops], device: torch.device, shape_SMKN: tuple[int, ...]
) -> None:
    assert ops_of(device).name == "compiled"
    num_tokens, width, num_choices, num_slots = shape_SMKN
    slots_KS = random_slots(num_tokens, num_choices, num_slots).to(device)
    x_SM, y_NM = (random_rows(rows, width, torch.bfloat16).to(device) for rows in (num_tokens, num_slots))
    weights_KS = random_rows(num_choices, num_tokens, torch.float32).to(device)
    for tensor in (x_SM, y_NM, weights_KS):
        tensor.requires_grad_()
    fsmoe, scores_SE = torch.ops.fsmoe, make_scores(num_tokens, 5).to(device)
    # Both derivatives, shapes without data, and dynamic shapes are in these.
    torch.library.opcheck(fsmoe.arrange.default, (x_SM, slots_KS, num_slots, torch.float32))
    torch.library.opcheck(fsmoe.restore.default, (y_NM, slots_KS, weights_KS))
    for weights in (weights_KS, weights_KS.detach().t().contiguous().t()):
        torch.library.opcheck(fsmoe.restore_backward.default, (x_SM, y_NM, slots_KS, weights))
    torch.library.opcheck(fsmoe.top_k_slots.default, (scores_SE, 2, 3, None, "score"))
    torch.library.opcheck(fsmoe.take_slots.default, (torch.zeros_like(slots_KS), 5, 3))
