# SPDX-License-Identifier: Apache-2.0
"""Defines the rules of what the planner may choose. All code that lists orders of a layer applies them.

A rule restricts what is chosen, predicted and tried, including the chunks of a schedule by name. A schedule that is
left without chunks is refused with the rule's name. ``num_chunks`` runs as written, and DeepSpeed's own schedule passes
every rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from ds_fsmoe.planning.cost import Cost
from ds_fsmoe.planning.decide.block_times import Order
from ds_fsmoe.planning.workload import MoEWork

MOST_IN_TWO_BATCH = 4
"""The most chunks of a sub-batch, where no number is asked for."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Describes one order of a layer in one phase."""

    order: Order
    moe: MoEWork
    """The layer's stages, which say how its tokens are exchanged; of a sub-batch, what it has of them."""
    backward: bool
    is_two_batch: bool = False
    """True if the two sub-batches of a micro-batch alternate."""
    costs: Mapping[str, Cost] = field(default_factory=dict)
    """Kind of task -> its cost in this phase; empty where nothing is measured, as for ``lina`` by rule."""

    @property
    def is_stock(self) -> bool:
        """Return True if the order is DeepSpeed's: the whole micro-batch in one chunk."""
        return self.order.degree == 1 and not self.is_two_batch


Rule = Callable[[Proposal], bool]
"""Whether a way may be chosen."""


def has_slots(proposal: Proposal) -> bool:
    """Return True if there are at most as many chunks as slots; more gain nothing."""
    return proposal.moe.capacity is None or proposal.order.degree <= max(1, proposal.moe.capacity)


def has_few_chunks_in_two_batch(proposal: Proposal) -> bool:
    """Return True if a sub-batch has few chunks. The other one computes meanwhile, so more chunks hide little."""
    return not proposal.is_two_batch or proposal.order.degree <= MOST_IN_TWO_BATCH


RULES: list[Rule] = [has_slots, has_few_chunks_in_two_batch]
"""All of which a way has to pass. A further rule is a function, written here."""


def may_be_chosen(proposal: Proposal) -> bool:
    """Return True if a proposal passes every rule."""
    return proposal.is_stock or all(rule(proposal) for rule in RULES)


def allowed(
    orders: Iterable[Order],
    moe: MoEWork,
    backward: bool,
    is_two_batch: bool = False,
    costs: Mapping[str, Cost] | None = None,
) -> list[Order]:
    """Return the orders that may be chosen for a layer in a phase.

    Args:
        orders: the orders of a system.
        moe: the stages of the layer, or of its sub-batch.
        backward: whether the phase is the backward.
        is_two_batch: whether the layer runs with two-batch overlap.
        costs: kind of task -> its cost in the phase.
    """
    proposals = [Proposal(each, moe, backward, is_two_batch, costs or {}) for each in dict.fromkeys(orders)]
    return [each.order for each in proposals if may_be_chosen(each)]


class RuleError(ValueError):
    """Raised when rules leave a schedule by name no chunks; the message names the rules."""


def check_named(
    schedule: str,
    orders: Iterable[Order],
    moe: MoEWork,
    backward: bool,
    costs: Mapping[str, Cost] | None = None,
) -> None:
    """Refuse a schedule by name if the rules allow none of its numbers of chunks. Otherwise it would run as another
    one.

    Args:
        schedule: its name, as in ``fsmoe.schedule``.
        orders: the orders of the schedule.
        moe, backward, costs: see :func:`allowed`.

    Raises:
        RuleError: the slots suffice for chunks, but the rules allow none.
    """
    proposals = [Proposal(each, moe, backward, costs=costs or {}) for each in orders if each.degree > 1]
    proposals = [each for each in proposals if has_slots(each)]
    if not proposals or any(map(may_be_chosen, proposals)):
        return
    alone = [rule.__name__ for rule in RULES if not any(map(rule, proposals))]
    names = alone or [rule.__name__ for rule in RULES if not all(map(rule, proposals))]
    raise RuleError(
        f'fsmoe.schedule = "{schedule}": {" and ".join(names)} in ds_fsmoe/planning/decide/rules.py '
        f"allow{'s' if len(names) == 1 else ''} none of its numbers of chunks; write "
        '"best", which has other orders, or num_chunks, which runs as written'
    )
