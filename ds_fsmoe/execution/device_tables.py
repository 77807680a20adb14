# SPDX-License-Identifier: Apache-2.0
"""Caches tables on a device, copies to the host without a wait, and handles the rules of CUDA graph capture.

``row_sizes``, ``counts_exchange`` and ``slot_chunks`` keep index tables here. Telemetry and layers use
:class:`HostCopy`, and ``stream_lanes`` the rules of captures.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
import torch

# ---- Rules of CUDA graph capture: what is forbidden during it, and how a thread may still query a device


_RELAXED = 2
"""The value of CU_STREAM_CAPTURE_MODE_RELAXED."""


def is_capturing() -> bool:
    """Return True if work on this thread's current stream is captured into a graph instead of executed."""
    with suppress(RuntimeError):  # a torch without CUDA, or a failed device, which raises where it is used
        return torch.cuda.is_current_stream_capturing()
    return False


@contextmanager
def allow_queries_in_captures() -> Iterator[None]:
    """Allow this thread to query events inside the block while other threads capture graphs.

    CUDA aborts a capture in the default mode if any thread of the process queries an event of any stream. A thread in
    relaxed mode is exempt. That is safe here: the queried events were recorded outside of captures, and the block
    neither waits nor allocates.
    """
    exchange = _exchange_capture_mode()
    mode = ctypes.c_int(_RELAXED)
    if exchange is None or exchange(ctypes.byref(mode)) != 0:
        yield
        return
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))  # restores the earlier mode


@functools.cache
def _exchange_capture_mode() -> Callable[..., int] | None:
    """Return the driver's function, or ``None``; it is loaded wherever CUDA is used, for any build of torch."""
    with suppress(OSError, AttributeError):
        if torch.version.hip is not None:
            return ctypes.CDLL("libamdhip64.so").hipThreadExchangeStreamCaptureMode
        return ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1").cuThreadExchangeStreamCaptureMode
    return None


# ---- Copies from a device to the host, through pinned memory


class HostCopy:
    """Represents a copy to the host in flight; for a tensor on the host, the tensor itself.

    Args:
        tensor: any shape and dtype. It must not be changed before the copy has arrived.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._source, self._host, self._arrived = tensor, tensor, None
        if tensor.device.type == "cpu":
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._arrived = torch.get_device_module(tensor.device).Event()
        self._arrived.record()

    def has_arrived(self) -> bool:
        """Return True if :meth:`wait` would return at once."""
        return self._arrived is None or self._arrived.query()

    def wait(self) -> torch.Tensor:
        """Return the copy, on the host. The host waits for the device."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host


# ---- Tables on a device, kept between calls: they depend on sizes, which rarely change


class DeviceTables:
    """Caches tables by their sources.

    On CUDA each stream has its own tables, because another stream's kernels that filled a table are not ordered before
    its use.

    Args:
        limit_bytes: the limit for all tables; the least recently used are dropped. Otherwise sizes that depend on the
            tokens would fill the device with tables that are used once.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._tables: OrderedDict[tuple[Hashable, ...], torch.Tensor] = OrderedDict()
        self._num_bytes = 0
        # A recomputed forward runs in a thread of autograd.
        self._lock = threading.Lock()

    def get(self, made_of: Hashable, like: torch.Tensor, make: Callable[[torch.device], torch.Tensor]) -> torch.Tensor:
        """Return a table on the device of a tensor.

        Args:
            made_of: all that the table depends on.
            like: a tensor that is used together with the table.
            make: makes the table on a device.
        """
        device = like.device
        # A tensor made during a capture belongs to the graph, and one made by a tracer has no values.
        if type(like) is not torch.Tensor or (like.is_cuda and is_capturing()):
            return make(device)
        key = made_of, device, torch.cuda.current_stream(device).cuda_stream if like.is_cuda else 0
        with self._lock:
            if key in self._tables:
                self._tables.move_to_end(key)
                return self._tables[key]
        with torch.inference_mode(False):
            table = make(device)
        if type(table) is torch.Tensor:
            self._keep(key, table)
        return table

    def from_host(self, like: torch.Tensor, make: Callable[..., np.ndarray], *made_of: Hashable) -> torch.Tensor:
        """Return ``make(*made_of)`` on the device of a tensor.

        Args:
            like: a tensor that is used together with the table.
            make: makes the table on the host.
            made_of: all that the table depends on.
        """
        return self.get((make, *made_of), like, lambda device: torch.from_numpy(make(*made_of)).to(device))

    def _keep(self, key: tuple[Hashable, ...], table: torch.Tensor) -> None:
        with self._lock:
            if key in self._tables or table.nbytes > self._limit_bytes:
                return
            self._tables[key] = table
            self._num_bytes += table.nbytes
            while self._num_bytes > self._limit_bytes:
                self._num_bytes -= self._tables.popitem(last=False)[1].nbytes


TABLES = DeviceTables(limit_bytes=32 << 20)
"""The tables of all layers of this process."""
