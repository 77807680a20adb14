# SPDX-License-Identifier: Apache-2.0
"""The common part of gates in which each token chooses its experts.

It chooses the k best experts of each token, and drops tokens of full experts. It returns slots, weights, counts and
losses. A gate defines the scores of experts and the weight of a choice. No loop runs over tokens, and the
host waits for the device only for the size of a dropless capacity.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn

from ds_fsmoe.components.gate import (
    CapacitySettings,
    SettingsGate,
    dropless_capacity,
    dropping_capacity,
    entropy_of,
    mean_over_used,
    option,
    takes_options_of,
    which_are_used,
    without_autocast,
)
from ds_fsmoe.components.routing import ReplayedRouting, Routing
from ds_fsmoe.ops import Ops
from ds_fsmoe.ops.reference import Slots, with_capacity


@dataclass(frozen=True, kw_only=True)
class ChoiceSettings(CapacitySettings):
    """Holds the options of the capacity, and the factors of the auxiliary losses. The model multiplies these losses by
    its own factor."""

    balance_loss_factor: float = option(1.0, least=0)
    """Factor of ``E / k * sum_e(share of tokens that chose e * mean probability of e)``, which is 1 in balance."""
    z_loss_factor: float = option(0.0, least=0)
    """Factor of ``mean(logsumexp(logits) ** 2)``, which keeps the router's logits small (ST-MoE)."""


@dataclass(frozen=True)
class Scores:
    """Holds a router's scores of every expert for every token."""

    logits_SE: torch.Tensor
    """[S, E], before softmax or sigmoid."""
    affinity_SE: torch.Tensor
    """[S, E], positive. A full expert keeps the tokens with the largest affinity. Divided by their sum, a token's
    affinities are the probabilities of the balance loss."""
    preference_SE: torch.Tensor | None = None
    """[S, E]: a token chooses the k largest; ``None``: the k largest logits."""


class TokenChoiceGate(SettingsGate):
    """A gate in which each token chooses, with one matrix ``wg`` [E, M] unless a subclass builds something else.

    A subclass defines :meth:`score`, and :meth:`weigh` if a choice's weight is not its affinity. Tokens that take no
    part (``used_token_S``) do not count in the losses. Called with x_SM [S, M], it returns a :class:`Routing` of K = k
    choices for each of the S tokens.

    Args:
        k: experts per token.
        capacity_factor: slots per expert over the mean number of choices, in training; ``None``: nothing is dropped.
        eval_capacity_factor: the same in evaluation.
        min_capacity: minimum number of slots per expert.
        drop_tokens: ``False``: as many slots as the fullest expert of all ranks needs.
        drop_policy: the tokens that a full expert keeps: ``"probs"``, those with the largest affinity, or
            ``"position"``, the first ones.
        balance_loss_factor: factor of ``E / k * sum_e(share of tokens that chose e * mean probability of e)``, which is
            1 in balance. A model multiplies the whole auxiliary loss by its own factor.
        z_loss_factor: factor of ``mean(logsumexp(logits) ** 2)``, which keeps the router's logits small (ST-MoE).

    Raises:
        ValueError: an unknown option, or a value that the option does not allow; the message says what is allowed.

    Examples:
        >>> import torch, ds_fsmoe
        >>> from ds_fsmoe.components.token_choice import Scores
        >>> class Softplus(ds_fsmoe.TokenChoiceGate):
        ...     def score(self, x_SM):
        ...         logits_SE = x_SM @ self.wg.weight.t()
        ...         return Scores(logits_SE, torch.nn.functional.softplus(logits_SE))
        >>> gate = Softplus(k=2, capacity_factor=1.25)
        >>> gate.build_once(model_dim=8, num_experts=4)
        >>> gate(torch.randn(6, 8)).weights_KS.shape
        torch.Size([2, 6])
    """

    takes_given = True
    Settings: ClassVar[type[ChoiceSettings]] = ChoiceSettings
    settings: ChoiceSettings

    @takes_options_of(ChoiceSettings)
    def __init__(self) -> None: ...

    def build(self, model_dim: int, num_experts: int) -> None:
        self.check_k(num_experts)
        if self.settings.k == 1 and self.weights_sum_to_1():
            warnings.warn(
                f"{type(self).__name__}: with k = 1 every weight is 1 (they sum to 1): only auxiliary losses train it; "
                "use k >= 2 or another gate",
                stacklevel=2,
            )
        self.wg = nn.Linear(model_dim, num_experts, bias=False)

    def weights_sum_to_1(self) -> bool:
        """Return True if the weights of a token's k choices sum to 1 for any scores."""
        return False

    def score(self, x_SM: torch.Tensor) -> Scores:
        """Score the experts for each token; called with autocast off.

        Args:
            x_SM: [S, M], float32 or float64; the computation must use the same dtype.
        """
        raise TypeError(f"{type(self).__name__} must define score(x_SM)")

    def weigh(self, scores: Scores, expert_SK: torch.Tensor) -> torch.Tensor:
        """Return the weights of the chosen experts' outputs, [S, K]; the caller sets those of dropped choices to 0.

        Args:
            scores: the result of :meth:`score`.
            expert_SK: [S, K] int64, the chosen experts of each token, the best first.
        """
        return scores.affinity_SE.gather(1, expert_SK)

    def forward(
        self,
        x_SM: torch.Tensor,
        used_token_S: torch.Tensor | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> Routing:
        settings = self.settings
        used_S = which_are_used(used_token_S, x_SM.shape[0])
        with without_autocast(x_SM.device):
            scores = self.score(x_SM.to(torch.promote_types(x_SM.dtype, torch.float32)))
            preference_SE = scores.logits_SE if scores.preference_SE is None else scores.preference_SE
            num_tokens, num_experts = preference_SE.shape
            capacity = first_capacity(num_tokens, num_experts, settings, self.training)
            slots = best_slots(self.ops, preference_SE.detach(), settings.k, capacity, used_S, self.given)
            if settings.drop_tokens and settings.drop_policy == "probs":
                affinity_KS = scores.affinity_SE.detach().gather(1, slots.experts_KS.t()).t()
                slots = self.ops.take_slots(slots.experts_KS, num_experts, capacity, used_S, "score", affinity_KS)
            slots, capacity = last_capacity(slots, capacity, settings, group, self.needs_capacity, self.given)
            weights_KS = self.weigh(scores, slots.experts_KS.t()).t()
            is_dropped_KS = slots.slots_KS == num_experts * capacity
            return Routing(
                slots_KS=slots.slots_KS,
                weights_KS=weights_KS.masked_fill(is_dropped_KS, 0.0).contiguous(),
                aux_loss=_aux_loss(scores, slots.counts_E, used_S, settings),
                counts_E=slots.counts_E,
                capacity=capacity,
                num_experts=num_experts,
                entropy=entropy_of(scores.affinity_SE, used_S) if self.says_entropy else None,
                experts_KS=slots.experts_KS,
            )


def first_capacity(num_tokens: int, num_experts: int, settings: CapacitySettings, training: bool) -> int:
    """Return C from the capacity factor; if nothing is dropped, return S, which :func:`last_capacity` reduces."""
    if not settings.drop_tokens:
        return num_tokens
    return dropping_capacity(num_tokens, num_experts, settings.factor(training) * settings.k, settings.min_capacity)


def best_slots(
    ops: Ops, scores_SE: torch.Tensor, k: int, capacity: int, used_S: torch.Tensor | None, given: ReplayedRouting | None
) -> Slots:
    """Return slots for the k best experts of each token, or for replayed ones, in the order of the tokens.

    Args:
        ops: the operators to use.
        scores_SE: [S, E], the higher the better.
        k: the choices of a token.
        capacity: C.
        used_S: [S] booleans, or ``None``.
        given: the choice to replay.
    """
    if given is None:
        return ops.top_k_slots(scores_SE, k, capacity, used_S, "token")

    def own_KS() -> torch.Tensor:
        return ops.top_k_slots(scores_SE, k, capacity, used_S, "token").experts_KS

    return ops.take_slots(given.completed(own_KS).contiguous(), scores_SE.shape[1], capacity, used_S, "token")


def last_capacity(
    slots: Slots,
    capacity: int,
    settings: CapacitySettings,
    group: dist.ProcessGroup | None,
    needs_capacity: bool = True,
    given: ReplayedRouting | None = None,
) -> tuple[Slots, int]:
    """Return the final slots and capacity; if no token is dropped, what the fullest expert of all ranks needs.

    Args:
        slots: assigned with the capacity of :func:`first_capacity`.
        capacity: of :func:`first_capacity`.
        settings: of the gate.
        group: the ranks that must agree; they wait for each other, and the host for the device.
        needs_capacity: see :attr:`GateBase.needs_capacity`.
        given: the choice to replay; if it has slots, these and their capacity are returned.
    """
    if given is not None and given.slots_KS is not None and given.capacity is not None:
        return slots._replace(slots_KS=given.slots_KS), given.capacity
    if settings.drop_tokens or not needs_capacity:
        return slots, capacity
    agreed = dropless_capacity(slots.counts_E, group)
    return slots._replace(slots_KS=with_capacity(slots.slots_KS, len(slots.counts_E), capacity, agreed)), agreed


def _aux_loss(
    scores: Scores, counts_E: torch.Tensor, used_S: torch.Tensor | None, settings: ChoiceSettings
) -> torch.Tensor:
    """Return the losses of the settings, each times its factor, as a mean over the tokens that take part."""
    logits_SE = scores.logits_SE
    loss = logits_SE.new_zeros(())
    if settings.balance_loss_factor:
        probs_SE = scores.affinity_SE / scores.affinity_SE.sum(dim=1, keepdim=True)
        share_E = counts_E.to(logits_SE.dtype) / (
            max(len(probs_SE), 1) if used_S is None else used_S.sum().clamp(min=1)
        )
        balance = (mean_over_used(probs_SE, used_S) * share_E).sum() * len(counts_E) / settings.k
        loss = loss + settings.balance_loss_factor * balance
    if settings.z_loss_factor:
        loss = loss + settings.z_loss_factor * mean_over_used(torch.logsumexp(logits_SE, dim=1).square(), used_S)
    return loss
