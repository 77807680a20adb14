# SPDX-License-Identifier: Apache-2.0
"""The einsum order: GShard's products with one-hot masks. It is there to be compared with: sparse is faster."""

from __future__ import annotations

import torch

from ds_fsmoe.components.gate import mix
from ds_fsmoe.components.order import OrderBase
from ds_fsmoe.components.routing import Routing, SlotRouting
from ds_fsmoe.registry import register_order


@register_order("einsum")
class EinsumOrder(OrderBase):
    """Multiplies with [S, E * C] masks, so time and memory grow with the square of the tokens.

    A token that is nan or infinite reaches every slot, as 0 times it is no zero; one that is in no slot reaches none.
    It reads :class:`Routing` and :class:`SlotRouting`: [S, M] tokens to [E, C, M] slots, and back.

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
    """The rows that are meant, the others zero; not by a product, because of nan and infinity."""
    return rows_NM.masked_fill(~mask_N.unsqueeze(1), 0.0)


def _one_hot(routing: Routing | SlotRouting) -> torch.Tensor:
    """[S, R] bool: which token is in which slot."""
    if isinstance(routing, SlotRouting):
        tokens_S1 = torch.arange(routing.num_tokens, device=routing.tokens_R.device).unsqueeze(1)
        return routing.tokens_R == tokens_S1
    is_in_SR = torch.zeros_like(_no_weights(routing), dtype=torch.bool)
    return is_in_SR.scatter_(1, routing.slots_KS.t(), True)[:, :-1]


def _weights(routing: Routing | SlotRouting) -> torch.Tensor:
    """[S, R]: the weight of each slot's result in each token's."""
    if isinstance(routing, SlotRouting):
        return _one_hot(routing) * routing.weights_R
    return _no_weights(routing).scatter_add(1, routing.slots_KS.t(), routing.weights_KS.t())[:, :-1]


def _no_weights(routing: Routing) -> torch.Tensor:
    """[S, R + 1] zeros: one more slot than there are takes what was dropped."""
    return routing.weights_KS.new_zeros(routing.slots_KS.shape[1], routing.num_slots + 1)
