# SPDX-License-Identifier: Apache-2.0
"""An order of one's own: tokens are written to their slots, where the built-in one reads each slot's token.

{"fsmoe": {"enabled": true, "plugins": ["extensions.scatter_order"], "order": "scatter"}}
"""

import torch

from ds_fsmoe import OrderBase, register_order
from ds_fsmoe.components.routing import Routing


@register_order("scatter")
class ScatterOrder(OrderBase):
    """Law: with one slot per token and weight 1, ``restore(arrange(x)) == x``; an empty slot is zero."""

    def arrange(self, x_SM: torch.Tensor, routing: Routing) -> torch.Tensor:
        """[S, M] tokens to [E, C, M] slots."""
        num_choices, width = routing.slots_KS.shape[0], x_SM.shape[1]
        # One more slot than there are takes what was dropped.
        x_RM = x_SM.new_zeros(routing.num_slots + 1, width)
        x_RM = x_RM.index_copy(0, routing.slots_KS.reshape(-1), x_SM.repeat(num_choices, 1))
        return x_RM[:-1].view(routing.num_experts, routing.capacity, width)

    def restore(self, y_ECM: torch.Tensor, routing: Routing) -> torch.Tensor:
        """[E, C, M] results to [S, M]: the weighted sum over a token's slots."""
        width = y_ECM.shape[-1]
        y_RM = torch.cat([y_ECM.reshape(-1, width), y_ECM.new_zeros(1, width)])
        y_KSM = y_RM[routing.slots_KS] * routing.weights_KS.unsqueeze(-1)
        return y_KSM.sum(dim=0).to(y_ECM.dtype)
