# SPDX-License-Identifier: Apache-2.0
"""Computes several experts of one structure together: each step of a forward call is one operation for all of them.

``calls`` decides by :func:`runs_of` and :func:`has_gain` which experts go together. ``written_call`` runs them like a
single expert.

Letters: k of the experts on this rank, N ranks the rows came from, c slots, R = N * c rows of each, M, H widths.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Hashable, Sequence
from typing import Any, Literal

import torch

from ds_fsmoe.components.expert_compute.grouped_products import RowGroups, takes_grouped
from ds_fsmoe.components.expert_compute.linears import GroupedLinear, StackedLinear
from ds_fsmoe.components.expert_compute.manual_ffn import ManualExpert
from ds_fsmoe.components.expert_compute.plan import PlannedExpert

GroupedExperts = Literal["auto", "never", "always"]
Layers = tuple[ManualExpert, Sequence[Any], Any]
"""The form of all experts, and the layers with their gradients: those up to the hidden layer, and the last one."""

# On a CPU larger tensors are returned to the system when they are freed, and new ones are mapped page by page. That
# costs more than computing together gains (benchmarks/results/experts.csv).
_LARGEST_ON_CPU_BYTES = 8 << 20


def has_gain(planned: PlannedExpert, x_NkcM: torch.Tensor) -> bool:
    """Return True if computing experts together is faster for these rows, and changes no bit.

    It is faster where an expert has no more rows than its width, R <= M. A single expert is then too small to keep a
    GPU busy, or takes less time than its launch. With more rows the products take as long either way. The extra memory
    for the hidden layers of all experts at once is then less than their weights' gradients.

    No bit changes where rows of either width fill whole cache lines, and every weight wants a gradient. Then each
    expert's part of a tensor is aligned as a separate tensor would be. (For a weight without gradient torch multiplies
    strided rows in another order.) Observed on a CPU, for float64, float32, bfloat16 and float16.

    Measured on a CPU, forward and backward: up to twice as fast for small experts, 1.0 to 1.3 times for larger ones.
    Not measured on a GPU.

    The result depends only on sizes in the plan and the model, so it is equal on every rank.
    """
    num_ranks, _, slots, width = x_NkcM.shape
    return num_ranks * slots <= width and planned.may_group


def most_together(planned: PlannedExpert, together: GroupedExperts) -> int:
    """Return the largest number of experts of this structure that are computed together."""
    largest_bytes = max(weight.nbytes for weight in planned.weights)
    if together == "always" or planned.weights[0].device.type != "cpu" or largest_bytes == 0:
        return sys.maxsize
    return max(1, _LARGEST_ON_CPU_BYTES // largest_bytes)


class SideBySide:
    """Represents k experts of one structure as one, whose weights are one tensor of each kind.

    It needs no copy where the weights are adjacent in memory
    (:class:`~ds_fsmoe.components.expert_compute.linears.StackedLinear`). Callers check that first by :meth:`is_free`. A
    weight that is moved between the forward and its backward is copied.

    Args:
        experts: k of one structure, in their order.
    """

    def __init__(self, experts: Sequence[PlannedExpert]) -> None:
        self._first = first = experts[0]
        self._layers = [[each.up[i] for each in experts] for i in range(len(first.up))]
        self._layers.append([each.down for each in experts])
        linears = [*itertools.chain(*self._layers)]
        self.weights = [each.weight for each in linears]
        self.wants_up, self.wants_any = first.wants_up, first.wants_any
        self._parameters = self.weights + [each.bias for each in linears if each.bias is not None]
        self._stacks: list[StackedLinear] = []
        self._stacks_of: list[object] = []
        self._of_slots: Layers | None = None

    def forget(self) -> None:
        """Drop references to the weights' memory, so that it can be moved."""
        self._stacks, self._stacks_of, self._of_slots = [], [], None

    def is_free(self, num_ranks: int = 1) -> bool:
        """Return True if the experts can be computed as one without a copy of a weight."""
        return all(self._stacked(num_ranks, may_copy=False))

    def layers(self, like: torch.Tensor, groups: RowGroups | None) -> Layers:
        """Return the form of all experts, and its layers.

        Args:
            like: slots [k, N, c, M], or rows.
            groups: the rows of each expert; ``None``: all have equally many, and each step is a batched product.
        """
        if groups is not None:
            stacks = [GroupedLinear(each, groups) for each in self._stacked(1)]
            return _as_form(self._first.form, stacks)
        stacks = self._stacked(like.shape[1])
        if self._of_slots is None:
            self._of_slots = _as_form(self._first.form, stacks)
        return self._of_slots

    def _stacked(self, num_ranks: int, may_copy: bool = True) -> list[StackedLinear]:
        """Return the layers of the experts, each as one; ``None`` among them where that would need a copy."""
        stacks_of = [num_ranks, *map(torch.Tensor.data_ptr, self._parameters)]
        if self._stacks_of != stacks_of:
            # As in torch for one of several experts: where rows are not contiguous the bias is added after the
            # product.
            within = [num_ranks == 1] * (len(self._layers) - 1) + [True]
            made = [StackedLinear.of(*each, may_copy) for each in zip(self._layers, within, strict=True)]
            if not all(made):
                return made
            self._stacks, self._stacks_of, self._of_slots = made, stacks_of, None
        return self._stacks


def _as_form(form: ManualExpert, layers: Sequence[StackedLinear | GroupedLinear]) -> Layers:
    *up, down = layers
    return form.with_layers(up, down), up, down


def runs_of(planned: Sequence[PlannedExpert | None], together: GroupedExperts) -> list[tuple[int, int]]:
    """Return [first, last) of runs of a rank's experts: neighbours of one structure together, the others alone."""

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


def can_be_grouped(planned: PlannedExpert, x_RM: torch.Tensor) -> bool:
    """Return True if torch has a grouped product for these rows and weights that does not wait for the device."""
    widths = (size for each in planned.weights for size in each.shape)
    return takes_grouped(widths, [x_RM.dtype, *(each.dtype for each in planned.weights)], x_RM.device)
