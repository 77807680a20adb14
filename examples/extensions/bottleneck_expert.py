# SPDX-License-Identifier: Apache-2.0
"""An expert of one's own: down to a few dimensions and up again, beside the token itself.

A model takes it by class, or by name once the plugin is imported: ``registry.lookup("expert", "bottleneck")``.
"""

import torch
from torch import nn

from ds_fsmoe import ExpertArgs, ExpertBase, register_expert


@register_expert("bottleneck")
class BottleneckExpert(ExpertBase):
    """Law: row-wise. Each row of the result depends on that row of the input alone, so that any cut gives the same."""

    def __init__(self, model_dim: int, expert_dim: int) -> None:
        super().__init__()
        self.down = nn.Linear(model_dim, expert_dim)
        self.up = nn.Linear(expert_dim, model_dim)

    def do_experts(self, args: ExpertArgs) -> torch.Tensor:
        """``args.tokens`` [..., M] to [..., M]. Gradients are autograd's, chunk by chunk."""
        return args.tokens + self.up(torch.sin(self.down(args.tokens)))
