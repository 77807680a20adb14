# SPDX-License-Identifier: Apache-2.0
"""Every family of transformers whose experts follow the contract, made tiny from its configuration."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

NUM_EXPERTS, NUM_CHOICES, WIDTH = 4, 2, 32
MOST_PARAMETERS = 20_000_000
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": NUM_EXPERTS,
    "num_local_experts": NUM_EXPERTS,
    "n_routed_experts": NUM_EXPERTS,
    "moe_num_experts": NUM_EXPERTS,
    "num_experts_per_tok": NUM_CHOICES,
    "moe_topk": NUM_CHOICES,
    "moe_k": NUM_CHOICES,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "head_dim": 8,
    "first_k_dense_replace": 0,
    "num_dense_layers": 0,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "n_shared_experts": 1,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 128,
    "router_aux_loss_coef": 0.01,
}
"""What a tiny model has, as far as its configuration knows the word."""
LATENT_ATTENTION = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "qk_head_dim": 12,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 8,
}
"""Heads in two parts; then nothing may say how wide a head is."""


def families() -> list[str]:
    """The folders of transformers' models whose experts are decorated as the contract has it."""
    import transformers

    folder = Path(transformers.__file__).parent / "models"
    files = folder.glob("*/modeling_*.py")
    return sorted({each.parent.name for each in files if "@use_experts_implementation" in each.read_text("utf-8")})


def config_of(family: str) -> Any:
    """A tiny configuration of a family."""
    from transformers import CONFIG_MAPPING

    kind = next((each for each in CONFIG_MAPPING if each.replace("-", "_") == family), None)
    if kind is None:
        raise ValueError(f"{family} has no configuration of its own name")
    return _tiny(CONFIG_MAPPING[kind])


def _tiny(config_class: Any) -> Any:
    base = config_class()
    sizes = dict(SIZES)
    if hasattr(base, "kv_lora_rank"):
        sizes |= LATENT_ATTENTION
        # The width that position takes of a head, where that is what the word means.
        sizes["head_dim"] = sizes["qk_rope_head_dim"]
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    given = {name: value for name, value in sizes.items() if hasattr(base, name)}
    if getattr(base, "layer_types", None):
        given["layer_types"] = _two_of(list(base.layer_types))
    for name in ("mlp_layer_types", "layers_block_type", "ffn_types"):
        if getattr(base, name, None):
            given[name] = _with_moe(list(getattr(base, name)))
    given |= {name: _tiny(kind) for name, kind in getattr(base, "sub_configs", {}).items() if _is_text(name)}
    return config_class(**given)


def _is_text(name: str) -> bool:
    return name in ("text_config", "thinker_config")


def _two_of(types: list[str]) -> list[str]:
    """The first layers, with one of attention among them."""
    attention = next((each for each in types if "attention" in each and "linear" not in each), types[0])
    return [types[0], attention]


def _with_moe(types: list[str]) -> list[str]:
    sparse = next((each for each in types if "moe" in each or "sparse" in each), types[-1])
    return [sparse, sparse]


def model_of(family: str, seed: int = 0) -> nn.Module:
    """A tiny causal language model of a family, in float32, with weights that are not small.

    Raises:
        Exception: whatever transformers has against so tiny a model.
    """
    from transformers import AutoModelForCausalLM

    config = config_of(family)
    with torch.device("meta"):
        size = sum(each.numel() for each in AutoModelForCausalLM.from_config(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{family} has {size} parameters at its smallest")
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for each in model.parameters():
            if each.dim() > 1:
                nn.init.normal_(each, std=0.1)
    model.set_experts_implementation("eager")
    return model


def batch(seed: int, num_sequences: int, length: int = 16) -> torch.Tensor:
    """Token numbers [num_sequences, length]."""
    return torch.randint(3, 100, (num_sequences, length), generator=torch.Generator().manual_seed(seed))


@functools.cache
def why_not(family: str) -> str:
    """Why a family cannot be built tiny and run; empty where it can."""
    from ds_fsmoe.components.expert_compute.contract import follows_contract

    try:
        model = model_of(family)
        x = batch(0, 1)
        model(input_ids=x, labels=x).loss.backward()
    except Exception as error:
        return re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")[:160]
    return "" if any(map(follows_contract, model.modules())) else "no layer of it has experts"
