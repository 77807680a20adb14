# SPDX-License-Identifier: Apache-2.0
"""Models and surroundings that cannot be trained are refused on every rank, before any process group is made."""

from __future__ import annotations

import logging
import platform
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.sharded_moe import MOELayer as StockMOELayer
from torch import nn

import ds_fsmoe
from ds_fsmoe.engine import compat
from ds_fsmoe.versions import REASONS, REQUIRED, RUN, SUPPORTED
from tests.small_model import Case, SmallModel

ENABLED = {"fsmoe": {"enabled": True}}


def refused(model: nn.Module, blocks: dict[str, Any] = ENABLED) -> str:
    """The message with which ``initialize`` refuses."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the callers look at the message
        ds_fsmoe.initialize(model=model, config=Case().ds_config(**blocks))
    assert not dist.is_initialized()
    return str(caught.value)


def test_a_model_without_moe_layers_is_told_which_class_was_looked_for() -> None:
    message = refused(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    assert message.startswith(
        "No MoE layers found in Sequential: ds_fsmoe needs deepspeed.moe.layer.MoE, ds_fsmoe.MoE or experts of "
        "transformers 5. Set fsmoe.enabled to false for this model"
    )


def test_ep_size_has_to_divide_the_world(monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")
    message = refused(SmallModel(Case(ep_size=4), rank=0))
    assert "moes.0.ep_size = 4: must divide the 6 ranks; for 4 experts the choices are 1, 2" in message
    assert "moes.1.ep_size = 4" in message
    # A model that is a layer itself has a name, too.
    assert refused(MoE(7, nn.Linear(7, 7), num_experts=4, ep_size=4)).startswith("MoE.ep_size = 4: must divide the 6")


class Changed(StockMOELayer):
    pass


def changed(model: nn.Module) -> None:
    model.moes[1].deepspeed_moe.__class__ = Changed


def hooked(name: str) -> Callable[[nn.Module], None]:
    return lambda model: getattr(model.moes[1].deepspeed_moe, name).register_forward_hook(lambda *_: None)


def of_tutel(model: nn.Module) -> None:
    model.moes[0].deepspeed_moe.use_tutel = True


def many_choices(model: nn.Module) -> None:
    model.moes[0] = MoE(7, nn.Linear(7, 7), num_experts=4, k=5)


@pytest.mark.parametrize(
    ("change", "block", "sentence"),
    [
        (lambda _: None, {"gate": {"k": 7}}, "fsmoe.gate.k = 7: must be between 1 and num_experts (4 in moes.0)"),
        (changed, {}, "moes.1.deepspeed_moe is a"),
        (
            hooked("gate"),
            {"gate": {"type": "gshard"}},
            'fsmoe.gate.type = "gshard": moes.1.deepspeed_moe.gate has hooks',
        ),
        (
            hooked("experts"),
            {"esp_size": 2},
            "fsmoe.esp_size = 2: moes.1: hooks on its experts module need all rows in",
        ),
        (of_tutel, {}, "moes.0: use_tutel = True"),
        (many_choices, {}, "moes.0: k = 5: must be between 1 and num_experts (4 in moes.0)"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_any_process_group(
    change: Callable[[nn.Module], None], block: dict[str, Any], sentence: str
) -> None:
    model = SmallModel(Case(expert="gpt"), rank=0)
    change(model)
    assert sentence in refused(model, {"fsmoe": {"enabled": True} | block})


def test_a_clash_with_a_block_of_deepspeed_is_refused_and_the_model_is_left_alone() -> None:
    model = SmallModel(Case(), rank=0)
    assert refused(model, ENABLED | {"zero_optimization": {"stage": 3}}) == (
        "zero_optimization.stage = 3: ZeRO 3 does not support deepspeed.moe.layer.MoE (found: moes.0). Use stage 0, 1 "
        "or 2. (Hugging Face MoE models do work with ZeRO 3.)"
    )
    assert type(model.moes[0].deepspeed_moe) is StockMOELayer
    assert torch.is_tensor(model.moes[0].deepspeed_moe.gate.wg.weight)


def test_a_config_that_is_not_there_or_is_written_as_python_is_told_so(tmp_path: Path) -> None:
    config = tmp_path / "ds_config.json"
    with pytest.raises(ValueError, match=rf"^{config}: not found$"):
        ds_fsmoe.initialize(model=SmallModel(Case(), rank=0), config=str(config))
    config.write_text('{"fsmoe": {\n  "enabled": True}}')
    with pytest.raises(ValueError, match=rf"^{config}, line 2: JSON writes true, not True$"):
        ds_fsmoe.initialize(model=SmallModel(Case(), rank=0), config=str(config))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"num_experts": 5, "ep_size": 2}, "num_experts = 5 is not divisible by ep_size = 2; with 5 experts"),
        ({"num_experts": 4, "ep_size": 0}, "with 4 experts ep_size can be 1, 2, 4"),
        ({"num_experts": 4, "k": 5}, r"k = 5: must be between 1 and num_experts \(4\)"),
    ],
)
def test_our_moe_refuses_sizes_that_do_not_fit(arguments: dict, sentence: str) -> None:
    with pytest.raises(ds_fsmoe.LayerError, match=sentence):
        ds_fsmoe.MoE(7, nn.Linear(7, 7), **arguments)


def test_every_version_out_of_range_is_refused_with_the_reason_and_what_fits_this_python() -> None:
    with pytest.raises(compat.IncompatibleError) as caught:
        compat.check_versions({"python": ">=3", "torch": ">=9", "deepspeed": "==0.20.1"})
    torchs, deepspeeds, way_out = str(caught.value).splitlines()
    assert torchs.startswith(f"torch {version('torch')} is installed; ds_fsmoe {ds_fsmoe.__version__} works with ")
    assert torchs.endswith(f"torch >=9: {REASONS['torch']}")
    assert deepspeeds.endswith(f"deepspeed ==0.20.1: {REASONS['deepspeed']}")
    python = ".".join(map(str, sys.version_info[:2]))
    assert way_out == f"On Python {python} these fit: pip install 'torch>=9' 'deepspeed==0.20.1'"


def test_a_python_out_of_range_is_refused_with_those_that_fit() -> None:
    with pytest.raises(compat.IncompatibleError, match=r"(?s)python 3\..*\nMake an environment with Python >=4"):
        compat.check_versions(SUPPORTED | {"python": ">=4"})


def test_a_torch_above_the_range_is_a_warning_that_names_what_is_not_known() -> None:
    ((level, said),) = compat.check_versions(SUPPORTED | {"torch": ">=2,<2.1"})
    assert level == logging.WARNING
    assert said.startswith(f"torch {version('torch')} is newer than ds_fsmoe")
    assert "(>=2,<2.1)" in said
    assert "names exist; order of collectives and streams untested" in said


def test_a_pair_of_versions_is_said_at_info_unless_it_was_run(monkeypatch) -> None:
    monkeypatch.setattr(compat, "RUN", (("3.10", "2.0"),))
    ((level, said),) = compat.check_versions()
    assert level == logging.INFO
    assert said.endswith("; on 3.10 with 2.0")
    pair = tuple(".".join(each.split(".")[:2]) for each in (platform.python_version(), version("torch")))
    monkeypatch.setattr(compat, "RUN", (pair,))
    assert compat.check_versions() == []


def test_every_range_has_a_reason() -> None:
    assert set(REASONS) == set(SUPPORTED)
    assert SUPPORTED["torch"].startswith(f"{REQUIRED['torch']},<"), "no install asks for a torch below it"
    for python, torchs in RUN:
        assert compat.in_range("python", f"{python}.0")
        assert compat.in_range("torch", f"{torchs}.0")


def test_a_name_that_deepspeed_moved_is_named() -> None:
    with pytest.raises(compat.IncompatibleError, match=r"deepspeed 0\.19\.8 has no deepspeed\.moe\.layer:MoE\.gone"):
        compat.check_private_names({"deepspeed.moe.layer:MoE.gone": None})
    with pytest.raises(compat.IncompatibleError, match=r"takes \(self, hidden_states\), not \(self, x\)"):
        compat.check_private_names({"deepspeed.moe.layer:MoE.forward": ("self", "x")})
    compat.check_private_names()


def test_a_layer_over_ranks_does_not_run_before_it_has_its_ranks() -> None:
    layer = ds_fsmoe.MoE(7, nn.Linear(7, 7), num_experts=4, ep_size=2)
    with pytest.raises(RuntimeError, match="has ep_size = 2 and no process group yet: call initialize"):
        layer(torch.randn(5, 7))
    alone = ds_fsmoe.MoE(7, nn.Linear(7, 7), num_experts=4)
    assert alone(torch.randn(5, 7))[0].shape == (5, 7)
