# SPDX-License-Identifier: Apache-2.0
"""One expert in one forward call of a layer, where its gradients are written out."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ds_fsmoe.components.expert_compute.gradient_sums import GradientSums
from ds_fsmoe.components.expert_compute.linears import (
    RowWeights,
    add_bias_products,
    add_gradients,
    apply_linear,
    rows_gradient,
)
from ds_fsmoe.components.expert_compute.manual_ffn import ManualExpert
from ds_fsmoe.components.expert_compute.plan import PlannedExpert
from ds_fsmoe.components.expert_compute.saved import SavedActivations

_VERSION = operator.attrgetter("_version")


@dataclass
class Left:
    """What the weight gradients of a cut need. Shapes are those of one expert; of k at once all begin with k."""

    kept: tuple[torch.Tensor, ...]
    """From which the hidden layer follows, unless that is there."""
    h_NcH: torch.Tensor | None
    dy_RM: torch.Tensor
    deltas_RH: tuple[torch.Tensor, ...]
    """The gradient of the results of each layer of ``up``."""
    x_RM: torch.Tensor | None = None
    """These are the rows, where a weight of ``up`` wants a gradient."""

    def add_gradients(
        self, sums: GradientSums, form: ManualExpert, add: Callable[..., None], up: Sequence[Any], down: Any
    ) -> None:
        """Add the gradients of all weights.

        Args:
            sums: where they go.
            form: the expert, or the first of k.
            add: ``add(sums, layer, gradient of its results, its rows)`` for one layer, or for that of k experts.
            up: the layers ahead of the hidden one.
            down: the layer behind it.
        """
        h_RH = None
        if sums.wants(form.down.weight):
            h_RH = flat_rows(form.hidden(self.kept) if self.h_NcH is None else self.h_NcH)
        add(sums, down, self.dy_RM, h_RH)
        self.h_NcH = h_RH = None
        if self.x_RM is not None and self.x_RM.dim() > self.dy_RM.dim():
            self.x_RM = flat_rows(self.x_RM)
        for each, delta_RH in zip(up, self.deltas_RH, strict=True):
            add(sums, each, delta_RH, self.x_RM)


def back_to_rows(
    form: ManualExpert, kept: tuple[torch.Tensor, ...], dy_NcM: torch.Tensor, weights: RowWeights | None = None
) -> tuple[torch.Tensor, Left]:
    """Go back through an expert, or through k that are stacked, as autograd would.

    Args:
        form: the expert.
        kept: of the forward.
        dy_NcM: the gradient of its results, or with weights that of their weighted sums.
        weights: of its results, not stacked; their gradients are added.

    Returns:
        The gradient of the rows, [N * c, M], and what is left to do for the weights, without the rows.
    """
    dy_RM = flat_rows(dy_NcM)
    dh_RH = rows_gradient(form.down, dy_RM)
    weighted_NcH = None
    if weights is not None:
        weighted_NcH = form.hidden(kept)
        weights.add_products(dh_RH, flat_rows(weighted_NcH))
        add_bias_products(form.down, dy_RM, weights)
        dh_RH, dy_RM = weights.apply(dh_RH), weights.apply(dy_RM)
    dh_NcH = dh_RH.view(*dy_NcM.shape[:-1], dh_RH.shape[-1])
    del dh_RH
    deltas_NcH, h_NcH = form.backward_hidden(dh_NcH, kept)
    h_NcH = weighted_NcH if h_NcH is None else h_NcH
    deltas_RH = tuple(map(flat_rows, deltas_NcH))
    del dh_NcH, deltas_NcH
    dx_RM = rows_gradient(form.up[0], deltas_RH[0])
    for linear, delta_RH in zip(form.up[1:], deltas_RH[1:], strict=True):
        dx_RM += rows_gradient(linear, delta_RH)
    return dx_RM, Left(kept if h_NcH is None else (), h_NcH, dy_RM, deltas_RH)


class ManualCall:
    """Keeps the rows (the caller's memory, not a copy) and the hidden layer once, and computes the rest again.

    The operations and their order are those of autograd on ``expert(x_NcM)``, so one cut of the whole capacity gives
    its bits. Strided rows (N > 1) are copied for every product as ``F.linear`` does it; no copy is kept.

    Args:
        planned: the expert.
        sums: where weight gradients go.
        needs_backward: whether to keep anything.
        recompute: keep the rows alone.
        contiguous: make the expert's rows contiguous first, on a copy that is not kept.
    """

    def __init__(
        self, planned: PlannedExpert, sums: GradientSums, *, needs_backward: bool, recompute: bool, contiguous: bool
    ) -> None:
        self.written = planned.form
        self._weights = planned.weights
        self._sums = sums
        self._needs_backward = needs_backward
        self._recompute = recompute
        self._contiguous = contiguous
        self.wants_up = planned.wants_up
        self.wants_any = planned.wants_any
        self.cuts = SavedActivations()
        # Autograd would refuse a weight that changed between forward and backward, and so do we.
        self._versions = versions_of(planned.weights) if needs_backward else []

    @property
    def stores(self) -> tuple[SavedActivations, ...]:
        """Return the stores of what is kept for the backward."""
        return (self.cuts,)

    def forward(self, start: int, stop: int, x_NcM: torch.Tensor) -> torch.Tensor:
        """[N, c, M] to the same shape."""
        kept = self._kept(x_NcM)
        if self._needs_backward:
            x_kept = x_NcM if self.wants_up or self._recompute else None
            self.cuts.put(start, stop, (x_kept, *(() if self._recompute else kept)))
        return apply_linear(self.written.down, self.written.hidden(kept))

    def read(self, start: int, stop: int) -> tuple[torch.Tensor | None, tuple[torch.Tensor, ...]]:
        """The rows of a cut, if they are kept, and what else is; nothing else with ``recompute``.

        Raises:
            RuntimeError: a weight was changed in place since the forward.
        """
        check_unchanged(self._weights, self._versions)
        x_NcM, *kept = self.cuts.take(start, stop)
        return x_NcM, tuple(kept)

    def backward(self, start: int, stop: int, dy_NcM: torch.Tensor, weights: RowWeights | None = None) -> torch.Tensor:
        """[N, c, M] to the same shape; adds to the weights' gradients."""
        dx_NcM, left = self.gradient_of_rows(*self.read(start, stop), dy_NcM, weights)
        self.add_gradients(left)
        return dx_NcM

    def gradient_of_rows(
        self,
        x_NcM: torch.Tensor | None,
        kept: tuple[torch.Tensor, ...],
        dy_NcM: torch.Tensor,
        weights: RowWeights | None = None,
    ) -> tuple[torch.Tensor, Left]:
        """:meth:`backward` of what :meth:`read` has returned, and what is left for :meth:`add_gradients`."""
        kept = self._kept(x_NcM) if self._recompute else kept
        dx_RM, left = back_to_rows(self.written, kept, dy_NcM, weights)
        if self.wants_up:
            # A copy where they are strided, so that the memory of those that came is free.
            left.x_RM = flat_rows(x_NcM)
        return dx_RM.view(dy_NcM.shape), left

    def add_gradients(self, left: Left) -> None:
        """Add to the weights' gradients."""
        if self.wants_any:
            left.add_gradients(self._sums, self.written, add_gradients, self.written.up, self.written.down)

    def _kept(self, x_NcM: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.written.kept(x_NcM.contiguous() if self._contiguous else x_NcM)


def versions_of(weights: Sequence[torch.Tensor]) -> list[int]:
    """How often each has been changed in place."""
    return list(map(_VERSION, weights))


def check_unchanged(weights: Sequence[torch.Tensor], before: list[int]) -> None:
    """Refuse weights that were changed in place.

    Raises:
        RuntimeError: one was, since :func:`versions_of` was asked.
    """
    if versions_of(weights) != before:
        raise RuntimeError("a weight of an expert was changed in place between the forward and its backward")


def flat_rows(x_NcM: torch.Tensor) -> torch.Tensor:
    """[N, c, M] to [N * c, M]; [k, N, c, M] to [k, N * c, M]."""
    return x_NcM.reshape(*x_NcM.shape[:-3], x_NcM.shape[-3] * x_NcM.shape[-2], x_NcM.shape[-1])
