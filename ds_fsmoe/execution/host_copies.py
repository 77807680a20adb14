# SPDX-License-Identifier: Apache-2.0
"""Copies what a device has computed to the host, through memory that the device writes by itself."""

from __future__ import annotations

import torch


class HostCopy:
    """A copy on its way to the host; the tensor itself, where that is on the host already.

    Args:
        tensor: any shape and dtype. It stays as it is until the copy has arrived.
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
        """Return whether :meth:`wait` would return at once."""
        return self._arrived is None or self._arrived.query()

    def wait(self) -> torch.Tensor:
        """Return the copy, on the host. The host waits here for the device."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host
