# SPDX-License-Identifier: Apache-2.0
"""A decision in the form in which DeepSpeed's own gate returns it, and back: what hooks on that gate are shown.

Letters: S tokens on this rank, E experts (all ranks), K choices per token, C slots per expert.
"""

from __future__ import annotations

from typing import Any

import torch

from ds_fsmoe.components.routing import Routing

StockRoutes = tuple[torch.Tensor, torch.Tensor, int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""(auxiliary loss, C, E, experts [K, S] int32, positions [K, S] int32, weights [K, S], counts [E]). A choice that was
dropped has expert -1 and position 0."""
StockMasks = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""(auxiliary loss, weights [S, E, C], the same as true or false, counts [E])."""


def stock_routes(routing: Routing) -> StockRoutes:
    """Return what DeepSpeed's gate returns with ``sparse_routes=True``."""
    is_kept_KS, expert_KS, position_KS = _places(routing)
    return (
        routing.aux_loss,
        torch.tensor(routing.capacity),
        routing.num_experts,
        torch.where(is_kept_KS, expert_KS, -1).to(torch.int32),
        torch.where(is_kept_KS, position_KS, 0).to(torch.int32),
        routing.weights_KS,
        routing.counts_E,
    )


def stock_masks(routing: Routing) -> StockMasks:
    """Return what DeepSpeed's gate returns without ``sparse_routes``."""
    num_tokens = routing.slots_KS.shape[1]
    # One column more, for what was dropped.
    weights_SR = routing.weights_KS.new_zeros(num_tokens, routing.num_slots + 1)
    weights_SR = weights_SR.scatter_add(1, routing.slots_KS.t(), routing.weights_KS.t())[:, :-1]
    weights_SEC = weights_SR.reshape(num_tokens, routing.num_experts, routing.capacity)
    return routing.aux_loss, weights_SEC, weights_SEC.bool(), routing.counts_E


def routing_of(routes: Any) -> Routing:
    """The decision that DeepSpeed's layer would read from such a tuple."""
    aux_loss, capacity, num_experts, expert_KS, position_KS, weights_KS, counts_E = routes
    capacity = int(capacity)
    slots_KS = torch.where(expert_KS >= 0, expert_KS.long() * capacity + position_KS.long(), num_experts * capacity)
    return Routing(slots_KS, weights_KS, aux_loss, counts_E, capacity, num_experts)


def _places(routing: Routing) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    slots_KS, capacity = routing.slots_KS, max(1, routing.capacity)
    expert_KS = slots_KS.div(capacity, rounding_mode="floor")
    return slots_KS < routing.num_slots, expert_KS, slots_KS - expert_KS * capacity
