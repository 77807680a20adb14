# SPDX-License-Identifier: Apache-2.0
"""The sparse order: one gather each way, touching every slot and every choice once."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ds_fsmoe.components.order import OrderBase
from ds_fsmoe.components.routing import Routing
from ds_fsmoe.ops import reference
from ds_fsmoe.registry import register_order


@register_order("sparse")
class SimpleOrder(OrderBase):
    """Reads each slot's token by index instead of multiplying with a one-hot [S, E, C] mask.

    Args:
        gather_rows: ``gather_rows(x_RM, index_N) -> [N, M]``, with a zero row where the index is out of range: the
            plain reference or the compiled op, as ``"fsmoe": {"ops": ...}`` says.
    """

    def __init__(self, gather_rows: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None) -> None:
        self.gather_rows = gather_rows or reference.gather_rows

    def arrange(self, x_SM: torch.Tensor, routing: Routing) -> torch.Tensor:
        num_tokens = x_SM.shape[0]
        # The token of every slot, and S (no such token, so a zero row) where none arrived. One more slot than there
        # are takes what was dropped and is cut off again: no branch, and no waiting for the device.
        token_of_slot = x_SM.new_full((routing.num_slots + 1,), num_tokens, dtype=torch.long)
        tokens_KS = torch.arange(num_tokens, device=x_SM.device).expand_as(routing.slots_KS)
        token_of_slot.scatter_(0, routing.slots_KS.reshape(-1), tokens_KS.reshape(-1))
        x_EcM = self.gather_rows(x_SM, token_of_slot[:-1])
        return x_EcM.view(routing.num_experts, routing.capacity, x_SM.shape[1])

    def restore(self, y_ECM: torch.Tensor, routing: Routing) -> torch.Tensor:
        width = y_ECM.shape[-1]
        num_choices, num_tokens = routing.slots_KS.shape
        y_KSM = self.gather_rows(y_ECM.reshape(-1, width), routing.slots_KS.reshape(-1))
        y_KSM = y_KSM.view(num_choices, num_tokens, width)
        # The weights are float32 (or wider), so products and the sum over choices are too, whatever the experts' type.
        return (y_KSM * routing.weights_KS.unsqueeze(-1)).sum(dim=0).to(y_ECM.dtype)
