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
from ds_fsmoe.components.expert_compute.autograd_call import as_it_is
from ds_fsmoe.components.expert_compute.contract import Contract, shape_of
from ds_fsmoe.components.expert_compute.gated_forms import Gate
from ds_fsmoe.components.expert_compute.gradient_sums import GradientSums
from ds_fsmoe.components.expert_compute.grouped_products import RowGroups
from ds_fsmoe.components.expert_compute.linears import RowWeights
from ds_fsmoe.components.expert_compute.manual_call import WrittenCall
from ds_fsmoe.components.expert_compute.manual_ffn import ManualExpert
from ds_fsmoe.components.expert_compute.saved import SavedRows

OwnForward = Callable[..., torch.Tensor]
"""``(hidden_states, top_k_index, top_k_weights) -> hidden_states`` of the module of the experts."""


class ManualStackedFFN(WrittenCall):
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

    _goes_on = True

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
        self._gate, self._module, self._contract, self._dtype = gate, module, contract, dtype
        # The module may have others by the time of the backward, as after torch.func.functional_call.
        self._parameters = dict(module._parameters)
        self._norm = dict(module.post_expert_norm.named_parameters()) if contract.has_post_expert_norm else {}
        self._adapters = adapters
        weights = [getattr(module, each) for each in (contract.up, contract.down)]
        widths = (size for each in weights for size in shape_of(each)[1:])
        # What autocast asks for, rows are cast to, as they are to the type of the weights.
        dtypes = [each.dtype for each in weights] if dtype is None else [dtype]
        self.is_grouped = products.takes_grouped(widths, dtypes, weights[0].device)
        self._row_dtype: torch.dtype | None = None
        # What ZeRO 3 shares out is put back into other memory in between.
        every = *module.parameters(), *(parameter for each in adapters for parameter in each.parameters)
        every = [each for each in every if not hasattr(each, "ds_id")]
        trains = sums.wants(weights[0]) or any(each.wants_rows(sums) for each in adapters if each.weight == contract.up)
        super().__init__(every, trains, True, sums, saved, needs_backward, recompute)

    def forward(self, chunk: int, x_RM: torch.Tensor, groups: RowGroups) -> torch.Tensor:
        """[R, M] to the same."""
        self._row_dtype = x_RM.dtype
        form = _BetweenProducts(self, groups)
        y_RM = form.down(self._forth((chunk,), form, self._cast(x_RM)))
        return self._module.post_expert_norm(y_RM) if self._contract.has_post_expert_norm else y_RM

    def backward(
        self, chunk: int, dy_RM: torch.Tensor, groups: RowGroups, weights: RowWeights | None = None
    ) -> torch.Tensor:
        """Return the gradient of the rows, in the shape of :meth:`forward`, and add to the weights' gradients."""
        form = _BetweenProducts(self, groups)
        dx_RM = self._back((chunk,), form, form.up, form.down, dy_RM, weights)
        return dx_RM if self._row_dtype is None else dx_RM.to(self._row_dtype)

    def _check_unchanged(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # weights may be marked, for scripts
            super()._check_unchanged()

    def _before_last(
        self, form: ManualExpert, kept: Sequence[torch.Tensor], dy_RM: torch.Tensor, weights: RowWeights | None
    ) -> tuple[torch.Tensor, RowWeights | None]:
        """Return the gradient ahead of the norm, and add to the gradients of the norm's own weights and of the weights
        of its results."""
        dy_RM = dy_RM.to(kept[0].dtype)
        if not self._contract.has_post_expert_norm:
            return dy_RM, weights
        own = [each for each in self._norm.values() if self._sums.wants(each)]
        leaf_RM = form.down(form.hidden(kept)).requires_grad_()
        with torch.enable_grad(), saved_tensors_hooks(as_it_is, as_it_is):
            normed_RM = functional_call(self._module.post_expert_norm, self._norm, (leaf_RM,))
        if weights is not None:
            weights.add_products(dy_RM, normed_RM.detach())
            dy_RM = weights.apply(dy_RM)
        before_RM, *of_own = torch.autograd.grad(normed_RM, [leaf_RM, *own], dy_RM.to(normed_RM.dtype))
        for parameter, gradient in zip(own, of_own, strict=True):
            self._sums.add(parameter, gradient)
        return before_RM, None

    def _weight(self, name: str) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():  # it may be marked, for scripts
            return self._cast(self._parameter(name).detach())

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._dtype is None or not tensor.is_floating_point() else tensor.to(self._dtype)

    def _parameter(self, name: str) -> nn.Parameter:
        # Python would look for it in vain elsewhere first.
        found = self._parameters.get(name)
        return getattr(self._module, name) if found is None else found


class _BetweenProducts(ManualExpert):
    """A call's experts for rows that lie so: the module's gate or activation between two products."""

    def __init__(self, call: ManualStackedFFN, groups: RowGroups) -> None:
        self._gate = call._gate
        up, down = call._contract.up, call._contract.down
        super().__init__((_ModuleLinear(call, up, groups),), _ModuleLinear(call, down, groups))

    def kept(self, x_RM: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self.up[0](x_RM),)

    def hidden(self, kept: Sequence[torch.Tensor]) -> torch.Tensor:
        return self._gate.forward(kept[0]).to(kept[0].dtype)

    def backward_hidden(
        self, dh_RH: torch.Tensor, kept: Sequence[torch.Tensor]
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        dup_RF, h_RH = self._gate.backward(kept[0], dh_RH)
        return (dup_RF,), h_RH


class _ModuleLinear:
    """One of the two products, with what is added to it: as
    :class:`~ds_fsmoe.components.expert_compute.linears.GroupedLinear`. Weights are looked up, and cast, when they are
    used.

    Args:
        call: whose product it is.
        name: of the weight.
        groups: where the rows of each expert lie.
    """

    def __init__(self, call: ManualStackedFFN, name: str, groups: RowGroups) -> None:
        self._call, self._name, self._groups = call, name, groups
        self._is_transposed, self._sums = call._contract.is_transposed, call._sums
        self._bias = f"{name}_bias" if call._contract.has_bias else None
        self._adds_bias = call._contract.has_bias and (name != call._contract.down or call._contract.adds_down_bias)
        self._adapters = [each for each in call._adapters if each.weight == name]

    def __call__(self, x_RI: torch.Tensor) -> torch.Tensor:
        weight_k = self._call._weight(self._name)
        x_RI = x_RI.to(weight_k.dtype)
        y_RO = products.product(x_RI, weight_k, self._is_transposed, self._groups)
        for each in self._adapters:
            y_RO.add_(each.product(x_RI, self._groups))
        return y_RO.add_(self._bias_of_rows()) if self._adds_bias else y_RO

    def rows_gradient(self, dy_RO: torch.Tensor) -> torch.Tensor:
        weight_k = self._call._weight(self._name)
        dx_RI = products.grouped_rows_gradient(dy_RO, weight_k, self._is_transposed, self._groups)
        for each in self._adapters:
            dx_RI.add_(each.rows_gradient(dy_RO, self._groups))
        return dx_RI

    def add_bias_products(self, dy_RO: torch.Tensor, to: RowWeights) -> None:
        if self._adds_bias:
            to.add_products(dy_RO, self._bias_of_rows())

    def wants_rows(self, sums: GradientSums) -> bool:
        return True

    def add_gradients(self, sums: GradientSums, dy_RO: torch.Tensor, x_RI: torch.Tensor | None) -> None:
        """Add to the gradients of the weight, its bias and its adapters; ``None``: it has no rows that these need."""
        parameter = self._call._parameter(self._name)
        if x_RI is not None and sums.wants(parameter):
            rows = x_RI, dy_RO, self._is_transposed, self._groups
            add_to = partial(products.add_weight_gradient, *rows)
            sums.add_made(parameter, lambda: _like(parameter, products.weight_gradient(*rows)), add_to)
        for each in self._adapters if x_RI is not None else ():
            each.add_gradients(x_RI, dy_RO, self._groups, sums)
        bias = None if self._bias is None else self._call._parameter(self._bias)
        if sums.wants(bias):
            found = products.bias_gradient(dy_RO, self._groups)
            sums.add(bias, _like(bias, found if self._adds_bias else torch.zeros_like(found)), is_own=True)

    def _bias_of_rows(self) -> torch.Tensor:
        return self._groups.rows_of_each(self._call._weight(self._bias))


def _like(parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    """A gradient in its parameter's type."""
    with torch._C.DisableTorchFunctionSubclass():
        return gradient.to(parameter.dtype)


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

    def forward(self, chunk: int, x_RM: torch.Tensor, groups: RowGroups) -> torch.Tensor:
        """[R, M] to the same."""
        if self._needs_backward:
            self._saved.put(chunk, (x_RM,))
        if self._keeps_graph:
            self._graphs[chunk] = self._recorded(x_RM, groups)
            return self._graphs[chunk][1].detach()
        return self._own(x_RM, groups, {})

    def backward(
        self, chunk: int, dy_RM: torch.Tensor, groups: RowGroups, weights: RowWeights | None = None
    ) -> torch.Tensor:
        """Return the gradient of the rows, in the shape of :meth:`forward`, and add to the weights' gradients."""
        (x_RM,) = self._saved.take(chunk)
        leaf_RM, y_RM, aliases = self._graphs.pop(chunk, None) or self._recorded(x_RM, groups)
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
        with torch.enable_grad(), saved_tensors_hooks(as_it_is, as_it_is):
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
        prefixed = {f"inner.{name}": each for name, each in named.items()}
        return functional_call(_ForwardOf(self._module, self._own_forward), prefixed, arguments)


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
