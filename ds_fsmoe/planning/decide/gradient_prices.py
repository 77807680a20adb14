# SPDX-License-Identifier: Apache-2.0
"""What gradients cost in the two windows of a layer's backward: how much longer it gets by so many milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ds_fsmoe.planning.decide.block_times import BlockTimes, Order

_CURVE_POINTS = 17
_FEW = 24
"""So many orders are all looked at for a curve."""
Price = Callable[[np.ndarray], np.ndarray]
"""Time of gradients in a window -> how much longer the layer gets."""


def window_prices(
    orders: Sequence[Order], alone: Order, moe: BlockTimes, whole: BlockTimes, num_micro_batches: int = 1
) -> tuple[Price, Price]:
    """Return the prices of the windows inside a layer's experts' part and beside the rest of it.

    Args:
        orders: the ways to run the layer, of which the best one is taken for every time of gradients.
        alone: the one that is taken without gradients.
        moe: the times of the experts' part.
        whole: the times of the whole layer.
        num_micro_batches: of which the last one sends gradients. All run in the same way, so that the others pay for
            one that is not the best without gradients.
    """
    alone_ms = moe.with_ms(orders, 0.0)
    base_ms = float(alone_ms.min())
    others_ms = (num_micro_batches - 1) * (alone_ms - base_ms)[:, None]
    if all(moe.has_closed_form(order) for order in orders):

        def priced(grad_ms: np.ndarray) -> np.ndarray:
            return (moe.times_ms(orders, grad_ms) + others_ms).min(axis=0) - base_ms

        def dense(grad_ms: np.ndarray) -> np.ndarray:
            return np.maximum(0.0, grad_ms - whole.after_ms)

        return priced, dense
    grid_ms = np.linspace(0.0, 1.5 * max(base_ms, whole.after_ms), _CURVE_POINTS)
    kept = list(range(len(orders)))
    if len(orders) > _FEW:
        kept = _promising(orders, alone_ms, moe.times_ms(orders, grid_ms[[_CURVE_POINTS // 3, -1]]))
    few = [orders[index] for index in kept]
    of_orders_ms = np.column_stack([alone_ms[kept], moe.times_ms(few, grid_ms[1:])])
    moe_ms = (of_orders_ms + others_ms[kept]).min(axis=0)
    dense_ms = whole.times_ms([alone], 0.0, grid_ms)[0]
    return _Curve(grid_ms, moe_ms - moe_ms[0]), _Curve(grid_ms, dense_ms - dense_ms[0])


def _promising(orders: Sequence[Order], *times_ms: np.ndarray) -> list[int]:
    """Return the places of those of many orders that matter for a curve: with few gradients, more, and many, the best
    of each degree, and of these the best eight."""
    kept: set[int] = set()
    for column_ms in np.column_stack([each.reshape(len(orders), -1) for each in times_ms]).T:
        of_degree: dict[int, int] = {}
        for index in np.argsort(column_ms, kind="stable"):
            of_degree.setdefault(orders[index].degree, int(index))
        kept.update(list(of_degree.values())[:8])
    return sorted(kept)


@dataclass(frozen=True)
class _Curve:
    """A function by its points: straight between them, and one to one behind the last."""

    at_ms: np.ndarray
    extra_ms: np.ndarray

    def __call__(self, grad_ms: np.ndarray) -> np.ndarray:
        beyond_ms = np.maximum(0.0, grad_ms - self.at_ms[-1])
        return np.interp(grad_ms, self.at_ms, np.maximum.accumulate(np.maximum(self.extra_ms, 0.0))) + beyond_ms
