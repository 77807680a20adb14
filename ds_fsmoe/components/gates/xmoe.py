# SPDX-License-Identifier: Apache-2.0
"""X-MoE's gate: scores are cosines between token and expert in a space of few dimensions.

This avoids representation collapse, in which tokens drift towards the experts' vectors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ds_fsmoe.components.gate import linear_scores, option, takes_options_of
from ds_fsmoe.components.token_choice import ChoiceSettings, Scores, TokenChoiceGate
from ds_fsmoe.registry import register_gate

_LEAST_TEMPERATURE = 0.01


@dataclass(frozen=True, kw_only=True)
class XMoESettings(ChoiceSettings):
    """Holds the options of the gate."""

    routing_dim: int | None = option(None, least=1)
    """Dimensions in which tokens and experts are compared; by default half the number of experts, at least 2."""
    temperature: float = option(0.3, above=0)
    """Initial divisor of the cosines."""


@register_gate("xmoe")
class XMoEGate(TokenChoiceGate):
    """Takes the k largest ``h_i = cos(Wproj x, wg_i) / temperature``, weighted by ``p = softmax(h)``.

    The temperature is learned as its logarithm, and never falls below 0.01.

    Called with x_SM [S, M], it returns a :class:`Routing` of K = k choices for each of the S tokens.

    Options that are not listed here are those of :class:`TokenChoiceGate`.

    Args:
        k: experts per token, 1 by default.
        routing_dim: the dimensions D in which tokens and experts are compared, with wg [E, D]; by default half the
            number of experts, at least 2.
        temperature: initial divisor of the cosines.

    Raises:
        ValueError: an unknown option, or a value that the option does not allow; the message says what is allowed.

    Examples:
        >>> import torch, ds_fsmoe
        >>> gate = ds_fsmoe.XMoEGate(k=2, routing_dim=3)
        >>> gate.build_once(model_dim=8, num_experts=4)
        >>> gate(torch.randn(6, 8)).weights_KS.shape
        torch.Size([2, 6])
    """

    Settings = XMoESettings
    settings: XMoESettings

    @takes_options_of(XMoESettings)
    def __init__(self) -> None: ...

    def build(self, model_dim: int, num_experts: int) -> None:
        self.check_k(num_experts)
        routing_dim = self.settings.routing_dim or max(num_experts // 2, 2)
        self.projection = nn.Linear(model_dim, routing_dim, bias=False)
        self.wg = nn.Parameter(torch.randn(num_experts, routing_dim) / math.sqrt(routing_dim))
        self.log_temperature = nn.Parameter(torch.full((1,), math.log(self.settings.temperature)))

    def score(self, x_SM: torch.Tensor) -> Scores:
        x_SD = F.normalize(linear_scores(x_SM, self.projection.weight), dim=1)
        cosine_SE = linear_scores(x_SD, F.normalize(self.wg.to(x_SD.dtype), dim=1))
        temperature = self.log_temperature.to(x_SD.dtype).exp().clamp(min=_LEAST_TEMPERATURE)
        logits_SE = cosine_SE / temperature
        return Scores(logits_SE, F.softmax(logits_SE, dim=1))
