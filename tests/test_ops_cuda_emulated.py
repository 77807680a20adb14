# SPDX-License-Identifier: Apache-2.0
"""What the CUDA kernels compute, checked where there is no GPU: the same sources, on emulated CUDA, on the CPU.

This finds wrong indices, missing barriers, sums in another order and writes outside of tensors. What only a GPU can
show, it does not: alignment faults, limits of the hardware, speed.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from ds_fsmoe.ops import reference  # noqa: E402
from tests.ops_cases import assert_same_bits, random_rows, random_slots  # noqa: E402
from tests.samples import sampled  # noqa: E402

REPOSITORY = Path(__file__).resolve().parents[1]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]  # in the order of the enum in launchers.h
# (S, M, K, N); widths that go in vectors of 16 bytes and others, and more than one round of the block's threads.
SHAPES_SMKN = [(1, 1, 1, 1), (7, 16, 2, 29), (11, 67, 5, 17), (3, 1064, 3, 7), (3, 2113, 1, 5), (5, 8, 3, 3)]
# (S, E, k, C); more than one tile of 256 tokens, more experts than a warp has lanes, k = E.
SHAPES_SEkC = [(1, 1, 1, 1), (13, 3, 2, 3), (541, 7, 2, 67), (263, 67, 3, 5), (17, 37, 37, 7), (523, 3, 3, 523)]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        pytest.skip(f"no C++ compiler: {compiler} is not on the PATH")
    output = tmp_path_factory.mktemp("emulated") / "kernels.so"
    folders = [f"-I{REPOSITORY / folder}" for folder in ("tests/emulated_cuda", "csrc/cuda")]
    command = [compiler, "-std=c++17", "-O1", "-ffp-contract=off", "-Wno-unknown-pragmas", "-shared", "-fPIC", *folders]
    source = REPOSITORY / "tests/emulated_cuda/library.cpp"
    done = subprocess.run([*command, str(source), "-o", str(output)], capture_output=True, text=True, timeout=600)
    if "_Float16" in done.stderr:
        pytest.skip(f"{compiler} has no _Float16, which stands for CUDA's half here")
    assert done.returncode == 0, done.stderr
    found = ctypes.CDLL(str(output))
    found.take_slots_workspace.restype = ctypes.c_int64
    return found


class Guarded:
    """A tensor of nonsense to be written, with a margin around it that must stay as it is."""

    MARGIN_BYTES = 256

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        size = dtype.itemsize * torch.Size(shape).numel()
        self.bytes = torch.full((size + 2 * self.MARGIN_BYTES + 64,), 0xA5, dtype=torch.uint8)
        start = self.MARGIN_BYTES + -(self.bytes.data_ptr() + self.MARGIN_BYTES) % 64
        self.tensor = self.bytes[start : start + size].view(dtype).view(shape)
        self.outside = [self.bytes[:start], self.bytes[start + size :]]

    def checked(self) -> Tensor:
        assert all((margin == 0xA5).all() for margin in self.outside), "written outside of the tensor"
        return self.tensor


def call(function, *arguments: Tensor | Guarded | torch.dtype | int | None) -> None:
    plain: list[object] = []
    for each in arguments:
        if isinstance(each, torch.dtype):
            plain.append(DTYPES.index(each))
        elif isinstance(each, int):
            plain.append(ctypes.c_int64(each))
        else:
            tensor = each.tensor if isinstance(each, Guarded) else each
            assert tensor is None or tensor.is_contiguous()
            plain.append(ctypes.c_void_p(None if tensor is None else tensor.data_ptr()))
    assert function(*plain) == 0


CASES = list(itertools.product(SHAPES_SMKN, DTYPES, DTYPES))
# Every fourth: each shape, and each pair of types.
SOME_CASES = range(0, len(CASES), 4)


@sampled(("shape_SMKN", "dtype", "wire"), CASES, kept=SOME_CASES, ids=str)
def test_arrange_equals_reference_bit_for_bit(library, shape_SMKN, dtype, wire) -> None:
    num_tokens, width, num_choices, num_slots = shape_SMKN
    x_SM, slots_KS = random_rows(num_tokens, width, dtype), random_slots(num_tokens, num_choices, num_slots)
    out, taken = Guarded((num_slots, width), wire), Guarded((num_slots,), torch.uint8)
    call(library.arrange, x_SM, dtype, slots_KS, out, wire, taken, num_tokens, num_choices, num_slots, width)
    taken.checked()
    assert_same_bits(out.checked(), reference.arrange(x_SM, slots_KS, num_slots, wire))


@sampled(("shape_SMKN", "dtype", "out_dtype"), CASES, kept=SOME_CASES, ids=str)
def test_restore_and_its_gradients_equal_reference(library, shape_SMKN, dtype, out_dtype) -> None:
    num_tokens, width, num_choices, num_slots = shape_SMKN
    slots_KS = random_slots(num_tokens, num_choices, num_slots)
    y_NM = random_rows(num_slots, width, dtype).requires_grad_()
    weights_KS = random_rows(num_choices, num_tokens, torch.float32, 2).requires_grad_()
    d_out_SM = random_rows(num_tokens, width, out_dtype, 3)
    sizes = (num_tokens, num_choices, num_slots, width)
    for weights in (None, weights_KS):
        expected_SM = reference.restore(y_NM, slots_KS, weights, out_dtype)
        out = Guarded((num_tokens, width), out_dtype)
        call(library.restore, y_NM, dtype, slots_KS, weights, out, out_dtype, *sizes)
        assert_same_bits(out.checked(), expected_SM.detach())
    expected_SM.backward(d_out_SM)
    dy, d_weights = Guarded((num_slots, width), dtype), Guarded((num_choices, num_tokens), torch.float32)
    taken = Guarded((num_slots,), torch.uint8)
    inputs = (d_out_SM, out_dtype, y_NM, dtype, slots_KS, weights_KS)
    call(library.restore_backward, *inputs, dy, d_weights, taken, *sizes)
    taken.checked()
    assert_same_bits(dy.checked(), y_NM.grad)
    largest = float(d_out_SM.double().abs().sum(1).max() * y_NM.detach().double().abs().max())
    torch.testing.assert_close(d_weights.checked(), weights_KS.grad, rtol=0, atol=1e-6 * largest)


def test_rows_that_do_not_begin_at_16_bytes_are_moved_value_by_value(library) -> None:
    num_tokens, width = 5, 8
    x_SM = (
        random_rows(num_tokens + 1, width, torch.float32).view(-1)[1 : 1 + num_tokens * width].view(num_tokens, width)
    )
    assert x_SM.data_ptr() % 16
    slots_KS = random_slots(num_tokens, 2, 11)
    out, taken = Guarded((11, width), torch.float32), Guarded((11,), torch.uint8)
    call(library.arrange, x_SM, x_SM.dtype, slots_KS, out, x_SM.dtype, taken, num_tokens, 2, 11, width)
    assert_same_bits(out.checked(), reference.arrange(x_SM, slots_KS, 11))


def emulated_take_slots(library, experts_KS, num_experts, capacity, used_S, priority, scores, strides):
    num_choices, num_tokens = experts_KS.shape
    number = ctypes.c_int(("choice", "token", "score").index(priority))
    sizes = tuple(map(ctypes.c_int64, (num_tokens, num_choices, num_experts)))
    space = Guarded((library.take_slots_workspace(*sizes, number),), torch.int32)
    slots, counts = Guarded((num_choices, num_tokens), torch.int64), Guarded((num_experts,), torch.int64)
    call(
        lambda experts, used, scores, *rest: library.take_slots(experts, used, number, scores, *rest),
        *(experts_KS, used_S, scores, *strides, num_tokens, num_choices, num_experts, capacity, slots, counts, space),
    )
    space.checked()
    return reference.Slots(experts_KS, slots.checked(), counts.checked())


@pytest.mark.parametrize("priority", reference.PRIORITIES)
@pytest.mark.parametrize("shape_SEkC", SHAPES_SEkC, ids=str)
def test_slots_equal_reference(library, shape_SEkC: tuple[int, int, int, int], priority: str) -> None:
    num_tokens, num_experts, k, capacity = shape_SEkC
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        scores_SE = torch.randn(num_tokens, num_experts, generator=generator)
        scores_SE[::2] = scores_SE[::2].round()  # equal ones
        scores_SE[1::5, 0] = float("nan")
        scores_SE[2::5, -1] = -0.0
        used_S = torch.rand(num_tokens, generator=generator) < 0.8 if seed else None
        experts = Guarded((k, num_tokens), torch.int64)
        call(library.choose, scores_SE, num_tokens, num_experts, k, experts)
        expected = reference.top_k_slots(scores_SE, k, capacity, used_S, priority)
        assert torch.equal(experts.checked(), expected.experts_KS)
        of_scores = (scores_SE, (0, num_experts, 1))
        found = emulated_take_slots(library, expected.experts_KS, num_experts, capacity, used_S, priority, *of_scores)
        assert torch.equal(found.slots_KS, expected.slots_KS)
        assert torch.equal(found.counts_E, expected.counts_E)


@pytest.mark.parametrize("priority", reference.PRIORITIES)
def test_choices_made_elsewhere_get_the_same_slots(library, priority: str) -> None:
    num_tokens, num_experts, k, capacity = 541, 5, 3, 53
    generator = torch.Generator().manual_seed(0)
    experts_KS = torch.rand(num_tokens, num_experts, generator=generator).topk(k).indices.t().contiguous()
    experts_KS[torch.rand(experts_KS.shape, generator=generator) < 0.2] = -1
    scores_KS = torch.randn(k, num_tokens, generator=generator)
    case = (experts_KS, num_experts, capacity, None, priority)
    found = emulated_take_slots(library, *case, scores_KS, (num_tokens, 1, 0))
    expected = reference.take_slots(*case, scores_KS)
    assert torch.equal(found.slots_KS, expected.slots_KS)
    assert torch.equal(found.counts_E, expected.counts_E)
