# SPDX-License-Identifier: Apache-2.0
"""What was predicted of one step beside what was measured of it, in numbers and in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

_WORST = 3

Event = tuple[str, float, int]
"""(name, value, samples), as DeepSpeed's monitors take them."""


@dataclass(frozen=True)
class Compared:
    """Milliseconds in one optimizer step."""

    predicted_ms: float
    measured_ms: float

    @property
    def off_ms(self) -> float:
        """By how much it differs."""
        return abs(self.measured_ms - self.predicted_ms)


@dataclass(frozen=True)
class StepComparison:
    """One step, the same on every rank: forwards and backwards of all micro batches, without the optimizer."""

    step: int
    whole: Compared
    rest: Compared
    """What is in no phase; "predicted" is what it was before."""
    phases: Mapping[str, Compared]
    """"L03/backward" -> all its runs together. Of ranks that exchange tokens it is measured on the one that waits
    least: it comes last."""
    kinds: Mapping[str, Compared]
    """Kind of task -> all of them together: computed on the slowest rank, sent by the rank that waits least."""

    @property
    def drift(self) -> float:
        """The share of the prediction by which the step differs from it; below 0 it was faster."""
        predicted = self.whole.predicted_ms
        return (self.whole.measured_ms - predicted) / predicted if predicted > 0 else math.inf

    def events(self, num_samples: int) -> list[Event]:
        """For monitors.

        Args:
            num_samples: that have been trained with.
        """
        named = {"step": self.whole, "rest": self.rest, **self.phases}
        named |= {f"tasks/{kind}": each for kind, each in self.kinds.items()}
        return [
            (f"fsmoe/{name}/{which}", getattr(each, which), num_samples)
            for name, each in named.items()
            for which in ("predicted_ms", "measured_ms")
        ]

    def worst(self) -> str:
        """What differs most, in words."""
        named = {"the rest of the model": self.rest, **self.phases, **self.kinds}
        # What hardly differs says nothing.
        telling = {name: each for name, each in named.items() if each.off_ms >= self.whole.off_ms / 10}
        found = sorted(telling.items(), key=lambda item: -item[1].off_ms)[:_WORST]
        return ", ".join(f"{name} {each.predicted_ms:.4g} and {each.measured_ms:.4g} ms" for name, each in found)
