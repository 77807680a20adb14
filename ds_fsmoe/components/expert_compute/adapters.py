# SPDX-License-Identifier: Apache-2.0
"""Adapters of low rank (LoRA) on the experts of one rank: a call computes with W + scaling * B A in place of a weight
W.

Hand-written products never form this sum: rows go through A and B separately, and so do gradients. So a call needs no
second copy of the weights, and no gradient of a whole frozen weight. ``stacked_experts`` creates the calls; ``linears``
adds an adapter's part to each product.

Letters: e experts on this rank, R rows expert by expert, I features in, O features out, r the rank of an adapter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ds_fsmoe.components.expert_compute import grouped_products as products
from ds_fsmoe.components.expert_compute.contract import shape_of
from ds_fsmoe.components.expert_compute.gradient_sums import GradientSums
from ds_fsmoe.components.expert_compute.grouped_products import RowGroups

_COLUMNS = 8
"""Ranks are padded with zeros to a multiple of this, which grouped products accept in every dtype."""


@dataclass(frozen=True, eq=False)
class Adapter:
    """Represents one adapter of one weight, in PEFT's layout."""

    weight: str
    """The name of the weight in the module of the experts."""
    a: nn.Parameter
    """[e * r, I], expert by expert."""
    b: nn.Parameter
    """[O, r * e], experts running fastest."""
    scaling: float
    num_experts: int
    """The experts of this rank, e."""

    @property
    def parameters(self) -> tuple[nn.Parameter, nn.Parameter]:
        """Return A and B."""
        return self.a, self.b

    @property
    def rank(self) -> int:
        """Return the adapter's rank, r."""
        return (shape_of(self.a) or (0,))[0] // self.num_experts

    def wants_rows(self, sums: GradientSums) -> bool:
        """Return True if A or B wants a gradient, which needs the rows."""
        return any(map(sums.wants, self.parameters))

    def product(self, x_RI: torch.Tensor, groups: RowGroups) -> torch.Tensor:
        """Return the adapter's addition to the product of rows with their expert's weight, [R, O]."""
        h_Rr = self._inner(x_RI, groups)
        return products.product(h_Rr.mul_(self.scaling), self._b_eOr(x_RI.dtype), False, groups)

    def rows_gradient(self, dy_RO: torch.Tensor, groups: RowGroups) -> torch.Tensor:
        """Return the adapter's addition to the gradient of the rows, [R, I]."""
        dh_Rr = self._inner_gradient(dy_RO, groups)
        return products.grouped_rows_gradient(dh_Rr, self._a_erI(dy_RO.dtype), False, groups)

    def add_gradients(self, x_RI: torch.Tensor, dy_RO: torch.Tensor, groups: RowGroups, sums: GradientSums) -> None:
        """Add the gradients of some rows to those of A and B.

        Args:
            x_RI: the rows, in the dtype of the products.
            dy_RO: the gradient of the results.
            groups: the rows of each expert.
            sums: the sums to add to.
        """
        x_RI, dy_RO = x_RI.to(dy_RO.dtype), dy_RO.contiguous()
        if sums.wants(self.a):
            da_erI = products.weight_gradient(x_RI, self._inner_gradient(dy_RO, groups), False, groups)
            da_A = da_erI[:, : self.rank].reshape(shape_of(self.a))
            sums.add(self.a, da_A.to(self.a.dtype), is_own=True)
        if sums.wants(self.b):
            h_Rr = self._inner(x_RI, groups).mul_(self.scaling)
            db_eOr = products.weight_gradient(h_Rr, dy_RO, False, groups)[:, :, : self.rank]
            sums.add(self.b, db_eOr.permute(1, 2, 0).reshape(shape_of(self.b)).to(self.b.dtype), is_own=True)

    def delta(self, is_transposed: bool, a: torch.Tensor | None = None, b: torch.Tensor | None = None) -> torch.Tensor:
        """Return the change of the weight, [e, O, I], or [e, I, O] where it is transposed; for autograd.

        Args:
            is_transposed: whether the weight is.
            a, b: replacements of A and B, if any.
        """
        a_erI = (self.a if a is None else a).unflatten(0, (self.num_experts, -1))
        b_Ore = (self.b if b is None else b).unflatten(1, (-1, self.num_experts))
        delta_eOI = torch.bmm(b_Ore.permute(2, 0, 1), a_erI) * self.scaling
        return delta_eOI.transpose(1, 2) if is_transposed else delta_eOI

    def _inner(self, x_RI: torch.Tensor, groups: RowGroups) -> torch.Tensor:
        return products.product(x_RI, self._a_erI(x_RI.dtype), False, groups)

    def _inner_gradient(self, dy_RO: torch.Tensor, groups: RowGroups) -> torch.Tensor:
        return products.grouped_rows_gradient(dy_RO, self._b_eOr(dy_RO.dtype), False, groups).mul_(self.scaling)

    def _a_erI(self, dtype: torch.dtype) -> torch.Tensor:
        return F.pad(self.a.detach().to(dtype).unflatten(0, (self.num_experts, -1)), (0, 0, 0, self._missing))

    def _b_eOr(self, dtype: torch.dtype) -> torch.Tensor:
        b_Ore = self.b.detach().to(dtype).unflatten(1, (-1, self.num_experts))
        return F.pad(b_Ore.permute(2, 0, 1), (0, self._missing)).contiguous()

    @property
    def _missing(self) -> int:
        return -self.rank % _COLUMNS
