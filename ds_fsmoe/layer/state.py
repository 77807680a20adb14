# SPDX-License-Identifier: Apache-2.0
"""The state of a layer, and the path of its tokens in a call, common to all kinds of layers.

``stock_layer``, ``experts_layer`` and ``moe_layer`` own a :class:`LayerState` each, call :meth:`LayerState.begin_call`
in their forward, and run :meth:`LayerRun.token_path`. Only the state changes how a layer runs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from ds_fsmoe.components.callback import CallbackArgs, CallbackBase
from ds_fsmoe.components.expert_compute.calls import ExpertSet
from ds_fsmoe.components.expert_compute.stacked_experts import StackedExperts
from ds_fsmoe.components.gate import GateCallOptions, in_backward
from ds_fsmoe.components.order import OrderBase
from ds_fsmoe.components.routing import ReplayedRouting, Routing, RoutingBase
from ds_fsmoe.config.blocks import Dispatch
from ds_fsmoe.config.reading import ConfigError
from ds_fsmoe.distributed.groups import FSMoEGroups
from ds_fsmoe.execution.call import GradientWindow, Layout
from ds_fsmoe.execution.collectives import Collectives
from ds_fsmoe.execution.counts_exchange import CountsExchange, Forward, Forwards, NodeExchange
from ds_fsmoe.execution.lanes import Lanes, Observer, SerialLanes
from ds_fsmoe.execution.pipeline import LayerPipeline
from ds_fsmoe.execution.row_chunks import RowLayout
from ds_fsmoe.execution.row_sizes import TokenChunks, token_chunks_of
from ds_fsmoe.execution.slot_chunks import SlotLayout, chunk_capacity
from ds_fsmoe.execution.tensor_parallel import TensorParallelTokens, TensorParallelUse
from ds_fsmoe.layer.expert_shard import TRUSTED, asking
from ds_fsmoe.layer.opaque import Handle, OpaqueModule
from ds_fsmoe.layer.parts import LayerError, Parts, refuse_copy
from ds_fsmoe.layer.replay import remembering, runs_again, take
from ds_fsmoe.layer.row_routing import Placed, number_by_node, number_rows_of_layer, takes_rows
from ds_fsmoe.layer.runtime import LayerRuntime, pipeline_without_engine
from ds_fsmoe.observing.instruments import Check, Gate, LayerCall
from ds_fsmoe.planning.block import LayerPlan
from ds_fsmoe.planning.decide.presets import BEST
from ds_fsmoe.planning.expert_placement import ExpertPlacement

# ---- One call of any layer: gate, order, the experts' part, i-order
#
# A layer is data here: its gate, order, experts and pipeline. The classes of DeepSpeed's layer, Hugging Face's and the
# one built from parts define what differs between them; the rest is common.
#
# Letters: S tokens on this rank, M width, E experts, C slots per expert.


@dataclass
class LayerHooks:
    """Calls a layer's hooks, in their order, at each of the six points."""

    callbacks: Sequence[CallbackBase]
    label: str
    """The label of the layer, passed to hooks."""
    routing: RoutingBase | None = None
    """The gate's decision; ``None`` before the gate has run."""

    def at(
        self, point: str, tensor: torch.Tensor, direction: Literal["forward", "backward"] = "forward", chunk: int = 0
    ) -> torch.Tensor:
        """Return the tensor after the hooks of a point; see :data:`~ds_fsmoe.execution.phase.Hook`."""
        for callback in self.callbacks:
            args = CallbackArgs(tensor, self.routing, direction, self.label, chunk)
            replaced = getattr(callback, point)(args)
            tensor = tensor if replaced is None else replaced
        return tensor


@dataclass(eq=False, repr=False, kw_only=True)
class LayerRun(LayerCall):
    """Runs one call of a layer. Instruments may have replaced its gate, pipeline and experts before
    :meth:`token_path`."""

    state: LayerState
    """The layer as data: its order, hooks, and expert placement."""
    used_token_S: torch.Tensor | None = None
    """[S]: the mask of tokens that take part; ``None``: all take part."""
    width: int | None = None
    """M of the layer; ``None`` if it is unknown."""
    forward: Forward | None = None
    """The forward, which ranks that exchange counts compare; ``None``: unknown."""
    routing: RoutingBase | None = None
    """The gate's decision; ``None`` before the gate has run."""
    hooks: LayerHooks | None = None
    """The hooks of the layer, if it has any."""

    @property
    def name(self) -> str:
        """Return the name of the layer, for messages."""
        return self.path or self.pipeline.label

    def token_path(self, x: torch.Tensor) -> torch.Tensor:
        """Run gate, order, the experts' part chunk by chunk, and i-order, and return [..., M].

        Args:
            x: the input of the call, [..., M].

        Raises:
            LayerError: an input or an expert has another width.
            RoutingError: the gate's decision contradicts itself, on every rank that shares the experts.
            DisagreementError: ranks that share the experts are in different forwards, on every one of them.
        """
        if self.state.parts.callbacks:
            self.hooks = LayerHooks(self.state.parts.callbacks, self.pipeline.label)
            x = self.hooks.at("before_moe_start_hook", x)
        if x.dim() == 0 or (self.width is not None and x.shape[-1] != self.width):
            made_for = "M" if self.width is None else f"M = {self.width}"
            raise LayerError(f"{self.name}: its input has shape {list(x.shape)}: must be [..., {made_for}]")
        x_SM = x.reshape(-1, x.shape[-1])
        routing = self.routing = self.gate(x_SM, self.used_token_S, self.capacity_group)
        if self.hooks is not None:
            self.hooks.routing = routing
        # Hooks, losses and counts use the numbers of experts; rows are sent to places.
        placed = self.state.placed
        sent = routing if placed is None else placed.routing(routing)
        y_SM = self._through_rows(x_SM, sent) if self.in_rows else self._through_slots(x_SM, sent)
        y = y_SM.reshape(x.shape)
        return y if self.hooks is None else self.hooks.at("before_moe_end_hook", y)

    def _through_slots(self, x_SM: torch.Tensor, routing: RoutingBase) -> torch.Tensor:
        """Send all slots, [E, C], taken or empty; [S, M] to [S, M]."""
        order, duplicates = self.state.order, self.state.duplicates
        chunked, capacity = self._in_chunks(routing)
        x_ECM = order.arrange(x_SM, chunked)
        x_RM = x_ECM.reshape(chunked.num_slots, x_ECM.shape[-1])
        if duplicates is not None:
            x_RM = duplicates.drop(x_RM)
        y_RM = self._run(x_RM, SlotLayout(routing.num_experts, capacity, self.pipeline.degrees))
        if duplicates is not None:
            y_RM = duplicates.gather(y_RM)
        y_ECM = y_RM.view(routing.num_experts, chunked.capacity, y_RM.shape[-1])
        return order.restore(y_ECM, chunked)

    def _in_chunks(self, routing: RoutingBase) -> tuple[RoutingBase, int]:
        """Return the routing with its slots chunk by chunk, and the slots per expert that this rank sends.

        An order writes rows to the routing's slots, so contiguous chunks need no copy.
        """
        num_experts, capacity = routing.num_experts, routing.capacity
        degree, duplicates = self.pipeline.forward.block.degree, self.state.duplicates
        if duplicates is None:
            cutting = chunk_capacity(capacity, degree)
            return routing.relaid(partial(cutting.chunked_slots, num_experts=num_experts), capacity), capacity
        own_capacity = duplicates.part(capacity)
        place = partial(
            duplicates.slots,
            num_experts=num_experts,
            capacity=capacity,
            capacity_chunks=chunk_capacity(own_capacity, degree),
        )
        return routing.relaid(place, duplicates.num_ranks * own_capacity), own_capacity

    def _through_rows(self, x_SM: torch.Tensor, routing: RoutingBase) -> torch.Tensor:
        """Send a row for every choice that a token made; [S, M] to [S, M]. Counts are exchanged while the order
        runs."""
        if not isinstance(routing, Routing):
            raise TypeError(
                f"{self.name}: the gate returned a {type(routing).__name__}, which has no rows: dispatch = "
                "'unpadded' needs a Routing"
            )
        order, collectives = self.state.order, self.pipeline.collectives
        token_chunks = token_chunks_of(*self.pipeline.degrees)
        if collectives.nodes is not None:
            return self._through_nodes(x_SM, routing, token_chunks)
        numbered = number_rows_of_layer(routing, token_chunks, order.ops)
        of_call = collectives.block, token_chunks, collectives.forwarded, self.name, self.forward
        counts = CountsExchange.begin(numbered.counts_ET, numbered.fault, *of_call)
        x_RM = order.arrange(x_SM, numbered.routing).reshape(numbered.routing.num_slots, x_SM.shape[-1])
        y_RM = self._run(x_RM, RowLayout(counts.wait(), routing.num_experts, len(x_SM), routing.slots_KS.shape[0]))
        return order.restore(y_RM.unsqueeze(0), numbered.routing)

    def _through_nodes(self, x_SM: torch.Tensor, routing: Routing, token_chunks: TokenChunks) -> torch.Tensor:
        """Send a row of a token to each node that has one of its experts; [S, M] to [S, M]."""
        order, collectives = self.state.order, self.pipeline.collectives
        sent, rows, weights_KS = number_by_node(routing, token_chunks, collectives.nodes, order.ops)
        exchange = NodeExchange.begin(rows, collectives.block, collectives.nodes, token_chunks, self.name, self.forward)
        x_RM = order.arrange(x_SM, sent).reshape(sent.num_slots, x_SM.shape[-1])
        choice_of_row_R = exchange.wait()
        weights_R = weights_KS.reshape(-1).index_select(0, choice_of_row_R)
        call = exchange.records(choice_of_row_R, weights_R.detach())
        sizes = call.sizes, routing.num_experts, len(x_SM), routing.slots_KS.shape[0]
        y_RM = self._run(x_RM, RowLayout(*sizes, call, order.ops.restore), weights_R)
        return order.restore(y_RM.unsqueeze(0), sent)

    def _run(self, x_RM: torch.Tensor, layout: Layout, weights_R: torch.Tensor | None = None) -> torch.Tensor:
        """Send rows to the experts and back, see :meth:`~ds_fsmoe.execution.pipeline.LayerPipeline.run`.

        Raises:
            LayerError: an expert does not accept or return rows of the layer's width. Experts are tried, with one row
                each, only after an error: torch's message names two matrices, but not their owners.
        """
        hook = None if self.hooks is None else self.hooks.at
        try:
            return self.pipeline.run(x_RM, layout, self.experts, hook, weights_R)
        except RuntimeError as error:
            # Experts with stacked weights are no modules that could be tried, and have the model's own width.
            is_stacked = isinstance(self.experts, StackedExperts)
            alone: Sequence[Any] = () if is_stacked else getattr(self.experts, "experts", ())
            for index, expert in enumerate(alone):
                if problem := _wrong_width(expert, x_RM, self.experts.keep_expert_dim):
                    named = f"{self.name}: expert {index}, a {type(expert).__name__}"
                    raise LayerError(f"{named}, {problem}") from error
            raise


_OF_SHAPES = re.compile(r"shapes? |size of tensor|input of size")
"""Matches torch's messages about shapes that do not fit, and no other error."""


def _wrong_width(expert: nn.Module, x: torch.Tensor, keep_expert_dim: bool) -> str | None:
    shape = (1, 1, 1, x.shape[-1]) if keep_expert_dim else (1, 1, x.shape[-1])
    devices = [x.device] if x.device.type == "cuda" else []
    must = f"an expert must return a row of the layer's width, M = {x.shape[-1]}, for every row"
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        try:
            made = expert(x.new_zeros(shape))
        except RuntimeError as error:
            if not _OF_SHAPES.search(str(error)):
                return None
            return f"does not accept rows of shape {list(shape)}: {error}; {must}"
    made = made[0] if isinstance(made, tuple) else made
    if isinstance(made, torch.Tensor) and made.shape != shape:
        return f"returned {list(made.shape)} for {list(shape)}: {must}"
    return None


# ---- The state of a layer, and the class in front of a converted module's own


@dataclass(eq=False, repr=False)
class LayerState:
    """Holds the state of a layer, its one attribute ``fsmoe`` inside DeepSpeed.

    Only this object changes how the layer is run: others call :meth:`apply`, :meth:`run_unchunked` and :meth:`attach`.
    A call that is active, or waits for its backward, keeps the pipeline it began with.
    """

    parts: Parts
    order: OrderBase
    """The order for the layer's gate."""
    running: LayerRuntime | None
    """The runtime that the engine's layers share; ``None`` for a layer outside of an engine."""
    label: str
    """The label of the layer, in traces."""
    path: str
    """The path of the layer in its model, for messages."""
    tensor_parallel: TensorParallelUse

    pipeline: LayerPipeline | None = None
    """The pipeline that runs the layer; set in this class alone. ``None`` before the layer's groups exist."""
    plan: LayerPlan | None = None
    """The plan applied last; a layer with :attr:`why_unchunked` has one chunk whatever the plan is."""
    why_unchunked: str = ""
    """The reason why the layer must run in one chunk; empty without one. See
    :class:`~ds_fsmoe.layer.expert_checks.ChunkGuard`."""
    groups: FSMoEGroups | None = None
    """The process groups of a layer in an engine."""
    duplicates: TensorParallelTokens | None = None
    """The tensor-parallel ranks that have the same tokens, if there are any."""
    last_shape: torch.Size | None = None
    """The shape of the last input."""
    unsharded: Sequence[nn.Module] | None = None
    """The whole experts of this rank, where they will be sharded once the groups exist."""
    known_experts: tuple[list, ExpertSet] | None = None
    """The modules and parameters of the experts, and the set made from them."""
    is_in_slots: bool = False
    """Whether the layer uses padded dispatch whatever the all-to-all, as decided when its groups were created, unless
    its plan is unpadded."""
    placed: Placed | None = None
    """The expert placement; ``None``: the model's own order."""
    forwards: Forwards | None = None
    """Counts the forwards of the layer."""
    group_alone: dist.ProcessGroup | None = None
    """The ranks that share the experts of a layer outside of an engine of ours; ``None`` for this process alone."""
    checks: list[Check] = field(default_factory=list)
    """The checks that receive a layer outside of an engine of ours before each call."""
    opaque: Handle | None = None
    """Represents the layer in compiled code."""
    _exchanges: dict[str, Collectives] = field(default_factory=dict)

    @property
    def capacity_group(self) -> dist.ProcessGroup | None:
        """Return the ranks that agree on a capacity, see :class:`~ds_fsmoe.distributed.groups.FSMoEGroups`."""
        return None if self.groups is None else self.groups.capacity_group

    def sends_rows(self, gate: Any, dispatch: Dispatch | None = None) -> bool:
        """Return True if the next call uses unpadded dispatch; the same on every rank.

        Args:
            gate: the gate of the layer.
            dispatch: the dispatch to assume instead of the configured one.
        """
        assert self.pipeline is not None
        collectives = self.pipeline.collectives
        is_for_slots = collectives.ep_group is not None and collectives.exchange_rows is None
        if self.duplicates is not None or is_for_slots:
            return False
        return takes_rows(dispatch or ("unpadded" if self.is_unpadded_by_choice else self.parts.dispatch), gate)

    @property
    def is_unpadded_by_choice(self) -> bool:
        """Return True if the autotuner has made dispatch unpadded that is padded by the config."""
        return self.plan is not None and self.plan.is_unpadded and not self.is_unchunked

    def could_send_rows(self, gate: Any) -> bool:
        """Return True if dispatch is padded by the config but could be unpadded; the same on every rank.

        Args:
            gate: the gate of the layer.
        """
        return self.sends_rows(gate, "unpadded") and not self.sends_rows(gate, self.parts.dispatch)

    def may_be_unpadded(self, gate: Any) -> bool:
        """Return True if the autotuner may make dispatch unpadded that is padded by the config: where it may also
        choose chunks, as both round differently. The same on every rank.

        Args:
            gate: the gate of the layer.
        """
        assert self.running is not None
        block = self.running.block
        comm_dtypes, keeps_bits = block.wires, block.deterministic or 1 in block.pipeline_degree.most
        # Hooks would get other shapes than before, and a communication dtype applies to rows only.
        is_same = not self.parts.callbacks and (comm_dtypes.dispatch, comm_dtypes.combine) == ("model", "model")
        is_open = (
            block.schedule == BEST
            and not keeps_bits
            and is_same
            and self.parts.dispatch == "auto"
            and not self.is_unchunked
        )
        return is_open and self.could_send_rows(gate)

    def exchange_of(self, alltoall: str) -> Collectives:
        """Return an all-to-all that the layer has used, as it is for rows."""
        return self._exchanges[alltoall]

    @property
    def mp_group(self) -> dist.ProcessGroup | None:
        """Return the tensor-parallel ranks, see :class:`~ds_fsmoe.distributed.groups.FSMoEGroups`."""
        return None if self.groups is None else self.groups.mp_group

    def begin_call(
        self, layer: Any, x: torch.Tensor, used_token_S: torch.Tensor | None = None, route: Gate | None = None
    ) -> LayerRun:
        """Start a call of the layer: run the checks on the layer, then the instruments on the call, and return it.

        Args:
            layer: the layer, which defines its gate, its experts, and how it runs alone.
            x: its input, [..., M].
            used_token_S: [S], 0 for tokens that take no part; ``None``: all take part.
            route: its routing function; by default that of its gate, with a replayed choice if there is one.

        Raises:
            ReplayError: a replayed choice does not fit these tokens, on any rank.
        """
        self.last_shape = x.shape
        if self.forwards is None:
            self.forwards = Forwards(self.path or self.label)
        forward = self.forwards.begin(layer.training, in_backward())
        if self.pipeline is None:
            layer.run_alone(x.device)
        for check in self.checks if self.running is None else self.running.checks:
            check(layer, x)
        gate, local = layer.gate, layer.local_experts()
        in_rows = self.sends_rows(gate)
        if isinstance(gate, GateCallOptions):
            gate.needs_capacity = not in_rows
        if route is None:
            given = self.next_replayed()
            self.check_replayed(given, x.shape[:-1].numel())
            route = remembering(layer.route, gate, self, given)
        group = self.group_alone if self.running is None else self.capacity_group
        experts = local if layer.why_called() is None else layer.whole_experts(local)
        run = LayerRun(
            self.label,
            self.path,
            layer.training,
            x,
            group,
            route,
            self.pipeline,
            experts,
            local,
            in_rows,
            state=self,
            used_token_S=used_token_S,
            width=getattr(gate, "takes_width", None),
            forward=forward,
        )
        for show in () if self.running is None else self.running.instruments:
            show(run)
        return run

    def next_replayed(self) -> ReplayedRouting | None:
        """Return the choice for the call that begins: of its first forward, if it is recomputed; or replayed; else
        ``None``."""
        if runs_again():
            return take(self)
        return None if self.running is None else self.running.replay.take(self.label)

    def check_replayed(self, given: ReplayedRouting | None, num_tokens: int) -> None:
        """Check that a choice fits the tokens of a call. Collective where routing is replayed.

        Raises:
            ReplayError: it does not fit, on any rank.
        """
        if self.running is not None:
            self.running.replay.check(self.label, given, num_tokens)

    def connect(self, ep_size: int, gate: Any) -> FSMoEGroups:
        """Create the process groups of the layer, and apply the plan of its engine's block. Collective.

        Args:
            ep_size: the number of ranks over which its experts are spread.
            gate: the gate of the layer.
        """
        assert self.running is not None
        groups = self.groups = self.running.groups(ep_size, self.tensor_parallel)
        if self.tensor_parallel.same_tokens and groups.mp_group is not None:
            if self.parts.dispatch == "unpadded":
                raise ConfigError(
                    f'fsmoe.dispatch = "unpadded": must be "auto" or "padded" with {self.path}, whose '
                    "tensor-parallel ranks have equal tokens and send a part of the slots each"
                )
            self.duplicates = TensorParallelTokens(groups.mp_group)
        self.is_in_slots = self.duplicates is not None or not takes_rows(self.parts.dispatch, gate)
        if self.is_in_slots:
            self.running.warn_padded_dispatch(self.path)
        self.apply(self.running.plan)
        self.running.observer.add_groups(self.pipeline, groups)
        return groups

    def place(self, placement: ExpertPlacement) -> None:
        """Send rows by this placement of experts, from the next call on. The same on every rank.

        Args:
            placement: the placement; the experts themselves have been moved already.
        """
        self.placed = None if placement.is_at_start else Placed(placement)

    def run_alone(
        self, group: dist.ProcessGroup | None, lanes: Lanes | None = None, degrees: tuple[int, int] = (1, 1)
    ) -> None:
        """Run the layer without an engine of ours.

        Args:
            group: the ranks that share the experts; ``None`` for this process alone.
            lanes: the lanes that run tasks; unless given, they run one after another.
            degrees: the numbers of chunks (forward, backward).
        """
        self.group_alone = group
        self.pipeline = pipeline_without_engine(self.parts.alltoall, group, lanes or SerialLanes(), degrees)

    def run_on_without_engine(self) -> None:
        """Run the layer from its next call on in one chunk, one task after another, in its present groups."""
        if self.pipeline is not None:
            self.pipeline = replace(
                self.pipeline.unchunked(), lanes=SerialLanes(), window=None, observer=None, on_call=()
            )

    def apply(self, plan: LayerPlan) -> None:
        """Run the layer by a plan from its next call on. Collective: an all-to-all may create communicators.

        Args:
            plan: the same on every rank that runs the layer.

        Raises:
            ConfigError: the all-to-all contradicts itself, on every rank.
        """
        assert self.running is not None
        assert self.groups is not None
        if plan.alltoall not in self._exchanges:
            self._exchanges[plan.alltoall] = self.running.exchange(self.groups, plan.alltoall)
        exchange = self._exchanges[plan.alltoall]
        is_in_slots = self.is_in_slots and (self.is_unchunked or not plan.is_unpadded)
        if exchange.nodes is not None and is_in_slots:
            exchange = replace(exchange, nodes=None, why_flat="slots are sent")
        if exchange.why_flat:
            self.running.warn_alltoall_fallback(plan.alltoall, exchange.why_flat)
        pipeline = self.running.pipeline(self.label, self.groups, plan, exchange, in_rows=not is_in_slots)
        if self.is_unchunked:
            pipeline = pipeline.unchunked()
        if self.pipeline is not None:
            pipeline = replace(pipeline, window=self.pipeline.window, observer=self.pipeline.observer)
        self.pipeline, self.plan = pipeline, plan

    @property
    def is_unchunked(self) -> bool:
        """Return True if the layer runs in one chunk whatever the plan is."""
        return bool(self.why_unchunked)

    def run_unchunked(self, reason: str) -> None:
        """Run the layer in one chunk from its next call on, whatever the plan is.

        Args:
            reason: the reason, for messages.
        """
        is_unpadded_by_choice = self.is_unpadded_by_choice
        self.why_unchunked = reason
        if is_unpadded_by_choice:
            self.apply(self.plan)
        elif self.pipeline is not None and self.pipeline.is_chunked:
            self.pipeline = self.pipeline.unchunked()

    def attach(self, window: GradientWindow | None, observer: Observer | None = None) -> None:
        """Send gradients during the layer's backward, and report its tasks to an observer, from the next call on.

        Args:
            window: the window of the gradients; ``None``: none are sent.
            observer: receives every task; ``None``: no observer.
        """
        assert self.pipeline is not None
        self.pipeline = replace(self.pipeline, window=window, observer=observer)


class ConvertedLayer(OpaqueModule):
    """Replaces the forward of a module, as a base in front of its class. Made by conversion, never constructed."""

    fsmoe: LayerState
    """All state of this package; without it the module is the original one."""

    @property
    def label(self) -> str:
        """Return the label of the layer, in traces."""
        return self.fsmoe.label

    @property
    def pipeline(self) -> LayerPipeline | None:
        """Return the pipeline that runs the layer; changed by :class:`LayerState` alone."""
        return self.fsmoe.pipeline

    @property
    def total_experts(self) -> int:
        """Return the number of experts of all ranks."""
        return self.num_local_experts * self.ep_size

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy or pickle the layer, alone or with its model, unless it has an engine and a script does it.

        Raises:
            LayerError: the layer has an engine.
        """
        may_be_copied = self.fsmoe.running is None or asking() in TRUSTED
        return super().__reduce_ex__(protocol) if may_be_copied else refuse_copy(self.fsmoe.path)

    def run_alone(self, device: torch.device) -> None:
        """Run the layer without an engine of ours, and without other ranks."""
        self.fsmoe.run_alone(None)
