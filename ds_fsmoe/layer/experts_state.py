# SPDX-License-Identifier: Apache-2.0
"""Holds all of ours that a module of experts in a Hugging Face model has."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import nn

from ds_fsmoe.components.expert_compute.adapters import Adapter
from ds_fsmoe.components.expert_compute.contract import Contract
from ds_fsmoe.components.expert_compute.stacked_forms import OwnForward
from ds_fsmoe.components.routing import Given
from ds_fsmoe.distributed.groups import stock_names
from ds_fsmoe.layer.late_faults import refuse
from ds_fsmoe.layer.one_rank import ShortWay
from ds_fsmoe.layer.parts import LayerError
from ds_fsmoe.layer.recomputed import is_kept, keep, runs_again
from ds_fsmoe.layer.replay import ReplayError
from ds_fsmoe.layer.router_choice import RouterChoice, RouterWatch
from ds_fsmoe.layer.state import LayerState

adapters_now: ContextVar[Mapping[int, tuple[Adapter, ...]]] = ContextVar("adapters", default=MappingProxyType({}))
"""Identity of a layer's state -> what is added to its weights."""


class GivenRouter(nn.Module):
    """Stands for a router that is the model's own, where a layer is asked for its gate."""

    drop_tokens = False
    needs_capacity = False
    k: int | None = None
    """The number of choices per token, as the last call had it."""

    def describe(self) -> str:
        """Describe it, for the log."""
        return "the model's own router"


@dataclass(eq=False, repr=False)
class ExpertsState(LayerState):
    """Holds what a module of experts has of ours."""

    contract: Contract | None = None
    own_forward: OwnForward | None = None
    """The module's own forward, where it computes something else than the contract says."""
    total_experts: int = 0
    """The number of experts of all ranks, E."""
    ep_size: int = 1
    esp_size: int = 1
    """The ranks that share an expert."""
    gate: GivenRouter = field(default_factory=GivenRouter)
    choice: RouterChoice | None = None
    """What is watched of the router, from the call of the block around it to that of the experts."""
    watch: RouterWatch | None = None
    """The hooks that see the router's block being called."""
    passes_on: bool | None = None
    """Whether the router hands on what it chose as it is; ``None`` as long as that has not been seen."""
    lent: tuple[weakref.ref, ...] = ()
    """The weights of the last call that had others than those known."""
    short_way: ShortWay | None = None
    """How the layer is run where it exchanges nothing, as it was found to be last."""
    outermost: tuple[nn.Module, ...] = ()
    """The module around this one that the model calls, if there is one; in a tuple, since it holds this one."""

    @property
    def group_name(self) -> str:
        """DeepSpeed's name of the ranks that share the experts."""
        return stock_names(self.ep_size, self.esp_size).expert_group_name

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """What is added to weights in the call under way, as the modules around this one say."""
        return adapters_now.get().get(id(self), ())

    @property
    def is_a_part_without_engine(self) -> bool:
        """Whether this rank has a part of the experts, and the engine that could reduce their gradients has ended."""
        return self.running is not None and self.running.is_over and self.ep_size * self.esp_size > 1

    def refuse_gradient(self, gradient: torch.Tensor) -> None:
        """Refuse a backward whose gradients would be the tokens' of other ranks, as a hook on the layer's output.

        Raises:
            LayerError: always.
        """
        raise LayerError(
            f"{self.path}: a backward after engine.destroy(): ds_fsmoe has left this rank its own experts only, whose "
            "gradients hold the tokens of other ranks, and nothing reduces them. Call ds_fsmoe.make_whole(model) on "
            "every rank before such a forward, or give the model to ds_fsmoe.initialize again"
        )

    def had_before(self, weights: Sequence[torch.Tensor | None]) -> bool:
        """Return whether these weights were in use at the last call of this method as well, and not for one call alone.

        ``torch.func.functional_call`` lends a module others, which go with the call.
        """
        present = [each for each in weights if each is not None]
        before, self.lent = self.lent, tuple(map(weakref.ref, present))
        return len(before) == len(present) and all(map(operator.is_, (each() for each in before), present))

    @property
    def shares_faults(self) -> bool:
        """Whether ranks tell each other of choices out of range at their step."""
        return self.running is not None and self.running.late_faults.are_shared

    def settle_fault(self, fault: torch.Tensor, in_training: bool) -> None:
        """Refuse choices that are out of range: now, or on a device, where that would wait, with the engine's step.

        Args:
            fault: a scalar, see :data:`~ds_fsmoe.execution.counts_exchange.FAULTS`.
            in_training: whether the layer is in training.

        Raises:
            RoutingError: something is wrong with them.
        """
        if fault.device.type == "cpu" or self.running is None or self.running.is_over:
            if number := int(fault):
                refuse(self.path, number)
        else:
            self.running.late_faults.add(self.path, fault, in_training)

    def places(self) -> list[int] | None:
        """Return where each expert lies among those of all ranks; ``None`` where none has moved."""
        return None if self.placed is None else list(self.placed.placement.home_of_expert)

    def begin_choice(self) -> None:
        """Begin to watch the router, if its choice is given, or has to be known as it makes it."""
        if self.choice is not None:
            self.end_choice()
        given = self.next_given()
        records = self.running is not None and self.running.records_routing
        if given is not None or (not self.passes_on and (records or is_kept())):
            self.choice = RouterChoice(self.total_experts, given)
            self.choice.begin()

    def end_choice(self) -> RouterChoice | None:
        """Return what was watched, and watch no more."""
        choice, self.choice = self.choice, None
        if choice is not None:
            choice.end()
        return choice

    def settle_choice(self, choice: RouterChoice | None, index_SK: torch.Tensor) -> torch.Tensor:
        """Keep what was chosen for functions that run again, and return it: [k, S], as the router made it.

        Args:
            choice: what was watched of the router.
            index_SK: [S, k], what the experts were called with.

        Raises:
            ReplayError: a choice was given, and the router makes its own in another way.
        """
        given = None if choice is None else choice.given
        is_again = runs_again()
        if not is_again:
            self.check_given(given, index_SK.shape[0])
        chosen_KS = index_SK.t()
        can_take = choice is None or choice.chosen_KS is not None
        if choice is not None and choice.chosen_KS is not None:
            chosen_KS = choice.chosen_KS
            is_same = choice.index is not None and choice.index.data_ptr() == index_SK.data_ptr()
            self.passes_on = is_same and choice.is_passed_on and chosen_KS.shape == index_SK.t().shape
        elif given is not None and not is_again and not torch.equal(chosen_KS.long(), given.experts_KS.long()):
            raise ReplayError(
                f"{self.path}: its router does not choose {given.experts_KS.shape[0]} experts for a token by "
                "torch.topk, so no other choice can be given to it, and the one that was given is not its own"
            )
        keep(self, Given(chosen_KS.to(torch.int32)) if can_take and is_kept() else None)
        return chosen_KS
