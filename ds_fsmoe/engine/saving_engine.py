# SPDX-License-Identifier: Apache-2.0
"""Implements the part of the engine that saves and loads."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

from ds_fsmoe.checkpoint.checkpoints import Checkpoints
from ds_fsmoe.checkpoint.expert_files import write_parts
from ds_fsmoe.checkpoint.ranks import replaced
from ds_fsmoe.checkpoint.saving import stock_layers
from ds_fsmoe.checkpoint.whole_weights import whole_state_dict
from ds_fsmoe.checkpoint_files.expert_parts import parts_in
from ds_fsmoe.checkpoint_files.guards import write_script
from ds_fsmoe.checkpoint_files.numbering import expert_name
from ds_fsmoe.checkpoint_files.tags import CheckpointError
from ds_fsmoe.distributed.waits import at_work
from ds_fsmoe.engine.marked_experts import refuse_parts
from ds_fsmoe.layer.expert_shard import TRUSTED, asking
from ds_fsmoe.layer.inference import refuse_within

_LOAD_OPTIONS = (
    "load_module_strict",
    "load_optimizer_states",
    "load_lr_scheduler_states",
    "load_module_only",
    "custom_load_fn",
)
"""The options of DeepSpeed's ``load_checkpoint``, in its order."""


class SavingEngine(DeepSpeedEngine):
    """DeepSpeed's engine, which saves whole checkpoints or none, and experts of Hugging Face models too."""

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
        """Save DeepSpeed's checkpoint, whole or not at all, with checksums, random generators and plans beside it.

        Raises:
            CheckpointError: saving failed; raised on every rank. ``latest`` still names the last good tag.
            RuntimeError: the engine is in inference.
        """
        refuse_within(self.fsmoe.running, "save_checkpoint")
        if self.spreads_experts and self.checkpoint_engine.is_decoupled():
            raise CheckpointError(
                f"checkpoint_engine {type(self.checkpoint_engine).__name__}: writes files while training goes on, "
                "which is not supported with experts of a Hugging Face model; leave it out of the config"
            )
        if self.fsmoe.placement is not None and self.checkpoint_engine.is_decoupled():
            raise CheckpointError(
                f"checkpoint_engine {type(self.checkpoint_engine).__name__}: writes files while training goes on, "
                "and experts that go home for a save would be on their way back; leave it out of the config, or use "
                'fsmoe.placement.policy = "off"'
            )
        tag = str(f"global_step{self.global_steps}" if tag is None else tag).rstrip("/")
        save, checkpoints = super().save_checkpoint, Checkpoints(self)
        if not save_dir or self.checkpoint_engine.is_decoupled():
            checkpoints.check_tag(save_dir, tag, save_latest)
            with self._experts_at_home():
                return save(save_dir, tag, client_state or {}, save_latest, *more, **others)

        def write(name: str) -> Any:
            return save(save_dir, name, client_state or {}, False, *more, **others)

        with self._experts_at_home():
            return checkpoints.save(save_dir, tag, write, save_latest, client_state)

    def _experts_at_home(self) -> AbstractContextManager[None]:
        """Have all experts where they are in the model's own order meanwhile. Collective."""
        placement = self.fsmoe.placement
        return nullcontext() if placement is None else placement.at_home()

    @at_work("saving weights")
    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> Any:
        """Save the weights in one file as DeepSpeed does; experts that are spread over ranks are put together.

        Raises:
            RuntimeError: the engine is in inference.
        """
        refuse_within(self.fsmoe.running, "save_16bit_model")
        save = super().save_16bit_model
        if not self.spreads_experts or self.zero_optimization_partition_weights():
            with self._experts_at_home():
                return save(save_dir, save_filename, exclude_frozen_parameters)
        whole = whole_state_dict(self, exclude_frozen_parameters)
        with replaced(self, "module_state_dict", lambda **options: whole):
            return save(save_dir, save_filename, exclude_frozen_parameters)

    def module_state_dict(self, *args: Any, **options: Any) -> Any:
        """Return the state dict of the module for DeepSpeed's own saving.

        Raises:
            CheckpointError: a script asks, and experts are spread over ranks.
        """
        if self.spreads_experts and asking() not in TRUSTED:
            for name, _, part in parts_in(self.module):
                if part.num_parts > 1:
                    refuse_parts(name)
        return super().module_state_dict(*args, **options)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> Any:
        """Return all weights of ZeRO 3 on the first rank; experts are put together from those that share them."""
        if not self.spreads_experts:
            return super()._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)
        optimizer = self.optimizer
        if self._optimizer_has_ckpt_event_prologue():
            optimizer.checkpoint_event_prologue()
        whole = whole_state_dict(self, exclude_frozen_parameters)
        if self._optimizer_has_ckpt_event_epilogue():
            optimizer.checkpoint_event_epilogue()
        return whole

    def _save_moe_checkpoint(
        self, save_dir: str, tag: str, client_state: Any = None, exclude_frozen_parameters: bool = False
    ) -> None:
        """Save the experts of Hugging Face models beside those that DeepSpeed knows."""
        with ExitStack() as stack:
            for layer in stock_layers(self).values():
                stack.enter_context(replaced(layer, "state_dict", _only_experts(layer.state_dict)))
            super()._save_moe_checkpoint(save_dir, tag, client_state or {}, exclude_frozen_parameters)
        write_parts(self, Path(save_dir) / tag, exclude_frozen_parameters)

    def _checkpoint_tag_validation(self, tag: str) -> None:
        """Validate the tag where DeepSpeed saves by itself; otherwise ranks agreed on it before any writing."""
        if self.checkpoint_engine.is_decoupled():
            super()._checkpoint_tag_validation(tag)

    def _copy_recovery_script(self, save_path: str) -> None:
        """Write a script ``zero_to_fp32.py`` beside a checkpoint: ours where DeepSpeed's knows nothing of parts."""
        if not self.spreads_experts:
            super()._copy_recovery_script(save_path)
        else:
            write_script(Path(save_path))

    @at_work("loading a checkpoint")
    def load_checkpoint(self, load_dir: str, tag: Any = None, *others: Any, **options: Any) -> Any:
        """Load DeepSpeed's checkpoint from checked files; random generators and plans go on as they were.

        Raises:
            CheckpointError: a file is wrong; raised on every rank, with the file and the reason.
            RuntimeError: the engine is in inference.
        """
        refuse_within(self.fsmoe.running, "load_checkpoint")
        if self.load_universal_checkpoint():
            raise CheckpointError(
                f"{load_dir}: checkpoint.load_universal = true: DeepSpeed has no universal form of MoE layers, and its "
                "reading of that form runs what files ask for. Leave it out of the config, and load the checkpoint "
                "that was saved: ds_fsmoe moves it to another layout by itself"
            )
        asked = dict(zip(_LOAD_OPTIONS, others, strict=False)) | options
        tag = None if tag is None else str(tag)
        placement, watch, load = self.fsmoe.placement, self.fsmoe.placement_watch, super().load_checkpoint
        if placement is None:
            return Checkpoints(self).load(Path(load_dir), tag, load, asked)
        # What is loaded is in the model's own order. Experts are then where they were when it was saved, if it says so;
        # else, or where nothing is loaded, where they are now.
        before, placement.was_read = dict(placement.now), False
        placement.go_home()
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
        """Return what no expert's file holds. DeepSpeed leaves out whatever has "expert" in its name, even in a layer's
        path, and would then write it nowhere."""
        for name in [each for each in full_state_dict if expert_name(each) is not None]:
            full_state_dict.pop(name)
        return full_state_dict


def _only_experts(state_dict: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Return a layer's ``state_dict`` that has experts alone where DeepSpeed looks for them, and all in a state dict of
    the model. DeepSpeed takes whatever has "expert" in its name for one, and asks for its number."""

    def found(*args: Any, **options: Any) -> dict[str, Any]:
        state = state_dict(*args, **options)
        if args or options:
            return state
        return {name: each for name, each in state.items() if expert_name(f".{name}") is not None}

    return found
