# SPDX-License-Identifier: Apache-2.0
"""The row gather: the reference against a loop, and the compiled op against the reference."""

from __future__ import annotations

import math
import os
import re
import shutil

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")

from torch import Tensor  # noqa: E402

from ds_fsmoe.ops import Ops, load_ops  # noqa: E402

# (R, M, N): rows, width, slots. Primes, single elements, widths around a cache line, empties of every kind, and one
# large enough for several threads.
SHAPES_RMN = [
    (1, 1, 1),
    (7, 13, 29),
    (31, 16, 17),
    (5, 67, 101),
    (509, 131, 1021),
    (0, 5, 7),
    (5, 7, 0),
    (0, 3, 0),
    (3, 0, 5),
]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Ops:
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        pytest.skip(f"no C++ compiler: {compiler} is not on the PATH")
    with pytest.MonkeyPatch.context() as patch:
        # `make test` names a folder: there it is compiled once, and again when the source has changed.
        if "TORCH_EXTENSIONS_DIR" not in os.environ:
            patch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path_factory.mktemp("torch_extensions")))
        patch.delenv("LOCAL_RANK", raising=False)
        return load_ops("required", "cpu")


@pytest.fixture
def reference() -> Ops:
    return load_ops("reference", "cpu")


def make_rows(shape_RMN: tuple[int, int, int], dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """(x [R, M], index [N], dy [N, M]); a good part of the slots is empty, rows repeat."""
    num_rows, width, num_slots = shape_RMN
    generator = torch.Generator().manual_seed(seed)
    x_RM = torch.randn(num_rows, width, generator=generator, dtype=torch.float64).to(dtype)
    index_N = torch.randint(-2, num_rows + 3, (num_slots,), generator=generator)
    dy_NM = torch.randn(num_slots, width, generator=generator, dtype=torch.float64).to(dtype)
    return x_RM, index_N, dy_NM


def forward_and_gradient(ops: Ops, x_RM: Tensor, index_N: Tensor, dy_NM: Tensor) -> tuple[Tensor, Tensor]:
    x_RM = x_RM.detach().requires_grad_()
    y_NM = ops.gather_rows(x_RM, index_N)
    y_NM.backward(dy_NM)
    assert x_RM.grad is not None
    return y_NM.detach(), x_RM.grad


def loop_forward(x_RM: list[list[float]], index_N: list[int], width: int) -> list[list[float]]:
    return [list(x_RM[r]) if 0 <= r < len(x_RM) else [0.0] * width for r in index_N]


def loop_gradient(dy_NM: list[list[float]], index_N: list[int], num_rows: int, width: int) -> list[list[float]]:
    dx_RM = [[0.0] * width for _ in range(num_rows)]
    for n, r in enumerate(index_N):
        if 0 <= r < num_rows:
            dx_RM[r] = [a + b for a, b in zip(dx_RM[r], dy_NM[n], strict=True)]
    return dx_RM


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bytes: tells -0 from 0, and compares nan."""
    return tensor.contiguous().view(torch.uint8) if tensor.numel() else tensor


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert torch.equal(bits(actual), bits(expected))


# ---- the reference against an explicit loop


@pytest.mark.parametrize("shape_RMN", SHAPES_RMN, ids=str)
def test_reference_equals_a_loop_over_slots(reference: Ops, shape_RMN: tuple[int, int, int]) -> None:
    num_rows, width, _ = shape_RMN
    x_RM, index_N, dy_NM = make_rows(shape_RMN, torch.float64)
    y_NM, dx_RM = forward_and_gradient(reference, x_RM, index_N, dy_NM)
    assert y_NM.tolist() == loop_forward(x_RM.tolist(), index_N.tolist(), width)
    assert dx_RM.tolist() == loop_gradient(dy_NM.tolist(), index_N.tolist(), num_rows, width)


@pytest.mark.parametrize("origin", ["reference", "compiled"])
def test_empty_slots_read_as_zero_rows(origin: str, request: pytest.FixtureRequest) -> None:
    ops: Ops = request.getfixturevalue(origin)
    x_RM = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    lowest, highest = -(2**63), 2**63 - 1
    y_NM = ops.gather_rows(x_RM, torch.tensor([2, 3, -1, 0, lowest, highest, 4]))
    zeros = [0.0, 0.0]
    assert y_NM.tolist() == [[5.0, 6.0], zeros, zeros, [1.0, 2.0], zeros, zeros, zeros]


@pytest.mark.parametrize("origin", ["reference", "compiled"])
def test_inf_and_nan_do_not_leak_into_empty_slots(origin: str, request: pytest.FixtureRequest) -> None:
    ops: Ops = request.getfixturevalue(origin)
    x_RM = torch.tensor([[math.inf, math.nan], [-math.inf, -0.0]])
    y_NM, dx_RM = forward_and_gradient(
        ops, x_RM, torch.tensor([2, 1]), torch.tensor([[math.nan, math.inf], [1.0, 2.0]])
    )
    assert_same_bits(y_NM, torch.tensor([[0.0, 0.0], [-math.inf, -0.0]]))
    assert_same_bits(dx_RM, torch.tensor([[0.0, 0.0], [1.0, 2.0]]))


# ---- the compiled op against the reference


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape_RMN", SHAPES_RMN, ids=str)
def test_compiled_equals_reference_bit_for_bit(
    compiled: Ops, reference: Ops, shape_RMN: tuple[int, int, int], dtype: torch.dtype
) -> None:
    for seed in range(3):
        rows = make_rows(shape_RMN, dtype, seed)
        y_NM, dx_RM = forward_and_gradient(compiled, *rows)
        expected_y_NM, expected_dx_RM = forward_and_gradient(reference, *rows)
        assert_same_bits(y_NM, expected_y_NM)
        assert_same_bits(dx_RM, expected_dx_RM)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_slots_of_one_row_add_up_in_the_order_of_index_add(compiled: Ops, dtype: torch.dtype) -> None:
    # A long sum depends on its order and on where it is rounded, so equality means that both agree.
    num_slots, width = 499, 37
    dy_NM = torch.randn(num_slots, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    index_N = torch.zeros(num_slots, dtype=torch.int64)
    _, dx_RM = forward_and_gradient(compiled, torch.zeros(2, width, dtype=dtype), index_N, dy_NM)
    assert_same_bits(dx_RM, torch.zeros(2, width, dtype=dtype).index_add(0, index_N, dy_NM))
    if dtype == torch.float32:  # the claim is not empty: summing backwards gives other bits
        assert not torch.equal(dx_RM, torch.zeros_like(dx_RM).index_add(0, index_N, dy_NM.flip(0)))
    if dtype == torch.bfloat16:  # and so does rounding after each addition
        rounded_M = torch.zeros(width, dtype=dtype)
        for dy_M in dy_NM:
            rounded_M += dy_M
        assert not torch.equal(dx_RM[0], rounded_M)


def test_result_does_not_depend_on_the_number_of_threads(compiled: Ops) -> None:
    rows = make_rows((509, 1031, 2039), torch.bfloat16)
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        y_NM, dx_RM = forward_and_gradient(compiled, *rows)
        torch.set_num_threads(3)
        y3_NM, dx3_RM = forward_and_gradient(compiled, *rows)
    finally:
        torch.set_num_threads(num_threads)
    assert_same_bits(y3_NM, y_NM)
    assert_same_bits(dx3_RM, dx_RM)


def test_inputs_need_not_be_contiguous(compiled: Ops, reference: Ops) -> None:
    x_RM, index_N, dy_NM = make_rows((11, 14, 46), torch.float32)
    strided = (x_RM.T.contiguous().T, torch.stack([index_N, index_N - 1], dim=1)[:, 0], dy_NM.T.contiguous().T)
    assert not any(tensor.is_contiguous() for tensor in strided)
    expected = forward_and_gradient(reference, x_RM, index_N, dy_NM)
    for actual, wanted in zip(forward_and_gradient(compiled, *strided), expected, strict=True):
        assert_same_bits(actual, wanted)


def test_a_gradient_expanded_from_one_value_is_read_correctly(compiled: Ops) -> None:
    # .sum().backward() hands over a gradient with strides 0.
    x_RM = torch.zeros(3, 5, requires_grad=True)
    compiled.gather_rows(x_RM, torch.tensor([0, 0, 2, 3])).sum().backward()
    assert x_RM.grad is not None
    assert x_RM.grad[:, 0].tolist() == [2.0, 0.0, 1.0]


@pytest.mark.parametrize("shape_RMN", [(5, 3, 7), (0, 3, 2), (4, 3, 0)], ids=str)
def test_gradients_equal_finite_differences(compiled: Ops, shape_RMN: tuple[int, int, int]) -> None:
    x_RM, index_N, _ = make_rows(shape_RMN, torch.float64)
    x_RM.requires_grad_()
    assert torch.autograd.gradcheck(compiled.gather_rows, (x_RM, index_N))
    assert torch.autograd.gradgradcheck(compiled.gather_rows, (x_RM, index_N))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_torch_accepts_the_operators(compiled: Ops, dtype: torch.dtype) -> None:
    x_RM, index_N, dy_NM = make_rows((7, 5, 11), dtype)
    torch.library.opcheck(torch.ops.fsmoe.gather_rows.default, (x_RM.requires_grad_(), index_N))
    torch.library.opcheck(torch.ops.fsmoe.gather_rows_backward.default, (dy_NM.requires_grad_(), index_N, 7))


@pytest.mark.parametrize(
    ("x", "index", "message"),
    [
        (torch.zeros(3), torch.zeros(2, dtype=torch.int64), "x must be 2-dimensional"),
        (torch.zeros(3, 2), torch.zeros(2, 1, dtype=torch.int64), "index must be 1-dimensional"),
        (torch.zeros(3, 2), torch.zeros(2, dtype=torch.int32), "index must be int64"),
        (torch.zeros(3, 2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), "x must be float32"),
    ],
)
def test_wrong_arguments_are_named(compiled: Ops, x: Tensor, index: Tensor, message: str) -> None:
    with pytest.raises(RuntimeError, match=re.escape(message)):
        compiled.gather_rows(x, index)


def test_backward_refuses_a_gradient_of_another_length(compiled: Ops) -> None:
    with pytest.raises(RuntimeError, match="dy has 3 rows but index has 2"):
        torch.ops.fsmoe.gather_rows_backward(torch.zeros(3, 2), torch.zeros(2, dtype=torch.int64), 4)
    with pytest.raises(RuntimeError, match="num_rows must not be negative"):
        torch.ops.fsmoe.gather_rows_backward(torch.zeros(2, 2), torch.zeros(2, dtype=torch.int64), -1)


def test_required_takes_the_compiled_op(compiled: Ops) -> None:
    assert compiled.name == "compiled"
    x_RM = torch.zeros(1, 1, requires_grad=True)
    assert "fsmoe_gather_rows" in compiled.gather_rows(x_RM, torch.zeros(1, dtype=torch.int64)).grad_fn.name()
