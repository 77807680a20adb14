# SPDX-License-Identifier: Apache-2.0
"""What a gate decides. There is a kind of routing for every way of deciding it, and an order reads some of them.

Here is what all kinds have in common, and the usual one, in which every token chooses its experts.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

Place = Callable[[torch.Tensor], torch.Tensor]
"""Slot numbers, any shape, to the numbers of their rows: for one that is none, the number of rows."""


@dataclass(frozen=True)
class Given:
    """A choice that was made before, for a gate to go by again: its weights still come from the scores of its call."""

    experts_KS: torch.Tensor | None = None
    """[K, S] integers: the expert of every choice; -1 where a token is to choose by itself."""
    leaves_some: bool = False
    """Says whether some tokens are to choose by themselves."""
    slots_KS: torch.Tensor | None = None
    """[K, S]: the slot of every choice, see :class:`Routing`; ``None``: the gate decides who stays in a full expert."""
    capacity: int | None = None
    """C of these slots."""
    tokens_R: torch.Tensor | None = None
    """[R]: the token in each slot, of a gate whose experts choose."""

    def completed(self, own: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return [K, S] int64: the experts, where tokens are to choose by themselves those of ``own``."""
        assert self.experts_KS is not None
        experts_KS = self.experts_KS.long()
        return torch.where(experts_KS < 0, own(), experts_KS) if self.leaves_some else experts_KS


class RoutingBase(ABC):
    """The decision of one gate call: which tokens go to which slots, and what of the results comes back to whom.

    Letters: S tokens on this rank, E experts (all ranks), K choices per token, C slots per expert, R = E * C slots, or
    the rows in which they lie. A gate gives a :class:`Routing`, a :class:`SlotRouting` or a :class:`DenseRouting`. All
    have ``aux_loss``, a scalar, ``counts_E`` [E] and the other attributes below, and an order that reads the kind.

    Examples:
        >>> import torch, ds_fsmoe
        >>> gate = ds_fsmoe.SwitchGate(capacity_factor=1.5)
        >>> gate.build_once(model_dim=8, num_experts=4)
        >>> routing = gate(torch.randn(16, 8))
        >>> isinstance(routing, ds_fsmoe.RoutingBase), routing.capacity, routing.num_slots
        (True, 6, 24)
        >>> routing.aux_loss.shape, routing.counts_E.sum()
        (torch.Size([]), tensor(16))
    """

    order: ClassVar[str] = "sparse"
    """Name of the order that "auto" takes."""

    aux_loss: torch.Tensor
    """Scalar: the load-balancing loss, to be added to the model's loss by the model; 0 where there is none."""
    counts_E: torch.Tensor
    """[E] int64: how many tokens of this rank chose each expert, before any was dropped."""
    capacity: int
    """C: slots of each expert for this rank's tokens; the same on every rank that exchanges tokens."""
    num_experts: int
    """E."""
    entropy: torch.Tensor | None = None
    """Scalar, in nats: of a token's probabilities over experts, as a mean over tokens. Where it was asked for."""

    @property
    def num_slots(self) -> int:
        """R = E * C, which is also the index that stands for "none"."""
        return self.num_experts * self.capacity

    def placed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Scalars: how many choices have found a place, and of how many."""
        return self.counts_E.sum(), self.counts_E.sum()

    def given(self) -> Given | None:
        """What a gate needs to decide the same again; ``None`` where it has nothing to choose."""
        return None

    @abstractmethod
    def relaid(self, place: Place, capacity: int) -> RoutingBase:
        """The same decision, for rows that lie elsewhere than ``expert * C + position``.

        Args:
            place: where the row of each slot lies.
            capacity: how many rows there are per expert, at least C; those that are no slot's are empty.
        """


@dataclass(frozen=True)
class Routing(RoutingBase):
    """Each token has chosen, at most K experts.

    Args:
        slots_KS: [K, S] int64: ``expert * capacity + position``, or ``num_experts * capacity`` where the choice was
            dropped.
        weights_KS: [K, S] float: what the expert's output is multiplied with; 0 where the choice was dropped.
        aux_loss: a scalar, see :class:`RoutingBase`.
        counts_E: [E] int64: the tokens of this rank that chose each expert, before any was dropped.
        capacity: C.
        num_experts: E.
        entropy: a scalar, see :class:`RoutingBase`.
        experts_KS: [K, S] int64: the expert of every choice, also where it was dropped; ``None``: the gate does not
            say.

    Examples:
        Three tokens, two experts with two slots each; the last token is dropped:

        >>> import torch, ds_fsmoe
        >>> slots_KS, weights_KS = torch.tensor([[0, 2, 4]]), torch.tensor([[1.0, 0.5, 0.0]])
        >>> routing = ds_fsmoe.Routing(slots_KS, weights_KS, torch.zeros(()), torch.tensor([2, 1]), 2, 2)
        >>> routing.num_slots, [each.item() for each in routing.placed()]
        (4, [2, 3])
    """

    slots_KS: torch.Tensor
    weights_KS: torch.Tensor
    aux_loss: torch.Tensor
    counts_E: torch.Tensor
    capacity: int
    num_experts: int
    entropy: torch.Tensor | None = None
    experts_KS: torch.Tensor | None = None

    @property
    def limits_E(self) -> torch.Tensor | None:
        """[E]: as many slots of each expert as may be taken; ``None``: however many are."""
        return self.counts_E

    def chosen(self) -> torch.Tensor:
        """[K, S] int64: the expert of every choice; E where it was dropped and the gate does not say more."""
        if self.experts_KS is not None:
            return self.experts_KS
        return self.slots_KS.div(max(1, self.capacity), rounding_mode="floor")

    def given(self) -> Given | None:
        return Given(self.experts_KS, slots_KS=self.slots_KS, capacity=self.capacity)

    def placed(self) -> tuple[torch.Tensor, torch.Tensor]:
        return (self.slots_KS < self.num_slots).sum(), self.counts_E.sum()

    def relaid(self, place: Place, capacity: int) -> Routing:
        return replace(self, slots_KS=place(self.slots_KS), capacity=capacity)


class BareRouting(Routing):
    """A decision of which nothing is known but the slots and weights: counts and loss are made when somebody asks."""

    @classmethod
    def of(
        cls,
        slots_KS: torch.Tensor,
        weights_KS: torch.Tensor,
        num_experts: int,
        capacity: int = 1,
        experts_KS: torch.Tensor | None = None,
    ) -> BareRouting:
        """Return a decision; see :class:`Routing`. With one slot per expert the slots are the experts."""
        found = cls.__new__(cls)
        vars(found).update(
            slots_KS=slots_KS,
            weights_KS=weights_KS,
            capacity=capacity,
            num_experts=num_experts,
            entropy=None,
            experts_KS=experts_KS,
        )
        return found

    @property
    def limits_E(self) -> None:
        return None

    @functools.cached_property
    def aux_loss(self) -> torch.Tensor:  # type: ignore[override]
        return self.weights_KS.new_zeros(())

    @functools.cached_property
    def counts_E(self) -> torch.Tensor:  # type: ignore[override]
        counts = self.slots_KS.new_zeros(self.num_experts + 1)
        expert_KS = self.slots_KS.div(max(1, self.capacity), rounding_mode="floor").clamp(0, self.num_experts)
        return counts.scatter_add_(0, expert_KS.reshape(-1), torch.ones_like(expert_KS).reshape(-1))[:-1]


@dataclass(frozen=True)
class Places:
    """Where the rows of all slots lie, both ways."""

    row_of_slot: torch.Tensor
    """[E * C] int64."""
    slot_of_row: torch.Tensor
    """[R] int64, E * C for a row that is no slot's."""


def find_places(place: Place, num_slots: int, num_rows: int, device: torch.device) -> Places | None:
    """What ``place`` does to all slots; ``None`` if every slot's row has the slot's own number."""
    slots = torch.arange(num_slots, device=device)
    row_of_slot = place(slots)
    if row_of_slot is slots and num_rows == num_slots:
        return None
    slot_of_row = torch.full((num_rows,), num_slots, device=device).scatter_(0, row_of_slot, slots)
    return Places(row_of_slot, slot_of_row)


def kind_of(gate: Any) -> type[RoutingBase]:
    """The kind of routing that a gate, or a class of gates, gives: its attribute ``gives``.

    What says nothing gives a :class:`Routing`: stock's own gates, and whatever a user wraps around them.
    """
    return getattr(gate, "gives", Routing)
