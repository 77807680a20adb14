# SPDX-License-Identifier: Apache-2.0
"""Several experts of one structure on rows of their own, not equally many: each step of them all in one product.

Letters: k of the experts on this rank, R rows of all of them, expert by expert, M, H widths.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence

import torch

from ds_fsmoe.components.expert_compute.gradient_sums import GradientSums
from ds_fsmoe.components.expert_compute.grouped_products import Groups, takes_grouped
from ds_fsmoe.components.expert_compute.linears import GroupedLinear, StackedLinear, add_grouped_gradients
from ds_fsmoe.components.expert_compute.manual_call import back_to_rows, check_versions, versions_of
from ds_fsmoe.components.expert_compute.manual_ffn import ManualExpert
from ds_fsmoe.components.expert_compute.plan import PlannedExpert
from ds_fsmoe.components.expert_compute.row_weights import RowWeights
from ds_fsmoe.components.expert_compute.saved_rows import SavedRows


def can_be_grouped(planned: PlannedExpert, x_RM: torch.Tensor) -> bool:
    """Whether torch has a grouped product for these rows and weights that does not wait for the device."""
    widths = (size for each in planned.weights for size in each.shape)
    return takes_grouped(widths, [x_RM.dtype, *(each.dtype for each in planned.weights)], x_RM.device)


class GroupedRowsCall:
    """Computes what calls of its experts would compute, on [R, M] with the rows expert by expert.

    Args:
        experts: k that have one structure, in their order.
        sums: where weight gradients go.
        needs_backward: whether to keep anything.
        recompute: whether to keep the rows alone.
        saved: where to keep it.
    """

    is_grouped = True

    def __init__(
        self,
        experts: Sequence[PlannedExpert],
        sums: GradientSums,
        *,
        needs_backward: bool,
        recompute: bool,
        saved: SavedRows,
    ) -> None:
        self._first = experts[0]
        self._sums = sums
        self._needs_backward = needs_backward
        self._recompute = recompute
        self._saved = saved
        self._up = [[each.form.up[i] for each in experts] for i in range(len(self._first.form.up))]
        self._down = [each.form.down for each in experts]
        self._weights = [each.weight for each in itertools.chain(*self._up, self._down)]
        self._versions = versions_of(self._weights) if needs_backward else []
        self._stacks: list[StackedLinear] | None = None

    @property
    def stores(self) -> tuple[SavedRows, ...]:
        """Of what is kept for the backward."""
        return (self._saved,)

    @classmethod
    def of(cls, experts: Sequence[PlannedExpert], *args: GradientSums, **options: object) -> GroupedRowsCall | None:
        """Return the call of experts whose weights lie side by side; ``None`` where they do not."""
        call = cls(experts, *args, **options)
        return call if call._stacked() is not None else None

    def forget(self) -> None:
        """Hold the weights' memory no longer, which somebody may want to move."""
        self._stacks = None

    def forward(self, chunk: int, x_RM: torch.Tensor, groups: Groups) -> torch.Tensor:
        """[R, M] to the same shape.

        Args:
            chunk: of the forward.
            x_RM: the rows.
            groups: where the rows of each expert lie.
        """
        form = self._form(groups)
        kept = form.kept(x_RM)
        if self._needs_backward:
            keeps_rows = self._first.wants_up or self._recompute
            hidden = () if self._recompute else (each.unsqueeze(0) for each in kept)
            self._saved.put(chunk, (x_RM.unsqueeze(0) if keeps_rows else None, *hidden))
        return form.down(form.hidden(kept))

    def backward(
        self, chunk: int, dy_RM: torch.Tensor, groups: Groups, weights: RowWeights | None = None
    ) -> torch.Tensor:
        """As :meth:`forward`; adds to the weights' gradients."""
        check_versions(self._weights, self._versions)
        form = self._form(groups)
        x_1RM, *read = self._saved.take(chunk)
        kept = tuple(each.unsqueeze(0) for each in form.kept(x_1RM[0])) if self._recompute else tuple(read)
        del read
        dx_RM, left = back_to_rows(form, kept, dy_RM.unsqueeze(0), weights)
        del kept
        if self._first.wants_any:
            h_RH = left.hidden_rows(self._first.form) if self._sums.wants(self._first.form.down.weight) else None
            add_grouped_gradients(self._sums, self._down, left.dy_RM, h_RH, groups)
            left.h_NcH = h_RH = None
            x_RM = x_1RM[0] if self._first.wants_up else None
            for up, delta_RH in zip(self._up, left.deltas_RH, strict=True):
                add_grouped_gradients(self._sums, up, delta_RH, x_RM, groups)
        return dx_RM

    def _stacked(self) -> list[StackedLinear] | None:
        """The weights of each layer as one tensor, without a copy; ``None`` where that cannot be."""
        if self._stacks is None:
            found = [StackedLinear.of(each, adds_bias_within=False) for each in (*self._up, self._down)]
            self._stacks = None if any(each is None for each in found) else found
        return self._stacks

    def _form(self, groups: Groups) -> ManualExpert:
        """The experts as one, for rows that lie there."""
        stacks = self._stacked()
        if stacks is None:
            raise RuntimeError("the weights of the experts were moved apart between the forward and its backward")
        form = copy.copy(self._first.form)
        *up, form.down = (GroupedLinear(each.weight_kOI, each.bias_kO, groups) for each in stacks)
        form.up = tuple(up)
        return form
