# SPDX-License-Identifier: Apache-2.0
"""Several experts of one structure in one forward call of a layer, each step of them all in one operation.

Letters: k of the experts on this rank, N ranks the rows came from, c slots, R = N * c rows of each, M, H widths.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from ds_fsmoe.components.expert_compute.autograd_call import GraphCall
from ds_fsmoe.components.expert_compute.gradient_sums import GradientSums
from ds_fsmoe.components.expert_compute.grouped_products import RowGroups, takes_grouped
from ds_fsmoe.components.expert_compute.linears import (
    GroupedLinear,
    RowWeights,
    StackedLinear,
    add_grouped_gradients,
    add_stacked_gradients,
    apply_linear,
)
from ds_fsmoe.components.expert_compute.manual_call import (
    ManualCall,
    back_to_rows,
    check_unchanged,
    flat_rows,
    versions_of,
)
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


class GroupedCall:
    """Computes what calls of its experts would compute, all at once where that pays and nothing is copied for it.

    That is where the experts' weights lie side by side in memory
    (:class:`~ds_fsmoe.components.expert_compute.linears.StackedLinear`): copying them costs more than it gives. Of a
    cut that went at once one tensor of each kind is kept for all experts; should the backward need them one by
    one, each expert has its part of it.

    Args:
        experts: k that have one structure, in their order.
        sums: where weight gradients go.
        needs_backward: whether to keep anything.
        recompute: whether to keep the rows alone.
        always: do so wherever it can be done, whether it pays or not.
    """

    def __init__(
        self,
        experts: Sequence[PlannedExpert],
        sums: GradientSums,
        *,
        needs_backward: bool,
        recompute: bool,
        always: bool,
    ) -> None:
        self._experts = tuple(experts)
        first = self._experts[0]
        self._first = first
        self._sums = sums
        self._needs_backward = needs_backward
        self._recompute = recompute
        self._always = always
        self._calls: tuple[ManualCall, ...] = ()
        """Of each expert alone, once they are needed."""
        self._up = [[each.form.up[i] for each in self._experts] for i in range(len(first.form.up))]
        self._down = [each.form.down for each in self._experts]
        linears = [*itertools.chain.from_iterable(self._up), *self._down]
        self._parameters = [each.weight for each in linears] + [each.bias for each in linears if each.bias is not None]
        self._weights = self._parameters[: len(linears)]
        self._versions = versions_of(self._weights) if needs_backward else []
        self._cuts = SavedActivations(dim=2)
        """Of what went at once."""
        self._cuts_at_once: list[tuple[int, int]] = []
        """Of the forward."""
        self._form: ManualExpert | None = None
        self._form_of: tuple[int, list[int]] | None = None

    @property
    def stores(self) -> tuple[SavedActivations, ...]:
        """Return the stores of what is kept for the backward."""
        return (self._cuts, *(call.cuts for call in self._calls))

    def forget(self) -> None:
        """Hold the weights' memory no longer, which somebody may want to move."""
        self._form = self._form_of = None

    def forward(self, start: int, stop: int, x_NkcM: torch.Tensor) -> torch.Tensor:
        """[N, k, c, M] to the same shape, new memory but perhaps not in that order."""
        form = self._stacked_form(x_NkcM.shape[0]) if self._always or pays(self._first, x_NkcM) else None
        if form is None:
            self._check_is_new(start, stop)
            return self._one_by_one(x_NkcM, lambda i, x_NcM: self._alone[i].forward(start, stop, x_NcM))
        kept = self._kept(form, x_NkcM)
        if self._needs_backward:
            x_kept = x_NkcM if self._first.wants_up or self._recompute else None
            self._check_is_new(start, stop)
            self._cuts.put(start, stop, (x_kept, *(() if self._recompute else kept)))
        self._cuts_at_once.append((start, stop))
        h_kRH = flat_rows(form.hidden(kept))
        del kept
        return _by_rank(apply_linear(form.down, h_kRH), x_NkcM.shape)

    def backward(self, start: int, stop: int, dy_NkcM: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the rows, in the shape of :meth:`forward`, and add to the weights' gradients."""
        form = self._form_of_backward(start, stop, dy_NkcM.shape[0])
        if form is None:
            return self._back_one_by_one(start, stop, dy_NkcM)
        check_unchanged(self._weights, self._versions)
        x_NkcM, *read = self._cuts.take(start, stop)
        kept = self._kept(form, x_NkcM) if self._recompute else tuple(read)
        del read
        dx_kRM, left = back_to_rows(form, kept, dy_NkcM.transpose(0, 1))
        del kept
        if self._first.wants_any:
            left.x_RM = x_NkcM.transpose(0, 1) if self._first.wants_up else None  # laid side by side when it is used
            left.add_gradients(self._sums, self._first.form, add_stacked_gradients, self._up, self._down)
        return _by_rank(dx_kRM, dy_NkcM.shape)

    def _stacked_form(self, num_ranks: int) -> ManualExpert | None:
        """The experts as one, without copying a weight; ``None`` where that cannot be."""
        form_of = num_ranks, list(map(torch.Tensor.data_ptr, self._parameters))
        if self._form_of != form_of:
            self._form, self._form_of = self._stack(num_ranks), form_of
        return self._form

    def _stack(self, num_ranks: int) -> ManualExpert | None:
        # As torch does it for one of several experts: where rows are not contiguous the bias comes after the product.
        within = num_ranks == 1
        down = StackedLinear.of(self._down, adds_bias_within=True)
        up = [None if down is None else StackedLinear.of(each, adds_bias_within=within) for each in self._up]
        if any(each is None for each in up):
            return None
        form = copy.copy(self._first.form)
        form.up, form.down = tuple(up), down
        return form

    def _form_of_backward(self, start: int, stop: int, num_ranks: int) -> ManualExpert | None:
        """``None`` unless the cut lies in one whose hidden layers the forward has laid side by side."""
        is_within_one = any(first <= start and stop <= last for first, last in self._cuts_at_once)
        return self._stacked_form(num_ranks) if is_within_one else None

    def _kept(self, form: ManualExpert, x_NkcM: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Of rows [N, k, c, M] what the rest needs, each [k, N, c, H]."""
        num_ranks, k, slots, _ = x_NkcM.shape
        kept = form.kept(flat_rows(x_NkcM.transpose(0, 1)))
        return tuple(each.view(k, num_ranks, slots, each.shape[-1]) for each in kept)

    @property
    def _alone(self) -> tuple[ManualCall, ...]:
        if not self._calls:
            options = {"needs_backward": self._needs_backward, "recompute": self._recompute, "contiguous": False}
            self._calls = tuple(ManualCall(each, self._sums, **options) for each in self._experts)
        return self._calls

    def _back_one_by_one(self, start: int, stop: int, dy_NkcM: torch.Tensor) -> torch.Tensor:
        check_unchanged(self._weights, self._versions)
        calls = self._alone
        went_at_once = any(first < stop and start < last for first, last in self._cuts_at_once)
        read = self._read_each(start, stop) if went_at_once else None

        def back(i: int, dy_NcM: torch.Tensor) -> torch.Tensor:
            if read is None:
                return calls[i].backward(start, stop, dy_NcM)
            (x_NcM, *kept), read[i] = read[i], ()
            dx_NcM, left = calls[i].gradient_of_rows(x_NcM, tuple(kept), dy_NcM)
            calls[i].add_gradients(left)
            return dx_NcM

        return self._one_by_one(dy_NkcM, back)

    def _read_each(self, start: int, stop: int) -> list[tuple[torch.Tensor | None, ...]]:
        """Of each expert what a cut needs that went at once in part."""
        within = {start, stop}
        for first, last in self._cuts_at_once:
            within.update(each for each in (first, last) if start < each < stop)
        parts: list[list[tuple[torch.Tensor | None, ...]]] = []
        for low, high in itertools.pairwise(sorted(within)):
            if any(first <= low and high <= last for first, last in self._cuts_at_once):
                x_NkcM, *kept = self._cuts.take(low, high)
                rows = [None] * len(self._experts) if x_NkcM is None else x_NkcM.unbind(1)
                parts.append(list(zip(rows, *(each.unbind() for each in kept), strict=True)))
            else:
                parts.append([call.cuts.take(low, high) for call in self._calls])
        if len(parts) == 1:
            return parts[0]
        return [
            tuple(None if each[0] is None else torch.cat(each, dim=1) for each in zip(*of_expert, strict=True))
            for of_expert in zip(*parts, strict=True)
        ]

    def _check_is_new(self, start: int, stop: int) -> None:
        for cuts in self.stores[:2]:
            cuts.check_is_new(start, stop)

    def _one_by_one(self, tensor_NkcM: torch.Tensor, way: Callable[[int, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        parts = (way(i, tensor_NkcM[:, i]).unsqueeze(1) for i in range(len(self._experts)))
        return joined_parts(parts, len(self._experts))


@dataclass(frozen=True)
class ExpertRun:
    """Experts first to last (exclusive) of a rank, one alone or neighbours together."""

    first: int
    last: int
    call: ManualCall | GraphCall | GroupedCall

    def through(
        self,
        tensor_NeCM: torch.Tensor,
        way: Callable[[ManualCall | GraphCall | GroupedCall, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """``way(call, theirs)`` of their part of [N, e, c, M]; [N, k, c, M]."""
        if isinstance(self.call, GroupedCall):
            return way(self.call, tensor_NeCM[:, self.first : self.last])
        return way(self.call, tensor_NeCM[:, self.first]).unsqueeze(1)


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
        """Return the stores of what is kept for the backward."""
        return (self._saved,)

    @classmethod
    def of(cls, experts: Sequence[PlannedExpert], *args: GradientSums, **options: object) -> GroupedRowsCall | None:
        """Return the call of experts whose weights lie side by side; ``None`` where they do not."""
        call = cls(experts, *args, **options)
        return call if call._stacked() is not None else None

    def forget(self) -> None:
        """Hold the weights' memory no longer, which somebody may want to move."""
        self._stacks = None

    def forward(self, chunk: int, x_RM: torch.Tensor, groups: RowGroups) -> torch.Tensor:
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
        self, chunk: int, dy_RM: torch.Tensor, groups: RowGroups, weights: RowWeights | None = None
    ) -> torch.Tensor:
        """Return the gradient of the rows, in the shape of :meth:`forward`, and add to the weights' gradients."""
        check_unchanged(self._weights, self._versions)
        form = self._form(groups)
        x_1RM, *read = self._saved.take(chunk)
        kept = tuple(each.unsqueeze(0) for each in form.kept(x_1RM[0])) if self._recompute else tuple(read)
        del read
        dx_RM, left = back_to_rows(form, kept, dy_RM.unsqueeze(0), weights)
        del kept
        if self._first.wants_any:
            add = partial(add_grouped_gradients, groups=groups)
            left.x_RM = x_1RM[0] if self._first.wants_up else None
            left.add_gradients(self._sums, self._first.form, add, self._up, self._down)
        return dx_RM

    def _stacked(self) -> list[StackedLinear] | None:
        """The weights of each layer as one tensor, without a copy; ``None`` where that cannot be."""
        if self._stacks is None:
            found = [StackedLinear.of(each, adds_bias_within=False) for each in (*self._up, self._down)]
            self._stacks = None if any(each is None for each in found) else found
        return self._stacks

    def _form(self, groups: RowGroups) -> ManualExpert:
        """The experts as one, for rows that lie there."""
        stacks = self._stacked()
        if stacks is None:
            raise RuntimeError("the weights of the experts were moved apart between the forward and its backward")
        form = copy.copy(self._first.form)
        *up, form.down = (GroupedLinear(each.weight_kOI, each.bias_kO, groups) for each in stacks)
        form.up = tuple(up)
        return form
