# SPDX-License-Identifier: Apache-2.0
"""The gate of stock DeepSpeed: top-1, top-2 and top-k of a linear router, number for number.

Stock uses three formulas, for k = 1, k = 2 and k >= 3, with a fixed order of random draws. They come from Switch
Transformer and GShard. This module reproduces all three, without waiting for the device when tokens are dropped.
Converted layers of stock call :func:`route_top_k`; :class:`LinearGate` is the gate for other layers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ds_fsmoe.components.gate import (
    CapacitySettings,
    OptionError,
    SettingsGate,
    entropy_of,
    takes_options_of,
    which_are_used,
)
from ds_fsmoe.components.routing import ReplayedRouting, Routing
from ds_fsmoe.components.token_choice import best_slots, first_capacity, last_capacity
from ds_fsmoe.ops import REFERENCE, Ops
from ds_fsmoe.ops.reference import Slots
from ds_fsmoe.registry import register_gate

_JITTER = 1e-2  # inputs of the router are scaled by a factor in 1 +- this


@dataclass(frozen=True, kw_only=True)
class TopKSettings(CapacitySettings):
    """Holds the constants of a top-k decision. Defaults are those of ``deepspeed.moe.layer.MoE``.

    ``drop_policy`` is for k >= 3; for k = 1 and k = 2 each formula has its own rule.
    """

    noisy_gate_policy: str | None = None
    """``"Jitter"`` scales the router's input by a random factor near 1, ``"RSample"`` (k = 1) adds Gumbel noise."""
    use_rts: bool = True
    """k = 1: a full expert keeps random tokens; if false, those that ``torch.topk`` returns among ties."""
    top2_2nd_expert_sampling: bool = True
    """k = 2: the second expert is sampled (Gumbel noise on the logits) instead of being the second best."""

    def check(self, owner: str) -> None:
        super().check(owner)
        if self.noisy_gate_policy not in (None, "None", "Jitter", "RSample"):
            problem = "choose from None, 'Jitter', 'RSample'"
            raise OptionError(owner, "noisy_gate_policy", self.noisy_gate_policy, problem)


@register_gate("topk")
class LinearGate(SettingsGate):
    """Scores experts by one matrix ``wg`` [E, M]; each token takes its k best, as in DeepSpeed's own layers.

    Called with x_SM [S, M], it returns a :class:`Routing` of K = k choices for each of the S tokens.

    Options that are not listed here are those of :class:`TokenChoiceGate`.

    Args:
        k: experts per token.
        drop_policy: see there; for k >= 3 only, as the formulas for k = 1 and k = 2 have their own rules.
        noisy_gate_policy: ``"Jitter"`` scales the router's input by a random factor near 1, ``"RSample"`` (k = 1) adds
            Gumbel noise.
        use_rts: k = 1: a full expert keeps random tokens; if false, those that ``torch.topk`` returns among ties.
        top2_2nd_expert_sampling: k = 2: the second expert is sampled (Gumbel noise on the logits) instead of being the
            second best.

    Raises:
        ValueError: an unknown option, or a value that the option does not allow; the message says what is allowed.

    Examples:
        >>> import torch, ds_fsmoe
        >>> gate = ds_fsmoe.LinearGate(k=2, capacity_factor=1.25)
        >>> gate.build_once(model_dim=8, num_experts=4)
        >>> gate(torch.randn(6, 8)).weights_KS.shape
        torch.Size([2, 6])
    """

    takes_given = True
    Settings = TopKSettings
    settings: TopKSettings

    @takes_options_of(TopKSettings)
    def __init__(self) -> None: ...

    def build(self, model_dim: int, num_experts: int) -> None:
        self.check_k(num_experts)
        self.wg = nn.Linear(model_dim, num_experts, bias=False)

    def forward(
        self,
        x_SM: torch.Tensor,
        used_token_S: torch.Tensor | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> Routing:
        options = {"ops": self.ops, "says_entropy": self.says_entropy, "needs_capacity": self.needs_capacity}
        options |= {"given": self.given}
        return route_top_k(x_SM, self.wg.weight, self.settings, self.training, used_token_S, group, **options)


def route_top_k(
    x_SM: torch.Tensor,
    weight_EM: torch.Tensor,
    settings: TopKSettings,
    training: bool,
    used_token_S: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    ops: Ops = REFERENCE,
    says_entropy: bool = False,
    needs_capacity: bool = True,
    given: ReplayedRouting | None = None,
) -> Routing:
    """Route tokens by a router matrix: score, choose and drop, as a function for modules that own the matrix.

    Args:
        x_SM: [S, M] tokens of any float type; the router computes in float32 (float64 for float64 tokens).
        weight_EM: [E, M].
        settings: the formula's constants.
        training: chooses the capacity factor and switches the router's noise.
        used_token_S: [S], nonzero for tokens that take part (others take no slot); ``None`` means all.
        group: the ranks over which a dropless capacity is agreed.
        ops: the operators to use.
        says_entropy: whether the routing contains the router's entropy.
        needs_capacity: see :attr:`~ds_fsmoe.components.gate.GateBase.needs_capacity`.
        given: the choice to replay, of k experts for each token.

    Raises:
        ValueError: a mask of another length than the tokens.
    """
    router_dtype = torch.promote_types(x_SM.dtype, torch.float32)
    x_SM = x_SM.to(router_dtype)
    noise = settings.noisy_gate_policy if training else None
    if noise == "Jitter":
        x_SM = x_SM * _uniform_like(x_SM, 1.0 - _JITTER, 1.0 + _JITTER)
    logits_SE = F.linear(x_SM, weight_EM.to(router_dtype))
    used_S = which_are_used(used_token_S, len(x_SM))
    settings = replace(settings, noisy_gate_policy=noise)
    probs_SE = F.softmax(logits_SE, dim=1)
    num_experts = probs_SE.shape[1]
    capacity = first_capacity(*probs_SE.shape, settings, training)
    choose = {1: _choose_1, 2: _choose_2}.get(settings.k, _choose_more)
    slots, aux_loss = choose(logits_SE, probs_SE, settings, capacity, used_S, ops, given)
    slots, capacity = last_capacity(slots, capacity, settings, group, needs_capacity, given)
    expert_SK = slots.experts_KS.t()
    weights_KS = probs_SE.gather(1, expert_SK).t().masked_fill(slots.slots_KS == num_experts * capacity, 0.0)
    smallest = torch.finfo(probs_SE.dtype).eps
    if settings.k == 2:
        weights_KS = weights_KS / torch.clamp(weights_KS[0] + weights_KS[1], min=smallest)
    elif settings.k > 2:
        # Summed over all E columns, zeros included, and so is the gradient, because the order of a sum is part of
        # stock's last bit.
        weights_SE = torch.zeros_like(probs_SE).scatter(1, expert_SK, weights_KS.t())
        total_S1 = torch.clamp(weights_SE.sum(dim=1, keepdim=True), min=smallest)
        weights_KS = (weights_SE / total_S1).gather(1, expert_SK).t()
    return Routing(
        slots.slots_KS,
        weights_KS.contiguous(),
        aux_loss,
        slots.counts_E,
        capacity,
        num_experts,
        entropy_of(probs_SE, used_S) if says_entropy else None,
        slots.experts_KS,
    )


def _uniform_like(x: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Draw float32 numbers in [low, high), equal to those of ``torch.distributions.Uniform`` with float32 bounds."""
    low_32, width_32 = _bounds(low, high)
    return torch.rand(x.shape, dtype=torch.float32, device=x.device).mul_(width_32).add_(low_32)


@functools.lru_cache(maxsize=16)
def _bounds(low: float, high: float) -> tuple[float, float]:
    """Return the lower bound and the width in float32; the difference of the bounds is rounded to float32 too."""
    low_32, high_32 = torch.tensor([low, high], dtype=torch.float32, device="cpu")
    return float(low_32), float(high_32 - low_32)


def _gumbel_like(logits_SE: torch.Tensor) -> torch.Tensor:
    """Draw float32 Gumbel noise [S, E], equal to that of ``torch.distributions.Gumbel(0, 1)``."""
    info = torch.finfo(torch.float32)
    uniform_SE = _uniform_like(logits_SE, info.tiny, 1 - info.eps)
    return uniform_SE.log_().neg_().log_().neg_()


def _scores(probs_SE: torch.Tensor) -> torch.Tensor:
    """Return probabilities in a dtype that the operators accept: under autocast they may be narrower than float32."""
    return probs_SE.detach().to(torch.promote_types(probs_SE.dtype, torch.float32))


def _share_E(expert_KS: torch.Tensor, probs_SE: torch.Tensor, used_S: torch.Tensor | None) -> torch.Tensor:
    """Return the share of tokens that chose each expert, [E], in float32 or wider."""
    num_tokens, num_experts = probs_SE.shape
    dtype = torch.promote_types(probs_SE.dtype, torch.float32)
    ones_KS = probs_SE.new_ones(expert_KS.shape, dtype=dtype)
    chosen_KS = ones_KS if used_S is None else ones_KS * used_S
    counts_E = probs_SE.new_zeros(num_experts, dtype=dtype)
    return counts_E.scatter_add(0, expert_KS.reshape(-1), chosen_KS.reshape(-1)) / num_tokens


def _choose_1(
    logits_SE: torch.Tensor,
    probs_SE: torch.Tensor,
    settings: TopKSettings,
    capacity: int,
    used_S: torch.Tensor | None,
    ops: Ops,
    replayed: ReplayedRouting | None,
) -> tuple[Slots, torch.Tensor]:
    """Return slots and loss of Switch Transformer's gate. The weight is the chosen expert's probability, not
    renormalised."""
    num_tokens, num_experts = probs_SE.shape
    # The noise is drawn first and the token selection later: this is the order of the random stream in stock.
    is_noisy = settings.noisy_gate_policy == "RSample"
    expert_S = torch.argmax(logits_SE + _gumbel_like(logits_SE) if is_noisy else probs_SE, dim=1)
    expert_KS = expert_S.unsqueeze(0) if replayed is None else replayed.completed(lambda: expert_S.unsqueeze(0))
    aux_loss = torch.sum(probs_SE.mean(dim=0) * _share_E(expert_KS, probs_SE, used_S)) * num_experts
    # A full expert keeps the `capacity` largest of a random number per (token, expert), or of the bare 0/1 mask. Ties
    # in the bare mask are broken by topk, as in stock.
    if settings.use_rts:
        precedence_SE = torch.rand(probs_SE.shape, dtype=torch.float32, device=probs_SE.device)
    else:
        chosen_SE = torch.zeros_like(probs_SE).scatter_(1, expert_KS.t(), 1.0)
        chosen_SE = chosen_SE if used_S is None else chosen_SE * used_S.unsqueeze(1)
        staying_CE = torch.topk(chosen_SE, k=min(capacity, num_tokens), dim=0).indices
        precedence_SE = _scores(torch.zeros_like(chosen_SE)).scatter_(0, staying_CE, 1.0)
    precedence_KS = precedence_SE.gather(1, expert_KS.t()).t()
    return ops.take_slots(expert_KS, num_experts, capacity, used_S, "score", precedence_KS), aux_loss


def _choose_2(
    logits_SE: torch.Tensor,
    probs_SE: torch.Tensor,
    settings: TopKSettings,
    capacity: int,
    used_S: torch.Tensor | None,
    ops: Ops,
    replayed: ReplayedRouting | None,
) -> tuple[Slots, torch.Tensor]:
    """Return slots and loss of GShard's gate: second choices queue behind all first choices.

    Weights are renormalised over the kept choices.
    """
    num_experts = probs_SE.shape[1]
    first_S = torch.argmax(probs_SE, dim=1)
    scores_SE = logits_SE.detach()
    if settings.top2_2nd_expert_sampling:
        scores_SE = scores_SE + _gumbel_like(logits_SE)
    second_S = torch.argmax(scores_SE.scatter(1, first_S.unsqueeze(1), float("-inf")), dim=1)
    expert_KS = torch.stack([first_S, second_S])
    if replayed is not None:
        expert_KS = replayed.completed(lambda: torch.stack([first_S, second_S])).contiguous()
    share_E = _share_E(expert_KS[0], probs_SE, used_S)
    aux_loss = torch.mean(probs_SE.mean(dim=0) * share_E) * num_experts * num_experts
    return ops.take_slots(expert_KS, num_experts, capacity, used_S, "choice"), aux_loss


def _choose_more(
    logits_SE: torch.Tensor,
    probs_SE: torch.Tensor,
    settings: TopKSettings,
    capacity: int,
    used_S: torch.Tensor | None,
    ops: Ops,
    replayed: ReplayedRouting | None,
) -> tuple[Slots, torch.Tensor]:
    """Return slots and loss for k >= 3: a full expert keeps its most probable tokens, or the first ones.

    Weights are renormalised over the kept choices.
    """
    num_experts = probs_SE.shape[1]
    slots = best_slots(ops, _scores(probs_SE), settings.k, capacity, used_S, replayed)
    expert_KS = slots.experts_KS
    if settings.drop_tokens and settings.drop_policy == "probs":
        best_KS = _scores(probs_SE).gather(1, expert_KS.t()).t()
        slots = ops.take_slots(expert_KS, num_experts, capacity, used_S, "score", best_KS)
    balance_E = probs_SE.mean(dim=0) * _share_E(expert_KS, probs_SE, used_S)
    return slots, torch.mean(balance_E) * num_experts * num_experts / settings.k
