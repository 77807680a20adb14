# SPDX-License-Identifier: Apache-2.0
"""The gate of DeepSeek-V3: sigmoid scores, experts from a few groups only, and balance without an auxiliary loss.

A bias per expert is added to its score where experts are chosen, and nowhere else. After every optimizer step it goes
up by a fixed speed for an expert that got fewer tokens than the mean, and down for one that got more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ds_fsmoe.components.gate import in_backward, linear_scores, option, takes_options_of
from ds_fsmoe.components.routing import Routing
from ds_fsmoe.components.token_choice import ChoiceSettings, Scores, TokenChoiceGate
from ds_fsmoe.registry import register_gate


@dataclass(frozen=True, kw_only=True)
class DeepSeekSettings(ChoiceSettings):
    """Options of the gate."""

    k: int = 2
    balance_loss_factor: float = option(0.0, least=0)
    num_groups: int = option(1, least=1)
    """Groups of neighbouring experts, of the same size; a token takes experts from some of them."""
    kept_groups: int | None = option(None, least=1)
    """How many; left out: half of them, rounded up, or more if k needs it. A group is as good as its best two experts
    together."""
    norm_topk_prob: bool = True
    """The weights of a token are divided by their sum."""
    routed_scaling_factor: float = option(1.0, above=0)
    """And multiplied with this."""
    bias_update_speed: float = option(0.001, least=0)
    """How far a bias goes in one optimizer step; 0: it stays."""


@register_gate("deepseek")
class DeepSeekGate(TokenChoiceGate):
    """``s = sigmoid(x Wg)``; of the kept groups the k experts in which ``s + balance_bias`` is largest; weights ``s``.

    The bias, [E] float32 whatever the model is cast to, is a buffer ``balance_bias``, saved with the model. It moves
    where the layer's engine calls ``update_gates`` after a step; counted are the choices of forwards in training.

    Called with x_SM [S, M], it returns a :class:`Routing` of K = k choices for each of the S tokens.

    Options that are not listed here are those of :class:`TokenChoiceGate`.

    Args:
        k: experts per token, 2 unless it is given.
        balance_loss_factor: see there; 0 unless it is given, as the bias balances.
        num_groups: groups of neighbouring experts, of the same size; a token takes experts from some of them.
        kept_groups: how many; left out: half of them, rounded up, or more if k needs it. A group is as good as its best
            two experts together.
        norm_topk_prob: the weights of a token are divided by their sum.
        routed_scaling_factor: and multiplied with this.
        bias_update_speed: how far a bias goes in one optimizer step; 0: it stays.

    Raises:
        ValueError: an option that it does not have, or a value that the option cannot have, with what is possible.

    Examples:
        >>> import torch, ds_fsmoe
        >>> gate = ds_fsmoe.DeepSeekGate(k=2, num_groups=2, kept_groups=1)
        >>> gate.build_once(model_dim=8, num_experts=4)
        >>> gate(torch.randn(6, 8)).weights_KS.shape
        torch.Size([2, 6])
        >>> gate.balance_bias.shape
        torch.Size([4])
    """

    Settings = DeepSeekSettings
    settings: DeepSeekSettings

    @takes_options_of(DeepSeekSettings)
    def __init__(self) -> None: ...

    def build(self, model_dim: int, num_experts: int) -> None:
        super().build(model_dim, num_experts)
        num_groups, kept = self.settings.num_groups, self.settings.kept_groups
        if num_experts % num_groups:
            sizes = ", ".join(str(each) for each in range(1, num_experts + 1) if num_experts % each == 0)
            raise self.wrong("num_groups", f"must divide num_experts ({num_experts}): the choices are {sizes}")
        needed = -(-self.settings.k // (num_experts // num_groups))
        if kept is not None and not needed <= kept <= num_groups:
            raise self.wrong("kept_groups", f"must be between {needed}, which k needs, and num_groups ({num_groups})")
        self.kept_groups = kept or max(needed, -(-num_groups // 2))
        self.register_buffer("balance_bias", torch.zeros(num_experts, dtype=torch.float32))
        self.register_buffer("counted_E", torch.zeros(num_experts, dtype=torch.int64), persistent=False)

    def weights_sum_to_1(self) -> bool:
        # Times a constant, which teaches no more.
        return self.settings.norm_topk_prob

    def score(self, x_SM: torch.Tensor) -> Scores:
        logits_SE = linear_scores(x_SM, self.wg.weight)
        affinity_SE = torch.sigmoid(logits_SE)
        preference_SE = affinity_SE.detach() + self.balance_bias.to(affinity_SE.dtype)
        return Scores(logits_SE, affinity_SE, self._of_best_groups(preference_SE))

    def _of_best_groups(self, preference_SE: torch.Tensor) -> torch.Tensor:
        """-inf where an expert is in none of the groups that its token keeps."""
        num_groups = self.settings.num_groups
        if self.kept_groups == num_groups:
            return preference_SE
        in_groups = preference_SE.unflatten(1, (num_groups, -1))
        of_group = in_groups.topk(min(2, in_groups.shape[2]), dim=2).values.sum(dim=2)
        best = of_group.topk(self.kept_groups, dim=1).indices
        is_out = torch.ones_like(of_group, dtype=torch.bool).scatter_(1, best, False)
        return in_groups.masked_fill(is_out.unsqueeze(2), float("-inf")).flatten(1)

    def weigh(self, scores: Scores, expert_SK: torch.Tensor) -> torch.Tensor:
        weights_SK = super().weigh(scores, expert_SK)
        if self.settings.norm_topk_prob:
            tiny = torch.finfo(weights_SK.dtype).tiny
            weights_SK = weights_SK / weights_SK.sum(dim=1, keepdim=True).clamp(min=tiny)
        return weights_SK * self.settings.routed_scaling_factor

    def forward(
        self,
        x_SM: torch.Tensor,
        used_token_S: torch.Tensor | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> Routing:
        routing = super().forward(x_SM, used_token_S, group)
        if self.training and not in_backward():
            self.counted_E += routing.counts_E
        return routing

    def counts_to_sum(self) -> torch.Tensor | None:
        return self.counted_E if self.settings.bias_update_speed else None

    @torch.no_grad()
    def after_optimizer_step(self, counts: torch.Tensor) -> None:
        """Move the bias by the counts of all ranks: in integers, so that all ranks come to the same."""
        above_mean_E = counts * counts.numel() - counts.sum()
        self.balance_bias -= self.settings.bias_update_speed * above_mean_E.sign()
        self.counted_E.zero_()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> DeepSeekGate:
        """A cast to 16 bits goes past the bias: there a step of 0.001 would be lost beside 1."""
        bias = getattr(self, "balance_bias", None)
        super()._apply(fn, recurse)
        if bias is not None and self.balance_bias.dtype in (torch.bfloat16, torch.float16):
            self.balance_bias = bias.to(self.balance_bias.device)
        return self
