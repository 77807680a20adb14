# SPDX-License-Identifier: Apache-2.0
"""Compares what was predicted of one step with what was measured, in numbers and in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

_WORST = 3


@dataclass(frozen=True)
class Compared:
    """Predicted and measured milliseconds in one optimizer step."""

    predicted_ms: float
    measured_ms: float

    @property
    def off_ms(self) -> float:
        """The difference between the two."""
        return abs(self.measured_ms - self.predicted_ms)


@dataclass(frozen=True)
class StepComparison:
    """Compares one step, the same on every rank: forwards and backwards of all micro batches, without the optimizer; in
    pipeline stages the whole batch with it."""

    step: int
    whole: Compared
    rest: Compared
    """The time outside of phases; its "predicted" is what it was before."""
    phases: Mapping[str, Compared]
    """"L03/backward" -> all its runs together. Of ranks that exchange tokens it is measured on the one that waits
    least, because that one comes last. In pipeline stages "stage1/backward" -> all of that stage, on its slowest
    rank."""
    kinds: Mapping[str, Compared]
    """Kind of task -> all of them together: computed on the slowest rank, sent by the rank that waits least."""
    lanes: Mapping[str, Compared]
    """Lane -> all tasks on it together, by the same ranks as ``kinds``."""
    load: float = 1.0
    """The rows of the fullest rank over those that the layers were planned for, as a mean over runs."""

    @property
    def drift(self) -> float:
        """The share of the prediction by which the step differs from it; below 0 the step was faster."""
        predicted = self.whole.predicted_ms
        return (self.whole.measured_ms - predicted) / predicted if predicted > 0 else math.inf

    @property
    def busy(self) -> dict[str, float]:
        """Lane -> its measured share of the phases."""
        phases_ms = sum(each.measured_ms for each in self.phases.values())
        return {lane: each.measured_ms / phases_ms for lane, each in self.lanes.items() if phases_ms}

    def values(self, is_detailed: bool) -> dict[str, float]:
        """Return milliseconds by name, for monitors.

        Args:
            is_detailed: include each phase and each kind of task, and not only sums over layers.
        """
        named = {"step": self.whole, "rest": self.rest}
        for direction in ("forward", "backward"):
            of_layers = [each for label, each in self.phases.items() if label.endswith(f"/{direction}")]
            if of_layers:
                named[direction] = Compared(
                    sum(each.predicted_ms for each in of_layers), sum(each.measured_ms for each in of_layers)
                )
        if is_detailed:
            named |= {**self.phases, **{f"tasks/{kind}": each for kind, each in self.kinds.items()}}
        found = {
            f"{name}/{which}": getattr(each, which)
            for name, each in named.items()
            for which in ("predicted_ms", "measured_ms")
        }
        return found | {f"busy/{lane}": share for lane, share in self.busy.items()}

    def worst(self) -> str:
        """Say in words what differs most."""
        named = {"the rest of the model": self.rest, **self.phases, **self.kinds}
        # What hardly differs says nothing.
        telling = {name: each for name, each in named.items() if each.off_ms >= self.whole.off_ms / 10}
        found = sorted(telling.items(), key=lambda item: -item[1].off_ms)[:_WORST]
        return ", ".join(f"{name} {each.predicted_ms:.4g} and {each.measured_ms:.4g} ms" for name, each in found)
