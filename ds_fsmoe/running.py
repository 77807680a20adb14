# SPDX-License-Identifier: Apache-2.0
"""How the layers of one engine are run: the plan that a block asks for, on lanes and groups that all layers share."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ds_fsmoe.blocks import FSMoEBlock
from ds_fsmoe.components.alltoall import AllToAllBase
from ds_fsmoe.config import ConfigError, shown
from ds_fsmoe.exchanges import exchange_in
from ds_fsmoe.first_forwards import FirstForwards
from ds_fsmoe.launch_order import VARIABLE
from ds_fsmoe.log import log_on_rank_0
from ds_fsmoe.planning.block import BlockPlan, Links, equal_shares
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.presets import BEST, preset
from ds_fsmoe.planning.schedule import (
    A2A_IN,
    A2A_IN_NODE,
    A2A_OUT,
    A2A_OUT_NODE,
    EXPERT_GRAD,
    GATHER,
    GRAD,
    REDUCE,
)
from ds_fsmoe.predicted import PredictedPipeline, Predictor, Predictors
from ds_fsmoe.reporting.run_files import TRACE
from ds_fsmoe.runtime.duplicates import PLAIN, SelfSplitWires, TensorParallelUse
from ds_fsmoe.runtime.groups import FSMoEGroups, make_groups, sizes_of_mpu
from ds_fsmoe.runtime.lanes import Lanes, SerialLanes, make_lanes
from ds_fsmoe.runtime.nccl import why_one_link
from ds_fsmoe.runtime.pipeline import PhasePlan, Pipeline
from ds_fsmoe.runtime.step_times import StepClock
from ds_fsmoe.runtime.topology import layout, rank_now, world_size_now
from ds_fsmoe.runtime.trace import Tracer
from ds_fsmoe.runtime.watchdog import Watchdog
from ds_fsmoe.runtime.wires import Wires
from ds_fsmoe.uncut import Uncut

_KINDS_OF_GROUP = {
    "ep": (A2A_IN, A2A_OUT, A2A_IN_NODE, A2A_OUT_NODE),
    "esp": (GATHER, REDUCE),
    "dp": (GRAD,),
    "edp": (EXPERT_GRAD,),
}

Exchange = Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]


def planned_degrees(block: FSMoEBlock) -> tuple[int, int]:
    """(forward, backward): as the block says; what is "auto" is 1, as nothing has been measured that would say more."""
    asked = block.pipeline_degree
    forward, backward = (1 if each == "auto" else each for each in (asked.forward, asked.backward))
    return forward, backward


def planned_links(block: FSMoEBlock) -> Links:
    """The order of traffic within a layer."""
    return "reduce_first" if block.schedule == BEST else preset(block.schedule).links


def trace_folder(block: FSMoEBlock) -> Path:
    """Where ranks leave their traces: as the block says, or else with the record of the run, if there is one."""
    if block.record.dir is None or "path" in block.trace.model_fields_set:
        return Path(block.trace.path)
    return Path(block.record.dir) / TRACE


class Running:
    """What the MoE layers of one engine have in common: lanes, plan, trace, watchdog. ``close`` it with the engine.

    Made where torch.distributed is initialised already; collective over all ranks of the job.

    Args:
        block: what is asked for.
        device: of the parameters.
        expert_before_data: whether neighbours share the experts, DeepSpeed's default.
        mpu: of the script, if there is one.

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
        self.one_link = why_one_link() if device.type == "cuda" else None
        """Why no two collectives may be under way at once, where that is so; the same on every rank."""
        if self.one_link is not None:
            log_on_rank_0(
                "links take turns, as NCCL might begin what is on both in another order on each rank, and hang: "
                f"{self.one_link}",
                logging.WARNING,
            )
        self.lanes: Lanes = make_lanes(device, block.overlap, self.one_link is not None)
        self.degrees = planned_degrees(block)
        self.links: Links = planned_links(block) if self.one_link is None else "shared"
        rank = rank_now()
        trace = block.trace
        folder = trace_folder(block)
        self.tracer = Tracer(folder, rank, trace.start_step, trace.num_steps, device) if trace.enabled else None
        self._predictor = None if self.tracer is None or trace.cluster is None else Predictor(trace.cluster)
        self.predictors: Predictors = dict
        """Of the layers, from what the autotuner has measured."""
        self.step_clock = StepClock(device) if block.autotune.enabled else None
        self.first_forwards = FirstForwards(keeps_calls=block.autotune.enabled)
        self.uncut = Uncut(device, block.debug.check_experts, block.autotune.enabled, block.esp_size > 1)
        self._watchdog = Watchdog(self.lanes, block.debug.hang_timeout_s)
        if self.tracer is not None:
            self._watchdog.at_end.append(self.tracer.save)
        self.lanes.on_error = self._watchdog.failed

    @property
    def max_ctas(self) -> int | None:
        """The most thread blocks that a collective of a lane may have; ``None``: what NCCL likes."""
        return None if self.block.max_ctas == "auto" else self.block.max_ctas

    def describe_links(self) -> str:
        """How their traffic runs, for the log."""
        if not self.block.overlap:
            return "one after another, as fsmoe.overlap = false says"
        if self.one_link is not None:
            return f"one after another: {self.one_link}"
        if self.device.type != "cuda":
            return "at the same time"
        ctas = "" if self.max_ctas is None else f", {self.max_ctas} thread blocks each at the most"
        return f"at the same time, begun in the order of issue ({VARIABLE}){ctas}"

    def groups(self, ep_size: int, use: TensorParallelUse = PLAIN) -> FSMoEGroups:
        """The groups of a layer spread over so many ranks. Collective."""
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

    def shard_index(self, ep_size: int) -> int:
        """Which part of each of its experts this rank has. No group is made for it."""
        sizes = {"mp_size": self.mp_size, "pp_size": self.pp_size}
        found = layout(world_size_now(), ep_size, self.block.esp_size, self.expert_before_data, **sizes)
        rank = rank_now()
        return found.group_of("esp", rank).index(rank)

    def experts_by_rule(self, ep_size: int) -> list[int]:
        """For each rank of this rank's block the EP rank whose experts a script gives it, by DeepSpeed's rule. It knows
        nothing of shards: in its layout the ranks of a block are several groups of ``ep_size``."""
        sizes = {"mp_size": self.mp_size, "pp_size": self.pp_size}
        cut, whole = (
            layout(world_size_now(), ep_size, esp_size, self.expert_before_data, **sizes)
            for esp_size in (self.block.esp_size, 1)
        )
        return [whole.group_of("ep", rank).index(rank) for rank in cut.group_of("blocks", dist.get_rank())]

    def pipeline(self, label: str, ep_size: int, alltoall: AllToAllBase, use: TensorParallelUse = PLAIN) -> Pipeline:
        """How one layer is run. Collective: every rank asks for its layers in the same order.

        Raises:
            ConfigError: ``trace.cluster`` has no number for one of the groups, or the all-to-all contradicts itself.
        """
        groups = self.groups(ep_size, use)
        if self.tracer is not None:
            self.tracer.peers[label] = {
                kind: list(groups.ranks_of(group)) for group, kinds in _KINDS_OF_GROUP.items() for kind in kinds
            }
        try:
            exchange = exchange_in(groups, alltoall)
        except ValueError as error:
            raise ConfigError(f"fsmoe.alltoall = {shown(self.block.alltoall)}: {error}") from error
        plans = (
            PhasePlan(BlockPlan(equal_shares(degree), self.links), groups.planned, backward, exchange.planned)
            for degree, backward in zip(self.degrees, (False, True), strict=True)
        )
        of_kind = SelfSplitWires if groups.layout.tensor_parallel_experts else Wires
        wires = of_kind(exchange.whole, groups.ep_group, groups.esp_group, exchange.legs)
        pipeline = Pipeline(self.lanes, wires, *plans, label, self.block.recompute, self.tracer)
        if self.step_clock is None and self._predictor is None:
            return pipeline
        return PredictedPipeline.of(pipeline, self.tracer, self._predictor, lambda: self.predictors(), self.step_clock)

    def at_step(self, number: int) -> None:
        """Optimizer step ``number`` is about to begin, or goes on."""
        if self.tracer is not None:
            self.tracer.step(number)

    def close(self) -> None:
        """End the watchdog and the lanes, and write what there is of a trace."""
        self._watchdog.close()
        if self.tracer is not None:
            self.tracer.close()
        self.lanes.close()


def alone(exchange: Exchange, group: dist.ProcessGroup | None = None) -> Pipeline:
    """For a layer that stands in no engine of ours: one task after another, among the ranks of ``group``."""
    ranks = 1 if group is None else dist.get_world_size(group)
    groups = Groups(world=ranks, gpus_per_node=ranks, ep=ranks)
    plans = (PhasePlan(BlockPlan(), groups, backward) for backward in (False, True))
    return Pipeline(SerialLanes(), Wires(exchange, group if ranks > 1 else None, None), *plans)
