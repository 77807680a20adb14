# SPDX-License-Identifier: Apache-2.0
"""What was decided about the placement of experts, for people and for the record of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ds_fsmoe.planning.expert_placement import ExpertPlacement
from ds_fsmoe.planning.placement_policies import Decision

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
    gain_ms: float | None
    """What a step is predicted to become shorter by; ``None``: nothing is known of times."""
    why: str


def if_it_lasts(now: ExpertPlacement, found: Decision, stretches: Sequence[np.ndarray], label: str) -> Decision:
    """Return a decision, or that nothing moves where its gain would not have been there in every stretch of steps.

    Args:
        now: the placement now.
        found: what was decided by all steps together.
        stretches: the rows that each rank had for each expert in each of several stretches.
        label: the label of the layer.
    """
    falls = [now.over_mean(each) - found.placement.over_mean(each) for each in stretches]
    if found.placement == now or min(falls) >= LASTING * (found.before - found.after):
        return found
    told = f"{label}: stays: the load has moved on, from where {falls[0]:.2f} of the mean were to be gained to where "
    return found.stays(now, f"{told}{falls[-1]:.2f} are")


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
    swaps = sum(each.num_swaps for each in of_moved)
    gain_ms = sum(each.gain_ms or 0.0 for each in of_moved)
    pays = max(each.pays_after_steps or 0 for each in decisions.values())
    first = max(of_moved, key=lambda each: each.balance)
    gain = f", {gain_ms:.1f} ms a step less, pays after {pays} step(s)" if gain_ms else ""
    return (
        f"placement at step {step}: {swaps} exchange(s) of experts in {len(decisions)} layer(s){gain}; {first.layer}: "
        f"the fullest rank {first.balance:.2f} -> {first.expected_balance:.2f} times the mean"
    )


def as_rows(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Return events as plain data, for the record of a run."""
    return [asdict(each) for each in events]
