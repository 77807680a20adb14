# SPDX-License-Identifier: Apache-2.0
"""The public names: which they are, and that each says what it is, takes, returns and raises."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

import ds_fsmoe
from ds_fsmoe.components.gate_settings import SettingsGate

# A name leaves this list only with a major version; one that is added here is promised.
PROMISED = (
    "AllToAllBase BFloat16Wire CallbackArgs CallbackBase Config ConfigError DeepSeekGate DenseOrder DenseRouting "
    "EinsumOrder ExpertArgs ExpertBase ExpertChoiceGate FSMoELayer FlatAllToAll FramesAsTokens "
    "GPTFeedForward GShardGate GateBase LayerError LinearGate MOELayer MixtralFeedForward MixtralGate MoE "
    "MoEOutput OptionError OrderBase QwenGate Routing RoutingBase SigmoidGate SimpleOrder SlotRouting "
    "SoftMoEGate SwitchGate TokenChoiceGate XMoEGate __version__ inference initialize install load_ops "
    "own_experts read_routing register_alltoall register_expert register_gate register_order uninstall update_gates "
    "whole_state_dict"
)
NAMES = PROMISED.split(" ")
OBJECTS = [name for name in NAMES if name != "__version__"]
OF_DEEPSPEED = {"FSMoELayer"}
"""Made by DeepSpeed's own arguments, which it documents."""


def test_the_public_names_are_the_promised_ones() -> None:
    assert sorted(ds_fsmoe.__all__) == sorted(NAMES)
    assert set(dir(ds_fsmoe)) == set(ds_fsmoe.__all__)


def test_nothing_else_in_the_package_looks_public() -> None:
    import types

    others = {name for name, value in vars(ds_fsmoe).items() if not isinstance(value, types.ModuleType)}
    assert {name for name in others - set(NAMES) if not name.startswith("_")} <= {
        "annotations",
        "TYPE_CHECKING",
        "Any",
    }


@pytest.mark.parametrize("name", OBJECTS)
def test_a_public_name_is_documented_where_it_is_defined(name: str) -> None:
    public = getattr(ds_fsmoe, name)
    own = vars(public).get("__doc__") if isinstance(public, type) else public.__doc__
    assert own
    assert len(own.split()) > 3
    for parameter in parameters(public) if name not in OF_DEEPSPEED else ():
        assert parameter in own, f"{name} does not say what {parameter} is"


def parameters(public: Any) -> list[str]:
    """The names of what a user passes, but for fields that are documented beside themselves."""
    if isinstance(public, type):
        is_of_fields = dataclasses.is_dataclass(public) or issubclass(public, (SettingsGate, tuple))
        if is_of_fields or "__init__" not in vars(public):
            return []
        public = public.__init__
    found = list(inspect.signature(public).parameters.values())
    return [
        each.name for each in found if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD) and each.name != "self"
    ]


@pytest.mark.parametrize("name", [name for name in OBJECTS if name.endswith("Gate")])
def test_a_gates_options_are_typed_keywords_in_its_signature(name: str) -> None:
    options = inspect.signature(getattr(ds_fsmoe, name)).parameters.values()
    assert options
    for option in options:
        assert option.kind is option.KEYWORD_ONLY
        assert option.annotation is not option.empty
        assert option.default is not option.empty
