# SPDX-License-Identifier: Apache-2.0
"""The task costs of one kind of layer as the planner needs them: from a cluster's file or from measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ds_fsmoe.planning.cost import Cost
from ds_fsmoe.planning.timeline import HostCost


@dataclass(frozen=True, eq=False)
class LayerCosts:
    """Costs by kind of task. Two are equal only if they are the same object, so that plans can be cached by them."""

    forward: Mapping[str, Cost]
    backward: Mapping[str, Cost]
    rechunked: Mapping[str, Cost] | None = None
    """The backward's costs if it has other chunks than the forward; ``None``: it makes no difference."""
    forward_host_ms: HostCost = 0.0
    """The launch costs of the thread that issues for all lanes; none if each lane issues its own tasks."""
    backward_host_ms: HostCost = 0.0
    rechunked_host_ms: HostCost = 0.0
    is_per_launch: bool = True
    """Whether each launch of a task adds the start-up. A measured cost is of the whole task with all its launches."""
    uses_rng: bool = False
    """Whether experts draw random numbers: then both phases must have the same chunks."""
    relative_residual: float = 0.0
    """The typical deviation of measurements from these costs, as a share: a smaller gain counts as none."""

    least: LayerCosts | None = None
    """What tasks cost at their fastest, for bounds; ``None``: not known."""

    @classmethod
    def written(cls, costs: Mapping[str, Cost], host_ms: float = 0.0) -> LayerCosts:
        """Return the costs of a cluster's file: the same in both phases."""
        return cls(costs, costs, None, host_ms, host_ms, host_ms)

    def of(self, backward: bool, same_chunks: bool = True) -> tuple[Mapping[str, Cost], HostCost]:
        """Return the costs of a phase and the host costs of its launches.

        Args:
            backward: whether the phase is the backward.
            same_chunks: whether the backward has the chunks of the forward.
        """
        if not backward:
            return self.forward, self.forward_host_ms
        if same_chunks or self.rechunked is None:
            return self.backward, self.backward_host_ms
        return self.rechunked, self.rechunked_host_ms
