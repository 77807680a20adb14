# SPDX-License-Identifier: Apache-2.0
"""Sends rows to where experts are in one call of a layer in inference, where popular ones are on several ranks.

Letters: E experts, G ranks of the EP group, P places, C copies of an expert at the most, K choices, S tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from ds_fsmoe.components.routing import Routing
from ds_fsmoe.ops import Ops


@dataclass(frozen=True)
class HeldTable:
    """Says which experts each rank holds in a call, the same on every rank.

    Every rank has as many places as the one with most experts; those behind a rank's experts are empty. Place p is on
    rank ``p // per_rank``.

    Raises:
        ValueError: a rank has no expert, or one twice; or an expert is nowhere.
    """

    experts_of_rank: tuple[tuple[int, ...], ...]
    """The experts of each of G ranks, in the order of its places."""
    num_experts: int
    """E."""

    def __post_init__(self) -> None:
        present = set().union(*self.experts_of_rank)
        if present != set(range(self.num_experts)):
            raise ValueError(f"experts {sorted(present)}: must be each of 0..{self.num_experts - 1}")
        for rank, experts in enumerate(self.experts_of_rank):
            if not experts or len(set(experts)) < len(experts):
                raise ValueError(f"rank {rank} holds experts {experts}: must be different ones, at least one")

    @property
    def per_rank(self) -> int:
        """The places of a rank."""
        return max(map(len, self.experts_of_rank))

    @property
    def num_places(self) -> int:
        """P."""
        return self.per_rank * len(self.experts_of_rank)

    @cached_property
    def copies_E(self) -> np.ndarray:
        """[E]: the ranks that hold each expert."""
        every = [expert for experts in self.experts_of_rank for expert in experts]
        return np.bincount(every, minlength=self.num_experts)

    @cached_property
    def places_EC(self) -> np.ndarray:
        """[E, C]: the places of each expert, rank by rank, again and again up to C."""
        found: list[list[int]] = [[] for _ in range(self.num_experts)]
        for rank, experts in enumerate(self.experts_of_rank):
            for index, expert in enumerate(experts):
                found[expert].append(rank * self.per_rank + index)
        most = max(map(len, found))
        return np.array([(each * most)[:most] for each in found])

    def load_of_ranks(self, rows_E: np.ndarray) -> np.ndarray:
        """Return [G]: the rows of each rank, as each expert's are dealt out evenly.

        Args:
            rows_E: the rows of each expert.
        """
        rows = rows_E / self.copies_E
        return np.array([rows[list(experts)].sum() for experts in self.experts_of_rank])

    def staying(self, before: HeldTable) -> HeldTable:
        """Return the same table with experts in the places that they had before, where they may stay there."""
        return replace(self, experts_of_rank=tuple(map(_staying, self.experts_of_rank, before.experts_of_rank)))


def _staying(experts: Sequence[int], before: Sequence[int]) -> tuple[int, ...]:
    stays = [each if each in experts else None for each in before[: len(experts)]]
    stays += [None] * (len(experts) - len(stays))
    come = iter(sorted(set(experts).difference(each for each in stays if each is not None)))
    return tuple(next(come) if each is None else each for each in stays)


def rows_of_experts(routing: Routing) -> torch.Tensor:
    """Return [E] int64: the rows that a decision sends to each expert; nothing waits."""
    expert_KS = _experts(routing).reshape(-1)
    counts = expert_KS.new_zeros(routing.num_experts + 1)
    return counts.scatter_add_(0, expert_KS, torch.ones_like(expert_KS))[:-1]


def dealt(routing: Routing, rows_E: torch.Tensor, table: HeldTable, rank: int, ops: Ops) -> Routing:
    """Return a decision about E experts as one about places, with one slot of each.

    The rows of an expert that is on several ranks go to them in turn, token by token; each rank begins with another
    one, so that the copies get equally many. Nothing waits for the device.

    Args:
        routing: the decision.
        rows_E: what :func:`rows_of_experts` returns of it.
        table: where experts are.
        rank: this rank, in the order of the EP group.
        ops: the operators to use.
    """
    expert_KS = _experts(routing)
    places_EC = torch.from_numpy(table.places_EC).to(expert_KS.device)
    most = places_EC.shape[1]
    num_places = table.num_places
    # One row more is for choices that are none.
    places_EC = torch.cat([places_EC, places_EC.new_full((1, most), num_places)])
    if most == 1:
        place_KS = places_EC[:, 0][expert_KS]
    else:
        copies_E = torch.from_numpy(np.append(table.copies_E, 1)).to(expert_KS.device)
        slots = max(1, expert_KS.numel())
        numbered = ops.take_slots(expert_KS.contiguous(), table.num_experts, slots, None, "token")
        number_KS = numbered.slots_KS - expert_KS * slots + rank
        place_KS = places_EC[expert_KS, number_KS % copies_E[expert_KS]]
    # A number that is none's, too large or too small, stays one, so that it is still found to be a fault; and so do
    # counts that are too small.
    place_KS = torch.where(routing.slots_KS < 0, -1, place_KS)
    place_KS = torch.where(routing.slots_KS > routing.num_slots, num_places + 1, place_KS)
    at = place_KS.reshape(-1).clamp(-1, num_places)
    counts_P = at.new_zeros(num_places + 2).scatter_add_(0, at + 1, torch.ones_like(at))[1:-1]
    counts_P = counts_P - (routing.counts_E < rows_E).any().long()
    return replace(routing, slots_KS=place_KS, counts_E=counts_P, capacity=1, num_experts=num_places)


def _experts(routing: Routing) -> torch.Tensor:
    """Return [K, S]: the expert of each row, E for none."""
    expert_KS = routing.slots_KS.div(max(1, routing.capacity), rounding_mode="floor")
    is_row_KS = (routing.slots_KS >= 0) & (routing.slots_KS < routing.num_slots)
    return torch.where(is_row_KS, expert_KS, routing.num_experts)
