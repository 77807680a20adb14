# SPDX-License-Identifier: Apache-2.0
"""Estimates which experts of a layer will be popular, before its gate has run, as Lina does in inference. Training
counts and saves the profile; inference reads it.

Tokens with the same past experts tend to choose the same ones again (Lina, ATC'23, section 5.2). A *path* is the first
choices of a token in the layers before. Training counts which experts the tokens of each path choose. In a forward, the
paths of its tokens predict the popularity of each expert of the next layer.

Letters: S tokens, K choices of a token, L layers of a path, E experts of a layer, U paths.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

MOST_PAIRS = 1 << 20
"""The most pairs of a path and an expert that a profile keeps; with more, the rarer half goes."""
_MERGED_FROM = 1 << 16


class PathProfile:
    """Counts, for one layer, the experts that the tokens of each path choose.

    Args:
        num_experts: E; the layers of a path have at most as many experts.
        path_length: L.
        most_pairs: the largest number of (path, expert) pairs to keep.

    Raises:
        ValueError: a size is invalid, or an int64 cannot number all paths.
    """

    def __init__(self, num_experts: int, path_length: int = 3, most_pairs: int = MOST_PAIRS) -> None:
        if num_experts < 1 or path_length < 0 or most_pairs < 2:
            raise ValueError(
                f"{num_experts} expert(s), path_length = {path_length}, most_pairs = {most_pairs}: must be at least 1, "
                "0 and 2"
            )
        self.num_experts, self.path_length, self.most_pairs = num_experts, path_length, most_pairs
        # One number more than there are experts stands for none.
        self._base = num_experts + 1
        if self._base**path_length * num_experts > np.iinfo(np.int64).max:
            raise ValueError(f"path_length = {path_length} with {num_experts} experts: has more paths than 2^63")
        self._pairs_N = np.empty(0, np.int64)
        self._counts_N = np.empty(0, np.int64)
        self._all_E = np.zeros(num_experts, np.int64)
        self._waiting: list[tuple[np.ndarray, np.ndarray]] = []
        self._levels: tuple[int, list[_Level]] | None = None

    @property
    def num_counted(self) -> int:
        """Return the number of choices counted."""
        return int(self._all_E.sum())

    @property
    def num_paths(self) -> int:
        """Return the number of different paths."""
        self._merge()
        return len(np.unique(self._pairs_N // self.num_experts))

    def add(self, paths_SL: np.ndarray, choices_SK: np.ndarray) -> None:
        """Count the choices of some tokens.

        Args:
            paths_SL: [S, up to L] integers: the first choices in the layers before, the latest last; E for none.
            choices_SK: [S, K] integers: the choices in this layer; values outside 0..E-1 mean no choice.

        Raises:
            ValueError: the shapes do not match, or a path has invalid numbers.
        """
        choices_SK = np.asarray(choices_SK)
        if choices_SK.ndim != 2 or len(choices_SK) != len(paths_SL):
            raise ValueError(
                f"choices of shape {choices_SK.shape} for {len(paths_SL)} paths: must be [tokens, choices]"
            )
        keys_SK = np.broadcast_to(self._keys(paths_SL)[:, None], choices_SK.shape)
        is_one_SK = (choices_SK >= 0) & (choices_SK < self.num_experts)
        chosen = choices_SK[is_one_SK].astype(np.int64)
        self._all_E += np.bincount(chosen, minlength=self.num_experts)
        self._waiting.append(_counted(keys_SK[is_one_SK] * self.num_experts + chosen))
        self._levels = None
        if sum(len(pairs) for pairs, _ in self._waiting) > max(_MERGED_FROM, len(self._pairs_N)):
            self._merge()

    def estimate(self, paths_SL: np.ndarray, k: int) -> np.ndarray:
        """Return the relative popularity of each expert among tokens of these paths, [E] float64.

        Each token adds the probabilities of the k most likely experts of its path (Lina, section 5.2). An unknown path
        loses its first layers until it is known; without any layer left, all experts of the layer count. The result is
        zero if no choice was counted.

        Args:
            paths_SL: see :meth:`add`; tokens without a latest choice do not count.
            k: the number of choices of a token.

        Raises:
            ValueError: k is below 1, or see :meth:`add`.
        """
        if k < 1:
            raise ValueError(f"k = {k}: must be at least 1")
        self._merge()
        found_E = np.zeros(self.num_experts)
        if not self.num_counted:
            return found_E
        keys_S = self._keys(paths_SL)
        keys_U, tokens_U = keys_S, np.ones(len(keys_S), np.int64)
        if np.shape(paths_SL)[1]:
            is_there_S = np.asarray(paths_SL)[:, -1] != self.num_experts
            keys_U, tokens_U = np.unique(keys_S[is_there_S], return_counts=True)
            for level in self._levels_of(k):
                is_left_U = level.add_to(found_E, keys_U, tokens_U)
                keys_U, tokens_U = keys_U[is_left_U], tokens_U[is_left_U]
        return found_E + tokens_U.sum() * (self._all_E / self.num_counted)

    @classmethod
    def merged(cls, profiles: Iterable[PathProfile]) -> PathProfile:
        """Return the counts of several ranks as one profile.

        Args:
            profiles: the profiles of one layer, at least one.

        Raises:
            ValueError: there is no profile, or their sizes differ.
        """
        each = list(profiles)
        sizes = {(one.num_experts, one.path_length) for one in each}
        if len(sizes) != 1:
            raise ValueError(f"profiles of (experts, path_length) {sorted(sizes)}: must be of one layer")
        result = cls(*sizes.pop(), max(one.most_pairs for one in each))
        for one in each:
            one._merge()
            result._waiting.append((one._pairs_N, one._counts_N))
            result._all_E += one._all_E
        result._merge()
        return result

    def as_arrays(self) -> dict[str, Any]:
        """Return the profile as two numbers and three arrays of int64, see :meth:`from_arrays`."""
        self._merge()
        return {
            "num_experts": self.num_experts,
            "path_length": self.path_length,
            "pairs": self._pairs_N.copy(),
            "counts": self._counts_N.copy(),
            "experts": self._all_E.copy(),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any]) -> PathProfile:
        """Return the profile from arrays of :meth:`as_arrays`.

        Raises:
            ValueError: an array is missing or malformed.
        """
        names = ("num_experts", "path_length", "pairs", "counts", "experts")
        if missing := [name for name in names if name not in arrays]:
            raise ValueError(f"a profile of paths lacks {', '.join(missing)}")
        sizes = [arrays[name] for name in names[:2]]
        if any(type(each) is not int for each in sizes):
            raise ValueError(f"a profile of paths with num_experts, path_length = {sizes}: must be whole numbers")
        result = cls(*sizes)
        pairs, counts, experts = (_whole(name, arrays[name]) for name in names[2:])
        num_pairs = result._base**result.path_length * result.num_experts
        if len(counts) != len(pairs) or (counts < 1).any() or (np.diff(pairs) < 1).any():
            raise ValueError("a profile of paths whose pairs do not ascend, or have no count of at least 1 each")
        if len(pairs) and (pairs[0] < 0 or pairs[-1] >= num_pairs):
            raise ValueError(f"a profile of paths with pairs outside 0..{num_pairs - 1}")
        kept_E = np.zeros(result.num_experts, np.int64)
        np.add.at(kept_E, pairs % result.num_experts, counts)
        if experts.shape != kept_E.shape or (experts < kept_E).any():
            raise ValueError("a profile of paths has experts whose counts differ from those of its pairs")
        result._pairs_N, result._counts_N, result._all_E = pairs, counts, experts
        return result

    def _keys(self, paths_SL: np.ndarray) -> np.ndarray:
        """Return each path as one integer, [S], in base E + 1.

        The latest layer is the lowest digit, and the digit E means no expert or no layer.
        """
        paths_SL = np.asarray(paths_SL)
        if paths_SL.ndim != 2 or paths_SL.shape[1] > self.path_length:
            raise ValueError(f"paths of shape {paths_SL.shape}: must be [tokens, up to {self.path_length} layers]")
        paths_SL = paths_SL.astype(np.int64)
        if ((paths_SL < 0) | (paths_SL > self.num_experts)).any():
            raise ValueError(f"paths with numbers outside 0..{self.num_experts}")
        missing = self.path_length - paths_SL.shape[1]
        key = sum(self.num_experts * self._base ** (self.path_length - 1 - each) for each in range(missing))
        keys_S = np.full(len(paths_SL), key, np.int64)
        for place, digit_S in enumerate(reversed(paths_SL.T)):
            keys_S += digit_S * self._base**place
        return keys_S

    def _merge(self) -> None:
        if not self._waiting:
            return
        kept = [(self._pairs_N, self._counts_N), *self._waiting]
        pairs, counts = (np.concatenate(each) for each in zip(*kept, strict=True))
        pairs, counts = _counted(pairs, counts)
        if len(pairs) > self.most_pairs:
            most_counted = np.sort(np.argsort(-counts, kind="stable")[: self.most_pairs // 2])
            pairs, counts = pairs[most_counted], counts[most_counted]
        self._pairs_N, self._counts_N, self._waiting, self._levels = pairs, counts, [], None

    def _levels_of(self, k: int) -> list[_Level]:
        """Return the k most likely experts by path: of whole paths first, then without their first layers."""
        if self._levels is None or self._levels[0] != k:
            paths_N, experts_N = np.divmod(self._pairs_N, self.num_experts)
            levels = []
            for length in range(self.path_length, 0, -1):
                modulus = self._base**length
                pairs, counts = _counted(paths_N % modulus * self.num_experts + experts_N, self._counts_N)
                levels.append(_Level.of(modulus, *np.divmod(pairs, self.num_experts), counts, k))
            self._levels = k, levels
        return self._levels[1]


@dataclass(frozen=True)
class _Level:
    """Holds the most likely experts of paths of one length."""

    modulus: int
    """What the number of a longer path is taken modulo of."""
    paths_U: np.ndarray
    """The numbers of the paths, ascending."""
    experts_Uk: np.ndarray
    shares_Uk: np.ndarray
    """Their probabilities; 0 where a path has fewer experts than k."""

    @classmethod
    def of(cls, modulus: int, paths_N: np.ndarray, experts_N: np.ndarray, counts_N: np.ndarray, k: int) -> _Level:
        """Return the k most likely experts of each path, from pairs sorted by path."""
        paths_U, first_U, path_N = np.unique(paths_N, return_index=True, return_inverse=True)
        totals_U = np.add.reduceat(counts_N, first_U) if len(first_U) else counts_N
        order_N = np.lexsort((experts_N, -counts_N, paths_N))
        rank_N = np.arange(len(paths_N)) - first_U[path_N]
        best = rank_N < k
        at = path_N[best], rank_N[best]
        experts_Uk = np.zeros((len(paths_U), k), np.int64)
        shares_Uk = np.zeros((len(paths_U), k))
        experts_Uk[at] = experts_N[order_N][best]
        shares_Uk[at] = counts_N[order_N][best] / totals_U[at[0]]
        return cls(modulus, paths_U, experts_Uk, shares_Uk)

    def add_to(self, found_E: np.ndarray, keys_V: np.ndarray, tokens_V: np.ndarray) -> np.ndarray:
        """Add the expected choices of tokens of these paths, and return which paths are unknown."""
        own_V = keys_V % self.modulus
        at_V = np.searchsorted(self.paths_U, own_V)
        at_V[at_V == len(self.paths_U)] = 0
        is_known_V = self.paths_U[at_V] == own_V if len(self.paths_U) else np.zeros(len(keys_V), bool)
        at, tokens = at_V[is_known_V], tokens_V[is_known_V]
        weights = self.shares_Uk[at] * tokens[:, None]
        found_E += np.bincount(self.experts_Uk[at].reshape(-1), weights.reshape(-1), minlength=len(found_E))
        return ~is_known_V


def _counted(pairs: np.ndarray, counts: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return each pair once, ascending, and its count."""
    if counts is None:
        return np.unique(pairs, return_counts=True)
    order = np.argsort(pairs, kind="stable")
    pairs, counts = pairs[order], counts[order]
    first = np.flatnonzero(np.diff(pairs, prepend=-1))
    return pairs[first], np.add.reduceat(counts, first) if len(first) else counts[:0]


def _whole(name: str, array: Any) -> np.ndarray:
    array = np.asarray(array)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"a profile of paths with {name} of {array.dtype}, {array.ndim} dimensions: must be [..] int64"
        )
    return array.astype(np.int64)
