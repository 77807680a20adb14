# SPDX-License-Identifier: Apache-2.0
"""Implements the part of the engine that saves and loads checkpoints and weights.

``engine.py`` derives its engine from this class. The files themselves are written and read by ``ds_fsmoe/checkpoint``;
here DeepSpeed's methods are connected with it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.mixed_precision_linkage import lazy_init_hp_params_optimizer_state
from torch import nn

from ds_fsmoe.checkpoint.checkpoints import Checkpoints
from ds_fsmoe.checkpoint.ranks import replaced
from ds_fsmoe.checkpoint.saving import whole_state_dict, write_parts
from ds_fsmoe.checkpoint_files.expert_parts import parts_in
from ds_fsmoe.checkpoint_files.guards import write_script
from ds_fsmoe.checkpoint_files.numbering import expert_name
from ds_fsmoe.checkpoint_files.tags import CheckpointError
from ds_fsmoe.distributed.waits import at_work
from ds_fsmoe.engine.marked_experts import check_whole, refuse_parts
from ds_fsmoe.layer.expert_shard import TRUSTED, asking, origin_of
from ds_fsmoe.layer.inference import refuse_within
from ds_fsmoe.layer.parts import refuse_copy
from ds_fsmoe.layer.stock_layer import StockMoE

_LOAD_OPTIONS = (
    "load_module_strict",
    "load_optimizer_states",
    "load_lr_scheduler_states",
    "load_module_only",
    "custom_load_fn",
)
"""The options of DeepSpeed's ``load_checkpoint``, in its order."""


class SavingEngine(DeepSpeedEngine):
    """Extends DeepSpeed's engine: a checkpoint is saved completely or not at all, with experts of Hugging Face models
    too."""

    has_partial_gradients = False
    """Whether gradients have been summed that no step has used yet."""

    spreads_experts = False
    """Whether experts of a Hugging Face model are spread over ranks: over those of any stage, in a pipeline."""

    @at_work("saving a checkpoint")
    def save_checkpoint(
        self,
        save_dir: str,
        tag: Any = None,
        client_state: Any = None,
        save_latest: bool = True,
        *more: Any,
        **others: Any,
    ) -> Any:
        """Save DeepSpeed's checkpoint, completely or not at all, with checksums, random generators and plans next to
        it.

        Raises:
            CheckpointError: saving failed; raised on every rank. ``latest`` still names the last good tag.
            RuntimeError: the engine is in inference.
        """
        refuse_within(self.fsmoe.running, "save_checkpoint")
        if self.spreads_experts and self.checkpoint_engine.is_decoupled():
            raise CheckpointError(
                f"checkpoint_engine {type(self.checkpoint_engine).__name__} writes files during training, which is "
                "not supported with experts of a Hugging Face model; remove it from the config"
            )
        if self.fsmoe.placement is not None and self.checkpoint_engine.is_decoupled():
            raise CheckpointError(
                f"checkpoint_engine {type(self.checkpoint_engine).__name__} writes files during training, when "
                'experts have moved on; remove it from the config, or use fsmoe.placement.policy = "off"'
            )
        tag = str(f"global_step{self.global_steps}" if tag is None else tag).rstrip("/")
        save, checkpoints = super().save_checkpoint, Checkpoints(self)
        if not save_dir or self.checkpoint_engine.is_decoupled():
            checkpoints.check_tag(save_dir, tag, save_latest)
            with self._experts_in_model_order():
                return save(save_dir, tag, client_state or {}, save_latest, *more, **others)

        def write(name: str) -> Any:
            return save(save_dir, name, client_state or {}, False, *more, **others)

        with self._experts_in_model_order():
            return checkpoints.save(save_dir, tag, write, save_latest, client_state)

    def _experts_in_model_order(self) -> AbstractContextManager[None]:
        """Restore the model's own order of experts inside the block. Collective."""
        placement = self.fsmoe.placement
        return nullcontext() if placement is None else placement.in_model_order()

    @at_work("saving weights")
    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> Any:
        """Save the weights in one file as DeepSpeed does; experts that are spread over ranks are gathered.

        Raises:
            RuntimeError: the engine is in inference.
        """
        refuse_within(self.fsmoe.running, "save_16bit_model")
        save = super().save_16bit_model
        if not self.spreads_experts or self.zero_optimization_partition_weights():
            with self._experts_in_model_order():
                return save(save_dir, save_filename, exclude_frozen_parameters)
        whole = whole_state_dict(self, exclude_frozen_parameters)
        with replaced(self, "module_state_dict", lambda **options: whole):
            return save(save_dir, save_filename, exclude_frozen_parameters)

    def module_state_dict(self, *args: Any, **options: Any) -> Any:
        """Return the state dict of the module for DeepSpeed's own saving.

        Raises:
            CheckpointError: a script calls it, and experts are spread over ranks.
        """
        if self.spreads_experts and asking() not in TRUSTED:
            for name, _, part in parts_in(self.module):
                if part.num_parts > 1:
                    refuse_parts(name)
        return super().module_state_dict(*args, **options)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> Any:
        """Return all weights of ZeRO 3 on the first rank; experts are gathered from the ranks that share them."""
        if not self.spreads_experts:
            return super()._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)
        optimizer = self.optimizer
        if self._optimizer_has_ckpt_event_prologue():
            optimizer.checkpoint_event_prologue()
        whole = whole_state_dict(self, exclude_frozen_parameters)
        if self._optimizer_has_ckpt_event_epilogue():
            optimizer.checkpoint_event_epilogue()
        return whole

    def _get_shared_params(self) -> dict[str, str]:
        """Return other name -> first name of each parameter with several; DeepSpeed's own leaves out a module that its
        parent has under two names."""
        first: dict[int, str] = {}
        named = self.module.named_parameters(remove_duplicate=False)
        return {name: other for name, each in named if (other := first.setdefault(id(each), name)) != name}

    def _save_moe_checkpoint(
        self, save_dir: str, tag: str, client_state: Any = None, exclude_frozen_parameters: bool = False
    ) -> None:
        """Save the experts of Hugging Face models next to those that DeepSpeed knows."""
        with ExitStack() as stack:
            for layer in (each for each in self.module.modules() if isinstance(each, StockMoE)):
                stack.enter_context(replaced(layer, "state_dict", _only_experts(layer.state_dict)))
            super()._save_moe_checkpoint(save_dir, tag, client_state or {}, exclude_frozen_parameters)
        write_parts(self, Path(save_dir) / tag, exclude_frozen_parameters)

    def _checkpoint_tag_validation(self, tag: str) -> None:
        """Validate the tag where DeepSpeed saves by itself; otherwise ranks agreed on it before any writing."""
        if self.checkpoint_engine.is_decoupled():
            super()._checkpoint_tag_validation(tag)

    def _copy_recovery_script(self, save_path: str) -> None:
        """Write a script ``zero_to_fp32.py`` next to a checkpoint: ours if DeepSpeed's cannot read parts of experts."""
        if not self.spreads_experts:
            super()._copy_recovery_script(save_path)
        else:
            write_script(Path(save_path))

    @at_work("loading a checkpoint")
    def load_checkpoint(self, load_dir: str, tag: Any = None, *others: Any, **options: Any) -> Any:
        """Load DeepSpeed's checkpoint from checked files, and restore random generators and plans.

        Raises:
            CheckpointError: a file is wrong; raised on every rank, with the file and the reason.
            RuntimeError: the engine is in inference.
        """
        refuse_within(self.fsmoe.running, "load_checkpoint")
        if self.load_universal_checkpoint():
            raise CheckpointError(
                f"{load_dir}: checkpoint.load_universal = true: DeepSpeed has no universal format for MoE layers. "
                "Remove it from the config, and load the saved checkpoint: ds_fsmoe converts it to another layout "
                "itself"
            )
        asked = dict(zip(_LOAD_OPTIONS, others, strict=False)) | options
        tag = None if tag is None else str(tag)
        placement, watch, load = self.fsmoe.placement, self.fsmoe.placement_watch, super().load_checkpoint
        if placement is None:
            return Checkpoints(self).load(Path(load_dir), tag, load, asked)
        # What is loaded is in the model's own order. Experts are then where they were when it was saved, if it says so;
        # else, or where nothing is loaded, where they are now.
        before, placement.was_read = dict(placement.now), False
        placement.restore_model_order()
        try:
            result = Checkpoints(self).load(Path(load_dir), tag, load, asked)
        except Exception:
            placement.go_to(before)
            raise
        if not placement.was_read:
            placement.go_to(before)
            if watch is not None and result[0] is not None:
                watch.forget()
        return result

    def _get_non_moe_state_dict(self, full_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return all weights that no expert's file holds.

        DeepSpeed leaves out every name with "expert" in it, even in a layer's path, and would then write it nowhere.
        """
        for name in [each for each in full_state_dict if expert_name(each) is not None]:
            full_state_dict.pop(name)
        return full_state_dict


def _only_experts(state_dict: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Return a layer's ``state_dict`` that has experts alone where DeepSpeed reads them, and all in a model's state
    dict.

    DeepSpeed treats every name with "expert" in it as an expert, and parses a number from it.
    """

    def found(*args: Any, **options: Any) -> dict[str, Any]:
        state = state_dict(*args, **options)
        if args or options:
            return state
        return {name: each for name, each in state.items() if expert_name(f".{name}") is not None}

    return found


# ---- Keeps other libraries from saving this rank's experts as if they were all: Accelerate, and
# ``save_pretrained``
#
# Below ZeRO 3 they take the model's own state dict. Accelerate's is asked for on all ranks, so there the experts are
# put together; ``save_pretrained`` may be called on one rank alone, so it has to be given the weights.


def keep_whole(model: nn.Module, is_spread: bool) -> list[Callable[[], None]]:
    """Replace methods of a model so that its experts stay complete: copies are refused. If experts are spread over
    ranks, the model is saved whole, and all ranks take part in generation.

    Args:
        model: a model with an engine.
        is_spread: True if ranks have parts of its experts.

    Returns:
        The functions that undo it.
    """
    name = type(model).__name__
    # Looked for on the object by copy and by pickle, before any of the model has been copied.
    undo = [put_over(model, "__reduce_ex__", lambda protocol: refuse_copy(name))]
    if not is_spread:
        return undo
    _let_accelerate_gather()
    if hasattr(model, "save_pretrained"):
        undo.append(put_over(model, "save_pretrained", _refusing(model, model.save_pretrained)))
    for module in model.modules():
        if any(base.__name__ == "GenerationMixin" for base in type(module).__mro__):
            undo.append(put_over(module, "generate", _together(module.generate)))
            break
    return undo


def _refusing(model: nn.Module, save: Any) -> Any:
    """Return ``save_pretrained`` that refuses to write parts."""

    @at_work("saving weights")
    @functools.wraps(save)
    def save_pretrained(*args: Any, **options: Any) -> Any:
        # Of a model with adapters only these are written.
        is_adapted = hasattr(model, "peft_config")
        parts = [name for name, each, _ in parts_in(model) if each.requires_grad or not is_adapted]
        writes, given = options.get("is_main_process", True), options.get("state_dict")
        if given is not None:
            check_whole(given, model)
        elif parts and writes:
            raise CheckpointError(
                f"save_pretrained: this rank has only its own experts in {parts[0]}. Call "
                "state_dict = ds_fsmoe.whole_state_dict(engine) on every rank, and on the first one "
                "save_pretrained(folder, state_dict=state_dict)"
            )
        if parts and options.get("state_dict") is not None:
            # Those of compiled modules are the names of a checkpoint of theirs, but not of a model's files.
            own = {name.replace("_orig_mod.", ""): each for name, each in options["state_dict"].items()}
            options["state_dict"] = own
        elif parts:  # nothing of it is written, but it is prepared for that
            options["state_dict"] = model.state_dict()
        return save(*args, **options)

    return save_pretrained


def _let_accelerate_gather() -> None:
    """Make ``Accelerator.get_state_dict`` return whole weights below ZeRO 3; at ZeRO 3 it asks the engine."""
    accelerator = getattr(sys.modules.get("accelerate.accelerator"), "Accelerator", None)
    theirs = getattr(accelerator, "get_state_dict", None)
    if theirs is None or hasattr(theirs, "__wrapped__"):
        return

    @functools.wraps(theirs)
    def get_state_dict(self: Any, model: Any, *args: Any, **options: Any) -> Any:
        is_ours = isinstance(model, SavingEngine) and model.spreads_experts
        if not is_ours or model.zero_optimization_partition_weights():
            return theirs(self, model, *args, **options)
        return whole_state_dict(model)

    accelerator.get_state_dict = get_state_dict


# ---- Has DeepSpeed's access to single parameters (``safe_get_full_grad`` and the like) give and take whole
# experts
#
# Scripts import those functions before anything of ours runs. So what they call is replaced: at ZeRO 1 and 2 methods
# that DeepSpeed puts on a parameter, at ZeRO 3 methods of its optimizer.


def show_whole_experts(engine: Any) -> None:
    """Make DeepSpeed's functions for single parameters see the experts of all ranks, as on one process.

    Args:
        engine: our engine, complete except for its placement.
    """
    optimizer = engine.optimizer
    if not engine._hf_layers:  # of DeepSpeed's own layers they see what stock has
        return
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        _replace_at_stage_3(optimizer)
    elif hasattr(optimizer, "_link_all_hp_params"):
        spread = [each for _, each, part in parts_in(engine.module) if part.num_parts > 1]
        _replace_on_parameters(optimizer, spread)


def _whole_of(own: torch.Tensor | None, parameter: nn.Parameter) -> torch.Tensor | None:
    """Return the whole of a parameter whose parts are on several ranks, in the model's own order. Collective."""
    origin = origin_of(parameter)
    return own if own is None or origin is None else origin.whole(own)


def _own_part_of(value: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """Return this rank's part of a whole value.

    Raises:
        ValueError: its size differs from the whole parameter's.
    """
    origin = origin_of(parameter)
    if origin is None:
        return value
    shape = origin.part.whole_shape(getattr(parameter, "ds_shape", parameter.shape))
    if value.numel() != torch.Size(shape).numel():
        raise ValueError(
            f"ds_fsmoe: a value of shape {list(value.shape)} for a parameter of experts that are spread over "
            f"{origin.part.num_parts} ranks: give that of all {origin.part.num_experts} experts, {list(shape)}, on "
            "every rank, as safe_get_full_* returns it"
        )
    return origin.take(value.reshape(shape))


def _replace_at_stage_3(optimizer: Any) -> None:
    gather, set_state = optimizer._fp32_state_allgather, optimizer.set_full_hp_param
    set_gradient, update = optimizer.set_fp32_grad_for_param, optimizer.update_fp32_grad_for_param_vectorized

    def update_whole(update_func: Callable[..., torch.Tensor], param_list: Iterable[nn.Parameter]) -> None:
        update(lambda whole, each: _own_part_of(update_func(whole, each), each), param_list)

    optimizer._fp32_state_allgather = lambda param, partition: _whole_of(gather(param, partition), param)
    optimizer.set_full_hp_param = lambda value, param, *key, **named: set_state(
        _own_part_of(value, param), param, *key, **named
    )
    optimizer.set_fp32_grad_for_param = lambda value, param: set_gradient(_own_part_of(value, param), param)
    optimizer.update_fp32_grad_for_param_vectorized = update_whole


def _replace_on_parameters(optimizer: Any, parameters: Iterable[nn.Parameter]) -> None:
    link = optimizer._link_all_hp_params
    link_states = _link_states_of_all(optimizer) if isinstance(optimizer, DeepSpeedZeroOptimizer) else None

    def see_whole() -> None:
        for each in parameters:
            if hasattr(each, "_hp_mapping"):
                _see_whole(each)

    def link_all() -> None:
        link()
        see_whole()
        if link_states is not None:
            link_states(anew=True)

    # DeepSpeed links again whenever its flat tensors have been replaced: after a load, and after an offload.
    optimizer._link_all_hp_params = link_all
    see_whole()


def _see_whole(parameter: nn.Parameter) -> None:
    get_state, get_gradient = parameter.get_full_hp_param, parameter.get_full_hp_grad
    set_state, set_gradient = parameter.set_full_hp_param, parameter.set_full_hp_grad
    parameter.get_full_hp_param = lambda *key, **named: _whole_of(get_state(*key, **named), parameter)
    parameter.get_full_hp_grad = lambda: _whole_of(get_gradient(), parameter)
    parameter.set_full_hp_param = lambda value, *key, **named: set_state(_own_part_of(value, parameter), *key, **named)
    parameter.set_full_hp_grad = lambda value: set_gradient(_own_part_of(value, parameter))


def _link_states_of_all(optimizer: DeepSpeedZeroOptimizer) -> Callable[..., None]:
    """Link the parameters of all groups to their states; return the links.

    DeepSpeed 0.19.8 links all groups once, after the step of the first one. Other groups, such as those of experts,
    have no states by then.
    """
    linked: set[int] = set()

    def link(anew: bool = False) -> None:
        if anew:
            linked.clear()
        for number, flat in enumerate(optimizer.single_partition_of_fp32_groups):
            if number not in linked and optimizer.optimizer.state.get(flat):
                lazy_init_hp_params_optimizer_state(optimizer.bit16_groups[number], flat, optimizer.optimizer.state)
                linked.add(number)

    optimizer._lazy_init_hp_params_optimizer_state = link
    return link


# ---- Lets ``model.generate`` run on ranks that share experts: one that has ended its sequences continues until
# all have


def put_over(module: nn.Module, name: str, method: Callable[..., Any]) -> Callable[[], None]:
    """Replace a method of a module's class; return the function that undoes it."""
    setattr(module, name, method)

    def take_off() -> None:
        if vars(module).get(name) is method:
            delattr(module, name)

    return take_off


def _together(generate: Any) -> Any:
    """Return ``generate`` in which every rank takes part in all forwards, as transformers does at ZeRO 3 only."""

    @functools.wraps(generate)
    def together(*args: Any, **options: Any) -> Any:
        # Also where a trainer says that it is not needed, as it knows of no other reason than ZeRO 3.
        return generate(*args, **options | {"synced_gpus": True})

    return together
