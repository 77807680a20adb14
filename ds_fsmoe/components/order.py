# SPDX-License-Identifier: Apache-2.0
"""What every order is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from ds_fsmoe.components.routing import Routing, RoutingBase
from ds_fsmoe.ops import REFERENCE, Ops


class OrderBase(ABC):
    """Moves tokens into the slots a gate gave them (order) and results back to their tokens (i-order).

    An order's law: with one slot per token and weight 1, ``restore(arrange(x)) == x``.
    """

    reads: ClassVar[tuple[type[RoutingBase], ...]] = (Routing,)
    """The kinds of routing it can go by."""
    ops: Ops = REFERENCE
    """The operators to use, where there are any for what it does; whoever takes the order in says which."""

    @abstractmethod
    def arrange(self, x_SM: torch.Tensor, routing: RoutingBase) -> torch.Tensor:
        """[S, M] tokens to [E, C, M] slots; a slot that no token took is zero."""

    @abstractmethod
    def restore(self, y_ECM: torch.Tensor, routing: RoutingBase) -> torch.Tensor:
        """[E, C, M] results to [S, M]: the weighted sum over a token's slots, zero where all were dropped."""
