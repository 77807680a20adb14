# SPDX-License-Identifier: Apache-2.0
"""The layer inside DeepSpeed: subclasses of stock's gate and inner MoE layer.

DeepSpeed decides parameter groups, expert checkpoints, timers and refusals by ``isinstance`` on ``MoE``, ``MOELayer``
and ``TopKGate``. So a layer is converted (see ``takeover.py``) by giving its inner modules one of these as their class:
same Parameter objects, same state-dict names, every ``isinstance`` still true.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE as StockMoE
from deepspeed.moe.sharded_moe import MOE_TIMER, TOPK_GATE_TIMER
from deepspeed.moe.sharded_moe import MOELayer as StockMOELayer
from deepspeed.moe.sharded_moe import TopKGate as StockTopKGate
from deepspeed.utils import groups as stock_groups
from torch import nn

from ds_fsmoe.components.expert_calls import ExpertSet
from ds_fsmoe.components.gate import GateBase
from ds_fsmoe.components.gates.topk import TopKSettings, route_top_k
from ds_fsmoe.components.order import OrderBase
from ds_fsmoe.components.routing import Routing, RoutingBase
from ds_fsmoe.components.stock_routes import StockMasks, StockRoutes, routing_of, stock_masks, stock_routes
from ds_fsmoe.components.written import runs_unobserved
from ds_fsmoe.container import is_like_stocks, whole_experts, why_called
from ds_fsmoe.expert_results import ExpertResults
from ds_fsmoe.moe_layer import token_path
from ds_fsmoe.ops import REFERENCE, Ops
from ds_fsmoe.parts import LayerError, Parts
from ds_fsmoe.planning.schedule import A2A_IN, A2A_IN_NODE, A2A_OUT, A2A_OUT_NODE
from ds_fsmoe.router_checks import RouterCheck
from ds_fsmoe.running import Running, alone
from ds_fsmoe.runtime.duplicates import PLAIN, Duplicates, TensorParallelUse
from ds_fsmoe.runtime.groups import sizes_of_mpu
from ds_fsmoe.runtime.pipeline import Pipeline
from ds_fsmoe.runtime.spans import Recorder, Together
from ds_fsmoe.runtime.whole import WholeExperts
from ds_fsmoe.telemetry.routers import RouterMetrics
from ds_fsmoe.unsharded import UnshardedExperts

__all__ = ["FSMoEGate", "FSMoELayer", "StockMOELayer", "StockMoE", "StockTopKGate", "gate_settings"]


class FSMoEGate(StockTopKGate):
    """Stock's gate module, its parameter ``wg`` included, that decides in our way.

    Called as a module it takes and returns what stock's does, so hooks on it, and whoever else calls it, see what they
    would see there. Our layer does so only where somebody would notice; otherwise it asks :meth:`decide`.
    """

    ops: Ops = REFERENCE
    """See :class:`~ds_fsmoe.components.gate.GateBase`."""
    says_entropy: bool = False
    """Likewise."""
    _entropy: torch.Tensor | None = None

    @property
    def takes_width(self) -> int | None:
        """Likewise."""
        return getattr(self.wg, "in_features", None)

    def forward(
        self,
        input: torch.Tensor,
        used_token: torch.Tensor | None = None,
        sparse_routes: bool = False,
        use_tutel: bool = False,
    ) -> StockRoutes | StockMasks:
        """Stock's arguments and results; ``use_tutel`` changes nothing."""
        routing = self.decide(input, used_token, self.ep_group)
        self._entropy = routing.entropy
        return stock_routes(routing) if sparse_routes else stock_masks(routing)

    def decide_heard(self, x_SM: torch.Tensor, used_token_S: torch.Tensor | None) -> Routing:
        """Through the module's call, by what its hooks have left of the result."""
        routing = routing_of(self(x_SM, used_token_S, True, False))
        # The tuple has no place for it.
        entropy, self._entropy = self._entropy, None
        return replace(routing, entropy=entropy)

    def decide(self, x_SM: torch.Tensor, used_token_S: torch.Tensor | None, group: dist.ProcessGroup | None) -> Routing:
        """See :class:`~ds_fsmoe.components.gate.GateBase`."""
        with _timed(self, TOPK_GATE_TIMER, "gate_time"):
            settings, ops, says_entropy = gate_settings(self), self.ops, self.says_entropy
            return route_top_k(x_SM, self.wg.weight, settings, self.training, used_token_S, group, ops, says_entropy)


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


class FSMoELayer(StockMOELayer):
    """Stock's inner MoE layer, with our way for the tokens. Made by :func:`take_over`, never constructed."""

    parts: Parts
    order: OrderBase
    running: Running | None = None
    router_check: RouterCheck | None = None
    expert_results: ExpertResults | None = None
    router_metrics: RouterMetrics | None = None
    pipeline: Pipeline | None = None
    label: str = "moe"
    path: str = ""
    """Of the layer in its model, for messages."""
    tensor_parallel: TensorParallelUse = PLAIN
    duplicates: Duplicates | None = None
    """The tensor-parallel ranks that have the same tokens, if there are any."""
    capacity_group: dist.ProcessGroup | None = None
    mp_group: dist.ProcessGroup | None = None
    """See :class:`~ds_fsmoe.runtime.groups.FSMoEGroups`."""
    is_uncut: bool = False
    """Whether it is not to be cut; see :class:`~ds_fsmoe.uncut.Uncut`."""
    last_shape: torch.Size | None = None
    """Of the last input."""
    unsharded: UnshardedExperts | None = None
    """Of this rank, where they are to be sharded and the groups are not there yet."""
    _known_experts: tuple[list, ExpertSet] | None = None

    def forward(self, hidden_states: torch.Tensor, used_token: torch.Tensor | None = None) -> torch.Tensor:
        """[..., M] to [..., M]; leaves ``l_aux`` and ``exp_counts`` on the layer, where stock's ``MoE`` reads them.

        Raises:
            RuntimeError: the experts are spread over ranks, and nobody has made the process group.
        """
        if self.ep_size > 1 and self.ep_group is None:
            raise RuntimeError(
                f"this MoE layer spreads its experts over ep_size = {self.ep_size} ranks and has no process group yet: "
                "call initialize() before the first forward"
            )
        self.last_shape = hidden_states.shape
        if self.pipeline is None:
            self.pipeline = alone(self.parts.alltoall.exchange, self.ep_group)
        if self.running is not None:
            self.running.uncut.look(self, hidden_states)
        recorder = Recorder(hidden_states.device) if self.wall_clock_breakdown else None
        pipeline = self.pipeline
        if not self.training and pipeline.observer is not None:
            # A step is traced, and no evaluation that happens to come before it.
            pipeline = replace(pipeline, observer=None)
        if recorder is not None:
            traced = pipeline.observer
            pipeline = replace(pipeline, observer=recorder if traced is None else Together(traced, recorder))
        experts = self.local_experts()
        if self.training and self.running is not None and isinstance(experts, ExpertSet):
            pipeline = self.running.first_forwards.watch(self.label, experts, pipeline, hidden_states)
        experts = self._called(experts, pipeline)
        gate = self.route
        if self.running is not None:
            comparing = self.running.first_forwards.comparing
            gate = comparing(gate, self.label, self.path, self.training, self.capacity_group)
        if self.training and self.router_check is not None:
            gate = self.router_check.before(gate, self.path)
        if self.training and self.router_metrics is not None:
            gate = self.router_metrics.after(gate, self.label)
        with _timed(self, MOE_TIMER, "time_moe"):
            result = token_path(
                hidden_states,
                used_token,
                gate=gate,
                order=self.order,
                pipeline=pipeline,
                experts=experts,
                group=self.ep_group if self.running is None else self.capacity_group,
                callbacks=self.parts.callbacks,
                duplicates=self.duplicates,
                width=getattr(self.gate, "takes_width", None),
                name=self.path,
            )
        if recorder is not None:
            spans = recorder.timeline(pipeline.forward.schedule).spans
            self.time_falltoall, self.time_salltoall = (
                sum(each.end_ms - each.start_ms for each in spans if each.task.kind in kinds)
                for kinds in ((A2A_IN_NODE, A2A_IN), (A2A_OUT, A2A_OUT_NODE))
            )
        self.l_aux, self.exp_counts = result.aux_loss, result.counts_E
        if self.mp_group is not None and not self.tensor_parallel.same_tokens:
            # Each rank has the loss of its own tokens: added up over the group they are to be its mean.
            self.l_aux = self.l_aux / self.mp_group.size()
        return result.output

    def _called(self, experts: ExpertSet | None, pipeline: Pipeline) -> ExpertSet | WholeExperts:
        """The experts as this call needs them."""
        results = self.expert_results if self.training else None
        if why_called(self.experts) is not None:
            if not pipeline.is_cut:
                look = None if results is None else partial(results.look, self.path)
                return whole_experts(self.experts, self.path, look)
            if experts is None:
                raise RuntimeError(
                    f"{self.path}: another experts module was put in after the first forward, and the layer is run in "
                    "chunks: call engine.fsmoe.look_again() on every rank after such a change"
                )
        assert experts is not None
        return experts if results is None else results.around(experts, self.path)

    def local_experts(self) -> ExpertSet | None:
        """The experts of this rank; ``None`` where nothing is known of the module that holds them."""
        if not is_like_stocks(self.experts):
            return None
        modules = tuple(self.experts.deepspeed_experts)
        # Compared by identity: whoever puts other modules or parameters in their place gets a new set.
        present = [*modules, *(parameter for module in modules for parameter in module.parameters())]
        if self._known_experts is None or [*map(id, present)] != [*map(id, self._known_experts[0])]:
            self._known_experts = present, ExpertSet(modules, keep_expert_dim=True, path=self.path)
        return self._known_experts[1]

    def _set_ep_group(self, ep_group: dist.ProcessGroup) -> None:
        self.ep_group = ep_group
        if self.running is not None:
            # DeepSpeed comes here layer by layer on every rank, and making groups is collective.
            use = self.tensor_parallel
            self.pipeline = self.running.pipeline(self.label, self.ep_size, self.parts.alltoall, use)
            groups = self.running.groups(self.ep_size, use)
            self.capacity_group, self.mp_group = groups.capacity_group, groups.mp_group
            if use.same_tokens and groups.mp_group is not None:
                self.duplicates = Duplicates(groups.mp_group)
            if self.unsharded is not None and groups.block_group is not None:
                rules = self.running.experts_by_rule(self.ep_size)
                esp_size, path = self.running.block.esp_size, self.path or self.label
                self.unsharded.hand_out(self.experts.deepspeed_experts, groups.block_group, rules, esp_size, path)
            self.unsharded = None
        elif sizes_of_mpu(stock_groups.mpu)[0] > 1:
            raise LayerError(
                f"a ds_fsmoe.MoE among {sizes_of_mpu(stock_groups.mpu)[0]} tensor-parallel ranks, in an engine of "
                "DeepSpeed's own: call ds_fsmoe.initialize, or ds_fsmoe.install() first, with fsmoe.enabled = true"
            )
        if hasattr(self.gate, "_set_ep_group"):  # stock's gate, or a user's module in its place
            self.gate._set_ep_group(ep_group if self.capacity_group is None else self.capacity_group)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Torch's hook of every module; what it adds is a sentence where shards are given whole experts."""
        super()._load_from_state_dict(state_dict, prefix, *others)
        esp_size = 1 if self.running is None else self.running.block.esp_size
        experts = f"{prefix}experts.deepspeed_experts."
        for name, own in self.experts.deepspeed_experts.named_parameters() if esp_size > 1 else ():
            shape = getattr(state_dict.get(experts + name), "shape", own.shape)
            if shape != own.shape:
                *_, error_messages = others
                error_messages.append(
                    f"{experts}{name} is {list(shape)} there and {list(own.shape)} here, because a rank holds shards "
                    f"of experts with fsmoe.esp_size = {esp_size}. Load whole experts before initialize(), on rank r "
                    "those of EP rank r % ep_size, or a checkpoint by engine.load_checkpoint(), which cuts what it "
                    "reads"
                )
                return

    def route(
        self, x_SM: torch.Tensor, used_token_S: torch.Tensor | None, group: dist.ProcessGroup | None
    ) -> RoutingBase:
        """What the layer's gate decides; see :class:`~ds_fsmoe.components.gate.GateBase`."""
        if isinstance(self.gate, FSMoEGate) and not runs_unobserved(self.gate):
            return self.gate.decide_heard(x_SM, used_token_S)
        return self.route_unheard(x_SM, used_token_S, group)

    def route_unheard(
        self, x_SM: torch.Tensor, used_token_S: torch.Tensor | None, group: dist.ProcessGroup | None
    ) -> RoutingBase:
        """The same without the hooks of a gate like stock's: for tokens that are made up."""
        if isinstance(self.gate, FSMoEGate):
            return self.gate.decide(x_SM, used_token_S, group)
        if isinstance(self.gate, GateBase):
            return self.gate(x_SM, used_token_S, group)
        # A user's subclass of stock's gate keeps its own forward; only what it returns is translated.
        return routing_of(self.gate(x_SM, used_token_S, True, False))


def _timed(module: nn.Module, timer: str, attribute: str) -> AbstractContextManager:
    """Stock's timers, which its ``wall_clock_breakdown`` prints from the attributes of gate and layer."""
    return _running(module, timer, attribute) if module.wall_clock_breakdown else nullcontext()


@contextmanager
def _running(module: nn.Module, timer: str, attribute: str) -> Iterator[None]:
    module.timers(timer).start()
    yield
    module.timers(timer).stop()
    setattr(module, attribute, module.timers(timer).elapsed(reset=False))
