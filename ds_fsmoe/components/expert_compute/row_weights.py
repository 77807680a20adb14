# SPDX-License-Identifier: Apache-2.0
"""The weights of experts' results in the sums of their tokens, where those are added up before they travel back.

The gradient of a weight is ``<dy, o>``, with ``o`` the result of the expert. It is taken where the backward passes
anyway, so that no result is kept: for ``o = W h + b`` it is ``<W^T dy, h> + <dy, b>``.

Letters: R rows of a chunk, M width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
