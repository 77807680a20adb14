# SPDX-License-Identifier: Apache-2.0
"""The layer inside DeepSpeed: stock's MoE modules made ours, and back, without touching a parameter.

DeepSpeed decides parameter groups, expert checkpoints, timers and refusals by ``isinstance`` on ``MoE``, ``MOELayer``
and ``TopKGate``. So a layer is converted by giving its inner modules a subclass as their class: same Parameter
objects, same state-dict names, every ``isinstance`` still true.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE as StockMoE
from deepspeed.moe.sharded_moe import (
    FIRST_ALLTOALL_TIMER,
    MOE_TIMER,
    SECOND_ALLTOALL_TIMER,
    TOPK_GATE_TIMER,
)
from deepspeed.moe.sharded_moe import MOELayer as StockMOELayer
from deepspeed.moe.sharded_moe import TopKGate as StockTopKGate
from torch import nn

from ds_fsmoe import registry
from ds_fsmoe.components.alltoall import AllToAllBase
from ds_fsmoe.components.gate import GateBase
from ds_fsmoe.components.gates.topk import TopKSettings, route_top_k
from ds_fsmoe.components.order import OrderBase
from ds_fsmoe.components.orders.sparse import SimpleOrder
from ds_fsmoe.components.routing import Routing
from ds_fsmoe.config import FSMoEBlock, GateBlock
from ds_fsmoe.moe_layer import token_path
from ds_fsmoe.ops.loading import load_row_ops


class LayerError(ValueError):
    """A model whose MoE layers cannot be made ours. The message names layer, class and what to change."""


@dataclass(frozen=True)
class Parts:
    """The exchangeable parts of a layer that hold no parameters, shared by all layers of a model."""

    order: OrderBase
    alltoall: AllToAllBase
    order_name: str
    alltoall_name: str
    ops_name: str


def choose_parts(block: FSMoEBlock, device_type: str) -> Parts:
    """The parts a block asks for; "auto" takes the best there is.

    Raises:
        RuntimeError: ``ops: "required"`` and the op cannot be built, on every rank.
        ValueError: ``ops: "required"`` on a device without compiled ops.
    """
    ops = load_row_ops(block.ops, device_type)
    order_name = "sparse" if block.order == "auto" else block.order
    alltoall_name = "flat" if block.alltoall == "auto" else block.alltoall
    order_class = registry.lookup("order", order_name)
    order = order_class(ops.gather_rows) if order_class is SimpleOrder else order_class()
    alltoall = registry.lookup("alltoall", alltoall_name)()
    for part, base, name in ((order, OrderBase, order_name), (alltoall, AllToAllBase, alltoall_name)):
        if not isinstance(part, base):
            raise LayerError(f"the part {name!r} is a {type(part).__name__}: it must be a subclass of {base.__name__}")
    return Parts(order, alltoall, order_name, alltoall_name, ops.name)


def check_parts(block: FSMoEBlock, layers: dict[str, StockMoE]) -> None:
    """Try the parts a block asks for, without building ops and without memory for parameters.

    Raises:
        LayerError: a part that cannot be made.
        ValueError: an option that the part refuses.
    """
    choose_parts(block.model_copy(update={"ops": "reference"}), "cpu")
    if block.gate is not None and block.gate.type != "topk":
        with torch.device("meta"):
            for layer in layers.values():
                _make_gate(layer, block.gate)


class FSMoEGate(StockTopKGate):
    """Stock's gate module, its parameter ``wg`` included, with a forward that returns a :class:`Routing`."""

    def forward(
        self,
        x_SM: torch.Tensor,
        used_token_S: torch.Tensor | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> Routing:
        with _timed(self, TOPK_GATE_TIMER, "gate_time"):
            return route_top_k(x_SM, self.wg.weight, gate_settings(self), self.training, used_token_S, group)


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
        result = token_path(
            hidden_states,
            used_token,
            gate=self.gate if isinstance(self.gate, (FSMoEGate, GateBase)) else self._route_by_own_gate,
            order=self.parts.order,
            alltoall=self.parts.alltoall,
            experts=self.experts,
            num_local_experts=self.num_local_experts,
            group=self.ep_group,
            timed=self._timed,
        )
        self.l_aux, self.exp_counts = result.aux_loss, result.counts_E
        return result.output

    def _set_ep_group(self, ep_group: dist.ProcessGroup) -> None:
        self.ep_group = ep_group
        if hasattr(self.gate, "_set_ep_group"):  # stock's gate, or a user's module in its place
            self.gate._set_ep_group(ep_group)

    def _timed(self, name: str) -> AbstractContextManager:
        timer, attribute = _TIMERS[name]
        return _timed(self, timer, attribute)

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


_TIMERS = {
    "moe": (MOE_TIMER, "time_moe"),
    "1st_a2a": (FIRST_ALLTOALL_TIMER, "time_falltoall"),
    "2nd_a2a": (SECOND_ALLTOALL_TIMER, "time_salltoall"),
}


def _timed(module: nn.Module, timer: str, attribute: str) -> AbstractContextManager:
    """Stock's timers, which its ``wall_clock_breakdown`` prints from the attributes of gate and layer."""
    return _running(module, timer, attribute) if module.wall_clock_breakdown else nullcontext()


@contextmanager
def _running(module: nn.Module, timer: str, attribute: str) -> Iterator[None]:
    module.timers(timer).start()
    yield
    module.timers(timer).stop()
    setattr(module, attribute, module.timers(timer).elapsed(reset=False))


def find_layers(model: nn.Module) -> dict[str, StockMoE]:
    """Name -> every ``deepspeed.moe.layer.MoE`` of a model, in module order.

    Raises:
        LayerError: there is none.
    """
    named = ((name or type(model).__name__, module) for name, module in model.named_modules())
    layers = {name: module for name, module in named if isinstance(module, StockMoE)}
    if not layers:
        raise LayerError(
            f"fsmoe.enabled = true, but {type(model).__name__} has no deepspeed.moe.layer.MoE among its "
            f"{sum(1 for _ in model.modules())} modules, and that is the class ds_fsmoe replaces; build the model with "
            "deepspeed.moe.layer.MoE or ds_fsmoe.MoE, or set fsmoe.enabled to false"
        )
    return layers


def check_layers(layers: dict[str, StockMoE], gate: GateBlock | None) -> None:
    """Refuse layers that were changed by somebody else, as far as a change would be lost.

    Raises:
        LayerError: naming the layer.
    """
    for name, layer in layers.items():
        inner = layer.deepspeed_moe
        if type(inner) not in (StockMOELayer, FSMoELayer):
            raise LayerError(
                f"{name}.deepspeed_moe is a {type(inner).__module__}.{type(inner).__name__}; ds_fsmoe replaces the "
                "forward of deepspeed.moe.sharded_moe.MOELayer itself, and would lose what this class does"
            )
        if inner.use_tutel:
            raise LayerError(f"{name}: use_tutel = True runs Tutel's kernels, which ds_fsmoe replaces; leave it out")
        if gate is not None and type(inner.gate) not in (StockTopKGate, FSMoEGate):
            raise LayerError(
                f"{name} has a gate of its own, a {type(inner.gate).__name__}, which fsmoe.gate would not reach: leave "
                "fsmoe.gate out, or give the layer stock's gate"
            )


def check_unused(layers: dict[str, StockMoE]) -> None:
    """Refuse a model that an engine has already: its layers hold that engine's process groups.

    Raises:
        LayerError: naming the layer.
    """
    for name, layer in layers.items():
        if getattr(layer.deepspeed_moe, "ep_group", None) is not None:
            raise LayerError(
                f"{name} has a process group already: this model was given to initialize() before; build a new model "
                "for every call"
            )


def take_over(layer: StockMoE, parts: Parts, gate: GateBlock | None = None) -> dict[nn.Parameter, nn.Parameter]:
    """Make a stock layer ours, in place.

    Args:
        layer: checked by :func:`check_layers`.
        parts: order, all-to-all, ops.
        gate: what the block asks for; ``None`` keeps the layer's own gate as it is.

    Returns:
        New parameter -> the one it stands in for. Empty unless another kind of gate was asked for.
    """
    inner = layer.deepspeed_moe
    inner.__class__ = FSMoELayer
    inner.parts = parts
    if gate is not None and gate.type != "topk":
        return _replace_gate(layer, gate)
    if type(inner.gate) is StockTopKGate:
        inner.gate.__class__ = FSMoEGate
    if gate is not None:
        for name in gate.model_fields_set - {"type"}:
            setattr(inner.gate, name, getattr(gate, name))
    return {}


def _replace_gate(layer: StockMoE, gate: GateBlock) -> dict[nn.Parameter, nn.Parameter]:
    stock = layer.deepspeed_moe.gate
    ours = _make_gate(layer, gate).to(device=stock.wg.weight.device, dtype=stock.wg.weight.dtype)
    layer.deepspeed_moe.gate = ours
    return dict.fromkeys(ours.parameters(), stock.wg.weight)


def _make_gate(layer: StockMoE, gate: GateBlock) -> GateBase:
    stock = layer.deepspeed_moe.gate
    gate_class: type[GateBase] = registry.lookup("gate", gate.type)
    options = {name: getattr(gate, name) for name in gate.model_fields_set - {"type"}}
    try:
        ours = gate_class(**_inherited_options(gate_class, stock) | options)
    except TypeError as error:
        raise LayerError(f"fsmoe.gate: the gate {gate.type!r} does not take {options}: {error}") from error
    if not isinstance(ours, GateBase):
        raise LayerError(f"fsmoe.gate: {gate.type!r} is a {gate_class.__name__}: it must be a subclass of GateBase")
    ours.build_once(stock.wg.in_features, stock.wg.out_features)
    for name in ours.state_dict():
        if "expert" in name:
            raise LayerError(
                f"fsmoe.gate: the gate {gate.type!r} has a parameter or buffer {name!r}; DeepSpeed takes every name "
                "with 'expert' in it for an expert's when it saves: rename it"
            )
    return ours


def _inherited_options(gate_class: type[GateBase], stock: StockTopKGate) -> dict[str, Any]:
    """What a block leaves out stays as the layer has it, as far as the new gate knows such a thing."""
    parameters = inspect.signature(gate_class).parameters
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    names = ("k", "capacity_factor", "eval_capacity_factor", "min_capacity", "drop_tokens")
    return {name: getattr(stock, name) for name in names if takes_all or name in parameters}


def give_back(layer: StockMoE) -> None:
    """Make one of our layers stock's again, in place: the inverse of :func:`take_over`."""
    inner = layer.deepspeed_moe
    if type(inner) is FSMoELayer:
        inner.__class__ = StockMOELayer
        del inner.parts
    if type(inner.gate) is FSMoEGate:
        inner.gate.__class__ = StockTopKGate


class MoE(StockMoE):
    """``deepspeed.moe.layer.MoE`` with our layer inside from the start, for models written for ds_fsmoe.

    Same arguments, same ``(output, l_aux, exp_counts)``. With ``"fsmoe": {"enabled": false}`` our ``initialize``
    turns it into the stock layer, so that one flag still compares the two.

    Raises:
        LayerError: ``num_experts``, ``ep_size`` or ``k`` that do not fit together.
    """

    def __init__(
        self, hidden_size: int, expert: nn.Module, num_experts: int = 1, ep_size: int = 1, k: int = 1, **kwargs
    ):
        if ep_size < 1 or num_experts % ep_size:
            sizes = [size for size in range(1, num_experts + 1) if num_experts % size == 0]
            raise LayerError(
                f"MoE: num_experts = {num_experts} is not divisible by ep_size = {ep_size}; for {num_experts} experts "
                f"the sizes are {', '.join(map(str, sizes))}"
            )
        if not 1 <= k <= num_experts:
            raise LayerError(f"MoE: k = {k}: must be between 1 and num_experts ({num_experts})")
        super().__init__(hidden_size, expert, num_experts, ep_size, k, **kwargs)
        take_over(self, choose_parts(FSMoEBlock(), "cpu"))
