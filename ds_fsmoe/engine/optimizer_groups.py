# SPDX-License-Identifier: Apache-2.0
"""Splits the groups of a script's own optimizer into those of experts and of all else, which DeepSpeed reduces apart.

Scripts for Hugging Face models know nothing of experts: Trainer makes two groups, with and without weight decay. The
group of experts that comes off one has its options, and follows it: schedulers, and scripts, go on to change the
options of the groups that they know.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ds_fsmoe.checkpoint_files.expert_parts import part_of

_OWN = ("params", "name", "moe")
"""What a group of experts does not take over from the one that it came off."""


def with_expert_groups(client: Any) -> Any:
    """Return a script's optimizer, or what makes it, with groups of experts; in place.

    Args:
        client: an optimizer, a function that makes one of parameters, or ``None``.
    """
    if isinstance(client, torch.optim.Optimizer):
        _split(client)
        return client
    if client is None:
        return None

    def make(parameters: Any) -> Any:
        made = client(parameters)
        if isinstance(made, torch.optim.Optimizer):
            _split(made)
        return made

    return make


def with_names(parameters: Any) -> Any:
    """Return groups of parameters for DeepSpeed's own optimizer, which tells them by names, each with one."""
    groups = list(parameters or ())
    if not groups or not isinstance(groups[0], dict) or any("moe" in each for each in groups):
        return parameters
    return [{"name": f"group {number}"} | each for number, each in enumerate(groups)]


def without_frozen_experts(parameters: Any) -> Any:
    """Return parameters, or groups of them, for DeepSpeed's own optimizer, which makes groups of experts by their size:
    below stage 3 ZeRO cannot have one whose parameters are all frozen, as experts beneath adapters are."""
    if parameters is None or isinstance(parameters, torch.Tensor):
        return parameters
    groups = list(parameters)
    if not groups or not isinstance(groups[0], dict):
        return [each for each in groups if part_of(each) is None or each.requires_grad]
    kept = [each | {"params": without_frozen_experts(each["params"])} for each in groups]
    return [each for each in kept if isinstance(each["params"], torch.Tensor) or each["params"]]


def _split(optimizer: torch.optim.Optimizer) -> None:
    """Take the experts out of groups that have others too; a group of experts alone is marked."""
    groups = optimizer.param_groups
    known: list[int | dict[str, Any]] = []
    for group in groups:
        # DeepSpeed leaves out what is empty; schedulers go on to count it.
        known.append(sum(isinstance(each, int) for each in known) if group["params"] else group)
    groups[:] = [each for each in groups if each["params"]]
    came_off: dict[int, int] = {}
    for number, group in enumerate(list(groups)):
        if group.get("moe"):
            continue
        # Below stage 3 ZeRO cannot have a group of frozen ones alone.
        experts = [each for each in group["params"] if part_of(each) is not None and each.requires_grad]
        if not experts:
            continue
        marks = {"moe": True, "name": experts[0].group_name}
        if len(experts) == len(group["params"]):
            group.update(marks)
            continue
        chosen = set(map(id, experts))
        group["params"] = [each for each in group["params"] if id(each) not in chosen]
        came_off[len(groups)] = number
        groups.append(group | marks | {"params": experts})
    if came_off:
        all_groups = _Groups(optimizer)
        optimizer.register_step_pre_hook(_following(all_groups, came_off))
        for scheduler in list(_schedulers_of(optimizer)):
            scheduler.optimizer = _Known(optimizer, all_groups, known)


class _Groups:
    """Knows all groups of an optimizer: loading makes others, and DeepSpeed takes steps with one group at a time.

    Args:
        optimizer: the optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.now = list(optimizer.param_groups)
        optimizer.register_load_state_dict_post_hook(self._look)

    def _look(self, optimizer: torch.optim.Optimizer) -> None:
        self.now = list(optimizer.param_groups)


def _following(groups: _Groups, came_off: dict[int, int]) -> Callable[..., None]:
    """Return what lets groups of experts follow those that they came off, before every step.

    Args:
        groups: all groups.
        came_off: number of a group of experts -> that of the other.
    """

    def follow(*_: Any) -> None:
        for own, other in came_off.items():
            options = groups.now[other].items()
            groups.now[own].update({name: value for name, value in options if name not in _OWN})

    return follow


class _Known:
    """Shows a scheduler the groups of an optimizer that were there when it was made: it has a rate for each of them.

    Args:
        optimizer: the optimizer.
        groups: all its groups.
        known: the numbers of those that were there; one that was empty is there itself.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, groups: _Groups, known: list[int | dict[str, Any]]) -> None:
        self._optimizer, self._groups, self._known = optimizer, groups, known

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups, as they are now."""
        return [self._groups.now[each] if isinstance(each, int) else each for each in self._known]

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":  # while it is copied
            raise AttributeError(name)
        return getattr(self._optimizer, name)


def _schedulers_of(optimizer: torch.optim.Optimizer) -> Iterator[LRScheduler]:
    """Return the schedulers that were made for an optimizer, which does not know them itself."""
    if not getattr(optimizer.step, "_wrapped_by_lr_sched", False):
        return
    gc.collect()
    for each in gc.get_objects():
        # By its type: some objects answer isinstance() with whatever they stand for.
        if issubclass(type(each), LRScheduler) and vars(each).get("optimizer") is optimizer:
            yield each
