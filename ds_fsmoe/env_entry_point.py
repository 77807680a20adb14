# SPDX-License-Identifier: Apache-2.0
"""Calls ``install()`` from the environment, and warns of engines that do not read the block.

The wheel puts ``ds_fsmoe_entry_point.pth`` next to the package. With ``DS_FSMOE`` set, a starting interpreter imports
this module through it; without the variable it imports nothing. ``install()`` has to run when DeepSpeed is imported,
and not earlier, as it needs torch and DeepSpeed. ``ds_fsmoe/__init__.py`` calls :func:`watch_engines`.
"""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import Any

from ds_fsmoe.config.imported_later import Finder

VARIABLE = "DS_FSMOE"
_ON, _OFF = ("1", "true"), ("", "0", "false")


def open_by_variable() -> None:
    """Run ``install()`` as soon as DeepSpeed has been imported, if ``DS_FSMOE`` asks for it."""
    if os.environ.get(VARIABLE, "").lower() not in _OFF:
        Finder("deepspeed", _install).begin()


def _install(deepspeed: ModuleType) -> None:
    value = os.environ.get(VARIABLE, "")
    if value.lower() not in (*_ON, *_OFF):
        # Raised only here: an error of a .pth file is printed by every interpreter that starts, and ends none.
        raise ValueError(
            f"ds_fsmoe: {VARIABLE} = {value!r} in the environment: write 1 to have deepspeed.initialize honour the "
            "fsmoe block, or 0 for stock DeepSpeed"
        )
    from ds_fsmoe.engine.entry_points import install

    install()


def watch_engines() -> None:
    """Watch DeepSpeed engines that are made from now on, and warn if one does not read an enabled block."""
    _watch.begin()


def _watch_engines_of(module: ModuleType) -> None:
    engine = module.DeepSpeedEngine
    if "_fsmoe_watches" in vars(engine):
        return
    init = engine.__init__

    @functools.wraps(init)
    def look(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        from ds_fsmoe.checks.missing_engine import warn_of_unread_block

        warn_of_unread_block(self)

    engine.__init__, engine._fsmoe_watches = look, True


_watch = Finder("deepspeed.runtime.engine", _watch_engines_of)
