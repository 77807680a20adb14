# SPDX-License-Identifier: Apache-2.0
"""What tests of the ops share: the compiled library, made once, and slots as gates give them."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile

import pytest
import torch
from torch import Tensor

from ds_fsmoe.ops import Ops, load_ops

# (S, M, K, N): tokens, width, choices, slots. Odd and prime; single elements; nothing at all of one kind; widths around
# a cache line and above a piece of columns; one that is shared out among threads.
SHAPES_SMKN = [
    (1, 1, 1, 1),
    (7, 13, 2, 29),
    (31, 16, 3, 31),
    (11, 67, 5, 17),
    (5, 2053, 2, 7),
    (509, 131, 2, 1021),
    (0, 5, 2, 7),
    (5, 7, 3, 0),
    (5, 0, 1, 3),
]
EVERY_OPS = ("reference", "plain", "compiled")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@functools.cache
def compiled_ops(device_type: str = "cpu") -> Ops:
    """The compiled ops; skips the test where there is nothing to compile or run them with."""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        pytest.skip(f"no C++ compiler: {compiler} is not on the PATH")
    with pytest.MonkeyPatch.context() as patch:
        # `make test` names a folder: there it is compiled once, and again when the source has changed.
        if "TORCH_EXTENSIONS_DIR" not in os.environ:
            patch.setenv("TORCH_EXTENSIONS_DIR", tempfile.mkdtemp(prefix="torch_extensions_"))
        patch.delenv("LOCAL_RANK", raising=False)
        return load_ops("required", device_type)


def ops_named(name: str) -> Ops:
    """One of :data:`EVERY_OPS`."""
    return compiled_ops() if name == "compiled" else load_ops(name, "cpu")


def random_slots(num_tokens: int, num_choices: int, num_slots: int, seed: int = 0) -> Tensor:
    """[K, S]: no slot twice; a part of the choices is dropped, in each of the ways a slot can be out of range."""
    generator = torch.Generator().manual_seed(seed)
    out_of_range = torch.tensor([num_slots, -1, num_slots + 7, -(2**63), 2**63 - 1])
    dropped = out_of_range[torch.randint(len(out_of_range), (num_choices * num_tokens,), generator=generator)]
    chosen = torch.randperm(num_slots, generator=generator)[: int(0.8 * num_choices * num_tokens)]
    places = torch.randperm(num_choices * num_tokens, generator=generator)[: len(chosen)]
    return dropped.scatter(0, places, chosen[: len(places)]).view(num_choices, num_tokens)


def segments_of(num_tokens: int, count: int) -> Tensor:
    """[3, T]: so many segments, some of them without a token, with queues expert by expert."""
    ends_T = torch.sort(torch.randint(0, num_tokens + 1, (count,), generator=torch.Generator().manual_seed(2))).values
    ends_T[-1] = num_tokens
    return torch.stack([ends_T, torch.arange(count), torch.full((count,), count)])


def random_rows(num_rows: int, width: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Equal in shape, dtype and every bit: tells -0 from 0, and compares nan."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.numel() == 0 or torch.equal(
        actual.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)
    )
