# SPDX-License-Identifier: Apache-2.0
"""Every family of transformers whose experts follow the contract, made tiny from its configuration."""

from __future__ import annotations

import copy
import functools
import importlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

NUM_EXPERTS, NUM_CHOICES, WIDTH = 4, 2, 32
MOST_PARAMETERS = 20_000_000
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), NUM_EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k"), NUM_CHOICES),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 0),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "n_shared_experts"), 1),
    **dict.fromkeys(("num_hidden_layers", "num_key_value_heads", "eos_token_id"), 2),
    **dict.fromkeys(("head_dim", "hidden_size_per_layer_input"), 8),
    **{"hidden_size": WIDTH, "num_attention_heads": 4, "max_position_embeddings": 64},
    **{"pad_token_id": 0, "bos_token_id": 1, "router_aux_loss_coef": 0.01},
}
"""What a tiny model has, as far as its configuration knows the word."""
LATENT_ATTENTION = {
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8},
    **{"qk_head_dim": 12, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 8},
}
"""Heads in two parts; then nothing may say how wide a head is."""


def families() -> list[str]:
    """The folders of transformers' models whose experts are decorated as the contract has it."""
    import transformers

    folder = Path(transformers.__file__).parent / "models"
    files = folder.glob("*/modeling_*.py")
    return sorted({each.parent.name for each in files if "@use_experts_implementation" in each.read_text("utf-8")})


def _rope(*sections: int, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections), **more}}


SPARSE = {"mlp_layer_types": ["sparse", "sparse"]}
OWN: dict[str, dict[str, Any]] = {
    "granitemoehybrid": dict.fromkeys(("mamba_n_heads", "mamba_d_head", "mamba_d_state"), 8)
    | {"layer_types": ["mamba", "attention"]},
    "jamba": {"expert_layer_period": 1, "expert_layer_offset": 0, "attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "nemotron_h": dict.fromkeys(("mamba_num_heads", "mamba_head_dim"), 8)
    | {"layers_block_type": ["moe", "attention"], "n_groups": 1},
    "hy_v4_vl_text": _rope(1, 1, 0),
    "glm5_next_text": {"index_kpool": 4, "qk_rope_head_dim": 0, "qk_head_dim": 8},
    "deepseek_ocr2_text": SPARSE,
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [24, 16]} | SPARSE | _rope(1, 1, 2),
    "flint": {"mlp_only_layers": []},
    "glm4v_moe_text": _rope(1, 1, 0, partial_rotary_factor=0.5),
    "mistral4": {"head_dim": 12},
    "qwen4_exp_text": {
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8},
        **{"indexer_compress_ratio": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 2},
        **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "hc_lowrank": 8},
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
    "gemma4_text": {"enable_moe_block": True, "top_k_experts": NUM_CHOICES, "num_experts": NUM_EXPERTS},
}
"""What some families must have besides, or otherwise."""
TEXT_MODELS = {"diffusion_gemma": "DiffusionGemmaEncoderTextModel", "qwen3_omni_moe": "Qwen3OmniMoeThinkerTextModel"}
"""The models of text alone that have another name than their configuration."""


def config_of(family: str) -> Any:
    """A tiny configuration of a family, of its text model where it has others."""
    from transformers import CONFIG_MAPPING

    names = [each for each in CONFIG_MAPPING if each.replace("-", "_") in (family, f"{family}_text")]
    if not names:
        raise ValueError(f"{family} has no configuration of its own name")
    name = max(names, key=len)
    return _tiny(CONFIG_MAPPING[name], OWN.get(name, {}))


def _tiny(config_class: Any, own: dict[str, Any] | None = None) -> Any:
    base = config_class()
    sizes = dict(SIZES)
    if _has(base, "kv_lora_rank"):
        sizes |= LATENT_ATTENTION
        # The width that position takes of a head, where that is what the word means.
        sizes["head_dim"] = sizes["qk_rope_head_dim"]
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    given = {name: value for name, value in sizes.items() if _has(base, name)}
    fields = getattr(config_class, "__dataclass_fields__", {"layer_types": None})
    if "layer_types" in fields and getattr(base, "layer_types", None):
        given["layer_types"] = _two_of(list(base.layer_types))
    for name in ("mlp_layer_types", "layers_block_type", "ffn_types"):
        if name in fields and getattr(base, name, None):
            given[name] = _with_moe(list(getattr(base, name)))
    given |= {name: _tiny(kind) for name, kind in getattr(base, "sub_configs", {}).items() if _is_text(name)}
    return config_class(**given | (own or {}))


def _has(config: Any, name: str) -> bool:
    try:
        getattr(config, name)
    except AttributeError:
        return False
    except Exception:  # it differs from layer to layer, and may be set for all
        return True
    return True


def _is_text(name: str) -> bool:
    return name in ("text_config", "thinker_config")


def _two_of(types: list[str]) -> list[str]:
    """The first layers, with one of attention among them."""
    attention = next((each for each in types if "attention" in each and "linear" not in each), types[0])
    return [types[0], attention]


def _with_moe(types: list[str]) -> list[str]:
    sparse = next((each for each in types if "moe" in each or "sparse" in each), types[-1])
    return [sparse, sparse]


def model_of(family: str, seed: int = 0, config: Any = None, **sizes: int) -> nn.Module:
    """A tiny model of a family, in float32, with weights that are not small: for language, or else of text alone.

    Args:
        family: its folder in transformers.
        seed: of its weights.
        config: the configuration, if it has been changed.
        sizes: of its configuration that are to be others than those of tiny ones.

    Raises:
        Exception: whatever transformers has against so tiny a model.
    """
    config = config_of(family) if config is None else config
    for name, value in sizes.items():
        setattr(config, name, value)
    model_class = _class_of(family, config)
    with torch.device("meta"):
        size = sum(each.numel() for each in model_class(copy.deepcopy(config)).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{family} has {size} parameters at its smallest")
    torch.manual_seed(seed)
    model = model_class(config).float()
    with torch.no_grad():
        for each in model.parameters():
            if each.dim() > 1:
                nn.init.normal_(each, std=0.1)
    model.set_experts_implementation("eager")
    return model


def _class_of(family: str, config: Any) -> Any:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        return found[0] if isinstance(found, tuple) else found
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    wanted = TEXT_MODELS.get(family, type(config).__name__.removesuffix("Config") + "Model")
    if not hasattr(module, wanted):
        raise ValueError(f"{family} has no model of text alone")
    return getattr(module, wanted)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The loss of a language model, or something of a model of text alone."""
    inner = getattr(model, "module", model)
    name = type(inner.get_base_model() if hasattr(inner, "get_base_model") else inner).__name__
    if name.endswith("ForCausalLM"):
        return model(input_ids=x, labels=x).loss
    y = model(input_ids=x).last_hidden_state
    # The squares after a norm would always add up to the same.
    return (y * torch.randn(y.shape[-1], generator=torch.Generator().manual_seed(0))).tanh().mean()


def backward(engine: Any, seed: int, rank: int = 0, world_size: int = 1) -> float:
    """The loss of a batch of which each rank has a sequence, after its backward."""
    loss = loss_of(engine, batch(seed, world_size)[rank : rank + 1])
    engine.backward(loss)
    return loss.item()


def step(engine: Any, seed: int) -> None:
    """A step of a sequence."""
    backward(engine, seed)
    engine.step()


def batch(seed: int, num_sequences: int, length: int = 16) -> torch.Tensor:
    """Token numbers [num_sequences, length]."""
    return torch.randint(3, 100, (num_sequences, length), generator=torch.Generator().manual_seed(seed))


def losses_of_steps(engine: Any, rank: int, world_size: int, numbers: Iterable[int]) -> list[float]:
    """Train a step on each of these batches, of which a rank has one sequence."""
    losses = []
    for number in numbers:
        losses.append(backward(engine, number, rank, world_size))
        engine.step()
    return losses


@functools.cache
def why_not(family: str) -> str:
    """Why a family cannot be built tiny and run; empty where it can."""
    from ds_fsmoe.components.expert_compute.contract import follows_contract

    try:
        model = model_of(family)
        x = batch(0, 1)
        loss_of(model, x).backward()
    except Exception as error:
        return re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")[:160]
    return "" if any(map(follows_contract, model.modules())) else "no layer of it has experts"


BEGIN, END = "<!-- families: made by tests/hf_families.py -->", "<!-- end of families -->"


@functools.cache
def shown(family: str) -> tuple[str, str]:
    """How a family's experts store weights, in words, and how the documentation names it."""
    from ds_fsmoe.components.expert_compute.contract import contract_of, follows_contract

    model = model_of(family)
    module = next(each for each in model.modules() if follows_contract(each))
    found = contract_of(module)
    words = ["gated" if found.has_gate else "plain"]
    words += ["interleaved"] if found.has_gate and not found.is_concatenated else []
    words += ["transposed"] if found.is_transposed else []
    words += ["with bias"] if found.has_bias else []
    words += ["norm after the experts"] if found.has_post_expert_norm else []
    own = type(module)
    words += ["activation of its own"] if own._apply_gate.__module__ == own.__module__ else []
    mark = "" if type(model).__name__.endswith("ForCausalLM") else " (text)"
    return ", ".join(words), f"{family}{mark}"


def table() -> str:
    """The families as the documentation shows them: by how their experts store weights."""
    by_kind: dict[str, list[str]] = {}
    for kind, name in map(shown, families()):
        by_kind.setdefault(kind, []).append(name)
    rows = [f"| {kind} | {', '.join(names)} |" for kind, names in sorted(by_kind.items())]
    return "\n".join(["| experts | families |", "|---|---|", *rows])


def is_shown(family: str, page: str) -> bool:
    """Whether a page has a family in the row of its kind."""
    kind, name = shown(family)
    rows = [row.split("|")[1:3] for row in shown_in(page).splitlines()]
    return any(row[0].strip() == kind and name in row[1].strip().split(", ") for row in rows)


def shown_in(page: str) -> str:
    """The table as a page has it."""
    return page.partition(BEGIN)[2].partition(END)[0].strip()


if __name__ == "__main__":
    file = Path(__file__).resolve().parents[1] / "docs" / "huggingface.md"
    page = file.read_text("utf-8")
    before, after = page.partition(BEGIN)[0], page.partition(END)[2]
    file.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}", "utf-8")
