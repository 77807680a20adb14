# SPDX-License-Identifier: Apache-2.0
"""Counts what a load takes from files: bytes of tensors, how often each file is opened, the largest new tensor."""

from __future__ import annotations

import bisect
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves


class Taken(TorchDispatchMode):
    """Counts within its block, whoever asks. A file read at once hands on all its tensors; a mapped one those elements
    that an operator puts elsewhere, and none for a view.

    Attributes:
        size_bytes: the bytes of all that was handed on.
        opened: the name of a file -> how often it was opened.
        largest_bytes: the bytes of the largest tensor that an operator has made anew.
    """

    def __init__(self) -> None:
        super().__init__()
        self.size_bytes = self.largest_bytes = 0
        self.opened: Counter[str] = Counter()
        self._mapped: list[tuple[int, int]] = []
        self._kept: list[Any] = []

    def __enter__(self) -> Taken:
        self._load = torch.load
        torch.load = self._open
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        torch.load = self._load

    def _open(self, path: Any, *args: Any, **options: Any) -> Any:
        with _disable_current_modes():
            found = self._load(path, *args, **options)
        self.opened[Path(path).name] += 1
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in _tensors(found)}
        if not options.get("mmap"):
            self.size_bytes += sum(each.nbytes() for each in storages.values())
            return found
        self._kept.append(found)  # so that no other memory gets these addresses
        for start, each in storages.items():
            bisect.insort(self._mapped, (start, start + each.nbytes()))
        return found

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given, made = list(_tensors((args, kwargs))), list(_tensors(result))
        if any(map(self._is_mapped, made)):
            return result
        numel = sum(each.numel() for each in made)
        self.size_bytes += sum(min(numel, each.numel()) * each.itemsize for each in given if self._is_mapped(each))
        known = {each.untyped_storage().data_ptr() for each in given}
        new = [each.untyped_storage() for each in made if each.device.type == "cpu"]
        self.largest_bytes = max([self.largest_bytes, *(each.nbytes() for each in new if each.data_ptr() not in known)])
        return result

    def _is_mapped(self, tensor: torch.Tensor) -> bool:
        if tensor.device.type != "cpu" or not tensor.numel():
            return False
        at = bisect.bisect_right(self._mapped, (tensor.data_ptr(), 1 << 63)) - 1
        return at >= 0 and tensor.data_ptr() < self._mapped[at][1]


def _tensors(tree: Any) -> Any:
    return (each for each in tree_leaves(tree) if isinstance(each, torch.Tensor))


def kept_bytes(engine: Any) -> int:
    """The bytes of the weights, buffers, optimized copies and states that a rank holds."""
    from ds_fsmoe.checkpoint.optimizer_states import live_groups

    here = [getattr(each, "ds_tensor", each) for each in engine.module.parameters()]
    found = {each.data_ptr(): each.numel() * each.itemsize for each in (*here, *engine.module.buffers())}
    for group in live_groups(engine) or ():
        masters = () if group.master is None else (group.master,)
        for each in (*masters, *group.per_element().values()):
            found[each.data_ptr()] = each.numel() * each.itemsize
    return sum(found.values())
