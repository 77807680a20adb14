# SPDX-License-Identifier: Apache-2.0
"""The two ways to compute experts whose weights one module has as one tensor of each kind: written out, or called.

Letters: R rows, expert by expert; M width, H width of an expert, F = 2 * H where experts are gated, else H.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from ds_fsmoe.components.expert_compute import grouped_products as products
from ds_fsmoe.components.expert_compute.adapters import Adapter
from ds_fsmoe.components.expert_compute.contract import Contract, shape_of
from ds_fsmoe.components.expert_compute.gated_forms import Gate
from ds_fsmoe.components.expert_compute.gradient_sums import GradientSums
from ds_fsmoe.components.expert_compute.grouped_products import RowGroups
from ds_fsmoe.components.expert_compute.linears import RowWeights
from ds_fsmoe.components.expert_compute.manual_call import check_unchanged, versions_of
from ds_fsmoe.components.expert_compute.saved import SavedRows

OwnForward = Callable[..., torch.Tensor]
"""``(hidden_states, top_k_index, top_k_weights) -> hidden_states`` of the module of the experts."""


class ManualStackedFFN:
    """The products written out. Kept are the rows and what the first product makes of them; the rest is made again.

    Args:
        module, contract: see :class:`~ds_fsmoe.components.expert_compute.stacked_experts.StackedExperts`.
        sums: where weight gradients go.
        saved: where to keep what the backward needs.
        needs_backward: whether to keep anything.
        recompute: keep the rows alone.
        dtype: the type that autocast asks for; ``None``: that of the weights.
        gate: what lies between the two products.
        adapters: what is added to weights.
    """

    def __init__(
        self,
        module: nn.Module,
        contract: Contract,
        sums: GradientSums,
        saved: SavedRows,
        needs_backward: bool,
        recompute: bool,
        dtype: torch.dtype | None,
        gate: Gate,
        adapters: Sequence[Adapter] = (),
    ) -> None:
        self._gate = gate
        self._module, self._contract, self._sums, self._saved = module, contract, sums, saved
        # The module may have others by the time of the backward, as after torch.func.functional_call.
        self._parameters = dict(module._parameters)
        self._norm = dict(module.post_expert_norm.named_parameters()) if contract.has_post_expert_norm else {}
        self._adapters: dict[str, list[Adapter]] = {}
        for each in adapters:
            self._adapters.setdefault(each.weight, []).append(each)
        self._needs_backward, self._recompute, self._dtype = needs_backward, recompute, dtype
        weights = [getattr(module, each) for each in (contract.up, contract.down)]
        widths = (size for each in weights for size in shape_of(each)[1:])
        # What autocast asks for, rows are cast to, as they are to the type of the weights.
        dtypes = [each.dtype for each in weights] if dtype is None else [dtype]
        self.is_grouped = products.takes_grouped(widths, dtypes, weights[0].device)
        # What ZeRO 3 shares out is put back into other memory in between.
        every = *module.parameters(), *(parameter for each in adapters for parameter in each.parameters)
        self._weights = [each for each in every if not hasattr(each, "ds_id")] if needs_backward else []
        self._versions = versions_of(self._weights)
        self._row_dtype: torch.dtype | None = None

    @property
    def stores(self) -> tuple[SavedRows, ...]:
        """Return the stores of what is kept for the backward."""
        return (self._saved,)

    def forget(self) -> None:
        """Hold parameters alone: their memory may be moved."""

    def forward(self, chunk: int, x_RM: torch.Tensor, groups: RowGroups) -> torch.Tensor:
        """[R, M] to the same."""
        self._row_dtype = x_RM.dtype
        x_RM = self._cast(x_RM)
        up_RF = self._up(x_RM, groups)
        if self._needs_backward:
            adapters = self._adapters.get(self._contract.up, ())
            trains = self._wants(self._contract.up) or any(each.wants_rows(self._sums) for each in adapters)
            keeps_rows = self._recompute or trains
            kept = x_RM if keeps_rows else None, None if self._recompute else up_RF
            self._saved.put(chunk, tuple([None if each is None else each.unsqueeze(0) for each in kept]))
        y_RM = self._down(self._gate.forward(up_RF), groups)
        return self._module.post_expert_norm(y_RM) if self._contract.has_post_expert_norm else y_RM

    def backward(
        self, chunk: int, dy_RM: torch.Tensor, groups: RowGroups, weights: RowWeights | None = None
    ) -> torch.Tensor:
        """Return the gradient of the rows, in the shape of :meth:`forward`, and add to the weights' gradients."""
        with torch._C.DisableTorchFunctionSubclass():
            check_unchanged(self._weights, self._versions)
        x_1RM, up_1RF = self._saved.take(chunk)
        x_RM = None if x_1RM is None else x_1RM[0]
        up_RF = self._up(x_RM, groups) if up_1RF is None else up_1RF[0]
        dy_RM = dy_RM.to(up_RF.dtype)
        if self._contract.has_post_expert_norm:
            dy_RM = self._before_norm(self._gate.forward(up_RF).to(up_RF.dtype), dy_RM, groups, weights)
        dh_RH = self._rows_gradient(self._contract.down, dy_RM, groups)
        if weights is not None and not self._contract.has_post_expert_norm:
            weights.add_products(dh_RH, self._gate.forward(up_RF).to(up_RF.dtype))
            if self._adds_bias(self._contract.down):
                bias_k = self._weight(f"{self._contract.down}_bias")
                weights.add_products(dy_RM, groups.rows_of_each(bias_k))
            dh_RH, dy_RM = weights.apply(dh_RH), weights.apply(dy_RM)
        dup_RF, h_RH = self._gate.backward(up_RF, dh_RH)
        # Each tensor goes when it has been used, so that they are not all there beside the gradients of both weights.
        del up_1RF, up_RF, dh_RH
        self._add_gradients(self._contract.down, h_RH, dy_RM, groups)
        del h_RH, dy_RM
        self._add_gradients(self._contract.up, x_RM, dup_RF, groups)
        del x_1RM, x_RM
        dx_RM = self._rows_gradient(self._contract.up, dup_RF, groups)
        return dx_RM if self._row_dtype is None else dx_RM.to(self._row_dtype)

    def _add_gradients(self, name: str, x_RI: torch.Tensor | None, dy_RO: torch.Tensor, groups: RowGroups) -> None:
        """Add to the gradients of a weight, its bias and its adapters.

        Args:
            name: the weight.
            x_RI: the rows that it was multiplied with; ``None``: neither it nor an adapter is trained.
            dy_RO: the gradient of the product.
            groups: the rows of each expert.
        """
        if x_RI is not None and self._wants(name):
            rows = x_RI, dy_RO, self._contract.is_transposed, groups
            add_to = partial(products.add_weight_gradient, *rows)
            self._sums.add_made(self._parameter(name), lambda: self._as(name, products.weight_gradient(*rows)), add_to)
        for each in self._adapters.get(name, ()) if x_RI is not None else ():
            each.add_gradients(x_RI, dy_RO, groups, self._sums)
        if self._contract.has_bias and self._wants(f"{name}_bias"):
            found = products.bias_gradient(dy_RO, groups)
            self._add(f"{name}_bias", found if self._adds_bias(name) else torch.zeros_like(found))

    def _up(self, x_RM: torch.Tensor, groups: RowGroups) -> torch.Tensor:
        return self._linear(self._contract.up, x_RM, groups)

    def _down(self, h_RH: torch.Tensor, groups: RowGroups) -> torch.Tensor:
        return self._linear(self._contract.down, h_RH, groups)

    def _linear(self, name: str, x_RI: torch.Tensor, groups: RowGroups) -> torch.Tensor:
        weight_k = self._weight(name)
        x_RI = x_RI.to(weight_k.dtype)
        y_RO = products.product(x_RI, weight_k, self._contract.is_transposed, groups)
        for each in self._adapters.get(name, ()):
            y_RO.add_(each.product(x_RI, groups))
        if self._adds_bias(name):
            y_RO.add_(groups.rows_of_each(self._weight(f"{name}_bias")))
        return y_RO

    def _rows_gradient(self, name: str, dy_RO: torch.Tensor, groups: RowGroups) -> torch.Tensor:
        dx_RI = products.grouped_rows_gradient(dy_RO, self._weight(name), self._contract.is_transposed, groups)
        for each in self._adapters.get(name, ()):
            dx_RI.add_(each.rows_gradient(dy_RO, groups))
        return dx_RI

    def _adds_bias(self, name: str) -> bool:
        return self._contract.has_bias and (name != self._contract.down or self._contract.adds_down_bias)

    def _before_norm(
        self, h_RH: torch.Tensor, dy_RM: torch.Tensor, groups: RowGroups, weights: RowWeights | None
    ) -> torch.Tensor:
        """Return the gradient ahead of the norm, and add to the gradients of the norm's own weights and of the weights
        of its results."""
        norm = self._module.post_expert_norm
        own = [each for each in self._norm.values() if self._sums.wants(each)]
        leaf_RM = self._down(h_RH, groups).requires_grad_()
        with torch.enable_grad(), saved_tensors_hooks(_as_it_is, _as_it_is):
            normed_RM = functional_call(norm, self._norm, (leaf_RM,))
        if weights is not None:
            weights.add_products(dy_RM, normed_RM.detach())
            dy_RM = weights.apply(dy_RM)
        before_RM, *of_own = torch.autograd.grad(normed_RM, [leaf_RM, *own], dy_RM.to(normed_RM.dtype))
        for parameter, gradient in zip(own, of_own, strict=True):
            self._sums.add(parameter, gradient)
        return before_RM

    def _weight(self, name: str) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():  # it may be marked, for scripts
            weight = self._parameter(name).detach()
        return weight if self._dtype is None else self._cast(weight)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._dtype is None or not tensor.is_floating_point() else tensor.to(self._dtype)

    def _wants(self, name: str) -> bool:
        return self._sums.wants(self._parameter(name))

    def _add(self, name: str, gradient: torch.Tensor) -> None:
        self._sums.add(self._parameter(name), self._as(name, gradient), is_own=True)

    def _as(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """Return a gradient in its parameter's type."""
        parameter = self._parameter(name)
        with torch._C.DisableTorchFunctionSubclass():
            return gradient.to(parameter.dtype)

    def _parameter(self, name: str) -> nn.Parameter:
        # Python would look for it in vain elsewhere first.
        found = self._parameters.get(name)
        return getattr(self._module, name) if found is None else found


class AutogradStackedFFN:
    """The module's own forward, differentiated by autograd.

    Args:
        module, own_forward: see :class:`~ds_fsmoe.components.expert_compute.stacked_experts.StackedExperts`.
        sums: where weight gradients go.
        saved: where to keep the rows.
        needs_backward: whether to keep anything.
        keeps_graph: whether to keep graphs, or the rows alone.
        adapters: what is added to weights.
        is_transposed: whether weights are.
    """

    is_grouped = False

    def __init__(
        self,
        module: nn.Module,
        own_forward: OwnForward,
        sums: GradientSums,
        saved: SavedRows,
        needs_backward: bool,
        keeps_graph: bool,
        adapters: Sequence[Adapter] = (),
        is_transposed: bool = False,
    ) -> None:
        self._module, self._own_forward, self._sums, self._saved = module, own_forward, sums, saved
        self._needs_backward, self._keeps_graph = needs_backward, keeps_graph
        self._adapters, self._is_transposed = adapters, is_transposed
        # The module may have others by the time of the backward, as after torch.func.functional_call.
        self._named = dict(module.named_parameters())
        self._graphs: dict[int, tuple[torch.Tensor, torch.Tensor, _Aliases]] = {}

    @property
    def stores(self) -> tuple[SavedRows, ...]:
        """Return the stores of what is kept for the backward."""
        return (self._saved,)

    def forget(self) -> None:
        """Hold parameters alone: their memory may be moved."""

    def forward(self, chunk: int, x_RM: torch.Tensor, groups: RowGroups) -> torch.Tensor:
        """[R, M] to the same."""
        if self._needs_backward:
            self._saved.put(chunk, (x_RM.unsqueeze(0),))
        if self._keeps_graph:
            self._graphs[chunk] = self._recorded(x_RM, groups)
            return self._graphs[chunk][1].detach()
        return self._own(x_RM, groups, {})

    def backward(
        self, chunk: int, dy_RM: torch.Tensor, groups: RowGroups, weights: RowWeights | None = None
    ) -> torch.Tensor:
        """Return the gradient of the rows, in the shape of :meth:`forward`, and add to the weights' gradients."""
        (x_1RM,) = self._saved.take(chunk)
        leaf_RM, y_RM, aliases = self._graphs.pop(chunk, None) or self._recorded(x_1RM[0], groups)
        inputs = leaf_RM, *(alias for _, alias in aliases.values())
        found: tuple[torch.Tensor | None, ...] = (None,) * len(inputs)
        if weights is not None:
            weights.add_products(dy_RM, y_RM.detach())
            dy_RM = weights.apply(dy_RM)
        if y_RM.requires_grad:  # without a row nothing may have been computed
            found = torch.autograd.grad(y_RM, inputs, dy_RM.to(y_RM.dtype), allow_unused=True)
        dx_RM, *gradients = found
        for (parameter, alias), gradient in zip(aliases.values(), gradients, strict=True):
            self._sums.add(parameter, torch.zeros_like(alias) if gradient is None else gradient)
        return torch.zeros_like(leaf_RM) if dx_RM is None else dx_RM

    def _recorded(self, x_RM: torch.Tensor, groups: RowGroups) -> tuple[torch.Tensor, torch.Tensor, _Aliases]:
        # Hooks on a parameter are for the gradient that the layer returns: the graph leads to aliases.
        every = *self._named.values(), *(parameter for each in self._adapters for parameter in each.parameters)
        with torch.enable_grad(), saved_tensors_hooks(_as_it_is, _as_it_is):
            aliases = {id(each): (each, each.detach().requires_grad_()) for each in every if self._sums.wants(each)}
            leaf_RM = x_RM.detach().requires_grad_()
            return leaf_RM, self._own(leaf_RM.view_as(leaf_RM), groups, aliases), aliases

    def _own(self, x_RM: torch.Tensor, groups: RowGroups, aliases: _Aliases) -> torch.Tensor:
        of_row_R = groups.rows_of_each(torch.arange(len(groups.sizes), device=x_RM.device))
        arguments = x_RM, of_row_R.unsqueeze(1), x_RM.new_ones(len(x_RM), 1)
        if not self._needs_backward and not self._adapters:
            with torch._C.DisableTorchFunctionSubclass():  # the weights may be marked, for scripts
                return self._own_forward(*arguments)
        named = {name: _alias_of(each, aliases) for name, each in self._named.items()}
        for each in self._adapters:
            weight, of_adapter = named[each.weight], (_alias_of(parameter, aliases) for parameter in each.parameters)
            named[each.weight] = weight + each.delta(self._is_transposed, *of_adapter).to(weight.dtype)
        return functional_call(_ForwardOf(self._module, self._own_forward), _prefixed(named), arguments)


_Aliases = Mapping[int, tuple[nn.Parameter, torch.Tensor]]
"""By the id of a parameter: it, and what stands in for it in a graph."""


def _alias_of(parameter: nn.Parameter, aliases: _Aliases) -> torch.Tensor:
    return aliases[id(parameter)][1] if id(parameter) in aliases else parameter.detach()


class _ForwardOf(nn.Module):
    """A module whose forward is another function on the module inside it."""

    def __init__(self, inner: nn.Module, forward: OwnForward) -> None:
        super().__init__()
        self.inner = inner
        self._own_forward = forward

    def forward(self, *arguments: torch.Tensor) -> torch.Tensor:
        return self._own_forward(*arguments)


def _prefixed(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"inner.{name}": each for name, each in named.items()}


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
