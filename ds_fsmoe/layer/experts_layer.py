# SPDX-License-Identifier: Apache-2.0
"""Implements the layer in Hugging Face models: the module of the experts runs our way, and all around it stays theirs.

The model's own router decides and calls ``experts(hidden_states, top_k_index, top_k_weights)``. The module keeps its
parameters' names, its own class as a base, and the experts of this rank; see ``engine/convert_experts.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_fsmoe.components.expert_compute.adapters import Adapter
from ds_fsmoe.components.expert_compute.contract import Contract
from ds_fsmoe.components.expert_compute.stacked_experts import StackedExperts
from ds_fsmoe.components.expert_compute.stacked_forms import OwnForward
from ds_fsmoe.components.routing import Given, Routing
from ds_fsmoe.distributed.groups import stock_names
from ds_fsmoe.layer.expert_shard import TRUSTED, asking
from ds_fsmoe.layer.moe_layer import token_path
from ds_fsmoe.layer.opaque import OpaqueModule
from ds_fsmoe.layer.parts import LayerError, refuse_copy
from ds_fsmoe.layer.recomputed import is_kept, keep, runs_again
from ds_fsmoe.layer.replay import ReplayError
from ds_fsmoe.layer.router_choice import RouterChoice, RouterWatch
from ds_fsmoe.layer.state import LayerState
from ds_fsmoe.observing.instruments import LayerCall

Route = Callable[[torch.Tensor, torch.Tensor | None, dist.ProcessGroup | None], Routing]


_adapters: ContextVar[Mapping[int, tuple[Adapter, ...]]] = ContextVar("adapters", default=MappingProxyType({}))
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
    outermost: tuple[nn.Module, ...] = ()
    """The module around this one that the model calls, if there is one; in a tuple, since it holds this one."""

    @property
    def group_name(self) -> str:
        """DeepSpeed's name of the ranks that share the experts."""
        return stock_names(self.ep_size, self.esp_size).expert_group_name

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """What is added to weights in the call under way, as the modules around this one say."""
        return _adapters.get().get(id(self), ())

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

    def places(self) -> list[int] | None:
        """Return where each expert lies among those of all ranks; ``None`` where none has moved."""
        if self.placed is None:
            return None
        placement = self.placed.placement
        homes = (divmod(home, placement.per_rank) for home in placement.home_of_expert)
        places = [rank * placement.num_local + place for rank, place in homes]
        return None if places == [*range(placement.num_experts)] else places

    def begin_choice(self) -> None:
        """Begin to watch the router, if its choice is given, or has to be known as it makes it."""
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
            self.check_given(given, len(index_SK))
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


class FSMoEExperts(OpaqueModule):
    """Goes before the class of a module of experts, and replaces its forward. Made by conversion, never constructed."""

    fsmoe: ExpertsState
    num_experts: int

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied or pickled by a script, alone or with the model around.

        Raises:
            LayerError: a script asks.
        """
        return super().__reduce_ex__(protocol) if asking() in TRUSTED else refuse_copy(self.fsmoe.path)

    @property
    def label(self) -> str:
        """The label of the layer, in traces."""
        return self.fsmoe.label

    @property
    def pipeline(self) -> Any:
        """The pipeline that runs the layer; changed by its state alone."""
        return self.fsmoe.pipeline

    @property
    def gate(self) -> GivenRouter:
        """What stands for the model's router."""
        return self.fsmoe.gate

    @property
    def experts(self) -> nn.Module:
        """The module with the experts' parameters: this one."""
        return self

    @property
    def ep_size(self) -> int:
        """The ranks over which the experts are spread."""
        return self.fsmoe.ep_size

    @property
    def ep_group_name(self) -> str:
        """DeepSpeed's name of these ranks."""
        return self.fsmoe.group_name

    @property
    def num_local_experts(self) -> int:
        """The number of experts of this rank."""
        return self.fsmoe.total_experts // self.fsmoe.ep_size

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return for each token the sum of its experts' results, times their weights.

        Args:
            hidden_states: [S, M].
            top_k_index: [S, k] integers: experts of all ranks, or their number for none.
            top_k_weights: [S, k].

        Raises:
            LayerError: weights of another shape.
            RoutingError: an index is out of range, on any rank; raised on every rank that shares the experts.
        """
        state = self.fsmoe
        choice = state.end_choice()
        state.gate.k = top_k_index.shape[-1]
        shape = hidden_states.shape
        x_SM = hidden_states.reshape(-1, shape[-1])
        # Of no tokens torch cannot tell how many choices each has.
        sizes = [len(x_SM), -1] if len(x_SM) else [0, top_k_index.shape[-1]]
        index_SK, weights_SK = (each.reshape(sizes) for each in (top_k_index, top_k_weights))
        if weights_SK.shape != index_SK.shape:
            # Some families of the first releases mean a weight for each expert, and some the first k of those.
            raise LayerError(
                f"{state.path}: the router gave weights {list(weights_SK.shape)} for choices {list(index_SK.shape)}: "
                "must be one for each choice; a later transformers has this right"
            )
        chosen_KS = state.settle_choice(choice, index_SK)
        state.last_shape = x_SM.shape
        forward = state.begin_forward(self.training)
        if state.pipeline is None:
            state.run_alone(None)
        for check in state.checks:
            check(self, x_SM)

        def route(x_SM: torch.Tensor, used_token_S: torch.Tensor | None, group: dist.ProcessGroup | None) -> Routing:
            return replace(routing_of_choices(index_SK, weights_SK, state.total_experts), experts_KS=chosen_KS)

        output = self._run(x_SM, route, forward).view(shape).to(hidden_states.dtype)
        if output.requires_grad and state.is_a_part_without_engine:
            output.register_hook(state.refuse_gradient)
        return output

    def _run(self, x_SM: torch.Tensor, route: Route, forward: Any) -> torch.Tensor:
        """Run the experts on tokens, [S, M], in a forward whose kind and number go with the counts."""
        state = self.fsmoe
        local = self.local_experts()
        placed = state.placed_call(local.parameters)
        group = state.capacity_group
        of_layer = state.label, state.path, self.training, x_SM, group, route, state.pipeline, local, local
        call = LayerCall(*of_layer, in_rows=True)
        for show in state.instruments:
            show(call)
        result = token_path(
            x_SM,
            None,
            gate=call.gate,
            order=state.order,
            pipeline=call.pipeline,
            experts=call.experts,
            group=group,
            callbacks=state.parts.callbacks,
            name=state.path,
            in_rows=True,
            placed=placed,
            forward=forward,
        )
        return result.output

    def local_experts(self) -> StackedExperts:
        """Return the experts of this rank."""
        state = self.fsmoe
        if state.adapters:
            return StackedExperts(self, state.contract, state.own_forward, state.path, state.adapters)
        if state.known_experts is None:
            spare = None if state.replicas is None else state.replicas.modules[0]
            experts = StackedExperts(self, state.contract, state.own_forward, state.path, spare=spare)
            state.known_experts = list(experts.parameters), experts
        return state.known_experts[1]

    @contextmanager
    def adapted(self, adapters: Sequence[Adapter]) -> Iterator[None]:
        """Add these to weights in calls meanwhile, and those that were there already.

        Args:
            adapters: with A and B of this rank's experts.
        """
        state = self.fsmoe
        # For this call alone: while it pauses, another half of the batch may come here.
        token = _adapters.set({**_adapters.get(), id(state): (*state.adapters, *adapters)})
        try:
            yield
        finally:
            _adapters.reset(token)

    def route_unheard(
        self, x_SM: torch.Tensor, used_token_S: torch.Tensor | None, group: dist.ProcessGroup | None
    ) -> Routing:
        """Return a decision about made-up tokens, with a row for each choice."""
        num_choices = self.fsmoe.gate.k or 1
        rows_KS = torch.arange(num_choices * len(x_SM), device=x_SM.device).view(num_choices, len(x_SM))
        counts_E = rows_KS.new_full((1,), rows_KS.numel())
        weights_KS = x_SM.new_ones(rows_KS.shape)
        return Routing(rows_KS, weights_KS, x_SM.new_zeros(()), counts_E, rows_KS.numel(), 1)

    def run_without_tokens(self, shape: torch.Size, like: torch.Tensor) -> torch.Tensor:
        """Take part in a forward of the other ranks, with tokens that choose nothing.

        Args:
            shape: the shape of the tokens, [S, M].
            like: a tensor that the result is to hang on.

        Returns:
            A scalar, 0.
        """
        weight = next(self.parameters())
        x_SM = torch.zeros(shape, dtype=weight.dtype, device=weight.device) + like.to(weight)
        # As many choices as others have, which is all that is to be the same in what ranks decide alike.
        index_SK = torch.full((len(x_SM), self.fsmoe.gate.k or 1), self.fsmoe.total_experts, device=weight.device)
        called = self.fsmoe.outermost[0] if self.fsmoe.outermost else self
        return 0.0 * called(x_SM, index_SK, torch.zeros_like(index_SK, dtype=weight.dtype)).float().sum()

    def why_called(self) -> str | None:
        """Return why the layer must not be cut: ``None``, since hooks on the module see its own call."""
        return None

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Make the process groups. DeepSpeed comes here layer by layer on every rank."""
        if self.fsmoe.running is not None:
            self.fsmoe.connect(self.fsmoe.ep_size, self.gate)


def own_class_of(module: FSMoEExperts) -> type[nn.Module]:
    """Return the class that a converted module had before."""
    return type(module).__bases__[1]


@dataclass(frozen=True)
class HuggingFaceLayer:
    """Shows a module of experts as others see a ``deepspeed.moe.layer.MoE``."""

    deepspeed_moe: FSMoEExperts

    enable_expert_tensor_parallelism = False

    @property
    def num_experts(self) -> int:
        """The number of experts of all ranks."""
        return self.deepspeed_moe.fsmoe.total_experts

    @property
    def num_local_experts(self) -> int:
        """The number of experts of this rank."""
        return self.deepspeed_moe.num_local_experts

    @property
    def ep_size(self) -> int:
        """The ranks over which the experts are spread."""
        return self.deepspeed_moe.ep_size

    @property
    def expert_group_name(self) -> str:
        """DeepSpeed's name of these ranks."""
        return self.deepspeed_moe.ep_group_name

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters of the experts."""
        return self.deepspeed_moe.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parameters of the experts by name."""
        return self.deepspeed_moe.named_parameters()


def routing_of_choices(index_SK: torch.Tensor, weights_SK: torch.Tensor, num_experts: int) -> Routing:
    """Return a router's choices as a decision of ours.

    Args:
        index_SK: [S, K] integers: experts, or E for none.
        weights_SK: [S, K] float.
        num_experts: E.
    """
    index_KS = index_SK.t().long()
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=index_KS.device)
    counts_E = counts.scatter_add_(0, index_KS.reshape(-1).clamp(0, num_experts), torch.ones_like(index_KS).reshape(-1))
    # With one slot per expert the slots are the experts; rows need no more.
    return Routing(index_KS, weights_SK.t(), weights_SK.new_zeros(()), counts_E[:num_experts], 1, num_experts)
