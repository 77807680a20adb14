# SPDX-License-Identifier: Apache-2.0
"""Takes the reduction of gradients over from DeepSpeed: when their bytes move, and nothing else.

DeepSpeed goes on deciding what a gradient is worth: its division, its type on the wire, its partitions, norm, clipping
and overflow check. At stage 0 one method of the engine is replaced, at stages 1 and 2 four of the ZeRO optimizer, on
the objects themselves; :meth:`Reduction.close` takes them off again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups as stock_groups
from torch import nn

from ds_fsmoe.config.blocks import FSMoEBlock, GradientPartitionBlock
from ds_fsmoe.distributed.fail_together import from_first_rank
from ds_fsmoe.distributed.groups import FSMoEGroups, communicator_like
from ds_fsmoe.execution.node_links import NodeLinks
from ds_fsmoe.gradients.adding_up import words_of_stage_2
from ds_fsmoe.gradients.beside import Beside, end_gathers, make_beside
from ds_fsmoe.gradients.flat_buffers import FlatGradients
from ds_fsmoe.gradients.idle_times import Idle, IdleTimes, TimedWindow, cost_of, plan_by_time
from ds_fsmoe.gradients.reducer import GradientReducer
from ds_fsmoe.gradients.stage_0 import Stage0
from ds_fsmoe.gradients.waiting_gradients import waiting_gradients
from ds_fsmoe.gradients.zero_stages import Stages1And2, partitions_are_ours
from ds_fsmoe.layer.node_levels import node_links
from ds_fsmoe.layer.stock_layer import FSMoELayer
from ds_fsmoe.log import log_on_rank_0
from ds_fsmoe.observing.instruments import LayerCall
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.gradient_plan import (
    BufferReadiness,
    GradientPlan,
    GradientSlice,
    WindowBytes,
    plan_by_bytes,
    plan_by_rule,
    plan_micro_ops,
)
from ds_fsmoe.planning.gradients import Mode, slice_bytes
from ds_fsmoe.planning.presets import BEST, preset
from ds_fsmoe.planning.schedule import EXPERT_GRAD, GRAD

LOOKS = 3
"""The backwards that are observed before gradients travel in them: the first of all is slow, two are measured."""


def wanted_mode(block: FSMoEBlock) -> Mode:
    """Return the mode of the block, or else of its schedule: "off" is DeepSpeed's own reduction."""
    asked = block.gradient_partition.mode
    if asked != "auto":
        return asked
    of_schedule = "adaptive" if block.schedule == BEST else preset(block.schedule).gradients
    return "off" if of_schedule == "exposed" else of_schedule


def obstacle_to(engine: Any, groups: Mapping[str, FSMoEGroups]) -> str | None:
    """Return what prevents taking over gradients of this engine; ``None`` for nothing. The same on every rank."""
    optimizer = engine.optimizer
    if optimizer is None:
        return "there is no optimizer"
    if not groups:
        return "this stage has no MoE layer"
    if engine.sequence_parallel_size > 1:
        return "DeepSpeed's sequence parallelism divides gradients in a way of its own"
    if isinstance(optimizer, ZeROOptimizer) and type(optimizer) is not DeepSpeedZeroOptimizer:
        if engine.zero_optimization_partition_weights():
            return "ZeRO 3 shards gradients"
        return f"{type(optimizer).__name__} keeps gradients where a backward cannot reach them"
    if len(next(iter(groups.values())).layout.dp[0]) == 1:
        return "a model has no replica to reduce with"
    for each in groups.values():
        # Whoever reduces experts together has to agree on what is late, and does so with those of dense gradients.
        if not all(any(set(edp) <= set(dp) for dp in each.layout.dp) for edp in each.layout.edp):
            return "experts are reduced among ranks that reduce dense gradients apart (mpu)"
    return None


def make_communicators(groups: Iterable[FSMoEGroups], asked: GradientPartitionBlock) -> None:
    """Make the communicators of a reduction on all ranks of a job: in a pipeline some stages have nothing to reduce,
    or other parameters. Collective over all ranks, with the same groups on each.

    Args:
        groups: of the MoE layers of all stages.
        asked: the options.
    """
    for each in groups:
        for kind in ("edp", "dp"):
            communicator_like(each, kind)
            if asked.levels != 1:
                node_links(each, kind, "gradients")


class Reduction:
    """Reduces the gradients of one engine. Collective to make.

    Args:
        engine: the complete engine, with its optimizer.
        layers: its MoE layers, with their pipelines.
        mode: the mode that says when bytes move.
        block: the other options.
        groups: the groups of the MoE layers, by DeepSpeed's name of their experts' group.
        beside: whether slices may travel beside other collectives between the layers.
    """

    def __init__(
        self,
        engine: Any,
        layers: Sequence[FSMoELayer],
        mode: Mode,
        block: FSMoEBlock,
        groups: dict[str, FSMoEGroups],
        beside: bool = True,
    ) -> None:
        self.mode = mode
        self._asked = block.gradient_partition
        self._chunk_bytes = slice_bytes(mode, self._asked.asked_bytes)
        self._layers = tuple(layers)
        self._by_rule, self._has_details = block.deterministic, block.autotune.details
        accumulate = self._asked.accumulate
        with_zero = isinstance(engine.optimizer, DeepSpeedZeroOptimizer)
        self._door = Stages1And2(engine, accumulate, self._by_rule) if with_zero else Stage0(engine, accumulate)
        self.beside = make_beside(engine.device) if beside else None
        """What sends beside the caller; ``None``: nothing does."""
        self.reducer = GradientReducer(
            _flats(self._door, groups, block.gradient_partition, mode, self.beside),
            self._door.gradient_of,
            self._door.is_sending,
            self._plan,
            self._door.replace,
            looks=1 if self._by_rule else LOOKS,
            all_used=block.gradient_partition.all_used,
            waiting=waiting_gradients(engine, self._door.most_waiting, layers),
        )
        self.foreseen: tuple[WindowBytes, ...] | None = None
        """The bytes that are sent in each window, as the plan of layers has it; ``None``: idle times say how many."""
        self._two_levels: tuple[bool, ...] | None = None
        """The buffers that are then added up in two levels."""
        self._idle = IdleTimes(engine.device)
        self.reducer.on_finish = self._idle.next_round
        if mode == "micro_ops" and self._layers[0].fsmoe.running is not None:
            self._layers[0].fsmoe.running.instruments.append(self._end_dense_part)
        self.look_at_plans()
        self._door.take(self.reducer)
        if engine.zero_optimization_partition_gradients() and engine.gradient_accumulation_steps() > 1:
            size = sum(each.numel * each.element_bytes for each in self.reducer.flats) / 1e6
            log_on_rank_0(words_of_stage_2(size, self.sums_each, accumulate))

    def try_windows(self, windows: Sequence[WindowBytes]) -> None:
        """Send from now on as much in each window as a plan of layers has foreseen. What was tried with those is kept
        with them: windows that are planned anew, from the times that are left, were slower in whole steps.

        Until it is known what there is before which window, one more round is observed.

        Args:
            windows: the windows in the order of the backward.
        """
        is_first, self.foreseen = self.foreseen is None, tuple(windows)
        self.reducer.on_finish = None
        self._watch_no_more()
        if is_first:
            self.reducer.look_again(1)
        self.reducer.try_plan(self._plan_foreseen)

    def plans_are_kept(self) -> None:
        """Say what is sent in the windows of the plan of layers that stays."""
        plan = self.reducer.coming_plan
        if self.foreseen is not None and plan is not None:
            self._tell(plan, "as in the steps in which that was tried")

    def go_on(self) -> None:
        """Take note that plans are not tried any more, and none of them stays."""
        if self.foreseen is not None:
            self.plan_anew()

    def plan_anew(self) -> None:
        """Measure the idle times of the layers' plans in the next backwards, and plan gradients from them."""
        self.foreseen = None
        self.reducer.forget_plan()
        self._idle = IdleTimes(self._idle.device)
        self.reducer.on_finish = self._idle.next_round
        self.reducer.look_again(LOOKS)
        self.look_at_plans()

    def _plan_foreseen(self, supplies: Sequence[BufferReadiness]) -> GradientPlan:
        assert self.foreseen is not None
        # Which way is faster depends on the links alone.
        if self._two_levels is None:
            self._two_levels = self._costs()[1]
        if self.mode == "micro_ops":
            # As many bytes as were foreseen, in slices of the tensors that there are.
            room = [(_total(each.moe), _total(each.dense)) for each in self.foreseen]
            plan = plan_micro_ops(supplies, room, lambda each: _bytes_in(each, supplies), self._chunk_bytes)
        else:
            plan = plan_by_bytes(supplies, self.foreseen)
        return replace(plan, two_levels=self._two_levels)

    def go_on_with(self, plan: GradientPlan, windows: Sequence[str], ready_at: Sequence[int]) -> None:
        """See :meth:`~ds_fsmoe.gradients.reducer.GradientReducer.go_on_with`."""
        self.foreseen = None
        self.reducer.go_on_with(plan, windows, ready_at)
        self.reducer.on_finish = None
        self._watch_no_more()

    def _watch_no_more(self) -> None:
        for layer in self._layers:
            layer.fsmoe.attach(self.reducer)

    def look_at_plans(self) -> None:
        """Measure in the backwards of the layers' changed plans, until gradients are planned, unless by rule."""
        if self.reducer.on_finish is None:
            return  # there is a plan, or one that the next round begins with
        if self._by_rule:
            self._watch_no_more()
            return
        for layer in self._layers:
            # A graph that is older keeps the window of its own plan.
            window = TimedWindow(self.reducer, layer.pipeline.backward, self._idle)
            layer.fsmoe.attach(window, window.observer)

    def _end_dense_part(self, call: LayerCall) -> None:
        """End the measured part behind a layer where another is computed again: its all-to-alls come before slices."""
        if torch._C._current_graph_task_id() >= 0:
            self._idle.over()

    def _plan(self, supplies: Sequence[BufferReadiness]) -> GradientPlan:
        """Return the plan, the same on every rank: rank 0 of those that share dense gradients decides."""
        if self.foreseen is not None:
            return self._plan_foreseen(supplies)
        self.reducer.on_finish = None
        self._watch_no_more()
        num_windows = len(supplies[-1].ready)
        group = self.reducer.flats[-1].group
        if self._by_rule:
            # In two levels wherever that can be, unless it was asked for otherwise.
            two_levels = [each.nodes is not None and self._asked.levels != 1 for each in self.reducer.flats]
            plan = plan_by_rule(supplies, self.mode, self._chunk_bytes)
            return replace(plan, two_levels=tuple(two_levels))
        costs, two_levels = self._costs()
        if not num_windows:
            plan = plan_by_rule(supplies, self.mode, self._chunk_bytes)
            return from_first_rank(replace(plan, two_levels=two_levels), group)
        idle = self._idle.typical(num_windows, group)
        plan = self._plan_by_time(supplies, costs, idle)
        plan = from_first_rank(replace(plan, two_levels=two_levels), group)
        windows = ", ".join(f"{each.moe_ms:.3g} + {each.dense_ms:.3g}" for each in idle)
        self._tell(plan, f"idle there were, inside and behind each MoE layer, {windows} ms")
        return plan

    def _tell(self, plan: GradientPlan, how: str) -> None:
        """Log how much is sent during the backward; with details also by which way, and how that was found."""
        flats = self.reducer.flats
        ways = ", ".join(dict.fromkeys(str(each.way_in(plan.is_in_levels(at))) for at, each in enumerate(flats)))
        details = f" ({self.mode}); {how}; they travel by {ways}" if self._has_details else ""
        log_on_rank_0(f"gradients: {_describe(plan, flats)}{details}")

    def describe(self) -> str:
        """Return what is sent during a backward, by the plan in force."""
        plan = self.reducer.coming_plan
        when = "after the backward until planned" if plan is None else _describe(plan, self.reducer.flats)
        return f"{self.mode}: {when}"

    def _plan_by_time(
        self, supplies: Sequence[BufferReadiness], costs: Sequence[LinearCost], idle: Sequence[Idle]
    ) -> GradientPlan:
        """Return a plan for the time that was measured to be left, and what sending costs."""
        if self.mode == "micro_ops":
            # Inside a layer there is room where no all-to-all comes that could have to wait.
            has_alltoalls = any(each.pipeline.backward.groups.ep > 1 for each in self._layers)
            room = [(0.0 if has_alltoalls else each.moe_ms, each.dense_ms) for each in idle]

            def took_ms(each: GradientSlice) -> float:
                return costs[each.flat].ms(_bytes_in(each, supplies))

            return plan_micro_ops(supplies, room, took_ms, self._chunk_bytes)
        placements = self._layers[0].pipeline.backward.groups.placements
        # Experts of the first layer may have nobody to be summed with, and those of another with another ep_size do.
        lanes_of = {GRAD: placements["dp"].lanes, EXPERT_GRAD: placements["edp"].lanes or placements["dp"].lanes}
        lanes = [lanes_of[each.kind] for each in supplies]
        solver, chunk_bytes = self._asked.solver, self._chunk_bytes
        return plan_by_time(supplies, lanes, costs, idle, self.mode, solver=solver, chunk_bytes=chunk_bytes)

    def _costs(self) -> tuple[list[LinearCost], tuple[bool, ...]]:
        """Return what sending costs, and which buffers are added up in two levels. Collective.

        Of the two ways the faster one is taken, as rank 0 has measured it.
        """
        # It may be asked between a step and the next forward, while parameters are on their way.
        end_gathers()
        found: list[tuple[LinearCost, bool]] = []
        for flat in self.reducer.flats:
            asked = self._asked.levels
            allowed = (False, True) if asked == "auto" else (asked == 2,)
            measured = {each: cost_of(flat, each) for each in allowed if flat.nodes is not None or not each}
            if not measured:
                measured = {False: cost_of(flat, False)}
            # Ranks of other groups of experts may have measured otherwise; each task's place is the same on all.
            best = from_first_rank(min(measured, key=lambda each: measured[each].alone_ms), self._everyone)
            found.append((measured[best].on_lane, best))
        return [cost for cost, _ in found], tuple(best for _, best in found)

    @property
    def _everyone(self) -> dist.ProcessGroup:
        return self.reducer.flats[-1].group

    @property
    def sums_each(self) -> bool:
        """Whether every micro-batch is summed over ranks, and not the last one of a step alone."""
        return self._door.sums_each

    def bytes_of_plan(self) -> tuple[int, int]:
        """Return (all bytes, those that travel before the backward is over), once there is a plan."""
        assert self.reducer.plan is not None
        return _bytes_of(self.reducer.plan, [each.element_bytes for each in self.reducer.flats])

    def close(self) -> None:
        """Give the reduction back to DeepSpeed."""
        self._door.give_back()
        if self.beside is not None:
            self.beside.close()
        for layer in self._layers:
            layer.fsmoe.attach(None)


def _total(slices: Sequence[tuple[str, float]]) -> float:
    """Return the bytes of several slices."""
    return sum(size_bytes for _, size_bytes in slices)


def _bytes_in(each: GradientSlice, supplies: Sequence[BufferReadiness]) -> int:
    """Return the bytes of a slice."""
    return (each.stop - each.first) * supplies[each.flat].element_bytes


def _bytes_of(plan: GradientPlan, element_bytes: Sequence[int]) -> tuple[int, int]:
    """Return (all bytes, those that travel in windows)."""
    early = sum((each.stop - each.first) * element_bytes[each.flat] for parcels in plan.parts for each in parcels)
    return sum(numel * size for numel, size in zip(plan.sizes, element_bytes, strict=True)), early


def _describe(plan: GradientPlan, flats: Sequence[FlatGradients]) -> str:
    """Say how much is sent when."""
    total, early = _bytes_of(plan, [each.element_bytes for each in flats])
    if not early:
        return f"{total / 1e6:.4g} MB, all reduced after the backward"
    return f"{early / total:.0%} of {total / 1e6:.4g} MB reduced during the backward"


def _flats(
    door: Stage0 | Stages1And2,
    groups: dict[str, FSMoEGroups],
    asked: GradientPartitionBlock,
    mode: Mode,
    beside: Beside | None,
) -> list[FlatGradients]:
    """Return a buffer for each group and type, the one of the most ranks last."""
    dense: dict[torch.dtype, list[nn.Parameter]] = defaultdict(list)
    experts: dict[tuple[str, torch.dtype], list[nn.Parameter]] = defaultdict(list)
    everyone = next(iter(groups.values()))
    # From the last to the first, as a backward makes them, until a backward has been seen.
    for parameter in reversed(door.parameters()):
        if not is_moe_param(parameter):
            dense[door.wire_type(parameter)].append(parameter)
        elif stock_groups._get_expert_data_parallel_group(parameter.group_name).size() > 1:
            experts[parameter.group_name, door.wire_type(parameter)].append(parameter)
    if not dense:
        dense[torch.float32] = []
    made: list[FlatGradients] = []
    count = sum(map(len, (*dense.values(), *experts.values())))
    # A slice of one tensor mostly has one owner, whose link alone would carry what all other ranks have of it.
    owners = door.owners if asked.collective != "all_reduce" and mode != "micro_ops" else None
    if isinstance(door, Stages1And2) and not partitions_are_ours(door.optimizer, groups):
        owners = None

    def among(of: FSMoEGroups, kind: str) -> tuple[dist.ProcessGroup | None, NodeLinks | None]:
        return communicator_like(of, kind), None if asked.levels == 1 else node_links(of, kind, "gradients")

    communicators = {name: among(groups[name], "edp") for name in dict.fromkeys(n for n, _ in experts)}
    for (name, dtype), parameters in experts.items():
        group, nodes = communicators[name]
        of_kind = EXPERT_GRAD, parameters, dtype, group, door.scaling(), door.device
        made.append(FlatGradients(*of_kind, 0, beside, nodes, owners, door.is_needed, door.most))
    of_all, nodes = among(everyone, "dp")
    for place, (dtype, parameters) in enumerate(dense.items(), 1):
        extra = 2 * count if place == len(dense) and not asked.all_used else 0
        of_kind = GRAD, parameters, dtype, of_all, door.scaling(), door.device
        made.append(FlatGradients(*of_kind, extra, beside, nodes, owners, door.is_needed, door.most))
    return made
