# SPDX-License-Identifier: Apache-2.0
"""The base class of experts, and the call of the experts of one rank."""

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
    """The arguments of an expert.

    Args:
        tokens: [..., M]: the rows that arrived, empty slots (zero rows) among them.

    Examples:
        >>> import torch, ds_fsmoe
        >>> ds_fsmoe.ExpertArgs(torch.ones(3, 8)).tokens.shape
        torch.Size([3, 8])
    """

    tokens: torch.Tensor


class ExpertBase(nn.Module):
    """One expert. A subclass says what is done to its tokens in :meth:`do_experts`, as in the paper's listing 1.

    An expert's law: it is row-wise. Row i of the result depends on row i of the input alone, so that tokens may be
    cut into chunks in any way. Any ``nn.Module`` from [..., M] to [..., M] that keeps this law is an expert too; this
    class is there for the name the paper uses.

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
        """Return the expert's output for rows, [..., M], row by row.

        Args:
            args: the rows are ``args.tokens``, [..., M].
        """
        raise TypeError(f"{type(self).__name__} must define do_experts(args)")

    def written(self) -> ManualExpert | None:
        """The same computation with its gradients by hand, or ``None``: then autograd differentiates it.

        It is used in place of ``do_experts`` while nothing hooks this module, and it is what lets the expert be
        sharded. A subclass that defines ``do_experts`` or ``forward`` anew is not taken at its parent's word.
        """
        return None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.do_experts(ExpertArgs(tokens))


class LocalExperts(nn.Module):
    """The experts of one rank, called one after another through ``module(...)``, so that module hooks run.

    Args:
        expert: copied ``num_local_experts`` times.
        num_local_experts: e.
    """

    def __init__(self, expert: nn.Module, num_local_experts: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(copy.deepcopy(expert) for _ in range(num_local_experts))
        make_contiguous(self.experts)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> LocalExperts:
        """Whatever gives the parameters other memory (``to``, ``half``, ``cuda``) comes here."""
        super()._apply(fn, recurse)
        make_contiguous(self.experts)
        return self

    def forward(self, x_GeCM: torch.Tensor) -> torch.Tensor:
        """[G, e, C, M] rows from G ranks for e experts to the same shape."""
        outputs = [expert(x_GeCM[:, i]) for i, expert in enumerate(self.experts)]
        # As in stock: an expert may return (output, bias) and keeps the bias to itself.
        return torch.stack([each[0] if isinstance(each, tuple) else each for each in outputs], dim=1)
