# SPDX-License-Identifier: Apache-2.0
"""Products of rows that lie expert by expert with the experts' weights, which are one tensor; by hand, both ways.

Letters: k experts, R rows, I features in, O features out. A weight is [k, O, I], or [k, I, O] where it is transposed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

_GROUPED_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_STRIDE_BYTES = 16
"""What torch's grouped product asks of the strides of its matrices."""
_COLUMNS = 8
"""As many columns as a grouped product takes in every type."""


@dataclass(frozen=True)
class Groups:
    """Where the rows of each expert lie."""

    sizes: list[int]
    """Of each of k experts, on the host."""
    ends_k: torch.Tensor
    """[k] int32, on the device: where the rows of each end."""

    @property
    def num_rows(self) -> int:
        """The number of rows of all experts."""
        return sum(self.sizes)

    def rows_of_each(self, values_kX: torch.Tensor) -> torch.Tensor:
        """Return the value of each row's expert, [R, X]."""
        sizes_k = self.ends_k.diff(prepend=self.ends_k.new_zeros(1))
        return torch.repeat_interleave(values_kX, sizes_k, dim=0, output_size=self.num_rows)

    def runs(self) -> list[tuple[int, int, int]]:
        """Return (expert, start, stop) of each that has rows."""
        ends = list(itertools.accumulate(self.sizes))
        return [(k, end - size, end) for k, (size, end) in enumerate(zip(self.sizes, ends, strict=True)) if size]


def takes_grouped(widths: Sequence[int], *tensors: torch.Tensor) -> bool:
    """Whether torch has a grouped product for matrices of these types and widths that does not wait for the device."""
    dtype, device = tensors[0].dtype, tensors[0].device
    if dtype not in _GROUPED_TYPES or any(each.dtype != dtype for each in tensors):
        return False
    if any(each * dtype.itemsize % _STRIDE_BYTES for each in widths):
        return False
    if device.type == "cuda":
        # Elsewhere torch loops over the groups, and asks the device for their sizes, which here the host knows.
        return dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) >= (9, 0)
    return True


def product(x_RI: torch.Tensor, weight_k: torch.Tensor, is_transposed: bool, groups: Groups) -> torch.Tensor:
    """Return the rows times their expert's weight, [R, O]."""
    weight_kIO = weight_k if is_transposed else weight_k.transpose(1, 2)
    if len(x_RI) and takes_grouped(weight_k.shape[1:], x_RI, weight_k):
        return F.grouped_mm(x_RI.contiguous(), weight_kIO, offs=groups.ends_k)
    y_RO = x_RI.new_empty(len(x_RI), weight_kIO.shape[2])
    for expert, start, stop in groups.runs():
        torch.mm(x_RI[start:stop], weight_kIO[expert], out=y_RO[start:stop])
    return y_RO


def rows_gradient(dy_RO: torch.Tensor, weight_k: torch.Tensor, is_transposed: bool, groups: Groups) -> torch.Tensor:
    """Return the gradient of the rows, [R, I], from that of the results."""
    return product(dy_RO, weight_k, not is_transposed, groups)


def weight_gradient(x_RI: torch.Tensor, dy_RO: torch.Tensor, is_transposed: bool, groups: Groups) -> torch.Tensor:
    """Return the gradient of the weight, in its shape; zeros for an expert without rows."""
    left, right = (x_RI, dy_RO) if is_transposed else (dy_RO, x_RI)
    left, right = left.contiguous(), right.contiguous()
    widths = left.shape[1], right.shape[1]
    if len(left) and takes_grouped(widths, left, right):
        return F.grouped_mm(left.t(), right, offs=groups.ends_k)
    found_k = left.new_zeros(len(groups.sizes), *widths)
    for expert, start, stop in groups.runs():
        torch.mm(left[start:stop].t(), right[start:stop], out=found_k[expert])
    return found_k


def bias_gradient(dy_RO: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Return the gradient of a bias, [k, O]."""
    if len(dy_RO) and takes_grouped(dy_RO.shape[1:], dy_RO):  # a product adds up in float32
        return F.grouped_mm(dy_RO.new_ones(len(dy_RO), _COLUMNS).t(), dy_RO.contiguous(), offs=groups.ends_k)[:, 0]
    found_kO = dy_RO.new_zeros(len(groups.sizes), dy_RO.shape[1])
    for expert, start, stop in groups.runs():
        torch.sum(dy_RO[start:stop], 0, out=found_kO[expert])
    return found_kO
