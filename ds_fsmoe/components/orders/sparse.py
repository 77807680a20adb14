# SPDX-License-Identifier: Apache-2.0
"""The sparse order: one gather each way, touching every slot and every choice once."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ds_fsmoe.components.order import OrderBase
from ds_fsmoe.components.routing import Routing
from ds_fsmoe.components.slot_routing import SlotRouting
from ds_fsmoe.ops import reference
from ds_fsmoe.registry import register_order


@register_order("sparse")
class SimpleOrder(OrderBase):
    """Reads each slot's token by index instead of multiplying with a one-hot [S, E, C] mask.

    Args:
        gather_rows: ``gather_rows(x_RM, index_N) -> [N, M]``, with a zero row where the index is out of range: the
            plain reference or the compiled op, as ``"fsmoe": {"ops": ...}`` says.
    """

    reads = (Routing, SlotRouting)

    def __init__(self, gather_rows: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None) -> None:
        self.gather_rows = gather_rows or reference.gather_rows

    def arrange(self, x_SM: torch.Tensor, routing: Routing | SlotRouting) -> torch.Tensor:
        tokens_R = routing.tokens_R if isinstance(routing, SlotRouting) else _tokens_of_slots(routing)
        x_RM = self.gather_rows(x_SM, tokens_R)
        return x_RM.view(routing.num_experts, routing.capacity, x_SM.shape[1])

    def restore(self, y_ECM: torch.Tensor, routing: Routing | SlotRouting) -> torch.Tensor:
        y_RM = y_ECM.reshape(routing.num_slots, y_ECM.shape[-1])
        # The weights are float32 (or wider), so products and sums are too, whatever the experts' type.
        if isinstance(routing, SlotRouting):
            return _added_to_tokens(y_RM * routing.weights_R.unsqueeze(-1), routing).to(y_ECM.dtype)
        num_choices, num_tokens = routing.slots_KS.shape
        y_KSM = self.gather_rows(y_RM, routing.slots_KS.reshape(-1)).view(num_choices, num_tokens, y_RM.shape[-1])
        return (y_KSM * routing.weights_KS.unsqueeze(-1)).sum(dim=0).to(y_ECM.dtype)


def _tokens_of_slots(routing: Routing) -> torch.Tensor:
    """[R] int64: the token of every slot, and S (no such token, so a zero row) where none arrived."""
    num_tokens = routing.slots_KS.shape[1]
    # One more slot than there are takes what was dropped and is cut off again: no branch, no waiting for the device.
    tokens = routing.slots_KS.new_full((routing.num_slots + 1,), num_tokens)
    tokens_KS = torch.arange(num_tokens, device=tokens.device).expand_as(routing.slots_KS)
    tokens.scatter_(0, routing.slots_KS.reshape(-1), tokens_KS.reshape(-1))
    return tokens[:-1]


def _added_to_tokens(y_RM: torch.Tensor, routing: SlotRouting) -> torch.Tensor:
    """[R, M] to [S, M]: the sum of each token's rows."""
    # One more token than there are takes the rows of empty slots.
    y_SM = y_RM.new_zeros(routing.num_tokens + 1, y_RM.shape[-1])
    return y_SM.index_add(0, routing.tokens_R, y_RM)[:-1]
