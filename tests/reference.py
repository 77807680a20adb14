# SPDX-License-Identifier: Apache-2.0
"""The oracle: a whole MoE layer as a plain loop over tokens, in one process, in the precision of its inputs.

Nothing here is shared with the package. The formulas are those of the sources (Switch Transformer for k = 1, GShard for
k = 2, DeepSpeed's top-k for more), written down so that one can check them by reading.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Formula:
    """What the layer is to compute."""

    k: int
    capacity_factor: float = 1.0
    min_capacity: int = 0
    drop_tokens: bool = True
    drop_policy: str = "probs"


@dataclass(frozen=True)
class Answer:
    """What it has to come to, for one rank's tokens."""

    output_SM: torch.Tensor
    aux_loss: torch.Tensor
    counts_E: list[int]
    kept: list[tuple[int, int]]
    """(token, expert) of every choice that found a slot."""


def capacity(num_tokens: int, num_experts: int, formula: Formula) -> int:
    """Slots per expert; the product is taken in float32, the way stock does."""
    if not formula.drop_tokens:
        return num_tokens
    share = np.float32(formula.capacity_factor * formula.k) * np.float32(num_tokens / num_experts)
    return max(math.ceil(share), formula.min_capacity)


def moe_layer(
    x_SM: torch.Tensor,
    weight_EM: torch.Tensor,
    experts: Sequence[Callable[[torch.Tensor], torch.Tensor]],
    formula: Formula,
    kept_by_k1: Sequence[int] | None = None,
) -> Answer:
    """One rank's tokens through the layer; every expert is at hand.

    Args:
        x_SM: the rank's tokens.
        weight_EM: the router.
        experts: each from [M] to [M].
        formula: k, capacity, dropping.
        kept_by_k1: for k = 1 with dropping, the tokens that stay: which ones do is a matter of ties (or of chance)
            and no formula. Everything else about them is computed here.
    """
    num_tokens, num_experts = len(x_SM), len(experts)
    slots = capacity(num_tokens, num_experts, formula)
    probs = [torch.softmax(weight_EM @ x_SM[s], dim=0) for s in range(num_tokens)]
    ranked = [sorted(range(num_experts), key=lambda e, s=s: -probs[s][e].item()) for s in range(num_tokens)]
    choices = [ranked[s][: formula.k] for s in range(num_tokens)]

    counts = [0] * num_experts
    for s in range(num_tokens):
        for e in choices[s]:
            counts[e] += 1

    kept: list[tuple[int, int]] = []
    if formula.k == 1:
        staying = range(num_tokens) if kept_by_k1 is None else kept_by_k1
        kept = [(s, choices[s][0]) for s in staying]
    elif formula.k == 2:
        taken = [0] * num_experts
        for choice in range(2):  # every first choice queues before any second choice
            for s in range(num_tokens):
                e = choices[s][choice]
                if taken[e] < slots:
                    kept.append((s, e))
                taken[e] += 1
    else:
        for e in range(num_experts):
            wanting = [s for s in range(num_tokens) if e in choices[s]]
            if formula.drop_policy == "probs":
                wanting.sort(key=lambda s, e=e: -probs[s][e].item())
            kept += [(s, e) for s in wanting[:slots]]

    output = []
    for s in range(num_tokens):
        own = [e for token, e in kept if token == s]
        # Of what was kept; not below the precision, so a token left with a choice it hardly wanted stays small.
        total = sum((probs[s][e] for e in own), torch.zeros((), dtype=x_SM.dtype))
        total = total.clamp(min=torch.finfo(x_SM.dtype).eps)
        row = torch.zeros_like(x_SM[s])
        for e in own:
            weight = probs[s][e] if formula.k == 1 else probs[s][e] / total
            row = row + weight * experts[e](x_SM[s])
        output.append(row)

    # The balance term looks at first choices for k <= 2, and at all k choices beyond.
    looked_at = 1 if formula.k <= 2 else formula.k
    aux_loss = torch.zeros((), dtype=x_SM.dtype)
    for e in range(num_experts):
        mean_prob = sum(probs[s][e] for s in range(num_tokens)) / num_tokens
        share = sum(e in choices[s][:looked_at] for s in range(num_tokens)) / num_tokens
        aux_loss = aux_loss + num_experts * mean_prob * share / looked_at
    return Answer(torch.stack(output), aux_loss, counts, kept)
