# SPDX-License-Identifier: Apache-2.0
"""Defines the base class of experts, and the module that calls the experts of one rank.

``experts`` holds the experts of the package, and ``expert_compute`` computes experts in the chunks of a layer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from ds_fsmoe.components.expert_compute.gradient_sums import make_contiguous

if TYPE_CHECKING:
    from ds_fsmoe.components.expert_compute.manual_ffn import ManualExpert


@dataclass(frozen=True)
class ExpertArgs:
    """Holds the arguments of an expert.

    Args:
        tokens: [..., M], the received rows; rows of empty slots are zero.

    Examples:
        >>> import torch, ds_fsmoe
        >>> ds_fsmoe.ExpertArgs(torch.ones(3, 8)).tokens.shape
        torch.Size([3, 8])
    """

    tokens: torch.Tensor


class ExpertBase(nn.Module):
    """Represents one expert. A subclass computes its rows in :meth:`do_experts`, as in the paper's listing 1.

    An expert's law: it is row-wise. Row i of the result depends on row i of the input alone, so tokens may be split
    into any chunks. Any ``nn.Module`` from [..., M] to [..., M] that keeps this law is an expert too. This class adds
    the paper's method name.

    Examples:
        >>> import torch, ds_fsmoe
        >>> class Doubled(ds_fsmoe.ExpertBase):
        ...     def do_experts(self, args):
        ...         return 2 * args.tokens
        >>> Doubled()(torch.ones(2, 3))
        tensor([[2., 2., 2.],
                [2., 2., 2.]])
    """

    def do_experts(self, args: ExpertArgs) -> torch.Tensor:
        """Return the expert's results, [..., M], row by row.

        Args:
            args: the rows are ``args.tokens``, [..., M].
        """
        raise TypeError(f"{type(self).__name__} must define do_experts(args)")

    def written(self) -> ManualExpert | None:
        """Return the same computation with hand-written gradients; ``None`` to have autograd differentiate it.

        It replaces ``do_experts`` while this module has no hooks, and makes the expert shardable. It is ignored for a
        subclass that overrides ``do_experts`` or ``forward`` without it.
        """
        return None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.do_experts(ExpertArgs(tokens))


class LocalExperts(nn.Module):
    """Calls the experts of one rank one after another through ``module(...)``, so that module hooks run.

    Args:
        expert: copied ``num_local_experts`` times.
        num_local_experts: e.
    """

    def __init__(self, expert: nn.Module, num_local_experts: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(copy.deepcopy(expert) for _ in range(num_local_experts))
        make_contiguous(self.experts)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> LocalExperts:
        """Apply ``fn`` as in torch (``to``, ``half``, ``cuda``), then make the new memory of the experts contiguous
        again."""
        super()._apply(fn, recurse)
        make_contiguous(self.experts)
        return self

    def forward(self, x_GeCM: torch.Tensor) -> torch.Tensor:
        """Compute [G, e, C, M], the rows of G ranks for e experts, to the same shape."""
        outputs = [expert(x_GeCM[:, i]) for i, expert in enumerate(self.experts)]
        # As in stock: an expert may return (output, bias), and the bias is ignored.
        return torch.stack([each[0] if isinstance(each, tuple) else each for each in outputs], dim=1)
