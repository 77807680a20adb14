# SPDX-License-Identifier: Apache-2.0
"""Chooses the number of chunks of a layer: the exact answer, and the paper's for comparison (section 4.2, algorithm
1).

Both assume the paper's order of tasks on three independent lanes. The inter-node link runs IN1..INr, the gradient
slice, OUT1..OUTr; the intra-node link G1..Gr, R1..Rr; compute E1..Er. For that order the makespan has a closed form, so
the exact search is a minimum over a few numbers. The order with one stream of traffic has a closed form, too (IN1 G1 ..
INr Gr, the gradient slice, R1 OUT1 .. Rr OUTr). The paper's four cases equal the first form if gather and reduce take
equally long. They mispredict about a fifth of other layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ds_fsmoe.planning.cost import LinearCost

TIE = 1e-12
"""Times that differ by less than this share are equal: floating point may add the same numbers in another order."""


@dataclass(frozen=True, slots=True)
class Load:
    """Describes one kind of work of a layer, unchunked."""

    cost: LinearCost
    size: float
    """The size for the whole layer, in the unit of the cost."""
    launches: int = 1
    """The number of launches per chunk."""

    def chunk_ms(self, degree: float) -> float:
        """Return the milliseconds of one of ``degree`` equal chunks."""
        return self.cost.ms(self.size / degree, self.launches)


NOTHING = Load(LinearCost(0.0, 0.0), 0.0)


@dataclass(frozen=True, slots=True)
class Phase:
    """Describes one MoE layer in one phase (forward or backward). Its two all-to-alls are equal."""

    a2a: Load
    gather: Load
    expert: Load
    reduce: Load
    grad_ms: float = 0.0
    """The time of the gradient slice that is sent during this layer; 0 in the forward phase."""
    links: Literal["paper", "shared"] = "paper"
    """The traffic: two links side by side, or one stream."""

    def chunk_times_ms(self, degree: float) -> tuple[float, float, float, float]:
        """Return a, g, e, s of the paper: the ms of all-to-all, gather, expert and reduce-scatter of one chunk."""
        return (
            self.a2a.chunk_ms(degree),
            self.gather.chunk_ms(degree),
            self.expert.chunk_ms(degree),
            self.reduce.chunk_ms(degree),
        )


BOTTLENECKS = ("inter-node link", "one lane's chunks in a row", "intra-node link")
STREAM = "one stream of traffic"


def bounds_ms(phase: Phase, degree: int) -> tuple[float, float, float]:
    """Return the ms of three chains of tasks; the longest is the makespan. Only the first grows with the gradient
    slice.

    The first runs through the inter-node link alone (or the one stream). The second runs through one lane's chunks with
    one chunk of everything else around them. The third runs through all gathers and then all reduces.
    """
    a, g, e, s = phase.chunk_times_ms(degree)
    if phase.links == "shared":
        enter, leave = a + g, s + a
        row = enter + e + leave + (degree - 1) * max(enter, e, leave)
        return degree * (enter + leave) + phase.grad_ms, row, 0.0
    return (
        2 * degree * a + phase.grad_ms,
        2 * a + g + e + s + (degree - 1) * max(a, g, e, s),
        2 * a + g + s + (degree - 1) * (max(a, g) + max(a, s)),
    )


def makespan_ms(phase: Phase, degree: int) -> float:
    """Return the exact milliseconds of the layer at this degree."""
    return max(bounds_ms(phase, degree))


def smallest_of_best(times_ms: Sequence[float]) -> int:
    """Return the index of the first time that ties with the best."""
    enough_ms = min(times_ms) * (1 + TIE)
    return next(index for index, time_ms in enumerate(times_ms) if time_ms <= enough_ms)


def choose_exact(phase: Phase, max_degree: int = 16) -> int:
    """Return the best integer degree, by the closed form at each. A tie goes to the smaller: fewer, larger tasks.

    Raises:
        ValueError: ``max_degree`` is below 1.
    """
    _check(max_degree)
    return 1 + smallest_of_best([makespan_ms(phase, degree) for degree in range(1, max_degree + 1)])


def choose_slsqp(phase: Phase, max_degree: int = 16) -> int:
    """Return the degree of the paper's algorithm 1, which serves as a comparison.

    It minimises each case's formula over real r >= 1 under the case's predicates, and rounds the best r.

    Raises:
        ValueError: ``max_degree`` is below 1, or the layer has one stream of traffic.
    """
    _check(max_degree)
    if phase.links == "shared":
        raise ValueError("solver = 'slsqp': the paper's four cases need two parallel links, not one stream")
    best: tuple[float, float] | None = None
    for case, clauses in _CLAUSES.items():
        for clause in clauses:
            found = _minimise(phase, case, clause, max_degree)
            if found is not None and (best is None or found < best):
                best = found
    return 1 if best is None else min(max_degree, max(1, round(best[1])))


def _check(max_degree: int) -> None:
    if max_degree < 1:
        raise ValueError(f"max_degree = {max_degree}: must be at least 1")


def _predicates(p: Phase, r: float) -> dict[str, float]:
    """Return the paper's predicates Q1 to Q7 as differences: a predicate holds where its value is above 0."""
    a, g, e, s = p.chunk_times_ms(r)
    # Q7 has the same formula as Q5 and stands for the other value of Q1.
    q5 = p.grad_ms - (r * e - 2 * (r - 1) * a + g + s)
    return {
        "Q1": a - g,
        "Q2": r * e - 2 * (r - 1) * a,
        "Q3": r * e - (r - 1) * (g + s),
        "Q4": p.grad_ms - (g + s),
        "Q5": q5,
        "Q6": p.grad_ms - (r * g + r * s - 2 * (r - 1) * a),
        "Q7": q5,
    }


# Case -> its clauses; a clause is a list of (predicate, whether it holds).
_Clause = tuple[tuple[str, bool], ...]
_CLAUSES: dict[int, tuple[_Clause, ...]] = {
    1: (
        (("Q1", True), ("Q2", False), ("Q4", True)),
        (("Q1", True), ("Q2", True), ("Q5", True)),
        (("Q1", False), ("Q3", False), ("Q6", True)),
        (("Q1", False), ("Q3", True), ("Q7", True)),
    ),
    2: ((("Q1", True), ("Q2", True), ("Q5", False)), (("Q1", False), ("Q3", True), ("Q7", False))),
    3: ((("Q1", True), ("Q2", False), ("Q4", False)),),
    4: ((("Q1", False), ("Q3", False), ("Q6", False)),),
}


def paper_case(phase: Phase, degree: float) -> int:
    """Return the case of the paper's figure 4 whose predicates hold; exactly one case fits each layer."""
    found = _predicates(phase, degree)
    for case, clauses in _CLAUSES.items():
        if any(all((found[predicate] > 0) == holds for predicate, holds in clause) for clause in clauses):
            return case
    raise AssertionError("the predicates of the four cases are exhaustive")


def paper_case_ms(phase: Phase, case: int, degree: float) -> float:
    """Return the paper's formula for one case (equations 2 and following), even where the case does not apply."""
    a, g, e, s = phase.chunk_times_ms(degree)
    return {
        1: 2 * degree * a + phase.grad_ms,
        2: 2 * a + g + s + degree * e,
        3: 2 * degree * a + g + s,
        4: 2 * a + degree * (g + s),
    }[case]


def _minimise(phase: Phase, case: int, clause: _Clause, max_degree: int) -> tuple[float, float] | None:
    """Return (time, r) of the best real r that SLSQP finds for one clause, or None if it finds none that fits."""
    from scipy.optimize import minimize  # only the paper's method needs it, and loading it takes a second

    def margin(r: np.ndarray, predicate: str, holds: bool) -> float:
        value = _predicates(phase, float(r[0]))[predicate]
        return value if holds else -value

    constraints = [{"type": "ineq", "fun": margin, "args": each} for each in clause]
    found = minimize(
        lambda r: paper_case_ms(phase, case, float(r[0])),
        x0=np.array([min(2.0, float(max_degree))]),
        bounds=[(1.0, float(max_degree))],
        constraints=constraints,
        method="SLSQP",
    )
    fits = all(margin(found.x, *each) >= -1e-6 for each in clause)
    return (float(found.fun), float(found.x[0])) if found.success and fits else None
