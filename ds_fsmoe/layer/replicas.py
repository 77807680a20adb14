# SPDX-License-Identifier: Apache-2.0
"""Keeps replicas of hot experts on ranks where they are not at home.

A replica has weights and nothing else: no optimizer states, no place in a checkpoint, no share in the norm. Its weights
come from the expert's home once after each optimizer step, ahead of the first call of the layer. What its rows add to
the weights' gradients goes home in the backward, right behind that of the layer: autograd adds it to what the home has,
and DeepSpeed sees one gradient of each parameter, as ever.

Both ways are one all-to-all among the ranks that share the experts, of sizes that follow from the placement.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_fsmoe.components.expert_compute.contract import contract_of, shape_of
from ds_fsmoe.distributed.waits import waiting
from ds_fsmoe.planning.expert_placement import EMPTY, ExpertPlacement


@dataclass(frozen=True)
class Trip:
    """Which experts of this rank have replicas on other ranks, and which replicas are in the spare places here."""

    sends: tuple[tuple[int, ...], ...]
    """For each rank the numbers, on this rank, of the experts at home here that it has a replica of."""
    receives: tuple[tuple[int, ...], ...]
    """For each rank the numbers of the spare places here with a replica of an expert at home there."""

    @staticmethod
    def of(placement: ExpertPlacement, rank: int) -> Trip:
        """Return what one rank sends and receives; experts for a rank come in the order of its spare places.

        Args:
            placement: where experts are.
            rank: this rank, in the order of the EP group.
        """
        sends: list[list[int]] = [[] for _ in range(placement.num_ranks)]
        receives: list[list[int]] = [[] for _ in range(placement.num_ranks)]
        for place, expert in enumerate(placement.expert_of_place):
            there, number = divmod(place, placement.per_rank)
            if number < placement.num_local or expert == EMPTY:
                continue
            home, index = divmod(placement.home_of_expert[expert], placement.per_rank)
            if home == rank:
                sends[there].append(index)
            if there == rank:
                receives[home].append(number - placement.num_local)
        return Trip(tuple(map(tuple, sends)), tuple(map(tuple, receives)))


class Replicas:
    """Holds the spare places of one layer on this rank.

    Args:
        homes: the module with the stacked weights of this rank's experts, or these experts one by one.
        num_spare: the number of spare places.
        group: the ranks that share the experts, for what the thread sends that calls the layer.
    """

    def __init__(self, homes: nn.Module | Sequence[nn.Module], num_spare: int, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._homes = homes
        self.modules: tuple[nn.Module, ...]
        """The experts in the spare places: one module with stacked weights, or one for each place."""
        if isinstance(homes, nn.Module):
            self._names = contract_of(homes).weights
            self.modules = (_stacked_like(homes, self._names, num_spare),)
        else:
            self._names = ()
            self.modules = tuple(_like(homes[0]) for _ in range(num_spare))
        self._trip: Trip | None = None
        self._is_stale = True

    @property
    def weights(self) -> list[torch.Tensor]:
        """The parameters of the spare places: those of a name for all, or those of one place after another."""
        return self._parameters_of(self.modules[0] if self._names else self.modules)

    def _parameters_of(self, experts: nn.Module | Sequence[nn.Module]) -> list[torch.Tensor]:
        if isinstance(experts, nn.Module):
            return [getattr(experts, name) for name in self._names]
        return [parameter for expert in experts for parameter in expert.parameters()]

    def _of_expert(self, tensors: Sequence[Any], index: int) -> list[torch.Tensor]:
        """Return the part of one expert, views of tensors that lie as parameters do."""
        if self._names:
            return [each[index] for each in tensors]
        per_expert = len(list(self.modules[0].parameters()))
        return list(tensors[index * per_expert : (index + 1) * per_expert])

    def place(self, placement: ExpertPlacement, rank: int) -> None:
        """Have the replicas of a placement from the next call on. The same on every rank.

        Args:
            placement: where experts are.
            rank: this rank, in the order of the EP group.
        """
        self._trip, self._is_stale = (Trip.of(placement, rank) if placement.num_replicas else None), True

    def weights_changed(self) -> None:
        """Take note that the experts have changed. Every rank calls it at the same place."""
        self._is_stale = True

    def be_like_homes(self) -> None:
        """Take over from the homes whether they are in training, and which of their parameters train."""
        first = self._homes if isinstance(self._homes, nn.Module) else self._homes[0]
        for module in self.modules:
            if module.training != first.training:
                module.train(first.training)
        homes = self._parameters_of(self._homes)
        for at, own in enumerate(self.weights):
            home = homes[at % len(homes)]
            if own.requires_grad != home.requires_grad:
                own.requires_grad_(home.requires_grad)

    def inputs(self) -> list[torch.Tensor]:
        """Return what stands for :attr:`weights` in the graph of a call. Collective where weights have changed."""
        self.be_like_homes()
        if self._trip is None:
            return [each.detach() for each in self.weights]
        homes = self._parameters_of(self._homes)
        # The first call after a step brings the weights; when a forward is run again they are there.
        if self._is_stale:
            self._is_stale = False
            self._bring(self._trip, homes)
        return list(_ToReplicas.apply(self, *homes))

    @torch.no_grad()
    def _bring(self, trip: Trip, homes: Sequence[torch.Tensor]) -> None:
        targets = [[self._of_expert(self.weights, number) for number in numbers] for numbers in trip.receives]
        sent = [[self._of_expert(homes, index) for index in of_rank] for of_rank in trip.sends]
        for target, values in self._exchanged(sent, targets):
            target.data.copy_(values)

    @torch.no_grad()
    def send_home(
        self, gradients: Sequence[torch.Tensor | None], like: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Return the sums of what replicas elsewhere add to the gradients of the experts here. Collective.

        Args:
            gradients: those of the spare places here; ``None``: zero.
            like: tensors without memory, of the shapes and types of the homes' parameters.

        Returns:
            ``None`` for a parameter to which nothing is added.
        """
        trip = self._trip
        assert trip is not None
        whole = [
            torch.zeros_like(weight) if each is None else each.to(weight.dtype)
            for each, weight in zip(gradients, self.weights, strict=True)
        ]
        # Of stacked weights all experts have one gradient, of others each its own.
        added = {0 if self._names else index for of_rank in trip.sends for index in of_rank}
        per_expert, device = len(self.weights) // (1 if self._names else len(self.modules)), self.weights[0].device
        sums = [
            torch.zeros_like(each, device=device) if at // per_expert in added else None for at, each in enumerate(like)
        ]
        sent = [[self._of_expert(whole, number) for number in numbers] for numbers in trip.receives]
        targets = [[self._of_expert(sums, index) for index in of_rank] for of_rank in trip.sends]
        # In the order of ranks, so that every run rounds alike.
        for target, values in self._exchanged(sent, targets):
            target += values
        return sums

    def _exchanged(
        self, sent: Sequence[Sequence[Sequence[torch.Tensor]]], targets: Sequence[Sequence[Sequence[torch.Tensor]]]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Send the tensors of experts to each rank, and return what comes with what it is for.

        Args:
            sent: for each rank, for each expert that it gets, the tensors.
            targets: for each rank, for each expert that comes from it, tensors of the same shapes and types.
        """
        packed = [[_as_bytes(each) for expert in of_rank for each in expert] for of_rank in sent]
        wanted = [[each for expert in of_rank for each in expert] for of_rank in targets]
        sizes = [sum(each.nbytes for each in of_rank) for of_rank in wanted]
        parts = [part for of_rank in packed for part in of_rank]
        device = self.weights[0].device
        arrived = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        packed_bytes = torch.cat(parts) if parts else arrived.new_empty(0)
        sent_sizes = [sum(map(len, of_rank)) for of_rank in packed]
        with waiting("the weights of replicas, or their gradients"):
            dist.all_to_all_single(arrived, packed_bytes, sizes, sent_sizes, group=self._group)
        every = [each for of_rank in wanted for each in of_rank]
        values = arrived.split([each.nbytes for each in every]) if every else ()
        # In memory of its own: elements of a type may not begin just anywhere.
        return [
            (each, part.clone().view(each.dtype).view(each.shape)) for each, part in zip(every, values, strict=True)
        ]


class _ToReplicas(torch.autograd.Function):
    """Has the homes' parameters as inputs and the replicas' as outputs; their values have been brought before."""

    @staticmethod
    def forward(ctx: Any, replicas: Replicas, *homes: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.replicas, ctx.like = replicas, [torch.empty_like(each, device="meta") for each in homes]
        return tuple(each.detach() for each in replicas.weights)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        sums = ctx.replicas.send_home(gradients, ctx.like)
        return None, *(each if needs else None for each, needs in zip(sums, ctx.needs_input_grad[1:], strict=True))


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _stacked_like(experts: nn.Module, names: Sequence[str], num_spare: int) -> nn.Module:
    """Return a module of experts with weights of its own; what is between the products are the same modules."""
    spare, own = copy.copy(experts), {}
    for name in names:
        home = getattr(experts, name)
        weight = torch.zeros(num_spare, *(shape_of(home) or ())[1:], dtype=home.dtype, device=home.device)
        own[name] = nn.Parameter(weight, requires_grad=home.requires_grad)
    spare.__dict__["_parameters"] = {**experts._parameters, **own}
    spare.__dict__["num_experts"] = num_spare
    return spare


def _like(expert: nn.Module) -> nn.Module:
    """Return a module like an expert with weights of its own, all zero."""
    # Whatever hangs on the parameters, such as ranks that share them, is the home's.
    spare = copy.deepcopy(expert)
    for module in spare.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = nn.Parameter(torch.zeros_like(parameter.data), parameter.requires_grad)
    return spare
