# SPDX-License-Identifier: Apache-2.0
"""Lists the families of Hugging Face models whose configurations can be read, with their fields and transformers'
defaults. ``hf_config.py`` calls it.

``model_type`` names a family. The defaults are those of transformers 5: tests build every family with it and compare
its parameters. Every reader takes the fields of a configuration and the index of a layer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ds_fsmoe.offline.models.architecture import Attention, BlockExperts
from ds_fsmoe.planning.workload import CHOICES
from ds_fsmoe.untrusted import MOST_POSITIONS

EXPERTS = "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"
WIDTH = "moe_intermediate_size"


class Fields:
    """Holds the fields of one configuration, and checks them on reading.

    Raises:
        ValueError: by every method, a field has a wrong value; the message names file, field and value.
    """

    def __init__(self, data: Mapping[str, Any], source: str, defaults: Mapping[str, Any]) -> None:
        self._data = data
        self._source = source
        self._defaults = defaults

    def wrong(self, sentence: str, *names: str) -> ValueError:
        """Return the error about a field, under the name that the file uses, or else its first name."""
        name = next((each for each in names if each in self._data), names[0])
        shown = json.dumps(self._data.get(name, self._defaults.get(name)), default=str)
        return ValueError(f"{self._source}: {name} = {shown[:60]}: {sentence}")

    def value(self, *names: str) -> Any:
        """Return a field's value under any of its names, or transformers' default."""
        said = [name for name in names if name in self._data]
        if not said:
            return self._defaults.get(names[0])
        for other in said[1:]:
            if self._data[other] != self._data[said[0]]:
                raise self.wrong(f"must be {self._data[said[0]]}, as {said[0]} says", other)
        return self._data[said[0]]

    def count(self, *names: str, least: int = 1, most: int = MOST_POSITIONS) -> int:
        """Return a whole number from ``least`` to ``most``."""
        value = self.value(*names)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(f"must be a whole number of at least {least}", *names)
        if value > most:
            raise self.wrong(f"must be at most {most}", *names)
        return value

    def optional(self, *names: str) -> int | None:
        """Return a whole number of at least 1; None if the field is null or 0."""
        return self.count(*names) if self.value(*names) not in (None, 0) else None

    def flag(self, name: str) -> bool:
        """Return True if a switch is on."""
        value = self.value(name)
        if value not in (None, True, False):
            raise self.wrong("must be true or false", name)
        return bool(value)

    def of_layer(self, layer: int, *names: str) -> int:
        """Return a whole number that is given once for all layers, or once per layer."""
        value = self.value(*names)
        if not isinstance(value, list):
            return self.count(*names)
        if layer >= len(value) or not isinstance(value[layer], int) or value[layer] < 1:
            raise self.wrong(f"must have a whole number of at least 1 for layer {layer}", *names)
        return value[layer]

    def layers(self, name: str) -> frozenset[int] | None:
        """Return the indices of layers that a field lists; None if it is null."""
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(each, int) for each in value):
            raise self.wrong("must be a list of whole numbers, the places of layers", name)
        return frozenset(value)

    def layer_type(self, layer: int, known: tuple[str, ...]) -> str | None:
        """Return the kind of a layer; None if the field is null.

        Args:
            layer: the index of the layer.
            known: the kinds of the family.
        """
        value = self.value("layer_types")
        if value is None:
            return None
        if not isinstance(value, list) or layer >= len(value) or value[layer] not in known:
            raise self.wrong(f"must have one for layer {layer}; the choices are {', '.join(known)}", "layer_types")
        return value[layer]


Rule = Callable[[Fields, int], bool]
"""Says something of a layer by its place."""

# ---- attention


def heads(
    fields: Fields,
    layer: int,
    *,
    slides: Rule | None = None,
    window: str = "sliding_window",
    biased: str = "attention_bias",
    has_output_bias: bool = True,
    norms: Callable[[int, int, int, int], int] = lambda *_: 0,
    normed: str = "",
) -> Attention:
    """Return attention with heads that have projections of their own.

    Args:
        fields, layer: the configuration, and the index of the layer.
        slides: the rule for layers with a sliding window; ``None``: no layer.
        window: the field with the positions of the window.
        biased: the field for whether projections have biases.
        has_output_bias: whether the output projection has a bias if the others do.
        norms: M, heads, heads of keys, and their width -> the parameters of norms of queries and keys, and of sinks.
        normed: the field for whether there are norms; empty: always.
    """
    M, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    kv_heads = fields.optional("num_key_value_heads") or num_heads
    head_dim = fields.optional("head_dim") or M // num_heads
    if num_heads % kv_heads:
        raise fields.wrong(f"must divide num_attention_heads = {num_heads}", "num_key_value_heads")
    sees = fields.optional(window) if slides is not None and slides(fields, layer) else None
    biases = (num_heads + 2 * kv_heads) * head_dim + (M if has_output_bias else 0) if fields.flag(biased) else 0
    of_norms = norms(M, num_heads, kv_heads, head_dim) if not normed or fields.flag(normed) else 0
    kind = "full" if sees is None else "sliding"
    return Attention(num_heads, kv_heads, head_dim, head_dim, kind, sees, num_other=biases + of_norms)


def per_head(M: int, num_heads: int, kv_heads: int, head_dim: int) -> int:
    """Return the parameters of norms that all heads share."""
    return 2 * head_dim


def typed(otherwise: Rule, kind: str = "sliding_attention") -> Rule:
    """Return a rule: a layer has this kind by ``layer_types``, or by another rule if that is null."""

    def rule(fields: Fields, layer: int) -> bool:
        said = fields.layer_type(layer, ("full_attention", kind))
        return otherwise(fields, layer) if said is None else said == kind

    return rule


def is_even(fields: Fields, layer: int) -> bool:
    """Return True for the first, third, fifth, ... layer."""
    return layer % 2 == 0


def is_chunked(fields: Fields, layer: int) -> bool:
    """Return True if a layer's attention is inside chunks: all layers but one in so many, or the listed ones."""
    said = fields.value("no_rope_layers")
    if not said:
        return (layer + 1) % fields.count("no_rope_layer_interval") != 0
    if not isinstance(said, list) or layer >= len(said):
        raise fields.wrong(f"must have a number for layer {layer}", "no_rope_layers")
    return bool(said[layer])


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


def linear_attention(fields: Fields, layer: int) -> Attention:
    """Return MiniMax's attention: in some layers linear, with a norm and a gate behind it."""
    if not _IS_LINEAR(fields, layer):
        return heads(fields, layer, slides=lambda *_: True)
    plain = heads(fields, layer)
    sizes = plain.heads, plain.heads, plain.head_dim, plain.head_dim
    width = plain.heads * plain.head_dim
    return Attention(*sizes, "linear", fields.count("block_size"), num_other=width, has_output_gate=True)


_IS_LINEAR = typed(lambda fields, layer: not is_even(fields, layer), "linear_attention")

# ---- experts


def experts(
    fields: Fields,
    layer: int,
    width: str = "intermediate_size",
    shared: Callable[[Fields], int] = lambda _: 0,
    **also: Any,
) -> BlockExperts:
    """Return experts whose width is that of a field.

    Args:
        fields, layer: the configuration, and the index of the layer.
        width: the field with the width inside an expert.
        shared: the width inside all shared experts.
        also: further fields of :class:`~ds_fsmoe.offline.models.architecture.BlockExperts`.
    """
    E, K = fields.of_layer(layer, *EXPERTS), fields.of_layer(layer, *CHOICES)
    if K > E:
        raise fields.wrong(f"must be at most the number of experts, {E}", *CHOICES)
    return BlockExperts(E, K, fields.of_layer(layer, width), shared_H=shared(fields), **also)


def so_many(field: str) -> Callable[[Fields], int]:
    """Return a function for the total width of shared experts: their number in a field times the width of a routed
    one.
    """
    return lambda fields: fields.count(field, least=0) * fields.count(WIDTH)


def experts_of_deepseek(fields: Fields, layer: int) -> BlockExperts:
    """Return narrow experts with shared ones, of which a token may first choose groups."""
    num_groups, num_chosen = fields.optional("n_group") or 1, fields.optional("topk_group") or 1
    groups = (num_groups, num_chosen) if num_groups > 1 and fields.value("topk_method") != "greedy" else None
    return experts(fields, layer, WIDTH, so_many("n_shared_experts"), groups=groups)


# ---- which layers have experts


def every_step(fields: Fields, layer: int) -> bool:
    """Return True if a layer has experts: one layer in so many, except the listed ones."""
    dense = fields.layers("mlp_only_layers") or frozenset()
    return layer not in dense and (layer + 1) % fields.count("decoder_sparse_step") == 0


def behind_the_first(fields: Fields, layer: int) -> bool:
    """Return True if a layer has experts: all layers except the first few."""
    if fields.value("moe_layer_freq") not in (None, 1):
        raise fields.wrong("must be 1, since transformers builds no other model of this family", "moe_layer_freq")
    return layer >= fields.count("first_k_dense_replace", least=0)


def in_interval(fields: Fields, layer: int) -> bool:
    """Return True if a layer has experts: every ``moe_layer_interval``-th layer between the start and end index."""
    start, end = fields.count("moe_layer_start_index", least=0), fields.count("moe_layer_end_index", least=-1)
    is_inside = start <= layer and (end == -1 or layer <= end)
    return is_inside and (layer + 1) % fields.count("moe_layer_interval") == 0


def interleaved(fields: Fields, layer: int) -> bool:
    """Return True if a layer has experts: the listed layers, or one in so many."""
    listed = fields.layers("moe_layers")
    return (layer + 1) % fields.count("interleave_moe_layer_step") == 0 if listed is None else layer in listed


@dataclass(frozen=True)
class Family:
    """Describes how the configurations of one family are read."""

    defaults: Mapping[str, Any]
    """Field -> what transformers takes where a file lacks it; null where it is not here."""
    attention: Callable[[Fields, int], Attention]
    """The attention of a layer by its place."""
    experts: Callable[[Fields, int], BlockExperts] = experts
    """The experts of a layer by its place."""
    is_sparse: Rule = lambda *_: True
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


_QWEN2_SLIDES = typed(lambda fields, layer: layer % 2 == 0 and layer < fields.count("max_window_layers", least=0))
_DOTS_SLIDES = typed(lambda fields, layer: layer >= fields.count("max_window_layers", least=0))
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
    "mixtral": Family(_MIXTRAL, partial(heads, slides=lambda *_: True)),
    "olmoe": Family(
        {
            **{"vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16},
            **{"num_attention_heads": 16, "max_position_embeddings": 4096, "num_experts": 64},
            "num_experts_per_tok": 8,
        },
        partial(heads, norms=lambda M, num_heads, kv_heads, _: M + M // num_heads * kv_heads),
    ),
    "qwen2_moe": Family(
        _QWEN
        | {
            **{"intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 60},
            **{"num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
            **{"qkv_bias": True, "max_window_layers": 28},
        },
        partial(
            heads,
            slides=lambda fields, layer: fields.flag("use_sliding_window") and _QWEN2_SLIDES(fields, layer),
            biased="qkv_bias",
            has_output_bias=False,
        ),
        partial(
            experts,
            width=WIDTH,
            shared=lambda fields: fields.count("shared_expert_intermediate_size", least=0),
            has_shared_gate=True,
        ),
        every_step,
    ),
    "qwen3_moe": Family(
        _QWEN
        | {
            **{"intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128},
            **{"num_experts_per_tok": 8, "moe_intermediate_size": 768},
        },
        partial(heads, slides=lambda fields, _: fields.flag("use_sliding_window"), norms=per_head),
        partial(experts, width=WIDTH),
        every_step,
    ),
    "deepseek_v2": Family(
        _COMMON
        | _DEEPSEEK
        | {
            **{"vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 11008, "first_k_dense_replace": 0},
            **{"n_shared_experts": 2, "num_experts": 64, "moe_intermediate_size": 1407, "topk_method": "greedy"},
        },
        latent_attention,
        experts_of_deepseek,
        behind_the_first,
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
        latent_attention,
        experts_of_deepseek,
        behind_the_first,
        also=("kimi_k2",),
    ),
    "gpt_oss": Family(
        {
            **{"vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36},
            **{"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128},
            **{"max_position_embeddings": 131072, "num_experts": 128, "num_experts_per_tok": 4},
            "attention_bias": True,
        },
        partial(heads, slides=typed(is_even), norms=lambda M, num_heads, *_: num_heads),
        partial(experts, has_bias=True, has_router_bias=True),
    ),
    "phimoe": Family(
        _MIXTRAL | {"vocab_size": 32064, "intermediate_size": 6400, "num_experts": 16},
        partial(heads, slides=lambda *_: True),
        head_bias="lm_head_bias",
        norm_size=2,
    ),
    "granitemoe": Family(
        _COMMON | {"hidden_size": 4096, "intermediate_size": 11008, "num_experts": 8, "num_experts_per_tok": 2},
        heads,
    ),
    "glm4_moe": Family(
        {
            **{"vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46},
            **{"num_attention_heads": 96, "num_key_value_heads": 8, "max_position_embeddings": 131072},
            **{"moe_intermediate_size": 1408, "num_experts_per_tok": 8, "n_shared_experts": 1, "num_experts": 128},
            **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
        },
        partial(heads, has_output_bias=False, norms=per_head, normed="use_qk_norm"),
        experts_of_deepseek,
        behind_the_first,
    ),
    "llama4_text": Family(
        {
            **{"vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384},
            **{"num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128},
            **{"max_position_embeddings": 131072, "num_experts_per_tok": 1, "num_experts": 16},
            **{"interleave_moe_layer_step": 1, "no_rope_layer_interval": 4, "attention_chunk_size": 8192},
        },
        partial(heads, slides=typed(is_chunked, "chunked_attention"), window="attention_chunk_size"),
        partial(experts, shared=lambda fields: fields.count("intermediate_size")),
        interleaved,
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
        partial(heads, biased="use_bias"),
        # Their correction is a parameter, if one that is not trained.
        partial(experts, width=WIDTH, shared=so_many("moe_num_shared_experts"), has_router_bias=True),
        in_interval,
        mlp_bias="use_bias",
        head_bias="use_bias",
    ),
    "minimax": Family(_MIXTRAL | {"block_size": 256}, linear_attention),
    "minimax_m2": Family(
        {
            **{"vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62},
            **{"num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "num_experts": 256},
            **{"max_position_embeddings": 196608, "num_experts_per_tok": 8},
        },
        partial(heads, norms=lambda M, num_heads, kv_heads, head_dim: (num_heads + kv_heads) * head_dim),
    ),
    "dots1": Family(
        _COMMON
        | {
            **{"vocab_size": 152064, "hidden_size": 4608, "intermediate_size": 10944, "moe_intermediate_size": 1408},
            **{"num_hidden_layers": 62, "num_key_value_heads": 32, "n_group": 1, "topk_group": 1},
            **{"first_k_dense_replace": 0, "sliding_window": 4096, "max_window_layers": 62},
        },
        partial(heads, slides=_DOTS_SLIDES, norms=per_head),
        experts_of_deepseek,
        behind_the_first,
    ),
    "hunyuan_v1_moe": Family(
        _COMMON
        | {
            **{"vocab_size": 290943, "hidden_size": 4096, "intermediate_size": 11008, "num_experts": 1},
            "num_experts_per_tok": 1,
        },
        partial(heads, norms=per_head),
        partial(experts, shared=lambda fields: fields.count("intermediate_size")),
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
