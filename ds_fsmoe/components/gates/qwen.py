# SPDX-License-Identifier: Apache-2.0
"""The gate of Qwen's MoE models: softmax over all experts.

With ``norm_topk_prob`` it is Mixtral's gate, renormalised over the chosen experts. A config selects it by
``fsmoe.gate.type = "qwen"``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ds_fsmoe.components.gate import takes_options_of
from ds_fsmoe.components.gates.mixtral import MixtralGate, MixtralSettings
from ds_fsmoe.components.token_choice import Scores, TokenChoiceGate
from ds_fsmoe.registry import register_gate


@dataclass(frozen=True, kw_only=True)
class QwenSettings(MixtralSettings):
    """Holds the options of the gate."""

    norm_topk_prob: bool = False
    """Weights sum to 1, as Mixtral's do (Qwen3); false: they are the plain probabilities (Qwen1.5, Qwen2)."""


@register_gate("qwen")
class QwenGate(MixtralGate):
    """Takes the k largest ``p = softmax(x Wg)``, weighted by ``p``, divided by their sum with ``norm_topk_prob``.

    Called with x_SM [S, M], it returns a :class:`Routing` of K = k choices for each of the S tokens.

    Options that are not listed here are those of :class:`TokenChoiceGate`.

    Args:
        k: experts per token, 2 by default.
        z_loss_factor: see there; ``0.1`` by default.
        norm_topk_prob: weights sum to 1, as Mixtral's do (Qwen3); ``False``: they are the plain probabilities (Qwen1.5,
            Qwen2).

    Raises:
        ValueError: an unknown option, or a value that the option does not allow; the message says what is allowed.

    Examples:
        >>> import torch, ds_fsmoe
        >>> gate = ds_fsmoe.QwenGate(k=2, norm_topk_prob=True)
        >>> gate.build_once(model_dim=8, num_experts=4)
        >>> gate(torch.randn(6, 8)).weights_KS.shape
        torch.Size([2, 6])
    """

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
