# SPDX-License-Identifier: Apache-2.0
"""Takes the reduction of gradients over from DeepSpeed: when their bytes move, and nothing else.

DeepSpeed goes on deciding what a gradient is worth: its division, its type on the wire, its partitions, norm, clipping
and overflow check. At stage 0 one method of the engine is replaced, at stages 1 and 2 four of the ZeRO optimizer, on
the objects themselves; :meth:`Reduction.close` takes them off again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups as stock_groups
from torch import nn

from ds_fsmoe.config import FSMoEBlock
from ds_fsmoe.layer import FSMoELayer
from ds_fsmoe.log import log_on_rank_0
from ds_fsmoe.planning.presets import BEST, preset
from ds_fsmoe.planning.schedule import EXPERT_GRAD, GRAD
from ds_fsmoe.runtime.flat_gradients import FlatGradients, Scaling
from ds_fsmoe.runtime.gradient_plan import GradientPlan, Mode, Supply, plan_by_rule
from ds_fsmoe.runtime.gradients import GradientReducer
from ds_fsmoe.runtime.groups import FSMoEGroups, communicator_like
from ds_fsmoe.runtime.idle_times import Idle, IdleTimes, TimedWindow, cost_of, plan_by_time
from ds_fsmoe.runtime.spans import Together

LOOKS = 3
"""Backwards that are looked at before gradients travel in them: the first of all is slow, two are measured."""


def wanted_mode(block: FSMoEBlock) -> Mode:
    """As the block says, or else as its schedule is: "off" is DeepSpeed's own reduction."""
    asked = block.gradient_partition.mode
    if asked != "auto":
        return asked
    of_schedule = "adaptive" if block.schedule == BEST else preset(block.schedule).gradients
    return "off" if of_schedule == "exposed" else of_schedule


def why_not(engine: Any, groups: Mapping[str, FSMoEGroups]) -> str | None:
    """What keeps gradients of this engine from being taken over; ``None`` for nothing. The same on every rank."""
    optimizer = engine.optimizer
    if optimizer is None:
        return "there is no optimizer"
    if engine.pipeline_parallelism:
        return "a pipeline of stages reduces when it is through"
    if engine.sequence_parallel_size > 1:
        return "DeepSpeed's sequence parallelism divides gradients in a way of its own"
    if isinstance(optimizer, ZeROOptimizer) and type(optimizer) is not DeepSpeedZeroOptimizer:
        return f"{type(optimizer).__name__} keeps gradients where a backward cannot reach them"
    if len(next(iter(groups.values())).layout.dp[0]) == 1:
        return "a model has no replica to reduce with"
    for each in groups.values():
        # Whoever reduces experts together has to agree on what is late, and does so with those of dense gradients.
        if not all(any(set(edp) <= set(dp) for dp in each.layout.dp) for edp in each.layout.edp):
            return "experts are reduced among ranks that reduce dense gradients apart (mpu)"
    return None


class Reduction:
    """The gradients of one engine, reduced by us. Collective to make.

    Args:
        engine: complete, its optimizer included.
        layers: its MoE layers, with their pipelines.
        mode: when bytes move.
        block: what else is asked for.
        groups: of the MoE layers, by DeepSpeed's name of their experts' group.
    """

    def __init__(
        self,
        engine: Any,
        layers: Sequence[FSMoELayer],
        mode: Mode,
        block: FSMoEBlock,
        groups: dict[str, FSMoEGroups],
    ) -> None:
        self.mode = mode
        self._asked = block.gradient_partition
        self._layers = tuple(layers)
        self._by_rule = block.deterministic
        self._door = (_Stages1And2 if isinstance(engine.optimizer, DeepSpeedZeroOptimizer) else _Stage0)(engine)
        self.reducer = GradientReducer(
            _flats(self._door, groups, block.gradient_partition.all_used),
            self._door.gradient_of,
            self._door.is_sending,
            self._plan,
            looks=1 if self._by_rule else LOOKS,
            keep=self._door.keep if block.gradient_partition.all_used else None,
        )
        self._idle = IdleTimes(engine.device)
        self.reducer.on_finish = self._idle.next_round
        self._observers = [layer.pipeline.observer for layer in self._layers]
        self.look_at_plans()
        self._door.take(self.reducer)

    def look_at_plans(self) -> None:
        """Measure in the backwards of the layers' plans, which have changed: until gradients are planned."""
        if self.reducer.plan is not None:
            return
        for layer, observer in zip(self._layers, self._observers, strict=True):
            # A graph that is older keeps the window of its own plan.
            window = TimedWindow(self.reducer, layer.pipeline.backward, self._idle)
            together = window.recorder if observer is None else Together(observer, window.recorder)
            layer.pipeline = replace(layer.pipeline, window=window, observer=together)

    def _plan(self, supplies: Sequence[Supply]) -> GradientPlan:
        """The same on every rank: rank 0 of those that share dense gradients decides."""
        self.reducer.on_finish = None
        for layer, observer in zip(self._layers, self._observers, strict=True):
            layer.pipeline = replace(layer.pipeline, window=self.reducer, observer=observer)
        num_windows = len(supplies[-1].ready)
        if self._by_rule or not num_windows:
            return plan_by_rule(supplies, self.mode, self._asked.chunk_bytes)
        group = self.reducer.flats[-1].group
        idle = self._idle.typical(num_windows, group)
        costs = [cost_of(each) for each in self.reducer.flats]
        placements = self._layers[0].pipeline.backward.groups.placements
        # Experts of the first layer may have nobody to be summed with, and those of another with another ep_size do.
        lanes_of = {GRAD: placements["dp"].lanes, EXPERT_GRAD: placements["edp"].lanes or placements["dp"].lanes}
        lanes = [lanes_of[each.kind] for each in supplies]
        solver, chunk_bytes = self._asked.solver, self._asked.chunk_bytes
        plan = plan_by_time(supplies, lanes, costs, idle, self.mode, solver=solver, chunk_bytes=chunk_bytes)
        decided = [plan]
        dist.broadcast_object_list(decided, src=dist.get_global_rank(group, 0), group=group)
        log_on_rank_0(_describe(decided[0], supplies, idle, self.mode))
        return decided[0]

    def close(self) -> None:
        """Give the reduction back to DeepSpeed."""
        self._door.give_back()
        for layer in self._layers:
            layer.pipeline = replace(layer.pipeline, window=None)


def _describe(plan: GradientPlan, supplies: Sequence[Supply], idle: Sequence[Idle], mode: Mode) -> str:
    sizes = [each.element_bytes for each in supplies]
    early = sum((each.stop - each.first) * sizes[each.flat] for parcels in plan.parts for each in parcels)
    total = sum(each.numel * each.element_bytes for each in supplies)
    windows = ", ".join(f"{each.moe_ms:.3g} + {each.dense_ms:.3g}" for each in idle)
    return (
        f"gradients ({mode}): {early / 1e6:.4g} of {total / 1e6:.4g} MB travel before the backward is over; idle there "
        f"were, inside and behind each MoE layer, {windows} ms"
    )


def _flats(door: _Stage0 | _Stages1And2, groups: dict[str, FSMoEGroups], all_used: bool) -> list[FlatGradients]:
    """A buffer for each group and type; that of the most ranks last."""
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
    communicators = {
        name: communicator_like(groups[name].layout, "edp") for name in dict.fromkeys(n for n, _ in experts)
    }
    for (name, dtype), parameters in experts.items():
        made.append(FlatGradients(EXPERT_GRAD, parameters, dtype, communicators[name], door.scaling(), door.device))
    of_all = communicator_like(everyone.layout, "dp")
    for place, (dtype, parameters) in enumerate(dense.items(), 1):
        extra = 2 * count if place == len(dense) and not all_used else 0
        made.append(FlatGradients(GRAD, parameters, dtype, of_all, door.scaling(), door.device, extra))
    return made


class _Stage0:
    """Without ZeRO: DeepSpeed collects the gradients of all parameters when the backward is over."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.device = engine.device
        self._handles: list[Any] = []

    def parameters(self) -> list[nn.Parameter]:
        """Whose gradients are to be reduced, in the order of the module. Sparse ones are left to DeepSpeed."""
        sparse = {
            id(module.weight)
            for module in self._engine.module.modules()
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
        }
        return [
            each
            for each in self._engine.module.parameters()
            if each.requires_grad and each.numel() and id(each) not in sparse
        ]

    def wire_type(self, parameter: nn.Parameter) -> torch.dtype:
        return self._engine.communication_data_type

    def gradient_of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        if parameter.grad is not None and parameter.grad.is_sparse:
            # Made so by a function, and not by a module that says so beforehand.
            parameter.grad = parameter.grad.to_dense()
        return parameter.grad

    def keep(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        if gradient.dtype == parameter.grad.dtype:
            parameter.grad = gradient

    def is_sending(self) -> bool:
        return self._engine.is_gradient_accumulation_boundary() and not self._engine.inside_no_sync_ctxt

    def scaling(self) -> Scaling:
        """As ``DeepSpeedEngine.allreduce_bucket`` does it, for experts too: by the data-parallel size."""
        engine = self._engine
        size = dist.get_world_size(stock_groups._get_sequence_data_parallel_group())
        if not engine.gradient_average:
            return Scaling()
        if not engine.postscale_gradients():
            return Scaling(before=lambda message: message.mul_(1.0 / size))
        first = engine.gradient_predivide_factor()
        return Scaling(
            before=None if first == 1.0 else lambda message: message.mul_(1.0 / first),
            after=None if first == size else lambda message: message.mul_(first / size),
        )

    def take(self, reducer: GradientReducer) -> None:
        def on_gradient(parameter: nn.Parameter) -> None:
            if self.is_sending():
                reducer.ready(parameter)

        for parameter in reducer.parameters:
            self._handles.append(parameter.register_post_accumulate_grad_hook(on_gradient))

        def gradients_for_reduction() -> tuple[list[torch.Tensor], dict[str, list[torch.Tensor]]]:
            reducer.finish()
            return self._write_back(reducer)

        self._engine._get_gradients_for_reduction = gradients_for_reduction

    def _write_back(self, reducer: GradientReducer) -> tuple[list[torch.Tensor], dict[str, list[torch.Tensor]]]:
        """Put what was reduced where DeepSpeed looks for it; returns what it still has to reduce."""
        dense: list[torch.Tensor] = []
        experts: dict[str, list[torch.Tensor]] = {name: [] for name in self._engine.expert_data_parallel_group}
        for parameter in self._engine.module.parameters():
            if not parameter.requires_grad or not parameter.numel():
                continue
            if parameter.grad is None:
                # A gradient that is missing is zero, as DeepSpeed has it.
                parameter.grad = torch.zeros_like(parameter)
            if parameter in reducer:
                parameter.grad.copy_(reducer.value(parameter).view(parameter.shape))
            elif is_moe_param(parameter):
                experts[parameter.group_name].append(parameter.grad.data)
            else:
                dense.append(_as_deepspeed_has_it(parameter))
        return dense, experts

    def give_back(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        vars(self._engine).pop("_get_gradients_for_reduction", None)


def _as_deepspeed_has_it(parameter: nn.Parameter) -> Any:
    from deepspeed.runtime.sparse_tensor import SparseTensor

    return SparseTensor(parameter.grad) if parameter.grad.is_sparse else parameter.grad.data


class _Stages1And2:
    """With ZeRO: its hooks announce gradients, and its buckets are filled with what is reduced already."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._optimizer: DeepSpeedZeroOptimizer = engine.optimizer
        self.device = engine.device
        self._group_of = {
            id(parameter): index for index, group in enumerate(self._optimizer.bit16_groups) for parameter in group
        }
        self._is_reduced = False
        """Whether what goes through ZeRO's buckets now has been reduced already."""

    def parameters(self) -> list[nn.Parameter]:
        """Whose gradients are to be reduced, in the order of the module."""
        return [
            each
            for each in self._engine.module.parameters()
            if each.requires_grad and each.numel() and id(each) in self._group_of
        ]

    def wire_type(self, parameter: nn.Parameter) -> torch.dtype:
        return self._optimizer.get_param_comm_dtype(parameter)

    def gradient_of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        return self._optimizer.get_gradient_for_reduction(parameter)

    def keep(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        if gradient.dtype == self.gradient_of(parameter).dtype:
            setattr(parameter, "grad_accum" if self._optimizer.use_grad_accum_attribute else "grad", gradient)

    def is_sending(self) -> bool:
        engine, optimizer = self._engine, self._optimizer
        reduces = optimizer.partition_gradients or engine.is_gradient_accumulation_boundary()
        return reduces and not engine.inside_no_sync_ctxt and not optimizer._coalesce_grad_reduction

    def scaling(self) -> Scaling:
        """As ``average_tensor`` does it, for experts too: by the data-parallel size, ahead of the sum."""
        size = dist.get_world_size(self._optimizer.dp_process_group)
        return Scaling(before=lambda message: message.div_(size)) if self._optimizer.gradient_average else Scaling()

    def take(self, reducer: GradientReducer) -> None:
        optimizer = self._optimizer
        # Its second bucket and its stream are for a communication that is not its own any more.
        self._overlap_comm, optimizer.overlap_comm = optimizer.overlap_comm, False
        stock_process = optimizer.process_gradients
        stock_average = optimizer.average_tensor
        stock_epilogue = optimizer.overlapping_partition_gradients_reduce_epilogue

        def process_gradients(parameter: nn.Parameter, i: int) -> None:
            if parameter not in reducer or optimizer._coalesce_grad_reduction:
                stock_process(parameter, i)
                return
            optimizer.setup_buckets()
            if optimizer.use_grad_accum_attribute:
                optimizer._fill_param_grad_accum_attribute(parameter)
            if self.is_sending() and getattr(parameter, "ds_grad_is_ready", True):
                reducer.ready(parameter)

        def average_tensor(tensor: torch.Tensor, communication_data_type: torch.dtype) -> None:
            if not self._is_reduced:
                stock_average(tensor, communication_data_type)
                return
            bucket = optimizer.ipg_buckets[communication_data_type]
            if not bucket.params:
                return
            parameters = (optimizer.bit16_groups[i][at] for i, at, _ in bucket.params)
            reduced = torch.cat([reducer.value(each) for each in parameters])
            tensor.copy_(reduced)
            optimizer._add_full_reduction_to_compact_grad_partition(reduced, communication_data_type)

        def hand_over() -> None:
            """Everything that has a gradient on some rank goes through ZeRO's buckets, in one order on all ranks."""
            present = reducer.finish()
            optimizer.setup_buckets()
            optimizer.reduce_ipg_grads()  # what ZeRO has been given so far, and reduces itself
            self._is_reduced = True
            for parameter in reducer.parameters:
                if id(parameter) in present:
                    self._give_if_missing(parameter)
                    optimizer.reduce_ready_partitions_and_remove_grads(parameter, self._group_of[id(parameter)])
            optimizer.reduce_ipg_grads()
            self._is_reduced = False

        def epilogue() -> None:
            hand_over()
            stock_epilogue()

        def reduce_gradients(pipeline_parallel: bool = False) -> None:
            optimizer.setup_buckets()
            for i, group in enumerate(optimizer.bit16_groups):
                for parameter in group:
                    if parameter not in reducer and self.gradient_of(parameter) is not None:
                        optimizer.reduce_ready_partitions_and_remove_grads(parameter, i)
            optimizer.overlapping_partition_gradients_reduce_epilogue()

        optimizer.process_gradients = process_gradients
        optimizer.average_tensor = average_tensor
        optimizer.overlapping_partition_gradients_reduce_epilogue = epilogue
        optimizer.reduce_gradients = reduce_gradients
        # Behind ``coalesce_grad_reduction``, where stock fills ZeRO's buckets with gradients yet to be reduced.
        self._engine._flush_coalesced_reduction_zero12 = lambda _: reduce_gradients()

    def _give_if_missing(self, parameter: nn.Parameter) -> None:
        if self.gradient_of(parameter) is None:
            name = "grad_accum" if self._optimizer.use_grad_accum_attribute else "grad"
            dtype = self._optimizer._gradient_reduction_buffer_dtype()
            setattr(parameter, name, torch.zeros_like(parameter, dtype=dtype if name == "grad_accum" else None))

    def give_back(self) -> None:
        for name in _METHODS:
            vars(self._optimizer).pop(name, None)
        vars(self._engine).pop("_flush_coalesced_reduction_zero12", None)
        self._optimizer.overlap_comm = self._overlap_comm


_METHODS = (
    "process_gradients",
    "average_tensor",
    "overlapping_partition_gradients_reduce_epilogue",
    "reduce_gradients",
)
