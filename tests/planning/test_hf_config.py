# SPDX-License-Identifier: Apache-2.0
"""What a ``config.json`` says is what is planned, family by family, and what cannot be planned is one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_fsmoe.offline.models.architecture import Architecture
from ds_fsmoe.offline.models.hf_config import read_hf_config
from ds_fsmoe.offline.models.hf_families import DENSE, FAMILIES

SMALL: dict[str, Any] = {
    **{"hidden_size": 28, "intermediate_size": 33, "moe_intermediate_size": 11, "num_hidden_layers": 7},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 3},
    **{"vocab_size": 101, "max_position_embeddings": 512},
}


def read(family: str, **fields: Any) -> Architecture:
    return read_hf_config({"model_type": family} | SMALL | fields)


def test_a_file_a_folder_and_what_is_in_it_are_the_same_model(tmp_path: Path) -> None:
    data = {"model_type": "mixtral"} | SMALL | {"torch_dtype": "float16"}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(data))
    found = [read_hf_config(each) for each in (file, str(file), tmp_path, data)]
    assert {each.blocks for each in found} == {found[0].blocks}
    assert {each.num_parameters for each in found} == {found[0].num_parameters}
    assert found[0].name == tmp_path.name
    assert found[0].source == str(file)
    assert found[0].dtype == "fp16"
    assert found[0].max_length == 512
    # Equal blocks are one object, so that what is planned is planned once.
    assert len({id(each) for each in found[0].blocks}) == 1


@pytest.mark.parametrize(
    ("family", "fields", "sparse"),
    [
        ("mixtral", {}, [0, 1, 2, 3, 4, 5, 6]),
        ("qwen3_moe", {"decoder_sparse_step": 2}, [1, 3, 5]),
        ("qwen2_moe", {"decoder_sparse_step": 3, "mlp_only_layers": [5]}, [2]),
        ("deepseek_v3", {"first_k_dense_replace": 3}, [3, 4, 5, 6]),
        ("deepseek_v2", {"first_k_dense_replace": 1, "moe_layer_freq": 1}, [1, 2, 3, 4, 5, 6]),
        ("ernie4_5_moe", {"moe_layer_start_index": 2, "moe_layer_end_index": 5, "moe_layer_interval": 2}, [3, 5]),
        ("ernie4_5_moe", {"moe_layer_end_index": -1}, [1, 2, 3, 4, 5, 6]),
        ("llama4_text", {"interleave_moe_layer_step": 2}, [1, 3, 5]),
        ("llama4_text", {"moe_layers": [0, 6]}, [0, 6]),
    ],
)
def test_the_layers_with_experts_are_those_that_the_family_says(
    family: str, fields: dict[str, Any], sparse: list[int]
) -> None:
    model = read(family, **fields)
    assert list(model.moe_blocks) == sparse
    dense = [block for place, block in enumerate(model.blocks) if place not in sparse]
    assert {block.dense_H for block in dense} <= {33 if family != "llama4_text" else 16384}


USED, SLIDING = {"use_sliding_window": True}, "sliding_attention"


@pytest.mark.parametrize(
    ("family", "fields", "windows"),
    [
        ("mixtral", {"sliding_window": 64}, [64] * 7),
        ("olmoe", {"sliding_window": 64}, [None] * 7),
        ("qwen3_moe", {"sliding_window": 64}, [None] * 7),
        ("qwen3_moe", {"sliding_window": 64, **USED}, [64] * 7),
        ("qwen2_moe", {**USED, "sliding_window": 64, "max_window_layers": 3}, [64, None] * 2 + [None] * 3),
        ("gpt_oss", {}, [128, None, 128, None, 128, None, 128]),
        ("gpt_oss", {"sliding_window": 9, "layer_types": [*["full_attention"] * 6, SLIDING]}, [None] * 6 + [9]),
        ("dots1", {"max_window_layers": 5, "n_routed_experts": 8, "n_shared_experts": 1}, [None] * 5 + [4096] * 2),
        ("llama4_text", {"attention_chunk_size": 32}, [32, 32, 32, None, 32, 32, 32]),
        ("llama4_text", {"attention_chunk_size": 32, "no_rope_layers": [0, 1] * 4}, [None, 32] * 3 + [None]),
        ("minimax", {"block_size": 16}, [None, 16, None, 16, None, 16, None]),
    ],
)
def test_windows_are_where_the_family_says(family: str, fields: dict[str, Any], windows: list[int | None]) -> None:
    blocks = read(family, **fields).blocks
    assert [each.attention.window for each in blocks] == windows
    bounded = "linear" if family == "minimax" else "sliding"
    assert [each.attention.kind for each in blocks] == ["full" if each is None else bounded for each in windows]


def test_heads_latent_attention_and_groups_of_experts_are_read() -> None:
    for fields, head_dim in (({"head_dim": 16}, 16), ({}, 28 // 4), ({"head_dim": None}, 28 // 4)):
        assert {each.attention.head_dim for each in read("qwen3_moe", **fields).blocks} == {head_dim}
    assert {each.attention.kv_heads for each in read("olmoe", num_key_value_heads=None).blocks} == {4}
    # By another name of the family, too.
    for name in ("deepseek_v3", "kimi_k2"):
        model = read(name, n_routed_experts=24, n_group=4, topk_group=2, n_shared_experts=2, q_lora_rank=None)
        attention, experts = model.blocks[0].attention, model.blocks[-1].experts
        assert (attention.kind, attention.query_rank, attention.kv_rank) == ("latent", None, 512)
        assert (attention.head_dim, attention.value_dim, attention.rope_dim) == (128 + 64, 128, 64)
        assert (experts.E, experts.K, experts.H, experts.shared_H, experts.groups) == (24, 3, 11, 22, (4, 2))
    for fields, groups in (({}, None), ({"topk_method": "group_limited_greedy"}, (4, 2))):
        assert read("deepseek_v2", n_group=4, topk_group=2, **fields).blocks[-1].experts.groups == groups


def test_the_number_of_experts_has_several_names_and_may_differ_by_layer() -> None:
    by_name = [read("mixtral", **{name: 6}).num_experts for name in ("num_local_experts", "num_experts")]
    assert by_name == [6, 6]
    fields = {key: value for key, value in SMALL.items() if key != "num_experts_per_tok"}
    numbers, choices = [4, 6, 8, 4, 6, 8, 4], [1, 2, 3, 1, 2, 3, 1]
    each_own = read_hf_config({"model_type": "hunyuan_v1_moe"} | fields | {"num_experts": numbers, "moe_topk": choices})
    assert [(block.experts.E, block.experts.K) for block in each_own.blocks if block.experts] == list(
        zip(numbers, choices, strict=True)
    )


def test_a_model_of_pictures_and_text_is_planned_as_its_text_model() -> None:
    text = {"model_type": "llama4_text"} | SMALL
    found = read_hf_config({"model_type": "llama4", "vision_config": {}, "text_config": text, "torch_dtype": "float32"})
    assert found.blocks == read("llama4_text").blocks
    assert found.source.endswith("its model of text alone")
    assert found.dtype == "fp32"


def test_a_dense_model_has_nothing_to_plan() -> None:
    for model_type in DENSE:
        with pytest.raises(ValueError, match=f'model_type = "{model_type}": has no experts, so there is nothing to'):
            read(model_type)


@pytest.mark.parametrize(
    ("family", "fields", "sentence"),
    [
        ("mixtrel", {}, "model_type = \"mixtrel\": unknown family: did you mean 'mixtral'?"),
        ("zamba9", {}, f"unknown family: .*{', .*'.join(sorted(FAMILIES))}"),
        ("jetmoe", {}, "cannot be planned: its attention has experts of its own"),
        ("mixtral", {"hidden_size": "28"}, 'hidden_size = "28": must be a whole number of at least 1'),
        ("mixtral", {"num_key_value_heads": 3}, "num_key_value_heads = 3: must divide num_attention_heads = 4"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok = 9: must be at most the number of experts, 8"),
        ("mixtral", {"num_local_experts": 8, "num_experts": 4}, "num_local_experts = 8: must be 4, as num_experts"),
        ("mixtral", {"tie_word_embeddings": "no"}, 'tie_word_embeddings = "no": must be true or false'),
        ("mixtral", {"torch_dtype": "int4"}, 'torch_dtype = "int4": the choices are float32, bfloat16, float16'),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq = 2: must be 1"),
        ("deepseek_v3", {"n_group": 3}, r"groups = \(3, 4\): must be a number that divides the 256 experts"),
        ("dots1", {"n_shared_experts": 1, "n_routed_experts": None}, "n_routed_experts = null: must be a whole"),
        ("gpt_oss", {"layer_types": ["full_attention"]}, "layer_types = .*: must have one for layer 1; the choices"),
        ("gpt_oss", {"layer_types": ["mamba"] * 7}, "must have one for layer 0; the choices are full_attention, slid"),
        ("qwen3_moe", {"mlp_only_layers": list(range(7))}, "none of its 7 layers has experts, so there is nothing"),
        ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers = 3: must be a list of whole numbers"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(
    family: str, fields: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": family} | SMALL | fields))
    with pytest.raises(ValueError, match=sentence) as caught:
        read_hf_config(file)
    assert str(caught.value).startswith(str(file))


def test_a_file_that_is_none_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no file .*nowhere"):
        read_hf_config(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"has no config\.json: give a config\.json, or a folder"):
        read_hf_config(tmp_path)
    for text, sentence in (("{", "cannot be read as JSON"), ("[]", "must be a JSON object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=sentence):
            read_hf_config(tmp_path)
