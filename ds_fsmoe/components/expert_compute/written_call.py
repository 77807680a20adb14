# SPDX-License-Identifier: Apache-2.0
"""Computes experts in one forward call of a layer by their hand-written forward and backward.

``calls`` and ``stacked_experts`` create it; ``autograd_call`` is the counterpart for experts without such a form.
"""

from __future__ import annotations

import operator

import torch

from ds_fsmoe.components.expert_compute.gradient_sums import GradientSums
from ds_fsmoe.components.expert_compute.grouped_products import RowGroups
from ds_fsmoe.components.expert_compute.linears import RowWeights
from ds_fsmoe.components.expert_compute.manual_ffn import ManualExpert, flat_rows
from ds_fsmoe.components.expert_compute.plan import PlannedExpert
from ds_fsmoe.components.expert_compute.saved import SavedTensors
from ds_fsmoe.components.expert_compute.side_by_side import SideBySide
from ds_fsmoe.components.expert_compute.stacked_forms import ModuleExperts

_VERSION = operator.attrgetter("_version")


class WrittenCall:
    """Computes one expert, or k as one, without autograd.

    It keeps the rows, in the caller's memory, where a weight wants a gradient, and the tensors of
    :meth:`ManualExpert.kept`. It computes the rest again.

    The operations and their order are those of autograd on ``expert(x_NcM)``, so one chunk of the whole capacity has
    the same bits. Strided rows (N > 1) are copied for every product, as in ``F.linear``; no copy is kept.

    Args:
        experts: the weights, which make layers for rows of a shape.
        sums: the sums of weight gradients.
        order: see :class:`~ds_fsmoe.components.expert_compute.saved.SavedTensors`.
        needs_backward: whether to keep anything.
        recompute: keep the rows alone.
        contiguous: make an expert's rows contiguous first, on a copy that is not kept.
    """

    makes_memory = True

    def __init__(
        self,
        experts: PlannedExpert | SideBySide | ModuleExperts,
        sums: GradientSums,
        order: torch.Tensor | None = None,
        *,
        needs_backward: bool,
        recompute: bool,
        contiguous: bool = False,
    ) -> None:
        self.experts, self.saved = experts, SavedTensors(order)
        self._sums, self._contiguous = sums, contiguous
        self._needs_backward, self._recompute = needs_backward, recompute
        self._keeps_rows = experts.wants_up or recompute
        self._weights = experts.weights if needs_backward else ()
        # Like autograd, refuse a weight that was changed between forward and backward.
        self._versions = list(map(_VERSION, self._weights))
        self._module = experts if isinstance(experts, ModuleExperts) else None
        self.takes_rows = self._module is not None
        self.is_grouped = self._module is None or self._module.is_grouped

    def forget(self) -> None:
        """Drop references to the weights' memory, so that it can be moved."""
        if isinstance(self.experts, SideBySide):
            self.experts.forget()

    def forward(self, start: int, stop: int, x: torch.Tensor, groups: RowGroups | None = None) -> torch.Tensor:
        """Compute [N, c, M], [k, N, c, M] or [R, M] to the same shape."""
        if self._module is None:
            return self._forth(start, stop, x, groups)
        with torch._C.DisableTorchFunctionSubclass():  # weights may be marked, for scripts
            return self._module.normed(self._forth(start, stop, self._module.received(x), groups))

    def backward(
        self,
        start: int,
        stop: int,
        dy: torch.Tensor,
        groups: RowGroups | None = None,
        weights: RowWeights | None = None,
    ) -> torch.Tensor:
        """Return the gradient of the rows, as autograd would, and add the weights' gradients.

        Each tensor is freed after its last use, so that not all of them coexist with the weights' gradients.

        Args:
            start, stop: of slots, or of rows.
            dy: the gradient of the results, or with weights that of their weighted sums; in the layout of the rows.
            groups: the rows of each expert.
            weights: the weights of results on rows, not on slots; their gradients are added.

        Returns:
            The gradient of the rows, in their shape.

        Raises:
            RuntimeError: a weight was changed in place since the forward.
        """
        if self._module is None:
            return self._back(start, stop, dy, groups, weights)
        with torch._C.DisableTorchFunctionSubclass():
            return self._module.returned(self._back(start, stop, dy, groups, weights))

    def _forth(self, start: int, stop: int, x: torch.Tensor, groups: RowGroups | None) -> torch.Tensor:
        form, _, down = self.experts.layers(x, groups)
        kept = self._kept(form, x)
        if self._needs_backward:
            rows = x if self._keeps_rows else None
            self.saved.put(start, stop, (rows, *(() if self._recompute else kept)))
        h = form.hidden(kept)
        return down(flat_rows(h)).view(x.shape) if x.ndim == 4 else down(h)

    def _kept(self, form: ManualExpert, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the result of :meth:`ManualExpert.kept` for rows, in the layout of the rows."""
        if x.ndim == 4:
            return tuple([each.view(*x.shape[:-1], each.shape[-1]) for each in form.kept(flat_rows(x))])
        return form.kept(x.contiguous() if self._contiguous else x)

    def _back(
        self, start: int, stop: int, dy: torch.Tensor, groups: RowGroups | None, weights: RowWeights | None
    ) -> torch.Tensor:
        if list(map(_VERSION, self._weights)) != self._versions:
            raise RuntimeError("a weight of an expert was changed in place between the forward and its backward")
        form, up, down = self.experts.layers(dy, groups)
        x, *read = self.saved.take(start, stop)
        kept = self._kept(form, x) if self._recompute else tuple(read)
        del read
        if self._module is not None:
            dy, weights = self._module.before_norm(form, kept, dy, weights)
        shape, dy_RM = dy.shape, flat_rows(dy)
        dh_RH = down.rows_gradient(dy_RM)
        h = None
        if weights is not None:
            h = form.hidden(kept)
            weights.add_products(dh_RH, flat_rows(h))
            down.add_bias_products(dy_RM, weights)
            dh_RH, dy_RM = weights.apply(dh_RH), weights.apply(dy_RM)
        dh = dh_RH.view(*shape[:-1], dh_RH.shape[-1])
        del dh_RH, dy
        deltas, made = form.backward_hidden(dh, kept)
        deltas_RH = tuple(map(flat_rows, deltas))
        h = made if made is not None else h
        del dh, deltas, made
        if self.experts.wants_any:
            h_RH = None
            if down.wants_rows(self._sums):
                h_RH = flat_rows(form.hidden(kept) if h is None else h)
            del h, kept
            down.add_gradients(self._sums, dy_RM, h_RH)
            del h_RH, dy_RM
            # A copy where they are strided, so that the memory of the received rows is free.
            x_RM = flat_rows(x) if self.experts.wants_up else None
            del x
            for each, delta_RH in zip(up, deltas_RH, strict=True):
                each.add_gradients(self._sums, delta_RH, x_RM)
            del x_RM
        dx_RM = up[0].rows_gradient(deltas_RH[0])
        for each, delta_RH in zip(up[1:], deltas_RH[1:], strict=True):
            dx_RM += each.rows_gradient(delta_RH)
        return dx_RM.view(shape)
