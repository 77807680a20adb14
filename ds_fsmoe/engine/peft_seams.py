# SPDX-License-Identifier: Apache-2.0
"""Lets PEFT make adapters for all experts of a model that was loaded with this rank's experts only.

Then each rank draws, or reads, the adapters of all experts, as one process does, and keeps those of its own when the
model gets its engine: they are small beside the experts.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from ds_fsmoe.config.imported_later import Finder
from ds_fsmoe.layer.own_experts_marks import loaded_part


def adapt_all_experts() -> None:
    """Let PEFT count all experts where only some are, from now on, whether it is imported already or later."""
    _finder.begin()


def _change(module: ModuleType) -> None:
    wrapper = getattr(module, "ParamWrapper", None)
    theirs = getattr(wrapper, "_get_in_out_features", None)
    # A PEFT that does it another way makes adapters of another shape, which are refused by theirs.
    if theirs is None or hasattr(theirs, "__wrapped__"):
        return

    @functools.wraps(theirs)
    def sizes(self: Any, *args: Any, **options: Any) -> Any:
        found = theirs(self, *args, **options)
        part = loaded_part(self.get_base_layer())
        if part is not None:
            self.num_experts = part.num_experts
        return found

    wrapper._get_in_out_features = sizes


_finder = Finder("peft.tuners.lora.layer", _change)
