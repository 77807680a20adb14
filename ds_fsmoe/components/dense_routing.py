# SPDX-License-Identifier: Apache-2.0
"""Routing in which every slot is a mixture of all tokens, and every token's result one of all slots' results."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ds_fsmoe.components.routing import Place, Places, RoutingBase, find_places


@dataclass(frozen=True)
class DenseRouting(RoutingBase):
    """Weights of every token in every slot, and of every slot in every token's result.

    Args:
        dispatch_SR: [S, E * C] float: of each token in each slot, 0 for a token that takes no part.
        combine_SR: [S, E * C] float: of each slot's result in each token's; 0 for a token that takes no part.
        aux_loss: a scalar, see :class:`RoutingBase`.
        counts_E: [E] int64: the tokens that take part, for every expert.
        capacity: C.
        num_experts: E.
        entropy: a scalar, see :class:`RoutingBase`.
        places: where the slots' rows lie, if not in the order of the columns. The two matrices are by far the largest
            tensors here, so it is rows that are moved, and not columns.

    Examples:
        >>> import torch, ds_fsmoe
        >>> gate = ds_fsmoe.SoftMoEGate(slots_per_expert=3)
        >>> gate.build_once(model_dim=8, num_experts=4)
        >>> routing = gate(torch.randn(6, 8))
        >>> routing.dispatch_SR.shape, torch.allclose(routing.dispatch_SR.sum(dim=0), torch.ones(12))
        (torch.Size([6, 12]), True)
    """

    order: ClassVar[str] = "dense"

    dispatch_SR: torch.Tensor
    combine_SR: torch.Tensor
    aux_loss: torch.Tensor
    counts_E: torch.Tensor
    capacity: int
    num_experts: int
    entropy: torch.Tensor | None = None
    places: Places | None = None

    def relaid(self, place: Place, capacity: int) -> DenseRouting:
        assert self.places is None, "relaid once already"
        places = find_places(place, self.num_slots, self.num_experts * capacity, self.dispatch_SR.device)
        return replace(self, places=places, capacity=capacity)
