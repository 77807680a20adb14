# SPDX-License-Identifier: Apache-2.0
"""Products of rows, sorted by expert, with the experts' stacked weights, forward and backward without autograd.

``linears`` and ``adapters`` call these functions. They use torch's grouped product where it needs no wait for the
device, else one product per expert.

Letters: k experts, R rows, I features in, O features out. A weight is [k, O, I], or [k, I, O] where it is transposed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

_GROUPED_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_STRIDE_BYTES = 16
"""Alignment that torch's grouped product requires of the strides of its matrices, and on CUDA of addresses."""
_COLUMNS = 8
"""A number of columns that a grouped product accepts in every dtype."""
_WORTH_A_LAUNCH_BYTES = 16 * 2**20
"""The host needs about 5 us to launch a product, in which an H100 moves 16 MB."""


@dataclass(slots=True)
class RowGroups:
    """Describes the rows of each expert, which are adjacent."""

    sizes: list[int]
    """The number of rows of each of k experts, on the host."""
    ends_k: torch.Tensor
    """[k] int32, on the device: the end of each expert's rows."""
    is_grouped: bool
    """Whether torch's grouped product accepts the rows and weights, see :func:`takes_grouped`."""

    @classmethod
    def equal(cls, num_experts: int, size: int, device: torch.device, is_grouped: bool) -> RowGroups:
        """Return the groups of experts with equally many rows."""
        ends_k = torch.arange(1, num_experts + 1, dtype=torch.int32, device=device) * size
        return cls([size] * num_experts, ends_k, is_grouped)

    @property
    def num_rows(self) -> int:
        """Return the number of rows of all experts."""
        return sum(self.sizes)

    def rows_of_each(self, values_kX: torch.Tensor) -> torch.Tensor:
        """Return the value of each row's expert, [R, X]."""
        sizes_k = self.ends_k.diff(prepend=self.ends_k.new_zeros(1))
        return torch.repeat_interleave(values_kX, sizes_k, dim=0, output_size=self.num_rows)

    def runs(self) -> list[tuple[int, int, int]]:
        """Return (expert, start, stop) of each expert with rows."""
        ends = list(itertools.accumulate(self.sizes))
        return [(k, end - size, end) for k, (size, end) in enumerate(zip(self.sizes, ends, strict=True)) if size]


def takes_grouped(widths: Iterable[int], dtypes: Collection[torch.dtype], device: torch.device) -> bool:
    """Return True if torch has a grouped product for these widths and dtypes that does not wait for the device."""
    dtype = next(iter(dtypes))
    if dtype not in _GROUPED_TYPES or any(each != dtype for each in dtypes):
        return False
    if any(each * dtype.itemsize % _STRIDE_BYTES for each in widths):
        return False
    # On other CUDA devices torch loops over the groups, and reads their sizes, known here on the host, from the device.
    return device.type != "cuda" or (dtype == torch.bfloat16 and _capability(device) >= (9, 0))


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def product(x_RI: torch.Tensor, weight_k: torch.Tensor, is_transposed: bool, groups: RowGroups) -> torch.Tensor:
    """Return the rows times their expert's weight, [R, O]."""
    if groups.is_grouped and weight_k.data_ptr() % _STRIDE_BYTES:
        # After a parameter of odd size in a flat buffer, or in a mapped file: on CUDA torch refuses such addresses.
        weight_k = weight_k.clone()
    weight_kIO = weight_k if is_transposed else weight_k.transpose(1, 2)
    if groups.is_grouped and x_RI.shape[0]:
        return F.grouped_mm(x_RI, weight_kIO, offs=groups.ends_k)
    y_RO = x_RI.new_empty(x_RI.shape[0], weight_kIO.shape[2])
    for expert, start, stop in groups.runs():
        torch.mm(x_RI[start:stop], weight_kIO[expert], out=y_RO[start:stop])
    return y_RO


def grouped_rows_gradient(
    dy_RO: torch.Tensor, weight_k: torch.Tensor, is_transposed: bool, groups: RowGroups
) -> torch.Tensor:
    """Return the gradient of the rows, [R, I], for that of the results."""
    return product(dy_RO.contiguous(), weight_k, not is_transposed, groups)


def weight_gradient(x_RI: torch.Tensor, dy_RO: torch.Tensor, is_transposed: bool, groups: RowGroups) -> torch.Tensor:
    """Return the gradient of the weight, in its shape; zeros for an expert without rows."""
    dy_RO = dy_RO.contiguous()
    left, right = (x_RI, dy_RO) if is_transposed else (dy_RO, x_RI)
    if groups.is_grouped and left.shape[0]:
        return F.grouped_mm(left.t(), right, offs=groups.ends_k)
    found_k = left.new_zeros(len(groups.sizes), left.shape[1], right.shape[1])
    for expert, start, stop in groups.runs():
        torch.mm(left[start:stop].t(), right[start:stop], out=found_k[expert])
    return found_k


def add_weight_gradient(
    x_RI: torch.Tensor, dy_RO: torch.Tensor, is_transposed: bool, groups: RowGroups, sum_k: torch.Tensor
) -> bool:
    """Add the gradient of the weight to a sum, expert by expert, if that is cheaper than a new tensor.

    torch's grouped product cannot add in place.

    Returns:
        True if the gradient has been added.
    """
    if sum_k.dtype != x_RI.dtype or (groups.is_grouped and sum_k[0].nbytes < _WORTH_A_LAUNCH_BYTES):
        return False
    left, right = (x_RI, dy_RO) if is_transposed else (dy_RO, x_RI)
    for expert, start, stop in groups.runs():
        sum_k[expert].addmm_(left[start:stop].t(), right[start:stop])
    return True


def bias_gradient(dy_RO: torch.Tensor, groups: RowGroups) -> torch.Tensor:
    """Return the gradient of a bias, [k, O]."""
    if groups.is_grouped and dy_RO.shape[0]:  # a product adds up in float32
        return F.grouped_mm(dy_RO.new_ones(len(dy_RO), _COLUMNS).t(), dy_RO.contiguous(), offs=groups.ends_k)[:, 0]
    found_kO = dy_RO.new_zeros(len(groups.sizes), dy_RO.shape[1])
    for expert, start, stop in groups.runs():
        torch.sum(dy_RO[start:stop], 0, out=found_kO[expert])
    return found_kO
