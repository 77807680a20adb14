# SPDX-License-Identifier: Apache-2.0
"""Arrange and restore: the reference against a loop, and the compiled ops against the reference."""

from __future__ import annotations

import itertools
import math
import re

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")

from torch import Tensor  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402

from ds_fsmoe.ops import Ops, load_ops  # noqa: E402
from tests.ops_cases import (  # noqa: E402
    DTYPES,
    SHAPES_SMKN,
    assert_same_bits,
    compiled_ops,
    random_rows,
    random_slots,
)

FP32, FP64, BF16, FP16 = DTYPES


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Ops:
    return compiled_ops(tmp_path_factory)


@pytest.fixture
def reference() -> Ops:
    return load_ops("reference", "cpu")


@pytest.fixture
def plain() -> Ops:
    return load_ops("plain", "cpu")


@pytest.fixture(params=["reference", "plain", "compiled"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return request.getfixturevalue(request.param)


def arranged(ops: Ops, x_SM: Tensor, slots_KS: Tensor, num_slots: int, dtype: torch.dtype, d_out_NM: Tensor):
    """(result, gradient of x)."""
    x_SM = x_SM.detach().requires_grad_()
    out_NM = ops.arrange(x_SM, slots_KS, num_slots, dtype)
    out_NM.backward(d_out_NM)
    return out_NM.detach(), x_SM.grad


def restored(ops: Ops, y_NM: Tensor, slots_KS: Tensor, weights_KS: Tensor, dtype: torch.dtype, d_out_SM: Tensor):
    """(result, gradient of y, gradient of the weights)."""
    y_NM, weights_KS = y_NM.detach().requires_grad_(), weights_KS.detach().requires_grad_()
    out_SM = ops.restore(y_NM, slots_KS, weights_KS, dtype)
    out_SM.backward(d_out_SM)
    return out_SM.detach(), y_NM.grad, weights_KS.grad


# ---- the reference against explicit loops


@pytest.mark.parametrize("shape_SMKN", SHAPES_SMKN[:5], ids=str)
def test_reference_equals_a_loop_over_tokens(reference: Ops, shape_SMKN: tuple[int, int, int, int]) -> None:
    num_tokens, width, num_choices, num_slots = shape_SMKN
    slots_KS = random_slots(num_tokens, num_choices, num_slots)
    x_SM, y_NM = random_rows(num_tokens, width, FP64), random_rows(num_slots, width, FP64)
    weights_KS = random_rows(num_choices, num_tokens, FP64)
    arranged_NM, restored_SM = torch.zeros(num_slots, width, dtype=FP64), torch.zeros(num_tokens, width, dtype=FP64)
    for s, k in itertools.product(range(num_tokens), range(num_choices)):
        slot = int(slots_KS[k, s])
        if 0 <= slot < num_slots:
            arranged_NM[slot] = x_SM[s]
            restored_SM[s] += weights_KS[k, s] * y_NM[slot]
    assert_same_bits(reference.arrange(x_SM, slots_KS, num_slots), arranged_NM)
    assert_same_bits(reference.restore(y_NM, slots_KS, weights_KS), restored_SM)


def test_restore_undoes_arrange_with_one_slot_per_token(ops: Ops) -> None:
    num_tokens, num_slots = 13, 17
    slots_KS = torch.randperm(num_slots, generator=torch.Generator().manual_seed(0))[:num_tokens].view(1, -1)
    x_SM = random_rows(num_tokens, 5, FP32)
    weights_KS = torch.ones(1, num_tokens)
    assert_same_bits(ops.restore(ops.arrange(x_SM, slots_KS, num_slots), slots_KS, weights_KS), x_SM)


def test_empty_slots_are_zero_and_dropped_tokens_come_back_as_zero(ops: Ops) -> None:
    x_SM = torch.tensor([[math.inf, math.nan], [-math.inf, 1.0], [2.0, -0.0]])
    slots_KS = torch.tensor([[3, 4, 0]])
    arranged_NM = ops.arrange(x_SM, slots_KS, 4)
    assert_same_bits(arranged_NM, torch.tensor([[2.0, -0.0], [0.0, 0.0], [0.0, 0.0], [math.inf, math.nan]]))
    # Not even a weight that is no number brings back what was dropped.
    restored_SM = ops.restore(arranged_NM, slots_KS, torch.tensor([[1.0, math.nan, 0.5]]))
    assert_same_bits(restored_SM[1:], torch.tensor([[0.0, 0.0], [1.0, 0.0]]))


# ---- the compiled ops against the reference


@pytest.mark.parametrize(("dtype", "wire"), list(itertools.product(DTYPES, DTYPES)), ids=str)
@pytest.mark.parametrize("shape_SMKN", SHAPES_SMKN, ids=str)
def test_compiled_arrange_equals_reference_bit_for_bit(
    compiled: Ops, reference: Ops, shape_SMKN: tuple[int, int, int, int], dtype: torch.dtype, wire: torch.dtype
) -> None:
    num_tokens, width, num_choices, num_slots = shape_SMKN
    slots_KS = random_slots(num_tokens, num_choices, num_slots)
    case = (random_rows(num_tokens, width, dtype), slots_KS, num_slots, wire, random_rows(num_slots, width, wire, 2))
    out_NM, dx_SM = arranged(compiled, *case)
    expected_out_NM, _ = arranged(reference, *case)
    assert_same_bits(out_NM, expected_out_NM)
    # In float32, and in the order of the slots, which is torch's when it adds up what was gathered.
    assert_same_bits(dx_SM, reference.restore(case[-1], slots_KS, None, dtype, by_slot=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape_SMKN", SHAPES_SMKN, ids=str)
def test_compiled_restore_equals_reference(
    compiled: Ops, reference: Ops, shape_SMKN: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    num_tokens, width, num_choices, num_slots = shape_SMKN
    slots_KS = random_slots(num_tokens, num_choices, num_slots)
    for out_dtype, weight_dtype in itertools.product(DTYPES, (FP32, FP64)):
        case = (
            random_rows(num_slots, width, dtype),
            slots_KS,
            random_rows(num_choices, num_tokens, weight_dtype, 2),
            out_dtype,
            random_rows(num_tokens, width, out_dtype, 3),
        )
        out_SM, dy_NM, d_weights_KS = restored(compiled, *case)
        expected_SM, expected_dy_NM, expected_d_weights_KS = restored(reference, *case)
        assert_same_bits(out_SM, expected_SM)
        assert_same_bits(dy_NM, expected_dy_NM)
        by_slot = (*case[:-1], True)
        assert_same_bits(compiled.restore(*by_slot), reference.restore(*by_slot))
        # A dot product over the width: the order of the sum is each one's own.
        is_double = FP64 in (dtype, out_dtype, weight_dtype)
        is_empty = 0 in shape_SMKN
        largest = 0.0 if is_empty else float(case[4].double().abs().sum(1).max() * case[0].double().abs().max())
        bound = largest * (1e-15 if is_double and weight_dtype == FP64 else 1e-6)
        torch.testing.assert_close(d_weights_KS, expected_d_weights_KS, rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gradient_of_arrange_differs_from_autograds_by_rounding_only(
    compiled: Ops, reference: Ops, dtype: torch.dtype
) -> None:
    # Autograd rounds a token's gradient after each slot, the op once.
    num_tokens, width, num_choices, num_slots = 31, 17, 5, 157
    case = (random_rows(num_tokens, width, dtype), random_slots(num_tokens, num_choices, num_slots), num_slots, dtype)
    d_out_NM = random_rows(num_slots, width, dtype, 2)
    _, dx_SM = arranged(compiled, *case, d_out_NM)
    _, expected_SM = arranged(reference, *case, d_out_NM)
    bound = 8 * num_choices * torch.finfo(dtype).eps
    torch.testing.assert_close(dx_SM, expected_SM, rtol=bound, atol=bound)


def test_sums_are_rounded_once(compiled: Ops) -> None:
    # 256 + 1 + 1 is 256 in bfloat16 if rounded each time, and 258 if rounded at the end.
    slots_KS = torch.arange(3).view(3, 1)
    y_NM = torch.tensor([[256.0], [1.0], [1.0]], dtype=BF16)
    assert compiled.restore(y_NM, slots_KS, torch.ones(3, 1)).item() == 258.0
    assert compiled.restore(y_NM, slots_KS).item() == 258.0


def test_result_does_not_depend_on_the_number_of_threads(compiled: Ops) -> None:
    num_tokens, width, num_choices, num_slots = 1021, 509, 3, 4001
    slots_KS = random_slots(num_tokens, num_choices, num_slots)
    case = (
        random_rows(num_slots, width, BF16),
        slots_KS,
        random_rows(num_choices, num_tokens, FP32),
        BF16,
        random_rows(num_tokens, width, BF16),
    )
    before, found = torch.get_num_threads(), {}
    try:
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            x_SM = case[-1]
            found[num_threads] = [*restored(compiled, *case), compiled.arrange(x_SM, slots_KS, num_slots)]
    finally:
        torch.set_num_threads(before)
    for one, three in zip(found[1], found[3], strict=True):
        assert_same_bits(one, three)


def test_inputs_need_not_be_contiguous(compiled: Ops) -> None:
    num_tokens, width, num_choices, num_slots = 11, 14, 3, 46
    slots_KS = random_slots(num_tokens, num_choices, num_slots)
    rows_NM, weights_KS = random_rows(num_slots, width, FP32), random_rows(num_choices, num_tokens, FP32)
    d_out_SM = random_rows(num_tokens, width, FP32, 2)

    def strided(tensor: Tensor) -> Tensor:
        other = tensor.T.contiguous().T
        assert not other.is_contiguous()
        return other

    expected = restored(compiled, rows_NM, slots_KS, weights_KS, FP32, d_out_SM)
    actual = restored(compiled, strided(rows_NM), strided(slots_KS), strided(weights_KS), FP32, strided(d_out_SM))
    for one, other in zip(actual, expected, strict=True):
        assert_same_bits(one, other)
    for wire in (FP32, BF16):
        assert_same_bits(
            compiled.arrange(strided(d_out_SM), strided(slots_KS), num_slots, wire),
            compiled.arrange(d_out_SM, slots_KS, num_slots, wire),
        )


@pytest.mark.parametrize("shape_SMKN", [(5, 3, 2, 7), (0, 3, 1, 2), (4, 3, 2, 0)], ids=str)
def test_gradients_equal_finite_differences(compiled: Ops, shape_SMKN: tuple[int, int, int, int]) -> None:
    num_tokens, width, num_choices, num_slots = shape_SMKN
    slots_KS = random_slots(num_tokens, num_choices, num_slots)
    x_SM = random_rows(num_tokens, width, FP64).requires_grad_()
    y_NM = random_rows(num_slots, width, FP64).requires_grad_()
    weights_KS = random_rows(num_choices, num_tokens, FP64, 2).requires_grad_()
    for function, inputs in (
        (lambda x: compiled.arrange(x, slots_KS, num_slots), (x_SM,)),
        (lambda y: compiled.restore(y, slots_KS), (y_NM,)),
        (lambda y, w: compiled.restore(y, slots_KS, w), (y_NM, weights_KS)),
    ):
        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_torch_accepts_the_operators(compiled: Ops, dtype: torch.dtype) -> None:
    num_tokens, width, num_choices, num_slots = 7, 5, 2, 11
    slots_KS = random_slots(num_tokens, num_choices, num_slots)
    x_SM = random_rows(num_tokens, width, dtype).requires_grad_()
    y_NM = random_rows(num_slots, width, dtype).requires_grad_()
    weights_KS = random_rows(num_choices, num_tokens, FP32).requires_grad_()
    assert compiled.name == "compiled"
    fsmoe = torch.ops.fsmoe
    torch.library.opcheck(fsmoe.arrange.default, (x_SM, slots_KS, num_slots, FP32))
    torch.library.opcheck(fsmoe.arrange.default, (x_SM, slots_KS, num_slots))
    torch.library.opcheck(fsmoe.restore.default, (y_NM, slots_KS, weights_KS))
    torch.library.opcheck(fsmoe.restore.default, (y_NM, slots_KS, None, FP32))
    for weights in (weights_KS, weights_KS.detach().t().contiguous().t()):
        torch.library.opcheck(fsmoe.restore_backward.default, (x_SM, y_NM, slots_KS, weights))


def test_gradients_of_weights_without_data_lie_as_on_each_device(compiled: Ops) -> None:
    assert compiled.name == "compiled"
    for device in ("cpu", "cuda"):
        with FakeTensorMode():
            x_SM, y_NM, weights_SK = (torch.empty(shape, device=device) for shape in ((7, 5), (11, 5), (7, 2)))
            slots_KS = torch.empty((2, 7), dtype=torch.int64, device=device)
            _, d_weights_KS = torch.ops.fsmoe.restore_backward(x_SM, y_NM, slots_KS, weights_SK.t())
        assert d_weights_KS.stride() == ((7, 1) if device == "cpu" else (1, 2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda o: o.arrange(torch.zeros(3), torch.zeros(1, 3).long(), 2), "x must be 2-dimensional, got shape [3]"),
        (lambda o: o.arrange(torch.zeros(3, 2).long(), torch.zeros(1, 3).long(), 2), "x must be float32"),
        (lambda o: o.arrange(torch.zeros(3, 2), torch.zeros(3).long(), 2), "slots must be [K, S], got shape [3]"),
        (lambda o: o.arrange(torch.zeros(3, 2), torch.zeros(1, 3), 2), "slots must be int64"),
        (lambda o: o.arrange(torch.zeros(3, 2), torch.zeros(1, 4).long(), 2), "x has 3 rows but slots is for 4"),
        (lambda o: o.arrange(torch.zeros(3, 2), torch.zeros(1, 3).long(), -1), "num_slots must not be negative"),
        (lambda o: o.arrange(torch.zeros(2, 2), torch.tensor([[1, 1]]), 2), "slot 1 is given to two tokens"),
        (lambda o: o.arrange(torch.zeros(1, 2), torch.tensor([[0]]), 2, torch.int64), "dtype must be float32"),
        (lambda o: o.restore(torch.zeros(3), torch.zeros(1, 3).long()), "y must be 2-dimensional"),
        (lambda o: o.restore(torch.zeros(3, 2), torch.zeros(1, 3).long(), torch.zeros(3)), "the shape of slots [1, 3]"),
        (
            lambda o: o.restore(torch.zeros(3, 2), torch.zeros(1, 3).long(), torch.zeros(1, 3, dtype=BF16)),
            "weights must be float32 or float64",
        ),
        (
            lambda o: torch.ops.fsmoe.restore_backward(
                torch.zeros(4, 2), torch.zeros(3, 2), torch.zeros(1, 3).long(), torch.zeros(1, 3)
            ),
            "d_out must be [3, 2], got shape [4, 2]",
        ),
    ],
)
def test_wrong_arguments_are_named(compiled: Ops, call, message: str) -> None:
    with pytest.raises(RuntimeError, match=re.escape(message)):
        call(compiled)
