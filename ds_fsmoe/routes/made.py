# SPDX-License-Identifier: Apache-2.0
"""Generates synthetic routing by name; the same arguments give the same choices in every process. The benchmarks
use it; :mod:`~ds_fsmoe.routes.recorded` reads routing of real jobs.

A name determines the popularity of experts. Each token then takes k different experts by popularity: those with the k
largest ``log(popularity) + Gumbel noise``.

Letters: S tokens of a rank, k choices of a token, E experts.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ds_fsmoe.untrusted import suggested

HOT_SHARE = 0.5
"""Of the tokens, those that have a hot expert among their choices, or go to a hot rank only."""
DRIFT_STEPS = 64
"""Steps in which popularity has moved from one expert to the next."""


@dataclass(frozen=True)
class _Request:
    num_tokens: int
    num_experts: int
    k: int
    ep_size: int
    step: int
    rank: int
    layer: int
    seed: int

    def of_layer(self) -> np.random.Generator:
        """Return the random generator that all ranks and steps of a layer share."""
        return np.random.default_rng([self.seed, self.layer, 0])

    def of_call(self) -> np.random.Generator:
        """Return the random generator of this rank, layer and step."""
        return np.random.default_rng([self.seed, self.layer, 1, self.step, self.rank])

    def order(self) -> np.ndarray:
        """Return the experts from the most to the least popular, [E]."""
        return self.of_layer().permutation(self.num_experts)


def choices(
    name: str,
    *,
    num_tokens: int,
    num_experts: int,
    k: int,
    ep_size: int = 1,
    step: int = 0,
    rank: int = 0,
    layer: int = 0,
    seed: int = 0,
) -> np.ndarray:
    """Return the experts of each token, [S, k] int64, all different within a token.

    Args:
        name: one of :data:`NAMES`.
        num_tokens: S.
        num_experts: E.
        k: the number of experts of a token.
        ep_size: the number of EP ranks, which own equal blocks of experts; used by ``hot_rank``.
        step: the optimizer step.
        rank: the rank of the tokens; each rank draws different choices.
        layer: the number of the layer; each layer has different popular experts.
        seed: the seed of all random numbers.

    Raises:
        ValueError: the name is unknown, or sizes are invalid.
    """
    if name not in _MAKERS:
        raise ValueError(f"unknown routing {name!r}: {suggested(name, NAMES)}")
    if not 1 <= k <= num_experts or num_tokens < 0:
        raise ValueError(f"k = {k}: must be between 1 and the {num_experts} experts, for {num_tokens} >= 0 tokens")
    if ep_size < 1 or num_experts % ep_size:
        raise ValueError(f"ep_size = {ep_size}: must divide the {num_experts} experts")
    # Of another seed for each name, so that no two are alike by accident.
    seed = (seed << 32) + zlib.crc32(name.encode())
    return _MAKERS[name](_Request(num_tokens, num_experts, k, ep_size, step, rank, layer, seed))


def _by_popularity(asked: _Request, popularity_E: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        log_E = np.log(popularity_E)
    noise_SE = asked.of_call().gumbel(size=(asked.num_tokens, asked.num_experts))
    return np.argsort(-(log_E + noise_SE), axis=1, kind="stable")[:, : asked.k]


def _balanced(asked: _Request) -> np.ndarray:
    """Return even choices: the counts of experts differ by at most one. Which experts a token combines is random."""
    order, draw = asked.order(), asked.of_call()
    first_S = (np.arange(asked.num_tokens) * asked.k + asked.rank) % asked.num_experts
    return order[(draw.permutation(first_S)[:, None] + np.arange(asked.k)) % asked.num_experts]


def _with_hot(asked: _Request, place: int) -> np.ndarray:
    """Return even choices in which a share of the tokens also choose one hot expert. ``place`` is its index in the
    order of popularity.
    """
    hot = int(asked.order()[place % asked.num_experts])
    found = _by_popularity(asked, np.ones(asked.num_experts))
    is_hot_S = asked.of_call().permutation(asked.num_tokens) < round(HOT_SHARE * asked.num_tokens)
    has_it_S = (found == hot).any(axis=1)
    found[is_hot_S & ~has_it_S, 0] = hot
    return found


def _hot_rank(asked: _Request) -> np.ndarray:
    """Return even choices in which a share of the tokens choose only experts of one hot rank."""
    num_local = asked.num_experts // asked.ep_size
    hot = int(asked.of_layer().integers(asked.ep_size))
    popularity_E = np.ones(asked.num_experts)
    is_there_E = np.arange(asked.num_experts) // num_local == hot
    found = _by_popularity(asked, popularity_E)
    # Experts elsewhere only where the rank has fewer than k.
    there = _by_popularity(asked, np.where(is_there_E, 1.0, 1e-12))
    is_hot_S = asked.of_call().permutation(asked.num_tokens) < round(HOT_SHARE * asked.num_tokens)
    found[is_hot_S] = there[is_hot_S]
    return found


def _zipf(exponent: float) -> Callable[[_Request], np.ndarray]:
    def make(asked: _Request) -> np.ndarray:
        popularity_E = np.empty(asked.num_experts)
        popularity_E[asked.order()] = np.arange(1, asked.num_experts + 1) ** -exponent
        return _by_popularity(asked, popularity_E)

    return make


def _drifting(asked: _Request) -> np.ndarray:
    """Return choices by Zipf's popularity, which moves from expert to expert, evenly over steps."""
    order = asked.order()
    moved, share = divmod(asked.step, DRIFT_STEPS)
    share /= DRIFT_STEPS
    zipf = np.arange(1, asked.num_experts + 1) ** -1.0
    before, after = np.roll(zipf, moved), np.roll(zipf, moved + 1)
    popularity_E = np.empty(asked.num_experts)
    popularity_E[order] = (1 - share) * before + share * after
    return _by_popularity(asked, popularity_E)


_MAKERS: dict[str, Callable[[_Request], np.ndarray]] = {
    "balanced": _balanced,
    "hot_expert": lambda asked: _with_hot(asked, 0),
    "hot_rank": _hot_rank,
    "zipf_1.0": _zipf(1.0),
    "zipf_1.5": _zipf(1.5),
    "drifting": _drifting,
    # Another expert is hot in every step.
    "rotating": lambda asked: _with_hot(asked, asked.step),
}
NAMES = tuple(_MAKERS)
"""The names, from even to always another."""
