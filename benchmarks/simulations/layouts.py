# SPDX-License-Identifier: Apache-2.0
"""Ways to lay a model out on a cluster: over how many ranks experts lie, how tokens are exchanged, what a GPU needs.

Attention and experts are whole on their ranks; only the number of ranks that share the experts is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ds_fsmoe.offline.models.architecture import Architecture
from ds_fsmoe.offline.models.known import load_model
from ds_fsmoe.offline.models.memory import GB, memory_of
from ds_fsmoe.offline.models.training import BYTES, Training
from ds_fsmoe.planning.cluster import Cluster, load_cluster
from ds_fsmoe.planning.groups import Fanout, Groups, can_deduplicate, expected_fanout
from ds_fsmoe.planning.workload import NODE_DEDUPLICATED, AllToAll


@dataclass(frozen=True, slots=True)
class Job:
    """A model on a cluster at one size.

    Raises:
        ValueError: a number of ranks that fills no whole nodes, or stage 3, whose gathers are not simulated.
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
    zero: int = 2
    """The stage of ZeRO, as far as memory depends on it."""
    checkpointing: bool = False
    """Whether every block is checkpointed, so that its forward runs once more."""

    def __post_init__(self) -> None:
        for name in ("ranks", "samples", "length", "micro_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")
        if self.zero not in (0, 1, 2):
            raise ValueError(f"zero = {self.zero}: the choices are 0, 1 and 2; what ZeRO 3 gathers is not simulated")
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
    memory_gb: float
    """What a GPU needs at its fullest, in 10^9 bytes."""
    fits: bool | None
    """Whether a GPU has as much; ``None``: the cluster's file does not say how much it has."""


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
        memory_gb = memory_gb_of(job, groups)
        fits = None if cluster.memory_gb is None else memory_gb <= cluster.memory_gb
        alltoalls: tuple[AllToAll, ...] = ("flat", NODE_DEDUPLICATED) if can_deduplicate(groups) else ("flat",)
        found += [Variant(groups, each, memory_gb, fits) for each in alltoalls]
    return found


def memory_gb_of(job: Job, groups: Groups) -> float:
    """Return what a GPU needs in 10^9 bytes, as ``ds_fsmoe plan`` predicts it."""
    cluster, model = cluster_of(job.cluster), model_of(job.model)
    training = Training(
        samples=job.samples,
        length=min(job.length, model.max_length),
        zero=job.zero,
        dtype=cluster.dtype if cluster.dtype in BYTES else "bf16",
        checkpointing=job.checkpointing,
    )
    return memory_of(model, groups, training).total / GB


def crossings_of(model: Architecture, groups: Groups) -> Fanout | None:
    """Return how often a token crosses where it does so once per node, all choices of the router being as likely, of
    experts and of groups of them; ``None`` where it cannot."""
    experts = model.blocks[model.moe_blocks[0]].experts
    if experts is None or not can_deduplicate(groups):
        return None
    at = groups.placements["ep"]
    return expected_fanout(experts.E, experts.K, at.nodes, at.per_node, *(experts.groups or (1, 1)))
