# SPDX-License-Identifier: Apache-2.0
"""Calls experts with weights that lie elsewhere than in the model, in one tensor of several experts for each weight.

Letters: e experts on this rank, W experts with weights in one tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ds_fsmoe.components.expert_compute.calls import ExpertSet
from ds_fsmoe.components.expert_compute.contract import shape_of
from ds_fsmoe.components.expert_compute.expert_call import CallRows, ExpertCall, sizes_of_call
from ds_fsmoe.components.expert_compute.stacked_experts import StackedExperts
from ds_fsmoe.layer.experts_layer import FSMoEExperts

_MOST_SETS = 64
"""The most sets of experts of a layer for which what was worked out is kept."""


CalledExperts = Callable[[Sequence[int], CallRows, torch.Tensor], ExpertCall]
"""Makes a call of some of W experts whose weights lie in one tensor of each kind. It takes their ascending numbers, the
sizes of the rows, of which the first are those of these experts and all others are 0, and the rows."""


@dataclass(frozen=True, eq=False)
class ExpertForm:
    """The experts of this rank in one layer, and how others with their structure are called."""

    shapes: Mapping[str, tuple[int, ...]]
    """Name -> the shape of a weight of one expert, also where it is shared out."""
    parameters: tuple[torch.Tensor, ...]
    """All that the weights are in, the names' own ones first."""
    own: Callable[[str, int], torch.Tensor]
    """Returns a weight, by its name, of one of the experts here, by its index; it must be whole."""
    called: Callable[[Mapping[str, torch.Tensor]], CalledExperts]
    """Returns experts with these weights, [W, ...] each."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the weights of an expert."""
        return tuple(self.shapes)

    @property
    def device(self) -> torch.device:
        """The device on which they are computed."""
        return self.parameters[0].device

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the type of a weight."""
        return self.parameters[self.names.index(name)].dtype


def form_of_module(module: FSMoEExperts) -> ExpertForm:
    """Return the form of the experts of Hugging Face's models: one module, in evaluation."""
    contract = module.fsmoe.contract
    assert contract is not None

    def called(stacks: Mapping[str, torch.Tensor]) -> CalledExperts:
        state = module.fsmoe
        stand_in = copy.copy(module)
        # It has the module's own functions, norm and flags, and other weights.
        stand_in._parameters = {
            **module._parameters,
            **{name: nn.Parameter(each, requires_grad=False) for name, each in stacks.items()},
        }
        num_experts = len(next(iter(stacks.values())))
        if hasattr(stand_in, "num_experts"):
            stand_in.num_experts = num_experts
        own = state.own_forward
        own_forward = None if own is None else own.__func__.__get__(stand_in)  # type: ignore[attr-defined]
        experts = StackedExperts(stand_in, contract, own_forward, state.path)
        return lambda which, rows, x_RM: experts.call(False, sizes_of_some(rows, which, num_experts), x_RM)

    weights = {name: getattr(module, name) for name in contract.weights}
    return ExpertForm(
        {name: (shape_of(each) or ())[1:] for name, each in weights.items()},
        tuple(weights.values()),
        lambda name, index: getattr(module, name).detach()[index],
        called,
    )


def form_of_set(experts: Sequence[nn.Module], path: str) -> ExpertForm:
    """Return the form of the experts of DeepSpeed's layers: modules of one structure.

    Args:
        experts: those of this rank, in evaluation.
        path: of the layer in the model, for messages.
    """
    weights = [_weights_of(each) for each in experts]

    def called(stacks: Mapping[str, torch.Tensor]) -> CalledExperts:
        modules = []
        for index in range(len(next(iter(stacks.values())))):
            memo: dict[int, Any] = {}
            for name, each in weights[0].items():
                weight = stacks[name][index]
                is_parameter = isinstance(each, nn.Parameter)
                memo[id(each)] = nn.Parameter(weight, requires_grad=False) if is_parameter else weight
            # What the memo has is put in the place of what would be copied.
            modules.append(copy.deepcopy(experts[0], memo))
        sets: dict[tuple[int, ...], ExpertSet] = {}

        def call_rows(which: Sequence[int], rows: CallRows, x_RM: torch.Tensor) -> ExpertCall:
            key = tuple(which)
            if key not in sets:
                if len(sets) == _MOST_SETS:
                    del sets[next(iter(sets))]
                sets[key] = ExpertSet([modules[each] for each in key], keep_expert_dim=True, path=path)
            return sets[key].call(False, sizes_of_some(rows, range(len(key)), len(key)), x_RM)

        return call_rows

    return ExpertForm(
        {name: tuple(each.shape) for name, each in weights[0].items()},
        tuple(each for of_expert in weights for each in of_expert.values()),
        lambda name, index: weights[index][name].detach(),
        called,
    )


def _weights_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict([*module.named_parameters(), *module.named_buffers()])


def sizes_of_some(rows: CallRows, which: Sequence[int], num_experts: int) -> CallRows:
    """Return the sizes of the forward for W experts of which only some have rows.

    Args:
        rows: the sizes of places; the first ones are those of these experts, and all others have no rows.
        which: the experts, ascending.
        num_experts: W.
    """
    chunks: list[list[int]] = []
    for of_experts in rows.forward.of_experts:
        sizes = [0] * num_experts
        for expert, size in zip(which, of_experts, strict=False):
            sizes[expert] = size
        chunks.append(sizes)
    ends = torch.tensor(chunks).cumsum(1).to(torch.int32)
    return sizes_of_call(chunks, ends.to(rows.forward.ends.device))
