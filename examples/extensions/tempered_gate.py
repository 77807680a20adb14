# SPDX-License-Identifier: Apache-2.0
"""A gate of one's own: softmax of scores divided by a temperature that is learned.

{"fsmoe": {"enabled": true, "plugins": ["extensions.tempered_gate"], "gate": {"type": "tempered", "start": 2.0}}}
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ds_fsmoe import register_gate
from ds_fsmoe.components.gate import linear_scores, option
from ds_fsmoe.components.token_choice import ChoiceSettings, Scores, TokenChoiceGate


@dataclass(frozen=True)
class TemperedSettings(ChoiceSettings):
    """All options of a gate in which tokens choose (k, capacity_factor, drop_tokens, ...), and one more."""

    k: int = 2
    start: float = option(1.0, least=0.1)
    """The temperature that training begins with."""


@register_gate("tempered")
class TemperedGate(TokenChoiceGate):
    """Choosing, capacity, dropping and losses are the base's; a gate says how experts are scored."""

    Settings = TemperedSettings

    def build(self, model_dim: int, num_experts: int) -> None:
        super().build(model_dim, num_experts)
        # DeepSpeed's optimizer gets it, and its checkpoints have it: no name may contain "expert", no shape be ().
        self.temperature = torch.nn.Parameter(torch.full((1,), self.settings.start))

    def score(self, x_SM: torch.Tensor) -> Scores:
        logits_SE = linear_scores(x_SM, self.wg.weight) / self.temperature
        return Scores(logits_SE, F.softmax(logits_SE, dim=1))
