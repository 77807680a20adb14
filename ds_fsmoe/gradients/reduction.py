# SPDX-License-Identifier: Apache-2.0
"""Replaces DeepSpeed's reduction of gradients: it decides when their bytes are sent, and nothing else.

DeepSpeed still decides a gradient's value: its division, its communication dtype, its partitions, norm, clipping and
overflow check. At stage 0 one method of the engine is replaced, at stages 1 and 2 four of the ZeRO optimizer. The
replacements are on the objects; :meth:`Reduction.close` removes them. The engine makes one Reduction; the autotuner
tries windows with it. ``reducer`` runs the rounds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups as stock_groups
from torch import nn

from ds_fsmoe.config.blocks import FSMoEBlock, GradientPartitionBlock
from ds_fsmoe.distributed.fail_together import from_first_rank
from ds_fsmoe.distributed.groups import FSMoEGroups, communicator_like
from ds_fsmoe.gradients.background_lane import BackgroundLane, end_gathers, make_background_lane
from ds_fsmoe.gradients.flat_buffers import MOST_RANGES, RANGE_NUMEL, FlatGradients
from ds_fsmoe.gradients.reducer import GradientReducer, WaitingGradients
from ds_fsmoe.gradients.zero_stages import Stage0, Stages1And2, partitions_match, words_of_stage_2
from ds_fsmoe.layer.parts import node_links
from ds_fsmoe.layer.stock_layer import FSMoELayer
from ds_fsmoe.log import log_on_rank_0
from ds_fsmoe.measuring.stopwatch import Stopwatch
from ds_fsmoe.observing.clock import HOST, Clock
from ds_fsmoe.planning.decide.gradient_plan import (
    BufferReadiness,
    GradientPlan,
    GradientSlice,
    WindowBytes,
    plan_by_bytes,
    plan_by_rule,
    plan_micro_ops,
)
from ds_fsmoe.planning.decide.gradients import Mode, slice_bytes
from ds_fsmoe.planning.schedule import EXPERT_GRAD, GRAD

OBSERVED_ROUNDS = 2
"""The backwards before gradients travel in them, with the autotuner: it takes the time of the model's dense parts from
the second one, in which nothing may be hidden."""
MEASURED_NUMEL = 1 << 20
"""The largest message that is timed, in elements."""


def obstacle_to(engine: Any, groups: Mapping[str, FSMoEGroups]) -> str | None:
    """Return the reason why gradients of this engine cannot be reduced here; ``None`` if they can. The same on every
    rank."""
    optimizer = engine.optimizer
    if optimizer is None:
        return "there is no optimizer"
    if not groups:
        return "this stage has no MoE layer"
    if engine.sequence_parallel_size > 1:
        return "DeepSpeed's sequence parallelism divides gradients differently"
    if isinstance(optimizer, ZeROOptimizer) and type(optimizer) is not DeepSpeedZeroOptimizer:
        if engine.zero_optimization_partition_weights():
            return "ZeRO 3 shards gradients"
        return f"{type(optimizer).__name__} keeps gradients where they cannot be reduced during the backward"
    if len(next(iter(groups.values())).layout.dp[0]) == 1:
        return "there are no data-parallel ranks"
    for each in groups.values():
        # Whoever reduces experts together has to agree on what is late, and does so with those of dense gradients.
        if not all(any(set(edp) <= set(dp) for dp in each.layout.dp) for edp in each.layout.edp):
            return "experts are reduced among ranks that reduce dense gradients separately (mpu)"
    return None


def make_communicators(groups: Iterable[FSMoEGroups], asked: GradientPartitionBlock) -> None:
    """Make the communicators of a reduction on all ranks of a job. Collective over all ranks, with the same groups on
    each.

    In a pipeline some stages have nothing to reduce, or other parameters.

    Args:
        groups: the groups of the MoE layers of all stages.
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
        mode: the mode that decides when bytes are sent.
        block: the other options.
        groups: the groups of the MoE layers, by DeepSpeed's name of their experts' group.
        background: whether slices may be sent concurrently with other collectives between the layers.
        begin_sums: called where the sums that end a backward begin; ``None``: nothing is.
    """

    def __init__(
        self,
        engine: Any,
        layers: Sequence[FSMoELayer],
        mode: Mode,
        block: FSMoEBlock,
        groups: dict[str, FSMoEGroups],
        background: bool = True,
        begin_sums: Callable[[], None] | None = None,
    ) -> None:
        self.mode = mode
        self._asked = block.gradient_partition
        self._chunk_bytes = slice_bytes(mode, self._asked.asked_bytes)
        self._layers = tuple(layers)
        self._by_rule = block.deterministic
        accumulate = self._asked.accumulate
        with_zero = isinstance(engine.optimizer, DeepSpeedZeroOptimizer)
        self._zero_stage = Stages1And2(engine, accumulate, self._by_rule) if with_zero else Stage0(engine, accumulate)
        self.background = make_background_lane(engine.device) if background else None
        """What sends beside the caller; ``None``: nothing does."""
        most = self._zero_stage.most_waiting
        self.reducer = GradientReducer(
            _flats(self._zero_stage, groups, block.gradient_partition, mode, self.background),
            self._zero_stage.gradient_of,
            self._zero_stage.is_sending,
            self._plan,
            self._zero_stage.replace,
            observed_rounds=OBSERVED_ROUNDS if block.autotune.enabled else 1,
            all_used=block.gradient_partition.all_used,
            waiting=None if most is None else WaitingGradients(engine, most, layers),
            begin_sums=begin_sums,
        )
        self.predicted_windows: tuple[WindowBytes, ...] | None = None
        """The bytes that are sent in each window, as the plan of layers has it; ``None``: by rule."""
        for layer in self._layers:
            layer.fsmoe.attach(self.reducer)
        self._zero_stage.take(self.reducer)
        if "solver" in self._asked.model_fields_set and not block.autotune.enabled:
            log_on_rank_0(
                f'fsmoe.gradient_partition.solver = "{self._asked.solver}" is not used (the autotuner is off)',
                details="Gradients are sliced by rule",
            )
        if engine.zero_optimization_partition_gradients() and engine.gradient_accumulation_steps() > 1:
            size = sum(each.numel * each.element_bytes for each in self.reducer.flats) / 1e6
            log_on_rank_0(
                words_of_stage_2(size, self.sums_each, accumulate),
                details="A rank keeps only its part of the gradients, unless its GPU has the memory for all"
                if self.sums_each and accumulate == "auto"
                else "",
            )

    def try_windows(self, windows: Sequence[WindowBytes]) -> None:
        """Send from now on as many bytes in each window as a plan of layers predicts.

        Args:
            windows: the windows in the order of the backward.
        """
        self.predicted_windows = tuple(windows)
        self.reducer.try_plan(self._planned)

    def plans_are_kept(self) -> None:
        """Log the windows of the plan that is kept."""
        plan = self.reducer.next_plan
        if self.predicted_windows is not None and plan is not None:
            self._log_plan(plan)

    def go_on(self) -> None:
        """Return to slices by rule after trials that kept no plan."""
        self.predicted_windows = None
        self.reducer.try_plan(self._planned)

    def go_on_with(self, plan: GradientPlan, windows: Sequence[str], ready_at: Sequence[int]) -> None:
        """Continue with a plan; see :meth:`~ds_fsmoe.gradients.reducer.GradientReducer.go_on_with`."""
        self.predicted_windows = None
        self.reducer.go_on_with(plan, windows, ready_at)

    def _plan(self, readiness: Sequence[BufferReadiness]) -> GradientPlan:
        plan = self._planned(readiness)
        self._log_plan(plan)
        return plan

    def _planned(self, readiness: Sequence[BufferReadiness]) -> GradientPlan:
        """Return the plan, the same on every rank."""
        if self.predicted_windows is None:
            plan = plan_by_rule(readiness, self.mode, self._chunk_bytes)
        elif self.mode == "micro_ops":
            # As many bytes as predicted, in slices of the existing tensors.
            window_bytes = [(_total(each.moe), _total(each.dense)) for each in self.predicted_windows]
            plan = plan_micro_ops(readiness, window_bytes, lambda each: _bytes_in(each, readiness), self._chunk_bytes)
        else:
            plan = plan_by_bytes(readiness, self.predicted_windows)
        return replace(plan, two_levels=self._two_levels)

    def _log_plan(self, plan: GradientPlan) -> None:
        """Log how much is sent during the backward; with details also by which algorithms."""
        flats = self.reducer.flats
        algorithms = dict.fromkeys(str(each.algorithm_in(plan.is_in_levels(at))) for at, each in enumerate(flats))
        log_on_rank_0(
            f"gradients: {_describe(plan, flats)}", details=f"Mode: {self.mode}; reduced by {', '.join(algorithms)}"
        )

    def describe(self) -> str:
        """Return a description of the slices that are sent during a backward, by the plan in force."""
        plan = self.reducer.next_plan
        when = "after the backward until planned" if plan is None else _describe(plan, self.reducer.flats)
        return f"{self.mode}: {when}"

    @cached_property
    def _two_levels(self) -> tuple[bool, ...]:
        """Return for each buffer whether it is added up in two levels: as configured, or as measured on rank 0.
        Collective."""
        flats, asked = self.reducer.flats, self._asked.levels
        if asked != "auto" or self._by_rule:
            return tuple(each.nodes is not None and asked != 1 for each in flats)
        # It may be asked between a step and the next forward, while parameters are on their way.
        end_gathers()
        # Ranks of other groups of experts may have measured otherwise; each task's place is the same on all.
        measured = tuple(each.nodes is not None and is_faster_in_levels(each) for each in flats)
        return from_first_rank(measured, flats[-1].group)

    @property
    def sums_each(self) -> bool:
        """Return True if every micro-batch is summed over ranks, False if only the last one of a step is."""
        return self._zero_stage.sums_each

    def bytes_of_plan(self) -> tuple[int, int]:
        """Return (all bytes, bytes sent before the backward ends), once there is a plan."""
        assert self.reducer.plan is not None
        return _bytes_of(self.reducer.plan, self.reducer.flats)

    def close(self) -> None:
        """Return the reduction to DeepSpeed."""
        self._zero_stage.give_back()
        if self.background is not None:
            self.background.close()
        for layer in self._layers:
            layer.fsmoe.attach(None)


def is_faster_in_levels(flat: FlatGradients, host: Clock = HOST) -> bool:
    """Measure a large message of a buffer; return True if two levels take less time than one. Collective among its
    ranks."""
    numel = max(8, min(flat.numel, MEASURED_NUMEL))
    watch = Stopwatch(flat.device, flat.group, host)

    def alone_ms(in_levels: bool) -> float:
        algorithm = flat.algorithm_in(in_levels)
        of_tasks = {
            task: watch.times_ms(f"gradients, {algorithm}", [numel], flat.reducing(task, algorithm), flat.group)[0]
            for task in algorithm.most_kinds
        }
        inside_ms, between_ms = sum(of_tasks.values()) - of_tasks[GRAD], of_tasks[GRAD]
        # In pieces that follow each other over the links, the shorter of the two is hidden but for that of one.
        pieces = max(1, min(MOST_RANGES, numel // RANGE_NUMEL))
        return max(inside_ms, between_ms) + min(inside_ms, between_ms) / pieces

    return alone_ms(True) < alone_ms(False)


def _total(slices: Sequence[tuple[str, float]]) -> float:
    """Return the bytes of several slices."""
    return sum(size_bytes for _, size_bytes in slices)


def _bytes_in(each: GradientSlice, flats: Sequence[FlatGradients] | Sequence[BufferReadiness]) -> int:
    """Return the bytes of a slice."""
    return (each.stop - each.first) * flats[each.flat].element_bytes


def _bytes_of(plan: GradientPlan, flats: Sequence[FlatGradients]) -> tuple[int, int]:
    """Return (all bytes, bytes sent in windows)."""
    early = sum(_bytes_in(each, flats) for grad_slices in plan.parts for each in grad_slices)
    return sum(each.numel * each.element_bytes for each in flats), early


def _describe(plan: GradientPlan, flats: Sequence[FlatGradients]) -> str:
    """Return a description of the sizes and times of messages."""
    total, early = _bytes_of(plan, flats)
    if not early:
        return f"{total / 1e6:.4g} MB, all reduced after the backward"
    return f"{early / total:.0%} of {total / 1e6:.4g} MB reduced during the backward"


def _flats(
    stage: Stage0 | Stages1And2,
    groups: dict[str, FSMoEGroups],
    asked: GradientPartitionBlock,
    mode: Mode,
    background: BackgroundLane | None,
) -> list[FlatGradients]:
    """Return a buffer for each group and dtype, the one with the most ranks last."""
    dense: dict[torch.dtype, list[nn.Parameter]] = defaultdict(list)
    experts: dict[tuple[str, torch.dtype], list[nn.Parameter]] = defaultdict(list)
    everyone = next(iter(groups.values()))
    # From the last to the first, as a backward makes them, until a backward has been seen.
    for parameter in reversed(stage.parameters()):
        if not is_moe_param(parameter):
            dense[stage.comm_dtype(parameter)].append(parameter)
        elif stock_groups._get_expert_data_parallel_group(parameter.group_name).size() > 1:
            experts[parameter.group_name, stage.comm_dtype(parameter)].append(parameter)
    if not dense:
        dense[torch.float32] = []
    # A slice of one tensor mostly has one owner, whose link alone would carry what all other ranks have of it.
    owners = stage.owners if asked.collective != "all_reduce" and mode != "micro_ops" else None
    if isinstance(stage, Stages1And2) and not partitions_match(stage.optimizer, groups):
        owners = None
    sets = [(EXPERT_GRAD, of, dtype, groups[name], "edp") for (name, dtype), of in experts.items()]
    sets += [(GRAD, of, dtype, everyone, "dp") for dtype, of in dense.items()]
    made = []
    for kind, parameters, dtype, of, ranks in sets:
        group = communicator_like(of, ranks)
        nodes = None if asked.levels == 1 else node_links(of, ranks, "gradients")
        of_kind = kind, parameters, dtype, group, stage.scaling(), stage.device
        made.append(FlatGradients(*of_kind, background, nodes, owners, stage.is_needed, stage.most))
    return made
