# SPDX-License-Identifier: Apache-2.0
"""Plans how the experts of a rank are computed, and keeps the plan until something about them changes.

``calls`` checks the plan ahead of each call. Modules, parameters and hooks belong to the user and may change at any
time. So all of them are compared with their earlier state. The check compares identities in one pass with little Python
code.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from ds_fsmoe.components.expert import ExpertBase
from ds_fsmoe.components.expert_compute.grouped_products import RowGroups
from ds_fsmoe.components.expert_compute.linears import LinearWeights
from ds_fsmoe.components.expert_compute.manual_ffn import (
    ManualExpert,
    ManualFeedForward,
    ManualGatedFeedForward,
    manual_form,
    modules_of,
    runs_unobserved,
)

# These compute with their layers and element by element, and so for any number of dimensions.
_FORMS = (ManualFeedForward, ManualGatedFeedForward)
_ALIGNED_BYTES = 64
_OURS = "ds_fsmoe.components.experts."
_DICTS = ("_parameters", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_PARAMETER = operator.attrgetter("__class__", "requires_grad", "dtype", "device", "shape")


@dataclass(frozen=True, eq=False)
class PlannedExpert:
    """Holds an expert in its hand-written form."""

    form: ManualExpert
    """The form; with its layers as plain weights where that changes nothing."""
    up: tuple[LinearWeights, ...]
    """The layers of ``form.up``."""
    down: LinearWeights
    """The layer of ``form.down``."""
    weights: tuple[nn.Parameter, ...]
    """The weights of all its layers."""
    wants_up: bool
    """Whether a weight of ``form.up`` wants a gradient."""
    wants_any: bool
    """True: at least one parameter of the expert needs a gradient."""
    structure: Hashable
    """Equal for experts that can be computed together; ``None`` for one that is computed alone."""
    may_group: bool
    """Whether its weights allow :func:`~ds_fsmoe.components.expert_compute.side_by_side.pays`."""

    @classmethod
    def of(cls, form: ManualExpert) -> PlannedExpert:
        wanted = [(linear.weight.requires_grad, _is_wanted(linear.bias)) for linear in form.linears]
        wants_up = any(weight for weight, _ in wanted[:-1])
        up, down = tuple(map(LinearWeights.of, form.up)), LinearWeights.of(form.down)
        structure = None
        if type(form) in _FORMS:
            layers = [
                (type(each), each.weight.shape, each.weight.dtype, each.weight.device, each.bias is None)
                for each in form.linears
            ]
            structure = type(form), form.activation, *layers, *wanted
            form = form.with_layers(up, down)
        weights = tuple(linear.weight for linear in form.linears)
        fills_lines = not any(each.shape[1] * each.element_size() % _ALIGNED_BYTES for each in weights)
        may_pay = fills_lines and all(each.requires_grad for each in weights)
        return cls(form, up, down, weights, wants_up, any(map(any, wanted)), structure, may_pay)

    def layers(
        self, like: torch.Tensor, groups: RowGroups | None
    ) -> tuple[ManualExpert, Sequence[LinearWeights], LinearWeights]:
        """Return the form, and its layers with their gradients, which are the same for rows of any shape."""
        return self.form, self.up, self.down


def _is_wanted(parameter: nn.Parameter | None) -> bool:
    return parameter is not None and parameter.requires_grad


class ExpertPlan:
    """Holds what calls of some experts have in common, until something about them changes.

    Args:
        experts: of the rank.
        parameters: all parameters of the experts.
    """

    def __init__(self, experts: Sequence[nn.Module], parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = tuple(parameters)
        modules = [module for expert in experts for module in modules_of(expert)]
        # Foreign attributes of a module are not kept here, unless they may change its computation.
        watched = [module for expert in experts if _may_be_written(expert) for module in modules_of(expert)]
        self._modules = modules
        self._dictionaries = [vars(module) for module in modules]
        self._attributes = [vars(module) for module in watched]
        self._inner = [attributes[name] for attributes in self._dictionaries for name in _DICTS]
        self._hooks = [attributes[name] for attributes in self._attributes for name in _HOOKS]
        self._observed = self._snapshot()
        self._is_for_once = any(map(_may_change_unnoticed, experts))
        self.wanted = frozenset(id(each) for each in self._parameters if each.requires_grad)
        """The ids of the parameters that require a gradient."""
        forms = [manual_form(each) if runs_unobserved(each) else None for each in experts]
        self.planned = tuple(None if form is None else PlannedExpert.of(form) for form in forms)
        """Each expert in its hand-written form, outside of autocast; ``None`` for one without."""
        self.device_types = tuple({each.down.weight.device.type: None for each in forms if each is not None})
        """The device types of these experts, for autocast."""

    def still_holds(self) -> bool:
        """Return True if nothing has changed since the plan was made."""
        if self._is_for_once:
            return False
        (objects, values), (objects_before, values_before) = self._snapshot(), self._observed
        if values != values_before or len(objects) != len(objects_before):
            return False
        return all(map(operator.is_, objects, objects_before))

    def _snapshot(self) -> tuple[list[Any], list[Any]]:
        """Return the objects that must stay the same, and the values that must stay equal."""
        objects = list(map(type, self._modules))
        objects += [attributes[name] for attributes in self._dictionaries for name in _DICTS]
        for dictionaries in (self._attributes, self._inner):
            objects += itertools.chain.from_iterable(map(dict.values, dictionaries))
        values = [bool(torch_module._has_any_global_hook()), *map(_OF_PARAMETER, self._parameters)]
        for dictionaries in (self._attributes, self._inner):
            values += map(len, dictionaries)
        values += map(bool, self._hooks)  # whether hooks exist, not which
        return objects, values


def _may_be_written(expert: nn.Module) -> bool:
    """Return True if this class can define a form with hand-written gradients, see ``ExpertBase.written``."""
    return type(expert) is nn.Sequential or (isinstance(expert, ExpertBase) and _definer(expert) is not ExpertBase)


def _may_change_unnoticed(expert: nn.Module) -> bool:
    """Return True if a class outside this package makes the expert's form, from state that is not compared."""
    return (
        _may_be_written(expert) and isinstance(expert, ExpertBase) and not _definer(expert).__module__.startswith(_OURS)
    )


def _definer(expert: ExpertBase) -> type:
    """Return the class that defines ``written`` for an expert."""
    return next(each for each in type(expert).__mro__ if "written" in vars(each))
