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

import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE as StockMoE
from deepspeed.moe.sharded_moe import MOE_TIMER, TOPK_GATE_TIMER
from deepspeed.moe.sharded_moe import MOELayer as StockMOELayer
from deepspeed.moe.sharded_moe import TopKGate as StockTopKGate
from deepspeed.utils import groups as stock_groups
from torch import nn

from ds_fsmoe.components.expert_calls import ExpertSet, expert_set
from ds_fsmoe.components.gate import GateBase
from ds_fsmoe.components.gates.topk import TopKSettings, route_top_k
from ds_fsmoe.components.order import OrderBase
from ds_fsmoe.components.routing import Routing, RoutingBase
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
from ds_fsmoe.telemetry.routers import RouterMetrics

__all__ = ["FSMoEGate", "FSMoELayer", "StockMOELayer", "StockMoE", "StockTopKGate", "gate_settings"]


class FSMoEGate(StockTopKGate):
    """Stock's gate module, its parameter ``wg`` included, with a forward that returns a :class:`Routing`."""

    ops: Ops = REFERENCE
    """See :class:`~ds_fsmoe.components.gate.GateBase`."""
    says_entropy: bool = False
    """Likewise."""

    @property
    def takes_width(self) -> int | None:
        """Likewise."""
        return getattr(self.wg, "in_features", None)

    def forward(
        self,
        x_SM: torch.Tensor,
        used_token_S: torch.Tensor | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> Routing:
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
    last_shape: torch.Size | None = None
    """Of the last input."""
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
        recorder = Recorder(hidden_states.device) if self.wall_clock_breakdown else None
        pipeline = self.pipeline
        if not self.training and pipeline.observer is not None:
            # A step is traced, and no evaluation that happens to come before it.
            pipeline = replace(pipeline, observer=None)
        if recorder is not None:
            traced = pipeline.observer
            pipeline = replace(pipeline, observer=recorder if traced is None else Together(traced, recorder))
        experts = self._local_experts()
        if self.training and self.running is not None:
            pipeline = self.running.first_forwards.watch(self.label, self.path, experts, pipeline, hidden_states)
        if self.training and self.expert_results is not None:
            experts = self.expert_results.around(experts, self.path)
        gate = self.route
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

    def _local_experts(self) -> ExpertSet:
        modules = tuple(self.experts.deepspeed_experts)
        # Compared by identity: whoever puts other modules or parameters in their place gets a new set.
        present = [*modules, *(parameter for module in modules for parameter in module.parameters())]
        if self._known_experts is None or [*map(id, present)] != [*map(id, self._known_experts[0])]:
            self._known_experts = present, expert_set(modules, keep_expert_dim=True, path=self.path)
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
        elif sizes_of_mpu(stock_groups.mpu)[0] > 1:
            raise LayerError(
                f"a ds_fsmoe.MoE among {sizes_of_mpu(stock_groups.mpu)[0]} tensor-parallel ranks, in an engine of "
                "DeepSpeed's own: call ds_fsmoe.initialize, or ds_fsmoe.install() first, with fsmoe.enabled = true"
            )
        if hasattr(self.gate, "_set_ep_group"):  # stock's gate, or a user's module in its place
            self.gate._set_ep_group(ep_group if self.capacity_group is None else self.capacity_group)

    def route(
        self, x_SM: torch.Tensor, used_token_S: torch.Tensor | None, group: dist.ProcessGroup | None
    ) -> RoutingBase:
        """What the layer's gate decides; see :class:`~ds_fsmoe.components.gate.GateBase`."""
        by_own_gate = not isinstance(self.gate, (FSMoEGate, GateBase))
        return (self._route_by_own_gate if by_own_gate else self.gate)(x_SM, used_token_S, group)

    def _route_by_own_gate(
        self, x_SM: torch.Tensor, used_token_S: torch.Tensor | None, group: dist.ProcessGroup | None
    ) -> Routing:
        """A user's subclass of stock's gate keeps its own forward; only what it returns is translated."""
        aux_loss, capacity, num_experts, expert_KS, position_KS, weights_KS, counts_E = self.gate(
            x_SM, used_token_S, True, False
        )
        capacity = int(capacity)
        slots_KS = torch.where(expert_KS >= 0, expert_KS.long() * capacity + position_KS.long(), num_experts * capacity)
        return Routing(slots_KS, weights_KS, aux_loss, counts_E, capacity, num_experts)


def _timed(module: nn.Module, timer: str, attribute: str) -> AbstractContextManager:
    """Stock's timers, which its ``wall_clock_breakdown`` prints from the attributes of gate and layer."""
    return _running(module, timer, attribute) if module.wall_clock_breakdown else nullcontext()


@contextmanager
def _running(module: nn.Module, timer: str, attribute: str) -> Iterator[None]:
    module.timers(timer).start()
    yield
    module.timers(timer).stop()
    setattr(module, attribute, module.timers(timer).elapsed(reset=False))
