# SPDX-License-Identifier: Apache-2.0
"""Ways to lay a model out on a cluster: over how many ranks experts lie, how tokens are exchanged, what a GPU keeps.

Attention and experts are whole on their ranks; only the number of ranks that share the experts is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ds_fsmoe.planning.architecture import Architecture
from ds_fsmoe.planning.cluster import Cluster, load_cluster
from ds_fsmoe.planning.crossings import Crossings, crosses_once, expected_crossings
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.models import load_model
from ds_fsmoe.planning.workload import ONCE_PER_NODE, AllToAll

_STATE_SHARE = 0.8
"""The share of a GPU's memory that weights, gradients and optimizer may take."""


@dataclass(frozen=True, slots=True)
class Job:
    """A model on a cluster at one size.

    Raises:
        ValueError: a number of ranks that fills no whole nodes.
    """

    model: str
    cluster: str
    ranks: int
    samples: int = 1
    """The samples of each GPU and micro-batch, B."""
    length: int = 4096
    """The positions of each, L, or as many as the model is made for."""
    micro_batches: int = 1
    """The micro-batches of a step, of which the last one's backward sums gradients over ranks."""

    def __post_init__(self) -> None:
        for name in ("ranks", "samples", "length", "micro_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")
        gpus = cluster_of(self.cluster).gpus_per_node
        if self.ranks % gpus and gpus % self.ranks:
            raise ValueError(
                f"ranks = {self.ranks}: must fill whole nodes of {gpus} GPUs of {self.cluster}, or a part of one that "
                "divides it"
            )


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to lay out and to run a job."""

    groups: Groups
    alltoall: AllToAll
    state_gb: float
    """Return what a GPU keeps of weights, gradients and optimizer, in 10^9 bytes; activations come on top."""
    fits: bool | None
    """Whether that leaves a fifth of the GPU's memory for them; ``None``: the cluster's file does not say how much it
    has."""


@lru_cache(maxsize=64)
def cluster_of(name: str) -> Cluster:
    """Return a cluster by name or file, read once."""
    return load_cluster(name)


@lru_cache(maxsize=64)
def model_of(name: str) -> Architecture:
    """Return a model by name or file, read once."""
    return load_model(name)


def dtype_bytes_of(cluster: Cluster) -> int:
    """Return the bytes of an element: of the type that the costs of computing hold for."""
    return {"fp32": 4, "fp8": 1}.get(cluster.dtype or "", 2)


def ep_sizes(num_experts: int, ranks: int, gpus_per_node: int) -> tuple[int, ...]:
    """Return how many ranks may share the experts: as many as divide them and the ranks, as many inside a node, and
    what lies between by doubling.

    Args:
        num_experts: E.
        ranks: in the job.
        gpus_per_node: of a node.
    """
    fitting = [size for size in range(1, num_experts + 1) if num_experts % size == 0 and ranks % size == 0]
    inside = max(size for size in fitting if gpus_per_node % size == 0)
    between = [inside << step for step in range(1, 32) if inside << step in fitting]
    return tuple(dict.fromkeys((max(fitting), inside, *between)))


def variants(job: Job) -> list[Variant]:
    """Return the ways in which a job is simulated."""
    cluster, model = cluster_of(job.cluster), model_of(job.model)
    found = []
    for ep in ep_sizes(model.num_experts, job.ranks, cluster.gpus_per_node):
        groups = Groups(job.ranks, cluster.gpus_per_node, ep=ep)
        state_gb = state_bytes(model, groups, dtype_bytes_of(cluster)) / 1e9
        fits = None if cluster.memory_gb is None else state_gb < _STATE_SHARE * cluster.memory_gb
        alltoalls: tuple[AllToAll, ...] = ("flat", ONCE_PER_NODE) if crosses_once(groups) else ("flat",)
        found += [Variant(groups, each, state_gb, fits) for each in alltoalls]
    return found


def state_bytes(model: Architecture, groups: Groups, dtype_bytes: int) -> float:
    """Return the bytes of weights, gradients and optimizer of one rank, all but the weights spread over the ranks that
    hold the same ones (ZeRO stage 2). Adam keeps two moments in fp32, and another weight where weights are shorter."""
    of_experts = model.num_expert_parameters / groups.ep
    others = model.num_parameters - model.num_expert_parameters
    spread = dtype_bytes + (8 if dtype_bytes == 4 else 12)
    kept = [(of_experts, groups.edp), (others, groups.stage)]
    return sum(count * (dtype_bytes + spread / ranks) for count, ranks in kept)


def crossings_of(model: Architecture, groups: Groups) -> Crossings | None:
    """Return how often a token crosses where it does so once per node, all choices of the router being as likely, of
    experts and of groups of them; ``None`` where it cannot."""
    experts = model.blocks[model.moe_blocks[0]].experts
    if experts is None or not crosses_once(groups):
        return None
    at = groups.placements["ep"]
    return expected_crossings(experts.E, experts.K, at.nodes, at.per_node, *(experts.groups or (1, 1)))
