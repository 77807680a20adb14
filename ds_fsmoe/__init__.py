# SPDX-License-Identifier: Apache-2.0
"""Trains Mixture-of-Experts models with DeepSpeed: fast, exact, flexible.

Importing this package loads neither torch nor DeepSpeed and builds nothing: a public name is imported at its first use.
In a process that a launcher has started, it asks NCCL for the order in which collectives begin. That has to precede the
first process group (see ``distributed/launch_order.py``). It also observes DeepSpeed's engines once DeepSpeed is
imported: an engine that does not read an enabled block logs a warning (see ``env_entry_point.py``).

Public names are those in ``__all__``, and the names for writing a gate: those of ``TokenChoiceGate``'s module and of
``components/gate.py``. All others are internal and may change with any version.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ds_fsmoe.distributed.launch_order import ask_as_rank as _ask_as_rank
from ds_fsmoe.env_entry_point import watch_engines as _watch_engines
from ds_fsmoe.versions import VERSION as __version__

if TYPE_CHECKING:
    from ds_fsmoe.checkpoint.saving import whole_state_dict
    from ds_fsmoe.components.alltoall import AllToAllBase
    from ds_fsmoe.components.alltoalls.flat import FlatAllToAll
    from ds_fsmoe.components.callback import CallbackArgs, CallbackBase
    from ds_fsmoe.components.expert import ExpertArgs, ExpertBase
    from ds_fsmoe.components.experts.gpt import GPTFeedForward
    from ds_fsmoe.components.experts.mixtral import MixtralFeedForward
    from ds_fsmoe.components.gate import GateBase, OptionError, update_gates
    from ds_fsmoe.components.gates.deepseek import DeepSeekGate
    from ds_fsmoe.components.gates.expert_choice import ExpertChoiceGate
    from ds_fsmoe.components.gates.gshard import GShardGate
    from ds_fsmoe.components.gates.mixtral import MixtralGate
    from ds_fsmoe.components.gates.qwen import QwenGate
    from ds_fsmoe.components.gates.sigmoid import SigmoidGate
    from ds_fsmoe.components.gates.softmoe import SoftMoEGate
    from ds_fsmoe.components.gates.switch import SwitchGate
    from ds_fsmoe.components.gates.topk import LinearGate
    from ds_fsmoe.components.gates.xmoe import XMoEGate
    from ds_fsmoe.components.hooks.bfloat16_communication import BFloat16Communication
    from ds_fsmoe.components.hooks.bfloat16_wire import BFloat16Wire as BFloat16Wire  # its name in version 0.2.0
    from ds_fsmoe.components.hooks.frames import FramesAsTokens
    from ds_fsmoe.components.order import OrderBase
    from ds_fsmoe.components.orders.dense import DenseOrder
    from ds_fsmoe.components.orders.einsum import EinsumOrder
    from ds_fsmoe.components.orders.sparse import SimpleOrder
    from ds_fsmoe.components.routing import DenseRouting, Routing, RoutingBase, SlotRouting
    from ds_fsmoe.components.token_choice import TokenChoiceGate
    from ds_fsmoe.config.builder import Config
    from ds_fsmoe.config.reading import ConfigError
    from ds_fsmoe.engine.convert_layers import MoE
    from ds_fsmoe.engine.entry_points import initialize, install, uninstall
    from ds_fsmoe.engine.inference import inference
    from ds_fsmoe.engine.marked_experts import gradient_norm, whole_parameters, whole_weight
    from ds_fsmoe.engine.own_experts import own_experts
    from ds_fsmoe.engine.restore_model import make_whole
    from ds_fsmoe.layer.expert_shard import own_experts_of, own_part
    from ds_fsmoe.layer.moe_layer import MOELayer, MoEOutput
    from ds_fsmoe.layer.parts import LayerError
    from ds_fsmoe.layer.stock_layer import FSMoELayer
    from ds_fsmoe.ops import load_ops
    from ds_fsmoe.registry import register_alltoall, register_expert, register_gate, register_order
    from ds_fsmoe.routes.recorded import read_routing

_MODULE_OF_NAME = {
    "AllToAllBase": "components.alltoall",
    "BFloat16Communication": "components.hooks.bfloat16_communication",
    "BFloat16Wire": "components.hooks.bfloat16_wire",  # its name in version 0.2.0
    "CallbackArgs": "components.callback",
    "CallbackBase": "components.callback",
    "Config": "config.builder",
    "ConfigError": "config.reading",
    "DeepSeekGate": "components.gates.deepseek",
    "DenseOrder": "components.orders.dense",
    "DenseRouting": "components.routing",
    "EinsumOrder": "components.orders.einsum",
    "ExpertArgs": "components.expert",
    "ExpertBase": "components.expert",
    "ExpertChoiceGate": "components.gates.expert_choice",
    "FSMoELayer": "layer.stock_layer",
    "FlatAllToAll": "components.alltoalls.flat",
    "FramesAsTokens": "components.hooks.frames",
    "GPTFeedForward": "components.experts.gpt",
    "GShardGate": "components.gates.gshard",
    "GateBase": "components.gate",
    "LayerError": "layer.parts",
    "LinearGate": "components.gates.topk",
    "MOELayer": "layer.moe_layer",
    "MixtralFeedForward": "components.experts.mixtral",
    "MixtralGate": "components.gates.mixtral",
    "MoE": "engine.convert_layers",
    "MoEOutput": "layer.moe_layer",
    "OptionError": "components.gate",
    "OrderBase": "components.order",
    "QwenGate": "components.gates.qwen",
    "Routing": "components.routing",
    "RoutingBase": "components.routing",
    "SigmoidGate": "components.gates.sigmoid",
    "SimpleOrder": "components.orders.sparse",
    "SlotRouting": "components.routing",
    "SoftMoEGate": "components.gates.softmoe",
    "SwitchGate": "components.gates.switch",
    "TokenChoiceGate": "components.token_choice",
    "XMoEGate": "components.gates.xmoe",
    "gradient_norm": "engine.marked_experts",
    "inference": "engine.inference",
    "initialize": "engine.entry_points",
    "install": "engine.entry_points",
    "load_ops": "ops",
    "make_whole": "engine.restore_model",
    "own_experts": "engine.own_experts",
    "read_routing": "routes.recorded",
    "register_alltoall": "registry",
    "register_expert": "registry",
    "register_gate": "registry",
    "register_order": "registry",
    "uninstall": "engine.entry_points",
    "update_gates": "components.gate",
    "own_experts_of": "layer.expert_shard",
    "own_part": "layer.expert_shard",
    "whole_parameters": "engine.marked_experts",
    "whole_state_dict": "checkpoint.saving",
    "whole_weight": "engine.marked_experts",
}

# Written out, because type checkers read it.
__all__ = [
    "AllToAllBase",
    "BFloat16Communication",
    "CallbackArgs",
    "CallbackBase",
    "Config",
    "ConfigError",
    "DeepSeekGate",
    "DenseOrder",
    "DenseRouting",
    "EinsumOrder",
    "ExpertArgs",
    "ExpertBase",
    "ExpertChoiceGate",
    "FSMoELayer",
    "FlatAllToAll",
    "FramesAsTokens",
    "GPTFeedForward",
    "GShardGate",
    "GateBase",
    "LayerError",
    "LinearGate",
    "MOELayer",
    "MixtralFeedForward",
    "MixtralGate",
    "MoE",
    "MoEOutput",
    "OptionError",
    "OrderBase",
    "QwenGate",
    "Routing",
    "RoutingBase",
    "SigmoidGate",
    "SimpleOrder",
    "SlotRouting",
    "SoftMoEGate",
    "SwitchGate",
    "TokenChoiceGate",
    "XMoEGate",
    "__version__",
    "gradient_norm",
    "inference",
    "initialize",
    "install",
    "load_ops",
    "make_whole",
    "own_experts",
    "own_experts_of",
    "own_part",
    "read_routing",
    "register_alltoall",
    "register_expert",
    "register_gate",
    "register_order",
    "uninstall",
    "update_gates",
    "whole_parameters",
    "whole_state_dict",
    "whole_weight",
]


_ask_as_rank()
_watch_engines()


def _find(name: str) -> Any:
    """Import a public name when it is first used."""
    module = _MODULE_OF_NAME.get(name)
    if module is None:
        raise AttributeError(f"module 'ds_fsmoe' has no attribute {name!r}")
    try:
        found = getattr(importlib.import_module(f"ds_fsmoe.{module}"), name)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] == "ds_fsmoe":
            raise
        raise ModuleNotFoundError(
            f"ds_fsmoe.{name} needs {error.name}, which is not installed: pip install 'ds_fsmoe[train]'",
            name=error.name,
        ) from error
    globals()[name] = found
    return found


if not TYPE_CHECKING:  # a type checker would take any name for one of ours
    __getattr__ = _find


def __dir__() -> list[str]:
    return sorted(__all__)
