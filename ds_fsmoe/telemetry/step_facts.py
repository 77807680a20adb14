# SPDX-License-Identifier: Apache-2.0
"""Counts what a step is told by besides its times: the tokens of this rank, and memory. Neither waits for a device."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_fsmoe.components.gate import in_backward

ON_DEVICE, OF_PROCESS = "allocated on the device", "resident in the process"
"""What is said of memory, by the kind of device."""


class TokenCount:
    """Counts the tokens that come to a layer in training, of this rank; those computed again in a backward once.

    Args:
        layer: the layer; its input has a token in each row.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._num_tokens = 0
        self.is_paused = False
        """Whether the forward that is under way has no batch."""
        self.hook = layer.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.is_paused or not layer.training or in_backward():
            return
        hidden = next((each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)), None)
        if hidden is not None and hidden.dim() > 1:
            self._num_tokens += hidden.numel() // max(1, hidden.shape[-1])

    def take(self) -> int:
        """Return the tokens since the last call."""
        found, self._num_tokens = self._num_tokens, 0
        return found


def memory_reader(device: torch.device) -> tuple[str, Callable[[], tuple[int, int]]] | None:
    """Return what is read, and a function that returns bytes now and at most so far; ``None``: nothing can be read."""
    if device.type == "cuda":
        return ON_DEVICE, lambda: _on_cuda(device)
    statm = Path("/proc/self/statm")
    if device.type != "cpu" or not statm.is_file():
        return None
    page_bytes = os.sysconf("SC_PAGE_SIZE")

    def of_process() -> tuple[int, int]:
        now_bytes = int(statm.read_text().split()[1]) * page_bytes
        return now_bytes, max(now_bytes, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)

    return OF_PROCESS, of_process


def _on_cuda(device: torch.device) -> tuple[int, int]:
    # The allocator's own counters, on the host.
    found = torch.cuda.memory_stats_as_nested_dict(device).get("allocated_bytes", {}).get("all", {})
    return int(found.get("current", 0)), int(found.get("peak", 0))
