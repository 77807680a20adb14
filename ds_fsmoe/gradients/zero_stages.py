# SPDX-License-Identifier: Apache-2.0
"""Replaces DeepSpeed's own reduction of gradients: without ZeRO, and at its stages 1 and 2.

Each class decides which parameters have gradients, and by what and when they are divided. It writes reduced gradients
where DeepSpeed reads them. ``reduction`` makes one of them.

*Over which ranks a gradient is summed, and by what it is divided.* The gradient wanted is that of
``L = 1/dp * sum over d of L_d``, where L_d is the loss that one of the dp model replicas computes from its tokens.
Every rank r starts its backward with dL_r/dL_r = 1, and gradients are sent between ranks as tokens were. A rank's
gradient of its own parameter is therefore the sum of dL_r/dw over all ranks r whose tokens it computed. It remains to
count them. A pipeline stage has mp * dp = ep * esp * edp ranks.

- Dense parameters and gates see the rank's own tokens: summed over DP, divided by dp.
- An expert shard computes the tokens of its whole block of ep * esp ranks: the all-to-all sends those of ep ranks, the
  all-gather those of all esp ranks of each. The reduce-scatter adds the shards' partial outputs, y_r = sum over s of
  y_rs, hence dL_r/dy_rs = dL_r/dy_r for every shard s: its backward is an all-gather without any factor, and the shard
  has its dL_r/dw_s for each r of the block, complete and exactly once. EDP has one rank in every block: summed over
  EDP, divided by dp, and not by edp, which would leave a factor that depends on ep and esp. The bias of the output is
  added by one shard alone, and the others' gradient of it is zero.
- With tensor parallelism mp ranks compute the same L_d. Where they have the same tokens, each sends its 1/mp of the
  slots and the outputs are gathered: the gather's backward takes the rank's own slice of dL_d/dy. Every slot then
  reaches an expert once, with its full gradient. The gate has the full gradient on each of the mp ranks: all as above.
- Where the mp ranks have different tokens of one sequence, nothing changes for experts. The gate, and the other
  parameters of the layer that are equal on them, process the rank's own tokens only. Their gradients are summed over MP
  first, before DeepSpeed's hooks see them. An auxiliary loss is computed mp times then, and the layer divides it by mp.

DeepSpeed 0.19.8 does the same at every stage: experts (``group_name`` of ``ep_size_{ep*esp}``) over EDP, all else over
DP, both divided by dp (``_reduce_expert_gradients`` of runtime/engine.py, ``average_tensor`` of zero/stage_1_and_2.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.sparse_tensor import SparseTensor
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups as stock_groups
from torch import nn

from ds_fsmoe.config.reading import ConfigError
from ds_fsmoe.distributed.fail_together import on_every_rank
from ds_fsmoe.distributed.groups import FSMoEGroups
from ds_fsmoe.gradients.flat_buffers import RANGE_NUMEL, Scaling
from ds_fsmoe.gradients.reducer import GradientReducer
from ds_fsmoe.gradients.reduction_algorithms import Stretch
from ds_fsmoe.log import log_on_rank_0

STEPS_WATCHED = 2
"""The steps after which the peak is known: the first of all makes what the others use again."""
_MARGIN = 1.1

_PATH = "fsmoe.gradient_partition.accumulate"


class Stage0:
    """Handles gradients without ZeRO: DeepSpeed collects those of all parameters after the backward.

    Args:
        engine: the engine, with its optimizer.
        accumulate: the option of that name.
    """

    sums_each = False
    """Whether every micro-batch is summed over ranks, and not the last one of a step alone."""

    def __init__(self, engine: Any, accumulate: str = "auto") -> None:
        refuse_before_stage_2(accumulate)
        self._engine = engine
        self.device = engine.device
        self._handles: list[Any] = []

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters whose gradients we reduce, in module order; DeepSpeed reduces sparse ones and those
        that stages share."""
        sparse = {
            id(module.weight)
            for module in self._engine.module.modules()
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
        }
        return [each for each in _of_one_stage(self._engine) if id(each) not in sparse]

    def comm_dtype(self, parameter: nn.Parameter) -> torch.dtype:
        return self._engine.communication_data_type

    def gradient_of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        if parameter.grad is not None and parameter.grad.is_sparse:
            # Made so by a function, and not by a module that says so beforehand.
            parameter.grad = parameter.grad.to_dense()
        return parameter.grad

    def replace(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        parameter.grad = gradient

    def is_sending(self) -> bool:
        engine = self._engine
        # Who asks for the reduction later may want to see to the gradients before.
        reduces = engine.pipeline_parallelism or engine.enable_backward_allreduce
        return reduces and not engine.inside_no_sync_ctxt and engine.is_gradient_accumulation_boundary()

    owners = None
    """Every rank updates all parameters."""
    most = 500_000_000
    """The elements of a message: as many as DeepSpeed sends at a time."""
    most_waiting = None
    """Gradients stay with their parameters until the step."""

    def is_needed(self, parameter: nn.Parameter) -> bool:
        return True

    def scaling(self) -> Scaling:
        """Return the scaling of ``DeepSpeedEngine.allreduce_bucket``, for experts too: division by the data-parallel
        size."""
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
            found = self._write_back(reducer)
            reducer.release()
            return found

        self._engine._get_gradients_for_reduction = gradients_for_reduction

    def _write_back(self, reducer: GradientReducer) -> tuple[list[torch.Tensor], dict[str, list[torch.Tensor]]]:
        """Write reduced gradients where DeepSpeed reads them; return the rest, which DeepSpeed reduces."""
        dense: list[torch.Tensor] = []
        experts: dict[str, list[torch.Tensor]] = {name: [] for name in self._engine.expert_data_parallel_group}
        for parameter in self._engine.module.parameters():
            if not parameter.requires_grad or not parameter.numel():
                continue
            if parameter in reducer:
                # Where it was reduced, if its type is the parameter's; one that is missing is zero there.
                parameter.grad = reducer.place(parameter).to(parameter.dtype)
                continue
            if parameter.grad is None:
                # A gradient that is missing is zero, as DeepSpeed has it.
                parameter.grad = torch.zeros_like(parameter)
            if is_moe_param(parameter):
                experts[parameter.group_name].append(parameter.grad.data)
            else:
                # As DeepSpeed has it.
                dense.append(SparseTensor(parameter.grad) if parameter.grad.is_sparse else parameter.grad.data)
        return dense, experts

    def give_back(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        vars(self._engine).pop("_get_gradients_for_reduction", None)


class Stages1And2:
    """Handles gradients with ZeRO: its hooks report them, and its buckets receive reduced ones.

    At stage 2 DeepSpeed sums over ranks in every micro-batch, so that a rank need not keep what others update. If
    memory suffices for all gradients, micro-batches can be added up first, and the sum over ranks is made once.

    Args:
        engine: the engine, with its optimizer.
        accumulate: the option of that name.
        by_rule: whether choices may depend on rules only, and on no measurement.
    """

    def __init__(self, engine: Any, accumulate: str = "auto", by_rule: bool = False) -> None:
        self._engine = engine
        self.optimizer: DeepSpeedZeroOptimizer = engine.optimizer
        self.sums_each = sums_every_micro_batch(engine, accumulate)
        """Whether every micro-batch is summed over ranks, and not the last one of a step alone."""
        several = self.optimizer.partition_gradients and engine.gradient_accumulation_steps() > 1
        has_choice = not by_rule and several and accumulate == "auto"
        self._may_add_up_later = has_choice and _obstacle(engine) is None and _free_bytes(engine.device) is not None
        """Whether every micro-batch is summed only as long as it is not known that there is room to add them up."""
        self.device = engine.device
        self._group_of = {
            id(parameter): index for index, group in enumerate(self.optimizer.bit16_groups) for parameter in group
        }
        self._is_reduced = False
        """Whether the gradients that go through ZeRO's buckets now are already reduced."""

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters whose gradients are to be reduced, in module order; DeepSpeed reduces those that stages
        share."""
        return [each for each in _of_one_stage(self._engine) if id(each) in self._group_of]

    def comm_dtype(self, parameter: nn.Parameter) -> torch.dtype:
        return self.optimizer.get_param_comm_dtype(parameter)

    def gradient_of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        return self.optimizer.get_gradient_for_reduction(parameter)

    def replace(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        setattr(parameter, "grad_accum" if self.optimizer.use_grad_accum_attribute else "grad", gradient)

    def is_sending(self) -> bool:
        engine, optimizer = self._engine, self.optimizer
        reduces = self.sums_each or engine.is_gradient_accumulation_boundary()
        return reduces and not engine.inside_no_sync_ctxt and not optimizer._coalesce_grad_reduction

    def owners(self, parameter: nn.Parameter) -> list[tuple[int, int]] | None:
        """Return which rank updates each part of a parameter's gradient, in memory order: [(elements, rank)].

        It is ``None`` if ZeRO needs more than a rank's own part: Muon makes whole matrices orthogonal, ZenFlow keeps
        columns of all. It is also ``None`` if its order in memory differs from that of the partitions.
        """
        optimizer = self.optimizer
        if not parameter.is_contiguous() or optimizer.zenflow or getattr(parameter, "use_muon", False):
            return None
        size, offset = self._place_of[id(parameter)]
        return [(stop - first, owner) for first, stop, owner in split_by_owner(offset, parameter.numel(), size)]

    @cached_property
    def _place_of(self) -> dict[int, tuple[int, int]]:
        """Return id of a parameter -> (elements of a partition of its group, its start in the group)."""
        optimizer = self.optimizer
        of_groups = zip(
            optimizer.round_robin_bit16_groups,
            optimizer.round_robin_bit16_offsets,
            optimizer.partition_size,
            strict=True,
        )
        return {
            id(parameter): (int(size), offset)
            for parameters, offsets, size in of_groups
            for parameter, offset in zip(parameters, offsets, strict=True)
        }

    @property
    def most(self) -> int:
        """Return the maximum of elements of a message: an owner of all of it receives as many from every other rank."""
        optimizer = self.optimizer
        return max(RANGE_NUMEL, optimizer.reduce_bucket_size // dist.get_world_size(optimizer.dp_process_group))

    @property
    def most_waiting(self) -> int | None:
        """Return the maximum of elements that may wait to be sent: stage 2 has a bucket of them."""
        return self.optimizer.reduce_bucket_size if self.optimizer.partition_gradients else None

    def is_needed(self, parameter: nn.Parameter) -> bool:
        """Return True if this rank updates any of a parameter, or ZeRO reads all of it."""
        optimizer = self.optimizer
        return (
            self.owners(parameter) is None or optimizer.is_param_in_current_partition[optimizer.get_param_id(parameter)]
        )

    def scaling(self) -> Scaling:
        """Return the scaling of ``average_tensor``, for experts too: division by the data-parallel size before the
        sum."""
        size = dist.get_world_size(self.optimizer.dp_process_group)
        return Scaling(before=lambda message: message.div_(size)) if self.optimizer.gradient_average else Scaling()

    def take(self, reducer: GradientReducer) -> None:
        optimizer = self.optimizer
        # Its second bucket and its stream are for a communication that is not its own any more.
        self._overlap_comm, optimizer.overlap_comm = optimizer.overlap_comm, False
        stock_process = optimizer.process_gradients
        stock_average = optimizer.average_tensor
        stock_epilogue = optimizer.overlapping_partition_gradients_reduce_epilogue

        def process_gradients(parameter: nn.Parameter, i: int) -> None:
            if parameter not in reducer or optimizer._coalesce_grad_reduction:
                stock_process(parameter, i)
                return
            if optimizer.use_grad_accum_attribute:
                optimizer._fill_param_grad_accum_attribute(parameter)
            if not getattr(parameter, "ds_grad_is_ready", True):
                return
            if self.is_sending():
                reducer.ready(parameter)

        def average_tensor(tensor: torch.Tensor, communication_data_type: torch.dtype) -> None:
            if not self._is_reduced:
                stock_average(tensor, communication_data_type)
                return
            bucket = optimizer.ipg_buckets[communication_data_type]
            if not bucket.params:
                return
            at = 0
            for parameter in (optimizer.bit16_groups[i][number] for i, number, _ in bucket.params):
                # What it was given may be narrower than the sum.
                if self._accumulation_dtype(parameter) != communication_data_type:
                    tensor[at : at + parameter.numel()] = reducer.value(parameter)
                at += parameter.numel()
                reducer.release_gradient(parameter)
            optimizer._add_full_reduction_to_compact_grad_partition(tensor, communication_data_type)

        def epilogue() -> None:
            if self.sums_each or self._engine.is_gradient_accumulation_boundary():
                self._hand_over(reducer)
                stock_epilogue()
                self._check_memory(reducer)
                return
            # At its end ZeRO forgets gradients, and what it has been given itself is to be summed all the same.
            kept = [(each, self.gradient_of(each)) for each in reducer.parameters]
            for parameter, _ in kept:
                self.replace(parameter, None)
            optimizer.setup_buckets()  # its end needs them, whatever came
            stock_epilogue()
            for parameter, gradient in kept:
                self.replace(parameter, gradient)

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

    def _hand_over(self, reducer: GradientReducer) -> None:
        """Pass every gradient of any rank through ZeRO's buckets, in one order on all ranks."""
        optimizer = self.optimizer
        present = reducer.finish()
        optimizer.setup_buckets()
        optimizer.reduce_ipg_grads()  # what ZeRO has been given so far, and reduces itself
        self._is_reduced = True
        for parameter in reducer.parameters:
            if id(parameter) in present:
                self._give(parameter, reducer.place(parameter))
                optimizer.reduce_ready_partitions_and_remove_grads(parameter, self._group_of[id(parameter)])
                if self._accumulation_dtype(parameter) == self.comm_dtype(parameter):
                    # It is in the bucket by now.
                    reducer.release_gradient(parameter)
        optimizer.reduce_ipg_grads()
        self._is_reduced = False
        reducer.release()

    def _check_memory(self, reducer: GradientReducer) -> None:
        """Add micro-batches up from the next step on if memory suffices on the GPUs of all ranks. Collective.

        The gradients have to fit on top of the peak so far, which two steps have shown.
        """
        engine = self._engine
        if not self._may_add_up_later or engine.global_steps < STEPS_WATCHED:
            return
        if not engine.is_gradient_accumulation_boundary():
            return
        self._may_add_up_later = False
        size = sum(each.numel * each.element_bytes for each in reducer.flats)
        room = _free_bytes(engine.device)
        has_room = room is not None and size * _MARGIN <= room
        self.sums_each = not all(on_every_rank(has_room, self.optimizer.dp_process_group))
        fits, are = ("do not fit", "summed one by one") if self.sums_each else ("fit", "added up first")
        log_on_rank_0(
            f"ZeRO 2: gradients of {size / 1e6:.4g} MB {fits} into what GPUs have left, so micro-batches are {are}"
        )

    def _give(self, parameter: nn.Parameter, reduced: torch.Tensor) -> None:
        """Pass ZeRO the tensor that it expects as the gradient; where dtypes differ, its ``average_tensor`` reads the
        numbers through :meth:`take`."""
        dtype = self._accumulation_dtype(parameter)
        self.replace(parameter, reduced if reduced.dtype == dtype else torch.zeros_like(parameter, dtype=dtype))

    def _accumulation_dtype(self, parameter: nn.Parameter) -> torch.dtype:
        uses_own = self.optimizer.use_grad_accum_attribute
        return self.optimizer._gradient_reduction_buffer_dtype() if uses_own else parameter.dtype

    def give_back(self) -> None:
        for name in _METHODS:
            vars(self.optimizer).pop(name, None)
        vars(self._engine).pop("_flush_coalesced_reduction_zero12", None)
        self.optimizer.overlap_comm = self._overlap_comm


def _of_one_stage(engine: Any) -> list[nn.Parameter]:
    """Return the parameters of a model that get a gradient, except those that several stages of a pipeline share.

    DeepSpeed sums the gradients of these over the stages after all micro-batches, and then over the ranks of a stage.
    """
    tied = engine.module.get_tied_weights_and_groups() if engine.pipeline_parallelism else ()
    shared = {id(weight) for weight, _ in tied}
    return [
        each for each in engine.module.parameters() if each.requires_grad and each.numel() and id(each) not in shared
    ]


def split_by_owner(offset: int, numel: int, partition_size: int) -> list[Stretch]:
    """Split elements of one of ZeRO's flat groups, ``numel`` from ``offset`` on, at the ends of its partitions."""
    found, at, end = [], offset, offset + numel
    while at < end:
        owner = at // partition_size
        stop = min(end, (owner + 1) * partition_size)
        found.append(Stretch(at, stop, owner))
        at = stop
    return found


def partitions_match(optimizer: DeepSpeedZeroOptimizer, groups: Mapping[str, FSMoEGroups]) -> bool:
    """Return True if ZeRO has partitioned every parameter group over the ranks that share it here, in their order.

    Args:
        optimizer: the optimizer of stage 1 or 2.
        groups: the groups of the MoE layers, by DeepSpeed's name of their experts' group.
    """
    everyone = next(iter(groups.values()))
    for members, group in zip(optimizer.round_robin_bit16_groups, optimizer.real_dp_process_group, strict=True):
        is_moe = bool(members) and is_moe_param(members[0])
        ranks = groups[members[0].group_name].ranks_of("edp") if is_moe else everyone.ranks_of("dp")
        if tuple(dist.get_process_group_ranks(group)) != tuple(ranks):
            return False
    return True


_METHODS = (
    "process_gradients",
    "average_tensor",
    "overlapping_partition_gradients_reduce_epilogue",
    "reduce_gradients",
)


# ---- Whether micro-batches of a step are added up on each rank before the sum over ranks, or summed one by one.
# Adding up takes room for all gradients of a rank, and ZeRO 2 promises to do without. So it is done there if it is
# asked for, or if the memory of the GPU is known to hold them: by what two steps have needed at their peak.


def sums_every_micro_batch(engine: Any, accumulate: str) -> bool:
    """Return True if every micro-batch is summed over ranks at ZeRO stage 1 or 2, False if only the last of a step is.

    Args:
        engine: the engine, with its optimizer.
        accumulate: the option of that name.

    Raises:
        ConfigError: the option cannot be fulfilled.
    """
    if not engine.optimizer.partition_gradients:
        refuse_before_stage_2(accumulate)
        return False
    reason = _obstacle(engine)
    if accumulate == "before_sum" and reason is not None:
        raise ConfigError(f'{_PATH} = "before_sum" is not possible here, because {reason}; use "auto" or "after_sum"')
    return accumulate != "before_sum"


def words_of_stage_2(size: float, sums_each: bool, accumulate: str) -> str:
    """Return which micro-batches are summed over ranks at stage 2, and why, in words; ``size``: all gradients of a rank
    in MB."""
    if not sums_each:
        return f'ZeRO 2: micro-batches are summed on each rank first ("accumulate"), in {size:.4g} MB of gradients'
    sentence = "ZeRO 2: every micro-batch is reduced over ranks"
    if accumulate == "auto":
        sentence += f' ("accumulate": "before_sum" sums micro-batches first, in {size:.4g} MB of gradients per rank)'
    return sentence


def _free_bytes(device: torch.device) -> float | None:
    """Return the bytes of a GPU that were free at the peak; ``None`` if its memory is unknown."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)


def refuse_before_stage_2(accumulate: str) -> None:
    """Refuse to sum every micro-batch below stage 2, where DeepSpeed does not do so either.

    Raises:
        ConfigError: the option asks for it.
    """
    if accumulate == "after_sum":
        raise ConfigError(f'{_PATH} = "after_sum" needs zero_optimization.stage 2; remove it')


def _obstacle(engine: Any) -> str | None:
    """Return the reason why micro-batches cannot be added up here at stage 2 before the sum over ranks; ``None`` if
    they can."""
    optimizer = engine.optimizer
    if not engine.managed_gradient_accumulation():
        return "managed_gradient_accumulation is false, so the last micro-batch is unknown"
    if optimizer.use_separate_grad_accum:
        return "gradients are accumulated in another dtype (data_types.grad_accum_dtype) than they are computed in"
    if optimizer.zenflow:
        return "ZenFlow reads the gradients of every micro-batch"
    if optimizer.cpu_offload:
        return "gradients are accumulated in host memory (offload_optimizer)"
    return None
