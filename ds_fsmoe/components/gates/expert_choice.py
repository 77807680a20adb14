# SPDX-License-Identifier: Apache-2.0
"""The expert-choice gate: each expert takes the tokens with its highest scores (Zhou et al. 2022, arXiv:2202.09368).

It returns a :class:`SlotRouting`; gates derived from ``token_choice`` return a :class:`Routing`. A config selects it by
``fsmoe.gate.type = "expert_choice"``.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ds_fsmoe.components.gate import (
    GateBase,
    OptionError,
    dropless_capacity,
    dropping_capacity,
    entropy_of,
    linear_scores,
    which_are_used,
)
from ds_fsmoe.components.routing import SlotRouting
from ds_fsmoe.registry import register_gate


@register_gate("expert_choice")
class ExpertChoiceGate(GateBase):
    """Scores tokens by a softmax over experts of ``x * wg``; each expert takes its ``T`` best, weighted by the score.

    ``T = ceil(S / E * k * capacity_factor)``, at most S. So all experts have the same load, and a token may be taken by
    any number of experts, or by none. The tokens of a rank compete with one another, later ones of a sequence with
    earlier ones.

    Args:
        k: mean number of experts per token, at a capacity factor of 1.
        capacity_factor: in training.
        eval_capacity_factor: in evaluation.
        agree_capacity: ``True``: ranks may have different numbers of tokens. T follows from a rank's own number, and
            the ranks agree on the largest; the host waits for it in every forward. ``False``: all ranks must have
            equally many tokens.
        causal: whether the model may be causal, so that no token may depend on later ones; ``False`` turns off the
            warning about that when a layer is converted.

    Raises:
        ValueError: a value that an option does not allow; the message says what is allowed.

    Examples:
        >>> import torch, ds_fsmoe
        >>> gate = ds_fsmoe.ExpertChoiceGate(k=2)
        >>> gate.build_once(model_dim=8, num_experts=4)
        >>> gate(torch.randn(6, 8)).counts_E  # x_SM [S, M]; each of 4 experts takes 6 / 4 * 2 tokens
        tensor([3, 3, 3, 3])
    """

    gives = SlotRouting

    def __init__(
        self,
        *,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        agree_capacity: bool = False,
        causal: bool = True,
    ) -> None:
        super().__init__()
        if type(k) is not int or k < 1:
            raise self._wrong("k", k, "must be an integer >= 1")
        for name, factor in (("capacity_factor", capacity_factor), ("eval_capacity_factor", eval_capacity_factor)):
            if type(factor) not in (int, float) or not 0 < factor < math.inf:
                raise self._wrong(name, factor, "must be a number above 0 and finite")
        for name, flag in (("agree_capacity", agree_capacity), ("causal", causal)):
            if type(flag) is not bool:
                raise self._wrong(name, flag, "must be true or false")
        self.k = k
        self.capacity_factor = capacity_factor
        self.eval_capacity_factor = eval_capacity_factor
        self.agree_capacity = agree_capacity
        self.causal = causal

    def build(self, model_dim: int, num_experts: int) -> None:
        if self.k > num_experts:
            raise self._wrong("k", self.k, f"must be between 1 and num_experts ({num_experts})")
        self.wg = nn.Linear(model_dim, num_experts, bias=False)

    def describe(self) -> str:
        return f"{super().describe()}, k = {self.k}, capacity factor {self.capacity_factor}"

    def _wrong(self, name: str, value: object, problem: str) -> OptionError:
        return OptionError(type(self).__name__, name, value, problem)

    def forward(
        self,
        x_SM: torch.Tensor,
        used_token_S: torch.Tensor | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> SlotRouting:
        scores_SE = F.softmax(linear_scores(x_SM, self.wg.weight), dim=1)
        num_tokens, num_experts = scores_SE.shape
        used_S = which_are_used(used_token_S, num_tokens)
        factor = self.k * (self.capacity_factor if self.training else self.eval_capacity_factor)
        num_taken = min(num_tokens, dropping_capacity(num_tokens, num_experts, factor, 0))
        capacity = num_taken
        if self.agree_capacity:
            capacity = dropless_capacity(torch.tensor([num_taken], device=x_SM.device), group)

        eligible_SE = scores_SE if used_S is None else scores_SE.masked_fill(~used_S.unsqueeze(1), float("-inf"))
        if self.given is None or self.given.tokens_R is None:
            tokens_ET = torch.topk(eligible_SE.detach(), num_taken, dim=0, sorted=False).indices.t()
        else:
            tokens_ET = self.given.tokens_R.view(num_experts, -1)[:, :num_taken]
        is_token_ET = tokens_ET < num_tokens
        tokens_ET = tokens_ET.clamp(max=max(0, num_tokens - 1))
        weights_ET = scores_SE.t().gather(1, tokens_ET)
        counts_E = torch.full((num_experts,), num_taken, device=x_SM.device)
        if used_S is not None:
            # An expert that takes more tokens than are used has chosen masked ones too.
            is_used_ET = used_S[tokens_ET] & is_token_ET
            tokens_ET = tokens_ET.masked_fill(~is_used_ET, num_tokens)
            weights_ET = weights_ET.masked_fill(~is_used_ET, 0.0)
            counts_E = is_used_ET.sum(dim=1)
        empty = (0, capacity - num_taken)
        return SlotRouting(
            tokens_R=F.pad(tokens_ET, empty, value=num_tokens).reshape(-1),
            weights_R=F.pad(weights_ET, empty).reshape(-1),
            num_tokens=num_tokens,
            aux_loss=scores_SE.new_zeros(()),
            counts_E=counts_E,
            capacity=capacity,
            num_experts=num_experts,
            entropy=entropy_of(scores_SE, used_S) if self.says_entropy else None,
        )
