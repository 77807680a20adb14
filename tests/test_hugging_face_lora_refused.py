# SPDX-License-Identifier: Apache-2.0
"""What of PEFT is refused around experts, before any group is made; and what the log says of the rest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("peft")

from tests.hf_families import model_of
from tests.hf_lora import BOTH, batch, engine_with, lora_config, lora_of, step
from tests.ranks import run_on_ranks
from tests.test_hugging_face import ds_config

EXPERTS = "base_model.model.model.layers.0.mlp.experts"


def of_biases() -> nn.Module:
    return lora_of("gpt_oss", target_parameters=["mlp.experts.gate_up_proj_bias"])


def with_a_copy() -> nn.Module:
    return lora_of("olmoe", modules_to_save=["experts"])


def of_another_kind() -> nn.Module:
    from peft.tuners.tuners_utils import BaseTunerLayer

    class Scaled(nn.Module, BaseTunerLayer):
        def __init__(self, base_layer: nn.Module) -> None:
            super().__init__()
            self.base_layer = base_layer

    Scaled.__module__ = "peft.tuners.scaled"
    model = lora_of("olmoe")
    block = model.base_model.model.model.layers[0].mlp
    block.experts = Scaled(block.experts)
    return model


def with_more_parameters() -> nn.Module:
    model = lora_of("olmoe", ("down",))
    wrapper = model.base_model.model.model.layers[0].mlp.experts
    wrapper.magnitude = nn.Parameter(wrapper.lora_A.default.weight.detach().clone())
    return model


def laid_out_otherwise() -> nn.Module:
    """As PEFT did when it took every weight for transposed."""
    model = lora_of("olmoe", ("down",))
    wrapper = model.base_model.model.model.layers[0].mlp.experts
    a, b = wrapper.lora_A.default, wrapper.lora_B.default
    a.weight, b.weight = nn.Parameter(b.weight.detach().t().clone()), nn.Parameter(a.weight.detach().t().clone())
    return model


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (of_biases, rf"{EXPERTS}: an adapter of gate_up_proj_bias has one A for all experts, .* can be gate_up_proj"),
        (
            with_a_copy,
            rf"{EXPERTS}.original_module: PEFT has wrapped the experts in a ModulesToSaveWrapper, .*a second copy",
        ),
        (of_another_kind, rf"{EXPERTS}.base_layer: PEFT has wrapped the experts in a Scaled, an adapter of another"),
        (with_more_parameters, rf"{EXPERTS}: has parameters magnitude besides A and B of plain LoRA"),
        (laid_out_otherwise, rf"{EXPERTS}: A and B of adapter 'default' are \[16, 32\] .* must be \[16, 24\] and \[32"),
    ],
)
def test_adapters_of_experts_that_cannot_be_cut_are_named(made: Callable[[], nn.Module], sentence: str) -> None:
    from ds_fsmoe.layer.parts import LayerError

    with pytest.raises(LayerError, match=sentence):
        engine_with(made(), ds_config(1))
    assert not dist.is_initialized()


def test_dora_on_experts_is_refused_by_peft_itself() -> None:
    with pytest.raises(ValueError, match="does not work with use_dora=True"):
        lora_of("olmoe", BOTH, use_dora=True)


def added_later(rank: int, world_size: int) -> list[str]:
    from ds_fsmoe.engine.convert_experts import table_of
    from ds_fsmoe.layer.parts import LayerError

    engine = engine_with(lora_of("olmoe", BOTH), ds_config(1, ep_size=2))
    table = table_of(list(engine.fsmoe.layers.values()), engine.module, 0)
    # 2 of 4 experts; of rank 4, on weights [48, 32] and [32, 24].
    weights, adapters = 2 * 2 * (48 * 32 + 32 * 24), 2 * 2 * 4 * (48 + 32 + 32 + 24)
    said = [] if f"{weights + adapters:,}" in table and f"  {adapters:,}  " in table else [table]
    step(engine, batch(0, world_size), rank)
    engine.module.add_adapter("later", lora_config(model_of("olmoe"), BOTH))
    engine.module.set_adapter("later")
    try:
        engine(input_ids=batch(0, 1))
    except LayerError as error:
        if "adapter 'later' of down_proj was added after initialize()" not in str(error):
            said.append(str(error))
    else:
        said.append("an adapter that no optimizer knows was used")
    engine.destroy()
    return said


def test_the_table_has_what_trains_and_an_adapter_added_later_is_refused(tmp_path: Path) -> None:
    assert run_on_ranks(added_later, 2, tmp_path) == [[], []]
