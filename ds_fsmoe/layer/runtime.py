# SPDX-License-Identifier: Apache-2.0
"""Runs the layers of one engine: by the plan that a block asks for, on lanes and groups that all layers share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ds_fsmoe import registry
from ds_fsmoe.checks.first_forwards import FirstForwards
from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.config.reading import ConfigError, shown
from ds_fsmoe.distributed import waits
from ds_fsmoe.distributed.groups import FSMoEGroups, make_groups, sizes_of_mpu
from ds_fsmoe.distributed.launch_order import VARIABLE
from ds_fsmoe.distributed.nccl import why_one_link
from ds_fsmoe.distributed.topology import Layout, layout, world_size_now
from ds_fsmoe.execution.collectives import Collectives
from ds_fsmoe.execution.lanes import Lanes, make_lanes
from ds_fsmoe.execution.pipeline import Pipeline
from ds_fsmoe.execution.row_sizes import ALONE, Block
from ds_fsmoe.execution.tensor_parallel import PLAIN, SelfSplitWires, TensorParallelUse
from ds_fsmoe.execution.wires import Wires
from ds_fsmoe.layer.alltoall_tasks import Exchange, exchange_in
from ds_fsmoe.layer.late_faults import LateFaults
from ds_fsmoe.layer.recomputed import tape_torchs_functions
from ds_fsmoe.layer.replay import Replay
from ds_fsmoe.log import log_on_rank_0
from ds_fsmoe.observing.call_observer import CallObserver
from ds_fsmoe.observing.instruments import Check, Instrument
from ds_fsmoe.observing.watchdog import Watchdog
from ds_fsmoe.planning.block import BlockPlan, Links
from ds_fsmoe.planning.layer_plan import LayerPlan
from ds_fsmoe.planning.phase_plan import PhasePlan
from ds_fsmoe.planning.presets import BEST, preset


def planned_by(block: FSMoEBlock, links: Links) -> LayerPlan:
    """Return the plan that a block asks for. A degree of "auto" is 1, as nothing has been measured that would say more.

    Args:
        block: the block of the engine.
        links: the order of traffic within a layer.
    """
    asked = block.pipeline_degree
    forward, backward = (
        BlockPlan(1 if degree == "auto" else degree, links) for degree in (asked.forward, asked.backward)
    )
    alltoall = "flat" if block.alltoall == "auto" else block.alltoall
    return LayerPlan(forward, backward, alltoall, in_halves=block.split_batch == "on")


def planned_links(block: FSMoEBlock) -> Links:
    """Return the order of traffic within a layer."""
    return "reduce_first" if block.schedule == BEST else preset(block.schedule).links


def block_of(groups: FSMoEGroups) -> Block:
    """Return the ranks that share the experts of a layer, as the exchange of counts needs them."""
    if groups.block_group is None:
        return ALONE
    ranks, layout = groups.ranks_of("blocks"), groups.layout
    places = tuple(
        (layout.group_of("ep", each).index(each), layout.group_of("esp", each).index(each)) for each in ranks
    )
    return Block(groups.block_group, places, ranks.index(groups.rank))


class LayerRuntime:
    """Holds what the MoE layers of one engine share: lanes, plan, trace, watchdog. ``close`` it with the engine.

    Make it once torch.distributed is initialised; collective over all ranks of the job.

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
        """The reason why no two collectives may be under way at once, if there is one; the same on every rank."""
        if self.one_link is not None:
            log_on_rank_0(
                "links take turns, as NCCL might begin what is on both in another order on each rank, and hang: "
                f"{self.one_link}",
                logging.WARNING,
            )
        self.lanes: Lanes = make_lanes(device, block.overlap, self.one_link is not None)
        self.links: Links = planned_links(block) if self.one_link is None else "shared"
        self.plan = planned_by(block, self.links)
        """The plan by which layers are run until another one is applied to them."""
        self.observer = CallObserver.of(block, device)
        self.tracer, self.step_clock = self.observer.tracer, self.observer.clock
        self.first_forwards = FirstForwards(keeps_calls=block.autotune.enabled is True)
        self.instruments: list[Instrument] = [self.first_forwards.watch, *self.observer.instruments]
        """The instruments that are shown the calls of all layers."""
        self.late_faults = LateFaults()
        """What devices have found of choices out of range."""
        self.replay = Replay()
        """The choices by which the next forward is to route."""
        self.records_routing = False
        """Whether the choices of routers are recorded."""
        self._said: set[str] = set()
        self.checks: list[Check] = []
        """The checks that are shown all layers before their calls."""
        self.engine: Callable[[], Any] = lambda: None
        """Returns the engine as long as it is there."""
        self.is_over = False
        """Whether the engine has ended: layers run without it."""
        self.put_on_model: list[Callable[[], None]] = []
        """What takes off again what lies on the model besides its layers, when it is given back."""
        self._watchdog = Watchdog(self.lanes, block.debug.hang_timeout_s)
        if self.tracer is not None:
            self._watchdog.at_end.append(self.tracer.save)
        self.lanes.on_error = self._watchdog.failed

    @property
    def needs_routers(self) -> bool:
        """Whether what routers choose is recorded or replaced in a forward that begins now; the same on every rank."""
        return self.records_routing or self.replay.is_armed

    @property
    def max_ctas(self) -> int | None:
        """The most thread blocks that a collective of a lane may have; ``None``: NCCL's own choice."""
        return None if self.block.max_ctas == "auto" else self.block.max_ctas

    def describe_links(self, orders: Sequence[str]) -> str:
        """Describe how the traffic of the links runs, for the log.

        Args:
            orders: the orders of tasks of the layers that run in chunks, in words; the others have one task at a time.
        """
        if not self.block.overlap:
            return "one after another, as fsmoe.overlap = false says"
        if self.one_link is not None:
            return f"one after another: {self.one_link}"
        if not orders:
            return "one after another, as layers run in one chunk"
        words = "; ".join(each.removeprefix("links ") for each in orders)
        if self.device.type != "cuda":
            return words
        ctas = "" if self.max_ctas is None else f", {self.max_ctas} thread blocks each at the most"
        return f"{words}, begun in the order of issue ({VARIABLE}){ctas}"

    def groups(self, ep_size: int, use: TensorParallelUse = PLAIN) -> FSMoEGroups:
        """Return the groups of a layer spread over so many ranks. Collective."""
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

    def shard_index(self, ep_size: int) -> int:
        """Return which part of each of its experts this rank has. No group is made for it."""
        rank = dist.get_rank() if world_size_now() > 1 else 0
        return self._layout(ep_size, self.block.esp_size).group_of("esp", rank).index(rank)

    def ep_rank(self, ep_size: int) -> int:
        """Return which of the ranks that share the experts this one is. No group is made for it."""
        rank = dist.get_rank() if world_size_now() > 1 else 0
        return self._layout(ep_size, self.block.esp_size).group_of("ep", rank).index(rank)

    def experts_by_rule(self, ep_size: int) -> list[int]:
        """Return, for each rank of this rank's block, the EP rank whose experts a script gives it, by DeepSpeed's rule.
        The rule ignores shards: in its layout the ranks of a block are several groups of ``ep_size``."""
        cut, whole = (self._layout(ep_size, esp_size) for esp_size in (self.block.esp_size, 1))
        return [whole.group_of("ep", rank).index(rank) for rank in cut.group_of("blocks", dist.get_rank())]

    def exchange(self, groups: FSMoEGroups, alltoall: str) -> Exchange:
        """Make an all-to-all in the groups of a layer. Collective: communicators may be made.

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

    def say_flat(self, alltoall: str, why: str) -> None:
        """Say once, for all layers, why an all-to-all is run as the flat one."""
        if why not in self._said:
            self._said.add(why)
            log_on_rank_0(f"fsmoe.alltoall = {shown(alltoall)} is run as flat: {why}", logging.WARNING)

    def say_in_slots(self, path: str) -> None:
        """Say once, for all layers, that wires are for rows, if any is asked for."""
        wires = self.block.wires
        if (wires.dispatch, wires.combine) != ("model", "model") and "wires" not in self._said:
            self._said.add("wires")
            log_on_rank_0(
                f"fsmoe.wires is for layers that send rows: {path}, and others like it, send slots in their own type",
                logging.WARNING,
            )

    def pipeline(self, label: str, groups: FSMoEGroups, plan: LayerPlan, exchange: Exchange) -> Pipeline:
        """Return the pipeline that runs one layer by a plan.

        Args:
            label: the label of the layer.
            groups: the groups of the layer.
            plan: the plan of the layer.
            exchange: the all-to-all of the plan, in these groups.
        """
        phases = (
            PhasePlan(block, groups.planned, backward, exchange.planned, plan.in_halves)
            for block, backward in ((plan.forward, False), (plan.backward, True))
        )
        of_kind = SelfSplitWires if groups.layout.tensor_parallel_experts else Collectives
        collectives = of_kind(
            exchange.whole,
            groups.ep_group,
            groups.esp_group,
            exchange.legs,
            plan.reduces,
            exchange.rows,
            exchange.row_legs,
            block_of(groups),
            exchange.passes_on,
            exchange.nodes,
            Wires(self.block.wires.dispatch, self.block.wires.combine),
        )
        return Pipeline(self.lanes, collectives, *phases, label, self.block.recompute)

    def at_step(self, number: int) -> None:
        """Take note that optimizer step ``number`` is about to begin, or goes on."""
        waits.at_step(number)
        if self.tracer is not None:
            self.tracer.step(number)

    def close(self) -> None:
        """End the watchdog and the lanes, and write what was recorded of a trace. Layers are looked at no more."""
        self._watchdog.close()
        if self.tracer is not None:
            self.tracer.close()
        self.lanes.close()
        self.is_over, self.records_routing = True, False
        self.checks.clear()
        self.instruments.clear()
