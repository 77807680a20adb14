# SPDX-License-Identifier: Apache-2.0
"""Runs a token's way through a layer; with the layer put together by hand that the paper's listing 2 shows.

Letters: S tokens on this rank, M width, E experts, e experts on this rank, C slots per expert, G ranks that exchange
tokens (E = G * e).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from ds_fsmoe import registry
from ds_fsmoe.components.alltoall import AllToAllBase
from ds_fsmoe.components.callback import CallbackArgs, CallbackBase
from ds_fsmoe.components.expert import LocalExperts
from ds_fsmoe.components.expert_compute.calls import ExpertSet
from ds_fsmoe.components.gate import GateBase, in_backward
from ds_fsmoe.components.order import OrderBase
from ds_fsmoe.components.routing import Routing, RoutingBase, kind_of
from ds_fsmoe.execution.collectives import Collectives
from ds_fsmoe.execution.counts_exchange import CountsExchange, Forward, Forwards, NodeExchange
from ds_fsmoe.execution.lanes import make_lanes
from ds_fsmoe.execution.pipeline import LayerPipeline, WholeExperts
from ds_fsmoe.execution.row_chunks import RowLayout
from ds_fsmoe.execution.row_sizes import TokenCuts, token_cuts_of
from ds_fsmoe.execution.slot_chunks import SlotLayout, cut
from ds_fsmoe.execution.tensor_parallel import TensorParallelTokens
from ds_fsmoe.layer.expert_checks import agreed, by_class, by_trial, check_width, naming_widths
from ds_fsmoe.layer.replay import remembering, take, tape_torchs_functions
from ds_fsmoe.layer.row_routing import Placed, number_by_node, number_rows_of_layer, sends_rows
from ds_fsmoe.layer.runtime import pipeline_without_engine
from ds_fsmoe.log import log_on_rank_0
from ds_fsmoe.ops import REFERENCE, Ops

Run = Callable[..., torch.Tensor]
"""Sends rows to the experts and back, see :meth:`LayerPipeline.run`."""


@dataclass(frozen=True)
class MoEOutput:
    """The results of a layer.

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


def path_of_tokens(
    x: torch.Tensor,
    used_token_S: torch.Tensor | None,
    *,
    gate: Callable[[torch.Tensor, torch.Tensor | None, dist.ProcessGroup | None], RoutingBase],
    order: OrderBase,
    pipeline: LayerPipeline,
    experts: ExpertSet | WholeExperts,
    group: dist.ProcessGroup | None,
    callbacks: Sequence[CallbackBase] = (),
    duplicates: TensorParallelTokens | None = None,
    width: int | None = None,
    name: str = "",
    in_rows: bool = False,
    placed: Placed | None = None,
    forward: Forward | None = None,
) -> tuple[torch.Tensor, RoutingBase]:
    """Run gate, order, the way to the experts and back chunk by chunk, i-order.

    Args:
        x: the tokens, [..., M].
        used_token_S: the [S] mask of tokens that take part, or ``None``.
        gate: ``(x_SM, used_token_S, group) -> routing``.
        order: an order that reads the gate's kind of routing.
        pipeline: the pipeline that runs the part between the orders.
        experts: the experts of this rank.
        group: the ranks that have to agree on the capacity; ``None`` for this rank alone.
        callbacks: hooks called in turn at each of the six points.
        duplicates: the ranks that have the same tokens and send a part of the slots each; ``None``: this one sends all.
        width: M, as the layer was made; ``None`` where it is not known.
        name: the layer's name for messages; the pipeline's label unless given.
        in_rows: whether rows travel, as many as tokens were given to each expert, or all slots.
        placed: where experts are, if not in the model's own order; the gate then gives a :class:`Routing`.
        forward: the forward, which ranks that exchange counts compare; ``None``: not known.

    Returns:
        [..., M], and the gate's decision.

    Raises:
        LayerError: an input or an expert has another width.
        RoutingError: the gate's decision contradicts itself, on every rank that shares the experts.
        DisagreementError: ranks that share the experts are in different forwards, on every one of them.
    """
    name = name or pipeline.label
    routing: RoutingBase | None = None

    def hooked(
        point: str, tensor: torch.Tensor, direction: Literal["forward", "backward"] = "forward", chunk: int = 0
    ) -> torch.Tensor:
        for callback in callbacks:
            args = CallbackArgs(tensor, routing, direction, pipeline.label, chunk)
            replaced = getattr(callback, point)(args)
            tensor = tensor if replaced is None else replaced
        return tensor

    x = hooked("before_moe_start_hook", x)
    check_width(name, x, width)
    x_SM = x.reshape(-1, x.shape[-1])
    routing = gate(x_SM, used_token_S, group)
    hook = hooked if callbacks else None

    def run(x_RM: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        with naming_widths(name, experts, x_RM):
            return pipeline.run(x_RM, *args, experts=experts, hook=hook, **options)

    # What hooks, losses and counts see is about experts; what is sent is about places.
    sent = routing if placed is None else placed.routing(routing)
    if in_rows:
        y_SM = _through_rows(x_SM, sent, order, run, pipeline, name, forward)
    else:
        y_SM = _through_slots(x_SM, sent, order, run, pipeline, duplicates)
    y = hooked("before_moe_end_hook", y_SM.reshape(x.shape))
    return y, routing


def token_path(x: torch.Tensor, used_token_S: torch.Tensor | None, **parts: Any) -> MoEOutput:
    """Run :func:`path_of_tokens`, and return what a layer returns."""
    y, routing = path_of_tokens(x, used_token_S, **parts)
    return MoEOutput(y, routing.aux_loss, routing.counts_E)


def _through_slots(
    x_SM: torch.Tensor,
    routing: RoutingBase,
    order: OrderBase,
    run: Run,
    pipeline: LayerPipeline,
    duplicates: TensorParallelTokens | None,
) -> torch.Tensor:
    """Send all slots, [E, C] of them, empty or not; [S, M] to [S, M]."""
    chunked, capacity = _in_chunks(routing, pipeline, duplicates)
    x_ECM = order.arrange(x_SM, chunked)
    x_RM = x_ECM.reshape(chunked.num_slots, x_ECM.shape[-1])
    if duplicates is not None:
        x_RM = duplicates.drop(x_RM)
    y_RM = run(x_RM, SlotLayout(routing.num_experts, capacity, pipeline.degrees))
    if duplicates is not None:
        y_RM = duplicates.gather(y_RM)
    y_ECM = y_RM.view(routing.num_experts, chunked.capacity, y_RM.shape[-1])
    return order.restore(y_ECM, chunked)


def _through_rows(
    x_SM: torch.Tensor,
    routing: RoutingBase,
    order: OrderBase,
    run: Run,
    pipeline: LayerPipeline,
    name: str,
    forward: Forward | None,
) -> torch.Tensor:
    """Send a row for every choice that a token made; [S, M] to [S, M]. Their counts travel while the order runs."""
    if not isinstance(routing, Routing):
        raise TypeError(
            f"{name}: the gate returned a {type(routing).__name__}, whose slots are no rows: dispatch = 'rows' needs "
            "a Routing"
        )
    collectives = pipeline.collectives
    cuts = token_cuts_of(*pipeline.degrees)
    if collectives.nodes is not None:
        return _through_nodes(x_SM, routing, order, run, collectives, cuts, name, forward)
    numbered = number_rows_of_layer(routing, cuts, order.ops)
    counts = CountsExchange.begin(
        numbered.counts_ET, numbered.fault, collectives.block, cuts, collectives.passes_on, name, forward
    )
    x_RM = order.arrange(x_SM, numbered.routing).reshape(numbered.routing.num_slots, x_SM.shape[-1])
    y_RM = run(x_RM, RowLayout(counts.wait(), routing.num_experts, len(x_SM), routing.slots_KS.shape[0]))
    return order.restore(y_RM.unsqueeze(0), numbered.routing)


def _through_nodes(
    x_SM: torch.Tensor,
    routing: Routing,
    order: OrderBase,
    run: Run,
    collectives: Collectives,
    cuts: TokenCuts,
    name: str,
    forward: Forward | None,
) -> torch.Tensor:
    """Send a row of a token to each node that has one of its experts; [S, M] to [S, M]."""
    sent, rows, weights_KS = number_by_node(routing, cuts, collectives.nodes, order.ops)
    exchange = NodeExchange.begin(rows, collectives.block, collectives.nodes, cuts, name, forward)
    x_RM = order.arrange(x_SM, sent).reshape(sent.num_slots, x_SM.shape[-1])
    choice_of_row_R = exchange.wait()
    weights_R = weights_KS.reshape(-1).index_select(0, choice_of_row_R)
    call = exchange.records(choice_of_row_R, weights_R.detach())
    layout = RowLayout(call.sizes, routing.num_experts, len(x_SM), routing.slots_KS.shape[0], call, order.ops.restore)
    y_RM = run(x_RM, layout, weights_R=weights_R)
    return order.restore(y_RM.unsqueeze(0), sent)


def _in_chunks(
    routing: RoutingBase, pipeline: LayerPipeline, duplicates: TensorParallelTokens | None
) -> tuple[RoutingBase, int]:
    """Return the routing with its slots chunk by chunk, and how many slots per expert this rank sends. An order puts
    rows where the routing says, so contiguous chunks cost no copy."""
    num_experts, capacity = routing.num_experts, routing.capacity
    if duplicates is None:
        cutting = cut(capacity, pipeline.forward.block.degree)
        return routing.relaid(partial(cutting.chunked_slots, num_experts=num_experts), capacity), capacity
    own_capacity = duplicates.part(capacity)
    cutting = cut(own_capacity, pipeline.forward.block.degree)
    place = partial(duplicates.slots, num_experts=num_experts, capacity=capacity, cutting=cutting)
    return routing.relaid(place, duplicates.num_ranks * own_capacity), own_capacity


class MOELayer(nn.Module):
    """A layer put together by hand from parts, usable as any ``nn.Module``, DeepSpeed or not.

    Args:
        gate_impl: a gate; the layer gives it its sizes.
        order_impl: an order.
        model_dim: M.
        num_experts: E, over all ranks of ``group``.
        expert_impl: one expert: a name on the shelf (then ``expert_dim`` is needed) or any row-wise ``nn.Module``,
            which is copied for each expert of this rank.
        expert_dim: H, for an expert named.
        alltoall_impl: an all-to-all, or its name on the shelf.
        callbacks: hooks, called in turn.
        group: the ranks that share the experts; ``None`` means this process alone. Every rank has to be given the same
            gate parameters: nothing is broadcast here.
        return_stats: ``True`` makes ``forward`` return a :class:`MoEOutput` instead of the output tensor.
        pipeline_degree: into how many chunks the capacity is cut; (forward, backward) if they differ. Experts that
            would compute something else in chunks, as with dropout, are found at the first forward and not cut.
        overlap: ``False`` runs one task after another.
        ops: operators for the gate and the order, as ``ds_fsmoe.load_ops("auto", "cpu")`` loads them; those in plain
            torch unless given.
        dispatch: what travels to the experts: ``"rows"``, as many as tokens have chosen an expert, or ``"slots"``, as
            many as the fullest expert has. ``"auto"``: rows where the gate drops nothing.

    Raises:
        ValueError: sizes do not fit together, or a part does not exist.
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
        dispatch: Literal["auto", "rows", "slots"] = "auto",
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
                f"{type(gate_impl).__name__} gives; the order {kind.order!r} can"
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
            raise ValueError(f"MOELayer: pipeline_degree = {pipeline_degree!r}: must be 1 or more, or a pair of such")
        if dispatch not in ("auto", "rows", "slots"):
            raise ValueError(f'MOELayer: dispatch = {dispatch!r}: must be "auto", "rows" or "slots"')
        if dispatch == "rows" and not (issubclass(kind, Routing) and alltoall_impl.takes_rows):
            raise ValueError(
                f'MOELayer: dispatch = \'rows\': must be "auto" or "slots" with {type(gate_impl).__name__} and '
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
        self._degrees, self._alltoall = degrees, alltoall_impl
        self._running: tuple[LayerPipeline, ExpertSet] | None = None
        self._looked: set[bool] = set()
        self._forwards = Forwards("MOELayer")

    def forward(self, x: torch.Tensor, used_token_S: torch.Tensor | None = None) -> torch.Tensor | MoEOutput:
        """Map [..., M] to [..., M]; with ``return_stats`` return a :class:`MoEOutput`.

        Args:
            x: [..., M], the tokens of this rank.
            used_token_S: [S], false or 0 for tokens that take no part, such as padding; ``None``: all do.
        """
        if self._running is None:
            # Only now the device is known.
            lanes = make_lanes(x.device, self.overlap)
            experts = ExpertSet(list(self.experts.experts), path="MOELayer")
            self._running = pipeline_without_engine(self._alltoall, self.group, lanes, self._degrees), experts
        if self.training not in self._looked:
            self._looked.add(self.training)
            self._leave_whole_if_need_be(x)
        pipeline, experts = self._running
        in_rows = sends_rows(self.dispatch, self.gate, pipeline.collectives)
        self.gate.needs_capacity = not in_rows
        result = token_path(
            x,
            used_token_S,
            gate=remembering(self.gate, self.gate, self, take(self)),
            order=self.order,
            pipeline=pipeline,
            experts=experts,
            group=self.group,
            callbacks=self.callbacks,
            width=self.gate.takes_width,
            name="MOELayer",
            in_rows=in_rows,
            forward=self._forwards.begin(self.training, in_backward()),
        )
        return result if self.return_stats else result.output

    def _leave_whole_if_need_be(self, x: torch.Tensor) -> None:
        """Do not cut experts that would compute something else in chunks. Collective where the layer is."""
        pipeline, experts = self._running
        if not pipeline.is_cut:
            return
        found = by_class(experts)
        found = found if found.text else by_trial(experts, x)
        is_alone = pipeline.collectives.ep_group is None
        reason = agreed(found, found.kind == "shape", type(self).__name__, self.group, is_alone, x.device)
        if reason:
            self._running = pipeline.uncut(), experts
            log_on_rank_0(f"a {type(self).__name__} put together by hand runs in one chunk: {reason}", logging.WARNING)
