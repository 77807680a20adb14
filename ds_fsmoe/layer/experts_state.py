# SPDX-License-Identifier: Apache-2.0
"""The state of a module of experts in a Hugging Face model, and its fast path on one rank.

``experts_layer`` calls both in each forward. ``state`` has the common state of all layers; this module adds the
observation of the model's router, the contract of its weights, and adapters.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ds_fsmoe.components.expert_compute import grouped_products as products
from ds_fsmoe.components.expert_compute.adapters import Adapter
from ds_fsmoe.components.expert_compute.contract import Contract, shape_of
from ds_fsmoe.components.expert_compute.gated_forms import Gate
from ds_fsmoe.components.expert_compute.grouped_products import RowGroups
from ds_fsmoe.components.expert_compute.stacked_experts import StackedExperts
from ds_fsmoe.components.expert_compute.stacked_forms import OwnForward
from ds_fsmoe.components.orders.sparse import SimpleOrder
from ds_fsmoe.components.routing import ReplayedRouting
from ds_fsmoe.config.blocks import Dispatch
from ds_fsmoe.distributed.groups import stock_names
from ds_fsmoe.distributed.topology import world_size_now
from ds_fsmoe.execution.call import current_sub_batch
from ds_fsmoe.execution.collectives import FULL
from ds_fsmoe.execution.pipeline import LayerPipeline
from ds_fsmoe.layer.parts import LayerError
from ds_fsmoe.layer.replay import ReplayError, RouterChoice, RouterWatch, is_kept, keep, runs_again
from ds_fsmoe.layer.runtime import refuse
from ds_fsmoe.layer.state import LayerState
from ds_fsmoe.ops import Ops

adapters_now: ContextVar[Mapping[int, tuple[Adapter, ...]]] = ContextVar("adapters", default=MappingProxyType({}))
"""Identity of a layer's state -> the adapters on its weights."""


class ExternalRouter(nn.Module):
    """Represents the model's own router where a layer's gate is needed."""

    drop_tokens = False
    needs_capacity = False
    takes_width = None
    k: int | None = None
    """The number of choices per token in the last call."""

    def describe(self) -> str:
        """Return a few words about it, for the log."""
        return "the model's own router"


@dataclass(eq=False, repr=False)
class ExpertsState(LayerState):
    """Holds the state of a module of experts."""

    contract: Contract | None = None
    own_forward: OwnForward | None = None
    """The module's own forward, where it computes something else than the contract."""
    total_experts: int = 0
    """The number of experts of all ranks, E."""
    ep_size: int = 1
    esp_size: int = 1
    """The number of ranks that share an expert."""
    gate: ExternalRouter = field(default_factory=ExternalRouter)
    choice: RouterChoice | None = None
    """Observes the router, from the call of the block around it to that of the experts."""
    watch: RouterWatch | None = None
    """The hooks on the router's block."""
    passes_on: bool | None = None
    """Whether the router passes on its choice unchanged; ``None`` before it was observed."""
    lent: tuple[weakref.ref, ...] = ()
    """The weights of the last call whose weights were not the known ones."""
    fast_path: FastPath | None = None
    """The last fast path of the layer, for a layer without communication."""
    outermost: tuple[nn.Module, ...] = ()
    """The module around this one that the model calls, if any; in a tuple, since it contains this one."""

    @property
    def group_name(self) -> str:
        """Return DeepSpeed's name of the ranks that share the experts."""
        return stock_names(self.ep_size, self.esp_size).expert_group_name

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """Return the adapters of the present call, as declared by the modules around this one."""
        return adapters_now.get().get(id(self), ())

    def sends_rows(self, gate: Any, dispatch: Dispatch | None = None) -> bool:
        """Return True: these layers use unpadded dispatch only."""
        return True

    def refuse_gradient(self, gradient: torch.Tensor) -> None:
        """Refuse a backward after the engine has ended, as a hook on the layer's output.

        This rank has a part of the experts, whose gradients would include tokens of other ranks without a reduction.

        Raises:
            LayerError: always.
        """
        raise LayerError(
            f"{self.path}: backward after engine.destroy(): this rank has its own experts only, their gradients "
            "include tokens of other ranks, and nothing reduces them. Call ds_fsmoe.make_whole(model) on every "
            "rank before such a forward, or pass the model to ds_fsmoe.initialize again"
        )

    def had_before(self, weights: Sequence[torch.Tensor | None]) -> bool:
        """Return True if the last call of this method had the same weights, so that they are not lent for one call.

        ``torch.func.functional_call`` lends a module other weights for the call.
        """
        present = [each for each in weights if each is not None]
        before, self.lent = self.lent, tuple(map(weakref.ref, present))
        return len(before) == len(present) and all(map(operator.is_, (each() for each in before), present))

    def settle_fault(self, fault: torch.Tensor, in_training: bool) -> None:
        """Refuse choices out of range: now, or on a device, where that would wait, at the engine's step.

        Args:
            fault: a scalar, see :data:`~ds_fsmoe.execution.counts_exchange.FAULTS`.
            in_training: whether the layer is in training.

        Raises:
            RoutingError: a choice is out of range.
        """
        if fault.device.type == "cpu" or self.running is None or self.running.is_over:
            if number := int(fault):
                refuse(self.path, number)
        else:
            self.running.late_faults.add(self.path, fault, in_training)

    def places(self) -> list[int] | None:
        """Return the position of each expert among those of all ranks; ``None`` if none has moved."""
        return None if self.placed is None else list(self.placed.placement.place_of_expert)

    def begin_choice(self) -> None:
        """Start to observe the router, if its choice is replaced or must be recorded as it is made."""
        if self.choice is not None:
            self.end_choice()
        given = self.next_replayed()
        records = self.running is not None and self.running.records_routing
        if given is not None or (not self.passes_on and (records or is_kept())):
            self.choice = RouterChoice(self.total_experts, given)
            self.choice.begin()

    def end_choice(self) -> RouterChoice | None:
        """Return the observed choice, and stop observing."""
        choice, self.choice = self.choice, None
        if choice is not None:
            choice.end()
        return choice

    def settle_choice(self, choice: RouterChoice | None, index_SK: torch.Tensor) -> torch.Tensor:
        """Keep the choice for recomputed functions, and return it: [k, S], as the router made it.

        Args:
            choice: the observation of the router.
            index_SK: [S, k], the argument of the experts.

        Raises:
            ReplayError: a choice is replayed, and the router does not choose by ``torch.topk``.
        """
        given = None if choice is None else choice.replayed
        is_again = runs_again()
        if not is_again:
            self.check_replayed(given, index_SK.shape[0])
        chosen_KS = index_SK.t()
        can_take = choice is None or choice.chosen_KS is not None
        if choice is not None and choice.chosen_KS is not None:
            chosen_KS = choice.chosen_KS
            is_same = choice.index is not None and choice.index.data_ptr() == index_SK.data_ptr()
            self.passes_on = is_same and choice.is_passed_on and chosen_KS.shape == index_SK.t().shape
        elif given is not None and not is_again and not torch.equal(chosen_KS.long(), given.experts_KS.long()):
            raise ReplayError(
                f"{self.path}: its router does not choose {given.experts_KS.shape[0]} experts per token by "
                "torch.topk, so its choice cannot be replaced"
            )
        if is_kept():
            keep(self, ReplayedRouting(chosen_KS.to(torch.int32)) if can_take else None)
        return chosen_KS


# ---- The fast path of a layer without communication: one rank has all experts, and its tokens are one chunk
#
# It consists of parts of the general path (:meth:`~ds_fsmoe.layer.state.LayerRun.token_path`), and returns the same
# bits. It omits what several chunks and ranks need: tasks, lanes, and the sizes of chunks on the host. Every choice has
# a row, those not made behind the last end, so the host does not wait for the device.
#
# Letters: S tokens, E experts, K choices per token, R = K * S rows, M width, H width of an expert, F = 2 * H where
# experts are gated, else H.


def why_general(state: ExpertsState, pipeline: LayerPipeline, experts: StackedExperts) -> str:
    """Return the reason why a layer needs the general path for any call; empty if it does not.

    Args:
        state: the state of the layer.
        pipeline: the pipeline that runs it.
        experts: the experts of this rank.
    """
    contract, collectives = experts.contract, pipeline.collectives
    weights = [getattr(experts.module, each) for each in (contract.up, contract.down)]
    widths = [size for each in weights for size in (shape_of(each) or ())[1:]]
    is_found_late = weights[0].device.type != "cpu"
    # A choice out of range is detected after the forward, and ranks must refuse it together.
    shares_faults = state.running is not None and state.running.late_faults.are_shared
    reasons = {
        "several ranks share the experts": collectives.num_exchanging * collectives.num_sharing > 1,
        "several chunks": pipeline.is_chunked,
        "experts are computed again in the backward": pipeline.recompute,
        "tasks are observed": pipeline.observer is not None or bool(pipeline.on_call),
        "gradients are sent in the backward": pipeline.window is not None,
        "rows have another communication dtype": collectives.comm_dtypes != FULL,
        "hooks": bool(state.parts.callbacks),
        "experts have moved": state.placed is not None,
        "another order": type(state.order) is not SimpleOrder,
        "the module's own forward": experts.own_forward is not None,
        "biases": contract.has_bias,
        "a norm of results": contract.has_post_expert_norm,
        "parameters are shared out": any(hasattr(each, "ds_id") for each in experts.parameters),
        "ranks have no step in common": is_found_late and world_size_now() > 1 and not shares_faults,
        "no grouped product": not products.takes_grouped(widths, {each.dtype for each in weights}, weights[0].device),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


@dataclass(slots=True)
class _Call(RowGroups):
    """Holds one call, with the ranges of its rows."""

    rows_KS: torch.Tensor
    path: FastPath


@dataclass(frozen=True, slots=True)
class FastPath:
    """Runs one layer on the fast path, as long as its pipeline and experts are these."""

    pipeline: LayerPipeline
    experts: StackedExperts
    why_general: str
    """The reason against the fast path; empty without one."""
    module: nn.Module
    gate: Gate
    ops: Ops
    names: tuple[str, str]
    """The names of the two weights."""
    is_transposed: bool
    dtype: torch.dtype
    device: torch.device
    """The device of the weights."""
    below_autograd: Callable[[], AbstractContextManager]
    """Returns a context in which compiled operators skip their own derivatives."""

    @classmethod
    def of(cls, state: ExpertsState, pipeline: LayerPipeline, experts: StackedExperts) -> FastPath:
        """Return the fast path of a layer in its present state."""
        why, contract = why_general(state, pipeline, experts), experts.contract
        of_experts = experts.module, experts.gate, state.order.ops, (contract.up, contract.down)
        below = torch._C._AutoDispatchBelowAutograd if state.order.ops.name == "compiled" else nullcontext
        weight = getattr(experts.module, contract.up)
        of_weights = contract.is_transposed, weight.dtype, weight.device
        return cls(pipeline, experts, why, *of_experts, *of_weights, below)

    def takes(self, x_SM: torch.Tensor, weights_SK: torch.Tensor) -> bool:
        """Return True if a call may use the fast path; checks its tensors only.

        Args:
            x_SM: the tokens.
            weights_SK: the weights of choices.
        """
        if self.why_general or current_sub_batch() is not None or not x_SM.numel() or not weights_SK.numel():
            return False
        up_weight, down_weight = map(self.module._parameters.get, self.names)
        return (
            type(up_weight) is type(down_weight) is nn.Parameter
            and up_weight.dtype is down_weight.dtype is x_SM.dtype is self.dtype
            and up_weight.device == self.device
            and weights_SK.is_floating_point()
            and not torch.is_autocast_enabled(x_SM.device.type)
            # Anomaly detection reads rows that are never written.
            and not torch.is_anomaly_enabled()
        )

    def run(
        self, x_SM: torch.Tensor, index_SK: torch.Tensor, weights_SK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return for each token the sum of its experts' results, [S, M], and the fault of the choices, a scalar.

        Args:
            x_SM: the tokens.
            index_SK: integers: experts, or E for a choice that is not made.
            weights_SK: the weight of each choice.
        """
        up_weight, down_weight = map(self.module._parameters.get, self.names)
        found = self.ops.number_rows(index_SK.t().long(), up_weight.shape[0])
        call = _Call([], found.ends_V, True, found.rows_KS, self)
        needed = x_SM.requires_grad or weights_SK.requires_grad or up_weight.requires_grad or down_weight.requires_grad
        if needed and torch.is_grad_enabled():
            y_SM = _Down.apply(_Up.apply(x_SM, up_weight, call), weights_SK.t(), down_weight, call)
        else:
            with torch.no_grad():
                _, up_RF = self.up(x_SM, up_weight, call)
                _, _, y_SM = self.down(up_RF, weights_SK.t(), down_weight, call)
        return y_SM, found.fault

    def up(self, x_SM: torch.Tensor, weight: torch.Tensor, call: _Call) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows sorted by expert, [R, M], and their up projections, [R, F]."""
        rows_KS = call.rows_KS
        with self.below_autograd():
            x_RM = self.ops.arrange(x_SM, rows_KS, rows_KS.numel())
        return x_RM, products.product(x_RM, weight, self.is_transposed, call)

    def down(
        self, up_RF: torch.Tensor, weights_KS: torch.Tensor, weight: torch.Tensor, call: _Call
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the experts' results, [R, M], the weights of choices in their final dtype, and the sums, [S, M]."""
        y_RM = products.product(self.gate.forward(up_RF), weight, self.is_transposed, call)
        if weights_KS.dtype is not torch.float64:
            weights_KS = weights_KS.float()
        with self.below_autograd():
            return y_RM, weights_KS, self.ops.restore(y_RM, call.rows_KS, weights_KS)


class _Up(torch.autograd.Function):
    """Arranges the tokens and multiplies them by the first weights.

    It is separate from :class:`_Down`, so that the second weights' gradient is passed on before the first is computed.
    """

    @staticmethod
    def forward(ctx: Any, x_SM: torch.Tensor, weight: torch.Tensor, call: _Call) -> torch.Tensor:
        x_RM, up_RF = call.path.up(x_SM, weight, call)
        ctx.save_for_backward(x_RM if weight.requires_grad else None, weight)
        ctx.call = call
        return up_RF

    @staticmethod
    def backward(ctx: Any, dup_RF: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Once differentiable as most backwards, without the cost of the decorator.
        return (_of_up_once if torch.is_grad_enabled() else _of_up)(ctx, dup_RF)


def _of_up(ctx: Any, dup_RF: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x_RM, weight = ctx.saved_tensors
    # Each tensor is freed after its last use, unless the graph is retained; skipped on a torch without the method.
    if clear := getattr(ctx, "maybe_clear_saved_tensors", None):
        clear()
    call, way = ctx.call, ctx.call.path
    of_weight = of_tokens = None
    if x_RM is not None:
        of_weight = products.weight_gradient(x_RM, dup_RF, way.is_transposed, call)
        del x_RM
    if ctx.needs_input_grad[0]:
        dx_RM = products.grouped_rows_gradient(dup_RF, weight, way.is_transposed, call)
        with way.below_autograd():
            of_tokens = way.ops.restore(dx_RM, call.rows_KS, None, dx_RM.dtype, True)
    return of_tokens, of_weight, None


_of_up_once = torch.autograd.function.once_differentiable(_of_up)


class _Down(torch.autograd.Function):
    """Computes the experts' outputs from the first products, and sums them by token."""

    @staticmethod
    def forward(
        ctx: Any, up_RF: torch.Tensor, weights_KS: torch.Tensor, weight: torch.Tensor, call: _Call
    ) -> torch.Tensor:
        y_RM, as_used_KS, y_SM = call.path.down(up_RF, weights_KS, weight, call)
        ctx.save_for_backward(up_RF, y_RM, as_used_KS, weight)
        ctx.call, ctx.dtype = call, weights_KS.dtype
        return y_SM

    @staticmethod
    def backward(ctx: Any, dy_SM: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (_of_down_once if torch.is_grad_enabled() else _of_down)(ctx, dy_SM)


def _of_down(ctx: Any, dy_SM: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    up_RF, y_RM, weights_KS, weight = ctx.saved_tensors
    if clear := getattr(ctx, "maybe_clear_saved_tensors", None):
        clear()
    call, way = ctx.call, ctx.call.path
    with way.below_autograd():
        dy_RM, of_weights_KS = way.ops.restore_backward(dy_SM, y_RM, call.rows_KS, weights_KS)
    del y_RM
    dh_RH = products.grouped_rows_gradient(dy_RM, weight, way.is_transposed, call)
    dup_RF, h_RH = way.gate.backward(up_RF, dh_RH)
    del up_RF, dh_RH
    of_weight = None
    if ctx.needs_input_grad[2]:
        of_weight = products.weight_gradient(h_RH, dy_RM, way.is_transposed, call)
    return dup_RF, of_weights_KS.to(ctx.dtype), of_weight, None


_of_down_once = torch.autograd.function.once_differentiable(_of_down)
