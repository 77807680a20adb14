# SPDX-License-Identifier: Apache-2.0
"""How many bytes of tensors live at the same time while something runs: the sum and its peak, exact and without noise.

Counted is each storage once, from the operation that makes it to the moment its last tensor goes. What a kernel takes
and gives back inside itself is not seen.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_fsmoe.execution.lanes import Observer


class LiveMemory(TorchDispatchMode):
    """``with LiveMemory() as memory:`` counts what is made inside, in this thread; ``memory.peak`` is in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}
        """Of every storage that has been seen; 0 for one that was there before."""
        self._lock = threading.RLock()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What an operation is given was there before; views of it among the results are nothing new.
        self._note((args, kwargs), is_made=False)
        result = func(*args, **(kwargs or {}))
        self._note(result, is_made=True)
        return result

    def in_this_thread(self) -> LiveMemory:
        """Count in the thread that enters what is returned, too."""
        return self

    def in_every_thread(self) -> Observer:
        """An observer of lanes that has their threads counted too."""
        return _Everywhere(self)

    def count(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Count these as well, which were there before, until they go."""
        for storage in storages:
            self._add(storage, self.size_of(storage))

    def begin_again(self) -> None:
        """Forget the peak so far."""
        with self._lock:
            self.peak = self.live

    def size_of(self, storage: torch.UntypedStorage) -> int:
        """What a storage counts, in bytes; nothing on the meta device."""
        return 0 if storage.device.type == "meta" else storage.nbytes()

    def _note(self, leaves: Any, is_made: bool) -> None:
        for leaf in tree_leaves(leaves):
            if isinstance(leaf, torch.Tensor) and (storage := leaf.untyped_storage())._cdata not in self._sizes:
                self._add(storage, self.size_of(storage) if is_made else 0)

    def _add(self, storage: torch.UntypedStorage, size: int) -> None:
        key = storage._cdata
        with self._lock:
            if key in self._sizes:
                return
            self._sizes[key] = size
            self.live += size
            self.peak = max(self.peak, self.live)
        # Called when the memory goes, not this object: torch keeps the one with the other. Another storage may have
        # the same key then.
        weakref.finalize(storage, self._forget, key).atexit = False

    def _forget(self, key: int) -> None:
        with self._lock:
            self.live -= self._sizes.pop(key)


class _Everywhere(Observer):
    def __init__(self, memory: LiveMemory) -> None:
        self._memory = memory
        self._caller = threading.get_ident()

    def begin(self, index: int, task: Any) -> None:
        if threading.get_ident() != self._caller:
            self._memory.__enter__()

    def end(self, index: int, task: Any) -> None:
        if threading.get_ident() != self._caller:
            self._memory.__exit__(None, None, None)
