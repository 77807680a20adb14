# SPDX-License-Identifier: Apache-2.0
"""Parameters and operations of a model's blocks, against loops and matrices (in test_architectures.py, those of
transformers); and what a ``config.json`` says is planned, family by family, or refused in one sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_fsmoe.offline.models.architecture import Architecture, Attention, BlockExperts, ModelBlock
from ds_fsmoe.offline.models.hf_config import read_hf_config
from ds_fsmoe.offline.models.hf_families import DENSE, FAMILIES
from ds_fsmoe.offline.models.known import load_model

M = 7
FULL = Attention(heads=6, kv_heads=2, head_dim=5, value_dim=5, num_other=3)
LATENT = Attention(3, 3, head_dim=11, value_dim=4, kind="latent", query_rank=8, kv_rank=5, rope_dim=2, num_other=13)
LINEAR = Attention(3, 3, 5, 5, kind="linear", window=4, num_other=15, has_output_gate=True)
EXPERTS = BlockExperts(E=10, K=3, H=11, shared_H=13, has_shared_gate=True, has_bias=True, has_router_bias=True)


def elements(*shapes: tuple[int, int]) -> int:
    return sum(rows * columns for rows, columns in shapes)


def products_of(attention: Attention, L: int) -> int:
    """Multiply-adds, position by position and head by head."""
    total = 0
    for _position in range(L):
        total += sum(attention.matrices(M))
        seen = L if attention.window is None else min(L, attention.window)
        for _head in range(attention.heads):
            total += seen * (attention.head_dim + attention.value_dim)
            if attention.kind == "linear":
                total += 2 * attention.head_dim * attention.value_dim
    return total


@pytest.mark.parametrize("L", [1, 4, 9, 13])
@pytest.mark.parametrize("attention", [FULL, LATENT, LINEAR, replace(FULL, kind="sliding", window=4)])
def test_attention_costs_its_matrices_and_what_every_position_sees(attention: Attention, L: int) -> None:
    assert attention.flops(M, L) == 2 * products_of(attention, L)
    seen = L if attention.window is None else min(L, attention.window)
    assert attention.scores(L) == (0 if attention.kind == "linear" else attention.heads * L * seen)


# Of an expert, and what every token uses beside the chosen ones: the router, shared experts and their gate.
ONE = elements((M, 11), (M, 11), (11, M)) + 11 + 11 + M
ALWAYS = elements((M, 10), (M, 13), (M, 13), (13, M), (M, 1)) + 10


def test_a_shard_of_an_expert_has_its_part_of_the_hidden_width_and_the_whole_output_bias() -> None:
    wide = replace(EXPERTS, H=12)
    assert wide.of_one(M, 3) == (elements((M, 4), (M, 4)), 4 + 4, elements((4, M)), M)


def test_a_model_is_the_sum_of_its_blocks() -> None:
    dense = ModelBlock(FULL, None, dense_H=17, num_norms=2 * M)
    sparse = ModelBlock(LATENT, EXPERTS, num_norms=2 * M)
    model = Architecture("odd", "", M, 19, False, 64, (dense, sparse, sparse), num_other=M)
    # The last norm and the others, the matrices of dense blocks, embedding and head.
    rest = M + 3 * 2 * M + FULL.num_parameters(M) + 2 * LATENT.num_parameters(M) + 3 * M * 17 + 2 * 19 * M
    assert model.num_parameters == rest + 2 * (10 * ONE + ALWAYS)
    assert model.num_active_parameters == rest + 2 * (3 * ONE + ALWAYS)
    assert model.num_expert_parameters == 2 * 10 * ONE
    assert replace(model, is_tied=True).num_parameters == model.num_parameters - 19 * M
    assert model.moe_blocks == (1, 2)
    assert model.kinds == {dense: 1, sparse: 2}
    blocks = tuple(ModelBlock(FULL, BlockExperts(E, 1, 3)) for E in (12, 18, 30))
    assert Architecture("odd", "", M, 19, False, 64, blocks).num_experts == 6, "what divides all"
    plain = ModelBlock(FULL, BlockExperts(E=10, K=3, H=11, gemms=2), num_norms=2 * M)
    of_experts = 10 * elements((M, 11), (11, M)) + 10 * M
    assert plain.num_parameters(M) == FULL.num_parameters(M) + 2 * M + of_experts


def test_a_model_is_cut_to_its_first_blocks_and_gets_other_experts() -> None:
    dense, sparse = ModelBlock(FULL, None, dense_H=17), ModelBlock(FULL, EXPERTS)
    model = Architecture("odd", "", M, 19, False, 64, (dense, dense, sparse, sparse))
    assert model.first(3).blocks == (dense, dense, sparse)
    other = replace(sparse, experts=replace(EXPERTS, E=20, K=5))
    assert model.with_experts(E=20, K=5).blocks == (dense, dense, other, other)
    for wrong, sentence in ((0, "must be from 1 to the 4"), (5, "must be from 1 to the 4"), (2, "must be at least 3")):
        with pytest.raises(ValueError, match=f"layers = {wrong}: {sentence}"):
            model.first(wrong)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: replace(FULL, kv_heads=4), "kv_heads = 4: must divide the number of heads, 6"),
        (lambda: replace(FULL, kind="wide"), "kind = 'wide': the choices are full, sliding, latent, linear"),
        (lambda: replace(FULL, kind="sliding"), "window = None: must be at least 1 with sliding attention"),
        (lambda: replace(LATENT, kv_rank=0), "kv_rank = 0: must be at least 1 with latent attention"),
        (lambda: replace(EXPERTS, K=11), "K = 11: must be at most the number of experts, E = 10"),
        (lambda: replace(EXPERTS, gemms=4), "gemms = 4: the choices are 2, 3"),
        (lambda: replace(EXPERTS, groups=(3, 1)), "must be a number that divides the 10 experts"),
        (lambda: ModelBlock(FULL), "dense_H = 0: must be at least 1 without experts"),
        (lambda: ModelBlock(FULL, EXPERTS, dense_H=3), "dense_H = 3: must be at least 1 without experts, and 0 with"),
        (lambda: Architecture("odd", "", M, 19, False, 64, ()), "odd: must have at least one block"),
    ],
)
def test_what_cannot_be_is_one_sentence(make, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()


@pytest.mark.parametrize(("name", "like"), [("mixtral-7b", "mixtral-8x7b"), ("mixtral-22b", "mixtral-8x22b")])
def test_the_papers_models_have_the_sizes_of_the_real_ones_and_drop_tokens(name: str, like: str) -> None:
    ours, real = load_model(name), load_model(like)
    assert ours.num_parameters == real.num_parameters
    factors = [{block.experts.capacity_factor for block in each.blocks if block.experts} for each in (ours, real)]
    assert factors == [{1.2}, {None}]


# ---- configurations


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
