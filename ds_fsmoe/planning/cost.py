# SPDX-License-Identifier: Apache-2.0
"""What a task costs: alpha + size * beta, as the paper models it (section 4.1, equation 1), and how that is fitted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

GOOD_R2 = 0.98
"""From here on a straight line describes the measurements; a plan made from a worse one would be a guess."""
GOOD_RESIDUAL = 0.05
"""So does a line that no measurement leaves by more than this share, even if there is hardly a slope to explain."""


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Time of one task.

    Raises:
        ValueError: a coefficient that is negative or not finite.
    """

    alpha_ms: float
    """Start-up: what a task of size 0 takes."""
    beta_ms: float
    """Per unit of size; which unit (bytes, elements, multiply-adds) is the caller's."""

    def __post_init__(self) -> None:
        for name in ("alpha_ms", "beta_ms"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"LinearCost: {name} = {value}: must be a finite number of at least 0")

    def ms(self, size: float, launches: int = 1) -> float:
        """Milliseconds of a task of this size, done in so many launches."""
        return launches * self.alpha_ms + size * self.beta_ms


@dataclass(frozen=True)
class Fit:
    """A cost with the evidence for it."""

    cost: LinearCost
    r2: float
    """Coefficient of determination."""
    sizes: tuple[float, ...]
    """Where it was measured."""
    residuals_ms: tuple[float, ...]
    """Measured minus fitted, one per size."""

    @property
    def worst_residual_ms(self) -> float:
        """The largest deviation of a measurement from the line."""
        return max(abs(each) for each in self.residuals_ms)

    @property
    def is_good(self) -> bool:
        """Whether the line describes the measurements."""
        pairs = zip(self.sizes, self.residuals_ms, strict=True)
        return self.r2 >= GOOD_R2 or all(abs(off) <= GOOD_RESIDUAL * self.cost.ms(size) for size, off in pairs)

    def require_good(self, what: str) -> LinearCost:
        """The cost, if it can be trusted.

        Args:
            what: the operation, for the message.

        Raises:
            ValueError: the fit is bad; with r^2 and the worst residual.
        """
        if not self.is_good:
            raise ValueError(
                f"{what}: a straight line does not describe what was measured (r^2 = {self.r2:.4f}, needed "
                f"{GOOD_R2}; worst residual {self.worst_residual_ms:.3g} ms): measure again, or at other sizes"
            )
        return self.cost


def fit(sizes: Sequence[float], times_ms: Sequence[float]) -> Fit:
    """Least squares of alpha + size * beta, neither below 0.

    Args:
        sizes: at least three, at least two of them different.
        times_ms: measured medians, one per size.

    Raises:
        ValueError: too few, unequal or impossible numbers.
    """
    size, time_ms = np.asarray(sizes, dtype=float), np.asarray(times_ms, dtype=float)
    if size.shape != time_ms.shape or size.ndim != 1 or len(size) < 3 or len(set(size.tolist())) < 2:
        raise ValueError(
            f"fit: {len(size)} sizes and {len(time_ms)} times: needed are three of each, at least two sizes different"
        )
    if not (np.isfinite(size).all() and np.isfinite(time_ms).all() and (size >= 0).all() and (time_ms >= 0).all()):
        raise ValueError("fit: sizes and times must be finite and at least 0")
    # Sizes span many orders of magnitude, so the slope is solved for in units of the largest.
    unit = size.max() or 1.0
    alpha_ms, slope_ms = _non_negative_line(size / unit, time_ms)
    residuals = time_ms - alpha_ms - slope_ms * size / unit
    spread = float(((time_ms - time_ms.mean()) ** 2).sum())
    r2 = 1.0 - float((residuals**2).sum()) / spread if spread > 0 else float(np.allclose(residuals, 0))
    return Fit(LinearCost(alpha_ms, slope_ms / unit), r2, tuple(size.tolist()), tuple(residuals.tolist()))


def _non_negative_line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Intercept and slope of the best line with neither below 0: the free optimum, or the better of the two edges."""
    slope, intercept = np.polyfit(x, y, 1)
    if slope >= 0 and intercept >= 0:
        return float(intercept), float(slope)
    through_origin = (0.0, max(0.0, float(x @ y / (x @ x))))
    flat = (max(0.0, float(y.mean())), 0.0)
    return min(through_origin, flat, key=lambda line: float(((y - line[0] - line[1] * x) ** 2).sum()))
