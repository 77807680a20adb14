# SPDX-License-Identifier: Apache-2.0
"""All decisions about how one layer is run, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from ds_fsmoe.planning.block import BlockPlan


@dataclass(frozen=True)
class LayerPlan:
    """How one layer is run: planned without the machine and handed to the object that owns the layer there."""

    forward: BlockPlan
    backward: BlockPlan
    alltoall: str
    """The name of the all-to-all in the registry."""
    reduces: tuple[tuple[float, str], ...] = ()
    """(smallest size in bytes, how a reduce-scatter is done), ascending; empty: the default for the kind of device."""
    in_halves: bool = False
    """Whether the two halves of a micro-batch take turns; the plans above are then those of one half."""
