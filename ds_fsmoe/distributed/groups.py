# SPDX-License-Identifier: Apache-2.0
"""Makes the communicators of an MoE layer, and registers them with DeepSpeed.

The engine and the layers call it during construction. ``topology`` decides which ranks a group has.

The ranks of a pipeline stage are ep x esp x edp. DeepSpeed lacks sharding of experts, so it receives ``ep * esp`` as
the number of ranks that share the experts. Its own function then makes the groups ``ep_size_{ep*esp}``: a *block* of
ranks with different parts of all experts, and the expert-data-parallel (EDP) groups of ranks with the same part. Its
broadcast, reduction and checkpoints are then right, since shards do not look like replicas. We split each block: ESP
groups, the ranks that share one expert's hidden width, are runs of ``esp`` consecutive ranks. EP groups stride over
them, with one rank of each ESP group. With ``esp = 1`` our EP groups have the ranks of DeepSpeed's. With more they
differ, and ``layer/state.py`` converts between DeepSpeed's EP ranks and ours.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch import nn

from ds_fsmoe.distributed import nccl
from ds_fsmoe.distributed.fail_together import on_every_rank
from ds_fsmoe.distributed.topology import (
    Layout,
    Ranks,
    Topology,
    find_topology,
    layout,
    placed_groups,
    why_not_sharded,
    world_size_now,
)
from ds_fsmoe.distributed.waits import waiting
from ds_fsmoe.planning.groups import Communicators, PlacedGroups, of_deepspeed, of_gradients, of_layers


@dataclass(frozen=True)
class FSMoEGroups:
    """Holds the groups of one (ep, esp) from the view of one rank. A communicator of one rank, or without peers, is
    ``None``."""

    layout: Layout
    topology: Topology
    rank: int
    ep_group: dist.ProcessGroup | None
    """All-to-alls of tokens use it. It and ``esp_group`` are ours alone and for one lane, so nothing can come
    between."""
    esp_group: dist.ProcessGroup | None
    """The group for all-gathers and reduce-scatters of tokens."""
    block_group: dist.ProcessGroup | None
    """DeepSpeed's ``ep_size_{ep*esp}``. Never used on a lane of links."""
    edp_group: dist.ProcessGroup | None
    """DeepSpeed's group that reduces gradients of experts."""
    dp_group: dist.ProcessGroup | None
    """DeepSpeed's group that reduces gradients of dense parameters. It includes sequence-parallel ranks, too."""
    mp_group: dist.ProcessGroup | None = None
    """Our group that gathers what tensor-parallel ranks have dropped, and sums gradients of what they hold alike."""
    capacity_group: dist.ProcessGroup | None = None
    """All ranks that exchange, gather or share tokens and must agree on a capacity: the block group, as a rule."""
    max_ctas: int | None = None
    """The most thread blocks of a lane's communicator on NCCL, see :func:`make`."""

    @cached_property
    def planned(self) -> PlacedGroups:
        """Return the groups in the planner's form.

        ``planned.placements[kind].lanes`` are the lanes of a kind of group, the same on every rank;
        ``topology.lanes_of(ranks_of(kind))`` are those of this rank's own group.
        """
        return placed_groups(self.layout, self.topology)

    def ranks_of(self, kind: str) -> Ranks:
        """Return the ranks of this rank's group of a kind, see :meth:`Layout.group_of`."""
        return self.layout.group_of(kind, self.rank)

    def index_in(self, kind: str) -> int:
        """Return this rank's index in its group of a kind: in ``"ep"`` the EP rank, in ``"esp"`` the shard, in
        ``"blocks"`` DeepSpeed's EP rank, which is in the names of experts' files."""
        return self.ranks_of(kind).index(self.rank)


@dataclass(frozen=True)
class _Made:
    """Holds the groups made under one default process group. They cannot be in DeepSpeed's own dictionaries, where
    every key counts as an expert-parallel size."""

    groups: dict[tuple, FSMoEGroups] = field(default_factory=dict)
    parts: dict[tuple, dist.ProcessGroup | None] = field(default_factory=dict)
    splits: list[bool] = field(default_factory=list)
    """Whether groups are split off the default one, once that is known."""


# When a default group goes, so does what was made under it: kept here, it would hold on to its sockets and threads.
_made_under: weakref.WeakKeyDictionary[Any, _Made] = weakref.WeakKeyDictionary()


def _made() -> _Made:
    """Return the groups of the present default process group."""
    world = dist.group.WORLD
    # What was made may name the group it was made under, which would then never go by itself.
    for other in [each for each in _made_under if each is not world]:
        del _made_under[other]
    return _made_under.setdefault(world, _Made())


def make_groups(
    ep_size: int = 1,
    esp_size: int = 1,
    *,
    expert_before_data: bool = True,
    ranks_per_node: int | None = None,
    mp_size: int | None = None,
    pp_size: int | None = None,
    tensor_parallel_experts: bool = False,
    same_tokens: bool = True,
    max_ctas: int | None = None,
) -> FSMoEGroups:
    """Return the groups of this rank for experts spread over ``ep_size`` and sharded over ``esp_size`` ranks.

    Collective over all ranks of the job: every rank calls with the same arguments, in the same order of calls. Groups
    are made once, and returned again until the default process group is destroyed. With one rank, or without
    torch.distributed, no communicator of ours is made.

    Under DeepSpeed, call it where the engine calls ``set_deepspeed_parallelism`` or later: by then DeepSpeed has its
    ``mpu`` and the device is set. Without DeepSpeed (a layer assembled by a script) all groups are ours.

    Args:
        ep_size, esp_size, expert_before_data: see :func:`layout`.
        ranks_per_node: ``fsmoe.topology.ranks_per_node``; ``None`` counts by host names.
        mp_size, pp_size: the sizes of the rest of the model; ``None``: those of DeepSpeed's ``mpu``, 1 without.
        tensor_parallel_experts: see :func:`layout`.
        same_tokens: whether tensor-parallel ranks enter the layer with the same tokens.
        max_ctas: the limit for communicators of lanes, see :func:`make`.

    Raises:
        ValueError: sizes do not divide the ranks (names sizes that do), or experts are sharded on nodes of unequal
            size.
        RuntimeError: DeepSpeed's groups of that size have other ranks, or belong to a destroyed process group.
    """
    stock = _deepspeed_groups()
    if mp_size is None or pp_size is None:
        mpu_mp_size, mpu_pp_size = sizes_of_mpu(None if stock is None else stock.mpu)
        mp_size = mpu_mp_size if mp_size is None else mp_size
        pp_size = mpu_pp_size if pp_size is None else pp_size
    key = (ep_size, esp_size, expert_before_data, ranks_per_node, mp_size, pp_size, tensor_parallel_experts)
    key = (*key, same_tokens, max_ctas, stock is not None)
    if world_size_now() > 1 and key in _made().groups:
        return _made().groups[key]
    found = layout(
        *(world_size_now(), ep_size, esp_size, expert_before_data),
        mp_size=mp_size,
        pp_size=pp_size,
        tensor_parallel_experts=tensor_parallel_experts,
    )
    if found.world_size == 1:
        if stock is not None:
            # DeepSpeed's engine looks for its groups by their names on one rank too.
            _made_by_deepspeed(stock, found, 0, expert_before_data)
        return FSMoEGroups(found, find_topology(ranks_per_node), 0, None, None, None, None, None)
    topology = find_topology(ranks_per_node)
    if reason := why_not_sharded(topology, esp_size):
        raise ValueError(reason)
    agreeing = found.agreeing(same_tokens=same_tokens)
    rank = dist.get_rank()
    # The order of these lines is the order on every rank, members or not: making a group is collective. DeepSpeed's
    # come first, as with a layer, which has made them before this is called; then those that DeepSpeed lacks.
    theirs = _groups_of_deepspeed(stock, found, rank, expert_before_data)
    wider = agreeing if agreeing != found.blocks else None
    ours = {each.purpose: make(each, max_ctas) for each in of_layers(found.kinds, wider)}
    capacity_group = ours.get("capacity", theirs[0])
    groups = FSMoEGroups(
        *(found, topology, rank, ours["ep"], ours["esp"], *theirs, ours["mp"], capacity_group, max_ctas)
    )
    return _made().groups.setdefault(key, groups)


def _groups_of_deepspeed(
    stock: Any, found: Layout, rank: int, expert_before_data: bool
) -> list[dist.ProcessGroup | None]:
    """Return this rank's block, EDP and DP groups: DeepSpeed's, if it is in use, connected to their peers."""
    if stock is None:
        return [make(each) for each in of_deepspeed(found.kinds)]
    groups = _made_by_deepspeed(stock, found, rank, expert_before_data)
    for group in groups:
        _connect(group)
    return groups


def make(listed: Communicators, max_ctas: int | None = None) -> dist.ProcessGroup | None:
    """Make a communicator for each of the listed sets of ranks; return this rank's, or ``None`` if it is alone.

    Collective over all ranks of the job, with the same arguments on each. Communicators are made once, and returned
    again until the default process group is destroyed.

    Args:
        listed: the sets of ranks and their purpose: two purposes with the same ranks have separate communicators.
        max_ctas: the maximum of thread blocks for collectives of lanes on NCCL; ``None``: NCCL's own choice.
    """
    made = _made().parts
    most = max_ctas if listed.is_on_lane else None
    key = listed, most
    if key not in made:
        several = [ranks for ranks in listed.ranks if len(ranks) > 1]
        own = _new(several, f"fsmoe_{listed.purpose}", most)
        _connect(own)
        made[key] = own
    return made[key]


def _new(groups: Sequence[Ranks], name: str, max_ctas: int | None) -> dist.ProcessGroup | None:
    """Make disjoint groups; return this rank's. Collective over all ranks of the job.

    If the default group is bound to a device, every rank takes part in each group that NCCL makes: so all groups are
    made at once then.
    """
    own = None
    rank = dist.get_rank()
    timeout = _timeout()
    with waiting("a new process group"):
        if groups and _is_splitting():
            ranks, asked = [list(each) for each in groups], nccl.options(max_ctas, timeout)
            return dist.split_group(split_ranks=ranks, timeout=timeout, pg_options=asked, group_desc=name)
        for ranks in groups:
            asked = nccl.options(max_ctas, timeout)
            group = dist.new_group(list(ranks), timeout=timeout, pg_options=asked, group_desc=name)
            own = group if rank in ranks else own
    return own


def _is_splitting() -> bool:
    """Return True if groups are split off the default one; the same on every rank. Collective at the first call."""
    splits = _made().splits
    if not splits:
        splits.append(nccl.is_used() and all(on_every_rank(nccl.can_split())))
    return splits[0]


def _connect(group: dist.ProcessGroup | None) -> None:
    """Connect a group before its first collective, which may run concurrently with others. Collective over its ranks.

    The groups of a kind are disjoint, and no other collective runs while groups are made.
    """
    if group is not None and nccl.is_used(group):
        nccl.warm(group)


def _timeout() -> timedelta | None:
    """Return the default group's timeout. A new group would have its backend's instead, half an hour on gloo."""
    world: Any = dist.group.WORLD
    backend = world._get_backend(world._device_types[0])
    return getattr(getattr(backend, "options", None), "_timeout", None)


def _deepspeed_groups() -> Any:
    """Return DeepSpeed's module of groups if this process communicates through DeepSpeed; importing it takes
    seconds."""
    if "deepspeed.comm" not in sys.modules:
        return None
    from deepspeed import comm
    from deepspeed.utils import groups

    return groups if comm.is_initialized() else None


def sizes_of_mpu(mpu: Any) -> tuple[int, int]:
    """Return (tensor-parallel ranks, pipeline stages) of a script's ``mpu`` for DeepSpeed; ``None`` means 1 of each."""
    if mpu is None:
        return 1, 1
    from deepspeed.utils.bwc import bwc_pipeline_parallel_world_size, bwc_tensor_model_parallel_world_size

    return bwc_tensor_model_parallel_world_size(mpu), bwc_pipeline_parallel_world_size(mpu)


def sequence_ranks_of_mpu(mpu: Any) -> int:
    """Return the number of ranks that share each sequence, by the ``mpu`` of DeepSpeed's Ulysses; 1 for any other.

    That ``mpu`` calls them model-parallel too; DeepSpeed recognises it by the lack of data-parallel ranks.
    """
    has_data = hasattr(mpu, "get_data_parallel_world_size")
    if has_data or not hasattr(mpu, "get_sequence_parallel_world_size"):
        return 1
    return mpu.get_sequence_parallel_world_size()


def has_neighbours(mpu: Any) -> bool:
    """Return True if this rank's tensor-parallel ranks are the run of consecutive ranks that :func:`layout` expects."""
    size, _ = sizes_of_mpu(mpu)
    if size == 1:
        return True
    from deepspeed.utils.bwc import bwc_tensor_model_parallel_group

    first = dist.get_rank() // size * size
    return dist.get_process_group_ranks(bwc_tensor_model_parallel_group(mpu)) == [*range(first, first + size)]


def _made_by_deepspeed(
    stock: Any, found: Layout, rank: int, expert_before_data: bool
) -> list[dist.ProcessGroup | None]:
    """Return DeepSpeed's block, EDP and DP groups of this rank; its own function makes the missing ones."""
    block_size = len(found.blocks[0])
    name = stock_names(block_size, 1).expert_group_name
    if name not in stock._get_expert_parallel_group_dict():
        order = {"use_data_before_expert_parallel_": not expert_before_data}
        if found.tensor_parallel_experts:
            stock._create_expert_data_and_model_parallel(block_size, stock.mpu, **order)
        else:
            stock._create_expert_and_data_parallel(block_size, pp_size=found.pp_size, **order)
    block_group, edp_group = stock._get_expert_parallel_group(name), stock._get_expert_data_parallel_group(name)
    try:
        dist.get_rank(block_group)
    except ValueError as error:
        raise RuntimeError(
            f"DeepSpeed's group {name} belongs to a process group that was destroyed: end process groups with "
            "deepspeed.comm.destroy_process_group(), which also clears DeepSpeed's groups"
        ) from error
    # DeepSpeed keeps one group per size, made as the first layer that asked for it wanted it.
    held = stock._get_expert_parallel_group_ranks(name), stock._get_expert_data_parallel_group_ranks(name)
    needed = found.group_of("blocks", rank), found.group_of("edp", rank)
    if tuple(map(tuple, held)) != needed:
        raise RuntimeError(
            f"DeepSpeed's group {name} of rank {rank} has the ranks {list(held[0])}, and {list(held[1])} for data; "
            f"ds_fsmoe needs {list(needed[0])} and {list(needed[1])}. An earlier layer made it with "
            "enable_expert_tensor_parallelism, with another use_data_before_expert_parallelism or in other "
            "pipeline stages: build all layers with the same settings"
        )
    dp_group = stock._get_sequence_data_parallel_group()
    sized = ((block_group, block_size), (edp_group, len(found.edp[0])), (dp_group, len(found.dp[0])))
    return [group if size > 1 else None for group, size in sized]


@dataclass(frozen=True)
class StockNames:
    """Holds the values that a ``deepspeed.moe.layer.MoE`` needs so that DeepSpeed handles it correctly."""

    ep_size: int
    """The value for ``MoE.ep_size``: ep * esp, the ranks that hold different parts of the experts."""
    expert_group_name: str
    """The value for ``MoE.expert_group_name``, ``MOELayer.ep_group_name`` and ``group_name`` of every parameter of an
    expert. Also ``name`` of the optimizer's parameter groups of experts, where a script has split them already."""

    def put_on(self, moe: nn.Module) -> None:
        """Write the values on a layer. ``MOELayer.ep_size`` stays, because the layer's own forward uses it."""
        moe.ep_size = self.ep_size
        moe.expert_group_name = self.expert_group_name
        moe.deepspeed_moe.ep_group_name = self.expert_group_name
        for parameter in moe.deepspeed_moe.experts.parameters():
            parameter.allreduce = False
            parameter.group_name = self.expert_group_name


def stock_names(ep_size: int, esp_size: int) -> StockNames:
    """Return the names for DeepSpeed of a layer spread over ``ep_size`` and sharded over ``esp_size`` ranks."""
    return StockNames(ep_size * esp_size, f"ep_size_{ep_size * esp_size}")


def communicator_like(groups: FSMoEGroups, kind: str) -> dist.ProcessGroup | None:
    """Return a separate communicator with the ranks of this rank's group of a kind; ``None`` for one rank. Collective.

    It serves traffic that must not come between that of another: gradients on a lane, and updated parameters. It is
    made once, as :func:`make` does: engines of one process share it. So do two kinds with the same ranks, whose
    gradients are sent in one order on one lane.
    """
    return make(of_gradients(getattr(groups.layout, kind)), groups.max_ctas)


@contextmanager
def passing_communicators(
    kinds: Sequence[Sequence[Ranks]], name: str, max_ctas: int | None = None
) -> Iterator[list[dist.ProcessGroup]]:
    """Make this rank's communicator of each kind for the block, also of one rank. Collective over all ranks of the job,
    with the same arguments on each.

    They are destroyed at the end, when no rank may be in their collectives.

    Args:
        kinds: the groups of each kind; every rank is in one of them.
        name: their name, for messages.
        max_ctas: see :func:`make`.
    """
    made: list[dist.ProcessGroup] = []
    try:
        for groups in kinds:
            own = _new(groups, name, max_ctas)
            made += [] if own is None else [own]
        yield made
    finally:
        for group in made:
            dist.destroy_process_group(group)
