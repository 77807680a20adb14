# SPDX-License-Identifier: Apache-2.0
"""The families of Hugging Face models whose configurations can be read: which field says what, and what
transformers takes where a file lacks it.

A family is what ``model_type`` names. Tests build every family with transformers and compare its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ds_fsmoe.offline.models import hf_parts as parts
from ds_fsmoe.offline.models.architecture import Attention, Experts
from ds_fsmoe.offline.models.hf_fields import Fields


@dataclass(frozen=True)
class Family:
    """Says how the configurations of one family are read."""

    defaults: Mapping[str, Any]
    """Field -> what transformers takes where a file lacks it; null where it is not here."""
    attention: Callable[[Fields, int], Attention]
    """The attention of a layer by its place."""
    experts: Callable[[Fields, int], Experts] = parts.experts
    """The experts of a layer by its place."""
    is_sparse: Callable[[Fields, int], bool] = parts.every_layer
    """Whether a layer has experts."""
    dense_width: str = "intermediate_size"
    """The field with the width inside layers without experts."""
    mlp_bias: str = ""
    """The field that says whether dense layers and shared experts have biases; empty: they have none."""
    head_bias: str = ""
    """The field that says whether the head has a bias; empty: it has none."""
    norm_size: int = 1
    """The parameters of a norm, in widths of the model."""
    also: tuple[str, ...] = ()
    """Other names of the family."""


_COMMON = {"max_position_embeddings": 2048, "vocab_size": 32000, "num_attention_heads": 32, "num_hidden_layers": 32}
_MIXTRAL = _COMMON | {
    **{"hidden_size": 4096, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072},
    **{"num_experts": 8, "num_experts_per_tok": 2},
}
_QWEN = {
    **{"vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 24, "max_position_embeddings": 32768},
    **{"sliding_window": 4096, "decoder_sparse_step": 1},
}
_DEEPSEEK = {
    **{"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
}
FAMILIES: dict[str, Family] = {
    "mixtral": Family(_MIXTRAL, parts.windowed_attention),
    "olmoe": Family(
        {
            **{"vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16},
            **{"num_attention_heads": 16, "max_position_embeddings": 4096, "num_experts": 64},
            "num_experts_per_tok": 8,
        },
        parts.attention_of_olmoe,
    ),
    "qwen2_moe": Family(
        _QWEN
        | {
            **{"intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 60},
            **{"num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
            **{"qkv_bias": True, "max_window_layers": 28},
        },
        parts.attention_of_qwen2,
        parts.experts_of_qwen2,
        parts.every_step,
    ),
    "qwen3_moe": Family(
        _QWEN
        | {
            **{"intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128},
            **{"num_experts_per_tok": 8, "moe_intermediate_size": 768},
        },
        parts.attention_of_qwen3,
        parts.narrow_experts,
        parts.every_step,
    ),
    "deepseek_v2": Family(
        _COMMON
        | _DEEPSEEK
        | {
            **{"vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 11008, "first_k_dense_replace": 0},
            **{"n_shared_experts": 2, "num_experts": 64, "moe_intermediate_size": 1407, "topk_method": "greedy"},
        },
        parts.latent_attention,
        parts.experts_of_deepseek,
        parts.behind_the_first,
        mlp_bias="mlp_bias",
    ),
    "deepseek_v3": Family(
        _DEEPSEEK
        | {
            **{"vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048},
            **{"num_hidden_layers": 61, "num_attention_heads": 128, "n_shared_experts": 1, "num_experts": 256},
            **{"n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "first_k_dense_replace": 3},
            "max_position_embeddings": 4096,
        },
        parts.latent_attention,
        parts.experts_of_deepseek,
        parts.behind_the_first,
        also=("kimi_k2",),
    ),
    "gpt_oss": Family(
        {
            **{"vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36},
            **{"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128},
            **{"max_position_embeddings": 131072, "num_experts": 128, "num_experts_per_tok": 4},
            "attention_bias": True,
        },
        parts.attention_of_gpt_oss,
        parts.experts_of_gpt_oss,
    ),
    "phimoe": Family(
        _MIXTRAL | {"vocab_size": 32064, "intermediate_size": 6400, "num_experts": 16},
        parts.windowed_attention,
        head_bias="lm_head_bias",
        norm_size=2,
    ),
    "granitemoe": Family(
        _COMMON | {"hidden_size": 4096, "intermediate_size": 11008, "num_experts": 8, "num_experts_per_tok": 2},
        parts.plain_attention,
    ),
    "glm4_moe": Family(
        {
            **{"vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46},
            **{"num_attention_heads": 96, "num_key_value_heads": 8, "max_position_embeddings": 131072},
            **{"moe_intermediate_size": 1408, "num_experts_per_tok": 8, "n_shared_experts": 1, "num_experts": 128},
            **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
        },
        parts.attention_of_glm,
        parts.experts_of_deepseek,
        parts.behind_the_first,
    ),
    "llama4_text": Family(
        {
            **{"vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384},
            **{"num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128},
            **{"max_position_embeddings": 131072, "num_experts_per_tok": 1, "num_experts": 16},
            **{"interleave_moe_layer_step": 1, "no_rope_layer_interval": 4, "attention_chunk_size": 8192},
        },
        parts.attention_of_llama4,
        parts.experts_with_one_shared,
        parts.interleaved,
        dense_width="intermediate_size_mlp",
    ),
    "ernie4_5_moe": Family(
        {
            **{"vocab_size": 103424, "hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 28},
            **{"num_attention_heads": 20, "num_key_value_heads": 4, "max_position_embeddings": 131072},
            **{"tie_word_embeddings": True, "moe_intermediate_size": 1536, "num_experts_per_tok": 6},
            **{"num_experts": 64, "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": -1},
            "moe_layer_interval": 1,
        },
        parts.attention_of_ernie,
        parts.experts_of_ernie,
        parts.in_interval,
        mlp_bias="use_bias",
        head_bias="use_bias",
    ),
    "minimax": Family(_MIXTRAL | {"block_size": 256}, parts.attention_of_minimax),
    "minimax_m2": Family(
        {
            **{"vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62},
            **{"num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "num_experts": 256},
            **{"max_position_embeddings": 196608, "num_experts_per_tok": 8},
        },
        parts.attention_of_minimax_m2,
    ),
    "dots1": Family(
        _COMMON
        | {
            **{"vocab_size": 152064, "hidden_size": 4608, "intermediate_size": 10944, "moe_intermediate_size": 1408},
            **{"num_hidden_layers": 62, "num_key_value_heads": 32, "n_group": 1, "topk_group": 1},
            **{"first_k_dense_replace": 0, "sliding_window": 4096, "max_window_layers": 62},
        },
        parts.attention_of_dots,
        parts.experts_of_deepseek,
        parts.behind_the_first,
    ),
    "hunyuan_v1_moe": Family(
        _COMMON
        | {
            **{"vocab_size": 290943, "hidden_size": 4096, "intermediate_size": 11008, "num_experts": 1},
            "num_experts_per_tok": 1,
        },
        parts.attention_of_hunyuan,
        parts.experts_with_one_shared,
    ),
}
"""``model_type`` -> how its configurations are read."""
DENSE = (
    *("bloom", "cohere", "cohere2", "falcon", "gemma", "gemma2", "gemma3", "gemma3_text", "gpt2", "gpt_bigcode"),
    *("gpt_neo", "gpt_neox", "gptj", "granite", "llama", "mistral", "olmo", "olmo2", "olmo3", "opt", "phi", "phi3"),
    *("qwen2", "qwen3", "smollm3", "stablelm", "starcoder2"),
)
"""Families that have no experts at all."""
UNREAD = {"jetmoe": "its attention has experts of its own, which the planner does not know"}
"""Families that are refused, and why."""
