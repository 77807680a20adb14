# SPDX-License-Identifier: Apache-2.0
"""Several experts of one structure in one forward call of a layer, each step of them all in one operation.

Letters: k of the experts on this rank, N ranks the rows came from, c slots, R = N * c rows of each, M, H widths.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ds_fsmoe.components.gradient_sums import GradientSums
from ds_fsmoe.components.graph_calls import GraphCall
from ds_fsmoe.components.linears import StackedLinear, add_stacked_gradients, apply_linear
from ds_fsmoe.components.side_by_side import stacked
from ds_fsmoe.components.written import WrittenExpert, WrittenFeedForward, WrittenGatedFeedForward
from ds_fsmoe.components.written_calls import WrittenCall

Together = Literal["auto", "never", "always"]

# What is known of these: they compute with their layers and element by element, and so for any number of dimensions.
_FORMS = (WrittenFeedForward, WrittenGatedFeedForward)
_ALIGNED_BYTES = 64
# On a CPU larger tensors go back to the system when they are freed and come page by page when they are made again,
# which takes more than computing together gives (benchmarks/results/experts.csv).
_LARGEST_ON_CPU_BYTES = 8 << 20


@dataclass
class _Pending:
    """What the weight gradients of a cut need."""

    x_kNcM: torch.Tensor | None
    kept: tuple[torch.Tensor, ...]
    """Each [k, N, c, H]; from which the hidden layer follows, unless that is there."""
    h_kNcH: torch.Tensor | None
    dy_kRM: torch.Tensor
    deltas_kRH: tuple[torch.Tensor, ...]


def structure(form: WrittenExpert, sums: GradientSums) -> Hashable:
    """What must be equal for experts to be computed together; ``None`` for one that is computed alone."""
    if type(form) not in _FORMS:
        return None
    layers = (
        (type(each), each.weight.shape, each.weight.dtype, each.weight.device, each.bias is None)
        for each in form.linears
    )
    wanted = ((sums.wants(each.weight), sums.wants(each.bias)) for each in form.linears)
    return type(form), form.activation, *layers, *wanted


def pays(form: WrittenExpert, x_NkcM: torch.Tensor) -> bool:
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
    weights = [linear.weight for linear in form.linears]
    num_ranks, _, slots, width = x_NkcM.shape
    return (
        num_ranks * slots <= width
        and all(weight.requires_grad for weight in weights)
        and not any(weight.shape[1] * weight.element_size() % _ALIGNED_BYTES for weight in weights)
    )


def most_together(form: WrittenExpert, together: Together) -> int:
    """How many experts of this structure are computed together at the most."""
    largest_bytes = max(linear.weight.nbytes for linear in form.linears)
    if together == "always" or form.down.weight.device.type != "cpu" or largest_bytes == 0:
        return sys.maxsize
    return max(1, _LARGEST_ON_CPU_BYTES // largest_bytes)


class TogetherCall:
    """Computes what its calls compute, all at once where that pays and nothing has to be copied for it.

    That is where the experts' weights lie side by side in memory (:mod:`~ds_fsmoe.components.side_by_side`): copying
    them costs more than it gives. Kept are views, one for each expert, so any cut may go one way or the other.

    Args:
        calls: of k experts that have one :func:`structure`, in their order.
        sums: where weight gradients go.
        recompute: whether the calls keep the rows alone.
        together: "always" for wherever it can be done, whether it pays or not.
    """

    splits = True

    def __init__(
        self, calls: Sequence[WrittenCall], sums: GradientSums, *, recompute: bool, together: Together
    ) -> None:
        self._calls = tuple(calls)
        self._sums = sums
        self._recompute = recompute
        self._always = together == "always"
        self._cuts_at_once: list[tuple[int, int]] = []
        """Of the forward."""
        self._pending: dict[tuple[int, int], _Pending] = {}

    def forward(self, start: int, stop: int, x_NkcM: torch.Tensor) -> torch.Tensor:
        """[N, k, c, M] to the same shape, new memory but perhaps not in that order."""
        form = self._stacked_form(x_NkcM.shape[0]) if self._always or pays(self._calls[0].written, x_NkcM) else None
        if form is None:
            return self._one_by_one(x_NkcM, lambda call, x_NcM: call.forward(start, stop, x_NcM))
        kept = self._kept(form, x_NkcM)
        for i, call in enumerate(self._calls):
            call.keep(start, stop, x_NkcM[:, i], tuple(each[i] for each in kept))
        self._cuts_at_once.append((start, stop))
        h_kRH = rows_of_each(form.hidden(kept))
        del kept
        return _by_rank(apply_linear(form.down, h_kRH), x_NkcM.shape)

    def backward(self, start: int, stop: int, dy_NkcM: torch.Tensor) -> torch.Tensor:
        """As :meth:`forward`; adds to the weights' gradients."""
        form = self._form_of_backward(start, stop, dy_NkcM.shape[0])
        if form is None:
            return self._one_by_one(dy_NkcM, lambda call, dy_NcM: call.backward(start, stop, dy_NcM))
        dx_NkcM = self._dx_at_once(form, start, stop, dy_NkcM)
        self.backward_dw(start, stop)
        return dx_NkcM

    def backward_dx(self, start: int, stop: int, dy_NkcM: torch.Tensor) -> torch.Tensor:
        """:meth:`backward` without weights; keeps ``dy_NkcM`` and what else :meth:`backward_dw` needs."""
        form = self._form_of_backward(start, stop, dy_NkcM.shape[0])
        if form is None:
            return self._one_by_one(dy_NkcM, lambda call, dy_NcM: call.backward_dx(start, stop, dy_NcM))
        return self._dx_at_once(form, start, stop, dy_NkcM)

    def backward_dw(self, start: int, stop: int) -> None:
        """Adds to the weights' gradients what :meth:`backward_dx` of the same cut left."""
        pending = self._pending.pop((start, stop), None)
        if pending is None:  # one by one, or no weight wants a gradient
            for call in self._calls:
                call.backward_dw(start, stop)
            return
        first = self._calls[0].written
        wants_down = self._sums.wants(first.down.weight)
        h_kRH = None
        if wants_down:
            h_kRH = rows_of_each(first.hidden(pending.kept) if pending.h_kNcH is None else pending.h_kNcH)
        add_stacked_gradients(self._sums, [call.written.down for call in self._calls], pending.dy_kRM, h_kRH)
        pending.h_kNcH = h_kRH = None
        x_kRM = None if pending.x_kNcM is None else rows_of_each(pending.x_kNcM)
        for i, delta_kRH in enumerate(pending.deltas_kRH):
            add_stacked_gradients(self._sums, [call.written.up[i] for call in self._calls], delta_kRH, x_kRM)

    def _dx_at_once(self, form: WrittenExpert, start: int, stop: int, dy_NkcM: torch.Tensor) -> torch.Tensor:
        rows, kept = zip(*(call.read(start, stop) for call in self._calls), strict=True)
        x_kNcM = None if rows[0] is None else _as_one(rows)
        if self._recompute:
            kept = self._kept(form, x_kNcM.transpose(0, 1))
        else:
            kept = tuple(_as_one(each) for each in zip(*kept, strict=True))
        del rows
        dy_kRM = rows_of_each(dy_NkcM.transpose(0, 1))
        dh_kRH = torch.bmm(dy_kRM, form.down.weight_kOI)
        dh_kNcH = dh_kRH.view(*kept[0].shape)
        del dh_kRH
        deltas_kNcH, h_kNcH = form.backward_hidden(dh_kNcH, kept)
        deltas_kRH = tuple(map(rows_of_each, deltas_kNcH))
        del dh_kNcH, deltas_kNcH
        dx_kRM = torch.bmm(deltas_kRH[0], form.up[0].weight_kOI)
        for linear, delta_kRH in zip(form.up[1:], deltas_kRH[1:], strict=True):
            dx_kRM += torch.bmm(delta_kRH, linear.weight_kOI)
        if self._calls[0].wants_any:
            x_kNcM = x_kNcM if self._calls[0].wants_up else None
            kept = kept if h_kNcH is None else ()
            self._pending[start, stop] = _Pending(x_kNcM, kept, h_kNcH, dy_kRM, deltas_kRH)
        return _by_rank(dx_kRM, dy_NkcM.shape)

    def _stacked_form(self, num_ranks: int) -> WrittenExpert | None:
        """The experts as one, without copying a weight; ``None`` where that cannot be."""
        # As torch does it for one of several experts: where rows are not contiguous the bias comes after the product.
        within = num_ranks == 1
        first = self._calls[0].written
        up = [
            StackedLinear.of([call.written.up[i] for call in self._calls], adds_bias_within=within)
            for i in range(len(first.up))
        ]
        down = StackedLinear.of([call.written.down for call in self._calls], adds_bias_within=True)
        if down is None or any(each is None for each in up):
            return None
        form = copy.copy(first)
        form.up, form.down = tuple(up), down
        return form

    def _form_of_backward(self, start: int, stop: int, num_ranks: int) -> WrittenExpert | None:
        """``None`` unless the cut lies in one whose hidden layers the forward has laid side by side."""
        is_within_one = any(first <= start and stop <= last for first, last in self._cuts_at_once)
        return self._stacked_form(num_ranks) if is_within_one else None

    def _kept(self, form: WrittenExpert, x_NkcM: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Of rows [N, k, c, M] what the rest needs, each [k, N, c, H]."""
        num_ranks, k, slots, _ = x_NkcM.shape
        kept = form.kept(rows_of_each(x_NkcM.transpose(0, 1)))
        return tuple(each.view(k, num_ranks, slots, each.shape[-1]) for each in kept)

    def _one_by_one(
        self, tensor_NkcM: torch.Tensor, way: Callable[[WrittenCall, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        parts = (way(call, tensor_NkcM[:, i]).unsqueeze(1) for i, call in enumerate(self._calls))
        return joined(parts, len(self._calls))


@dataclass(frozen=True)
class Run:
    """Experts first to last (exclusive) of a rank, one alone or neighbours together."""

    first: int
    last: int
    call: WrittenCall | GraphCall | TogetherCall

    def through(
        self,
        tensor_NeCM: torch.Tensor,
        way: Callable[[WrittenCall | GraphCall | TogetherCall, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """``way(call, theirs)`` of their part of [N, e, c, M]; [N, k, c, M]."""
        if isinstance(self.call, TogetherCall):
            return way(self.call, tensor_NeCM[:, self.first : self.last])
        return way(self.call, tensor_NeCM[:, self.first]).unsqueeze(1)


def runs_of(
    calls: Sequence[WrittenCall | GraphCall], sums: GradientSums, *, recompute: bool, together: Together
) -> tuple[Run, ...]:
    """The experts of a rank in their order: neighbours of one structure together, the others alone."""

    def kind(index: int) -> Hashable:
        call = calls[index]
        known = structure(call.written, sums) if together != "never" and isinstance(call, WrittenCall) else None
        return index if known is None else known

    runs = []
    for _, indices in itertools.groupby(range(len(calls)), kind):
        alike = list(indices)
        most = most_together(calls[alike[0]].written, together) if len(alike) > 1 else 1
        for first in range(alike[0], alike[-1] + 1, most):
            last = min(first + most, alike[-1] + 1)
            call = calls[first]
            if last - first > 1:
                call = TogetherCall(calls[first:last], sums, recompute=recompute, together=together)
            runs.append(Run(first, last, call))
    return tuple(runs)


def joined(parts: Iterable[torch.Tensor], num_experts: int) -> torch.Tensor:
    """Results [N, k, c, M] of some experts each, to [N, e, c, M] in new memory. A part goes before the next is made."""
    whole_NeCM, first = None, 0
    for part in parts:
        if whole_NeCM is None:
            whole_NeCM = part.new_empty(part.shape[0], num_experts, *part.shape[2:])
        elif part.dtype != whole_NeCM.dtype:
            whole_NeCM = whole_NeCM.to(torch.promote_types(part.dtype, whole_NeCM.dtype))
        whole_NeCM[:, first : first + part.shape[1]] = part
        first += part.shape[1]
        del part
    return whole_NeCM


def rows_of_each(x_kNcM: torch.Tensor) -> torch.Tensor:
    """[k, N, c, M] to [k, N * c, M]."""
    return x_kNcM.reshape(x_kNcM.shape[0], x_kNcM.shape[1] * x_kNcM.shape[2], x_kNcM.shape[3])


def _by_rank(y_kRM: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """[k, N * c, M] to [N, k, c, M], the same memory."""
    num_ranks, k, slots, width = shape
    return y_kRM.view(k, num_ranks, slots, width).transpose(0, 1)


def _as_one(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """[k, ...]; a copy only where somebody who keeps tensors for autograd has moved them."""
    together = stacked(tensors)
    return torch.stack(tuple(tensors)) if together is None else together
