# SPDX-License-Identifier: Apache-2.0
"""The lanes, plan, groups and checks that the layers of one engine share, and the pipelines that run them.

The engine creates one :class:`LayerRuntime`; each layer's state calls it to create groups and pipelines. Layers without
an engine use :func:`pipeline_without_engine`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ds_fsmoe import registry
from ds_fsmoe.checks.first_forwards import FirstForwards
from ds_fsmoe.components.alltoall import AllToAllBase
from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.config.reading import ConfigError, shown
from ds_fsmoe.distributed import waits
from ds_fsmoe.distributed.groups import FSMoEGroups, make_groups, sizes_of_mpu
from ds_fsmoe.distributed.launch_order import VARIABLE
from ds_fsmoe.distributed.nccl import why_one_link
from ds_fsmoe.distributed.topology import Layout, layout, world_size_now
from ds_fsmoe.distributed.waits import waiting
from ds_fsmoe.execution.collectives import FULL, Collectives, CommDtypes
from ds_fsmoe.execution.counts_exchange import FAULTS, RoutingError
from ds_fsmoe.execution.device_tables import HostCopy, is_capturing
from ds_fsmoe.execution.lanes import Lanes, make_lanes
from ds_fsmoe.execution.pipeline import LayerPipeline
from ds_fsmoe.execution.row_sizes import ALONE, RowBlock
from ds_fsmoe.execution.tensor_parallel import PLAIN, TensorParallelUse
from ds_fsmoe.layer.parts import exchange_in
from ds_fsmoe.layer.replay import Replay, tape_torchs_functions
from ds_fsmoe.log import log_on_rank_0
from ds_fsmoe.observing.call_observer import CallObserver
from ds_fsmoe.observing.instruments import Check, Instrument
from ds_fsmoe.observing.watchdog import Watchdog
from ds_fsmoe.planning.block import BlockPlan, LayerPlan, Links
from ds_fsmoe.planning.decide.presets import BEST, preset
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.phase_plan import PhasePlan

# ---- Reports choices out of range late, where a check in the call would make the host wait for the device
#
# A layer without communication treats such a choice as not made, and continues. The device's finding is copied to the
# host behind the forward, and checked at the engine's step; without a step, at a later call after its arrival, or at
# ``eval()``, ``train()`` or ``destroy()``. Several ranks share the findings of forwards in training at their common
# step, and raise together. In evaluation each rank raises alone, as a call on a CPU does.


def refuse(path: str, fault: int, rank: int | None = None) -> None:
    """Refuse choices out of range.

    Args:
        path: the path of the layer.
        fault: see :data:`~ds_fsmoe.execution.counts_exchange.FAULTS`; 0: no fault.
        rank: the rank that made them; by default this one.

    Raises:
        RoutingError: there is a fault.
    """
    if fault:
        if rank is None:
            rank = dist.get_rank() if world_size_now() > 1 else 0
        raise RoutingError(f"{path or 'an MoE layer'}: the gate's result on rank {rank}: {FAULTS[fault]}")


_MOST = 256
"""The maximum number of forwards of layers that wait for their check."""


class LateFaults:
    """Collects routing faults (a gate's invalid choices) that forwards of one engine found on the device.

    They wait here until the host checks them and raises :class:`RoutingError`.
    """

    def __init__(self) -> None:
        self._found: list[tuple[str, torch.Tensor, HostCopy]] = []
        self._paths: tuple[str, ...] = ()
        self._device = torch.device("cpu")
        self._kept: dict[str, torch.Tensor] = {}
        self._shared: list[HostCopy] = []

    @property
    def are_shared(self) -> bool:
        """Return True if ranks share the faults of forwards in training."""
        return bool(self._paths)

    def begin_sharing(self, paths: Iterable[str], device: torch.device) -> None:
        """Share the faults of forwards in training from now on.

        Args:
            paths: the paths of the layers, the same on every rank.
            device: the device of this rank.
        """
        self._paths, self._device = tuple(paths), device

    def add(self, path: str, fault: torch.Tensor, in_training: bool) -> None:
        """Keep the fault of a forward, and check those of earlier ones that have arrived.

        Args:
            path: the path of the layer.
            fault: a scalar on the device.
            in_training: whether the layer is in training.

        Raises:
            RoutingError: an earlier forward had choices out of range.
        """
        if is_capturing():  # a graph would keep this forward's fault, and none of its replays
            return
        if in_training and self.are_shared:
            self._keep(path, fault)
            return
        self._check_own(waits=len(self._found) >= _MOST)
        self._found.append((path, fault, HostCopy(fault)))

    def share(self) -> None:
        """Share the faults since the last call with all ranks. Collective where ranks share them.

        Only the device waits for it; the host waits in :meth:`check`.
        """
        if not self.are_shared:
            return
        for path, fault, _ in self._found:
            self._keep(path, fault)
        self._found.clear()
        none = torch.zeros((), dtype=torch.int64, device=self._device)
        faults_L = torch.stack([self._kept.pop(each, none).long() for each in self._paths])
        # The largest code of each layer identifies its rank.
        codes_L = torch.where(faults_L > 0, faults_L * dist.get_world_size() + dist.get_rank(), 0)
        with waiting("choices out of range"):
            dist.all_reduce(codes_L, op=dist.ReduceOp.MAX)
        self._shared.append(HostCopy(codes_L))

    def check(self) -> None:
        """Check all faults, with a wait for those that have not arrived.

        Raises:
            RoutingError: a forward had choices out of range; if it was shared, on every rank.
        """
        shared, self._shared = self._shared, []
        for copy in shared:
            with waiting("choices out of range"):
                codes = copy.wait().tolist()
            for path, code in zip(self._paths, codes, strict=True):
                fault, rank = divmod(code, dist.get_world_size())
                refuse(path, fault, rank)
        self._check_own(waits=True)

    def check_all(self) -> None:
        """Check faults that will no longer be shared, at the end of the engine.

        Raises:
            RoutingError: a forward of this rank had choices out of range.
        """
        self._found += [(path, fault, HostCopy(fault)) for path, fault in self._kept.items()]
        self._kept.clear()
        self.check()

    def _keep(self, path: str, fault: torch.Tensor) -> None:
        earlier = self._kept.get(path)
        self._kept[path] = fault if earlier is None else torch.maximum(earlier, fault)

    def _check_own(self, waits: bool) -> None:
        while self._found and (waits or self._found[0][2].has_arrived()):
            path, _, copy = self._found.pop(0)
            fault = int(copy.wait())
            if fault:
                self._found.clear()
                refuse(path, fault)


# ---- Layers without an engine of ours


def pipeline_without_engine(
    alltoall: AllToAllBase, group: dist.ProcessGroup | None, lanes: Lanes, degrees: tuple[int, int] = (1, 1)
) -> LayerPipeline:
    """Return the pipeline of a layer without an engine of ours.

    Args:
        alltoall: the all-to-all.
        group: the ranks that share the experts; ``None`` for this process alone.
        lanes: the lanes that run tasks.
        degrees: the numbers of chunks (forward, backward).
    """
    ranks = 1 if group is None else dist.get_world_size(group)
    groups = Groups(world=ranks, gpus_per_node=ranks, ep=ranks)
    plans = [PhasePlan(BlockPlan(each), groups, i == 1) for i, each in enumerate(degrees)]
    if ranks == 1:
        return LayerPipeline(lanes, Collectives(alltoall.exchange, None, None), *plans)
    block = RowBlock(group, tuple((each, 0) for each in range(ranks)), dist.get_rank(group))
    rows = alltoall.exchange_rows if alltoall.takes_rows else None
    return LayerPipeline(lanes, Collectives(alltoall.exchange, group, None, exchange_rows=rows, block=block), *plans)


# ---- The layers of one engine


def planned_by(block: FSMoEBlock, links: Links) -> LayerPlan:
    """Return the plan that a block configures. A degree of "auto" is 1 before measurements.

    Args:
        block: the block of the engine.
        links: the order of communication within a layer.
    """
    asked = block.pipeline_degree
    forward, backward = (
        BlockPlan(1 if degree == "auto" else degree, links) for degree in (asked.forward, asked.backward)
    )
    alltoall = "flat" if block.alltoall == "auto" else block.alltoall
    return LayerPlan(forward, backward, alltoall, is_two_batch=block.split_batch == "on")


def planned_links(block: FSMoEBlock) -> Links:
    """Return the order of communication within a layer."""
    return "reduce_first" if block.schedule == BEST else preset(block.schedule).links


def block_of(groups: FSMoEGroups) -> RowBlock:
    """Return the ranks that share the experts of a layer, for the exchange of counts."""
    group, ranks, layout = groups.block_group, groups.ranks_of("blocks"), groups.layout
    if layout.tensor_parallel_experts and groups.capacity_group is not None:
        # Experts that split themselves gather rows of tensor-parallel ranks, each of which is in a block of its own.
        group, ranks = groups.capacity_group, tuple(dist.get_process_group_ranks(groups.capacity_group))
    if group is None:
        return ALONE
    places = tuple(
        (layout.group_of("ep", each).index(each), layout.group_of("esp", each).index(each)) for each in ranks
    )
    return RowBlock(group, places, ranks.index(groups.rank))


class LayerRuntime:
    """Holds the lanes, plan, trace and watchdog that one engine's MoE layers share. ``close`` it with the engine.

    Create it after torch.distributed is initialised; collective over all ranks of the job.

    Args:
        block: the options.
        device: the device of the parameters.
        expert_before_data: whether neighbours share the experts, DeepSpeed's default.
        mpu: the script's ``mpu``, if there is one.

    Raises:
        OSError: the folder of the trace cannot be written to.
    """

    def __init__(
        self, block: FSMoEBlock, device: torch.device, expert_before_data: bool = True, mpu: Any = None
    ) -> None:
        self.block = block
        self.device = device
        self.expert_before_data = expert_before_data
        self.mp_size, self.pp_size = sizes_of_mpu(mpu)
        tape_torchs_functions()
        self.one_link = why_one_link() if device.type == "cuda" else None
        """The reason why two collectives must not be concurrent, if there is one; the same on every rank."""
        if self.one_link is not None:
            log_on_rank_0(
                f"links are used one at a time ({self.one_link})",
                logging.WARNING,
                "NCCL may start collectives in another order on each rank, and hang",
            )
        self.lanes: Lanes = make_lanes(device, block.overlap, self.one_link is not None)
        self.links: Links = planned_links(block) if self.one_link is None else "shared"
        self.layer_sizes: Sequence[tuple[int, TensorParallelUse]] = ()
        """The EP size and the tensor parallelism of the layers of all pipeline stages, the same on every rank."""
        self.plan = planned_by(block, self.links)
        """The plan of layers until another one is applied to them."""
        self.observer = CallObserver.of(block, device)
        self.tracer, self.step_clock = self.observer.tracer, self.observer.clock
        self.first_forwards = FirstForwards(keeps_calls=block.autotune.enabled is True)
        self.instruments: list[Instrument] = [self.first_forwards.watch, *self.observer.instruments]
        """The instruments that receive the calls of all layers."""
        self.late_faults = LateFaults()
        """The choices out of range that devices have detected."""
        self.replay = Replay()
        """The choices that the next forward replays."""
        self.records_routing = False
        """Whether the choices of routers are recorded."""
        self._logged: set[str] = set()
        self.checks: list[Check] = []
        """The checks that receive all layers before their calls."""
        self.engine: Callable[[], Any] = lambda: None
        """Returns the engine; ``None`` before it is set and after the engine is deleted."""
        self.is_over = False
        """Whether the engine has ended, and layers run without it."""
        self.put_on_model: list[Callable[[], None]] = []
        """Functions that remove the engine's changes of the model outside its layers."""
        self._watchdog = Watchdog(self.lanes, block.debug.hang_timeout_s)
        if self.tracer is not None:
            self._watchdog.at_end.append(self.tracer.save)
        self.lanes.on_error = self._watchdog.failed

    @property
    def needs_routers(self) -> bool:
        """Return True if routers' choices are recorded or replaced in the forward that begins; the same on every
        rank."""
        return self.records_routing or self.replay.is_armed

    @property
    def max_ctas(self) -> int | None:
        """Return the maximum thread blocks of a lane's collective; ``None``: NCCL's own choice."""
        return None if self.block.max_ctas == "auto" else self.block.max_ctas

    def describe_links(self, orders: Sequence[str]) -> str:
        """Return a description of the order of communication on the links, for the log.

        Args:
            orders: the orders of tasks of the layers that run in chunks, in words; others have one task at a time.
        """
        if not self.block.overlap:
            return "one at a time (fsmoe.overlap = false)"
        if self.one_link is not None:
            return f"one after another: {self.one_link}"
        if not orders:
            return "one at a time (layers run in one chunk)"
        words = "; ".join(each.removeprefix("links ") for each in orders)
        if self.device.type != "cuda":
            return words
        ctas = "" if self.max_ctas is None else f", at most {self.max_ctas} thread blocks each"
        return f"{words}, started in the order of issue ({VARIABLE}){ctas}"

    def groups(self, ep_size: int, use: TensorParallelUse = PLAIN) -> FSMoEGroups:
        """Return the groups of a layer with this EP size. Collective."""
        asked = self.block.topology.ranks_per_node
        return make_groups(
            ep_size,
            self.block.esp_size,
            expert_before_data=self.expert_before_data,
            ranks_per_node=None if asked == "auto" else asked,
            mp_size=self.mp_size,
            pp_size=self.pp_size,
            tensor_parallel_experts=use.experts,
            same_tokens=use.same_tokens,
            max_ctas=self.max_ctas,
        )

    def _layout(self, ep_size: int, esp_size: int) -> Layout:
        sizes = {"mp_size": self.mp_size, "pp_size": self.pp_size}
        return layout(world_size_now(), ep_size, esp_size, self.expert_before_data, **sizes)

    def index_in(self, kind: str, ep_size: int) -> int:
        """Return this rank's index in its group of a kind, without creating the group.

        Args:
            kind: "ep": the ranks that share the experts; "esp": the ranks that share each expert.
            ep_size: the number of ranks over which the experts are spread.
        """
        rank = dist.get_rank() if world_size_now() > 1 else 0
        return self._layout(ep_size, self.block.esp_size).group_of(kind, rank).index(rank)

    def experts_by_rule(self, ep_size: int) -> list[int]:
        """Return, for each rank of this rank's block, the EP rank whose experts a script gives it by DeepSpeed's rule.

        The rule ignores shards: in its layout the ranks of a block are several groups of ``ep_size``.
        """
        cut, whole = (self._layout(ep_size, esp_size) for esp_size in (self.block.esp_size, 1))
        return [whole.group_of("ep", rank).index(rank) for rank in cut.group_of("blocks", dist.get_rank())]

    def exchange(self, groups: FSMoEGroups, alltoall: str) -> Collectives:
        """Create an all-to-all in the groups of a layer. Collective: communicators may be created.

        Args:
            groups: the groups of the layer.
            alltoall: its name in the registry.

        Raises:
            ConfigError: the all-to-all contradicts itself, on every rank.
        """
        try:
            return exchange_in(groups, registry.lookup("alltoall", alltoall)())
        except ValueError as error:
            raise ConfigError(f"fsmoe.alltoall = {shown(alltoall)}: {error}") from error

    def alltoalls_to_compare(self) -> dict[tuple[int, TensorParallelUse], dict[str, Collectives]]:
        """Make every all-to-all for all layers, by :attr:`layer_sizes` and name, the flat one first; none where there
        is one kind of link, or where the config names one. Collective over all ranks, which make the communicators of
        all stages: with fewer on some, later ones would have other names there."""
        if self.block.alltoall != "auto":
            return {}
        names = ("flat", *(each for each in registry.known("alltoall") if each != "flat"))
        found = {}
        for sizes in self.layer_sizes:
            groups = self.groups(*sizes)
            if len(groups.planned.placements["ep"].lanes) > 1:
                found[sizes] = {name: exchange_in(groups, registry.lookup("alltoall", name)()) for name in names}
        return found

    def warn_alltoall_fallback(self, alltoall: str, why: str) -> None:
        """Warn once, for all layers, that an all-to-all runs as the flat one, with the reason."""
        if why not in self._logged:
            self._logged.add(why)
            log_on_rank_0(f"fsmoe.alltoall = {shown(alltoall)} is run as flat: {why}", logging.WARNING)

    def warn_padded_dispatch(self, path: str) -> None:
        """Warn once, for all layers, that a configured communication dtype applies to unpadded dispatch only."""
        comm_dtypes = self.block.wires
        if (comm_dtypes.dispatch, comm_dtypes.combine) != ("model", "model") and "wires" not in self._logged:
            self._logged.add("wires")
            log_on_rank_0(
                f"fsmoe.comm_dtype does not apply to {path} and layers like it (padded dispatch keeps their dtype)",
                logging.WARNING,
            )

    def pipeline(
        self, label: str, groups: FSMoEGroups, plan: LayerPlan, collectives: Collectives, in_rows: bool
    ) -> LayerPipeline:
        """Return the pipeline that runs one layer by a plan.

        Args:
            label: the label of the layer.
            groups: the groups of the layer.
            plan: the plan of the layer.
            collectives: those of the plan's all-to-all, in these groups.
            in_rows: whether the layer uses unpadded dispatch, to which communication dtypes apply; slots keep their own
                dtype.
        """
        comm_dtypes = CommDtypes(self.block.wires.dispatch, self.block.wires.combine) if in_rows else FULL
        phases = (
            PhasePlan(block, groups.planned, backward, collectives.planned, plan.is_two_batch, comm_dtypes.narrow)
            for block, backward in ((plan.forward, False), (plan.backward, True))
        )
        collectives = replace(
            collectives,
            ep_group=groups.ep_group,
            esp_group=groups.esp_group,
            reduces=plan.reduces,
            block=block_of(groups),
            comm_dtypes=comm_dtypes,
        )
        return LayerPipeline(self.lanes, collectives, *phases, label, self.block.recompute)

    def at_step(self, number: int) -> None:
        """Start, or continue, optimizer step ``number``."""
        waits.at_step(number)
        if self.tracer is not None:
            self.tracer.step(number)

    def close(self) -> None:
        """Stop the watchdog and the lanes, write the trace, and drop checks and instruments."""
        self._watchdog.close()
        if self.tracer is not None:
            self.tracer.close()
        self.lanes.close()
        self.is_over, self.records_routing = True, False
        self.checks.clear()
        self.instruments.clear()
