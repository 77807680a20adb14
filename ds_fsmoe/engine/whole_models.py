# SPDX-License-Identifier: Apache-2.0
"""Keeps other libraries from saving this rank's experts as if they were all: Accelerate, and ``save_pretrained``.

Below ZeRO 3 they take the model's own state dict. Accelerate's is asked for on all ranks, so there the experts are put
together; ``save_pretrained`` may be called on one rank alone, so it has to be given the weights.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from ds_fsmoe.checkpoint.whole_weights import whole_state_dict
from ds_fsmoe.checkpoint_files.expert_parts import parts_in
from ds_fsmoe.checkpoint_files.tags import CheckpointError
from ds_fsmoe.distributed.waits import at_work
from ds_fsmoe.engine.generation import generate_together, put_over
from ds_fsmoe.engine.marked_experts import check_whole
from ds_fsmoe.engine.saving_engine import SavingEngine
from ds_fsmoe.layer.parts import refuse_copy


def keep_whole(model: nn.Module, is_spread: bool) -> list[Callable[[], None]]:
    """Put over methods of a model what keeps its experts together: copies are refused, and of a model whose experts are
    spread over ranks whole ones are saved, and all ranks generate.

    Args:
        model: a model with an engine.
        is_spread: whether ranks have parts of its experts.

    Returns:
        What undoes it.
    """
    undo = [_refuse_copies(model)]
    return [*undo, _save_whole_models(model), generate_together(model)] if is_spread else undo


def _save_whole_models(model: nn.Module) -> Callable[[], None]:
    """Let what saves a model save all of its experts, or refuse."""
    _let_accelerate_gather()
    if not hasattr(model, "save_pretrained"):
        return lambda: None
    return put_over(model, "save_pretrained", _refusing(model, model.save_pretrained))


def _refuse_copies(model: nn.Module) -> Callable[[], None]:
    """Let a model say that it cannot be copied or pickled, before any of it has been."""
    name = type(model).__name__
    # Looked for on the object by copy and by pickle.
    return put_over(model, "__reduce_ex__", lambda protocol: refuse_copy(name))


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
    """Let ``Accelerator.get_state_dict`` return whole weights below ZeRO 3; at ZeRO 3 it asks the engine."""
    accelerator = getattr(sys.modules.get("accelerate.accelerator"), "Accelerator", None)
    theirs = getattr(accelerator, "get_state_dict", None)
    if theirs is None or hasattr(theirs, "__wrapped__"):
        return

    @functools.wraps(theirs)
    def get_state_dict(self: Any, model: Any, *args: Any, **options: Any) -> Any:
        if not isinstance(model, SavingEngine) or not model.spreads_experts:
            return theirs(self, model, *args, **options)
        if model.zero_optimization_partition_weights():
            return theirs(self, model, *args, **options)
        return whole_state_dict(model)

    accelerator.get_state_dict = get_state_dict
