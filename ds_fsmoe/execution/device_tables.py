# SPDX-License-Identifier: Apache-2.0
"""Tables of numbers on a device, kept between calls: they depend on sizes, which rarely change."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch

from ds_fsmoe.execution.captures import is_capturing


class DeviceTables:
    """Keeps tables by what they were made of.

    On CUDA each stream has its own, because nothing orders one stream's first use after the kernels of another stream
    that filled the table.

    Args:
        limit_bytes: the limit for all tables; the least recently used are dropped. Sizes that follow from the tokens
            would otherwise fill a device's memory with tables that are never used again.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._tables: OrderedDict[tuple[Hashable, ...], torch.Tensor] = OrderedDict()
        self._num_bytes = 0
        # A forward that is computed again runs in a thread of autograd's.
        self._lock = threading.Lock()

    def get(self, made_of: Hashable, like: torch.Tensor, make: Callable[[torch.device], torch.Tensor]) -> torch.Tensor:
        """Return a table on the device of a tensor.

        Args:
            made_of: all that the table depends on.
            like: a tensor that is used together with the table.
            make: makes the table on a device.
        """
        device = like.device
        # What is made while a graph is captured lives with the graph, and what a tracer makes has no numbers.
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
