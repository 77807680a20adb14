# SPDX-License-Identifier: Apache-2.0
"""Puts gradients end to end in one buffer, so that any stretch of them can travel as one message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn


@dataclass(frozen=True)
class Scaling:
    """Scales a message so that a sum over ranks becomes the gradient wanted; both functions work in place."""

    before: Callable[[torch.Tensor], object] | None = None
    after: Callable[[torch.Tensor], object] | None = None


class FlatGradients:
    """Holds the gradients that travel over one group in one type.

    Args:
        kind: the planner's GRAD or EXPERT_GRAD.
        parameters: the parameters in the order of their gradients in the buffer; all on one device.
        dtype: the type on the wire.
        group: the ranks that are summed over, for this traffic alone.
        scaling: what is done before and after the sum.
        extra: the number of elements at the end that belong to no parameter, and are not scaled.
        beside: whether started reductions run beside the caller's stream; otherwise they are sent in it.
    """

    def __init__(
        self,
        kind: str,
        parameters: Sequence[nn.Parameter],
        dtype: torch.dtype,
        group: dist.ProcessGroup,
        scaling: Scaling,
        device: torch.device,
        extra: int = 0,
        beside: bool = True,
    ) -> None:
        self.kind = kind
        self._beside = beside
        self.group = group
        self._scaling = scaling
        self.numel = sum(each.numel() for each in parameters)
        self._buffer = torch.zeros(self.numel + extra, dtype=dtype, device=device)
        self.extra = self._buffer[self.numel :]
        self.arrange(parameters)

    @property
    def dtype(self) -> torch.dtype:
        """The type on the wire."""
        return self._buffer.dtype

    @property
    def device(self) -> torch.device:
        """The device of the buffer."""
        return self._buffer.device

    @property
    def element_bytes(self) -> int:
        """The bytes of one gradient element on the wire."""
        return self._buffer.element_size()

    def arrange(self, parameters: Sequence[nn.Parameter]) -> None:
        """Put gradients in another order. The contents of the buffer are lost."""
        self.parameters = tuple(parameters)
        self.starts: list[int] = []
        """The index at which each parameter's gradient begins."""
        at = 0
        for each in self.parameters:
            self.starts.append(at)
            at += each.numel()

    def value(self, index: int) -> torch.Tensor:
        """Return the gradient of a parameter in the buffer: [numel]."""
        start = self.starts[index]
        return self._buffer[start : start + self.parameters[index].numel()]

    def place(self, index: int) -> torch.Tensor:
        """Return the gradient in the shape of the parameter and its layout in memory."""
        return _laid_out(self.value(index), self.parameters[index])

    def add(self, index: int, late: torch.Tensor | None) -> None:
        """Reduce what arrived of a gradient after its place was sent, ``None`` for nothing, and add it there."""
        place = self.value(index)
        message = torch.zeros_like(place)
        if late is not None:
            _laid_out(message, self.parameters[index]).copy_(late)
        self._reduce(message)
        place.add_(message)

    def send(self, first: int, stop: int) -> None:
        """Reduce elements [first, stop), in the calling thread and on its current stream."""
        self._reduce(self._buffer[first:stop])

    def _reduce(self, gradients: torch.Tensor) -> None:
        self._scale(gradients)
        dist.all_reduce(gradients, group=self.group)
        self._finish(gradients)

    def start(self, first: int, stop: int, with_extra: bool = False) -> Callable[[], None]:
        """Begin to reduce elements [first, stop); return a function that waits for the end, for the same thread.

        Args:
            first, stop: the range of the gradients.
            with_extra: whether the extra elements follow them in the same message.
        """
        gradients = self._buffer[first:stop]
        self._scale(gradients)
        message = self._buffer[first:] if with_extra else gradients
        work = dist.all_reduce(message, group=self.group, async_op=self._beside)

        def wait() -> None:
            if work is not None:
                work.wait()
            self._finish(gradients)

        return wait

    def _scale(self, gradients: torch.Tensor) -> None:
        if self._scaling.before is not None:
            self._scaling.before(gradients)

    def _finish(self, gradients: torch.Tensor) -> None:
        if self._scaling.after is not None:
            self._scaling.after(gradients)


def _laid_out(values: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """Return [numel] values in autograd's layout of a gradient: fused optimizers go through memory, not by index."""
    if parameter.is_contiguous():
        return values.view(parameter.shape)
    strides = torch.empty_like(parameter, device="meta").stride()
    return values.as_strided(parameter.shape, strides, values.storage_offset())
