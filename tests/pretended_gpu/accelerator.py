# SPDX-License-Identifier: Apache-2.0
"""The accelerator that DeepSpeed is given where the GPU is pretended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed.accelerator.real_accelerator as chosen
import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator


class PretendedAccelerator(CPU_Accelerator):
    """Calls itself ``cuda``, and has of it what is needed to train; the rest is the CPU's."""

    Stream = property(lambda self: torch.cuda.Stream)
    Event = property(lambda self: torch.cuda.Event)

    def __init__(self) -> None:
        super().__init__()
        self._name = "cuda"

    def is_synchronized_device(self) -> bool:
        return False

    def device_name(self, device_index: int | None = None) -> str:
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def current_device_name(self) -> str:
        return f"cuda:{torch.cuda.current_device()}"

    def device_count(self) -> int:
        return 8

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda


def _as_cuda(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(torch.cuda, name)(*args)


for each in ("device", "set_device", "current_device", "synchronize", "stream", "current_stream", "default_stream"):
    setattr(PretendedAccelerator, each, _as_cuda(each))


@contextmanager
def accelerated() -> Iterator[None]:
    """Within this, DeepSpeed's accelerator is the pretended one."""
    before = chosen.ds_accelerator
    chosen.ds_accelerator = PretendedAccelerator()
    try:
        yield
    finally:
        chosen.ds_accelerator = before
