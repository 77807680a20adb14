# SPDX-License-Identifier: Apache-2.0
"""Several experts of one structure in one forward call of a layer, each step of them all in one operation.

Letters: k of the experts on this rank, N ranks the rows came from, c slots, R = N * c rows of each, M, H widths.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Literal

import torch

from ds_fsmoe.components.expert_compute.gradient_sums import GradientSums
from ds_fsmoe.components.expert_compute.grouped_products import RowGroups, takes_grouped
from ds_fsmoe.components.expert_compute.linears import GroupedLinear, RowWeights, StackedLinear
from ds_fsmoe.components.expert_compute.manual_call import ManualCall, WrittenCall, flat_rows
from ds_fsmoe.components.expert_compute.manual_ffn import ManualExpert
from ds_fsmoe.components.expert_compute.plan import PlannedExpert
from ds_fsmoe.components.expert_compute.row_call import joined_parts
from ds_fsmoe.components.expert_compute.saved import SavedActivations, SavedRows

GroupedExperts = Literal["auto", "never", "always"]

# On a CPU larger tensors go back to the system when they are freed and come page by page when they are made again,
# which takes more than computing together gives (benchmarks/results/experts.csv).
_LARGEST_ON_CPU_BYTES = 8 << 20


def pays(planned: PlannedExpert, x_NkcM: torch.Tensor) -> bool:
    """Whether it is worth it for these rows of the experts, and changes no bit.

    Worth it is where an expert has no more rows than its width, R <= M. One expert alone is then too small to keep a
    GPU busy, or takes less time than launching it; with more rows its products take as long in either way. What the
    hidden layers of all experts take at the same time, instead of one expert's, is then less than the gradients of
    their weights, which have to be there anyway.

    No bit changes where rows of either width fill whole lines of memory, so that each expert's part of a tensor is
    aligned as a tensor of its own would be, and where every weight wants a gradient (for one that does not torch
    multiplies strided rows in another order). Seen on a CPU, for float64, float32, bfloat16 and float16.

    Measured on a CPU, forward and backward: up to twice as fast for small experts, 1.0 to 1.3 times for larger ones.
    Not measured on a GPU.

    From sizes alone, which come from the plan and the model and so are the same on every rank.
    """
    num_ranks, _, slots, width = x_NkcM.shape
    return num_ranks * slots <= width and planned.may_pay


def most_together(planned: PlannedExpert, together: GroupedExperts) -> int:
    """How many experts of this structure are computed together at the most."""
    largest_bytes = max(weight.nbytes for weight in planned.weights)
    if together == "always" or planned.weights[0].device.type != "cpu" or largest_bytes == 0:
        return sys.maxsize
    return max(1, _LARGEST_ON_CPU_BYTES // largest_bytes)


class TogetherCall(WrittenCall):
    """Calls of k experts of one structure, whose weights are one tensor of each kind.

    That costs nothing where they lie side by side in memory
    (:class:`~ds_fsmoe.components.expert_compute.linears.StackedLinear`). Whoever makes such a call asks for it first
    (:meth:`lie_side_by_side`); should somebody move a weight between the forward and its backward, it is copied.

    Args:
        experts: k that have one structure, in their order.
        sums: where weight gradients go.
        saved: where to keep what the backward needs.
        needs_backward: whether to keep anything.
        recompute: whether to keep the rows alone.
    """

    def __init__(
        self,
        experts: Sequence[PlannedExpert],
        sums: GradientSums,
        saved: SavedActivations | SavedRows,
        *,
        needs_backward: bool,
        recompute: bool,
    ) -> None:
        self._experts, self._first = tuple(experts), experts[0]
        self._layers = [[each.up[i] for each in experts] for i in range(len(self._first.up))]
        self._layers.append([each.down for each in experts])
        linears = [*itertools.chain(*self._layers)]
        weights = [each.weight for each in linears]
        self._parameters = weights + [each.bias for each in linears if each.bias is not None]
        self._stacks: list[StackedLinear] = []
        self._stacks_of: list[object] = []
        self._form_of_slots: ManualExpert | None = None
        wanted = self._first.wants_up, self._first.wants_any
        super().__init__(weights, *wanted, sums, saved, needs_backward, recompute)

    def forget(self) -> None:
        """Hold the weights' memory no longer, which somebody may want to move."""
        self._stacks, self._stacks_of, self._form_of_slots = [], [], None

    def lie_side_by_side(self, num_ranks: int = 1) -> bool:
        """Return whether the experts can be computed as one without a copy of a weight."""
        return all(self._stacked(num_ranks, may_copy=False))

    def _stacked(self, num_ranks: int, may_copy: bool = True) -> list[StackedLinear]:
        """The layers of the experts, each as one, ``None`` among them where that cannot be."""
        stacks_of = [num_ranks, *map(torch.Tensor.data_ptr, self._parameters)]
        if self._stacks_of != stacks_of:
            # As torch does it for one of several experts: where rows are not contiguous the bias comes after the
            # product.
            within = [num_ranks == 1] * (len(self._layers) - 1) + [True]
            made = [StackedLinear.of(*each, may_copy) for each in zip(self._layers, within, strict=True)]
            if not all(made):
                return made
            self._stacks, self._stacks_of, self._form_of_slots = made, stacks_of, None
        return self._stacks


class GroupedCall(TogetherCall):
    """Computes what calls of its experts would compute, all at once where that pays and nothing is copied for it.

    The first rows of a call decide for all. Of each kind of tensor one is kept for all experts.

    Args:
        experts: k that have one structure, in their order.
        sums: where weight gradients go.
        always: whether to do so wherever it can be done, whether it pays or not.
        options: see :class:`TogetherCall`.
    """

    def __init__(self, experts: Sequence[PlannedExpert], sums: GradientSums, *, always: bool, **options: bool) -> None:
        super().__init__(experts, sums, SavedActivations(dim=2), **options)
        self._always, self._options = always, options
        self._alone: tuple[ManualCall, ...] | None = None
        """Calls of each expert, if that is the way; ``None`` before the first rows."""

    @property
    def stores(self) -> tuple[SavedActivations | SavedRows, ...]:
        """Return the stores of what is kept for the backward."""
        return tuple(each for call in self._alone or () for each in call.stores) or super().stores

    def forward(self, start: int, stop: int, x_NkcM: torch.Tensor) -> torch.Tensor:
        """[N, k, c, M] to the same shape, new memory but perhaps not in that order."""
        if self._alone is None:
            at_once = (self._always or pays(self._first, x_NkcM)) and self.lie_side_by_side(x_NkcM.shape[0])
            options = {**self._options, "contiguous": False}
            self._alone = () if at_once else tuple(ManualCall(each, self._sums, **options) for each in self._experts)
        if self._alone:
            return self._one_by_one(x_NkcM, lambda i, x_NcM: self._alone[i].forward(start, stop, x_NcM))
        form = self._form(x_NkcM.shape[0])
        h_kRH = flat_rows(self._forth((start, stop), form, x_NkcM))
        return _by_rank(form.down(h_kRH), x_NkcM.shape)

    def backward(self, start: int, stop: int, dy_NkcM: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the rows, in the shape of :meth:`forward`, and add to the weights' gradients."""
        if self._alone:
            return self._one_by_one(dy_NkcM, lambda i, dy_NcM: self._alone[i].backward(start, stop, dy_NcM))
        form = self._form(dy_NkcM.shape[0])
        dx_kRM = self._back((start, stop), form, form.up, form.down, dy_NkcM.transpose(0, 1))
        return _by_rank(dx_kRM, dy_NkcM.shape)

    def _form(self, num_ranks: int) -> ManualExpert:
        *up, down = self._stacked(num_ranks)
        if self._form_of_slots is None:
            self._form_of_slots = self._first.form.with_layers(up, down)
        return self._form_of_slots

    def _kept(self, form: ManualExpert, x_NkcM: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return what :meth:`ManualExpert.kept` gives for rows [N, k, c, M], each [k, N, c, H]."""
        num_ranks, k, slots, _ = x_NkcM.shape
        kept = form.kept(self._flat(x_NkcM))
        return tuple(each.view(k, num_ranks, slots, each.shape[-1]) for each in kept)

    def _flat(self, x_NkcM: torch.Tensor) -> torch.Tensor:
        return flat_rows(x_NkcM.transpose(0, 1))

    def _one_by_one(self, tensor_NkcM: torch.Tensor, way: Callable[[int, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        parts = (way(i, tensor_NkcM[:, i]).unsqueeze(1) for i in range(len(self._experts)))
        return joined_parts(parts, len(self._experts))


def runs_of(planned: Sequence[PlannedExpert | None], together: GroupedExperts) -> list[tuple[int, int]]:
    """[first, last) of the experts of a rank in their order: neighbours of one structure together, the others alone."""

    def kind(index: int) -> Hashable:
        expert = planned[index]
        known = None if expert is None or together == "never" else expert.structure
        return index if known is None else known

    runs = []
    for _, indices in itertools.groupby(range(len(planned)), kind):
        alike = list(indices)
        most = most_together(planned[alike[0]], together) if len(alike) > 1 else 1
        runs += [(first, min(first + most, alike[-1] + 1)) for first in range(alike[0], alike[-1] + 1, most)]
    return runs


def _by_rank(y_kRM: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """[k, N * c, M] to [N, k, c, M], the same memory."""
    num_ranks, k, slots, width = shape
    return y_kRM.view(k, num_ranks, slots, width).transpose(0, 1)


# ---- Several experts of one structure on rows of their own, not equally many: each step of them all in one
# product
#
# Letters: k of the experts on this rank, R rows of all of them, expert by expert, M, H widths.


def can_be_grouped(planned: PlannedExpert, x_RM: torch.Tensor) -> bool:
    """Whether torch has a grouped product for these rows and weights that does not wait for the device."""
    widths = (size for each in planned.weights for size in each.shape)
    return takes_grouped(widths, [x_RM.dtype, *(each.dtype for each in planned.weights)], x_RM.device)


class GroupedRowsCall(TogetherCall):
    """Computes what calls of its experts would compute, on [R, M] with the rows expert by expert."""

    is_grouped = True

    def forward(self, chunk: int, x_RM: torch.Tensor, groups: RowGroups) -> torch.Tensor:
        """[R, M] to the same shape.

        Args:
            chunk: of the forward.
            x_RM: the rows.
            groups: where the rows of each expert lie.
        """
        form = self._form(groups)
        return form.down(self._forth((chunk,), form, x_RM))

    def backward(
        self, chunk: int, dy_RM: torch.Tensor, groups: RowGroups, weights: RowWeights | None = None
    ) -> torch.Tensor:
        """Return the gradient of the rows, in the shape of :meth:`forward`, and add to the weights' gradients."""
        form = self._form(groups)
        return self._back((chunk,), form, form.up, form.down, dy_RM, weights)

    def _form(self, groups: RowGroups) -> ManualExpert:
        """The experts as one, for rows that lie there."""
        *up, down = (
            GroupedLinear(each.linears, each.weight_kOI, each.bias_kO, groups=groups) for each in self._stacked(1)
        )
        return self._first.form.with_layers(up, down)
