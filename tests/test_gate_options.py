# SPDX-License-Identifier: Apache-2.0
"""Options of gates, in the block and by hand: each gate's own, and every mistake is one sentence with the choices."""

from __future__ import annotations

import inspect
import math
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_fsmoe
from ds_fsmoe import registry
from ds_fsmoe.components.gate import GateBase
from ds_fsmoe.config.reading import ConfigError, read_block
from ds_fsmoe.engine.convert_layers import check_layers, convert
from ds_fsmoe.layer.parts import LayerError, choose_parts
from tests.small_model import Case, SmallModel


def read(gate: dict[str, Any]) -> Any:
    return read_block({"fsmoe": {"enabled": True, "gate": gate}})


def taken_over(gate: dict[str, Any]) -> GateBase:
    layer = SmallModel(Case(k=2), rank=0).moes[0]
    block = read(gate)
    convert(layer, choose_parts(block, "cpu"), block.gate)
    return layer.deepspeed_moe.gate


def test_a_gate_takes_its_own_options_from_the_block() -> None:
    gate = taken_over({"type": "deepseek", "k": 3, "num_groups": 2, "bias_update_speed": 0.01, "drop_tokens": False})
    assert type(gate) is ds_fsmoe.DeepSeekGate
    assert (gate.settings.k, gate.settings.num_groups, gate.settings.bias_update_speed) == (3, 2, 0.01)
    assert gate.describe() == "DeepSeekGate, k = 3, nothing dropped"


@pytest.mark.parametrize("name", [name for name in registry.known("gate") if name != "topk"])
def test_what_a_block_leaves_out_is_the_layers(name: str) -> None:
    gate = taken_over({"type": name})
    settings = getattr(gate, "settings", gate)
    of_layer = {"k": 2, "capacity_factor": 1.25, "eval_capacity_factor": 1.0, "min_capacity": 4, "drop_tokens": True}
    found = {each: getattr(settings, each) for each in of_layer if hasattr(settings, each)}
    assert found == {each: of_layer[each] for each in found}
    assert found or name == "softmoe"


def test_a_matrix_of_the_same_meaning_begins_as_the_model_has_it() -> None:
    weight = SmallModel(Case(k=2), rank=0).moes[0].deepspeed_moe.gate.wg.weight
    assert torch.equal(taken_over({"type": "mixtral"}).wg.weight, weight)
    assert taken_over({"type": "xmoe", "routing_dim": 13}).wg.shape == weight.shape
    assert not torch.equal(taken_over({"type": "xmoe", "routing_dim": 13}).wg, weight)


@pytest.mark.parametrize(
    ("gate", "sentence"),
    [
        ({"type": "sigmoid", "zzz": [1]}, 'fsmoe.gate.zzz = [1]: the gate "sigmoid" has no such option; its options'),
        ({"num_groups": 4}, "fsmoe.gate.num_groups: unknown key; the keys are type, top_k, capacity_factor"),
        ({"type": "gshard", "k": "2"}, 'fsmoe.gate.k = "2": must be an integer'),
        ({"type": "gshard", "drop_policy": "last"}, "fsmoe.gate.drop_policy = \"last\": must be 'probs' or 'position'"),
    ],
    ids=str,
)
def test_an_option_that_a_gate_does_not_have_is_refused_with_those_it_has(gate: dict, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(gate)
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


# ---- values


def wrong_values() -> list[tuple[str, str, Any]]:
    """(gate, option, value) for every option of every registered gate."""
    found = []
    for name in registry.known("gate"):
        for option in inspect.signature(registry.lookup("gate", name)).parameters.values():
            wrong: list[Any] = [[1]]
            if isinstance(option.default, bool):
                wrong += [1, "no"]
            elif isinstance(option.default, (int, float)):
                wrong += ["much", -1, math.nan]
            else:
                wrong += ["nonsense"]
            found += [(name, option.name, value) for value in wrong]
    return found


@pytest.mark.parametrize(("name", "option", "value"), wrong_values(), ids=str)
def test_a_value_that_an_option_cannot_have_is_refused_by_name(name: str, option: str, value: Any) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is looked at
        registry.lookup("gate", name)(**{option: value}).build_once(13, 5)
    message = str(caught.value)
    assert f"{option} = {value!r}: must be" in message or repr(value) in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("topk", {"k": 6}, r"k = 6: must be between 1 and num_experts \(5\)"),
        ("topk", {"kk": 2}, "no setting 'kk': choose from k, capacity_factor"),
        ("topk", {"capacity_factor": 0.0}, "capacity_factor = 0.0: must be above 0"),
        ("softmoe", {"slots_per_expert": 0}, "SoftMoEGate: slots_per_expert = 0: must be an integer >= 1"),
        ("deepseek", {"num_groups": 5, "kept_groups": 6}, "kept_groups = 6: must be between 2, which k needs, and"),
        ("deepseek", {"num_groups": 5, "kept_groups": 1, "k": 2}, "kept_groups = 1: must be between 2, which k needs"),
    ],
    ids=str,
)
def test_what_does_not_fit_the_experts_or_a_limit_is_said_with_the_choices(name, options, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        registry.lookup("gate", name)(**options).build_once(13, 5)


def test_what_does_not_go_together_is_refused_before_any_process_group() -> None:
    for block, sentence in (
        ({"gate": {"type": "sigmoid", "k": 5}}, "fsmoe.gate.k = 5: must be between 1 and num_experts (4 in moes.0)"),
        ({"gate": {"type": "expert_choice", "k": 5}}, "k = 5: must be between 1 and num_experts (4"),
        (
            {"gate": {"type": "deepseek", "k": 2, "num_groups": 3}},
            "fsmoe.gate.num_groups = 3: must divide num_experts (4): the choices are 1, 2, 4",
        ),
        (
            {"gate": {"type": "softmoe"}, "order": "sparse"},
            'fsmoe.order = "sparse": must be "auto" or "dense" with SoftMoEGate, which returns a DenseRouting',
        ),
        (
            {"gate": {"type": "expert_choice"}, "order": "dense"},
            'fsmoe.order = "dense": must be "auto" or "einsum" or ',
        ),
        ({"order": "dense"}, 'fsmoe.order = "dense": must be "auto" or "einsum" or '),
    ):
        model = SmallModel(Case(), rank=0)  # of 4 experts
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is looked at
            ds_fsmoe.initialize(model=model, config=Case().ds_config(fsmoe={"enabled": True} | block))
        assert not dist.is_initialized()
        assert sentence in str(caught.value).splitlines()[-1].replace("moes.1", "moes.0")
        assert type(model.moes[0].deepspeed_moe).__name__ == "MOELayer"


# ---- users' gates


class PlainGate(GateBase):
    """A user's gate with options in its signature, and none of our settings."""

    def __init__(self, sharpness: float = 1.0) -> None:
        super().__init__()
        if sharpness <= 0:
            raise ValueError(f"sharpness = {sharpness}: must be above 0")

    def build(self, model_dim: int, num_experts: int) -> None:
        self.wg = nn.Linear(model_dim, num_experts, bias=False)


class GateWithoutOptions(PlainGate):
    def __init__(self) -> None:
        super().__init__()


class BoundedGate(ds_fsmoe.MixtralGate):
    """A gate of ours with a constructor of its own."""

    def __init__(self, bound: float = 1.0, **settings: Any) -> None:
        super().__init__(**settings)
        self.bound = bound


class ExpertishGate(PlainGate):
    """One that DeepSpeed could not save."""

    def build(self, model_dim: int, num_experts: int) -> None:
        super().build(model_dim, num_experts)
        self.register_buffer("expert_bias", torch.zeros(num_experts))


PLUGINS = {"plain": PlainGate, "without": GateWithoutOptions, "bounded": BoundedGate, "expertish": ExpertishGate}


def test_the_options_of_a_users_gate_are_those_of_its_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, part in PLUGINS.items():
        monkeypatch.setitem(registry._PARTS["gate"], name, part)
    assert type(taken_over({"type": "plain", "sharpness": 2.0})) is PlainGate
    assert type(taken_over({"type": "without"})) is GateWithoutOptions
    bounded = taken_over({"type": "bounded", "bound": 3.0, "z_loss_factor": 0.5, "k": 3})
    assert (bounded.bound, bounded.settings.z_loss_factor, bounded.settings.k) == (3.0, 0.5, 3)
    for gate, error, sentence in (
        (
            {"type": "plain", "sharpnes": 2},
            ConfigError,
            r"fsmoe\.gate\.sharpnes = 2: the gate \"plain\" has no such option",
        ),
        ({"type": "without", "k": 2}, ConfigError, "has no such option; its options are none"),
        ({"type": "plain", "sharpness": -1}, LayerError, r"fsmoe\.gate: this layer: sharpness = -1: must be above 0"),
        ({"type": "bounded", "z_los": 1}, LayerError, "BoundedGate has no setting 'z_los': choose from k, capacity_f"),
        ({"type": "expertish"}, LayerError, "has a parameter or buffer 'expert_bias'"),
    ):
        with pytest.raises(error, match=sentence):
            taken_over(gate)


class CallersGate(deepspeed.moe.sharded_moe.TopKGate):
    """A user's own subclass of stock's gate."""


def test_a_gate_block_is_refused_where_it_would_not_reach_the_gate() -> None:
    layers = {"h.0": SmallModel(Case(), rank=0).moes[0]}
    layers["h.0"].deepspeed_moe.gate.__class__ = CallersGate
    check_layers(layers, None)
    with pytest.raises(LayerError, match=r"h\.0 has its own gate, a CallersGate, which fsmoe\.gate would not change"):
        check_layers(layers, read({"k": 2}).gate)
