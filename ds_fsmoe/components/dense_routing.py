# SPDX-License-Identifier: Apache-2.0
"""Routing in which every slot is a mixture of all tokens, and every token's result one of all slots' results."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ds_fsmoe.components.routing import Place, Places, RoutingBase, find_places


@dataclass(frozen=True)
class DenseRouting(RoutingBase):
    """Weights of every token in every slot, and of every slot in every token's result."""

    order: ClassVar[str] = "dense"

    dispatch_SR: torch.Tensor
    """[S, E * C] float: of each token in each slot, 0 for a token that takes no part."""
    combine_SR: torch.Tensor
    """[S, E * C] float: of each slot's result in each token's; 0 for a token that takes no part."""
    aux_loss: torch.Tensor
    counts_E: torch.Tensor
    capacity: int
    num_experts: int
    entropy: torch.Tensor | None = None
    places: Places | None = None
    """Where the slots' rows lie, if not in the order of the columns. The two matrices are by far the largest tensors
    here, so it is rows that are moved, and not columns."""

    def relaid(self, place: Place, capacity: int) -> DenseRouting:
        assert self.places is None, "relaid once already"
        places = find_places(place, self.num_slots, self.num_experts * capacity, self.dispatch_SR.device)
        return replace(self, places=places, capacity=capacity)
