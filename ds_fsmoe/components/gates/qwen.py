# SPDX-License-Identifier: Apache-2.0
"""The gate of Qwen's MoE models: softmax over all experts, renormalised over the chosen ones if asked for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ds_fsmoe.components.gate_settings import takes_options_of
from ds_fsmoe.components.gates.mixtral import MixtralGate, MixtralSettings
from ds_fsmoe.components.token_choice import Scores, TokenChoiceGate
from ds_fsmoe.registry import register_gate


@dataclass(frozen=True, kw_only=True)
class QwenSettings(MixtralSettings):
    """Options of the gate."""

    norm_topk_prob: bool = False
    """Weights sum to 1, as Mixtral's do (Qwen3); false: they are the plain probabilities (Qwen1.5, Qwen2)."""


@register_gate("qwen")
class QwenGate(MixtralGate):
    """``p = softmax(x Wg)``; the k largest; weights ``p``, over their sum with ``norm_topk_prob``."""

    Settings = QwenSettings
    settings: QwenSettings

    @takes_options_of(QwenSettings)
    def __init__(self) -> None: ...

    def weights_sum_to_1(self) -> bool:
        return self.settings.norm_topk_prob

    def weigh(self, scores: Scores, expert_SK: torch.Tensor) -> torch.Tensor:
        if self.settings.norm_topk_prob:
            return super().weigh(scores, expert_SK)
        return TokenChoiceGate.weigh(self, scores, expert_SK)
