# SPDX-License-Identifier: Apache-2.0
"""Implements the layer inside DeepSpeed: subclasses of stock's gate and inner MoE layer.

DeepSpeed decides parameter groups, expert checkpoints, timers and refusals by ``isinstance`` on ``MoE``, ``MOELayer``
and ``TopKGate``. So a layer is converted (see ``engine/convert_layers.py``) by giving its inner modules one of these as
their class: same Parameter objects, same state-dict names, every ``isinstance`` still true.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from deepspeed.moe.experts import Experts as StockExperts
from deepspeed.moe.layer import MoE as StockMoE
from deepspeed.moe.sharded_moe import MOE_TIMER, TOPK_GATE_TIMER
from deepspeed.moe.sharded_moe import MOELayer as StockMOELayer
from deepspeed.moe.sharded_moe import TopKGate as StockTopKGate
from deepspeed.utils import groups as stock_groups
from torch import nn

from ds_fsmoe.checks.no_door import warn_without_door
from ds_fsmoe.components.expert_compute.autograd_call import buffers_kept
from ds_fsmoe.components.expert_compute.calls import ExpertSet
from ds_fsmoe.components.expert_compute.manual_ffn import is_observed, runs_unobserved
from ds_fsmoe.components.gate import GateBase
from ds_fsmoe.components.gates.topk import TopKSettings, route_top_k
from ds_fsmoe.components.routing import (
    ReplayedRouting,
    Routing,
    RoutingBase,
    StockMasks,
    StockRoutes,
    routing_of,
    stock_masks,
    stock_routes,
)
from ds_fsmoe.distributed.groups import sizes_of_mpu
from ds_fsmoe.execution.pipeline import WholeExperts
from ds_fsmoe.layer.moe_layer import token_path
from ds_fsmoe.layer.parts import LayerError
from ds_fsmoe.layer.replay import remembering
from ds_fsmoe.layer.state import ConvertedLayer, hand_out
from ds_fsmoe.observing.instruments import LayerCall
from ds_fsmoe.observing.spans import Recorder
from ds_fsmoe.ops import REFERENCE, Ops
from ds_fsmoe.planning.schedule import A2A_IN, A2A_IN_NODE, A2A_OUT, A2A_OUT_NODE

# ---- Handles the module ``deepspeed_moe.experts`` that holds a rank's experts, and says whether it must be
# called itself
#
# DeepSpeed's own only hands each expert its rows, so our layer takes the experts out of it. Where a user has put
# hooks on it, or replaced its forward or the module itself, it is called once with all rows.


def is_like_stocks(container: nn.Module) -> bool:
    """Return whether it computes what DeepSpeed's does: its class, or one that changes neither forward nor call."""
    return (
        isinstance(container, StockExperts)
        and type(container).forward is StockExperts.forward
        and type(container).__call__ is nn.Module.__call__
        and "forward" not in vars(container)
    )


def why_called(container: nn.Module) -> str | None:
    """Say why it has to be called itself, as the rest of a sentence about its layer; ``None`` if it need not be."""
    if not is_like_stocks(container):
        kind = type(container)
        return f"its experts module is a {kind.__module__}.{kind.__qualname__}, which is called with all rows at once"
    if is_observed(container):
        return "hooks on its experts module are to see all rows at once, as in DeepSpeed"
    return None


def whole_experts(container: nn.Module, path: str) -> WholeExperts:
    """Wrap the container of a layer, to be called once.

    Args:
        container: the container of the layer.
        path: the path of the layer in the model.
    """
    name = f"{path}.deepspeed_moe.experts, a {type(container).__name__}," if path else type(container).__name__
    again = partial(buffers_kept, container)
    return WholeExperts(container, tuple(container.parameters()), name, again, is_like_stocks(container))


def check_containers(layers: Mapping[str, Any], esp_size: int) -> None:
    """Refuse to shard experts over several ranks where their module would be shown partial sums.

    Args:
        layers: name -> a ``deepspeed.moe.layer.MoE``.
        esp_size: the ranks that share an expert.

    Raises:
        LayerError: the container has to be called; names the layer.
    """
    for name, layer in layers.items() if esp_size > 1 else ():
        if reason := why_called(layer.deepspeed_moe.experts):
            raise LayerError(
                f"fsmoe.expert_tensor_parallel_size = {esp_size}: {name}: {reason}; with experts cut over {esp_size} "
                "ranks there would be parts of sums to see: use 1"
            )


# ---- Implements the layer inside DeepSpeed: subclasses of stock's gate and inner MoE layer


__all__ = ["FSMoEGate", "FSMoELayer", "StockMOELayer", "StockMoE", "StockTopKGate", "gate_settings"]


class FSMoEGate(StockTopKGate):
    """Decides our way in stock's gate module, with its parameter ``wg``.

    Called as a module it takes and returns what stock's does, so hooks on it, and other callers, see what they would
    see there. Our layer calls it only where that makes a difference; otherwise it uses :meth:`decide`.
    """

    ops: Ops = REFERENCE
    """The operators, see :class:`~ds_fsmoe.components.gate.GateBase`."""
    says_entropy: bool = False
    """Whether the entropy is reported, see :class:`~ds_fsmoe.components.gate.GateBase`."""
    needs_capacity: bool = True
    """Whether ranks have to agree on a capacity, see :class:`~ds_fsmoe.components.gate.GateBase`."""
    takes_given: ClassVar[bool] = True
    given: ReplayedRouting | None = None
    """The choice to go by, see :class:`~ds_fsmoe.components.gate.GateBase`."""
    _decided: Routing | None = None

    @property
    def takes_width(self) -> int | None:
        """The width of the gate's input, see :class:`~ds_fsmoe.components.gate.GateBase`."""
        return getattr(self.wg, "in_features", None)

    def forward(
        self,
        input: torch.Tensor,
        used_token: torch.Tensor | None = None,
        sparse_routes: bool = False,
        use_tutel: bool = False,
    ) -> StockRoutes | StockMasks:
        """Take stock's arguments and return its results; ``use_tutel`` changes nothing."""
        # Where rows travel, the ranks need not agree, and may not all have come here: what is shown is this rank's.
        routing = self._decide(input, used_token, self.ep_group if self.needs_capacity else None, True)
        self._decided = routing
        return stock_routes(routing) if sparse_routes else stock_masks(routing)

    def decide_heard(self, x_SM: torch.Tensor, used_token_S: torch.Tensor | None) -> Routing:
        """Decide through the module's call, from what its hooks have left of the result."""
        routing = routing_of(self(x_SM, used_token_S, True, False))
        # The tuple has no place for what was chosen and dropped, and for the entropy.
        decided, self._decided = self._decided, None
        if decided is None:
            return routing
        chosen_KS = torch.where(routing.slots_KS < routing.num_slots, routing.chosen(), decided.chosen())
        return replace(routing, entropy=decided.entropy, experts_KS=chosen_KS)

    def decide(self, x_SM: torch.Tensor, used_token_S: torch.Tensor | None, group: dist.ProcessGroup | None) -> Routing:
        """See :class:`~ds_fsmoe.components.gate.GateBase`."""
        return self._decide(x_SM, used_token_S, group, self.needs_capacity)

    def _decide(
        self,
        x_SM: torch.Tensor,
        used_token_S: torch.Tensor | None,
        group: dist.ProcessGroup | None,
        needs_capacity: bool,
    ) -> Routing:
        with _timed(self, TOPK_GATE_TIMER, "gate_time") if self.wall_clock_breakdown else nullcontext():
            options = {"ops": self.ops, "says_entropy": self.says_entropy, "needs_capacity": needs_capacity}
            options |= {"given": self.given}
            settings = gate_settings(self)
            return route_top_k(x_SM, self.wg.weight, settings, self.training, used_token_S, group, **options)


def gate_settings(gate: StockTopKGate) -> TopKSettings:
    """The settings of a stock gate, read at every call because callers may change them between steps."""
    return TopKSettings(
        k=gate.k,
        capacity_factor=gate.capacity_factor,
        eval_capacity_factor=gate.eval_capacity_factor,
        min_capacity=gate.min_capacity,
        noisy_gate_policy=gate.noisy_gate_policy,
        drop_tokens=gate.drop_tokens,
        drop_policy=getattr(gate, "drop_policy", "probs"),
        use_rts=gate.use_rts,
        top2_2nd_expert_sampling=gate.top2_2nd_expert_sampling,
    )


class FSMoELayer(ConvertedLayer, StockMOELayer):
    """Runs tokens our way in DeepSpeed's inner MoE layer, ``moe.deepspeed_moe``. Made by conversion, never constructed.

    It has the parameters, the names in a state dict and the results of DeepSpeed's ``MOELayer``: its forward maps
    [..., M] to [..., M], and leaves ``l_aux``, a scalar, and ``exp_counts`` [E] on the layer.

    Examples:
        >>> import torch, ds_fsmoe
        >>> layer = ds_fsmoe.MoE(8, torch.nn.Linear(8, 8), num_experts=4, k=2)
        >>> inner = layer.deepspeed_moe
        >>> isinstance(inner, ds_fsmoe.FSMoELayer), inner(torch.randn(6, 8)).shape, inner.exp_counts.sum()
        (True, torch.Size([6, 8]), tensor(12))
    """

    def fits_operator(self, *args: Any, **kwargs: Any) -> bool:
        """Return whether a call can go through the operator: what types other gates and autocast give is not known."""
        is_known = isinstance(self.gate, FSMoEGate) and not torch.is_autocast_enabled(args[0].device.type)
        return is_known and not kwargs

    def through_operator(self, *args: Any) -> torch.Tensor:
        """Return what a call returns, in compiled code, and leave behind what it leaves."""
        second = args[1] if len(args) > 1 else None
        num_experts = self.num_local_experts * self.ep_size
        result, self.l_aux, self.exp_counts = self.call_operator(args[0], second, num_experts=num_experts)
        return result

    def forward(self, hidden_states: torch.Tensor, used_token: torch.Tensor | None = None) -> torch.Tensor:
        """Map [..., M] to [..., M]; leave ``l_aux`` and ``exp_counts`` on the layer, where stock's ``MoE`` reads them.

        Args:
            hidden_states: [..., M], the tokens of this rank.
            used_token: [S], 0 for tokens that take no part; ``None``: all do.

        Raises:
            RuntimeError: the experts are spread over ranks, and the process group was not made.
        """
        state = self.fsmoe
        forward = state.begin_call(self, hidden_states)
        in_rows = state.sends_rows(self.gate)
        if isinstance(self.gate, (FSMoEGate, GateBase)):
            self.gate.needs_capacity = not in_rows
        call = self._call(hidden_states, in_rows)
        given = state.next_given()
        state.check_given(given, hidden_states.shape[:-1].numel())
        call.gate = remembering(call.gate, self.gate, state, given)
        with _stock_times(self, call) if self.wall_clock_breakdown else nullcontext():
            for show in state.instruments:
                show(call)
            result = token_path(
                hidden_states,
                used_token,
                gate=call.gate,
                order=state.order,
                pipeline=call.pipeline,
                experts=call.experts,
                group=self.ep_group if state.running is None else state.capacity_group,
                callbacks=state.parts.callbacks,
                duplicates=state.duplicates,
                width=getattr(self.gate, "takes_width", None),
                name=state.path,
                in_rows=in_rows,
                placed=state.placed,
                forward=forward,
            )
        self.l_aux, self.exp_counts = result.aux_loss, result.counts_E
        if state.mp_group is not None and not state.tensor_parallel.same_tokens:
            # Each rank has the loss of its own tokens: added up over the group they are to be its mean.
            self.l_aux = self.l_aux / state.mp_group.size()
        return result.output

    def run_alone(self) -> None:
        """Run the layer without an engine of ours, among the ranks of its group.

        Raises:
            RuntimeError: it has other ranks, and no group yet.
        """
        if self.ep_size > 1 and self.ep_group is None:
            raise RuntimeError(
                f"this MoE layer spreads its experts over ep_size = {self.ep_size} ranks and has no process group yet: "
                "call initialize() before the first forward"
            )
        self.fsmoe.run_alone(self.ep_group)

    def _call(self, x: torch.Tensor, in_rows: bool) -> LayerCall:
        """Return the next call of the layer, as it is made where no instrument changes it."""
        state, local = self.fsmoe, self.local_experts()
        experts: ExpertSet | WholeExperts | None = local
        if why_called(self.experts) is not None:
            if not state.pipeline.is_cut:
                experts = whole_experts(self.experts, state.path)
            elif local is None:
                raise RuntimeError(
                    f"{state.path}: another experts module was put in after the first forward, and the layer is run "
                    "in chunks: call engine.fsmoe.look_again() on every rank after such a change"
                )
        group = state.capacity_group
        of_layer = state.label, state.path, self.training, x, group, self.route, state.pipeline, experts, local
        return LayerCall(*of_layer, in_rows)

    def why_called(self) -> str | None:
        """Return why the experts module has to be called itself; ``None`` if it need not be."""
        return why_called(self.experts)

    def run_without_tokens(self, shape: torch.Size, like: torch.Tensor) -> torch.Tensor:
        """Take part in a forward of the other ranks, with tokens that are masked out.

        Args:
            shape: the shape of the tokens, [..., M].
            like: a tensor that the result is to hang on.

        Returns:
            A scalar, 0.
        """
        weight = next(self.experts.parameters())
        x = torch.zeros(shape, dtype=weight.dtype, device=weight.device) + like.to(weight)
        y = self(x, torch.zeros(shape[:-1].numel(), device=weight.device))
        return 0.0 * (y.float().sum() + self.l_aux.float())

    def local_experts(self) -> ExpertSet | None:
        """Return the experts of this rank; ``None`` where nothing is known of the module that holds them."""
        if not is_like_stocks(self.experts):
            return None
        state, modules = self.fsmoe, tuple(self.experts.deepspeed_experts)
        # Compared by identity: whoever puts other modules or parameters in their place gets a new set.
        present = [*modules, *(parameter for module in modules for parameter in module.parameters())]
        if state.known_experts is None or [*map(id, present)] != [*map(id, state.known_experts[0])]:
            state.known_experts = present, ExpertSet(modules, keep_expert_dim=True, path=state.path)
        return state.known_experts[1]

    def _set_ep_group(self, ep_group: dist.ProcessGroup) -> None:
        self.ep_group = ep_group
        state = self.fsmoe
        if state.running is not None:
            # DeepSpeed comes here layer by layer on every rank, and making groups is collective.
            groups = state.connect(self.ep_size, self.gate)
            if state.unsharded is not None and groups.block_group is not None:
                rules = state.running.experts_by_rule(self.ep_size)
                esp_size, path = state.running.block.esp_size, state.path or state.label
                shards = self.experts.deepspeed_experts
                hand_out(state.unsharded, shards, groups.block_group, rules, esp_size, path)
            state.unsharded = None
        elif sizes_of_mpu(stock_groups.mpu)[0] > 1:
            raise LayerError(
                f"a ds_fsmoe.MoE among {sizes_of_mpu(stock_groups.mpu)[0]} tensor-parallel ranks, in an engine of "
                "DeepSpeed's own: call ds_fsmoe.initialize, or ds_fsmoe.install() first, with fsmoe.enabled = true"
            )
        elif warn_without_door not in state.checks_without_engine:
            # Only an engine gives a layer its group, and this one is not ours.
            state.checks_without_engine.append(warn_without_door)
        if hasattr(self.gate, "_set_ep_group"):  # stock's gate, or a user's module in its place
            self.gate._set_ep_group(ep_group if state.capacity_group is None else state.capacity_group)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Extend torch's hook of every module: add a sentence to the error where shards are given whole experts."""
        super()._load_from_state_dict(state_dict, prefix, *others)
        running = self.fsmoe.running
        esp_size = 1 if running is None else running.block.esp_size
        experts = f"{prefix}experts.deepspeed_experts."
        for name, own in self.experts.deepspeed_experts.named_parameters() if esp_size > 1 else ():
            shape = getattr(state_dict.get(experts + name), "shape", own.shape)
            if shape != own.shape:
                *_, error_messages = others
                error_messages.append(
                    f"{experts}{name} is {list(shape)} there and {list(own.shape)} here, because a rank holds shards "
                    f"of experts with fsmoe.expert_tensor_parallel_size = {esp_size}. Load whole experts before "
                    "initialize(), on rank r those of EP rank r % ep_size, or a checkpoint by "
                    "engine.load_checkpoint(), which cuts what it reads"
                )
                return

    def route(
        self, x_SM: torch.Tensor, used_token_S: torch.Tensor | None, group: dist.ProcessGroup | None
    ) -> RoutingBase:
        """Return what the layer's gate decides; see :class:`~ds_fsmoe.components.gate.GateBase`."""
        if isinstance(self.gate, FSMoEGate) and not runs_unobserved(self.gate):
            return self.gate.decide_heard(x_SM, used_token_S)
        return self.route_unheard(x_SM, used_token_S, group)

    def route_unheard(
        self, x_SM: torch.Tensor, used_token_S: torch.Tensor | None, group: dist.ProcessGroup | None
    ) -> RoutingBase:
        """Return what the gate decides, without the hooks of a gate like stock's: for made-up tokens."""
        if isinstance(self.gate, FSMoEGate):
            return self.gate.decide(x_SM, used_token_S, group)
        if isinstance(self.gate, GateBase):
            return self.gate(x_SM, used_token_S, group)
        # A user's subclass of stock's gate keeps its own forward; only what it returns is translated.
        return routing_of(self.gate(x_SM, used_token_S, True, False))


@contextmanager
def _stock_times(layer: FSMoELayer, call: LayerCall) -> Iterator[None]:
    """Time what stock's ``wall_clock_breakdown`` prints of a layer: its whole call, and the two all-to-alls in it."""
    recorder = Recorder(call.x.device)
    call.pipeline = call.pipeline.watched(recorder)
    with _timed(layer, MOE_TIMER, "time_moe"):
        yield
    spans = recorder.timeline(call.pipeline.forward.schedule).spans
    layer.time_falltoall, layer.time_salltoall = (
        sum(each.end_ms - each.start_ms for each in spans if each.task.kind in kinds)
        for kinds in ((A2A_IN_NODE, A2A_IN), (A2A_OUT, A2A_OUT_NODE))
    )


@contextmanager
def _timed(module: nn.Module, timer: str, attribute: str) -> Iterator[None]:
    """Run one of stock's timers, which ``wall_clock_breakdown`` prints from the attributes of gate and layer."""
    module.timers(timer).start()
    yield
    module.timers(timer).stop()
    setattr(module, attribute, module.timers(timer).elapsed(reset=False))
