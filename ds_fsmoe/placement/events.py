# SPDX-License-Identifier: Apache-2.0
"""What was decided about the placement of experts, for people and for the record of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ds_fsmoe.planning.expert_placement import ExpertPlacement, fullest_over_mean
from ds_fsmoe.planning.placement_costs import Seen
from ds_fsmoe.planning.placement_decision import Decision

LASTING = 0.5
"""Of what the fullest rank is to have less, how much it must have had less in either of two stretches of steps."""


@dataclass(frozen=True)
class Event:
    """What happened to the placement of one layer at one step."""

    step: int
    layer: str
    """The label of the layer."""
    rows_E: tuple[float, ...]
    """[E]: the rows of a call for each expert, on average over the steps that were counted."""
    balance: float
    """The rows of the fullest rank over the mean, in these steps."""
    expected_balance: float
    """The same with what was decided."""
    num_swaps: int
    num_replicas: int
    gain_ms: float | None
    """What a step is predicted to become shorter by; ``None``: nothing is known of times."""
    why: str


def balance_of(placement: ExpertPlacement, rows_GE: np.ndarray, node_of_rank: Sequence[int]) -> float:
    """Return the rows of the fullest rank over the mean.

    Args:
        placement: where experts are.
        rows_GE: the rows that each rank has for each expert.
        node_of_rank: the node of each rank.
    """
    return fullest_over_mean(placement.rows_between(rows_GE, node_of_rank).sum(0))


def if_it_lasts(now: ExpertPlacement, found: Decision, stretches: Sequence[Seen], label: str) -> Decision:
    """Return a decision, or that nothing moves where its gain would not have been there in every stretch of steps.

    Args:
        now: the placement now.
        found: what was decided by all steps together.
        stretches: what was measured in each of several stretches.
        label: the label of the layer.
    """
    if found.placement == now:
        return found
    falls = [
        balance_of(now, each.rows_GE, each.node_of_rank) - balance_of(found.placement, each.rows_GE, each.node_of_rank)
        for each in stretches
    ]
    if min(falls) >= LASTING * (found.before - found.after):
        return found
    told = f"{label}: stays: the load has moved on, from where {falls[0]:.2f} of the mean were to be gained to where "
    return replace(
        found,
        placement=now,
        gain_ms_per_step=None if found.gain_ms_per_step is None else 0.0,
        moves_ms=None if found.moves_ms is None else 0.0,
        pays_after_steps=None,
        after=found.before,
        why=f"{told}{falls[-1]:.2f} are",
    )


def in_one_line(step: int, decisions: Mapping[str, Decision], events: Sequence[Event]) -> str:
    """Return what was decided at a step about all layers, in one line for the log.

    Args:
        step: the number of the next optimizer step.
        decisions: label -> decision, of the layers that change.
        events: those of all layers.
    """
    worst = max(events, key=lambda each: each.balance)
    if not decisions:
        return (
            f"placement at step {step}: nothing moves; the fullest rank has {worst.balance:.2f} times the mean "
            f"({worst.layer}): {worst.why}"
        )
    of_moved = [each for each in events if each.layer in decisions]
    swaps, replicas = sum(each.num_swaps for each in of_moved), sum(each.num_replicas for each in of_moved)
    gain_ms = sum(each.gain_ms or 0.0 for each in of_moved)
    pays = max(each.pays_after_steps or 0 for each in decisions.values())
    first = max(of_moved, key=lambda each: each.balance)
    gain = f", {gain_ms:.1f} ms a step less, pays after {pays} step(s)" if gain_ms else ""
    return (
        f"placement at step {step}: {swaps} exchange(s) of experts and {replicas} replica(s) in {len(decisions)} "
        f"layer(s){gain}; {first.layer}: the fullest rank {first.balance:.2f} -> {first.expected_balance:.2f} times "
        "the mean"
    )


def as_rows(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Return events as plain data, for the record of a run."""
    return [asdict(each) for each in events]
