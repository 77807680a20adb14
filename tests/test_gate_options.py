# SPDX-License-Identifier: Apache-2.0
"""Options of a gate in the block: each gate's own, and every mistake one sentence with path, value and choices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_fsmoe
from ds_fsmoe import registry
from ds_fsmoe.components.gate import GateBase
from ds_fsmoe.config.reading import ConfigError, read_block
from ds_fsmoe.engine.convert_layers import convert
from ds_fsmoe.layer.parts import LayerError, choose_parts
from tests.small_model import Case, SmallModel


def read(gate: dict[str, Any]) -> Any:
    return read_block({"fsmoe": {"enabled": True, "gate": gate}})


def taken_over(gate: dict[str, Any]) -> GateBase:
    layer = SmallModel(Case(k=2), rank=0).moes[0]
    block = read(gate)
    convert(layer, choose_parts(block, "cpu"), block.gate)
    return layer.deepspeed_moe.gate


def refused(gate: dict[str, Any]) -> str:
    """What ``initialize`` says, before any process group is made. The model has 4 experts."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the callers look at the message
        ds_fsmoe.initialize(
            model=SmallModel(Case(), rank=0), config=Case().ds_config(fsmoe={"enabled": True, "gate": gate})
        )
    assert not dist.is_initialized()
    return str(caught.value)


def test_a_gate_takes_its_own_options_from_the_block() -> None:
    gate = taken_over({"type": "deepseek", "k": 3, "num_groups": 2, "bias_update_speed": 0.01, "drop_tokens": False})
    assert type(gate) is ds_fsmoe.DeepSeekGate
    assert (gate.settings.k, gate.settings.num_groups, gate.settings.bias_update_speed) == (3, 2, 0.01)
    assert gate.describe() == "DeepSeekGate, k = 3, nothing dropped"


@pytest.mark.parametrize("name", [name for name in registry.known("gate") if name not in ("topk", "softmoe")])
def test_what_a_block_leaves_out_is_the_layers(name: str) -> None:
    gate = taken_over({"type": name})
    settings = getattr(gate, "settings", gate)
    assert (settings.k, settings.capacity_factor, settings.eval_capacity_factor) == (2, 1.25, 1.0)
    if hasattr(settings, "min_capacity"):
        assert (settings.min_capacity, settings.drop_tokens) == (4, True)


def test_a_matrix_of_the_same_meaning_begins_as_the_model_has_it() -> None:
    weight = SmallModel(Case(k=2), rank=0).moes[0].deepspeed_moe.gate.wg.weight
    assert torch.equal(taken_over({"type": "mixtral"}).wg.weight, weight)
    assert taken_over({"type": "xmoe", "routing_dim": 13}).wg.shape == weight.shape
    assert not torch.equal(taken_over({"type": "xmoe", "routing_dim": 13}).wg, weight)


@pytest.mark.parametrize(
    ("gate", "sentence"),
    [
        (
            {"type": "deepseek", "num_group": 4},
            "fsmoe.gate.num_group = 4: the gate \"deepseek\" has no such option; did you mean 'num_groups'? Its "
            "options are k, capacity_factor, eval_capacity_factor, min_capacity, drop_tokens, drop_policy, "
            "balance_loss_factor, z_loss_factor, num_groups, kept_groups, norm_topk_prob, routed_scaling_factor, "
            "bias_update_speed",
        ),
        (
            {"type": "sigmoid", "zzz": [1]},
            'fsmoe.gate.zzz = [1]: the gate "sigmoid" has no such option; its options are k,',
        ),
        (
            {"type": "softmoe", "drop_policy": "probs"},
            'fsmoe.gate.drop_policy = "probs": the gate "softmoe" has no such',
        ),
        ({"type": "gshart"}, 'fsmoe.gate.type = "gshart": no such part; the choices are '),
        ({"num_groups": 4}, "fsmoe.gate.num_groups: unknown key; the keys are type, top_k, capacity_factor"),
        (
            {"type": "topk", "drop_token": True},
            "fsmoe.gate.drop_token: unknown key; did you mean 'drop_tokens'?",
        ),
        ({"type": "gshard", "k": "2"}, 'fsmoe.gate.k = "2": must be an integer'),
        ({"type": "gshard", "capacity_factor": 0}, "fsmoe.gate.capacity_factor = 0: must be greater than 0"),
        ({"type": "gshard", "drop_policy": "last"}, "fsmoe.gate.drop_policy = \"last\": must be 'probs' or 'position'"),
    ],
    ids=str,
)
def test_an_option_that_a_gate_does_not_have_is_refused_with_those_it_has(gate: dict, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(gate)
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


def test_a_disabled_block_is_still_held_against_the_keys_of_the_own_gate() -> None:
    with pytest.raises(ConfigError, match=r"fsmoe\.gate\.kk: unknown key; did you mean 'top_k'\?"):
        read_block({"fsmoe": {"enabled": False, "gate": {"kk": 1}}})
    assert not read_block({"fsmoe": {"enabled": False, "gate": {"type": "one of a plugin", "kk": 1}}}).enabled


@pytest.mark.parametrize(
    ("gate", "sentence"),
    [
        ({"type": "sigmoid", "k": 5}, "fsmoe.gate.k = 5: must be between 1 and num_experts (4 in moes.0)"),
        ({"type": "deepseek", "k": 0}, "fsmoe.gate.k = 0: must be between 1 and num_experts (4 in moes.0)"),
        (
            {"type": "deepseek", "k": 2, "num_groups": 3},
            "fsmoe.gate.num_groups = 3: must divide num_experts (4): the choices are 1, 2, 4",
        ),
        ({"type": "mixtral", "k": 2, "z_loss_factor": -1}, "fsmoe.gate.z_loss_factor = -1: must be at least 0"),
        ({"type": "switch", "jitter": "much"}, 'fsmoe.gate.jitter = "much": must be a number'),
        ({"type": "qwen", "k": 2, "norm_topk_prob": 1}, "fsmoe.gate.norm_topk_prob = 1: must be true or false"),
        ({"type": "xmoe", "routing_dim": 0}, "fsmoe.gate.routing_dim = 0: must be at least 1"),
        ({"type": "xmoe", "temperature": 0}, "fsmoe.gate.temperature = 0: must be above 0 and finite"),
        ({"type": "xmoe", "balance_loss_factor": None}, "fsmoe.gate.balance_loss_factor = null: must be a number"),
        ({"type": "softmoe", "slots_per_expert": 0}, "fsmoe.gate.slots_per_expert = 0: must be an integer"),
    ],
    ids=str,
)
def test_a_value_that_an_option_cannot_have_is_refused_before_any_process_group(gate: dict, sentence: str) -> None:
    assert sentence in refused(gate).splitlines()[-1].replace("moes.1", "moes.0")


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


@pytest.fixture
def _plugins(monkeypatch) -> None:
    for name, part in (("plain", PlainGate), ("without", GateWithoutOptions), ("bounded", BoundedGate)):
        monkeypatch.setitem(registry._PARTS["gate"], name, part)


@pytest.mark.usefixtures("_plugins")
def test_the_options_of_a_users_gate_are_those_of_its_signature() -> None:
    assert type(taken_over({"type": "plain", "sharpness": 2.0})) is PlainGate
    assert type(taken_over({"type": "without"})) is GateWithoutOptions
    bounded = taken_over({"type": "bounded", "bound": 3.0, "z_loss_factor": 0.5, "k": 3})
    assert (bounded.bound, bounded.settings.z_loss_factor, bounded.settings.k) == (3.0, 0.5, 3)
    with pytest.raises(ConfigError, match=r"fsmoe\.gate\.sharpnes = 2: the gate \"plain\" has no such option; did you"):
        read({"type": "plain", "sharpnes": 2})
    with pytest.raises(ConfigError, match="has no such option; its options are none"):
        read({"type": "without", "k": 2})
    with pytest.raises(LayerError, match=r"fsmoe\.gate: this layer: sharpness = -1: must be above 0"):
        taken_over({"type": "plain", "sharpness": -1})
    with pytest.raises(LayerError, match=r"BoundedGate has no setting 'z_los': choose from k, capacity_factor"):
        taken_over({"type": "bounded", "z_los": 1})
