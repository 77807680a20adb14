# SPDX-License-Identifier: Apache-2.0
"""Routing in which slots choose: an expert fills each of its slots with one token, and a token may be in any number."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ds_fsmoe.components.routing import Given, Place, RoutingBase, find_places


@dataclass(frozen=True)
class SlotRouting(RoutingBase):
    """Each slot has one token, or none.

    A :class:`Routing` could say it with K = E choices per token, nearly all of them dropped; restoring from that would
    read E * S rows instead of E * C.

    Args:
        tokens_R: [R] int64: the token in each slot, ``num_tokens`` where there is none.
        weights_R: [R] float: what the slot's result is multiplied with; 0 where there is no token.
        num_tokens: S.
        aux_loss: a scalar, see :class:`RoutingBase`.
        counts_E: [E] int64: the tokens in the slots of each expert.
        capacity: C.
        num_experts: E.
        entropy: a scalar, see :class:`RoutingBase`.

    Examples:
        >>> import torch, ds_fsmoe
        >>> gate = ds_fsmoe.ExpertChoiceGate(k=2)
        >>> gate.build_once(model_dim=8, num_experts=4)
        >>> routing = gate(torch.randn(6, 8))  # each of 4 experts takes 6 / 4 * 2 = 3 tokens
        >>> type(routing).__name__, routing.tokens_R.shape
        ('SlotRouting', torch.Size([12]))
    """

    tokens_R: torch.Tensor
    weights_R: torch.Tensor
    num_tokens: int
    aux_loss: torch.Tensor
    counts_E: torch.Tensor
    capacity: int
    num_experts: int
    entropy: torch.Tensor | None = None

    def placed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens that some expert has taken, and how many there are; those that take no part count as not taken."""
        is_taken = self.tokens_R.new_zeros(self.num_tokens + 1).index_fill_(0, self.tokens_R, 1)[:-1]
        return is_taken.sum(), torch.full_like(is_taken.sum(), self.num_tokens)

    def given(self) -> Given:
        return Given(tokens_R=self.tokens_R, capacity=self.capacity)

    def relaid(self, place: Place, capacity: int) -> SlotRouting:
        places = find_places(place, self.num_slots, self.num_experts * capacity, self.tokens_R.device)
        if places is None:
            return self
        # One more slot than there are stands for none.
        tokens = torch.cat([self.tokens_R, self.tokens_R.new_full((1,), self.num_tokens)])
        weights = torch.cat([self.weights_R, self.weights_R.new_zeros(1)])
        return replace(
            self, tokens_R=tokens[places.slot_of_row], weights_R=weights[places.slot_of_row], capacity=capacity
        )
