# SPDX-License-Identifier: Apache-2.0
"""The dense order, for SoftMoE: every slot is a weighted mean of all tokens, and every token's result of all slots'
results.

It reads only :class:`DenseRouting`; the other orders read the other kinds.
"""

from __future__ import annotations

import torch

from ds_fsmoe.components.gate import mix
from ds_fsmoe.components.order import OrderBase
from ds_fsmoe.components.routing import DenseRouting
from ds_fsmoe.registry import register_order


@register_order("dense")
class DenseOrder(OrderBase):
    """Multiplies by the [S, E * C] weights of a gate that mixes tokens, such as SoftMoE's: one product each way.

    It reads :class:`DenseRouting`: [S, M] tokens to [E, C, M] slots, and back.

    Examples:
        >>> import torch, ds_fsmoe
        >>> gate, order = ds_fsmoe.SoftMoEGate(slots_per_expert=3), ds_fsmoe.DenseOrder()
        >>> gate.build_once(model_dim=8, num_experts=4)
        >>> x_SM = torch.randn(16, 8)
        >>> routing = gate(x_SM)
        >>> x_ECM = order.arrange(x_SM, routing)
        >>> x_ECM.shape, order.restore(x_ECM, routing).shape
        (torch.Size([4, 3, 8]), torch.Size([16, 8]))
    """

    reads = (DenseRouting,)

    def arrange(self, x_SM: torch.Tensor, routing: DenseRouting) -> torch.Tensor:
        x_RM = mix(routing.dispatch_SR.t(), x_SM)
        if routing.places is not None:
            x_RM = self.ops.gather_rows(x_RM, routing.places.slot_of_row)
        return x_RM.view(routing.num_experts, routing.capacity, x_SM.shape[1])

    def restore(self, y_ECM: torch.Tensor, routing: DenseRouting) -> torch.Tensor:
        y_RM = y_ECM.reshape(routing.num_slots, y_ECM.shape[-1])
        if routing.places is not None:
            y_RM = self.ops.gather_rows(y_RM, routing.places.row_of_slot)
        return mix(routing.combine_SR, y_RM)
