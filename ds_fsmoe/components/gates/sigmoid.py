# SPDX-License-Identifier: Apache-2.0
"""The sigmoid gate of BASE layers and StableMoE: what an expert weighs does not depend on the other experts."""

from __future__ import annotations

import torch

from ds_fsmoe.components.router import linear_scores
from ds_fsmoe.components.token_choice import Scores, TokenChoiceGate
from ds_fsmoe.registry import register_gate


@register_gate("sigmoid")
class SigmoidGate(TokenChoiceGate):
    """``h = x Wg``; the k largest; weights ``sigmoid(h)``, not renormalised."""

    def score(self, x_SM: torch.Tensor) -> Scores:
        logits_SE = linear_scores(x_SM, self.wg.weight)
        return Scores(logits_SE, torch.sigmoid(logits_SE))
