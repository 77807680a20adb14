# SPDX-License-Identifier: Apache-2.0
"""Observes the calls of a layer with timers, metrics and checks that the layer itself does not know.

An instrument is a function that receives each call before it is made, and wraps the parts of the call that it observes.
The layers of one engine share one list of the active instruments; a layer outside of an engine has none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ds_fsmoe.components.expert_compute.calls import ExpertSet
from ds_fsmoe.components.routing import RoutingBase
from ds_fsmoe.execution.pipeline import LayerPipeline, WholeExperts

Gate = Callable[[torch.Tensor, torch.Tensor | None, dist.ProcessGroup | None], RoutingBase]
"""``(x_SM, used_token_S, group) -> routing``."""


@dataclass
class LayerCall:
    """Describes a call of a layer before it runs. Instruments may replace the gate, the pipeline and the experts."""

    label: str
    """The label of the layer, one for each layer of an engine."""
    path: str
    """The path of the layer in its model."""
    is_training: bool
    x: torch.Tensor
    """The input, [..., M]."""
    capacity_group: dist.ProcessGroup | None
    """The ranks that must have as many slots as this one; ``None`` for this rank alone."""
    gate: Gate
    pipeline: LayerPipeline
    experts: ExpertSet | WholeExperts
    """The experts of this rank, in the form in which they are called."""
    local_experts: ExpertSet | None
    """The experts of this rank one by one; ``None`` where nothing is known of the module that holds them."""
    in_rows: bool = False
    """Whether rows travel instead of slots; then ranks need not have equally many."""

    def add_routing_callback(self, hear: Callable[[RoutingBase], None]) -> None:
        """Call a function with the gate's decision, before rows are sent."""
        gate = self.gate

        def heard(*args: Any) -> RoutingBase:
            routing = gate(*args)
            hear(routing)
            return routing

        self.gate = heard


Instrument = Callable[[LayerCall], None]
Check = Callable[[Any, torch.Tensor], None]
"""``(layer, x)``: looks at a layer that is about to be called with x, and may still change how the layer is run."""
