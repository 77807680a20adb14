# SPDX-License-Identifier: Apache-2.0
"""What computing takes beside multiply-adds: the traffic of experts' weights and of activations.

A product of experts takes its operations at the rate of large products, and its weights at the rate of memory. So
experts with few rows are slower, by 1 + (operations a second / bytes a second) / rows in bf16. Activations take a time
in proportion to rows x H, products one to rows x M x H: narrow models are slower.

The bytes are those of torch's kernels, one after another, each of which reads its inputs and writes its result once.
Letters: M width of the model, H width inside an expert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_fsmoe.planning.cluster import Cluster
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.groups import Groups, Placement
from ds_fsmoe.planning.schedule import (
    ATTENTION,
    DENSE,
    ELEMENTWISE,
    EXPERT,
    ORDER,
    RESTORE,
    ROUTE,
    SOFTMAX,
    Lane,
)

if TYPE_CHECKING:
    from ds_fsmoe.planning.workload import Shape

_OPERATIONS = {
    **dict.fromkeys((EXPERT, DENSE), "gemm"),
    ATTENTION: "attention",
    SOFTMAX: "softmax",
    ROUTE: "routing",
    ORDER: "order",
    RESTORE: "order",
}
_ACTIVATION_PASSES = {3: 19, 2: 7}
"""Products of a feed-forward -> how often forward and backward read or write [rows, H]. SwiGLU: an activation (2), a
product (3); in the backward two products of the gradient (3, 3), one backward (3), the activation once more (2, 3)."""
_WEIGHT_PASSES = 2
"""How often one product of forward or backward reads or writes its weights, on average: each phase reads them, the
gradient is written, and added to the one that is there (3), six for three products."""
_PHASES = 3
"""The backward takes two forwards, so a third of the bytes of both is the forward's."""


def computing_costs(cluster: Cluster) -> dict[str, LinearCost]:
    """Return the cost of each kind of task that computes, experts at the rate of any product."""
    costs = {kind: cluster.operation(name, "every layer").cost for kind, name in _OPERATIONS.items()}
    costs[ROUTE] = costs[ROUTE].plus(cluster.layer_wait_ms)
    has_bytes = "elementwise" in cluster.operations
    costs[ELEMENTWISE] = cluster.operations["elementwise"].cost if has_bytes else LinearCost(0.0, 0.0)
    return costs


def experts_cost(cluster: Cluster, shape: Shape, gemms: int, groups: Groups) -> LinearCost:
    """Return the cost of a floating-point operation of experts, and of the start of one product of one expert.

    Args:
        cluster: without ``elementwise`` activations take no time, without ``grouped_gemm`` weights take none, and each
            expert's product starts by itself.
        shape: of the layer.
        gemms: the products of an expert.
        groups: over which ranks experts are spread and cut.
    """
    gemm = cluster.operation("gemm", "every layer").cost
    alpha_ms, beta_ms = gemm.alpha_ms, gemm.beta_ms
    if "elementwise" in cluster.operations:
        passes = _ACTIVATION_PASSES[gemms] / (_PHASES * 2 * gemms * shape.M)
        beta_ms += passes * shape.dtype_bytes * cluster.operations["elementwise"].cost.beta_ms
    if "grouped_gemm" in cluster.operations:
        grouped = cluster.operations["grouped_gemm"].cost
        weight_bytes = shape.M * (shape.H // groups.esp) * shape.dtype_bytes
        alpha_ms = grouped.alpha_ms * groups.ep / shape.E + _WEIGHT_PASSES * weight_bytes * grouped.beta_ms
    return LinearCost(alpha_ms, beta_ms)


def activation_bytes(rows: float, hidden: int, gemms: int, dtype_bytes: int) -> float:
    """Return a third of the bytes of the activations of a dense feed-forward, forward and backward."""
    return rows * hidden * dtype_bytes * _ACTIVATION_PASSES[gemms] / _PHASES


def cost_among(cluster: Cluster, group: str, at: Placement, collective: str, peers: int | None) -> LinearCost:
    """Return the cost of a collective among the ranks of a group, by the name that it has in :class:`Groups`.

    Args:
        cluster: the cluster.
        group, at: the group, and where its ranks lie.
        collective: the operation.
        peers: how many messages a rank starts; ``None``: one for each node.

    Raises:
        ValueError: the cluster has no number for it.
    """
    lies = f"the {group.upper()} group ({at.size} ranks, at most {at.per_node} in a node)"
    if at.lanes == (Lane.INTRA,):
        return cluster.operation(f"intra.{collective}", lies).among(at.size)
    cost = cluster.operation(f"inter.{collective}", lies).among(at.nodes, peers)
    share = 1 if collective == "all_to_all" else at.per_node
    return LinearCost(cost.alpha_ms, cost.beta_ms / share)
