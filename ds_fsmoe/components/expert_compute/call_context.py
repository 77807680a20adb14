# SPDX-License-Identifier: Apache-2.0
"""What a call found around it and its repetition has to find again, and to leave as it was."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class AutocastState:
    """Autocast as it stood in a thread at some moment."""

    settings: tuple[tuple[str, bool, torch.dtype], ...]
    """Device type, whether it is enabled there, and the type that it casts to."""
    cache_enabled: bool

    @classmethod
    def now(cls, device_types: Iterable[str]) -> AutocastState:
        """This thread's state for some device types (``"cpu"``, ``"cuda"``)."""
        settings = [(each, torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in device_types]
        return cls(tuple(settings), torch.is_autocast_cache_enabled())

    def _is_now(self) -> bool:
        for device, enabled, dtype in self.settings:
            if torch.is_autocast_enabled(device) != enabled or torch.get_autocast_dtype(device) != dtype:
                return False
        return torch.is_autocast_cache_enabled() == self.cache_enabled

    def restored(self) -> AbstractContextManager:
        """Puts the state in force; costs next to nothing where it is already."""
        if self._is_now():
            return _NOTHING
        stack = ExitStack()
        for device, enabled, dtype in self.settings:
            stack.enter_context(torch.autocast(device, dtype, enabled, self.cache_enabled))
        return stack


_NOTHING = nullcontext()


@dataclass(frozen=True)
class RandomState:
    """The random-number generators, of the host and of one device, as they stood at some moment."""

    device: torch.device
    of_host: torch.Tensor
    of_device: torch.Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        of_device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
        return cls(device, torch.get_rng_state(), of_device)

    def is_now(self) -> bool:
        """Return whether no random number has been drawn since."""
        now = RandomState.now(self.device)
        if self.of_device is not None and not torch.equal(self.of_device, now.of_device):
            return False
        return torch.equal(self.of_host, now.of_host)

    @property
    def nbytes(self) -> int:
        """What it takes to remember it."""
        return self.of_host.nbytes + (0 if self.of_device is None else self.of_device.nbytes)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Draws inside are those that followed this state; outside nothing is drawn."""
        outside = RandomState.now(self.device)
        self._set()
        try:
            yield
        finally:
            outside._set()

    def _set(self) -> None:
        torch.set_rng_state(self.of_host)
        if self.of_device is not None:
            torch.get_device_module(self.device).set_rng_state(self.of_device, self.device)


@contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """Inside, buffers are copies that may be changed; outside they are what they were, as for a call that does not
    count."""
    held = [(each, dict(each._buffers)) for each in module.modules() if each._buffers]
    for each, buffers in held:
        each._buffers.update({name: None if buffer is None else buffer.clone() for name, buffer in buffers.items()})
    try:
        yield
    finally:
        for each, buffers in held:
            each._buffers.update(buffers)
