# SPDX-License-Identifier: Apache-2.0
"""Sends rows to where experts have been placed: a router's decision about experts becomes one about places.

Gates, losses, counts, hooks and recordings know experts by their own numbers. Only what lies between the order and the
experts counts in places, see :class:`~ds_fsmoe.planning.expert_placement.ExpertPlacement`.

Letters: E experts, K choices, S tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ds_fsmoe.components.routing import Routing
from ds_fsmoe.execution.device_tables import TABLES
from ds_fsmoe.planning.expert_placement import ExpertPlacement


@dataclass(frozen=True)
class Placed:
    """A placement by which a layer is called. Never changed: a layer is given another one instead.

    Args:
        placement: the same on every rank.
    """

    placement: ExpertPlacement

    def place_of(self, experts: torch.Tensor) -> torch.Tensor:
        """Return the places of these experts, E for E or more; nothing waits.

        Args:
            experts: any shape, integers in 0..E.
        """
        return self._table(experts)[experts.long()]

    def routing(self, routing: Routing) -> Routing:
        """Return the decision with places for experts: C slots of each place.

        Args:
            routing: a decision about E experts.
        """
        slots_KS, capacity = routing.slots_KS, max(1, routing.capacity)
        # A number that is none's, too large or too small, stays one, so that it is still found to be a fault.
        expert_KS = slots_KS.div(capacity, rounding_mode="floor")
        place_KS = self.place_of(expert_KS.clamp(0, self.placement.num_experts))
        placed_KS = place_KS * capacity + (slots_KS - expert_KS * capacity)
        is_one_KS = (slots_KS >= 0) & (slots_KS < routing.num_slots)
        counts = torch.zeros_like(routing.counts_E).scatter_(0, self._table(routing.counts_E)[:-1], routing.counts_E)
        return replace(routing, slots_KS=torch.where(is_one_KS, placed_KS, slots_KS), counts_E=counts)

    def _table(self, like: torch.Tensor) -> torch.Tensor:
        """Return [E + 1]: the place of each expert, and last E for none; on the device of a tensor."""
        return TABLES.get(("places", self.placement), like, self._made)

    def _made(self, device: torch.device) -> torch.Tensor:
        places = *self.placement.home_of_expert, self.placement.num_experts
        return torch.tensor(places, dtype=torch.int64, device=device)
