# SPDX-License-Identifier: Apache-2.0
"""The decision of a gate. There is a kind of routing for every kind of decision; an order reads some of them.

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
class ReplayedRouting:
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
    """The decision of one gate call: the slots of tokens, and the weights of results.

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

    def given(self) -> ReplayedRouting | None:
        """The data with which a gate repeats its decision; ``None`` where it has no choice."""
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

    def given(self) -> ReplayedRouting | None:
        return ReplayedRouting(self.experts_KS, slots_KS=self.slots_KS, capacity=self.capacity)

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
class RowPlaces:
    """Where the rows of all slots lie, both ways."""

    row_of_slot: torch.Tensor
    """[E * C] int64."""
    slot_of_row: torch.Tensor
    """[R] int64, E * C for a row that is no slot's."""


def find_places(place: Place, num_slots: int, num_rows: int, device: torch.device) -> RowPlaces | None:
    """Return the effect of ``place`` on all slots; ``None`` if every slot's row has the slot's own number."""
    slots = torch.arange(num_slots, device=device)
    row_of_slot = place(slots)
    if row_of_slot is slots and num_rows == num_slots:
        return None
    slot_of_row = torch.full((num_rows,), num_slots, device=device).scatter_(0, row_of_slot, slots)
    return RowPlaces(row_of_slot, slot_of_row)


def kind_of(gate: Any) -> type[RoutingBase]:
    """The kind of routing that a gate, or a class of gates, gives: its attribute ``gives``.

    What says nothing gives a :class:`Routing`: stock's own gates, and whatever a user wraps around them.
    """
    return getattr(gate, "gives", Routing)


# ---- Routing in which every slot is a mixture of all tokens, and every token's result one of all slots'
# results


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
    places: RowPlaces | None = None

    def relaid(self, place: Place, capacity: int) -> DenseRouting:
        assert self.places is None, "relaid once already"
        places = find_places(place, self.num_slots, self.num_experts * capacity, self.dispatch_SR.device)
        return replace(self, places=places, capacity=capacity)


# ---- Routing in which slots choose: an expert fills each of its slots with one token, and a token may be in
# any number


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

    def given(self) -> ReplayedRouting:
        return ReplayedRouting(tokens_R=self.tokens_R, capacity=self.capacity)

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


# ---- A decision in the form in which DeepSpeed's own gate returns it, and back: what hooks on that gate are
# shown
#
# Letters: S tokens on this rank, E experts (all ranks), K choices per token, C slots per expert.


StockRoutes = tuple[torch.Tensor, torch.Tensor, int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""(auxiliary loss, C, E, experts [K, S] int32, positions [K, S] int32, weights [K, S], counts [E]). A choice that was
dropped has expert -1 and position 0."""
StockMasks = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""(auxiliary loss, weights [S, E, C], the same as true or false, counts [E])."""


def stock_routes(routing: Routing) -> StockRoutes:
    """Return the routing as DeepSpeed's gate returns it with ``sparse_routes=True``."""
    is_kept_KS, expert_KS, position_KS = _places(routing)
    return (
        routing.aux_loss,
        torch.tensor(routing.capacity),
        routing.num_experts,
        torch.where(is_kept_KS, expert_KS, -1).to(torch.int32),
        torch.where(is_kept_KS, position_KS, 0).to(torch.int32),
        routing.weights_KS,
        routing.counts_E,
    )


def stock_masks(routing: Routing) -> StockMasks:
    """Return the routing as DeepSpeed's gate returns it without ``sparse_routes``."""
    num_tokens = routing.slots_KS.shape[1]
    # One column more, for what was dropped.
    weights_SR = routing.weights_KS.new_zeros(num_tokens, routing.num_slots + 1)
    weights_SR = weights_SR.scatter_add(1, routing.slots_KS.t(), routing.weights_KS.t())[:, :-1]
    weights_SEC = weights_SR.reshape(num_tokens, routing.num_experts, routing.capacity)
    return routing.aux_loss, weights_SEC, weights_SEC.bool(), routing.counts_E


def routing_of(routes: Any) -> Routing:
    """The decision that DeepSpeed's layer would read from such a tuple."""
    aux_loss, capacity, num_experts, expert_KS, position_KS, weights_KS, counts_E = routes
    capacity = int(capacity)
    slots_KS = torch.where(expert_KS >= 0, expert_KS.long() * capacity + position_KS.long(), num_experts * capacity)
    return Routing(slots_KS, weights_KS, aux_loss, counts_E, capacity, num_experts)


def _places(routing: Routing) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    slots_KS, capacity = routing.slots_KS, max(1, routing.capacity)
    expert_KS = slots_KS.div(capacity, rounding_mode="floor")
    return slots_KS < routing.num_slots, expert_KS, slots_KS - expert_KS * capacity
