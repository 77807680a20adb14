# SPDX-License-Identifier: Apache-2.0
"""The experts that a rank has in memory for one call of a layer in inference, and the transfer of their weights.

``ds_fsmoe.layer.inference`` decides which experts a rank needs, and calls an :class:`ExpertCache`. All experts' weights
are in the memory of each host, or are fetched from their primary ranks, only those that change. On a CPU experts
compute in the host's memory, without a copy. Otherwise, and for fetched weights, a buffer has the weights of the rank's
experts.

Letters: E experts, e experts on this rank, G ranks, W experts with weights in one tensor.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ds_fsmoe.components.expert_compute.calls import ExpertSet
from ds_fsmoe.components.expert_compute.contract import shape_of
from ds_fsmoe.components.expert_compute.expert_call import CallRows, ExpertCall, sizes_of_call
from ds_fsmoe.components.expert_compute.stacked_experts import StackedExperts
from ds_fsmoe.components.routing import Routing
from ds_fsmoe.distributed.partitioned import is_shared_out
from ds_fsmoe.distributed.waits import waiting
from ds_fsmoe.execution.row_sizes import RowBlock
from ds_fsmoe.layer.experts_layer import FSMoEExperts
from ds_fsmoe.ops import Ops

# ---- Routing to the copies of experts in one call of a layer in inference, where popular ones are on several ranks
# Letters: E experts, G ranks of the EP group, P places, C maximum copies of an expert, K choices, S tokens.


@dataclass(frozen=True)
class ExpertCacheTable:
    """Holds the experts of each rank in a call, the same on every rank.

    Every rank has as many places as the rank with most experts; places behind a rank's experts are empty. Place p is on
    rank ``p // per_rank``.

    Raises:
        ValueError: a rank has no expert, or one twice; or an expert is on no rank.
    """

    experts_of_rank: tuple[tuple[int, ...], ...]
    """The experts of each of G ranks, in the order of its places."""
    num_experts: int
    """E."""

    def __post_init__(self) -> None:
        present = set().union(*self.experts_of_rank)
        if present != set(range(self.num_experts)):
            raise ValueError(f"experts {sorted(present)}: must be 0..{self.num_experts - 1}")
        for rank, experts in enumerate(self.experts_of_rank):
            if not experts or len(set(experts)) < len(experts):
                raise ValueError(f"rank {rank} has experts {experts}: must be different ones, at least one")

    @property
    def per_rank(self) -> int:
        """Return the number of places of a rank."""
        return max(map(len, self.experts_of_rank))

    @property
    def num_places(self) -> int:
        """Return the number of places, P."""
        return self.per_rank * len(self.experts_of_rank)

    @cached_property
    def copies_E(self) -> np.ndarray:
        """Return the number of ranks that have each expert, [E]."""
        every = [expert for experts in self.experts_of_rank for expert in experts]
        return np.bincount(every, minlength=self.num_experts)

    @cached_property
    def places_EC(self) -> np.ndarray:
        """Return the places of each expert, rank by rank, repeated up to C: [E, C]."""
        found: list[list[int]] = [[] for _ in range(self.num_experts)]
        for rank, experts in enumerate(self.experts_of_rank):
            for index, expert in enumerate(experts):
                found[expert].append(rank * self.per_rank + index)
        most = max(map(len, found))
        return np.array([(each * most)[:most] for each in found])

    def load_of_ranks(self, rows_E: np.ndarray) -> np.ndarray:
        """Return the rows of each rank, [G], where each expert's rows are split evenly over its copies.

        Args:
            rows_E: the rows of each expert.
        """
        rows = rows_E / self.copies_E
        return np.array([rows[list(experts)].sum() for experts in self.experts_of_rank])

    def in_same_places(self, before: ExpertCacheTable) -> ExpertCacheTable:
        """Return the same table with experts in their earlier places, where possible."""
        return replace(self, experts_of_rank=tuple(map(_in_same_places, self.experts_of_rank, before.experts_of_rank)))


def _in_same_places(experts: Sequence[int], before: Sequence[int]) -> tuple[int, ...]:
    stays = [each if each in experts else None for each in before[: len(experts)]]
    stays += [None] * (len(experts) - len(stays))
    come = iter(sorted(set(experts).difference(each for each in stays if each is not None)))
    return tuple(next(come) if each is None else each for each in stays)


def rows_of_experts(routing: Routing) -> torch.Tensor:
    """Return the rows that a decision sends to each expert, [E] int64; without a wait for the device."""
    expert_KS = _experts(routing).reshape(-1)
    counts = expert_KS.new_zeros(routing.num_experts + 1)
    return counts.scatter_add_(0, expert_KS, torch.ones_like(expert_KS))[:-1]


def route_to_copies(routing: Routing, rows_E: torch.Tensor, table: ExpertCacheTable, rank: int, ops: Ops) -> Routing:
    """Return a decision about E experts as one about places, with one slot of each.

    The rows of an expert on several ranks go to its copies in turn, token by token. Each rank begins with another copy,
    so that all get equally many. The host does not wait for the device.

    Args:
        routing: the decision.
        rows_E: the result of :func:`rows_of_experts` for it.
        table: the experts of each rank.
        rank: this rank, in the order of the EP group.
        ops: the operators to use.
    """
    expert_KS = _experts(routing)
    places_EC = torch.from_numpy(table.places_EC).to(expert_KS.device)
    most = places_EC.shape[1]
    num_places = table.num_places
    # An extra row is for choices that are not made.
    places_EC = torch.cat([places_EC, places_EC.new_full((1, most), num_places)])
    if most == 1:
        place_KS = places_EC[:, 0][expert_KS]
    else:
        copies_E = torch.from_numpy(np.append(table.copies_E, 1)).to(expert_KS.device)
        slots = max(1, expert_KS.numel())
        numbered = ops.take_slots(expert_KS.contiguous(), table.num_experts, slots, None, "token")
        number_KS = numbered.slots_KS - expert_KS * slots + rank
        place_KS = places_EC[expert_KS, number_KS % copies_E[expert_KS]]
    # A number out of range stays out of range, so that it is still detected as a fault; so do counts that are too
    # small.
    place_KS = torch.where(routing.slots_KS < 0, -1, place_KS)
    place_KS = torch.where(routing.slots_KS > routing.num_slots, num_places + 1, place_KS)
    at = place_KS.reshape(-1).clamp(-1, num_places)
    counts_P = at.new_zeros(num_places + 2).scatter_add_(0, at + 1, torch.ones_like(at))[1:-1]
    counts_P = counts_P - (routing.counts_E < rows_E).any().long()
    return replace(routing, slots_KS=place_KS, counts_E=counts_P, capacity=1, num_experts=num_places)


def _experts(routing: Routing) -> torch.Tensor:
    """Return the expert of each choice, [K, S]; E for a choice that is not made."""
    expert_KS = routing.slots_KS.div(max(1, routing.capacity), rounding_mode="floor")
    is_row_KS = (routing.slots_KS >= 0) & (routing.slots_KS < routing.num_slots)
    return torch.where(is_row_KS, expert_KS, routing.num_experts)


# ---- The experts in a rank's memory for one call of a layer in inference, and the transfer of their weights


Where = Literal["host", "home"]
"""The source of weights: ``"host"``, the memory of each host, or ``"home"``, the ranks of primary experts."""


@dataclass(frozen=True)
class ExpertCacheMemory:
    """Holds the memory for the weights of one layer's experts, before it is filled."""

    stacks: dict[str, torch.Tensor] = field(default_factory=dict)
    """Name -> [E, ...] for each weight, in the host's memory; empty: weights are fetched."""
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    """Name -> [maximum experts of a rank, ...], where they are computed; empty: in the stacks."""

    @classmethod
    def made(cls, form: ExpertForm, num_experts: int, most: int, where: Where) -> ExpertCacheMemory:
        """Return newly allocated memory.

        Args:
            form: the experts of this rank.
            num_experts: E.
            most: the maximum number of experts of a rank.
            where: the source of weights.

        Raises:
            RuntimeError, MemoryError: the host or the device has too little memory.
        """
        stacks, buffers = {}, {}
        pinned = form.device.type == "cuda"
        for name in form.names:
            shape, dtype = form.shapes[name], form.dtype_of(name)
            if where == "host":
                stacks[name] = torch.empty(num_experts, *shape, dtype=dtype, pin_memory=pinned)
            if where == "home" or not computes_on_host(form.device):
                buffers[name] = torch.empty(most, *shape, dtype=dtype, device=form.device)
        return cls(stacks, buffers)

    @staticmethod
    def bytes_of(form: ExpertForm, num_experts: int, most: int, where: Where) -> tuple[int, int]:
        """Return the bytes that :meth:`made` allocates: in the host's memory, and where experts are computed."""
        of_expert = sum(math.prod(form.shapes[each]) * form.dtype_of(each).itemsize for each in form.names)
        is_buffered = where == "home" or not computes_on_host(form.device)
        return (num_experts if where == "host" else 0) * of_expert, (most if is_buffered else 0) * of_expert


class AllOnHost:
    """Calls experts that are all in host memory in which they are computed.

    Args:
        form: the calls of experts.
        stacks: name -> [E, ...] for each weight.
        rank: this rank, in the order of the EP group.
    """

    may_be_early = True
    """Whether :meth:`prepare` may be called outside of the layer's forward; the same on every rank."""

    def __init__(self, form: ExpertForm, stacks: Mapping[str, torch.Tensor], rank: int) -> None:
        self._called, self._rank = form.called(stacks), rank
        self._experts: tuple[int, ...] = ()

    def arranged(self, table: ExpertCacheTable) -> ExpertCacheTable:
        """Return the table with the experts of each rank ascending, in the order of their weights."""
        return ExpertCacheTable(tuple(tuple(sorted(each)) for each in table.experts_of_rank), table.num_experts)

    def prepare(self, table: ExpertCacheTable) -> None:
        """Make the experts of this table available."""
        self._experts = table.experts_of_rank[self._rank]

    def call_rows(self, rows: CallRows, x_RM: torch.Tensor) -> ExpertCall:
        """Return one call of the experts of the last table."""
        return self._called(self._experts, rows, x_RM)


class Buffered:
    """Calls copies of the rank's experts, in one tensor for each weight, which grows as needed.

    Args:
        form: the calls of experts, and the weights of this rank's primary experts.
        primary_experts: the primary experts of each rank, in the order of their weights.
        block: the ranks that share the experts.
        memory: the memory for them, with filled stacks if it has any.
    """

    def __init__(
        self, form: ExpertForm, primary_experts: Sequence[Sequence[int]], block: RowBlock, memory: ExpertCacheMemory
    ) -> None:
        stacks = memory.stacks or None
        self._form, self._primary_experts, self._block, self._stacks = form, primary_experts, block, stacks
        self._rank = block.ep_index
        self._table = ExpertCacheTable(tuple(map(tuple, primary_experts)), sum(map(len, primary_experts)))
        self._row_of_own = {expert: index for index, expert in enumerate(primary_experts[self._rank])}
        is_whole = not any(map(is_shared_out, form.parameters))
        self.may_be_early = stacks is not None or is_whole
        # Parameters that ZeRO 3 partitions are whole within the layer's forward only.
        self._reads_own = stacks is None or is_whole
        self._buffers = dict(memory.buffers)
        self._cached: list[int] = []
        self._fetching: dict[str, tuple[Any, torch.Tensor, torch.Tensor]] = {}
        self._prefetched: list[int] = []
        self._called: CalledExperts | None = None
        device = form.device
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def arranged(self, table: ExpertCacheTable) -> ExpertCacheTable:
        """Return the table with kept experts in their present places."""
        return table.in_same_places(self._table)

    def prepare(self, table: ExpertCacheTable) -> None:
        """Start to load the experts of this table. Collective over the block where weights are fetched."""
        self._finish()
        before, self._table = self._table, table
        experts = table.experts_of_rank[self._rank]
        self._grow_buffers(len(experts))
        if self._stacks is None:
            self._fetch(before)
        if self._side is not None:
            # After the calls that still use the replaced weights, and concurrent with work up to the next one.
            self._side.wait_stream(torch.cuda.current_stream(self._form.device))
        with torch.cuda.stream(self._side):
            for row, expert in enumerate(experts):
                if row < len(self._cached) and self._cached[row] == expert:
                    continue
                for name, buffer in self._buffers.items():
                    weight = self._at_hand(name, expert)
                    if weight is not None:
                        buffer[row].copy_(weight, non_blocking=True)
        self._cached = list(experts)

    def call_rows(self, rows: CallRows, x_RM: torch.Tensor) -> ExpertCall:
        """Return one call of the experts of the last table."""
        self._finish()
        if self._called is None:
            self._called = self._form.called(self._buffers)
        return self._called(tuple(range(len(self._cached))), rows, x_RM)

    def _at_hand(self, name: str, expert: int) -> torch.Tensor | None:
        """Return a weight that need not be fetched; else ``None``."""
        if expert in self._row_of_own and self._reads_own:
            return self._form.own(name, self._row_of_own[expert])
        if expert in self._cached:
            # It is in a place behind those of this table, and those are not overwritten.
            return self._buffers[name][self._cached.index(expert)]
        return None if self._stacks is None else self._stacks[name][expert]

    def _grow_buffers(self, num_held: int) -> None:
        """Enlarge the buffers to at least this number of experts."""
        if self._buffers and num_held <= len(next(iter(self._buffers.values()))):
            return
        for name in self._form.names:
            shape, dtype = self._form.shapes[name], self._form.dtype_of(name)
            grown = torch.empty(num_held, *shape, dtype=dtype, device=self._form.device)
            if name in self._buffers:
                grown[: len(self._buffers[name])] = self._buffers[name]
            self._buffers[name] = grown
        self._called = None

    def _fetch(self, before: ExpertCacheTable) -> None:
        """Start to fetch weights of experts that ranks neither own nor had before. Every rank knows all transfers."""
        tables = zip(self._table.experts_of_rank, before.experts_of_rank, self._primary_experts, strict=True)
        wanted = [sorted(set(now).difference(then, at_home)) for now, then, at_home in tables]
        if not any(wanted):
            return
        # In the order of the group, which may differ from that of EP ranks.
        eps = [ep for ep, _ in self._block.places]
        sent = [[each for each in wanted[ep] if each in self._row_of_own] for ep in eps]
        received = [[each for each in wanted[self._rank] if each in self._primary_experts[ep]] for ep in eps]
        self._prefetched = [expert for experts in received for expert in experts]
        rows = [self._row_of_own[expert] for experts in sent for expert in experts]
        for name, buffer in self._buffers.items():
            x = buffer.new_empty(len(rows), buffer[0].numel())
            for at, row in enumerate(rows):
                x[at] = self._form.own(name, row).reshape(-1)
            y = buffer.new_empty(len(self._prefetched), x.shape[1])
            sizes = list(map(len, received)), list(map(len, sent))
            work = dist.all_to_all_single(y, x, *sizes, group=self._block.group, async_op=True)
            self._fetching[name] = work, x, y

    def _finish(self) -> None:
        """Wait for the transfers that have begun."""
        if self._side is not None:
            torch.cuda.current_stream(self._form.device).wait_stream(self._side)
        fetching, self._fetching = self._fetching, {}
        for name, (work, _, y) in fetching.items():
            with waiting("the weights of experts"):
                work.wait()
            buffer = self._buffers[name]
            for expert, weight in zip(self._prefetched, y, strict=True):
                buffer[self._cached.index(expert)] = weight.view(buffer.shape[1:])


def gather_stacks(
    stacks: Mapping[str, torch.Tensor], form: ExpertForm, primary_experts: Sequence[Sequence[int]], block: RowBlock
) -> None:
    """Fill stacks with all experts' weights, one expert of each rank at a time. Collective over the block.

    Args:
        stacks: see :attr:`ExpertCacheMemory.stacks`.
        form: the primary experts of this rank, with whole weights.
        primary_experts: see :class:`Buffered`.
        block: the ranks that share the experts.
    """
    for name, stack in stacks.items():
        for index in range(len(primary_experts[0])):
            own = form.own(name, index).contiguous()
            parts = [torch.empty_like(own) for _ in block.places]
            with waiting("the weights of experts"):
                dist.all_gather(parts, own, group=block.group)
            for (ep, _), part in zip(block.places, parts, strict=True):
                stack[primary_experts[ep][index]] = part


def computes_on_host(device: torch.device) -> bool:
    """Return True if experts on this device are computed in the host's memory."""
    return device.type == "cpu"


ExpertCache = AllOnHost | Buffered
"""The experts in this rank's memory for one layer, by a table that changes from call to call."""


def make_expert_cache(
    form: ExpertForm, primary_experts: Sequence[Sequence[int]], block: RowBlock, memory: ExpertCacheMemory
) -> ExpertCache:
    """Return the expert cache of a layer. Collective over the block where there are stacks.

    Args:
        form, primary_experts, block: see :class:`Buffered`.
        memory: the memory for the weights.
    """
    gather_stacks(memory.stacks, form, primary_experts, block)
    if not memory.buffers:
        return AllOnHost(form, memory.stacks, block.ep_index)
    return Buffered(form, primary_experts, block, memory)


def give_back_host_memory() -> None:
    """Free the unused blocks of torch's allocator of pinned memory, which it would keep otherwise."""
    empty = getattr(torch.accelerator, "empty_host_cache", None)
    if empty is not None and torch.accelerator.is_available():
        empty()


# ---- Calls of experts with weights outside the model, in one tensor of several experts for each weight


_MOST_SETS = 64
"""The maximum number of cached sets of experts of a layer."""


CalledExperts = Callable[[Sequence[int], CallRows, torch.Tensor], ExpertCall]
"""Makes a call of some of W experts with stacked weights. Arguments: their ascending numbers; the sizes of the rows,
of which the first are those of these experts and all others are 0; and the rows."""


@dataclass(frozen=True, eq=False)
class ExpertForm:
    """Describes the experts of this rank in one layer, and calls of other experts with their structure."""

    shapes: Mapping[str, tuple[int, ...]]
    """Name -> the whole shape of a weight of one expert, also where ZeRO 3 partitions it."""
    parameters: tuple[torch.Tensor, ...]
    """All parameters with the weights, those of the names first."""
    own: Callable[[str, int], torch.Tensor]
    """Returns a weight, by its name, of one of this rank's experts, by its index; it must be whole."""
    called: Callable[[Mapping[str, torch.Tensor]], CalledExperts]
    """Returns experts with these weights, [W, ...] each."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the weights of an expert."""
        return tuple(self.shapes)

    @property
    def device(self) -> torch.device:
        """Return the device on which the experts are computed."""
        return self.parameters[0].device

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype of a weight."""
        return self.parameters[self.names.index(name)].dtype


def with_weights(module: nn.Module, weights: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return a copy of a module of experts with these weights, which shares its functions, norm and flags."""
    made = copy.copy(module)
    given = {name: nn.Parameter(each, requires_grad=False) for name, each in weights.items()}
    made._parameters = {**module._parameters, **given}
    if hasattr(module, "num_experts"):
        made.num_experts = len(next(iter(weights.values())))
    return made


def form_of_module(module: FSMoEExperts) -> ExpertForm:
    """Return the form of the experts of a Hugging Face model: one module, in evaluation."""
    contract = module.fsmoe.contract
    assert contract is not None

    def called(stacks: Mapping[str, torch.Tensor]) -> CalledExperts:
        state, num_experts = module.fsmoe, len(next(iter(stacks.values())))
        stand_in, own = with_weights(module, stacks), state.own_forward
        own_forward = None if own is None else own.__func__.__get__(stand_in)  # type: ignore[attr-defined]
        experts = StackedExperts(stand_in, contract, own_forward, state.path)
        return lambda which, rows, x_RM: experts.call(False, sizes_of_some(rows, which, num_experts), x_RM)

    weights = {name: getattr(module, name) for name in contract.weights}
    return ExpertForm(
        {name: (shape_of(each) or ())[1:] for name, each in weights.items()},
        tuple(weights.values()),
        lambda name, index: getattr(module, name).detach()[index],
        called,
    )


def form_of_set(experts: Sequence[nn.Module], path: str) -> ExpertForm:
    """Return the form of the experts of a DeepSpeed layer: modules of one structure.

    Args:
        experts: the experts of this rank, in evaluation.
        path: of the layer in the model, for messages.
    """
    weights = [_weights_of(each) for each in experts]

    def called(stacks: Mapping[str, torch.Tensor]) -> CalledExperts:
        modules = []
        for index in range(len(next(iter(stacks.values())))):
            memo: dict[int, Any] = {}
            for name, each in weights[0].items():
                weight = stacks[name][index]
                is_parameter = isinstance(each, nn.Parameter)
                memo[id(each)] = nn.Parameter(weight, requires_grad=False) if is_parameter else weight
            # deepcopy uses the entries of the memo instead of copies.
            modules.append(copy.deepcopy(experts[0], memo))
        sets: dict[tuple[int, ...], ExpertSet] = {}

        def call_rows(which: Sequence[int], rows: CallRows, x_RM: torch.Tensor) -> ExpertCall:
            key = tuple(which)
            if key not in sets:
                if len(sets) == _MOST_SETS:
                    del sets[next(iter(sets))]
                sets[key] = ExpertSet([modules[each] for each in key], keep_expert_dim=True, path=path)
            return sets[key].call(False, sizes_of_some(rows, range(len(key)), len(key)), x_RM)

        return call_rows

    return ExpertForm(
        {name: tuple(each.shape) for name, each in weights[0].items()},
        tuple(each for of_expert in weights for each in of_expert.values()),
        lambda name, index: weights[index][name].detach(),
        called,
    )


def _weights_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict([*module.named_parameters(), *module.named_buffers()])


def sizes_of_some(rows: CallRows, which: Sequence[int], num_experts: int) -> CallRows:
    """Return the sizes of the forward for W experts of which only some have rows.

    Args:
        rows: the sizes of places; the first are those of these experts, and all others have no rows.
        which: the experts, ascending.
        num_experts: W.
    """
    chunks: list[list[int]] = []
    for of_experts in rows.forward.of_experts:
        sizes = [0] * num_experts
        for expert, size in zip(which, of_experts, strict=False):
            sizes[expert] = size
        chunks.append(sizes)
    ends = torch.tensor(chunks).cumsum(1).to(torch.int32)
    return sizes_of_call(chunks, ends.to(rows.forward.ends.device))
