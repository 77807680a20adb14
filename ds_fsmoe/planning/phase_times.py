# SPDX-License-Identifier: Apache-2.0
"""The times of one layer's experts' part in one phase, by which the way to run it is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ds_fsmoe.planning.block_times import BlockTimes, Order


@dataclass(frozen=True)
class PhaseTimes:
    """The times of one layer's MoE part in one phase."""

    same: BlockTimes
    """The times if the backward has the chunks of the forward."""
    other: BlockTimes | None = None
    """The times if it has other chunks; ``None``: that makes no difference."""
    isolated: BlockTimes | None = None
    """``same`` on lanes that do not slow each other down; ``None``: they do not."""
    grad_ms: float = 0.0
    """The time of the gradients that are sent in it."""
    num_micro_batches: int = 1
    """Of which the last one sends them; all are cut alike."""

    @property
    def grads_ms(self) -> tuple[float, ...]:
        """The times of gradients with which :meth:`mean_ms` looks at a layer."""
        return (self.grad_ms,) if self.num_micro_batches == 1 else (self.grad_ms, 0.0)

    def of(self, same_chunks: bool) -> BlockTimes:
        """Return the times that hold for such chunks."""
        return self.same if same_chunks or self.other is None else self.other

    def mean_ms(self, orders: Sequence[Order], same_chunks: bool = True) -> np.ndarray:
        """Return the mean time of a micro-batch for each way to run it, [orders]."""
        return self.mean_of(self.of(same_chunks), orders)

    def mean_of(self, times: BlockTimes, orders: Sequence[Order]) -> np.ndarray:
        """Return the same by given times."""
        last_ms = times.with_ms(orders, self.grad_ms)
        if self.num_micro_batches == 1 or not self.grad_ms:
            return last_ms
        earlier_ms = times.with_ms(orders, 0.0)
        return earlier_ms + (last_ms - earlier_ms) / self.num_micro_batches
