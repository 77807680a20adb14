# SPDX-License-Identifier: Apache-2.0
"""Rows of a decision are numbered, counted and checked: every set of ops against a loop over choices."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")

from torch import Tensor  # noqa: E402

from ds_fsmoe.ops import Ops  # noqa: E402
from tests.ops_cases import EVERY_OPS, compiled_ops, ops_named  # noqa: E402

# (S, E, K, C): no token, no choice, one of each; more experts than tokens; several places of an expert.
SHAPES_SEKC = [(0, 3, 2, 1), (5, 3, 0, 1), (1, 1, 1, 1), (13, 3, 2, 1), (541, 7, 2, 1), (37, 384, 8, 1), (64, 5, 3, 4)]
SEGMENTS = [None, [1.0], [0.25, 0.25, 0.9, 1.0], [k / 30 for k in range(1, 31)]]


@pytest.fixture(params=EVERY_OPS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return ops_named(request.param)


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


@pytest.mark.parametrize("is_wrong", [False, True])
@pytest.mark.parametrize("parts", SEGMENTS, ids=lambda each: f"{len(each or ())} segments")
@pytest.mark.parametrize("shape_SEKC", SHAPES_SEKC, ids=str)
def test_rows_are_numbered_queue_by_queue(ops: Ops, shape_SEKC, parts: list[float] | None, is_wrong: bool) -> None:
    num_tokens, num_experts, _, capacity = shape_SEKC
    choices_KS = drawn(shape_SEKC, is_wrong)
    ends = [num_tokens] if parts is None else [round(part * num_tokens) for part in parts]
    first, step = list(range(len(ends))), [len(ends)] * len(ends)
    segments_3T = None if parts is None else torch.tensor([ends, first, step])
    found = ops.number_rows(choices_KS, num_experts, capacity, segments_3T)
    rows, counts = numbered(choices_KS.tolist(), num_experts, capacity, ends, first, step)
    assert found.rows_KS.tolist() == rows
    assert found.counts_V.tolist() == counts
    assert found.ends_V.tolist() == list(itertools.accumulate(counts))
    assert (found.rows_KS.dtype, found.counts_V.dtype, found.ends_V.dtype) == (torch.int64, torch.int64, torch.int32)
    is_out = bool(((choices_KS < 0) | (choices_KS > num_experts * capacity)).any())
    assert int(found.fault) == is_out


def test_choices_may_lie_token_by_token_in_memory(ops: Ops) -> None:
    shape = 29, 5, 3, 1
    choices_KS = drawn(shape)
    transposed_KS = choices_KS.t().contiguous().t()
    for one, other in zip(ops.number_rows(choices_KS, 5), ops.number_rows(transposed_KS, 5), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("limits", "fault"), [([2, 3, 0], 0), ([1, 3, 0], 2), ([2, 3, 9], 0)], ids=str)
def test_more_rows_than_an_expert_may_have_are_a_fault(ops: Ops, limits: list[int], fault: int) -> None:
    choices_KS = torch.tensor([[0, 1, 1], [1, 0, 3]])
    assert int(ops.number_rows(choices_KS, 3, 1, None, torch.tensor(limits)).fault) == fault
    wrong_KS = torch.tensor([[0, 1, 1], [1, 0, 4]])
    assert int(ops.number_rows(wrong_KS, 3, 1, None, torch.tensor(limits)).fault) == fault + 1


def test_a_segment_may_number_its_experts_in_its_own_steps(ops: Ops) -> None:
    """Two chunks of two segments and of one, each chunk with the queues of all its experts one after another."""
    choices_KS = torch.tensor([[0, 1, 1, 0, 2, 0]])
    segments_3T = torch.tensor([[2, 4, 6], [0, 1, 6], [2, 2, 1]])
    found = ops.number_rows(choices_KS, 3, 1, segments_3T)
    rows, counts = numbered(choices_KS.tolist(), 3, 1, *segments_3T.tolist())
    assert found.rows_KS.tolist() == rows
    assert found.counts_V.tolist() == counts == [1, 1, 1, 1, 0, 0, 1, 0, 1]


def test_what_does_not_fit_is_refused() -> None:
    good = torch.zeros(2, 3, dtype=torch.int64)
    for arguments, match in (
        ((good[0], 2), r"choices must be \[K, S\]"),
        ((good.int(), 2), "choices must be int64"),
        ((good, 0), "num_experts must be at least 1"),
        ((good, 2, -1), "capacity must not be negative"),
        ((good, 2, 1, good), r"segments must be int64 and \[3, T\]"),
        ((good, 2, 1, None, good[0]), r"limits must be int64 and \[2\]"),
    ):
        with pytest.raises(RuntimeError, match=match):
            compiled_ops().number_rows(*arguments)


def test_torch_is_told_the_truth_about_the_operator() -> None:
    assert compiled_ops().name == "compiled"
    choices_KS = drawn((13, 3, 2, 1))
    segments_3T = torch.tensor([[5, 13], [0, 1], [2, 2]])
    torch.library.opcheck(torch.ops.fsmoe.number_rows.default, (choices_KS, 3, 1, segments_3T, torch.full((3,), 9)))
