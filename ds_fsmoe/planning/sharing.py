# SPDX-License-Identifier: Apache-2.0
"""What ZeRO sends for one layer of a model, and what that costs."""

from __future__ import annotations

from dataclasses import dataclass

from ds_fsmoe.planning.cluster import Cluster
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.rates import cost_among
from ds_fsmoe.planning.schedule import EXPERT_GRAD_PARTS, EXPERT_PARAMETERS, GRAD_PARTS, PARAMETERS
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


def sharing_costs(cluster: Cluster, groups: Groups) -> dict[str, LinearCost]:
    """Return the cost of each kind of task of :class:`Sharing`; see
    :func:`~ds_fsmoe.planning.workload.kind_costs`."""
    costs = {}
    for kind, group, collective in (
        (PARAMETERS, "dp", "all_gather"),
        (EXPERT_PARAMETERS, "edp", "all_gather"),
        (GRAD_PARTS, "dp", "reduce_scatter"),
        (EXPERT_GRAD_PARTS, "edp", "reduce_scatter"),
    ):
        at = groups.placements[group]
        if at.size > 1:
            costs[kind] = cost_among(cluster, group, at, collective, None)
    return costs
