# SPDX-License-Identifier: Apache-2.0
"""The gates, written a second time: from their formulas, token by token, with no slots in memory, no top-k or softmax.

Autograd through the loops gives the gradients to compare with. Meant for float64. Random numbers are drawn from the
seed as a gate draws them: that is all that is taken from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ds_fsmoe.components.token_choice import TokenChoiceGate


@dataclass(frozen=True)
class TokenScores:
    """Of one token, by expert: a full expert and the balance loss go by the affinity, the choice by the preference."""

    logits: list[torch.Tensor]
    affinity: list[torch.Tensor]
    preference: list[float]


@dataclass(frozen=True)
class Loop:
    """What comes out: (token, expert) of every kept choice -> its weight, the loss, and the choices of each expert."""

    weights: dict[tuple[int, int], torch.Tensor]
    aux_loss: torch.Tensor
    counts_E: list[int]


def run_loop(
    name: str,
    gate: TokenChoiceGate,
    x_SM: torch.Tensor,
    used_S: Sequence[bool] | None = None,
    seed: int = 0,
    given: Sequence[Sequence[int]] | None = None,
) -> Loop:
    """The decision of a gate on the shelf, its parameters and settings read from the module.

    ``given`` are the experts of each token, where the gate does not choose them.
    """
    settings = gate.settings
    num_tokens, width = x_SM.shape
    num_experts = gate.wg.shape[0] if name == "xmoe" else gate.wg.out_features
    torch.manual_seed(seed)
    noise_SE, jitter_SM = torch.zeros(num_tokens, num_experts), torch.ones(num_tokens, width)
    if name == "gshard" and gate.training:
        noise_SE = torch.randn(num_tokens, num_experts, dtype=x_SM.dtype)
    if name == "switch" and gate.training:
        jitter_SM = torch.empty_like(x_SM).uniform_(1 - settings.jitter, 1 + settings.jitter)
    scores = [score(name, gate, x_SM[s] * jitter_SM[s], noise_SE[s], num_experts) for s in range(num_tokens)]

    chosen = [
        sorted(range(num_experts), key=lambda e: -scores[s].preference[e])[: settings.k]
        if used_S is None or used_S[s]
        else []
        for s in range(num_tokens)
    ]
    if given is not None:
        chosen = [list(given[s]) if used_S is None or used_S[s] else [] for s in range(num_tokens)]
    waiting = [[s for s in range(num_tokens) if e in chosen[s]] for e in range(num_experts)]
    kept = set()
    for e, queue in enumerate(waiting):
        if settings.drop_tokens and settings.drop_policy == "probs":
            queue = sorted(queue, key=lambda s: -scores[s].affinity[e].item())
        factor = settings.capacity_factor if gate.training else settings.eval_capacity_factor
        capacity = max(math.ceil(num_tokens / num_experts * factor * settings.k), settings.min_capacity)
        kept |= {(s, e) for s in (queue[:capacity] if settings.drop_tokens else queue)}
    weights = {(s, e): weight(name, gate, scores[s], chosen[s], e) for s, e in kept}
    return Loop(weights, losses(scores, chosen, used_S, gate), [len(queue) for queue in waiting])


def score(name: str, gate: TokenChoiceGate, x_M: torch.Tensor, noise_E: torch.Tensor, num_experts: int) -> TokenScores:
    """The formulas of PAPER section 7, and of the models that a gate is named after."""
    if name == "xmoe":
        x_D = torch.stack([(row * x_M).sum() for row in gate.projection.weight])
        temperature = torch.exp(gate.log_temperature[0])
        logits = [
            (x_D * gate.wg[e]).sum() / (x_D.square().sum().sqrt() * gate.wg[e].square().sum().sqrt()) / temperature
            for e in range(num_experts)
        ]
    else:
        logits = [(gate.wg.weight[e] * x_M).sum() for e in range(num_experts)]
    if name == "gshard" and gate.training:
        logits = [
            logits[e] + noise_E[e] * torch.log(1 + torch.exp((gate.w_noise.weight[e] * x_M).sum()))
            for e in range(num_experts)
        ]
    if name in ("sigmoid", "deepseek"):
        affinity = [1 / (1 + torch.exp(-each)) for each in logits]
    else:
        total = sum(torch.exp(each) for each in logits)
        affinity = [torch.exp(each) / total for each in logits]
    preference = [each.item() for each in affinity]
    if name == "deepseek":
        preference = [each + bias for each, bias in zip(preference, gate.balance_bias.tolist(), strict=True)]
        preference = of_best_groups(preference, gate)
    return TokenScores(logits, affinity, preference)


def of_best_groups(preference: list[float], gate: TokenChoiceGate) -> list[float]:
    num_groups = gate.settings.num_groups
    size = len(preference) // num_groups
    best_two = [sum(sorted(preference[g * size : (g + 1) * size])[-2:]) for g in range(num_groups)]
    best = sorted(range(num_groups), key=lambda g: -best_two[g])
    kept = best[: gate.settings.kept_groups or math.ceil(num_groups / 2)]
    return [each if e // size in kept else -math.inf for e, each in enumerate(preference)]


def weight(name: str, gate: TokenChoiceGate, scores: TokenScores, chosen: list[int], e: int) -> torch.Tensor:
    """Over all chosen, those without a slot included."""
    over_chosen = scores.affinity[e] / sum(scores.affinity[other] for other in chosen)
    if name == "deepseek":
        return gate.settings.routed_scaling_factor * (
            over_chosen if gate.settings.norm_topk_prob else scores.affinity[e]
        )
    if name in ("gshard", "mixtral") or (name == "qwen" and gate.settings.norm_topk_prob):
        return over_chosen
    return scores.affinity[e]


def losses(
    scores: list[TokenScores], chosen: list[list[int]], used_S: Sequence[bool] | None, gate: TokenChoiceGate
) -> torch.Tensor:
    used = [s for s in range(len(scores)) if used_S is None or used_S[s]]
    num_experts = len(scores[0].logits)
    balance = torch.zeros((), dtype=torch.float64)
    for e in range(num_experts):
        share = sum(e in chosen[s] for s in used) / len(used)
        mean_prob = sum(scores[s].affinity[e] / sum(scores[s].affinity) for s in used) / len(used)
        balance = balance + share * mean_prob * num_experts / gate.settings.k
    z = sum(torch.log(sum(torch.exp(each) for each in scores[s].logits)) ** 2 for s in used) / len(used)
    return gate.settings.balance_loss_factor * balance + gate.settings.z_loss_factor * z


# ---- gates in which slots choose: whole layers of one rank, their numbers compared and added up one by one

Expert = Callable[[torch.Tensor], torch.Tensor]


def softmax(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Of scalars."""
    highest = max(value.item() for value in values)
    powers = [torch.exp(value - highest) for value in values]
    total = sum(powers)
    return [power / total for power in powers]


def expert_choice_layer(
    x_SM: torch.Tensor,
    weight_EM: torch.Tensor,
    experts: Sequence[Expert],
    num_taken: int,
    used_S: Sequence[bool] | None = None,
) -> tuple[torch.Tensor, list[list[int]]]:
    """Each expert takes ``num_taken`` of the tokens.

    Returns:
        The output [S, M]; for each expert its tokens, best first.
    """
    used = [token for token in range(len(x_SM)) if used_S is None or used_S[token]]
    scores = [softmax([(weight_M * x_M).sum() for weight_M in weight_EM]) for x_M in x_SM]
    rows_SM = [0 * x_M for x_M in x_SM]
    taken = []
    for number, expert in enumerate(experts):
        best_first = sorted(used, key=lambda token: -scores[token][number].item())
        taken.append(best_first[:num_taken])
        for token in taken[-1]:
            rows_SM[token] = rows_SM[token] + scores[token][number] * expert(x_SM[token : token + 1])[0]
    return torch.stack(rows_SM), taken


def softmoe_layer(
    x_SM: torch.Tensor,
    weight_RM: torch.Tensor,
    experts: Sequence[Expert],
    slots_per_expert: int,
    used_S: Sequence[bool] | None = None,
) -> torch.Tensor:
    """Each slot gets a mixture of the tokens, each token one of the slots' results; the output [S, M]."""
    used = [token for token in range(len(x_SM)) if used_S is None or used_S[token]]
    logits = {token: [(weight_M * x_SM[token]).sum() for weight_M in weight_RM] for token in used}
    results = []
    for slot in range(len(weight_RM)):
        shares = softmax([logits[token][slot] for token in used]) if used else []
        mixed_M = torch.zeros(x_SM.shape[1], dtype=x_SM.dtype)
        for token, share in zip(used, shares, strict=True):
            mixed_M = mixed_M + share * x_SM[token]
        results.append(experts[slot // slots_per_expert](mixed_M.unsqueeze(0))[0])
    rows_SM = [0 * x_M for x_M in x_SM]
    for token in used:
        for share, result_M in zip(softmax(logits[token]), results, strict=True):
            rows_SM[token] = rows_SM[token] + share * result_M
    return torch.stack(rows_SM)
