# SPDX-License-Identifier: Apache-2.0
"""What ZeRO sends for one layer of a model."""

from __future__ import annotations

from dataclasses import dataclass

from ds_fsmoe.planning.workload import Work


@dataclass(frozen=True, slots=True)
class Sharing:
    """What ZeRO sends for one layer besides what its schedule places."""

    forward: tuple[Work, ...] = ()
    """The gathers of parameters that its forward waits for."""
    backward: tuple[Work, ...] = ()
    gradients: tuple[Work, ...] = ()
    """The reduce-scatters of its gradients, when its backward is through."""
    is_ahead: bool = True
    """Whether gathers begin with the layer that runs before; otherwise when that one is through."""
    in_all: bool = True
    """Whether this happens in every micro-batch; otherwise once a step."""
