# SPDX-License-Identifier: Apache-2.0
"""The einsum order: GShard's products with one-hot masks.

It is a baseline for comparisons; the sparse order is faster.
"""

from __future__ import annotations

import torch

from ds_fsmoe.components.gate import mix
from ds_fsmoe.components.order import OrderBase
from ds_fsmoe.components.routing import Routing, SlotRouting
from ds_fsmoe.registry import register_order


@register_order("einsum")
class EinsumOrder(OrderBase):
    """Multiplies by [S, E * C] masks, so time and memory grow with the square of the tokens.

    A nan or infinite token reaches every slot, as 0 times it is not zero; one without a slot reaches none. It reads
    :class:`Routing` and :class:`SlotRouting`: [S, M] tokens to [E, C, M] slots, and back.

    Examples:
        >>> import torch, ds_fsmoe
        >>> gate, order = ds_fsmoe.MixtralGate(k=2, min_capacity=0), ds_fsmoe.EinsumOrder()
        >>> gate.build_once(model_dim=8, num_experts=4)
        >>> x_SM = torch.randn(16, 8)
        >>> routing = gate(x_SM)
        >>> x_ECM = order.arrange(x_SM, routing)
        >>> x_ECM.shape, order.restore(x_ECM, routing).shape
        (torch.Size([4, 8, 8]), torch.Size([16, 8]))
    """

    reads = (Routing, SlotRouting)

    def arrange(self, x_SM: torch.Tensor, routing: Routing | SlotRouting) -> torch.Tensor:
        dispatch_SR = _one_hot(routing)
        x_RM = _only(dispatch_SR.any(dim=0), mix(dispatch_SR.t().to(x_SM.dtype), _only(dispatch_SR.any(dim=1), x_SM)))
        return x_RM.view(routing.num_experts, routing.capacity, x_SM.shape[1])

    def restore(self, y_ECM: torch.Tensor, routing: Routing | SlotRouting) -> torch.Tensor:
        y_RM = y_ECM.reshape(routing.num_slots, y_ECM.shape[-1])
        return mix(_weights(routing), _only(_one_hot(routing).any(dim=0), y_RM))


def _only(mask_N: torch.Tensor, rows_NM: torch.Tensor) -> torch.Tensor:
    """Return the rows under the mask, with the others zero; without a product, because of nan and infinity."""
    return rows_NM.masked_fill(~mask_N.unsqueeze(1), 0.0)


def _one_hot(routing: Routing | SlotRouting) -> torch.Tensor:
    """Return [S, R] booleans: True where a token is in a slot."""
    if isinstance(routing, SlotRouting):
        tokens_S1 = torch.arange(routing.num_tokens, device=routing.tokens_R.device).unsqueeze(1)
        return routing.tokens_R == tokens_S1
    is_in_SR = torch.zeros_like(_no_weights(routing), dtype=torch.bool)
    return is_in_SR.scatter_(1, routing.slots_KS.t(), True)[:, :-1]


def _weights(routing: Routing | SlotRouting) -> torch.Tensor:
    """Return [S, R]: the weight of each slot's result in each token's result."""
    if isinstance(routing, SlotRouting):
        return _one_hot(routing) * routing.weights_R
    return _no_weights(routing).scatter_add(1, routing.slots_KS.t(), routing.weights_KS.t())[:, :-1]


def _no_weights(routing: Routing) -> torch.Tensor:
    """Return zeros [S, R + 1]; the last column takes dropped choices."""
    return routing.weights_KS.new_zeros(routing.slots_KS.shape[1], routing.num_slots + 1)
