# SPDX-License-Identifier: Apache-2.0
"""What ranks get where experts are somewhere else, counted exactly, and the exchanges by which the fullest gets less.

Rows are counted in whole numbers, so that sums are the same in any order, on every machine.

Letters: E experts, G ranks that share them, N layouts that are compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from ds_fsmoe.planning.expert_placement import ExpertPlacement
from ds_fsmoe.planning.placement_costs import Seen

WHOLE = 2**30
"""The rows of all ranks together are counted in about so many units; squares of these fit into 64 bits."""
_EVEN = 1000
"""Of the mean load, the part in which two fullest ranks count as equally full."""
_FEW = 8
"""So many ranks are tried for a replica; what each would get from it takes long to count."""


class CountedRows:
    """Counts the rows that an expert brings to the ranks that hold it, and over the ports of nodes.

    Args:
        seen: what was measured.
    """

    def __init__(self, seen: Seen) -> None:
        total = math.fsum(seen.rows_GE.reshape(-1).tolist())
        scale = WHOLE / total if total > 0 else 0.0
        self.rows_GE = np.rint(seen.rows_GE * scale).astype(np.int64)
        self.node_of_rank = tuple(seen.node_of_rank)
        node_G = np.asarray(self.node_of_rank)
        self.of_expert_E = self.rows_GE.sum(axis=0)
        is_near_GG = node_G[:, None] == node_G
        self.crossing_EG = np.array([self.rows_GE[~near_G].sum(axis=0) for near_G in is_near_GG]).T
        """[E, G]: the rows that cross nodes for an expert that one rank alone holds."""
        self._known: dict[tuple[int, tuple[int, ...]], tuple[np.ndarray, int]] = {}

    @property
    def total(self) -> int:
        """All rows."""
        return int(self.of_expert_E.sum())

    @property
    def num_ranks(self) -> int:
        """G."""
        return len(self.node_of_rank)

    def of(self, expert: int, ranks: tuple[int, ...]) -> tuple[np.ndarray, int]:
        """Return [G], the rows that an expert brings to each rank, and those of them that cross nodes.

        Args:
            expert: the expert.
            ranks: the ranks that hold it.
        """
        key = expert, tuple(sorted(ranks))
        if key not in self._known:
            to_G, rows_G = _targets(key[1], self.node_of_rank), self.rows_GE[:, expert]
            load_G = np.zeros(self.num_ranks, dtype=np.int64)
            np.add.at(load_G, to_G, rows_G)
            node_G = np.asarray(self.node_of_rank)
            self._known[key] = load_G, int(rows_G[node_G != node_G[to_G]].sum())
        return self._known[key]


@lru_cache(maxsize=2**14)
def _targets(ranks: tuple[int, ...], node_of_rank: tuple[int, ...]) -> np.ndarray:
    """Return [G], the rank to which each sends the rows of an expert that these ranks hold."""
    # By the rule of placements, asked of one in which nothing else has replicas.
    num_ranks = len(node_of_rank)
    alone = ExpertPlacement.at_start(num_ranks, num_ranks, 1)
    alone = alone.with_replicas({2 * each + 1: ranks[0] for each in ranks[1:]})
    return alone.routes(node_of_rank)[:, ranks[0]] // alone.per_rank


@dataclass(frozen=True, eq=False)
class Layout:
    """The ranks of experts, without regard to places."""

    rows: CountedRows
    home_E: np.ndarray
    """[E]: the rank where each expert is at home."""
    replicas: tuple[tuple[int, ...], ...]
    """[E]: the ranks that have a replica of each."""

    @classmethod
    def of(cls, rows: CountedRows, placement: ExpertPlacement) -> Layout:
        """Return where a placement has the experts at home, without its replicas."""
        home_E = np.array([placement.rank_of_place(each) for each in placement.home_of_expert])
        return cls(rows, home_E, ((),) * len(home_E))

    @cached_property
    def load_EG(self) -> np.ndarray:
        """[E, G]: the rows that each expert brings to each rank."""
        return self._with_homes(np.arange(len(self.home_E)), self.home_E)[0]

    @cached_property
    def load_G(self) -> np.ndarray:
        """[G]: the rows of each rank."""
        return self.load_EG.sum(axis=0)

    @cached_property
    def crossing_E(self) -> np.ndarray:
        """[E]: the rows of each expert that cross nodes."""
        return self._with_homes(np.arange(len(self.home_E)), self.home_E)[1]

    @property
    def peak(self) -> int:
        """The rows of the fullest rank."""
        return int(self.load_G.max())

    @cached_property
    def fullness(self) -> tuple[int, int]:
        """The rows of the fullest rank, and where these are equal, how uneven all ranks are: less is better."""
        return self.peak, int((self.load_G**2).sum())

    @property
    def crossing(self) -> int:
        """The rows that cross nodes."""
        return int(self.crossing_E.sum())

    @property
    def num_replicas(self) -> int:
        """The replicas of all experts."""
        return sum(map(len, self.replicas))

    @cached_property
    def has_replica_EG(self) -> np.ndarray:
        """[E, G]: whether a rank has a replica of an expert."""
        found = np.zeros((len(self.home_E), self.rows.num_ranks), dtype=bool)
        for expert, ranks in enumerate(self.replicas):
            if ranks:
                found[expert, list(ranks)] = True
        return found

    def held(self, rank: int) -> list[int]:
        """Return the experts of which a rank has a replica."""
        return np.flatnonzero(self.has_replica_EG[:, rank]).tolist()

    def num_moved(self, home_E: np.ndarray) -> int:
        """Return how many experts are at home on another rank than there."""
        return int((self.home_E != home_E).sum())

    def _with_homes(self, experts_N: np.ndarray, home_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return [N, G] the rows that these experts bring, were they at home there, and [N] those that cross."""
        load_NG = np.zeros((len(experts_N), self.rows.num_ranks), dtype=np.int64)
        load_NG[np.arange(len(experts_N)), home_N] = self.rows.of_expert_E[experts_N]
        crossing_N = self.rows.crossing_EG[experts_N, home_N]
        is_replicated_N = self.has_replica_EG[experts_N].any(axis=1)
        for index in np.flatnonzero(is_replicated_N).tolist():
            expert = int(experts_N[index])
            load_NG[index], crossing_N[index] = self.rows.of(expert, (int(home_N[index]), *self.replicas[expert]))
        return load_NG, crossing_N

    def exchanged(self, first: int, second: int) -> Layout:
        """Return the layout with the homes of two experts exchanged; a replica that would be at home goes."""
        home_E, replicas = self.home_E.copy(), list(self.replicas)
        home_E[[first, second]] = home_E[[second, first]]
        for each in (first, second):
            replicas[each] = tuple(rank for rank in replicas[each] if rank != home_E[each])
        return replace(self, home_E=home_E, replicas=tuple(replicas))

    def with_replica(self, expert: int, rank: int) -> Layout:
        """Return the layout with one replica more."""
        return self._replicas_of(expert, tuple(sorted((*self.replicas[expert], rank))))

    def without_replica(self, expert: int, rank: int) -> Layout:
        """Return the layout with one replica less."""
        return self._replicas_of(expert, tuple(each for each in self.replicas[expert] if each != rank))

    def _replicas_of(self, expert: int, ranks: tuple[int, ...]) -> Layout:
        return replace(self, replicas=(*self.replicas[:expert], ranks, *self.replicas[expert + 1 :]))

    def best_exchange(self, first_N: np.ndarray, second_N: np.ndarray, now_E: np.ndarray) -> tuple[int, int] | None:
        """Return the exchange of two homes after which the fullest rank has least.

        Of those that are as good, the one with which fewer rows cross nodes, then the one after which more experts are
        where they are now, then the first. An expert never gets home where it has a replica.

        Args:
            first_N: experts; each may be exchanged with the one at the same index of ``second_N``.
            second_N: experts on other ranks.
            now_E: [E], the rank where each expert is now.
        """
        to_first_N, to_second_N = self.home_E[second_N], self.home_E[first_N]
        is_open_N = ~(self.has_replica_EG[first_N, to_first_N] | self.has_replica_EG[second_N, to_second_N])
        first_N, second_N, to_first_N, to_second_N = (
            each[is_open_N] for each in (first_N, second_N, to_first_N, to_second_N)
        )
        if not len(first_N):
            return None
        load_NG, crossing_N = self.load_G[None], np.zeros(len(first_N), dtype=np.int64)
        moved_N = np.zeros(len(first_N), dtype=np.int64)
        for experts_N, home_N in ((first_N, to_first_N), (second_N, to_second_N)):
            brought_NG, crosses_N = self._with_homes(experts_N, home_N)
            load_NG = load_NG + brought_NG - self.load_EG[experts_N]
            crossing_N += crosses_N - self.crossing_E[experts_N]
            moved_N += (home_N != now_E[experts_N]).astype(int) - (self.home_E[experts_N] != now_E[experts_N])
        peak_N, squares_N = load_NG.max(axis=1), (load_NG**2).sum(axis=1)
        # As good: within a thousandth of the mean, and by what is counted no worse than what is there.
        is_less_N = (peak_N < self.peak) | ((peak_N == self.peak) & (squares_N < self.fullness[1]))
        near_N = peak_N <= peak_N.min() + self.rows.total // (self.rows.num_ranks * _EVEN)
        among_N = np.flatnonzero(near_N & is_less_N if (near_N & is_less_N).any() else near_N)
        order = np.lexsort([each[among_N] for each in (squares_N, peak_N, moved_N, crossing_N)])
        best = int(among_N[order[0]])
        return int(first_N[best]), int(second_N[best])

    def improved(self, now_E: np.ndarray, num_spare: int, homes: bool = True) -> Layout:
        """Return the layout after exchanges of homes and changes of replicas, until the fullest rank cannot be lowered.

        Args:
            now_E: [E], the rank where each expert is now.
            num_spare: the spare places of a rank.
            homes: whether experts may get other homes.
        """
        layout = self
        while True:
            fullest = int(layout.load_G.argmax())
            found = [layout._best_change_of_a_replica(fullest, num_spare)]
            if homes:
                here, there = (np.flatnonzero(each) for each in (layout.home_E == fullest, layout.home_E != fullest))
                pair = layout.best_exchange(np.repeat(here, len(there)), np.tile(there, len(here)), now_E)
                found += [layout.exchanged(*pair)] if pair else []
            best = min((each for each in found if each is not None), key=lambda each: each.fullness, default=layout)
            if best.fullness >= layout.fullness:
                return layout
            layout = best

    def _best_change_of_a_replica(self, rank: int, num_spare: int) -> Layout | None:
        """Return the best layout in which one replica of an expert that this rank holds is gone, or on another rank,
        one of the least loaded, which had a spare place or gives one of its replicas in exchange."""
        options: list[dict[int, tuple[int, ...]]] = []
        held = [self.held(each) for each in range(self.rows.num_ranks)]
        low = np.argsort(self.load_G, kind="stable")[:_FEW].tolist()
        for expert, ranks in enumerate(self.replicas):
            holding = self._holding(expert)
            for old in ranks if rank in holding else ():
                rest = tuple(each for each in ranks if each != old)
                options.append({expert: rest})
                for new in (each for each in low if each not in holding):
                    changes = {expert: (*rest, new)}
                    if len(held[new]) < num_spare:
                        options.append(changes)
                        continue
                    for other in (each for each in held[new] if old not in self._holding(each)):
                        others = (at for at in self.replicas[other] if at != new)
                        options.append(changes | {other: (*others, old)})
        if not options:
            return None
        replicas = list(self.replicas)
        for expert, ranks in min(options, key=self._fullness_with).items():
            replicas[expert] = tuple(sorted(ranks))
        return replace(self, replicas=tuple(replicas))

    def _holding(self, expert: int) -> tuple[int, ...]:
        return (int(self.home_E[expert]), *self.replicas[expert])

    def _fullness_with(self, replicas: Mapping[int, tuple[int, ...]]) -> tuple[int, int]:
        """Return :attr:`fullness` with these replicas of these experts."""
        load_G = self.load_G
        for expert, ranks in replicas.items():
            load_G = load_G + self.rows.of(expert, (int(self.home_E[expert]), *ranks))[0] - self.load_EG[expert]
        return int(load_G.max()), int((load_G**2).sum())

    def towards(self, wanted: Layout, most: int) -> Layout:
        """Return the layout on the way to the homes of another, as soon as no rank has more than so many rows.

        Each exchange brings an expert to the rank where it is wanted: the one that lowers the fullest rank most, then
        the next. The replicas are those that are wanted, as far as no expert is at home there.

        Args:
            wanted: the layout to go to.
            most: the rows of the fullest rank that are low enough.
        """

        def at(home_E: np.ndarray) -> Layout:
            replicas = (
                tuple(each for each in ranks if each != home)
                for ranks, home in zip(wanted.replicas, home_E.tolist(), strict=True)
            )
            return Layout(self.rows, home_E, tuple(replicas))

        layout, now_E = at(self.home_E), self.home_E
        while layout.peak > most and (wrong := np.flatnonzero(layout.home_E != wanted.home_E)).size:
            pairs = wrong[np.argwhere(wanted.home_E[wrong][:, None] == layout.home_E[wrong])]
            fullest = int(layout.load_G.argmax())
            # What leaves the fullest rank alone cannot lower it.
            touches = (layout.home_E[pairs] == fullest).any(axis=1)
            pairs = pairs[touches] if touches.any() else pairs
            first, second = layout.best_exchange(pairs[:, 0], pairs[:, 1], now_E) or pairs[0].tolist()
            layout = at(layout.exchanged(first, second).home_E)
        return layout

    def placement(self, now: ExpertPlacement) -> ExpertPlacement:
        """Return the placement with this layout in which as much as possible is in the place where it is now."""
        order = np.argsort(self.home_E, kind="stable").reshape(now.num_ranks, -1)
        wanted = ExpertPlacement(tuple(order.reshape(-1).tolist()), now.num_experts, now.num_ranks)
        found = now.with_replicas({})
        for first, second in now.swaps_to(wanted):
            found = found.swapped(first, second)
        spare: dict[int, int] = {}
        for rank in range(now.num_ranks):
            wanted_here = self.held(rank)
            places = range(rank * now.per_rank + now.num_local, (rank + 1) * now.per_rank)
            kept = {each: now.expert_of_place[each] for each in places if now.expert_of_place[each] in wanted_here}
            free = [each for each in places if each not in kept]
            others = [each for each in wanted_here if each not in kept.values()]
            spare |= kept | dict(zip(free, others, strict=False))
        return found.with_replicas(spare)
