# SPDX-License-Identifier: Apache-2.0
"""How many bytes of tensors live at the same time while something runs: the sum and its peak, exact and without noise.

Counted is each storage once, from the operation that makes it to the moment its last tensor goes. What a kernel takes
and gives back inside itself is not seen.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_fsmoe.execution.lanes import Observer

WITHOUT_PLACE = ("torch", "tests/live_memory.py")
"""Whose lines say nothing about why a tensor is made: torch's own package, and this file."""


@dataclass(frozen=True)
class Made:
    """Tensors of one size that one line of code has made."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    operation: str
    place: str
    """The innermost lines outside of torch, the innermost first."""


class LiveMemory(TorchDispatchMode):
    """``with LiveMemory() as memory:`` counts what is made inside, in this thread; ``memory.peak`` is in bytes.

    Args:
        with_places: whether to note what is made where, for :meth:`at_peak`; it takes many times as long.
    """

    def __init__(self, with_places: bool = False) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}
        """Of every storage that has been seen; 0 for one that was there before."""
        self._lock = threading.RLock()
        self._with_places = with_places
        self._made: dict[int, Made] = {}
        self._at_peak: dict[Made, list[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What an operation is given was there before; views of it among the results are nothing new.
        self._note((args, kwargs), "", is_made=False)
        result = func(*args, **(kwargs or {}))
        self._note(result, str(func), is_made=True)
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
            self.peak, self._at_peak = self.live, {}

    def at_peak(self) -> str:
        """What lived at the peak, the largest first: bytes, how many tensors, and which; with places only."""
        found = sorted(self._at_peak.items(), key=lambda each: -sum(each[1]))
        return "\n".join(
            f"{sum(sizes):>12,} {len(sizes):>4} x {list(made.shape)} {made.dtype} {made.operation} {made.place}"
            for made, sizes in found
        )

    def size_of(self, storage: torch.UntypedStorage) -> int:
        """What a storage counts, in bytes; nothing on the meta device."""
        return 0 if storage.device.type == "meta" else storage.nbytes()

    def _note(self, leaves: Any, operation: str, is_made: bool) -> None:
        for leaf in tree_leaves(leaves):
            if not isinstance(leaf, torch.Tensor):
                continue
            storage = leaf.untyped_storage()
            if storage._cdata in self._sizes:
                continue
            made = None
            if self._with_places and is_made:
                made = Made(tuple(leaf.shape), leaf.dtype, operation, _place())
            self._add(storage, self.size_of(storage) if is_made else 0, made)

    def _add(self, storage: torch.UntypedStorage, size: int, made: Made | None = None) -> None:
        key = storage._cdata
        with self._lock:
            if key in self._sizes:
                return
            self._sizes[key] = size
            self.live += size
            if made is not None and size:
                self._made[key] = made
            if self.live > self.peak:
                self.peak = self.live
                if self._with_places:
                    self._look()
        # Called when the memory goes, not this object: torch keeps the one with the other. Another storage may have
        # the same key then.
        weakref.finalize(storage, self._forget, key).atexit = False

    def _look(self) -> None:
        self._at_peak = {}
        for key, made in self._made.items():
            self._at_peak.setdefault(made, []).append(self._sizes[key])

    def _forget(self, key: int) -> None:
        with self._lock:
            self.live -= self._sizes.pop(key)
            self._made.pop(key, None)


def _place(most: int = 3) -> str:
    """The innermost lines that are not torch's."""
    frame: FrameType | None = sys._getframe(1)
    lines: dict[str, None] = {}
    while frame is not None and len(lines) < most:
        path = Path(frame.f_code.co_filename)
        own = "/".join(path.parts[-2:])
        if "torch" not in path.parts and own not in WITHOUT_PLACE:
            lines[f"{own}:{frame.f_lineno}"] = None
        frame = frame.f_back
    return " < ".join(lines)


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
