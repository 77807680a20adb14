# SPDX-License-Identifier: Apache-2.0
"""GShard's noisy top-k gate: in training, each logit gets noise whose size depends on the token.

A config selects it by ``fsmoe.gate.type = "gshard"``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ds_fsmoe.components.gate import linear_scores, takes_options_of
from ds_fsmoe.components.token_choice import ChoiceSettings, Scores, TokenChoiceGate
from ds_fsmoe.registry import register_gate


@dataclass(frozen=True, kw_only=True)
class GShardSettings(ChoiceSettings):
    """Holds the options of the gate."""

    k: int = 2
    noise: bool = True
    """False: no noise in training either, and no ``w_noise``."""


@register_gate("gshard")
class GShardGate(TokenChoiceGate):
    """Takes the k largest ``h = x Wg + N(0, 1) * softplus(x Wnoise)``, weighted by a softmax over those k.

    Called with x_SM [S, M], it returns a :class:`Routing` of K = k choices for each of the S tokens.

    Options that are not listed here are those of :class:`TokenChoiceGate`.

    Args:
        k: experts per token, 2 by default.
        noise: ``False``: no noise in training, and no ``w_noise``; evaluation has no noise.

    Raises:
        ValueError: an unknown option, or a value that the option does not allow; the message says what is allowed.

    Examples:
        >>> import torch, ds_fsmoe
        >>> gate = ds_fsmoe.GShardGate(k=2, noise=False)
        >>> gate.build_once(model_dim=8, num_experts=4)
        >>> gate(torch.randn(6, 8)).weights_KS.shape
        torch.Size([2, 6])
    """

    Settings = GShardSettings
    settings: GShardSettings

    @takes_options_of(GShardSettings)
    def __init__(self) -> None: ...

    def build(self, model_dim: int, num_experts: int) -> None:
        super().build(model_dim, num_experts)
        if self.settings.noise:
            self.w_noise = nn.Linear(model_dim, num_experts, bias=False)
            nn.init.zeros_(self.w_noise.weight)

    def weights_sum_to_1(self) -> bool:
        return True

    def score(self, x_SM: torch.Tensor) -> Scores:
        logits_SE = linear_scores(x_SM, self.wg.weight)
        if self.training and self.settings.noise:
            size_SE = F.softplus(linear_scores(x_SM, self.w_noise.weight))
            logits_SE = logits_SE + torch.randn_like(logits_SE) * size_SE
        return Scores(logits_SE, F.softmax(logits_SE, dim=1))

    def weigh(self, scores: Scores, expert_SK: torch.Tensor) -> torch.Tensor:
        return F.softmax(scores.logits_SE.gather(1, expert_SK), dim=1)
