# SPDX-License-Identifier: Apache-2.0
"""Finds which ranks share a node and which form a group, and from both the links that a group uses.

The engine, ``groups`` and most reports call it. It only computes lists of ranks; ``groups`` makes communicators of
them.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from ds_fsmoe.distributed.waits import waiting
from ds_fsmoe.planning.groups import PlacedGroups, Placement
from ds_fsmoe.planning.schedule import Lane

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Topology:
    """Holds the nodes of a job, the same object on every rank."""

    node_of_rank: tuple[int, ...]
    """Rank -> the number of its node. Ranks of a node need not be neighbours, nor nodes equally large."""

    @property
    def world_size(self) -> int:
        """Return the number of ranks of the job."""
        return len(self.node_of_rank)

    @property
    def ranks_per_node(self) -> int:
        """Return the number of ranks on the fullest node."""
        return max(Counter(self.node_of_rank).values())

    @property
    def node_sizes(self) -> tuple[int, ...]:
        """Return the number of ranks on each node, in the order of its first rank."""
        return tuple(Counter(self.node_of_rank).values())

    def lanes_of(self, ranks: Sequence[int]) -> tuple[Lane, ...]:
        """Return the links that one group uses; see :class:`~ds_fsmoe.planning.groups.Placement`."""
        return self.place([ranks]).lanes

    def place(self, groups: Iterable[Sequence[int]]) -> Placement:
        """Return the links of the groups of one kind, taken together: the worst group counts.

        A schedule has to be the same on every rank, so its lanes may not depend on the rank's own group. If one group
        of a kind is inside a node and another spans two, both are scheduled as the second needs it.

        Args:
            groups: the ranks of each group, all groups equally large.
        """
        nodes = [Counter(self.node_of_rank[rank] for rank in ranks) for ranks in groups]
        return Placement.over(nodes[0].total(), max(max(each.values()) for each in nodes), max(map(len, nodes)))


def topology_of_hosts(hosts: Iterable[str]) -> Topology:
    """Return the topology in which ranks with the same host name share a node. ``hosts``: one name per rank, in rank
    order."""
    numbers: dict[str, int] = {}
    return Topology(tuple(numbers.setdefault(host, len(numbers)) for host in hosts))


def topology_of_size(world_size: int, ranks_per_node: int) -> Topology:
    """Return the topology with ``ranks_per_node`` consecutive ranks on each node.

    Raises:
        ValueError: ``ranks_per_node`` does not divide the ranks.
    """
    if not is_count(ranks_per_node) or world_size % ranks_per_node:
        raise ValueError(
            f"fsmoe.topology.ranks_per_node = {ranks_per_node!r}: must divide the {world_size} ranks; the choices are "
            f"{sizes_that_divide(world_size)}"
        )
    return Topology(tuple(rank // ranks_per_node for rank in range(world_size)))


def why_not_sharded(topology: Topology, esp_size: int) -> str | None:
    """Return the reason why ``esp_size`` ranks cannot share experts on these nodes; ``None`` if they can."""
    sizes = Counter(topology.node_sizes)
    if esp_size == 1 or len(sizes) == 1:
        return None
    nodes = ", ".join(f"{count} of {size} rank{'s' if size > 1 else ''}" for size, count in sorted(sizes.items()))
    return (
        f"fsmoe.expert_tensor_parallel_size = {esp_size}: the nodes have different numbers of ranks ({nodes}), so "
        "ranks of two nodes would share an expert; use 1, or as many ranks on every node. If host names do not "
        "identify the nodes, set fsmoe.topology.ranks_per_node"
    )


def find_topology(ranks_per_node: int | None = None) -> Topology:
    """Return the topology of this job, by the ranks' host names or the config. Collective: every rank has to call.

    Args:
        ranks_per_node: ``fsmoe.topology.ranks_per_node``; ``None`` asks every rank for its host name. On a GPU the
            device of this rank has to be set by then, because NCCL sends the names.

    Raises:
        ValueError: ``ranks_per_node`` does not divide the ranks.
    """
    world_size = world_size_now()
    if ranks_per_node is not None:
        return topology_of_size(world_size, ranks_per_node)
    hosts = [socket.gethostname()] * world_size
    if world_size > 1:
        with waiting("the names of hosts"):
            dist.all_gather_object(hosts, socket.gethostname())
    return topology_of_hosts(hosts)


def world_size_now() -> int:
    """Return the number of ranks of the default process group; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank_now(group: dist.ProcessGroup | None = None) -> int:
    """Return this process's index among the ranks of a group, or of all; 0 without a process group."""
    return 0 if world_size_now() == 1 else dist.get_rank(group)


@dataclass(frozen=True)
class Layout:
    """Lists every group of every kind, as ranks in ascending order. The order is static, and the same on every rank."""

    world_size: int
    ep_size: int
    esp_size: int
    """The number of ranks of a group in ``esp``; the tensor-parallel ones, if experts split themselves over those."""
    mp_size: int
    pp_size: int
    blocks: tuple[Ranks, ...]
    """The groups that DeepSpeed takes for expert-parallel: rank ``i * esp + s`` of a block holds shard s of the experts
    of EP rank i. Where experts split themselves over the tensor-parallel ranks, these are the EP groups."""
    ep: tuple[Ranks, ...]
    """The groups whose ranks exchange tokens."""
    esp: tuple[Ranks, ...]
    """The groups whose ranks share the hidden width of the same experts."""
    edp: tuple[Ranks, ...]
    """The groups whose ranks hold the same shard of the same experts."""
    mp: tuple[Ranks, ...]
    """The tensor-parallel groups: ranks work on the same tokens, or the same sequence, outside the MoE layers."""
    dp: tuple[Ranks, ...]
    """The groups whose ranks hold the same dense parameters."""
    tensor_parallel_experts: bool = False
    """Whether experts split themselves over the ranks of the MP groups, which then are the ESP groups."""

    def group_of(self, kind: str, rank: int) -> Ranks:
        """Return the group of a kind (``"ep"``, ``"esp"``, ``"edp"``, ``"mp"``, ``"dp"``, ``"blocks"``) with a rank."""
        return next(ranks for ranks in getattr(self, kind) if rank in ranks)

    @property
    def kinds(self) -> dict[str, tuple[Ranks, ...]]:
        """Return the groups of each kind."""
        return {kind: getattr(self, kind) for kind in ("blocks", "ep", "esp", "edp", "mp", "dp")}

    def agreeing(self, *, same_tokens: bool) -> tuple[Ranks, ...]:
        """Return the groups of ranks that have to agree on a capacity derived from their tokens.

        Ranks of a block exchange slots, and ranks of an ESP group gather them. An MP group whose ranks have the same
        tokens sends one set of slots in parts. The result is the blocks themselves if each block has all tokens of the
        ranks tied to it.

        Args:
            same_tokens: whether the ranks of an MP group have the same tokens; otherwise each has its own.
        """
        tied = [*self.blocks, *self.esp, *(self.mp if same_tokens else ())]
        joined_of: dict[int, set[int]] = {}
        for ranks in tied:
            touched = {id(joined_of[rank]): joined_of[rank] for rank in ranks if rank in joined_of}
            union = set(ranks).union(*touched.values())
            joined_of.update(dict.fromkeys(union, union))
        joined = list({id(each): each for each in joined_of.values()}.values())

        def sources(ranks: Iterable[int]) -> set[int]:
            return {rank // self.mp_size if same_tokens else rank for rank in ranks}

        if all(sources(block) == sources(joined_of[block[0]]) for block in self.blocks):
            return self.blocks
        return tuple(sorted(tuple(sorted(ranks)) for ranks in joined))


def layout(
    world_size: int,
    ep_size: int = 1,
    esp_size: int = 1,
    expert_before_data: bool = True,
    *,
    mp_size: int = 1,
    pp_size: int = 1,
    tensor_parallel_experts: bool = False,
) -> Layout:
    """Return the layout of the groups of a job.

    Args:
        world_size: the number of ranks of the job.
        ep_size: the number of ranks over which the experts are spread, from the script.
        esp_size: the number of ranks that share one expert, ``fsmoe.expert_tensor_parallel_size``.
        expert_before_data: ``True`` is DeepSpeed's default: a block is a run of consecutive ranks. ``False`` is its
            ``use_data_before_expert_parallelism``: an EDP group is such a run, and a block strides over them.
        mp_size, pp_size: the numbers of tensor-parallel ranks and pipeline stages of the rest of the model.
        tensor_parallel_experts: whether experts split themselves over the tensor-parallel ranks, DeepSpeed's
            ``enable_expert_tensor_parallelism``. Then EP groups are parts of the DP groups. The ranks of an MP group
            share an expert like those of an ESP group; ``esp_size`` has to be 1.

    Raises:
        ValueError: sizes do not divide the ranks; names sizes that do.
    """
    self_split = tensor_parallel_experts and mp_size > 1
    stage_size = _checked_stage_size(world_size, ep_size, esp_size, mp_size, pp_size, self_split)
    block_size = ep_size * esp_size
    blocks: list[Ranks] = []
    edp: list[Ranks] = []
    dp: list[Ranks] = []
    for first in range(0, world_size, stage_size):
        stage = range(first, first + stage_size)
        stage_dp = [stage[each::mp_size] for each in range(mp_size)]
        dp += map(tuple, stage_dp)
        for ranks in stage_dp if self_split else [stage]:
            edp_size = len(ranks) // block_size
            if expert_before_data:
                cut = [ranks[each : each + block_size] for each in range(0, len(ranks), block_size)]
            else:
                cut = [ranks[each::edp_size] for each in range(edp_size)]
            blocks += map(tuple, cut)
            edp += zip(*cut, strict=True)
    mp = tuple(tuple(range(each, each + mp_size)) for each in range(0, world_size, mp_size))
    esp = tuple(block[each : each + esp_size] for block in blocks for each in range(0, block_size, esp_size))
    return Layout(
        world_size=world_size,
        ep_size=ep_size,
        esp_size=mp_size if self_split else esp_size,
        mp_size=mp_size,
        pp_size=pp_size,
        blocks=tuple(blocks),
        ep=tuple(block[shard::esp_size] for block in blocks for shard in range(esp_size)),
        esp=mp if self_split else esp,
        edp=tuple(edp),
        mp=mp,
        dp=tuple(dp),
        tensor_parallel_experts=self_split,
    )


def _checked_stage_size(
    world_size: int, ep_size: int, esp_size: int, mp_size: int, pp_size: int, self_split: bool
) -> int:
    """Return the number of ranks of one pipeline stage."""
    if not is_count(pp_size) or world_size % pp_size:
        raise ValueError(
            f"{pp_size!r} pipeline stages: must divide the {world_size} ranks; the choices are "
            f"{sizes_that_divide(world_size)}"
        )
    stage_size = world_size // pp_size
    ranks = f"the {stage_size} ranks{' of a pipeline stage' if pp_size > 1 else ''}"
    for name, size in (("tensor-parallel size", mp_size), ("ep_size", ep_size)):
        if not is_count(size) or stage_size % size:
            choices = sizes_that_divide(stage_size)
            raise ValueError(f"{name} = {size!r}: must divide {ranks}; the choices are {choices}")
    if self_split and stage_size // mp_size % ep_size:
        raise ValueError(
            f"ep_size = {ep_size}: with experts that are split over {mp_size} tensor-parallel ranks, it must divide "
            f"the {stage_size // mp_size} data-parallel ranks; the choices are "
            f"{sizes_that_divide(stage_size // mp_size)}"
        )
    if self_split and esp_size != 1:
        raise ValueError(
            f"fsmoe.expert_tensor_parallel_size = {esp_size!r}: enable_expert_tensor_parallelism already splits the "
            "experts; set it to 1, or remove enable_expert_tensor_parallelism"
        )
    if not is_count(esp_size) or stage_size % (ep_size * esp_size):
        raise ValueError(
            f"fsmoe.expert_tensor_parallel_size = {esp_size!r}: times ep_size, it must divide {ranks}; with ep_size = "
            f"{ep_size} the choices are {sizes_that_divide(stage_size // ep_size)}"
        )
    return stage_size


def placed_groups(laid_out: Layout, topology: Topology) -> PlacedGroups:
    """Return a layout in the planner's form: sizes, and the link that each kind of group uses."""
    return PlacedGroups(
        world=laid_out.world_size,
        gpus_per_node=topology.ranks_per_node,
        mp=laid_out.mp_size,
        esp=laid_out.esp_size,
        ep=laid_out.ep_size,
        pp=laid_out.pp_size,
        placed=tuple((kind, topology.place(getattr(laid_out, kind))) for kind in ("mp", "dp", "esp", "ep", "edp")),
    )


def is_count(value: object) -> bool:
    """Return True if a value is a whole number of at least 1; ``True`` itself is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def sizes_that_divide(total: int) -> str:
    """Return the divisors of a number, for messages: ``"1, 2, 3, 6"`` for 6."""
    return ", ".join(str(size) for size in range(1, total + 1) if total % size == 0)


# ---- Describes where a rank is in a job whose model is split into pipeline stages


@dataclass(frozen=True)
class Stages:
    """Describes the position of this rank in a job of pipeline stages."""

    stage: int
    """The stage that this rank runs, counted from the front."""
    num_stages: int
    num_micro_batches: int
