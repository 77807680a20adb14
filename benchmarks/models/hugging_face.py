# SPDX-License-Identifier: Apache-2.0
"""Models of transformers with experts, made small from their configurations."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Model:
    """``layers`` blocks of a family of Hugging Face models, of width M, with E experts of hidden width H over all
    ranks, to k of which each token goes; B sequences of L tokens on every rank."""

    family: str
    """``"qwen3"``, ``"olmoe"`` or ``"mixtral"``."""
    layers: int
    B: int
    L: int
    M: int
    H: int
    E: int
    k: int
    vocabulary: int = 64
    heads: int = 4


def made(sizes: Model) -> torch.nn.Module:
    """Return the model, with the same weights on every rank."""
    import transformers

    torch.manual_seed(0)
    shared = {
        "vocab_size": sizes.vocabulary,
        "hidden_size": sizes.M,
        "intermediate_size": sizes.H,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.heads if sizes.family == "olmoe" else sizes.heads // 2,
        "num_experts_per_tok": sizes.k,
        "max_position_embeddings": sizes.L,
        "use_cache": False,
    }
    of_families = {
        "qwen3": (
            transformers.Qwen3MoeConfig,
            {"num_experts": sizes.E, "moe_intermediate_size": sizes.H, "head_dim": sizes.M // sizes.heads},
        ),
        "olmoe": (transformers.OlmoeConfig, {"num_experts": sizes.E}),
        "mixtral": (transformers.MixtralConfig, {"num_local_experts": sizes.E}),
    }
    config_class, own = of_families[sizes.family]
    return transformers.AutoModelForCausalLM.from_config(config_class(**shared, **own))
