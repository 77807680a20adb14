# SPDX-License-Identifier: Apache-2.0
"""Keeps Accelerate, and with it the Trainer of Hugging Face, from replacing the ``"auto"`` values of our block, and
writes TRL's ``max_length`` into it.

The entry points call it. In a DeepSpeed config ``"auto"`` is Accelerate's word for "filled in from the training
arguments". While it prepares a model, ``accelerate.DeepSpeedPlugin`` iterates over every field of the config, including
unknown blocks. It raises an error for an ``"auto"`` without a value. This happens before ``deepspeed.initialize`` is
called, so the iteration has to skip our block. Trainer fills its config in when its arguments are made, ahead of the
model: there ``SFTConfig.max_length`` is known.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

from ds_fsmoe.config.imported_later import Finder
from ds_fsmoe.config.reading import BLOCK

_MODULE, _CLASS, _METHOD = "accelerate.utils.dataclasses", "DeepSpeedPlugin", "fill_match"
"""The method that looks at one field: ``fill_match(self, "fsmoe.alltoall", ...)``."""
_SETS = "set_deepspeed_weakref"
"""The method that gives transformers the config, for models that are loaded: ``set_deepspeed_weakref(self)``. The
micro-batch and the accumulation of a later ``prepare`` are 1 in it."""
_BATCH = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_OF_TRAINER = "transformers.integrations.deepspeed", "HfTrainerDeepSpeedConfig", "trainer_config_process"
"""The method that fills the config in from Trainer's arguments: ``trainer_config_process(self, args)``."""


def leave_block_alone() -> None:
    """Keep Accelerate from reading our block from now on, whether it is imported already or later, and have the length
    of TRL's samples in it."""
    _finder.begin()
    _finder_of_trainer.begin()


def watch_block_again() -> None:
    """Undo :func:`leave_block_alone`."""
    _finder.end()
    _finder_of_trainer.end()
    for module, name, method in ((_MODULE, _CLASS, _METHOD), (_MODULE, _CLASS, _SETS), _OF_TRAINER):
        holder = getattr(sys.modules.get(module), name, None)
        theirs = getattr(getattr(holder, method, None), "__wrapped__", None)
        if theirs is not None:
            setattr(holder, method, theirs)


def _wrap(module: ModuleType) -> None:
    plugin = getattr(module, _CLASS, None)
    theirs = getattr(plugin, _METHOD, None)
    # An Accelerate that does it another way is left as it is; its error then says which field it is about.
    if theirs is None or hasattr(theirs, "__wrapped__"):
        return

    @functools.wraps(theirs)
    def fill_match(self: Any, ds_key_long: str, *args: Any, **kwargs: Any) -> Any:
        if ds_key_long.split(".", 1)[0] == BLOCK:
            return None
        return theirs(self, ds_key_long, *args, **kwargs)

    setattr(plugin, _METHOD, fill_match)
    if (their_set := getattr(plugin, _SETS, None)) is not None:

        @functools.wraps(their_set)
        def set_config(self: Any, *args: Any, **kwargs: Any) -> None:
            their_set(self, *args, **kwargs)
            open_ = [name for name in _BATCH if self.deepspeed_config.get(name, "auto") == "auto"]
            self.dschf.config = _Filled(self.dschf.config, open_)

        setattr(plugin, _SETS, set_config)


class _Filled(dict[str, Any]):
    """A config of which some numbers are placeholders.

    Args:
        config: the config.
        names: their names.
    """

    def __init__(self, config: Mapping[str, Any], names: Iterable[str] = ()) -> None:
        super().__init__(config)
        self.open = tuple(names)


def without_placeholders(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config with "auto" where Accelerate has written a number that nobody knows yet."""
    return config | dict.fromkeys(config.open, "auto") if isinstance(config, _Filled) else config


def _wrap_trainers(module: ModuleType) -> None:
    _, name, method = _OF_TRAINER
    holder = getattr(module, name, None)
    theirs = getattr(holder, method, None)
    # Where transformers does it another way, the length is not known.
    if theirs is None or hasattr(theirs, "__wrapped__"):
        return

    @functools.wraps(theirs)
    def process(self: Any, args: Any, *others: Any, **options: Any) -> Any:
        result = theirs(self, args, *others, **options)
        block, length = self.config.get(BLOCK), getattr(args, "max_length", None)
        is_sft = any(each.__name__ == "SFTConfig" for each in type(args).__mro__)
        is_open = isinstance(block, Mapping) and block.get("sequence_length") in (None, "auto")
        if is_sft and is_open and isinstance(length, int):
            self.config[BLOCK] = {**block, "sequence_length": length}
        return result

    setattr(holder, method, process)


_finder = Finder(_MODULE, _wrap)
_finder_of_trainer = Finder(_OF_TRAINER[0], _wrap_trainers)
