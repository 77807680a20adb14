# SPDX-License-Identifier: Apache-2.0
"""All that is decided about how one layer is run, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from ds_fsmoe.planning.block import BlockPlan


@dataclass(frozen=True)
class LayerPlan:
    """How one layer is run: planned without the machine, and handed to whatever owns the layer there."""

    forward: BlockPlan
    backward: BlockPlan
    alltoall: str
    """The all-to-all, by its name in the registry."""
    reduces: tuple[tuple[float, str], ...] = ()
    """(from so many bytes on, how a reduce-scatter is done), ascending; empty: as is best on the kind of device."""
