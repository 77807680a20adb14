# SPDX-License-Identifier: Apache-2.0
"""What all gates have in common in which each token chooses its experts.

Scores -> the k best experts of each token -> who stays in a full expert -> slots, weights, counts, losses. A gate says
how experts are scored and what a choice weighs; the rest is here. Nothing goes over single tokens, and nothing waits
for the device but the size of a capacity that drops nothing.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn

from ds_fsmoe.components.gate import dropless_capacity, dropping_capacity
from ds_fsmoe.components.gate_settings import CapacitySettings, SettingsGate, option
from ds_fsmoe.components.router import which_are_used, without_autocast
from ds_fsmoe.components.routing import Routing


@dataclass(frozen=True)
class ChoiceSettings(CapacitySettings):
    """And what the auxiliary loss is made of; a model multiplies it with a factor of its own on top."""

    balance_loss_factor: float = option(1.0, least=0)
    """Of ``E / k * sum_e(share of tokens that chose e * mean probability of e)``, which is 1 in balance."""
    z_loss_factor: float = option(0.0, least=0)
    """Of ``mean(logsumexp(logits) ** 2)``, which keeps the router's logits small (ST-MoE)."""


@dataclass(frozen=True)
class Scores:
    """What a router thinks of every expert for every token."""

    logits_SE: torch.Tensor
    """[S, E], before softmax or sigmoid."""
    affinity_SE: torch.Tensor
    """[S, E], positive. A full expert keeps the tokens in which it is largest, and a token's affinities, over their
    sum, are the probabilities of the balance loss."""
    preference_SE: torch.Tensor | None = None
    """[S, E], of which a token takes the k largest; ``None``: of the logits."""


class TokenChoiceGate(SettingsGate):
    """A gate with one matrix ``wg`` [E, M] (unless it builds something else) in which each token chooses.

    A subclass defines :meth:`score`, and :meth:`weigh` if a choice weighs something else than its affinity.
    Tokens that take no part (``used_token_S``) have no say in the losses either.
    """

    Settings: ClassVar[type[ChoiceSettings]] = ChoiceSettings
    settings: ChoiceSettings

    def build(self, model_dim: int, num_experts: int) -> None:
        self.check_k(num_experts)
        if self.settings.k == 1 and self.weights_sum_to_1():
            warnings.warn(
                f"{type(self).__name__}: with k = 1 every weight is 1, because the weights of a token sum to 1: the "
                "router learns from its auxiliary loss alone; use k >= 2, or another gate",
                stacklevel=2,
            )
        self.wg = nn.Linear(model_dim, num_experts, bias=False)

    def weights_sum_to_1(self) -> bool:
        """Whether the weights of a token's k choices do, whatever the scores are."""
        return False

    def score(self, x_SM: torch.Tensor) -> Scores:
        """Score the experts; called with autocast switched off.

        Args:
            x_SM: [S, M], float32 or float64, in which the arithmetic is to be as well.
        """
        raise TypeError(f"{type(self).__name__} must define score(x_SM)")

    def weigh(self, scores: Scores, expert_SK: torch.Tensor) -> torch.Tensor:
        """[S, K]: what the chosen experts' outputs are multiplied with, if they have room for the token."""
        return scores.affinity_SE.gather(1, expert_SK)

    def forward(
        self,
        x_SM: torch.Tensor,
        used_token_S: torch.Tensor | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> Routing:
        used_S = which_are_used(used_token_S, x_SM.shape[0])
        with without_autocast(x_SM.device):
            scores = self.score(x_SM.to(torch.promote_types(x_SM.dtype, torch.float32)))
            preference_SE = scores.logits_SE if scores.preference_SE is None else scores.preference_SE
            expert_SK = torch.topk(preference_SE.detach(), self.settings.k, dim=1).indices
            chosen_SE = mask_chosen(expert_SK, preference_SE.shape[1], used_S)
            counts_E = chosen_SE.sum(dim=0)
            capacity = capacity_of(counts_E, x_SM.shape[0], self.settings, self.training, group)
            kept_SE = chosen_SE
            if self.settings.drop_tokens and self.settings.drop_policy == "probs":
                competing_SE = scores.affinity_SE.detach().masked_fill(~chosen_SE, float("-inf"))
                kept_SE = keep_largest(chosen_SE, competing_SE, capacity)
            kept_SE, slots_KS = place(expert_SK, kept_SE, capacity)
            weights_SK = self.weigh(scores, expert_SK)
            return Routing(
                slots_KS=slots_KS,
                weights_KS=weights_SK.masked_fill(~kept_SE.gather(1, expert_SK), 0.0).t().contiguous(),
                aux_loss=_aux_loss(scores, chosen_SE, used_S, self.settings),
                counts_E=counts_E,
                capacity=capacity,
                num_experts=preference_SE.shape[1],
            )


def mask_chosen(expert_SK: torch.Tensor, num_experts: int, used_S: torch.Tensor | None) -> torch.Tensor:
    """[S, E] bool: which experts each token chose; tokens that take no part chose none."""
    chosen_SE = torch.zeros(len(expert_SK), num_experts, dtype=torch.bool, device=expert_SK.device)
    chosen_SE.scatter_(1, expert_SK, True)
    return chosen_SE if used_S is None else chosen_SE & used_S.unsqueeze(1)


def capacity_of(
    counts_E: torch.Tensor,
    num_tokens: int,
    settings: CapacitySettings,
    training: bool,
    group: dist.ProcessGroup | None,
) -> int:
    """C: by the factor in force, or as the fullest expert of all ranks of ``group`` needs it (then it is a wait)."""
    if not settings.drop_tokens:
        return dropless_capacity(counts_E, group)
    factor = settings.factor(training) * settings.k
    return dropping_capacity(num_tokens, counts_E.numel(), factor, settings.min_capacity)


def keep_largest(chosen_SE: torch.Tensor, competing_SE: torch.Tensor, capacity: int) -> torch.Tensor:
    """[S, E] bool: of the choices of each expert at most ``capacity``, those for which ``competing_SE`` is largest.

    Args:
        chosen_SE: [S, E] bool.
        competing_SE: [S, E], smaller where nothing was chosen than where something was.
        capacity: C.
    """
    staying_CE = torch.topk(competing_SE, k=min(capacity, len(competing_SE)), dim=0, sorted=False).indices
    return chosen_SE & torch.zeros_like(chosen_SE).scatter_(0, staying_CE, True)


def place(expert_SK: torch.Tensor, kept_SE: torch.Tensor, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Give slots to choices: within an expert in the order of the tokens. Who comes after C others is dropped.

    Args:
        expert_SK: [S, K] int64, the experts that each token chose.
        kept_SE: [S, E] bool, the choices that are still in.
        capacity: C.

    Returns:
        [S, E] bool, the choices that have a slot; [K, S] int64, the slots as a :class:`Routing` has them.
    """
    num_experts = kept_SE.shape[1]
    position_SE = torch.cumsum(kept_SE, dim=0) - 1
    kept_SE = kept_SE & (position_SE < capacity)
    kept_KS, position_KS = kept_SE.gather(1, expert_SK).t(), position_SE.gather(1, expert_SK).t()
    return kept_SE, slots_of(expert_SK.t(), position_KS, kept_KS, num_experts, capacity)


def slots_of(
    expert_KS: torch.Tensor, position_KS: torch.Tensor, kept_KS: torch.Tensor, num_experts: int, capacity: int
) -> torch.Tensor:
    """[K, S] int64: ``expert * C + position``, or ``E * C`` for what was not kept."""
    return torch.where(kept_KS, expert_KS * capacity + position_KS, num_experts * capacity)


def _aux_loss(
    scores: Scores, chosen_SE: torch.Tensor, used_S: torch.Tensor | None, settings: ChoiceSettings
) -> torch.Tensor:
    """The losses that the settings ask for, each with its factor, as a mean over the tokens that take part."""
    logits_SE = scores.logits_SE
    loss = logits_SE.new_zeros(())
    if settings.balance_loss_factor:
        probs_SE = scores.affinity_SE / scores.affinity_SE.sum(dim=1, keepdim=True)
        share_E = _mean(chosen_SE.to(logits_SE.dtype), used_S)
        balance = (_mean(probs_SE, used_S) * share_E).sum() * chosen_SE.shape[1] / settings.k
        loss = loss + settings.balance_loss_factor * balance
    if settings.z_loss_factor:
        loss = loss + settings.z_loss_factor * _mean(torch.logsumexp(logits_SE, dim=1).square(), used_S)
    return loss


def _mean(values_S: torch.Tensor, used_S: torch.Tensor | None) -> torch.Tensor:
    """Over the first dimension, as far as it is used; 0 where nothing is."""
    if used_S is None:
        return values_S.sum(dim=0) / max(len(values_S), 1)
    masked_S = values_S.masked_fill(~used_S.view(-1, *[1] * (values_S.dim() - 1)), 0.0)
    return masked_S.sum(dim=0) / used_S.sum().clamp(min=1)
