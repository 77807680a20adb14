# SPDX-License-Identifier: Apache-2.0
"""The short way of a layer that exchanges nothing: one rank has all experts, and its tokens are one chunk.

It is made of the parts of the general way (:func:`~ds_fsmoe.layer.moe_layer.path_of_tokens`) and gives the same bits.
What it leaves out is what several chunks and ranks need: tasks, lanes, and the sizes of chunks on the host. Every
choice has a row, those of none behind the last end, so nothing waits for the device.

Letters: S tokens, E experts, K choices per token, R = K * S rows, M width, H width of an expert, F = 2 * H where
experts are gated, else H.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ds_fsmoe.components.expert_compute import grouped_products as products
from ds_fsmoe.components.expert_compute.contract import shape_of
from ds_fsmoe.components.expert_compute.gated_forms import Gate
from ds_fsmoe.components.expert_compute.grouped_products import Groups
from ds_fsmoe.components.expert_compute.stacked_experts import StackedExperts
from ds_fsmoe.components.orders.sparse import SimpleOrder
from ds_fsmoe.distributed.topology import world_size_now
from ds_fsmoe.execution.pauses import half_now
from ds_fsmoe.execution.pipeline import Pipeline
from ds_fsmoe.execution.wires import FULL
from ds_fsmoe.ops import Ops

if TYPE_CHECKING:
    from ds_fsmoe.layer.experts_state import ExpertsState


def why_general(state: ExpertsState, pipeline: Pipeline, experts: StackedExperts) -> str:
    """Return why a layer takes the general way whatever it is called with; empty where it need not.

    Args:
        state: the state of the layer.
        pipeline: the pipeline that runs it.
        experts: the experts of this rank.
    """
    contract, collectives = experts.contract, pipeline.collectives
    weights = [getattr(experts.module, each) for each in (contract.up, contract.down)]
    widths = [size for each in weights for size in (shape_of(each) or ())[1:]]
    is_found_late = weights[0].device.type != "cpu"
    reasons = {
        "several ranks share the experts": collectives.num_exchanging * collectives.num_sharing > 1,
        "several chunks": pipeline.is_cut,
        "experts are computed again in the backward": pipeline.recompute,
        "tasks are observed": pipeline.observer is not None or bool(pipeline.on_call),
        "gradients travel in the backward": pipeline.window is not None,
        "rows travel in another format": collectives.wires != FULL,
        "hooks": bool(state.parts.callbacks),
        "experts have moved": state.placed is not None,
        "another order": type(state.order) is not SimpleOrder,
        "the module's own forward": experts.own_forward is not None,
        "biases": contract.has_bias,
        "a norm of results": contract.has_post_expert_norm,
        "parameters are shared out": any(hasattr(each, "ds_id") for each in experts.parameters),
        # A choice out of range is found behind the forward, and ranks have to refuse it together.
        "ranks have no step in common": is_found_late and world_size_now() > 1 and not state.shares_faults,
        "no grouped product": not products.takes_grouped(widths, {each.dtype for each in weights}, weights[0].device),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


@dataclass(slots=True)
class _Call(Groups):
    """One call: where its rows lie."""

    rows_KS: torch.Tensor
    way: ShortWay


@dataclass(frozen=True, slots=True)
class ShortWay:
    """Runs one layer the short way, as long as its pipeline and experts are these."""

    pipeline: Pipeline
    experts: StackedExperts
    why_general: str
    """The reason against it; empty where there is none."""
    module: nn.Module
    gate: Gate
    ops: Ops
    names: tuple[str, str]
    """The names of the two weights."""
    is_transposed: bool
    dtype: torch.dtype
    device: torch.device
    """Those of the weights."""
    below_autograd: Callable[[], AbstractContextManager]
    """Within this no operator asks for derivatives of its own, which compiled ones have."""

    @classmethod
    def of(cls, state: ExpertsState, pipeline: Pipeline, experts: StackedExperts) -> ShortWay:
        """Return the short way of a layer as it is now."""
        why, contract = why_general(state, pipeline, experts), experts.contract
        of_experts = experts.module, experts.gate, state.order.ops, (contract.up, contract.down)
        below = torch._C._AutoDispatchBelowAutograd if state.order.ops.name == "compiled" else nullcontext
        weight = getattr(experts.module, contract.up)
        of_weights = contract.is_transposed, weight.dtype, weight.device
        return cls(pipeline, experts, why, *of_experts, *of_weights, below)

    def takes(self, x_SM: torch.Tensor, weights_SK: torch.Tensor) -> bool:
        """Return whether a call goes the short way, in which nothing but the tensors is looked at.

        Args:
            x_SM: the tokens.
            weights_SK: the weights of choices.
        """
        if self.why_general or half_now() is not None or not x_SM.numel() or not weights_SK.numel():
            return False
        up_weight, down_weight = map(self.module._parameters.get, self.names)
        return (
            type(up_weight) is type(down_weight) is nn.Parameter
            and up_weight.dtype is down_weight.dtype is x_SM.dtype is self.dtype
            and up_weight.device == self.device
            and weights_SK.is_floating_point()
            and not torch.is_autocast_enabled(x_SM.device.type)
            # It looks at rows that nobody has written.
            and not torch.is_anomaly_enabled()
        )

    def run(
        self, x_SM: torch.Tensor, index_SK: torch.Tensor, weights_SK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return for each token the sum of its experts' results, [S, M], and what is wrong with the choices, a scalar.

        Args:
            x_SM: the tokens.
            index_SK: integers: experts, or E for none.
            weights_SK: of each choice its weight.
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
        """Return the rows of the tokens, [R, M], and their first products, [R, F]."""
        rows_KS = call.rows_KS
        with self.below_autograd():
            x_RM = self.ops.arrange(x_SM, rows_KS, rows_KS.numel())
        return x_RM, products.product(x_RM, weight, self.is_transposed, call)

    def down(
        self, up_RF: torch.Tensor, weights_KS: torch.Tensor, weight: torch.Tensor, call: _Call
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the experts' results, [R, M], the weights of choices as they are used, and the sums, [S, M]."""
        y_RM = products.product(self.gate.forward(up_RF), weight, self.is_transposed, call)
        if weights_KS.dtype is not torch.float64:
            weights_KS = weights_KS.float()
        with self.below_autograd():
            return y_RM, weights_KS, self.ops.restore(y_RM, call.rows_KS, weights_KS)


class _Up(torch.autograd.Function):
    """Arranges the tokens and multiplies them with the first weights.

    It is a function of its own so that the gradient of the second weights leaves before that of the first is made.
    """

    @staticmethod
    def forward(ctx: Any, x_SM: torch.Tensor, weight: torch.Tensor, call: _Call) -> torch.Tensor:
        x_RM, up_RF = call.way.up(x_SM, weight, call)
        ctx.save_for_backward(x_RM if weight.requires_grad else None, weight)
        ctx.call = call
        return up_RF

    @staticmethod
    def backward(ctx: Any, dup_RF: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # As most backwards are, without the cost of saying so.
        return (_of_up_once if torch.is_grad_enabled() else _of_up)(ctx, dup_RF)


def _of_up(ctx: Any, dup_RF: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x_RM, weight = ctx.saved_tensors
    # Each goes when it has been used, unless the graph is kept; a torch that cannot do it yet goes without.
    if clear := getattr(ctx, "maybe_clear_saved_tensors", None):
        clear()
    call, way = ctx.call, ctx.call.way
    of_weight = of_tokens = None
    if x_RM is not None:
        of_weight = products.weight_gradient(x_RM, dup_RF, way.is_transposed, call)
        del x_RM
    if ctx.needs_input_grad[0]:
        dx_RM = products.rows_gradient(dup_RF, weight, way.is_transposed, call)
        with way.below_autograd():
            of_tokens = way.ops.restore(dx_RM, call.rows_KS, None, dx_RM.dtype, True)
    return of_tokens, of_weight, None


_of_up_once = torch.autograd.function.once_differentiable(_of_up)


class _Down(torch.autograd.Function):
    """Makes of the first products what the experts return, and sums that up by token."""

    @staticmethod
    def forward(
        ctx: Any, up_RF: torch.Tensor, weights_KS: torch.Tensor, weight: torch.Tensor, call: _Call
    ) -> torch.Tensor:
        y_RM, as_used_KS, y_SM = call.way.down(up_RF, weights_KS, weight, call)
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
    call, way = ctx.call, ctx.call.way
    with way.below_autograd():
        dy_RM, of_weights_KS = way.ops.restore_backward(dy_SM, y_RM, call.rows_KS, weights_KS)
    del y_RM
    dh_RH = products.rows_gradient(dy_RM, weight, way.is_transposed, call)
    dup_RF, h_RH = way.gate.backward(up_RF, dh_RH)
    del up_RF, dh_RH
    of_weight = None
    if ctx.needs_input_grad[2]:
        of_weight = products.weight_gradient(h_RH, dy_RM, way.is_transposed, call)
    return dup_RF, of_weights_KS.to(ctx.dtype), of_weight, None


_of_down_once = torch.autograd.function.once_differentiable(_of_down)
