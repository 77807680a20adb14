# SPDX-License-Identifier: Apache-2.0
"""Has schedulers count the groups of a script's optimizer, whoever makes them, and the engine report those.

Experts lie in groups of their own, which follow the script's. A scheduler with a value or a function for each group has
as many as the script has made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from deepspeed.runtime import lr_schedules
from deepspeed.runtime.engine import DeepSpeedEngine
from torch.optim import lr_scheduler

from ds_fsmoe.engine.expert_groups import groups_of_trained
from ds_fsmoe.engine.optimizer_groups import (
    as_script_knows,
    follow_groups,
    numbers_of,
    show_scripts_groups,
    with_expert_groups,
    with_names,
    without_frozen_experts,
)
from ds_fsmoe.engine.whole_tensor_optimizers import warn_of_whole_tensors


class GroupsEngine(DeepSpeedEngine):
    """DeepSpeed's engine whose optimizer has groups of experts, of which its script need not know."""

    _number_of_given: dict[int, int]

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:
        """Make DeepSpeed's optimizer, with groups of experts; without experts to train it has none for them."""
        if self._hf_layers:
            client_optimizer, model_parameters = with_expert_groups(client_optimizer), with_names(model_parameters)
            _count_scripts_groups()
        if self._hf_layers and self.zero_optimization():
            model_parameters = without_frozen_experts(model_parameters)
        self._number_of_given = numbers_of(model_parameters)
        with groups_of_trained(self, self._hf_layers):
            super()._configure_optimizer(client_optimizer, model_parameters)
        if self._hf_layers:
            warn_of_whole_tensors(self)

    def _configure_basic_optimizer(self, model_parameters: Any) -> Any:
        made = super()._configure_basic_optimizer(model_parameters)
        if self._hf_layers:
            follow_groups(made, self._number_of_given)
        return made

    def _configure_lr_scheduler(self) -> None:
        with as_script_knows(self.basic_optimizer):
            super()._configure_lr_scheduler()
        show_scripts_groups(self.lr_scheduler)

    def _get_optimizer_param(self, param_name: str) -> list[Any]:
        with as_script_knows(self.basic_optimizer):
            return super()._get_optimizer_param(param_name)


def _count_scripts_groups() -> None:
    """Let schedulers of torch and DeepSpeed that are made from now on count the groups that scripts know."""
    kinds = [each for module in (lr_scheduler, lr_schedules) for each in vars(module).values()]
    for kind in kinds:
        is_scheduler = isinstance(kind, type) and (
            issubclass(kind, lr_scheduler.LRScheduler) or kind.__module__ == lr_schedules.__name__
        )
        if is_scheduler and "__init__" in vars(kind) and not hasattr(kind.__init__, "counts_scripts_groups"):
            kind.__init__ = _counting(kind.__init__)


def _counting(make: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(make)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        with as_script_knows(args[0] if args else kwargs.get("optimizer")):
            make(self, *args, **kwargs)
        show_scripts_groups(self)

    __init__.counts_scripts_groups = True  # type: ignore[attr-defined]
    return __init__
