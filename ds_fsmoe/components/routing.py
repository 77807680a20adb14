# SPDX-License-Identifier: Apache-2.0
"""What a gate decides: which slot every choice of every token takes, and with which weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Routing:
    """The decision of one gate call, as every order reads it.

    Letters: S tokens on this rank, E experts (all ranks), K choices per token, C slots per expert.
    """

    slots_KS: torch.Tensor
    """[K, S] int64: ``expert * capacity + position``, or ``num_experts * capacity`` where the choice was dropped."""
    weights_KS: torch.Tensor
    """[K, S] float: what the expert's output is multiplied with; 0 where the choice was dropped."""
    aux_loss: torch.Tensor
    """Scalar: the load-balancing loss, to be added to the model's loss by the model."""
    counts_E: torch.Tensor
    """[E] int64: how many tokens of this rank chose each expert, before any was dropped."""
    capacity: int
    """C: slots of each expert for this rank's tokens; the same on every rank that exchanges tokens."""
    num_experts: int
    """E."""

    @property
    def num_slots(self) -> int:
        """E * C, which is also the index that stands for "dropped"."""
        return self.num_experts * self.capacity
