# SPDX-License-Identifier: Apache-2.0
"""The state that torch keeps per thread and that a body relies on: taken from one thread, applied in another.

It covers grad mode, inference mode, and autocast for the device types cpu and cuda. Not covered: dispatch and function
modes (``torch.device`` as a context), hooks on saved tensors, and profilers; they see the caller's thread only.

Random numbers need no handling here, but they need care. torch's CPU generator is shared by the whole process, so a
task on a link lane draws between the draws of the compute lane, in an order that differs from run to run: anything
that must be reproducible draws on the compute lane, or from a ``torch.Generator`` of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

_AUTOCAST_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class ThreadState:
    """The state of one thread at one moment."""

    is_grad_enabled: bool
    is_inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    """The tuples (device type, enabled, dtype)."""
    caches_casts: bool

    @staticmethod
    def here() -> ThreadState:
        """Return the current state of the calling thread."""
        return ThreadState(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple(
                (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
                for device in _AUTOCAST_DEVICES
            ),
            torch.is_autocast_cache_enabled(),
        )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Apply the state to the calling thread for the length of the block.

        This is for dedicated threads: only inference mode is undone, and the next block sets the rest again.
        """
        with torch.inference_mode() if self.is_inference else nullcontext():
            torch.set_grad_enabled(self.is_grad_enabled)  # after inference mode, which turns it off
            for device, is_enabled, dtype in self.autocast:
                torch.set_autocast_enabled(device, is_enabled)
                torch.set_autocast_dtype(device, dtype)
            torch.set_autocast_cache_enabled(self.caches_casts)
            # The cache of casts belongs to all threads, and an outermost autocast block that ends clears it: a block
            # inside a body is not to count as outermost while the caller is in one.
            torch.autocast_increment_nesting()
            try:
                yield
            finally:
                torch.autocast_decrement_nesting()
