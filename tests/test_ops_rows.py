# SPDX-License-Identifier: Apache-2.0
"""Rows of a decision are numbered, arranged, restored and gathered as loops over choices do it.

That compiled ops equal the reference is in test_gpu_ops.py; what they refuse, in test_gpu_one_rank.py.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

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

FP32, FP64, BF16, _ = DTYPES


@pytest.fixture(params=EVERY_OPS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return ops_named(request.param)


@pytest.fixture
def compiled() -> Ops:
    return compiled_ops()


def results(call: Callable[..., Any], arguments: Any, lies: Callable[[Tensor], Tensor] = lambda each: each) -> list:
    """What a call returns, and the gradients of its inputs where it has any; all tensors as ``lies`` puts them."""
    given = [lies(each.detach()) if isinstance(each, Tensor) else each for each in arguments]
    inputs = [each.requires_grad_() for each in given if isinstance(each, Tensor) and each.is_floating_point()]
    found = call(*given)
    if not isinstance(found, Tensor):
        return [*found]
    dy = lies(random_rows(*found.shape, found.dtype, 9))
    return [found.detach(), *torch.autograd.grad(found, inputs, dy)]


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
    x_SM.requires_grad_()
    found_NM = reference.gather_rows(x_SM, index_N)
    assert_same_bits(found_NM.detach(), gathered_NM)
    assert_same_bits(torch.autograd.grad(found_NM, x_SM, y_NM)[0], dx_SM)


def test_empty_slots_are_zero_and_dropped_tokens_come_back_as_zero_whatever_the_others_are(ops: Ops) -> None:
    x_SM = torch.tensor([[math.inf, math.nan], [-math.inf, 1.0], [2.0, -0.0]], requires_grad=True)
    slots_KS = torch.tensor([[3, 4, 0]])
    arranged_NM = ops.arrange(x_SM, slots_KS, 4).detach()
    assert_same_bits(arranged_NM, torch.tensor([[2.0, -0.0], [0.0, 0.0], [0.0, 0.0], [math.inf, math.nan]]))
    # Not even a weight that is no number brings back what was dropped.
    restored_SM = ops.restore(arranged_NM, slots_KS, torch.tensor([[1.0, math.nan, 0.5]]))
    assert_same_bits(restored_SM[1:], torch.tensor([[0.0, 0.0], [1.0, 0.0]]))
    index_N = torch.tensor([2, 3, -1, -(2**63), 2**63 - 1, 4])
    y_NM = ops.gather_rows(x_SM, index_N)
    assert_same_bits(y_NM.detach(), torch.cat([x_SM.detach()[2:], torch.zeros(5, 2)]))
    dy_NM = torch.full((6, 2), math.nan).index_fill(0, torch.tensor([0]), 3.0)
    assert_same_bits(torch.autograd.grad(y_NM, x_SM, dy_NM)[0], torch.tensor([[0.0, 0.0], [0.0, 0.0], [3.0, 3.0]]))


# (S, E, K, C): no token, no choice, one of each; more experts than tokens; several places of an expert.
SHAPES_SEKC = [(0, 3, 2, 1), (5, 3, 0, 1), (1, 1, 1, 1), (13, 3, 2, 1), (541, 7, 2, 1), (37, 384, 8, 1), (64, 5, 3, 4)]
SEGMENTS = [None, [1.0], [0.3, 0.7, 1.0], [0.25, 0.25, 0.9, 1.0], [k / 30 for k in range(1, 31)]]


def numbered(
    choices: list[list[int]], num_experts: int, capacity: int, ends: list[int], first: list[int], step: list[int]
) -> tuple[list[list[int]], list[int]]:
    """The definition: queue by queue, and in a queue token by token, choice by choice."""
    num_tokens = len(choices[0]) if choices else 0
    queues: list[list[tuple[int, int]]] = [[] for _ in range(num_experts * len(ends))]
    rows = [[len(choices) * num_tokens] * num_tokens for _ in choices]
    for s, k in itertools.product(range(num_tokens), range(len(choices))):
        if 0 <= choices[k][s] < num_experts * capacity:
            segment = next(t for t, end in enumerate(ends) if s < end)
            queues[choices[k][s] // capacity * step[segment] + first[segment]].append((k, s))
    for number, (k, s) in enumerate(itertools.chain(*queues)):
        rows[k][s] = number
    return rows, list(map(len, queues))


def drawn(shape_SEKC: tuple[int, int, int, int], is_wrong: bool = False) -> Tensor:
    num_tokens, num_experts, num_choices, capacity = shape_SEKC
    generator = torch.Generator().manual_seed(num_tokens)
    lowest, highest = (-1, num_experts * capacity + 3) if is_wrong else (0, num_experts * capacity + 1)
    return torch.randint(lowest, highest, (num_choices, num_tokens), generator=generator)


@pytest.mark.parametrize("shape_SEKC", SHAPES_SEKC, ids=str)
def test_rows_are_numbered_queue_by_queue(ops: Ops, shape_SEKC: tuple[int, int, int, int]) -> None:
    num_tokens, num_experts, _, capacity = shape_SEKC
    for parts, is_wrong in itertools.product(SEGMENTS, (False, True)):
        choices_KS = drawn(shape_SEKC, is_wrong)
        ends = [num_tokens] if parts is None else [round(part * num_tokens) for part in parts]
        first, step = list(range(len(ends))), [len(ends)] * len(ends)
        if len(ends) == 3:  # two chunks of two segments and of one, each with the queues of all its experts in a row
            first, step = [0, 1, 2 * num_experts], [2, 2, 1]
        segments_3T = None if parts is None else torch.tensor([ends, first, step])
        found = ops.number_rows(choices_KS, num_experts, capacity, segments_3T)
        rows, counts = numbered(choices_KS.tolist(), num_experts, capacity, ends, first, step)
        assert found.rows_KS.tolist() == rows
        assert found.counts_V.tolist() == counts
        assert found.ends_V.tolist() == list(itertools.accumulate(counts))
        types = found.rows_KS.dtype, found.counts_V.dtype, found.ends_V.dtype
        assert types == (torch.int64, torch.int64, torch.int32)
        assert int(found.fault) == bool(((choices_KS < 0) | (choices_KS > num_experts * capacity)).any())


def test_more_rows_than_an_expert_may_have_are_a_fault(ops: Ops) -> None:
    for limits, fault in (([2, 3, 0], 0), ([1, 3, 0], 2), ([2, 3, 9], 0)):
        for last, is_out in ((3, 0), (4, 1)):
            choices_KS = torch.tensor([[0, 1, 1], [1, 0, last]])
            assert int(ops.number_rows(choices_KS, 3, 1, None, torch.tensor(limits)).fault) == fault + is_out


# ---- the compiled ops


def test_results_depend_neither_on_the_number_of_threads_nor_on_where_inputs_lie(compiled: Ops) -> None:
    def apart(each: Tensor) -> Tensor:
        return each.T.contiguous().T if each.dim() == 2 else torch.stack([each, each], dim=1)[:, 0]

    num_tokens, width, num_choices, num_slots = 1021, 509, 3, 4001
    slots_KS, weights_KS = random_slots(num_tokens, num_choices, num_slots), random_rows(num_choices, num_tokens, FP32)
    x_SM, y_NM = random_rows(num_tokens, width, BF16), random_rows(num_slots, width, BF16)
    used_S = torch.arange(num_tokens) % 3 > 0
    before = torch.get_num_threads()
    for call, arguments in (
        (compiled.restore, (y_NM, slots_KS, weights_KS, BF16)),
        (compiled.arrange, (x_SM, slots_KS, num_slots, BF16)),
        (compiled.arrange, (x_SM, slots_KS, num_slots, FP32)),
        (compiled.gather_rows, (x_SM, slots_KS[0] - 3)),
        (compiled.top_k_slots, (random_rows(num_tokens, 31, FP32), 4, 257, used_S)),
        (compiled.number_rows, (drawn((num_tokens, 31, 3, 1)), 31)),
    ):
        try:
            torch.set_num_threads(1)
            one = results(call, arguments)
            torch.set_num_threads(3)
            others = results(call, arguments), results(call, arguments, apart)
        finally:
            torch.set_num_threads(before)
        for other in others:
            for found, expected in zip(other, one, strict=True):
                assert not found.requires_grad
                assert_same_bits(found, expected)


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
    # .sum().backward() hands over a gradient with strides 0.
    x_RM = torch.zeros(3, 5, requires_grad=True)
    compiled.gather_rows(x_RM, torch.tensor([0, 0, 2, 3])).sum().backward()
    assert x_RM.grad[:, 0].tolist() == [2.0, 0.0, 1.0]


def test_gradients_of_weights_without_data_lie_as_on_each_device(compiled: Ops) -> None:
    assert compiled.name == "compiled"
    for device in ("cpu", "cuda"):
        with FakeTensorMode():
            x_SM, y_NM, weights_SK = (torch.empty(shape, device=device) for shape in ((7, 5), (11, 5), (7, 2)))
            slots_KS = torch.empty((2, 7), dtype=torch.int64, device=device)
            _, d_weights_KS = torch.ops.fsmoe.restore_backward(x_SM, y_NM, slots_KS, weights_SK.t())
        assert d_weights_KS.stride() == ((7, 1) if device == "cpu" else (1, 2))


@pytest.mark.parametrize(
    ("op", "arguments", "message"),
    [
        ("arrange", (torch.zeros(2, 2), torch.tensor([[1, 1]]), 2), "slot 1 is given to two tokens"),
        ("gather_rows", (torch.zeros(3), torch.zeros(2).long()), "x must be 2-dimensional"),
        ("gather_rows", (torch.zeros(3, 2), torch.zeros(2, 1).long()), "index must be 1-dimensional"),
        ("gather_rows", (torch.zeros(3, 2), torch.zeros(2).int()), "index must be int64"),
        ("gather_rows", (torch.zeros(3, 2).long(), torch.zeros(2).long()), "x must be float32"),
        ("gather_rows_backward", (torch.zeros(3, 2), torch.zeros(2).long(), 4), "dy has 3 rows but index has 2"),
        ("gather_rows_backward", (torch.zeros(2, 2), torch.zeros(2).long(), -1), "num_rows must not be negative"),
    ],
)
def test_what_no_device_but_the_cpu_checks_is_named(compiled: Ops, op: str, arguments: tuple, message: str) -> None:
    assert compiled.name == "compiled"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        getattr(torch.ops.fsmoe, op)(*arguments)
