# SPDX-License-Identifier: Apache-2.0
"""Predicts a recorded job on other ranks: more nodes, another EP or ESP size, an all-to-all that was not timed. The
what-if commands call it.

Each rank keeps its tokens, and experts keep their measured costs. The cost of a collective is the measured one times a
ratio of the cluster's numbers: those of the other group over those of the job's group. A collective that the job did
not have costs what the cluster's file states. These costs are extrapolated, not measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ds_fsmoe.planning.call_shape import CallShape, moe_work
from ds_fsmoe.planning.cluster import Cluster
from ds_fsmoe.planning.cost import Cost
from ds_fsmoe.planning.groups import Fanout, Groups, can_deduplicate, expected_fanout
from ds_fsmoe.planning.job.recorded_costs import RecordedAllToAll, RecordedJob, RecordedKind
from ds_fsmoe.planning.schedule import EXPERT_GRAD
from ds_fsmoe.planning.workload import NODE_DEDUPLICATED, AllToAll, kind_costs

_GRADIENT_BYTES = 1 << 20
"""The size at which collectives of gradients are compared."""


@dataclass(frozen=True)
class OtherRanks:
    """Lists what differs from the recorded job; ``None`` means unchanged."""

    nodes: int | None = None
    per_node: int | None = None
    """The ranks of a node."""
    ep: int | None = None
    """The ranks over which experts are spread; as they were, or over all ranks if that is how they were."""
    esp: int | None = None
    """The ranks that share an expert's width."""
    alltoall: AllToAll | None = None

    def groups(self, was: Groups, num_experts: int) -> Groups:
        """Return the process groups of a layer.

        Args:
            was: the groups of the layer in the job.
            num_experts: the number of experts, E.

        Raises:
            ValueError: the sizes do not match each other.
        """
        per_node = was.gpus_per_node if self.per_node is None else self.per_node
        nodes = max(1, was.world // was.gpus_per_node) if self.nodes is None else self.nodes
        esp, own = was.esp if self.esp is None else self.esp, 1 if self.ep is None else self.ep
        for name, value in (("nodes", nodes), ("ranks per node", per_node), ("ep", own), ("esp", esp)):
            if value < 1:
                raise ValueError(f"{name} = {value}: must be at least 1")
        stage, ep = nodes * per_node // was.pp, self.ep
        if ep is None:
            most = max(1, stage // esp) if was.ep * was.esp == was.stage else was.ep
            ep = max(each for each in range(1, most + 1) if num_experts % each == 0 and stage % (each * esp) == 0)
        elif num_experts % ep:
            raise ValueError(f"ep = {ep}: must divide the {num_experts} experts")
        return Groups(nodes * per_node, per_node, was.mp, esp, ep, None, was.pp)


def on_other_ranks(job: RecordedJob, cluster: Cluster, other: OtherRanks) -> RecordedJob:
    """Return the job as it is predicted on other ranks.

    Args:
        job: the job, with costs.
        cluster: the costs of collectives there.
        other: the differences.

    Raises:
        ValueError: the sizes do not match each other, or the cluster lacks a number.
    """
    kinds = tuple(_kind(job, kind, cluster, other) for kind in job.kinds)
    gradients_bytes = dict(job.gradients_bytes)
    if gradients_bytes:
        gradients_bytes[EXPERT_GRAD] = sum(
            len(kind.labels) * kind.shape.num_weights * kind.shape.dtype_bytes for kind in kinds if kind.groups.edp > 1
        )
    return replace(job, kinds=kinds, gradients_bytes=gradients_bytes, tensors_bytes={}, _costs={})


def _kind(job: RecordedJob, kind: RecordedKind, cluster: Cluster, other: OtherRanks) -> RecordedKind:
    groups = other.groups(kind.groups, kind.shape.num_experts)
    name, way = next(iter(kind.alltoalls.items()))
    alltoall = other.alltoall or way.planned
    if alltoall == NODE_DEDUPLICATED and not can_deduplicate(groups):
        raise ValueError(f"{NODE_DEDUPLICATED}: needs whole experts on several ranks of several nodes")
    # The nearest of those that were timed is what others are held against.
    name, way = next(((key, each) for key, each in kind.alltoalls.items() if each.planned == alltoall), (name, way))
    was_local, is_local = kind.groups.ep * kind.groups.esp, groups.ep * groups.esp
    shape = replace(
        kind.shape,
        num_weights=max(1, kind.shape.num_weights * was_local // is_local),
        crossings=_fanout(kind, groups) if alltoall == NODE_DEDUPLICATED else kind.shape.crossings,
    )
    was, now = kind_costs(cluster, kind.groups, way.planned), kind_costs(cluster, groups, alltoall)
    sizes = _sizes(groups, shape, alltoall)
    costs = job.costs_of(kind, name)

    def cost_of(each: str, own: Mapping[str, Cost]) -> Cost:
        size = sizes.get(each, _GRADIENT_BYTES)
        before_ms = was[each].ms(size) if each in was and each in own else 0.0
        return own[each].times(now[each].ms(size) / before_ms) if before_ms else now[each]

    fitted = costs.among_others(now, cost_of)
    return replace(kind, groups=groups, shape=shape, alltoalls={alltoall: RecordedAllToAll(alltoall, None, fitted)})


def _fanout(kind: RecordedKind, groups: Groups) -> Fanout:
    """Return the fan-out for each of a token's choices: the counted one of the job if the places are the same."""
    at, counted = groups.placements["ep"], kind.shape.crossings
    if counted is not None and at == kind.groups.placements["ep"]:
        return counted
    k = kind.num_choices or 1
    found = expected_fanout(kind.shape.num_experts, k, at.nodes, at.per_node)
    return Fanout(found.nodes / k, found.ranks / k)


def _sizes(groups: Groups, shape: CallShape, alltoall: AllToAll) -> dict[str, float]:
    return {each.kind: each.size for each in moe_work(groups, False, shape, alltoall).collectives}
