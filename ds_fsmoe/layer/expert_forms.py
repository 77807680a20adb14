# SPDX-License-Identifier: Apache-2.0
"""Calls experts with weights that lie elsewhere than in the model, in one tensor of several experts for each weight.

Letters: e experts on this rank, W experts with weights in one tensor.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ds_fsmoe.components.expert_compute.calls import ExpertSet
from ds_fsmoe.components.expert_compute.contract import shape_of
from ds_fsmoe.components.expert_compute.row_call import CallRows, RowCall, sizes_of_call
from ds_fsmoe.components.expert_compute.stacked_experts import StackedExperts
from ds_fsmoe.layer.experts_layer import FSMoEExperts

_MOST_SETS = 64
"""The most sets of experts of a layer for which what was worked out is kept."""


CalledExperts = Callable[[Sequence[int], CallRows, torch.Tensor], RowCall]
"""Makes a call of some of W experts whose weights lie in one tensor of each kind. It takes their ascending numbers, the
sizes of the rows, of which the first are those of these experts and all others are 0, and the rows."""


class ExpertForm(ABC):
    """The experts of this rank in one layer, and how others with their structure are called."""

    names: tuple[str, ...]
    """The names of the weights of an expert."""
    parameters: tuple[torch.Tensor, ...]
    """All that the weights are in."""

    @property
    def device(self) -> torch.device:
        """The device on which they are computed."""
        return self.parameters[0].device

    @abstractmethod
    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight of one expert, also where it is shared out."""

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the type of a weight."""
        return self.parameters[self.names.index(name)].dtype

    @abstractmethod
    def own(self, name: str, index: int) -> torch.Tensor:
        """Return a weight of one of the experts here, which must be whole."""

    @abstractmethod
    def called(self, stacks: Mapping[str, torch.Tensor]) -> CalledExperts:
        """Return experts with these weights, [W, ...] each."""


class StackedForm(ExpertForm):
    """The experts of Hugging Face's models: one module.

    Args:
        module: the module, in evaluation.
    """

    def __init__(self, module: FSMoEExperts) -> None:
        self._module = module
        contract = module.fsmoe.contract
        assert contract is not None
        self._contract = contract
        self.names = contract.weights
        self.parameters = tuple(getattr(module, name) for name in self.names)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight of one expert, also where it is shared out."""
        return (shape_of(getattr(self._module, name)) or ())[1:]

    def own(self, name: str, index: int) -> torch.Tensor:
        """Return a weight of one of the experts here, which must be whole."""
        return getattr(self._module, name).detach()[index]

    def called(self, stacks: Mapping[str, torch.Tensor]) -> CalledExperts:
        """Return experts with these weights, [W, ...] each."""
        state = self._module.fsmoe
        stand_in = copy.copy(self._module)
        # It has the module's own functions, norm and flags, and other weights.
        stand_in._parameters = {
            **self._module._parameters,
            **{name: nn.Parameter(each, requires_grad=False) for name, each in stacks.items()},
        }
        num_experts = len(next(iter(stacks.values())))
        if hasattr(stand_in, "num_experts"):
            stand_in.num_experts = num_experts
        own = state.own_forward
        own_forward = None if own is None else own.__func__.__get__(stand_in)  # type: ignore[attr-defined]
        experts = StackedExperts(stand_in, self._contract, own_forward, state.path)
        return lambda which, rows, x_RM: experts.call_rows(False, sizes_of_some(rows, which, num_experts), x_RM)


class SetForm(ExpertForm):
    """The experts of DeepSpeed's layers: modules of one structure.

    Args:
        modules: those of this rank, in evaluation.
        path: of the layer in the model, for messages.
    """

    def __init__(self, modules: Sequence[nn.Module], path: str) -> None:
        self._modules, self._path = tuple(modules), path
        self._weights = [_weights_of(each) for each in modules]
        self.names = tuple(self._weights[0])
        self.parameters = tuple(each for weights in self._weights for each in weights.values())

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight of one expert."""
        return tuple(self._weights[0][name].shape)

    def own(self, name: str, index: int) -> torch.Tensor:
        """Return a weight of one of the experts here."""
        return self._weights[index][name].detach()

    def called(self, stacks: Mapping[str, torch.Tensor]) -> CalledExperts:
        """Return experts with these weights, [W, ...] each."""
        modules = []
        for index in range(len(next(iter(stacks.values())))):
            memo: dict[int, Any] = {}
            for name, each in self._weights[0].items():
                weight = stacks[name][index]
                is_parameter = isinstance(each, nn.Parameter)
                memo[id(each)] = nn.Parameter(weight, requires_grad=False) if is_parameter else weight
            # What the memo has is put in the place of what would be copied.
            modules.append(copy.deepcopy(self._modules[0], memo))
        sets: dict[tuple[int, ...], ExpertSet] = {}

        def call_rows(which: Sequence[int], rows: CallRows, x_RM: torch.Tensor) -> RowCall:
            key = tuple(which)
            if key not in sets:
                if len(sets) == _MOST_SETS:
                    del sets[next(iter(sets))]
                sets[key] = ExpertSet([modules[each] for each in key], keep_expert_dim=True, path=self._path)
            return sets[key].call_rows(False, sizes_of_some(rows, range(len(key)), len(key)), x_RM)

        return call_rows


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
    for chunk in rows.forward.chunks:
        sizes = [0] * num_experts
        for expert, size in zip(which, chunk.of_experts, strict=False):
            sizes[expert] = size
        chunks.append(sizes)
    ends = torch.tensor(chunks).cumsum(1).to(torch.int32)
    return sizes_of_call(chunks, ends.to(rows.forward.ends.device))
