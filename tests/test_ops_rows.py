# SPDX-License-Identifier: Apache-2.0
"""Arrange, restore and the row gather: their definitions as loops, and what every set of ops has in common.

That compiled ops equal the reference is in test_gpu_ops.py.
"""

from __future__ import annotations

import itertools
import math
import re

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")

from torch import Tensor  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402

from ds_fsmoe.ops import Ops  # noqa: E402
from tests.ops_cases import (  # noqa: E402
    DTYPES,
    EVERY_OPS,
    SHAPES_SMKN,
    assert_same_bits,
    compiled_ops,
    ops_named,
    random_rows,
    random_slots,
)

FP32, FP64, BF16, FP16 = DTYPES


@pytest.fixture(params=EVERY_OPS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return ops_named(request.param)


@pytest.fixture
def compiled() -> Ops:
    return compiled_ops()


def restored(ops: Ops, y_NM: Tensor, slots_KS: Tensor, weights_KS: Tensor, dtype: torch.dtype, d_out_SM: Tensor):
    """(result, gradient of y, gradient of the weights)."""
    y_NM, weights_KS = y_NM.detach().requires_grad_(), weights_KS.detach().requires_grad_()
    out_SM = ops.restore(y_NM, slots_KS, weights_KS, dtype)
    out_SM.backward(d_out_SM)
    return out_SM.detach(), y_NM.grad, weights_KS.grad


def gathered(ops: Ops, x_RM: Tensor, index_N: Tensor, dy_NM: Tensor) -> tuple[Tensor, Tensor]:
    """(result, gradient of x)."""
    x_RM = x_RM.detach().requires_grad_()
    y_NM = ops.gather_rows(x_RM, index_N)
    y_NM.backward(dy_NM)
    return y_NM.detach(), x_RM.grad


# ---- definitions


@pytest.mark.parametrize("shape_SMKN", SHAPES_SMKN[:4] + SHAPES_SMKN[6:], ids=str)
def test_the_reference_equals_loops_over_tokens_and_slots(shape_SMKN: tuple[int, int, int, int]) -> None:
    num_tokens, width, num_choices, num_slots = shape_SMKN
    reference, slots_KS = ops_named("reference"), random_slots(num_tokens, num_choices, num_slots)
    x_SM, y_NM = random_rows(num_tokens, width, FP64), random_rows(num_slots, width, FP64)
    weights_KS = random_rows(num_choices, num_tokens, FP64)
    arranged_NM, restored_SM = torch.zeros_like(y_NM), torch.zeros_like(x_SM)
    for s, k in itertools.product(range(num_tokens), range(num_choices)):
        slot = int(slots_KS[k, s])
        if 0 <= slot < num_slots:
            arranged_NM[slot] = x_SM[s]
            restored_SM[s] += weights_KS[k, s] * y_NM[slot]
    assert_same_bits(reference.arrange(x_SM, slots_KS, num_slots), arranged_NM)
    assert_same_bits(reference.restore(y_NM, slots_KS, weights_KS), restored_SM)

    index_N = torch.randint(-2, num_tokens + 3, (num_slots,), generator=torch.Generator().manual_seed(0))
    gathered_NM, dx_SM = torch.zeros_like(y_NM), torch.zeros_like(x_SM)
    for slot, token in enumerate(index_N.tolist()):
        if 0 <= token < num_tokens:
            gathered_NM[slot] = x_SM[token]
            dx_SM[token] += y_NM[slot]
    found = gathered(reference, x_SM, index_N, y_NM)
    assert_same_bits(found[0], gathered_NM)
    assert_same_bits(found[1], dx_SM)


def test_restore_undoes_arrange_with_one_slot_per_token(ops: Ops) -> None:
    num_tokens, num_slots = 13, 17
    slots_KS = torch.randperm(num_slots, generator=torch.Generator().manual_seed(0))[:num_tokens].view(1, -1)
    x_SM = random_rows(num_tokens, 5, FP32)
    weights_KS = torch.ones(1, num_tokens)
    assert_same_bits(ops.restore(ops.arrange(x_SM, slots_KS, num_slots), slots_KS, weights_KS), x_SM)


def test_empty_slots_are_zero_and_dropped_tokens_come_back_as_zero_whatever_the_others_are(ops: Ops) -> None:
    x_SM = torch.tensor([[math.inf, math.nan], [-math.inf, 1.0], [2.0, -0.0]])
    slots_KS = torch.tensor([[3, 4, 0]])
    arranged_NM = ops.arrange(x_SM, slots_KS, 4)
    assert_same_bits(arranged_NM, torch.tensor([[2.0, -0.0], [0.0, 0.0], [0.0, 0.0], [math.inf, math.nan]]))
    # Not even a weight that is no number brings back what was dropped.
    restored_SM = ops.restore(arranged_NM, slots_KS, torch.tensor([[1.0, math.nan, 0.5]]))
    assert_same_bits(restored_SM[1:], torch.tensor([[0.0, 0.0], [1.0, 0.0]]))
    lowest, highest = -(2**63), 2**63 - 1
    index_N = torch.tensor([2, 3, -1, lowest, highest, 4])
    dy_NM = torch.full((6, 2), math.nan).index_fill(0, torch.tensor([0]), 3.0)
    y_NM, dx_SM = gathered(ops, x_SM, index_N, dy_NM)
    assert_same_bits(y_NM, torch.cat([x_SM[2:], torch.zeros(5, 2)]))
    assert_same_bits(dx_SM, torch.tensor([[0.0, 0.0], [0.0, 0.0], [3.0, 3.0]]))


# ---- the compiled ops


def test_sums_are_rounded_once(compiled: Ops) -> None:
    # 256 + 1 + 1 is 256 in bfloat16 if rounded each time, and 258 if rounded at the end.
    slots_KS = torch.arange(3).view(3, 1)
    y_NM = torch.tensor([[256.0], [1.0], [1.0]], dtype=BF16)
    assert compiled.restore(y_NM, slots_KS, torch.ones(3, 1)).item() == 258.0
    assert compiled.restore(y_NM, slots_KS).item() == 258.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_slots_of_one_row_add_up_in_the_order_of_index_add(compiled: Ops, dtype: torch.dtype) -> None:
    # A long sum depends on its order and on where it is rounded, so equality means that both agree.
    num_slots, width = 499, 37
    dy_NM = torch.randn(num_slots, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    index_N = torch.zeros(num_slots, dtype=torch.int64)
    _, dx_RM = gathered(compiled, torch.zeros(2, width, dtype=dtype), index_N, dy_NM)
    assert_same_bits(dx_RM, torch.zeros(2, width, dtype=dtype).index_add(0, index_N, dy_NM))
    if dtype == torch.float32:  # the claim is not empty: summing backwards gives other bits
        assert not torch.equal(dx_RM, torch.zeros_like(dx_RM).index_add(0, index_N, dy_NM.flip(0)))
    if dtype == torch.bfloat16:  # and so does rounding after each addition
        rounded_M = torch.zeros(width, dtype=dtype)
        for dy_M in dy_NM:
            rounded_M += dy_M
        assert not torch.equal(dx_RM[0], rounded_M)


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
            found[num_threads] += gathered(compiled, x_SM, slots_KS[0], x_SM)
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
    index_N = slots_KS[0] - 3
    apart_N = torch.stack([index_N, index_N], dim=1)[:, 0]
    for one, other in zip(
        gathered(compiled, strided(rows_NM), apart_N, strided(d_out_SM)),
        gathered(compiled, rows_NM, index_N, d_out_SM),
        strict=True,
    ):
        assert_same_bits(one, other)
    # .sum().backward() hands over a gradient with strides 0.
    x_RM = torch.zeros(3, 5, requires_grad=True)
    compiled.gather_rows(x_RM, torch.tensor([0, 0, 2, 3])).sum().backward()
    assert x_RM.grad[:, 0].tolist() == [2.0, 0.0, 1.0]


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
        (lambda x: compiled.gather_rows(x, slots_KS.reshape(-1) - 1), (x_SM,)),
    ):
        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs)


def test_gradients_of_weights_without_data_lie_as_on_each_device(compiled: Ops) -> None:
    assert compiled.name == "compiled"
    for device in ("cpu", "cuda"):
        with FakeTensorMode():
            x_SM, y_NM, weights_SK = (torch.empty(shape, device=device) for shape in ((7, 5), (11, 5), (7, 2)))
            slots_KS = torch.empty((2, 7), dtype=torch.int64, device=device)
            _, d_weights_KS = torch.ops.fsmoe.restore_backward(x_SM, y_NM, slots_KS, weights_SK.t())
        assert d_weights_KS.stride() == ((7, 1) if device == "cpu" else (1, 2))


def test_required_takes_the_compiled_op(compiled: Ops) -> None:
    assert compiled.name == "compiled"
    x_RM = torch.zeros(1, 1, requires_grad=True)
    assert "fsmoe_gather_rows" in compiled.gather_rows(x_RM, torch.zeros(1, dtype=torch.int64)).grad_fn.name()


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
        (lambda o: o.gather_rows(torch.zeros(3), torch.zeros(2).long()), "x must be 2-dimensional"),
        (lambda o: o.gather_rows(torch.zeros(3, 2), torch.zeros(2, 1).long()), "index must be 1-dimensional"),
        (lambda o: o.gather_rows(torch.zeros(3, 2), torch.zeros(2).int()), "index must be int64"),
        (lambda o: o.gather_rows(torch.zeros(3, 2).long(), torch.zeros(2).long()), "x must be float32"),
        (
            lambda o: torch.ops.fsmoe.gather_rows_backward(torch.zeros(3, 2), torch.zeros(2).long(), 4),
            "dy has 3 rows but index has 2",
        ),
        (
            lambda o: torch.ops.fsmoe.gather_rows_backward(torch.zeros(2, 2), torch.zeros(2).long(), -1),
            "num_rows must not be negative",
        ),
    ],
)
def test_wrong_arguments_are_named(compiled: Ops, call, message: str) -> None:
    with pytest.raises(RuntimeError, match=re.escape(message)):
        call(compiled)
