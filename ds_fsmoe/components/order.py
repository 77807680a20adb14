# SPDX-License-Identifier: Apache-2.0
"""Defines the base class of orders, which permute tokens into slots and results back.

A layer calls its order around dispatch and combine; ``orders`` holds the orders of the package.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from ds_fsmoe.components.routing import Routing, RoutingBase
from ds_fsmoe.ops import REFERENCE, Ops


class OrderBase(ABC):
    """Moves tokens into the slots that a gate chose (order) and results back to their tokens (i-order).

    An order's law: with one slot per token and weight 1, ``restore(arrange(x)) == x``. A subclass defines
    :meth:`arrange`, [S, M] to [E, C, M], and :meth:`restore`, [E, C, M] to [S, M]. It declares the kinds of routing
    that it reads.

    Examples:
        >>> import torch, ds_fsmoe
        >>> class OneByOne(ds_fsmoe.OrderBase):
        ...     def arrange(self, x_SM, routing):
        ...         x_RM = x_SM.new_zeros(routing.num_slots + 1, x_SM.shape[1])  # the last row takes dropped tokens
        ...         for slots_S in routing.slots_KS:
        ...             x_RM[slots_S] = x_SM
        ...         return x_RM[:-1].view(routing.num_experts, routing.capacity, -1)
        ...     def restore(self, y_ECM, routing):
        ...         y_RM = torch.nn.functional.pad(y_ECM.flatten(0, 1), (0, 0, 0, 1))
        ...         return (y_RM[routing.slots_KS] * routing.weights_KS.unsqueeze(-1)).sum(dim=0)
        >>> slots_KS, weights_KS = torch.tensor([[0, 3, 2]]), torch.ones(1, 3)
        >>> routing = ds_fsmoe.Routing(slots_KS, weights_KS, torch.zeros(()), torch.tensor([1, 2]), 2, 2)
        >>> order, x_SM = OneByOne(), torch.randn(3, 8)
        >>> torch.equal(order.restore(order.arrange(x_SM, routing), routing), x_SM)
        True
    """

    reads: ClassVar[tuple[type[RoutingBase], ...]] = (Routing,)
    """The kinds of routing that it reads."""
    ops: Ops = REFERENCE
    """The custom operators to use; the layer sets them."""

    @abstractmethod
    def arrange(self, x_SM: torch.Tensor, routing: RoutingBase) -> torch.Tensor:
        """Copy tokens into slots [E, C, M]; a slot without a token is zero.

        Args:
            x_SM: [S, M], the tokens of this rank.
            routing: a decision of one of the kinds in ``reads``.
        """

    @abstractmethod
    def restore(self, y_ECM: torch.Tensor, routing: RoutingBase) -> torch.Tensor:
        """Return the result of each token, [S, M]: the weighted sum over its slots, zero where all were dropped.

        Args:
            y_ECM: [E, C, M], the experts' results.
            routing: the decision by which the slots were filled.
        """
