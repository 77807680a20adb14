# SPDX-License-Identifier: Apache-2.0
"""A linear layer by hand: its product and its gradients, with the operations that autograd would use."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ds_fsmoe.components.gradient_sums import GradientSums


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


def apply_linear(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """[..., I] to [..., O]."""
    return F.linear(x, linear.weight, None if type(linear) is UnbiasedShardLinear else linear.bias)


def add_gradients(sums: GradientSums, linear: nn.Linear, dy_RO: torch.Tensor, x_RI: torch.Tensor | None) -> None:
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
        if type(linear) is UnbiasedShardLinear:
            sums.add(linear.bias, torch.zeros_like(linear.bias))
        else:
            sums.add(linear.bias, dy_RO.sum(0))
