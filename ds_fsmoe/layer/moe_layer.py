# SPDX-License-Identifier: Apache-2.0
"""The layer that a user builds from parts, as in the paper's listing 2, with or without DeepSpeed.

It shares ``state`` with the converted layers of ``stock_layer`` and ``experts_layer``, but needs no engine.

Letters: S tokens on this rank, M width, E experts, H width of an expert.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import torch
import torch.distributed as dist
from torch import nn

from ds_fsmoe import registry
from ds_fsmoe.components.alltoall import AllToAllBase
from ds_fsmoe.components.callback import CallbackBase
from ds_fsmoe.components.expert import LocalExperts
from ds_fsmoe.components.expert_compute.calls import ExpertSet
from ds_fsmoe.components.gate import GateBase
from ds_fsmoe.components.order import OrderBase
from ds_fsmoe.components.routing import Routing, RoutingBase, kind_of
from ds_fsmoe.config.blocks import DISPATCH_OF_BEFORE, Dispatch
from ds_fsmoe.execution.lanes import make_lanes
from ds_fsmoe.execution.tensor_parallel import PLAIN
from ds_fsmoe.layer.expert_checks import agreed, by_class, by_trial
from ds_fsmoe.layer.parts import Parts
from ds_fsmoe.layer.replay import tape_torchs_functions
from ds_fsmoe.layer.state import LayerState
from ds_fsmoe.log import log_on_rank_0
from ds_fsmoe.ops import REFERENCE, Ops


@dataclass(frozen=True)
class MoEOutput:
    """Holds the results of a layer.

    Args:
        output: the output, [..., M], in the shape of the input.
        aux_loss: the gate's load-balancing loss, a scalar.
        counts_E: the tokens of this rank that chose each expert, before any was dropped: [E] int64.

    Examples:
        >>> import torch, ds_fsmoe
        >>> parts = ds_fsmoe.SwitchGate(), ds_fsmoe.SimpleOrder()
        >>> layer = ds_fsmoe.MOELayer(*parts, model_dim=8, num_experts=4, expert_dim=16, return_stats=True)
        >>> result = layer(torch.randn(2, 3, 8))
        >>> result.output.shape, result.aux_loss.shape, result.counts_E.sum()
        (torch.Size([2, 3, 8]), torch.Size([]), tensor(6))
    """

    output: torch.Tensor
    aux_loss: torch.Tensor
    counts_E: torch.Tensor


class MOELayer(nn.Module):
    """Runs a layer that is built from parts, usable as any ``nn.Module``, with or without DeepSpeed.

    Args:
        gate_impl: a gate; the layer passes it the sizes.
        order_impl: an order.
        model_dim: M.
        num_experts: E, over all ranks of ``group``.
        expert_impl: one expert: a name in the registry (then ``expert_dim`` is needed) or any row-wise ``nn.Module``,
            which is copied for each expert of this rank.
        expert_dim: H, for an expert from the registry.
        alltoall_impl: an all-to-all, or its name in the registry.
        callbacks: hooks, called in this order.
        group: the ranks that share the experts; ``None`` means this process alone. Every rank must start with the same
            gate parameters: the layer broadcasts none.
        return_stats: ``True`` makes ``forward`` return a :class:`MoEOutput` instead of the output tensor.
        pipeline_degree: the number of chunks; (forward, backward) if they differ. Experts that would compute something
            else in chunks, as with dropout, are detected at the first forward. Their layer runs in one chunk.
        overlap: ``False`` runs tasks one after another.
        ops: operators for the gate and the order, as ``ds_fsmoe.load_ops("auto", "cpu")`` loads them; by default the
            reference in torch.
        dispatch: ``"unpadded"`` sends the rows that tokens chose, ``"padded"`` as many slots per expert as the fullest
            one has. ``"auto"``: unpadded where the gate drops nothing.

    Raises:
        ValueError: sizes do not match, or a part is not in the registry.
        TypeError: a part is of the wrong kind.

    Examples:
        >>> import torch, ds_fsmoe
        >>> parts = ds_fsmoe.LinearGate(k=2), ds_fsmoe.SimpleOrder()
        >>> layer = ds_fsmoe.MOELayer(*parts, model_dim=8, num_experts=4, expert_dim=32, pipeline_degree=(2, 3))
        >>> layer(torch.randn(2, 5, 8)).shape  # [..., M] to [..., M]
        torch.Size([2, 5, 8])
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
        pipeline_degree: int | tuple[int, int] = 1,
        overlap: bool = True,
        ops: Ops = REFERENCE,
        dispatch: Dispatch = "auto",
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
        kind = kind_of(gate_impl)
        if not issubclass(kind, order_impl.reads):
            raise ValueError(
                f"MOELayer: order_impl = {type(order_impl).__name__}: cannot read the {kind.__name__} that "
                f"{type(gate_impl).__name__} returns; use the order {kind.order!r}"
            )
        num_ranks = 1 if group is None else dist.get_world_size(group)
        if num_experts < 1 or num_experts % num_ranks:
            raise ValueError(f"MOELayer: num_experts = {num_experts}: must be a multiple of the {num_ranks} rank(s)")
        if isinstance(expert_impl, str):
            if expert_dim is None or expert_dim < 1:
                raise ValueError(f"MOELayer: expert_impl = {expert_impl!r} needs expert_dim, the expert's hidden width")
            expert_impl = registry.lookup("expert", expert_impl)(model_dim, expert_dim)
        degrees = (pipeline_degree,) * 2 if isinstance(pipeline_degree, int) else tuple(pipeline_degree)
        if len(degrees) != 2 or not all(isinstance(each, int) and each >= 1 for each in degrees):
            raise ValueError(
                f"MOELayer: pipeline_degree = {pipeline_degree!r}: must be at least 1, or a pair of such numbers"
            )
        dispatch = DISPATCH_OF_BEFORE.get(str(dispatch), dispatch)
        if dispatch not in get_args(Dispatch):
            raise ValueError(f'MOELayer: dispatch = {dispatch!r}: must be "auto", "unpadded" or "padded"')
        if dispatch == "unpadded" and not (issubclass(kind, Routing) and alltoall_impl.takes_rows):
            raise ValueError(
                f'MOELayer: dispatch = \'unpadded\': must be "auto" or "padded" with {type(gate_impl).__name__} and '
                f"{type(alltoall_impl).__name__}"
            )
        tape_torchs_functions()
        gate_impl.build_once(model_dim, num_experts)
        gate_impl.ops = order_impl.ops = ops
        self.gate = gate_impl
        self.experts = LocalExperts(expert_impl, num_experts // num_ranks)
        self.order = order_impl
        self.callbacks, self.group = tuple(callbacks), group
        self.return_stats, self.overlap, self.dispatch = return_stats, overlap, dispatch
        self._degrees = degrees
        parts = Parts(alltoall_impl, self.callbacks, kind.order, ops, dispatch)
        of_layer = {"label": "moe", "path": "MOELayer", "tensor_parallel": PLAIN}
        self._state = LayerState(parts, order_impl, None, **of_layer, checks=[_check_experts])
        self._checked_modes: set[bool] = set()

    def forward(self, x: torch.Tensor, used_token_S: torch.Tensor | None = None) -> torch.Tensor | MoEOutput:
        """Compute [..., M] to [..., M]; with ``return_stats`` return a :class:`MoEOutput`.

        Args:
            x: [..., M], the tokens of this rank.
            used_token_S: [S], false or 0 for tokens that take no part, such as padding; ``None``: all take part.
        """
        state = self._state
        # A script may have replaced these attributes of the layer.
        state.order = self.order
        dispatch = DISPATCH_OF_BEFORE.get(self.dispatch, self.dispatch)
        state.parts = replace(state.parts, callbacks=self.callbacks, dispatch=dispatch)
        run = state.begin_call(self, x, used_token_S)
        output = run.token_path(x)
        return MoEOutput(output, run.routing.aux_loss, run.routing.counts_E) if self.return_stats else output

    def run_alone(self, device: torch.device) -> None:
        """Create the pipeline at the first forward, when the device is known."""
        self._state.run_alone(self.group, make_lanes(device, self.overlap), self._degrees)

    def route(
        self, x_SM: torch.Tensor, used_token_S: torch.Tensor | None, group: dist.ProcessGroup | None
    ) -> RoutingBase:
        """Return the decision of the layer's gate; see :class:`~ds_fsmoe.components.gate.GateBase`."""
        return self.gate(x_SM, used_token_S, group)

    def local_experts(self) -> ExpertSet:
        """Return the experts of this rank."""
        if self._state.known_experts is None:
            self._state.known_experts = [], ExpertSet(list(self.experts.experts), path="MOELayer")
        return self._state.known_experts[1]

    def why_called(self) -> None:
        """Return the reason why the module of experts must be called as a whole: ``None``, as there is no such
        module."""


def _check_experts(layer: MOELayer, x: torch.Tensor) -> None:
    """Run experts in one chunk if chunks would change their results, as the first forward in each mode detects.

    Collective then where the layer is.
    """
    state = layer._state
    if layer.training in layer._checked_modes:
        return
    layer._checked_modes.add(layer.training)
    if not state.pipeline.is_chunked:
        return
    experts = layer.local_experts()
    found = by_class(experts)
    found = found if found.text else by_trial(experts, x)
    is_alone = state.pipeline.collectives.ep_group is None
    kind = type(layer).__name__
    if reason := agreed(found, found.kind == "shape", kind, layer.group, is_alone, x.device):
        state.run_unchunked(reason)
        log_on_rank_0(f"a {kind} built by hand runs in one chunk: {reason}", logging.WARNING)
