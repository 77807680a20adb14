# SPDX-License-Identifier: Apache-2.0
"""Keeps Accelerate, and with it the Trainer of Hugging Face, from replacing the ``"auto"`` values of our block.

The entry points call it. In a DeepSpeed config ``"auto"`` is Accelerate's word for "filled in from the training
arguments". While it prepares a model, ``accelerate.DeepSpeedPlugin`` iterates over every field of the config, including
unknown blocks. It raises an error for an ``"auto"`` without a value. This happens before ``deepspeed.initialize`` is
called, so the iteration has to skip our block.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

from ds_fsmoe.config.imported_later import Finder
from ds_fsmoe.config.reading import BLOCK

_MODULE, _CLASS, _METHOD = "accelerate.utils.dataclasses", "DeepSpeedPlugin", "fill_match"
"""The method that looks at one field: ``fill_match(self, "fsmoe.alltoall", ...)``."""


def leave_block_alone() -> None:
    """Keep Accelerate from reading our block from now on, whether it is imported already or later."""
    _finder.begin()


def watch_block_again() -> None:
    """Undo :func:`leave_block_alone`."""
    _finder.end()
    plugin = getattr(sys.modules.get(_MODULE), _CLASS, None)
    theirs = getattr(getattr(plugin, _METHOD, None), "__wrapped__", None)
    if theirs is not None:
        setattr(plugin, _METHOD, theirs)


def _wrap(module: ModuleType) -> None:
    plugin = getattr(module, _CLASS, None)
    theirs = getattr(plugin, _METHOD, None)
    # An Accelerate that does it another way is left as it is; its error then says which field it is about.
    if theirs is None or hasattr(theirs, "__wrapped__"):
        return

    @functools.wraps(theirs)
    def fill_match(self: Any, ds_key_long: str, *args: Any, **kwargs: Any) -> Any:
        if ds_key_long.split(".", 1)[0] == BLOCK:
            return None
        return theirs(self, ds_key_long, *args, **kwargs)

    setattr(plugin, _METHOD, fill_match)


_finder = Finder(_MODULE, _wrap)
