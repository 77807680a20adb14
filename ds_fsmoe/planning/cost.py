# SPDX-License-Identifier: Apache-2.0
"""Defines the cost of a task, alpha + size * beta as in the paper (section 4.1, equation 1), and fits it to
measurements. The profiler fits costs; the planner reads them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ds_fsmoe.planning.schedule import DEQUANTISING, EXPERT, HOLD, QUANTISING, REST

GOOD_SHARE = 0.1
"""The largest typical deviation, as a share of the fitted time, at which a line describes the measurements: a plan from
a worse fit would be a guess. R^2 is no judge: of times that span two orders of magnitude it sees the largest alone, and
small sizes are what chunks are."""
_SCATTER = 0.1
"""The deviation, as a share, from which on a measurement counts linearly and no longer by its square. Over links of 25
Mbit/s repeated all-to-alls scatter by 10 to 19 percent (the interquartile range over 1.35) at every size from 16 kB to
1 MB: what scatters is a share and no constant, and the medians of several are within about this."""


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Holds the time of one task as a linear function of its size.

    Raises:
        ValueError: a coefficient is negative or not finite.
    """

    alpha_ms: float
    """The start-up time: the time of a task of size 0."""
    beta_ms: float
    """The time per unit of size; the caller chooses the unit (bytes, elements, multiply-adds)."""

    def __post_init__(self) -> None:
        for name in ("alpha_ms", "beta_ms"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"LinearCost: {name} = {value}: must be a finite number of at least 0")

    def ms(self, size: float, launches: int = 1) -> float:
        """Return the milliseconds of a task of this size in this many launches."""
        return launches * self.alpha_ms + size * self.beta_ms

    def times(self, share: float) -> LinearCost:
        """Return the cost multiplied by a share."""
        return self if share == 1.0 else LinearCost(share * self.alpha_ms, share * self.beta_ms)

    def plus(self, alpha_ms: float) -> LinearCost:
        """Return the same cost with a longer start-up, in ms."""
        return LinearCost(self.alpha_ms + alpha_ms, self.beta_ms)


@dataclass(frozen=True, slots=True)
class SwitchedCost:
    """Holds two lines: from some size on, a backend uses another protocol or algorithm."""

    below: LinearCost
    above: LinearCost
    switch_size: float
    """The smallest size on the upper line."""

    def ms(self, size: float, launches: int = 1) -> float:
        """Return the milliseconds; see :class:`LinearCost`."""
        return (self.below if size < self.switch_size else self.above).ms(size, launches)

    def times(self, share: float) -> SwitchedCost:
        """Return the cost multiplied by a share; see :class:`LinearCost`."""
        return SwitchedCost(self.below.times(share), self.above.times(share), self.switch_size)

    def plus(self, alpha_ms: float) -> SwitchedCost:
        """Return the cost with a longer start-up; see :class:`LinearCost`."""
        return SwitchedCost(self.below.plus(alpha_ms), self.above.plus(alpha_ms), self.switch_size)


Cost = LinearCost | SwitchedCost
HostCost = float | Mapping[str, float]
"""The time of a launch on the one thread that issues for all lanes: one number for all tasks, or by kind."""


def least_ms(cost: Cost, size: float, most_parts: int = 256) -> float:
    """Return the least time of a size that is split into up to ``most_parts`` parts of any sizes.

    Below the size at which a backend switches, a part may cost less than its share of the whole.
    """
    found_ms = [cost.ms(size)]
    if isinstance(cost, SwitchedCost) and 0 < cost.switch_size <= size:
        below, above, largest = cost.below, cost.above, cost.switch_size
        # So many pieces on the lower line, as large as they can be there; the rest, if any, in one on the upper.
        for pieces in range(1, min(most_parts, math.ceil(size / largest)) + 1):
            on_lower = min(size, pieces * largest)
            on_upper_ms = above.ms(size - on_lower) if on_lower < size else 0.0
            found_ms.append(below.ms(on_lower, pieces) + on_upper_ms)
    return min(found_ms)


@dataclass(frozen=True)
class Fit:
    """Holds a cost with the measurements that support it."""

    cost: Cost
    r2: float
    """The coefficient of determination."""
    sizes: tuple[float, ...]
    """The sizes at which it was measured."""
    residuals_ms: tuple[float, ...]
    """The measured minus the fitted times, one per size."""

    @property
    def worst_share(self) -> float:
        """Return the largest deviation, as a share of the fitted time at that size."""
        return max(
            abs(off) / max(self.cost.ms(size), 1e-12) for size, off in zip(self.sizes, self.residuals_ms, strict=True)
        )

    @property
    def typical_share(self) -> float:
        """Return the root mean square of the deviations, each as a share of the fitted time at that size."""
        shares = (off / max(self.cost.ms(size), 1e-12) for size, off in zip(self.sizes, self.residuals_ms, strict=True))
        return math.sqrt(sum(each**2 for each in shares) / len(self.sizes))

    @property
    def is_good(self) -> bool:
        """Return True if the line describes the measurements at the timed sizes."""
        return self.typical_share <= GOOD_SHARE


def fit(sizes: Sequence[float], times_ms: Sequence[float]) -> Fit:
    """Fit alpha + size * beta, both at least 0, so that relative deviations are small.

    Timings scatter in proportion to their length, so each size has the same weight. Outliers count little: a soft L1
    loss sums the logarithms of measured over fitted times.

    Args:
        sizes: at least three sizes, two or more of them different.
        times_ms: measured medians, one per size.

    Raises:
        ValueError: there are too few numbers, unequal counts, or numbers that are negative or not finite.
    """
    size, time_ms = np.asarray(sizes, dtype=float), np.asarray(times_ms, dtype=float)
    if size.shape != time_ms.shape or size.ndim != 1 or len(size) < 3 or len(set(size.tolist())) < 2:
        raise ValueError(
            f"fit: {len(size)} sizes and {len(time_ms)} times: needs three of each, with at least two different sizes"
        )
    if not (np.isfinite(size).all() and np.isfinite(time_ms).all() and (size >= 0).all() and (time_ms >= 0).all()):
        raise ValueError("fit: sizes and times must be finite and at least 0")
    return _fitted(size, time_ms)


def _fitted(size: np.ndarray, time_ms: np.ndarray) -> Fit:
    # Sizes span many orders of magnitude, so the slope is solved for in units of the largest.
    unit = size.max() or 1.0
    alpha_ms, slope_ms = _robust_line(size / unit, time_ms)
    residuals = time_ms - alpha_ms - slope_ms * size / unit
    spread = float(((time_ms - time_ms.mean()) ** 2).sum())
    r2 = 1.0 - float((residuals**2).sum()) / spread if spread > 0 else float(np.allclose(residuals, 0))
    return Fit(LinearCost(alpha_ms, slope_ms / float(unit)), r2, tuple(size.tolist()), tuple(residuals.tolist()))


def fit_switched(sizes: Sequence[float], times_ms: Sequence[float]) -> Fit:
    """Return :func:`fit`, or two lines if that is not good and two lines fit far better.

    Args:
        sizes: the sizes, ascending; two lines need at least six, three for each.
        times_ms: measured medians, one per size.

    Raises:
        ValueError: see :func:`fit`.
    """
    best = fit(sizes, times_ms)
    if best.is_good:
        return best
    size, time_ms = np.asarray(sizes, dtype=float), np.asarray(times_ms, dtype=float)
    one_share = best.worst_share
    for place in range(3, len(size) - 2):
        low = _fitted(size[:place], time_ms[:place])
        high = _fitted(size[place:], time_ms[place:])
        share = max(low.worst_share, high.worst_share)
        # More lines always fit better; a switch is believed where it leaves a fraction of the deviation.
        if share < min(0.4 * one_share, best.worst_share):
            assert isinstance(low.cost, LinearCost)
            assert isinstance(high.cost, LinearCost)
            residuals = (*low.residuals_ms, *high.residuals_ms)
            spread = float(((time_ms - time_ms.mean()) ** 2).sum())
            r2 = 1.0 - sum(each**2 for each in residuals) / spread if spread > 0 else best.r2
            best = Fit(SwitchedCost(low.cost, high.cost, float(size[place])), r2, best.sizes, residuals)
    return best


def _robust_line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Return intercept and slope, both at least 0, of the line with the least logarithmic deviations."""
    from scipy.optimize import least_squares

    least = 1e-6 * y.max()
    if not least:
        return 0.0, 0.0
    # What is at most a millionth of the longest time is noise of the clock.
    y = np.maximum(y, least)
    first = np.array(_non_negative_line(x, y, 1.0 / y))
    scale = np.array([max(y.min(), least), max((y / np.maximum(x, 1e-12)).min(), least)])

    def deviations(line: np.ndarray) -> np.ndarray:
        return np.log(np.maximum(line[0] + line[1] * x, least) / y)

    if np.abs(deviations(first)).max() < 1e-9:
        return float(first[0]), float(first[1])
    found = least_squares(
        deviations,
        first,
        bounds=(0.0, np.inf),
        loss="soft_l1",
        f_scale=_SCATTER,
        x_scale=scale,
        **dict.fromkeys(("ftol", "xtol", "gtol"), 1e-12),
    )
    # Bounds are kept to from inside: an end that is all but on one is on it.
    alpha_ms, slope_ms = (float(value) if value > 1e-6 * y.max() else 0.0 for value in found.x)
    return alpha_ms, slope_ms


def _non_negative_line(x: np.ndarray, y: np.ndarray, weight: np.ndarray) -> tuple[float, float]:
    """Return intercept and slope of the best line, both at least 0: the free optimum or the better edge."""
    slope, intercept = np.polyfit(x, y, 1, w=weight)
    if slope >= 0 and intercept >= 0:
        return float(intercept), float(slope)
    squared = weight**2
    through_origin = (0.0, max(0.0, float((squared * x) @ y / ((squared * x) @ x))))
    flat = (max(0.0, float(squared @ y / squared.sum())), 0.0)
    return min(through_origin, flat, key=lambda line: float((squared * (y - line[0] - line[1] * x) ** 2).sum()))


# ---- the costs of all tasks of one kind of layer: from a cluster's file or from measurements


_COMPUTED = (HOLD, REST, EXPERT, *QUANTISING, *DEQUANTISING)


@dataclass(frozen=True, eq=False)
class LayerCosts:
    """Holds costs by kind of task. Two are equal only if they are the same object, so that plans can be cached by
    them.
    """

    forward: Mapping[str, Cost]
    backward: Mapping[str, Cost]
    rechunked: Mapping[str, Cost] | None = None
    """The backward's costs if it has other chunks than the forward; ``None``: it makes no difference."""
    forward_host_ms: HostCost = 0.0
    """The launch costs of the thread that issues for all lanes; none if each lane issues its own tasks."""
    backward_host_ms: HostCost = 0.0
    rechunked_host_ms: HostCost = 0.0
    is_per_launch: bool = True
    """Whether each launch of a task adds the start-up. A measured cost is of the whole task with all its launches."""
    uses_rng: bool = False
    """Whether experts draw random numbers: then both phases must have the same chunks."""
    relative_residual: float = 0.0
    """The typical deviation of measurements from these costs, as a share: a smaller gain counts as none."""

    least: LayerCosts | None = None
    """What tasks cost at their fastest, for bounds; ``None``: not known."""

    @classmethod
    def written(cls, costs: Mapping[str, Cost], host_ms: float = 0.0) -> LayerCosts:
        """Return the costs of a cluster's file, the same in both phases."""
        return cls(costs, costs, None, host_ms, host_ms, host_ms)

    def of(self, backward: bool, same_chunks: bool = True) -> tuple[Mapping[str, Cost], HostCost]:
        """Return the costs of a phase and the host costs of its launches.

        Args:
            backward: whether the phase is the backward.
            same_chunks: whether the backward has the chunks of the forward.
        """
        if not backward:
            return self.forward, self.forward_host_ms
        if same_chunks or self.rechunked is None:
            return self.backward, self.backward_host_ms
        return self.rechunked, self.rechunked_host_ms

    def among_others(self, kinds: Collection[str], cost_of: Callable[[str, Mapping[str, Cost]], Cost]) -> LayerCosts:
        """Return the costs of a layer whose collectives run among other ranks. Its computation costs the same.

        Args:
            kinds: the kinds of tasks of that layer.
            cost_of: a kind of collective and this layer's costs of a phase -> the cost among the other ranks.
        """

        def costs(own: Mapping[str, Cost]) -> dict[str, Cost]:
            sent = {kind: cost_of(kind, own) for kind in kinds if kind not in _COMPUTED}
            return sent | {kind: cost for kind, cost in own.items() if kind in _COMPUTED}

        def host_ms(own: HostCost) -> HostCost:
            if not isinstance(own, Mapping):
                return own
            # To issue a collective takes the host as long among other ranks, and one kind of them as long as another.
            of_links = [each_ms for kind, each_ms in own.items() if kind not in _COMPUTED]
            return dict.fromkeys(kinds, max(of_links or own.values(), default=0.0)) | dict(own)

        return replace(
            self,
            forward=costs(self.forward),
            backward=costs(self.backward),
            rechunked=None if self.rechunked is None else costs(self.rechunked),
            forward_host_ms=host_ms(self.forward_host_ms),
            backward_host_ms=host_ms(self.backward_host_ms),
            rechunked_host_ms=host_ms(self.rechunked_host_ms),
        )
