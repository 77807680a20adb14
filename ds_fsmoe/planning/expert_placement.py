# SPDX-License-Identifier: Apache-2.0
"""Maps the experts of a layer to ranks, as one table that is the same on every rank. Placement policies make it, and
:mod:`~ds_fsmoe.placement.placements` carries it out.

Every rank has the same number of *places*. Each holds one expert with its optimizer states. Places are numbered rank by
rank, so place p is on rank ``p // num_local``.

Letters: E experts, G ranks that share them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from ds_fsmoe.untrusted import MOST_EXPERTS


@dataclass(frozen=True)
class ExpertPlacement:
    """Holds the placement of the experts of one layer.

    Raises:
        ValueError: the sizes do not match, or an expert has no place or two.
    """

    expert_of_place: tuple[int, ...]
    """[E]: the expert in each place."""
    num_experts: int
    """E."""
    num_ranks: int
    """G, in the order of the EP group."""
    num_spare: ClassVar[int] = 0
    """No rank has a place for replicas. Policies that were written when there were some ask for it."""
    num_replicas: ClassVar[int] = 0
    """As :attr:`num_spare`."""

    def __post_init__(self) -> None:
        # A policy may compute with numpy, whose integers no file takes.
        object.__setattr__(self, "expert_of_place", tuple(map(int, self.expert_of_place)))
        for name in ("num_experts", "num_ranks"):
            object.__setattr__(self, name, int(getattr(self, name)))
        if self.num_ranks < 1 or self.num_experts < 1 or self.num_experts % self.num_ranks:
            raise ValueError(f"{self.num_experts} experts: must be a multiple of {self.num_ranks} rank(s), at least 1")
        if sorted(self.expert_of_place) != list(range(self.num_experts)):
            raise ValueError(
                f"experts in places {list(self.expert_of_place)}: must be each of 0..{self.num_experts - 1} once"
            )

    @classmethod
    def at_start(cls, num_experts: int, num_ranks: int) -> ExpertPlacement:
        """Return the placement of the model's own order: expert by expert, rank by rank.

        Args:
            num_experts: E.
            num_ranks: G.
        """
        return cls(tuple(range(num_experts)), num_experts, num_ranks)

    @property
    def num_local(self) -> int:
        """Return the number of places of a rank."""
        return self.num_experts // self.num_ranks

    per_rank = num_local  # as policies call it that were written when a rank had places for replicas too

    @cached_property
    def by_rank(self) -> np.ndarray:
        """Return the experts of each rank, [G, places of a rank]."""
        return np.array(self.expert_of_place, dtype=np.int64).reshape(self.num_ranks, -1)

    @cached_property
    def place_of_expert(self) -> tuple[int, ...]:
        """Return the place of each expert, [E]."""
        return tuple(np.argsort(self.expert_of_place).tolist())

    @cached_property
    def rank_of_expert(self) -> np.ndarray:
        """Return the rank of each expert, [E]."""
        return np.array(self.place_of_expert) // self.num_local

    @property
    def is_at_start(self) -> bool:
        """Return True if every expert is where the model's own order has it."""
        return self.expert_of_place == tuple(range(self.num_experts))

    def rank_of_place(self, place: int) -> int:
        """Return the rank of a place."""
        return place // self.num_local

    def num_moved(self, after: ExpertPlacement) -> int:
        """Return the number of experts that another placement has on another rank."""
        return int((self.rank_of_expert != after.rank_of_expert).sum())

    def rows_between(self, rows_GE: np.ndarray, node_of_rank: Sequence[int] = ()) -> np.ndarray:
        """Return the rows that each rank sends to each rank, itself included, [G, G].

        Args:
            rows_GE: the rows of each rank for each expert, [G, E].
            node_of_rank: ignored; policies written for replicas pass it.
        """
        found = np.zeros((self.num_ranks, self.num_ranks))
        np.add.at(found.T, self.rank_of_expert, np.asarray(rows_GE, dtype=float).T)
        return found

    def over_mean(self, rows_GE: np.ndarray) -> float:
        """Return the rows of the fullest rank over the mean; 1 if there are no rows.

        Args:
            rows_GE: the rows of each rank for each expert, [G, E].
        """
        rows_G = self.rows_between(rows_GE).sum(axis=0)
        return float(rows_G.max() / rows_G.mean()) if rows_G.sum() > 0 else 1.0

    def swapped(self, first: int, second: int) -> ExpertPlacement:
        """Return the placement with the experts of two places exchanged.

        Args:
            first, second: the places.
        """
        found = list(self.expert_of_place)
        found[first], found[second] = found[second], found[first]
        return replace(self, expert_of_place=tuple(found))

    def with_replicas(self, expert_of_spare: Mapping[int, int]) -> ExpertPlacement:
        """Return this placement; policies written for replicas ask for one without any.

        Args:
            expert_of_spare: spare place -> expert; must be empty.

        Raises:
            ValueError: ``expert_of_spare`` is not empty.
        """
        if expert_of_spare:
            raise ValueError("experts have no replicas in training since version 0.2.0: a policy can only move experts")
        return self

    def swaps_to(self, wanted: ExpertPlacement, exactly: bool = False) -> list[tuple[int, int]]:
        """Return exchanges of two places that lead to the ranks of another placement, in order.

        An expert on its wanted rank keeps its place: in training, its place within a rank makes no difference. In a
        checkpoint, which is read by place, the places themselves have to match.

        Args:
            wanted: a placement of the same sizes.
            exactly: whether experts have to reach the same places, and not only the same ranks.

        Raises:
            ValueError: the other placement has other sizes.
        """
        if (wanted.num_experts, wanted.num_ranks) != (self.num_experts, self.num_ranks):
            raise ValueError(
                f"a placement of {wanted.num_experts} experts on {wanted.num_ranks} ranks: must be of "
                f"{self.num_experts} on {self.num_ranks}"
            )
        rank_of, places = wanted.rank_of_expert.tolist(), list(self.expert_of_place)
        swaps: list[tuple[int, int]] = []

        def exchange(first: int, second: int) -> None:
            swaps.append((first, second))
            places[first], places[second] = places[second], places[first]

        for place in range(self.num_experts):
            own = self.rank_of_place(place)
            # Bring here what is wanted on this rank, from a place whose rank does not want it; exchange directly where
            # both are put right at once.
            while (rank := rank_of[places[place]]) != own:
                here = range(rank * self.num_local, (rank + 1) * self.num_local)
                wrong = [each for each in here if rank_of[places[each]] != rank]
                back = [each for each in wrong if rank_of[places[each]] == own]
                exchange(place, (back or wrong)[0])
        for place in range(self.num_experts) if exactly else ():
            other = places.index(wanted.expert_of_place[place])
            if other != place:
                exchange(place, other)
        return swaps

    def as_dict(self) -> dict[str, Any]:
        """Return the placement as plain data, see :meth:`from_dict`."""
        return {
            "expert_of_place": list(self.expert_of_place),
            "num_experts": self.num_experts,
            "num_ranks": self.num_ranks,
        }

    @classmethod
    def from_dict(cls, found: Any) -> ExpertPlacement:
        """Return the placement in data of :meth:`as_dict`. Spare places of older versions, last on each rank, are
        dropped.

        Raises:
            ValueError: the data is malformed.
        """
        names = ("expert_of_place", "num_experts", "num_ranks")
        if not isinstance(found, Mapping) or set(found) != set(names):
            raise ValueError(f"a placement must be an object with {', '.join(names)}")
        places, num_experts, num_ranks = (found[name] for name in names)
        if not isinstance(places, list) or any(type(each) is not int for each in (*places, num_experts, num_ranks)):
            raise ValueError(f"a placement must have whole numbers in {', '.join(names)}")
        if not (0 < num_ranks <= num_experts <= MOST_EXPERTS):
            raise ValueError(f"a placement must have 1 to {MOST_EXPERTS} experts, and at most as many ranks")
        per_rank, num_local = len(places) // num_ranks, num_experts // num_ranks
        if len(places) > num_experts and len(places) % num_ranks == 0:
            places = [expert for place, expert in enumerate(places) if place % per_rank < num_local]
        return cls(tuple(places), num_experts, num_ranks)
