# SPDX-License-Identifier: Apache-2.0
"""The accelerator that DeepSpeed is given where the GPU is pretended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed.accelerator.real_accelerator as chosen
import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator


class PretendedAccelerator(CPU_Accelerator):
    """Calls itself ``cuda``, and has of it what is needed to train; the rest is the CPU's."""

    def __init__(self) -> None:
        super().__init__()
        self._name = "cuda"

    def is_synchronized_device(self) -> bool:
        return False

    def device_name(self, device_index: int | None = None) -> str:
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        return torch.cuda.device(device_index)

    def set_device(self, device_index: int) -> None:
        torch.cuda.set_device(device_index)

    def current_device(self) -> int:
        return torch.cuda.current_device()

    def current_device_name(self) -> str:
        return f"cuda:{torch.cuda.current_device()}"

    def device_count(self) -> int:
        return 8

    def synchronize(self, device_index: int | None = None) -> None:
        torch.cuda.synchronize()

    @property
    def Stream(self) -> Any:
        return torch.cuda.Stream

    @property
    def Event(self) -> Any:
        return torch.cuda.Event

    def stream(self, stream: Any) -> Any:
        return torch.cuda.stream(stream)

    def current_stream(self, device_index: int | None = None) -> Any:
        return torch.cuda.current_stream()

    def default_stream(self, device_index: int | None = None) -> Any:
        return torch.cuda.default_stream()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda


@contextmanager
def accelerated() -> Iterator[None]:
    """Within this, DeepSpeed's accelerator is the pretended one."""
    before = chosen.ds_accelerator
    chosen.ds_accelerator = PretendedAccelerator()
    try:
        yield
    finally:
        chosen.ds_accelerator = before
