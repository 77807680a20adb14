# SPDX-License-Identifier: Apache-2.0
"""SoftMoE's gate: every slot is a mixture of all tokens, every token's result a mixture of all slots' results.

Source: Puigcerver et al. 2023, arXiv:2308.00951.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ds_fsmoe.components.gate import GateBase, OptionError, entropy_of, linear_scores, which_are_used
from ds_fsmoe.components.routing import DenseRouting
from ds_fsmoe.registry import register_gate


@register_gate("softmoe")
class SoftMoEGate(GateBase):
    """Mixes tokens into slots and results into tokens, weighted by softmaxes of ``x * wg``, which has a column per
    slot.

    A slot's input is the mean of all tokens, weighted by the softmax of its column over tokens. A token's result is the
    mean of all slots' results, weighted by the softmax of its row over slots.

    No token is dropped, and nothing has to be balanced. The tokens of a rank are mixed with one another, later ones of
    a sequence with earlier ones. The router's matrix is [E * slots_per_expert, M]. The experts' work does not depend on
    the number of tokens.

    Args:
        slots_per_expert: C. With E * C near S * k, the experts compute about as many rows as with a gate of k experts.
        causal: whether the model may be causal, so that no token may depend on later ones; ``False`` turns off the
            warning about that when a layer is converted.

    Raises:
        ValueError: a value that an option does not allow; the message says what is allowed.

    Examples:
        >>> import torch, ds_fsmoe
        >>> gate = ds_fsmoe.SoftMoEGate(slots_per_expert=3)
        >>> gate.build_once(model_dim=8, num_experts=4)
        >>> gate(torch.randn(6, 8)).dispatch_SR.shape  # x_SM [S, M] to weights [S, E * C]
        torch.Size([6, 12])
    """

    gives = DenseRouting

    def __init__(self, *, slots_per_expert: int = 1, causal: bool = True) -> None:
        super().__init__()
        owner = type(self).__name__
        if type(slots_per_expert) is not int or slots_per_expert < 1:
            raise OptionError(owner, "slots_per_expert", slots_per_expert, "must be an integer >= 1")
        if type(causal) is not bool:
            raise OptionError(owner, "causal", causal, "must be true or false")
        self.slots_per_expert = slots_per_expert
        self.causal = causal

    def build(self, model_dim: int, num_experts: int) -> None:
        self.wg = nn.Linear(model_dim, num_experts * self.slots_per_expert, bias=False)

    def describe(self) -> str:
        return f"{super().describe()}, {self.slots_per_expert} slot(s) per expert"

    def forward(
        self,
        x_SM: torch.Tensor,
        used_token_S: torch.Tensor | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> DenseRouting:
        logits_SR = linear_scores(x_SM, self.wg.weight)
        num_tokens, num_slots = logits_SR.shape
        num_experts = num_slots // self.slots_per_expert
        used_S = which_are_used(used_token_S, num_tokens)
        combine_SR = F.softmax(logits_SR, dim=1)
        if used_S is None:
            dispatch_SR = F.softmax(logits_SR, dim=0)
            num_used = torch.full((), num_tokens, device=x_SM.device)
        else:
            is_masked_S1 = ~used_S.unsqueeze(1)
            # Not minus infinity: if all tokens are masked, the softmax would be nan.
            lowest = torch.finfo(logits_SR.dtype).min
            dispatch_SR = F.softmax(logits_SR.masked_fill(is_masked_S1, lowest), dim=0).masked_fill(is_masked_S1, 0.0)
            combine_SR = combine_SR.masked_fill(is_masked_S1, 0.0)
            num_used = used_S.sum()
        return DenseRouting(
            dispatch_SR=dispatch_SR,
            combine_SR=combine_SR,
            aux_loss=logits_SR.new_zeros(()),
            counts_E=num_used.expand(num_experts).clone(),
            capacity=self.slots_per_expert,
            num_experts=num_experts,
            entropy=entropy_of(combine_SR.unflatten(1, (num_experts, -1)).sum(dim=2), used_S)
            if self.says_entropy
            else None,
        )
