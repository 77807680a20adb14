# SPDX-License-Identifier: Apache-2.0
"""A token's way through a layer, and the layer put together by hand that the paper's listing 2 shows.

Letters: S tokens on this rank, M width, E experts, e experts on this rank, C slots per expert, G ranks that exchange
tokens (E = G * e).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ds_fsmoe import registry
from ds_fsmoe.components.alltoall import AllToAllBase
from ds_fsmoe.components.callback import CallbackArgs, CallbackBase
from ds_fsmoe.components.expert import LocalExperts
from ds_fsmoe.components.gate import GateBase
from ds_fsmoe.components.order import OrderBase
from ds_fsmoe.components.routing import Routing


@dataclass(frozen=True)
class MoEOutput:
    """What a layer computes."""

    output: torch.Tensor
    """[..., M], the shape of the input."""
    aux_loss: torch.Tensor
    """Scalar: the gate's load-balancing loss."""
    counts_E: torch.Tensor
    """[E] int64: tokens of this rank that chose each expert, before any was dropped."""


def _untimed(_: str) -> AbstractContextManager:
    return nullcontext()


def token_path(
    x: torch.Tensor,
    used_token_S: torch.Tensor | None,
    *,
    gate: Callable[[torch.Tensor, torch.Tensor | None, dist.ProcessGroup | None], Routing],
    order: OrderBase,
    alltoall: AllToAllBase,
    experts: Callable[[torch.Tensor], torch.Tensor],
    num_local_experts: int,
    group: dist.ProcessGroup | None,
    callbacks: Sequence[CallbackBase] = (),
    timed: Callable[[str], AbstractContextManager] = _untimed,
) -> MoEOutput:
    """Gate, order, dispatch, experts, combine, i-order, one after another on the whole capacity.

    Args:
        x: [..., M].
        used_token_S: [S] mask of tokens that take part, or ``None``.
        gate: ``(x_SM, used_token_S, group) -> Routing``.
        order, alltoall: parts.
        experts: [G, e, C, M] to the same shape.
        num_local_experts: e.
        group: the G ranks that exchange tokens; ``None`` for one.
        callbacks: called in turn at each of the six points.
        timed: context manager by name, entered around ``"moe"``, ``"1st_a2a"`` and ``"2nd_a2a"``.
    """

    def hooked(point: str, tensor: torch.Tensor, routing: Routing | None = None) -> torch.Tensor:
        for callback in callbacks:
            replaced = getattr(callback, point)(CallbackArgs(tensor, routing))
            tensor = tensor if replaced is None else replaced
        return tensor

    with timed("moe"):
        x = hooked("before_moe_start_hook", x)
        width = x.shape[-1]
        x_SM = x.reshape(-1, width)
        routing = gate(x_SM, used_token_S, group)
        x_ECM = hooked("before_dispatch_hook", order.arrange(x_SM, routing), routing)
        with timed("1st_a2a"):
            x_ECM = alltoall(x_ECM, group)
        x_ECM = hooked("after_dispatch_hook", x_ECM, routing)
        # Dimension 0 now runs over the ranks the rows came from, then over the experts of this rank.
        num_sources = x_ECM.shape[0] // num_local_experts
        y_GeCM = experts(x_ECM.reshape(num_sources, num_local_experts, *x_ECM.shape[1:]))
        y_ECM = hooked("before_combine_hook", y_GeCM.reshape(x_ECM.shape), routing)
        with timed("2nd_a2a"):
            y_ECM = alltoall(y_ECM, group)
        y_ECM = hooked("after_combine_hook", y_ECM, routing)
        if y_ECM.shape[:2] != (routing.num_experts, routing.capacity):
            raise ValueError(
                f"{tuple(y_ECM.shape)} came back for {routing.num_experts} experts of {routing.capacity} slots: a hook "
                "or an expert has changed the number of rows"
            )
        y = hooked("before_moe_end_hook", order.restore(y_ECM, routing).reshape(x.shape), routing)
    return MoEOutput(y, routing.aux_loss, routing.counts_E)


class MOELayer(nn.Module):
    """A layer put together by hand from parts, usable as any ``nn.Module``, DeepSpeed or not.

    ``MOELayer(LinearGate(k=2), SimpleOrder(), model_dim=512, num_experts=8, expert_dim=2048)``

    Args:
        gate_impl: a gate; the layer gives it its sizes.
        order_impl: an order.
        model_dim: M.
        num_experts: E, over all ranks of ``group``.
        expert_impl: one expert: a name on the shelf (then ``expert_dim`` is needed) or any row-wise ``nn.Module``,
            copied for each expert of this rank.
        expert_dim: H, for an expert named.
        alltoall_impl: an all-to-all, or its name on the shelf.
        callbacks: hooks, called in turn.
        group: the ranks that share the experts; ``None`` means this process alone. Every rank has to be given the same
            gate parameters: nothing is broadcast here.
        return_stats: ``True`` makes ``forward`` return a :class:`MoEOutput` instead of the output tensor.

    Raises:
        ValueError: sizes that do not fit together, or a part that does not exist.
        TypeError: a part that is none of its kind.
    """

    def __init__(
        self,
        gate_impl: GateBase,
        order_impl: OrderBase,
        *,
        model_dim: int,
        num_experts: int,
        expert_impl: str | nn.Module = "gpt",
        expert_dim: int | None = None,
        alltoall_impl: str | AllToAllBase = "flat",
        callbacks: Sequence[CallbackBase] = (),
        group: dist.ProcessGroup | None = None,
        return_stats: bool = False,
    ) -> None:
        super().__init__()
        if isinstance(alltoall_impl, str):
            alltoall_impl = registry.lookup("alltoall", alltoall_impl)()
        parts = [("gate_impl", gate_impl, GateBase), ("order_impl", order_impl, OrderBase)]
        parts += [("alltoall_impl", alltoall_impl, AllToAllBase)]
        parts += [("callbacks", callback, CallbackBase) for callback in callbacks]
        for name, part, base in parts:
            if not isinstance(part, base):
                raise TypeError(f"MOELayer: {name} = {part!r}: must be an instance of {base.__name__}")
        num_ranks = 1 if group is None else dist.get_world_size(group)
        if num_experts < 1 or num_experts % num_ranks:
            raise ValueError(f"MOELayer: num_experts = {num_experts}: must be a multiple of the {num_ranks} rank(s)")
        if isinstance(expert_impl, str):
            if expert_dim is None or expert_dim < 1:
                raise ValueError(f"MOELayer: expert_impl = {expert_impl!r} needs expert_dim, the expert's hidden width")
            expert_impl = registry.lookup("expert", expert_impl)(model_dim, expert_dim)
        gate_impl.build_once(model_dim, num_experts)
        self.gate = gate_impl
        self.experts = LocalExperts(expert_impl, num_experts // num_ranks)
        self.order = order_impl
        self.alltoall = alltoall_impl
        self.callbacks = tuple(callbacks)
        self.group = group
        self.num_local_experts = num_experts // num_ranks
        self.return_stats = return_stats

    def forward(self, x: torch.Tensor, used_token_S: torch.Tensor | None = None) -> torch.Tensor | MoEOutput:
        """[..., M] to [..., M]; with ``return_stats`` a :class:`MoEOutput`."""
        result = token_path(
            x,
            used_token_S,
            gate=self.gate,
            order=self.order,
            alltoall=self.alltoall,
            experts=self.experts,
            num_local_experts=self.num_local_experts,
            group=self.group,
            callbacks=self.callbacks,
        )
        return result if self.return_stats else result.output
