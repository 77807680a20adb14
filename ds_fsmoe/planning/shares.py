# SPDX-License-Identifier: Apache-2.0
"""Chunks of different sizes: small ones at the ends, where the other lanes wait for them.

For one order of tasks on lanes that do not slow each other down, every start time is a maximum of sums of chunk sizes,
so the best sizes are a linear program.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ds_fsmoe.planning.block_times import BlockTimes, Order

SMALLEST = 0.02
"""No chunk is smaller than this part of an equal one: its matrix products would be too small for a straight line."""


def best_shares(
    times: BlockTimes, order: Order, moe_grad_ms: float = 0.0, dense_grad_ms: float = 0.0
) -> tuple[float, ...] | None:
    """The shares of the chunks with which a layer is through first, if nothing contends.

    Returns:
        One per chunk, summing to 1; ``None`` where the program finds none.
    """
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    fixed_ms, scaled_ms, chunk_of, after = times.linear_program(order, moe_grad_ms, dense_grad_ms)
    tasks, degree = len(fixed_ms), order.degree
    # Variables: the start of every task, the shares, the makespan.
    rows: list[int] = []
    columns: list[int] = []
    values: list[float] = []
    bounds_ms: list[float] = []

    def ends_before(task: int, variable: int) -> None:
        """start + fixed + scaled * share <= variable"""
        row = len(bounds_ms)
        rows.extend((row, row, row))
        columns.extend((task, tasks + chunk_of[task], variable))
        values.extend((1.0, scaled_ms[task], -1.0))
        bounds_ms.append(-fixed_ms[task])

    for task, needed in enumerate(after):
        for each in needed:
            ends_before(each, task)
        ends_before(task, tasks + degree)
    shape = (len(bounds_ms), tasks + degree + 1)
    total = np.zeros((1, shape[1]))
    total[0, tasks : tasks + degree] = 1.0
    target = np.zeros(shape[1])
    target[-1] = 1.0
    found = linprog(
        target,
        A_ub=coo_array((values, (rows, columns)), shape=shape).tocsr(),
        b_ub=bounds_ms,
        A_eq=total,
        b_eq=[1.0],
        bounds=[*[(0.0, None)] * tasks, *[(SMALLEST / degree, 1.0)] * degree, (0.0, None)],
        method="highs",
    )
    if not found.success:
        return None
    return _normalised(found.x[tasks : tasks + degree])


def _normalised(shares: Sequence[float]) -> tuple[float, ...]:
    rounded = [round(float(each), 4) for each in shares]
    largest = max(range(len(rounded)), key=rounded.__getitem__)
    rounded[largest] += 1.0 - sum(rounded)
    return tuple(rounded)
