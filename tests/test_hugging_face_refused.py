# SPDX-License-Identifier: Apache-2.0
"""What of Hugging Face's models and of PEFT's adapters is refused, before any group is made; over how many ranks
experts are spread."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("peft")

from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.config.reading import ConfigError
from ds_fsmoe.engine.convert_experts import chosen_ep_size, table_of
from ds_fsmoe.layer.parts import LayerError
from tests.hf_families import NUM_EXPERTS, WIDTH, batch, model_of
from tests.hf_lora import BOTH, engine_with, lora_config, lora_of, step
from tests.ranks import run_on_ranks
from tests.sgd_engines import ds_config, engine_of
from tests.test_hugging_face import OfTwice


def tied(model: nn.Module) -> None:
    first, second = (each.mlp.experts for each in model.model.layers)
    second.down_proj = first.down_proj


def quantised(model: nn.Module) -> None:
    experts = model.model.layers[0].mlp.experts
    experts.down_proj = nn.Parameter(experts.down_proj.to(torch.float8_e4m3fn), requires_grad=False)


def misshapen(model: nn.Module) -> None:
    experts = model.model.layers[0].mlp.experts
    experts.down_proj = nn.Parameter(experts.down_proj[:, :, :-1].clone())


def more_weights(model: nn.Module) -> None:
    model.model.layers[0].mlp.experts.scale = nn.Parameter(torch.ones(NUM_EXPERTS))


def of_transformers_4(model: nn.Module) -> None:
    block = model.model.layers[0].mlp
    block.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))


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


def changed(change: Callable[[nn.Module], None]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = model_of("olmoe")
        change(model)
        return model

    return make


def olmoe() -> nn.Module:
    return model_of("olmoe")


def cut(size: int) -> dict[str, Any]:
    return {"expert_tensor_parallel_size": size}


FIRST, ADAPTED = "model.layers.0.mlp.experts", "base_model.model.model.layers.0.mlp.experts"
NOT_WITH = "not with experts of a Hugging Face model"
REFUSED: list[tuple[Callable[[], nn.Module], dict[str, Any], dict[str, Any], str]] = [
    (changed(tied), {}, {}, f"model.layers.1.mlp.experts.down_proj is the same parameter as {FIRST}.down_proj"),
    (changed(quantised), {}, {}, f"{FIRST}.down_proj is float8_e4m3fn: quantized experts cannot be trained"),
    (changed(misshapen), {}, {}, f"{FIRST}, a OlmoeExperts, has the attributes.*do not match its flags"),
    (changed(more_weights), {}, {}, f"{FIRST}, a OlmoeExperts,.*has weights that are not known: scale"),
    (changed(of_transformers_4), {}, {}, rf"cannot convert \({FIRST}, a ModuleList of 4 Linear\)"),
    (lambda: nn.DataParallel(olmoe()), {}, {}, r"the model is a DataParallel: pass the model itself to initialize\(\)"),
    (olmoe, {"gate": "topk"}, {}, f'fsmoe.gate = "topk": {NOT_WITH}'),
    (olmoe, {"dispatch": "padded"}, {}, f'fsmoe.dispatch = "padded": {NOT_WITH}'),
    (olmoe, {}, {"expert_parallel": {"enabled": True}}, "take one of the two off, expert_parallel or fsmoe"),
    (olmoe, cut(2), {"zero_optimization": {"stage": 3}}, "fsmoe.expert_tensor_parallel_size = 2: not supported at"),
    (olmoe, cut(5), {}, r"size = 5: .*must divide the hidden width of model.*mlp.experts \(24\); .* 1, 2, 3"),
    (lambda: model_of("muse_spark"), cut(2), {}, "size = 2: .*normalizes the output of its experts, of which a shard"),
    (OfTwice, cut(2), {}, "size = 2: .*the experts of experts, a Twice, give other results in shards"),
    (
        lambda: nn.Sequential(MoE(WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=4)),
        {"ep_size": 2},
        {},
        r"fsmoe.ep_size = 2 applies .* set deepspeed.moe.layer.MoE\(..., ep_size=...\)",
    ),
    # Adapters.
    (
        lambda: lora_of("gpt_oss", target_parameters=["mlp.experts.gate_up_proj_bias"]),
        {},
        {},
        f"{ADAPTED}: an adapter of gate_up_proj_bias has one A for all experts, .* can be gate_up_proj",
    ),
    (
        lambda: lora_of("olmoe", modules_to_save=["experts"]),
        {},
        {},
        f"{ADAPTED}.original_module: PEFT has wrapped the experts in a ModulesToSaveWrapper, .*a second copy",
    ),
    (of_another_kind, {}, {}, f"{ADAPTED}.base_layer: PEFT has wrapped the experts in a Scaled, an adapter of another"),
    (with_more_parameters, {}, {}, f"{ADAPTED}: has parameters magnitude besides A and B of plain LoRA"),
    (laid_out_otherwise, {}, {}, rf"{ADAPTED}: A and B of adapter 'default' are \[16, 32\] .* must be \[16, 24\]"),
]
"""A model, a block, what is beside it, and what is said."""


@pytest.mark.parametrize(("model", "block", "others", "sentence"), REFUSED)
def test_what_cannot_be_trained_is_refused_by_name_before_any_group(
    model: Callable[[], nn.Module], block: dict[str, Any], others: dict[str, Any], sentence: str
) -> None:
    with pytest.raises((ConfigError, LayerError), match=sentence):
        engine_with(model(), ds_config(1, **block) | others)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("asked", "experts", "ranks", "per_node", "expected"),
    [
        ("auto", [8], 4, 2, 2),
        ("auto", [6, 9], 6, 6, 3),
        ("auto", [7], 4, 4, 1),
        (4, [8], 8, 2, 4),
        (3, [8], 6, 6, "must divide the 6 ranks and the 8 experts of the layers; the choices are 1, 2"),
        (3, [8], 1, 1, r"^fsmoe\.ep_size = 3: with 1 rank it can only be 1$"),
    ],
)
def test_auto_spreads_experts_over_as_many_ranks_of_a_node_as_divide_them_and_a_number_must_divide_both(
    asked: Any, experts: list[int], ranks: int, per_node: int, expected: Any
) -> None:
    block = FSMoEBlock(ep_size=asked)
    if isinstance(expected, int):
        assert chosen_ep_size(block, experts, ranks, per_node) == expected
    else:
        with pytest.raises(ConfigError, match=expected):
            chosen_ep_size(block, experts, ranks, per_node)


def test_sizes_that_do_not_fit_are_refused_before_any_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")
    with pytest.raises(ConfigError, match=r"fsmoe\.ep_size = 3: must divide the 6 ranks and the 4"):
        engine_of(model_of("olmoe"), ds_config(1, ep_size=3))
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match=r"expert_tensor_parallel_size = 2: must divide the 3 ranks; .* 1, 3"):
        engine_of(model_of("olmoe"), ds_config(1, expert_tensor_parallel_size=2))
    assert not dist.is_initialized()


def refused_with_sequence_parallel_ranks(rank: int, world_size: int) -> str:
    """What is said to the mpu that DeepSpeed's Ulysses makes."""
    import ds_fsmoe

    deepspeed.init_distributed()
    parallel_state_sp.initialize_sequence_parallel(2)
    model = model_of("olmoe")
    with pytest.raises(ds_fsmoe.LayerError) as caught:
        ds_fsmoe.initialize(
            model=model, model_parameters=model.parameters(), config=ds_config(1), mpu=parallel_state_sp
        )
    return str(caught.value)


def test_sequence_parallel_ranks_are_refused_by_that_name_and_not_as_tensor_parallel_ones(tmp_path: Path) -> None:
    for said in run_on_ranks(refused_with_sequence_parallel_ranks, 2, tmp_path):
        assert said.startswith("mpu: sequence parallelism, here over 2 ranks, is not supported with experts of Hugging")
        assert "leave mpu and sequence_parallel_size out, or sp_size 1" in said
        assert "tensor" not in said


def test_dora_on_experts_is_refused_by_peft_itself() -> None:
    with pytest.raises(ValueError, match="does not work with use_dora=True"):
        lora_of("olmoe", BOTH, use_dora=True)


def added_later(rank: int, world_size: int) -> list[str]:
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
