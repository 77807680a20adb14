# SPDX-License-Identifier: Apache-2.0
"""Switch Transformer's gate: a choice weighs its probability, and a full expert drops later tokens.

A config selects it by ``fsmoe.gate.type = "switch"``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ds_fsmoe.components.gate import linear_scores, option, takes_options_of
from ds_fsmoe.components.token_choice import ChoiceSettings, Scores, TokenChoiceGate
from ds_fsmoe.registry import register_gate


@dataclass(frozen=True, kw_only=True)
class SwitchSettings(ChoiceSettings):
    """Holds the options of the gate."""

    drop_policy: str = option("position", choices=("probs", "position"))
    jitter: float = option(0.01, least=0)
    """In training, the router's input is multiplied by random numbers between 1 - jitter and 1 + jitter."""


@register_gate("switch")
class SwitchGate(TokenChoiceGate):
    """Takes the k largest ``p = softmax(x Wg)``, weighted by ``p``, not renormalised.

    Called with x_SM [S, M], it returns a :class:`Routing` of K = k choices for each of the S tokens.

    Options that are not listed here are those of :class:`TokenChoiceGate`.

    Args:
        k: experts per token, 1 by default.
        drop_policy: see there; ``"position"`` by default.
        jitter: in training, the router's input is multiplied by random numbers between 1 - jitter and 1 + jitter.

    Raises:
        ValueError: an unknown option, or a value that the option does not allow; the message says what is allowed.

    Examples:
        >>> import torch, ds_fsmoe
        >>> gate = ds_fsmoe.SwitchGate(jitter=0.0)
        >>> gate.build_once(model_dim=8, num_experts=4)
        >>> gate(torch.randn(6, 8)).weights_KS.shape
        torch.Size([1, 6])
    """

    Settings = SwitchSettings
    settings: SwitchSettings

    @takes_options_of(SwitchSettings)
    def __init__(self) -> None: ...

    def score(self, x_SM: torch.Tensor) -> Scores:
        jitter = self.settings.jitter
        if self.training and jitter:
            x_SM = x_SM * torch.empty_like(x_SM).uniform_(1.0 - jitter, 1.0 + jitter)
        logits_SE = linear_scores(x_SM, self.wg.weight)
        return Scores(logits_SE, F.softmax(logits_SE, dim=1))
