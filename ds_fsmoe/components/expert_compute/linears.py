# SPDX-License-Identifier: Apache-2.0
"""A linear layer by hand: its product and its gradients, with the operations that autograd would use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from ds_fsmoe.components.expert_compute import grouped_products
from ds_fsmoe.components.expert_compute.gradient_sums import GradientSums, stacked
from ds_fsmoe.components.expert_compute.grouped_products import RowGroups

# ---- The weights of experts' results in the sums of their tokens, where those are added up before they travel
# back
#
# The gradient of a weight is ``<dy, o>``, with ``o`` the result of the expert. It is taken where the backward passes
# anyway, so that no result is kept: for ``o = W h + b`` it is ``<W^T dy, h> + <dy, b>``.
#
# Letters: R rows of a chunk, M width.


@dataclass(frozen=True)
class RowWeights:
    """The weights of the rows of one chunk, and the memory for their gradients."""

    weights_R: torch.Tensor
    gradients_R: torch.Tensor
    """Zeros at first."""

    def part(self, start: int, stop: int) -> RowWeights:
        """Return those of rows [start, stop)."""
        return RowWeights(self.weights_R[start:stop], self.gradients_R[start:stop])

    def apply(self, dy_RM: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the experts' results, in the type of ``dy_RM``.

        Args:
            dy_RM: the gradient of the sums.
        """
        return (dy_RM * self.weights_R.unsqueeze(1)).to(dy_RM.dtype)

    def add_products(self, one_RX: torch.Tensor, other_RX: torch.Tensor) -> None:
        """Add the products of the rows of two tensors to the gradients."""
        dtype = self.gradients_R.dtype
        self.gradients_R.add_(torch.linalg.vecdot(one_RX.to(dtype), other_RX.to(dtype)))


# ---- A linear layer by hand: its product and its gradients, with the operations that autograd would use


class UnbiasedShardLinear(nn.Linear):
    """The last linear layer of a shard whose bias another shard adds.

    It has a bias, so that names and shapes stay those of ``nn.Linear``, and leaves it out: the shards' results are
    summed and the bias counts once. The bias has a gradient, of zeros.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.weight)
        return y if self.bias is None else _WithZeroGradient.apply(y, self.bias)


class _WithZeroGradient(torch.autograd.Function):
    """``y``, and zeros as the gradient of ``unused``."""

    @staticmethod
    def forward(ctx, y: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(unused)
        return y.view_as(y)

    @staticmethod
    def backward(ctx, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        (unused,) = ctx.saved_tensors
        return dy, torch.zeros_like(unused) if ctx.needs_input_grad[1] else None


def is_plain_linear(module: nn.Module) -> bool:
    """Whether it is exactly a linear layer with exactly its own parameters (not parametrised, pruned, or wrapped)."""
    if type(module) not in (nn.Linear, UnbiasedShardLinear):
        return False
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    return (
        type(weight) is nn.Parameter and (bias is None or type(bias) is nn.Parameter) and "bias" not in module.__dict__
    )


@dataclass(frozen=True, eq=False)
class LinearWeights:
    """What a plain linear layer computes with. A module looks for its parameters by name, in Python, every time."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    adds_bias: bool
    in_features: int

    @classmethod
    def of(cls, linear: nn.Linear) -> LinearWeights:
        return cls(linear.weight, linear.bias, _adds_bias(linear), linear.in_features)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias if self.adds_bias else None)


def _adds_bias(linear: nn.Linear | LinearWeights) -> bool:
    if type(linear) is LinearWeights:
        return linear.adds_bias
    return linear.bias is not None and type(linear) is not UnbiasedShardLinear


@dataclass(frozen=True)
class StackedLinear:
    """k linear layers of one shape, each for rows of its own."""

    weight_kOI: torch.Tensor
    bias_kO: torch.Tensor | None
    """Of those that add it."""
    adds_bias_within: bool
    """Whether the bias is added within the product, with one rounding, or after it, with two."""

    @classmethod
    def of(cls, linears: Sequence[nn.Linear | LinearWeights], adds_bias_within: bool) -> StackedLinear | None:
        """Those of k experts without copying a weight, or ``None`` where weights or biases do not lie side by side."""
        weight_kOI = stacked([linear.weight for linear in linears])
        if weight_kOI is None or not _adds_bias(linears[0]):
            return None if weight_kOI is None else cls(weight_kOI, None, adds_bias_within)
        bias_kO = stacked([linear.bias for linear in linears])
        return None if bias_kO is None else cls(weight_kOI, bias_kO, adds_bias_within)

    def __call__(self, x_kRI: torch.Tensor) -> torch.Tensor:
        """To [k, R, O]."""
        weight_kIO = self.weight_kOI.transpose(1, 2)
        if self.bias_kO is None:
            return torch.bmm(x_kRI, weight_kIO)
        if self.adds_bias_within:
            return torch.baddbmm(self.bias_kO.unsqueeze(1), x_kRI, weight_kIO)
        return torch.bmm(x_kRI, weight_kIO).add_(self.bias_kO.unsqueeze(1))


@dataclass(frozen=True)
class GroupedLinear:
    """k linear layers of one shape, each for some of the rows, which lie expert by expert."""

    weight_kOI: torch.Tensor
    bias_kO: torch.Tensor | None
    """Of those that add it."""
    groups: RowGroups
    """Where the rows of each lie."""

    def __call__(self, x_RI: torch.Tensor) -> torch.Tensor:
        """To [R, O]."""
        y_RO = grouped_products.product(x_RI, self.weight_kOI, False, self.groups)
        return y_RO if self.bias_kO is None else y_RO.add_(self.groups.rows_of_each(self.bias_kO))


def apply_linear(linear: nn.Linear | LinearWeights | StackedLinear | GroupedLinear, x: torch.Tensor) -> torch.Tensor:
    """[..., I] to [..., O]; [k, R, I] to [k, R, O] for a stacked one."""
    if type(linear) is nn.Linear or type(linear) is UnbiasedShardLinear:  # hooks of theirs are not to run
        return F.linear(x, linear.weight, linear.bias if _adds_bias(linear) else None)
    return linear(x)


def rows_gradient(
    linear: nn.Linear | LinearWeights | StackedLinear | GroupedLinear, dy_RO: torch.Tensor
) -> torch.Tensor:
    """The gradient of the results [R, O] to that of the rows [R, I]; [k, R, O] to [k, R, I] for a stacked one."""
    if type(linear) is GroupedLinear:
        return grouped_products.grouped_rows_gradient(dy_RO, linear.weight_kOI, False, linear.groups)
    return torch.bmm(dy_RO, linear.weight_kOI) if type(linear) is StackedLinear else dy_RO @ linear.weight


def add_bias_products(linear: nn.Linear | LinearWeights | GroupedLinear, dy_RO: torch.Tensor, to: RowWeights) -> None:
    """Add the part that a layer's bias has in the gradients of its results' weights."""
    if type(linear) is GroupedLinear:
        if linear.bias_kO is not None:
            to.add_products(dy_RO, linear.groups.rows_of_each(linear.bias_kO))
    elif _adds_bias(linear):
        to.add_products(dy_RO, linear.bias.expand_as(dy_RO))


def add_gradients(
    sums: GradientSums, linear: nn.Linear | LinearWeights, dy_RO: torch.Tensor, x_RI: torch.Tensor | None
) -> None:
    """Add the gradients of weight and bias.

    Args:
        sums: where to.
        linear: a plain linear layer.
        dy_RO: [R, O], the gradient of its results.
        x_RI: [R, I], its rows; may be ``None`` where the weight wants no gradient.
    """
    if x_RI is not None and sums.wants(linear.weight):
        sums.add_product(linear.weight, dy_RO.t(), x_RI)
    if sums.wants(linear.bias):
        if not _adds_bias(linear):
            sums.add(linear.bias, torch.zeros_like(linear.bias))
        else:
            sums.add(linear.bias, dy_RO.sum(0))


def add_stacked_gradients(
    sums: GradientSums, linears: Sequence[nn.Linear | LinearWeights], dy_kRO: torch.Tensor, x_kRI: torch.Tensor | None
) -> None:
    """:func:`add_gradients` for layers of one shape in k experts, all of which want the same."""
    if x_kRI is not None and sums.wants(linears[0].weight):
        sums.add_products([linear.weight for linear in linears], dy_kRO.transpose(1, 2), x_kRI)
    if sums.wants(linears[0].bias):
        if not _adds_bias(linears[0]):
            gradient_kO = dy_kRO.new_zeros(dy_kRO.shape[0], dy_kRO.shape[2])
        else:
            gradient_kO = dy_kRO.sum(1)
        sums.add_each([linear.bias for linear in linears], gradient_kO)


def add_grouped_gradients(
    sums: GradientSums,
    linears: Sequence[nn.Linear | LinearWeights],
    dy_RO: torch.Tensor,
    x_RI: torch.Tensor | None,
    groups: RowGroups,
) -> None:
    """:func:`add_gradients` for layers of one shape in k experts, whose rows lie expert by expert.

    Args:
        sums: where to.
        linears: k plain linear layers, all of which want the same.
        dy_RO: [R, O], the gradient of their results.
        x_RI: [R, I], their rows; may be ``None`` where the weights want no gradient.
        groups: where the rows of each lie.
    """
    if x_RI is not None and sums.wants(linears[0].weight):
        rows = x_RI, dy_RO, False, groups
        make = partial(grouped_products.weight_gradient, *rows)
        add_to = partial(grouped_products.add_weight_gradient, *rows)
        sums.add_made([linear.weight for linear in linears], make, add_to)
    if sums.wants(linears[0].bias):
        if not _adds_bias(linears[0]):
            gradient_kO = dy_RO.new_zeros(len(linears), dy_RO.shape[1])
        else:
            gradient_kO = grouped_products.bias_gradient(dy_RO, groups)
        sums.add_each([linear.bias for linear in linears], gradient_kO)
