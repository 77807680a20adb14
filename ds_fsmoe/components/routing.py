# SPDX-License-Identifier: Apache-2.0
"""Defines the decisions of gates, one class per kind of decision; an order reads some of the kinds.

This module has the common base, and the usual kind, in which every token chooses its experts. It converts that kind to
and from the form of DeepSpeed's own gate.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

Place = Callable[[torch.Tensor], torch.Tensor]
"""Slot numbers, any shape, to the numbers of their rows; the number for "no slot" becomes the number of rows."""


@dataclass(frozen=True)
class ReplayedRouting:
    """Holds an earlier choice for a gate to replay: weights still come from the scores of the new call."""

    experts_KS: torch.Tensor | None = None
    """[K, S] integers: the expert of every choice; -1 where a token chooses by itself."""
    leaves_some: bool = False
    """True if some tokens choose by themselves."""
    slots_KS: torch.Tensor | None = None
    """[K, S]: the slot of every choice, see :class:`Routing`; ``None``: the gate decides which are dropped."""
    capacity: int | None = None
    """C of these slots."""
    tokens_R: torch.Tensor | None = None
    """[R]: the token in each slot, for a gate whose experts choose."""

    def completed(self, own: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the experts, [K, S] int64; where tokens choose by themselves, those of ``own()``."""
        assert self.experts_KS is not None
        experts_KS = self.experts_KS.long()
        return torch.where(experts_KS < 0, own(), experts_KS) if self.leaves_some else experts_KS


class RoutingBase(ABC):
    """Holds the decision of one gate call: the slots of tokens, and the weights of results.

    Letters: S tokens on this rank, E experts (all ranks), K choices per token, C slots per expert, R = E * C slots, or
    the rows in which they are stored. A gate returns a :class:`Routing`, a :class:`SlotRouting` or a
    :class:`DenseRouting`. All have ``aux_loss``, a scalar, ``counts_E`` [E] and the other attributes below, and an
    order that reads the kind.

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
    """Name of the order that ``"auto"`` chooses."""

    aux_loss: torch.Tensor
    """Scalar: the load-balancing loss, which the model adds to its own loss; 0 for a gate without one."""
    counts_E: torch.Tensor
    """[E] int64: the tokens of this rank that chose each expert, before any was dropped."""
    capacity: int
    """C: slots of each expert for this rank's tokens; equal on all ranks that exchange tokens."""
    num_experts: int
    """E."""
    entropy: torch.Tensor | None = None
    """Scalar, in nats: the entropy of a token's probabilities, as a mean over tokens; ``None`` unless requested."""

    @property
    def num_slots(self) -> int:
        """Return the number of slots, R = E * C, which is also the index for "no slot"."""
        return self.num_experts * self.capacity

    def placed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two scalars: the number of choices that were not dropped, and the number of all choices."""
        return self.counts_E.sum(), self.counts_E.sum()

    def given(self) -> ReplayedRouting | None:
        """Return the data with which a gate repeats its decision; ``None`` for a gate that makes no choice."""
        return None

    @abstractmethod
    def relaid(self, place: Place, capacity: int) -> RoutingBase:
        """Return the same decision for rows that are not stored at ``expert * C + position``.

        Args:
            place: returns the row of each slot.
            capacity: the rows per expert, at least C; rows without a slot are empty.
        """


@dataclass(frozen=True)
class Routing(RoutingBase):
    """Holds the decision of a gate in which each token chooses at most K experts.

    Args:
        slots_KS: [K, S] int64: ``expert * capacity + position``, or ``num_experts * capacity`` where the choice was
            dropped.
        weights_KS: [K, S] float: the factor on the expert's output; 0 where the choice was dropped.
        aux_loss: a scalar, see :class:`RoutingBase`.
        counts_E: [E] int64: the tokens of this rank that chose each expert, before any was dropped.
        capacity: C.
        num_experts: E.
        entropy: a scalar, see :class:`RoutingBase`.
        experts_KS: [K, S] int64: the expert of every choice, dropped ones included; ``None`` if the gate does not
            provide it.

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
        """Return the maximum number of taken slots of each expert, [E]; ``None`` for no limit."""
        return self.counts_E

    def chosen(self) -> torch.Tensor:
        """Return the expert of every choice, [K, S] int64; E for a dropped choice of a gate that does not provide
        it."""
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
    """Holds a decision with slots and weights only: counts and loss are computed on the first access."""

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
    """Maps slots to rows, and rows to slots."""

    row_of_slot: torch.Tensor
    """[E * C] int64: the row of each slot."""
    slot_of_row: torch.Tensor
    """[R] int64: the slot of each row, E * C for a row without one."""


def find_places(place: Place, num_slots: int, num_rows: int, device: torch.device) -> RowPlaces | None:
    """Return the mapping of ``place`` on all slots; ``None`` if every slot's row has the slot's own number."""
    slots = torch.arange(num_slots, device=device)
    row_of_slot = place(slots)
    if row_of_slot is slots and num_rows == num_slots:
        return None
    slot_of_row = torch.full((num_rows,), num_slots, device=device).scatter_(0, row_of_slot, slots)
    return RowPlaces(row_of_slot, slot_of_row)


def kind_of(gate: Any) -> type[RoutingBase]:
    """Return the kind of routing that a gate, or a gate class, declares in its attribute ``gives``.

    The default is :class:`Routing`: stock's gates, and wrappers of users around them.
    """
    return getattr(gate, "gives", Routing)


# ---- Routing in which every slot is a mixture of all tokens, and every token's result of all slots' results


@dataclass(frozen=True)
class DenseRouting(RoutingBase):
    """Holds the weights of every token in every slot, and of every slot in every token's result.

    Args:
        dispatch_SR: [S, E * C] float: the weight of each token in each slot, 0 for a token that takes no part.
        combine_SR: [S, E * C] float: the weight of each slot in each token's result, 0 for a token that takes no part.
        aux_loss: a scalar, see :class:`RoutingBase`.
        counts_E: [E] int64: the tokens that take part, for every expert.
        capacity: C.
        num_experts: E.
        entropy: a scalar, see :class:`RoutingBase`.
        places: the rows of the slots, if not in the order of the columns. The two matrices are by far the largest
            tensors here, so rows are moved instead of columns.

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


# ---- Routing in which slots choose: an expert fills each slot with one token, and a token may be in any number


@dataclass(frozen=True)
class SlotRouting(RoutingBase):
    """Holds the decision of a gate whose experts choose: each slot has one token, or none.

    A :class:`Routing` with K = E choices per token, nearly all dropped, would be equivalent. Restoring from it would
    read E * S rows instead of E * C.

    Args:
        tokens_R: [R] int64: the token in each slot, ``num_tokens`` for an empty slot.
        weights_R: [R] float: the factor on the slot's result; 0 for an empty slot.
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
        """Return two scalars: the tokens that an expert has taken, and all tokens; those that take no part count as not
        taken."""
        is_taken = self.tokens_R.new_zeros(self.num_tokens + 1).index_fill_(0, self.tokens_R, 1)[:-1]
        return is_taken.sum(), torch.full_like(is_taken.sum(), self.num_tokens)

    def given(self) -> ReplayedRouting:
        return ReplayedRouting(tokens_R=self.tokens_R, capacity=self.capacity)

    def relaid(self, place: Place, capacity: int) -> SlotRouting:
        places = find_places(place, self.num_slots, self.num_experts * capacity, self.tokens_R.device)
        if places is None:
            return self
        # The slot behind the last one means "no slot".
        tokens = torch.cat([self.tokens_R, self.tokens_R.new_full((1,), self.num_tokens)])
        weights = torch.cat([self.weights_R, self.weights_R.new_zeros(1)])
        return replace(
            self, tokens_R=tokens[places.slot_of_row], weights_R=weights[places.slot_of_row], capacity=capacity
        )


# ---- Conversion to and from the form of DeepSpeed's own gate, for hooks on that gate
#
# Letters: S tokens on this rank, E experts (all ranks), K choices per token, C slots per expert.


StockRoutes = tuple[torch.Tensor, torch.Tensor, int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""(auxiliary loss, C, E, experts [K, S] int32, positions [K, S] int32, weights [K, S], counts [E]). A dropped
choice has expert -1 and position 0."""
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
    # One extra column takes dropped choices.
    weights_SR = routing.weights_KS.new_zeros(num_tokens, routing.num_slots + 1)
    weights_SR = weights_SR.scatter_add(1, routing.slots_KS.t(), routing.weights_KS.t())[:, :-1]
    weights_SEC = weights_SR.reshape(num_tokens, routing.num_experts, routing.capacity)
    return routing.aux_loss, weights_SEC, weights_SEC.bool(), routing.counts_E


def routing_of(routes: Any) -> Routing:
    """Return the decision that DeepSpeed's layer reads from such a tuple."""
    aux_loss, capacity, num_experts, expert_KS, position_KS, weights_KS, counts_E = routes
    capacity = int(capacity)
    slots_KS = torch.where(expert_KS >= 0, expert_KS.long() * capacity + position_KS.long(), num_experts * capacity)
    return Routing(slots_KS, weights_KS, aux_loss, counts_E, capacity, num_experts)


def _places(routing: Routing) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    slots_KS, capacity = routing.slots_KS, max(1, routing.capacity)
    expert_KS = slots_KS.div(capacity, rounding_mode="floor")
    return slots_KS < routing.num_slots, expert_KS, slots_KS - expert_KS * capacity
