# SPDX-License-Identifier: Apache-2.0
"""The gate of stock DeepSpeed: top-1, top-2 and top-k of a linear router, number for number.

Stock uses three different formulas for k = 1, k = 2 and k >= 3 (GShard and Switch Transformer are their sources),
down to the order in which random numbers are drawn; this file reproduces all three without waiting for the device
when tokens are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ds_fsmoe.components.gate_settings import CapacitySettings, OptionError, SettingsGate
from ds_fsmoe.components.router import which_are_used
from ds_fsmoe.components.routing import Routing
from ds_fsmoe.components.token_choice import capacity_of, keep_largest, mask_chosen, place, slots_of
from ds_fsmoe.registry import register_gate

_JITTER = 1e-2  # inputs of the router are scaled by a factor in 1 +- this


@dataclass(frozen=True)
class TopKSettings(CapacitySettings):
    """Everything a top-k decision depends on besides the logits. Defaults are those of ``deepspeed.moe.layer.MoE``.

    ``drop_policy`` is for k >= 3; below, each formula has a rule of its own.
    """

    noisy_gate_policy: str | None = None
    """``"Jitter"`` scales the router's input by a random factor near 1, ``"RSample"`` (k = 1) adds Gumbel noise."""
    use_rts: bool = True
    """k = 1: who stays when an expert is full is drawn at random; without it, it is as ``torch.topk`` breaks ties."""
    top2_2nd_expert_sampling: bool = True
    """k = 2: the second expert is sampled (Gumbel noise on the logits) instead of being the second best."""

    def check(self, owner: str) -> None:
        super().check(owner)
        if self.noisy_gate_policy not in (None, "None", "Jitter", "RSample"):
            problem = "the choices are None, 'Jitter', 'RSample'"
            raise OptionError(owner, "noisy_gate_policy", self.noisy_gate_policy, problem)


@register_gate("topk")
class LinearGate(SettingsGate):
    """One matrix ``wg`` [E, M] scores the experts; each token takes its k best."""

    Settings = TopKSettings
    settings: TopKSettings

    def build(self, model_dim: int, num_experts: int) -> None:
        self.check_k(num_experts)
        self.wg = nn.Linear(model_dim, num_experts, bias=False)

    def forward(
        self,
        x_SM: torch.Tensor,
        used_token_S: torch.Tensor | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> Routing:
        return route_top_k(x_SM, self.wg.weight, self.settings, self.training, used_token_S, group)


def route_top_k(
    x_SM: torch.Tensor,
    weight_EM: torch.Tensor,
    settings: TopKSettings,
    training: bool,
    used_token_S: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> Routing:
    """Score, choose, drop: the whole gate as a function, for modules that hold the matrix themselves.

    Args:
        x_SM: [S, M] tokens of any float type; the router computes in float32 (float64 for float64 tokens).
        weight_EM: [E, M].
        settings: the formula's constants.
        training: chooses the capacity factor and switches the router's noise.
        used_token_S: [S], nonzero for tokens that take part (the masked ones take no slot); ``None`` means all.
        group: the ranks over which a dropless capacity is agreed.

    Raises:
        ValueError: a mask of another length than the tokens.
    """
    router_dtype = torch.promote_types(x_SM.dtype, torch.float32)
    x_SM = x_SM.to(router_dtype)
    noise = settings.noisy_gate_policy if training else None
    if noise == "Jitter":
        one = torch.ones((), dtype=torch.float32, device=x_SM.device)
        # Arguments that are held against their range are fetched from the device for it.
        factors = torch.distributions.Uniform(one * (1.0 - _JITTER), one * (1.0 + _JITTER), validate_args=False)
        x_SM = x_SM * factors.rsample(x_SM.shape)
    logits_SE = F.linear(x_SM, weight_EM.to(router_dtype))
    used_S = which_are_used(used_token_S, len(x_SM))
    settings = replace(settings, noisy_gate_policy=noise)
    route = {1: _route_top_1, 2: _route_top_2}.get(settings.k, _route_more)
    return route(logits_SE, settings, training, used_S, group)


def _gumbel_like(logits_SE: torch.Tensor) -> torch.Tensor:
    zero = torch.zeros((), dtype=torch.float32, device=logits_SE.device)
    return torch.distributions.Gumbel(zero, zero + 1.0, validate_args=False).rsample(logits_SE.shape)


def _one_hot(expert_S: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[S, E] int64; ``F.one_hot`` looks at the numbers first, and on some devices the host waits for them."""
    zeros_SE = torch.zeros(len(expert_S), num_experts, dtype=torch.int64, device=expert_S.device)
    return zeros_SE.scatter_(1, expert_S.unsqueeze(1), 1)


def _mask_used(mask_SE: torch.Tensor, used_S: torch.Tensor | None) -> torch.Tensor:
    return mask_SE if used_S is None else mask_SE * used_S.unsqueeze(1).to(mask_SE.dtype)


def _share_E(chosen_SE: torch.Tensor, probs_SE: torch.Tensor) -> torch.Tensor:
    """The share of tokens that chose each expert, in float32 at least (under autocast the logits may be less)."""
    return chosen_SE.to(torch.promote_types(probs_SE.dtype, torch.float32)).mean(dim=0)


def _route_top_1(
    logits_SE: torch.Tensor,
    settings: TopKSettings,
    training: bool,
    used_S: torch.Tensor | None,
    group: dist.ProcessGroup | None,
) -> Routing:
    """Switch Transformer's gate: the weight is the chosen expert's probability, not renormalised."""
    num_tokens, num_experts = logits_SE.shape
    # The noise is drawn first and the token selection later: this is the order of the random stream in stock.
    noisy_SE = logits_SE + _gumbel_like(logits_SE) if settings.noisy_gate_policy == "RSample" else None
    probs_SE = F.softmax(logits_SE, dim=1)
    expert_S = torch.argmax(probs_SE if noisy_SE is None else noisy_SE, dim=1)
    chosen_SE = _mask_used(_one_hot(expert_S, num_experts), used_S)
    counts_E = chosen_SE.sum(dim=0)
    capacity = capacity_of(counts_E, num_tokens, settings, training, group)
    aux_loss = torch.sum(probs_SE.mean(dim=0) * _share_E(chosen_SE, probs_SE)) * num_experts

    # Who stays: the `capacity` largest of a random number per (token, expert), or of the bare 0/1 mask. Ties in the
    # bare mask fall as topk lets them, which is stock's choice too.
    priority_SE = chosen_SE
    if settings.use_rts:
        priority_SE = chosen_SE * torch.rand(chosen_SE.shape, dtype=torch.float32, device=chosen_SE.device)
    staying_CE = torch.topk(priority_SE, k=min(capacity, num_tokens), dim=0).indices
    kept_SE = chosen_SE * torch.zeros_like(chosen_SE).scatter_(0, staying_CE, 1)

    position_S = ((torch.cumsum(kept_SE, dim=0) - 1) * kept_SE).sum(dim=1)
    return Routing(
        slots_KS=slots_of(expert_S, position_S, kept_SE.sum(dim=1) > 0, num_experts, capacity).unsqueeze(0),
        weights_KS=(probs_SE * kept_SE).sum(dim=1).unsqueeze(0),
        aux_loss=aux_loss,
        counts_E=counts_E,
        capacity=capacity,
        num_experts=num_experts,
    )


def _route_top_2(
    logits_SE: torch.Tensor,
    settings: TopKSettings,
    training: bool,
    used_S: torch.Tensor | None,
    group: dist.ProcessGroup | None,
) -> Routing:
    """GShard's gate: second choices queue behind all first choices; weights are renormalised over what was kept."""
    num_tokens, num_experts = logits_SE.shape
    probs_SE = F.softmax(logits_SE, dim=1)
    first_S = torch.argmax(probs_SE, dim=1)
    first_SE = _one_hot(first_S, num_experts)
    scores_SE = logits_SE.detach()
    if settings.top2_2nd_expert_sampling:
        scores_SE = scores_SE + _gumbel_like(logits_SE)
    second_S = torch.argmax(scores_SE.masked_fill(first_SE.bool(), float("-inf")), dim=1)
    first_SE = _mask_used(first_SE, used_S)
    second_SE = _mask_used(_one_hot(second_S, num_experts), used_S)

    position_first_SE = torch.cumsum(first_SE, dim=0) - 1
    position_second_SE = torch.cumsum(second_SE, dim=0) - 1 + first_SE.sum(dim=0, keepdim=True)
    aux_loss = torch.mean(probs_SE.mean(dim=0) * _share_E(first_SE, probs_SE)) * num_experts * num_experts
    counts_E = (first_SE + second_SE).sum(dim=0)
    capacity = capacity_of(counts_E, num_tokens, settings, training, group)
    if settings.drop_tokens:
        first_SE = first_SE * (position_first_SE < capacity)
        second_SE = second_SE * (position_second_SE < capacity)

    kept_KS = torch.stack([first_SE.sum(dim=1), second_SE.sum(dim=1)]) > 0
    position_KS = torch.stack([(position_first_SE * first_SE).sum(dim=1), (position_second_SE * second_SE).sum(dim=1)])
    weight_first_S = (probs_SE * first_SE).sum(dim=1)
    weight_second_S = (probs_SE * second_SE).sum(dim=1)
    total_S = torch.clamp(weight_first_S + weight_second_S, min=torch.finfo(probs_SE.dtype).eps)
    return Routing(
        slots_KS=slots_of(torch.stack([first_S, second_S]), position_KS, kept_KS, num_experts, capacity),
        weights_KS=torch.stack([weight_first_S / total_S, weight_second_S / total_S]),
        aux_loss=aux_loss,
        counts_E=counts_E,
        capacity=capacity,
        num_experts=num_experts,
    )


def _route_more(
    logits_SE: torch.Tensor,
    settings: TopKSettings,
    training: bool,
    used_S: torch.Tensor | None,
    group: dist.ProcessGroup | None,
) -> Routing:
    """k >= 3: full experts keep their most probable tokens (or the first); weights renormalised over what was kept."""
    num_tokens, num_experts = logits_SE.shape
    probs_SE = F.softmax(logits_SE, dim=1)
    best_SK, expert_SK = torch.topk(probs_SE, k=settings.k, dim=1)
    chosen_SE = mask_chosen(expert_SK, num_experts, used_S)
    counts_E = chosen_SE.sum(dim=0)
    balance_E = probs_SE.mean(dim=0) * _share_E(chosen_SE, probs_SE)
    aux_loss = torch.mean(balance_E) * num_experts * num_experts / settings.k

    capacity = capacity_of(counts_E, num_tokens, settings, training, group)
    kept_SE = chosen_SE
    if settings.drop_tokens and settings.drop_policy == "probs":
        # Zeros where nothing was chosen, as in stock, beside which a probability that underflowed has no precedence.
        competing_SE = torch.zeros_like(probs_SE).scatter(1, expert_SK, best_SK)
        if used_S is not None:
            competing_SE = competing_SE * used_S.unsqueeze(1)
        kept_SE = keep_largest(chosen_SE, competing_SE, capacity)
    kept_SE, slots_KS = place(expert_SK, kept_SE, capacity)

    weights_SE = probs_SE * kept_SE
    # Summed over all E columns, zeros included, because the order of this sum is part of stock's last bit.
    total_S1 = torch.clamp(weights_SE.sum(dim=1, keepdim=True), min=torch.finfo(probs_SE.dtype).eps)
    return Routing(
        slots_KS=slots_KS,
        weights_KS=(weights_SE / total_S1).gather(1, expert_SK).t().contiguous(),
        aux_loss=aux_loss,
        counts_E=counts_E,
        capacity=capacity,
        num_experts=num_experts,
    )
