# SPDX-License-Identifier: Apache-2.0
"""The oracle: a whole MoE layer for several ranks as a plain loop over tokens, in one process.

Written from the formulas (Switch Transformer for k = 1, GShard for k = 2, their common generalisation above) with as
little cleverness as possible: no slots, no buffers, no communication. Every kept choice calls its expert on that one
token. Autograd through the loop gives the gradients to compare with. Meant for float64.

Letters: S tokens of a rank, M width, E experts of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LayerSettings:
    """What the layer depends on besides tokens and weights."""

    k: int = 1
    capacity_factor: float = 1.0
    min_capacity: int = 4
    drop_tokens: bool = True
    drop_policy: str = "probs"
    """k >= 3 only: ``"probs"`` or ``"position"``."""


@dataclass(frozen=True)
class RankRouting:
    """What the gate decides for one rank."""

    weights: dict[tuple[int, int], torch.Tensor]
    """(token, expert) of every kept choice -> its weight, a scalar."""
    aux_loss: torch.Tensor
    counts_E: list[int]
    """Tokens that chose each expert, before any was dropped."""
    capacity: int | None
    """``None`` where nothing is dropped: it does not matter for any value then."""


@dataclass(frozen=True)
class RankResult:
    """What the layer computes for one rank."""

    output_SM: torch.Tensor
    aux_loss: torch.Tensor
    counts_E: list[int]


def capacity_of(num_tokens: int, num_experts: int, settings: LayerSettings) -> int:
    """``max(ceil(S / E * factor * k), min_capacity)``, with S / E, factor * k and their product each in float32."""
    share = torch.tensor(num_tokens / num_experts, dtype=torch.float32)
    factor = torch.tensor(settings.capacity_factor * settings.k, dtype=torch.float32)
    return max(math.ceil((share * factor).item()), settings.min_capacity)


def route(
    x_SM: torch.Tensor,
    weight_EM: torch.Tensor,
    settings: LayerSettings,
    used_S: Sequence[bool] | None = None,
    priority_SE: torch.Tensor | None = None,
    given: Sequence[Sequence[int]] | None = None,
) -> RankRouting:
    """The gate, for the tokens of one rank.

    Args:
        x_SM: [S, M].
        weight_EM: [E, M].
        settings: the formula's constants.
        used_S: which tokens take part; ``None`` means all. The others keep their say in the mean probabilities.
        priority_SE: [S, E], k = 1 only: an expert that is full keeps the tokens with the largest of these. Which ones
            survive is a draw or a tie there, not a formula, so the caller has to say.
        given: the experts of each token, where the gate does not choose them.
    """
    num_tokens, num_experts = x_SM.shape[0], weight_EM.shape[0]
    probs: list[torch.Tensor] = []
    chosen: list[list[int]] = []  # for every token its experts, best first
    for s in range(num_tokens):
        logits_E = torch.stack([(weight_EM[e] * x_SM[s]).sum() for e in range(num_experts)])
        exp_E = torch.exp(logits_E - logits_E.max())
        probs.append(exp_E / exp_E.sum())
        best_first = sorted(range(num_experts), key=lambda e: -probs[s][e].item())
        best_first = best_first if given is None else list(given[s])
        chosen.append(best_first[: settings.k] if used_S is None or used_S[s] else [])

    counts = [sum(e in chosen[s] for s in range(num_tokens)) for e in range(num_experts)]
    capacity = capacity_of(num_tokens, num_experts, settings) if settings.drop_tokens else None
    kept: set[tuple[int, int]] = set()
    for e in range(num_experts):
        kept.update((s, e) for s in _queue(e, probs, chosen, settings, priority_SE)[:capacity])

    weights: dict[tuple[int, int], torch.Tensor] = {}
    for s in range(num_tokens):
        mine = [e for e in chosen[s] if (s, e) in kept]
        for e in mine:
            weights[s, e] = probs[s][e]
            if settings.k > 1:
                total = sum(probs[s][other] for other in mine)
                weights[s, e] = probs[s][e] / torch.clamp(total, min=torch.finfo(total.dtype).eps)
    return RankRouting(weights, _aux_loss(probs, chosen, settings.k), counts, capacity)


def _queue(
    e: int,
    probs: list[torch.Tensor],
    chosen: list[list[int]],
    settings: LayerSettings,
    priority_SE: torch.Tensor | None,
) -> list[int]:
    """The tokens that chose expert e, those that stay longest first."""
    waiting = [s for s in range(len(chosen)) if e in chosen[s]]
    if settings.k == 1 and settings.drop_tokens:
        assert priority_SE is not None, "k = 1 with dropping: the caller says who stays"
        return sorted(waiting, key=lambda s: -priority_SE[s, e].item())
    if settings.k == 2:
        return [s for s in waiting if chosen[s][0] == e] + [s for s in waiting if chosen[s][1] == e]
    if settings.k > 2 and settings.drop_policy == "probs":
        return sorted(waiting, key=lambda s: -probs[s][e].item())
    return waiting


def _aux_loss(probs: list[torch.Tensor], chosen: list[list[int]], k: int) -> torch.Tensor:
    """The load-balancing loss. For k = 2 only first choices count as load."""
    num_tokens, num_experts = len(probs), probs[0].shape[0]
    total = torch.zeros((), dtype=probs[0].dtype)
    for e in range(num_experts):
        mean_prob = sum(probs[s][e] for s in range(num_tokens)) / num_tokens
        load = sum(e in (chosen[s][:1] if k == 2 else chosen[s]) for s in range(num_tokens)) / num_tokens
        total = total + mean_prob * load
    if k == 1:
        return total * num_experts
    mean_over_experts = total / num_experts
    return mean_over_experts * num_experts**2 / (1 if k == 2 else k)


def moe_layer(
    x_per_rank: Sequence[torch.Tensor],
    weight_EM: torch.Tensor,
    experts: Sequence[Callable[[torch.Tensor], torch.Tensor]],
    settings: LayerSettings,
    used_per_rank: Sequence[Sequence[bool] | None] | None = None,
    priority_per_rank: Sequence[torch.Tensor | None] | None = None,
) -> list[RankResult]:
    """The whole layer, for all ranks: each rank's tokens are routed by themselves, the experts are shared.

    Args:
        x_per_rank: one [S, M] per rank; S may differ.
        weight_EM: [E, M], the same on all ranks.
        experts: E callables from [1, M] to [1, M].
        settings: as for :func:`route`.
        used_per_rank, priority_per_rank: as for :func:`route`, one per rank.
    """
    results = []
    for rank, x_SM in enumerate(x_per_rank):
        used_S = used_per_rank[rank] if used_per_rank else None
        priority_SE = priority_per_rank[rank] if priority_per_rank else None
        routing = route(x_SM, weight_EM, settings, used_S, priority_SE)
        rows = []
        for s in range(x_SM.shape[0]):
            row_1M = torch.zeros(1, x_SM.shape[1], dtype=x_SM.dtype)
            for e, expert in enumerate(experts):
                if (s, e) in routing.weights:
                    row_1M = row_1M + routing.weights[s, e] * expert(x_SM[s : s + 1])
            rows.append(row_1M)
        results.append(RankResult(torch.cat(rows), routing.aux_loss, routing.counts_E))
    return results
