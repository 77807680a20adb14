# SPDX-License-Identifier: Apache-2.0
"""Experts in one forward call of a layer, where their gradients are written out."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from ds_fsmoe.components.expert_compute.gradient_sums import GradientSums
from ds_fsmoe.components.expert_compute.linears import RowWeights
from ds_fsmoe.components.expert_compute.manual_ffn import ManualExpert
from ds_fsmoe.components.expert_compute.plan import PlannedExpert
from ds_fsmoe.components.expert_compute.saved import SavedActivations, SavedRows

_VERSION = operator.attrgetter("_version")


class WrittenCall:
    """What calls by hand have in common: what they keep for the backward, and the way back.

    Kept are the rows, where a weight wants a gradient, and what :meth:`ManualExpert.kept` says; the rest is computed
    again.

    Args:
        weights: of the experts.
        wants_up: whether a weight ahead of the hidden layer wants a gradient.
        wants_any: whether any weight does.
        sums: where weight gradients go.
        saved: where to keep what the backward needs.
        needs_backward: whether to keep anything.
        recompute: keep the rows alone.
    """

    _goes_on = False
    """True where a step follows the last layer, which :meth:`_before_last` goes back over."""

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        wants_up: bool,
        wants_any: bool,
        sums: GradientSums,
        saved: SavedActivations | SavedRows,
        needs_backward: bool,
        recompute: bool,
    ) -> None:
        self._keeps_rows, self._wants_up, self._wants_any = wants_up or recompute, wants_up, wants_any
        self._sums, self._saved = sums, saved
        self._needs_backward, self._recompute = needs_backward, recompute
        self._weights = weights if needs_backward else ()
        # Autograd would refuse a weight that changed between forward and backward, and so do we.
        self._versions = list(map(_VERSION, self._weights))

    @property
    def stores(self) -> tuple[SavedActivations | SavedRows, ...]:
        """Return the stores of what is kept for the backward."""
        return (self._saved,)

    def _kept(self, form: ManualExpert, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return what :meth:`ManualExpert.kept` gives for rows, in the layout in which they are kept."""
        return form.kept(x)

    def _flat(self, x: torch.Tensor) -> torch.Tensor:
        """Return rows as they are kept as [R, M], or as [k, R, M] of k experts that are stacked."""
        return x

    def _forth(self, place: tuple[int, ...], form: ManualExpert, x: torch.Tensor) -> torch.Tensor:
        """Return the rows of the last layer, and keep what the backward needs.

        Args:
            place: of the rows, by which they are kept.
            form: the expert, or k that are stacked.
            x: the rows.
        """
        kept = self._kept(form, x)
        if self._needs_backward:
            rows = x if self._keeps_rows else None
            self._saved.put(*place, (rows, *(() if self._recompute else kept)))
        return form.hidden(kept)

    def _back(
        self,
        place: tuple[int, ...],
        form: ManualExpert,
        up: Sequence[Any],
        down: Any,
        dy: torch.Tensor,
        weights: RowWeights | None = None,
    ) -> torch.Tensor:
        """Go back through an expert, or through k that are stacked, as autograd would, and add the weights' gradients.

        Each tensor goes when it has been used, so that they are not all there beside the gradients of the weights.

        Args:
            place: of the rows.
            form: the expert.
            up, down: its layers, of which the gradients are.
            dy: the gradient of its results, or with weights that of their weighted sums; laid out as what is kept.
            weights: of its results, not stacked; their gradients are added.

        Returns:
            The gradient of the rows, flat.

        Raises:
            RuntimeError: a weight was changed in place since the forward.
        """
        self._check_unchanged()
        x, *read = self._saved.take(*place)
        kept = self._kept(form, x) if self._recompute else tuple(read)
        del read
        if self._goes_on:
            dy, weights = self._before_last(form, kept, dy, weights)
        dy_RM = flat_rows(dy)
        dh_RH = down.rows_gradient(dy_RM)
        h = None
        if weights is not None:
            h = form.hidden(kept)
            weights.add_products(dh_RH, flat_rows(h))
            down.add_bias_products(dy_RM, weights)
            dh_RH, dy_RM = weights.apply(dh_RH), weights.apply(dy_RM)
        dh = dh_RH.view(*dy.shape[:-1], dh_RH.shape[-1])
        del dh_RH, dy
        deltas, made = form.backward_hidden(dh, kept)
        deltas_RH = tuple(map(flat_rows, deltas))
        h = made if made is not None else h
        del dh, deltas, made
        if self._wants_any:
            h_RH = None
            if down.wants_rows(self._sums):
                h_RH = flat_rows(form.hidden(kept) if h is None else h)
            del h, kept
            down.add_gradients(self._sums, dy_RM, h_RH)
            del h_RH, dy_RM
            # A copy where they are strided, so that the memory of those that came is free.
            x_RM = self._flat(x) if self._wants_up else None
            del x
            for each, delta_RH in zip(up, deltas_RH, strict=True):
                each.add_gradients(self._sums, delta_RH, x_RM)
            del x_RM
        dx_RM = up[0].rows_gradient(deltas_RH[0])
        for each, delta_RH in zip(up[1:], deltas_RH[1:], strict=True):
            dx_RM += each.rows_gradient(delta_RH)
        return dx_RM

    def _check_unchanged(self) -> None:
        if list(map(_VERSION, self._weights)) != self._versions:
            raise RuntimeError("a weight of an expert was changed in place between the forward and its backward")

    def _before_last(
        self, form: ManualExpert, kept: Sequence[torch.Tensor], dy: torch.Tensor, weights: RowWeights | None
    ) -> tuple[torch.Tensor, RowWeights | None]:
        """Return the gradient of what the last layer gives, and the weights that are still to be applied."""
        return dy, weights


class ManualCall(WrittenCall):
    """One expert. Keeps the rows (the caller's memory, not a copy) and the hidden layer once.

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
        wanted = planned.wants_up, planned.wants_any
        super().__init__(planned.weights, *wanted, sums, SavedActivations(), needs_backward, recompute)
        self._planned, self._contiguous = planned, contiguous

    def forward(self, start: int, stop: int, x_NcM: torch.Tensor) -> torch.Tensor:
        """[N, c, M] to the same shape."""
        return self._planned.down(self._forth((start, stop), self._planned.form, x_NcM))

    def backward(self, start: int, stop: int, dy_NcM: torch.Tensor, weights: RowWeights | None = None) -> torch.Tensor:
        """[N, c, M] to the same shape; adds to the weights' gradients."""
        planned = self._planned
        return self._back((start, stop), planned.form, planned.up, planned.down, dy_NcM, weights).view(dy_NcM.shape)

    def _kept(self, form: ManualExpert, x_NcM: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return form.kept(x_NcM.contiguous() if self._contiguous else x_NcM)

    def _flat(self, x_NcM: torch.Tensor) -> torch.Tensor:
        return flat_rows(x_NcM)


def flat_rows(x_NcM: torch.Tensor) -> torch.Tensor:
    """[N, c, M] to [N * c, M]; [k, N, c, M] to [k, N * c, M]; rows [R, M] as they are."""
    if x_NcM.ndim == 2:
        return x_NcM
    return x_NcM.reshape(*x_NcM.shape[:-3], x_NcM.shape[-3] * x_NcM.shape[-2], x_NcM.shape[-1])
