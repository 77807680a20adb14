# SPDX-License-Identifier: Apache-2.0
"""Defines DeepSpeed's engines with our layers, our reduction of gradients and our norm.

Layers are converted at the point where DeepSpeed itself replaces layers: the config and the process group exist, the
optimizer does not. ``entry_points`` puts these classes in the place of DeepSpeed's. ``saving_engine`` and
``optimizer_groups`` have their base classes.
"""

from __future__ import annotations

import logging
import weakref
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups as stock_groups
from torch import nn

from ds_fsmoe.checkpoint_files.numbering import Numbering
from ds_fsmoe.checks.expert_results import ExpertResults
from ds_fsmoe.checks.preflight import (
    accelerate_warnings,
    check_experts,
    check_nodes,
    check_tensor_parallel,
    launcher_warnings,
    speed_warnings,
    untested,
)
from ds_fsmoe.config.reading import ConfigError, read_block
from ds_fsmoe.config.words import BLOCK, words_of
from ds_fsmoe.distributed import nccl
from ds_fsmoe.distributed.agreement import check_agreement, facts_of_config, facts_of_layers, facts_of_versions
from ds_fsmoe.distributed.fail_together import on_every_rank
from ds_fsmoe.distributed.groups import FSMoEGroups, sizes_of_mpu
from ds_fsmoe.distributed.partitioned import fence_gathers
from ds_fsmoe.distributed.topology import Stages
from ds_fsmoe.engine import compat
from ds_fsmoe.engine.auto_ep_size import forget_ep_size, watched_lengths
from ds_fsmoe.engine.convert_experts import (
    agree_on_forms,
    convert_experts,
    ep_size_of,
    find_experts,
    log_table,
    watch_router,
)
from ds_fsmoe.engine.convert_layers import check_mpu, convert, facts_of_tensor_parallel, find_layers
from ds_fsmoe.engine.marked_experts import count_all_experts, hooks_on, mark_experts, refuse_hooks
from ds_fsmoe.engine.optimizer_groups import GroupsEngine
from ds_fsmoe.engine.restore_model import free_when_dropped, refuse_while_shared_out
from ds_fsmoe.engine.routing_data import RoutingData
from ds_fsmoe.engine.saving_engine import SavingEngine, keep_whole, show_whole_experts
from ds_fsmoe.engine.set_up import (
    begin_placement,
    begin_splitting,
    make_groups_on_every_stage,
    tape_deepspeeds_functions,
)
from ds_fsmoe.engine.shard_experts import gather_as_they_run, type_of_run, wrappers_around
from ds_fsmoe.engine.state import FSMoEState, summary
from ds_fsmoe.engine.telemetry import Telemetry
from ds_fsmoe.gradients.norm import clip_by_norm, complete_norms, correct_norm
from ds_fsmoe.gradients.reduction import Reduction, make_communicators, obstacle_to
from ds_fsmoe.gradients.updated_parameters import UpdatedParameters
from ds_fsmoe.gradients.zero_stages import partitions_match
from ds_fsmoe.layer.expert_checks import uncompiled
from ds_fsmoe.layer.experts_layer import FSMoEExperts
from ds_fsmoe.layer.parts import choose_parts
from ds_fsmoe.layer.runtime import LayerRuntime
from ds_fsmoe.layer.state import ConvertedLayer
from ds_fsmoe.layer.stock_layer import facts_of_experts
from ds_fsmoe.log import log_on_rank_0, show_details
from ds_fsmoe.observing.step_timer import StepClock
from ds_fsmoe.planning.decide.plan import mode_of
from ds_fsmoe.tuning.when import needs_numbers, settled
from ds_fsmoe.versions import VERSION


class FSMoEEngine(GroupsEngine, SavingEngine):
    """Extends DeepSpeed's engine with ds_fsmoe layers; ``engine.fsmoe`` is their state."""

    fsmoe: FSMoEState
    _hf_layers: list[FSMoEExperts]
    """Its layers in Hugging Face models."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fsmoe.begin(self.optimizer is not None and not self.zero_optimization_partition_weights())
        check_agreement(self.fsmoe.facts(), self.fsmoe.stage_group, "how MoE layers are run")
        self._take_over_reduction()
        if self._hf_layers and self.zero_optimization_partition_weights():
            fence_gathers(self.optimizer, self._hf_layers)
        correct_norm(self, has_stock_layers=len(self._hf_layers) < len(self.fsmoe.layers))
        show_whole_experts(self)
        count_all_experts(self)
        if self.fsmoe.block.debug.check_results:
            self._watch_results()
        in_stages = isinstance(self.module, PipelineModule)
        self.fsmoe.routing = RoutingData(self.fsmoe, self.module, self.global_steps, in_stages)
        begin_placement(self, in_stages)
        begin_splitting(self.module, self.fsmoe, in_stages)
        self.fsmoe.telemetry = Telemetry(self, self.fsmoe)
        self.fsmoe.running.put_on_model.append(mark_experts(self.module))
        free_when_dropped(self.optimizer)
        log_on_rank_0(summary(self.fsmoe))

    def _take_over_reduction(self) -> None:
        state = self.fsmoe
        mode = mode_of(state.block.schedule, state.block.gradient_partition.mode)
        if dist.get_world_size() == 1:
            state.gradients = "one rank has none to reduce"
            return
        groups = state.groups()
        if mode != "off" and self.pipeline_parallelism:
            of_all = (state.running.groups(*each) for each in state.running.layer_sizes)
            make_communicators(of_all, state.block.gradient_partition)
        reason = None if mode == "off" else obstacle_to(self, groups)
        # A stage without layers has other reasons than the others.
        if reason is not None and groups and state.block.gradient_partition.mode not in ("auto", "off"):
            raise ConfigError(
                f"fsmoe.gradient_partition.mode = {mode!r} is not possible here, because {reason}: DeepSpeed "
                'reduces the gradients. Remove it, or set it to "off"'
            )
        if mode != "off" and reason is not None:
            state.gradients, state.has_late_gradients = f"not overlapped ({reason})", True
        if mode != "off" and reason is None:
            clock, may_overlap = state.running.step_clock, state.running.one_link is None
            begin_sums = None if clock is None else clock.begin_sums
            of_engine = self, [*state.layers.values()], mode, state.block, groups
            state.reduction = Reduction(*of_engine, may_overlap, begin_sums)
            state.gradients = mode
        elif state.running.one_link is not None and self.zero_overlap_comm():
            log_on_rank_0(
                "zero_optimization.overlap_comm = true: NCCL may hang. Set it to false, or reduce with "
                "fsmoe.gradient_partition.mode",
                logging.WARNING,
                "DeepSpeed reduces gradients on its own stream, so NCCL may start collectives in another order on each "
                f"rank: {state.running.one_link}",
            )
        self._take_over_gather(groups, 'fsmoe.gradient_partition.mode is "off"' if mode == "off" else reason)

    def _take_over_gather(self, groups: dict[str, FSMoEGroups], reason: str | None) -> None:
        """Gather updated parameters under the next forward, unless there is a reason against it.

        Raises:
            ConfigError: the config requires it, and there is a reason against it.
        """
        state, asked = self.fsmoe, self.fsmoe.block.gradient_partition.gather_parameters
        if self.pipeline_parallelism:
            reason = "the forwards of stages start one after another"
        elif type(self.optimizer) is not DeepSpeedZeroOptimizer:
            reason = "updated parameters are gathered at zero_optimization.stage 1 and 2"
        elif not partitions_match(self.optimizer, groups):
            reason = "ZeRO partitions parameters over other ranks than those that share them"
        reason = reason or state.running.one_link
        if asked == "overlapped" and reason is not None:
            raise ConfigError(
                f'fsmoe.gradient_partition.gather_parameters = "overlapped" is not possible here, because {reason}; '
                'use "auto" or "at_end"'
            )
        if asked != "at_end" and reason is None:
            state.updated = UpdatedParameters(self, state.reduction, groups, [*state.layers.values()])
            # Before other code reads the classes of experts.
            state.running.checks.insert(0, state.updated.before_layer)

    def _watch_results(self) -> None:
        state = self.fsmoe
        state.expert_results = ExpertResults(state.stage_group, self.fp16_enabled())
        for path, layer in state.layers.items():
            number = stock_groups._get_expert_parallel_rank(layer.ep_group_name) * layer.num_local_experts
            first, _ = Numbering(layer.total_experts, layer.ep_size, state.block.esp_size).meant(number)
            experts = range(first, first + layer.num_local_experts)
            state.expert_results.add(path, layer.total_experts, experts, state.running.device)
        state.running.instruments.append(state.expert_results.watch)

    def _take_model_step(self, *args: Any, **kwargs: Any) -> None:
        """Run DeepSpeed's optimizer step, after ranks have shared the findings of this step's forwards. Collective.

        Raises:
            ExpertResultError: results of experts are wrong, and the config asks to check them.
        """
        if self.fsmoe.expert_results is not None:
            self.fsmoe.expert_results.before_step(self.global_steps)
        self.fsmoe.running.late_faults.share()
        super()._take_model_step(*args, **kwargs)

    @torch._disable_dynamo(recursive=False)
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run DeepSpeed's forward; at the start of a step, begin a trace if one is due, and check that ranks agree on
        how layers run."""
        if self.fsmoe.running.is_over:
            return super().forward(*inputs, **kwargs)
        clock = self._begin_forward()
        # A compiler would not see routers being watched.
        with uncompiled(self.fsmoe.running.needs_routers):
            result = super().forward(*inputs, **kwargs)
        self._end_forward(clock)
        return result

    @torch._disable_dynamo
    def _begin_forward(self, has_batch: bool = True) -> StepClock | None:
        """Start a forward, which is collective for all ranks, with or without a batch; return its clock."""
        self.fsmoe.at_step(self.global_steps)
        if self.fsmoe.reduction is not None:
            self.fsmoe.reduction.reducer.forget_if_broken_off()
        # DeepSpeed's ``eval`` reaches the module alone: the engine itself is always in training mode.
        clock, is_training = None, self.module.training
        if is_training:
            self.fsmoe.before_forward()
            if self.fsmoe.lengths is not None:
                self.fsmoe.lengths.begin_forward(has_batch)
            clock = self.fsmoe.running.step_clock
        if clock is not None:
            clock.begin_forward()
        self.fsmoe.routing.begin_forward(is_training, has_batch)
        splitter = self.fsmoe.splitter
        if splitter is not None and has_batch:
            splitter.begin_forward()
        elif splitter is not None and is_training:
            splitter.decline()
        return clock

    @torch._disable_dynamo
    def _end_forward(self, clock: StepClock | None, has_batch: bool = True) -> None:
        if self.fsmoe.splitter is not None:
            self.fsmoe.splitter.end_forward(self.module.training, has_batch)
        self.fsmoe.routing.end_forward(has_batch)
        if self.fsmoe.lengths is not None:
            self.fsmoe.lengths.end_forward()
        if clock is not None:
            clock.end_forward()
        if has_batch:
            self.fsmoe.running.first_forwards.log_saved_bytes()

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run DeepSpeed's backward, timed in steps that are compared with predictions."""
        self.has_partial_gradients = True
        if (clock := self.fsmoe.running.step_clock) is None:
            return super().backward(*args, **kwargs)
        clock.begin_backward()
        result = super().backward(*args, **kwargs)
        clock.end_backward()
        return result

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Run DeepSpeed's step; the trace of the step ends here."""
        number, ends_step = self.global_steps, self.is_gradient_accumulation_boundary()
        result = super().step(*args, **kwargs)
        self.has_partial_gradients = not ends_step
        self._after_step(self.global_steps != number)
        return result

    def _after_step(self, is_over: bool) -> None:
        """Update the state after a step of DeepSpeed, which need not be an optimizer step."""
        state = self.fsmoe
        if self.was_step_applied():
            state.after_optimizer_step()
        state.running.at_step(self.global_steps)
        state.routing.at_step(self.global_steps)
        if is_over:
            found = state.step_is_over(self.global_steps)
            state.telemetry.step_is_over(self.global_steps, self.global_samples, found)
        state.running.late_faults.check()

    def clip_fp32_gradients(self) -> None:
        """Clip by the true norm of all gradients; DeepSpeed's norm differs where experts are spread over ranks."""
        self._global_grad_norm = clip_by_norm(self.module.parameters(), self.gradient_clipping(), self.mpu)

    def get_global_grad_norm(self) -> float | None:
        """Return DeepSpeed's norm; a value on the device is fetched when it is asked for."""
        norm = super().get_global_grad_norm()
        return norm.item() if isinstance(norm, torch.Tensor) else norm

    def destroy(self) -> None:
        """End the background lanes, then the engine; layers keep running without it."""
        try:
            if "fsmoe" in vars(self) and not self.fsmoe.running.is_over:
                self.fsmoe.close()
                refuse_while_shared_out(self.module, self.fsmoe.running)
                self.fsmoe.running.late_faults.check_all()
        finally:
            super().destroy()

    def fsmoe_dummy_forward(self) -> torch.Tensor:
        """Run the MoE layers alone, without tokens, while the other ranks run a forward with a batch.

        A rank with fewer batches than the others calls this; otherwise they would wait for it in the all-to-alls.

        Returns:
            Zero, to be passed to :meth:`backward` as the others pass their losses.

        Raises:
            RuntimeError: no forward was run before, so the size of a batch is unknown; or ZeRO 3, where all other
                layers communicate as well.
        """
        if self.zero_optimization_partition_weights():
            raise RuntimeError(
                "fsmoe_dummy_forward: at ZeRO 3 every layer gathers its weights from all ranks, so a rank without "
                "a batch cannot run the MoE layers alone: give every rank the same number of batches"
            )
        clock = self._begin_forward(has_batch=False)
        total, telemetry = torch.zeros(()), self.fsmoe.telemetry
        counts = telemetry.routers, telemetry.record and telemetry.record.tokens, self.fsmoe.paths
        for each in (paused := [each for each in counts if each is not None]):
            each.is_paused = True
        for name, layer in self.fsmoe.layers.items():
            shape = layer.fsmoe.last_shape
            if shape is None:
                raise RuntimeError(
                    f"fsmoe_dummy_forward: {name} has not run yet, so its input size is unknown: run "
                    "one forward with a batch on every rank first"
                )
            # Each layer hangs on the one before, so that the backward meets them in the order of the other ranks.
            total = layer.run_without_tokens(shape, total)
        for each in paused:
            each.is_paused = False
        self._end_forward(clock, has_batch=False)
        return total

    def _configure_with_arguments(self, args: Any, mpu: Any) -> None:
        super()._configure_with_arguments(args, mpu)
        # DeepSpeed sets the device of a rank when layers have been replaced. Ours make streams and communicate there,
        # which without this would be on device 0 for every rank of a node.
        index = getattr(args, "device_rank", self.local_rank)
        if index >= 0:
            get_accelerator().set_device(index)

    def _configure_expert_parallel(self, model: nn.Module, collect_sources: bool | None = None) -> Any:
        sources = super()._configure_expert_parallel(model, collect_sources)
        tape_deepspeeds_functions()
        for level, sentence in compat.check_versions():
            log_on_rank_0(sentence, level)
        asked = read_block(self.config)
        block, untuned = settled(asked, self.config, dist.get_world_size())
        show_details(block.autotune.details)
        experts = find_experts(model)
        stock = find_layers(model, bool(experts))
        stage_size, stage_group, num_stages = dist.get_world_size(), None, None
        if isinstance(model, PipelineModule):
            num_stages, stage_group = model.num_stages, self.mpu.get_data_parallel_group()
            stage_size //= num_stages
        check_experts(stock, stage_size, block.gate, block.esp_size)
        # Before any group is made: DeepSpeed would hang over models that differ.
        called = {path: next(iter(wrappers_around(model, path).values()), each) for path, each in experts.items()}
        facts = facts_of_layers({**stock, **called}) | facts_of_config(block.alike())
        facts |= facts_of_versions(("torch", "deepspeed", *(("transformers",) if experts else ()))) | nccl.facts()
        facts |= facts_of_tensor_parallel(stock, self.mpu)
        facts |= facts_of_experts(stock) if block.esp_size > 1 else {}
        facts |= {f"gradient hooks in {path}": ", ".join(hooks_on(each)) or "none" for path, each in called.items()}
        check_agreement(facts | {"version of ds_fsmoe": VERSION}, stage_group, "model, config or versions")
        check_mpu(self.mpu)
        check_tensor_parallel(stock, dist.get_world_size(), sizes_of_mpu(self.mpu)[0], block.esp_size)
        parts = choose_parts(block, get_accelerator().device_name())
        device = torch.device(get_accelerator().current_device_name())
        expert_before_data = not self.config.get("use_data_before_expert_parallelism", False)
        sentences = check_nodes(block, stock, expert_before_data, *sizes_of_mpu(self.mpu))
        sentences += [*launcher_warnings(), *accelerate_warnings(dist.get_world_size())]
        sentences += [*untested(self.config, device.type), *speed_warnings(self.config, asked, device.type)]
        words = words_of(self.config[BLOCK])
        for sentence in words.old:
            log_on_rank_0(sentence)
        for sentence in sentences:
            line, _, details = words.as_written(sentence).partition("\n")
            log_on_rank_0(line, logging.WARNING, details)
        running = LayerRuntime(block, device, expert_before_data, self.mpu)
        running.engine = weakref.ref(self)
        as_run = type_of_run(self.config, device.type)
        ep_size = ep_size_of(
            block, experts, device, expert_before_data, as_run, num_stages, model=model, ds_config=self.config
        )
        for path, each in called.items() if ep_size * block.esp_size > 1 else ():
            refuse_hooks(path, each)
        layers: dict[str, ConvertedLayer] = {}
        present = {name or type(model).__name__: module for name, module in model.named_modules()}
        names = [name for name in present if name in stock or name in experts]
        for index, name in enumerate(names):
            label = f"L{index:02d}"
            if name in stock:
                replaced = convert(stock[name], parts, block.gate, running, label, name)
                layers[name] = stock[name].deepspeed_moe
            else:
                around = wrappers_around(model, name)
                replaced = convert_experts(experts[name], parts, running, label, name, ep_size, around)
                layers[name] = experts[name]
                watch_router(model, name, experts[name])
            # DeepSpeed puts each new parameter into the optimizer group of the one that it replaces.
            sources.sources.update({id(new): [old] for new, old in replaced.items()})
            sources.discarded.update(id(old) for old in replaced.values())
        self._hf_layers = [each for each in layers.values() if isinstance(each, FSMoEExperts)]
        self.spreads_experts = bool(self._hf_layers) if num_stages is None else any(on_every_rank(bool(experts)))
        agree_on_forms(self._hf_layers, stage_group)
        log_table(self._hf_layers, model, len(stock), num_stages is not None)
        running.put_on_model += keep_whole(model, ep_size * block.esp_size > 1)
        running.put_on_model.append(partial(forget_ep_size, [*experts.values()]))
        if num_stages is not None:
            make_groups_on_every_stage(model, layers, running)
        self.fsmoe = FSMoEState(block, layers, parts, running, stage_group, self.gradient_accumulation_steps)
        self.fsmoe.lengths = watched_lengths(
            [*experts.values()], self.config, ep_size, next((each.label for each in self._hf_layers), ""), running
        )
        self.fsmoe.why_untuned = untuned
        if untuned is not None and needs_numbers(asked):
            log_on_rank_0(
                f'fsmoe.schedule = "{asked.schedule}" runs in one chunk ({untuned})',
                logging.WARNING,
                "fsmoe.num_chunks is auto, and nothing is measured",
            )
        return sources

    def _configure_distributed_model(self, model: nn.Module) -> None:
        super()._configure_distributed_model(model)
        if self._hf_layers:
            # DeepSpeed counts its own two classes of layers.
            self.has_moe_layers = True
            self.num_experts.extend(each.total_experts for each in self._hf_layers)

    def _validate_zero3_moe_compatibility(self) -> None:
        """Check DeepSpeed's requirements for experts at stage 3; DeepSpeed itself checks them for AutoEP only."""
        if not self._hf_layers or len(self._hf_layers) < len(self.fsmoe.layers):
            super()._validate_zero3_moe_compatibility()
        gather_as_they_run(self.module, self._hf_layers)
        self._resolve_zero3_param_placement()


# ---- DeepSpeed's engine for a ``PipelineModule``, with our layers in each stage


class FSMoEPipelineEngine(FSMoEEngine, PipelineEngine):
    """Extends DeepSpeed's pipeline engine like :class:`~ds_fsmoe.engine.engine.FSMoEEngine`: each stage's layers are
    ours.

    Gradients are sent in the backward of the last micro-batch, after all earlier ones have added theirs. Between two
    batches no stage has work in progress: there, layers of all stages are measured at once. Plans are tried with whole
    batches. Each stage plans for its own layers.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        complete_norms(self.optimizer)
        if self.num_stages > 1:
            self.fsmoe.begin_stages(Stages(self.stage_id, self.num_stages, self.micro_batches))
        self._num_backwards = 0
        """The micro batches of this batch whose backwards have begun."""

    def train_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Run DeepSpeed's ``train_batch``, and update the state at the start and at the end of the step."""
        state = self.fsmoe
        state.at_step(self.global_steps)
        state.before_forward()
        clock = state.running.step_clock
        if clock is not None and state.autotune is not None and state.autotune.is_measuring:
            # Micro batches of a stage come and go in no fixed turns with their backwards: all of them are timed.
            clock.start()
        if state.reduction is not None:
            state.reduction.reducer.forget_if_broken_off()
        self._num_backwards = 0
        if clock is not None:
            clock.begin_step()
        result = super().train_batch(*args, **kwargs)
        if clock is not None:
            clock.end_step()
        state.running.first_forwards.log_saved_bytes()
        self._after_step(is_over=True)
        return result

    def _exec_forward_pass(self, buffer_id: int) -> None:
        """Run the forward of one micro-batch, timed if the step is timed."""
        clock = self.fsmoe.running.step_clock
        if clock is None or not self.module.training:
            super()._exec_forward_pass(buffer_id)
            return
        clock.begin_forward()
        super()._exec_forward_pass(buffer_id)
        clock.end_forward()

    def _exec_backward_pass(self, buffer_id: int) -> None:
        """Run the backward of one micro-batch, timed if the step is timed; in the last one, gradients are complete as
        they come."""
        clock = self.fsmoe.running.step_clock
        self._num_backwards += 1
        self._force_grad_boundary = self._num_backwards == self.micro_batches and self._is_one_backward(buffer_id)
        if clock is not None:
            clock.begin_backward()
        try:
            super()._exec_backward_pass(buffer_id)
        finally:
            self._force_grad_boundary = False
        if clock is not None:
            clock.end_backward()

    def _is_one_backward(self, buffer_id: int) -> bool:
        """Return True if a micro-batch has one backward: DeepSpeed runs one for each tensor that the stage sends on,
        and a gradient is complete after the last."""
        outputs = self.pipe_buffers["outputs"][buffer_id]
        if self.is_last_stage() or not isinstance(outputs, tuple):
            return True
        return sum(each.is_floating_point() for each in outputs) == 1

    _INSTRUCTION_MAP = PipelineEngine._INSTRUCTION_MAP | {
        schedule.ForwardPass: _exec_forward_pass,
        schedule.BackwardPass: _exec_backward_pass,
    }
