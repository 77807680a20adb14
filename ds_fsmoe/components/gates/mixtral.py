# SPDX-License-Identifier: Apache-2.0
"""Mixtral's gate: softmax over the logits of the chosen experts only, so that a token's weights sum to 1.

A config selects it by ``fsmoe.gate.type = "mixtral"``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ds_fsmoe.components.gate import linear_scores, option, takes_options_of
from ds_fsmoe.components.token_choice import ChoiceSettings, Scores, TokenChoiceGate
from ds_fsmoe.registry import register_gate


@dataclass(frozen=True, kw_only=True)
class MixtralSettings(ChoiceSettings):
    """Holds the options of the gate."""

    k: int = 2
    z_loss_factor: float = option(0.1, least=0)
    """A tenth of the balance loss, as in ST-MoE (1e-3 and 1e-2)."""


@register_gate("mixtral")
class MixtralGate(TokenChoiceGate):
    """Takes the k largest ``h = x Wg``, weighted by a softmax over those k, so that weights sum to 1.

    Called with x_SM [S, M], it returns a :class:`Routing` of K = k choices for each of the S tokens.

    Options that are not listed here are those of :class:`TokenChoiceGate`.

    Args:
        k: experts per token, 2 by default.
        z_loss_factor: see there; by default a tenth of the balance loss, as in ST-MoE (1e-3 and 1e-2).

    Raises:
        ValueError: an unknown option, or a value that the option does not allow; the message says what is allowed.

    Examples:
        >>> import torch, ds_fsmoe
        >>> gate = ds_fsmoe.MixtralGate(k=2)
        >>> gate.build_once(model_dim=8, num_experts=4)
        >>> gate(torch.randn(6, 8)).weights_KS.shape
        torch.Size([2, 6])
        >>> torch.allclose(gate.eval()(torch.randn(1, 8)).weights_KS.sum(dim=0), torch.ones(1))
        True
    """

    Settings = MixtralSettings
    settings: MixtralSettings

    @takes_options_of(MixtralSettings)
    def __init__(self) -> None: ...

    def weights_sum_to_1(self) -> bool:
        return True

    def score(self, x_SM: torch.Tensor) -> Scores:
        logits_SE = linear_scores(x_SM, self.wg.weight)
        return Scores(logits_SE, F.softmax(logits_SE, dim=1))

    def weigh(self, scores: Scores, expert_SK: torch.Tensor) -> torch.Tensor:
        # Equal to probabilities divided by their sum, without their underflow.
        return F.softmax(scores.logits_SE.gather(1, expert_SK), dim=1)
