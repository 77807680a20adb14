# SPDX-License-Identifier: Apache-2.0
"""The parts of Hugging Face models as their configurations say them: attention, experts, and which layers have those.

What is here holds for transformers 5. Every reader takes the fields of a configuration and the place of a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ds_fsmoe.offline.models.architecture import Attention, Experts
from ds_fsmoe.offline.models.hf_fields import Fields

EXPERTS = "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"
CHOICES = "num_experts_per_tok", "moe_topk", "moe_k"

# ---- attention


def _heads(
    fields: Fields,
    window: int | None = None,
    *,
    biased: str = "attention_bias",
    has_output_bias: bool = True,
    norms: Callable[[int, int, int, int], int] = lambda *_: 0,
) -> Attention:
    """Return attention of heads with projections of their own.

    Args:
        fields: the configuration.
        window: the positions that one sees; ``None``: all.
        biased: the field that says whether projections have biases.
        has_output_bias: whether the one behind attention has one with the others.
        norms: M, heads, heads of keys, and their width -> the parameters of norms of queries and keys.
    """
    M, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    kv_heads = fields.optional("num_key_value_heads") or heads
    head_dim = fields.optional("head_dim") or M // heads
    if heads % kv_heads:
        raise fields.wrong("num_key_value_heads", f"must divide num_attention_heads = {heads}")
    biases = (heads + 2 * kv_heads) * head_dim + (M if has_output_bias else 0) if fields.flag(biased) else 0
    num_other = biases + norms(M, heads, kv_heads, head_dim)
    kind = "full" if window is None else "sliding"
    return Attention(heads, kv_heads, head_dim, head_dim, kind, window, num_other=num_other)


def _per_head(M: int, heads: int, kv_heads: int, head_dim: int) -> int:
    """Return the parameters of norms that all heads share."""
    return 2 * head_dim


def plain_attention(fields: Fields, layer: int) -> Attention:
    """Return attention to all positions."""
    return _heads(fields)


def windowed_attention(fields: Fields, layer: int) -> Attention:
    """Return attention to a window, where there is one."""
    return _heads(fields, fields.optional("sliding_window"))


def latent_attention(fields: Fields, layer: int) -> Attention:
    """Return DeepSeek's latent attention."""
    heads, M = fields.count("num_attention_heads"), fields.count("hidden_size")
    query_rank, kv_rank = fields.optional("q_lora_rank"), fields.count("kv_lora_rank")
    rope_dim = fields.count("qk_rope_head_dim")
    num_other = (query_rank or 0) + kv_rank
    if fields.flag("attention_bias"):
        num_other += (query_rank or 0) + kv_rank + rope_dim + M
    head_dim = fields.count("qk_nope_head_dim") + rope_dim
    value_dim = fields.count("v_head_dim")
    return Attention(heads, heads, head_dim, value_dim, "latent", None, query_rank, kv_rank, rope_dim, num_other)


def attention_of_qwen2(fields: Fields, layer: int) -> Attention:
    """Return attention to a window in the layers that the configuration says, with biases of its own."""
    window = fields.optional("sliding_window") if fields.flag("use_sliding_window") else None
    kind = fields.layer_type(layer, ("full_attention", "sliding_attention"))
    slides = layer % 2 == 0 and layer < fields.count("max_window_layers", least=0)
    if kind is not None:
        slides = kind == "sliding_attention"
    return _heads(fields, window if slides else None, biased="qkv_bias", has_output_bias=False)


def attention_of_qwen3(fields: Fields, layer: int) -> Attention:
    """Return attention with norms inside every head."""
    window = fields.optional("sliding_window") if fields.flag("use_sliding_window") else None
    return _heads(fields, window, norms=_per_head)


def attention_of_olmoe(fields: Fields, layer: int) -> Attention:
    """Return attention with norms over all heads."""
    return _heads(fields, norms=lambda M, heads, kv_heads, _: M + M // heads * kv_heads)


def attention_of_gpt_oss(fields: Fields, layer: int) -> Attention:
    """Return attention with a sink in every head, every other one to a window."""
    kind = fields.layer_type(layer, ("full_attention", "sliding_attention"))
    slides = layer % 2 == 0 if kind is None else kind == "sliding_attention"
    window = fields.optional("sliding_window") if slides else None
    return _heads(fields, window, norms=lambda M, heads, *_: heads)


def attention_of_dots(fields: Fields, layer: int) -> Attention:
    """Return attention with norms inside every head, in the last layers to a window."""
    kind = fields.layer_type(layer, ("full_attention", "sliding_attention"))
    slides = layer >= fields.count("max_window_layers", least=0) if kind is None else kind == "sliding_attention"
    return _heads(fields, fields.optional("sliding_window") if slides else None, norms=_per_head)


def attention_of_hunyuan(fields: Fields, layer: int) -> Attention:
    """Return attention to all positions with norms inside every head."""
    return _heads(fields, norms=_per_head)


def attention_of_glm(fields: Fields, layer: int) -> Attention:
    """Return attention whose norms may be left out."""
    norms = _per_head if fields.flag("use_qk_norm") else lambda *_: 0
    return _heads(fields, has_output_bias=False, norms=norms)


def attention_of_ernie(fields: Fields, layer: int) -> Attention:
    """Return attention with the biases that all layers have, or have not."""
    return _heads(fields, biased="use_bias")


def attention_of_llama4(fields: Fields, layer: int) -> Attention:
    """Return attention inside chunks, but in every few layers to all positions."""
    kind = fields.layer_type(layer, ("full_attention", "chunked_attention"))
    said = fields.value("no_rope_layers")
    if kind is not None:
        is_chunked = kind == "chunked_attention"
    elif not said:
        is_chunked = (layer + 1) % fields.count("no_rope_layer_interval") != 0
    elif isinstance(said, list) and layer < len(said):
        is_chunked = bool(said[layer])
    else:
        raise fields.wrong("no_rope_layers", f"must have a number for layer {layer}")
    return _heads(fields, fields.optional("attention_chunk_size") if is_chunked else None)


def attention_of_minimax(fields: Fields, layer: int) -> Attention:
    """Return attention, every other one linear with a norm and a gate behind it."""
    kind = fields.layer_type(layer, ("full_attention", "linear_attention"))
    if (layer % 2 == 0) if kind is None else kind == "full_attention":
        return windowed_attention(fields, layer)
    plain = _heads(fields)
    sizes = plain.heads, plain.heads, plain.head_dim, plain.head_dim
    width = plain.heads * plain.head_dim
    return Attention(*sizes, "linear", fields.count("block_size"), num_other=width, has_output_gate=True)


def attention_of_minimax_m2(fields: Fields, layer: int) -> Attention:
    """Return attention with norms over all heads, which may be wider than the model."""
    return _heads(fields, norms=lambda M, heads, kv_heads, head_dim: (heads + kv_heads) * head_dim)


# ---- experts


def experts(fields: Fields, layer: int, width: str = "intermediate_size", **also: Any) -> Experts:
    """Return experts as wide as a field says.

    Args:
        fields, layer: the configuration, and the place of the layer.
        width: the field with the width inside an expert.
        also: what else :class:`~ds_fsmoe.offline.models.architecture.Experts` takes.
    """
    E, K = fields.of_layer(layer, *EXPERTS), fields.of_layer(layer, *CHOICES)
    if K > E:
        raise fields.wrong(fields.written(*CHOICES), f"must be at most the number of experts, {E}")
    return Experts(E, K, fields.of_layer(layer, width), **also)


def narrow_experts(fields: Fields, layer: int) -> Experts:
    """Return experts of another width than dense layers have."""
    return experts(fields, layer, "moe_intermediate_size")


def experts_of_deepseek(fields: Fields, layer: int) -> Experts:
    """Return narrow experts beside so many shared ones, of which a token may choose groups first."""
    shared_H = fields.count("n_shared_experts", least=0) * fields.count("moe_intermediate_size")
    num_groups, num_chosen = fields.optional("n_group") or 1, fields.optional("topk_group") or 1
    groups = (num_groups, num_chosen) if num_groups > 1 and fields.value("topk_method") != "greedy" else None
    return experts(fields, layer, "moe_intermediate_size", shared_H=shared_H, groups=groups)


def experts_of_ernie(fields: Fields, layer: int) -> Experts:
    """Return narrow experts beside so many shared ones. Their correction is a parameter, if one that is not trained."""
    shared_H = fields.count("moe_num_shared_experts", least=0) * fields.count("moe_intermediate_size")
    return experts(fields, layer, "moe_intermediate_size", shared_H=shared_H, has_router_bias=True)


def experts_of_qwen2(fields: Fields, layer: int) -> Experts:
    """Return narrow experts beside one shared one, which has a gate."""
    shared_H = fields.count("shared_expert_intermediate_size", least=0)
    return experts(fields, layer, "moe_intermediate_size", shared_H=shared_H, has_shared_gate=True)


def experts_of_gpt_oss(fields: Fields, layer: int) -> Experts:
    """Return experts with biases."""
    return experts(fields, layer, has_bias=True, has_router_bias=True)


def experts_with_one_shared(fields: Fields, layer: int) -> Experts:
    """Return experts beside a shared one that is as wide."""
    return experts(fields, layer, shared_H=fields.count("intermediate_size"))


# ---- which layers have experts


def every_layer(fields: Fields, layer: int) -> bool:
    """Whether a layer has experts: all have."""
    return True


def every_step(fields: Fields, layer: int) -> bool:
    """Whether a layer has experts: one in so many, but those that are listed."""
    dense = fields.layers("mlp_only_layers") or frozenset()
    return layer not in dense and (layer + 1) % fields.count("decoder_sparse_step") == 0


def behind_the_first(fields: Fields, layer: int) -> bool:
    """Whether a layer has experts: all but the first so many."""
    if fields.value("moe_layer_freq") not in (None, 1):
        raise fields.wrong("moe_layer_freq", "must be 1, since transformers builds no other model of this family")
    return layer >= fields.count("first_k_dense_replace", least=0)


def in_interval(fields: Fields, layer: int) -> bool:
    """Whether a layer has experts: one in so many from one place to another."""
    start, end = fields.count("moe_layer_start_index", least=0), fields.count("moe_layer_end_index", least=-1)
    is_inside = start <= layer and (end == -1 or layer <= end)
    return is_inside and (layer + 1) % fields.count("moe_layer_interval") == 0


def interleaved(fields: Fields, layer: int) -> bool:
    """Whether a layer has experts: those that are listed, or one in so many."""
    listed = fields.layers("moe_layers")
    return (layer + 1) % fields.count("interleave_moe_layer_step") == 0 if listed is None else layer in listed
