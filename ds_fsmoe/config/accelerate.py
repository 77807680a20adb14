# SPDX-License-Identifier: Apache-2.0
"""Keeps Accelerate, and with it the Trainer of Hugging Face, from using the ``"auto"`` in our block as its own.

In a DeepSpeed config ``"auto"`` is their word for "filled in from the training arguments". While it prepares a model,
``accelerate.DeepSpeedPlugin`` walks over every field of the config, blocks it does not know included, and raises an
error for an ``"auto"`` it has no value for. This happens before ``deepspeed.initialize`` is called, so it is the walk
that has to leave our block out.
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
    """Keep Accelerate from looking into our block from now on, whether it is imported already or later."""
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
