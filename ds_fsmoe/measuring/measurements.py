# SPDX-License-Identifier: Apache-2.0
"""The measurements by name: what is known already is not measured again.

Every rank knows the same, because what was kept from before is read by one rank and sent to all; so all of them measure
the same things in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from ds_fsmoe.measuring.stopwatch import Prepare, Stopwatch
from ds_fsmoe.planning.measured import Timing


@dataclass
class Measurements:
    """The values, the same on every rank. A name says what was measured and what it depends on besides the cluster."""

    timings: dict[str, Timing] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    """The values: milliseconds, factors, and 0 or 1 for yes or no."""


class Measuring:
    """This class measures what is not known yet. Every method is collective.

    Args:
        watch: of this job.
        known: is added to.
        on_progress: hears what is about to be measured; on every rank.
    """

    def __init__(
        self, watch: Stopwatch, known: Measurements, on_progress: Callable[[str], None] = lambda what: None
    ) -> None:
        self.watch = watch
        self.known = known
        self._on_progress = on_progress

    def timing(
        self,
        name: str,
        unit: str,
        sizes: Sequence[int],
        size_of_one: float,
        prepare: Prepare,
        group: dist.ProcessGroup | None = None,
    ) -> Timing:
        """Measure an operation at several sizes.

        Args:
            name: of what is measured.
            unit: of the sizes in the result, such as "byte".
            sizes: given to ``prepare``.
            size_of_one: units in a size of 1.
            prepare: makes ready for a size.
            group: of a collective.

        Raises:
            MeasuringError: on every rank, if one has failed.
        """
        if name not in self.known.timings:
            self._on_progress(name)
            found = self.watch.times(name, sizes, prepare, group)
            in_units = tuple(each * size_of_one for each in sizes)
            self.known.timings[name] = Timing(
                unit, in_units, tuple(found.times_ms), tuple(found.issued_ms), tuple(found.least_ms)
            )
        return self.known.timings[name]

    def number(self, name: str, measure: Callable[[], float]) -> float:
        """Return a number; ``measure`` is collective and returns the same on every rank."""
        if name not in self.known.numbers:
            self._on_progress(name)
            self.known.numbers[name] = measure()
        return self.known.numbers[name]
