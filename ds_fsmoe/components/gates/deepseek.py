# SPDX-License-Identifier: Apache-2.0
"""The gate of DeepSeek-V3: sigmoid scores, experts from a few groups only, and balance without an auxiliary loss.

A bias per expert is added to its score for the choice of experts, and nowhere else. After every optimizer step it rises
by a fixed speed for an expert with fewer tokens than the mean. For one with more it falls.
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
    """Holds the options of the gate."""

    k: int = 2
    balance_loss_factor: float = option(0.0, least=0)
    num_groups: int = option(1, least=1)
    """Number of groups of neighbouring experts, of equal size; a token takes experts from some of them."""
    kept_groups: int | None = option(None, least=1)
    """Number of groups that a token takes experts from; by default half of them, rounded up, or more if k needs it. A
    group's score is the sum of its two best experts' scores."""
    norm_topk_prob: bool = True
    """Divide the weights of a token by their sum."""
    routed_scaling_factor: float = option(1.0, above=0)
    """Factor on the weights of a token."""
    bias_update_speed: float = option(0.001, least=0)
    """Change of a bias in one optimizer step; 0: it stays constant."""


@register_gate("deepseek")
class DeepSeekGate(TokenChoiceGate):
    """Takes the k experts of the kept groups with the largest ``s + balance_bias``, weighted by ``s = sigmoid(x Wg)``.

    The bias, [E] float32 whatever dtype the model has, is a buffer ``balance_bias``, saved with the model.
    ``update_gates`` changes it after an optimizer step, as the layer's engine does. It counts the choices of forwards
    in training.

    Called with x_SM [S, M], it returns a :class:`Routing` of K = k choices for each of the S tokens.

    Options that are not listed here are those of :class:`TokenChoiceGate`.

    Args:
        k: experts per token, 2 by default.
        balance_loss_factor: see there; 0 by default, as the bias balances.
        num_groups: number of groups of neighbouring experts, of equal size; a token takes experts from some of them.
        kept_groups: number of groups that a token takes experts from; by default half of them, rounded up, or more if k
            needs it. A group's score is the sum of its two best experts' scores.
        norm_topk_prob: divide the weights of a token by their sum.
        routed_scaling_factor: factor on the weights of a token.
        bias_update_speed: change of a bias in one optimizer step; 0: it stays constant.

    Raises:
        ValueError: an unknown option, or a value that the option does not allow; the message says what is allowed.

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
        # The sum is then the constant scaling factor, whatever the scores are.
        return self.settings.norm_topk_prob

    def score(self, x_SM: torch.Tensor) -> Scores:
        logits_SE = linear_scores(x_SM, self.wg.weight)
        affinity_SE = torch.sigmoid(logits_SE)
        preference_SE = affinity_SE.detach() + self.balance_bias.to(affinity_SE.dtype)
        return Scores(logits_SE, affinity_SE, self._of_best_groups(preference_SE))

    def _of_best_groups(self, preference_SE: torch.Tensor) -> torch.Tensor:
        """Return the preferences [S, E], with -inf for experts outside the groups that a token keeps."""
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
        """Change the bias by the counts of all ranks, in integers, so that all ranks compute the same."""
        above_mean_E = counts * counts.numel() - counts.sum()
        self.balance_bias -= self.settings.bias_update_speed * above_mean_E.sign()
        self.counted_E.zero_()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> DeepSeekGate:
        """Apply ``fn`` as in torch, but keep the bias in float32: in 16 bits, 1 + 0.001 is rounded to 1."""
        bias = getattr(self, "balance_bias", None)
        super()._apply(fn, recurse)
        if bias is not None and self.balance_bias.dtype in (torch.bfloat16, torch.float16):
            self.balance_bias = bias.to(self.balance_bias.device)
        return self
