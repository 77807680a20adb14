# SPDX-License-Identifier: Apache-2.0
"""Linear layers with hand-written products and gradients, in the operations that autograd would use.

One layer (:class:`LinearWeights`), k layers with equal numbers of rows (:class:`StackedLinear`), or with different
numbers (:class:`GroupedLinear`) have the same methods. ``written_call`` calls them in the forward and backward of
experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from ds_fsmoe.components.expert_compute import grouped_products
from ds_fsmoe.components.expert_compute.gradient_sums import GradientSums, stacked
from ds_fsmoe.components.expert_compute.grouped_products import RowGroups

if TYPE_CHECKING:
    from ds_fsmoe.components.expert_compute.stacked_forms import ModuleWeights

# ---- The weights of experts' results in the sums of their tokens, where results are added up before combine
#
# The gradient of a weight is ``<dy, o>``, with ``o`` the result of the expert. The backward computes it from tensors
# that it has, so that no result is kept: for ``o = W h + b`` it is ``<W^T dy, h> + <dy, b>``.
#
# Letters: R rows of a chunk, M width.


@dataclass(frozen=True)
class RowWeights:
    """Holds the weights of the rows of one chunk, and the memory for their gradients."""

    weights_R: torch.Tensor
    gradients_R: torch.Tensor
    """Zeros at first."""

    def part(self, start: int, stop: int) -> RowWeights:
        """Return the weights of rows [start, stop)."""
        return RowWeights(self.weights_R[start:stop], self.gradients_R[start:stop])

    def apply(self, dy_RM: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the experts' results, in the dtype of ``dy_RM``.

        Args:
            dy_RM: the gradient of the sums.
        """
        return (dy_RM * self.weights_R.unsqueeze(1)).to(dy_RM.dtype)

    def add_products(self, one_RX: torch.Tensor, other_RX: torch.Tensor) -> None:
        """Add the products of the rows of two tensors to the gradients."""
        dtype = self.gradients_R.dtype
        self.gradients_R.add_(torch.linalg.vecdot(one_RX.to(dtype), other_RX.to(dtype)))


# ---- Linear layers


class UnbiasedShardLinear(nn.Linear):
    """Computes the last linear layer of a shard whose bias another shard adds.

    It has a bias, so that names and shapes equal those of ``nn.Linear``, but does not add it: the shards' results are
    summed, and the bias counts once. The bias has a gradient of zeros.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.weight)
        return y if self.bias is None else _WithZeroGradient.apply(y, self.bias)


class _WithZeroGradient(torch.autograd.Function):
    """Returns ``y``, with zeros as the gradient of ``unused``."""

    @staticmethod
    def forward(ctx, y: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(unused)
        return y.view_as(y)

    @staticmethod
    def backward(ctx, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        (unused,) = ctx.saved_tensors
        return dy, torch.zeros_like(unused) if ctx.needs_input_grad[1] else None


def is_plain_linear(module: nn.Module) -> bool:
    """Return True if a module is exactly a linear layer with its own parameters (not parametrised, pruned, or
    wrapped)."""
    if type(module) not in (nn.Linear, UnbiasedShardLinear):
        return False
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    return (
        type(weight) is nn.Parameter and (bias is None or type(bias) is nn.Parameter) and "bias" not in module.__dict__
    )


@dataclass(frozen=True, eq=False)
class LinearWeights:
    """Holds the parameters of a plain linear layer. It avoids a module's lookup of parameters by name in every call."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    adds_bias: bool
    in_features: int

    @classmethod
    def of(cls, linear: nn.Linear) -> LinearWeights:
        adds_bias = linear.bias is not None and type(linear) is not UnbiasedShardLinear
        return cls(linear.weight, linear.bias, adds_bias, linear.in_features)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute [..., I] to [..., O]."""
        return F.linear(x, self.weight, self.bias if self.adds_bias else None)

    def rows_gradient(self, dy_RO: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the rows [R, I] for that of the results [R, O]."""
        return dy_RO @ self.weight

    def add_bias_products(self, dy_RO: torch.Tensor, to: RowWeights) -> None:
        """Add the bias's part to the gradients of the results' weights."""
        if self.adds_bias:
            to.add_products(dy_RO, self.bias.expand_as(dy_RO))

    def wants_rows(self, sums: GradientSums) -> bool:
        """Return True if :meth:`add_gradients` needs the rows."""
        return sums.wants(self.weight)

    def add_gradients(self, sums: GradientSums, dy_RO: torch.Tensor, x_RI: torch.Tensor | None) -> None:
        """Add the gradients of weight and bias.

        Args:
            sums: the sums to add to.
            dy_RO: [R, O], the gradient of its results.
            x_RI: [R, I], its rows; may be ``None`` where the weight wants no gradient.
        """
        if x_RI is not None and sums.wants(self.weight):
            sums.sum_of(self.weight).add_product(dy_RO.t(), x_RI)
        if sums.wants(self.bias):
            sums.sum_of(self.bias).add(dy_RO.sum(0) if self.adds_bias else torch.zeros_like(self.bias))


class StackedLinear:
    """Computes k linear layers of one shape, each with its own rows, all of which want the same gradients.

    Args:
        linears: the layers.
        weight_kOI: their weights as one tensor.
        bias_kO: the biases of those that add them; ``None``: they add none.
        adds_bias_within: whether the bias is added within the product, with one rounding, or after it, with two.
    """

    is_transposed = False
    adapters = ()

    def __init__(
        self,
        linears: Sequence[LinearWeights],
        weight_kOI: torch.Tensor,
        bias_kO: torch.Tensor | None,
        adds_bias_within: bool,
    ) -> None:
        self.weight_kOI, self.bias_kO, self._adds_bias_within = weight_kOI, bias_kO, adds_bias_within
        self.weight, self.bias = linears[0].weight, linears[0].bias
        """The parameters of the first layer, for properties that all share."""
        self.weights = [linear.weight for linear in linears]
        self.biases = [linear.bias for linear in linears]
        self.adds_bias = bias_kO is not None

    @classmethod
    def of(cls, linears: Sequence[LinearWeights], adds_bias_within: bool, may_copy: bool) -> StackedLinear | None:
        """Return the layers of k experts as one, without a copy of their weights.

        Where weights or biases are not adjacent in memory, return ``None``, or with ``may_copy`` copy them.
        """
        whole_of = partial(_whole, may_copy=may_copy)
        weight_kOI = whole_of([linear.weight for linear in linears])
        if weight_kOI is None or not linears[0].adds_bias:
            return None if weight_kOI is None else cls(linears, weight_kOI, None, adds_bias_within)
        bias_kO = whole_of([linear.bias for linear in linears])
        return None if bias_kO is None else cls(linears, weight_kOI, bias_kO, adds_bias_within)

    def __call__(self, x_kRI: torch.Tensor) -> torch.Tensor:
        """Compute [k, R, I] to [k, R, O]."""
        weight_kIO = self.weight_kOI.transpose(1, 2)
        if self.bias_kO is None:
            return torch.bmm(x_kRI, weight_kIO)
        if self._adds_bias_within:
            return torch.baddbmm(self.bias_kO.unsqueeze(1), x_kRI, weight_kIO)
        return torch.bmm(x_kRI, weight_kIO).add_(self.bias_kO.unsqueeze(1))

    def rows_gradient(self, dy_kRO: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the rows [k, R, I] for that of the results [k, R, O]."""
        return torch.bmm(dy_kRO, self.weight_kOI)

    def wants_rows(self, sums: GradientSums) -> bool:
        """Return True if :meth:`add_gradients` needs the rows; see :meth:`LinearWeights.wants_rows`."""
        return sums.wants(self.weight)

    def add_gradients(self, sums: GradientSums, dy_kRO: torch.Tensor, x_kRI: torch.Tensor | None) -> None:
        """Add the gradients of weights and biases; see :meth:`LinearWeights.add_gradients`."""
        if x_kRI is not None and self.wants_rows(sums):
            sums.add_product(self.weights, dy_kRO.transpose(1, 2), x_kRI)
        if sums.wants(self.bias):
            sums.add(
                self.biases, dy_kRO.sum(1) if self.adds_bias else dy_kRO.new_zeros(dy_kRO.shape[0], dy_kRO.shape[2])
            )


def _whole(tensors: Sequence[torch.Tensor], may_copy: bool) -> torch.Tensor | None:
    whole = stacked(tensors)
    return torch.stack([each.detach() for each in tensors]) if whole is None and may_copy else whole


class GroupedLinear:
    """Computes k linear layers of one shape, each for some of the rows [R, I], which are sorted by expert.

    Args:
        of: their weights as one view.
        groups: the rows of each expert.
    """

    def __init__(self, of: StackedLinear | ModuleWeights, groups: RowGroups) -> None:
        self._of, self._groups = of, groups

    def __call__(self, x_RI: torch.Tensor) -> torch.Tensor:
        """Compute [R, I] to [R, O]."""
        of, weight_k = self._of, self._of.weight_kOI
        x_RI = x_RI if x_RI.dtype == weight_k.dtype else x_RI.to(weight_k.dtype)
        y_RO = grouped_products.product(x_RI, weight_k, of.is_transposed, self._groups)
        for each in of.adapters:
            y_RO.add_(each.product(x_RI, self._groups))
        return y_RO.add_(self._groups.rows_of_each(of.bias_kO)) if of.adds_bias else y_RO

    def rows_gradient(self, dy_RO: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the rows [R, I] for that of the results [R, O]."""
        of = self._of
        dx_RI = grouped_products.grouped_rows_gradient(dy_RO, of.weight_kOI, of.is_transposed, self._groups)
        for each in of.adapters:
            dx_RI.add_(each.rows_gradient(dy_RO, self._groups))
        return dx_RI

    def add_bias_products(self, dy_RO: torch.Tensor, to: RowWeights) -> None:
        """Add the bias's part to the gradients of the results' weights; see :meth:`LinearWeights.add_bias_products`."""
        if self._of.adds_bias:
            to.add_products(dy_RO, self._groups.rows_of_each(self._of.bias_kO))

    def wants_rows(self, sums: GradientSums) -> bool:
        """Return True if :meth:`add_gradients` needs the rows; see :meth:`LinearWeights.wants_rows`."""
        return sums.wants(self._of.weight) or any(each.wants_rows(sums) for each in self._of.adapters)

    def add_gradients(self, sums: GradientSums, dy_RO: torch.Tensor, x_RI: torch.Tensor | None) -> None:
        """Add the gradients of weights, biases and adapters; see :meth:`LinearWeights.add_gradients`."""
        of, weight, bias = self._of, self._of.weight, self._of.bias
        if x_RI is not None and sums.wants(weight):
            rows = x_RI, dy_RO, of.is_transposed, self._groups
            make = partial(grouped_products.weight_gradient, *rows)
            in_type = make if weight.dtype == dy_RO.dtype else lambda: make().to(weight.dtype)
            sums.add_made(of.weights, in_type, partial(grouped_products.add_weight_gradient, *rows))
        for each in of.adapters if x_RI is not None else ():
            each.add_gradients(x_RI, dy_RO, self._groups, sums)
        if sums.wants(bias):
            if of.adds_bias:
                found_kO = grouped_products.bias_gradient(dy_RO, self._groups)
            else:
                found_kO = dy_RO.new_zeros(len(self._groups.sizes), dy_RO.shape[1])
            sums.add(of.biases, found_kO.to(bias.dtype), is_own=True)


def apply_linear(linear: nn.Linear | LinearWeights | StackedLinear | GroupedLinear, x: torch.Tensor) -> torch.Tensor:
    """Apply a layer to rows, without a module's hooks."""
    return (LinearWeights.of(linear) if isinstance(linear, nn.Module) else linear)(x)
