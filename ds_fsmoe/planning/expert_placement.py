# SPDX-License-Identifier: Apache-2.0
"""Which ranks hold which expert of a layer, as data: one table, the same on every rank.

Every rank has equally many *places*. The first ones of a rank are the *homes* of experts: each expert has one, with its
optimizer states. The others are *spare*: empty, or with a replica of an expert that is at home somewhere else. Places
are numbered rank by rank, so that place p is on rank ``p // per_rank``.

Letters: E experts, G ranks that share them, P places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ds_fsmoe.untrusted import MOST_EXPERTS

EMPTY = -1
"""Stands for no expert, in a spare place."""


@dataclass(frozen=True)
class ExpertPlacement:
    """The placement of the experts of one layer.

    Raises:
        ValueError: sizes that do not fit, an expert with no home or two, or two places of a rank with one expert.
    """

    expert_of_place: tuple[int, ...]
    """[P]: the expert in each place; :data:`EMPTY` in a spare one that has none."""
    num_experts: int
    """E."""
    num_ranks: int
    """G, in the order of the EP group."""

    def __post_init__(self) -> None:
        # A policy may compute with numpy, whose integers no file takes.
        object.__setattr__(self, "expert_of_place", tuple(map(int, self.expert_of_place)))
        for name in ("num_experts", "num_ranks"):
            object.__setattr__(self, name, int(getattr(self, name)))
        if self.num_ranks < 1 or self.num_experts < 1 or self.num_experts % self.num_ranks:
            raise ValueError(f"{self.num_experts} experts: must be a multiple of {self.num_ranks} rank(s), at least 1")
        if len(self.expert_of_place) % self.num_ranks or self.num_spare < 0:
            raise ValueError(f"{len(self.expert_of_place)} places: must be as many on each of {self.num_ranks} rank(s)")
        at_home = sorted(self.by_rank[:, : self.num_local].reshape(-1).tolist())
        if at_home != list(range(self.num_experts)):
            raise ValueError(f"experts at home {at_home}: must be each of 0..{self.num_experts - 1} once")
        for rank, experts in enumerate(self.by_rank.tolist()):
            held = [each for each in experts if each != EMPTY]
            if len(set(held)) < len(held):
                raise ValueError(f"rank {rank} holds experts {held}: must be different ones")
            if any(not 0 <= each < self.num_experts for each in held):
                raise ValueError(f"rank {rank} holds experts {held}: must be in 0..{self.num_experts - 1}")

    @classmethod
    def at_start(cls, num_experts: int, num_ranks: int, num_spare: int = 0) -> ExpertPlacement:
        """Return the placement of the model's own order: expert by expert, rank by rank, with empty spare places.

        Args:
            num_experts: E.
            num_ranks: G.
            num_spare: the spare places of a rank.
        """
        if num_ranks < 1 or num_experts % num_ranks:
            raise ValueError(f"{num_experts} experts: must be a multiple of {num_ranks} rank(s)")
        homes = np.arange(num_experts).reshape(num_ranks, -1)
        spare = np.full((num_ranks, num_spare), EMPTY)
        return cls(tuple(np.hstack([homes, spare]).reshape(-1).tolist()), num_experts, num_ranks)

    @property
    def num_places(self) -> int:
        """P."""
        return len(self.expert_of_place)

    @property
    def per_rank(self) -> int:
        """The places of a rank."""
        return self.num_places // self.num_ranks

    @property
    def num_local(self) -> int:
        """The experts that are at home on a rank."""
        return self.num_experts // self.num_ranks

    @property
    def num_spare(self) -> int:
        """The spare places of a rank."""
        return self.per_rank - self.num_local

    @cached_property
    def by_rank(self) -> np.ndarray:
        """[G, places of a rank]: the experts of each rank."""
        return np.array(self.expert_of_place, dtype=np.int64).reshape(self.num_ranks, -1)

    @cached_property
    def home_of_expert(self) -> tuple[int, ...]:
        """[E]: the place where each expert is at home."""
        found = [0] * self.num_experts
        for place, expert in enumerate(self.expert_of_place):
            if place % self.per_rank < self.num_local:
                found[expert] = place
        return tuple(found)

    @cached_property
    def places_of_expert(self) -> tuple[tuple[int, ...], ...]:
        """[E]: all places of each expert, its home first."""
        found = [[home] for home in self.home_of_expert]
        for place, expert in enumerate(self.expert_of_place):
            if expert != EMPTY and place != self.home_of_expert[expert]:
                found[expert].append(place)
        return tuple(map(tuple, found))

    @property
    def is_at_start(self) -> bool:
        """Whether every expert is where it is in the model's own order, and no replica exists."""
        return self == self.at_start(self.num_experts, self.num_ranks, self.num_spare)

    @property
    def num_replicas(self) -> int:
        """The spare places that hold an expert."""
        return sum(each != EMPTY for each in self.expert_of_place) - self.num_experts

    def rank_of_place(self, place: int) -> int:
        """Return the rank that has a place."""
        return place // self.per_rank

    def routes(self, node_of_rank: Sequence[int]) -> np.ndarray:
        """Return [G, E]: the place to which each rank sends the rows of each expert.

        A rank takes the nearest: its own place, else one in its node, else any. Where several are equally near, the
        ranks that have this choice are dealt out over them in turn. The rule asks nothing but this table.

        Args:
            node_of_rank: the node of each of G ranks.
        """
        node_G = np.asarray(node_of_rank)
        if node_G.shape != (self.num_ranks,):
            raise ValueError(f"nodes of {node_G.size} ranks: must be of {self.num_ranks}")
        found = np.tile(np.array(self.home_of_expert), (self.num_ranks, 1))
        for expert, places in enumerate(self.places_of_expert):
            if len(places) == 1:
                continue
            turns: dict[tuple[int, ...], int] = {}
            by_rank = {self.rank_of_place(each): each for each in sorted(places)}
            for rank in range(self.num_ranks):
                if rank in by_rank:
                    found[rank, expert] = by_rank[rank]
                    continue
                near = tuple(each for at, each in by_rank.items() if node_G[at] == node_G[rank])
                choice = near or tuple(by_rank.values())
                turn = turns.get(choice, 0)
                turns[choice] = turn + 1
                found[rank, expert] = choice[turn % len(choice)]
        return found

    def rows_between(self, rows_GE: np.ndarray, node_of_rank: Sequence[int]) -> np.ndarray:
        """Return [G, G]: the rows that each rank sends to each, its own included.

        Args:
            rows_GE: the rows that each rank has for each expert.
            node_of_rank: the node of each rank.
        """
        to_GE = self.routes(node_of_rank) // self.per_rank
        found = np.zeros((self.num_ranks, self.num_ranks))
        np.add.at(found, (np.arange(self.num_ranks)[:, None], to_GE), np.asarray(rows_GE, dtype=float))
        return found

    def swapped(self, first: int, second: int) -> ExpertPlacement:
        """Return the placement with the experts of two homes exchanged; replicas stay where they are.

        A replica that would then be on the rank where its expert is at home goes.

        Args:
            first, second: the places.
        """
        found = list(self.expert_of_place)
        found[first], found[second] = found[second], found[first]
        for place in (first, second):
            at = self.rank_of_place(place) * self.per_rank
            for spare in range(at + self.num_local, at + self.per_rank):
                if found[spare] == found[place]:
                    found[spare] = EMPTY
        return replace(self, expert_of_place=tuple(found))

    def with_replicas(self, expert_of_spare: Mapping[int, int]) -> ExpertPlacement:
        """Return the placement with these experts in these spare places, and the other spare places empty.

        Args:
            expert_of_spare: spare place -> expert.
        """
        found = [
            each if place % self.per_rank < self.num_local else EMPTY for place, each in enumerate(self.expert_of_place)
        ]
        for place, expert in expert_of_spare.items():
            if not 0 <= place < self.num_places or place % self.per_rank < self.num_local:
                raise ValueError(f"place {place}: is not a spare one")
            found[place] = expert
        return replace(self, expert_of_place=tuple(found))

    def swaps_to(self, wanted: ExpertPlacement, exactly: bool = False) -> list[tuple[int, int]]:
        """Return exchanges of two homes that lead to the homes of another placement, one after another.

        Where an expert is on its wanted rank already it stays in its place: for training it makes no difference which
        place of a rank it has, and no exchange is within a rank. To be read by place, as in a checkpoint, experts have
        to be in the very places.

        Args:
            wanted: a placement of the same sizes.
            exactly: whether experts have to come to the same places, and not only to the same ranks.

        Raises:
            ValueError: it has other sizes.
        """
        if (wanted.num_experts, wanted.num_ranks) != (self.num_experts, self.num_ranks):
            raise ValueError(
                f"a placement of {wanted.num_experts} experts on {wanted.num_ranks} ranks: must be of "
                f"{self.num_experts} on {self.num_ranks}"
            )
        rank_of_expert = [wanted.rank_of_place(each) for each in wanted.home_of_expert]
        now, swaps = self, []
        for place in sorted(self.home_of_expert):
            # Bring here what is wanted on this rank, from a place whose rank does not want it; exchange directly where
            # both are put right at once.
            while (rank := rank_of_expert[now.expert_of_place[place]]) != now.rank_of_place(place):
                wrong = [
                    each
                    for each in range(rank * now.per_rank, rank * now.per_rank + now.num_local)
                    if rank_of_expert[now.expert_of_place[each]] != rank
                ]
                back = [each for each in wrong if rank_of_expert[now.expert_of_place[each]] == now.rank_of_place(place)]
                other = (back or wrong)[0]
                swaps.append((place, other))
                now = now.swapped(place, other)
        for place in sorted(self.home_of_expert) if exactly else ():
            other = now.home_of_expert[wanted.expert_of_place[self._same_place(place, wanted)]]
            if other != place:
                swaps.append((place, other))
                now = now.swapped(place, other)
        return swaps

    def _same_place(self, place: int, other: ExpertPlacement) -> int:
        """Return the number that a home has in a placement with another number of spare places."""
        rank, number = divmod(place, self.per_rank)
        return rank * other.per_rank + number

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data, see :meth:`from_dict`."""
        return {
            "expert_of_place": list(self.expert_of_place),
            "num_experts": self.num_experts,
            "num_ranks": self.num_ranks,
        }

    @classmethod
    def from_dict(cls, found: Any) -> ExpertPlacement:
        """Return what :meth:`as_dict` gave.

        Raises:
            ValueError: it is not that.
        """
        names = ("expert_of_place", "num_experts", "num_ranks")
        if not isinstance(found, Mapping) or set(found) != set(names):
            raise ValueError(f"a placement is an object with {', '.join(names)}")
        places, *numbers = (found[name] for name in names)
        if not isinstance(places, list) or any(type(each) is not int for each in (*places, *numbers)):
            raise ValueError(f"a placement has whole numbers in {', '.join(names)}")
        if max(numbers) > MOST_EXPERTS or not all(EMPTY <= each < MOST_EXPERTS for each in places):
            raise ValueError(f"a placement has at most {MOST_EXPERTS} experts, and numbers of experts from {EMPTY} on")
        return cls(tuple(places), *numbers)


def fullest_over_mean(rows_G: np.ndarray) -> float:
    """Return the rows of the fullest rank over the mean; 1 where there are none."""
    rows = np.asarray(rows_G, dtype=float)
    return float(rows.max() / rows.mean()) if rows.sum() > 0 else 1.0
