# SPDX-License-Identifier: Apache-2.0
"""The sparse order: one pass each way, which reads every slot and every choice once.

It is the default where tokens or slots choose; ``einsum`` has the same results.
"""

from __future__ import annotations

import torch

from ds_fsmoe.components.order import OrderBase
from ds_fsmoe.components.routing import Routing, SlotRouting
from ds_fsmoe.registry import register_order


@register_order("sparse")
class SimpleOrder(OrderBase):
    """Moves each row by its index instead of multiplying by a one-hot [S, E, C] mask.

    It reads :class:`Routing` and :class:`SlotRouting`: [S, M] tokens to [E, C, M] slots, and back.

    Examples:
        >>> import torch, ds_fsmoe
        >>> gate, order = ds_fsmoe.MixtralGate(k=2, min_capacity=0), ds_fsmoe.SimpleOrder()
        >>> gate.build_once(model_dim=8, num_experts=4)
        >>> x_SM = torch.randn(16, 8)
        >>> routing = gate(x_SM)
        >>> x_ECM = order.arrange(x_SM, routing)
        >>> x_ECM.shape, order.restore(x_ECM, routing).shape
        (torch.Size([4, 8, 8]), torch.Size([16, 8]))
    """

    reads = (Routing, SlotRouting)

    def arrange(self, x_SM: torch.Tensor, routing: Routing | SlotRouting) -> torch.Tensor:
        if isinstance(routing, SlotRouting):
            x_RM = self.ops.gather_rows(x_SM, routing.tokens_R)
        else:
            x_RM = self.ops.arrange(x_SM, routing.slots_KS, routing.num_slots)
        return x_RM.view(routing.num_experts, routing.capacity, x_SM.shape[1])

    def restore(self, y_ECM: torch.Tensor, routing: Routing | SlotRouting) -> torch.Tensor:
        y_RM = y_ECM.reshape(routing.num_slots, y_ECM.shape[-1])
        # The weights are float32 (or wider), so products and sums are too, whatever the experts' type.
        if isinstance(routing, SlotRouting):
            weighted_RM = y_RM * routing.weights_R.unsqueeze(-1)
            return self.ops.add_rows(weighted_RM, routing.tokens_R, routing.num_tokens).to(y_ECM.dtype)
        weights_KS = routing.weights_KS.to(torch.promote_types(routing.weights_KS.dtype, torch.float32))
        return self.ops.restore(y_RM, routing.slots_KS, weights_KS)
