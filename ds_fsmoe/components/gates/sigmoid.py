# SPDX-License-Identifier: Apache-2.0
"""The sigmoid gate of BASE layers and StableMoE: an expert's weight does not depend on the scores of the others.

A config selects it by ``fsmoe.gate.type = "sigmoid"``.
"""

from __future__ import annotations

import torch

from ds_fsmoe.components.gate import linear_scores
from ds_fsmoe.components.token_choice import Scores, TokenChoiceGate
from ds_fsmoe.registry import register_gate


@register_gate("sigmoid")
class SigmoidGate(TokenChoiceGate):
    """Takes the k largest ``h = x Wg``, weighted by ``sigmoid(h)``, not renormalised.

    Called with x_SM [S, M], it returns a :class:`Routing` of K = k choices for each of the S tokens.

    Options that are not listed here are those of :class:`TokenChoiceGate`.

    Args:
        k: experts per token, 1 by default.

    Raises:
        ValueError: an unknown option, or a value that the option does not allow; the message says what is allowed.

    Examples:
        >>> import torch, ds_fsmoe
        >>> gate = ds_fsmoe.SigmoidGate(k=2)
        >>> gate.build_once(model_dim=8, num_experts=4)
        >>> gate(torch.randn(6, 8)).weights_KS.shape
        torch.Size([2, 6])
    """

    def score(self, x_SM: torch.Tensor) -> Scores:
        logits_SE = linear_scores(x_SM, self.wg.weight)
        return Scores(logits_SE, torch.sigmoid(logits_SE))
