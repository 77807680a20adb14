# SPDX-License-Identifier: Apache-2.0
"""Sends rows to where experts have been placed: a router's decision about experts becomes one about places.

Gates, losses, counts, hooks and recordings know experts by their own numbers. Only what lies between the order and the
experts counts in places, see :class:`~ds_fsmoe.planning.expert_placement.ExpertPlacement`.

Letters: E experts, P places, K choices, S tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ds_fsmoe.components.routing import Routing
from ds_fsmoe.execution.device_tables import TABLES
from ds_fsmoe.planning.expert_placement import ExpertPlacement


@dataclass(frozen=True)
class Placed:
    """A placement as one rank of the EP group sees it. Never changed: a layer is given another one instead.

    Args:
        placement: the same on every rank.
        rank: this rank, in the order of the EP group.
        node_of_rank: the node of each rank of the EP group.
        inputs: of a call, where there are replicas.
    """

    placement: ExpertPlacement
    rank: int
    node_of_rank: tuple[int, ...]
    inputs: tuple[torch.Tensor, ...] | None = None
    """What stands for the experts' parameters in the graph of one call; ``None``: they themselves."""

    def place_of(self, experts: torch.Tensor) -> torch.Tensor:
        """Return the place to which this rank sends rows of these experts, P for E or more; nothing waits.

        Args:
            experts: any shape, integers in 0..E.
        """
        return self._table(experts)[experts.long()]

    def routing(self, routing: Routing) -> Routing:
        """Return the decision with places for experts: C slots of each place, those of places that get nothing empty.

        Args:
            routing: a decision about E experts.
        """
        slots_KS, capacity = routing.slots_KS, max(1, routing.capacity)
        # A number that is none's, too large or too small, stays one, so that it is still found to be a fault.
        expert_KS = slots_KS.div(capacity, rounding_mode="floor")
        place_KS = self.place_of(expert_KS.clamp(0, self.placement.num_experts))
        placed_KS = place_KS * capacity + (slots_KS - expert_KS * capacity)
        num_slots = self.placement.num_places * routing.capacity
        above_KS = slots_KS - routing.num_slots + num_slots
        slots = torch.where(slots_KS < 0, slots_KS, torch.where(slots_KS >= routing.num_slots, above_KS, placed_KS))
        counts = routing.counts_E.new_zeros(self.placement.num_places)
        counts.scatter_(0, self._table(counts)[:-1], routing.counts_E)
        return replace(routing, slots_KS=slots, counts_E=counts, num_experts=self.placement.num_places)

    def _table(self, like: torch.Tensor) -> torch.Tensor:
        """Return [E + 1]: the place of each expert, and last P for none; on the device of a tensor."""
        return TABLES.get(("places", self.placement, self.rank, self.node_of_rank), like, self._made)

    def _made(self, device: torch.device) -> torch.Tensor:
        routes_E = self.placement.routes(self.node_of_rank)[self.rank]
        return torch.tensor([*routes_E.tolist(), self.placement.num_places], dtype=torch.int64, device=device)
