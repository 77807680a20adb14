# SPDX-License-Identifier: Apache-2.0
"""Two ways to compute experts with stacked weights: by hand-written products, or by the module's own forward.

``stacked_experts`` chooses one for each call. :class:`ModuleExperts` goes through ``written_call``, :class:`OwnExperts`
through ``autograd_call``.

Letters: R rows, expert by expert; M width, H width of an expert, F = 2 * H where experts are gated, else H.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from ds_fsmoe.components.expert_compute import grouped_products as products
from ds_fsmoe.components.expert_compute.adapters import Adapter
from ds_fsmoe.components.expert_compute.autograd_call import Aliases, as_it_is
from ds_fsmoe.components.expert_compute.contract import Contract, shape_of
from ds_fsmoe.components.expert_compute.gated_forms import Gate
from ds_fsmoe.components.expert_compute.gradient_sums import GradientSums
from ds_fsmoe.components.expert_compute.grouped_products import RowGroups
from ds_fsmoe.components.expert_compute.linears import GroupedLinear, RowWeights
from ds_fsmoe.components.expert_compute.manual_ffn import ManualExpert

OwnForward = Callable[..., torch.Tensor]
"""``(hidden_states, top_k_index, top_k_weights) -> hidden_states`` of the module of the experts."""


class ModuleExperts:
    """Represents the experts of one module as one, in their hand-written form: a gate or activation between two
    products.

    Args:
        module, contract: see :class:`~ds_fsmoe.components.expert_compute.stacked_experts.StackedExperts`.
        sums: the sums of weight gradients.
        dtype: the dtype of autocast; ``None``: that of the weights.
        gate: computes the part between the two products.
        adapters: the adapters on weights.
    """

    # Whether any parameter may want a gradient: always, as each weight is checked by itself.
    wants_any = True

    def __init__(
        self,
        module: nn.Module,
        contract: Contract,
        sums: GradientSums,
        dtype: torch.dtype | None,
        gate: Gate,
        adapters: Sequence[Adapter] = (),
    ) -> None:
        self._module, self._contract, self._sums, self._dtype, self._gate = module, contract, sums, dtype, gate
        # Keep the parameters of the forward: functional_call may have swapped them by the backward.
        self._parameters = dict(module._parameters)
        self._norm = dict(module.post_expert_norm.named_parameters()) if contract.has_post_expert_norm else {}
        self._up = ModuleWeights(self, contract.up, contract, adapters)
        self._down = ModuleWeights(self, contract.down, contract, adapters)
        weights = [getattr(module, each) for each in (contract.up, contract.down)]
        widths = (size for each in weights for size in shape_of(each)[1:])
        # Rows are cast to the dtype of autocast, or to that of the weights.
        dtypes = [each.dtype for each in weights] if dtype is None else [dtype]
        self.is_grouped = products.takes_grouped(widths, dtypes, weights[0].device)
        self._row_dtype: torch.dtype | None = None
        # ZeRO 3 weights are left out: their memory differs between forward and backward.
        every = *module.parameters(), *(parameter for each in adapters for parameter in each.parameters)
        self.weights = [each for each in every if not hasattr(each, "ds_id")]
        # Whether the first weights or their adapters want a gradient, for which a call keeps its rows.
        self.wants_up = sums.wants(weights[0]) or any(each.wants_rows(sums) for each in self._up.adapters)

    def layers(self, like: torch.Tensor, groups: RowGroups) -> tuple[ManualExpert, Sequence[Any], GroupedLinear]:
        """Return the form of all experts, and its layers; ``groups`` has the rows of each expert."""
        form = _BetweenProducts(self._gate, GroupedLinear(self._up, groups), GroupedLinear(self._down, groups))
        return form, form.up, form.down

    def received(self, x_RM: torch.Tensor) -> torch.Tensor:
        """Return rows in the dtype of the products."""
        self._row_dtype = x_RM.dtype
        return self.cast(x_RM)

    def returned(self, dx_RM: torch.Tensor) -> torch.Tensor:
        """Return the gradient of rows in the dtype of the received rows."""
        return dx_RM if self._row_dtype is None else dx_RM.to(self._row_dtype)

    def normed(self, y_RM: torch.Tensor) -> torch.Tensor:
        """Return the results after the module's norm, if it has one."""
        return self._module.post_expert_norm(y_RM) if self._contract.has_post_expert_norm else y_RM

    def before_norm(
        self, form: ManualExpert, kept: Sequence[torch.Tensor], dy_RM: torch.Tensor, weights: RowWeights | None
    ) -> tuple[torch.Tensor, RowWeights | None]:
        """Return the gradient of the norm's input, and the weights that remain to be applied.

        If ``weights`` (of choices) are given, a norm's backward applies them, and ``None`` is returned for them. Adds
        the gradients of the norm's parameters and of ``weights``.
        """
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

    def cast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor in the dtype of autocast."""
        return tensor if self._dtype is None or not tensor.is_floating_point() else tensor.to(self._dtype)

    def parameter(self, name: str) -> nn.Parameter:
        """Return a weight by its name."""
        # Python would search other attributes first.
        found = self._parameters.get(name)
        return getattr(self._module, name) if found is None else found


class ModuleWeights:
    """Represents one of the two stacked weights of all experts, and its bias.

    It has the interface of :class:`~ds_fsmoe.components.expert_compute.linears.StackedLinear`. Weights are read, and
    cast, at each use.
    """

    def __init__(self, of: ModuleExperts, name: str, contract: Contract, adapters: Sequence[Adapter]) -> None:
        self._of, self._name = of, name
        self._bias = f"{name}_bias" if contract.has_bias else None
        self.is_transposed = contract.is_transposed
        self.adds_bias = contract.has_bias and (name != contract.down or contract.adds_down_bias)
        self.adapters = [each for each in adapters if each.weight == name]

    @property
    def weight(self) -> nn.Parameter:
        """Return the parameter of the weight."""
        return self._of.parameter(self._name)

    @property
    def bias(self) -> nn.Parameter | None:
        """Return the parameter of the bias; ``None`` if there is none."""
        return None if self._bias is None else self._of.parameter(self._bias)

    weights, biases = weight, bias

    @property
    def weight_kOI(self) -> torch.Tensor:
        """Return the weight in the dtype of the products, [k, O, I], or [k, I, O] where it is transposed."""
        return self._of.cast(self.weight.detach())

    @property
    def bias_kO(self) -> torch.Tensor:
        """Return the bias in the dtype of the products."""
        return self._of.cast(self.bias.detach())


class _BetweenProducts(ManualExpert):
    """Computes the module's gate or activation between two products."""

    def __init__(self, gate: Gate, up: GroupedLinear, down: GroupedLinear) -> None:
        super().__init__((up,), down)
        self._gate = gate

    def kept(self, x_RM: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self.up[0](x_RM),)

    def hidden(self, kept: Sequence[torch.Tensor]) -> torch.Tensor:
        return self._gate.forward(kept[0]).to(kept[0].dtype)

    def backward_hidden(
        self, dh_RH: torch.Tensor, kept: Sequence[torch.Tensor]
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        dup_RF, h_RH = self._gate.backward(kept[0], dh_RH)
        return (dup_RF,), h_RH


class OwnExperts:
    """Computes the experts of one module by its own forward, for :class:`AutogradCall`.

    Args:
        module, own_forward: see :class:`~ds_fsmoe.components.expert_compute.stacked_experts.StackedExperts`.
        adapters: what is added to weights.
        is_transposed: whether weights are stored [k, I, O].
    """

    # Gets rows [R, M] for slots too; a parameter without influence on the result has a gradient of zeros.
    takes_rows = has_all_gradients = True

    def __init__(
        self, module: nn.Module, own_forward: OwnForward, adapters: Sequence[Adapter], is_transposed: bool
    ) -> None:
        self.module, self._own_forward = module, own_forward
        self._adapters, self._is_transposed = adapters, is_transposed
        # Keep the parameters of the forward: functional_call may have swapped them by the backward.
        self._named = dict(module.named_parameters())
        of_adapters = (each for adapter in adapters for each in adapter.parameters)
        self.parameters = tuple(dict.fromkeys((*self._named.values(), *of_adapters)))

    def call(self, x_RM: torch.Tensor, groups: RowGroups, aliases: Aliases | None) -> torch.Tensor:
        """Compute rows [R, M] to the same shape; ``aliases`` replace parameters."""
        of_row_R = groups.rows_of_each(torch.arange(len(groups.sizes), device=x_RM.device))
        arguments = x_RM, of_row_R.unsqueeze(1), x_RM.new_ones(len(x_RM), 1)
        if aliases is None and not self._adapters:
            with torch._C.DisableTorchFunctionSubclass():  # the weights may be marked, for scripts
                return self._own_forward(*arguments)
        now = {id(each): each.detach() for each in self.parameters} | dict(aliases or {})
        named = {name: now[id(each)] for name, each in self._named.items()}
        for each in self._adapters:
            weight, of_adapter = named[each.weight], (now[id(parameter)] for parameter in each.parameters)
            named[each.weight] = weight + each.delta(self._is_transposed, *of_adapter).to(weight.dtype)
        prefixed = {f"inner.{name}": each for name, each in named.items()}
        return functional_call(_ForwardOf(self.module, self._own_forward), prefixed, arguments)


class _ForwardOf(nn.Module):
    """Runs another function as its forward, called with the parameters of the module inside it."""

    def __init__(self, inner: nn.Module, forward: OwnForward) -> None:
        super().__init__()
        self.inner = inner
        self._own_forward = forward

    def forward(self, *arguments: torch.Tensor) -> torch.Tensor:
        return self._own_forward(*arguments)
